//! Pure codecs of the protocol's messages and file formats: no I/O and no tokio.
//!
//! Invariant: decoders must take any bytes. They return an error instead of panicking, and allocate
//! nothing by a length that they have not checked.

pub mod bitmap;
pub mod frame;
#[cfg(test)]
mod golden;
pub mod index;
pub mod proto;
pub mod reply;
pub mod request;
pub mod send_frame;
pub mod send_message;
pub mod types;

/// The input breaks the rules of its format. The texts contain numbers of the input, but no
/// text of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The input ended before the message did.
    #[error("the message is incomplete")]
    Incomplete,
    /// A length or count exceeds its limit. Nothing was allocated for it.
    #[error("{what} is {len}, the limit is {max}")]
    TooLarge {
        /// The quantity that is too large.
        what: &'static str,
        /// Announced size.
        len: u64,
        /// Limit.
        max: u64,
    },
    /// A frame type that does not exist or that this side never receives.
    #[error("unknown frame type {0}")]
    UnknownType(u8),
    /// The input breaks the format.
    #[error("malformed message: {what} (at byte {at})")]
    Malformed {
        /// The broken rule.
        what: &'static str,
        /// Byte offset in the message at which the error was detected.
        at: u64,
    },
}

/// Fields that precede the data and identify its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendHeader<'a> {
    /// The application, not validated.
    pub app: &'a str,
    /// Shuffle id, not validated.
    pub shuffle: i32,
    /// The ticket of `requireBuffer`.
    pub ticket: i64,
}

/// A block's fields except its bytes, as the peer sent them. Absent fields are 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockHeader {
    /// Block id, not validated.
    pub block_id: i64,
    /// Number of bytes. Equals the bytes written to the sink by the time of
    /// [`BlockSink::end_block`].
    pub length: i32,
    /// Bytes after decompression.
    pub uncompressed_length: i32,
    /// CRC-32 of the bytes, 0 = not computed.
    pub crc: i64,
    /// The writing task attempt.
    pub task_attempt_id: i64,
}

/// Receives decoded blocks. An error stops the decoding at once.
///
/// A decoder calls `header (partition (begin_block write* end_block)*)*`. Exactly n bytes are
/// written between `begin_block(n)` and its `end_block`. A message can still turn out to be
/// incomplete until the decoder has finished, so nothing may become visible before that.
pub trait BlockSink {
    /// Error of the sink, into which decoding errors are converted.
    type Error: From<DecodeError>;
    /// Receives the fields before the data. Called once, before everything else.
    fn header(&mut self, header: SendHeader<'_>) -> Result<(), Self::Error>;
    /// Begins a partition, to which the following blocks belong. May repeat an earlier one.
    fn partition(&mut self, partition: i32) -> Result<(), Self::Error>;
    /// Begins a block of `length` bytes.
    fn begin_block(&mut self, length: u32) -> Result<(), Self::Error>;
    /// Receives the next bytes of the block, at least one.
    fn write(&mut self, bytes: &[u8]) -> Result<(), Self::Error>;
    /// Ends a block. `block.length` is the number of bytes that were written.
    fn end_block(&mut self, block: BlockHeader) -> Result<(), Self::Error>;
}
