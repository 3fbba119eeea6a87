//! Damaged blocks and unreadable extents.
//!
//! A block with a wrong checksum is read again, alone and without the page cache. If it is wrong
//! again, the block is marked as damaged, and the rest of its extent stays. After the third [failed
//! read](super::failures) of a partition on a disk, all its extents there are tried, unreadable
//! ones three times with half a second of pauses. Those that stay unreadable become holes. The
//! extents of a file that another program removed become holes at once. Blocks in holes can be sent
//! again. Whether a block is lost is decided by `service`.

use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

use super::failures::is_damage;
use crate::clock::sleep;
use crate::store::disk::core::DiskCore;
use crate::store::disk::log_file::Log;
use crate::store::disk::shuffle::DiskShuffle;
use crate::store::disk::walk::{partitions_of, yield_per_batch};
use crate::store::extents::extent::Extent;
use crate::store::index::block_verifier::BlockCheck;
use crate::store::{StoreError, StoreErrorKind};
use uniffle_io::Vanished;
use uniffle_wire::index::IndexRecord;
use uniffle_wire::types::PartitionId;

/// Number of attempts before an extent is marked as lost.
const TRIES: u32 = 3;
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(250);
/// Number of partitions and blocks that a marker reads again at a time, each with one chunk of
/// memory.
const PROBED_AT_ONCE: usize = 2;

/// Extents of a vanished file or object.
#[derive(Debug, Default)]
pub(in crate::store) struct LostTotals {
    pub(in crate::store) extents: u64,
    pub(in crate::store) blocks: u64,
    pub(in crate::store) bytes: u64,
}

/// Returns the error of reads of a vanished file.
fn vanished(log: &Log) -> StoreError {
    StoreError::io(log.full_path(), Vanished::File.into())
}

/// Verifies stored data and marks damage.
#[derive(Debug)]
pub(in crate::store) struct DamageMarker {
    core: Arc<DiskCore>,
    turns: Semaphore,
}

impl DamageMarker {
    pub(in crate::store) fn new(core: Arc<DiskCore>) -> Arc<Self> {
        Arc::new(Self { core, turns: Semaphore::new(PROBED_AT_ONCE) })
    }

    /// Returns whether a block with a wrong checksum is correct when read again from the device.
    pub(in crate::store::disk) async fn is_sound(
        &self,
        shuffle: &DiskShuffle,
        partition: PartitionId,
        block: &BlockCheck,
    ) -> Result<bool, StoreError> {
        let Ok(_turn) = self.turns.acquire().await else { return Ok(false) };
        let Some(extent) = shuffle.extent_at(partition, block.base) else { return Ok(false) };
        let log = shuffle.log_at(extent.data_log);
        let mut hasher = crc32fast::Hasher::new();
        let offset = extent.data_offset() + (block.place.start - extent.base);
        let length = block.place.end - block.place.start;
        self.core.read_again(shuffle, &log, offset..offset + length, |bytes| hasher.update(bytes)).await?;
        let crc = hasher.finalize();
        Ok(crc == block.crc || self.recorded_crc(shuffle, &extent, block).await == Some(crc))
    }

    /// Returns the checksum of a block from its index record on disk, or `None` if it cannot be
    /// read.
    async fn recorded_crc(&self, shuffle: &DiskShuffle, extent: &Extent, block: &BlockCheck) -> Option<u32> {
        let mut crc = None;
        let find = |record: &IndexRecord| {
            if extent.base + record.offset.unsigned_abs() == block.place.start {
                crc = u32::try_from(record.crc).ok();
            }
            ControlFlow::Continue(())
        };
        let visited = self.core.visit_records(shuffle, extent, 0, find).await;
        visited.ok().and(crc)
    }

    /// Marks a block that was wrong twice as damaged, so that it can be sent again. Counts against
    /// its disk.
    pub(super) fn mark_damaged(
        &self,
        shuffle: &DiskShuffle,
        partition: PartitionId,
        block: &BlockCheck,
    ) -> StoreError {
        let Some(extent) = shuffle.extent_at(partition, block.base) else {
            return shuffle.error(StoreErrorKind::Corrupt);
        };
        let log = shuffle.log_at(extent.data_log);
        let what = "block is corrupt, confirmed by a second read";
        let (path, bytes) = (log.full_path(), block.place.end - block.place.start);
        let error = StoreError::corrupt(&path, what);
        let mark = || shuffle.damaged.add(partition, &block.place);
        self.core.damage.notify_around(&shuffle.key, partition, &error.to_string(), mark);
        self.core.metrics.blocks_damaged.inc();
        log.disk.note(&io::Error::new(io::ErrorKind::InvalidData, what));
        tracing::error!(shuffle = %shuffle.key, %partition, path = %path.display(), bytes, "{what}");
        error
    }

    fn mark_lost(&self, shuffle: &DiskShuffle, partition: PartitionId, extent: &Extent) -> Option<Extent> {
        let extent = shuffle.mark_lost(partition, extent)?;
        if extent.is_on_disk() {
            self.core.metrics.extents.dec();
            self.core.records.remove(std::iter::once(shuffle.records_key(&extent)));
        }
        Some(extent)
    }

    /// Tries all extents of a partition on a disk. Returns the unreadable ones, and the error of
    /// one.
    pub(in crate::store::disk) async fn probe_extents(
        &self,
        shuffle: &DiskShuffle,
        partition: PartitionId,
        disk: usize,
    ) -> Option<(Vec<Extent>, StoreError)> {
        let mut unreadable: Vec<_> =
            shuffle.extents(partition).iter().filter(|it| it.is_on_disk()).copied().collect();
        let mut error = None;
        for attempt in 0..TRIES {
            if attempt > 0 {
                sleep(PAUSE).await;
            }
            let _turn = self.turns.acquire().await.ok()?;
            (unreadable, error) = self.still_damaged(shuffle, unreadable, disk).await;
            if unreadable.is_empty() {
                break;
            }
        }
        error.map(|error| (unreadable, error))
    }

    /// Marks unreadable extents as lost.
    pub(in crate::store::disk) fn mark_all_lost(
        &self,
        shuffle: &DiskShuffle,
        partition: PartitionId,
        extents: &[Extent],
        error: &StoreError,
    ) {
        if extents.is_empty() {
            return;
        }
        let mark = || extents.iter().for_each(|extent| self.make_hole(shuffle, partition, extent));
        self.core.damage.notify_around(&shuffle.key, partition, &error.to_string(), mark);
    }

    /// Marks all extents as lost whose data or records were in a vanished file.
    pub(in crate::store::disk) async fn lose_log(&self, shuffle: &DiskShuffle, log: &Log) {
        self.core.files.forget(log);
        if let Some(here) = shuffle.found(&log.disk) {
            here.occupied.take(log.uncount());
        }
        let is_here = |it: &Extent| it.is_on_disk() && (it.data_log == log.slot || it.index_log == log.slot);
        let lost = self.lose_all(shuffle, &vanished(log), is_here).await;
        self.log_vanished(shuffle, log, lost);
    }

    /// Marks all extents of a shuffle as lost for which `is_gone` is true.
    pub(in crate::store) async fn lose_all(
        &self,
        shuffle: &DiskShuffle,
        error: &StoreError,
        is_gone: impl Fn(&Extent) -> bool,
    ) -> LostTotals {
        let (mut lost, mut visited) = (LostTotals::default(), 0);
        for partition in partitions_of(shuffle).await {
            let extents = shuffle.extents(partition);
            let gone: Vec<_> = extents.iter().filter(|it| is_gone(it)).copied().collect();
            yield_per_batch(&mut visited, 1 + gone.len()).await;
            self.lose_some(shuffle, error, partition, &gone, &mut lost);
        }
        lost
    }

    /// Like [`DamageMarker::lose_log`], for extents that have just become visible.
    pub(in crate::store::disk) fn lose_extents(
        &self,
        shuffle: &DiskShuffle,
        log: &Log,
        extents: &[(PartitionId, Extent)],
    ) {
        let mut lost = LostTotals::default();
        for (partition, extent) in extents {
            self.lose_some(shuffle, &vanished(log), *partition, std::slice::from_ref(extent), &mut lost);
        }
        self.log_vanished(shuffle, log, lost);
    }

    fn lose_some(
        &self,
        shuffle: &DiskShuffle,
        error: &StoreError,
        partition: PartitionId,
        extents: &[Extent],
        lost: &mut LostTotals,
    ) {
        if extents.is_empty() {
            return;
        }
        let mark = || {
            for extent in extents.iter().filter_map(|extent| self.mark_lost(shuffle, partition, extent)) {
                lost.extents += 1;
                lost.blocks += u64::from(extent.blocks);
                lost.bytes += extent.length;
            }
        };
        self.core.damage.notify_around(&shuffle.key, partition, &error.to_string(), mark);
    }

    fn log_vanished(&self, shuffle: &DiskShuffle, log: &Log, lost: LostTotals) {
        if shuffle.is_purged() {
            return;
        }
        let LostTotals { extents, blocks, bytes } = lost;
        self.core.metrics.files_vanished.inc();
        self.core.metrics.extents_lost.inc_by(extents);
        tracing::error!(
            shuffle = %shuffle.key, path = %log.full_path().display(), extents, blocks, bytes,
            "a file was removed, replaced or truncated by another program; its blocks are lost, new data \
             goes to a new file"
        );
    }

    fn make_hole(&self, shuffle: &DiskShuffle, partition: PartitionId, extent: &Extent) {
        if self.mark_lost(shuffle, partition, extent).is_some() {
            self.core.metrics.extents_lost.inc();
            let (bytes, blocks) = (extent.length, extent.blocks);
            // Lost blocks are logged once per shuffle.
            tracing::debug!(shuffle = %shuffle.key, %partition, bytes, blocks, "extent is lost");
        }
    }

    /// Returns the unreadable ones of `extents`, and the error of the last.
    async fn still_damaged(
        &self,
        shuffle: &DiskShuffle,
        extents: Vec<Extent>,
        disk: usize,
    ) -> (Vec<Extent>, Option<StoreError>) {
        let (mut damaged, mut last_error) = (Vec::new(), None);
        for extent in extents {
            match self.probe_extent(shuffle, &extent, disk).await {
                Err(error) if is_damage(&error) && !shuffle.is_purged() => {
                    last_error = Some(error);
                    damaged.push(extent);
                }
                Ok(()) | Err(_) => {}
            }
        }
        (damaged, last_error)
    }

    /// Reads the parts of an extent that are on a disk.
    async fn probe_extent(
        &self,
        shuffle: &DiskShuffle,
        extent: &Extent,
        disk: usize,
    ) -> Result<(), StoreError> {
        let here = |slot: u16| shuffle.log_at(slot).disk.index == disk;
        if here(extent.index_log) {
            self.core.visit_records(shuffle, extent, 0, |_| ControlFlow::Continue(())).await?;
        }
        if !here(extent.data_log) {
            return Ok(());
        }
        let (log, start) = (shuffle.log_at(extent.data_log), extent.data_offset());
        self.core.read_again(shuffle, &log, start..start + extent.length, |_| ()).await
    }
}
