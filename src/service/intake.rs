//! Between the decoders of both transports and a [`SendSession`].
//!
//! The session opens at the header, before any block was seen, and spends the ticket there. Dropped without
//! [`Intake::commit`], nothing of the request becomes visible and all its memory goes back.

use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use uniffle_wire::{self as wire, BlockHeader, BlockSink, DecodeError};

use super::ServiceError;
use super::aside;
use super::ingest::Ingest;
use super::write::{SendHeader, SendSession};
use crate::budget::heap::HeapFull;
use crate::budget::{Charge, HeapKind};

/// What has come of [`Intake::commit`]. For its errors see [`SendSession::commit`].
#[derive(Debug)]
pub enum Commit {
    /// It is over.
    Done(Result<(), ServiceError>),
    /// It goes on, also if nobody waits for it.
    Aside(Committing),
}

/// A commit on a blocking thread.
#[derive(Debug)]
pub struct Committing(JoinHandle<Result<(), ServiceError>>);

impl Committing {
    /// Waits for it. Nothing is lost with a wait that is given up: the next one goes on.
    ///
    /// # Errors
    /// See [`SendSession::commit`].
    pub async fn outcome(&mut self) -> Result<(), ServiceError> {
        (&mut self.0).await.map_err(aside::failed)?
    }
}

/// A send whose message is being decoded.
#[derive(Debug)]
pub struct Intake {
    ingest: Arc<Ingest>,
    /// Bytes of the whole message.
    message_bytes: u64,
    session: Option<SendSession>,
    /// The partition of the next block. The session hears of it with its first block only: empty partitions take eight
    /// bytes of a frame, too little to pay for what the session keeps of each.
    next_partition: Option<i32>,
    /// Heap of what the decoder keeps.
    kept: Option<Charge>,
}

impl Intake {
    /// For a message of `message_bytes`.
    pub fn new(ingest: Arc<Ingest>, message_bytes: u32) -> Self {
        Self {
            ingest,
            message_bytes: u64::from(message_bytes),
            session: None,
            next_partition: None,
            kept: None,
        }
    }

    /// The decoder keeps `bytes` of headers by now: they count as blocks that are not committed.
    ///
    /// # Errors
    /// The application has no heap left for them.
    pub fn keep(&mut self, bytes: u64) -> Result<(), ServiceError> {
        let budget = match &self.session {
            Some(session) => session.unfinished_blocks(),
            None => self.ingest.memory.heap().of(HeapKind::Blocks),
        };
        let kept = self.kept.get_or_insert_with(|| budget.nothing());
        let more = bytes.saturating_sub(kept.bytes());
        kept.try_grow(more).map_err(|refusal| HeapFull::of(HeapKind::Blocks, refusal).into())
    }

    /// The message was whole: makes its blocks visible, here if they are few, else on a blocking thread.
    pub fn commit(&mut self) -> Commit {
        let Some(session) = self.session.take() else {
            return Commit::Done(Err(DecodeError::Incomplete.into()));
        };
        if session.is_small() {
            return Commit::Done(session.commit());
        }
        let kept = self.kept.take();
        Commit::Aside(Committing(tokio::task::spawn_blocking(move || {
            let stored = session.commit();
            drop(kept);
            stored
        })))
    }

    #[inline]
    fn open(&mut self) -> Result<&mut SendSession, ServiceError> {
        // Decoders deliver the header first; a broken promise is the request's fault, not a panic.
        self.session.as_mut().ok_or_else(|| DecodeError::Incomplete.into())
    }
}

impl Drop for Intake {
    /// What is given up gives back a segment or more of each partition.
    fn drop(&mut self) {
        let many = self.session.take_if(|session| !session.is_small());
        if let (Some(session), Ok(runtime)) = (many, Handle::try_current()) {
            runtime.spawn_blocking(move || drop(session));
        }
    }
}

impl BlockSink for Intake {
    type Error = ServiceError;

    fn header(&mut self, header: wire::SendHeader<'_>) -> Result<(), ServiceError> {
        let wire::SendHeader { app, shuffle, ticket } = header;
        let header = SendHeader { app, shuffle, ticket, message_bytes: self.message_bytes };
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
            self.open()?.partition(partition)?;
        }
        self.open()?.begin_block(length)
    }

    #[inline]
    fn write(&mut self, bytes: &[u8]) -> Result<(), ServiceError> {
        self.open()?.write(bytes)
    }

    #[inline]
    fn end_block(&mut self, block: BlockHeader) -> Result<(), ServiceError> {
        self.open()?.end_block(block)
    }
}
