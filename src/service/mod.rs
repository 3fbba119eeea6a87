//! What the worker does, in protocol-free terms: the listeners translate into these calls and back.
//!
//! Every call refuses first and cheaply (state, app, ticket), then works. Nothing here waits for a disk except the
//! two local reads.

mod commit_gate;
mod doubt;
mod error;
mod examine;
mod explain;
mod fairness;
mod history;
mod intake;
mod lifecycle;
mod losses;
pub(crate) mod metrics;
pub mod partition_limit;
mod read;
mod read_ahead;
mod read_metrics;
mod report;
mod require;
mod restore;
mod results;
pub mod statistics;
mod status;
mod top_apps;
mod write;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use prometheus::Registry;

pub use error::ServiceError;
pub use explain::{Explanation, Presence, StageView, TopPartition};
pub use fairness::{FairnessConfig, WeightRule};
pub use history::{SAMPLE_INTERVAL, Sample};
pub use intake::Intake;
pub use lifecycle::RegisterRequest;
pub use losses::{IncompleteShuffle, LossReport, ShuffleLoss};
pub use partition_limit::{PartitionConfig, PartitionLimits};
pub use read::{Answering, ChunkStream, DataAnswer, IndexAnswer, MemoryAnswer, MemoryReadRequest};
pub use read_ahead::ReadAhead;
pub use report::ReportRequest;
pub use require::{RequireGrant, RequireRequest};
pub use restore::Restored;
pub use results::Results;
pub use statistics::AppStatistics;
pub use status::{Stopping, WorkerState, WorkerStatus};
pub use uniffle_wire::BlockHeader;
pub use write::{SendHeader, SendSession};

use commit_gate::CommitGate;
use explain::Gone;
use history::History;

use crate::app::{App, AppRegistry, ShuffleState};
use crate::flush::Flusher;
use crate::memory::Memory;
use crate::schema::kind::{HOUR, SECOND, seconds};
use crate::schema::section;
use crate::telemetry::Refusals;
use crate::tiers::Tiers;
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};

section! {
    /// Limits of the service.
    pub struct ServiceConfig {
        /// A worker that is decommissioned gets no new shuffles and serves those it has: how often it looks whether an
        /// application is left.
        #[key("decommission_check_interval_sec", seconds(SECOND..=HOUR), Restart)]
        pub decommission_check_interval: Duration = 60 * SECOND,
        /// How often expired tickets are looked for; at most the timeout.
        #[key("memory_store.buffer_ticket_check_interval_sec", seconds(SECOND / 10..=HOUR), Restart)]
        pub ticket_check_interval: Duration = 10 * SECOND,
        /// Partitions one `requireBuffer` may name.
        pub partitions_per_request_max: usize = 1_000_000,
        /// How long a local read waits for read memory before NO_BUFFER.
        pub read_memory_wait: Duration = 10 * SECOND,
        /// How long a request waits for heap before NO_BUFFER.
        pub heap_wait: Duration = 10 * SECOND,
        /// Whether a block's CRC-32 is checked as it arrives.
        pub verify_crc: bool = true,
        /// Bounds of one partition.
        pub partition_limits: PartitionLimits = PartitionLimits::default(),
        /// Who counts how much.
        #[section(FairnessConfig)]
        pub fairness: FairnessConfig,
    }
}

/// The service; shared by all listeners.
#[derive(Debug)]
pub struct Service {
    config: ServiceConfig,
    partition_limits: RwLock<PartitionLimits>,
    fairness: RwLock<FairnessConfig>,
    apps: Arc<AppRegistry>,
    memory: Arc<Memory>,
    tiers: Tiers,
    flusher: Option<Arc<Flusher>>,
    status: WorkerStatus,
    commits: CommitGate,
    tasks: crate::runtime::Tasks,
    metrics: metrics::ServiceMetrics,
    history: History,
    gone: Gone,
    refusals: Refusals,
}

impl Service {
    /// Ties the parts together.
    ///
    /// # Errors
    /// A metric name that is taken in `registry`.
    pub fn new(
        config: ServiceConfig,
        apps: Arc<AppRegistry>,
        memory: Arc<Memory>,
        flusher: Option<Arc<Flusher>>,
        tasks: crate::runtime::Tasks,
        registry: &Registry,
    ) -> prometheus::Result<Arc<Self>> {
        let metrics = metrics::ServiceMetrics::new(registry)?;
        if let Some(flusher) = &flusher {
            flusher.charge_to(Arc::clone(&apps));
        }
        let tiers = flusher.as_ref().map(|flusher| flusher.tiers().clone()).unwrap_or_default();
        Ok(Arc::new(Self {
            partition_limits: RwLock::new(config.partition_limits),
            fairness: RwLock::new(config.fairness.clone()),
            config,
            apps,
            memory,
            tiers,
            flusher,
            status: WorkerStatus::default(),
            commits: CommitGate::default(),
            tasks,
            metrics,
            history: History::default(),
            gone: Gone::default(),
            refusals: Refusals::default(),
        }))
    }

    /// A request that came through `listener` was refused; the log hears of it if the client is at fault.
    pub fn note_refusal(&self, listener: &'static str, error: &ServiceError) {
        if let Some(kind) = error.client_fault() {
            self.refusals.note(listener, kind, error);
        }
    }

    /// What came through `listener` breaks its format.
    pub fn note_malformed(&self, listener: &'static str, error: &dyn std::fmt::Display) {
        self.refusals.note(listener, error::MALFORMED, error);
    }

    /// State of the worker as a node of the cluster.
    #[must_use]
    pub fn status(&self) -> &WorkerStatus {
        &self.status
    }

    /// From here on no send is acknowledged: clients get NO_BUFFER, wait and send again. When this returns none is being
    /// acknowledged either, so what is in memory can only become less.
    pub fn refuse_sends(&self) {
        self.commits.close();
    }

    /// Undoes [`Service::refuse_sends`] and [`WorkerStatus::stop`]: it did not come to that.
    pub fn go_on(&self) {
        self.commits.open();
        self.status.go_on();
    }

    /// The memory tier.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// The tiers below memory; a worker of store type MEMORY has none.
    #[must_use]
    pub fn tiers(&self) -> &Tiers {
        &self.tiers
    }

    /// Who fills them, where there are any.
    #[must_use]
    pub fn flusher(&self) -> Option<&Arc<Flusher>> {
        self.flusher.as_ref()
    }

    /// Bounds of one partition, as they are now.
    #[must_use]
    pub fn partition_limits(&self) -> PartitionLimits {
        *self.partition_limits.read()
    }

    /// Replaces them.
    pub fn set_partition_limits(&self, limits: PartitionLimits) {
        *self.partition_limits.write() = limits;
    }

    /// How long a request waits for heap.
    #[must_use]
    pub fn heap_wait(&self) -> Duration {
        self.config.heap_wait
    }

    /// The registry of apps.
    #[must_use]
    pub fn apps(&self) -> &Arc<AppRegistry> {
        &self.apps
    }

    /// Tickets refused since the start: for lack of memory, and because a huge partition fills its share.
    #[must_use]
    pub fn refused_tickets(&self) -> (u64, u64) {
        let metrics = &self.metrics;
        (metrics.require_buffer_refused_regular.get(), metrics.require_buffer_refused_huge.get())
    }

    /// Brings gauges of live values up to date; called before metrics are gathered.
    pub fn refresh_metrics(&self, apps: &[AppStatistics]) {
        self.metrics.set_inventory(apps, self.apps.block_id_count());
        self.metrics.set_state(self.status.state());
        self.set_loss_gauges();
    }

    /// The app of a request; an id that cannot exist is unknown like any other.
    fn app(&self, app: &str) -> Result<Arc<App>, ServiceError> {
        let found = AppId::parse(app).ok().and_then(|id| self.apps.find(&id));
        found.ok_or_else(|| {
            self.metrics.apps_not_found.inc();
            ServiceError::NotRegistered
        })
    }

    /// As [`Service::app`], and the app counts as used now.
    fn touched_app(&self, app: &str) -> Result<Arc<App>, ServiceError> {
        let app = self.app(app)?;
        self.apps.touch(&app);
        Ok(app)
    }
}

/// Key and state of a shuffle of `app`; `None` if it is not registered.
fn shuffle_of(app: &App, shuffle: i32) -> Option<(ShuffleKey, Arc<ShuffleState>)> {
    let state = app.shuffle(ShuffleId(shuffle))?;
    Some((state.key().clone(), state))
}
