//! Connections of the HTTP listeners, bounded in number, time and size.
//!
//! A connection carries one request. Its head has a deadline, and the connection ends at the latest
//! after the request timeout, which bounds slow writers and slow readers. A long request such as a
//! profile extends its [`Deadline`]. hyper itself answers malformed requests, with 400, 414 or 431
//! and no body; the reason is in the log at DEBUG.
//! Invariant: requests with a permit, which health checks do not need, never occupy all
//! connections. A full listener therefore still answers a health check.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{Request, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::{Extension, Router};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use prometheus::{IntCounter, IntGauge};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tower::ServiceExt as _;

use crate::clock::{Instant, sleep_until};
use crate::listeners::acceptor::{Acceptor, Binding, Connection, ListenerNames, ProtocolStart, Stream};
use crate::listeners::connection_limiter::{self, ConnectionState};
use crate::runtime::{BlockingPool, Tasks};
use crate::schema::kind::{SECOND, count, flag, seconds};
use crate::schema::section;

/// Limit of request line and headers, and thus of the URL. Browsers and scrapers need below 2 KiB.
const HEAD_BYTES_MAX: usize = 8 << 10;

/// Maximum number of header lines.
const HEADERS_MAX: usize = 64;

/// Buffer of hyper per connection: twice the head, above its minimum of 8 KiB.
const BUFFER_BYTES_MAX: usize = 2 * HEAD_BYTES_MAX;

/// Prefix of the paths of health checks, which need no permit.
const HEALTH: &str = "/health/";

/// Time to finish an answer after the tasks were cancelled.
const STOP_GRACE: Duration = Duration::from_secs(1);

section! {
    /// Limits of the listener.
    #[table("http", "The HTTP listener.")]
    #[derive(Copy)]
    pub struct HttpConfig {
        /// Concurrent requests; further ones wait. Health checks (/health/...) have a limit of
        /// their own.
        #[key("http.max_connections", count(1..=10_000), Restart)]
        pub max_connections: usize = 64,
        /// Timeout of a new connection's TLS handshake and request head.
        #[key("http.opening_timeout_sec", seconds(SECOND..=600 * SECOND), Restart)]
        pub opening_timeout: Duration = 10 * SECOND,
        /// Serve profiles and task dumps (/debug/...) here to every caller. The administration
        /// listener always serves them.
        #[key("http.profiles", flag(), Restart)]
        pub profiles: bool = false,
        /// Timeout of a request from accept to the last byte of the response.
        #[key("http.request_timeout_sec", seconds(SECOND..=600 * SECOND), Restart)]
        pub request_timeout: Duration = 30 * SECOND,
        /// Maximum connections if descriptors allow fewer than [`HttpConfig::connections_wanted`].
        pub connections_max: Option<usize> = None,
    }
}

/// Number of connections beyond those that serve requests: for request heads and health checks.
const SPARE_CONNECTIONS: usize = 256;

impl HttpConfig {
    /// Returns the maximum number of connections if there are enough descriptors.
    pub(crate) const fn connections_wanted(&self) -> usize {
        self.max_connections + SPARE_CONNECTIONS
    }

    /// Returns the maximum number of connections, and how many of them may serve a request.
    fn limits(&self) -> (usize, usize) {
        match self.connections_max.filter(|max| *max < self.connections_wanted()) {
            Some(max) => (max.max(2), self.max_connections.min((max / 2).max(1))),
            None => (self.connections_wanted(), self.max_connections),
        }
    }
}

/// The caller's address, in the extensions of every request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Peer(pub(super) SocketAddr);

/// Metrics of a listener's connections.
#[derive(Debug)]
pub(super) struct ConnectionCounts {
    pub(super) open: IntGauge,
    pub(super) closed: IntCounter,
}

/// Serves `router` on `binding` until the tasks are cancelled. Returns at once.
pub(super) fn start(
    names: ListenerNames,
    config: HttpConfig,
    binding: Binding,
    router: Router,
    counts: ConnectionCounts,
    tasks: &Tasks,
) {
    let (connections_max, requests_max) = config.limits();
    let acceptor = Acceptor {
        names,
        binding,
        connections_max,
        closed: counts.closed,
        open: vec![counts.open],
        opening_deadline: config.opening_timeout,
        begins: ProtocolStart::ByListener,
        cores: None,
        tasks: tasks.clone(),
    };
    let (permits, tasks) = (Arc::new(Semaphore::new(requests_max)), tasks.clone());
    acceptor.start(move |Connection { stream, peer, place }| {
        let router = router.clone().layer(Extension(Peer(peer)));
        let exchange = Exchange {
            router,
            deadline: Deadline::after(config.request_timeout),
            permits: Arc::clone(&permits),
            connection_state: Arc::clone(place.state()),
            serving: Mutex::default(),
        };
        let tasks = tasks.clone();
        async move {
            exchange.run(stream, &tasks).await;
            drop(place);
        }
    });
}

/// Time at which a connection is closed. It is in the extensions of every request.
#[derive(Debug, Clone)]
pub(super) struct Deadline(Arc<Mutex<Instant>>);

impl Deadline {
    fn after(timeout: Duration) -> Self {
        Self(Arc::new(Mutex::new(Instant::now() + timeout)))
    }

    /// Extends the deadline by the requested duration of a profile.
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

/// A connection with its request and answer.
struct Exchange {
    router: Router,
    deadline: Deadline,
    permits: Arc<Semaphore>,
    connection_state: Arc<ConnectionState>,
    /// Permit of the request, held until the connection ends.
    serving: Mutex<Option<(connection_limiter::Request, Option<OwnedSemaphorePermit>)>>,
}

impl Exchange {
    async fn run(self, stream: Stream, tasks: &Tasks) {
        let stopped = async {
            tasks.cancelled().await;
            crate::clock::sleep(STOP_GRACE).await;
        };
        // The connection is dropped when the first of these ends. Errors of a peer are
        // logged at DEBUG.
        tokio::select! {
            biased;
            result = self.answer(stream) => if let Err(error) = result {
                tracing::debug!(%error, "http connection failed");
            },
            () = self.deadline.passed() => tracing::debug!("http connection timed out"),
            () = stopped => {}
        }
    }

    async fn answer(&self, stream: Stream) -> hyper::Result<()> {
        hyper::server::conn::http1::Builder::new()
            .keep_alive(false)
            .max_header_size(HEAD_BYTES_MAX)
            .max_headers(HEADERS_MAX)
            .max_buf_size(BUFFER_BYTES_MAX)
            .serve_connection(TokioIo::new(stream), service_fn(|request| self.call(request)))
            .await
    }

    /// Handles a request after its head was received.
    async fn call(&self, mut request: Request<Incoming>) -> Result<Response, Infallible> {
        self.connection_state.opened();
        let begun = self.connection_state.request();
        let permit = match request.uri().path().starts_with(HEALTH) {
            true => None,
            false => Arc::clone(&self.permits).acquire_owned().await.ok(),
        };
        *self.serving.lock() = Some((begun, permit));
        request.extensions_mut().insert(self.deadline.clone());
        self.router.clone().oneshot(request).await
    }
}

/// Runs `collect` on a blocking thread, after waiting for a free one of `pool`.
pub(super) async fn run_blocking(
    pool: &BlockingPool,
    collect: impl FnOnce() -> Response + Send + 'static,
) -> Response {
    let failed = |error| (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response();
    pool.run(collect).await.unwrap_or_else(failed)
}
