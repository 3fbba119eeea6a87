//! Parses the frames of one connection, given any piece of its byte stream. [`Frames::parse`] never
//! waits and never keeps a chunk.
//!
//! There are two kinds of faults. A frame with an invalid header or without a request id ends the
//! connection, because nothing after it can be trusted. Any other fault is refused with a status
//! after the rest of the frame, whose length is known. Meanwhile a refused send holds no memory.

use std::sync::Arc;

use bytes::BufMut;
use fastrace::Span;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::clock::Instant;
use crate::listeners::connection_limiter::{ConnectionState, Request};
use crate::runtime::Tasks;
use crate::service::{Commit, Committing, ReadLimits, SendSink, ServiceError};
use uniffle_base::budget::heap::HeapFull;
use uniffle_base::budget::{Budget, Charge, HeapKind};
use uniffle_wire::DecodeError;
use uniffle_wire::frame::{FrameHeader, FrameType, HEADER_BYTES};
use uniffle_wire::request::request_id;
use uniffle_wire::send_frame::SendFrameDecoder;

use super::dispatch::{self, LOCAL_READS_MAX, LocalRead, ReadMessage, TcpReply};
use super::metrics::InProgress;
use super::shared::{ConnectionContext, TcpListenerState};
use super::writer::{Outbox, Outgoing, ReplyGuard};

/// Number of bytes read between frames. Small, so that few bytes stay unparsed if a request must
/// wait.
const SMALL_REQUEST_BYTES: u32 = 64 << 10;
/// Bytes read from a socket at a time. They stay in the core's cache
/// (docs/design/data-path.md §2). Each thread has one such buffer for all connections.
const CHUNK_BYTES: usize = 256 << 10;
/// Largest accepted frame. Sends are never buffered, blocks need a ticket, and reads have a lower
/// limit, so the bound costs no memory. It must exceed one block of 512 MiB
/// (`types::BLOCK_BYTES_MAX`) and refuses only broken peers: Spark aims at 16 MiB per request
/// (`rss.client.send.size.limit`). Java's decoder allows `i32::MAX`.
const FRAME_BYTES_MAX: u32 = 1 << 30;
/// Read requests up to this size are bounded by the number of requests. Larger ones are charged to
/// the heap.
const FREE_REQUEST_BYTES: usize = 256;
/// Heap charged per byte of a read request: the byte itself and the decoded task filter.
const REQUEST_WEIGHT: u64 = 5;
/// Larger task filters are decoded on a blocking thread.
const INLINE_REQUEST_BYTES_MAX: usize = 64 << 10;
/// Heap charged for a read that runs in a task: the task and the decoded request.
const READ_TASK_BYTES: u64 = 4 << 10;
/// Every message begins with its request id.
const REQUEST_ID_BYTES: usize = 8;

/// Condition for parsing further.
#[derive(Debug)]
pub(super) enum Requirement {
    /// More bytes.
    Bytes,
    /// A permit for a request of the connection.
    Request,
    /// The end of a commit.
    Commit,
}

/// Position within a frame.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one per connection, and a send is the common case")]
enum FramePhase {
    Header {
        bytes: [u8; HEADER_BYTES],
        have: usize,
    },
    /// A send with its trace span, which ends with it.
    Send {
        sink: SendSink,
        _span: Span,
    },
    Read(PartialRead),
    /// The rest of a refused frame.
    Drain(Drain),
}

impl FramePhase {
    const START: Self = Self::Header { bytes: [0; HEADER_BYTES], have: 0 };
}

/// A partly received read request.
#[derive(Debug)]
struct PartialRead {
    kind: FrameType,
    message_bytes: usize,
    message: Vec<u8>,
    charge: Charge,
}

impl PartialRead {
    /// Reserves space for `more` bytes. Charges it first.
    fn make_room(&mut self, more: usize) -> Result<(), HeapFull> {
        let needed = self.message.len() + more;
        if needed <= self.message.capacity() {
            return Ok(());
        }
        let wanted = (2 * self.message.capacity()).max(needed).min(self.message_bytes);
        if self.message_bytes > FREE_REQUEST_BYTES {
            let charged = self.charge.try_grow(REQUEST_WEIGHT * (wanted - self.message.capacity()) as u64);
            charged.map_err(|refusal| HeapFull::of(HeapKind::Requests, refusal))?;
        }
        self.message.reserve_exact(wanted - self.message.len());
        Ok(())
    }
}

/// The rest of a frame that is already refused.
#[derive(Debug)]
struct Drain {
    kind: FrameType,
    remaining: u64,
    /// Bytes of the request id received so far.
    id: Vec<u8>,
    error: ServiceError,
}

/// Frame parser of one connection.
#[derive(Debug)]
pub(super) struct Frames {
    shared: Arc<TcpListenerState>,
    outbox: Outbox,
    connection: Tasks,
    connection_state: Arc<ConnectionState>,
    requests: Arc<Semaphore>,
    phase: FramePhase,
    decoder: SendFrameDecoder,
    /// Permit of the current or next request.
    permit: Option<OwnedSemaphorePermit>,
    /// Heap budget of the connection's requests.
    heap: Budget,
    /// Limits on the connection's reads.
    limits: Arc<ReadLimits>,
    requests_max: usize,
    /// A completely received send that is being committed.
    committing: Option<(i64, Committing)>,
    /// When the first byte of the current frame arrived.
    began: Option<Instant>,
    /// Counts the current frame's request from its header on, for the listener and for the
    /// connection.
    counted: Option<(InProgress, Request)>,
    /// The listener is closing: no bytes beyond the current frame are read.
    aligned: bool,
}

impl Frames {
    /// Creates the parser of a connection with at most `requests_max` requests in progress.
    pub(super) fn new(context: ConnectionContext, outbox: Outbox, requests_max: usize) -> Self {
        let ConnectionContext { shared, tasks: connection, state: connection_state } = context;
        let requests = Arc::new(Semaphore::new(requests_max));
        let (limits, wait) = (shared.service.reads.read_limits(), shared.config.local_read_wait);
        let limits = limits.in_order(LOCAL_READS_MAX, &shared.local_reads, wait);
        // Half of the budget, so that one connection cannot use it up.
        let heap = shared.service.memory().heap().of(HeapKind::Requests);
        let heap = heap.child(heap.capacity() / 2);
        Self {
            shared,
            outbox,
            connection,
            connection_state,
            requests,
            phase: FramePhase::START,
            decoder: SendFrameDecoder::new(0),
            permit: None,
            heap,
            limits: Arc::new(limits),
            requests_max,
            committing: None,
            began: None,
            counted: None,
            aligned: false,
        }
    }

    /// Returns when the arriving frame began, or `None` between frames.
    pub(super) fn began(&self) -> Option<Instant> {
        self.began
    }

    /// Returns when to call [`Frames::check_pace`] next, or `None` outside of sends.
    pub(super) fn next_check(&self) -> Option<Instant> {
        match &self.phase {
            FramePhase::Send { sink, .. } => Some(sink.next_check()),
            FramePhase::Header { .. } | FramePhase::Read(_) | FramePhase::Drain(_) => None,
        }
    }

    /// Refuses the arriving send if it is too slow.
    pub(super) fn check_pace(&mut self) {
        let FramePhase::Send { sink, .. } = &mut self.phase else { return };
        let remaining = self.decoder.remaining();
        let refused = sink.check_pace(sink.message_bytes().saturating_sub(remaining)).err();
        if let (Some(error), Some(id)) = (refused, self.decoder.request_id()) {
            self.refuse(Drain { kind: FrameType::Send, remaining, id: id.to_be_bytes().to_vec(), error });
        }
    }

    /// Returns whether a reply is pending.
    pub(super) fn is_busy(&self) -> bool {
        let free = self.requests.available_permits() + usize::from(self.permit.is_some());
        free < self.requests_max
    }

    /// Charges bytes that were read but cannot be parsed yet, even beyond the free heap. Closing
    /// the connection instead would fail all its requests.
    pub(super) fn charge_unparsed(&self, bytes: usize) -> Charge {
        self.heap.charge_unchecked(bytes as u64)
    }

    /// Reads no more than the current frame needs from now on.
    pub(super) fn align(&mut self) {
        self.aligned = true;
    }

    /// Returns whether nothing more is to be read, see [`Frames::align`].
    pub(super) fn is_at_end(&self) -> bool {
        self.aligned && matches!(self.phase, FramePhase::Header { have: 0, .. })
    }

    /// Returns the number of bytes to read next. Small between frames, so that few bytes stay
    /// unparsed if a request must wait. Only the exact need if the heap is short, and up to a whole
    /// chunk within a send.
    pub(super) fn bytes_wanted(&self) -> usize {
        let is_exact = self.aligned || self.heap.free() < u64::from(SMALL_REQUEST_BYTES);
        let in_frame = match &self.phase {
            FramePhase::Send { .. } => usize::try_from(self.decoder.remaining()).unwrap_or(usize::MAX),
            FramePhase::Drain(drain) => usize::try_from(drain.remaining).unwrap_or(usize::MAX),
            FramePhase::Header { have, .. } if is_exact => HEADER_BYTES - have,
            FramePhase::Read(read) if is_exact => read.message_bytes - read.message.len(),
            FramePhase::Header { .. } | FramePhase::Read(_) => 0,
        };
        if is_exact {
            return in_frame.clamp(1, CHUNK_BYTES);
        }
        in_frame.saturating_add(SMALL_REQUEST_BYTES as usize).min(CHUNK_BYTES)
    }

    /// Returns the condition for [`Frames::parse`] to continue.
    pub(super) fn requirement(&mut self) -> Requirement {
        if self.committing.is_some() {
            return Requirement::Commit;
        }
        let between = matches!(self.phase, FramePhase::Header { have: 0, .. });
        if between && self.permit.is_none() {
            self.permit = Arc::clone(&self.requests).try_acquire_owned().ok();
            if self.permit.is_none() {
                return Requirement::Request;
            }
        }
        Requirement::Bytes
    }

    /// Waits for the permit of the next request.
    pub(super) async fn wait_for_permit(&mut self) {
        self.permit = Arc::clone(&self.requests).acquire_owned().await.ok();
    }

    /// Parses `chunk`. Returns the number of bytes parsed, which is less than all if another
    /// condition must be met first.
    ///
    /// # Errors
    /// If the stream cannot be parsed any further.
    pub(super) fn parse(&mut self, chunk: &[u8]) -> Result<usize, DecodeError> {
        let mut rest = chunk;
        while !rest.is_empty() && matches!(self.requirement(), Requirement::Bytes) {
            let taken = match &mut self.phase {
                FramePhase::Header { .. } => self.parse_header(rest)?,
                FramePhase::Send { .. } => self.parse_send(rest)?,
                FramePhase::Read(_) => self.parse_read(rest)?,
                FramePhase::Drain(_) => self.parse_drain(rest)?,
            };
            rest = &rest[taken..];
        }
        Ok(chunk.len() - rest.len())
    }

    fn parse_header(&mut self, chunk: &[u8]) -> Result<usize, DecodeError> {
        let FramePhase::Header { bytes, have } = &mut self.phase else { return Ok(0) };
        if *have == 0 {
            self.began = Some(Instant::now());
        }
        let taken = chunk.len().min(HEADER_BYTES - *have);
        bytes[*have..*have + taken].copy_from_slice(&chunk[..taken]);
        *have += taken;
        if *have == HEADER_BYTES {
            let header = FrameHeader::decode_request(bytes, FRAME_BYTES_MAX)?;
            self.connection_state.opened();
            self.counted =
                Some((self.shared.metrics.of(header.kind).begin(), self.connection_state.request()));
            self.phase = self.begin(header);
        }
        Ok(taken)
    }

    fn begin(&mut self, header: FrameHeader) -> FramePhase {
        let FrameHeader { message_bytes, kind, .. } = header;
        if kind == FrameType::Send {
            self.decoder.restart(message_bytes);
            let span = self.shared.config.traces.begin("tcp sendShuffleData", None);
            let sink = SendSink::new(Arc::clone(&self.shared.service.ingest), message_bytes);
            return FramePhase::Send { sink, _span: span };
        }
        let drain = |error| {
            FramePhase::Drain(Drain { kind, remaining: u64::from(message_bytes), id: Vec::new(), error })
        };
        let max = self.shared.config.read_request_bytes_max;
        if message_bytes > max {
            let (len, max) = (u64::from(message_bytes), u64::from(max));
            return drain(DecodeError::TooLarge { what: "read request", len, max }.into());
        }
        let (message_bytes, charge) = (message_bytes as usize, self.heap.empty_charge());
        FramePhase::Read(PartialRead { kind, message_bytes, message: Vec::new(), charge })
    }

    fn parse_send(&mut self, chunk: &[u8]) -> Result<usize, DecodeError> {
        let FramePhase::Send { sink, .. } = &mut self.phase else { return Ok(0) };
        let remaining = self.decoder.remaining();
        let taken = usize::try_from(remaining).unwrap_or(usize::MAX).min(chunk.len());
        let commit = match self.decoder.feed(&chunk[..taken], sink) {
            Ok(false) => return Ok(taken),
            Ok(true) => {
                self.shared.metrics.of(FrameType::Send).transit().arrived(self.decoder.timestamp_ms());
                sink.commit()
            }
            Err(error) => Commit::Done(Err(error)),
        };
        // A request that ends before its id cannot be answered.
        let id = self.decoder.request_id().ok_or(DecodeError::Incomplete)?;
        match commit {
            Commit::Done(outcome) => self.end_send(id, remaining - taken as u64, outcome),
            Commit::Background(committing) => self.committing = Some((id, committing)),
        }
        Ok(taken)
    }

    /// Waits for the commit of a send and answers it. Dropping the wait loses nothing.
    pub(super) async fn end_commit(&mut self) {
        if let Some((id, committing)) = &mut self.committing {
            let (id, outcome) = (*id, committing.outcome().await);
            self.committing = None;
            self.end_send(id, 0, outcome);
        }
    }

    /// Answers a send with `remaining` bytes of its frame still to come.
    fn end_send(&mut self, id: i64, remaining: u64, outcome: Result<(), ServiceError>) {
        match outcome {
            Ok(()) => self.reply(dispatch::sent(&self.shared, id)),
            Err(error) => {
                self.refuse(Drain { kind: FrameType::Send, remaining, id: id.to_be_bytes().to_vec(), error });
            }
        }
    }

    /// Releases the request's memory. Answers once its whole frame has been received.
    fn refuse(&mut self, drain: Drain) {
        let error = &drain.error;
        tracing::debug!(kind = ?drain.kind, status = ?error.status(), %error, "tcp request refused");
        if drain.remaining > 0 {
            self.phase = FramePhase::Drain(drain);
        } else if let Some(id) = request_id(&drain.id) {
            self.reply(dispatch::refused(&self.shared, drain.kind, id, error));
        }
    }

    fn parse_drain(&mut self, chunk: &[u8]) -> Result<usize, DecodeError> {
        let FramePhase::Drain(drain) = &mut self.phase else { return Ok(0) };
        let taken = usize::try_from(drain.remaining).unwrap_or(usize::MAX).min(chunk.len());
        let of_id = taken.min(REQUEST_ID_BYTES - drain.id.len());
        drain.id.put_slice(&chunk[..of_id]);
        drain.remaining -= taken as u64;
        if drain.remaining == 0 {
            let id = request_id(&drain.id).ok_or(DecodeError::Incomplete)?;
            let reply = dispatch::refused(&self.shared, drain.kind, id, &drain.error);
            self.reply(reply);
        }
        Ok(taken)
    }

    fn parse_read(&mut self, chunk: &[u8]) -> Result<usize, DecodeError> {
        let FramePhase::Read(read) = &mut self.phase else { return Ok(0) };
        let (kind, have) = (read.kind, read.message.len());
        let taken = (read.message_bytes - have).min(chunk.len());
        if taken == read.message_bytes && kind == FrameType::Memory && taken <= FREE_REQUEST_BYTES {
            self.complete_memory(&chunk[..taken])?;
            return Ok(taken);
        }
        if let Err(full) = read.make_room(taken) {
            let mut id = read.message.clone();
            id.truncate(REQUEST_ID_BYTES);
            let remaining = (read.message_bytes - have) as u64;
            self.phase = FramePhase::Drain(Drain { kind, remaining, id, error: full.into() });
            return Ok(0);
        }
        read.message.extend_from_slice(&chunk[..taken]);
        if read.message.len() == read.message_bytes {
            let bytes = std::mem::take(&mut read.message);
            let all = read.charge.bytes();
            let charge = read.charge.split_up_to(all);
            self.complete(kind, ReadMessage { bytes, charge })?;
        }
        Ok(taken)
    }

    /// Answers a small memory read at once, unless it may take long.
    fn complete_memory(&mut self, message: &[u8]) -> Result<(), DecodeError> {
        if dispatch::may_take_long(&self.shared, self.limits.window(), message) {
            let message = ReadMessage { bytes: message.to_vec(), charge: self.heap.empty_charge() };
            return self.complete(FrameType::Memory, message);
        }
        let id = request_id(message).ok_or(DecodeError::Incomplete)?;
        self.reply(dispatch::memory(&self.shared, self.limits.window(), id, message));
        Ok(())
    }

    /// Answers a complete read request, or passes it to a task.
    fn complete(&mut self, kind: FrameType, message: ReadMessage) -> Result<(), DecodeError> {
        let id = request_id(&message.bytes).ok_or(DecodeError::Incomplete)?;
        if kind == FrameType::Sorted {
            self.reply(dispatch::sorted(&self.shared, id, &message.bytes));
        } else if kind == FrameType::Memory {
            self.read_memory(id, message);
        } else {
            self.read_local(kind, id, message);
        }
        Ok(())
    }

    fn read_memory(&mut self, id: i64, mut message: ReadMessage) {
        let is_quick = message.bytes.len() <= INLINE_REQUEST_BYTES_MAX
            && !dispatch::may_take_long(&self.shared, self.limits.window(), &message.bytes);
        if is_quick {
            return self.reply(dispatch::memory(&self.shared, self.limits.window(), id, &message.bytes));
        }
        if let Err(refusal) = message.charge.try_grow(READ_TASK_BYTES) {
            let full = HeapFull::of(HeapKind::Requests, refusal).into();
            return self.reply(dispatch::refused(&self.shared, FrameType::Memory, id, &full));
        }
        let Some(guard) = self.finish() else { return };
        let (shared, outbox, answers) =
            (Arc::clone(&self.shared), self.outbox.clone(), self.limits.window().clone());
        self.connection.spawn_linked("tcp memory read", async move {
            let (pool, app) = (shared.pool.clone(), dispatch::memory_reader(&message.bytes));
            // The work owns the guard and the charge, because it continues even if the connection
            // ends.
            let answer =
                move || (dispatch::memory(&shared, &answers, id, &message.bytes), message.charge, guard);
            if let Ok((TcpReply { head, body }, _charge, guard)) = pool.run_for(app, answer).await {
                outbox.post(Outgoing { head, body, guard });
            }
        });
    }

    fn read_local(&mut self, kind: FrameType, request_id: i64, mut message: ReadMessage) {
        if let Err(refusal) = message.charge.try_grow(READ_TASK_BYTES) {
            let full = HeapFull::of(HeapKind::Requests, refusal).into();
            return self.reply(dispatch::refused(&self.shared, kind, request_id, &full));
        }
        let Some(guard) = self.finish() else { return };
        let read = LocalRead {
            shared: Arc::clone(&self.shared),
            outbox: self.outbox.clone(),
            connection: self.connection.clone(),
            limits: Arc::clone(&self.limits),
            kind,
            request_id,
            message,
            guard,
        };
        self.connection.spawn_linked("tcp local read", read.run());
    }

    fn reply(&mut self, TcpReply { head, body }: TcpReply) {
        if let Some(guard) = self.finish() {
            self.outbox.post(Outgoing { head, body, guard });
        }
    }

    /// Ends the current frame. Returns the resources to release after its reply.
    fn finish(&mut self) -> Option<ReplyGuard> {
        let received = Instant::now();
        let counted = self.counted.take();
        if let (Some(began), Some((counted, _))) = (self.began.take(), &counted) {
            counted.metrics().parsing.observe(received.duration_since(began).as_secs_f64());
        }
        self.phase = FramePhase::START;
        let request = self.permit.take();
        debug_assert!(
            request.is_some() && counted.is_some(),
            "a frame must take a permit and be counted when it begins"
        );
        let (request, (counted, of_connection)) = (request?, counted?);
        let request = (request, of_connection);
        Some(ReplyGuard { request, admission: None, response_guard: None, received, counted })
    }
}
