//! The block ids that finished task attempts reported, one set per partition, charged to the heap before they are kept.
//!
//! Ids are opaque here: the partition stands beside them in every request, so any block-id layout works
//! (docs/protocol.md §3.1). A retried report changes nothing.

use std::collections::HashMap;

use croaring::Treemap;

use uniffle_wire::types::PartitionId;

use super::quota::{Quota, QuotaExceeded, Share};
use crate::budget::heap::HeapFull;
use crate::budget::{Budget, Charge, HeapKind};
use crate::durability::{Cost, IdSet};

/// A partition's place in the table.
const PARTITION_BYTES: u64 = 96;

/// A report named another number of bitmaps than the shuffle's first (docs/protocol.md §11 trap 13: ids were lost
/// silently).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("bitmapNum is {sent}, the shuffle's first report had {first}")]
pub struct BitmapCountChanged {
    /// Of the first report.
    pub first: i32,
    /// Of this report.
    pub sent: i32,
}

/// Why a report was not taken; nothing of it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ReportError {
    /// See [`BitmapCountChanged`].
    #[error(transparent)]
    BitmapCountChanged(#[from] BitmapCountChanged),
    /// Too many ids are held.
    #[error("reported block ids: {0}")]
    TooMany(#[from] QuotaExceeded),
    /// No heap for them.
    #[error(transparent)]
    NoHeap(#[from] HeapFull),
    /// A block id is negative.
    #[error("block id {0} is negative")]
    NegativeId(i64),
}

/// Reported ids of one shuffle.
#[derive(Debug)]
pub struct BlockIds {
    bitmap_count: Option<i32>,
    partitions: HashMap<PartitionId, IdSet>,
    share: Share,
    charge: Charge,
    /// As quotas count them.
    counted: Charge,
}

impl BlockIds {
    /// No ids; what is added counts against `quota`, is charged to `heap`, and counted with `counted`.
    #[must_use]
    pub fn new(quota: &Quota, heap: &Budget, counted: Charge) -> Self {
        let charge = heap.nothing();
        Self { bitmap_count: None, partitions: HashMap::new(), share: quota.share(), charge, counted }
    }

    /// Whether [`BlockIds::report`] would take these ids, and how many it would learn; none if it would learn nothing at all.
    ///
    /// # Errors
    /// As there.
    pub fn would_learn(
        &self,
        bitmap_count: i32,
        partitions: &[(PartitionId, impl AsRef<[i64]>)],
    ) -> Result<Option<u64>, ReportError> {
        self.check(bitmap_count, partitions)?;
        let Cost { new, bytes } = self.cost(partitions);
        self.share.check(new)?;
        let free = self.charge.budget().free();
        if bytes > free {
            return Err(HeapFull { kind: HeapKind::ReportedIds.name(), asked: bytes, free }.into());
        }
        Ok(Some(new).filter(|_| new > 0 || self.bitmap_count.is_none()))
    }

    fn cost(&self, partitions: &[(PartitionId, impl AsRef<[i64]>)]) -> Cost {
        let none = IdSet::default();
        let costs = partitions.iter().map(|(partition, ids)| match self.partitions.get(partition) {
            Some(set) => set.cost(ids.as_ref()),
            None => {
                let Cost { new, bytes } = none.cost(ids.as_ref());
                Cost { new, bytes: bytes + PARTITION_BYTES }
            }
        });
        costs.fold(Cost::default(), |sum, cost| Cost {
            new: sum.new + cost.new,
            bytes: sum.bytes + cost.bytes,
        })
    }

    fn check(
        &self,
        bitmap_count: i32,
        partitions: &[(PartitionId, impl AsRef<[i64]>)],
    ) -> Result<(), ReportError> {
        if let Some(first) = self.bitmap_count.filter(|first| *first != bitmap_count) {
            return Err(BitmapCountChanged { first, sent: bitmap_count }.into());
        }
        let mut all_ids = partitions.iter().flat_map(|(_, ids)| ids.as_ref().iter().copied());
        match all_ids.find(|id| *id < 0) {
            Some(negative) => Err(ReportError::NegativeId(negative)),
            None => Ok(()),
        }
    }

    /// Adds the ids of one task attempt. Ids already present are ignored.
    ///
    /// # Errors
    /// [`ReportError`]; then the sets are as before.
    pub fn report(
        &mut self,
        bitmap_count: i32,
        partitions: &[(PartitionId, impl AsRef<[i64]>)],
    ) -> Result<(), ReportError> {
        self.check(bitmap_count, partitions)?;
        let before = self.share.held();
        let cost = self.cost(partitions);
        self.share.grow(cost.new)?;
        let charged = self.charge.try_grow(cost.bytes);
        if let Err(refusal) = charged {
            self.share.shrink_to(before);
            return Err(HeapFull::of(HeapKind::ReportedIds, refusal).into());
        }
        self.enter(before, bitmap_count, partitions);
        Ok(())
    }

    /// As [`BlockIds::report`], of a report that an earlier process acknowledged: there is heap for it, or what comes later
    /// finds none.
    ///
    /// # Errors
    /// As there; the sets are as before then, and do not have what was acknowledged.
    pub fn take_over(
        &mut self,
        bitmap_count: i32,
        partitions: &[(PartitionId, impl AsRef<[i64]>)],
    ) -> Result<(), ReportError> {
        self.check(bitmap_count, partitions)?;
        let before = self.share.held();
        let cost = self.cost(partitions);
        self.share.grow(cost.new)?;
        self.hold(cost.bytes);
        self.enter(before, bitmap_count, partitions);
        Ok(())
    }

    /// Charges what else is held of the shuffle's ids, until they are dropped.
    pub fn hold(&mut self, bytes: u64) {
        let more = self.charge.budget().force_charge(bytes);
        self.charge.merge(more);
    }

    /// Adds ids that are paid for; `before` are held.
    fn enter(&mut self, before: u64, bitmap_count: i32, partitions: &[(PartitionId, impl AsRef<[i64]>)]) {
        self.bitmap_count = Some(bitmap_count);
        let mut added = 0;
        for (partition, ids) in partitions {
            let set = self.partitions.entry(*partition).or_default();
            added += ids.as_ref().iter().filter(|id| set.add(id.unsigned_abs())).count() as u64;
        }
        self.share.shrink_to(before + added);
        let counted = self.counted.budget().force_charge(added);
        self.counted.merge(counted);
    }

    /// The ids of `partitions` together.
    #[must_use]
    pub fn of(&self, partitions: &[PartitionId]) -> Treemap {
        let mut all = Treemap::new();
        for set in partitions.iter().filter_map(|partition| self.partitions.get(partition)) {
            set.add_to(&mut all);
        }
        all
    }

    /// The ids of `partition`, as they are now and shared as far as they are many; none if there are none.
    #[must_use]
    pub fn set(&self, partition: PartitionId) -> Option<IdSet> {
        self.partitions.get(&partition).cloned()
    }

    /// Those of `ids` that were reported in `partition`.
    #[must_use]
    pub fn among(&self, partition: PartitionId, ids: &Treemap) -> Treemap {
        self.partitions.get(&partition).map(|set| set.among(ids)).unwrap_or_default()
    }

    /// All partitions with their ids.
    pub fn by_partition(&self) -> impl Iterator<Item = (PartitionId, &IdSet)> {
        self.partitions.iter().map(|(partition, ids)| (*partition, ids))
    }

    /// How many ids are held.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.share.held()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P0: PartitionId = PartitionId(0);
    const P1: PartitionId = PartitionId(1);

    fn heap() -> Budget {
        Budget::new(1 << 20)
    }

    #[test]
    fn a_retried_report_changes_nothing() {
        let (quota, heap) = (Quota::new(100), heap());
        let mut ids = BlockIds::new(&quota, &heap, Budget::new(u64::MAX).nothing());
        let report = [(P0, vec![0, 1, i64::MAX]), (P1, vec![7])];
        ids.report(1, &report).unwrap();
        let charged = heap.used();
        ids.report(1, &report).unwrap();
        assert_eq!(heap.used(), charged);
        assert_eq!(ids.of(&[P0]).to_vec(), vec![0, 1, i64::MAX.unsigned_abs()]);
        assert_eq!(ids.of(&[P0, P1]).cardinality(), 4);
        assert_eq!(ids.of(&[PartitionId(9)]).cardinality(), 0);
        assert_eq!(quota.used(), 4);
        drop(ids);
        assert_eq!((quota.used(), heap.used()), (0, 0));
    }

    /// A bounded number of ids is no bound: scattered ones take a hundred times what neighbours take.
    #[test]
    fn n17_reported_ids_follow_the_heap_and_not_a_number() {
        let heap = heap();
        let mut ids = BlockIds::new(&Quota::new(u64::MAX), &heap, Budget::new(u64::MAX).nothing());
        let refused = (0..).find_map(|task: i64| {
            let scattered: Vec<i64> = (0..1000).map(|id| (task * 1000 + id) << 33).collect();
            let report = [(P0, scattered)];
            let known = ids.count();
            match (ids.would_learn(1, &report), ids.report(1, &report)) {
                (Ok(Some(_)), Ok(())) => None,
                (Err(foreseen), Err(error)) => {
                    assert_eq!((foreseen, ids.count()), (error, known), "nothing of it was taken");
                    Some((task, error))
                }
                other => panic!("{other:?}"),
            }
        });
        let (reports, error) = refused.unwrap();
        assert!((2..8).contains(&reports), "{reports} reports of 1,000 scattered ids in 1 MiB");
        assert!(matches!(error, ReportError::NoHeap(HeapFull { kind: "reported_ids", .. })), "{error}");
        assert!(heap.used() <= heap.capacity());
        ids.report(1, &[(P1, vec![1])]).unwrap();
    }

    #[test]
    fn a_refused_report_leaves_the_sets_as_they_were() {
        let (quota, heap) = (Quota::new(3), heap());
        let mut ids = BlockIds::new(&quota, &heap, Budget::new(u64::MAX).nothing());
        ids.report(1, &[(P0, vec![1])]).unwrap();
        assert!(matches!(ids.report(2, &[(P0, vec![2])]), Err(ReportError::BitmapCountChanged(_))));
        assert!(matches!(ids.report(1, &[(P0, vec![2, -1])]), Err(ReportError::NegativeId(-1))));
        assert!(matches!(ids.report(1, &[(P0, vec![2, 3, 4])]), Err(ReportError::TooMany(_))));
        assert_eq!(ids.of(&[P0]).to_vec(), vec![1]);
        assert_eq!(quota.used(), 1);
    }
}
