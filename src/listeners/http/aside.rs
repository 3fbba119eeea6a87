//! Answers of which the work grows with what the worker holds.

use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};

/// Collects it on a blocking thread.
pub(super) async fn aside(collect: impl FnOnce() -> Response + Send + 'static) -> Response {
    let failed = |error| (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response();
    tokio::task::spawn_blocking(collect).await.unwrap_or_else(failed)
}
