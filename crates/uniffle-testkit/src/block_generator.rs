//! Blocks whose content follows from a seed.
//!
//! Invariant: a block's bytes depend only on (seed, block id, length), on every machine and
//! version, so that a reader can verify the data of another process.

use bytes::Bytes;

use uniffle_client::block::{Block, IdLayout};
use uniffle_wire::types::{BlockId, PartitionId, TaskAttemptId};

/// Creates the same blocks in every process with the same seed.
#[derive(Debug, Clone, Copy)]
pub struct BlockGenerator {
    seed: u64,
    layout: IdLayout,
}

impl BlockGenerator {
    /// Creates a generator of blocks with ids of `layout`.
    #[must_use]
    pub fn new(seed: u64, layout: IdLayout) -> Self {
        Self { seed, layout }
    }

    /// Returns block number `sequence` of `task` for `partition`, with `length` bytes.
    ///
    /// # Panics
    /// Panics if a part of the id does not fit the layout.
    #[must_use]
    pub fn block(&self, partition: PartitionId, task: TaskAttemptId, sequence: u32, length: u32) -> Block {
        let id =
            self.layout.block_id(sequence, partition, task).expect("the caller's numbers fit its layout");
        Block::new(id, task, self.content(id, length))
    }

    /// Returns the bytes of block `id`.
    #[must_use]
    pub fn content(&self, id: BlockId, length: u32) -> Bytes {
        let mut state = SplitMix64(self.seed ^ id.0.cast_unsigned().wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let length = usize::try_from(length).expect("a u32 fits into usize");
        let mut data = Vec::with_capacity(length.next_multiple_of(8));
        while data.len() < length {
            data.extend_from_slice(&state.next().to_le_bytes());
        }
        data.truncate(length);
        data.into()
    }
}

/// Sebastiano Vigna's SplitMix64: fast, and independent of crate versions.
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_one_seed_are_equal() {
        let block = |seed| {
            BlockGenerator::new(seed, IdLayout::SPARK).block(PartitionId(1), TaskAttemptId(2), 3, 1001)
        };
        assert_eq!(block(7), block(7));
        assert_ne!(block(7).data, block(8).data);
        assert_eq!(block(7).data.len(), 1001);
        assert_eq!(block(7).meta.crc, crc32fast::hash(&block(7).data));
        // SplitMix64's published first output for the state 0.
        assert_eq!(SplitMix64(0).next(), 0xe220_a839_7b1d_cdaf);
    }
}
