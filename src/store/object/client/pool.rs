//! Pool of idle connections to the store.
//!
//! Invariant: an open connection is either in the pool or used by one request. It returns to the
//! pool only after the whole response was read; otherwise the next request would wait for it.

use hyper::client::conn::http1::SendRequest;
use object_store::client::HttpRequestBody;
use parking_lot::Mutex;
use prometheus::IntGauge;
use std::time::Duration;
use tokio::sync::oneshot;

use crate::clock::Instant;

/// Connections that were idle for longer are dropped, because servers close idle connections.
const IDLE_MAX: Duration = Duration::from_secs(20);

/// Scheme, host and port of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ServerOrigin {
    pub(super) is_encrypted: bool,
    pub(super) host: String,
    pub(super) port: u16,
}

impl ServerOrigin {
    /// Returns the origin of an absolute address.
    pub(super) fn of(uri: &http::Uri) -> Option<Self> {
        let is_encrypted = uri.scheme_str() == Some("https");
        let port = uri.port_u16().unwrap_or(if is_encrypted { 443 } else { 80 });
        Some(Self { is_encrypted, host: uri.host()?.to_owned(), port })
    }
}

/// An open connection. Its task ends on drop.
pub(super) struct StoreConnection {
    pub(super) sender: SendRequest<HttpRequestBody>,
    pub(super) origin: ServerOrigin,
    /// Ends the task of the connection on drop.
    pub(super) _alive: Alive,
}

/// Counts an open connection, and ends its task on drop.
pub(super) struct Alive {
    pub(super) _end: oneshot::Sender<()>,
    pub(super) count: IntGauge,
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.count.dec();
    }
}

/// Idle connections. The most recently used connection is the last.
pub(super) struct ConnectionPool {
    idle: Mutex<Vec<(StoreConnection, Instant)>>,
    max: usize,
}

impl std::fmt::Debug for ConnectionPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("idle", &self.idle.lock().len()).finish_non_exhaustive()
    }
}

impl ConnectionPool {
    /// Creates a pool of at most `max` connections.
    pub(super) fn new(max: usize) -> Self {
        Self { idle: Mutex::new(Vec::new()), max }
    }

    /// Returns the most recently used connection to `origin`.
    pub(super) fn take(&self, origin: &ServerOrigin) -> Option<StoreConnection> {
        let mut idle = self.idle.lock();
        idle.retain(|(connection, since)| !connection.sender.is_closed() && since.elapsed() < IDLE_MAX);
        let at = idle.iter().rposition(|(connection, _)| connection.origin == *origin)?;
        Some(idle.remove(at).0)
    }

    /// Adds `connection`. If the pool is full, closes the connection that was idle longest.
    pub(super) fn put(&self, connection: StoreConnection) {
        if connection.sender.is_closed() {
            return;
        }
        let mut idle = self.idle.lock();
        if idle.len() >= self.max {
            idle.remove(0);
        }
        idle.push((connection, Instant::now()));
    }
}
