//! Reports that an earlier process acknowledged, gathered by partition before they are entered: a report names a few ids of each of
//! many partitions, and a set of ids takes many at once for a tenth of what it costs one by one.
//!
//! Invariants: what is gathered is entered before anybody asks for it ([`Gathered::enter`] at the end of the log at the latest), at
//! most [`GATHERED_MAX`] ids of all shuffles wait, and where they cannot be entered together each report is entered or refused as if
//! it had come alone.

use bytes::Bytes;
use uniffle_wire::types::{PartitionId, ShuffleKey};

use crate::app::{ReportError, ShuffleState};
use crate::durability::{Record, Report, plain_ids};

/// Ids of all shuffles that wait: some 20 bytes each, with the records that they are from.
pub(super) const GATHERED_MAX: usize = 1 << 18;

/// A record counts as an id for so many bytes at least.
const RECORD_BYTES_PER_ID: usize = 20;

/// Of one shuffle.
#[derive(Debug, Default)]
pub(super) struct Gathered {
    /// As they were written, for when they cannot be entered together.
    records: Vec<Bytes>,
    bitmap_count: i32,
    ids: hashbrown::HashMap<PartitionId, Vec<i64>>,
    /// Of the report that is read.
    read: Vec<(PartitionId, i64)>,
}

impl Gathered {
    /// Takes a report that may be entered together with those before it. Returns how many ids it counts for; none if it has to
    /// be entered alone.
    pub(super) fn take(&mut self, report: &Report, record: &Bytes) -> Option<usize> {
        let fits = self.records.is_empty() || self.bitmap_count == report.bitmap_count;
        if !fits || report.partitions.iter().any(|(_, ids)| ids.iter().any(|id| *id < 0)) {
            return None;
        }
        self.bitmap_count = report.bitmap_count;
        self.records.push(record.clone());
        let mut count = 0;
        for (partition, ids) in &report.partitions {
            self.ids.entry(*partition).or_default().extend_from_slice(ids);
            count += ids.len();
        }
        Some(count.max(record.len() / RECORD_BYTES_PER_ID))
    }

    /// The same of a report as it was written, if it has nothing but ids; none of any other record.
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

    /// Enters what was gathered; why not all of it could be, if so.
    pub(super) fn enter(&mut self, key: &ShuffleKey, state: &ShuffleState) -> Option<ReportError> {
        let Self { records, bitmap_count, ids, read: _ } = std::mem::take(self);
        if records.is_empty() {
            return None;
        }
        let sorted = |(partition, mut ids): (PartitionId, Vec<i64>)| {
            ids.sort_unstable();
            ids.dedup();
            (partition, ids)
        };
        let together: Vec<(PartitionId, Vec<i64>)> = ids.into_iter().map(sorted).collect();
        if state.block_ids().lock().take_over(bitmap_count, &together).is_ok() {
            return None;
        }
        drop(together);
        let reports = records.iter().filter_map(|record| match Record::decode(record) {
            Ok(Record::Report(report)) => Some(report),
            // It was read before.
            Ok(Record::Registration(_)) | Err(_) => None,
        });
        let refused = reports.filter_map(|report| enter_alone(key, state, &report).err());
        refused.fold(None, |first, error| first.or(Some(error)))
    }
}

/// Enters one report.
pub(super) fn enter_alone(
    key: &ShuffleKey,
    state: &ShuffleState,
    report: &Report,
) -> Result<(), ReportError> {
    let taken = state.block_ids().lock().take_over(report.bitmap_count, &report.partitions);
    taken.inspect_err(|error| {
        tracing::error!(
            shuffle = %key,
            task_attempt = report.task_attempt,
            %error,
            "cannot recover a report"
        );
    })
}
