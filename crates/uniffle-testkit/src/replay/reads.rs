//! Blocks read from one partition, in the recording and in the replay.
//!
//! The time at which a block moves from memory to a disk varies, so responses are not compared one
//! by one. All reads of the replay together must return every recorded block, unchanged.

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;
use croaring::Treemap;

use uniffle_client::block::Block;
use uniffle_client::read::{self, RecordPosition};
use uniffle_wire::types::{BlockId, BlockMeta};

/// Blocks of one partition by id, as read by the recording and by the replay.
#[derive(Debug, Default)]
pub(super) struct PartitionReads {
    recorded: BTreeMap<BlockId, BlockMeta>,
    replayed: BTreeMap<BlockId, BlockMeta>,
    recorded_index: Vec<RecordPosition>,
    replayed_index: Vec<RecordPosition>,
    /// Last block of the replay's last response by task filter. Each filter is a separate reader of
    /// memory.
    cursors: HashMap<Option<Bytes>, BlockId>,
}

/// A range of a partition's data and its blocks.
#[derive(Debug)]
pub(super) struct ReplayPiece {
    pub(super) offset: u64,
    pub(super) length: u64,
    records: Vec<RecordPosition>,
}

impl PartitionReads {
    /// Returns the cursor of the replay's reader: the last block that it read, or −1. It begins
    /// anew if the recorded reader did (`recorded` is −1).
    pub(super) fn cursor(&mut self, filter: Option<&Bytes>, recorded: i64) -> i64 {
        let reader = filter.cloned();
        if recorded == -1 {
            self.cursors.remove(&reader);
        }
        self.cursors.get(&reader).map_or(-1, |last| last.0)
    }

    /// Adds both responses to a read of memory.
    pub(super) fn memory(
        &mut self,
        filter: Option<&Bytes>,
        recorded: &[Block],
        replayed: &[Block],
    ) -> Result<(), String> {
        let wanted = filter.map(|bytes| read::decode_bitmap(bytes)).transpose();
        let wanted = wanted.map_err(|error| error.to_string())?;
        if let Some(last) = replayed.last() {
            self.cursors.insert(filter.cloned(), last.meta.block_id);
        }
        self.recorded.extend(recorded.iter().map(|block| (block.meta.block_id, block.meta)));
        replayed.iter().try_for_each(|block| self.take(block, wanted.as_ref()))
    }

    /// Replaces the index by both responses to a read of it.
    pub(super) fn index(&mut self, recorded: Vec<RecordPosition>, replayed: Vec<RecordPosition>) {
        self.recorded_index = recorded;
        self.replayed_index = replayed;
    }

    /// Returns the replay's ranges of the blocks that the recording read at `offset`. Blocks that
    /// are still in memory are omitted.
    pub(super) fn data(&mut self, offset: u64, length: u64) -> Vec<ReplayPiece> {
        let range = offset..offset + length;
        let wanted: Vec<BlockMeta> = self
            .recorded_index
            .iter()
            .filter(|record| range.contains(&record.offset))
            .map(|record| record.meta)
            .collect();
        self.recorded.extend(wanted.iter().map(|meta| (meta.block_id, *meta)));
        let mut pieces: Vec<ReplayPiece> = Vec::new();
        for record in &self.replayed_index {
            if !wanted.iter().any(|meta| meta.block_id == record.meta.block_id) {
                continue;
            }
            let length = u64::from(record.meta.length);
            match pieces.last_mut() {
                Some(piece) if piece.offset + piece.length == record.offset => {
                    piece.length += length;
                    piece.records.push(*record);
                }
                _ => pieces.push(ReplayPiece { offset: record.offset, length, records: vec![*record] }),
            }
        }
        pieces
    }

    /// Adds the replay's response to the read of a range. Returns the number of blocks.
    pub(super) fn piece(&mut self, piece: ReplayPiece, data: &Bytes) -> Result<usize, String> {
        let segment =
            read::DataSegment { offset: piece.offset, length: piece.length, records: piece.records };
        let blocks = read::segment_blocks(&segment, data).map_err(|error| error.to_string())?;
        blocks.iter().try_for_each(|block| self.take(block, None))?;
        Ok(blocks.len())
    }

    /// Returns the blocks of the recording that the replay lacks.
    pub(super) fn missing(&self) -> Vec<BlockId> {
        self.recorded.keys().filter(|id| !self.replayed.contains_key(id)).copied().collect()
    }

    /// Adds a block of the replay. Its bytes must match its checksum, which is compared with the
    /// sent one later.
    pub(super) fn take(&mut self, block: &Block, wanted: Option<&Treemap>) -> Result<(), String> {
        read::check_crc(block).map_err(|error| error.to_string())?;
        let task = block.meta.task_attempt_id.0.cast_unsigned();
        if wanted.is_some_and(|wanted| !wanted.contains(task)) {
            return Err(format!("{:?} is of a task that was not requested", block.meta));
        }
        self.replayed.insert(block.meta.block_id, block.meta);
        Ok(())
    }

    /// Checks that every block of both sides is as it was sent.
    pub(super) fn compare(&self, sent: &HashMap<BlockId, BlockMeta>) -> Result<(), String> {
        for meta in self.recorded.values().chain(self.replayed.values()) {
            let sent = sent.get(&meta.block_id);
            if sent != Some(meta) {
                return Err(format!("sent {sent:?}, but read {meta:?}"));
            }
        }
        Ok(())
    }
}
