//! Reports of finished task attempts.
//!
//! A report is on the device before it is taken and acknowledged: what reducers are told to expect outlives process and
//! power, or their results would be short without an error. Where that is not proven after a start, results are refused.

use std::sync::Arc;

use crate::app::{Counted, PartitionRecords, ReportError, ShuffleState};
use crate::budget::Charge;
use crate::durability::{Record, Report};
use crate::tiers::{StoreErrorKind, Tier};
use uniffle_wire::types::{PartitionId, ShuffleKey};

use super::ServiceError;
use super::aside::aside;
use super::ingest::Ingest;
use super::known::shuffle_of;

/// Above this many ids a report is compared, encoded and entered on blocking threads (docs/protocol.md §11 trap 16).
const INLINE_IDS_MAX: u64 = 10_000;

/// Ids compared or entered under one hold of the shuffle's lock.
const IDS_AT_ONCE: usize = 4096;

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
    /// Unknown app or shuffle, another `bitmapNum` than before, too many or negative ids, more than a quota allows, no disk that takes the note;
    /// nothing was taken then.
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
        let bitmap_count = request.bitmap_count;
        let is_small = numbers_in(&request.partitions, &request.records) <= INLINE_IDS_MAX;
        let (asked, partitions) = (Arc::clone(&shuffle), std::mem::take(&mut request.partitions));
        let (learns, partitions) =
            aside(is_small, move || (would_learn(&asked, bitmap_count, &partitions), partitions)).await?;
        let learns_records =
            shuffle.records().lock().would_learn(&request.records).map_err(ReportError::from)?;
        let log = || self.tiers.metadata().and_then(|tier| tier.metadata_log(&key));
        // Counted from here on: reports that come at once would each find the quota as it was before the others.
        let counted = match learns? {
            Some(new) => app.usage().take(Counted::ReportedIds, new)?,
            // It was written down before, and is on the device unless an earlier process left it and nothing could be written
            // since.
            None if !learns_records && log().is_none_or(|log| log.is_recovered_durable()) => return Ok(()),
            None => app.usage().count(Counted::ReportedIds, 0),
        };
        request.partitions = partitions;
        self.losses.judge_report(&app, &shuffle, &request.partitions).await?;
        let (partitions, records) = match self.tiers.metadata() {
            Some(tier) => note_report(&**tier, &key, request).await?,
            None => (request.partitions, request.records),
        };
        shuffle.records().lock().report(&records).map_err(ReportError::from)?;
        aside(is_small, move || enter(&shuffle, bitmap_count, &partitions, counted)).await??;
        Ok(())
    }
}

/// Block ids by partition.
type Ids = Vec<(PartitionId, Vec<i64>)>;

fn numbers_in(partitions: &[(PartitionId, Vec<i64>)], records: &[PartitionRecords]) -> u64 {
    let ids: u64 = partitions.iter().map(|(_, ids)| ids.len() as u64).sum();
    ids + records.iter().map(|(_, tasks)| tasks.len() as u64).sum::<u64>()
}

/// The report in pieces small enough for one hold of the shuffle's lock.
fn pieces(partitions: &[(PartitionId, Vec<i64>)]) -> Vec<Vec<(PartitionId, &[i64])>> {
    let (mut pieces, mut room) = (vec![Vec::new()], IDS_AT_ONCE);
    for (partition, ids) in partitions {
        for some in ids.chunks(IDS_AT_ONCE) {
            if some.len() > room {
                pieces.push(Vec::new());
                room = IDS_AT_ONCE;
            }
            room -= some.len();
            pieces.last_mut().expect("begins with one").push((*partition, some));
        }
    }
    pieces
}

/// How many ids the shuffle would learn; none if nothing at all.
fn would_learn(
    shuffle: &ShuffleState,
    bitmap_count: i32,
    partitions: &[(PartitionId, Vec<i64>)],
) -> Result<Option<u64>, ReportError> {
    let mut learns: Option<u64> = None;
    for piece in pieces(partitions) {
        if let Some(new) = shuffle.block_ids().lock().would_learn(bitmap_count, &piece)? {
            learns = Some(learns.unwrap_or(0) + new);
        }
    }
    Ok(learns)
}

/// Enters a report, which counts its ids; `counted` is what they counted until then. One that is refused in between leaves ids that no
/// successful attempt names.
fn enter(
    shuffle: &ShuffleState,
    bitmap_count: i32,
    partitions: &[(PartitionId, Vec<i64>)],
    mut counted: Charge,
) -> Result<(), ReportError> {
    for piece in pieces(partitions) {
        let ids = piece.iter().map(|(_, ids)| ids.len() as u64).sum();
        let mut entered = shuffle.block_ids().lock();
        drop(counted.split_up_to(ids));
        entered.report(bitmap_count, &piece)?;
    }
    Ok(())
}

/// Makes a report survive the process; gives its ids and record numbers back.
async fn note_report(
    tier: &dyn Tier,
    key: &ShuffleKey,
    request: ReportRequest<'_>,
) -> Result<(Ids, Vec<PartitionRecords>), ServiceError> {
    let unknown = || unknown_shuffle(request.shuffle);
    let log = tier.metadata_log(key).ok_or_else(unknown)?;
    let ReportRequest { task_attempt, bitmap_count, partitions, records, .. } = request;
    let numbers = numbers_in(&partitions, &records);
    let report = Report { bitmap_count, task_attempt, partitions, records };
    let encode = move || {
        let note = Record::Report(report);
        (note.encode(), note)
    };
    let (bytes, note) = if numbers <= INLINE_IDS_MAX {
        encode()
    } else {
        let encoding = tokio::task::spawn_blocking(encode).await;
        encoding.map_err(|error| ServiceError::Malformed(format!("report could not be encoded: {error}")))?
    };
    match log.append(bytes.into()).await {
        Err(error) if error.kind == StoreErrorKind::Purged => Err(unknown()),
        Err(error) => Err(error.into()),
        Ok(()) => match note {
            Record::Report(report) => Ok((report.partitions, report.records)),
            Record::Registration(_) => Ok((Vec::new(), Vec::new())),
        },
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
        assert_eq!(pieces.iter().map(Vec::len).collect::<Vec<_>>(), [1, 1, 2]);
        assert!(
            pieces.iter().all(|piece| piece.iter().map(|(_, ids)| ids.len()).sum::<usize>() <= IDS_AT_ONCE)
        );
        assert_eq!(pieces.iter().flatten().map(|(_, ids)| ids.len()).sum::<usize>(), 10_003);
    }
}
