//! Blocks of the tests, whose content follows from id and length.

use uniffle_client::block::{Block, IdLayout};
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_wire::types::{PartitionId, TaskAttemptId};

const SEED: u64 = 0x5eed;

/// Returns block `sequence` of `task` for `partition`.
pub(crate) fn block(partition: i32, task: i64, sequence: u32, length: u32) -> Block {
    let generator = BlockGenerator::new(SEED, IdLayout::SPARK);
    generator.block(PartitionId(partition), TaskAttemptId(task), sequence, length)
}

/// Returns blocks of one task with small, different lengths.
pub(crate) fn blocks(partition: i32, task: i64, sequences: std::ops::Range<u32>) -> Vec<Block> {
    sequences.map(|n| block(partition, task, n, 500 + n)).collect()
}

/// Returns a batch of one partition.
pub(crate) fn batch(partition: i32, blocks: &[Block]) -> Vec<(PartitionId, Vec<Block>)> {
    vec![(PartitionId(partition), blocks.to_vec())]
}

/// Returns the number of payload bytes.
pub(crate) fn payload(blocks: &[Block]) -> u64 {
    blocks.iter().map(|block| u64::from(block.meta.length)).sum()
}
