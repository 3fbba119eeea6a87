//! Runs handlers whose work grows with the stored data.

use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};

use crate::runtime::BlockingPool;

/// Runs `collect` on a blocking thread, after waiting for a free one of `pool`.
pub(super) async fn run_blocking(
    pool: &BlockingPool,
    collect: impl FnOnce() -> Response + Send + 'static,
) -> Response {
    let failed = |error| (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response();
    pool.run(collect).await.unwrap_or_else(failed)
}
