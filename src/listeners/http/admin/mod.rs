//! Administration over HTTP, on a listener of its own: calls that change state or are expensive.
//!
//! The service and the composition root ([`AdminHooks`]) implement the calls. `serve.rs` bounds the
//! connections in number and time.
//! Invariant: [`guard`] checks every route, including mounted ones. It requires POST (GET for
//! profiles), and a bearer token or a local caller that is not a browser. It bounds the body and
//! emits one event with the tracing target `audit` for each call of an admitted caller.

mod calls;
mod guard;
#[cfg(feature = "object")]
pub mod orphans;

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;

use axum::Router;
use prometheus::Registry;

pub use calls::{AdminHooks, Control};
pub(crate) use guard::AdminMetrics;
pub(super) use guard::JAVA_STACKS;
pub use guard::{InvalidToken, Token};

use super::serve::{self, ConnectionCounts, HttpConfig};
use crate::listeners::acceptor::{Binding, ListenerNames};
use crate::runtime::Tasks;
use crate::schema::kind::{ip_address, optional, path, port, secret};
use crate::schema::section;

section! {
    /// Settings of the administration listener.
    #[table(
        "admin",
        "Administration: all HTTP calls that change the worker's state. Disabled without a port; \
         grpc_decommission applies in any case."
    )]
    pub struct AdminConfig {
        /// Port; 0 = any free one. Default: none, administration is disabled.
        #[key("admin.port", optional(port()), Restart, example "19997")]
        pub port: Option<u16> = None,
        /// Listening address; any address except a loopback one requires a token.
        #[key("admin.bind_address", ip_address(), Restart)]
        pub bind_address: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST),
        /// File with the bearer token of callers, at least 16 characters; or set
        /// WORKER_ADMIN_TOKEN. Default: none; local callers need no token.
        #[key("admin.token_file", optional(path()), Restart, example "\"/etc/uniffle-worker/admin.token\"")]
        pub token_file: Option<PathBuf> = None,
        /// The bearer token itself.
        #[env("WORKER_ADMIN_TOKEN", optional(secret("16 to 1024 printable characters", parse_token)))]
        pub token: Option<Token> = None,
    }
}

fn parse_token(text: &str) -> Result<Token, String> {
    Token::parse(text).map_err(|error| error.to_string())
}

const NAMES: ListenerNames = ListenerNames {
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
    /// the routes of other parts, which must be POST below `/admin/`, or GET below `/debug/` or at
    /// [`JAVA_STACKS`]. They get the same access checks.
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
        let metrics = AdminMetrics::new(registry)?;
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
