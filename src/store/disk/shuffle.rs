//! One shuffle on the local disks: its logs, its published extents, and the gate between purges and
//! writes.
//!
//! Creating a directory or a file holds the gate for reading. A purge marks the shuffle, then
//! acquires the gate for writing: no file is created after that.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::RwLock;

use super::directories::directory::{APPS, LocalDisk, Occupied};
use super::log_file::{Log, LogKind};
use super::read::damaged::DamagedBlocks;
use super::read::failures::FailedReads;
use super::write::pending::PublishState;
use crate::log::Incarnation;
use crate::store::extents::extent::{Extent, ExtentList, OBJECT};
use crate::store::extents::streams::{Partition, Partitions, Streams};
use crate::store::index::record_cache::RecordsKey;
use crate::store::{StoreError, StoreErrorKind, TierUsage};
use uniffle_base::budget::Budget;
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// State recovered from an earlier process.
#[derive(Debug)]
pub(in crate::store) struct RestoredStreams {
    pub(in crate::store) partitions: Partitions,
    pub(in crate::store) first_base: u64,
}

/// A registered shuffle.
#[derive(Debug)]
pub(in crate::store) struct DiskShuffle {
    pub(in crate::store) key: ShuffleKey,
    pub(in crate::store) incarnation: u64,
    /// Directory on every disk, relative to the root.
    pub(in crate::store) directory: PathBuf,
    purged: AtomicBool,
    /// Held for reading while files are created, and for writing by a purge.
    pub(in crate::store) gate: tokio::sync::RwLock<()>,
    disks: Vec<OnceLock<Box<ShuffleDisk>>>,
    streams: RwLock<Streams>,
    logs: RwLock<Vec<Arc<Log>>>,
    published_bytes: AtomicU64,
    /// True if the purge is in the metadata log.
    purge_is_logged: AtomicBool,
    /// See [`DiskShuffle::set_forgotten`].
    forgotten_bytes: OnceLock<Vec<u64>>,
    pub(super) failed_reads: FailedReads,
    pub(in crate::store) damaged: DamagedBlocks,
    /// See [`DiskShuffle::set_out_of_reach`].
    is_partly_out_of_reach: AtomicBool,
    /// Beginning of the streams of new partitions: after data that may have been published and is
    /// unknown now.
    first_base: AtomicU64,
    pub(in crate::store) publish_lock: tokio::sync::Mutex<PublishState>,
}

/// A shuffle on one disk. Created with the first write to it, or if a start finds files there.
#[derive(Debug)]
pub(in crate::store) struct ShuffleDisk {
    data: tokio::sync::Mutex<Option<Arc<Log>>>,
    index: tokio::sync::Mutex<Option<Arc<Log>>>,
    next_number: AtomicU32,
    pub(in crate::store) occupied: Occupied,
}

impl ShuffleDisk {
    fn new(disk: &Arc<LocalDisk>, next_number: u32) -> Box<Self> {
        Box::new(Self {
            data: tokio::sync::Mutex::default(),
            index: tokio::sync::Mutex::default(),
            next_number: AtomicU32::new(next_number),
            occupied: Occupied::none(Arc::clone(disk)),
        })
    }

    /// Returns the latest log of a kind, if there is one. It may be closed.
    pub(in crate::store) fn current(&self, kind: LogKind) -> &tokio::sync::Mutex<Option<Arc<Log>>> {
        match kind {
            LogKind::Data => &self.data,
            LogKind::Index => &self.index,
        }
    }

    /// Returns an unused file number of the shuffle on this disk.
    pub(in crate::store) fn next_number(&self) -> u32 {
        self.next_number.fetch_add(1, Ordering::Relaxed)
    }
}

impl DiskShuffle {
    /// Creates a shuffle. Its lists of extents are charged to `extents`.
    pub(in crate::store) fn new(key: ShuffleKey, incarnation: u64, disks: usize, extents: &Budget) -> Self {
        let name = format!("{}.{incarnation}", key.shuffle);
        let directory = Path::new(APPS).join(key.app.as_str()).join(name);
        Self {
            key,
            incarnation,
            directory,
            purged: AtomicBool::new(false),
            gate: tokio::sync::RwLock::new(()),
            disks: (0..disks).map(|_| OnceLock::new()).collect(),
            streams: RwLock::new(Streams::new(extents)),
            logs: RwLock::default(),
            published_bytes: AtomicU64::new(0),
            purge_is_logged: AtomicBool::new(false),
            forgotten_bytes: OnceLock::new(),
            failed_reads: FailedReads::default(),
            damaged: DamagedBlocks::default(),
            is_partly_out_of_reach: AtomicBool::new(false),
            first_base: AtomicU64::new(0),
            publish_lock: tokio::sync::Mutex::default(),
        }
    }

    pub(in crate::store) fn is_purged(&self) -> bool {
        self.purged.load(Ordering::Acquire)
    }

    /// Returns its key and number in the metadata log.
    pub(in crate::store) fn incarnation(&self) -> Incarnation {
        Incarnation { key: self.key.clone(), number: self.incarnation }
    }

    /// See [`DiskShuffle::set_purge_logged`].
    pub(in crate::store) fn purge_is_logged(&self) -> bool {
        self.purge_is_logged.load(Ordering::Acquire)
    }

    /// Marks the purge as logged. Its files may be removed once its extents are
    /// [dropped](DiskShuffle::set_forgotten) too.
    pub(in crate::store) fn set_purge_logged(&self) {
        self.purge_is_logged.store(true, Ordering::Release);
    }

    /// Marks its extents as dropped from shared state. `bytes` is its payload by disk.
    pub(in crate::store) fn set_forgotten(&self, bytes: Vec<u64>) {
        self.forgotten_bytes.get_or_init(|| bytes);
    }

    /// Returns its payload on a disk, or `None` before its extents are dropped.
    pub(in crate::store) fn forgotten_bytes(&self, disk: &LocalDisk) -> Option<u64> {
        self.forgotten_bytes.get().map(|bytes| bytes[disk.index])
    }

    pub(in crate::store) fn error(&self, kind: StoreErrorKind) -> StoreError {
        StoreError::new(kind, self.key.to_string())
    }

    pub(in crate::store) fn require_present(&self) -> Result<(), StoreError> {
        if self.is_purged() { Err(self.error(StoreErrorKind::Purged)) } else { Ok(()) }
    }

    /// Marks the shuffle as purged, and returns its extents. Under the lock of the extents: a
    /// publish is either included or refused.
    pub(in crate::store) fn mark_purged(&self) -> Streams {
        let mut streams = self.streams.write();
        self.purged.store(true, Ordering::Release);
        streams.take()
    }

    /// Returns the cache key of an extent's records.
    pub(in crate::store) fn records_key(&self, extent: &Extent) -> RecordsKey {
        RecordsKey {
            incarnation: self.incarnation,
            log: u32::from(extent.index_log),
            offset: extent.index_offset,
        }
    }

    /// Returns the indexes of disks that may have files of the shuffle.
    pub(in crate::store) fn touched_disks(&self) -> Vec<usize> {
        let touched = self.disks.iter().enumerate().filter(|(_, disk)| disk.get().is_some());
        touched.map(|(index, _)| index).collect()
    }

    /// Returns all logs, removed ones too.
    pub(in crate::store) fn logs(&self) -> Vec<Arc<Log>> {
        self.logs.read().clone()
    }

    /// Returns the log in a slot that an extent names.
    pub(in crate::store) fn log_at(&self, slot: u16) -> Arc<Log> {
        Arc::clone(&self.logs.read()[usize::from(slot)])
    }

    /// Reads the published state of a partition.
    pub(super) fn with_partition<T>(
        &self,
        partition: PartitionId,
        read: impl FnOnce(Option<&Partition>) -> T,
    ) -> T {
        read(self.streams.read().get(partition))
    }

    /// Makes extents visible atomically.
    pub(in crate::store) fn apply(&self, extents: &[(PartitionId, Extent)]) -> Result<(), StoreError> {
        let mut streams = self.streams.write();
        self.require_present()?;
        for (id, extent) in extents {
            streams.push(*id, *extent, self.first_base());
            let on_disks = if extent.is_on_disk() { extent.length } else { 0 };
            self.published_bytes.fetch_add(on_disks, Ordering::Relaxed);
        }
        Ok(())
    }

    /// See [`DiskShuffle::set_out_of_reach`].
    pub(in crate::store) fn is_partly_out_of_reach(&self) -> bool {
        self.is_partly_out_of_reach.load(Ordering::Relaxed)
    }

    /// Notes that extents may be in a directory that is missing or could not be read. A later start
    /// may find them.
    pub(in crate::store) fn set_out_of_reach(&self) {
        self.is_partly_out_of_reach.store(true, Ordering::Relaxed);
    }

    /// Returns the extent of a partition that begins at `base`, if it is on a disk.
    pub(super) fn extent_at(&self, partition: PartitionId, base: u64) -> Option<Extent> {
        self.with_partition(partition, |found| {
            let extents = &found?.extents;
            extents.get(extents.beginning_at(base)?).filter(|extent| extent.is_on_disk()).copied()
        })
    }

    /// Returns the extents of a partition, including lost ones.
    pub(in crate::store) fn extents(&self, partition: PartitionId) -> ExtentList {
        self.with_partition(partition, |found| found.map(|it| it.extents.clone())).unwrap_or_default()
    }

    /// Counts a failed read. Returns whether all extents of the partition on the disk must be tried
    /// now.
    pub(super) fn count_failed_read(&self, partition: PartitionId, disk: usize, error: &StoreError) -> bool {
        !self.is_purged() && self.failed_reads.count_damage(partition, disk, error)
    }

    /// Reads the published state of all partitions.
    pub(in crate::store) fn with_streams<T>(&self, read: impl FnOnce(&Streams) -> T) -> T {
        read(&self.streams.read())
    }

    /// Replaces extents on disks by their copies in objects. Returns the replaced extents. Extents
    /// that are lost or damaged meanwhile stay.
    pub(in crate::store) fn relocate(&self, copies: &[(PartitionId, Extent)]) -> Vec<Extent> {
        let mut streams = self.streams.write();
        let is_sound = |id, it: &Extent| !self.damaged.touches(id, &(it.base..it.base + it.length));
        let sound = copies.iter().filter(|(id, copy)| is_sound(*id, copy));
        let moved: Vec<_> = sound.filter_map(|(id, copy)| streams.relocate(*id, copy)).collect();
        self.published_bytes.fetch_sub(moved.iter().map(|it| it.length).sum(), Ordering::Relaxed);
        moved
    }

    /// Marks an extent as lost. Returns it, or `None` if another extent or a hole has its place
    /// now.
    pub(super) fn mark_lost(&self, partition: PartitionId, extent: &Extent) -> Option<Extent> {
        self.streams.write().lose(partition, extent)
    }

    /// Returns its files and bytes on the disks.
    pub(in crate::store) fn usage(&self) -> TierUsage {
        let files = self.logs.read().iter().filter(|log| !log.is_released()).count() as u64;
        let bytes = self.published_bytes.load(Ordering::Relaxed);
        let on_disks = self.disks.iter().filter_map(OnceLock::get).map(|here| here.occupied.bytes());
        TierUsage { files, bytes, object_bytes: 0, occupied_bytes: on_disks.sum() }
    }

    /// Returns the length of a partition's stream.
    pub(in crate::store) fn stream_bytes(&self, partition: PartitionId) -> u64 {
        self.with_partition(partition, |found| found.map_or(self.first_base(), |partition| partition.bytes))
    }

    /// Returns its state on a disk, if it was written there or a start found its files there.
    pub(in crate::store) fn found(&self, disk: &LocalDisk) -> Option<&ShuffleDisk> {
        self.disks[disk.index].get().map(|it| &**it)
    }

    fn first_base(&self) -> u64 {
        self.first_base.load(Ordering::Relaxed)
    }

    /// Notes files that a start found on a disk.
    pub(in crate::store) fn found_on(&self, disk: &Arc<LocalDisk>, next_number: u32, bytes: u64) {
        self.disks[disk.index].get_or_init(|| ShuffleDisk::new(disk, next_number)).occupied.found(bytes);
    }

    /// Returns its state on a disk, which is created if missing.
    pub(super) fn on(&self, disk: &Arc<LocalDisk>) -> &ShuffleDisk {
        self.disks[disk.index].get_or_init(|| ShuffleDisk::new(disk, 0))
    }

    /// Adds a log to the table.
    pub(in crate::store) fn add_log(
        &self,
        id: u64,
        disk: &Arc<LocalDisk>,
        kind: LogKind,
        number: u32,
    ) -> Result<Arc<Log>, StoreError> {
        let mut logs = self.logs.write();
        let (slot, path) = (self.slot(&logs)?, self.log_path(kind, number));
        let log = Arc::new(Log::new(id, slot, kind, Arc::clone(disk), path, number));
        logs.push(Arc::clone(&log));
        Ok(log)
    }

    /// Restores the published state of an earlier process.
    pub(in crate::store) fn restore(&self, restored: RestoredStreams) {
        let on_disks = restored.partitions.values().flat_map(Partition::on_disks);
        let bytes = on_disks.map(|extent| extent.length).sum();
        self.published_bytes.store(bytes, Ordering::Relaxed);
        self.first_base.store(restored.first_base, Ordering::Relaxed);
        let mut streams = self.streams.write();
        *streams = streams.found(restored.partitions);
    }

    pub(in crate::store) fn log_path(&self, kind: LogKind, number: u32) -> PathBuf {
        self.directory.join(format!("{number}.{}", kind.extension()))
    }

    /// Returns the next free slot. A shuffle has at most 32,768 files, which also bounds its
    /// failures.
    fn slot(&self, logs: &[Arc<Log>]) -> Result<u16, StoreError> {
        let slot = u16::try_from(logs.len()).ok().filter(|slot| *slot < OBJECT);
        slot.ok_or_else(|| self.error(StoreErrorKind::Unhealthy))
    }
}
