//! The block ids that finished task attempts reported, one 64-bit set per partition.
//!
//! Ids are opaque here: the partition stands beside them in every request, so any block-id layout works
//! (docs/protocol.md §3.1). A retried report changes nothing.

use std::collections::HashMap;

use croaring::Treemap;

use uniffle_wire::types::PartitionId;

use super::quota::{Quota, QuotaExceeded, Share};

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
    /// A block id is negative.
    #[error("block id {0} is negative")]
    NegativeId(i64),
}

/// Reported ids of one shuffle.
#[derive(Debug)]
pub struct BlockIds {
    bitmap_count: Option<i32>,
    partitions: HashMap<PartitionId, Treemap>,
    share: Share,
}

impl BlockIds {
    /// No ids; what is added counts against `quota`.
    #[must_use]
    pub fn new(quota: &Quota) -> Self {
        Self { bitmap_count: None, partitions: HashMap::new(), share: quota.share() }
    }

    /// Whether [`BlockIds::report`] would take these ids, and whether it would learn anything.
    ///
    /// # Errors
    /// As there.
    pub fn would_learn(
        &self,
        bitmap_count: i32,
        partitions: &[(PartitionId, Vec<i64>)],
    ) -> Result<bool, ReportError> {
        self.check(bitmap_count, partitions)?;
        let new = partitions.iter().map(|(partition, ids)| match self.partitions.get(partition) {
            Some(set) => ids.iter().filter(|id| !set.contains(id.unsigned_abs())).count(),
            None => ids.len(),
        });
        let new = new.sum::<usize>() as u64;
        self.share.check(new)?;
        Ok(new > 0 || self.bitmap_count.is_none())
    }

    fn check(&self, bitmap_count: i32, partitions: &[(PartitionId, Vec<i64>)]) -> Result<(), ReportError> {
        if let Some(first) = self.bitmap_count.filter(|first| *first != bitmap_count) {
            return Err(BitmapCountChanged { first, sent: bitmap_count }.into());
        }
        let mut all_ids = partitions.iter().flat_map(|(_, ids)| ids.iter().copied());
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
        partitions: &[(PartitionId, Vec<i64>)],
    ) -> Result<(), ReportError> {
        self.check(bitmap_count, partitions)?;
        let before = self.share.held();
        self.share.grow(partitions.iter().map(|(_, ids)| ids.len() as u64).sum())?;
        self.bitmap_count = Some(bitmap_count);
        let mut added = 0;
        for (partition, ids) in partitions {
            let set = self.partitions.entry(*partition).or_default();
            added += ids.iter().filter(|id| set.add_checked(id.unsigned_abs())).count() as u64;
        }
        self.share.shrink_to(before + added);
        Ok(())
    }

    /// The ids of `partitions` together.
    #[must_use]
    pub fn of(&self, partitions: &[PartitionId]) -> Treemap {
        let mut all = Treemap::new();
        for set in partitions.iter().filter_map(|partition| self.partitions.get(partition)) {
            all.or_inplace(set);
        }
        all
    }

    /// Those of `ids` that were reported in `partition`.
    #[must_use]
    pub fn among(&self, partition: PartitionId, ids: &Treemap) -> Treemap {
        self.partitions.get(&partition).map(|set| set.and(ids)).unwrap_or_default()
    }

    /// All partitions with their ids.
    pub fn by_partition(&self) -> impl Iterator<Item = (PartitionId, &Treemap)> {
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

    #[test]
    fn a_retried_report_changes_nothing() {
        let quota = Quota::new(100);
        let mut ids = BlockIds::new(&quota);
        let report = [(P0, vec![0, 1, i64::MAX]), (P1, vec![7])];
        ids.report(1, &report).unwrap();
        ids.report(1, &report).unwrap();
        assert_eq!(ids.of(&[P0]).to_vec(), vec![0, 1, i64::MAX.unsigned_abs()]);
        assert_eq!(ids.of(&[P0, P1]).cardinality(), 4);
        assert_eq!(ids.of(&[PartitionId(9)]).cardinality(), 0);
        assert_eq!(quota.used(), 4);
        drop(ids);
        assert_eq!(quota.used(), 0);
    }

    #[test]
    fn a_refused_report_leaves_the_sets_as_they_were() {
        let quota = Quota::new(3);
        let mut ids = BlockIds::new(&quota);
        ids.report(1, &[(P0, vec![1])]).unwrap();
        assert!(matches!(ids.report(2, &[(P0, vec![2])]), Err(ReportError::BitmapCountChanged(_))));
        assert!(matches!(ids.report(1, &[(P0, vec![2, -1])]), Err(ReportError::NegativeId(-1))));
        assert!(matches!(ids.report(1, &[(P0, vec![2, 3, 4])]), Err(ReportError::TooMany(_))));
        assert_eq!(ids.of(&[P0]).to_vec(), vec![1]);
        assert_eq!(quota.used(), 1);
    }
}
