//! The accept loop and the connections of the gRPC port.
//!
//! Not here: calls (`router`). hyper's HTTP/2 server is driven directly, because the hot methods need its frames and
//! each connection its own windows; tonic's own server offers neither. An HTTP/2 receiver of our own was judged by
//! measurement and not built: it would win 6 to 10 % end to end (README, "What was tried and dropped").
//!
//! Invariant: connections, the streams and the receive windows of all are bounded; every task belongs to the group
//! handed in and ends after it was told to close, connections after a GOAWAY and at most the drain deadline.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;

use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus::Registry;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Duration, Instant, sleep, timeout};
use tonic::service::{Routes, RoutesBuilder};
use tracing::{debug, info, warn};

use super::GrpcConfig;
use super::internal::{InternalCalls, Peer};
use super::metrics::GrpcMetrics;
use super::router::Router;
use super::shares::{STREAMS_MIN, Share, ShareBudget, ShareLimits, WINDOW_BYTES_MIN};
use super::shuffle::ShuffleCalls;

use crate::proto::shuffle_server_internal_server::ShuffleServerInternalServer;
use crate::proto::shuffle_server_server::ShuffleServerServer;
use crate::runtime::{Handover, Tasks};
use crate::service::Service;
use crate::tls::TlsAcceptor;

/// Pause after a failed accept (EMFILE and the like), so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Refusals and failures of the accept loop are logged at most this often.
const WARN_INTERVAL: Duration = Duration::from_secs(10);
/// Smallest frame size the protocol lets us announce (RFC 9113 §6.5.2).
const FRAME_BYTES_MIN: u32 = 16_384;
/// Response bytes that may wait in one stream. They are slices of memory that is accounted for elsewhere.
const SEND_BUFFER_BYTES: usize = 1 << 20;

/// The gRPC server on one bound listener.
#[derive(Debug)]
pub struct GrpcServer {
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    router: Arc<Router>,
    windows: ShareBudget,
    streams: ShareBudget,
    connections: Arc<Semaphore>,
    tasks: Tasks,
    handover: Handover,
    kept: Vec<std::net::TcpStream>,
}

impl GrpcServer {
    /// A server that will accept on `listener`. `routes` carries services of other modules (the embedded
    /// coordinator) or nothing; the shuffle server's own are added here.
    ///
    /// # Errors
    /// When a metric name is taken in `registry`.
    pub fn new(
        config: GrpcConfig,
        listener: TcpListener,
        mut routes: RoutesBuilder,
        service: Arc<Service>,
        tasks: Tasks,
        registry: &Registry,
    ) -> prometheus::Result<Self> {
        let small = config.small_message_bytes_max;
        let metrics = GrpcMetrics::new(registry)?;
        let calls = ShuffleCalls::new(Arc::clone(&service), metrics.transit.sorted.clone());
        let shuffle = ShuffleServerServer::new(calls);
        let internal = InternalCalls::new(Arc::clone(&service), config.decommission_by.clone());
        let internal = ShuffleServerInternalServer::new(internal);
        // Answers are not limited here: a bitmap of a large shuffle may be larger than any request.
        routes.add_service(shuffle.max_decoding_message_size(small).max_encoding_message_size(usize::MAX));
        routes.add_service(internal);
        let routes: Routes = routes.routes().prepare();

        let windows = ShareLimits { least: WINDOW_BYTES_MIN, most: config.connection_window_bytes };
        let windows = ShareBudget::new(config.window_budget_bytes, windows);
        let streams = ShareLimits { least: STREAMS_MIN, most: config.concurrent_streams_max };
        let streams = ShareBudget::new(config.stream_budget, streams);
        let connections = Arc::new(Semaphore::new(config.connections_max.min(Semaphore::MAX_PERMITS)));
        let router = Arc::new(Router { config, service, routes, metrics, tasks: tasks.clone() });
        let (handover, kept) = (Handover::default(), Vec::new());
        Ok(Self { listener, tls: None, router, windows, streams, connections, tasks, handover, kept })
    }

    /// Serves the connections `kept` by a predecessor, and leaves those of its own that have said nothing yet to
    /// `handover` when it closes.
    #[must_use]
    pub fn with_handover(self, handover: Handover, kept: Vec<std::net::TcpStream>) -> Self {
        Self { handover, kept, ..self }
    }

    /// Speaks TLS, and nothing else.
    #[must_use]
    pub fn with_tls(self, tls: Option<TlsAcceptor>) -> Self {
        Self { tls, ..self }
    }

    /// Starts accepting; returns at once. Ends with the task group.
    pub fn start(self) {
        let tasks = self.tasks.clone();
        tasks.spawn("grpc accept", self.accept());
    }

    async fn accept(mut self) {
        let mut warnings = Warnings::default();
        for stream in std::mem::take(&mut self.kept) {
            let socket = stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream));
            match socket {
                Ok(socket) => self.open(socket, &mut warnings),
                Err(error) => debug!(%error, "a connection of the predecessor cannot be polled"),
            }
        }
        let mut closing = pin!(self.tasks.closing());
        loop {
            let accepted = tokio::select! {
                biased;
                () = closing.as_mut() => break,
                accepted = self.listener.accept() => accepted,
            };
            match accepted {
                Ok((socket, _peer)) => self.open(socket, &mut warnings),
                Err(error) => {
                    if let Some(count) = warnings.take() {
                        warn!(%error, count, "accepting grpc connections fails");
                    }
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    /// Hands `socket` to a task of its own, or closes it when there are too many.
    fn open(&self, socket: TcpStream, warnings: &mut Warnings) {
        let Ok(permit) = Arc::clone(&self.connections).try_acquire_owned() else {
            self.router.metrics.refused_connection();
            if let Some(count) = warnings.take() {
                let max = self.router.config.connections_max;
                warn!(max, count, "too many grpc connections, closing new ones");
            }
            return;
        };
        let router = Arc::clone(&self.router);
        let (windows, streams) = (self.windows.clone(), self.streams.clone());
        let handover = self.handover.clone();
        let tls = self.tls.clone();
        self.tasks.spawn("grpc connection", async move {
            let shares = Shares { window: windows.take(), streams: streams.take() };
            let counted = router.metrics.connection();
            router.metrics.set_window_bytes(windows.given());
            if let Err(error) = serve(&router, tls, socket, &shares, &handover).await {
                debug!(%error, "grpc connection ended");
            }
            drop(shares);
            router.metrics.set_window_bytes(windows.given());
            drop((counted, permit));
        });
    }
}

/// What a connection has of the budgets of all.
struct Shares {
    window: Share,
    streams: Share,
}

/// Serves one connection until it ends, or until the drain deadline after the listener was told to close.
async fn serve(
    router: &Arc<Router>,
    tls: Option<TlsAcceptor>,
    socket: TcpStream,
    shares: &Shares,
    handover: &Handover,
) -> Result<(), Box<dyn std::error::Error>> {
    socket.set_nodelay(true)?;
    let peer = Peer(socket.peer_addr()?);
    // hyper waits for a preface without limit; a peer that never says anything is not worth a slot.
    let mut first_byte = [0];
    let spoken = timeout(router.config.first_byte_deadline, socket.peek(&mut first_byte));
    tokio::select! {
        biased;
        () = router.tasks.closing() => {
            handover.keep(socket);
            return Ok(());
        }
        spoken = spoken => if spoken.map_err(silent)?? == 0 {
            return Ok(());
        },
    }
    match tls {
        None => drive(router, socket, peer, shares).await,
        Some(tls) => drive(router, tls.accept(socket).await?, peer, shares).await,
    }
}

/// HTTP/2 on a stream whose peer has begun to speak.
async fn drive(
    router: &Arc<Router>,
    stream: impl AsyncRead + AsyncWrite + Unpin,
    peer: Peer,
    shares: &Shares,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut closing = pin!(router.tasks.closing());
    let service = service_fn(|request| Arc::clone(router).call(request, peer));
    let connection =
        builder(&router.config, shares, &router.tasks).serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    tokio::select! {
        biased;
        ended = connection.as_mut() => return Ok(ended?),
        () = closing.as_mut() => {}
    }
    connection.as_mut().graceful_shutdown();
    match timeout(router.config.drain_deadline, connection).await {
        Ok(ended) => Ok(ended?),
        Err(_elapsed) => {
            info!("grpc connection did not drain in time, closing it");
            Ok(())
        }
    }
}

fn silent(_: tokio::time::error::Elapsed) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the peer said nothing")
}

fn builder(config: &GrpcConfig, shares: &Shares, tasks: &Tasks) -> http2::Builder<TaskExecutor> {
    let window_bytes = shares.window.amount();
    let stream_bytes = config.stream_window_bytes.min(window_bytes);
    let executor = TaskExecutor { tasks: tasks.clone(), stream_deadline: config.stream_deadline };
    let mut builder = http2::Builder::new(executor);
    builder
        .timer(TokioTimer::new())
        .initial_stream_window_size(stream_bytes)
        .initial_connection_window_size(window_bytes.max(WINDOW_BYTES_MIN))
        // A frame cannot be larger than its stream's window.
        .max_frame_size(config.frame_bytes_max.min(stream_bytes).clamp(FRAME_BYTES_MIN, (1 << 24) - 1))
        .max_concurrent_streams(shares.streams.amount())
        .max_send_buf_size(SEND_BUFFER_BYTES)
        .keep_alive_interval(config.keep_alive_interval)
        .keep_alive_timeout(config.keep_alive_timeout);
    builder
}

/// Runs a connection's streams as tasks of the group, each with an end: hyper does not ask a body for more while the
/// peer takes nothing, so only from out here can a stalled answer be given up and its memory be freed.
#[derive(Debug, Clone)]
struct TaskExecutor {
    tasks: Tasks,
    stream_deadline: Duration,
}

impl<F> hyper::rt::Executor<F> for TaskExecutor
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, future: F) {
        let bounded = timeout(self.stream_deadline, future);
        self.tasks.spawn("grpc stream", async move {
            if bounded.await.is_err() {
                debug!("grpc stream gave up: its answer was not taken in time");
            }
        });
    }
}

/// Counts events and says when the next line may be logged.
#[derive(Debug, Default)]
pub(super) struct Warnings {
    count: u64,
    last: Option<Instant>,
}

impl Warnings {
    /// One more event; `Some(events since the last line)` when a line is due.
    pub(super) fn take(&mut self) -> Option<u64> {
        self.count += 1;
        if self.last.is_some_and(|last| last.elapsed() < WARN_INTERVAL) {
            return None;
        }
        self.last = Some(Instant::now());
        Some(std::mem::take(&mut self.count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn warnings_are_counted_and_rarely_said() {
        let mut warnings = Warnings::default();
        assert_eq!(warnings.take(), Some(1));
        assert_eq!((warnings.take(), warnings.take()), (None, None));
        tokio::time::advance(WARN_INTERVAL).await;
        assert_eq!(warnings.take(), Some(3));
    }
}
