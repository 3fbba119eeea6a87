//! The disks' side of an offload: selection and reads of extents, and the removal of data logs
//! without remaining extents.
//!
//! An offload chooses data logs ([`LocalStore::oldest`]) and reads their extents
//! ([`ChosenExtents`]). Once an object with them is stored, it [relocates](LocalStore::relocate)
//! them. Index logs stay until the shuffle is purged. A later start needs the sequence of all
//! groups to verify that none is missing, and index logs are small. A reader that still has extents
//! of a removed log gets `NotFound`, and finds the same bytes in the object.

use std::collections::{HashSet, VecDeque};
use std::ops::{ControlFlow, Range};
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;

use crate::metrics::clamped;
use crate::store::disk::core::DiskCore;
use crate::store::disk::directories::directory::LocalDisk;
use crate::store::disk::log_file::{Log, LogKind};
use crate::store::disk::read::{DataRead, DiskReader};
use crate::store::disk::shuffle::DiskShuffle;
use crate::store::disk::store::{DiskShuffleHandle, LocalStore};
use crate::store::disk::walk::{WALK_BATCH_MAX, partitions_of, yield_per_batch};
use crate::store::extents::extent::{Extent, ExtentList};
use crate::store::{StoreError, TierUsage};
use uniffle_wire::index::{IndexRecord, RECORD_BYTES};
use uniffle_wire::types::PartitionId;

/// Maximum bytes and blocks of a run, unless its first extent has more.
const RUN_BYTES: u64 = 32 << 20;
const RUN_BLOCKS: u64 = 32 << 10;

/// Extents to be offloaded that are contiguous in a partition's stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// Partition of the run.
    pub partition: PartitionId,
    pub(in crate::store) extents: Vec<Extent>,
}

/// Extents that are not offloaded, by partition and base.
pub type Excluded = HashSet<(PartitionId, u64)>;

/// Chosen extents of one registration, in the order of partitions and streams.
#[derive(Debug)]
pub struct ChosenExtents {
    core: Arc<DiskCore>,
    reader: DiskReader,
    shuffle: Arc<DiskShuffle>,
    /// Chosen data logs, or `None` for all.
    logs: Option<HashSet<u16>>,
    partitions: VecDeque<PartitionId>,
    current: Option<CurrentPartition>,
    excluded: Excluded,
    visited: usize,
}

/// The partition whose extents are offloaded now.
#[derive(Debug)]
struct CurrentPartition {
    id: PartitionId,
    extents: ExtentList,
    /// Index of the next extent, and of the first one that is not offloaded.
    next: usize,
    until: usize,
    /// Extents before this index are read one by one, because a run with them cannot be read.
    singly_until: usize,
}

impl DiskShuffleHandle {
    /// Returns the shuffle's usage of the disks.
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

    /// Returns the length of a partition's stream.
    #[cfg(feature = "object")]
    pub(in crate::store) fn stream_bytes(&self, partition: PartitionId) -> u64 {
        self.shuffle.stream_bytes(partition)
    }

    /// Appends extents in objects to their streams and makes them visible atomically. Only for a
    /// store without disks, and not for concurrent callers.
    ///
    /// # Errors
    /// `Purged`.
    #[cfg(feature = "object")]
    pub(in crate::store) fn publish_stored(
        &self,
        extents: &[(PartitionId, Extent)],
    ) -> Result<(), StoreError> {
        self.shuffle.apply(extents)
    }

    /// Returns the incarnation, which distinguishes registrations of a shuffle.
    #[must_use]
    pub fn incarnation(&self) -> u64 {
        self.shuffle.incarnation
    }
}

impl LocalStore {
    /// Chooses the data of a shuffle to be offloaded next: every partition's extents up to the last
    /// one in its oldest data logs, except `excluded` ones. An object then has a contiguous part of
    /// the stream, whatever disks the batches went to. These logs have at most `bytes_max` bytes
    /// together, unless the first has more. They are closed for writing.
    pub async fn oldest(
        &self,
        handle: &DiskShuffleHandle,
        bytes_max: u64,
        excluded: Excluded,
    ) -> ChosenExtents {
        let shuffle = &handle.shuffle;
        let mut logs: Vec<_> = shuffle.with_streams(|streams| streams.logs().collect());
        logs.sort_by_cached_key(|(slot, _)| shuffle.log_at(*slot).order());
        let mut bytes = 0;
        let oldest = logs.into_iter().take_while(|(_, of_log)| {
            let is_in = bytes == 0 || bytes + of_log.bytes <= bytes_max;
            bytes += of_log.bytes;
            is_in
        });
        let chosen: HashSet<u16> = oldest.map(|(slot, _)| slot).collect();
        self.end_logs(shuffle, |log| chosen.contains(&log.slot)).await;
        self.choose(handle, partitions_of(shuffle).await, Some(chosen), excluded)
    }

    /// Chooses all data of some partitions, except `excluded` extents. Closes all open data logs of
    /// the shuffle, so that later batches go to new files.
    pub async fn all_of(
        &self,
        handle: &DiskShuffleHandle,
        partitions: Vec<PartitionId>,
        excluded: Excluded,
    ) -> ChosenExtents {
        self.end_logs(&handle.shuffle, |_| true).await;
        self.choose(handle, partitions, None, excluded)
    }

    fn choose(
        &self,
        handle: &DiskShuffleHandle,
        mut partitions: Vec<PartitionId>,
        logs: Option<HashSet<u16>>,
        excluded: Excluded,
    ) -> ChosenExtents {
        partitions.sort_unstable();
        let (core, shuffle) = (Arc::clone(&self.core), Arc::clone(&handle.shuffle));
        let (reader, partitions) = (DiskReader::new(&core), partitions.into());
        ChosenExtents { core, reader, shuffle, logs, partitions, current: None, excluded, visited: 0 }
    }

    /// Returns the bytes of a shuffle's files, by disk.
    #[must_use]
    pub fn occupied(&self, handle: &DiskShuffleHandle) -> Vec<u64> {
        let bytes = |disk| handle.shuffle.found(disk).map_or(0, |here| here.occupied.bytes());
        self.core.disks.iter().map(|disk| bytes(disk)).collect()
    }

    /// Closes the current data logs that match, so that later batches go to new files.
    pub(super) async fn end_logs(&self, shuffle: &DiskShuffle, is_one: impl Fn(&Log) -> bool + Send) {
        for disk in &self.core.disks {
            let Some(here) = shuffle.found(disk) else { continue };
            let mut current = here.current(LogKind::Data).lock().await;
            if let Some(log) = current.take_if(|log| is_one(log)) {
                log.close();
            }
        }
    }

    /// Relocates extents to the objects that have copies of them. Removes the files without
    /// remaining extents. Returns the bytes of these files.
    ///
    /// # Errors
    /// The error of a file that was not removed. A later call, the maintenance or the next start
    /// removes it.
    pub async fn relocate(
        &self,
        handle: &DiskShuffleHandle,
        copies: Vec<(PartitionId, Extent)>,
    ) -> Result<u64, StoreError> {
        let shuffle = &handle.shuffle;
        let mut visited = 0;
        for some in copies.chunks(WALK_BATCH_MAX) {
            let moved = shuffle.relocate(some);
            self.core.metrics.extents.sub(clamped(moved.len()));
            self.core.records.remove(moved.iter().map(|extent| shuffle.records_key(extent)));
            yield_per_batch(&mut visited, some.len()).await;
        }
        self.remove_empty_logs(shuffle).await
    }

    async fn remove_empty_logs(&self, shuffle: &DiskShuffle) -> Result<u64, StoreError> {
        // Checked in this order: all extents of a settled log are visible.
        let settled: Vec<_> = shuffle.logs().into_iter().filter(|log| is_removable(log)).collect();
        // A log with a hole may be readable at a later start, so it stays.
        let is_empty_log = |log: &Arc<Log>| shuffle.with_streams(|it| it.is_log_empty(log.slot));
        let empty: Vec<_> = settled.into_iter().filter(is_empty_log).collect();
        // If this future is dropped, the maintenance removes the logs.
        empty.iter().for_each(|log| log.release());
        self.remove_logs(shuffle, empty).await
    }

    /// Removes the released files of a disk whose removal did not finish earlier.
    pub(in crate::store) async fn remove_left_logs(&self, disk: &LocalDisk) -> Result<(), StoreError> {
        let shuffles: Vec<_> = self.shuffles.iter().map(|shuffle| Arc::clone(&*shuffle)).collect();
        let mut failed = None;
        for shuffle in shuffles {
            let is_empty_log =
                |log: &Arc<Log>| log.disk.index == disk.index && log.is_released() && !log.is_removed();
            let left: Vec<_> = shuffle.logs().into_iter().filter(is_empty_log).collect();
            failed = self.remove_logs(&shuffle, left).await.err().or(failed);
        }
        failed.map_or(Ok(()), Err)
    }

    async fn remove_logs(&self, shuffle: &DiskShuffle, logs: Vec<Arc<Log>>) -> Result<u64, StoreError> {
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
            let deleted = disk.delete(&trash).await;
            deleted.map_err(|error| self.core.failed(&disk, &trash, error))?;
            disk.note_space_freed().await.map_err(|error| self.core.failed(&disk, &trash, error))?;
        }
        failed.map_or(Ok(bytes), Err)
    }
}

/// A file that was moved into the trash. Empty if another caller removes it.
#[derive(Debug, Default)]
pub(in crate::store) struct TrashedFile {
    bytes: u64,
    /// Path in the trash, if the file existed.
    trash: Option<PathBuf>,
}

/// Returns whether a log's file may be removed once it has no extents.
fn is_removable(log: &Log) -> bool {
    log.kind == LogKind::Data && log.is_settled() && !log.is_removed()
}

impl DiskCore {
    /// Moves the file of a data log without extents directly into the trash. A disk that is short
    /// of space may have no room for another directory.
    pub(in crate::store) async fn remove_log(
        &self,
        shuffle: &DiskShuffle,
        log: &Log,
    ) -> Result<TrashedFile, StoreError> {
        log.release();
        let Some(removal) = log.begin_removal() else { return Ok(TrashedFile::default()) };
        self.files.forget(log);
        let disk = &log.disk;
        let trash = disk.discard(&log.path).await;
        let trash = trash.map_err(|error| self.failed(disk, log.full_path(), error))?;
        removal.done();
        let bytes = log.uncount();
        if let Some(here) = shuffle.found(disk) {
            here.occupied.take(bytes);
        }
        Ok(TrashedFile { bytes, trash })
    }
}

impl Run {
    /// Returns the range of the run in the stream.
    fn range(&self) -> Range<u64> {
        let ends = self.extents.first().zip(self.extents.last());
        ends.map_or(0..0, |(first, last)| first.base..last.base + last.length)
    }
}

impl ChosenExtents {
    /// Returns the next run, or `None` at the end.
    pub async fn next_run(&mut self) -> Option<Run> {
        loop {
            let mut current = match self.current.take() {
                Some(current) => current,
                None => {
                    let id = self.partitions.pop_front()?;
                    let extents = self.shuffle.extents(id);
                    let until = self.end_of_chosen(&extents).await;
                    CurrentPartition { id, extents, next: 0, until, singly_until: 0 }
                }
            };
            let mut run = Run { partition: current.id, extents: Vec::new() };
            let mut blocks = 0;
            while current.next < current.until
                && let Some(extent) = current.extents.get(current.next)
            {
                let is_wanted = self.wants(current.id, extent);
                blocks += u64::from(extent.blocks);
                let bytes = extent.base + extent.length - run.range().start;
                let fits = current.next >= current.singly_until && bytes <= RUN_BYTES && blocks <= RUN_BLOCKS;
                if !(run.extents.is_empty() || is_wanted && fits) {
                    break;
                }
                if is_wanted {
                    run.extents.push(*extent);
                } else {
                    blocks = 0;
                }
                current.next += 1;
                yield_per_batch(&mut self.visited, 1).await;
            }
            if !run.extents.is_empty() {
                self.current = Some(current);
                return Some(run);
            }
        }
    }

    /// Returns the index after the last extent in a chosen log.
    async fn end_of_chosen(&mut self, extents: &ExtentList) -> usize {
        let Some(logs) = &self.logs else { return extents.len() };
        let mut until = 0;
        for (at, extent) in extents.iter().enumerate() {
            until = if logs.contains(&extent.data_log) { at + 1 } else { until };
            yield_per_batch(&mut self.visited, 1).await;
        }
        until
    }

    fn wants(&self, partition: PartitionId, extent: &Extent) -> bool {
        let place = extent.base..extent.base + extent.length;
        extent.is_on_disk()
            && u32::try_from(extent.length).is_ok()
            && !self.excluded.contains(&(partition, extent.base))
            && !self.shuffle.damaged.touches(partition, &place)
    }

    /// Returns whether a block of a run is damaged.
    #[must_use]
    pub fn has_damage(&self, run: &Run) -> bool {
        self.shuffle.damaged.touches(run.partition, &run.range())
    }

    /// Gives back the last run, which cannot be read. Returns its extent if it has only one, which
    /// is excluded now. Otherwise its extents become runs of their own.
    pub fn give_back(&mut self, run: &Run) -> Option<(PartitionId, u64)> {
        let (current, first) = (self.current.as_mut()?, run.extents.first()?);
        if run.extents.len() > 1 {
            current.singly_until = current.next;
            current.next = current.extents.after(first.base);
            return None;
        }
        let excluded = (run.partition, first.base);
        self.excluded.insert(excluded);
        Some(excluded)
    }

    /// Returns the index records of an extent, with offsets relative to it.
    ///
    /// # Errors
    /// An error of the disk, `Corrupt` records, or `Purged`.
    pub async fn records(&self, extent: &Extent) -> Result<Bytes, StoreError> {
        let mut all = Vec::with_capacity(extent.blocks as usize * RECORD_BYTES);
        let add = |record: &IndexRecord| {
            all.extend_from_slice(&record.encode());
            ControlFlow::Continue(())
        };
        let visited = self.core.visit_records(&self.shuffle, extent, 0, add).await;
        self.shuffle.require_present()?;
        visited.map(|()| all.into())
    }

    /// Returns a reader of the data of a run, which verifies the blocks. Its failures are not
    /// counted as failed reads.
    #[must_use]
    pub fn data(&self, run: &Run) -> DataRead {
        let (shuffle, extents) = (Arc::clone(&self.shuffle), run.extents.iter());
        DataRead::new(&self.reader, shuffle, run.partition, extents.clone(), run.range()).for_offload(extents)
    }
}
