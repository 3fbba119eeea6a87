//! Runs work that may be too long for a runtime thread on a blocking thread.
//!
//! Work that clients can trigger goes through a pool with a bounded number of threads. The worker's
//! own work has no such bound.

use tokio::task::JoinError;

use super::ServiceError;
use crate::runtime::BlockingPool;

/// Runs `work` inline if it is small, otherwise on a blocking thread once the pool has a free slot.
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
            Some(pool) => pool.run(step).await.map_err(failed),
        }
    }
}

/// Runs the worker's own `work` on a blocking thread. Clients must not be able to trigger it.
pub(super) async fn run_own_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ServiceError> {
    tokio::task::spawn_blocking(work).await.map_err(failed)
}

/// Returns the error for work that ended without a result.
#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
pub(super) fn failed(error: JoinError) -> ServiceError {
    ServiceError::Malformed(format!("task on a blocking thread failed: {error}"))
}
