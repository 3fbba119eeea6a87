//! Work that may be too long for a runtime thread.

use super::ServiceError;

/// Does `work` here if it is small, else on a blocking thread.
pub(super) async fn aside<T: Send + 'static>(
    is_small: bool,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ServiceError> {
    if is_small {
        return Ok(work());
    }
    let failed = |error| ServiceError::Malformed(format!("work on a blocking thread ended: {error}"));
    tokio::task::spawn_blocking(work).await.map_err(failed)
}
