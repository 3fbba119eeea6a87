//! The HTTP door: metrics, health and a banner. It translates only; what is ready or measured comes in as [`Hooks`].
//!
//! `serve.rs` bounds the connections; here are the paths. Nothing here changes state, so there is nothing to protect.
//! Gathering metrics is done in place: it takes a fraction of a millisecond and happens a few times a minute.

mod serve;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus::{Encoder as _, Registry, TEXT_FORMAT, TextEncoder};

pub use serve::serve;

/// Bounds of the door.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HttpConfig {
    /// Connections at once; more wait in the listener's backlog.
    pub max_connections: usize,
    /// From accept to the last byte of the answer.
    pub request_timeout: Duration,
}

/// What the door asks the rest of the worker.
#[derive(Clone)]
pub struct Hooks {
    /// The worker's metrics.
    pub registry: Registry,
    /// Brings gauges up to date; called before each gathering.
    pub refresh: Arc<dyn Fn() + Send + Sync>,
    /// Whether clients may be sent here; the error is the reason why not.
    pub ready: Arc<dyn Fn() -> Result<(), String> + Send + Sync>,
}

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooks").finish_non_exhaustive()
    }
}

const BANNER: &str = concat!(
    "uniffle-worker ",
    env!("CARGO_PKG_VERSION"),
    " (",
    env!("WORKER_GIT_COMMIT"),
    ")\n\
     \n\
     /metrics              metrics in Prometheus' text format (also /prometheus/metrics)\n\
     /health/live          200 while the process answers\n\
     /health/ready         200 while the worker takes shuffle data, else 503 and the reason\n"
);

/// All paths. Java's server has its Prometheus text below `/prometheus/metrics`, with an optional registry name; this
/// worker has one registry, so that every name gives all of it.
fn router(hooks: Hooks) -> Router {
    Router::new()
        .route("/", get(|| async { BANNER }))
        .route("/metrics", get(metrics))
        .route("/prometheus/metrics", get(metrics))
        .route("/prometheus/metrics/{registry}", get(metrics))
        .route("/health/live", get(|| async { "live\n" }))
        .route("/health/ready", get(ready))
        .with_state(hooks)
}

async fn metrics(State(hooks): State<Hooks>) -> Response {
    (hooks.refresh)();
    let mut text = Vec::new();
    match TextEncoder::new().encode(&hooks.registry.gather(), &mut text) {
        Ok(()) => ([(header::CONTENT_TYPE, TEXT_FORMAT)], text).into_response(),
        Err(error) => {
            tracing::error!(%error, "metrics can not be encoded");
            (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response()
        }
    }
}

async fn ready(State(hooks): State<Hooks>) -> Response {
    match (hooks.ready)() {
        Ok(()) => "ready\n".into_response(),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response(),
    }
}

#[cfg(test)]
mod tests;
