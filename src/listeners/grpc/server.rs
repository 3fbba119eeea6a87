//! Connections of the gRPC port.
//!
//! hyper's HTTP/2 server is driven directly, because tonic's own does not offer its frames, nor
//! windows per connection. Calls are in `router`, accepting in [`crate::listeners::acceptor`].
//!
//! Invariant: connections, and their total of streams and receive windows, are bounded. Every task
//! belongs to the given group and ends after a close: connections after a GOAWAY and at most the
//! drain deadline. An evicted connection gets a GOAWAY and a shorter deadline if few others are
//! leaving, and is aborted otherwise. Its client retries on a new one. A connection without a call
//! also ends if its peer does not answer.

use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::sync::Semaphore;
use tonic::service::{Routes, RoutesBuilder};
use tracing::{debug, info};

use super::calls::convert::LISTENER;
use super::calls::internal::InternalCalls;
use super::calls::shuffle::ShuffleCalls;
use super::config::GrpcConfig;
use super::metrics::GrpcMetrics;
use super::router::{Caller, Router};
use super::transport::coalescing::{Buffers, CoalescingStream, CoalescingWriter, coalescing};
use super::transport::progress::{self, CallDeadlines, Tails};
use super::transport::request_collector::RequestHeap;

use timer::ConnectionTimer;

use crate::clock::timeout;
use crate::listeners::CLOSING_REST;
use crate::listeners::acceptor::{Acceptor, Binding, Connection, ListenerNames, ProtocolStart, Stream};
use crate::listeners::connection_limiter::{ConnectionState, LEAVING_DEADLINE};
use crate::listeners::shares::{Share, ShareBudget, ShareLimits};
use crate::proto::shuffle_server_internal_server::ShuffleServerInternalServer;
use crate::proto::shuffle_server_server::ShuffleServerServer;
use crate::runtime::Tasks;
use crate::service::{HEAP_WAIT, Reads, Service};
use uniffle_base::budget::memory_plan::{STREAMS_MIN, WINDOW_BYTES_MIN};

const NAMES: ListenerNames = ListenerNames {
    listener: LISTENER,
    accepting: "grpc accept",
    connection: "grpc connection",
    limit: "grpc.max_connections",
};
/// Time for a connection's calls to end after GOAWAY.
const DRAIN_DEADLINE: Duration = Duration::from_secs(10);
/// Pause between keep-alive pings.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(60);
/// Time for the answer to a keep-alive ping.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(20);
/// Smallest frame size that the protocol allows to announce (RFC 9113 §6.5.2).
const FRAME_BYTES_MIN: u32 = 16_384;
/// Minimum limit of calls cancelled before hyper has processed them. Equal to h2's own limit.
const CANCELLED_MIN: usize = 20;
/// Minimum limit of streams ended for a client's errors over the life of a connection. Equal to
/// h2's own limit.
const ERRORS_MIN: usize = 1024;
/// Limit of streams ended for errors, per stream that the connection may have at once.
const ERRORS_PER_STREAM: usize = 4;
/// Response bytes that may wait in one stream. They are slices of memory that is accounted for
/// elsewhere.
const SEND_BUFFER_BYTES: usize = 1 << 20;

/// The gRPC listener.
#[derive(Debug)]
pub struct GrpcServer {
    router: Arc<Router>,
    windows: ShareBudget,
    streams: ShareBudget,
    buffers: Arc<Buffers>,
}

impl GrpcServer {
    /// Serves on `binding` until `tasks` are closed. Returns at once. `routes` has services of
    /// other modules (the embedded coordinator) or none. The shuffle server's own are added here.
    pub fn start(
        config: GrpcConfig,
        binding: impl Into<Binding>,
        mut routes: RoutesBuilder,
        service: Arc<Service>,
        tasks: Tasks,
        metrics: GrpcMetrics,
    ) {
        let calls = ShuffleCalls::new(Arc::clone(&service), metrics.transit().sorted.clone());
        let shuffle = ShuffleServerServer::new(calls);
        let internal = InternalCalls::new(Arc::clone(&service), &config);
        let internal = ShuffleServerInternalServer::new(internal);
        routes.add_service(shuffle);
        routes.add_service(internal);
        let routes: Routes = routes.routes().prepare();

        let acceptor = Acceptor {
            names: NAMES,
            binding: binding.into(),
            connections_max: config.connections_max,
            closed: metrics.refused_connections().clone(),
            open: vec![metrics.connections().clone()],
            opening_deadline: config.opening_deadline,
            begins: ProtocolStart::Http2,
            cores: None,
            tasks: tasks.clone(),
        };
        let windows = ShareLimits { least: WINDOW_BYTES_MIN, most: config.connection_window_bytes };
        let windows = ShareBudget::new(config.window_budget_bytes, config.connections_max, windows);
        let streams = ShareLimits { least: STREAMS_MIN, most: config.concurrent_streams_max };
        let streams = ShareBudget::new(config.stream_budget, config.connections_max, streams);
        let requests = RequestHeap::new(service.memory().heap(), HEAP_WAIT);
        let router = Arc::new(Router { config, service, routes, metrics, tasks, requests });
        let server = Arc::new(Self { router, windows, streams, buffers: Arc::default() });
        acceptor.start(move |connection| Arc::clone(&server).serve(connection));
    }

    async fn serve(self: Arc<Self>, connection: Connection<Stream>) {
        let Connection { stream, peer, place } = connection;
        let shares = Shares { window: self.windows.take(), streams: self.streams.take() };
        let metrics = &self.router.metrics;
        metrics.set_window_bytes(self.windows.granted());
        let (stream, writer) = coalescing(stream, &self.buffers, shares.cancelled_max());
        if let Err(error) = drive(&self.router, stream, writer, peer, &shares, place.state()).await {
            debug!(%error, "grpc connection ended");
        }
        drop(shares);
        metrics.set_window_bytes(self.windows.granted());
        drop(place);
    }
}

/// A connection's shares of the common budgets.
struct Shares {
    window: Share,
    streams: Share,
}

impl Shares {
    /// Returns how many calls may be cancelled before hyper has processed them: as many as may run
    /// at once.
    fn cancelled_max(&self) -> usize {
        (self.streams.amount() as usize).max(CANCELLED_MIN)
    }
}

/// Drives HTTP/2 until the connection ends, or until a deadline after the listener was closed or
/// the connection evicted.
async fn drive(
    router: &Arc<Router>,
    stream: CoalescingStream<Stream>,
    writer: CoalescingWriter<Stream>,
    peer: SocketAddr,
    shares: &Shares,
    connection_state: &Arc<ConnectionState>,
) -> Result<(), hyper::Error> {
    let mut closing = pin!(router.tasks.closing());
    let caller = Arc::new(Caller {
        peer,
        collector: router.requests.collector(),
        reading: router.service.reads.read_limits(),
        // The other half is for calls that free memory, or need none.
        tickets: Semaphore::new(shares.streams.amount() as usize / 2),
    });
    let tails = Tails::new(router.config.answer_deadline);
    let service = service_fn(|request| Arc::clone(router).call(request, Arc::clone(&caller)));
    let executor = CallExecutor {
        tasks: router.tasks.clone(),
        reads: Arc::clone(&router.service.reads),
        connection_state: Arc::clone(connection_state),
        deadlines: deadlines(&router.config),
        tails: Arc::clone(&tails),
    };
    let connection =
        builder(&router.config, shares, executor).serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    let (deadline, is_stopping) = tokio::select! {
        biased;
        ended = poll_fn(|context| writer.poll(context, connection.as_mut())) => return ended,
        () = closing.as_mut() => (DRAIN_DEADLINE, true),
        () = connection_state.leaving() => (LEAVING_DEADLINE, false),
        () = tails.stuck() => {
            debug!("grpc connection closed: client did not read the rest of a response in time");
            return Ok(());
        }
        () = tails.stalls_others(connection_state, || router.service.reads.has_waiters()) => {
            debug!("grpc connection closed: client does not read the rest of a response, and others wait");
            return Ok(());
        }
    };
    connection.as_mut().graceful_shutdown();
    if is_stopping {
        tails.close();
    }
    let rest = poll_fn(|context| writer.poll(context, connection.as_mut()));
    // Peers that do not acknowledge the GOAWAY in time read nothing, however much they send.
    let is_written = || is_stopping && tails.are_taken() && writer.is_written();
    tokio::select! {
        biased;
        ended = timeout(deadline, rest) => ended.unwrap_or_else(|_elapsed| {
            if is_stopping {
                info!("grpc connection did not drain in time; closing it");
            }
            Ok(())
        }),
        // The peer does not answer, and no running call waits for it. Others wait for a successor.
        () = connection_state.wait_until_idle(if is_stopping { CLOSING_REST } else { LEAVING_DEADLINE }, is_written) => Ok(()),
    }
}

fn deadlines(config: &GrpcConfig) -> CallDeadlines {
    CallDeadlines { call: config.call_deadline, frame: config.frame_deadline, answer: config.answer_deadline }
}

fn builder(config: &GrpcConfig, shares: &Shares, executor: CallExecutor) -> http2::Builder<CallExecutor> {
    let window_bytes = shares.window.amount();
    let stream_bytes = config.stream_window_bytes.min(window_bytes);
    let mut builder = http2::Builder::new(executor);
    builder
        .timer(ConnectionTimer)
        .initial_stream_window_size(stream_bytes)
        .initial_connection_window_size(window_bytes.max(WINDOW_BYTES_MIN))
        // A frame cannot be larger than its stream's window.
        .max_frame_size(config.frame_bytes_max.min(stream_bytes).clamp(FRAME_BYTES_MIN, (1 << 24) - 1))
        .max_concurrent_streams(shares.streams.amount())
        .max_pending_accept_reset_streams(shares.cancelled_max())
        .max_local_error_reset_streams(ERRORS_MIN.max(ERRORS_PER_STREAM * shares.streams.amount() as usize))
        .max_send_buf_size(SEND_BUFFER_BYTES)
        .keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT);
    builder
}

/// Runs a connection's calls as tasks of the group, each with a deadline. hyper does not poll a
/// body while the peer reads nothing, so only an outer task can abort a stalled response and free
/// its memory. A call ends when HTTP/2 has its last bytes; the connection then watches those
/// ([`Tails`]).
#[derive(Debug, Clone)]
struct CallExecutor {
    tasks: Tasks,
    reads: Arc<Reads>,
    connection_state: Arc<ConnectionState>,
    deadlines: CallDeadlines,
    tails: Arc<Tails>,
}

impl<F> hyper::rt::Executor<F> for CallExecutor
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, call: F) {
        let request = self.connection_state.request();
        let reads = Arc::clone(&self.reads);
        let is_waited_for = move || reads.has_waiters();
        // A call is some KiB large and would be moved by each wrapper.
        let call = Box::pin(call);
        let bounded = progress::bounded(self.deadlines, Arc::clone(&self.tails), is_waited_for, call);
        self.tasks.spawn("grpc stream", async move {
            if !bounded.await {
                debug!("grpc stream aborted: client did not read the response in time");
            }
            drop(request);
        });
    }
}

mod timer {
    #![expect(clippy::disallowed_types, reason = "hyper's interface names the standard library's type")]

    use std::pin::Pin;
    use std::task::{Context, Poll};
    use std::time::{Duration, Instant};

    use hyper::rt::{Sleep, Timer};
    use pin_project_lite::pin_project;

    use crate::clock;

    /// Provides hyper with HTTP/2 timers (keep-alive) on the clock of the process, so that a pause
    /// of this process does not close a peer.
    #[derive(Debug, Clone, Copy)]
    pub(super) struct ConnectionTimer;

    pin_project! {
        /// A sleep of [`clock`] as hyper's type.
        struct ProcessSleep {
            #[pin]
            sleep: clock::Sleep,
        }
    }

    impl Future for ProcessSleep {
        type Output = ();

        fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
            self.project().sleep.poll(context)
        }
    }

    impl Sleep for ProcessSleep {}

    impl Timer for ConnectionTimer {
        fn sleep(&self, duration: Duration) -> Pin<Box<dyn Sleep>> {
            Box::pin(ProcessSleep { sleep: clock::sleep(duration) })
        }

        fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn Sleep>> {
            Box::pin(ProcessSleep { sleep: clock::sleep_until(deadline.into()) })
        }

        fn now(&self) -> Instant {
            clock::Instant::now().into()
        }
    }
}
