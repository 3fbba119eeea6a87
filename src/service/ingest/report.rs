//! Reports of finished task attempts.
//!
//! If a tier has a metadata log, a report is on the device before it is accepted and acknowledged.
//! Otherwise results could be short without an error after a crash or a power loss.
//!
//! A report is accepted as a whole or not at all. Its resources are reserved before it is written
//! ([`Ingest::pay`]), so adding a reserved report never fails. Partitions outside the registered
//! ranges are accepted, as in the Java server (`ShuffleBlockIdManager.addFinishedBlockIds`). Their
//! ids are charged to heap and quotas like others and returned only in results.

use std::sync::Arc;

use crate::app::{App, PaidIds, Price, QuotaResource, ReportError, Reports, ShuffleState};
use crate::clock::timeout;
use crate::log::{IdRun, PartitionBlockIds, PartitionRecordCounts, Record, Report};
use crate::store::{RegistrationLog, StoreErrorKind};
use uniffle_base::budget::heap::HeapFull;
use uniffle_base::budget::{Charge, HeapKind};
use uniffle_wire::types::{ShuffleId, ShuffleKey};

use super::Ingest;
use super::spill::{self, SpillRoom};
use crate::service::ServiceError;
use crate::service::parts::{HEAP_WAIT, StepRunner, shuffle_of};

/// Number of ids and record counts above which a report is compared, encoded and added on blocking
/// threads (docs/protocol.md §11 bitmap-on-runtime).
const INLINE_IDS_MAX: u64 = 10_000;

/// Maximum number of ids compared or added under one acquisition of the shuffle's lock. Ids of one
/// partition may be up to twice as many.
const IDS_AT_ONCE: usize = 2048;

/// A `reportShuffleResult` request.
#[derive(Debug, Clone)]
pub struct ReportRequest<'a> {
    /// Application id as sent.
    pub app: &'a str,
    /// Shuffle id.
    pub shuffle: i32,
    /// Task attempt id.
    pub task_attempt: i64,
    /// `bitmapNum`.
    pub bitmap_count: i32,
    /// Block ids per partition.
    pub partitions: Vec<PartitionBlockIds>,
    /// Record counts by task attempt, per partition; sent only by the newest clients.
    pub records: Vec<PartitionRecordCounts>,
}

impl Ingest {
    /// Stores which blocks a task attempt has written.
    ///
    /// # Errors
    /// Unknown app or shuffle, a `bitmapNum` below 1 or other than before, negative ids, exceeded
    /// heap or quota, blocks that are lost, or no tier that can record the report. No id or record
    /// count was added then, but the first `bitmapNum` may be fixed for later reports.
    pub async fn report(&self, mut request: ReportRequest<'_>) -> Result<(), ServiceError> {
        let app = self.parts.touched_app(request.app)?;
        if request.bitmap_count <= 0 {
            let value = i64::from(request.bitmap_count);
            return Err(ServiceError::InvalidField {
                field: "bitmapNum",
                value,
                allowed: "must be 1 or more",
            });
        }
        let (key, shuffle) =
            shuffle_of(&app, request.shuffle).ok_or_else(|| unknown_shuffle(request.shuffle))?;
        let is_small = entries_in(&request.partitions, &request.records) <= INLINE_IDS_MAX;
        let runner = StepRunner::new(&self.parts.pool, is_small);
        let (partitions, records) =
            (std::mem::take(&mut request.partitions), std::mem::take(&mut request.records));
        let mut reported = Reported { bitmap_count: request.bitmap_count, partitions, records };
        let log = self.log_of(&app, &key, &shuffle)?;
        let compared = Arc::clone(&shuffle);
        let look = move || {
            name_once(&mut reported.partitions);
            (reported.changes(&compared.reports), reported)
        };
        let (changes, reported) = runner.run(look).await?;
        let changes = match changes? {
            Changes::Nothing => false,
            Changes::Ids if shuffle.reports.block_ids.lock().has_runs() => {
                !spill::runs_have_rest(&shuffle.reports, &reported.partitions).await
            }
            Changes::Ids | Changes::Records => true,
        };
        // A known report was written before. It is on the device, unless an earlier process left it
        // and nothing could be written since.
        if !changes && log.as_ref().is_none_or(|log| log.is_recovered_durable()) {
            return Ok(());
        }
        let paid = self.pay(&app, &shuffle.reports, &reported).await?;
        let alarms = self.parts.losses.check_report(&app, &shuffle, &reported.partitions).await?;
        let reported = match log {
            Some(log) if shuffle.reports.omits_repeated_ids() || !reported.records.is_empty() => {
                let unknown = reported.unknown(&shuffle.reports).await;
                note_report(runner, &*log, key.shuffle, request.task_attempt, unknown).await?;
                reported
            }
            Some(log) => note_report(runner, &*log, key.shuffle, request.task_attempt, reported).await?,
            None => reported,
        };
        shuffle.on_disk.set(|| self.parts.tiers.occupied_bytes(&key));
        let state = Arc::clone(&shuffle);
        let enter = move || {
            reported.enter(&state.reports, paid);
            reported
        };
        let reported = runner.run(enter).await?;
        self.parts.losses.note_reported(&shuffle, &reported.partitions, alarms);
        Ok(())
    }

    /// Reserves the resources of a report before it is written or added; otherwise concurrent
    /// reports would each see the quotas without the others. If heap is short, moves ids to disk,
    /// or waits for heap that other reports return once they are added.
    async fn pay(
        &self,
        app: &App,
        reports: &Reports,
        report: &Reported,
    ) -> Result<ReportCharge, ServiceError> {
        let Price { ids, bytes } = Price::of(&report.partitions);
        let counted = app.usage.take(QuotaResource::ReportedIds, ids)?;
        let record_bytes = reports.records.lock().cost_of(&report.records);
        let mut on_disk = None;
        let mut charge = match self.parts.spill.charge(app, bytes + record_bytes).await {
            SpillRoom::Charged(charge) => charge,
            SpillRoom::OnlyOnDisk => {
                let records = self.wait_for_heap(app, record_bytes).await?;
                on_disk = self.parts.spill.write(app, &report.partitions).await;
                match &on_disk {
                    Some(_) => records,
                    None => self.wait_for_heap(app, bytes + record_bytes).await?,
                }
            }
            SpillRoom::None => self.wait_for_heap(app, bytes + record_bytes).await?,
        };
        let records = charge.split_up_to(record_bytes);
        let mut block_ids = reports.block_ids.lock();
        let ids = block_ids.pay(ids, charge, counted).map_err(ReportError::from)?;
        block_ids.begin(report.bitmap_count).map_err(ReportError::from)?;
        drop(block_ids);
        Ok(ReportCharge { ids, records, on_disk })
    }

    async fn wait_for_heap(&self, app: &App, bytes: u64) -> Result<Charge, ServiceError> {
        let heap = &app.budgets.reported_ids;
        let charge = match timeout(HEAP_WAIT, heap.charge(bytes)).await {
            Ok(charge) => charge,
            Err(_elapsed) => heap.try_charge(bytes),
        };
        charge.map_err(|full| ReportError::NoHeap(HeapFull::of(HeapKind::ReportedIds, full)).into())
    }

    /// Returns the log for reports of `shuffle`, if there is one: its own log, not that of a later
    /// shuffle with the same name.
    fn log_of(
        &self,
        app: &App,
        key: &ShuffleKey,
        shuffle: &Arc<ShuffleState>,
    ) -> Result<Option<Arc<dyn RegistrationLog>>, ServiceError> {
        let Some(tier) = self.parts.tiers.metadata() else { return Ok(None) };
        let log = tier.metadata_log(key);
        // A tier removes a shuffle after the app does, and knows a new one before.
        let is_registered = app.shuffle(key.shuffle).is_some_and(|known| Arc::ptr_eq(&known, shuffle));
        let log = log.filter(|_| is_registered).ok_or_else(|| unknown_shuffle(key.shuffle.0))?;
        Ok(Some(log))
    }
}

/// Contents of a report. After [`name_once`], each partition and each id occurs once in
/// `partitions`.
#[derive(Debug)]
struct Reported {
    bitmap_count: i32,
    partitions: Vec<PartitionBlockIds>,
    records: Vec<PartitionRecordCounts>,
}

/// Resources reserved for a whole report. Drop returns the unused part.
#[derive(Debug)]
struct ReportCharge {
    ids: PaidIds,
    records: Charge,
    /// The ids, written to disk because there was no heap for them.
    on_disk: Option<(IdRun, Charge)>,
}

/// Changes that a report would make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Changes {
    Nothing,
    /// The ids in memory change, but no record counts.
    Ids,
    Records,
}

impl Reported {
    /// Returns the changes that the report would make to `reports`.
    ///
    /// # Errors
    /// Returns the reason to refuse the report.
    fn changes(&self, reports: &Reports) -> Result<Changes, ReportError> {
        reports.block_ids.lock().check(self.bitmap_count, &self.partitions)?;
        let are_known = pieces(&self.partitions).iter().all(|piece| reports.block_ids.lock().has_all(piece));
        Ok(match reports.records.lock().would_change(&self.records) {
            true => Changes::Records,
            false if are_known => Changes::Nothing,
            false => Changes::Ids,
        })
    }

    /// Adds the report. Record counts are added first, so that a reader of the ids also sees them.
    fn enter(&self, reports: &Reports, mut paid: ReportCharge) {
        reports.records.lock().insert(&self.records, paid.records);
        if let Some((run, counted)) = paid.on_disk {
            let ids = Price::of(&self.partitions).ids;
            reports.block_ids.lock().enter_run(run, counted, ids, &mut paid.ids);
            return;
        }
        let before = reports.block_ids.lock().count();
        for piece in pieces(&self.partitions) {
            reports.block_ids.lock().insert(&piece, &mut paid.ids);
        }
        let new = reports.block_ids.lock().count().saturating_sub(before);
        reports.record_repetition(new, self.partitions.iter().map(|it| it.block_ids.len() as u64).sum());
    }

    /// Returns the part of the report that `reports` lack; the rest was written before.
    /// Normally all ids of a task are new, so they are looked up only if the shuffle repeats
    /// reports.
    async fn unknown(&self, reports: &Reports) -> Self {
        let partitions = match reports.omits_repeated_ids() {
            true => spill::unknown(reports, &self.partitions).await,
            false => self.partitions.clone(),
        };
        let records = reports.records.lock().new_entries(&self.records);
        Self { bitmap_count: self.bitmap_count, partitions, records }
    }
}

fn entries_in(partitions: &[PartitionBlockIds], records: &[PartitionRecordCounts]) -> u64 {
    let ids: u64 = partitions.iter().map(|it| it.block_ids.len() as u64).sum();
    ids + records.iter().map(|it| it.tasks.len() as u64).sum::<u64>()
}

/// Sorts partitions and their ids, and drops duplicates and empty partitions, so that they are
/// neither counted, charged, nor written.
fn name_once(partitions: &mut Vec<PartitionBlockIds>) {
    partitions.sort_unstable_by_key(|it| it.partition);
    partitions.dedup_by(|next, first| {
        let is_repeated = next.partition == first.partition;
        if is_repeated {
            first.block_ids.append(&mut next.block_ids);
        }
        is_repeated
    });
    partitions.retain(|it| !it.block_ids.is_empty());
    for PartitionBlockIds { block_ids, .. } in partitions {
        block_ids.sort_unstable();
        block_ids.dedup();
    }
}

/// Cuts the report into pieces small enough for one acquisition of the shuffle's lock.
fn pieces(partitions: &[PartitionBlockIds]) -> Vec<Vec<PartitionBlockIds<&[i64]>>> {
    let (mut pieces, mut room) = (vec![Vec::new()], IDS_AT_ONCE);
    for PartitionBlockIds { partition, block_ids } in partitions {
        let mut rest = block_ids.as_slice();
        while !rest.is_empty() {
            let count = if rest.len() < 2 * IDS_AT_ONCE { rest.len() } else { IDS_AT_ONCE };
            let (some, others) = rest.split_at(count);
            if some.len() > room {
                pieces.push(Vec::new());
                room = IDS_AT_ONCE;
            }
            room = room.saturating_sub(some.len());
            let some = PartitionBlockIds { partition: *partition, block_ids: some };
            pieces.last_mut().expect("there is at least one piece").push(some);
            rest = others;
        }
    }
    pieces
}

/// Writes a report durably and returns it.
async fn note_report(
    runner: StepRunner<'_>,
    log: &dyn RegistrationLog,
    shuffle: ShuffleId,
    task_attempt: i64,
    reported: Reported,
) -> Result<Reported, ServiceError> {
    let Reported { bitmap_count, partitions, records } = reported;
    let encode = move || {
        let note = Record::Report(Report { bitmap_count, task_attempt, partitions, records });
        (note.encode(), note)
    };
    let (bytes, note) = runner.run(encode).await?;
    match log.append(bytes.into()).await {
        Err(error) if error.kind == StoreErrorKind::Purged => Err(unknown_shuffle(shuffle.0)),
        Err(error) => Err(error.into()),
        Ok(()) => {
            let (partitions, records) = match note {
                Record::Report(report) => (report.partitions, report.records),
                Record::Registration(_) => (Vec::new(), Vec::new()),
            };
            Ok(Reported { bitmap_count, partitions, records })
        }
    }
}

fn unknown_shuffle(shuffle: i32) -> ServiceError {
    ServiceError::NotRegisteredPart(format!("shuffle {shuffle}"))
}

#[cfg(test)]
mod tests {
    use uniffle_wire::types::PartitionId;

    use super::*;

    fn ids_of(partition: PartitionId, block_ids: Vec<i64>) -> PartitionBlockIds {
        PartitionBlockIds { partition, block_ids }
    }

    #[test]
    fn report_is_entered_in_parts_but_completely() {
        let report = [
            ids_of(PartitionId(1), vec![7; 10_000]),
            ids_of(PartitionId(2), Vec::new()),
            ids_of(PartitionId(3), vec![8; 3]),
        ];
        let pieces = pieces(&report);
        let ids: Vec<Vec<usize>> =
            pieces.iter().map(|piece| piece.iter().map(|it| it.block_ids.len()).collect()).collect();
        assert_eq!(ids, [vec![2048], vec![2048], vec![2048], vec![3856], vec![3]]);
    }

    #[test]
    fn repeated_ids_of_a_report_are_named_once() {
        let (p, q) = (PartitionId(1), PartitionId(2));
        let mut report = vec![
            ids_of(q, vec![3, 1, 3]),
            ids_of(p, vec![9]),
            ids_of(q, vec![2, 1]),
            ids_of(p, Vec::new()),
            ids_of(p, vec![9, 8]),
            ids_of(PartitionId(0), vec![]),
        ];
        name_once(&mut report);
        assert_eq!(report, [ids_of(p, vec![8, 9]), ids_of(q, vec![1, 2, 3])]);
    }
}
