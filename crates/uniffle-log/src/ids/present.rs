//! Ids of the blocks in the tiers, charged to the application that wrote them.
//!
//! A set that exceeds its application's share of the heap is dropped. Its ids are still in the
//! index records of the tiers, and are looked up there when needed. Invariant: a set has all ids
//! that were added to it, or is dropped as a whole. Pure: no I/O.

use std::collections::HashMap;

use super::id_set::IdSet;
use uniffle_base::budget::{Budget, Charge};
use uniffle_wire::types::PartitionId;

/// Heap reserved per id. What a set takes beyond it is charged afterwards.
const ID_BYTES: u64 = 8;

/// Ids of one partition, charged as they are added.
#[derive(Debug)]
pub struct HeldIds {
    ids: IdSet,
    charge: Charge,
}

impl HeldIds {
    /// Returns an empty set whose ids are charged to `heap`.
    #[must_use]
    pub fn new(heap: &Budget) -> Self {
        Self { ids: IdSet::default(), charge: heap.empty_charge() }
    }

    /// Adds all ids, or none. Returns false if there is no heap for them.
    #[must_use]
    pub fn add(&mut self, ids: &[u64]) -> bool {
        if self.charge.try_grow(ID_BYTES * ids.len() as u64).is_err() {
            return false;
        }
        let mut sorted = ids.to_vec();
        sorted.sort_unstable();
        self.ids.add_sorted(&sorted);
        self.settle();
        true
    }

    /// Removes ids.
    pub(crate) fn remove_all(&mut self, ids: &IdSet) {
        self.ids.remove_all(ids);
        self.settle();
    }

    /// Adjusts the charge to the size of the set.
    fn settle(&mut self) {
        let (charged, held) = (self.charge.bytes(), self.ids.heap_bytes());
        // The spare capacity of a list is small.
        self.charge.merge(self.charge.budget().charge_unchecked(held.saturating_sub(charged)));
        drop(self.charge.split_up_to(charged.saturating_sub(held)));
    }

    /// Returns the set.
    #[must_use]
    pub fn ids(&self) -> &IdSet {
        &self.ids
    }

    /// Moves the charge of the set to another budget. Returns `None` if there is no heap for it.
    fn charged_to(self, heap: &Budget) -> Option<Self> {
        let Self { ids, charge } = self;
        let bytes = charge.bytes();
        // Released first, because both budgets may be parts of the same one.
        drop(charge);
        Some(Self { ids, charge: heap.try_charge(bytes).ok()? })
    }
}

/// A copy is charged too, even beyond the capacity.
impl Clone for HeldIds {
    fn clone(&self) -> Self {
        Self { ids: self.ids.clone(), charge: self.charge.budget().charge_unchecked(self.charge.bytes()) }
    }
}

/// Ids of one shuffle that a start finds in a tier, by partition. The default has room for all.
#[derive(Debug, Clone)]
pub struct PresentIds {
    heap: Budget,
    /// Ids per partition, or `None` if they are not held but are in the tier.
    partitions: HashMap<PartitionId, Option<HeldIds>>,
}

impl Default for PresentIds {
    fn default() -> Self {
        Self::new(&Budget::new(u64::MAX))
    }
}

impl PresentIds {
    /// Returns an empty table whose ids are charged to `heap`.
    #[must_use]
    pub fn new(heap: &Budget) -> Self {
        Self { heap: heap.clone(), partitions: HashMap::new() }
    }

    /// Adds ids of a partition, in any order.
    pub fn add(&mut self, partition: PartitionId, ids: &[u64]) {
        let heap = &self.heap;
        let held = self.partitions.entry(partition).or_insert_with(|| Some(HeldIds::new(heap)));
        if held.as_mut().is_some_and(|held| !held.add(ids)) {
            *held = None;
        }
    }

    /// Removes the ids of a partition, which will be read again.
    pub fn clear(&mut self, partition: PartitionId) {
        self.partitions.insert(partition, Some(HeldIds::new(&self.heap)));
    }

    /// Adds the ids of the same shuffle in another tier.
    pub fn merge(&mut self, other: Self) {
        for (partition, held) in other.partitions {
            match held {
                Some(held) => slices(held.ids(), SLICE_IDS).for_each(|ids| self.add(partition, &ids)),
                None => drop(self.partitions.insert(partition, None)),
            }
        }
    }

    /// Returns the ids of a partition, or `None` if they are not held.
    #[must_use]
    pub fn held(&self, partition: PartitionId) -> Option<&IdSet> {
        self.partitions.get(&partition)?.as_ref().map(HeldIds::ids)
    }

    /// Returns the partitions with ids that are not held.
    pub fn in_tier(&self) -> impl Iterator<Item = PartitionId> {
        self.partitions.iter().filter(|(_, held)| held.is_none()).map(|(partition, _)| *partition)
    }

    /// Returns the number of partitions.
    #[must_use]
    pub fn len(&self) -> usize {
        self.partitions.len()
    }

    /// Returns whether there are no partitions.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.partitions.is_empty()
    }

    /// Returns all partitions, with their ids charged to `heap`. Partitions whose ids are not held
    /// have `None`.
    pub(crate) fn charged_to(self, heap: &Budget) -> impl Iterator<Item = (PartitionId, Option<HeldIds>)> {
        let all = self.partitions.into_iter();
        all.map(|(partition, held)| (partition, held.and_then(|held| held.charged_to(heap))))
    }
}

/// Number of ids that are handled together: 1 MiB.
pub const SLICE_IDS: usize = 1 << 17;

/// Returns the ids of a set in order, in slices of up to `max` ids.
pub fn slices(ids: &IdSet, max: usize) -> impl Iterator<Item = Vec<u64>> {
    let mut ids = ids.iter();
    std::iter::from_fn(move || {
        let slice: Vec<u64> = ids.by_ref().take(max).collect();
        Some(slice).filter(|slice| !slice.is_empty())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const P0: PartitionId = PartitionId(0);
    const P1: PartitionId = PartitionId(1);

    #[test]
    fn ids_beyond_the_share_are_dropped_and_released() {
        let heap = Budget::new(4096);
        let mut present = PresentIds::new(&heap);
        present.add(P0, &[3, 1, 2]);
        (0..2000).for_each(|n: u64| present.add(P1, &[(n * n) << 33]));
        assert_eq!(present.held(P0).unwrap().len(), 3);
        assert_eq!((present.held(P1).is_none(), present.in_tier().collect::<Vec<_>>()), (true, vec![P1]));
        assert!(heap.used() <= 100, "three ids take {} bytes", heap.used());
        let app = Budget::new(20);
        let charged: HashMap<_, _> = present.charged_to(&app).collect();
        assert!(charged[&P0].is_none() && charged[&P1].is_none());
        assert_eq!((heap.used(), app.used()), (0, 0));
    }

    #[test]
    fn tables_of_two_tiers_are_merged() {
        let heap = Budget::new(1 << 20);
        let (mut here, mut there) = (PresentIds::new(&heap), PresentIds::new(&heap));
        here.add(P0, &[1, 2]);
        there.add(P0, &[2, 3]);
        there.add(P1, &[7]);
        here.merge(there);
        assert_eq!(here.held(P0).unwrap().iter().collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!((here.held(P1).unwrap().len(), here.len(), here.in_tier().count()), (1, 2, 0));
        drop(here);
        assert_eq!(heap.used(), 0);
    }

    #[test]
    fn slices_have_all_ids_in_order() {
        let ids = IdSet::from_iter((0..1000).map(|n| n * 7));
        let all: Vec<Vec<u64>> = slices(&ids, 300).collect();
        assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [300, 300, 300, 100]);
        assert!(all.concat().iter().copied().eq((0..1000).map(|n| n * 7)));
        assert_eq!(slices(&IdSet::default(), 300).count(), 0);
    }
}
