//! Opens connections to the store: name lookup, TCP, TLS and HTTP/1.1 within one deadline.
//!
//! A task serves each connection. It ends when the connection is dropped, the server closes it, or
//! the client's tasks are cancelled: no connection outlives its owner.

use std::error::Error as _;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::Uri;
use hyper::client::conn::http1;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use prometheus::IntGauge;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{self, ClientConfig};
use tower::ServiceExt as _;

use super::pool::{Alive, ServerOrigin, StoreConnection};
use crate::runtime::Tasks;

/// Idle time before the first TCP probe, which detects a vanished peer.
const KEEPALIVE_TIME: Duration = Duration::from_secs(30);
/// Interval of further probes.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Limit for unread response bytes of one connection.
const READ_BUFFER_BYTES_MAX: usize = 256 << 10;

/// A server that is not authenticated as the store.
#[derive(Debug, thiserror::Error)]
#[error("{authority}: {reason}")]
pub(super) struct Untrusted {
    authority: String,
    reason: String,
}

impl Untrusted {
    /// Returns the reason if a connection to `origin` failed because the server was not
    /// authenticated.
    pub(super) fn of(origin: &ServerOrigin, error: &io::Error) -> Option<Self> {
        let reason = match error.get_ref()?.downcast_ref::<rustls::Error>()? {
            certificate @ rustls::Error::InvalidCertificate(_) => certificate.to_string(),
            rustls::Error::InvalidMessage(_) => "server does not speak TLS".to_owned(),
            _ => return None,
        };
        Some(Self { authority: format!("{}:{}", origin.host, origin.port), reason })
    }
}

/// Opens connections, each served by a task.
#[derive(Debug)]
pub(super) struct Connector {
    tcp: HttpConnector,
    tls: Option<Arc<ClientConfig>>,
    timeout: Duration,
    tasks: Tasks,
    connections: IntGauge,
}

impl Connector {
    /// Creates a connector that counts open connections in `connections`.
    pub(super) fn new(
        tls: Option<Arc<ClientConfig>>,
        timeout: Duration,
        tasks: Tasks,
        connections: IntGauge,
    ) -> Self {
        let mut tcp = HttpConnector::new();
        tcp.set_nodelay(true);
        tcp.set_keepalive(Some(KEEPALIVE_TIME));
        tcp.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
        // The timeout is divided among the addresses of a host, so an address that does not respond
        // leaves time for the next.
        tcp.set_connect_timeout(Some(timeout));
        Self { tcp, tls, timeout, tasks, connections }
    }

    /// Opens a connection to `origin`.
    pub(super) async fn connect(&self, origin: &ServerOrigin) -> io::Result<StoreConnection> {
        let opened = crate::clock::timeout(self.timeout, self.open(origin)).await;
        opened.unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "connect timeout")))
    }

    async fn open(&self, origin: &ServerOrigin) -> io::Result<StoreConnection> {
        let address = format!("http://{}:{}", origin.host, origin.port);
        let address: Uri = address.parse().map_err(io::Error::other)?;
        let stream = self.tcp.clone().oneshot(address).await;
        // The error's own text does not name the cause.
        let stream = stream.map_err(|error| {
            io::Error::other(error.source().map_or_else(|| error.to_string(), ToString::to_string))
        })?;
        let stream = stream.into_inner();
        if !origin.is_encrypted {
            return self.greet(origin, stream).await;
        }
        let Some(tls) = &self.tls else { return Err(io::Error::other("TLS is not configured")) };
        let host = origin.host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(host).map_err(io::Error::other)?;
        let stream = TlsConnector::from(Arc::clone(tls)).connect(name, stream).await?;
        self.greet(origin, stream).await
    }

    async fn greet<S>(&self, origin: &ServerOrigin, stream: S) -> io::Result<StoreConnection>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let mut http = http1::Builder::new();
        http.max_buf_size(READ_BUFFER_BYTES_MAX);
        let (sender, connection) = http.handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        let (end, ended) = oneshot::channel();
        self.connections.inc();
        let alive = Alive { _end: end, count: self.connections.clone() };
        let cancelled = self.tasks.cancelled();
        self.tasks.spawn("object store connection", async move {
            tokio::select! {
                biased;
                () = cancelled => {}
                // The `StoreConnection` was dropped.
                _ = ended => {}
                // The server closed the connection. A pending request gets the error.
                _ = connection => {}
            }
        });
        Ok(StoreConnection { sender, origin: origin.clone(), _alive: alive })
    }
}
