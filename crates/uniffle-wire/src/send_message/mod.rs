//! Streaming decoder of `SendShuffleDataRequest` (docs/protocol.md §1.5, §1.8), after gRPC's 5-byte
//! prefix.
//!
//! A block's bytes go to the [`BlockSink`](crate::BlockSink) as sub-slices of the fed chunk. Only
//! partitions and block headers are collected, and only in the contiguous and the combined form,
//! which send them ahead of the bytes.
//! Invariant: every length is checked against the enclosing message before it is used. The decoder
//! is stricter than protobuf, because streamed data cannot be taken back: header fields must
//! precede the data, and a partition id its blocks, as Java and prost write them.

mod collected;
mod decoder;
mod grammar;
#[cfg(test)]
mod tests;

pub use decoder::Decoder;

/// Bounds of one message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageLimits {
    /// Maximum number of blocks in one message. Blocks of the classic form occupy no
    /// memory in the decoder, so `collected_max` does not bound their number.
    pub blocks_max: u64,
    /// Maximum number of block headers (32 B each) that are collected ahead of their bytes, and
    /// maximum number of partitions (8 B each).
    pub collected_max: usize,
}

impl Default for MessageLimits {
    /// 4 Mi blocks, and 256 Ki collected: 8 MiB of headers and 2 MiB of partitions, enough for a
    /// 14 MiB message of 56-byte blocks.
    fn default() -> Self {
        Self { blocks_max: 4 << 20, collected_max: 256 << 10 }
    }
}

/// Totals of a complete message, and the fields that follow the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MessageSummary {
    /// Number of blocks passed to the sink. The caller rejects zero ("No data in request").
    pub blocks: u64,
    /// Number of payload bytes passed to the sink.
    pub payload_bytes: u64,
    /// Field 5, milliseconds; 0 = unset.
    pub timestamp_ms: i64,
}
