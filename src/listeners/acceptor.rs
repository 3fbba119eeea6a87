//! Accepts the connections of every listener.
//!
//! It has the common parts: limit and eviction (`connection_limiter`), socket options, the opening
//! deadline, TLS, retries of failed accepts, placement on threads, and the handover to a successor.
//!
//! Invariants: a connection counts until its [`ConnectionSlot`] is dropped or given to another. A
//! connection that has not begun its protocol by the deadline is closed. Nothing is accepted once
//! the tasks are closing. A connection without a first byte is then left to the successor or
//! closed.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{AbortRegistration, Abortable};
use prometheus::{IntCounter, IntGauge};
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::yield_now;
use tokio_rustls::server::TlsStream;
use tokio_util::either::Either;

use crate::clock::sleep;
use crate::metrics::GaugeGuard;
use crate::runtime::{CorePlace, Cores, Handover, Tasks};
use crate::telemetry::LogLimiter;

use super::CLOSING_REST;
use super::connection_limiter::{
    ConnectionActivity, ConnectionGuard, ConnectionLimiter, ConnectionState, closing,
};
use super::http2::FrameScanner;
use super::tls::TlsAcceptor;
use super::tracked_stream::TrackedStream;

/// Pause after a failed accept: retrying at once does not free a descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Divisor and cap of the number of evicted HTTP/2 connections that may finish their calls. Their
/// resources are beyond the budget of the connection limit.
const LEAVING_PART: usize = 16;
const LEAVING_MAX: usize = 16;
/// Interval of the log lines about evicted connections, and about failed accepts, per listener.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Idle time after which the kernel starts to probe a peer.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
/// Interval of probes to a peer that does not answer. The kernel's default number of them ends the
/// connection.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);

/// Source of a listener's connections, and their treatment before the listener sees them.
#[derive(Debug)]
pub struct Binding {
    /// The listening socket.
    pub listener: TcpListener,
    /// Encrypts the connections, if the listener supports that.
    pub tls: Option<TlsAcceptor>,
    /// Collects connections for a successor.
    pub handover: Handover,
    /// Connections inherited from a predecessor.
    pub inherited: Vec<std::net::TcpStream>,
}

impl From<TcpListener> for Binding {
    /// Returns a binding without TLS and inherited connections.
    fn from(listener: TcpListener) -> Self {
        Self { listener, tls: None, handover: Handover::default(), inherited: Vec::new() }
    }
}

/// Names of a listener in the log, of its tasks, and of the key that limits its connections.
#[derive(Debug, Clone, Copy)]
pub(super) struct ListenerNames {
    pub(super) listener: &'static str,
    pub(super) accepting: &'static str,
    pub(super) connection: &'static str,
    pub(super) limit: &'static str,
}

/// Detection of the moment when a connection has begun its protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProtocolStart {
    /// The listener reports it ([`ConnectionState::opened`]).
    ByListener,
    /// By the preface and the first frame of HTTP/2.
    Http2,
}

/// Accepts the connections of one listener.
#[derive(Debug)]
pub(super) struct Acceptor {
    pub(super) names: ListenerNames,
    pub(super) binding: Binding,
    pub(super) connections_max: usize,
    /// Counts connections evicted for others.
    pub(super) closed: IntCounter,
    /// Gauges of open connections, one per metric name.
    pub(super) open: Vec<IntGauge>,
    /// Time for a new connection to begin: first byte, TLS, and the start of the protocol.
    pub(super) opening_deadline: Duration,
    pub(super) begins: ProtocolStart,
    /// Threads that connections are bound to. If `None`, they run on the runtime that starts the
    /// acceptor.
    pub(super) cores: Option<Cores>,
    /// All tasks of the listener.
    pub(super) tasks: Tasks,
}

/// An accepted connection.
#[derive(Debug)]
pub(super) struct Connection<S> {
    pub(super) stream: S,
    pub(super) peer: SocketAddr,
    pub(super) place: ConnectionSlot,
}

/// A stream with or without TLS.
pub(super) type Stream = TrackedStream<Either<TcpStream, TlsStream<TcpStream>>>;

/// A connection's share of the limit, returned on drop.
#[derive(Debug)]
pub(super) struct ConnectionSlot {
    held: ConnectionGuard,
    _open: Vec<GaugeGuard>,
    _core: Option<CorePlace>,
}

impl ConnectionSlot {
    /// Returns the connection's state, which the listener updates.
    pub(super) fn state(&self) -> &Arc<ConnectionState> {
        self.held.state()
    }
}

impl Acceptor {
    /// Starts accepting and returns at once. `serve` runs in one task per connection, after the
    /// first byte and the TLS handshake.
    pub(super) fn start<F>(mut self, serve: impl Fn(Connection<Stream>) -> F + Send + Sync + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let opening = Arc::new(ConnectionSetup {
            tls: self.binding.tls.take(),
            begins: self.begins,
            handover: self.binding.handover.clone(),
            tasks: self.tasks.clone(),
        });
        let (serve, listener) = (Arc::new(serve), self.names.listener);
        self.start_plain(move |connection| {
            let (opening, serve) = (Arc::clone(&opening), Arc::clone(&serve));
            async move {
                let Connection { stream, peer, place } = connection;
                match opening.open(stream, place.state()).await {
                    Ok(Some(stream)) => serve(Connection { stream, peer, place }).await,
                    Ok(None) => {}
                    Err(error) => tracing::debug!(listener, %peer, %error, "connection failed during setup"),
                }
            }
        });
    }

    /// Starts accepting as [`Acceptor::start`], but passes on the plain socket.
    pub(super) fn start_plain<F>(self, serve: impl Fn(Connection<TcpStream>) -> F + Send + Sync + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let tasks = self.tasks.clone();
        tasks.spawn(self.names.accepting, self.accept(Arc::new(serve)));
    }

    async fn accept<F, S>(mut self, serve: Arc<S>)
    where
        F: Future<Output = ()> + Send + 'static,
        S: Fn(Connection<TcpStream>) -> F + Send + Sync + 'static,
    {
        let listener = self.names.listener;
        let leaving_max = match self.begins {
            ProtocolStart::Http2 => (self.connections_max / LEAVING_PART).clamp(1, LEAVING_MAX),
            ProtocolStart::ByListener => 0,
        };
        let limiter = ConnectionLimiter::new(self.connections_max).with_leaving(leaving_max);
        let (closings, failures) = (LogLimiter::new(1, LOG_INTERVAL), LogLimiter::new(1, LOG_INTERVAL));
        let mut inherited = std::mem::take(&mut self.binding.inherited).into_iter();
        let mut stopping = pin!(self.tasks.closing());
        loop {
            let next_inherited = inherited.next();
            // An inherited HTTP/2 connection has sent nothing. One of another protocol counts as
            // begun.
            let has_begun = next_inherited.is_some() && self.begins == ProtocolStart::ByListener;
            let next = async {
                match next_inherited {
                    Some(stream) => inherit(stream),
                    None => self.binding.listener.accept().await,
                }
            };
            let accepted = tokio::select! {
                biased;
                () = stopping.as_mut() => return,
                accepted = next => accepted,
            };
            let (stream, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    if let Some(times) = failures.pass() {
                        tracing::warn!(listener, %error, times, "cannot accept connections; retrying");
                    }
                    sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let (close, registration) = closing();
            let (held, closed) = limiter.take(peer.ip(), close);
            if let Some((stage, idle)) = closed {
                self.note_closed(stage, idle, &closings);
            }
            if has_begun {
                held.state().opened();
                // A request to the predecessor counts as one here.
                drop(held.state().request());
            }
            let connection_state = Arc::clone(held.state());
            let lifetime =
                ConnectionLifetime { connection_state, registration, deadline: self.opening_deadline };
            self.open(stream, peer, held, lifetime, &serve);
            // The connection's task runs before the next accept. A storm of connects must not evict
            // a connection whose request has arrived.
            yield_now().await;
        }
    }

    /// Records that a connection was evicted in `stage`, after `idle` without progress.
    fn note_closed(&self, stage: ConnectionActivity, idle: Duration, closings: &LogLimiter) {
        self.closed.inc();
        if let Some(times) = closings.pass() {
            let (ListenerNames { listener, limit, .. }, most) = (self.names, self.connections_max);
            let text = "connection limit reached; closed the connection that was idle longest";
            tracing::warn!(listener, limit, most, ?stage, ?idle, times, "{text}");
        }
    }

    /// Starts the connection's task, on the least loaded core if there are cores.
    fn open<F, S>(
        &self,
        stream: TcpStream,
        peer: SocketAddr,
        held: ConnectionGuard,
        lifetime: ConnectionLifetime,
        serve: &Arc<S>,
    ) where
        F: Future<Output = ()> + Send + 'static,
        S: Fn(Connection<TcpStream>) -> F + Send + Sync + 'static,
    {
        // Fails if the peer has already disconnected. The next read then fails too.
        if let Err(error) = set_up(&stream) {
            tracing::debug!(%peer, %error, "cannot set socket options");
        }
        let open = self.open.iter().map(GaugeGuard::inc).collect();
        let name = self.names.connection;
        let Some(cores) = &self.cores else {
            let place = ConnectionSlot { held, _open: open, _core: None };
            return self.tasks.spawn(name, lifetime.of(serve(Connection { stream, peer, place })));
        };
        // Deregisters the socket from this runtime, before the core registers it.
        let stream = match stream.into_std() {
            Ok(stream) => stream,
            Err(error) => return tracing::debug!(%peer, %error, "connection failed during setup"),
        };
        let (handle, core) = cores.place();
        let (place, serve) = (ConnectionSlot { held, _open: open, _core: Some(core) }, Arc::clone(serve));
        self.tasks.spawn_on(handle, name, async move {
            match TcpStream::from_std(stream) {
                Ok(stream) => lifetime.of(serve(Connection { stream, peer, place })).await,
                Err(error) => tracing::warn!(%peer, %error, "connection closed: cannot register its socket with the runtime"),
            }
        });
    }
}

/// Lifetime of a connection: it ends by itself, at the opening deadline, or on eviction.
struct ConnectionLifetime {
    connection_state: Arc<ConnectionState>,
    registration: AbortRegistration,
    deadline: Duration,
}

impl ConnectionLifetime {
    async fn of(self, serve: impl Future<Output = ()>) {
        let Self { connection_state, registration, deadline } = self;
        let mut served = pin!(Abortable::new(serve, registration));
        tokio::select! {
            biased;
            _ended = served.as_mut() => return,
            () = sleep(deadline) => {}
        }
        if connection_state.is_open() {
            let _ended = served.await;
        } else {
            tracing::debug!(?deadline, "connection closed: opening timed out");
        }
    }
}

/// Converts a connection that a predecessor accepted.
fn inherit(stream: std::net::TcpStream) -> io::Result<(TcpStream, SocketAddr)> {
    let peer = stream.peer_addr()?;
    stream.set_nonblocking(true)?;
    Ok((TcpStream::from_std(stream)?, peer))
}

fn set_up(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE_IDLE).with_interval(KEEPALIVE_INTERVAL);
    SockRef::from(stream).set_tcp_keepalive(&keepalive)
}

/// Steps of a connection before the listener sees it.
#[derive(Debug)]
struct ConnectionSetup {
    tls: Option<TlsAcceptor>,
    begins: ProtocolStart,
    handover: Handover,
    tasks: Tasks,
}

impl ConnectionSetup {
    /// Opens a connection. Returns `None` if the peer disconnected without a byte, or the listener
    /// closed first. A connection without a byte is then offered to a successor.
    async fn open(
        &self,
        socket: TcpStream,
        connection_state: &Arc<ConnectionState>,
    ) -> io::Result<Option<Stream>> {
        let mut first_byte = [0];
        tokio::select! {
            biased;
            () = self.tasks.closing() => {
                self.handover.keep(socket);
                return Ok(None);
            }
            spoken = socket.peek(&mut first_byte) => if spoken? == 0 {
                return Ok(None);
            },
        }
        let stream = match &self.tls {
            None => Either::Left(socket),
            Some(tls) => tokio::select! {
                biased;
                () = self.soon_after_closing() => return Ok(None),
                encrypted = tls.accept(socket) => Either::Right(encrypted?),
            },
        };
        let beginning = (self.begins == ProtocolStart::Http2).then(FrameScanner::default);
        Ok(Some(TrackedStream::new(stream, Arc::clone(connection_state), beginning)))
    }

    /// Resolves shortly after the listener closes, so that a running handshake can finish.
    async fn soon_after_closing(&self) {
        self.tasks.closing().await;
        sleep(CLOSING_REST).await;
    }
}
