//! Administration: everything over HTTP that changes the worker's state, on a listener of its own.
//!
//! Invariant: [`guard`] stands before every route, mounted ones too: POST only, a bearer token (or, without one, a
//! program on this machine that is no browser), a bounded body, and one event at the tracing target `audit` per call.
//! The connections are those of `serve.rs`, bounded in number and time. The calls themselves are the service's and the
//! composition root's ([`AdminHooks`]); here they are translated.

mod calls;
mod config;
mod guard;
mod token;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use prometheus::{IntCounterVec, IntGauge, Registry};

pub use config::AdminConfig;
pub use token::{InvalidToken, Token};

use super::serve::{self, HttpConfig};
use crate::listeners::acceptor::{Binding, Names};
use crate::metrics;
use crate::runtime::Tasks;
use crate::service::Service;

const NAMES: Names = Names { listener: "admin", accepting: "admin accept", connection: "http connection" };

/// Connections at once: people and their scripts.
const CONNECTIONS_MAX: usize = 16;

/// From accept to the last byte of the answer. Nothing here waits for data to move.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// A call with one text that can be refused with reasons.
pub type TextCall = Arc<dyn Fn(&str) -> Result<(), String> + Send + Sync>;

/// Replaces the tags; the error names the one that is none.
pub type SetTags = Arc<dyn Fn(Vec<String>) -> Result<(), String> + Send + Sync>;

/// Reads the configuration again: keys that are in effect now, and keys that wait for a start. The error is everything
/// that is wrong with it.
pub type Reload = Arc<dyn Fn() -> Result<(Vec<String>, Vec<String>), String> + Send + Sync>;

/// What the calls ask of the rest of the worker.
#[derive(Clone)]
pub struct AdminHooks {
    /// Decommissioning, flushing, purging.
    pub service: Arc<Service>,
    /// Replaces the configured tags.
    pub set_tags: SetTags,
    /// Replaces the log filter.
    pub set_log_filter: TextCall,
    /// Reads the configuration again.
    pub reload: Reload,
}

impl fmt::Debug for AdminHooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AdminHooks")
    }
}

/// The administration's listener.
#[derive(Debug)]
pub struct AdminServer;

metrics::table! {
    #[derive(Clone)]
    pub(crate) struct AdminMetrics {
        connections: IntGauge = "admin_connection_number", "connections of the administration now open";
        calls: IntCounterVec["result"] = "admin_calls_total", "administration calls, by result";
    }
}

impl AdminServer {
    /// Serves on `binding` in tasks of `tasks` until they are cancelled. Callers must show `token`; without one only those
    /// on this machine are heard. `mounted` are the routes of other parts: they are guarded as the own ones, so they
    /// need be nothing but handlers of POST below `/admin/`.
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
        let metrics = AdminMetrics::new(registry)?;
        for result in guard::RESULTS {
            metrics.calls.with_label_values(&[result]); // there from the start, so that a rate of them is one
        }
        let router = calls::router(hooks).merge(mounted);
        let connections = metrics.connections.clone();
        let router = guard::protect(router, token, metrics);
        let config = HttpConfig { max_connections: CONNECTIONS_MAX, request_timeout: REQUEST_TIMEOUT };
        serve::start(NAMES, config, binding.into(), router, connections, tasks);
        Ok(())
    }
}
