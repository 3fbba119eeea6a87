//! The HTTP listener: metrics, health, the status page and its API.
//!
//! A [`NodeView`] provides figures and readiness. `serve.rs` bounds connections. Work that grows
//! with the stored data runs on blocking threads. Invariant: nothing here changes state, so there
//! is no authentication. Calls that change state are on a listener of their own ([`admin`]).

pub mod admin;
pub mod api;
pub mod debug;
mod page;
pub mod push;
mod serve;

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use futures::future::BoxFuture;
use prometheus::{Encoder as _, IntCounter, IntGauge, Registry, TEXT_FORMAT, TextEncoder};

use crate::compat::http::NodeInfo;
use crate::listeners::acceptor::{Binding, ListenerNames};
use crate::runtime::{BlockingPool, Tasks};
use crate::service::{AppStatistics, Incompleteness};
use crate::{metrics, telemetry};

pub use serve::HttpConfig;
use serve::{ConnectionCounts, run_blocking};

const NAMES: ListenerNames = ListenerNames {
    listener: "http",
    accepting: "http accept",
    connection: "http connection",
    limit: "http.max_connections",
};

/// Source of the worker's state for the listener.
pub trait NodeView: NodeInfo {
    /// Returns why clients should not use this worker, or `None` if it is ready.
    fn not_ready(&self) -> Option<String>;

    /// Returns the incomplete shuffles. The figures are at most a second old.
    fn incomplete(&self) -> Incompleteness;

    /// Returns whether the worker stops without a successor, or is being drained.
    fn is_stopping_for_good(&self) -> bool;

    /// Returns risks of data loss that exist although the worker is ready, one line each.
    fn risks(&self) -> Vec<String>;

    /// Returns the lost blocks.
    fn losses(&self) -> serde_json::Value;

    /// Returns the worker's state. The figures are at most a second old.
    fn status(&self) -> api::Status;

    /// Returns the worker's applications. The figures are at most a second old.
    fn apps(&self) -> Vec<AppStatistics>;

    /// Returns its coordinator's view of the cluster ([`api::cluster::ClusterModel`]) as JSON text,
    /// or `None` without a coordinator. Text can be shared between callers, as it may be long.
    fn cluster(&self) -> Option<Bytes>;

    /// Explains an application over all workers known to its coordinator, or returns `None` without
    /// a coordinator.
    fn explain_everywhere(&self, app: &str) -> Option<Everywhere>;
}

/// An application's explanation over all workers.
pub type Everywhere = BoxFuture<'static, Result<serde_json::Value, NotExplained>>;

/// Reason why an application cannot be explained over all workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotExplained {
    /// No worker knows the application.
    Unknown(String),
    /// Workers that may know it do not answer, or there are too many concurrent requests.
    Unavailable(String),
}

/// Sources of the listener.
#[derive(Debug, Clone)]
pub struct Pages {
    /// Registry of all metrics.
    pub registry: Registry,
    /// Metrics of this listener, which are registered in `registry`.
    pub metrics: HttpMetrics,
    /// Source of the worker's state.
    pub node: Arc<dyn NodeView>,
    /// Routes of other parts, such as [`api::router`], which must not change state.
    pub mounted: Router,
    /// Threads for collecting answers; see [`gathering_pool`].
    pub pool: BlockingPool,
    /// Threads for readiness, so that it does not wait for the collection of other answers.
    pub ready: BlockingPool,
}

/// Returns the threads for answers that grow with the stored data. Each takes some MB and a core.
#[must_use]
pub fn gathering_pool() -> BlockingPool {
    BlockingPool::new(2)
}

metrics::table! {
    /// Counters of the listener.
    #[derive(Clone)]
    pub struct HttpMetrics {
        connections: IntGauge = "http_connection_number", "Open connections of the HTTP listener";
        closed: IntCounter = "http_connection_refused_total",
            "Connections of the HTTP listener closed at the limit to accept new ones";
    }
}

/// The HTTP listener.
#[derive(Debug)]
pub struct HttpServer;

impl HttpServer {
    /// Serves on `binding` in tasks of `tasks` until they are cancelled. Open connections then have
    /// a second to finish. Also registers the telemetry metrics of the process.
    ///
    /// # Errors
    /// If the registry already has these metrics.
    pub fn start(
        config: HttpConfig,
        binding: impl Into<Binding>,
        pages: Pages,
        tasks: &Tasks,
    ) -> prometheus::Result<()> {
        telemetry::TelemetryMetrics::new(&pages.registry)?;
        let HttpMetrics { connections, closed, .. } = &pages.metrics;
        let counts = ConnectionCounts { open: connections.clone(), closed: closed.clone() };
        let mounted = pages.mounted.clone();
        let router = router(pages).merge(mounted);
        serve::start(NAMES, config, binding.into(), router, counts, tasks);
        Ok(())
    }
}

/// Returns the routes except [`Pages::mounted`]. The Java server has Prometheus text below
/// `/prometheus/metrics`, with an optional registry name. This worker has one registry, so every
/// name returns all metrics.
fn router(pages: Pages) -> Router {
    Router::new()
        .route("/metrics", get(metrics_text))
        .route("/prometheus/metrics", get(metrics_text))
        .route("/prometheus/metrics/{registry}", get(metrics_text))
        .route("/api/shuffleServer/prometheus/metrics", get(metrics_text))
        .route("/api/shuffleServer/prometheus/metrics/{registry}", get(metrics_text))
        .route("/losses", get(losses))
        .route("/health/live", get(|| async { "live\n" }))
        .route("/health/ready", get(ready))
        .with_state(pages)
        .merge(page::router())
}

async fn metrics_text(State(pages): State<Pages>) -> Response {
    let pool = pages.pool.clone();
    run_blocking(&pool, move || gather(&pages)).await
}

fn gather(pages: &Pages) -> Response {
    pages.node.refresh_metrics();
    let mut text = Vec::new();
    match TextEncoder::new().encode(&pages.registry.gather(), &mut text) {
        Ok(()) => ([(header::CONTENT_TYPE, TEXT_FORMAT)], text).into_response(),
        Err(error) => {
            tracing::error!(%error, "cannot encode metrics");
            (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response()
        }
    }
}

async fn losses(State(pages): State<Pages>) -> Response {
    let pool = pages.pool.clone();
    run_blocking(&pool, move || Json(pages.node.losses()).into_response()).await
}

async fn ready(State(pages): State<Pages>) -> Response {
    match pages.node.not_ready() {
        None => {
            let node = Arc::clone(&pages.node);
            let incomplete = pages.ready.run(move || node.incomplete()).await.unwrap_or_default();
            describe_ready(&incomplete, &pages.node.risks()).into_response()
        }
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response(),
    }
}

/// Returns the text for a ready worker. It lists refused results and risks, which would go
/// unnoticed.
fn describe_ready(incomplete: &Incompleteness, risks: &[String]) -> String {
    let mut text = "ready\n".to_owned();
    if incomplete.shuffles > 0 {
        let reasons = incomplete.reasons.join("; ");
        text.push_str(&format!("results of {} shuffles are refused: {reasons}\n", incomplete.shuffles));
    }
    if let Some(reason) = &incomplete.unknown_shuffles {
        text.push_str(&format!("results of unknown shuffles are refused: {reason}\n"));
    }
    risks.iter().for_each(|risk| text.push_str(&format!("{risk}\n")));
    text
}

#[cfg(test)]
mod tests;
