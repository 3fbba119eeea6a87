//! Administration over HTTP, on a listener of its own: calls that change state or are expensive.
//!
//! The service and the composition root ([`AdminHooks`]) implement the calls. `serve.rs` bounds the
//! connections in number and time.
//! Invariant: [`guard`] checks every route, including mounted ones. It requires POST (GET for
//! profiles), and a bearer token or a local caller that is not a browser. It bounds the body and
//! emits one event with the tracing target `audit` per call.

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

use super::serve::{self, ConnectionCounts, HttpConfig};
use crate::listeners::acceptor::{Binding, Names};
use crate::runtime::Tasks;

const NAMES: Names = Names {
    listener: "admin",
    accepting: "admin accept",
    connection: "http connection",
    limit: "16, which is no key",
};

/// Limits of the listener. Few concurrent calls are enough for people and scripts, and no call
/// waits for data to be moved.
const CONFIG: HttpConfig = HttpConfig {
    max_connections: 16,
    opening_timeout: Duration::from_secs(10),
    profiles: true,
    request_timeout: Duration::from_secs(30),
    connections_max: Some(CONNECTIONS_MAX),
};

/// Maximum connections of the listener, including those that are still sending a request head.
pub(crate) const CONNECTIONS_MAX: usize = 64;

/// The administration listener.
#[derive(Debug)]
pub struct AdminServer;

impl AdminServer {
    /// Serves on `binding` in tasks of `tasks` until they are cancelled.
    ///
    /// Callers must send `token`. Without a token only local callers are accepted. `mounted` has
    /// the routes of other parts, which must be POST below `/admin/` or GET below `/debug/`. They
    /// get the same access checks.
    ///
    /// # Errors
    /// If `registry` already has the metrics.
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
            metrics.calls.with_label_values(&[result]); // exported from the start, so that rate() sees the first
        }
        let router = calls::router(hooks).merge(mounted);
        let counts = ConnectionCounts { open: metrics.connections.clone(), closed: metrics.closed.clone() };
        let router = guard::protect(router, token, metrics);
        serve::start(NAMES, CONFIG, binding.into(), router, counts, tasks);
        Ok(())
    }
}
