//! The worker's operations in protocol-free terms: listeners translate requests into these calls
//! and results back.
//!
//! [`Ingest`] serves writers, [`Reads`] readers. [`Lifecycle`] covers registration to removal,
//! recovery, and decommissioning. [`Diagnostics`] covers explanations, statistics, and losses.
//!
//! Every call refuses first and cheaply (state, app, ticket), then works. A call waits for a disk
//! only where its result must be durable or is read from one. The parts share their dependencies
//! and do not know [`Service`], which connects them.

mod app_lookup;
mod blocking;
mod diagnostics;
mod error;
mod ingest;
mod lifecycle;
mod losses;
pub(crate) mod metrics;
mod quota;
mod reads;
mod status;

#[cfg(test)]
mod tests;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::RwLock;
use prometheus::Registry;

pub use diagnostics::Diagnostics;
pub use diagnostics::explain::{Explanation, Presence, StageView, TopPartition};
pub use diagnostics::history::{SAMPLE_INTERVAL, Sample};
pub use diagnostics::statistics::AppStatistics;
pub use error::ServiceError;
pub use ingest::Ingest;
pub use ingest::partition_limit::{PartitionConfig, PartitionLimits};
pub use ingest::report::ReportRequest;
pub use ingest::require::{RequireGrant, RequireRequest};
pub use ingest::send_sink::{Commit, Committing, SendSink};
pub use ingest::write::{SendHeader, SendSession};
pub use lifecycle::drain::Draining;
pub use lifecycle::fairness::{FairnessConfig, WeightRule};
pub use lifecycle::restore::Restored;
pub use lifecycle::{Lifecycle, RegisterRequest, SettingsStore};
pub use losses::{IncompleteShuffle, Incompleteness, LossReport, ShuffleLoss};
pub use quota::{QuotaConfig, QuotaUse};
pub use reads::admission::{ReadAdmission, ReadLimits};
pub use reads::read_ahead::ReadAhead;
pub use reads::response_window::ResponseWindow;
pub use reads::results::{IdWidths, Results};
pub use reads::{
    ChunkStream, DataAnswer, IndexAnswer, MemoryAnswer, MemoryReadRequest, ReadRange, ReadTarget, Reads,
    ResponseGuard,
};
pub use status::{Stopping, WorkerState, WorkerStatus};
pub use uniffle_wire::BlockHeader;

use app_lookup::AppLookup;
use diagnostics::explain::FinishedApps;
use diagnostics::history::History;
use ingest::commit_gate::CommitGate;
use ingest::ticket_queue::TicketQueue;
use lifecycle::deletions::Deletions;
use lifecycle::fairness::Weights;
use losses::Losses;
use losses::log::LossLog;
use losses::verify::Verifier;
use metrics::ServiceMetrics;

use crate::app::AppRegistry;
use crate::flush::Flusher;
use crate::memory::Memory;
use crate::runtime::{BlockingPool, Tasks};
use crate::schema::kind::{HOUR, SECOND, seconds};
use crate::schema::section;
use crate::store::Tiers;
use crate::telemetry::Refusals;

section! {
    /// Limits of the service.
    pub struct ServiceConfig {
        /// Interval at which a decommissioned worker checks whether any application is left.
        #[key("decommission_check_interval_sec", seconds(SECOND..=HOUR), Restart)]
        pub decommission_check_interval: Duration = 60 * SECOND,
        /// Interval at which expired tickets are released; at most the ticket timeout.
        #[key("memory_store.buffer_ticket_check_interval_sec", seconds(SECOND / 10..=HOUR), Restart)]
        pub ticket_check_interval: Duration = 10 * SECOND,
        /// Time that a ticket request waits for memory. After it, clients get NO_BUFFER and sleep
        /// for seconds. 0 = no waiting.
        #[key("memory_store.buffer_ticket_wait_sec", seconds(Duration::ZERO..=30 * SECOND), Restart)]
        pub ticket_wait: Duration = SECOND,
        /// Partitions one `requireBuffer` may name.
        pub partitions_per_request_max: usize = 1_000_000,
        /// Time that a local read waits for read memory before NO_BUFFER.
        pub read_memory_wait: Duration = 10 * SECOND,
        /// Time that a request waits for heap before NO_BUFFER.
        pub heap_wait: Duration = 10 * SECOND,
        /// Whether a block's CRC-32 is checked as it arrives.
        pub verify_crc: bool = true,
        /// Bounds of one partition.
        pub partition_limits: PartitionLimits = PartitionLimits::default(),
        /// Who counts how much.
        #[section(FairnessConfig)]
        pub fairness: FairnessConfig,
        /// How much one application and one user may have.
        #[section(QuotaConfig)]
        pub quota: QuotaConfig,
    }
}

/// The service, shared by all listeners.
#[derive(Debug)]
pub struct Service {
    /// Calls for writers.
    pub ingest: Arc<Ingest>,
    /// Calls for readers.
    pub reads: Arc<Reads>,
    /// Registration to removal.
    pub lifecycle: Arc<Lifecycle>,
    /// Diagnostics.
    pub diagnostics: Arc<Diagnostics>,
    apps: Arc<AppRegistry>,
    memory: Arc<Memory>,
    tiers: Tiers,
    flusher: Option<Arc<Flusher>>,
    status: Arc<WorkerStatus>,
    heap_wait: Duration,
    refusals: Refusals,
}

impl Service {
    /// Creates the parts and connects them.
    ///
    /// # Errors
    /// A metric name is already registered in `registry`.
    #[expect(clippy::too_many_lines, reason = "one line per part and dependency")]
    pub fn new(
        config: ServiceConfig,
        apps: Arc<AppRegistry>,
        memory: Arc<Memory>,
        flusher: Option<Arc<Flusher>>,
        tasks: Tasks,
        registry: &Registry,
    ) -> prometheus::Result<Arc<Self>> {
        let metrics = Arc::new(ServiceMetrics::new(registry)?);
        flusher.iter().for_each(|flusher| flusher.charge_to(Arc::clone(&apps)));
        let tiers = flusher.as_ref().map(|flusher| flusher.tiers().clone()).unwrap_or_default();
        let status = Arc::new(WorkerStatus::default());
        let lookup =
            AppLookup { apps: apps.clone(), metrics: metrics.clone(), pool: BlockingPool::of_cores() };
        let (verifier, losses) = verification(&lookup, &memory, &tiers, &tasks);
        let diagnostics = Arc::new(Diagnostics {
            apps: apps.clone(),
            memory: memory.clone(),
            tiers: tiers.clone(),
            flusher: flusher.clone(),
            status: status.clone(),
            losses: losses.clone(),
            tasks: tasks.clone(),
            metrics: metrics.clone(),
            history: History::default(),
            finished: FinishedApps::default(),
        });
        let spill = Arc::new(ingest::spill::Spill::new(&tiers));
        let ingest = Arc::new(Ingest {
            lookup: lookup.clone(),
            memory: memory.clone(),
            tiers: tiers.clone(),
            flusher: flusher.clone(),
            status: status.clone(),
            losses: losses.clone(),
            metrics: metrics.clone(),
            limits: RwLock::new(config.partition_limits),
            commits: CommitGate::default(),
            ticket_queue: TicketQueue::default(),
            ticket_wait: config.ticket_wait,
            heap_wait: config.heap_wait,
            spill: spill.clone(),
            partitions_max: config.partitions_per_request_max,
            verify_crc: config.verify_crc,
            committing: BlockingPool::of_cores(),
            aborting: BlockingPool::of_cores(),
            tasks: tasks.clone(),
        });
        let reads = Arc::new(Reads {
            lookup: lookup.clone(),
            memory: memory.clone(),
            tiers: tiers.clone(),
            losses: losses.clone(),
            verifier: verifier.clone(),
            metrics: metrics.clone(),
            partitions_max: config.partitions_per_request_max,
            read_memory_wait: config.read_memory_wait,
            heap_wait: config.heap_wait,
            last_refusal: reads::answer_limits::LastRefusal::none(),
        });
        let lifecycle = Arc::new(Lifecycle {
            lookup,
            apps: apps.clone(),
            memory: memory.clone(),
            tiers: tiers.clone(),
            flusher: flusher.clone(),
            status: status.clone(),
            ends: BlockingPool::of_cores(),
            deletions: Deletions::new(tiers.len(), tasks.clone()),
            weights: Weights { config: RwLock::new(config.fairness), memory: memory.clone() },
            losses,
            verifier,
            spill,
            diagnostics: diagnostics.clone(),
            tasks,
            metrics,
            decommission_check_interval: config.decommission_check_interval,
            settings_store: OnceLock::new(),
        });
        Ok(Arc::new(Self {
            ingest,
            reads,
            lifecycle,
            diagnostics,
            apps,
            memory,
            tiers,
            flusher,
            status,
            heap_wait: config.heap_wait,
            refusals: Refusals::default(),
        }))
    }

    /// Records a refused request that came through `listener`. It is logged if the client is at
    /// fault.
    pub fn note_refusal(&self, listener: &'static str, error: &ServiceError) {
        if let Some(kind) = error.client_fault() {
            self.refusals.note(listener, kind, error);
        }
    }

    /// Records a malformed request that came through `listener`.
    pub fn note_malformed(&self, listener: &'static str, error: &dyn std::fmt::Display) {
        self.refusals.note(listener, error::MALFORMED, error);
    }

    /// Returns the state of the worker as a node of the cluster.
    #[must_use]
    pub fn status(&self) -> &WorkerStatus {
        &self.status
    }

    /// Undoes [`Ingest::refuse_sends`] and [`WorkerStatus::stop`] after a cancelled stop.
    pub fn resume(&self) {
        self.ingest.take_sends();
        self.status.resume();
    }

    /// Returns the memory tier.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Returns the tiers below memory; a worker of store type MEMORY has none.
    #[must_use]
    pub fn tiers(&self) -> &Tiers {
        &self.tiers
    }

    /// Returns the flusher, if there are tiers below memory.
    #[must_use]
    pub fn flusher(&self) -> Option<&Arc<Flusher>> {
        self.flusher.as_ref()
    }

    /// Returns how long a request waits for heap.
    #[must_use]
    pub fn heap_wait(&self) -> Duration {
        self.heap_wait
    }

    /// Returns the registry of apps.
    #[must_use]
    pub fn apps(&self) -> &Arc<AppRegistry> {
        &self.apps
    }
}

/// Creates the verifier of lost blocks and the loss tracking.
fn verification(
    AppLookup { apps, metrics, .. }: &AppLookup,
    memory: &Arc<Memory>,
    tiers: &Tiers,
    tasks: &Tasks,
) -> (Arc<Verifier>, Arc<Losses>) {
    let loss_log = LossLog::new(tasks);
    let verifier = Verifier::new(memory.clone(), tiers.clone(), tasks.clone(), metrics.clone(), loss_log);
    let verifier = Arc::new(verifier);
    let losses = Losses::new(apps.clone(), verifier.clone(), metrics.clone());
    (verifier, Arc::new(losses))
}
