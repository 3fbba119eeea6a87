//! The HTTP listener: metrics, health, the status page and its API. It translates only; what is measured and whether it is ready comes from a [`Node`].
//!
//! `serve.rs` bounds the connections; here are the paths. Nothing here changes state, so there is
//! nothing to protect; what does is on a listener of its own, [`admin`].
//! What grows with what the worker holds is gathered on a blocking thread.

pub mod admin;
pub mod api;
mod aside;
pub mod debug;
pub mod java;
mod page;
pub mod push;
mod serve;

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use futures::future::BoxFuture;
use prometheus::{Encoder as _, IntCounter, IntGauge, Registry, TEXT_FORMAT, TextEncoder};

use crate::listeners::acceptor::{Binding, Names};
use crate::runtime::{Aside, Tasks};
use crate::service::{AppStatistics, Incompleteness};
use crate::{metrics, telemetry};

use self::aside::aside;

pub use serve::HttpConfig;

const NAMES: Names = Names {
    listener: "http",
    accepting: "http accept",
    connection: "http connection",
    limit: "http.max_connections",
};

/// What the listener tells of the worker.
pub trait Node: std::fmt::Debug + Send + Sync {
    /// Brings gauges up to date; called before each gathering.
    fn refresh_metrics(&self);

    /// Why clients should not be sent here; `None` when they may.
    fn not_ready(&self) -> Option<String>;

    /// What is not proven to be complete, with figures that are at most a second old.
    fn incomplete(&self) -> Incompleteness;

    /// Whether the worker stops without a successor.
    fn is_stopping_for_good(&self) -> bool;

    /// What may be lost although the worker is ready, one line each.
    fn risks(&self) -> Vec<String>;

    /// Blocks that are lost.
    fn losses(&self) -> serde_json::Value;

    /// Its state, with figures that are at most a second old.
    fn status(&self) -> api::Status;

    /// Its applications, likewise.
    fn apps(&self) -> Vec<AppStatistics>;

    /// The configuration in effect, key by key, without secrets.
    fn configuration(&self) -> BTreeMap<&'static str, String>;

    /// What its coordinator knows ([`api::cluster::Cluster`] as JSON), likewise; `None` without one. As text, since
    /// that is all that askers get and it may be long.
    fn cluster(&self) -> Option<Bytes>;

    /// What all workers that its coordinator knows say of an application; `None` without one.
    fn explain_everywhere(&self, app: &str) -> Option<Everywhere>;
}

/// An application's explanation over all workers, or why there is none.
pub type Everywhere = BoxFuture<'static, Result<serde_json::Value, NotExplained>>;

/// Why an application is not explained over all workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotExplained {
    /// No worker knows it.
    Unknown(String),
    /// Workers that may know it do not answer, or too many ask at once.
    Unavailable(String),
}

/// What the listener shows.
#[derive(Debug, Clone)]
pub struct Pages {
    /// Metrics.
    pub registry: Registry,
    /// The listener's own, registered there.
    pub metrics: HttpMetrics,
    /// Tells of the worker.
    pub node: Arc<dyn Node>,
    /// Paths of other parts, such as [`api::router`]; like all here they must not change anything.
    pub mounted: Router,
    /// For what is gathered, see [`gathering_places`].
    pub aside: Aside,
    /// For a look at what is refused, which waits for nothing that is gathered.
    pub ready: Aside,
}

/// Answers that grow with what the worker holds, gathered at once: some MB each, and all of a core.
#[must_use]
pub fn gathering_places() -> Aside {
    Aside::new(2)
}

metrics::table! {
    /// What the listener counts.
    #[derive(Clone)]
    pub struct HttpMetrics {
        connections: IntGauge = "http_connection_number", "connections of the HTTP listener that are open";
        closed: IntCounter = "http_connection_refused_total",
            "connections of the HTTP listener closed because new ones wanted their places";
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
        telemetry::TelemetryMetrics::new(&pages.registry)?;
        let counts = (pages.metrics.connections.clone(), pages.metrics.closed.clone());
        let mounted = pages.mounted.clone();
        let router = router(pages).merge(mounted);
        serve::start(NAMES, config, binding.into(), router, counts, tasks);
        Ok(())
    }
}

/// All paths. Java's server has its Prometheus text below `/prometheus/metrics`, with an optional registry name; this
/// worker has one registry, so that every name gives all of it.
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
    let places = pages.aside.clone();
    aside(&places, move || gathered(&pages)).await
}

fn gathered(pages: &Pages) -> Response {
    pages.node.refresh_metrics();
    let mut text = Vec::new();
    match TextEncoder::new().encode(&pages.registry.gather(), &mut text) {
        Ok(()) => ([(header::CONTENT_TYPE, TEXT_FORMAT)], text).into_response(),
        Err(error) => {
            tracing::error!(%error, "metrics cannot be encoded");
            (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response()
        }
    }
}

async fn losses(State(pages): State<Pages>) -> Response {
    let places = pages.aside.clone();
    aside(&places, move || Json(pages.node.losses()).into_response()).await
}

async fn ready(State(pages): State<Pages>) -> Response {
    match pages.node.not_ready() {
        None => {
            let node = Arc::clone(&pages.node);
            let incomplete = pages.ready.run(move || node.incomplete()).await.unwrap_or_default();
            said_ready(&incomplete, &pages.node.risks()).into_response()
        }
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response(),
    }
}

/// It takes data; what it refuses and what is at risk is said, since nobody looks before.
fn said_ready(incomplete: &Incompleteness, risks: &[String]) -> String {
    let mut said = "ready\n".to_owned();
    if incomplete.shuffles > 0 {
        let reasons = incomplete.reasons.join("; ");
        said.push_str(&format!("results of {} shuffles are refused: {reasons}\n", incomplete.shuffles));
    }
    if let Some(reason) = &incomplete.unknown_shuffles {
        said.push_str(&format!("results of shuffles that are not known are refused: {reason}\n"));
    }
    risks.iter().for_each(|risk| said.push_str(&format!("{risk}\n")));
    said
}

#[cfg(test)]
mod tests;
