//! One shuffle on the local disks: its logs, its published extents, and the gate that keeps purge and write apart.
//!
//! Creating a directory or a file takes the gate for reading, purging takes it for writing and marks the shuffle
//! first: nothing is created after a purge.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::RwLock;

use super::damaged::DamagedBlocks;
use super::disk::{APPS, LocalDisk, Occupied};
use super::extent::{Extent, ExtentList, NO_LOG};
use super::failures::FailedReads;
use super::log::{Log, LogKind};
use super::pending::PublishState;
use super::streams::{Partition, Partitions, Streams};
use crate::budget::Budget;
use crate::durability::Incarnation;
use crate::tiers::record_cache::RecordsKey;
use crate::tiers::{StoreError, StoreErrorKind, TierUsage};
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// What is taken over from an earlier process.
#[derive(Debug)]
pub(super) struct Restored {
    pub(super) partitions: Partitions,
    pub(super) first_base: u64,
}

/// A registered shuffle.
#[derive(Debug)]
pub(super) struct Shuffle {
    pub(super) key: ShuffleKey,
    pub(super) incarnation: u64,
    /// Its directory on every disk, relative to the root.
    pub(super) directory: PathBuf,
    purged: AtomicBool,
    /// Shared by writes, taken alone by the purge.
    pub(super) gate: tokio::sync::RwLock<()>,
    disks: Vec<OnceLock<Box<ShuffleDisk>>>,
    streams: RwLock<Streams>,
    logs: RwLock<Vec<Arc<Log>>>,
    published_bytes: AtomicU64,
    /// The metadata log knows that it is purged.
    purge_is_noted: AtomicBool,
    /// See [`Shuffle::set_forgotten`].
    forgotten_bytes: OnceLock<Vec<u64>>,
    pub(super) failed_reads: FailedReads,
    pub(super) damaged: DamagedBlocks,
    /// See [`Shuffle::set_out_of_reach`].
    is_partly_out_of_reach: AtomicBool,
    /// Where the streams of new partitions begin: behind what may have been published and is not known any more.
    first_base: AtomicU64,
    pub(super) publish_lock: tokio::sync::Mutex<PublishState>,
}

/// A shuffle on one disk; exists once something was to be written there.
#[derive(Debug)]
pub(super) struct ShuffleDisk {
    data: tokio::sync::Mutex<Option<Arc<Log>>>,
    index: tokio::sync::Mutex<Option<Arc<Log>>>,
    next_number: AtomicU32,
    pub(super) occupied: Occupied,
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

    /// The log of a kind that is being written, if there is one.
    pub(super) fn current(&self, kind: LogKind) -> &tokio::sync::Mutex<Option<Arc<Log>>> {
        match kind {
            LogKind::Data => &self.data,
            LogKind::Index => &self.index,
        }
    }

    /// A number that no file of the shuffle has on this disk.
    pub(super) fn next_number(&self) -> u32 {
        self.next_number.fetch_add(1, Ordering::Relaxed)
    }
}

impl Shuffle {
    /// `extents` is what its lists of extents are charged to.
    pub(super) fn new(key: ShuffleKey, incarnation: u64, disks: usize, extents: &Budget) -> Self {
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
            purge_is_noted: AtomicBool::new(false),
            forgotten_bytes: OnceLock::new(),
            failed_reads: FailedReads::default(),
            damaged: DamagedBlocks::default(),
            is_partly_out_of_reach: AtomicBool::new(false),
            first_base: AtomicU64::new(0),
            publish_lock: tokio::sync::Mutex::default(),
        }
    }

    pub(super) fn is_purged(&self) -> bool {
        self.purged.load(Ordering::Acquire)
    }

    /// By what the metadata log calls it.
    pub(super) fn incarnation(&self) -> Incarnation {
        Incarnation { key: self.key.clone(), number: self.incarnation }
    }

    /// See [`Shuffle::set_purge_noted`].
    pub(super) fn purge_is_noted(&self) -> bool {
        self.purge_is_noted.load(Ordering::Acquire)
    }

    /// Its files may be removed once what it had is [forgotten](Shuffle::set_forgotten), too.
    pub(super) fn set_purge_noted(&self) {
        self.purge_is_noted.store(true, Ordering::Release);
    }

    /// Nothing that is shared knows it any more; it had so much payload, by disk.
    pub(super) fn set_forgotten(&self, bytes: Vec<u64>) {
        self.forgotten_bytes.get_or_init(|| bytes);
    }

    /// The payload that it had on a disk; none before it is forgotten.
    pub(super) fn forgotten_bytes(&self, disk: &LocalDisk) -> Option<u64> {
        self.forgotten_bytes.get().map(|bytes| bytes[disk.index])
    }

    pub(super) fn error(&self, kind: StoreErrorKind) -> StoreError {
        StoreError::new(kind, self.key.to_string())
    }

    pub(super) fn require_present(&self) -> Result<(), StoreError> {
        if self.is_purged() { Err(self.error(StoreErrorKind::Purged)) } else { Ok(()) }
    }

    /// Marks it purged and forgets its extents, which it returns. Under the lock of the extents, so that a
    /// publish is either before (and forgotten) or refused.
    pub(super) fn mark_purged(&self) -> Streams {
        let mut streams = self.streams.write();
        self.purged.store(true, Ordering::Release);
        streams.take()
    }

    /// Under which key the records of an extent are cached.
    pub(super) fn records_key(&self, extent: &Extent) -> RecordsKey {
        RecordsKey {
            incarnation: self.incarnation,
            log: u32::from(extent.index_log),
            offset: extent.index_offset,
        }
    }

    /// Indexes of the disks that may hold files of it.
    pub(super) fn touched_disks(&self) -> Vec<usize> {
        let touched = self.disks.iter().enumerate().filter(|(_, disk)| disk.get().is_some());
        touched.map(|(index, _)| index).collect()
    }

    /// All logs it ever had.
    pub(super) fn logs(&self) -> Vec<Arc<Log>> {
        self.logs.read().clone()
    }

    /// The log in a slot that an extent names.
    pub(super) fn log_at(&self, slot: u16) -> Arc<Log> {
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

    /// Makes extents visible, all at once.
    pub(super) fn apply(&self, extents: &[(PartitionId, Extent)]) -> Result<(), StoreError> {
        let mut streams = self.streams.write();
        self.require_present()?;
        for (id, extent) in extents {
            streams.push(*id, *extent, self.first_base());
            self.published_bytes.fetch_add(extent.length, Ordering::Relaxed);
        }
        Ok(())
    }

    /// See [`Shuffle::set_out_of_reach`].
    pub(super) fn is_partly_out_of_reach(&self) -> bool {
        self.is_partly_out_of_reach.load(Ordering::Relaxed)
    }

    /// Some of it may be in a directory that is not here or could not be read: a later start may find it.
    pub(super) fn set_out_of_reach(&self) {
        self.is_partly_out_of_reach.store(true, Ordering::Relaxed);
    }

    /// The extent of a partition that begins at `base`, unless it is a hole.
    pub(super) fn extent_at(&self, partition: PartitionId, base: u64) -> Option<Extent> {
        self.with_partition(partition, |found| {
            let extents = &found?.extents;
            extents.get(extents.beginning_at(base)?).filter(|extent| !extent.is_lost()).copied()
        })
    }

    /// The extents of a partition, holes too.
    pub(super) fn extents(&self, partition: PartitionId) -> ExtentList {
        self.with_partition(partition, |found| found.map(|it| it.extents.clone())).unwrap_or_default()
    }

    /// Those that hold a range of its stream, as [`ExtentList::part`].
    pub(super) fn part(&self, partition: PartitionId, range: &Range<u64>) -> ExtentList {
        let part = |found: Option<&Partition>| found.map(|it| it.extents.part(range.start, range.end));
        self.with_partition(partition, part).unwrap_or_default()
    }

    /// Counts a failed read; whether what the partition has on the disk is to be tried now.
    pub(super) fn count_failed_read(&self, partition: PartitionId, disk: usize, error: &StoreError) -> bool {
        !self.is_purged() && self.failed_reads.count_damage(partition, disk, error)
    }

    /// Reads what is published of all partitions.
    pub(super) fn with_streams<T>(&self, read: impl FnOnce(&Streams) -> T) -> T {
        read(&self.streams.read())
    }

    /// Takes out what of a partition ends at or before `until`, so many extents at most: they lie elsewhere. What they were.
    pub(super) fn release(&self, partition: PartitionId, until: u64, extents_max: usize) -> Vec<Extent> {
        let released = self.streams.write().release(partition, until, extents_max);
        let bytes = released.iter().map(|extent| extent.length).sum();
        self.published_bytes.fetch_sub(bytes, Ordering::Relaxed);
        released
    }

    /// Makes a hole of an extent and returns what it was; `None` when another stands in its place by now, or a hole.
    pub(super) fn mark_lost(&self, partition: PartitionId, extent: &Extent) -> Option<Extent> {
        self.streams.write().lose(partition, extent)
    }

    /// What it has on the disks.
    pub(super) fn usage(&self) -> TierUsage {
        let files = self.logs.read().iter().filter(|log| !log.is_released()).count() as u64;
        let bytes = self.published_bytes.load(Ordering::Relaxed);
        let on_disks = self.disks.iter().filter_map(OnceLock::get).map(|here| here.occupied.bytes());
        TierUsage { files, bytes, object_bytes: 0, occupied_bytes: on_disks.sum() }
    }

    /// Length of a partition's stream.
    pub(super) fn stream_bytes(&self, partition: PartitionId) -> u64 {
        self.with_partition(partition, |found| found.map_or(self.first_base(), |partition| partition.bytes))
    }

    /// What it has on a disk, if anything was to be written there.
    pub(super) fn found(&self, disk: &LocalDisk) -> Option<&ShuffleDisk> {
        self.disks[disk.index].get().map(|it| &**it)
    }

    fn first_base(&self) -> u64 {
        self.first_base.load(Ordering::Relaxed)
    }

    /// Notes that files of it are on a disk already.
    pub(super) fn found_on(&self, disk: &Arc<LocalDisk>, next_number: u32, bytes: u64) {
        self.disks[disk.index].get_or_init(|| ShuffleDisk::new(disk, next_number)).occupied.found(bytes);
    }

    /// What it has on a disk, from now on.
    pub(super) fn on(&self, disk: &Arc<LocalDisk>) -> &ShuffleDisk {
        self.disks[disk.index].get_or_init(|| ShuffleDisk::new(disk, 0))
    }

    /// Takes a log into the table.
    pub(super) fn add_log(
        &self,
        id: u64,
        disk: &Arc<LocalDisk>,
        kind: LogKind,
        number: u32,
    ) -> Result<Arc<Log>, StoreError> {
        let mut logs = self.logs.write();
        let place = (self.log_path(kind, number), number);
        let log = Arc::new(Log::new(id, self.slot(&logs)?, kind, Arc::clone(disk), place));
        logs.push(Arc::clone(&log));
        Ok(log)
    }

    /// Takes over what an earlier process published.
    pub(super) fn restore(&self, restored: Restored) {
        let bytes = restored.partitions.values().map(|partition| partition.bytes - partition.start).sum();
        self.published_bytes.store(bytes, Ordering::Relaxed);
        self.first_base.store(restored.first_base, Ordering::Relaxed);
        let mut streams = self.streams.write();
        *streams = streams.found(restored.partitions);
    }

    pub(super) fn log_path(&self, kind: LogKind, number: u32) -> PathBuf {
        self.directory.join(format!("{number}.{}", kind.extension()))
    }

    /// The next free slot. 65,535 files of one shuffle are enough: this also bounds its failures.
    fn slot(&self, logs: &[Arc<Log>]) -> Result<u16, StoreError> {
        let slot = u16::try_from(logs.len()).ok().filter(|slot| *slot != NO_LOG);
        slot.ok_or_else(|| self.error(StoreErrorKind::Unhealthy))
    }
}
