//! Work that may be too long for a runtime thread.

use tokio::task::JoinError;

use super::ServiceError;
use crate::runtime::Aside;

/// Does `work` here if it is small, else on a blocking thread, when there is a place.
pub(super) async fn aside<T: Send + 'static>(
    places: &Aside,
    is_small: bool,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ServiceError> {
    if is_small {
        return Ok(work());
    }
    places.run(work).await.map_err(failed)
}

/// Does the worker's own `work` on a blocking thread; no client can ask for it.
pub(super) async fn own_aside<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ServiceError> {
    tokio::task::spawn_blocking(work).await.map_err(failed)
}

/// Work that has ended otherwise than by its answer.
#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
pub(super) fn failed(error: JoinError) -> ServiceError {
    ServiceError::Malformed(format!("task on a blocking thread failed: {error}"))
}
