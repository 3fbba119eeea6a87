//! Connections of the HTTP listener, bounded in number, time and size.
//!
//! A connection carries one request and lives for at most the request timeout, accept to last byte: that bounds slow
//! writers and slow readers alike with one timer, and scrapes are too rare for keep-alive to matter. A request that is
//! asked to take long (a profile) moves its [`Deadline`].

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::http::Request;
use axum::{Extension, Router};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use prometheus::IntGauge;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep_until};
use tower::ServiceExt as _;

use super::HttpConfig;
use crate::runtime::Tasks;
use crate::tls::TlsAcceptor;

/// Request line and headers; also bounds the URL. Browsers and scrapers stay below 2 KiB.
const HEAD_BYTES_MAX: usize = 8 << 10;

/// Header lines of a request.
const HEADERS_MAX: usize = 64;

/// hyper's buffer per connection: twice the head, above its minimum of 8 KiB.
const BUFFER_BYTES_MAX: usize = 2 * HEAD_BYTES_MAX;

/// Pause after a failed accept: out of descriptors is not cured by asking again at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What a connection gets to finish its answer after the group was cancelled.
const STOP_GRACE: Duration = Duration::from_secs(1);

/// Who asks; in the extensions of every request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Peer(pub(super) SocketAddr);

/// The task that accepts connections and starts one task for each.
pub(super) struct Acceptor {
    pub(super) listener: TcpListener,
    pub(super) tls: Option<TlsAcceptor>,
    pub(super) config: HttpConfig,
    pub(super) router: Router,
    pub(super) connections: IntGauge,
    pub(super) tasks: Tasks,
}

impl Acceptor {
    /// Accepts until the tasks are cancelled.
    pub(super) async fn run(self) {
        tokio::select! {
            biased;
            () = self.tasks.cancelled() => {}
            () = self.accept() => {}
        }
    }

    async fn accept(&self) {
        let permits = Arc::new(Semaphore::new(self.config.max_connections));
        loop {
            let Ok(permit) = Arc::clone(&permits).acquire_owned().await else {
                return; // never: nobody closes the semaphore
            };
            match self.listener.accept().await {
                Ok((stream, peer)) => {
                    let place = Place::take(&self.connections, permit);
                    let timeout = self.config.request_timeout;
                    let router = self.router.clone().layer(Extension(Peer(peer)));
                    let exchange =
                        Exchange { stream, tls: self.tls.clone(), router, tasks: self.tasks.clone() };
                    let served = exchange.run(timeout, place);
                    self.tasks.spawn("http connection", served);
                }
                Err(error) => {
                    tracing::warn!(%error, "http accept failed");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

/// One of the connections the listener may have; given back on drop.
struct Place {
    connections: IntGauge,
    _permit: OwnedSemaphorePermit,
}

impl Place {
    fn take(connections: &IntGauge, permit: OwnedSemaphorePermit) -> Self {
        connections.inc();
        Self { connections: connections.clone(), _permit: permit }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.connections.dec();
    }
}

/// When a connection is cut. Requests find it among their extensions.
#[derive(Debug, Clone)]
pub(super) struct Deadline(Arc<Mutex<Instant>>);

impl Deadline {
    fn after(timeout: Duration) -> Self {
        Self(Arc::new(Mutex::new(Instant::now() + timeout)))
    }

    /// Gives the request more time: what it was asked to take.
    pub(super) fn extend(&self, by: Duration) {
        *self.0.lock() += by;
    }

    async fn passed(&self) {
        loop {
            let until = *self.0.lock();
            if Instant::now() >= until {
                return;
            }
            sleep_until(until).await;
        }
    }
}

/// One connection: a handshake if there is TLS, a request, an answer.
struct Exchange {
    stream: TcpStream,
    tls: Option<TlsAcceptor>,
    router: Router,
    tasks: Tasks,
}

impl Exchange {
    async fn run(self, timeout: Duration, _place: Place) {
        let Self { stream, tls, router, tasks } = self;
        let deadline = Deadline::after(timeout);
        let served = async {
            match tls {
                None => answer(stream, router, &deadline).await,
                Some(tls) => answer(tls.accept(stream).await?, router, &deadline).await,
            }
        };
        let stopped = async {
            tasks.cancelled().await;
            tokio::time::sleep(STOP_GRACE).await;
        };
        // Whatever ends first drops the connection; a peer's bad manners are no news.
        tokio::select! {
            biased;
            result = served => match result {
                Ok(()) => {}
                Err(error) => tracing::debug!(%error, "http connection"),
            },
            () = deadline.passed() => tracing::debug!("http connection timed out"),
            () = stopped => {}
        }
    }
}

async fn answer(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    router: Router,
    deadline: &Deadline,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let service = service_fn(|mut request: Request<Incoming>| {
        request.extensions_mut().insert(deadline.clone());
        router.clone().oneshot(request)
    });
    hyper::server::conn::http1::Builder::new()
        .keep_alive(false)
        .max_header_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .max_buf_size(BUFFER_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), service)
        .await?;
    Ok(())
}
