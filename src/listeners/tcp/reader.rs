//! The receiving half of a raw TCP connection: reads from the socket into the thread's chunk, where
//! [`Frames`] parses it.
//!
//! Each chunk belongs to a thread, because it is parsed at once and is free again before any await.
//! It stays in the core's cache, and a thousand connections need no more chunks than ten. Bytes
//! that cannot be parsed before a permit or the end of a commit are copied, at most 64 KiB.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::tcp::OwnedReadHalf;
use tokio::time::Duration;

use crate::clock::{Instant, Sleep, sleep_until};
use crate::listeners::connection_limiter::ConnectionState;
use crate::listeners::{CLOSING_PAUSE, CLOSING_REQUEST};
use crate::runtime::{PollBudget, Tasks};
use uniffle_base::budget::Charge;
use uniffle_wire::DecodeError;

use super::frames::{Frames, Requirement};
use super::shared::{ConnectionContext, LISTENER, TcpListenerState};
use super::writer::{HandoverHalf, Outbox};

thread_local! {
    /// Scratch space. Its content has no meaning between two polls.
    static CHUNK: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Reason to stop reading a connection.
#[derive(Debug, thiserror::Error)]
enum End {
    #[error("closed by the peer")]
    Closed,
    #[error("closed by the peer in the middle of a frame")]
    Cut,
    #[error("frame timed out")]
    Stalled,
    #[error("idle timeout")]
    Idle,
    #[error("listener shutdown")]
    ListenerCloses,
    #[error("{0}")]
    Broken(#[from] DecodeError),
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Reads frames of a connection into the thread's chunk, and keeps only its unparsed bytes.
#[derive(Debug)]
pub(super) struct ConnectionReader {
    shared: Arc<TcpListenerState>,
    socket: OwnedReadHalf,
    frames: Frames,
    connection: Tasks,
    connection_state: Arc<ConnectionState>,
    /// Bytes that were read but cannot be parsed yet, with their charge.
    unparsed: Vec<u8>,
    unparsed_charge: Option<Charge>,
    last_read: Instant,
    /// Longest pause within a frame.
    pause_max: Duration,
    /// Deadline of the arriving frame, once the listener closes.
    frame_deadline: Option<Instant>,
    poll_budget: PollBudget,
    /// Wakes at or before the nearest deadline. Deadlines that moved are checked only then, so that
    /// no read touches the timer.
    alarm: Pin<Box<Sleep>>,
    handover_half: HandoverHalf,
}

impl ConnectionReader {
    pub(super) fn new(
        context: ConnectionContext,
        socket: OwnedReadHalf,
        outbox: Outbox,
        handover_half: HandoverHalf,
        requests_max: usize,
    ) -> Self {
        let frames = Frames::new(context.clone(), outbox, requests_max);
        let ConnectionContext { shared, tasks: connection, state: connection_state } = context;
        let now = Instant::now();
        let alarm = Box::pin(sleep_until(now + shared.config.idle_timeout));
        let (unparsed, unparsed_charge) = (Vec::new(), None);
        let pause_max = shared.config.frame_timeout;
        Self {
            shared,
            socket,
            frames,
            connection,
            connection_state,
            unparsed,
            unparsed_charge,
            last_read: now,
            pause_max,
            frame_deadline: None,
            poll_budget: PollBudget::default(),
            alarm,
            handover_half,
        }
    }

    /// Reads until the peer closes, times out or breaks the protocol, the listener closes between
    /// two requests, or the connection is cancelled. Pending replies are still written, except to a
    /// peer that stalls.
    pub(super) async fn run(mut self) {
        let connection = self.connection.clone();
        let shared = Arc::clone(&self.shared);
        let end = tokio::select! {
            // Cancellation has priority: a failed writer frees permits, and left-over bytes must
            // not be parsed with those.
            biased;
            () = connection.cancelled() => return,
            // Dropping the read loses no data: it keeps none while it waits.
            () = connection.closing() => None,
            end = self.read() => Some(end),
        };
        let end = match end {
            Some(end) => end,
            None => {
                self.frames.align();
                // A peer that is slow within a frame delays everyone who waits for a successor.
                self.pause_max = self.pause_max.min(CLOSING_PAUSE);
                self.last_read = Instant::now();
                self.frame_deadline = Some(self.last_read + CLOSING_REQUEST);
                tokio::select! {
                    biased;
                    () = connection.cancelled() => return,
                    end = self.read() => end,
                }
            }
        };
        match &end {
            End::ListenerCloses => {
                if shared.handover.has_begun() {
                    *self.handover_half.lock() = Some(self.socket);
                }
                return;
            }
            End::Closed | End::Idle => {}
            End::Stalled => {
                connection.cancel();
                shared.metrics.all.exceptions.inc();
            }
            End::Cut | End::Io(_) => shared.metrics.all.exceptions.inc(),
            End::Broken(error) => {
                shared.metrics.all.exceptions.inc();
                shared.service.note_malformed(LISTENER, error);
            }
        }
        tracing::debug!(%end, "tcp connection ended");
    }

    async fn read(&mut self) -> End {
        loop {
            if self.frames.is_at_end() && self.unparsed.is_empty() {
                return End::ListenerCloses;
            }
            let step = match self.frames.requirement() {
                Requirement::Request => {
                    self.frames.wait_for_permit().await;
                    self.last_read = Instant::now();
                    self.parse_unparsed()
                }
                Requirement::Commit => {
                    self.frames.end_commit().await;
                    self.last_read = Instant::now();
                    self.parse_unparsed()
                }
                Requirement::Bytes if !self.unparsed.is_empty() => self.parse_unparsed(),
                Requirement::Bytes => poll_fn(|context| self.poll_socket(context)).await,
            };
            if let Err(end) = step {
                return end;
            }
            if self.poll_budget.take_exhausted() {
                tokio::task::yield_now().await;
            }
        }
    }

    fn parse_unparsed(&mut self) -> Result<(), End> {
        let bytes = std::mem::take(&mut self.unparsed);
        let began = Instant::now();
        let parsed = self.frames.parse(&bytes)?;
        self.poll_budget.add(began.elapsed());
        self.unparsed = bytes;
        self.unparsed.drain(..parsed);
        if self.unparsed.is_empty() {
            self.unparsed = Vec::new();
            self.unparsed_charge = None;
        }
        Ok(())
    }

    /// Reads from the socket and parses the bytes.
    fn poll_socket(&mut self, context: &mut Context<'_>) -> Poll<Result<(), End>> {
        let wanted = self.frames.bytes_wanted();
        let began = Instant::now();
        let read = CHUNK.with_borrow_mut(|chunk| {
            if chunk.len() < wanted {
                chunk.resize(wanted, 0);
            }
            let mut buffer = ReadBuf::new(&mut chunk[..wanted]);
            ready!(Pin::new(&mut self.socket).poll_read(context, &mut buffer))?;
            let filled = buffer.filled();
            if filled.is_empty() {
                let end = if self.frames.began().is_some() { End::Cut } else { End::Closed };
                return Poll::Ready(Err(end));
            }
            let parsed = self.frames.parse(filled)?;
            if parsed < filled.len() {
                self.unparsed_charge = Some(self.frames.charge_unparsed(filled.len() - parsed));
                self.unparsed.extend_from_slice(&filled[parsed..]);
            }
            Poll::Ready(Ok(()))
        });
        if read.is_ready() {
            self.last_read = Instant::now();
            self.poll_budget.add(self.last_read.duration_since(began));
            self.connection_state.progressed();
            return read;
        }
        self.poll_deadline(context).map(Err)
    }

    /// Resolves when the peer misses a deadline.
    fn poll_deadline(&mut self, context: &mut Context<'_>) -> Poll<End> {
        loop {
            let config = &self.shared.config;
            let (due, end) = match self.frames.began() {
                Some(began) => {
                    let due = (began + config.fill_timeout).min(self.last_read + self.pause_max);
                    (self.frame_deadline.map_or(due, |deadline| deadline.min(due)), End::Stalled)
                }
                None => (self.last_read + config.idle_timeout, End::Idle),
            };
            let look = self.frames.next_check().map_or(due, |look| look.min(due));
            if look < self.alarm.deadline() {
                self.alarm.as_mut().reset(look);
            }
            ready!(self.alarm.as_mut().poll(context));
            let now = Instant::now();
            if look <= now && look < due {
                self.frames.check_pace();
                continue;
            }
            if now >= due {
                // A connection that waits for its replies is not idle.
                if matches!(end, End::Stalled) || !self.frames.is_busy() {
                    return Poll::Ready(end);
                }
                self.last_read = now;
                continue;
            }
            self.alarm.as_mut().reset(look);
        }
    }
}
