//! Block ids by layout (docs/protocol.md §3.1) and blocks whose content follows from a seed.
//!
//! Invariant: a block's bytes are a function of (seed, block id, length) only, on every machine and version, so that a
//! reader can verify what another process wrote.

use bytes::Bytes;

use uniffle_wire::types::{BlockId, BlockMeta, PartitionId, TaskAttemptId};

/// How the 63 bits of a block id are divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdLayout {
    /// Upper bits: sequence number.
    pub sequence_bits: u32,
    /// Middle bits: partition.
    pub partition_bits: u32,
    /// Lower bits: task attempt.
    pub task_bits: u32,
}

impl IdLayout {
    /// Java's `DEFAULT`, and what a request without a layout means.
    pub const HISTORIC: Self = Self { sequence_bits: 18, partition_bits: 24, task_bits: 21 };
    /// Spark 0.9+ with default settings.
    pub const SPARK: Self = Self { sequence_bits: 21, partition_bits: 20, task_bits: 22 };

    /// The id of these parts; `None` if one does not fit its bits or the layout is not legal.
    #[must_use]
    pub fn block_id(self, sequence: u32, partition: PartitionId, task: TaskAttemptId) -> Option<BlockId> {
        let Self { sequence_bits, partition_bits, task_bits } = self;
        let legal = |bits: u32| (1..=31).contains(&bits);
        if !(legal(sequence_bits) && legal(partition_bits) && legal(task_bits))
            || sequence_bits + partition_bits + task_bits != 63
        {
            return None;
        }
        let fits = |part: i64, bits: u32| part >= 0 && part >> bits == 0;
        let (sequence, partition, task) = (i64::from(sequence), i64::from(partition.0), task.0);
        let all_fit =
            fits(sequence, sequence_bits) && fits(partition, partition_bits) && fits(task, task_bits);
        all_fit.then_some(BlockId(sequence << (partition_bits + task_bits) | partition << task_bits | task))
    }

    /// The partition field of `id`.
    #[must_use]
    pub fn partition_of(self, id: BlockId) -> i64 {
        (id.0 >> self.task_bits) & ((1 << self.partition_bits) - 1)
    }
}

/// A block as a writer has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Id, lengths, checksum.
    pub meta: BlockMeta,
    /// The bytes.
    pub data: Bytes,
}

impl Block {
    /// A block of `data` with its CRC.
    ///
    /// # Panics
    /// If `data` has more bytes than an `i32` counts.
    #[must_use]
    pub fn new(block_id: BlockId, task_attempt_id: TaskAttemptId, data: Bytes) -> Self {
        let length = u32::try_from(data.len()).ok().filter(|&len| i32::try_from(len).is_ok());
        let length = length.expect("the protocol's lengths are i32");
        let crc = crc32fast::hash(&data);
        let meta = BlockMeta { block_id, task_attempt_id, length, uncompressed_length: length, crc };
        Self { meta, data }
    }
}

/// Makes blocks that anybody with the same seed makes too.
#[derive(Debug, Clone, Copy)]
pub struct BlockGenerator {
    seed: u64,
    layout: IdLayout,
}

impl BlockGenerator {
    /// A generator of blocks with ids of `layout`.
    #[must_use]
    pub fn new(seed: u64, layout: IdLayout) -> Self {
        Self { seed, layout }
    }

    /// Block number `sequence` of `task` for `partition`, with `length` bytes.
    ///
    /// # Panics
    /// If the parts do not fit the layout.
    #[must_use]
    pub fn block(&self, partition: PartitionId, task: TaskAttemptId, sequence: u32, length: u32) -> Block {
        let id =
            self.layout.block_id(sequence, partition, task).expect("the caller's numbers fit its layout");
        Block::new(id, task, self.content(id, length))
    }

    /// The bytes of block `id`.
    #[must_use]
    pub fn content(&self, id: BlockId, length: u32) -> Bytes {
        let mut state = SplitMix64(self.seed ^ id.0.cast_unsigned().wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let length = usize::try_from(length).expect("a u32 is an index");
        let mut data = Vec::with_capacity(length.next_multiple_of(8));
        while data.len() < length {
            data.extend_from_slice(&state.next().to_le_bytes());
        }
        data.truncate(length);
        data.into()
    }
}

/// Sebastiano Vigna's SplitMix64: eight bytes in a few cycles, and never another sequence with another crate version.
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
    fn block_ids_match_the_vectors_of_the_protocol() {
        let id = |layout: IdLayout| layout.block_id(1, PartitionId(2), TaskAttemptId(3));
        assert_eq!(id(IdLayout::HISTORIC), Some(BlockId(35_184_376_283_139)));
        assert_eq!(id(IdLayout::SPARK), Some(BlockId(4_398_054_899_715)));
        assert_eq!(IdLayout::SPARK.partition_of(BlockId(4_398_054_899_715)), 2);
    }

    #[test]
    fn parts_that_do_not_fit_have_no_id() {
        let spark = IdLayout::SPARK;
        assert_eq!(spark.block_id(1 << 21, PartitionId(0), TaskAttemptId(0)), None);
        assert_eq!(spark.block_id(0, PartitionId(1 << 20), TaskAttemptId(0)), None);
        assert_eq!(spark.block_id(0, PartitionId(-1), TaskAttemptId(0)), None);
        assert_eq!(spark.block_id(0, PartitionId(0), TaskAttemptId(-1)), None);
        let broken = IdLayout { sequence_bits: 32, partition_bits: 10, task_bits: 21 };
        assert_eq!(broken.block_id(0, PartitionId(0), TaskAttemptId(0)), None);
    }

    #[test]
    fn content_follows_from_the_seed_alone() {
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
