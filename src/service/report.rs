//! Reports of finished task attempts, and what reducers are to expect.
//!
//! A report is on the device before it is taken and acknowledged: what reducers are told to expect outlives process and
//! power, or their results would be short without an error. Where that is not proven after a start, results are refused.

use std::sync::Arc;

use bytes::Bytes;
use croaring::Treemap;

use crate::durability::{Record, Report};
use crate::tiers::{StoreErrorKind, Tier};
use uniffle_wire::bitmap;
use uniffle_wire::types::{PartitionId, ShuffleKey};

use super::{Service, ServiceError, shuffle_of};

/// Above this many ids a result is built on a blocking thread (docs/protocol.md §11 trap 16).
const INLINE_IDS_MAX: u64 = 100_000;

/// Bits of a block id (docs/protocol.md §3.1): they add up to 63.
const BLOCK_ID_BITS: i32 = 63;

/// Bits of the task attempt when a client does not tell its layout.
const TASK_BITS_DEFAULT: i32 = 21;

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
}

impl Service {
    /// Remembers which blocks a task attempt has written.
    ///
    /// # Errors
    /// Unknown app or shuffle, another `bitmapNum` than before, too many or negative ids, no disk that takes the note;
    /// nothing was taken then.
    pub async fn report(self: &Arc<Self>, request: ReportRequest<'_>) -> Result<(), ServiceError> {
        let app = self.touched_app(request.app)?;
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
        // What adds nothing was written down before.
        if !shuffle.block_ids().lock().would_learn(bitmap_count, &request.partitions)? {
            return Ok(());
        }
        self.judge_report(&app, &shuffle, &request.partitions).await?;
        let partitions = match self.tiers.metadata() {
            Some(tier) => note_report(&**tier, &key, request).await?,
            None => request.partitions,
        };
        shuffle.block_ids().lock().report(bitmap_count, &partitions)?;
        Ok(())
    }

    /// The reported ids of `partitions` as Java's bitmap. A partition without reports has none, nor has a shuffle that was
    /// never registered.
    ///
    /// # Errors
    /// Unknown app, a layout whose widths are not 1..=31 each and 63 together, reports that may be missing, or a shuffle
    /// that an earlier process may have known.
    pub async fn results(
        &self,
        app: &str,
        shuffle: i32,
        partitions: &[i32],
        layout: Option<(i32, i32, i32)>,
    ) -> Result<Bytes, ServiceError> {
        let app = self.touched_app(app)?;
        if let Some(layout) = layout {
            check_layout(layout)?;
        }
        let task_bits = layout.map_or(TASK_BITS_DEFAULT, |(_, _, task)| task);
        app.learn_task_bits(task_bits.unsigned_abs());
        let Some((_, shuffle)) = shuffle_of(&app, shuffle) else {
            return match self.tiers.metadata().and_then(|tier| tier.metadata_gap()) {
                None => Ok(bitmap::encode(&Treemap::new())),
                Some(reason) => Err(ServiceError::Lost(format!(
                    "whether shuffle {}/{shuffle} was registered is not known: {reason}",
                    app.id()
                ))),
            };
        };
        if let Some(reason) = shuffle.losses().incomplete() {
            let key = shuffle.key();
            let text = format!("results of shuffle {key} are refused, reports may be missing: {reason}");
            return Err(ServiceError::Lost(text));
        }
        let partitions: Vec<PartitionId> = partitions.iter().copied().map(PartitionId).collect();
        if shuffle.block_ids().lock().count() <= INLINE_IDS_MAX {
            return Ok(bitmap::encode(&shuffle.block_ids().lock().of(&partitions)));
        }
        let build = move || {
            let ids = shuffle.block_ids().lock().of(&partitions);
            bitmap::encode(&ids)
        };
        tokio::task::spawn_blocking(build)
            .await
            .map_err(|error| ServiceError::Malformed(format!("block id bitmap could not be built: {error}")))
    }
}

/// Makes a report survive the process; gives its ids back.
async fn note_report(
    tier: &dyn Tier,
    key: &ShuffleKey,
    request: ReportRequest<'_>,
) -> Result<Vec<(PartitionId, Vec<i64>)>, ServiceError> {
    let unknown = || unknown_shuffle(request.shuffle);
    let log = tier.metadata_log(key).ok_or_else(unknown)?;
    let ReportRequest { task_attempt, bitmap_count, partitions, .. } = request;
    let ids: u64 = partitions.iter().map(|(_, ids)| ids.len() as u64).sum();
    let report = Report { bitmap_count, task_attempt, partitions };
    let encode = move || {
        let note = Record::Report(report);
        (note.encode(), note)
    };
    let (bytes, note) = if ids <= INLINE_IDS_MAX {
        encode()
    } else {
        let encoding = tokio::task::spawn_blocking(encode).await;
        encoding.map_err(|error| ServiceError::Malformed(format!("report could not be encoded: {error}")))?
    };
    match log.append(bytes.into()).await {
        Err(error) if error.kind == StoreErrorKind::Purged => Err(unknown()),
        Err(error) => Err(error.into()),
        Ok(()) => match note {
            Record::Report(report) => Ok(report.partitions),
            Record::Registration(_) => Ok(Vec::new()),
        },
    }
}

fn unknown_shuffle(shuffle: i32) -> ServiceError {
    ServiceError::NotRegisteredPart(format!("shuffle {shuffle}"))
}

fn check_layout((sequence, partition, task): (i32, i32, i32)) -> Result<(), ServiceError> {
    let widths = [sequence, partition, task];
    let legal =
        widths.iter().all(|bits| (1..=31).contains(bits)) && widths.iter().sum::<i32>() == BLOCK_ID_BITS;
    if legal {
        return Ok(());
    }
    Err(ServiceError::InvalidField {
        field: "blockIdLayout",
        value: widths.iter().map(|bits| i64::from(*bits)).sum(),
        allowed: "three widths of 1 to 31 bits that add up to 63 are allowed",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts() {
        for legal in [(18, 24, 21), (21, 20, 22), (31, 1, 31)] {
            assert!(check_layout(legal).is_ok());
        }
        for illegal in [(0, 32, 31), (32, 10, 21), (-1, 32, 32), (18, 24, 20), (i32::MAX, i32::MAX, 65)] {
            assert!(check_layout(illegal).is_err());
        }
    }
}
