//! The local disks as one store of extents.
//!
//! Per shuffle and disk there is a data log and an index log, whatever the number of partitions. A batch goes to one
//! disk as one sequential range ([`write`](LocalStore::write)), gets its place in the partitions' streams in the
//! shuffle's publish lane, and is visible from then on. To readers a partition is one contiguous stream; which disks
//! hold it is nobody's business but ours.
//!
//! | file | does |
//! | --- | --- |
//! | `claim`, `mounts` | which directories are ours, and which are empty for want of a mount |
//! | `disk`, `health`, `share` | space and health of one directory, and its share of the memory for reads |
//! | `claimable` | whether a successor could claim what the running worker holds |
//! | `placement`, `pace` | which disk takes a batch, how fast it was lately (pure) |
//! | `log`, `files` | append-only files and their descriptors |
//! | `shuffle` | the extents and logs of one shuffle |
//! | `write`, `publish`, `index` | data, then index group, then visibility |
//! | `read`, `records` | index and data streams, cached index records |
//! | `take_over` | the metadata log of the worker, on these disks |
//! | `scan`, `recover` | what an earlier process left becomes the store's state again |
//! | `sync` | what must be on the device first, and group commit |
//! | `verify` | checksums of blocks while they are read |
//! | `damage` | what a disk does not give back any more becomes a hole |
//! | `condemned` | blocks that it gives back with other bytes |
//! | `purge`, `deletes` | removal and maintenance, each disk by itself |
//!
//! Layout: `<root>/apps/<app>/<shuffle>.<incarnation>/<n>.data|.index`. By default these are not synced: a process
//! that dies leaves its writes to the page cache. What shuffles say always is (`durability`). With [`SyncWrites::Group`] data is on the device before its index group
//! is written, the group before its extents are visible, and what an earlier process left before it is taken over: a machine that dies loses nothing that anybody was told of.

mod claim;
pub mod claimable;
mod condemned;
mod damage;
mod deletes;
mod disk;
mod files;
pub mod health;
pub mod index;
mod log;
pub(crate) mod metrics;
mod mounts;
pub mod pace;
pub mod placement;
mod publish;
mod purge;
mod read;
mod records;
mod recover;
mod scan;
mod share;
mod shuffle;
mod sync;
mod take_over;
mod tier;

mod verify;
mod write;

#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use croaring::Treemap;
use dashmap::DashMap;
use futures::future::join_all;
use parking_lot::Mutex;
use prometheus::Registry;
use tokio::sync::{Semaphore, watch};

pub use self::claim::MARKER;
pub use self::read::{DataRead, IndexRead};
pub use self::sync::SyncWrites;
pub use self::verify::VerifyReads;

pub(super) use self::tier::NAMES;

use self::deletes::Deletes;
use self::disk::LocalDisk;
use self::files::Files;
use self::metrics::{ALL_DISKS, Metrics};
use self::placement::Candidate;
use self::records::RecordCache;
use self::share::ReadShare;
use self::shuffle::Shuffle;
use crate::durability::MetadataLog;
use crate::runtime::Tasks;
use crate::schema::kind::{DAY, GIB, MIB, SECOND, Word, count, flag, list, path, ratio, seconds, size, word};
use crate::schema::section;
use crate::tiers::{DiskCondition, DiskInfo, ExtentWrite, Recovered, StoreError, StoreErrorKind};
use uniffle_io::blocking::BlockingDisk;
use uniffle_io::buffers::{AlignedPool, READ_CHUNK_BYTES_MAX};
use uniffle_io::{Disk, Engine};
use uniffle_wire::types::{PartitionId, ShuffleKey};

section! {
    /// How the local store works.
    #[table("localfile_store", "Local disks.")]
    pub struct LocalConfig |machine| {
        /// One directory per disk: absolute, distinct, none inside another. Needed with a coordinator_quorum. Default:
        /// $XDG_STATE_HOME/uniffle-worker/data, else ~/.local/state/uniffle-worker/data, else below the temp directory.
        #[key("localfile_store.data_paths", list(64, path()), Restart, example "[\"/data1/uniffle\", \"/data2/uniffle\"]")]
        pub paths: Vec<PathBuf> = vec![machine.state_dir.join("data")],
        /// Fewer disks than this that take data (not full, hung or broken) make the worker unhealthy; 0 = never.
        #[key(
            "localfile_store.healthy_check_min_disks" or "localfile_store.min_number_of_available_disks",
            count(0..=64), AtOnce
        )]
        pub min_disks: usize = 0,
        /// A disk filled beyond this share gets no new data ...
        #[key("localfile_store.disk_high_watermark", ratio(), AtOnce)]
        pub high_watermark: f64 = 0.8,
        /// ... until it is below this one.
        #[key("localfile_store.disk_low_watermark", ratio(), AtOnce)]
        pub low_watermark: f64 = 0.7,
        /// Reads and writes together under way per disk, metadata left out.
        #[key("localfile_store.disk_max_concurrency", count(1..=1_000_000), Restart)]
        pub max_concurrency_per_disk: usize = 2000,
        /// Writes of data under way per disk. Index groups have as many places of their own, metadata two, so neither waits
        /// for data.
        #[key("localfile_store.write_concurrency_per_disk", count(1..=256), Restart)]
        pub write_concurrency_per_disk: usize = 4,
        /// Between two probes of the disks.
        #[key("localfile_store.disk_healthy_check_interval_sec", seconds(SECOND..=DAY), Restart)]
        pub probe_interval: Duration = 60 * SECOND,
        /// Write past the page cache where the file system allows it.
        #[key("localfile_store.direct_io", flag(), Restart)]
        pub direct_io: bool = true,
        /// Take over at the start what an earlier process left in the data paths; false deletes it.
        #[key("localfile_store.recovery", flag(), Restart)]
        pub recovery: bool = true,
        /// Who reads and writes: blocking = threads that wait, io_uring = one ring per disk (blocking where the kernel
        /// refuses it).
        #[key("localfile_store.io_engine", word(), Restart)]
        pub engine: Engine = Engine::Blocking,
        /// Compare the checksums of blocks that are read from disk: always, sampled (one read in sixteen) or off. Clients
        /// check in any case; here the disk is blamed and the loss entered. It costs 8 % of a read's CPU time: less than a
        /// wrong block that nobody can place.
        #[key("localfile_store.verify_reads", word(), Restart)]
        pub verify_reads: VerifyReads = VerifyReads::Always,
        /// What of the data is on the device before it counts: off = nothing, the page cache survives kill -9 and
        /// upgrades; group = data before its index, both before memory is released, so that a power loss takes nothing
        /// that was flushed. One fdatasync serves all who wait for it. Registrations and reports are always synced before
        /// they are acknowledged.
        #[key("localfile_store.sync", word(), Restart)]
        pub sync: SyncWrites = SyncWrites::Off,
        /// Index records kept in memory, so that reducers' first question needs no disk.
        #[key("localfile_store.index_cache_size", size(0..=16 * GIB), Restart)]
        pub index_cache_bytes: u64 = 16 * MIB,
        /// Read calls per disk at a time. At least 1.
        pub read_concurrency_per_disk: usize = 16,
        /// Memory for reads of all disks, of which each has a share.
        pub read_memory_bytes: u64 = 64 * MIB,
        /// Time for one write call of at most 16 MiB, queueing included.
        pub write_timeout: Duration = 60 * SECOND,
        /// Time for one read call of at most 2 MiB, queueing included.
        pub read_timeout: Duration = 60 * SECOND,
        /// Time to open, create or rename something.
        pub name_timeout: Duration = 30 * SECOND,
        /// Time to delete a shuffle's files.
        pub purge_timeout: Duration = 600 * SECOND,
        /// Between two measurements of free space.
        pub space_interval: Duration = 10 * SECOND,
        /// Cached descriptors. At least 1.
        pub descriptors_max: usize = 1024,
        /// A cached descriptor that is not used for this long is closed.
        pub descriptor_idle_timeout: Duration = 60 * SECOND,
        /// Time for what waits to reach the device in one copy of the metadata log.
        pub metadata_timeout: Duration = 10 * SECOND,
        /// Staging buffers of 1 MiB for gathered writes; 0 = twice the write calls of all disks, at most 64.
        pub staging_buffers: usize = 0,
    }
}

impl Word for Engine {
    const ALL: &'static [Self] = &[Self::Blocking, Self::Uring];

    fn as_str(self) -> &'static str {
        match self {
            Self::Blocking => "blocking",
            Self::Uring => "io_uring",
        }
    }

    fn unusable(self) -> Option<&'static str> {
        let is_missing = self == Self::Uring && !cfg!(feature = "io-uring");
        is_missing.then_some("this program was built without the feature io-uring")
    }
}

/// Most staging buffers that are chosen by default: 64 MiB outside the memory region.
const STAGING_BUFFERS_DEFAULT_MAX: usize = 64;

impl LocalConfig {
    /// The real disks of [`LocalConfig::paths`].
    #[must_use]
    pub fn real_disks(&self) -> Vec<Arc<dyn Disk>> {
        let (writes, reads) = (self.write_concurrency_per_disk, self.read_concurrency_per_disk);
        let disk = |path: &PathBuf| {
            let disk = BlockingDisk::new(path, writes, reads);
            self.engine.disk(disk.with_max_concurrency(self.max_concurrency_per_disk))
        };
        self.paths.iter().map(disk).collect()
    }

    /// Memory that reads of one of `disks` may hold at a time: what is useful to it at most, and so much that the others can
    /// go on when all of it is stuck.
    fn read_share_bytes(&self, disks: usize) -> usize {
        let useful = self.read_concurrency_per_disk.saturating_mul(READ_CHUNK_BYTES_MAX);
        let share = self.read_memory_bytes / (disks as u64 + 1);
        usize::try_from(share).unwrap_or(usize::MAX).min(useful).max(READ_CHUNK_BYTES_MAX)
    }

    fn staging_buffers_for(&self, disks: usize) -> usize {
        if self.staging_buffers > 0 {
            return self.staging_buffers;
        }
        (2 * disks * self.write_concurrency_per_disk).min(STAGING_BUFFERS_DEFAULT_MAX)
    }
}

/// A batch that is readable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Published {
    /// Its place among the shuffle's batches.
    pub sequence: u64,
    /// Index of the disk that took it.
    pub disk: usize,
    /// Extents.
    pub extents: usize,
    /// Blocks.
    pub blocks: usize,
    /// Payload bytes.
    pub bytes: u64,
}

/// One incarnation of a shuffle: a batch written with it cannot end up in a later one of the same name.
#[derive(Clone)]
pub struct ShuffleHandle {
    shuffle: Arc<Shuffle>,
}

impl fmt::Debug for ShuffleHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ShuffleHandle({}.{})", self.shuffle.key, self.shuffle.incarnation)
    }
}

/// What reads and writes share.
#[derive(Debug)]
struct Core {
    config: LocalConfig,
    disks: Vec<Arc<LocalDisk>>,
    /// Written when a disk's condition changes.
    changes: Arc<watch::Sender<()>>,
    /// Configured directories that could not be claimed.
    disks_refused: u64,
    files: Files,
    records: RecordCache,
    staging: Arc<AlignedPool>,
    metrics: Metrics,
    /// By disk.
    deletes: Vec<Deletes>,
    /// Shuffles that are gone, of which the metadata log does not know it yet.
    pending_purges: Mutex<Vec<Arc<Shuffle>>>,
    metadata: OnceLock<MetadataLog>,
    /// See `damage`.
    probes: Semaphore,
    /// Data reads so far, for sampling.
    data_reads: AtomicU64,
}

/// The store.
#[derive(Debug)]
pub struct LocalStore {
    core: Arc<Core>,
    shuffles: DashMap<ShuffleKey, Arc<Shuffle>>,
    next_incarnation: AtomicU64,
    min_disks: AtomicUsize,
    recovered: Mutex<Recovered>,
    /// Of the metadata log.
    tasks: Tasks,
}

impl LocalStore {
    /// Claims the disks and takes over what an earlier process left there ([`LocalStore::take_recovered`]), or discards it
    /// (deleted later, by [`LocalStore::maintain`]). A directory that does not answer is left out as long as another one
    /// does.
    ///
    /// # Errors
    /// `NotOurs` or `InUse` for any directory; any failure when no disk is left.
    pub async fn open(
        config: LocalConfig,
        disks: Vec<Arc<dyn Disk>>,
        registry: &Registry,
    ) -> Result<Arc<Self>, StoreError> {
        let metrics =
            Metrics::new(registry).map_err(|error| StoreError::io("metrics", io::Error::other(error)))?;
        let roots = disks.len() as u64;
        let changes = Arc::new(watch::Sender::new(()));
        let read_share_bytes = config.read_share_bytes(disks.len());
        let mut claimed = claim::claim_all(disks, &config, &changes).await?;
        for (index, disk) in claimed.iter_mut().enumerate() {
            disk.index = index;
            disk.reads = ReadShare::new(read_share_bytes);
        }
        let claimed: Vec<_> = claimed.into_iter().map(Arc::new).collect();
        let min_disks = AtomicUsize::new(config.min_disks);
        let core = Core {
            disks_refused: roots - claimed.len() as u64,
            records: RecordCache::new(config.index_cache_bytes),
            files: Files::new(config.descriptors_max, config.direct_io, config.name_timeout),
            staging: AlignedPool::new(config.staging_buffers_for(claimed.len())),
            deletes: claimed.iter().map(|_| Deletes::default()).collect(),
            disks: claimed,
            changes,
            metrics,
            pending_purges: Mutex::default(),
            metadata: OnceLock::new(),
            probes: Semaphore::new(damage::PROBED_AT_ONCE),
            data_reads: AtomicU64::new(0),
            config,
        };
        let store = Arc::new(Self {
            core: Arc::new(core),
            shuffles: DashMap::new(),
            next_incarnation: AtomicU64::new(1),
            min_disks,
            recovered: Mutex::default(),
            tasks: Tasks::new(),
        });
        store.take_over().await;
        store.core.set_gauges();
        Ok(store)
    }

    /// What was found at the start; empty from the second call on. A shuffle that its taker does not want must be
    /// forgotten.
    #[must_use]
    pub fn take_recovered(&self) -> Recovered {
        std::mem::take(&mut *self.recovered.lock())
    }

    /// Makes a shuffle known; again is fine. Touches no disk.
    pub fn register(&self, key: &ShuffleKey) -> ShuffleHandle {
        let create = || {
            let incarnation = self.next_incarnation.fetch_add(1, Ordering::Relaxed);
            Arc::new(Shuffle::new(key.clone(), incarnation, self.core.disks.len()))
        };
        let shuffle = Arc::clone(&*self.shuffles.entry(key.clone()).or_insert_with(create));
        ShuffleHandle { shuffle }
    }

    /// The present incarnation of a shuffle.
    #[must_use]
    pub fn handle(&self, key: &ShuffleKey) -> Option<ShuffleHandle> {
        self.shuffles.get(key).map(|shuffle| ShuffleHandle { shuffle: Arc::clone(&*shuffle) })
    }

    /// [`LocalStore::write_to`] the present incarnation of a shuffle.
    ///
    /// # Errors
    /// As there; `Purged` when the shuffle is not known.
    pub async fn write(&self, key: &ShuffleKey, extents: Vec<ExtentWrite>) -> Result<Published, StoreError> {
        let purged = || StoreError::new(StoreErrorKind::Purged, key.to_string());
        let handle = self.handle(key).ok_or_else(purged)?;
        self.write_to(&handle, extents).await
    }

    /// Writes a batch to one disk and publishes it: when this returns `Ok` every block is readable. Disks that fail
    /// are left for others until none is left.
    ///
    /// # Errors
    /// The last disk's error (the caller keeps the memory and may try again), `Purged`, or `InvalidBatch`.
    pub async fn write_to(
        &self,
        handle: &ShuffleHandle,
        extents: Vec<ExtentWrite>,
    ) -> Result<Published, StoreError> {
        self.core.write(&handle.shuffle, &extents).await
    }

    /// The index of a partition; empty when nothing of it is published.
    ///
    /// # Errors
    /// `NotFound` when the shuffle is not known.
    pub fn index(&self, key: &ShuffleKey, partition: PartitionId) -> Result<IndexRead, StoreError> {
        let shuffle = self.find(key)?;
        Ok(IndexRead::new(Arc::clone(&self.core), shuffle, partition))
    }

    /// Ids of the blocks of a partition that can be read, by their index records. For rare paths: reads all of them.
    ///
    /// # Errors
    /// `NotFound` when the shuffle is not known; what the disk says.
    pub async fn present(&self, key: &ShuffleKey, partition: PartitionId) -> Result<Treemap, StoreError> {
        let shuffle = self.find(key)?;
        let extents = shuffle.with_partition(partition, |found| found.map(|it| it.extents.clone()));
        let mut present = Treemap::new();
        for extent in extents.unwrap_or_default().iter().filter(|extent| !extent.is_lost()) {
            let records = self.core.records_of(&shuffle, extent).await?;
            for record in records {
                let start = extent.base + record.offset.unsigned_abs();
                let place = start..start + u64::from(record.length.unsigned_abs());
                if !shuffle.condemned.touches(partition, &place) {
                    present.add(record.block_id.unsigned_abs());
                }
            }
        }
        Ok(present)
    }

    /// A range of a partition's data stream.
    ///
    /// # Errors
    /// `NotFound` when the shuffle is not known, `InvalidRange` when the range is empty or not wholly published.
    pub fn data(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        offset: u64,
        length: u32,
    ) -> Result<DataRead, StoreError> {
        let shuffle = self.find(key)?;
        DataRead::new(Arc::clone(&self.core), shuffle, partition, offset, length)
    }

    /// Published bytes of a partition.
    #[must_use]
    pub fn partition_bytes(&self, key: &ShuffleKey, partition: PartitionId) -> u64 {
        self.handle(key).map_or(0, |handle| handle.shuffle.stream_bytes(partition))
    }

    /// Bytes of our data and index logs.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.disks().iter().map(|disk| disk.used_bytes).sum()
    }

    /// What the disks tell about themselves.
    #[must_use]
    pub fn disks(&self) -> Vec<DiskInfo> {
        self.core.disks.iter().map(|disk| disk.info()).collect()
    }

    /// Replaces the watermarks of all disks.
    pub fn set_watermarks(&self, high: f64, low: f64) {
        self.core.disks.iter().for_each(|disk| disk.set_watermarks(high, low));
    }

    /// Disks that take batches now: neither sick nor full.
    #[must_use]
    pub fn available_disks(&self) -> usize {
        self.core.available_disks()
    }

    /// Replaces how many disks must take batches for the tier to be healthy; 0 = they make no difference.
    pub fn set_min_disks(&self, disks: usize) {
        if self.min_disks.swap(disks, Ordering::Relaxed) != disks {
            self.core.changes.send_replace(());
        }
    }

    /// Known shuffles.
    #[must_use]
    pub fn shuffle_count(&self) -> usize {
        self.shuffles.len()
    }

    fn find(&self, key: &ShuffleKey) -> Result<Arc<Shuffle>, StoreError> {
        let found = self.shuffles.get(key).map(|shuffle| Arc::clone(&*shuffle));
        found.ok_or_else(|| StoreError::new(StoreErrorKind::NotFound, key.to_string()))
    }
}

impl Core {
    async fn write(&self, shuffle: &Shuffle, extents: &[ExtentWrite]) -> Result<Published, StoreError> {
        let bytes = write::validate(shuffle, extents)?;
        self.metrics.write_local.inc();
        let result = self.write_and_publish(shuffle, extents, bytes).await;
        match &result {
            Ok(published) => self.count_published(published, bytes),
            Err(error) if error.kind == StoreErrorKind::Purged => {}
            Err(_) => self.metrics.write_local_failed.inc(),
        }
        result
    }

    fn available_disks(&self) -> usize {
        self.disks.iter().filter(|disk| disk.condition() == DiskCondition::Healthy).count()
    }

    async fn write_and_publish(
        &self,
        shuffle: &Shuffle,
        extents: &[ExtentWrite],
        bytes: u64,
    ) -> Result<Published, StoreError> {
        let mut tried = Vec::new();
        let mut last_error = None;
        let batch = loop {
            shuffle.require_present()?;
            let Some(index) = self.choose(bytes, &tried).await else {
                return Err(last_error.unwrap_or_else(|| self.no_disk()));
            };
            if !tried.is_empty() {
                self.metrics.write_local_retries.inc();
            }
            match self.write_batch(shuffle, &self.disks[index], extents, bytes).await {
                Ok(batch) => break batch,
                Err(error) => {
                    shuffle.require_present()?;
                    tracing::warn!(shuffle = %shuffle.key, error = %error, "write failed, trying next disk");
                    self.metrics.write_exceptions.inc();
                    tried.push(index);
                    last_error = Some(error);
                }
            }
        };
        self.publish(shuffle, &batch, extents).await
    }

    /// The disk for a batch. Before giving up, space is measured again: it may have been freed since.
    async fn choose(&self, bytes: u64, tried: &[usize]) -> Option<usize> {
        let candidates = || self.disks.iter().map(|disk| disk.candidate()).collect::<Vec<Candidate>>();
        if let Some(index) = placement::choose(&candidates(), bytes, tried) {
            return Some(index);
        }
        let sound = self.disks.iter().filter(|disk| disk.is_healthy() && !tried.contains(&disk.index));
        join_all(sound.map(|disk| disk.measure()).collect::<Vec<_>>()).await;
        placement::choose(&candidates(), bytes, tried)
    }

    fn no_disk(&self) -> StoreError {
        let any_healthy = self.disks.iter().any(|disk| disk.is_healthy());
        let kind = if any_healthy { StoreErrorKind::NoSpace } else { StoreErrorKind::Unhealthy };
        StoreError::new(kind, "all local disks")
    }

    /// Notes a failure against its disk and makes it an error of the store.
    fn failed(&self, disk: &LocalDisk, path: impl AsRef<Path>, error: io::Error) -> StoreError {
        disk.note(&error);
        StoreError::io(path, error)
    }

    fn count_published(&self, published: &Published, occupied_bytes: u64) {
        let metrics = &self.metrics;
        metrics.writes.inc();
        metrics.write_local_succeeded.inc();
        metrics.write_data.inc_by(published.bytes);
        metrics.write_blocks.inc_by(published.blocks as u64);
        metrics.localfile_used.inc_by(occupied_bytes);
        let label = self.disks[published.disk].label.as_str();
        metrics.localfile_write_data.with_label_values(&[label]).inc_by(published.bytes);
        metrics.localfile_write_data.with_label_values(&[ALL_DISKS]).inc_by(published.bytes);
    }
}
