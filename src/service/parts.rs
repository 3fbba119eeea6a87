//! Configuration and dependencies that the views of the service share, the lookup of applications
//! named in requests, and blocking threads for their work.
//!
//! An unknown application is refused. If an earlier process may have known it, the error states why
//! its registration is missing. A lookup never creates an application.

use std::sync::Arc;
use std::time::Duration;

use prometheus::Registry;
use tokio::task::JoinError;

use crate::app::{App, AppRegistry, ShuffleState};
use crate::flush::Flusher;
use crate::memory::Memory;
use crate::runtime::{BlockingPool, Tasks};
use crate::schema::kind::{HOUR, SECOND, seconds};
use crate::schema::section;
use crate::store::Tiers;
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};

use super::ServiceError;
use super::ingest::partition_limit::PartitionLimits;
use super::ingest::spill::Spill;
use super::lifecycle::fairness::FairnessConfig;
use super::losses::Losses;
use super::losses::log::LossLog;
use super::losses::verify::Verifier;
use super::metrics::ServiceMetrics;
use super::quota::QuotaConfig;
use super::status::WorkerStatus;

/// Maximum number of partitions that one request may name.
pub(super) const PARTITIONS_PER_REQUEST_MAX: usize = 1_000_000;

/// Time that a request waits for heap before it is refused.
pub(crate) const HEAP_WAIT: Duration = Duration::from_secs(10);

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
        /// Bounds of one partition.
        pub partition_limits: PartitionLimits = PartitionLimits::default(),
        /// Weights of applications.
        #[section(FairnessConfig)]
        pub fairness: FairnessConfig,
        /// Quotas of one application and one user.
        #[section(QuotaConfig)]
        pub quota: QuotaConfig,
    }
}

/// Dependencies of all views.
#[derive(Debug)]
pub(super) struct ServiceParts {
    pub(super) apps: Arc<AppRegistry>,
    pub(super) memory: Arc<Memory>,
    pub(super) tiers: Tiers,
    pub(super) flusher: Option<Arc<Flusher>>,
    pub(super) status: WorkerStatus,
    pub(super) losses: Losses,
    pub(super) verifier: Arc<Verifier>,
    pub(super) spill: Spill,
    pub(super) metrics: Arc<ServiceMetrics>,
    pub(super) tasks: Tasks,
    /// Pool for requested work that may be too long for a runtime thread.
    pub(super) pool: BlockingPool,
}

impl ServiceParts {
    /// Creates the parts of a worker.
    ///
    /// # Errors
    /// A metric name is already registered in `registry`.
    pub(super) fn new(
        apps: Arc<AppRegistry>,
        memory: Arc<Memory>,
        flusher: Option<Arc<Flusher>>,
        tasks: Tasks,
        registry: &Registry,
    ) -> prometheus::Result<Self> {
        let metrics = Arc::new(ServiceMetrics::new(registry)?);
        let tiers = flusher.as_ref().map(|flusher| flusher.tiers().clone()).unwrap_or_default();
        let log = LossLog::new(&tasks);
        let verifier = Verifier::new(memory.clone(), tiers.clone(), tasks.clone(), metrics.clone(), log);
        let verifier = Arc::new(verifier);
        Ok(Self {
            losses: Losses::new(apps.clone(), verifier.clone(), metrics.clone()),
            spill: Spill::new(&tiers),
            status: WorkerStatus::default(),
            pool: BlockingPool::sized_by_cores(),
            apps,
            memory,
            tiers,
            flusher,
            verifier,
            metrics,
            tasks,
        })
    }

    /// Returns the app of a request. An invalid id is treated as unknown.
    pub(super) fn app(&self, app: &str) -> Result<Arc<App>, ServiceError> {
        let id = AppId::parse(app).ok();
        id.as_ref().and_then(|id| self.apps.find(id)).ok_or_else(|| {
            self.metrics.apps_not_found.inc();
            self.apps.note_unknown_call();
            match id.and_then(|id| self.apps.unverified_reason(&id)) {
                Some(reason) => ServiceError::NoLongerRegistered(format!(
                    "application {app} is no longer registered: {reason}"
                )),
                None => ServiceError::NotRegistered,
            }
        })
    }

    /// Returns the app as [`ServiceParts::app`] does, and marks it as used now.
    pub(super) fn touched_app(&self, app: &str) -> Result<Arc<App>, ServiceError> {
        let app = self.app(app)?;
        self.apps.touch(&app);
        Ok(app)
    }
}

/// Returns key and state of a shuffle of `app`, or `None` if it is not registered.
pub(super) fn shuffle_of(app: &App, shuffle: i32) -> Option<(ShuffleKey, Arc<ShuffleState>)> {
    let state = app.shuffle(ShuffleId(shuffle))?;
    Some((state.key().clone(), state))
}

/// Runs `work` inline if it is small, otherwise on a blocking thread once the pool has a free slot.
/// The pool bounds the threads for work that clients can trigger.
pub(super) async fn run_blocking<T: Send + 'static>(
    pool: &BlockingPool,
    is_small: bool,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ServiceError> {
    StepRunner::new(pool, is_small).run(work).await
}

/// Where the steps of one request run, decided once from the request's size.
#[derive(Debug, Clone, Copy)]
pub(super) struct StepRunner<'a> {
    /// `None` runs the steps inline.
    pool: Option<&'a BlockingPool>,
}

impl<'a> StepRunner<'a> {
    /// Creates a runner that uses blocking threads of `pool` unless the request is small.
    pub(super) fn new(pool: &'a BlockingPool, is_small: bool) -> Self {
        Self { pool: Some(pool).filter(|_| !is_small) }
    }

    /// Runs one step and returns its result.
    pub(super) async fn run<T: Send + 'static>(
        self,
        step: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ServiceError> {
        match self.pool {
            None => Ok(step()),
            Some(pool) => pool.run(step).await.map_err(blocking_failed),
        }
    }
}

/// Runs the worker's own `work` on a blocking thread. Clients must not be able to trigger it.
pub(super) async fn run_own_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ServiceError> {
    tokio::task::spawn_blocking(work).await.map_err(blocking_failed)
}

/// Returns the error for work that ended without a result.
#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
pub(super) fn blocking_failed(error: JoinError) -> ServiceError {
    ServiceError::Unfinished(format!("task on a blocking thread failed: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::StatusCode;

    #[tokio::test]
    async fn failed_thread_is_no_fault_of_the_client() {
        let error = run_own_blocking(|| panic!("boom")).await.map(|never: ()| never).unwrap_err();
        assert_eq!((error.status(), error.client_fault()), (StatusCode::InternalError, None));
    }
}
