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
use tokio::time::{Instant, sleep_until};
use tower::ServiceExt as _;

use crate::listeners::acceptor::{Acceptor, Binding, Connection, Names, Stream, WhenFull};
use crate::runtime::Tasks;
use crate::schema::kind::{SECOND, count, seconds};
use crate::schema::section;

/// Request line and headers; also bounds the URL. Browsers and scrapers stay below 2 KiB.
const HEAD_BYTES_MAX: usize = 8 << 10;

/// Header lines of a request.
const HEADERS_MAX: usize = 64;

/// hyper's buffer per connection: twice the head, above its minimum of 8 KiB.
const BUFFER_BYTES_MAX: usize = 2 * HEAD_BYTES_MAX;

/// What a connection gets to finish its answer after the group was cancelled.
const STOP_GRACE: Duration = Duration::from_secs(1);

section! {
    /// Bounds of the listener.
    #[table("http", "The HTTP listener.")]
    #[derive(Copy)]
    pub struct HttpConfig {
        /// Connections at once; more wait in the listener's backlog.
        #[key("http.max_connections", count(1..=10_000), Restart)]
        pub max_connections: usize = 64,
        /// A request is answered, from accept to the last byte, within this time.
        #[key("http.request_timeout_sec", seconds(SECOND..=600 * SECOND), Restart)]
        pub request_timeout: Duration = 30 * SECOND,
    }
}

/// Who asks; in the extensions of every request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Peer(pub(super) SocketAddr);

/// Serves `router` on `binding` until the tasks are cancelled; returns at once.
pub(super) fn start(
    names: Names,
    config: HttpConfig,
    binding: Binding,
    router: Router,
    open: IntGauge,
    tasks: &Tasks,
) {
    let acceptor = Acceptor {
        names,
        binding,
        connections_max: config.max_connections,
        when_full: WhenFull::Wait,
        open: vec![open],
        first_byte_deadline: None,
        cores: None,
        tasks: tasks.clone(),
    };
    let tasks = tasks.clone();
    acceptor.start(move |Connection { stream, peer, place }| {
        let (router, tasks) = (router.clone().layer(Extension(Peer(peer))), tasks.clone());
        async move {
            exchange(stream, router, config.request_timeout, &tasks).await;
            drop(place);
        }
    });
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

/// One connection: a request, an answer.
async fn exchange(stream: Stream, router: Router, timeout: Duration, tasks: &Tasks) {
    let deadline = Deadline::after(timeout);
    let stopped = async {
        tasks.cancelled().await;
        tokio::time::sleep(STOP_GRACE).await;
    };
    // Whatever ends first drops the connection; a peer's bad manners are no news.
    tokio::select! {
        biased;
        result = answer(stream, router, &deadline) => if let Err(error) = result {
            tracing::debug!(%error, "http connection");
        },
        () = deadline.passed() => tracing::debug!("http connection timed out"),
        () = stopped => {}
    }
}

async fn answer(stream: Stream, router: Router, deadline: &Deadline) -> hyper::Result<()> {
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
        .await
}
