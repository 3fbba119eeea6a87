//! Administration: everything over HTTP that changes the worker's state or costs it much, on a listener of its own.
//!
//! Invariant: [`guard`] stands before every route, mounted ones too: POST only (GET for profiles), a bearer token (or, without one, a
//! program on this machine that is no browser), a bounded body, and one event at the tracing target `audit` per call.
//! The connections are those of `serve.rs`, bounded in number and time. The calls themselves are the service's and the
//! composition root's ([`AdminHooks`]); here they are translated.

mod calls;
mod config;
mod guard;
pub mod lost_nodes;
pub(crate) mod metrics;
#[cfg(feature = "object")]
pub mod orphans;
mod token;

use std::time::Duration;

use axum::Router;
use prometheus::Registry;

pub use calls::{AdminHooks, Control};
pub use config::AdminConfig;
pub use token::{InvalidToken, Token};

use super::serve::{self, HttpConfig};
use crate::listeners::acceptor::{Binding, Names};
use crate::runtime::Tasks;

const NAMES: Names = Names {
    listener: "admin",
    accepting: "admin accept",
    connection: "http connection",
    limit: "16, which is no key",
};

/// Calls at once: people and their scripts; from accept to the last byte of the answer, since nothing here waits for data to
/// move.
const CONFIG: HttpConfig = HttpConfig {
    max_connections: 16,
    opening_timeout: Duration::from_secs(10),
    profiles: true,
    request_timeout: Duration::from_secs(30),
    connections_max: Some(CONNECTIONS_MAX),
};

/// Connections of the listener, with those whose head is being read.
pub(crate) const CONNECTIONS_MAX: usize = 64;

/// The administration's listener.
#[derive(Debug)]
pub struct AdminServer;

impl AdminServer {
    /// Serves on `binding` in tasks of `tasks` until they are cancelled. Callers must show `token`; without one only those
    /// on this machine are heard. `mounted` are the routes of other parts: they are guarded as the own ones, so they
    /// need be nothing but handlers of POST below `/admin/`, or of GET below `/debug/`.
    ///
    /// # Errors
    /// When `registry` has its metrics already.
    pub fn start(
        binding: impl Into<Binding>,
        token: Option<Token>,
        hooks: AdminHooks,
        mounted: Router,
        registry: &Registry,
        tasks: &Tasks,
    ) -> prometheus::Result<()> {
        let metrics = metrics::AdminMetrics::new(registry)?;
        for result in guard::RESULTS {
            metrics.calls.with_label_values(&[result]); // there from the start, so that a rate of them is one
        }
        let router = calls::router(hooks).merge(mounted);
        let counts = (metrics.connections.clone(), metrics.closed.clone());
        let router = guard::protect(router, token, metrics);
        serve::start(NAMES, CONFIG, binding.into(), router, counts, tasks);
        Ok(())
    }
}
