//! Answers of which the work grows with what the worker holds.

use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};

use crate::runtime::Aside;

/// Collects it on a blocking thread, when there is a place.
pub(super) async fn aside(places: &Aside, collect: impl FnOnce() -> Response + Send + 'static) -> Response {
    let failed = |error| (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response();
    places.run(collect).await.unwrap_or_else(failed)
}
