//! Reports of finished task attempts.
//!
//! A report is on the device before it is taken and acknowledged: what reducers are told to expect outlives process and
//! power, or their results would be short without an error. Where that is not proven after a start, results are refused.
//!
//! Partitions outside the registered ranges are taken like others, as Java's server takes them
//! (`ShuffleBlockIdManager.addFinishedBlockIds` looks at no range): who reports some is told them again, and nothing else. They
//! are paid for like all, from the heap and the quotas of ids.
//!
//! A report is taken as a whole or not at all: what it costs is paid before it is written down ([`ReportCost::pay`]),
//! and entering what is paid for is refused by nothing.

use std::sync::Arc;

use crate::app::{App, Counted, PaidIds, PartitionRecords, ReportError, ShuffleState};
use crate::budget::Charge;
use crate::durability::{Cost, Record, Report};
use crate::runtime::Aside;
use crate::tiers::{MetadataLog, StoreErrorKind};
use uniffle_wire::types::{PartitionId, ShuffleId, ShuffleKey};

use super::ServiceError;
use super::aside::aside;
use super::ingest::Ingest;
use super::known::shuffle_of;

/// Above this many ids a report is compared, encoded and entered on blocking threads (docs/protocol.md §11 bitmap-on-runtime).
const INLINE_IDS_MAX: u64 = 10_000;

/// Ids compared or entered under one hold of the shuffle's lock; less than twice as many where they are of one
/// partition.
const IDS_AT_ONCE: usize = 2048;

/// `reportShuffleResult`.
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
    pub partitions: Vec<(PartitionId, Vec<i64>)>,
    /// Record numbers by task attempt, per partition; from the newest clients only.
    pub records: Vec<PartitionRecords>,
}

impl Ingest {
    /// Remembers which blocks a task attempt has written.
    ///
    /// # Errors
    /// Unknown app or shuffle, another `bitmapNum` than before, negative ids, more than the heap or a quota allows, no disk
    /// that takes the note; nothing was taken then.
    pub async fn report(&self, mut request: ReportRequest<'_>) -> Result<(), ServiceError> {
        let app = self.known.touched_app(request.app)?;
        if request.bitmap_count <= 0 {
            let value = i64::from(request.bitmap_count);
            return Err(ServiceError::InvalidField {
                field: "bitmapNum",
                value,
                allowed: "1 or more is allowed",
            });
        }
        let (key, shuffle) =
            shuffle_of(&app, request.shuffle).ok_or_else(|| unknown_shuffle(request.shuffle))?;
        let is_small = numbers_in(&request.partitions, &request.records) <= INLINE_IDS_MAX;
        let (partitions, records) =
            (std::mem::take(&mut request.partitions), std::mem::take(&mut request.records));
        let mut reported = Reported { bitmap_count: request.bitmap_count, partitions, records };
        let log = self.log_of(&app, &key, &shuffle)?;
        let mut turn = None;
        let (paid, _on_its_way) = loop {
            let ended = app.reports().ended();
            let asked = Arc::clone(&shuffle);
            let (cost, costed) = aside(&self.known.aside, is_small, move || reported.costed(&asked)).await?;
            reported = costed;
            let cost = cost?;
            // What is known was written down before, and is on the device unless an earlier process left it and nothing
            // could be written since.
            if cost.learns_nothing() && log.as_ref().is_none_or(|log| log.is_recovered_durable()) {
                return Ok(());
            }
            match app.reports().pay(|| cost.pay(&app, &shuffle, reported.bitmap_count)) {
                Ok(paid) => break paid,
                Err(refused) if refused.others == 0 || !refused.error.is_no_heap() => {
                    return Err(refused.error);
                }
                Err(_) if turn.is_none() => turn = app.reports().turn().await,
                Err(_) => ended.await,
            }
        };
        drop(turn);
        self.losses.judge_report(&app, &shuffle, &reported.partitions).await?;
        let reported = match log {
            Some(log) => {
                note_report(&self.known.aside, &*log, key.shuffle, request.task_attempt, reported).await?
            }
            None => reported,
        };
        let state = Arc::clone(&shuffle);
        let enter = move || {
            reported.enter(&state, paid);
            reported
        };
        let reported = aside(&self.known.aside, is_small, enter).await?;
        self.losses.note_reported(&shuffle, &reported.partitions);
        Ok(())
    }

    /// Where reports of `shuffle` are written down, if anywhere: its own log, and not that of one that has its name by now.
    fn log_of(
        &self,
        app: &App,
        key: &ShuffleKey,
        shuffle: &Arc<ShuffleState>,
    ) -> Result<Option<Arc<dyn MetadataLog>>, ServiceError> {
        let Some(tier) = self.tiers.metadata() else { return Ok(None) };
        let log = tier.metadata_log(key);
        // A tier forgets a shuffle after the app has, and knows another one before.
        let is_registered = app.shuffle(key.shuffle).is_some_and(|known| Arc::ptr_eq(&known, shuffle));
        let log = log.filter(|_| is_registered).ok_or_else(|| unknown_shuffle(key.shuffle.0))?;
        Ok(Some(log))
    }
}

/// What a report says; each partition and each id once.
#[derive(Debug)]
struct Reported {
    bitmap_count: i32,
    partitions: Vec<(PartitionId, Vec<i64>)>,
    records: Vec<PartitionRecords>,
}

/// What a report would add.
#[derive(Debug)]
struct ReportCost {
    /// None if all ids are known.
    ids: Option<Cost>,
    /// None if all record numbers are.
    record_bytes: Option<u64>,
}

/// What a whole report takes; what is not entered goes back.
#[derive(Debug)]
struct Paid {
    ids: PaidIds,
    records: Charge,
}

impl ReportCost {
    fn learns_nothing(&self) -> bool {
        self.ids.is_none() && self.record_bytes.is_none()
    }

    /// Takes it before a byte is written down or entered. Quotas count it from here on: reports that come at once would
    /// each find them as they were before the others. So does the first report's number of bitmaps.
    fn pay(&self, app: &App, shuffle: &ShuffleState, bitmap_count: i32) -> Result<Paid, ServiceError> {
        let counted = match self.ids {
            Some(cost) => app.usage().take(Counted::ReportedIds, cost.new)?,
            None => app.usage().count(Counted::ReportedIds, 0),
        };
        let records = shuffle.records().lock().pay(self.record_bytes.unwrap_or(0));
        let records = records.map_err(ReportError::from)?;
        let mut block_ids = shuffle.block_ids().lock();
        let ids = block_ids.pay(self.ids.unwrap_or_default(), counted)?;
        block_ids.begin(bitmap_count).map_err(ReportError::from)?;
        drop(block_ids);
        Ok(Paid { ids, records })
    }
}

impl Reported {
    /// What it would add to `shuffle`, and itself.
    fn costed(mut self, shuffle: &ShuffleState) -> (Result<ReportCost, ReportError>, Self) {
        name_once(&mut self.partitions);
        (self.cost(shuffle), self)
    }

    fn cost(&self, shuffle: &ShuffleState) -> Result<ReportCost, ReportError> {
        let mut ids: Option<Cost> = None;
        for piece in pieces(&self.partitions) {
            if let Some(cost) = shuffle.block_ids().lock().cost_of(self.bitmap_count, &piece)? {
                let sum = ids.unwrap_or_default();
                ids = Some(Cost { new: sum.new + cost.new, bytes: sum.bytes + cost.bytes });
            }
        }
        Ok(ReportCost { ids, record_bytes: shuffle.records().lock().cost_of(&self.records) })
    }

    /// Enters it. Record numbers first: who sees the ids sees those too.
    fn enter(&self, shuffle: &ShuffleState, mut paid: Paid) {
        shuffle.records().lock().enter(&self.records, paid.records);
        for piece in pieces(&self.partitions) {
            shuffle.block_ids().lock().enter(&piece, &mut paid.ids);
        }
    }
}

fn numbers_in(partitions: &[(PartitionId, Vec<i64>)], records: &[PartitionRecords]) -> u64 {
    let ids: u64 = partitions.iter().map(|(_, ids)| ids.len() as u64).sum();
    ids + records.iter().map(|(_, tasks)| tasks.len() as u64).sum::<u64>()
}

/// Sorts partitions and their ids, and drops what is repeated: neither quotas nor the heap count it then.
fn name_once(partitions: &mut Vec<(PartitionId, Vec<i64>)>) {
    partitions.sort_unstable_by_key(|(partition, _)| *partition);
    partitions.dedup_by(|(repeated, more), (partition, ids)| {
        let is_repeated = repeated == partition;
        if is_repeated {
            ids.append(more);
        }
        is_repeated
    });
    for (_, ids) in partitions {
        ids.sort_unstable();
        ids.dedup();
    }
}

/// The report in pieces small enough for one hold of the shuffle's lock. Of a partition that is divided no piece has
/// few ids: what they add is judged piece by piece, and few are a list, but not beside many.
fn pieces(partitions: &[(PartitionId, Vec<i64>)]) -> Vec<Vec<(PartitionId, &[i64])>> {
    let (mut pieces, mut room) = (vec![Vec::new()], IDS_AT_ONCE);
    for (partition, ids) in partitions {
        let mut rest = ids.as_slice();
        while !rest.is_empty() {
            let count = if rest.len() < 2 * IDS_AT_ONCE { rest.len() } else { IDS_AT_ONCE };
            let (some, others) = rest.split_at(count);
            if some.len() > room {
                pieces.push(Vec::new());
                room = IDS_AT_ONCE;
            }
            room = room.saturating_sub(some.len());
            pieces.last_mut().expect("begins with one").push((*partition, some));
            rest = others;
        }
    }
    pieces
}

/// Makes a report survive the process; gives it back.
async fn note_report(
    places: &Aside,
    log: &dyn MetadataLog,
    shuffle: ShuffleId,
    task_attempt: i64,
    reported: Reported,
) -> Result<Reported, ServiceError> {
    let Reported { bitmap_count, partitions, records } = reported;
    let is_small = numbers_in(&partitions, &records) <= INLINE_IDS_MAX;
    let encode = move || {
        let note = Record::Report(Report { bitmap_count, task_attempt, partitions, records });
        (note.encode(), note)
    };
    let (bytes, note) = aside(places, is_small, encode).await?;
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
    use super::*;

    #[test]
    fn a_report_is_entered_in_pieces_and_whole() {
        let report =
            [(PartitionId(1), vec![7; 10_000]), (PartitionId(2), Vec::new()), (PartitionId(3), vec![8; 3])];
        let pieces = pieces(&report);
        let ids: Vec<Vec<usize>> =
            pieces.iter().map(|piece| piece.iter().map(|(_, ids)| ids.len()).collect()).collect();
        assert_eq!(ids, [vec![2048], vec![2048], vec![2048], vec![3856], vec![3]]);
    }

    #[test]
    fn what_a_report_repeats_is_named_once() {
        let (p, q) = (PartitionId(1), PartitionId(2));
        let mut report =
            vec![(q, vec![3, 1, 3]), (p, vec![9]), (q, vec![2, 1]), (p, Vec::new()), (p, vec![9, 8])];
        name_once(&mut report);
        assert_eq!(report, [(p, vec![8, 9]), (q, vec![1, 2, 3])]);
    }
}
