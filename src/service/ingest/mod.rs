//! Calls for writers: tickets, sends, reports, and commits of tasks.
//!
//! Invariant: after [`Ingest::refuse_sends`] returns, no send is committed until
//! [`Ingest::accept_sends`]: the commit gate is closed before memory is handed over to a successor,
//! and at a forced stop.

mod commit_task;
mod pace;
pub(super) mod partition_limit;
pub(super) mod report;
pub(super) mod require;
pub(super) mod send_sink;
pub(super) mod spill;
mod ticket_queue;
pub(super) mod write;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{RwLock, RwLockReadGuard};

use crate::runtime::BlockingPool;
use crate::service::ServiceError;
use crate::service::parts::{ServiceConfig, ServiceParts};

use partition_limit::PartitionLimits;
use ticket_queue::TicketQueue;

/// The writing half of the service. It refuses cheaply first, and reserves memory before it accepts
/// bytes.
#[derive(Debug)]
pub struct Ingest {
    parts: Arc<ServiceParts>,
    limits: RwLock<PartitionLimits>,
    commits: CommitGate,
    ticket_queue: TicketQueue,
    ticket_wait: Duration,
    /// Pool for commits of large sends.
    pub(super) committing: BlockingPool,
    /// Pool for large sends that are aborted. It is separate so that aborts do not delay commits.
    pub(super) aborting: BlockingPool,
}

impl Ingest {
    pub(super) fn new(parts: &Arc<ServiceParts>, config: &ServiceConfig) -> Self {
        Self {
            parts: Arc::clone(parts),
            limits: RwLock::new(config.partition_limits),
            commits: CommitGate::default(),
            ticket_queue: TicketQueue::default(),
            ticket_wait: config.ticket_wait,
            committing: BlockingPool::sized_by_cores(),
            aborting: BlockingPool::sized_by_cores(),
        }
    }

    /// Returns the current limits of one partition.
    pub fn partition_limits(&self) -> PartitionLimits {
        *self.limits.read()
    }

    /// Replaces the limits of one partition.
    pub fn set_partition_limits(&self, limits: PartitionLimits) {
        *self.limits.write() = limits;
    }

    /// Stops committing sends: clients get `NO_BUFFER`, wait, and send again. On return no commit
    /// is in progress either, so the data in memory can only shrink.
    pub fn refuse_sends(&self) {
        self.commits.close();
    }

    /// Undoes [`Ingest::refuse_sends`].
    pub fn accept_sends(&self) {
        self.commits.open();
    }
}

/// The gate that each send passes when its blocks become visible: open or closed.
#[derive(Debug, Default)]
struct CommitGate {
    closed: RwLock<bool>,
    /// Copy of `closed` for early checks that do not write to a cache line shared by all sends.
    seems_closed: AtomicBool,
}

/// Keeps the gate in its state for the duration of one commit.
type CommitPermit<'a> = RwLockReadGuard<'a, bool>;

impl CommitGate {
    /// Passes the gate for as long as the returned value lives.
    ///
    /// # Errors
    /// `Stopping` while the gate is closed. Clients wait and send again.
    fn pass(&self) -> Result<CommitPermit<'_>, ServiceError> {
        let passing = self.closed.read();
        if *passing { Err(ServiceError::Stopping) } else { Ok(passing) }
    }

    /// Refuses a send early that [`CommitGate::pass`] would refuse after all of its bytes.
    ///
    /// # Errors
    /// The errors of [`CommitGate::pass`].
    fn check(&self) -> Result<(), ServiceError> {
        if self.seems_closed.load(Ordering::Relaxed) { Err(ServiceError::Stopping) } else { Ok(()) }
    }

    /// Closes the gate and waits for running commits, which only touch memory.
    fn close(&self) {
        self.set(true);
    }

    fn open(&self) {
        self.set(false);
    }

    fn set(&self, closed: bool) {
        let mut guarded = self.closed.write();
        *guarded = closed;
        self.seems_closed.store(closed, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use uniffle_testkit::wait_until;

    use super::*;

    #[test]
    fn gate_closes_after_the_last_commit() {
        let gate = CommitGate::default();
        std::thread::scope(|scope| {
            // Runs inside the scope, so that the closing thread ends even if this assertion fails.
            let passing = gate.pass().unwrap();
            let closing = scope.spawn(|| gate.close());
            wait_until("the gate waits for running commits", Duration::from_secs(20), || {
                gate.closed.try_read().map_or(Ok(()), |_| Err("others may pass".to_owned()))
            });
            assert!(!closing.is_finished(), "the gate closed while a commit was running");
            drop(passing);
            closing.join().unwrap();
        });
        assert!(matches!(gate.pass(), Err(ServiceError::Stopping)) && gate.check().is_err());
        gate.open();
        assert!(gate.check().is_ok());
        drop(gate.pass().unwrap());
    }
}
