//! One shuffle on the local disks: its logs, its published extents, and the gate that keeps purge and write apart.
//!
//! Creating a directory or a file takes the gate for reading, purging takes it for writing and marks the shuffle
//! first: nothing is created after a purge.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::RwLock;

use super::Core;
use super::condemned::Condemned;
use super::damage::FailedReads;
use super::disk::{APPS, LocalDisk, Occupied, within};
use super::log::{Log, LogKind};
use super::publish::Lane;
use super::records::RecordsKey;
use crate::durability::Incarnation;
use crate::tiers::{StoreError, StoreErrorKind, TierUsage};
use uniffle_io::BLOCK_ALIGN;
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// A published extent: 40 bytes, all that is held in memory per extent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    /// Offset of its first byte in the partition's stream.
    pub(super) base: u64,
    /// Bytes of data.
    pub(super) length: u64,
    /// Where its records stand in the index log.
    pub(super) index_offset: u64,
    /// Where its data stands in the data log, in units of [`BLOCK_ALIGN`].
    pub(super) data_page: u32,
    pub(super) blocks: u32,
    /// CRC-32 of its records on disk.
    pub(super) records_crc: u32,
    pub(super) data_log: u16,
    pub(super) index_log: u16,
}

/// Slot of no log: the extent is lost, a hole in the stream, and readers are given filler records. Not the records of
/// its blocks, known or not: one of them may have been sent again and stand further on.
pub(super) const NO_LOG: u16 = u16::MAX;

/// Length of one filler record. Clients fetch what lies between two blocks that they want together with them.
pub(super) const FILLER_BYTES: u64 = 1 << 20;

const _: () = assert!(size_of::<Extent>() == 40, "the sketch of docs/architecture.md §2.3");

impl Extent {
    pub(super) fn data_offset(&self) -> u64 {
        u64::from(self.data_page) * BLOCK_ALIGN as u64
    }

    /// Bytes of which nothing is known.
    pub(super) fn gap(base: u64, length: u64) -> Self {
        let blocks = u32::try_from(length.div_ceil(FILLER_BYTES)).unwrap_or(u32::MAX);
        let (data_log, index_log) = (NO_LOG, NO_LOG);
        Self { base, length, index_offset: 0, data_page: 0, blocks, records_crc: 0, data_log, index_log }
    }

    pub(super) fn is_lost(&self) -> bool {
        self.data_log == NO_LOG
    }
}

/// What is published of one partition.
#[derive(Debug, Default)]
pub(super) struct Partition {
    /// In the order of their bases, without gaps.
    pub(super) extents: Vec<Extent>,
    /// Length of the stream.
    pub(super) bytes: u64,
    pub(super) blocks: u64,
}

impl Partition {
    /// Nothing of it is known before `base`.
    fn from(base: u64) -> Self {
        let mut partition = Self::default();
        partition.extend_to(base);
        partition
    }

    /// Extents whose records are known.
    pub(super) fn known_extents(&self) -> usize {
        self.extents.iter().filter(|extent| extent.index_log != NO_LOG).count()
    }

    /// Makes the stream go on at `base`, with a hole before it.
    pub(super) fn extend_to(&mut self, base: u64) {
        if base > self.bytes {
            self.push(Extent::gap(self.bytes, base - self.bytes));
        }
    }

    /// Appends an extent that begins where the stream ends.
    pub(super) fn push(&mut self, extent: Extent) {
        // A stream with a hole or an overlap would mix blocks up for every reader.
        assert_eq!(self.bytes, extent.base, "bases are assigned in the publish lane");
        self.bytes += extent.length;
        self.blocks += u64::from(extent.blocks);
        self.extents.push(extent);
    }
}

/// What is taken over from an earlier process.
#[derive(Debug)]
pub(super) struct Restored {
    pub(super) partitions: HashMap<PartitionId, Partition>,
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
    partitions: RwLock<HashMap<PartitionId, Partition>>,
    logs: RwLock<Vec<Arc<Log>>>,
    published_bytes: AtomicU64,
    /// The metadata log knows that it is purged.
    purge_is_noted: AtomicBool,
    pub(super) failed_reads: FailedReads,
    pub(super) condemned: Condemned,
    /// Where the streams of new partitions begin: behind what may have been published and is not known any more.
    first_base: AtomicU64,
    pub(super) lane: tokio::sync::Mutex<Lane>,
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
}

/// A shuffle on one disk; exists once something was to be written there.
#[derive(Debug)]
struct ShuffleDisk {
    data: tokio::sync::Mutex<Option<Arc<Log>>>,
    index: tokio::sync::Mutex<Option<Arc<Log>>>,
    next_number: AtomicU32,
    occupied: Occupied,
}

impl Shuffle {
    pub(super) fn new(key: ShuffleKey, incarnation: u64, disks: usize) -> Self {
        let name = format!("{}.{incarnation}", key.shuffle);
        let directory = Path::new(APPS).join(key.app.as_str()).join(name);
        Self {
            key,
            incarnation,
            directory,
            purged: AtomicBool::new(false),
            gate: tokio::sync::RwLock::new(()),
            disks: (0..disks).map(|_| OnceLock::new()).collect(),
            partitions: RwLock::default(),
            logs: RwLock::default(),
            published_bytes: AtomicU64::new(0),
            purge_is_noted: AtomicBool::new(false),
            failed_reads: FailedReads::default(),
            condemned: Condemned::default(),
            first_base: AtomicU64::new(0),
            lane: tokio::sync::Mutex::default(),
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

    /// Its files may be removed.
    pub(super) fn set_purge_noted(&self) {
        self.purge_is_noted.store(true, Ordering::Release);
    }

    pub(super) fn error(&self, kind: StoreErrorKind) -> StoreError {
        StoreError::new(kind, self.key.to_string())
    }

    pub(super) fn require_present(&self) -> Result<(), StoreError> {
        if self.is_purged() { Err(self.error(StoreErrorKind::Purged)) } else { Ok(()) }
    }

    /// Marks it purged and forgets its extents, which it returns. Under the lock of the extents, so that a
    /// publish is either before (and forgotten) or refused.
    pub(super) fn mark_purged(&self) -> Vec<Extent> {
        let mut partitions = self.partitions.write();
        self.purged.store(true, Ordering::Release);
        let forgotten = std::mem::take(&mut *partitions);
        drop(partitions);
        forgotten.into_values().flat_map(|partition| partition.extents).collect()
    }

    /// Under which key the records of an extent are cached.
    pub(super) fn records_key(&self, extent: &Extent) -> RecordsKey {
        RecordsKey { incarnation: self.incarnation, log: extent.index_log, offset: extent.index_offset }
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
        read(self.partitions.read().get(&partition))
    }

    /// Makes extents visible, all at once.
    pub(super) fn apply(&self, extents: &[(PartitionId, Extent)]) -> Result<(), StoreError> {
        let mut partitions = self.partitions.write();
        self.require_present()?;
        for (id, extent) in extents {
            let partition = partitions.entry(*id).or_insert_with(|| Partition::from(self.first_base()));
            partition.push(*extent);
            self.published_bytes.fetch_add(extent.length, Ordering::Relaxed);
        }
        Ok(())
    }

    /// The extent of a partition that begins at `base`, unless it is a hole.
    pub(super) fn extent_at(&self, partition: PartitionId, base: u64) -> Option<Extent> {
        self.with_partition(partition, |found| {
            let extents = &found?.extents;
            let at = extents.binary_search_by_key(&base, |extent| extent.base).ok()?;
            extents.get(at).filter(|extent| !extent.is_lost()).copied()
        })
    }

    /// Makes a hole of the extent that begins at `base` and returns what it was; `None` when it is one.
    pub(super) fn mark_lost(&self, partition: PartitionId, base: u64) -> Option<Extent> {
        let mut partitions = self.partitions.write();
        let partition = partitions.get_mut(&partition)?;
        let at = partition.extents.binary_search_by_key(&base, |extent| extent.base).ok()?;
        let extent = partition.extents.get_mut(at).filter(|extent| !extent.is_lost())?;
        let lost = std::mem::replace(extent, Extent::gap(extent.base, extent.length));
        partition.blocks += u64::from(extent.blocks);
        partition.blocks -= u64::from(lost.blocks);
        Some(lost)
    }

    /// What it has on the disks.
    pub(super) fn usage(&self) -> TierUsage {
        let files = self.logs.read().len() as u64;
        TierUsage { files, bytes: self.published_bytes.load(Ordering::Relaxed) }
    }

    /// Length of a partition's stream.
    pub(super) fn stream_bytes(&self, partition: PartitionId) -> u64 {
        self.with_partition(partition, |found| found.map_or(self.first_base(), |partition| partition.bytes))
    }

    fn first_base(&self) -> u64 {
        self.first_base.load(Ordering::Relaxed)
    }

    /// Notes that files of it are on a disk already.
    pub(super) fn found_on(&self, disk: &Arc<LocalDisk>, next_number: u32, bytes: u64) {
        self.disks[disk.index].get_or_init(|| ShuffleDisk::new(disk, next_number)).occupied.found(bytes);
    }

    /// Takes a log of an earlier process into the table: to be read, never to be written.
    pub(super) fn adopt_log(
        &self,
        core: &Core,
        disk: &Arc<LocalDisk>,
        kind: LogKind,
        number: u32,
    ) -> Result<Arc<Log>, StoreError> {
        let mut logs = self.logs.write();
        let place = (self.log_path(kind, number), number);
        let log = Arc::new(Log::new(core.files.next_id(), self.slot(&logs)?, kind, Arc::clone(disk), place));
        log.close();
        logs.push(Arc::clone(&log));
        Ok(log)
    }

    /// Takes over what an earlier process published.
    pub(super) fn restore(&self, restored: Restored) {
        let bytes = restored.partitions.values().map(|partition| partition.bytes).sum();
        self.published_bytes.store(bytes, Ordering::Relaxed);
        self.first_base.store(restored.first_base, Ordering::Relaxed);
        *self.partitions.write() = restored.partitions;
    }

    pub(super) fn log_path(&self, kind: LogKind, number: u32) -> PathBuf {
        self.directory.join(format!("{number}.{}", kind.extension()))
    }

    /// The next free slot. 65,535 files of one shuffle are enough: this also bounds its failures.
    fn slot(&self, logs: &[Arc<Log>]) -> Result<u16, StoreError> {
        let slot = u16::try_from(logs.len()).ok().filter(|slot| *slot != NO_LOG);
        slot.ok_or_else(|| self.error(StoreErrorKind::Unhealthy))
    }

    /// Reserves `bytes` in the open log of a disk, with a new file when there is none.
    pub(super) async fn reserve(
        &self,
        core: &Core,
        disk: &Arc<LocalDisk>,
        kind: LogKind,
        bytes: u64,
    ) -> Result<(Arc<Log>, u64), StoreError> {
        let here = self.disks[disk.index].get_or_init(|| ShuffleDisk::new(disk, 0));
        let current = match kind {
            LogKind::Data => &here.data,
            LogKind::Index => &here.index,
        };
        let mut current = current.lock().await;
        let open = current.as_ref().and_then(|log| Some((Arc::clone(log), log.reserve(bytes)?)));
        let (log, offset) = match open {
            Some(reserved) => reserved,
            None => {
                // Whoever waited here while the disk failed need not try it as well.
                if !disk.is_healthy() {
                    return Err(StoreError::new(StoreErrorKind::Unhealthy, disk.io.root()));
                }
                let log = self.create_log(core, disk, kind, &here.next_number).await?;
                *current = Some(Arc::clone(&log));
                let offset = log.reserve(bytes).ok_or_else(|| self.error(StoreErrorKind::InvalidBatch))?;
                (log, offset)
            }
        };
        here.occupied.add(bytes);
        Ok((log, offset))
    }

    async fn create_log(
        &self,
        core: &Core,
        disk: &Arc<LocalDisk>,
        kind: LogKind,
        next_number: &AtomicU32,
    ) -> Result<Arc<Log>, StoreError> {
        let _gate = self.gate.read().await;
        self.require_present()?;
        let directory = disk.io.root().join(&self.directory);
        let deadline = core.config.name_timeout;
        let mut made = within(deadline, disk.io.create_dir_all(&self.directory)).await;
        if made.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            // The app's empty directory may just have been removed by a purge of its earlier registration.
            made = within(deadline, disk.io.create_dir_all(&self.directory)).await;
        }
        made.map_err(|error| core.failed(disk, &directory, error))?;
        let number = next_number.fetch_add(1, Ordering::Relaxed);
        let log = {
            let mut logs = self.logs.write();
            let place = (self.log_path(kind, number), number);
            let log =
                Arc::new(Log::new(core.files.next_id(), self.slot(&logs)?, kind, Arc::clone(disk), place));
            logs.push(Arc::clone(&log));
            log
        };
        let created = core.files.create(&log).await;
        created.map_err(|error| core.failed(disk, log.full_path(), error))?;
        if self.is_purged() {
            // The purge may have listed the logs before this one was among them.
            core.files.forget(&log);
        }
        let named = core.make_names_durable(disk, &self.directory).await;
        named.map_err(|error| core.failed(disk, &directory, error))?;
        core.metrics.files_opened.inc();
        Ok(log)
    }
}
