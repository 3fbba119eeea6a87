//! Drives a service's send session with what the walker finds in a frame.
//!
//! The session opens at the header, before any block was seen, and spends the ticket there. Dropped without
//! [`Ingest::commit`] nothing of the request becomes visible and all its memory goes back.

use std::sync::Arc;

use fastrace::Span;

use crate::proto::StatusCode;
use crate::service::{BlockHeader, SendHeader, SendSession, Service, ServiceError};
use uniffle_wire::DecodeError;
use uniffle_wire::send_frame::{FrameBlock, SendFrameHeader, SendFrameSink};

/// Why a request is not answered with what it asked for.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    pub(super) text: String,
    /// Who is told.
    pub(super) blame: Blame,
}

/// Whose fault a refusal is.
#[derive(Debug)]
pub(super) enum Blame {
    /// Nobody's, or it is everyday: only the client is told.
    Nobody,
    /// What came breaks the format.
    Format,
    /// Perhaps the client's.
    Service(ServiceError),
}

impl From<ServiceError> for Refusal {
    fn from(error: ServiceError) -> Self {
        Self { status: error.status(), text: error.to_string(), blame: Blame::Service(error) }
    }
}

impl From<DecodeError> for Refusal {
    /// The frame's length was sound, so the connection goes on (docs/protocol.md §7.7).
    fn from(error: DecodeError) -> Self {
        Self { status: StatusCode::InternalError, text: error.to_string(), blame: Blame::Format }
    }
}

/// A send that is arriving.
#[derive(Debug)]
pub(super) struct Ingest {
    service: Arc<Service>,
    message_bytes: u32,
    session: Option<SendSession>,
    /// The partition of the next block. The session hears of it with its first block only: empty partitions take eight
    /// bytes of a frame, too little to pay for what the session keeps of each.
    next_partition: Option<i32>,
    /// Ends with the send.
    _span: Span,
}

impl Ingest {
    pub(super) fn new(service: Arc<Service>, message_bytes: u32, span: Span) -> Self {
        Self { service, message_bytes, session: None, next_partition: None, _span: span }
    }

    /// Makes the blocks visible.
    pub(super) fn commit(&mut self) -> Result<(), Refusal> {
        // The stage attempt is not on this wire.
        Ok(self.session()?.commit(0)?)
    }

    fn session(&mut self) -> Result<SendSession, Refusal> {
        self.session.take().ok_or_else(|| DecodeError::Incomplete.into())
    }

    #[inline]
    fn open(&mut self) -> Result<&mut SendSession, Refusal> {
        self.session.as_mut().ok_or_else(|| DecodeError::Incomplete.into())
    }
}

impl SendFrameSink for Ingest {
    type Error = Refusal;

    fn header(&mut self, header: SendFrameHeader<'_>) -> Result<(), Refusal> {
        self.session = Some(self.service.begin_send(SendHeader {
            app: header.app,
            shuffle: header.shuffle,
            ticket: header.ticket,
            message_bytes: u64::from(self.message_bytes),
        })?);
        Ok(())
    }

    fn partition(&mut self, partition: i32) -> Result<(), Refusal> {
        self.next_partition = Some(partition);
        Ok(())
    }

    #[inline]
    fn begin_block(&mut self, length: u32) -> Result<(), Refusal> {
        if let Some(partition) = self.next_partition.take() {
            self.open()?.partition(partition)?;
        }
        Ok(self.open()?.begin_block(length)?)
    }

    #[inline]
    fn write(&mut self, bytes: &[u8]) -> Result<(), Refusal> {
        Ok(self.open()?.write(bytes)?)
    }

    #[inline]
    fn end_block(&mut self, block: FrameBlock) -> Result<(), Refusal> {
        Ok(self.open()?.end_block(BlockHeader {
            block_id: block.block_id,
            length: block.length,
            uncompressed_length: block.uncompressed_length,
            crc: block.crc,
            task_attempt_id: block.task_attempt_id,
        })?)
    }
}
