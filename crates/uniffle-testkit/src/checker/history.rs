//! Blocks that clients of a checked worker sent, and the worker's responses.

use std::collections::BTreeMap;

use uniffle_client::block::Block;
use uniffle_wire::types::{BlockId, PartitionId, TaskAttemptId};

use crate::oracle::{self, ShuffleHistory};

/// Blocks of one shuffle, by partition.
pub(super) type ShuffleBlocks = BTreeMap<i32, BTreeMap<BlockId, Block>>;

/// Known facts about the shuffles, by id.
#[derive(Debug, Default)]
pub(super) struct CheckedHistory {
    /// All blocks that clients sent, and all responses.
    pub(super) histories: BTreeMap<i32, ShuffleHistory>,
    /// Acknowledged blocks whose report was acknowledged too.
    pub(super) reported: BTreeMap<i32, ShuffleBlocks>,
    /// The blocks of `reported`, and blocks in reports that failed, which the worker may have
    /// accepted.
    pub(super) in_reports: BTreeMap<i32, ShuffleBlocks>,
    next_task: i64,
}

impl CheckedHistory {
    pub(super) fn new_task(&mut self) -> TaskAttemptId {
        self.next_task += 1;
        TaskAttemptId(self.next_task)
    }

    pub(super) fn forget(&mut self, id: i32) {
        self.histories.remove(&id);
        self.reported.remove(&id);
        self.in_reports.remove(&id);
    }

    pub(super) fn sent(&mut self, id: i32, batch: &[(PartitionId, Vec<Block>)]) {
        let history = self.histories.entry(id).or_default();
        for (at, blocks) in batch {
            let blocks = blocks.iter().map(|block| (block.meta.block_id, block.data.clone()));
            history.partition(at.0).sent.extend(blocks);
        }
    }

    pub(super) fn tried(
        &mut self,
        id: i32,
        batch: &[(PartitionId, Vec<Block>)],
        report: &oracle::ReportedIds,
    ) {
        remember(&mut self.in_reports, id, batch);
        self.histories.entry(id).or_default().tried(report);
    }

    pub(super) fn reported(
        &mut self,
        id: i32,
        batch: &[(PartitionId, Vec<Block>)],
        report: &oracle::ReportedIds,
    ) {
        remember(&mut self.reported, id, batch);
        self.histories.entry(id).or_default().reported(report);
    }
}

fn remember(shuffles: &mut BTreeMap<i32, ShuffleBlocks>, id: i32, batch: &[(PartitionId, Vec<Block>)]) {
    let partitions = shuffles.entry(id).or_default();
    for (at, blocks) in batch {
        let blocks = blocks.iter().map(|block| (block.meta.block_id, block.clone()));
        partitions.entry(at.0).or_default().extend(blocks);
    }
}
