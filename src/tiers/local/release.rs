//! Releases data that has moved to another tier: prefixes of streams, and the data logs without
//! remaining extents.
//!
//! A migration asks for the oldest data ([`LocalStore::oldest`]) and reads it ([`Moving`]). Once it
//! is safe in the other tier, the migration releases it ([`LocalStore::release`]). Index logs stay
//! until the shuffle is purged. A later start needs the sequence of all groups to verify that none
//! is missing, and index logs are small. A reader that still has extents of a removed log gets
//! `NotFound`, and finds the same bytes in the other tier.

use std::collections::{HashMap, HashSet};
use std::ops::{ControlFlow, Range};
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;

use super::core::Core;
use super::disk::LocalDisk;
use super::extent::Extent;
use super::log::{Log, LogKind};
use super::read::{DataRead, Reader};
use super::shuffle::Shuffle;
use super::store::{LocalStore, ShuffleHandle};
use super::walk::{TOGETHER_MAX, partitions_of, turn};
use crate::metrics::clamped;
use crate::tiers::{StoreError, StoreErrorKind, TierUsage};
use uniffle_wire::index::{IndexRecord, RECORD_BYTES};
use uniffle_wire::types::PartitionId;

/// Maximum bytes and blocks of a run, unless its first extent has more.
const RUN_BYTES: u64 = 32 << 20;
const RUN_BLOCKS: u64 = 32 << 10;

/// A run of contiguous extents of a partition's stream, which are moved together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// Partition of the run.
    pub partition: PartitionId,
    /// Range of the run in the stream.
    pub range: Range<u64>,
    /// Number of blocks in the run.
    pub blocks: u32,
}

/// The oldest data of a shuffle, which is to be moved next.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Oldest {
    /// Ends of the data to move, by partition and in its order.
    pub ends: Vec<(PartitionId, u64)>,
    /// Number of bytes up to these ends.
    pub bytes: u64,
}

/// Limits in the streams of partitions: extents that end after them are not moved.
pub type Stops = HashMap<PartitionId, u64>;

/// Reads runs of one registration.
#[derive(Debug)]
pub struct Moving {
    core: Arc<Core>,
    reader: Reader,
    shuffle: Arc<Shuffle>,
}

impl ShuffleHandle {
    /// Returns the usage of the disks.
    #[must_use]
    pub fn usage(&self) -> TierUsage {
        self.shuffle.usage()
    }

    /// Returns whether further data may be in a directory that was missing at the start or could
    /// not be read.
    #[must_use]
    pub fn is_partly_out_of_reach(&self) -> bool {
        self.shuffle.is_partly_out_of_reach()
    }

    /// Returns the incarnation, which distinguishes registrations of a shuffle.
    #[must_use]
    pub fn incarnation(&self) -> u64 {
        self.shuffle.incarnation
    }
}

impl LocalStore {
    /// Returns the data of a shuffle to be moved next. It covers every partition's stream up to its
    /// last extent in the oldest data logs. These logs have at most `bytes_max` bytes together,
    /// unless the first has more. A stream ends before a lost extent, and at `stops`. The logs are
    /// closed for writing.
    pub async fn oldest(&self, handle: &ShuffleHandle, bytes_max: u64, stops: &Stops) -> Oldest {
        let shuffle = &handle.shuffle;
        let chosen = shuffle.with_streams(|streams| {
            let mut bytes = 0;
            let before = streams.logs().take_while(|(_, of_log)| {
                let is_in = bytes == 0 || bytes + of_log.bytes <= bytes_max;
                bytes += of_log.bytes;
                is_in
            });
            before.map(|(slot, _)| slot).collect::<HashSet<u16>>()
        });
        self.end_logs(shuffle, |log| chosen.contains(&log.slot)).await;
        let partitions = partitions_of(shuffle).await;
        oldest_of(shuffle, partitions, stops, |extent| chosen.contains(&extent.data_log)).await
    }

    /// Returns all data of some partitions, with the same limits as [`LocalStore::oldest`].
    pub async fn all_of(
        &self,
        handle: &ShuffleHandle,
        partitions: Vec<PartitionId>,
        stops: &Stops,
    ) -> Oldest {
        self.end_logs(&handle.shuffle, |_| true).await;
        oldest_of(&handle.shuffle, partitions, stops, |_| true).await
    }

    /// Returns the bytes of a shuffle's files, by disk.
    #[must_use]
    pub fn occupied(&self, handle: &ShuffleHandle) -> Vec<u64> {
        let bytes = |disk| handle.shuffle.found(disk).map_or(0, |here| here.occupied.bytes());
        self.core.disks.iter().map(|disk| bytes(disk)).collect()
    }

    /// Closes the current data logs that match, so that later batches go to new files.
    pub(super) async fn end_logs(&self, shuffle: &Shuffle, is_one: impl Fn(&Log) -> bool + Send) {
        for disk in &self.core.disks {
            let Some(here) = shuffle.found(disk) else { continue };
            let mut current = here.current(LogKind::Data).lock().await;
            if let Some(log) = current.take_if(|log| is_one(log)) {
                log.close();
            }
        }
    }

    /// Creates the reader for the migration of a shuffle.
    #[must_use]
    pub fn moving(&self, handle: &ShuffleHandle) -> Moving {
        let (core, shuffle) = (Arc::clone(&self.core), Arc::clone(&handle.shuffle));
        Moving { reader: Reader::new(&core), core, shuffle }
    }

    /// Releases the extents of a shuffle that end at or before `ends`, because they are in another
    /// tier. Removes the files without remaining extents. Returns the bytes of these files.
    ///
    /// # Errors
    /// The error of a file that was not removed. A later call, the maintenance or the next start
    /// removes it.
    pub async fn release(
        &self,
        handle: &ShuffleHandle,
        ends: Vec<(PartitionId, u64)>,
    ) -> Result<u64, StoreError> {
        let shuffle = &handle.shuffle;
        let mut looked = 0;
        for (partition, end) in ends {
            loop {
                let released = shuffle.release(partition, end, TOGETHER_MAX);
                let known = || released.iter().filter(|extent| !extent.is_lost());
                self.core.metrics.extents.sub(clamped(known().count()));
                self.core.records.forget(known().map(|extent| shuffle.records_key(extent)));
                turn(&mut looked, 1 + released.len()).await;
                if released.len() < TOGETHER_MAX {
                    break;
                }
            }
        }
        self.remove_empty_logs(shuffle).await
    }

    async fn remove_empty_logs(&self, shuffle: &Shuffle) -> Result<u64, StoreError> {
        // Checked in this order: all extents of a settled log are visible.
        let settled: Vec<_> = shuffle.logs().into_iter().filter(|log| is_removable(log)).collect();
        // A log with a hole may be readable at a later start, so it stays.
        let is_left = |log: &Arc<Log>| shuffle.with_streams(|it| it.is_left(log.slot));
        let empty: Vec<_> = settled.into_iter().filter(is_left).collect();
        // If this future is dropped, the maintenance removes the logs.
        empty.iter().for_each(|log| log.release());
        self.remove_logs(shuffle, empty).await
    }

    /// Removes the released files of a disk whose removal did not finish earlier.
    pub(super) async fn remove_left_logs(&self, disk: &LocalDisk) -> Result<(), StoreError> {
        let shuffles: Vec<_> = self.shuffles.iter().map(|shuffle| Arc::clone(&*shuffle)).collect();
        let mut failed = None;
        for shuffle in shuffles {
            let is_left =
                |log: &Arc<Log>| log.disk.index == disk.index && log.is_released() && !log.is_removed();
            let left: Vec<_> = shuffle.logs().into_iter().filter(is_left).collect();
            failed = self.remove_logs(&shuffle, left).await.err().or(failed);
        }
        failed.map_or(Ok(()), Err)
    }

    async fn remove_logs(&self, shuffle: &Shuffle, logs: Vec<Arc<Log>>) -> Result<u64, StoreError> {
        let (mut bytes, mut trashed, mut failed) = (0, Vec::new(), None);
        for log in logs {
            match self.core.remove_log(shuffle, &log).await {
                Ok(removed) => {
                    bytes += removed.bytes;
                    trashed.extend(removed.trash.map(|trash| (Arc::clone(&log.disk), trash)));
                }
                Err(error) => failed = Some(error),
            }
        }
        for (disk, trash) in trashed {
            // Files that are not deleted now are deleted when the trash is emptied.
            let deleted = disk.delete(&trash, self.core.config.purge_timeout).await;
            deleted.map_err(|error| self.core.failed(&disk, &trash, error))?;
            disk.made_room().await.map_err(|error| self.core.failed(&disk, &trash, error))?;
        }
        failed.map_or(Ok(bytes), Err)
    }
}

/// A file that was moved into the trash. Empty if another caller removes it.
#[derive(Debug, Default)]
pub(super) struct Removed {
    bytes: u64,
    /// Path in the trash, if the file existed.
    trash: Option<PathBuf>,
}

/// Returns whether a log's file may be removed once it has no extents.
fn is_removable(log: &Log) -> bool {
    log.kind == LogKind::Data && log.is_settled() && !log.is_removed()
}

/// Returns, for each partition, the end of its last wanted extent that can be moved.
async fn oldest_of(
    shuffle: &Shuffle,
    mut partitions: Vec<PartitionId>,
    stops: &Stops,
    is_wanted: impl Fn(&Extent) -> bool,
) -> Oldest {
    let (mut oldest, mut looked) = (Oldest::default(), 0);
    partitions.sort_unstable();
    for id in partitions {
        let found = shuffle.with_partition(id, |found| found.map(|it| (it.extents.clone(), it.start)));
        let Some((extents, start)) = found else { continue };
        let stop = stops.get(&id).copied().unwrap_or(u64::MAX);
        let mut end = None;
        for extent in extents.iter() {
            let place = extent.base..extent.base + extent.length;
            let can_be_moved = !extent.is_lost()
                && place.end <= stop
                && u32::try_from(extent.length).is_ok()
                && !shuffle.damaged.touches(id, &place);
            if !can_be_moved {
                break;
            }
            end = if is_wanted(extent) { Some(place.end) } else { end };
            turn(&mut looked, 1).await;
        }
        if let Some(end) = end {
            oldest.bytes += end - start;
            oldest.ends.push((id, end));
        }
        turn(&mut looked, 1).await;
    }
    oldest
}

impl Core {
    /// Moves the file of a data log without extents directly into the trash. A disk that is short
    /// of space may have no room for another directory.
    pub(super) async fn remove_log(&self, shuffle: &Shuffle, log: &Log) -> Result<Removed, StoreError> {
        log.release();
        let Some(removal) = log.begin_removal() else { return Ok(Removed::default()) };
        self.files.forget(log);
        let (disk, bytes) = (&log.disk, log.bytes());
        let trash = disk.discard(&log.path).await;
        let trash = trash.map_err(|error| self.failed(disk, log.full_path(), error))?;
        removal.done();
        if let Some(here) = shuffle.found(disk) {
            here.occupied.take(bytes);
        }
        Ok(Removed { bytes, trash })
    }
}

impl Moving {
    /// Returns the next run of a partition. It begins at `base`, where an extent begins, and ends
    /// at or before `end`. Returns `None` at the end.
    #[must_use]
    pub fn next_run(&self, partition: PartitionId, base: u64, end: u64) -> Option<Run> {
        let extents = self.shuffle.part(partition, &(base..end.min(base.saturating_add(RUN_BYTES))));
        let first = extents.beginning_at(base)?;
        let (mut until, mut blocks) = (base, 0u64);
        for extent in extents.iter_from(first) {
            let (next, more) = (extent.base + extent.length, blocks + u64::from(extent.blocks));
            let fits = next - base <= RUN_BYTES && more <= RUN_BLOCKS;
            if next > end || extent.is_lost() || !(fits || blocks == 0) {
                break;
            }
            (until, blocks) = (next, more);
        }
        let blocks = u32::try_from(blocks).ok().filter(|blocks| *blocks > 0)?;
        Some(Run { partition, range: base..until, blocks })
    }

    /// Returns the index records of a run, with offsets relative to it.
    ///
    /// # Errors
    /// An error of the disk, `Corrupt` records, or `Purged`.
    pub async fn records(&self, run: &Run) -> Result<Bytes, StoreError> {
        let mut all = Vec::with_capacity(run.blocks as usize * RECORD_BYTES);
        let extents = self.shuffle.part(run.partition, &run.range);
        for extent in extents.touched(run.range.start, run.range.end) {
            let shift = (extent.base - run.range.start).cast_signed();
            let add = |record: &IndexRecord| {
                let moved = IndexRecord { offset: record.offset + shift, ..*record };
                all.extend_from_slice(&moved.encode());
                ControlFlow::Continue(())
            };
            let visited = self.core.visit_records(&self.shuffle, extent, 0, add).await;
            self.shuffle.require_present()?;
            visited?;
        }
        if all.len() != run.blocks as usize * RECORD_BYTES {
            self.shuffle.require_present()?;
            return Err(self.shuffle.error(StoreErrorKind::InvalidRange));
        }
        Ok(all.into())
    }

    /// Returns a reader of the data of a run, which verifies every block. Its failures are not
    /// counted as failed reads.
    ///
    /// # Errors
    /// `InvalidRange` if the run is not completely on the disks any longer.
    pub fn data(&self, run: &Run) -> Result<DataRead, StoreError> {
        let invalid = || self.shuffle.error(StoreErrorKind::InvalidRange);
        let length = u32::try_from(run.range.end - run.range.start).map_err(|_| invalid())?;
        let shuffle = Arc::clone(&self.shuffle);
        let read = DataRead::new(&self.reader, shuffle, run.partition, run.range.start, length)?;
        if read.has_hole() {
            return Err(invalid());
        }
        Ok(read.for_moving())
    }

    /// Returns the beginning of a partition's stream on the disks.
    #[must_use]
    pub fn start(&self, partition: PartitionId) -> u64 {
        self.shuffle.with_partition(partition, |found| found.map_or(0, |it| it.start))
    }
}
