//! Gathers the reports that a start reads from the metadata log, and adds them in batches. A report
//! has the block ids that one task attempt wrote: a few for each of many partitions. Adding many
//! ids to a partition's set at once is far cheaper than one by one.
//!
//! Invariants: gathered ids are added before anything reads the sets ([`ReportBatch::enter`] runs
//! at the end of the log at the latest). If they cannot be added together, each report is added or
//! refused as if it had come alone. About [`GATHERED_MAX`] ids of all shuffles wait at most.

use bytes::Bytes;
use uniffle_wire::types::{PartitionId, ShuffleKey};

use crate::app::{ReportError, ShuffleState};
use crate::log::{PartitionBlockIds, Record, Report, plain_ids};

/// Maximum number of waiting ids of all shuffles. With their records they take about 20 bytes each.
pub(super) const GATHERED_MAX: usize = 1 << 18;

/// A record counts as at least one id for this number of its bytes.
const RECORD_BYTES_PER_ID: usize = 20;

/// Gathered reports of one shuffle.
#[derive(Debug, Default)]
pub(super) struct ReportBatch {
    /// Encoded records, for the case that the ids cannot be added together.
    records: Vec<Bytes>,
    bitmap_count: i32,
    ids: hashbrown::HashMap<PartitionId, Vec<i64>>,
    /// Ids of the report that is being read.
    read: Vec<(PartitionId, i64)>,
}

impl ReportBatch {
    /// Gathers a report that may be added together with the earlier ones. Returns how many ids it
    /// counts for, or `None` if it must be added alone.
    pub(super) fn take(&mut self, report: &Report, record: &Bytes) -> Option<usize> {
        let fits = self.records.is_empty() || self.bitmap_count == report.bitmap_count;
        if !fits || report.partitions.iter().any(|it| it.block_ids.iter().any(|id| *id < 0)) {
            return None;
        }
        self.bitmap_count = report.bitmap_count;
        self.records.push(record.clone());
        let mut count = 0;
        for PartitionBlockIds { partition, block_ids } in &report.partitions {
            self.ids.entry(*partition).or_default().extend_from_slice(block_ids);
            count += block_ids.len();
        }
        Some(count.max(record.len() / RECORD_BYTES_PER_ID))
    }

    /// Gathers an encoded report that holds only ids, as [`ReportBatch::take`] does. Returns `None`
    /// for any other record, and for another number of bitmaps than the gathered reports have.
    pub(super) fn take_plain(&mut self, record: &Bytes) -> Option<usize> {
        let bitmap_count = plain_ids(record, &mut self.read)?;
        if !self.records.is_empty() && self.bitmap_count != bitmap_count {
            return None;
        }
        self.bitmap_count = bitmap_count;
        self.records.push(record.clone());
        for ids in self.read.chunk_by(|(one, _), (next, _)| one == next) {
            let of_one = ids.first().map(|(partition, _)| self.ids.entry(*partition).or_default());
            of_one.into_iter().for_each(|of_one| of_one.extend(ids.iter().map(|(_, id)| *id)));
        }
        Some(self.read.len().max(record.len() / RECORD_BYTES_PER_ID))
    }

    /// Adds the gathered reports. Returns the first error if some could not be added.
    pub(super) fn enter(&mut self, key: &ShuffleKey, state: &ShuffleState) -> Option<ReportError> {
        let Self { records, bitmap_count, ids, read: _ } = std::mem::take(self);
        if records.is_empty() {
            return None;
        }
        let sorted = |(partition, mut block_ids): (_, Vec<_>)| {
            block_ids.sort_unstable();
            block_ids.dedup();
            PartitionBlockIds { partition, block_ids }
        };
        let together: Vec<_> = ids.into_iter().map(sorted).collect();
        if state.reports.block_ids.lock().insert_recovered(bitmap_count, &together).is_ok() {
            return None;
        }
        drop(together);
        let reports = records.iter().filter_map(|record| match Record::decode(record) {
            Ok(Record::Report(report)) => Some(report),
            // The record was decoded before.
            Ok(Record::Registration(_)) | Err(_) => None,
        });
        let refused = reports.filter_map(|report| enter_alone(key, state, &report).err());
        refused.fold(None, |first, error| first.or(Some(error)))
    }
}

/// Adds one report.
pub(super) fn enter_alone(
    key: &ShuffleKey,
    state: &ShuffleState,
    report: &Report,
) -> Result<(), ReportError> {
    let taken = state.reports.block_ids.lock().insert_recovered(report.bitmap_count, &report.partitions);
    taken.inspect_err(|error| {
        tracing::error!(
            shuffle = %key,
            task_attempt = report.task_attempt,
            %error,
            "cannot recover a report"
        );
    })
}
