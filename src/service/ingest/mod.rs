//! Calls for writers: tickets, sends and reports.
//!
//! [`Ingest`] holds the dependencies that these calls share. The calls are in `require`, `write`,
//! `report` and `commit_task`. Invariant: after [`Ingest::refuse_sends`] returns, no send is
//! acknowledged until [`Ingest::take_sends`].

pub(super) mod commit_gate;
pub(super) mod commit_task;
pub(super) mod pace;
pub(super) mod partition_limit;
pub(super) mod report;
pub(super) mod require;
pub(super) mod send_sink;
pub(super) mod spill;
pub(super) mod ticket_queue;
pub(super) mod write;

use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;

use crate::flush::Flusher;
use crate::memory::Memory;
use crate::runtime::{BlockingPool, Tasks};
use crate::store::Tiers;

use crate::service::app_lookup::AppLookup;
use crate::service::losses::Losses;
use crate::service::metrics::ServiceMetrics;
use crate::service::status::WorkerStatus;
use commit_gate::CommitGate;
use partition_limit::PartitionLimits;
use spill::Spill;
use ticket_queue::TicketQueue;

/// The writing half of the service. It refuses cheaply first, and reserves memory before it accepts
/// bytes.
#[derive(Debug)]
pub struct Ingest {
    pub(super) lookup: AppLookup,
    pub(super) memory: Arc<Memory>,
    pub(super) tiers: Tiers,
    pub(super) flusher: Option<Arc<Flusher>>,
    pub(super) status: Arc<WorkerStatus>,
    pub(super) losses: Arc<Losses>,
    pub(super) metrics: Arc<ServiceMetrics>,
    pub(super) limits: RwLock<PartitionLimits>,
    pub(super) commits: CommitGate,
    pub(super) ticket_queue: TicketQueue,
    pub(super) ticket_wait: Duration,
    pub(super) heap_wait: Duration,
    pub(super) spill: Arc<Spill>,
    pub(super) partitions_max: usize,
    pub(super) verify_crc: bool,
    /// Pool for commits of large sends.
    pub(super) committing: BlockingPool,
    /// Pool for large sends that are aborted. It is separate so that aborts do not delay commits.
    pub(super) aborting: BlockingPool,
    pub(super) tasks: Tasks,
}

impl Ingest {
    /// Returns the current limits of one partition.
    pub fn partition_limits(&self) -> PartitionLimits {
        *self.limits.read()
    }

    /// Replaces the limits of one partition.
    pub fn set_partition_limits(&self, limits: PartitionLimits) {
        *self.limits.write() = limits;
    }

    /// Stops acknowledging sends: clients get `NO_BUFFER`, wait, and send again. On return no
    /// acknowledgement is in progress either, so the data in memory can only shrink.
    pub fn refuse_sends(&self) {
        self.commits.close();
    }

    /// Undoes [`Ingest::refuse_sends`].
    pub fn take_sends(&self) {
        self.commits.open();
    }
}
