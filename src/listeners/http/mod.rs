//! The HTTP listener: metrics, health, the status page and its API. It translates only; what is ready or measured comes in as hooks.
//!
//! `serve.rs` bounds the connections; here are the paths. Nothing here changes state, so there is
//! nothing to protect; what does is on a listener of its own, [`admin`].
//! Gathering metrics is done in place: it takes a fraction of a millisecond and happens a few times a minute.

pub mod admin;
pub mod api;
pub mod debug;
mod page;
pub mod push;
mod serve;

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use prometheus::{Encoder as _, IntGauge, Registry, TEXT_FORMAT, TextEncoder};

use crate::listeners::acceptor::{Binding, Names};
use crate::runtime::Tasks;
use crate::{metrics, telemetry};

pub use serve::HttpConfig;

const NAMES: Names = Names { listener: "http", accepting: "http accept", connection: "http connection" };

/// Brings gauges up to date; called before each gathering.
pub type Refresh = Arc<dyn Fn() + Send + Sync>;

/// Whether clients may be sent here; the error is the reason why not.
pub type Ready = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// Blocks that are lost.
pub type Losses = Arc<dyn Fn() -> serde_json::Value + Send + Sync>;

/// What the listener asks the rest of the worker.
#[derive(Clone)]
struct Hooks {
    registry: Registry,
    refresh: Refresh,
    ready: Ready,
    losses: Losses,
}

/// What the listener shows.
pub struct Pages {
    /// Metrics; the listener adds its own.
    pub registry: Registry,
    /// Brings gauges up to date.
    pub refresh: Refresh,
    /// Answers `/health/ready`.
    pub ready: Ready,
    /// Answers `/losses`.
    pub losses: Losses,
    /// Paths of other parts, such as [`api::router`]; like all here they must not change anything.
    pub mounted: Router,
}

impl std::fmt::Debug for Pages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pages").finish_non_exhaustive()
    }
}

metrics::table! {
    pub(crate) struct HttpMetrics {
        connections: IntGauge = "http_connection_number", "connections of the HTTP listener that are open";
    }
}

/// The HTTP listener.
#[derive(Debug)]
pub struct HttpServer;

impl HttpServer {
    /// Serves on `binding` in tasks of `tasks`, until they are cancelled. Connections have a second to end then.
    ///
    /// Also puts into the registry what no other part owns: the listener's connections and the process's panics.
    ///
    /// # Errors
    /// When the registry has these metrics already.
    pub fn start(
        config: HttpConfig,
        binding: impl Into<Binding>,
        pages: Pages,
        tasks: &Tasks,
    ) -> prometheus::Result<()> {
        let Pages { registry, refresh, ready, losses, mounted } = pages;
        telemetry::PanicMetrics::new(&registry)?;
        let HttpMetrics { connections } = HttpMetrics::new(&registry)?;
        let router = router(Hooks { registry, refresh, ready, losses })
            .merge(debug::routes(tasks.clone()))
            .merge(mounted);
        serve::start(NAMES, config, binding.into(), router, connections, tasks);
        Ok(())
    }
}

/// All paths. Java's server has its Prometheus text below `/prometheus/metrics`, with an optional registry name; this
/// worker has one registry, so that every name gives all of it.
fn router(hooks: Hooks) -> Router {
    Router::new()
        .route("/metrics", get(metrics_text))
        .route("/prometheus/metrics", get(metrics_text))
        .route("/prometheus/metrics/{registry}", get(metrics_text))
        .route("/losses", get(losses))
        .route("/health/live", get(|| async { "live\n" }))
        .route("/health/ready", get(ready))
        .with_state(hooks)
        .merge(page::router())
}

async fn metrics_text(State(hooks): State<Hooks>) -> Response {
    (hooks.refresh)();
    let mut text = Vec::new();
    match TextEncoder::new().encode(&hooks.registry.gather(), &mut text) {
        Ok(()) => ([(header::CONTENT_TYPE, TEXT_FORMAT)], text).into_response(),
        Err(error) => {
            tracing::error!(%error, "metrics cannot be encoded");
            (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response()
        }
    }
}

async fn losses(State(hooks): State<Hooks>) -> Response {
    Json((hooks.losses)()).into_response()
}

async fn ready(State(hooks): State<Hooks>) -> Response {
    match (hooks.ready)() {
        Ok(()) => "ready\n".into_response(),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response(),
    }
}

#[cfg(test)]
mod tests;
