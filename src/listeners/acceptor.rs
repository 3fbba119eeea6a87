//! Accepts the connections of every listener.
//!
//! Here is what they have in common: the bound on connections and who goes when it is reached (`places`), socket
//! options, the deadline for a beginning, TLS, the pause and the log when accepting fails, the way to a thread of its own,
//! and the handover to a successor. What is spoken on a connection is the listener's: it names its bounds in an
//! [`Acceptor`] and gives a function that serves one connection.
//!
//! Invariants: a connection counts until its [`Place`] is dropped or given away. One that has not begun its protocol by the
//! deadline is closed, whatever it is waiting in. Nothing is accepted once the tasks are closing, and a connection whose
//! first byte is waited for is then left to the successor or closed.

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
use super::http2::FrameScanner;
use super::places::{Held, Places, Seat, Stage, closing};
use super::tls::TlsAcceptor;
use super::watched::Watched;

/// Pause after a failed accept: a full table of descriptors is not cured by asking again at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Of HTTP/2's connections whose places were given away so many may end their calls: a part of those that may be open, within
/// this. What they hold is beyond what is set aside for those.
const LEAVING_PART: usize = 16;
const LEAVING_MAX: usize = 16;
/// Connections closed for others and failures of one listener are each logged once in this time.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// When the kernel begins to probe an idle peer.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
/// Between two probes of a peer that does not answer; the kernel's default number of them ends the connection.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);

/// Where a listener's connections come from and how they are treated before it sees them.
#[derive(Debug)]
pub struct Binding {
    /// The socket.
    pub listener: TcpListener,
    /// Encrypts the connections, where the listener can.
    pub tls: Option<TlsAcceptor>,
    /// Where connections are left for a successor.
    pub handover: Handover,
    /// Connections left by a predecessor.
    pub kept: Vec<std::net::TcpStream>,
}

impl From<TcpListener> for Binding {
    /// In the clear, without predecessor and successor.
    fn from(listener: TcpListener) -> Self {
        Self { listener, tls: None, handover: Handover::default(), kept: Vec::new() }
    }
}

/// A listener's name in the log, the names of its tasks, and of the key that bounds its connections.
#[derive(Debug, Clone, Copy)]
pub(super) struct Names {
    pub(super) listener: &'static str,
    pub(super) accepting: &'static str,
    pub(super) connection: &'static str,
    pub(super) limit: &'static str,
}

/// How a listener sees that a connection has begun its protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Begins {
    /// The listener says so ([`Seat::opened`]).
    Said,
    /// With the preface and the first frame of HTTP/2.
    Http2,
}

/// Accepts the connections of one listener.
#[derive(Debug)]
pub(super) struct Acceptor {
    pub(super) names: Names,
    pub(super) binding: Binding,
    pub(super) connections_max: usize,
    /// Connections that were closed because others wanted their places.
    pub(super) closed: IntCounter,
    /// Connections that are open, by all their names.
    pub(super) open: Vec<IntGauge>,
    /// Time for a new connection to begin: first byte, TLS, and what the protocol begins with.
    pub(super) opening_deadline: Duration,
    pub(super) begins: Begins,
    /// Threads to which connections are bound; none = they run on the runtime that starts the acceptor.
    pub(super) cores: Option<Cores>,
    /// All tasks of the listener.
    pub(super) tasks: Tasks,
}

/// An accepted connection.
#[derive(Debug)]
pub(super) struct Connection<S> {
    pub(super) stream: S,
    pub(super) peer: SocketAddr,
    pub(super) place: Place,
}

/// A stream that is encrypted or not.
pub(super) type Stream = Watched<Either<TcpStream, TlsStream<TcpStream>>>;

/// One of the connections that a listener may have; given back on drop.
#[derive(Debug)]
pub(super) struct Place {
    held: Held,
    _open: Vec<GaugeGuard>,
    _core: Option<CorePlace>,
}

impl Place {
    /// Where the listener says what the connection is doing.
    pub(super) fn seat(&self) -> &Arc<Seat> {
        self.held.seat()
    }
}

impl Acceptor {
    /// Begins to accept; each connection is served by `serve` in a task of its own, once it has begun to speak and was
    /// encrypted. Returns at once.
    pub(super) fn start<F>(mut self, serve: impl Fn(Connection<Stream>) -> F + Send + Sync + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let opening = Arc::new(Opening {
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
                match opening.open(stream, place.seat()).await {
                    Ok(Some(stream)) => serve(Connection { stream, peer, place }).await,
                    Ok(None) => {}
                    Err(error) => tracing::debug!(listener, %peer, %error, "connection failed during setup"),
                }
            }
        });
    }

    /// As [`Acceptor::start`], with the socket as it was accepted.
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
            Begins::Http2 => (self.connections_max / LEAVING_PART).clamp(1, LEAVING_MAX),
            Begins::Said => 0,
        };
        let places = Places::new(self.connections_max).with_leaving(leaving_max);
        let (closings, failures) = (LogLimiter::new(1, LOG_INTERVAL), LogLimiter::new(1, LOG_INTERVAL));
        let mut kept = std::mem::take(&mut self.binding.kept).into_iter();
        let mut stopping = pin!(self.tasks.closing());
        loop {
            let kept = kept.next();
            // What a predecessor kept of HTTP/2 has said nothing; of other protocols it had begun.
            let has_begun = kept.is_some() && self.begins == Begins::Said;
            let next = async {
                match kept {
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
            let (held, closed) = places.take(peer.ip(), close);
            if let Some(closed) = closed {
                self.note_closed(closed, &closings);
            }
            if has_begun {
                held.seat().opened();
                // A request to the predecessor counts as one here.
                drop(held.seat().request());
            }
            let seat = Arc::clone(held.seat());
            let life = Life { seat, registration, deadline: self.opening_deadline };
            self.open((stream, peer), held, life, &serve);
            // Its task comes before the next connection: a storm of connects must not close one whose request is there.
            yield_now().await;
        }
    }

    /// A connection was closed for a new one, in `stage` and without progress for `idle`.
    fn note_closed(&self, (stage, idle): (Stage, Duration), closings: &LogLimiter) {
        self.closed.inc();
        if let Some(times) = closings.pass() {
            let (Names { listener, limit, .. }, most) = (self.names, self.connections_max);
            let text = "connection limit reached; closed the connection that was idle longest";
            tracing::warn!(listener, limit, most, ?stage, ?idle, times, "{text}");
        }
    }

    /// Starts the connection's task, on the core that has the fewest if there are any.
    fn open<F, S>(&self, (stream, peer): (TcpStream, SocketAddr), held: Held, life: Life, serve: &Arc<S>)
    where
        F: Future<Output = ()> + Send + 'static,
        S: Fn(Connection<TcpStream>) -> F + Send + Sync + 'static,
    {
        // A peer that is gone already makes this fail; the next read fails alike.
        if let Err(error) = set_up(&stream) {
            tracing::debug!(%peer, %error, "cannot set socket options");
        }
        let open = self.open.iter().map(GaugeGuard::one).collect();
        let name = self.names.connection;
        let Some(cores) = &self.cores else {
            let place = Place { held, _open: open, _core: None };
            return self.tasks.spawn(name, life.of(serve(Connection { stream, peer, place })));
        };
        // The socket leaves this runtime's poller here and enters the core's there.
        let stream = match stream.into_std() {
            Ok(stream) => stream,
            Err(error) => return tracing::debug!(%peer, %error, "connection failed during setup"),
        };
        let (handle, core) = cores.place();
        let (place, serve) = (Place { held, _open: open, _core: Some(core) }, Arc::clone(serve));
        self.tasks.spawn_on(handle, name, async move {
            match TcpStream::from_std(stream) {
                Ok(stream) => life.of(serve(Connection { stream, peer, place })).await,
                Err(error) => tracing::warn!(%peer, %error, "connection closed: its core cannot poll it"),
            }
        });
    }
}

/// How long a connection is served: until it ends, does not begin in time, or its place is given to another.
struct Life {
    seat: Arc<Seat>,
    registration: AbortRegistration,
    deadline: Duration,
}

impl Life {
    async fn of(self, serve: impl Future<Output = ()>) {
        let Self { seat, registration, deadline } = self;
        let mut served = pin!(Abortable::new(serve, registration));
        tokio::select! {
            biased;
            _ended = served.as_mut() => return,
            () = sleep(deadline) => {}
        }
        if seat.is_open() {
            let _ended = served.await;
        } else {
            tracing::debug!(?deadline, "connection closed: opening timed out");
        }
    }
}

/// A connection that a predecessor has accepted.
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

/// What a connection goes through before the listener sees it.
#[derive(Debug)]
struct Opening {
    tls: Option<TlsAcceptor>,
    begins: Begins,
    handover: Handover,
    tasks: Tasks,
}

impl Opening {
    /// `None` when the peer went without a word, or the connection is left to a successor.
    async fn open(&self, socket: TcpStream, seat: &Arc<Seat>) -> io::Result<Option<Stream>> {
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
        let beginning = (self.begins == Begins::Http2).then(FrameScanner::default);
        Ok(Some(Watched::new(stream, Arc::clone(seat), beginning)))
    }

    /// A handshake under way may end.
    async fn soon_after_closing(&self) {
        self.tasks.closing().await;
        sleep(CLOSING_REST).await;
    }
}
