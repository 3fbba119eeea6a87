//! Traits of a tier below memory. The flusher and the service use tiers only through them. The
//! server also uses operations of single types ([`Tiers::find`]).
//!
//! A tier takes batches of one shuffle. When a write returns `Ok`, readers can find every block of
//! it. Readers either use this worker ([`Tier::served`]) or open the tier's files themselves. A
//! tier never decides which batch it gets (`flush::placement`). It may turn unreadable data into
//! holes, but `service` decides whether their blocks are lost.

use std::any::Any;
use std::fmt;
use std::future::ready;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::extents::extent_write::ExtentWrite;
use super::recovered::Recovered;
use super::state::TierState;
use super::{StoreError, StoreErrorKind};
use crate::log::Scratch;
use uniffle_base::damage::DamageListener;
use uniffle_io::ReadBuffers;
use uniffle_wire::types::{AppId, PartitionId, ShuffleKey};

/// Storage of settings made at run time.
pub trait SavedSettings: Send + Sync {
    /// Returns the settings that were saved last, or `None` if none were.
    ///
    /// # Errors
    /// The store does not answer or refuses.
    fn read(&self) -> BoxFuture<'_, Result<Option<Bytes>, StoreError>>;

    /// Saves settings in place of earlier ones.
    ///
    /// # Errors
    /// The store does not answer or refuses, or another process of the worker has started.
    fn save(&self, text: Bytes) -> BoxFuture<'_, Result<(), StoreError>>;
}

/// A destination below memory for sealed data.
pub trait Tier: Any + fmt::Debug + Send + Sync {
    /// Returns the constant properties of the tier.
    fn capability(&self) -> Capability;

    /// Returns the component tiers, if there are any.
    fn parts(&self) -> Vec<Arc<dyn Tier>> {
        Vec::new()
    }

    /// Returns the current state.
    fn state(&self) -> TierState;

    /// Validates a registration before anything is registered. Returns `None` if this tier does not
    /// take the shuffle.
    ///
    /// # Errors
    /// The client named a storage that cannot be used.
    fn prepare(self: Arc<Self>, storage: Option<&RemoteStorage>) -> Result<Option<Admission>, StoreError>;

    /// Returns the current registration of a shuffle, or `None` if it has none here.
    fn shuffle(&self, key: &ShuffleKey) -> Option<Arc<dyn TierShuffle>>;

    /// Calls `visit` with the id of each readable block of a partition, in any order. For rare
    /// paths only, because it may read all index records.
    ///
    /// # Errors
    /// Some records cannot be read, or the shuffle is unknown. Blocks may be missing among the
    /// visited ones, and visited ones may be wrong.
    fn visit_present<'a>(
        &'a self,
        key: &'a ShuffleKey,
        partition: PartitionId,
        visit: &'a mut (dyn FnMut(u64) + Send),
    ) -> BoxFuture<'a, Result<(), StoreError>>;

    /// Returns the usage of a shuffle, which is empty if it is unknown.
    fn usage(&self, key: &ShuffleKey) -> TierUsage;

    /// Detaches shuffles of an application at once: later writes to them fail with `Purged`, and
    /// reads do not find them. Called under a lock that registrations wait for, so slow work and
    /// deletions are left to the returned future, if there are any.
    fn forget(
        self: Arc<Self>,
        app: &AppId,
        keys: &[ShuffleKey],
        purge: Purge,
    ) -> Option<BoxFuture<'static, ()>>;

    /// Returns the reads that this worker serves from the tier, or `None` if clients open its files
    /// themselves.
    fn served(&self) -> Option<&dyn ServedTier>;

    /// Returns the metadata that survives the process, in a [primary](TierRole::Primary) tier.
    fn metadata(&self) -> Option<&dyn MetadataTier> {
        None
    }

    /// Returns the drain, in a tier above a store where a worker of the same name finds the data on
    /// another machine.
    fn drain(&self) -> Option<&dyn DrainableTier> {
        None
    }

    /// Returns the background work of the tier and its end.
    fn maintenance(self: Arc<Self>) -> Option<Arc<dyn MaintainedTier>> {
        None
    }
}

/// Metadata and recovered state of a tier whose data outlives the process.
pub trait MetadataTier: Send + Sync {
    /// Returns the metadata log of a registered shuffle.
    fn metadata_log(&self, key: &ShuffleKey) -> Option<Arc<dyn RegistrationLog>>;

    /// Returns the factory of unnamed files, if there are local disks.
    fn scratch(&self) -> Option<Arc<Scratch>>;

    /// Returns the storage of settings made at run time, if the metadata log is not in data
    /// directories.
    fn saved_settings(&self) -> Option<&dyn SavedSettings>;

    /// Returns the state recovered at start. It is empty from the second call on.
    fn take_recovered(&self) -> Recovered;

    /// Waits until the state recovered at start is on the device, or cannot be. Called after the
    /// recovery was applied.
    fn recovered_durable(&self) -> BoxFuture<'_, ()>;

    /// Returns the reason why an earlier process may have known shuffles that are unknown now.
    fn metadata_gap(&self) -> Option<Arc<str>>;

    /// Ends the metadata gap, also for later starts. To be called once no application from before
    /// the gap is left. Returns false if this cannot be proven here.
    ///
    /// # Errors
    /// The end of the gap cannot be recorded now.
    fn end_metadata_gap(&self) -> BoxFuture<'_, Result<bool, StoreError>>;

    /// Returns the reason why the next process would refuse results that this process serves, or
    /// `None`.
    fn successor_doubts(&self) -> Option<String>;

    /// Waits until no later start can find the shuffles that were forgotten before the call:
    /// shuffle `key` of `app`, or all of `app` without a key.
    ///
    /// # Errors
    /// This could not be recorded, and a later start may find the shuffle again.
    fn forgotten_durable<'a>(
        &'a self,
        app: &'a AppId,
        key: Option<&'a ShuffleKey>,
    ) -> BoxFuture<'a, Result<(), StoreError>>;

    /// Forgets a shuffle whose data stays for a later process.
    fn leave(&self, key: &ShuffleKey);
}

/// Offloads all data to a store where a worker of the same name finds it on another machine.
pub trait DrainableTier: Send + Sync {
    /// Begins or continues the drain. Returns the remaining work.
    fn begin(&self) -> DrainBacklog;

    /// Cancels the drain. Offloaded data stays in the store.
    fn cancel(&self);
}

/// Background work of a tier, and its end.
pub trait MaintainedTier: Send + Sync {
    /// Runs the background work until `stop`.
    fn maintain(self: Arc<Self>, stop: BoxFuture<'static, ()>) -> BoxFuture<'static, ()>;

    /// Updates gauges of live values.
    fn refresh_metrics(&self);

    /// Returns a receiver that is notified when the state changes. A tier without it is polled
    /// every second.
    fn state_changes(&self) -> Option<watch::Receiver<()>> {
        None
    }

    /// Syncs written data to the device, as far as possible within `_time`. Nothing is written
    /// afterwards.
    fn sync(&self, _time: Duration) -> BoxFuture<'_, ()> {
        ready(()).boxed()
    }

    /// Waits for deletions in progress, for `_time` at most. None continues after the worker's
    /// tasks have ended.
    fn end_deletions(&self, _time: Duration) -> BoxFuture<'_, ()> {
        ready(()).boxed()
    }
}

/// Writer of one registration of a shuffle in a tier. Data written with it never becomes part of a
/// later registration of the same name.
pub trait TierShuffle: fmt::Debug + Send + Sync {
    /// Returns whether the tier takes batches of the registration now.
    fn is_accepting(&self) -> bool;

    /// Writes a batch. After `Ok` readers find every block.
    ///
    /// # Errors
    /// An error of the tier (the caller keeps the memory and may retry or write elsewhere), or
    /// `Purged`.
    fn write(&self, batch: TierBatch) -> BoxFuture<'_, Result<(), StoreError>>;
}

/// Metadata of one registration of a shuffle that survives the process.
pub trait RegistrationLog: Send + Sync {
    /// Returns whether the recovered state is durable in all copies of the log. If so, known state
    /// needs no new record.
    fn is_recovered_durable(&self) -> bool {
        true
    }

    /// Appends a record. After `Ok` it survives the process and a power loss.
    ///
    /// # Errors
    /// `Purged`, `InvalidBatch` if the record is too long, or an error if no disk took it.
    fn append(&self, record: Bytes) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Records for later starts that reports of the shuffle may be missing, and why.
    ///
    /// # Errors
    /// See [`RegistrationLog::append`].
    fn mark_incomplete<'a>(&'a self, reason: &'a str) -> BoxFuture<'a, Result<(), StoreError>>;
}

/// Reads for clients without access to the tier. A partition is one contiguous stream of blocks,
/// with an index.
pub trait ServedTier: Send + Sync {
    /// Returns the index of a partition. It is empty if nothing of the partition is published.
    ///
    /// # Errors
    /// `NotFound` if the shuffle is unknown.
    fn index(&self, key: &ShuffleKey, partition: PartitionId) -> Result<ServedIndex, StoreError>;

    /// Returns `length` bytes of a partition's data stream from `offset` on.
    ///
    /// # Errors
    /// `NotFound` if the shuffle is unknown, `Purged` if it is purged meanwhile. `InvalidRange` if
    /// the range is empty or not completely published.
    fn data(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        offset: u64,
        length: u32,
    ) -> Result<ServedData, StoreError>;

    /// Notes non-empty ranges of a partition's data stream that a reader will read next. Changes no
    /// response, never waits, and may be ignored.
    fn hint(&self, _: &ShuffleKey, _: PartitionId, _: &[Range<u64>]) {}

    /// Registers the listener for partitions with lost blocks. Each loss is reported twice: before
    /// a reader can mistake missing data for data, and afterwards. Losses found so far are reported
    /// at once. Only the first listener is used.
    fn on_damage(&self, _: DamageListener) {}

    /// Reads all data of a partition on devices with too many failed reads, and unreadable parts
    /// repeatedly for half a second. Turns unreadable parts into holes, so that their blocks can be
    /// sent again and found. Returns an error of a device, or `None` if it found no such part.
    fn mark_damaged_lost<'a>(
        &'a self,
        _: &'a ShuffleKey,
        _: PartitionId,
    ) -> BoxFuture<'a, Option<StoreError>> {
        ready(None).boxed()
    }
}

/// A read in chunks.
pub trait ChunkRead: fmt::Debug + Send + Sync {
    /// Returns the next chunk, or `None` at the end. Waits for a buffer of `buffers`.
    ///
    /// # Errors
    /// An error of the device. After an error a read returns only errors.
    fn next_chunk<'a>(
        &'a mut self,
        buffers: &'a dyn ReadBuffers,
    ) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>>;

    /// Returns the maximum room for the next chunk, or 0 if nothing is read.
    fn next_room(&self) -> usize;

    /// Returns whether the last error means that blocks of the partition are or may be lost. The
    /// caller must then determine which.
    fn may_have_losses(&self) -> bool {
        false
    }
}

/// Remaining length of a read. After a failed chunk, a read returns only errors.
#[derive(Debug)]
pub(super) struct RemainingRead {
    remaining: u64,
    failed: bool,
}

impl RemainingRead {
    /// Creates the progress of a read of `remaining` bytes.
    pub(super) fn new(remaining: u64) -> Self {
        Self { remaining, failed: false }
    }

    /// Returns the remaining bytes.
    pub(super) fn remaining(&self) -> u64 {
        self.remaining
    }

    /// Returns the remaining bytes, at most `max`.
    pub(super) fn next_len(&self, max: usize) -> usize {
        usize::try_from(self.remaining).unwrap_or(max).min(max)
    }

    /// Begins a chunk of at most `max` bytes. Returns its length, which is 0 at the end, or `None`
    /// after a failed chunk. A chunk counts as failed until it has [ended](Self::end), because the
    /// caller may drop it.
    pub(super) fn begin(&mut self, max: usize) -> Option<usize> {
        let len = self.next_len(max);
        let is_open = !self.failed;
        self.failed |= len > 0;
        is_open.then_some(len)
    }

    /// Ends a chunk of `len` bytes.
    pub(super) fn end(&mut self, len: usize) {
        self.failed = false;
        self.remaining -= len as u64;
    }
}

/// A partition's index.
#[derive(Debug)]
pub struct ServedIndex {
    /// Length of all records in bytes.
    pub length: u64,
    /// Length of the data stream described by the records.
    pub data_length: u64,
    /// Reader of the records.
    pub chunks: Box<dyn ChunkRead>,
}

/// A range of a partition's data.
#[derive(Debug)]
pub struct ServedData {
    /// True if part of the range is lost. Lost bytes are zeros.
    pub has_hole: bool,
    /// Reader of the bytes.
    pub chunks: Box<dyn ChunkRead>,
}

/// Constant properties of a tier.
#[derive(Debug, Clone, Copy)]
pub struct Capability {
    /// Names in metrics and logs.
    pub names: TierNames,
    /// Maximum number of concurrently written batches. At least 1.
    pub writers: usize,
    /// Maximum number of batches waiting or being written. Above it the tier takes no more batches
    /// while another tier does.
    pub in_flight_max: usize,
    /// Role among the tiers of a worker.
    pub role: TierRole,
}

/// Role of a tier among those of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TierRole {
    /// Also stores registrations and reports. The worker is unhealthy if this tier is.
    Primary,
    /// Stores data only. No tier of the worker has this role so far; a test tier does.
    Secondary,
    /// Stores cold data: large batches and batches of huge partitions. Each partition has files of
    /// its own. A batch that is made for this tier therefore has one partition, and a retry writes
    /// only that one again. A batch that failed in another tier may have more.
    Cold,
}

/// Names of a tier. Java and riffle have their own names for the local and the remote tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TierNames {
    /// Name in the API and in logs.
    pub name: &'static str,
    /// Name in sentences.
    pub title: &'static str,
    /// Value of the label `storage_type`.
    pub label: &'static str,
    /// Name in riffle's metrics.
    pub spill: &'static str,
    /// Name in Java's metrics of events.
    pub events: &'static str,
    /// Name in Java's metrics of queues.
    pub queue: &'static str,
}

/// Usage of a tier by a shuffle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TierUsage {
    /// Number of files.
    pub files: u64,
    /// Number of payload bytes.
    pub bytes: u64,
    /// Number of these bytes in an object store.
    pub object_bytes: u64,
    /// Occupied bytes: payload, alignment, index groups, and on disks the records in the metadata
    /// log.
    pub occupied_bytes: u64,
}

/// Scope of a removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purge {
    /// The shuffles are removed, but not their application.
    Shuffles,
    /// The application is removed.
    App(Cause),
}

/// Reason why an application is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// The client unregistered the application, or an operator purged it.
    Unregistered,
    /// The client sent no heartbeat for too long.
    Expired,
}

/// Registers a shuffle in the tier that prepared it, or adds ranges of partitions to it. Cannot
/// fail.
pub type Admission = Box<dyn Fn(&ShuffleKey, &[(i32, i32)]) + Send + Sync>;

/// Remote storage of a shuffle's cold data, as requested by the client.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteStorage {
    /// Path, such as `hdfs://namenode:8020/uniffle`.
    pub path: String,
    /// Hadoop settings.
    pub conf: Vec<(String, String)>,
    /// The application's user.
    pub user: String,
    /// Requested writers per partition, or `None` for the worker's choice.
    pub writers: Option<usize>,
}

/// Extents of one shuffle that are written together.
#[derive(Debug)]
pub struct TierBatch {
    /// Extents, one per partition. At least one.
    pub extents: Vec<ExtentWrite>,
    /// True if an earlier write of the batch failed, here or in another tier.
    pub is_retry: bool,
    /// Payload bytes of huge partitions in the batch.
    pub huge_bytes: u64,
    /// True if the process ends. A batch that no tier takes is lost, so watermarks and earlier
    /// refusals are ignored.
    pub is_last: bool,
}

impl From<Vec<ExtentWrite>> for TierBatch {
    fn from(extents: Vec<ExtentWrite>) -> Self {
        Self { extents, is_retry: false, huge_bytes: 0, is_last: false }
    }
}

/// Data that another machine would not find, which is the remaining work of a drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DrainBacklog {
    /// Number of shuffles with data or records that are or may be only here, for example in a
    /// missing or unreadable directory. Data of `stuck_bytes` does not count.
    pub shuffles_left: usize,
    /// Number of their bytes still to be offloaded.
    pub bytes_left: u64,
    /// Number of bytes of shuffles of which nothing can be offloaded now: it is lost or unreadable.
    pub stuck_bytes: u64,
}

/// The tiers of a worker, in the order in which a batch is offered to them.
#[derive(Debug, Clone, Default)]
pub struct Tiers(Arc<[Arc<dyn Tier>]>);

impl Tiers {
    /// Creates the list from `tiers`, in the order in which they are tried.
    ///
    /// # Errors
    /// More than one tier is read through this worker. A reader sees one stream of a partition,
    /// whose offsets must not change.
    pub fn new(tiers: Vec<Arc<dyn Tier>>) -> Result<Self, StoreError> {
        if tiers.iter().filter(|tier| tier.served().is_some()).count() > 1 {
            let names = tiers.iter().map(|tier| tier.capability().names.name).collect::<Vec<_>>().join(", ");
            return Err(StoreError::new(StoreErrorKind::InvalidBatch, names));
        }
        Ok(Self(tiers.into()))
    }

    /// Returns all tiers in order.
    pub fn iter(&self) -> std::slice::Iter<'_, Arc<dyn Tier>> {
        self.0.iter()
    }

    /// Returns the number of tiers.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether no tier exists below memory.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the tier at `index` of the order.
    #[must_use]
    pub fn at(&self, index: usize) -> &Arc<dyn Tier> {
        &self.0[index]
    }

    /// Returns the tier that is read through this worker.
    #[must_use]
    pub fn served(&self) -> Option<&dyn ServedTier> {
        self.iter().find_map(|tier| tier.served())
    }

    /// Returns the occupied bytes of a shuffle in the tier that is read through this worker.
    #[must_use]
    pub fn occupied_bytes(&self, key: &ShuffleKey) -> u64 {
        self.iter().filter(|tier| tier.served().is_some()).map(|tier| tier.usage(key).occupied_bytes).sum()
    }

    /// Returns the metadata of the tier that stores registrations and reports.
    #[must_use]
    pub fn metadata(&self) -> Option<&dyn MetadataTier> {
        self.iter().find_map(|tier| tier.metadata())
    }

    /// Returns the tiers with background work.
    pub fn maintained(&self) -> impl Iterator<Item = Arc<dyn MaintainedTier>> {
        self.iter().filter_map(|tier| Arc::clone(tier).maintenance())
    }

    /// Returns the tier of type `T`, for its specific operations.
    #[must_use]
    pub fn find<T: Tier>(&self) -> Option<Arc<T>> {
        let all = self.iter().flat_map(|tier| std::iter::once(Arc::clone(tier)).chain(tier.parts()));
        all.into_iter().find_map(|tier| (tier as Arc<dyn Any + Send + Sync>).downcast().ok())
    }
}

impl<T: Tier> From<Arc<T>> for Tiers {
    fn from(tier: Arc<T>) -> Self {
        Self(Arc::new([tier as Arc<dyn Tier>]))
    }
}
