//! Connections to the store that wait for their next request.
//!
//! Invariant: a connection is either here, with one request, or gone; it comes back only after the whole answer was read.

use hyper::client::conn::http1::SendRequest;
use object_store::client::HttpRequestBody;
use parking_lot::Mutex;
use prometheus::IntGauge;
use std::time::Duration;
use tokio::sync::oneshot;

use crate::clock::Instant;

/// Servers close connections that are idle; one that waited for longer is not worth the try.
const IDLE_MAX: Duration = Duration::from_secs(20);

/// Who is spoken to: scheme, host and port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Origin {
    pub(super) is_encrypted: bool,
    pub(super) host: String,
    pub(super) port: u16,
}

impl Origin {
    /// Of an absolute address.
    pub(super) fn of(uri: &http::Uri) -> Option<Self> {
        let is_encrypted = uri.scheme_str() == Some("https");
        let port = uri.port_u16().unwrap_or(if is_encrypted { 443 } else { 80 });
        Some(Self { is_encrypted, host: uri.host()?.to_owned(), port })
    }
}

/// An open connection; dropped, its task ends at once.
pub(super) struct Connection {
    pub(super) sender: SendRequest<HttpRequestBody>,
    pub(super) origin: Origin,
    /// Its task watches the other end.
    pub(super) _alive: Alive,
}

/// Counts the connection, and ends its task when it is dropped.
pub(super) struct Alive {
    pub(super) _end: oneshot::Sender<()>,
    pub(super) count: IntGauge,
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.count.dec();
    }
}

/// The idle ones.
pub(super) struct Pool {
    idle: Mutex<Vec<(Connection, Instant)>>,
    max: usize,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("idle", &self.idle.lock().len()).finish_non_exhaustive()
    }
}

impl Pool {
    /// Keeps at most `max`.
    pub(super) fn new(max: usize) -> Self {
        Self { idle: Mutex::new(Vec::new()), max }
    }

    /// The one to `origin` that was used last.
    pub(super) fn take(&self, origin: &Origin) -> Option<Connection> {
        let mut idle = self.idle.lock();
        idle.retain(|(connection, since)| !connection.sender.is_closed() && since.elapsed() < IDLE_MAX);
        let at = idle.iter().rposition(|(connection, _)| connection.origin == *origin)?;
        Some(idle.remove(at).0)
    }

    /// Keeps `connection` for the next request, instead of the one that waits the longest when there is no room.
    pub(super) fn put(&self, connection: Connection) {
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
