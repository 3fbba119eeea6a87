//! The store: the known shuffles, and the components that write, read and remove them.
//!
//! A shuffle is known from its registration, or its recovery, until its purge. A handle or a view
//! keeps its incarnation: after a purge it fails, and never reaches a later registration of the
//! same shuffle.

use std::collections::HashSet;
use std::fmt;
use std::ops::{ControlFlow, Range};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use dashmap::DashMap;
use futures::future::join_all;
use parking_lot::Mutex;

use super::config::{METADATA_TIMEOUT, SyncWrites};
use super::core::DiskCore;
use super::directories::directory::{LocalDisk, TRASH};
use super::read::view::{InObjects, StreamView, ViewRun};
use super::read::{DataRead, DiskReader};
use super::shuffle::DiskShuffle;
use super::write::append::DiskWriter;
use super::write::batch::BatchSummary;
use crate::clock::timeout;
use crate::log::{MetadataLog, Scratch, within};
use crate::runtime::Tasks;
use crate::store::extents::streams::Partition;
use crate::store::removal::deletion_queue::DeletionQueue;
use crate::store::removal::purge_notes::PurgeNotes;
use crate::store::{ChunkRead, DiskInfo, ExtentWrite, Recovered, StoreError, StoreErrorKind};
use uniffle_wire::index::IndexRecord;
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// Handle of one incarnation of a shuffle. Batches written with it never become part of a later
/// incarnation.
#[derive(Clone)]
pub struct DiskShuffleHandle {
    pub(in crate::store) writer: Arc<DiskWriter>,
    pub(in crate::store) shuffle: Arc<DiskShuffle>,
}

impl fmt::Debug for DiskShuffleHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ShuffleHandle({}.{})", self.shuffle.key, self.shuffle.incarnation)
    }
}

impl DiskShuffleHandle {
    /// Writes a batch to one disk and publishes it. After `Ok` every block is readable. If a disk
    /// fails, the next one is tried.
    ///
    /// # Errors
    /// The error of the last disk, or `NoSpace` or `Unhealthy` if none can be tried: the caller
    /// keeps the batch and may retry. `Purged`, or `InvalidBatch`.
    pub async fn write(&self, extents: Vec<ExtentWrite>) -> Result<BatchSummary, StoreError> {
        self.writer.write(&self.shuffle, extents, false).await
    }
}

/// The local disks as one store. Without disks, only the extents of objects and the metadata log.
#[derive(Debug)]
pub struct LocalStore {
    pub(in crate::store) core: Arc<DiskCore>,
    pub(in crate::store) writer: Arc<DiskWriter>,
    pub(in crate::store) reader: DiskReader,
    pub(in crate::store) shuffles: DashMap<ShuffleKey, Arc<DiskShuffle>>,
    pub(in crate::store) next_incarnation: AtomicU64,
    pub(super) min_disks: AtomicUsize,
    /// Deletion queue per disk.
    pub(in crate::store) deletions: Vec<DeletionQueue>,
    pub(in crate::store) metadata: MetadataLog,
    pub(super) scratch: Arc<Scratch>,
    /// Purged shuffles whose purge is not in the metadata log yet.
    pub(in crate::store) pending_purges: PurgeNotes,
    pub(in crate::store) recovered: Mutex<Recovered>,
    /// Incarnations whose files stay for a later process.
    pub(in crate::store) kept_incarnations: Mutex<HashSet<u64>>,
    /// Tasks of the metadata log.
    pub(in crate::store) tasks: Tasks,
}

impl Drop for LocalStore {
    fn drop(&mut self) {
        self.tasks.cancel();
        self.reader.tasks.cancel();
        self.writer.tasks.cancel();
    }
}

impl LocalStore {
    pub(in crate::store) fn new(core: DiskCore, metadata: MetadataLog, tasks: Tasks) -> Arc<Self> {
        let core = Arc::new(core);
        let directories = core.disks.iter().map(LocalDisk::directory).collect();
        let scratch = Scratch::new(directories, Path::new(TRASH), METADATA_TIMEOUT);
        Arc::new(Self {
            scratch: Arc::new(scratch),
            writer: DiskWriter::new(&core),
            reader: DiskReader::new(&core),
            shuffles: DashMap::new(),
            next_incarnation: AtomicU64::new(1),
            min_disks: AtomicUsize::new(core.config.min_disks),
            deletions: core.disks.iter().map(|_| DeletionQueue::default()).collect(),
            metadata,
            pending_purges: PurgeNotes::default(),
            recovered: Mutex::default(),
            kept_incarnations: Mutex::default(),
            tasks,
            core,
        })
    }

    /// Returns whether there are disks. Without them all data is in objects.
    #[must_use]
    pub fn has_disks(&self) -> bool {
        !self.core.disks.is_empty()
    }

    /// Returns the shuffles that the start recovered. Empty from the second call on. The caller
    /// must purge those that it does not keep.
    #[must_use]
    pub fn take_recovered(&self) -> Recovered {
        std::mem::take(&mut *self.recovered.lock())
    }

    /// Registers a shuffle, unless it is registered. Does not access the disks.
    pub fn register(&self, key: &ShuffleKey) -> DiskShuffleHandle {
        let create = || {
            let incarnation = self.next_incarnation.fetch_add(1, Ordering::Relaxed);
            Arc::new(DiskShuffle::new(key.clone(), incarnation, self.core.disks.len(), &self.core.extents))
        };
        let shuffle = Arc::clone(&*self.shuffles.entry(key.clone()).or_insert_with(create));
        self.handle_of(shuffle)
    }

    fn handle_of(&self, shuffle: Arc<DiskShuffle>) -> DiskShuffleHandle {
        DiskShuffleHandle { writer: Arc::clone(&self.writer), shuffle }
    }

    /// Returns the current incarnation of a shuffle.
    pub fn handle(&self, key: &ShuffleKey) -> Option<DiskShuffleHandle> {
        self.find(key).ok().map(|shuffle| self.handle_of(shuffle))
    }

    /// Takes a snapshot of a partition's stream.
    ///
    /// # Errors
    /// `NotFound` if the shuffle is unknown.
    pub fn view(&self, key: &ShuffleKey, partition: PartitionId) -> Result<StreamView, StoreError> {
        let shuffle = self.find(key)?;
        let found = shuffle.with_partition(partition, |found| found.cloned()).unwrap_or_default();
        let in_objects = InObjects::of(&found);
        let Partition { extents, bytes, blocks, .. } = found;
        Ok(StreamView { shuffle, partition, extents, bytes, blocks, in_objects })
    }

    /// Takes a snapshot of a range of a partition's stream.
    ///
    /// # Errors
    /// `NotFound` if the shuffle is unknown, `Purged` if it is purged meanwhile, `InvalidRange` if
    /// the range is empty or not completely published.
    pub fn view_part(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        range: &Range<u64>,
    ) -> Result<StreamView, StoreError> {
        StreamView::part(self.find(key)?, partition, range)
    }

    /// Reads the index of a run without objects.
    pub fn index_of(&self, view: &StreamView, run: &ViewRun) -> Box<dyn ChunkRead> {
        self.reader.index(view, run)
    }

    /// Reads a range of data without objects.
    pub fn data_of(&self, view: &StreamView, range: Range<u64>) -> DataRead {
        let extents = view.extents.touched(range.start, range.end);
        DataRead::new(&self.reader, Arc::clone(&view.shuffle), view.partition, extents, range)
    }

    /// Calls `visit` with the ids of the readable blocks of a partition on disks, from their index
    /// records.
    pub(super) async fn visit_records_of(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        visit: &mut (dyn FnMut(u64) + Send),
    ) -> Result<(), StoreError> {
        let shuffle = self.find(key)?;
        for extent in shuffle.extents(partition).iter().filter(|extent| extent.is_on_disk()) {
            let add = |record: &IndexRecord| {
                let start = extent.base + record.offset.unsigned_abs();
                let place = start..start + u64::from(record.length.unsigned_abs());
                if !shuffle.damaged.touches(partition, &place) {
                    visit(record.block_id.unsigned_abs());
                }
                ControlFlow::Continue(())
            };
            let visited = self.core.visit_records(&shuffle, extent, 0, add).await;
            let disk = shuffle.log_at(extent.index_log).disk.index;
            visited.inspect_err(|error| shuffle.failed_reads.index_unreadable(partition, disk, error))?;
        }
        Ok(())
    }

    /// Returns the bytes of data and index logs.
    pub fn used_bytes(&self) -> u64 {
        self.disks().iter().map(|disk| disk.used_bytes).sum()
    }

    /// Returns the state of the disks.
    pub fn disks(&self) -> Vec<DiskInfo> {
        self.core.disks.iter().map(|disk| disk.info()).collect()
    }

    /// Replaces the watermarks of all disks.
    pub fn set_watermarks(&self, high: f64, low: f64) {
        self.core.disks.iter().for_each(|disk| disk.set_watermarks(high, low));
    }

    /// Returns the number of disks that take batches: neither unhealthy nor full.
    pub fn available_disks(&self) -> usize {
        self.core.available_disks()
    }

    /// Replaces the number of disks that must take batches for the tier to be healthy. 0 disables
    /// the check.
    pub fn set_min_disks(&self, disks: usize) {
        if self.min_disks.swap(disks, Ordering::Relaxed) != disks {
            self.core.changes.send_replace(());
        }
    }

    /// Returns the number of known shuffles.
    pub fn shuffle_count(&self) -> usize {
        self.shuffles.len()
    }

    /// Settles the metadata log, then syncs data and indexes of all disks unless each write was
    /// synced. Failed syncs are only logged. A disk that is late or fails delays no other.
    pub(super) async fn sync_disks(&self, time: Duration) {
        if self.shuffles.is_empty() {
            return;
        }
        // Another program may have damaged the metadata log since it was last checked. A log that
        // cannot be settled in time is left as it is.
        let _: Result<(), _> = timeout(time, self.log().settle()).await;
        if self.core.config.sync == SyncWrites::Group {
            return;
        }
        let syncs = self.core.disks.iter().map(async |disk| {
            let synced = within(time, disk.io.sync_all()).await;
            if let Err(error) = synced {
                tracing::warn!(
                    disk = %disk.label,
                    %error,
                    "sync failed; a power loss may lose the latest writes"
                );
            }
        });
        join_all(syncs).await;
    }

    pub(in crate::store) fn find(&self, key: &ShuffleKey) -> Result<Arc<DiskShuffle>, StoreError> {
        let found = self.shuffles.get(key).map(|shuffle| Arc::clone(&*shuffle));
        found.ok_or_else(|| StoreError::new(StoreErrorKind::NotFound, key.to_string()))
    }
}
