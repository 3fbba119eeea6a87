//! What a disk does not give back any more.
//!
//! A block with other bytes than were written is read once more, by itself and around the page cache; if it still has, it is
//! given up, and nothing else of its extent. A read that fails may succeed later, so it only counts: after the third failure of a partition on a disk all that it has there is tried, three times within
//! half a second, and what still cannot be read can be given up and becomes a hole. Blocks in holes can be sent again and
//! found; whether one is lost is not decided here (`service`).
//!
//! Why three: clients with default settings try a task four times within a second, and the fourth is to be told what is
//! lost. What says nothing about stored bytes (no descriptors, a deadline) is not counted.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, sleep};

use super::disk::within;
use super::files::Mode;
use super::health::{Verdict, judge};
use super::log::Log;
use super::shuffle::{Extent, NO_LOG, Shuffle};
use super::verify::Check;
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
    /// Whether a block that was read with other bytes than were written has the right ones when the device is asked again.
    pub(super) async fn is_sound(
        &self,
        shuffle: &Shuffle,
        partition: PartitionId,
        block: &Check,
    ) -> Result<bool, StoreError> {
        let Ok(_turn) = self.probes.acquire().await else { return Ok(false) };
        let Some(extent) = shuffle.extent_at(partition, block.base) else { return Ok(false) };
        let log = shuffle.log_at(extent.data_log);
        let mut hasher = crc32fast::Hasher::new();
        let offset = extent.data_offset() + (block.place.start - extent.base);
        let length = block.place.end - block.place.start;
        self.read_again(&log, offset..offset + length, |bytes| hasher.update(bytes)).await?;
        Ok(hasher.finalize() == block.crc)
    }

    /// Gives up a block that had other bytes than were written twice, so that it can be sent again and found; blames its
    /// disk.
    pub(super) fn condemn(&self, shuffle: &Shuffle, partition: PartitionId, block: &Check) -> StoreError {
        let Some(extent) = shuffle.extent_at(partition, block.base) else {
            return shuffle.error(StoreErrorKind::Corrupt);
        };
        shuffle.condemned.add(partition, &block.place);
        self.metrics.blocks_condemned.inc();
        let log = shuffle.log_at(extent.data_log);
        let what = "a block has another checksum than when it was written, also when it is read again";
        log.disk.note(&io::Error::new(io::ErrorKind::InvalidData, what));
        let (path, bytes) = (log.full_path(), block.place.end - block.place.start);
        tracing::error!(shuffle = %shuffle.key, %partition, path = %path.display(), bytes, what);
        StoreError::corrupt(path, what)
    }

    /// Reads a range of a data log around the page cache, whole disk blocks at a time: an extent fills its last one.
    async fn read_again(
        &self,
        log: &Log,
        range: Range<u64>,
        mut take: impl FnMut(&[u8]),
    ) -> Result<(), StoreError> {
        let failed = |error| self.failed(&log.disk, log.full_path(), error);
        let file = self.files.open_read(log, Mode::ReadDirect).await.map_err(failed)?;
        let mut at = range.start;
        while at < range.end {
            let start = at - at % BLOCK_ALIGN as u64;
            let skip = usize::try_from(at - start).unwrap_or(0);
            let left = usize::try_from(range.end - start).unwrap_or(usize::MAX);
            let part = left.min(READ_CHUNK_BYTES_MAX);
            let blocks = part.next_multiple_of(BLOCK_ALIGN);
            let reading = file.read(ReadTarget::one(Box::new(vec![0; blocks]), 0..blocks, start));
            let target = within(self.config.read_timeout, async {
                let (target, result) = reading.await;
                result.map(|()| target)
            });
            let mut target = target.await.map_err(failed)?;
            take(target.part_mut(0).and_then(|bytes| bytes.get(skip..part)).unwrap_or_default());
            at = start + part as u64;
        }
        Ok(())
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
        let start = extent.data_offset();
        self.read_again(&shuffle.log_at(extent.data_log), start..start + extent.length, |_| ()).await
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
