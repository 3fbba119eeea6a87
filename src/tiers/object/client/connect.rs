//! A connection to the store: name, TCP, TLS, HTTP/1.1, each within the one deadline.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use prometheus::IntGauge;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, lookup_host};
use tokio::sync::oneshot;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{self, ClientConfig};

use super::pool::{Alive, Connection, Origin};
use crate::runtime::Tasks;

/// A connection whose other end is gone without a word is found out after a minute.
const KEEPALIVE: TcpKeepalive =
    TcpKeepalive::new().with_time(Duration::from_secs(30)).with_interval(Duration::from_secs(10));
/// What one connection holds of an answer that nobody takes.
const READ_BUFFER_BYTES_MAX: usize = 256 << 10;

/// A server that does not prove to be the store.
#[derive(Debug, thiserror::Error)]
#[error("{authority}: {reason}")]
pub(super) struct Untrusted {
    authority: String,
    reason: String,
}

impl Untrusted {
    /// The reason of a connection that failed, if it is this one.
    pub(super) fn of(origin: &Origin, error: &io::Error) -> Option<Self> {
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
    pub(super) tls: Option<Arc<ClientConfig>>,
    pub(super) timeout: Duration,
    pub(super) tasks: Tasks,
    pub(super) connections: IntGauge,
}

impl Connector {
    /// A new connection to `origin`.
    pub(super) async fn connect(&self, origin: &Origin) -> io::Result<Connection> {
        let opened = crate::clock::timeout(self.timeout, self.open(origin)).await;
        opened.unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "connect timeout")))
    }

    async fn open(&self, origin: &Origin) -> io::Result<Connection> {
        let stream = dial(origin).await?;
        if !origin.is_encrypted {
            return self.greet(origin, stream).await;
        }
        let Some(tls) = &self.tls else { return Err(io::Error::other("TLS is not configured")) };
        let host = origin.host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(host).map_err(io::Error::other)?;
        let stream = TlsConnector::from(Arc::clone(tls)).connect(name, stream).await?;
        self.greet(origin, stream).await
    }

    async fn greet<S>(&self, origin: &Origin, stream: S) -> io::Result<Connection>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let mut http = http1::Builder::new();
        http.max_buf_size(READ_BUFFER_BYTES_MAX);
        let (sender, connection) = http.handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        let (end, ended) = oneshot::channel();
        self.connections.inc();
        let alive = Alive { end: Some(end), count: self.connections.clone() };
        let cancelled = self.tasks.cancelled();
        self.tasks.spawn("object store connection", async move {
            tokio::select! {
                biased;
                () = cancelled => {}
                // Nobody sends or reads any more.
                _ = ended => {}
                // Who waits for an answer is told; an idle connection may end.
                _ = connection => {}
            }
        });
        Ok(Connection { sender, origin: origin.clone(), _alive: alive })
    }
}

/// The first of the host's addresses that answers.
async fn dial(origin: &Origin) -> io::Result<TcpStream> {
    let host = origin.host.trim_start_matches('[').trim_end_matches(']');
    let mut last = io::Error::new(io::ErrorKind::NotFound, "host name has no address");
    for address in lookup_host((host, origin.port)).await? {
        match TcpStream::connect(address).await {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                SockRef::from(&stream).set_tcp_keepalive(&KEEPALIVE)?;
                return Ok(stream);
            }
            Err(error) => last = io::Error::new(error.kind(), format!("{address}: {error}")),
        }
    }
    Err(last)
}
