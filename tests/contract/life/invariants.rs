//! What clients were told, and so what must be true whatever happened since.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use bytes::Bytes;
use uniffle_testkit::oracle::Told;
use uniffle_wire::types::BlockId;

/// Of every shuffle.
pub(crate) const PARTITIONS: i32 = 3;

/// A block that was acknowledged.
#[derive(Debug, Clone)]
pub(crate) struct Block {
    pub(crate) data: Vec<u8>,
    /// The life of the worker that acknowledged it last.
    pub(crate) life: u32,
}

/// What clients of one registered shuffle were expected.
#[derive(Debug, Default)]
pub(crate) struct Invariants {
    /// Blocks of sends of any outcome, per partition.
    pub(crate) sent: HashMap<i32, BTreeMap<i64, Bytes>>,
    /// Acknowledged blocks per partition.
    pub(crate) acknowledged: HashMap<i32, BTreeMap<i64, Block>>,
    /// Ids of acknowledged reports per partition.
    pub(crate) reported: HashMap<i32, BTreeSet<i64>>,
    /// Ids of reports that were tried: a report that failed may have been written down.
    pub(crate) tried: HashMap<i32, BTreeSet<i64>>,
    /// Blocks that stood in an index, or were on the disks at an orderly end: they survive everything but disks.
    pub(crate) durable: HashMap<i32, BTreeSet<i64>>,
    /// The longest index seen per partition.
    pub(crate) index_seen: HashMap<i32, Vec<u8>>,
    /// Distinguishes registrations of the same shuffle.
    pub(crate) epoch: u64,
    pub(crate) local_order: bool,
    /// Its results are refused in this life: what was reported is not demanded.
    pub(crate) is_refused: bool,
    /// It was registered before: on a directory that was away the earlier one is not over.
    pub(crate) is_again: bool,
}

impl Invariants {
    /// The same as the judge takes it.
    pub(crate) fn told(&self) -> Told {
        let mut told = Told::default();
        (0..PARTITIONS).for_each(|partition| _ = told.partition(partition));
        for (partition, blocks) in &self.sent {
            let blocks = blocks.iter().map(|(id, data)| (BlockId(*id), data.clone()));
            told.partition(*partition).sent = blocks.collect();
        }
        let ids = |ids: &BTreeSet<i64>| ids.iter().copied().map(BlockId).collect();
        for (partition, tried) in &self.tried {
            told.partition(*partition).tried = ids(tried);
        }
        for (partition, reported) in &self.reported {
            told.partition(*partition).reported = ids(reported);
        }
        told
    }

    /// Any file may be gone: what was acknowledged so far may be lost, but not silently.
    pub(crate) fn lose_files(&mut self) {
        self.acknowledged.values_mut().flat_map(BTreeMap::values_mut).for_each(|block| block.life = 0);
        self.lose_places();
    }

    /// What is on the disks may not be found there any more.
    pub(crate) fn lose_places(&mut self) {
        self.durable.clear();
        self.index_seen.clear();
    }

    pub(crate) fn acknowledge(&mut self, partition: i32, id: i64, data: Vec<u8>, life: u32) {
        let block = Block { data, life };
        self.acknowledged.entry(partition).or_default().insert(id, block);
    }

    /// Whether a block is certain to be in a tier now.
    fn is_safe(&self, partition: i32, id: i64, now: Now) -> bool {
        if now.reads_fail {
            return false;
        }
        let acknowledged = self.acknowledged.get(&partition).and_then(|blocks| blocks.get(&id));
        let fresh = acknowledged.is_some_and(|block| block.life == now.life);
        fresh || (!now.disk_is_missing && contains(&self.durable, partition, id))
    }

    /// What a reader that begins now must find, unless it is told of a loss.
    pub(crate) fn required(&self, partition: i32, now: Now) -> BTreeMap<i64, Vec<u8>> {
        let blocks = self.acknowledged.get(&partition).into_iter().flatten();
        let wanted = blocks.filter(|(id, _)| {
            let is_reported = !self.is_refused && contains(&self.reported, partition, **id);
            self.is_safe(partition, **id, now) || is_reported
        });
        wanted.map(|(id, block)| (*id, block.data.clone())).collect()
    }

    /// Whether a loss in this partition can be true.
    pub(crate) fn can_have_lost(&self, partition: i32, now: Now) -> bool {
        let mut tried = self.tried.get(&partition).into_iter().flatten();
        self.is_refused && self.is_again || tried.any(|id| !self.is_safe(partition, *id, now))
    }

    /// Whether one of `ids` can be gone.
    pub(crate) fn can_miss(&self, ids: &[(i32, Vec<i64>)], now: Now) -> bool {
        let mut all = ids.iter().flat_map(|(partition, ids)| ids.iter().map(|id| (*partition, *id)));
        all.any(|(partition, id)| !self.is_safe(partition, id, now))
    }

    /// Everything is on the disks.
    pub(crate) fn settle(&mut self, life: u32) {
        for (partition, blocks) in &self.acknowledged {
            let fresh = blocks.iter().filter(|(_, block)| block.life == life).map(|(id, _)| *id);
            self.durable.entry(*partition).or_default().extend(fresh);
        }
    }

    /// Acknowledged blocks that no report named.
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

/// The moment of a question.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Now {
    pub(crate) life: u32,
    pub(crate) disk_is_missing: bool,
    /// In this life disks fail to give back what they have, and some of it is given up.
    pub(crate) reads_fail: bool,
    /// In this life files were removed under the worker.
    pub(crate) files_removed: bool,
}

impl Now {
    /// Whether what is on the disks may be out of reach.
    pub(crate) fn has_holes(self) -> bool {
        self.disk_is_missing || self.reads_fail || self.files_removed
    }
}
