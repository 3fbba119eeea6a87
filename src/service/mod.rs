//! The worker's operations in protocol-free terms: listeners translate requests into these calls
//! and results back.
//!
//! [`Ingest`] serves writers, [`Reads`] readers. [`Lifecycle`] covers registration to removal,
//! recovery, and decommissioning. [`Diagnostics`] covers explanations, statistics, and losses.
//!
//! Every call refuses first and cheaply (state, app, ticket), then works. A call waits for a disk
//! only where its result must be durable or is read from one. The views share their dependencies
//! (`ServiceParts`) and do not know [`Service`], which creates them.

mod diagnostics;
mod error;
mod ingest;
mod lifecycle;
mod losses;
pub(crate) mod metrics;
mod parts;
mod quota;
mod reads;
mod status;

#[cfg(test)]
mod tests;

use std::sync::Arc;

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
pub use ingest::write::{IncomingSend, SendSession};
pub use lifecycle::end::Draining;
pub use lifecycle::fairness::{FairnessConfig, WeightRule};
pub use lifecycle::restore::RestoreCounts;
pub use lifecycle::{Lifecycle, RegisterRequest, SettingsStore};
pub use losses::{IncompleteShuffle, Incompleteness, LossReport, ShuffleLoss};
pub(crate) use parts::HEAP_WAIT;
pub use parts::ServiceConfig;
pub use quota::{QuotaConfig, QuotaUse};
pub use reads::admission::{ReadAdmission, ReadLimits};
pub use reads::read_ahead::ReadAhead;
pub use reads::response_window::ResponseWindow;
pub use reads::results::{IdWidths, Results};
pub use reads::{
    ChunkStream, DataAnswer, IndexAnswer, MemoryAnswer, MemoryReadRequest, ReadRange, Reads,
    RequestedPartition, ResponseGuard,
};
pub use status::{Stopping, WorkerState, WorkerStatus};
pub use uniffle_wire::BlockHeader;

use parts::ServiceParts;

use crate::app::AppRegistry;
use crate::flush::Flusher;
use crate::memory::Memory;
use crate::runtime::Tasks;
use crate::store::Tiers;
use crate::telemetry::Refusals;

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
    parts: Arc<ServiceParts>,
    refusals: Refusals,
}

impl Service {
    /// Creates the parts and their views.
    ///
    /// # Errors
    /// A metric name is already registered in `registry`.
    pub fn new(
        config: ServiceConfig,
        apps: Arc<AppRegistry>,
        memory: Arc<Memory>,
        flusher: Option<Arc<Flusher>>,
        tasks: Tasks,
        registry: &Registry,
    ) -> prometheus::Result<Arc<Self>> {
        flusher.iter().for_each(|flusher| flusher.set_apps(Arc::clone(&apps)));
        let parts = Arc::new(ServiceParts::new(apps, memory, flusher, tasks, registry)?);
        let diagnostics = Arc::new(Diagnostics::new(&parts));
        Ok(Arc::new(Self {
            ingest: Arc::new(Ingest::new(&parts, &config)),
            reads: Arc::new(Reads::new(&parts)),
            lifecycle: Arc::new(Lifecycle::new(&parts, &diagnostics, config)),
            diagnostics,
            parts,
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
        &self.parts.status
    }

    /// Undoes [`Ingest::refuse_sends`] and [`WorkerStatus::stop`] after a cancelled stop.
    pub fn resume(&self) {
        self.ingest.accept_sends();
        self.parts.status.resume();
    }

    /// Returns the memory.
    #[must_use]
    pub fn memory(&self) -> &Arc<Memory> {
        &self.parts.memory
    }

    /// Returns the tiers below memory; a worker of store type MEMORY has none.
    #[must_use]
    pub fn tiers(&self) -> &Tiers {
        &self.parts.tiers
    }

    /// Returns the flusher, if there are tiers below memory.
    #[must_use]
    pub fn flusher(&self) -> Option<&Arc<Flusher>> {
        self.parts.flusher.as_ref()
    }

    /// Returns the registry of apps.
    #[must_use]
    pub fn apps(&self) -> &Arc<AppRegistry> {
        &self.parts.apps
    }
}
