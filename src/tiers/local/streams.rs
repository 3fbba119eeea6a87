//! Where the published bytes of a shuffle are: by partition, extents one behind the other.
//!
//! They stay until the shuffle is purged, so they are charged: [`Streams`] pays for what grows with the number of extents. A
//! partition's place here and its first extent are paid for with its buffer (`HeapKind::Partitions`), unless a start found them.

use std::collections::HashMap;

use uniffle_wire::types::PartitionId;

use super::extent::{Extent, NO_LOG};
use super::extents::{ExtentList, PLACE_BYTES};
use crate::budget::{Budget, Charge};

/// Heap of a partition that a start found: its place in the table, which doubles when it is full, and its first extent.
const FOUND_PARTITION_BYTES: u64 = 2 * size_of::<(PartitionId, Partition)>() as u64 * 8 / 7 + PLACE_BYTES;

/// What is published of one partition.
#[derive(Debug, Default)]
pub(super) struct Partition {
    /// In the order of their bases, without gaps.
    pub(super) extents: ExtentList,
    /// Where the first one begins: what stands before it in the stream lies elsewhere.
    pub(super) start: u64,
    /// Length of the stream.
    pub(super) bytes: u64,
    pub(super) blocks: u64,
}

impl Partition {
    /// Nothing of it is known before `base`.
    pub(super) fn from(base: u64) -> Self {
        let mut partition = Self::default();
        partition.extend_to(base);
        partition
    }

    /// What stands before `start` lies elsewhere.
    pub(super) fn beginning_at(start: u64) -> Self {
        Self { start, bytes: start, ..Self::default() }
    }

    /// Takes out the extents that end at or before `until`; what they were.
    fn release(&mut self, until: u64) -> Vec<Extent> {
        let count = self.extents.after(until);
        let released: Vec<Extent> = self.extents.iter().take(count).copied().collect();
        self.extents = self.extents.without_first(count);
        self.start = self.extents.get(0).map_or(self.bytes, |extent| extent.base);
        self.blocks -= released.iter().map(|extent| u64::from(extent.blocks)).sum::<u64>();
        released
    }

    /// Extents whose records are known.
    pub(super) fn known_extents(&self) -> usize {
        self.extents.iter().filter(|extent| extent.index_log != NO_LOG).count()
    }

    /// Makes the stream go on at `base`, with a hole before it.
    pub(super) fn extend_to(&mut self, base: u64) {
        if base > self.bytes {
            self.push(Extent::gap(self.bytes, base - self.bytes));
        }
    }

    /// Appends an extent that begins where the stream ends.
    pub(super) fn push(&mut self, extent: Extent) {
        // A stream with a hole or an overlap would mix blocks up for every reader.
        assert_eq!(self.bytes, extent.base, "bases are assigned in the publish lane");
        self.bytes += extent.length;
        self.blocks += u64::from(extent.blocks);
        self.extents.push(extent);
    }

    /// Heap of the extents after the first.
    fn further_bytes(&self) -> u64 {
        self.extents.heap_bytes().saturating_sub(PLACE_BYTES)
    }
}

/// What is published of a shuffle.
#[derive(Debug)]
pub(super) struct Streams {
    by_partition: HashMap<PartitionId, Partition>,
    /// Given back after the lists.
    charge: Charge,
}

impl Streams {
    /// Nothing; what comes is charged to `budget`.
    pub(super) fn new(budget: &Budget) -> Self {
        Self { by_partition: HashMap::new(), charge: budget.nothing() }
    }

    /// What a start found, charged to the same budget.
    pub(super) fn found(&self, by_partition: HashMap<PartitionId, Partition>) -> Self {
        let further: u64 = by_partition.values().map(Partition::further_bytes).sum();
        let bytes = by_partition.len() as u64 * FOUND_PARTITION_BYTES + further;
        Self { by_partition, charge: self.charge.budget().force_charge(bytes) }
    }

    /// Takes everything out, with its charge.
    pub(super) fn take(&mut self) -> Self {
        let nothing = Self::new(self.charge.budget());
        std::mem::replace(self, nothing)
    }

    pub(super) fn get(&self, partition: PartitionId) -> Option<&Partition> {
        self.by_partition.get(&partition)
    }

    pub(super) fn get_mut(&mut self, partition: PartitionId) -> Option<&mut Partition> {
        self.by_partition.get_mut(&partition)
    }

    /// Appends an extent to a partition, whose stream begins at `first_base` if it is new.
    pub(super) fn push(&mut self, id: PartitionId, extent: Extent, first_base: u64) {
        let partition = self.by_partition.entry(id).or_insert_with(|| Partition::from(first_base));
        let before = partition.further_bytes();
        partition.push(extent);
        let after = partition.further_bytes();
        if after > before {
            self.charge.merge(self.charge.budget().force_charge(after - before));
        } else {
            drop(self.charge.split_up_to(before - after));
        }
    }

    /// Takes out what of a partition ends at or before `until`; what it was.
    pub(super) fn release(&mut self, id: PartitionId, until: u64) -> Vec<Extent> {
        let Some(partition) = self.by_partition.get_mut(&id) else { return Vec::new() };
        let before = partition.further_bytes();
        let released = partition.release(until);
        drop(self.charge.split_up_to(before.saturating_sub(partition.further_bytes())));
        released
    }

    /// All partitions.
    pub(super) fn iter(&self) -> impl Iterator<Item = (PartitionId, &Partition)> {
        self.by_partition.iter().map(|(id, partition)| (*id, partition))
    }

    /// All extents.
    pub(super) fn extents(&self) -> impl Iterator<Item = &Extent> {
        self.by_partition.values().flat_map(|partition| partition.extents.iter())
    }
}
