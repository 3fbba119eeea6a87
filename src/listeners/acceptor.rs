//! Accepts the connections of every listener.
//!
//! Here are what they have in common: the bound on connections, socket options, the wait for a first byte, TLS, the
//! pause and the log when accepting fails, the way to a thread of its own, and the handover to a successor. What is
//! spoken on a connection is the listener's: it names its bounds in an [`Acceptor`] and gives a function that serves
//! one connection.
//!
//! Invariants: a connection counts until its [`Place`] is dropped. Nothing is accepted once the tasks are closing, and a
//! connection whose first byte is waited for is then left to the successor or closed.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use prometheus::{IntCounter, IntGauge};
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};
use tokio_rustls::server::TlsStream;
use tokio_util::either::Either;

use crate::metrics::GaugeGuard;
use crate::runtime::{CorePlace, Cores, Handover, Tasks};
use crate::telemetry::LogLimiter;

use super::tls::TlsAcceptor;

/// Pause after a failed accept: a full table of descriptors is not cured by asking again at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Refused connections and failures of one listener are each logged once in this time.
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

/// A listener's name in the log, and the names of its tasks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Names {
    pub(super) listener: &'static str,
    pub(super) accepting: &'static str,
    pub(super) connection: &'static str,
}

/// What becomes of connections over the limit.
#[derive(Debug)]
pub(super) enum WhenFull {
    /// They are accepted and closed at once, and counted.
    Close(IntCounter),
    /// They wait in the listener's backlog.
    Wait,
}

/// Accepts the connections of one listener.
#[derive(Debug)]
pub(super) struct Acceptor {
    pub(super) names: Names,
    pub(super) binding: Binding,
    pub(super) connections_max: usize,
    pub(super) when_full: WhenFull,
    /// Connections that are open, by all their names.
    pub(super) open: Vec<IntGauge>,
    /// Time for a new connection to send its first byte; none = the listener sees to that.
    pub(super) first_byte_deadline: Option<Duration>,
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
pub(super) type Stream = Either<TcpStream, TlsStream<TcpStream>>;

/// One of the connections that a listener may have; given back on drop.
#[derive(Debug)]
#[expect(dead_code, reason = "held for their drop")]
pub(super) struct Place {
    permit: OwnedSemaphorePermit,
    open: Vec<GaugeGuard>,
    core: Option<CorePlace>,
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
            first_byte_deadline: self.first_byte_deadline,
            handover: self.binding.handover.clone(),
            tasks: self.tasks.clone(),
        });
        let (serve, listener) = (Arc::new(serve), self.names.listener);
        self.start_plain(move |connection| {
            let (opening, serve) = (Arc::clone(&opening), Arc::clone(&serve));
            async move {
                let Connection { stream, peer, place } = connection;
                match opening.open(stream).await {
                    Ok(Some(stream)) => serve(Connection { stream, peer, place }).await,
                    Ok(None) => {}
                    Err(error) => tracing::debug!(listener, %peer, %error, "connection ended as it began"),
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
        let places = Arc::new(Semaphore::new(self.connections_max.min(Semaphore::MAX_PERMITS)));
        let (refusals, failures) = (LogLimiter::new(1, LOG_INTERVAL), LogLimiter::new(1, LOG_INTERVAL));
        let mut kept = std::mem::take(&mut self.binding.kept).into_iter();
        let mut closing = pin!(self.tasks.closing());
        loop {
            let next = async {
                let permit = match self.when_full {
                    WhenFull::Wait => Arc::clone(&places).acquire_owned().await.ok(),
                    WhenFull::Close(_) => None,
                };
                let accepted = match kept.next() {
                    Some(stream) => inherit(stream),
                    None => self.binding.listener.accept().await,
                };
                (permit, accepted)
            };
            let (permit, accepted) = tokio::select! {
                biased;
                () = closing.as_mut() => return,
                next = next => next,
            };
            let (stream, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    if let Some(times) = failures.pass() {
                        tracing::warn!(listener, %error, times, "cannot accept connections");
                    }
                    sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            match permit.or_else(|| Arc::clone(&places).try_acquire_owned().ok()) {
                Some(permit) => self.open(stream, peer, permit, &serve),
                None => self.refuse(peer, &refusals),
            }
        }
    }

    fn refuse(&self, peer: SocketAddr, refusals: &LogLimiter) {
        if let WhenFull::Close(refused) = &self.when_full {
            refused.inc();
        }
        if let Some(times) = refusals.pass() {
            let (listener, limit) = (self.names.listener, self.connections_max);
            tracing::warn!(listener, %peer, limit, times, "connection closed: as many as allowed are open");
        }
    }

    /// Starts the connection's task, on the core that has the fewest if there are any.
    fn open<F, S>(&self, stream: TcpStream, peer: SocketAddr, permit: OwnedSemaphorePermit, serve: &Arc<S>)
    where
        F: Future<Output = ()> + Send + 'static,
        S: Fn(Connection<TcpStream>) -> F + Send + Sync + 'static,
    {
        // A peer that is gone already makes this fail; whoever reads from it will see the same.
        if let Err(error) = set_up(&stream) {
            tracing::debug!(%peer, %error, "cannot set socket options");
        }
        let open = self.open.iter().map(GaugeGuard::one).collect();
        let name = self.names.connection;
        let Some(cores) = &self.cores else {
            let place = Place { permit, open, core: None };
            return self.tasks.spawn(name, serve(Connection { stream, peer, place }));
        };
        // The socket leaves this runtime's poller here and enters the core's there.
        let stream = match stream.into_std() {
            Ok(stream) => stream,
            Err(error) => return tracing::debug!(%peer, %error, "connection ended as it began"),
        };
        let (handle, core) = cores.place();
        let (place, serve) = (Place { permit, open, core: Some(core) }, Arc::clone(serve));
        self.tasks.spawn_on(handle, name, async move {
            match TcpStream::from_std(stream) {
                Ok(stream) => serve(Connection { stream, peer, place }).await,
                Err(error) => tracing::warn!(%peer, %error, "connection closed: its core cannot poll it"),
            }
        });
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
    first_byte_deadline: Option<Duration>,
    handover: Handover,
    tasks: Tasks,
}

impl Opening {
    /// `None` when the peer went without a word, or the connection is left to a successor.
    async fn open(&self, socket: TcpStream) -> io::Result<Option<Stream>> {
        if let Some(deadline) = self.first_byte_deadline {
            let mut first_byte = [0];
            let spoken = timeout(deadline, socket.peek(&mut first_byte));
            tokio::select! {
                biased;
                () = self.tasks.closing() => {
                    self.handover.keep(socket);
                    return Ok(None);
                }
                spoken = spoken => if spoken.map_err(|_| silent())?? == 0 {
                    return Ok(None);
                },
            }
        }
        let Some(tls) = &self.tls else { return Ok(Some(Either::Left(socket))) };
        tokio::select! {
            biased;
            () = self.tasks.cancelled() => Ok(None),
            encrypted = tls.accept(socket) => Ok(Some(Either::Right(encrypted?))),
        }
    }
}

fn silent() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the peer said nothing")
}
