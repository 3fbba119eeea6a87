//! Where the decoders of both transports put the blocks of a send.

use crate::DecodeError;

/// What stands before the data: whose it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendHeader<'a> {
    /// The application, not validated.
    pub app: &'a str,
    pub shuffle: i32,
    /// The ticket of `requireBuffer`.
    pub ticket: i64,
}

/// A block's fields besides its bytes, as the peer wrote them. Absent fields are 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockHeader {
    pub block_id: i64,
    /// Bytes; what the sink was given when [`BlockSink::end_block`] sees it.
    pub length: i32,
    /// Bytes after decompression.
    pub uncompressed_length: i32,
    /// CRC-32 of the bytes, 0 = not computed.
    pub crc: i64,
    /// The writing task attempt.
    pub task_attempt_id: i64,
}

/// Takes decoded blocks. An error ends the decoding at once.
///
/// A decoder calls `header (partition (begin_block write* end_block)*)*`, with exactly n bytes between `begin_block(n)`
/// and its `end_block`. Whether the message was whole is known only when the decoder has ended; until then nothing may
/// become visible.
pub trait BlockSink {
    /// The sink's error; decoding errors are turned into it.
    type Error: From<DecodeError>;
    /// Called once, before everything else.
    fn header(&mut self, header: SendHeader<'_>) -> Result<(), Self::Error>;
    /// The partition of the blocks that follow. May repeat an earlier one.
    fn partition(&mut self, partition: i32) -> Result<(), Self::Error>;
    /// A block of `length` bytes begins.
    fn begin_block(&mut self, length: u32) -> Result<(), Self::Error>;
    /// The next bytes of the block, at least one.
    fn write(&mut self, bytes: &[u8]) -> Result<(), Self::Error>;
    /// All bytes of the block were written; `block.length` is their number.
    fn end_block(&mut self, block: BlockHeader) -> Result<(), Self::Error>;
}
