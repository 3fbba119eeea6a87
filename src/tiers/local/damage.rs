//! What a disk does not give back any more.
//!
//! A block with other bytes than were written makes a hole of its extent at once. A read that fails may succeed later, so
//! it only counts: after the third failure of a partition on a disk all that it has there is tried, three times within
//! half a second, and what still cannot be read can be given up and becomes a hole. Blocks in holes can be sent again and
//! found; whether one is lost is not decided here (`service`).
//!
//! Why three: clients with default settings try a task four times within a second, and the fourth is to be told what is
//! lost. What says nothing about stored bytes (no descriptors, a deadline) is not counted.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, sleep};

use super::disk::within;
use super::health::{Verdict, judge};
use super::read::DIRECT_BYTES_MIN;
use super::shuffle::{Extent, NO_LOG, Shuffle};
use super::{Core, LocalStore};
use crate::tiers::{DamagedExtents, StoreError, StoreErrorKind};
use uniffle_io::buffers::READ_CHUNK_BYTES_MAX;
use uniffle_io::{BLOCK_ALIGN, ReadTarget};
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// Clients try four times within a second: the fourth is to be told what is lost.
const FAILED_READS_MAX: u32 = 3;
/// Failures that lie so long apart have nothing to do with each other.
const FAILURES_FORGOTTEN_AFTER: Duration = Duration::from_secs(600);
/// How often an extent is tried before it is given up.
const TRIES: u32 = 3;
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(250);
/// Partitions that are tried at a time, each with one chunk of memory.
pub(super) const PROBED_AT_ONCE: usize = 2;

/// Failed reads of one shuffle.
#[derive(Debug, Default)]
pub(super) struct FailedReads(Mutex<HashMap<(PartitionId, usize), Failures>>);

#[derive(Debug)]
struct Failures {
    count: u32,
    last: Instant,
    /// Somebody was told that there were too many.
    told: bool,
}

impl FailedReads {
    /// Counts one of a partition on a disk; true once when there have been too many.
    fn count(&self, partition: PartitionId, disk: usize, now: Instant) -> bool {
        let mut failed = self.0.lock();
        let fresh = Failures { count: 0, last: now, told: false };
        let failures = failed.entry((partition, disk)).or_insert(fresh);
        if now - failures.last >= FAILURES_FORGOTTEN_AFTER {
            (failures.count, failures.told) = (0, false);
        }
        failures.last = now;
        failures.count = failures.count.saturating_add(1);
        let due = failures.count >= FAILED_READS_MAX && !failures.told;
        failures.told |= due;
        due
    }

    fn forget(&self, partition: PartitionId, disk: usize) {
        self.0.lock().remove(&(partition, disk));
    }
}

/// Whether an error says that stored bytes cannot be read.
fn is_damage(error: &StoreError) -> bool {
    match (error.kind, &error.source) {
        (StoreErrorKind::Corrupt | StoreErrorKind::NotFound, _) => true,
        (_, Some(source)) => judge(source) == Verdict::Broken,
        _ => false,
    }
}

impl LocalStore {
    /// Reads all that a partition has on the disk of index `disk`, from which reads failed
    /// ([`Suspicion::device`](crate::tiers::Suspicion)), for half a second; `None` when everything can be read.
    pub async fn probe_partition(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        disk: usize,
    ) -> Option<DamagedExtents> {
        let shuffle = self.find(key).ok()?;
        let (extents, error) = self.core.probe_extents(&shuffle, partition, disk).await?;
        let core = Arc::clone(&self.core);
        Some(DamagedExtents::new(error, move || core.mark_all_lost(&shuffle, partition, &extents)))
    }
}

impl Shuffle {
    /// Counts a failed read; whether what the partition has on the disk is to be [tried](Core::probe_extents).
    pub(super) fn count_failed_read(&self, partition: PartitionId, disk: usize, error: &StoreError) -> bool {
        is_damage(error) && !self.is_purged() && self.failed_reads.count(partition, disk, Instant::now())
    }
}

impl Core {
    /// A disk returned other bytes than were written: blames it, and makes a hole of the extent, so that its blocks can
    /// be sent again and found.
    pub(super) fn mark_damaged(&self, shuffle: &Shuffle, partition: PartitionId, base: u64) -> StoreError {
        self.metrics.read_crc_mismatches.inc();
        let Some(extent) = self.mark_lost(shuffle, partition, base) else {
            return shuffle.error(StoreErrorKind::Corrupt);
        };
        let log = shuffle.log_at(extent.data_log);
        let what = "a block has another checksum than when it was written";
        log.disk.note(&io::Error::new(io::ErrorKind::InvalidData, what));
        let path = log.full_path();
        tracing::error!(shuffle = %shuffle.key, %partition, path = %path.display(), bytes = extent.length, what);
        StoreError::corrupt(path, what)
    }

    fn mark_lost(&self, shuffle: &Shuffle, partition: PartitionId, base: u64) -> Option<Extent> {
        let extent = shuffle.mark_lost(partition, base)?;
        self.metrics.extents.dec();
        self.records.forget(std::iter::once(shuffle.records_key(&extent)));
        Some(extent)
    }

    /// Tries all that a partition has on a disk. Those of its extents that cannot be read, and the error of one.
    pub(super) async fn probe_extents(
        &self,
        shuffle: &Shuffle,
        partition: PartitionId,
        disk: usize,
    ) -> Option<(Vec<Extent>, StoreError)> {
        let extents = shuffle.with_partition(partition, |found| found.map(|it| it.extents.clone()));
        let mut suspects = extents.unwrap_or_default();
        let mut error = None;
        for attempt in 0..TRIES {
            if attempt > 0 {
                sleep(PAUSE).await;
            }
            let _turn = self.probes.acquire().await.ok()?;
            (suspects, error) = self.unreadable(shuffle, suspects, disk).await;
            if suspects.is_empty() {
                break;
            }
        }
        shuffle.failed_reads.forget(partition, disk);
        error.map(|error| (suspects, error))
    }

    /// Makes holes of extents that cannot be read.
    pub(super) fn mark_all_lost(&self, shuffle: &Shuffle, partition: PartitionId, extents: &[Extent]) {
        for extent in extents {
            if self.mark_lost(shuffle, partition, extent.base).is_some() {
                self.metrics.extents_lost.inc();
                let (bytes, blocks) = (extent.length, extent.blocks);
                tracing::error!(shuffle = %shuffle.key, %partition, bytes, blocks, "an extent is lost");
            }
        }
    }

    /// Those of `extents` that cannot be read, and the last one's error.
    async fn unreadable(
        &self,
        shuffle: &Shuffle,
        extents: Vec<Extent>,
        disk: usize,
    ) -> (Vec<Extent>, Option<StoreError>) {
        let (mut unreadable, mut last_error) = (Vec::new(), None);
        for extent in extents {
            match self.probe_extent(shuffle, &extent, disk).await {
                Err(error) if is_damage(&error) && !shuffle.is_purged() => {
                    last_error = Some(error);
                    unreadable.push(extent);
                }
                Ok(()) | Err(_) => {}
            }
        }
        (unreadable, last_error)
    }

    /// Reads what of an extent lies on a disk.
    async fn probe_extent(&self, shuffle: &Shuffle, extent: &Extent, disk: usize) -> Result<(), StoreError> {
        let here = |slot: u16| slot != NO_LOG && shuffle.log_at(slot).disk.index == disk;
        if here(extent.index_log) {
            self.records_of(shuffle, extent).await?;
        }
        if !here(extent.data_log) {
            return Ok(());
        }
        let log = shuffle.log_at(extent.data_log);
        let failed = |error| self.failed(&log.disk, log.full_path(), error);
        let direct = extent.length >= DIRECT_BYTES_MIN && self.files.is_direct(&log);
        let opened =
            if direct { self.files.direct_reader(&log).await } else { self.files.reader(&log).await };
        let file = opened.map_err(failed)?;
        let mut done = 0;
        while done < extent.length {
            let left = usize::try_from(extent.length - done).unwrap_or(usize::MAX);
            // An extent fills its last block.
            let part = left.min(READ_CHUNK_BYTES_MAX).next_multiple_of(BLOCK_ALIGN);
            let target = ReadTarget::one(Box::new(vec![0; part]), 0..part, extent.data_offset() + done);
            let reading = file.read(target);
            within(self.config.read_timeout, async { reading.await.1 }).await.map_err(failed)?;
            done += part as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_caller_is_told_of_the_third_failure() {
        let failed = FailedReads::default();
        let (p, mut now) = (PartitionId(1), Instant::now());
        let told: Vec<bool> = (0..5).map(|_| failed.count(p, 0, now)).collect();
        assert_eq!(told, [false, false, true, false, false]);
        assert!(!failed.count(p, 1, now), "another disk");
        assert!(!failed.count(PartitionId(2), 0, now), "another partition");
        failed.forget(p, 0);
        assert!(!failed.count(p, 0, now), "it begins anew");
        assert!(!failed.count(p, 0, now));
        now += FAILURES_FORGOTTEN_AFTER;
        assert!(!failed.count(p, 0, now), "long ago");
    }

    #[test]
    fn what_passes_is_no_damage() {
        let errno = |errno: i32| StoreError::io("/d", io::Error::from_raw_os_error(errno));
        assert!(is_damage(&errno(uniffle_testkit::fault::EIO)));
        assert!(is_damage(&StoreError::corrupt("/d", "x")));
        assert!(is_damage(&StoreError::io("/d", io::ErrorKind::NotFound.into())), "a deleted file");
        assert!(!is_damage(&errno(uniffle_testkit::fault::EMFILE)));
        assert!(!is_damage(&StoreError::io("/d", io::ErrorKind::TimedOut.into())));
        assert!(!is_damage(&StoreError::new(StoreErrorKind::Purged, "app/1")));
    }
}
