//! Giving up what lies elsewhere by now: prefixes of streams, and the data logs in which nothing is left.
//!
//! Who moves data away asks what is oldest ([`LocalStore::oldest`]), reads it ([`Moving`]), and once it is safe elsewhere
//! releases it ([`LocalStore::release`]). Index logs stay until the shuffle is purged: a later start needs the sequence of
//! all groups to know that none is missing, and they are small. A reader that still has extents of a removed log is told
//! `NotFound`, and finds the same bytes where they lie now.

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

/// Bytes and blocks of a piece of a stream that is moved as one, unless one extent has more.
const RUN_BYTES: u64 = 32 << 20;
const RUN_BLOCKS: u64 = 32 << 10;

/// A piece of a partition's stream: whole extents one behind the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// The partition.
    pub partition: PartitionId,
    /// Its place in the stream.
    pub range: Range<u64>,
    /// Blocks in it.
    pub blocks: u32,
}

/// What is to be moved next of a shuffle.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Oldest {
    /// Until where, by partition and in its order.
    pub ends: Vec<(PartitionId, u64)>,
    /// Bytes up to there.
    pub bytes: u64,
}

/// Places in the streams of partitions: what ends behind is not moved.
pub type Stops = HashMap<PartitionId, u64>;

/// Reads runs of one registration.
#[derive(Debug)]
pub struct Moving {
    core: Arc<Core>,
    reader: Reader,
    shuffle: Arc<Shuffle>,
}

impl ShuffleHandle {
    /// What it has on the disks.
    #[must_use]
    pub fn usage(&self) -> TierUsage {
        self.shuffle.usage()
    }

    /// Whether there may be more of it, in a directory that was not here at the start or could not be read.
    #[must_use]
    pub fn is_partly_out_of_reach(&self) -> bool {
        self.shuffle.is_partly_out_of_reach()
    }

    /// Tells registrations of a shuffle apart.
    #[must_use]
    pub fn incarnation(&self) -> u64 {
        self.shuffle.incarnation
    }
}

impl LocalStore {
    /// What of a shuffle is to be moved next: of every partition the stream up to its last extent in the oldest data logs,
    /// which have `bytes_max` together or one of which has more. A stream ends before what is lost, and at `stops`. Nothing is
    /// written to these logs any more.
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

    /// All that some partitions have; as [`LocalStore::oldest`].
    pub async fn all_of(
        &self,
        handle: &ShuffleHandle,
        partitions: Vec<PartitionId>,
        stops: &Stops,
    ) -> Oldest {
        self.end_logs(&handle.shuffle, |_| true).await;
        oldest_of(&handle.shuffle, partitions, stops, |_| true).await
    }

    /// Bytes of a shuffle's files, by disk.
    #[must_use]
    pub fn occupied(&self, handle: &ShuffleHandle) -> Vec<u64> {
        let bytes = |disk| handle.shuffle.found(disk).map_or(0, |here| here.occupied.bytes());
        self.core.disks.iter().map(|disk| bytes(disk)).collect()
    }

    /// What is written from now on goes to new files instead of these.
    pub(super) async fn end_logs(&self, shuffle: &Shuffle, is_one: impl Fn(&Log) -> bool + Send) {
        for disk in &self.core.disks {
            let Some(here) = shuffle.found(disk) else { continue };
            let mut current = here.current(LogKind::Data).lock().await;
            if let Some(log) = current.take_if(|log| is_one(log)) {
                log.close();
            }
        }
    }

    /// Reads of a shuffle that is moved.
    #[must_use]
    pub fn moving(&self, handle: &ShuffleHandle) -> Moving {
        let (core, shuffle) = (Arc::clone(&self.core), Arc::clone(&handle.shuffle));
        Moving { reader: Reader::new(&core), core, shuffle }
    }

    /// Forgets what of a shuffle ends at or before these places of its streams, which lies elsewhere, and removes the files
    /// in which nothing is left. Bytes of the files.
    ///
    /// # Errors
    /// Of a file that was not removed; a later call, the maintenance or the next start does that.
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
        // Looked at in this order: what a settled log has is visible.
        let settled: Vec<_> = shuffle.logs().into_iter().filter(|log| is_removable(log)).collect();
        // What is a hole now may be there for a later start.
        let is_left = |log: &Arc<Log>| shuffle.with_streams(|it| it.is_left(log.slot));
        let empty: Vec<_> = settled.into_iter().filter(is_left).collect();
        // If this is dropped before it is done, the maintenance does it.
        empty.iter().for_each(|log| log.release());
        self.remove_logs(shuffle, empty).await
    }

    /// Removes from a disk the files that were to be removed before and were not.
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
            // What is not deleted now goes with the next look at the trash.
            let deleted = disk.delete(&trash, self.core.config.purge_timeout).await;
            deleted.map_err(|error| self.core.failed(&disk, &trash, error))?;
            disk.made_room().await.map_err(|error| self.core.failed(&disk, &trash, error))?;
        }
        failed.map_or(Ok(bytes), Err)
    }
}

/// A file that is not in its place any more; nothing where another removes it.
#[derive(Debug, Default)]
pub(super) struct Removed {
    bytes: u64,
    /// Where it is, if it was there.
    trash: Option<PathBuf>,
}

/// Whether a log's file may be removed once no extent is in it.
fn is_removable(log: &Log) -> bool {
    log.kind == LogKind::Data && log.is_settled() && !log.is_removed()
}

/// Of some partitions, one after the other, the place behind the last extent that is wanted and can be moved.
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
    /// Moves the file of a data log in which nothing is left into the trash. Straight: a disk that is relieved may have no
    /// room for a directory.
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
    /// The next run of a partition from `base` on, where an extent begins, until `end` at most; none at the end.
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

    /// The index records of a run, with offsets in it.
    ///
    /// # Errors
    /// What the disk says, that they are not what was written, or `Purged`.
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

    /// The bytes of a run, every block of them checked. That they cannot be read counts for no reader.
    ///
    /// # Errors
    /// `InvalidRange` when it is not there any more.
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

    /// Where a partition's stream begins on the disks.
    #[must_use]
    pub fn start(&self, partition: PartitionId) -> u64 {
        self.shuffle.with_partition(partition, |found| found.map_or(0, |it| it.start))
    }
}
