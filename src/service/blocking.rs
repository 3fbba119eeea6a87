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
    if is_small {
        return Ok(work());
    }
    pool.run(work).await.map_err(failed)
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
