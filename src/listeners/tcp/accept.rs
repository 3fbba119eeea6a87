//! Accepts connections up to the limit and sets their sockets up.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::tcp::OwnedReadHalf;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, sleep};

use crate::runtime::{CorePlace, Cores, Tasks};

use super::{Shared, reader, writer};

/// What a full table of file descriptors is given to drain.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// A log line of a kind that peers cause is written once in this time.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Between two probes of a peer that does not answer; the kernel's default number of them ends the connection.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);

pub(super) async fn run(
    shared: Arc<Shared>,
    listener: TcpListener,
    cores: Option<Cores>,
    tasks: Tasks,
    kept: Vec<std::net::TcpStream>,
) {
    let closing = tasks.closing();
    tokio::pin!(closing);
    let (mut refusals, mut failures) = (RateLimit::default(), RateLimit::default());
    let mut kept = kept.into_iter();
    loop {
        let next = async {
            match kept.next() {
                Some(stream) => inherit(stream),
                None => listener.accept().await,
            }
        };
        let accepted = tokio::select! {
            biased;
            () = &mut closing => return,
            accepted = next => accepted,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                if let Some(times) = failures.pass() {
                    tracing::warn!(%error, times, "cannot accept tcp connections");
                }
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(place) = Arc::clone(&shared.connections).try_acquire_owned() else {
            shared.metrics.refused.inc();
            if let Some(times) = refusals.pass() {
                let limit = shared.config.connections_max;
                tracing::warn!(%peer, limit, times, "tcp connection closed: as many as allowed are open");
            }
            continue;
        };
        // A peer that is gone already makes this fail; its reader will see the same.
        if let Err(error) = set_up(&stream, shared.config.keepalive) {
            tracing::debug!(%peer, %error, "cannot set socket options");
        }
        match &cores {
            None => start(&shared, stream, place, None, &tasks),
            Some(cores) => start_on(cores, &shared, stream, place, &tasks),
        }
    }
}

/// A connection that a predecessor has accepted.
fn inherit(stream: std::net::TcpStream) -> io::Result<(TcpStream, SocketAddr)> {
    let peer = stream.peer_addr()?;
    stream.set_nonblocking(true)?;
    Ok((TcpStream::from_std(stream)?, peer))
}

/// Moves the connection to the core that has the fewest.
fn start_on(
    cores: &Cores,
    shared: &Arc<Shared>,
    stream: TcpStream,
    place: OwnedSemaphorePermit,
    tasks: &Tasks,
) {
    // The socket leaves this runtime's poller here and enters the core's there.
    let stream = match stream.into_std() {
        Ok(stream) => stream,
        Err(error) => return tracing::debug!(%error, "tcp connection ended as it began"),
    };
    let (handle, core) = cores.place();
    let (shared, of_core) = (Arc::clone(shared), tasks.clone());
    tasks.spawn_on(handle, "tcp connection", async move {
        match TcpStream::from_std(stream) {
            Ok(stream) => start(&shared, stream, place, Some(core), &of_core),
            Err(error) => tracing::warn!(%error, "tcp connection closed: its core cannot poll it"),
        }
    });
}

fn set_up(stream: &TcpStream, keepalive: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new().with_time(keepalive).with_interval(KEEPALIVE_INTERVAL);
    SockRef::from(stream).set_tcp_keepalive(&keepalive)
}

/// Where the reader leaves its half of a connection that a successor is to have.
pub(super) type KeptHalf = Arc<Mutex<Option<OwnedReadHalf>>>;

/// Starts the two tasks of a connection.
fn start(
    shared: &Arc<Shared>,
    stream: TcpStream,
    place: OwnedSemaphorePermit,
    core: Option<CorePlace>,
    tasks: &Tasks,
) {
    let (read_half, write_half) = stream.into_split();
    // Cancelled when either side of the connection fails, so that the other does not wait for it.
    let connection = tasks.child();
    let gauge = shared.metrics.connection();
    let (outbox, queue) = writer::queue(shared.config.requests_in_flight_per_connection_max);
    let kept = KeptHalf::default();
    let reader = reader::Reader::new(Arc::clone(shared), read_half, outbox, connection.clone(), kept.clone());
    connection.spawn_linked("tcp reader", reader.run());
    let writer = writer::Writer::new(Arc::clone(shared), write_half, queue, connection.clone(), kept);
    connection.spawn_linked("tcp writer", async move {
        writer.run().await;
        // The writer ends last: it outlives the reader until every reply was written or given up.
        drop((place, core, gauge));
    });
}

/// Lets one of many equal log lines pass.
#[derive(Debug, Default)]
struct RateLimit {
    last: Option<Instant>,
    held_back: u64,
}

impl RateLimit {
    /// How many lines this one stands for; `None` if it is to be held back.
    fn pass(&mut self) -> Option<u64> {
        self.held_back += 1;
        let now = Instant::now();
        let soon = self.last.is_some_and(|last| now.duration_since(last) < LOG_INTERVAL);
        if soon {
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.held_back))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_line_stands_for_those_held_back() {
        let mut limit = RateLimit::default();
        assert_eq!(limit.pass(), Some(1));
        assert_eq!(limit.pass(), None);
        assert_eq!(limit.pass(), None);
        tokio::time::advance(LOG_INTERVAL).await;
        assert_eq!(limit.pass(), Some(3));
    }
}
