//! Streaming decoder of `SendShuffleDataRequest` (docs/protocol.md §1.5, §1.8), fed with whatever pieces the socket
//! gives.
//!
//! Not here: gRPC's 5-byte prefix, tickets, memory. The decoder holds no payload: a block's bytes go to the
//! [`BlockSink`](crate::BlockSink) as sub-slices of the fed chunk, once its length is known. Only block *headers* are ever collected,
//! and only in the two forms that send them ahead of the bytes.
//!
//! Three forms are told apart while streaming:
//!
//! | form | field 4 | field 7 |
//! | --- | --- | --- |
//! | classic (all stock clients) | blocks with data | absent or empty |
//! | contiguous | blocks with lengths only | the bytes, Σ lengths = its length |
//! | combined (riffle) | absent | a message: arrays, then the bytes |
//!
//! Invariant: the sink sees `header (partition (begin_block write* end_block)+)*`, and between `begin_block(n)` and
//! its `end_block` exactly n bytes. Every length is checked against its parent before anything is done for it.
//!
//! Stricter than protobuf on purpose, because nothing can be taken back once streamed: header fields stand before the
//! data, a partition id before its blocks, and no field of a block repeats its data. Java and prost write that way.

mod collected;
mod decoder;
mod grammar;
#[cfg(test)]
mod tests;
mod varint;

pub use decoder::Decoder;

/// Bounds of one message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Blocks in one message. A block of the classic form costs the decoder nothing; the bound is against floods.
    pub blocks_max: u64,
    /// Block headers (40 B each) and partitions (8 B) collected before the bytes come, in the forms that need it.
    pub collected_max: usize,
}

impl Default for Limits {
    /// 4 Mi blocks; 256 Ki collected (10 MiB; a 14 MiB message of 56-byte blocks fits).
    fn default() -> Self {
        Self { blocks_max: 4 << 20, collected_max: 256 << 10 }
    }
}

/// What a complete message carried, with the fields that stand after the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Summary {
    /// Blocks handed to the sink. Zero is for the caller to refuse ("No data in request").
    pub blocks: u64,
    /// Payload bytes handed to the sink.
    pub payload_bytes: u64,
    /// Field 5, milliseconds; 0 = unset.
    pub timestamp_ms: i64,
}
