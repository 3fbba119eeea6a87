//! Invariants of a shuffle: the responses to its clients, and the blocks that must therefore be
//! served.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use bytes::Bytes;
use uniffle_testkit::oracle::ShuffleHistory;
use uniffle_wire::types::BlockId;

/// Partitions of every shuffle.
pub(crate) const PARTITIONS: i32 = 3;

/// An acknowledged block.
#[derive(Debug, Clone)]
pub(crate) struct Block {
    pub(crate) data: Vec<u8>,
    /// The worker process that acknowledged it last.
    pub(crate) life: u32,
}

/// Responses to the clients of one registered shuffle. They determine the invariants:
///
/// - Every acknowledged and reported block is readable with the same bytes or is reported lost.
///   Only possible losses are reported.
/// - Blocks acknowledged in this process, or once seen in an index, are readable.
/// - A partition's data stream has no gaps, and index entries never change, also for readers that
///   began in an earlier process.
/// - A start serves every block on the disks, and reports only missing blocks as lost.
/// - Acknowledged reports are known, and no others. Where metadata was damaged or missing, or power
///   was lost with unsynced data, results are refused, but never short.
/// - Unacknowledged blocks are invisible, except those of a send that failed after some partitions.
/// - A power loss does not affect data that a graceful stop has flushed.
/// - A shuffle whose end was acknowledged is not recovered.
/// - Empty directories are refused while the object store has part of the data on the disks. Where
///   they are accepted, they lose nothing.
/// - A store that hangs delays no report of a shuffle that has nothing in it, and no report
///   forever.
/// - After everything is unregistered, all counters are zero. No file remains, unless results may
///   be refused.
#[derive(Debug, Default)]
pub(crate) struct Invariants {
    /// Blocks of all sends, whatever the outcome, by partition.
    pub(crate) sent: HashMap<i32, BTreeMap<i64, Bytes>>,
    /// Acknowledged blocks, by partition.
    pub(crate) acknowledged: HashMap<i32, BTreeMap<i64, Block>>,
    /// Ids in acknowledged reports, by partition.
    pub(crate) reported: HashMap<i32, BTreeSet<i64>>,
    /// Ids in all reports, by partition. A failed report may have been written.
    pub(crate) tried: HashMap<i32, BTreeSet<i64>>,
    /// Blocks that were in an index or on disk at a graceful stop. Only a damaged disk can lose
    /// them.
    pub(crate) durable: HashMap<i32, BTreeSet<i64>>,
    /// The longest index that was read, by partition.
    pub(crate) index_seen: HashMap<i32, Vec<u8>>,
    /// Number of the registration of this shuffle.
    pub(crate) epoch: u64,
    pub(crate) local_order: bool,
    /// A start found two blocks at one place, because directories ran separately.
    pub(crate) has_overlaps: bool,
    /// Results are refused in the current process, so reported blocks are not required.
    pub(crate) is_refused: bool,
    /// The shuffle was registered before. A missing directory may still contain the earlier
    /// registration.
    pub(crate) is_again: bool,
}

impl Invariants {
    /// Returns the responses in the form of the oracle.
    pub(crate) fn responses(&self) -> ShuffleHistory {
        let mut responses = ShuffleHistory::default();
        (0..PARTITIONS).for_each(|partition| _ = responses.partition(partition));
        for (partition, blocks) in &self.sent {
            let blocks = blocks.iter().map(|(id, data)| (BlockId(*id), data.clone()));
            responses.partition(*partition).sent = blocks.collect();
        }
        let ids = |ids: &BTreeSet<i64>| ids.iter().copied().map(BlockId).collect();
        for (partition, tried) in &self.tried {
            responses.partition(*partition).tried = ids(tried);
        }
        for (partition, reported) in &self.reported {
            responses.partition(*partition).reported = ids(reported);
        }
        responses
    }

    /// Weakens the invariants after files were removed: acknowledged blocks may be lost, but not
    /// silently.
    pub(crate) fn lose_files(&mut self) {
        self.acknowledged.values_mut().flat_map(BTreeMap::values_mut).for_each(|block| block.life = 0);
        self.lose_places();
    }

    /// Drops the expected places of blocks, which may have changed.
    pub(crate) fn lose_places(&mut self) {
        self.durable.clear();
        self.index_seen.clear();
    }

    pub(crate) fn acknowledge(&mut self, partition: i32, id: i64, data: Vec<u8>, life: u32) {
        let block = Block { data, life };
        self.acknowledged.entry(partition).or_default().insert(id, block);
    }

    /// Returns whether an acknowledged report has the block.
    pub(crate) fn is_reported(&self, partition: i32, id: i64) -> bool {
        contains(&self.reported, partition, id)
    }

    /// Returns whether a block is certain to be in a tier.
    fn is_safe(&self, partition: i32, id: i64, now: Now) -> bool {
        if now.reads_fail {
            return false;
        }
        let acknowledged = self.acknowledged.get(&partition).and_then(|blocks| blocks.get(&id));
        let fresh = acknowledged.is_some_and(|block| block.life == now.life);
        fresh || (!now.disk_is_missing && contains(&self.durable, partition, id))
    }

    /// Returns the blocks that a new reader must find, unless their loss is reported to it.
    pub(crate) fn required(&self, partition: i32, now: Now) -> BTreeMap<i64, Vec<u8>> {
        let blocks = self.acknowledged.get(&partition).into_iter().flatten();
        let wanted = blocks.filter(|(id, _)| {
            let is_reported = !self.is_refused && contains(&self.reported, partition, **id);
            self.is_safe(partition, **id, now) || is_reported
        });
        wanted.map(|(id, block)| (*id, block.data.clone())).collect()
    }

    /// Returns whether a loss in this partition is possible.
    pub(crate) fn can_have_lost(&self, partition: i32, now: Now) -> bool {
        let mut tried = self.tried.get(&partition).into_iter().flatten();
        self.is_refused && self.is_again || tried.any(|id| !self.is_safe(partition, *id, now))
    }

    /// Returns whether one of `ids` can be lost.
    pub(crate) fn can_miss(&self, ids: &[(i32, Vec<i64>)], now: Now) -> bool {
        let mut all = ids.iter().flat_map(|(partition, ids)| ids.iter().map(|id| (*partition, *id)));
        all.any(|(partition, id)| !self.is_safe(partition, id, now))
    }

    /// Records that all blocks acknowledged by process `life` are on the disks or in the store.
    pub(crate) fn settle(&mut self, life: u32) {
        for (partition, blocks) in &self.acknowledged {
            let fresh = blocks.iter().filter(|(_, block)| block.life == life).map(|(id, _)| *id);
            self.durable.entry(*partition).or_default().extend(fresh);
        }
    }

    /// Returns acknowledged blocks that no report contains.
    pub(crate) fn unreported(&self) -> Vec<(i32, Vec<i64>)> {
        let mut all: Vec<(i32, Vec<i64>)> = Vec::new();
        for (partition, blocks) in &self.acknowledged {
            let ids = blocks.keys().copied().filter(|id| !contains(&self.reported, *partition, *id));
            all.push((*partition, ids.collect()));
        }
        all.retain(|(_, ids)| !ids.is_empty());
        all.sort();
        all
    }
}

fn contains(sets: &HashMap<i32, BTreeSet<i64>>, partition: i32, id: i64) -> bool {
    sets.get(&partition).is_some_and(|ids| ids.contains(&id))
}

/// State of the worker at the time of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Now {
    pub(crate) life: u32,
    pub(crate) disk_is_missing: bool,
    /// Disks fail to return stored data in this process, and some of it is abandoned.
    pub(crate) reads_fail: bool,
    /// Files were removed under this process.
    pub(crate) files_removed: bool,
}

impl Now {
    /// Returns whether stored data may be unreachable.
    pub(crate) fn has_holes(self) -> bool {
        self.disk_is_missing || self.reads_fail || self.files_removed
    }
}
