//! Adapter between the decoders of both transports and a [`SendSession`].
//!
//! The session opens at the header, before any block, and spends the ticket there. If it is dropped
//! without [`SendSink::commit`], nothing of the request becomes visible and all its memory is
//! released.
//!
//! Invariant: large sends are committed and aborted on blocking threads, with bounded concurrency
//! each. However many arrive, other work finds a thread. Commits and aborts use separate pools, so
//! that aborts do not delay commits.

use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinError;
use uniffle_wire::{self as wire, BlockHeader, BlockSink, DecodeError};

use super::Ingest;
use super::pace::SendPace;
use super::write::{IncomingSend, SendSession};
use crate::clock::Instant;
use crate::memory::MemoryError;
use crate::service::ServiceError;
use crate::service::parts::blocking_failed;
use uniffle_base::budget::heap::HeapFull;
use uniffle_base::budget::{Charge, HeapKind};

/// Result of [`SendSink::commit`]. For its errors see [`SendSession::commit`].
#[derive(Debug)]
pub enum Commit {
    /// The commit has finished.
    Done(Result<(), ServiceError>),
    /// The commit continues in a task, even if its caller stops waiting.
    Background(Committing),
}

/// A commit that runs or will run on a blocking thread.
#[derive(Debug)]
pub struct Committing(oneshot::Receiver<Result<Result<(), ServiceError>, JoinError>>);

impl Committing {
    /// Waits for the commit. Cancel safe: if a wait is dropped, the next call continues it.
    ///
    /// # Errors
    /// See [`SendSession::commit`].
    pub async fn outcome(&mut self) -> Result<(), ServiceError> {
        let ended = |_| ServiceError::Unfinished("the worker is stopping".to_owned());
        (&mut self.0).await.map_err(ended)?.map_err(blocking_failed)?
    }
}

/// A send whose message is being decoded.
#[derive(Debug)]
pub struct SendSink {
    ingest: Arc<Ingest>,
    /// Bytes of the whole message.
    message_bytes: u64,
    session: Option<SendSession>,
    /// The partition of the next block, passed to the session only with its first block. An empty
    /// partition takes eight bytes of a frame, too little to justify the session's bookkeeping per
    /// partition.
    next_partition: Option<i32>,
    /// Heap of the data that the decoder keeps.
    header_charge: Option<Charge>,
    pace: SendPace,
}

impl SendSink {
    /// Creates the sink for a message of `message_bytes` bytes.
    pub fn new(ingest: Arc<Ingest>, message_bytes: u32) -> Self {
        Self {
            ingest,
            message_bytes: u64::from(message_bytes),
            session: None,
            next_partition: None,
            header_charge: None,
            pace: SendPace::new(u64::from(message_bytes), Instant::now()),
        }
    }

    /// Returns the size of the whole message.
    pub fn message_bytes(&self) -> u64 {
        self.message_bytes
    }

    /// Returns when to call [`SendSink::check_pace`] next if no byte arrives until then.
    pub fn next_check(&self) -> Instant {
        self.pace.next_check()
    }

    /// Checks whether the send may wait for more bytes after `arrived` bytes of its message.
    ///
    /// # Errors
    /// The send is slow and another application waits for its memory.
    pub fn check_pace(&mut self, arrived: u64) -> Result<(), ServiceError> {
        let is_slow = self.pace.is_slow(arrived, Instant::now());
        // Before the header the send holds no memory.
        let Some(session) = self.session.as_ref().filter(|_| is_slow) else { return Ok(()) };
        if !self.ingest.parts.memory.tickets().must_yield(session.app()) {
            return Ok(());
        }
        self.ingest.parts.metrics.slow_sends_ended.inc();
        Err(MemoryError::TooSlow { bytes_per_sec: self.pace.bytes_per_sec() }.into())
    }

    /// Charges the `bytes` of headers that the decoder keeps, as uncommitted blocks.
    ///
    /// # Errors
    /// The application has no heap left for them; before the header, the worker has none.
    pub fn keep(&mut self, bytes: u64) -> Result<(), ServiceError> {
        let budget = match &self.session {
            Some(session) => session.unfinished_blocks(),
            None => self.ingest.parts.memory.heap().of(HeapKind::Blocks),
        };
        let header_charge = self.header_charge.get_or_insert_with(|| budget.empty_charge());
        let more = bytes.saturating_sub(header_charge.bytes());
        header_charge.try_grow(more).map_err(|refusal| HeapFull::of(HeapKind::Blocks, refusal).into())
    }

    /// Makes the blocks of the complete message visible: inline if they are few, otherwise on a
    /// blocking thread once the pool has a free slot.
    pub fn commit(&mut self) -> Commit {
        let Some(session) = self.session.take() else {
            return Commit::Done(Err(DecodeError::Incomplete.into()));
        };
        if session.is_small() {
            return Commit::Done(session.commit());
        }
        let header_charge = self.header_charge.take();
        let (result, committing) = oneshot::channel();
        let pool = self.ingest.committing.clone();
        self.ingest.parts.tasks.spawn("commit of a large send", async move {
            let commit = move || {
                let stored = session.commit();
                drop(header_charge);
                stored
            };
            // The caller may have stopped waiting.
            let _ignored = result.send(pool.run(commit).await);
        });
        Commit::Background(Committing(committing))
    }

    /// Returns the session that the header has opened.
    #[inline]
    fn opened(&mut self) -> Result<&mut SendSession, ServiceError> {
        // Decoders deliver the header first. A missing header is a fault of the request, not a
        // panic.
        self.session.as_mut().ok_or_else(|| DecodeError::Incomplete.into())
    }
}

impl Drop for SendSink {
    /// Releases a segment or more of each partition of an aborted send, on a blocking thread if the
    /// send is large.
    fn drop(&mut self) {
        let many = self.session.take_if(|session| !session.is_small());
        if let (Some(session), Ok(_runtime)) = (many, Handle::try_current()) {
            let pool = self.ingest.aborting.clone();
            self.ingest.parts.tasks.spawn("aborted large send", async move {
                // The panic hook reports a panic; nothing else can be done here.
                let _aborted = pool.run(move || drop(session)).await;
            });
        }
    }
}

impl BlockSink for SendSink {
    type Error = ServiceError;

    fn header(&mut self, header: wire::SendHeader<'_>) -> Result<(), ServiceError> {
        let wire::SendHeader { app, shuffle, ticket } = header;
        let header = IncomingSend { app, shuffle, ticket, message_bytes: self.message_bytes };
        self.session = Some(self.ingest.begin_send(header)?);
        Ok(())
    }

    #[inline]
    fn partition(&mut self, partition: i32) -> Result<(), ServiceError> {
        self.next_partition = Some(partition);
        Ok(())
    }

    #[inline]
    fn begin_block(&mut self, length: u32) -> Result<(), ServiceError> {
        if let Some(partition) = self.next_partition.take() {
            self.opened()?.partition(partition)?;
        }
        self.opened()?.begin_block(length)
    }

    #[inline]
    fn write(&mut self, bytes: &[u8]) -> Result<(), ServiceError> {
        self.opened()?.write(bytes)
    }

    #[inline]
    fn end_block(&mut self, block: BlockHeader) -> Result<(), ServiceError> {
        self.opened()?.end_block(block)
    }
}
