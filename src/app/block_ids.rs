//! Block ids reported by finished task attempts: one set per partition in memory, and runs on disk.
//!
//! Ids are opaque here, so any block-id layout works (docs/protocol.md §3.1). A report reserves its
//! [`Price`] before it is stored. Afterwards the heap charge is settled to the allocated bytes. If
//! the heap is full, `service` moves all ids of a shuffle to a run ([`BlockIds::begin_spill`]).
//! Invariant: an id stays readable in memory until its run is complete. An id that is in a run, or
//! on its way into one, may be stored and counted again.

use std::collections::HashMap;
use std::sync::Arc;

use uniffle_wire::types::PartitionId;

use super::quota::{Quota, QuotaExceeded, QuotaShare};
use crate::log::{IdRun, IdSet, PartitionBlockIds};
use uniffle_base::budget::heap::HeapFull;
use uniffle_base::budget::{Budget, Charge};

/// Heap of a partition's table entry, including the largest single growth of its list.
const PARTITION_BYTES: u64 = 96;
/// Heap reserved per id of a report. [`BlockIds::insert`] charges what exceeds it.
const ID_BYTES: u64 = 8;

/// Error: a report has another number of bitmaps than the shuffle's first report. Accepting it
/// would lose ids silently (docs/protocol.md §11 bitmap-count).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("bitmapNum is {sent}, must be {first} as in the shuffle's first report")]
pub struct BitmapCountChanged {
    /// Number of bitmaps in the first report.
    pub first: i32,
    /// Number of bitmaps in this report.
    pub sent: i32,
}

/// Reason to refuse a report as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ReportError {
    /// See [`BitmapCountChanged`].
    #[error(transparent)]
    BitmapCountChanged(#[from] BitmapCountChanged),
    /// The limit on stored ids is reached.
    #[error("reported block ids: {0}")]
    TooMany(#[from] QuotaExceeded),
    /// The heap has no room for the ids.
    #[error(transparent)]
    NoHeap(#[from] HeapFull),
    /// A block id is negative.
    #[error("block id is {0}, must be 0 or more")]
    NegativeId(i64),
}

/// Amounts to reserve for a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Price {
    /// Block ids, including known ones.
    pub ids: u64,
    /// Heap bytes.
    pub bytes: u64,
}

impl Price {
    /// Returns the price of a report, regardless of the stored ids.
    #[must_use]
    pub fn of(partitions: &[PartitionBlockIds]) -> Self {
        let ids = partitions.iter().map(|it| it.block_ids.len() as u64).sum();
        Self { ids, bytes: ID_BYTES * ids + PARTITION_BYTES * partitions.len() as u64 }
    }
}

/// Resources reserved for a report. Drop returns the unused part.
#[derive(Debug)]
pub struct PaidIds {
    share: QuotaShare,
    charge: Charge,
    counted: Charge,
}

/// Ids in memory, by partition.
pub type IdTable = HashMap<PartitionId, IdSet>;

/// Reported ids of one shuffle.
#[derive(Debug)]
pub struct BlockIds {
    bitmap_count: Option<i32>,
    partitions: IdTable,
    /// Ids that are being written to a run. They are read from here until the run is complete.
    leaving: Option<Arc<IdTable>>,
    /// Ids on disk, oldest run first, each with its charge to the disk quotas.
    runs: Vec<(Arc<IdRun>, Charge)>,
    share: QuotaShare,
    charge: Charge,
    /// Charge to the quotas of reported ids.
    counted: Charge,
}

impl BlockIds {
    /// Creates an empty set. Added ids count against `quota` and in `counted`, and are charged to
    /// `heap`.
    #[must_use]
    pub fn new(quota: &Quota, heap: &Budget, counted: Charge) -> Self {
        let charge = heap.empty_charge();
        Self {
            bitmap_count: None,
            partitions: IdTable::new(),
            leaving: None,
            runs: Vec::new(),
            share: quota.share(),
            charge,
            counted,
        }
    }

    /// Checks a report in which the ids of each partition are sorted.
    ///
    /// # Errors
    /// Returns the reason to refuse the report.
    pub fn check(
        &self,
        bitmap_count: i32,
        partitions: &[PartitionBlockIds<impl AsRef<[i64]>>],
    ) -> Result<(), ReportError> {
        if let Some(first) = self.bitmap_count.filter(|first| *first != bitmap_count) {
            return Err(BitmapCountChanged { first, sent: bitmap_count }.into());
        }
        // Records of the metadata log sort ids as unsigned, so negative ids would break their
        // order.
        let ids = partitions.iter().map(|it| it.block_ids.as_ref());
        let ends = ids.flat_map(|ids| [ids.first(), ids.last()]);
        match ends.flatten().find(|id| **id < 0) {
            Some(negative) => Err(ReportError::NegativeId(*negative)),
            None => Ok(()),
        }
    }

    /// Returns whether all these sorted ids are in memory, and a report has begun. Stops at the
    /// first new id.
    #[must_use]
    pub fn has_all(&self, partitions: &[PartitionBlockIds<impl AsRef<[i64]>>]) -> bool {
        let is_known = |it: &PartitionBlockIds<_>| {
            let ids: &[i64] = AsRef::as_ref(&it.block_ids);
            let mut known: Vec<_> = self.sets(it.partition).map(IdSet::lookup).collect();
            ids.iter().all(|id| known.iter_mut().any(|known| known.contains(id.unsigned_abs())))
        };
        self.bitmap_count.is_some() && partitions.iter().all(is_known)
    }

    /// Reserves `ids` against the limit on all ids. `charge` and `counted` are the reservations of
    /// heap and quotas.
    ///
    /// # Errors
    /// [`QuotaExceeded`].
    pub fn pay(&self, ids: u64, charge: Charge, counted: Charge) -> Result<PaidIds, QuotaExceeded> {
        let mut share = self.share.of_the_same();
        share.grow(ids)?;
        Ok(PaidIds { share, charge, counted })
    }

    /// Returns the budget that ids are charged to.
    pub fn heap(&self) -> &Budget {
        self.charge.budget()
    }

    /// Begins to add a report. The first report determines the number of bitmaps for all.
    ///
    /// # Errors
    /// [`BitmapCountChanged`].
    pub fn begin(&mut self, bitmap_count: i32) -> Result<(), BitmapCountChanged> {
        match *self.bitmap_count.get_or_insert(bitmap_count) {
            first if first == bitmap_count => Ok(()),
            first => Err(BitmapCountChanged { first, sent: bitmap_count }),
        }
    }

    /// Adds a piece of a report that has begun. The ids of a partition ascend. Ids in `partitions`
    /// are ignored. Chunks that compress worse than before may take more than the reservation. The
    /// excess is charged beyond the capacity, because the report is acknowledged already or soon
    /// will be.
    pub fn insert(&mut self, partitions: &[PartitionBlockIds<impl AsRef<[i64]>>], paid: &mut PaidIds) {
        let mut ids = Vec::new();
        let (mut before, mut after) = ((0, 0), (0, 0));
        for PartitionBlockIds { partition, block_ids } in partitions {
            ids.clear();
            ids.extend(block_ids.as_ref().iter().map(|id| id.unsigned_abs()));
            let set = self.partitions.entry(*partition).or_insert_with(|| {
                after.0 += PARTITION_BYTES;
                IdSet::default()
            });
            before = (before.0 + set.heap_bytes(), before.1 + set.len());
            set.add_sorted(&ids);
            after = (after.0 + set.heap_bytes(), after.1 + set.len());
        }
        settle(&mut self.charge, before.0, after.0, &mut paid.charge);
        self.settle_count(before.1, after.1, paid);
    }

    fn settle_count(&mut self, before: u64, after: u64, paid: &mut PaidIds) {
        settle(&mut self.counted, before, after, &mut paid.counted);
        self.share.move_from(&mut paid.share, after.saturating_sub(before));
        self.share.shrink_to(self.share.held() - before.saturating_sub(after));
    }

    /// Adds a report that an earlier process acknowledged. The ids of a partition ascend. The
    /// report is charged even beyond the capacity.
    ///
    /// # Errors
    /// [`ReportError`]; the sets are unchanged then and lack the acknowledged ids.
    pub fn insert_recovered(
        &mut self,
        bitmap_count: i32,
        partitions: &[PartitionBlockIds],
    ) -> Result<(), ReportError> {
        self.check(bitmap_count, partitions)?;
        let empty = |charge: &Charge| charge.budget().empty_charge();
        let price = Price::of(partitions);
        let mut paid = self.pay(price.ids, empty(&self.charge), empty(&self.counted))?;
        self.begin(bitmap_count)?;
        self.insert(partitions, &mut paid);
        Ok(())
    }

    /// Charges further memory held for the shuffle's ids until they are dropped.
    pub fn hold(&mut self, bytes: u64) {
        let more = self.charge.budget().charge_unchecked(bytes);
        self.charge.merge(more);
    }

    /// Returns the sets of `partition` in memory. A clone shares most of its ids.
    pub fn sets(&self, partition: PartitionId) -> impl Iterator<Item = &IdSet> {
        self.tables().filter_map(move |table| table.get(&partition))
    }

    /// Returns the sets of all partitions in memory.
    pub fn by_partition(&self) -> impl Iterator<Item = (PartitionId, &IdSet)> {
        self.tables().flatten().map(|(partition, ids)| (*partition, ids))
    }

    fn tables(&self) -> impl Iterator<Item = &IdTable> {
        self.leaving.as_deref().into_iter().chain([&self.partitions])
    }

    /// Returns the runs of ids on disk, oldest first.
    #[must_use]
    pub fn runs(&self) -> Vec<Arc<IdRun>> {
        self.runs.iter().map(|(run, _)| Arc::clone(run)).collect()
    }

    /// Returns whether ids are on disk.
    #[must_use]
    pub fn has_runs(&self) -> bool {
        !self.runs.is_empty()
    }

    /// Returns the heap bytes of the ids in memory.
    #[must_use]
    pub fn table_bytes(&self) -> u64 {
        self.tables().map(heap_bytes).sum()
    }

    /// Returns the ids to write to a run: the ids in memory, or those of an unfinished run. They
    /// stay readable in memory until [`BlockIds::end_spill`].
    pub fn begin_spill(&mut self) -> Option<Arc<IdTable>> {
        if self.leaving.is_none() && !self.partitions.is_empty() {
            self.leaving = Some(Arc::new(std::mem::take(&mut self.partitions)));
        }
        self.leaving.clone()
    }

    /// Replaces the ids of [`BlockIds::begin_spill`] by `run`. Returns whether it is the first run.
    pub fn end_spill(&mut self, run: IdRun, on_disk: Charge) -> bool {
        let bytes = self.leaving.take().map_or(0, |table| heap_bytes(&table));
        let is_first = self.runs.is_empty();
        self.add_run(run, on_disk);
        drop(self.charge.split_up_to(bytes));
        is_first
    }

    fn add_run(&mut self, run: IdRun, on_disk: Charge) {
        self.hold(run.heap_bytes());
        self.runs.push((Arc::new(run), on_disk));
    }

    /// Adds a report that was written as a run of its own. Its `ids` are counted from `paid`.
    pub fn enter_run(&mut self, run: IdRun, on_disk: Charge, ids: u64, paid: &mut PaidIds) {
        self.add_run(run, on_disk);
        self.settle_count(0, ids, paid);
    }

    /// Replaces the `old` runs by `run`, which contains their ids.
    pub fn replace_runs(&mut self, old: &[Arc<IdRun>], run: IdRun, on_disk: Charge) {
        let is_old = |run: &Arc<IdRun>| old.iter().any(|old| Arc::ptr_eq(old, run));
        let freed = old.iter().map(|run| run.heap_bytes()).sum();
        self.runs.retain(|(run, _)| !is_old(run));
        self.add_run(run, on_disk);
        drop(self.charge.split_up_to(freed));
    }

    /// Returns the number of stored ids. An id in memory and in runs counts once in each, and as
    /// often after these runs were merged.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.share.held()
    }
}

fn heap_bytes(table: &IdTable) -> u64 {
    table.values().map(|set| PARTITION_BYTES + set.heap_bytes()).sum()
}

/// Moves the difference between two amounts to or from `held`. Growth is taken from `paid`; the
/// missing part is charged beyond the capacity.
fn settle(held: &mut Charge, before: u64, after: u64, paid: &mut Charge) {
    let grown = after.saturating_sub(before);
    let part = paid.split_up_to(grown);
    let beyond = held.budget().charge_unchecked(grown - part.bytes());
    held.merge(part);
    held.merge(beyond);
    drop(held.split_up_to(before.saturating_sub(after)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use uniffle_base::budget::HeapKind;

    const P0: PartitionId = PartitionId(0);
    const P1: PartitionId = PartitionId(1);

    fn ids_of(partition: PartitionId, block_ids: Vec<i64>) -> PartitionBlockIds {
        PartitionBlockIds { partition, block_ids }
    }

    fn heap() -> Budget {
        Budget::new(1 << 20)
    }

    fn none(quota: &Quota, heap: &Budget) -> BlockIds {
        BlockIds::new(quota, heap, Budget::new(u64::MAX).empty_charge())
    }

    fn paid(ids: &BlockIds, report: &[PartitionBlockIds]) -> Result<PaidIds, ReportError> {
        let price = Price::of(report);
        let charge = ids.heap().try_charge(price.bytes);
        let charge = charge.map_err(|refusal| HeapFull::of(HeapKind::ReportedIds, refusal))?;
        Ok(ids.pay(price.ids, charge, ids.counted.budget().charge_unchecked(price.ids))?)
    }

    /// Adds a whole report in one piece.
    fn report(
        ids: &mut BlockIds,
        bitmap_count: i32,
        report: &[PartitionBlockIds],
    ) -> Result<(), ReportError> {
        ids.check(bitmap_count, report)?;
        let mut paid = paid(ids, report)?;
        ids.begin(bitmap_count)?;
        ids.insert(report, &mut paid);
        Ok(())
    }

    fn listed(ids: &BlockIds, partition: PartitionId) -> Vec<u64> {
        ids.sets(partition).flat_map(IdSet::iter).collect()
    }

    #[test]
    fn retried_report_changes_nothing() {
        let (quota, heap) = (Quota::new(100), heap());
        let mut ids = none(&quota, &heap);
        let first = [ids_of(P0, vec![0, 1, i64::MAX]), ids_of(P1, vec![7])];
        assert!(
            !ids.has_all(&first) && !ids.has_all(&first[..0]),
            "an unknown number of bitmaps must count as new"
        );
        report(&mut ids, 1, &first).unwrap();
        let charged = heap.used();
        assert!(
            ids.has_all(&first)
                && !ids.has_all(&[ids_of(P1, vec![7, 8])])
                && !ids.has_all(&[ids_of(PartitionId(9), vec![7])])
        );
        report(&mut ids, 1, &first).unwrap();
        assert_eq!(heap.used(), charged);
        assert_eq!(listed(&ids, P0), [0, 1, i64::MAX.unsigned_abs()]);
        assert_eq!((listed(&ids, P1), listed(&ids, PartitionId(9))), (vec![7], vec![]));
        assert_eq!((quota.used(), ids.counted.bytes()), (4, 4));
        drop(ids);
        assert_eq!((quota.used(), heap.used()), (0, 0));
    }

    #[test]
    fn id_costs_at_most_eight_bytes_in_usual_layouts() {
        // Sequence numbers far apart, Spark's layout, one step, random.
        let mut random = 88_172_645_463_325_252_u64;
        let mut next = move || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random >> 1).cast_signed()
        };
        let random: Vec<i64> = (0..50_000).map(|_| next()).collect();
        let layouts: [Vec<i64>; 4] = [
            (0..50_000).map(|id| id << 33).collect(),
            (0..50_000).map(|id| (id % 500) << 42 | 5 << 22 | (id / 500) << 2).collect(),
            (0..50_000).map(|id| id * 4).collect(),
            random,
        ];
        for (number, layout) in layouts.iter().enumerate() {
            for reported_together in [1, 40, 5000] {
                let heap = heap();
                let mut ids = none(&Quota::new(u64::MAX), &heap);
                for some in layout.chunks(reported_together) {
                    let mut some = some.to_vec();
                    some.sort_unstable();
                    report(&mut ids, 1, &[ids_of(P0, some)]).unwrap();
                }
                let bytes = heap.used();
                assert!(
                    bytes <= 8 * 50_000,
                    "layout {number}, {reported_together} ids per report: 50,000 ids take {bytes} bytes"
                );
                assert_eq!(listed(&ids, P0).len(), 50_000);
            }
        }
    }

    #[test]
    fn report_without_heap_is_refused_as_a_whole() {
        let heap = heap();
        let mut ids = none(&Quota::new(u64::MAX), &heap);
        let refused = (0..).find_map(|task: i64| {
            let scattered: Vec<i64> = (0..1000).map(|id| (task * 1000 + id).pow(3)).collect();
            let (known, used) = (ids.count(), heap.used());
            let error = report(&mut ids, 1, &[ids_of(P0, scattered)]).err()?;
            assert_eq!(
                (ids.count(), heap.used()),
                (known, used),
                "a refused report changed the ids or the heap"
            );
            Some((task, error))
        });
        let (reports, error) = refused.unwrap();
        assert!(reports > 131, "only {reports} reports of 1,000 ids fit into 1 MiB");
        assert!(matches!(error, ReportError::NoHeap(HeapFull { kind: "reported_ids", .. })), "{error}");
        assert!(heap.used() <= heap.capacity());
    }

    #[test]
    fn refused_report_leaves_the_sets_unchanged() {
        let (quota, heap) = (Quota::new(3), heap());
        let mut ids = none(&quota, &heap);
        report(&mut ids, 1, &[ids_of(P0, vec![1])]).unwrap();
        assert!(matches!(
            report(&mut ids, 2, &[ids_of(P0, vec![2])]),
            Err(ReportError::BitmapCountChanged(_))
        ));
        assert!(matches!(report(&mut ids, 1, &[ids_of(P0, vec![-1, 2])]), Err(ReportError::NegativeId(-1))));
        assert!(matches!(report(&mut ids, 1, &[ids_of(P0, vec![2, 3, 4])]), Err(ReportError::TooMany(_))));
        assert_eq!(listed(&ids, P0), [1]);
        assert_eq!((quota.used(), ids.counted.bytes()), (1, 1));
    }

    #[test]
    fn concurrent_reports_are_charged_for_what_was_allocated() {
        let (quota, heap) = (Quota::new(1000), heap());
        let mut ids = none(&quota, &heap);
        // A third of the ids is in both reports.
        let scattered = |from: i64| [ids_of(P0, (from..from + 120).map(|id| id << 33).collect::<Vec<_>>())];
        let (some, others) = (scattered(0), scattered(80));
        let [mut first, mut second] = [&some, &others].map(|report| paid(&ids, report).unwrap());
        assert_eq!((quota.used(), heap.used()), (240, 2 * (120 * 8 + 96)));
        ids.begin(1).unwrap();
        assert_eq!(ids.begin(2), Err(BitmapCountChanged { first: 1, sent: 2 }));
        ids.insert(&some, &mut first);
        ids.insert(&others, &mut second);
        drop((first, second));
        assert_eq!((quota.used(), ids.count(), ids.counted.bytes()), (200, 200, 200));
        assert_eq!(heap.used(), PARTITION_BYTES + ids.sets(P0).map(IdSet::heap_bytes).sum::<u64>());
        drop(ids);
        assert_eq!((quota.used(), heap.used()), (0, 0));
    }

    #[test]
    fn acknowledged_report_is_recovered_without_heap() {
        let (quota, heap) = (Quota::new(1000), Budget::new(100));
        let mut ids = none(&quota, &heap);
        ids.insert_recovered(1, &[ids_of(P0, (0..100).map(|id| id << 20).collect::<Vec<_>>())]).unwrap();
        assert_eq!((quota.used(), ids.count(), ids.counted.bytes()), (100, 100, 100));
        assert!(heap.used() > heap.capacity());
        assert!(matches!(
            ids.insert_recovered(2, &[ids_of(P0, vec![1])]),
            Err(ReportError::BitmapCountChanged(_))
        ));
    }
}
