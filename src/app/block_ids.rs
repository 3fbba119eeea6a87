//! The block ids that finished task attempts reported, one set per partition, charged to the heap before they are kept.
//!
//! Ids are opaque here: the partition stands beside them in every request, so any block-id layout works
//! (docs/protocol.md §3.1). A retried report changes nothing. A report is paid for as a whole ([`BlockIds::pay`])
//! before any of it is entered, piece by piece, so that it is refused as a whole or not at all.

use std::collections::HashMap;

use croaring::Treemap;

use uniffle_wire::types::PartitionId;

use super::quota::{Quota, QuotaExceeded, Share};
use crate::budget::heap::HeapFull;
use crate::budget::{Budget, Charge, HeapKind};
use crate::durability::{Cost, IdSet};

/// A partition's place in the table.
const PARTITION_BYTES: u64 = 96;

/// A report named another number of bitmaps than the shuffle's first (docs/protocol.md §11 bitmap-count: ids were lost
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

/// What a report takes; what is not entered goes back.
#[derive(Debug)]
pub struct PaidIds {
    share: Share,
    charge: Charge,
    counted: Charge,
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

    /// What a piece of a report would add; none if it would learn nothing at all. Each partition and each id of a
    /// report is named once.
    ///
    /// # Errors
    /// The report must be refused.
    pub fn cost_of(
        &self,
        bitmap_count: i32,
        partitions: &[(PartitionId, impl AsRef<[i64]>)],
    ) -> Result<Option<Cost>, ReportError> {
        self.check(bitmap_count, partitions)?;
        let cost = self.cost(partitions);
        Ok(Some(cost).filter(|cost| cost.new > 0 || self.bitmap_count.is_none()))
    }

    /// Takes what a report costs, before any of it is entered; `counted` is what quotas count of it.
    ///
    /// # Errors
    /// Too many ids, or no heap for them; nothing was taken then.
    pub fn pay(&self, cost: Cost, counted: Charge) -> Result<PaidIds, ReportError> {
        let mut share = self.share.of_the_same();
        share.grow(cost.new)?;
        let charge = self.charge.budget().try_charge(cost.bytes);
        let charge = charge.map_err(|refusal| HeapFull::of(HeapKind::ReportedIds, refusal))?;
        Ok(PaidIds { share, charge, counted })
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

    /// A report was paid for and will be entered: the first one's number of bitmaps is that of all.
    ///
    /// # Errors
    /// [`BitmapCountChanged`].
    pub fn begin(&mut self, bitmap_count: i32) -> Result<(), BitmapCountChanged> {
        match *self.bitmap_count.get_or_insert(bitmap_count) {
            first if first == bitmap_count => Ok(()),
            first => Err(BitmapCountChanged { first, sent: bitmap_count }),
        }
    }

    /// Adds a piece of a report that has begun. Ids already present are ignored. Where others have changed the sets
    /// since it was paid for, and made it dearer, the rest is charged beyond what there is: it is acknowledged, or soon
    /// will be.
    pub fn enter(&mut self, partitions: &[(PartitionId, impl AsRef<[i64]>)], paid: &mut PaidIds) {
        let bytes = self.cost(partitions).bytes;
        let charge = paid.charge.split_up_to(bytes);
        self.hold(bytes - charge.bytes());
        self.charge.merge(charge);
        let mut added = 0;
        for (partition, ids) in partitions {
            let set = self.partitions.entry(*partition).or_default();
            added += ids.as_ref().iter().filter(|id| set.add(id.unsigned_abs())).count() as u64;
        }
        self.count_added(added, paid);
    }

    /// Counts ids that were added, of what is `paid`.
    fn count_added(&mut self, added: u64, paid: &mut PaidIds) {
        self.share.move_from(&mut paid.share, added);
        let counted = paid.counted.split_up_to(added);
        let beyond = counted.budget().force_charge(added - counted.bytes());
        self.counted.merge(counted);
        self.counted.merge(beyond);
    }

    /// Enters a report that an earlier process acknowledged: there is heap for it, or what comes later finds none.
    ///
    /// # Errors
    /// [`ReportError`]; the sets are as before then, and do not have what was acknowledged.
    pub fn take_over(
        &mut self,
        bitmap_count: i32,
        partitions: &[(PartitionId, impl AsRef<[i64]>)],
    ) -> Result<(), ReportError> {
        self.check(bitmap_count, partitions)?;
        let Cost { new, bytes } = self.cost(partitions);
        let mut paid = self.pay(Cost { new, bytes: 0 }, self.counted.budget().nothing())?;
        self.begin(bitmap_count)?;
        self.hold(bytes);
        let mut added = 0;
        for (partition, ids) in partitions {
            let mut ids: Vec<u64> = ids.as_ref().iter().map(|id| id.unsigned_abs()).collect();
            ids.sort_unstable();
            added += self.partitions.entry(*partition).or_default().add_sorted(&ids);
        }
        self.count_added(added, &mut paid);
        Ok(())
    }

    /// Charges what else is held of the shuffle's ids, until they are dropped.
    pub fn hold(&mut self, bytes: u64) {
        let more = self.charge.budget().force_charge(bytes);
        self.charge.merge(more);
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

    fn none(quota: &Quota, heap: &Budget) -> BlockIds {
        BlockIds::new(quota, heap, Budget::new(u64::MAX).nothing())
    }

    /// A whole report, in one piece.
    fn report(
        ids: &mut BlockIds,
        bitmap_count: i32,
        report: &[(PartitionId, Vec<i64>)],
    ) -> Result<(), ReportError> {
        let cost = ids.cost_of(bitmap_count, report)?.unwrap_or_default();
        let counted = ids.counted.budget().force_charge(cost.new);
        let mut paid = ids.pay(cost, counted)?;
        ids.begin(bitmap_count)?;
        ids.enter(report, &mut paid);
        assert_eq!((paid.share.held(), paid.charge.bytes(), paid.counted.bytes()), (0, 0, 0));
        Ok(())
    }

    #[test]
    fn a_retried_report_changes_nothing() {
        let (quota, heap) = (Quota::new(100), heap());
        let mut ids = none(&quota, &heap);
        let first = [(P0, vec![0, 1, i64::MAX]), (P1, vec![7])];
        report(&mut ids, 1, &first).unwrap();
        let charged = heap.used();
        assert_eq!(ids.cost_of(1, &first), Ok(None));
        report(&mut ids, 1, &first).unwrap();
        assert_eq!(heap.used(), charged);
        assert_eq!(ids.of(&[P0]).to_vec(), vec![0, 1, i64::MAX.unsigned_abs()]);
        assert_eq!(ids.of(&[P0, P1]).cardinality(), 4);
        assert_eq!(ids.of(&[PartitionId(9)]).cardinality(), 0);
        assert_eq!((quota.used(), ids.counted.bytes()), (4, 4));
        drop(ids);
        assert_eq!((quota.used(), heap.used()), (0, 0));
    }

    /// A bounded number of ids is no bound: scattered ones take a hundred times what neighbours take.
    #[test]
    fn n17_reported_ids_follow_the_heap_and_not_a_number() {
        let heap = heap();
        let mut ids = none(&Quota::new(u64::MAX), &heap);
        let refused = (0..).find_map(|task: i64| {
            let scattered: Vec<i64> = (0..1000).map(|id| (task * 1000 + id) << 33).collect();
            let (known, used) = (ids.count(), heap.used());
            let error = report(&mut ids, 1, &[(P0, scattered)]).err()?;
            assert_eq!((ids.count(), heap.used()), (known, used), "nothing of it was taken");
            Some((task, error))
        });
        let (reports, error) = refused.unwrap();
        assert!((2..8).contains(&reports), "{reports} reports of 1,000 scattered ids in 1 MiB");
        assert!(matches!(error, ReportError::NoHeap(HeapFull { kind: "reported_ids", .. })), "{error}");
        assert!(heap.used() <= heap.capacity());
        report(&mut ids, 1, &[(P1, vec![1])]).unwrap();
    }

    #[test]
    fn a_refused_report_leaves_the_sets_as_they_were() {
        let (quota, heap) = (Quota::new(3), heap());
        let mut ids = none(&quota, &heap);
        report(&mut ids, 1, &[(P0, vec![1])]).unwrap();
        assert!(matches!(report(&mut ids, 2, &[(P0, vec![2])]), Err(ReportError::BitmapCountChanged(_))));
        assert!(matches!(report(&mut ids, 1, &[(P0, vec![2, -1])]), Err(ReportError::NegativeId(-1))));
        assert!(matches!(report(&mut ids, 1, &[(P0, vec![2, 3, 4])]), Err(ReportError::TooMany(_))));
        assert_eq!(ids.of(&[P0]).to_vec(), vec![1]);
        assert_eq!((quota.used(), ids.counted.bytes()), (1, 1));
    }

    #[test]
    fn two_reports_that_are_paid_for_at_once_are_both_entered_and_charged_for_what_they_came_to() {
        let (quota, heap) = (Quota::new(1000), heap());
        let mut ids = none(&quota, &heap);
        // Each is a list, the two together a bitmap; a third of them is in both.
        let scattered = |from: i64| [(P0, (from..from + 120).map(|id| id << 33).collect::<Vec<_>>())];
        let (some, others) = (scattered(0), scattered(80));
        let [mut first, mut second] = [&some, &others].map(|report| {
            let cost = ids.cost_of(1, report).unwrap().unwrap();
            ids.pay(cost, ids.counted.budget().force_charge(cost.new)).unwrap()
        });
        assert_eq!(quota.used(), 240);
        ids.begin(1).unwrap();
        assert_eq!(ids.begin(2), Err(BitmapCountChanged { first: 1, sent: 2 }));
        ids.enter(&some, &mut first);
        let listed = heap.used();
        ids.enter(&others, &mut second);
        drop((first, second));
        assert_eq!((quota.used(), ids.count(), ids.counted.bytes()), (200, 200, 200));
        assert!(heap.used() > 4 * listed, "a bitmap of scattered ids takes more than two lists");
        drop(ids);
        assert_eq!((quota.used(), heap.used()), (0, 0));
    }

    #[test]
    fn what_was_acknowledged_is_taken_over_without_heap_for_it() {
        let (quota, heap) = (Quota::new(1000), Budget::new(100));
        let mut ids = none(&quota, &heap);
        ids.take_over(1, &[(P0, (0..100).collect::<Vec<_>>())]).unwrap();
        assert_eq!((quota.used(), ids.count(), ids.counted.bytes()), (100, 100, 100));
        assert!(heap.used() > heap.capacity());
        assert!(matches!(ids.take_over(2, &[(P0, vec![1])]), Err(ReportError::BitmapCountChanged(_))));
    }
}
