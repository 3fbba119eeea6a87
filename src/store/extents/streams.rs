//! The extent map of a shuffle: its published extents, by partition and in the order of the stream.
//!
//! They exist until the shuffle is purged, so they are charged: [`Streams`] charges all extents
//! after the first of a partition. The entry of a partition and its first extent are charged with
//! its buffer (`HeapKind::Partitions`), or here after a start.

use std::collections::HashSet;

use indexmap::IndexMap;
use uniffle_wire::types::PartitionId;

use super::extent::{Extent, ExtentList};
use super::extent_list::recharge;
use uniffle_base::budget::{Budget, Charge};

/// Partitions in the order of their first extent, so that a walk over them also finds partitions
/// that are added meanwhile.
pub(in crate::store) type Partitions = IndexMap<PartitionId, Partition>;

/// Heap of a recovered partition: its entries in both tables of [`Partitions`], which double when
/// full, and its first extent.
const FOUND_PARTITION_BYTES: u64 = {
    let (entry, place) = (size_of::<(u64, PartitionId, Partition)>(), size_of::<u64>() + 1);
    2 * (entry + place * 8 / 7) as u64 + ExtentList::PLACE_BYTES
};

/// Published state of one partition.
#[derive(Debug, Clone, Default)]
pub(in crate::store) struct Partition {
    /// Extents ordered by base, without gaps.
    pub(in crate::store) extents: ExtentList,
    /// Number of extents in objects.
    pub(in crate::store) in_objects: usize,
    /// Length of the stream.
    pub(in crate::store) bytes: u64,
    pub(in crate::store) blocks: u64,
}

impl Partition {
    /// Creates a stream that has a hole up to `base`.
    pub(in crate::store) fn from(base: u64) -> Self {
        let mut partition = Self::default();
        partition.extend_to(base);
        partition
    }

    /// Returns its extents on disks.
    pub(in crate::store) fn on_disks(&self) -> impl Iterator<Item = &Extent> {
        self.extents.iter().filter(|extent| extent.is_on_disk())
    }

    /// Extends the stream to `base` with a hole.
    pub(in crate::store) fn extend_to(&mut self, base: u64) {
        if base > self.bytes {
            self.push(Extent::gap(self.bytes, base - self.bytes));
        }
    }

    /// Appends an extent that begins at the end of the stream.
    pub(in crate::store) fn push(&mut self, extent: Extent) {
        // A stream with a hole or an overlap would mix blocks up for every reader.
        assert_eq!(self.bytes, extent.base, "bases are assigned under the publish lock");
        self.bytes += extent.length;
        self.blocks += u64::from(extent.blocks);
        self.in_objects += usize::from(extent.is_in_object());
        self.extents.push(extent);
    }
}

/// Published extents of one data log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::store) struct InLog {
    pub(in crate::store) extents: u64,
    pub(in crate::store) bytes: u64,
}

/// Published extents of all data logs, by slot. Counted incrementally: an offload asks for them per
/// object.
#[derive(Debug, Default)]
struct ByLog(Vec<InLog>);

/// Data logs with lost extents. A later start may be able to read them.
#[derive(Debug, Default)]
struct Lost(HashSet<u16>);

impl ByLog {
    fn of(&mut self, extent: &Extent) -> Option<&mut InLog> {
        if !extent.is_on_disk() {
            return None;
        }
        let slot = usize::from(extent.data_log);
        self.0.resize(self.0.len().max(slot + 1), InLog::default());
        self.0.get_mut(slot)
    }

    fn add(&mut self, extent: &Extent) {
        if let Some(InLog { extents, bytes }) = self.of(extent) {
            *extents += 1;
            *bytes += extent.length;
        }
    }

    fn take(&mut self, extent: &Extent) {
        if let Some(InLog { extents, bytes }) = self.of(extent) {
            *extents -= 1;
            *bytes -= extent.length;
        }
    }
}

/// Published state of a shuffle.
#[derive(Debug)]
pub(in crate::store) struct Streams {
    by_partition: Partitions,
    by_log: ByLog,
    lost: Lost,
    /// Declared last, so that it is dropped after the lists.
    charge: Charge,
}

impl Streams {
    /// Creates an empty state. Its extents are charged to `budget`.
    pub(in crate::store) fn new(budget: &Budget) -> Self {
        let (by_log, lost) = (ByLog::default(), Lost::default());
        Self { by_partition: Partitions::new(), by_log, lost, charge: budget.empty_charge() }
    }

    /// Creates the state that a start recovered, charged to the same budget.
    pub(in crate::store) fn found(&self, by_partition: Partitions) -> Self {
        let further: u64 = by_partition.values().map(|partition| partition.extents.further_bytes()).sum();
        let bytes = by_partition.len() as u64 * FOUND_PARTITION_BYTES + further;
        let mut by_log = ByLog::default();
        by_partition.values().flat_map(|partition| partition.extents.iter()).for_each(|it| by_log.add(it));
        let charge = self.charge.budget().charge_unchecked(bytes);
        Self { by_partition, by_log, lost: Lost::default(), charge }
    }

    /// Takes all extents, with their charge.
    pub(in crate::store) fn take(&mut self) -> Self {
        let nothing = Self::new(self.charge.budget());
        std::mem::replace(self, nothing)
    }

    pub(in crate::store) fn get(&self, partition: PartitionId) -> Option<&Partition> {
        self.by_partition.get(&partition)
    }

    /// Returns the extents of a data log.
    pub(super) fn in_log(&self, slot: u16) -> InLog {
        self.by_log.0.get(usize::from(slot)).copied().unwrap_or_default()
    }

    /// Returns the data logs with extents, ordered by slot.
    pub(in crate::store) fn logs(&self) -> impl Iterator<Item = (u16, InLog)> {
        let all = self.by_log.0.iter().zip(0..).map(|(it, slot)| (slot, *it));
        all.filter(|(_, it)| it.extents > 0)
    }

    /// Marks an extent as lost. Returns it, or `None` if another extent or a hole has its place
    /// now.
    pub(in crate::store) fn lose(&mut self, id: PartitionId, lost: &Extent) -> Option<Extent> {
        let partition = self.by_partition.get_mut(&id)?;
        let at = partition.extents.beginning_at(lost.base)?;
        let extent = partition.extents.get_mut(at).filter(|it| !it.is_lost() && it.is_at(lost))?;
        let lost = std::mem::replace(extent, Extent::gap(extent.base, extent.length));
        partition.blocks += u64::from(extent.blocks);
        partition.blocks -= u64::from(lost.blocks);
        partition.in_objects -= usize::from(lost.is_in_object());
        self.by_log.take(&lost);
        if lost.is_on_disk() {
            self.lost.0.insert(lost.data_log);
        }
        Some(lost)
    }

    /// Returns whether no extent of a data log is left in it. A log with a hole may be readable at
    /// a later start.
    pub(in crate::store) fn is_log_empty(&self, slot: u16) -> bool {
        self.in_log(slot).extents == 0 && !self.lost.0.contains(&slot)
    }

    /// Appends an extent to a partition. The stream of a new partition begins at `first_base`.
    pub(in crate::store) fn push(&mut self, id: PartitionId, extent: Extent, first_base: u64) {
        self.by_log.add(&extent);
        let partition = self.by_partition.entry(id).or_insert_with(|| Partition::from(first_base));
        let before = partition.extents.further_bytes();
        partition.push(extent);
        recharge(&mut self.charge, before, partition.extents.further_bytes());
    }

    /// Replaces an extent on a disk by its copy in an object. Returns the extent, or `None` if it
    /// is not on a disk any more.
    pub(in crate::store) fn relocate(&mut self, id: PartitionId, copy: &Extent) -> Option<Extent> {
        let partition = self.by_partition.get_mut(&id)?;
        let at = partition.extents.beginning_at(copy.base)?;
        let extent = partition.extents.get_mut(at).filter(|it| it.is_on_disk() && it.is_copy_of(copy))?;
        let extent = std::mem::replace(extent, *copy);
        partition.in_objects += 1;
        self.by_log.take(&extent);
        Some(extent)
    }

    /// Returns up to `max` partitions after the first `at`.
    pub(in crate::store) fn partitions_from(&self, at: usize, max: usize) -> Vec<PartitionId> {
        let end = self.by_partition.len().min(at + max);
        self.by_partition.get_range(at..end).map_or_else(Vec::new, |some| some.keys().copied().collect())
    }

    /// Returns all extents.
    pub(in crate::store) fn extents(&self) -> impl Iterator<Item = &Extent> {
        self.by_partition.values().flat_map(|partition| partition.extents.iter())
    }
}

/// An extent, and the sequence in which it was published.
#[derive(Debug)]
pub(in crate::store) struct SequencedExtent {
    pub(in crate::store) sequence: u64,
    pub(in crate::store) extent: Extent,
}

/// Orders extents into a stream. Also returns whether some were left out, because they overlap
/// extents that were published later.
pub(in crate::store) fn sort_extents(mut extents: Vec<SequencedExtent>) -> (Partition, bool) {
    // The extent published later comes first, so that it takes precedence at its place.
    extents.sort_by_key(|it| (it.extent.base, std::cmp::Reverse(it.sequence)));
    let mut kept: Vec<SequencedExtent> = Vec::with_capacity(extents.len());
    let mut left_out = false;
    for next in extents {
        let overlaps = |kept: &[SequencedExtent]| {
            kept.last().is_some_and(|last| last.extent.base + last.extent.length > next.extent.base)
        };
        while overlaps(&kept) && kept.last().is_some_and(|last| last.sequence < next.sequence) {
            kept.pop();
            left_out = true;
        }
        if overlaps(&kept) {
            left_out = true;
        } else {
            kept.push(next);
        }
    }
    let mut partition = Partition::default();
    for SequencedExtent { extent, .. } in kept {
        partition.extend_to(extent.base);
        partition.push(extent);
    }
    (partition, left_out)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::super::extent::OBJECT;
    use super::*;

    /// An operation on a partition.
    #[derive(Debug, Clone, Copy)]
    enum StreamOperation {
        Publish {
            log: u16,
            length: u64,
        },
        /// Place in the stream, in thousandths.
        Relocate(u64),
        Lose(u64),
    }

    fn happens() -> impl Strategy<Value = StreamOperation> {
        prop_oneof![
            4 => (0u16..5, 1u64..9).prop_map(|(log, length)| StreamOperation::Publish { log, length }),
            1 => (0u64..=1000).prop_map(StreamOperation::Relocate),
            1 => (0u64..=1000).prop_map(StreamOperation::Lose),
        ]
    }

    fn counted(streams: &Streams) -> Vec<(u16, InLog)> {
        let mut by_log: BTreeMap<u16, InLog> = BTreeMap::new();
        for extent in streams.extents().filter(|extent| extent.is_on_disk()) {
            let it = by_log.entry(extent.data_log).or_default();
            (it.extents, it.bytes) = (it.extents + 1, it.bytes + extent.length);
        }
        by_log.into_iter().collect()
    }

    proptest! {
        #[test]
        fn log_content_is_counted(
            all in prop::collection::vec((0i32..3, happens()), 0..300),
        ) {
            let budget = Budget::new(u64::MAX);
            let mut streams = Streams::new(&budget);
            for (id, it) in all {
                let id = PartitionId(id);
                let bytes = streams.get(id).map_or(0, |it| it.bytes);
                let place = |thousandths: u64| bytes * thousandths / 1000;
                match it {
                    StreamOperation::Publish { log, length } => {
                        let extent = Extent { data_log: log, index_log: 0, ..Extent::gap(bytes, length) };
                        streams.push(id, extent, 0);
                    }
                    StreamOperation::Relocate(at) => {
                        let extents = streams.get(id).map(|it| it.extents.clone()).unwrap_or_default();
                        if let Some(extent) = extents.get(extents.after(place(at))) {
                            let copy = Extent { data_log: OBJECT, index_log: 1, ..*extent };
                            prop_assert_eq!(streams.relocate(id, &copy).is_some(), extent.is_on_disk());
                            prop_assert!(streams.relocate(id, &copy).is_none(), "an extent was relocated twice");
                        }
                    }
                    StreamOperation::Lose(at) => {
                        let extents = streams.get(id).map(|it| it.extents.clone()).unwrap_or_default();
                        if let Some(extent) = extents.get(extents.after(place(at))) {
                            prop_assert_eq!(streams.lose(id, extent).is_some(), !extent.is_lost());
                            prop_assert!(streams.lose(id, extent).is_none(), "an extent that is a hole was lost again");
                        }
                    }
                }
                prop_assert_eq!(streams.logs().collect::<Vec<_>>(), counted(&streams));
                prop_assert_eq!(streams.in_log(9), InLog::default());
                let in_objects = |it: &Partition| it.extents.iter().filter(|it| it.is_in_object()).count();
                let is_counted = |it: &Partition| it.in_objects == in_objects(it);
                prop_assert!(streams.by_partition.values().all(is_counted));
            }
            let partitions = std::mem::take(&mut streams.by_partition);
            let found = streams.found(partitions);
            prop_assert_eq!(found.logs().collect::<Vec<_>>(), counted(&found));
        }
    }

    /// Base sequence of a later epoch.
    const LATER: u64 = 1 << 32;

    fn extent(sequence: u64, base: u64, length: u64) -> SequencedExtent {
        let extent = Extent { data_log: 0, index_log: 0, blocks: 1, ..Extent::gap(base, length) };
        SequencedExtent { sequence, extent }
    }

    #[test]
    fn stream_keeps_holes_and_later_extents() {
        let (partition, left_out) = sort_extents(vec![extent(2, 300, 50), extent(0, 0, 100)]);
        let places: Vec<_> = partition.extents.iter().map(|it| (it.base, it.length, it.is_lost())).collect();
        assert_eq!(places, [(0, 100, false), (100, 200, true), (300, 50, false)]);
        assert_eq!((partition.bytes, left_out), (350, false));

        let overlapping = vec![extent(0, 0, 100), extent(1, 100, 100), extent(LATER, 150, 20)];
        let (partition, left_out) = sort_extents(overlapping);
        let places: Vec<_> = partition.extents.iter().map(|it| (it.base, it.length, it.is_lost())).collect();
        assert_eq!(places, [(0, 100, false), (100, 50, true), (150, 20, false)]);
        assert!(left_out);
    }
}
