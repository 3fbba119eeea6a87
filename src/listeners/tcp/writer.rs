//! Writes the replies of a connection to its socket, in the order in which they become ready.
//!
//! Small replies are combined in vectored writes. Response bytes are not copied: they stay in their
//! buffers, which remain charged, until the socket has taken them. If the disk fails during a
//! streamed response, the connection is closed: the length was announced, and padding would be read
//! as data.

use std::collections::VecDeque;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::{Buf, Bytes};
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use crate::clock::{Instant, sleep, timeout, timeout_at};
use crate::listeners::connection_limiter::{ConnectionState, Request};
use crate::listeners::{CLOSING_ANSWER, STALL_MAX};
use crate::runtime::Tasks;
use crate::service::{ReadAdmission, ReadAhead, ResponseGuard};

use super::metrics::InProgress;
use super::shared::{ConnectionContext, TcpListenerState};

/// Maximum number of pieces in one vectored write. The kernel accepts 1,024, and 128 of 14 KiB
/// already exceed a socket buffer.
const PIECES_PER_WRITE: usize = 128;
/// Replies are collected up to this size before a write, and large ones are written in steps of
/// this size.
const BATCH_BYTES: usize = 1 << 20;

/// Interval at which the progress of a write is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// A peer that takes fewer bytes than this within [`STALL_MAX`] counts as stalled.
const STALL_BYTES: usize = 64 << 10;

/// Time to write finished replies after the tasks of the connection were cancelled.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);

/// Slot in which the reader leaves its half of a connection for a successor.
pub(super) type HandoverHalf = Arc<Mutex<Option<OwnedReadHalf>>>;

/// Part of a reply after its head.
#[derive(Debug)]
pub(super) enum ReplyBody {
    /// No body.
    Empty,
    /// Bytes in memory. Dropping the guard marks them as taken by the client.
    Pieces(Vec<Bytes>, ResponseGuard),
    /// `length` bytes that are read from disk during the write.
    Stream { length: u64, chunks: ReadAhead },
}

/// Resources released once a reply is written or abandoned.
#[derive(Debug)]
pub(super) struct ReplyGuard {
    /// Permit of the connection, and its request count.
    #[expect(dead_code, reason = "held until the reply is written")]
    pub(super) request: (OwnedSemaphorePermit, Request),
    /// Admission of a local read.
    pub(super) admission: Option<ReadAdmission>,
    /// Guard of a memory read, from the time its pieces are collected.
    pub(super) response_guard: Option<ResponseGuard>,
    /// When the request was complete.
    pub(super) received: Instant,
    /// Counts the request and measures its time.
    pub(super) counted: InProgress,
}

/// A reply that is ready to write.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) head: Bytes,
    pub(super) body: ReplyBody,
    pub(super) guard: ReplyGuard,
}

/// Sending end of a connection's reply queue.
#[derive(Debug, Clone)]
pub(super) struct Outbox(mpsc::Sender<Outgoing>);

impl Outbox {
    /// Queues a reply. The queue is never full, because it has a slot for each permit of the
    /// connection and every reply holds one. After the writer has ended, the reply is dropped.
    pub(super) fn post(&self, reply: Outgoing) {
        if let Err(mpsc::error::TrySendError::Full(_)) = self.0.try_send(reply) {
            debug_assert!(false, "a reply needs a permit");
        }
    }
}

/// Creates the queue of a connection with at most `requests_max` requests in flight.
pub(super) fn queue(requests_max: usize) -> (Outbox, mpsc::Receiver<Outgoing>) {
    let (sender, receiver) = mpsc::channel(requests_max.max(1));
    (Outbox(sender), receiver)
}

/// Sending half of a connection, with the replies that wait for it.
#[derive(Debug)]
pub(super) struct ConnectionWriter {
    shared: Arc<TcpListenerState>,
    socket: OwnedWriteHalf,
    queue: mpsc::Receiver<Outgoing>,
    connection: Tasks,
    connection_state: Arc<ConnectionState>,
    pieces: VecDeque<Bytes>,
    handover_half: HandoverHalf,
}

impl ConnectionWriter {
    pub(super) fn new(
        context: ConnectionContext,
        socket: OwnedWriteHalf,
        queue: mpsc::Receiver<Outgoing>,
        handover_half: HandoverHalf,
    ) -> Self {
        let ConnectionContext { shared, tasks: connection, state: connection_state } = context;
        Self { shared, socket, queue, connection, connection_state, pieces: VecDeque::new(), handover_half }
    }

    /// Writes until all senders of the queue are dropped, a reply cannot be written completely, or
    /// the grace period after a cancel ends.
    pub(super) async fn run(mut self) {
        let cancelled = self.connection.cancelled();
        let end_of_grace = async move {
            cancelled.await;
            sleep(SHUTDOWN_GRACE).await;
        };
        let connection = self.connection.clone();
        let shared = Arc::clone(&self.shared);
        let end = tokio::select! {
            biased;
            end = self.write_replies() => Some(end),
            () = end_of_grace => None,
        };
        if let Some(Err(error)) = &end {
            shared.metrics.all.exceptions.inc();
            tracing::debug!(%error, "tcp connection closed: cannot write replies");
        }
        connection.cancel();
        if let Some(Ok(())) = end {
            self.end().await;
        }
    }

    /// Ends a connection after its last reply. Hands it over if the reader left its half for that,
    /// otherwise closes it.
    async fn end(self) {
        let handover_half = self.handover_half.lock().take();
        match handover_half.map(|half| half.reunite(self.socket)) {
            Some(Ok(stream)) => self.shared.handover.keep(stream),
            Some(Err(halves)) => drop(halves),
            None => {}
        }
    }

    async fn write_replies(&mut self) -> io::Result<()> {
        let mut batch = Vec::new();
        while let Some(first) = self.queue.recv().await {
            let mut stream = self.collect(first, &mut batch);
            while stream.is_none()
                && batch_has_room(&self.pieces)
                && let Ok(next) = self.queue.try_recv()
            {
                stream = self.collect(next, &mut batch);
            }
            match stream {
                None => self.flush().await?,
                Some((length, chunks)) => self.stream(length, chunks, batch.last_mut()).await?,
            }
            for guard in batch.drain(..) {
                guard.counted.answered(guard.received.elapsed().as_secs_f64());
            }
        }
        if self.handover_half.lock().is_some() {
            return Ok(());
        }
        self.socket.shutdown().await
    }

    /// Adds a reply to the pending write. Returns its stream, if it has one. The stream must be
    /// written before the next reply is added.
    fn collect(&mut self, reply: Outgoing, batch: &mut Vec<ReplyGuard>) -> Option<(u64, ReadAhead)> {
        let Outgoing { head, body, mut guard } = reply;
        self.pieces.push_back(head);
        let stream = match body {
            ReplyBody::Empty => None,
            ReplyBody::Pieces(pieces, response_guard) => {
                self.pieces.extend(pieces.into_iter().filter(|piece| !piece.is_empty()));
                guard.response_guard = Some(response_guard);
                None
            }
            ReplyBody::Stream { length, chunks } => Some((length, chunks)),
        };
        batch.push(guard);
        stream
    }

    /// Writes the collected pieces and `length` bytes of `chunks`. Reads the next chunk while it
    /// writes one.
    async fn stream(
        &mut self,
        length: u64,
        mut chunks: ReadAhead,
        mut guard: Option<&mut ReplyGuard>,
    ) -> io::Result<()> {
        let mut remaining = length;
        loop {
            // The first chunk has already been read and goes out with the head.
            let next = next_chunk(&self.shared, &mut chunks, remaining).await?;
            remaining -= next.len() as u64;
            self.pieces.push_back(next);
            if remaining == 0 {
                return self.flush().await;
            }
            chunks.during(self.flush()).await?;
            // The first chunk is written, so this response no longer waits behind other replies.
            if let Some(admission) = guard.take().and_then(|guard| guard.admission.as_mut()) {
                admission.first_chunk_is_sent();
            }
        }
    }

    /// Writes all collected pieces and drops each one as soon as the socket has it.
    async fn flush(&mut self) -> io::Result<()> {
        while !self.pieces.is_empty() {
            // The time limit applies to one step, not to the whole reply.
            let Self { socket, pieces, shared, connection_state, connection, .. } = self;
            let taken = AtomicUsize::new(0);
            let limits = StepLimits {
                time: shared.config.write_timeout,
                others_wait: || shared.service.reads.has_waiters(),
                is_closing: || connection.is_closing(),
            };
            within(limits, &taken, write_step(socket, pieces, connection_state, &taken)).await?;
        }
        Ok(())
    }
}

/// Returns the next chunk, which is neither empty nor longer than `remaining` bytes.
async fn next_chunk(shared: &TcpListenerState, chunks: &mut ReadAhead, remaining: u64) -> io::Result<Bytes> {
    let end = match timeout(shared.config.write_timeout, chunks.next()).await {
        Ok(Ok(Some(chunk))) if !chunk.is_empty() && chunk.len() as u64 <= remaining => return Ok(chunk),
        Ok(Ok(_)) => io::Error::other("local data response does not have the announced length"),
        Ok(Err(error)) => io::Error::other(error),
        Err(_) => io::ErrorKind::TimedOut.into(),
    };
    tracing::warn!(error = %end, remaining, "tcp connection closed: cannot complete a local data response");
    Err(end)
}

fn batch_has_room(pieces: &VecDeque<Bytes>) -> bool {
    pieces.len() < PIECES_PER_WRITE && pieces.iter().map(Bytes::len).sum::<usize>() < BATCH_BYTES
}

/// Time limits of one write step.
struct StepLimits<W, C> {
    time: Duration,
    /// Returns whether other requests wait for memory that replies hold. A stalled peer is then
    /// disconnected after [`STALL_MAX`].
    others_wait: W,
    /// Returns whether the listener is closing. A step must then end within [`CLOSING_ANSWER`], so
    /// that the worker's successor can begin.
    is_closing: C,
}

/// Runs `writing`, which adds the bytes written to `taken`. Fails with `TimedOut` when one of
/// `limits` is exceeded.
async fn within(
    limits: StepLimits<impl Fn() -> bool, impl Fn() -> bool>,
    taken: &AtomicUsize,
    writing: impl Future<Output = io::Result<()>>,
) -> io::Result<()> {
    let deadline = Instant::now() + limits.time;
    let (mut seen, mut since, mut closed) = (0, Instant::now(), None);
    let mut writing = pin!(writing);
    loop {
        let look = deadline.min(Instant::now() + POLL_INTERVAL);
        if let Ok(written) = timeout_at(look, writing.as_mut()).await {
            return written;
        }
        let (now, in_all) = (Instant::now(), taken.load(Ordering::Relaxed));
        if in_all >= seen + STALL_BYTES {
            (seen, since) = (in_all, now);
        }
        let is_stalled = now >= since + STALL_MAX;
        let delays_successor = (limits.is_closing)() && now >= *closed.get_or_insert(now) + CLOSING_ANSWER;
        if now >= deadline || delays_successor || is_stalled && (limits.others_wait)() {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}

/// Writes all of `pieces`, or [`BATCH_BYTES`] of them.
async fn write_step(
    socket: &mut OwnedWriteHalf,
    pieces: &mut VecDeque<Bytes>,
    connection_state: &ConnectionState,
    taken: &AtomicUsize,
) -> io::Result<()> {
    let mut remaining = BATCH_BYTES;
    while remaining > 0 && !pieces.is_empty() {
        let mut slices = [IoSlice::new(&[]); PIECES_PER_WRITE];
        let mut used = 0;
        for (slice, piece) in slices.iter_mut().zip(pieces.iter()) {
            *slice = IoSlice::new(piece);
            used += 1;
        }
        let mut written = socket.write_vectored(&slices[..used]).await?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        connection_state.progressed();
        taken.fetch_add(written, Ordering::Relaxed);
        remaining = remaining.saturating_sub(written);
        while let Some(front) = pieces.front_mut() {
            if written < front.len() {
                front.advance(written);
                break;
            }
            written -= front.len();
            pieces.pop_front();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the lifetime in seconds of a reply of which `bytes` bytes are taken every second.
    async fn lives(others_wait: bool, is_closing: bool, bytes: usize) -> u64 {
        let (began, taken) = (Instant::now(), AtomicUsize::new(0));
        let writing = async {
            loop {
                sleep(Duration::from_secs(1)).await;
                taken.fetch_add(bytes, Ordering::Relaxed);
            }
        };
        let limits = StepLimits {
            time: Duration::from_secs(100),
            others_wait: || others_wait,
            is_closing: || is_closing,
        };
        let ended = within(limits, &taken, writing).await;
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::TimedOut);
        began.elapsed().as_secs()
    }

    #[tokio::test(start_paused = true)]
    async fn slowly_read_reply_is_dropped_for_waiting_requests() {
        assert_eq!(lives(true, false, 0).await, 10);
        assert_eq!(lives(true, false, 100).await, 10);
        assert_eq!(
            lives(true, false, 8 << 10).await,
            100,
            "slow progress of the peer must not close the connection"
        );
        assert_eq!(lives(false, false, 0).await, 100);
    }

    #[tokio::test(start_paused = true)]
    async fn slowly_read_reply_ends_when_the_listener_closes() {
        assert_eq!(lives(false, true, 8 << 10).await, 1);
    }
}
