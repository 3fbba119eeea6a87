//! What a tier below memory promises the flusher, the service and the server: they know tiers only by these traits.
//!
//! A tier takes batches of one shuffle; when a write returns `Ok`, every block of it can be found by readers. Readers
//! either come through this worker ([`Tier::served`]) or open the tier's files themselves. What a tier never does:
//! decide which batch it gets (`flush::placement`), or whether a block is lost (`service`).

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

use super::recovered::Recovered;
use super::state::TierState;
use super::{StoreError, StoreErrorKind};
use crate::durability::{OnDamage, Scratch};
use uniffle_io::{BLOCK_ALIGN, ReadBuffers};
use uniffle_wire::types::{AppId, BlockMeta, PartitionId, ShuffleKey};

/// A place below memory for sealed data.
pub trait Tier: Any + fmt::Debug + Send + Sync {
    /// What it is and how it wants its batches; never changes.
    fn capability(&self) -> Capability;

    /// The tiers that it is made of, if it is made of others.
    fn parts(&self) -> Vec<Arc<dyn Tier>> {
        Vec::new()
    }

    /// How it is now.
    fn state(&self) -> TierState;

    /// Wakes when its state has changed; a tier without it is asked every second.
    fn state_changes(&self) -> Option<watch::Receiver<()>> {
        None
    }

    /// Looks at a registration before anything is registered; none when this tier does not take the shuffle.
    ///
    /// # Errors
    /// The client named a place that cannot be used.
    fn prepare(self: Arc<Self>, storage: Option<&RemoteStorage>) -> Result<Option<Admission>, StoreError>;

    /// The present registration of a shuffle; none when it has none here.
    fn shuffle(&self, key: &ShuffleKey) -> Option<Arc<dyn TierShuffle>>;

    /// Where the metadata of a shuffle is written, in a [primary](TierRole::Primary) tier.
    fn metadata_log(&self, _: &ShuffleKey) -> Option<Arc<dyn MetadataLog>> {
        None
    }

    /// Where files without a name can be made, in a tier that has local disks.
    fn scratch(&self) -> Option<Arc<Scratch>> {
        None
    }

    /// Why an earlier process may have known shuffles that are not known here.
    fn metadata_gap(&self) -> Option<Arc<str>> {
        None
    }

    /// Calls `visit` with the id of each block of a partition that readers find here, in any order. For rare paths: may read
    /// all index records.
    fn visit_present<'a>(
        &'a self,
        key: &'a ShuffleKey,
        partition: PartitionId,
        visit: &'a mut (dyn FnMut(u64) + Send),
    ) -> BoxFuture<'a, Result<(), StoreError>>;

    /// What a shuffle has here; nothing when it is not known.
    fn usage(&self, key: &ShuffleKey) -> TierUsage;

    /// How this worker reads the tier for its clients; none when clients open its files themselves.
    fn served(&self) -> Option<&dyn ServedTier>;

    /// Forgets shuffles of an app at once: from now on writes of them end with `Purged` and nothing of them is found.
    /// Called under a lock for which registrations wait: what takes long, and what is left to be deleted, is the future's, if
    /// there is anything.
    fn forget(
        self: Arc<Self>,
        app: &AppId,
        keys: &[ShuffleKey],
        purge: Purge,
    ) -> Option<BoxFuture<'static, ()>>;

    /// Waits until no later start can find what was forgotten before the call: of one shuffle of `app`, or of all without a `key`.
    ///
    /// # Errors
    /// That could not be written down: a later start may know it again.
    fn forgotten_durable<'a>(
        &'a self,
        _app: &'a AppId,
        _key: Option<&'a ShuffleKey>,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        ready(Ok(())).boxed()
    }

    /// Forgets a shuffle whose data stays for a later process.
    fn leave(&self, _: &ShuffleKey) {}

    /// What was found at the start; empty from the second call on.
    fn take_recovered(&self) -> Recovered {
        Recovered::default()
    }

    /// Waits until what was found at the start and told is on the device, or cannot be. When it was told.
    fn recovered_durable(&self) -> BoxFuture<'_, ()> {
        ready(()).boxed()
    }

    /// Brings what was written to the device, as far as that is done within `time`: nothing is written after it.
    fn sync(&self, _time: Duration) -> BoxFuture<'_, ()> {
        ready(()).boxed()
    }

    /// Waits for deletions that are under way, no longer than `time`: none goes on after the worker's tasks have ended.
    fn end_deletions(&self, _time: Duration) -> BoxFuture<'_, ()> {
        ready(()).boxed()
    }

    /// Begins to bring everything to where a worker of the same name finds it on another machine; how far that is. None where
    /// no such place is.
    fn drain(&self) -> Option<Drained> {
        self.drained()
    }

    /// The drain is taken back: what was brought away stays so.
    fn stay(&self) {}

    /// How far that is, whether it has begun or not.
    fn drained(&self) -> Option<Drained> {
        None
    }

    /// It is told of each partition of which the tier finds out that blocks are gone, in a read or a write: before a reader can
    /// take what is missing for data, and once more after; now of what was found out so far. The first one only.
    fn on_damage(&self, _: OnDamage) {}

    /// Brings gauges of live values up to date.
    fn refresh_metrics(&self) {}

    /// What the tier does by itself, until `stop`.
    fn maintain(self: Arc<Self>, stop: BoxFuture<'static, ()>) -> BoxFuture<'static, ()> {
        stop
    }
}

/// One registration of a shuffle in a tier: what is written with it cannot end up in a later one of the same name.
pub trait TierShuffle: fmt::Debug + Send + Sync {
    /// Whether it takes batches now.
    fn is_accepting(&self) -> bool;

    /// Writes a batch: when this returns `Ok`, readers find every block.
    ///
    /// # Errors
    /// The tier's (the caller keeps the memory and may try again or elsewhere), or `Purged`.
    fn write(&self, batch: TierBatch) -> BoxFuture<'_, Result<(), StoreError>>;
}

/// Metadata of one registration of a shuffle that survives the process.
pub trait MetadataLog: Send + Sync {
    /// Whether what was recovered is wherever a record goes, and outlives power there: then what is known needs none.
    fn is_recovered_durable(&self) -> bool {
        true
    }

    /// Appends a record: when this returns `Ok` it outlives process and power.
    ///
    /// # Errors
    /// `Purged`, `InvalidBatch` when it is too long, or that no disk took it.
    fn append(&self, record: Bytes) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Later starts, too, are to know that reports of the shuffle may be missing, and why.
    ///
    /// # Errors
    /// As [`MetadataLog::append`].
    fn mark_incomplete<'a>(&'a self, reason: &'a str) -> BoxFuture<'a, Result<(), StoreError>>;
}

/// Reads for clients that do not see the tier: a partition is one contiguous stream of blocks, with an index.
pub trait ServedTier: Send + Sync {
    /// The index of a partition; empty when nothing of it is published.
    ///
    /// # Errors
    /// `NotFound` when the shuffle is not known.
    fn index(&self, key: &ShuffleKey, partition: PartitionId) -> Result<ServedIndex, StoreError>;

    /// A range of a partition's data stream.
    ///
    /// # Errors
    /// `NotFound` when the shuffle is not known, `InvalidRange` when the range is empty or not wholly published.
    fn data(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        range: (u64, u32),
    ) -> Result<ServedData, StoreError>;

    /// Takes note of ranges of a partition's data stream, none of them empty, that a reader says it will read next. Changes no
    /// answer, waits for nothing, and may be ignored.
    fn hint(&self, _: &ShuffleKey, _: PartitionId, _: &[Range<u64>]) {}

    /// Reads all that a partition has on devices of which reads have failed, and makes holes of what cannot be read, so
    /// that its blocks can be sent again and found. What a device said of it; none when everything can be read.
    fn mark_damaged_lost<'a>(
        &'a self,
        _: &'a ShuffleKey,
        _: PartitionId,
    ) -> BoxFuture<'a, Option<StoreError>> {
        ready(None).boxed()
    }
}

/// Bytes that are read in chunks.
pub trait ChunkRead: fmt::Debug + Send + Sync {
    /// The next chunk, `None` at the end. Waits for a buffer of `buffers`.
    ///
    /// # Errors
    /// What the device says; after an error a read gives only errors.
    fn next_chunk<'a>(
        &'a mut self,
        buffers: &'a dyn ReadBuffers,
    ) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>>;

    /// Room that the next chunk needs at most, 0 when none is read.
    fn next_room(&self) -> usize;

    /// Whether the last error shows that blocks of the partition are gone, or may be: it is to be found out which.
    fn is_suspect(&self) -> bool {
        false
    }
}

/// A partition's index.
#[derive(Debug)]
pub struct ServedIndex {
    /// Bytes of all records.
    pub length: u64,
    /// Length of the data stream that they describe.
    pub data_length: u64,
    /// The records.
    pub chunks: Box<dyn ChunkRead>,
}

/// A range of a partition's data.
#[derive(Debug)]
pub struct ServedData {
    /// Whether part of it is lost: zeros stand for it.
    pub has_hole: bool,
    /// The bytes.
    pub chunks: Box<dyn ChunkRead>,
}

/// What a tier is.
#[derive(Debug, Clone, Copy)]
pub struct Capability {
    /// By what metrics and logs call it.
    pub names: TierNames,
    /// Batches that are written at a time. At least 1.
    pub writers: usize,
    /// Batches that wait for it or are being written, beyond which it takes no more while another tier does.
    pub in_flight_max: usize,
    /// Its role among the tiers of a worker.
    pub role: TierRole,
}

/// The role of a tier among those of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TierRole {
    /// Stores registrations and reports too. The worker is unhealthy when this tier is.
    Primary,
    /// Stores data.
    Secondary,
    /// Stores cold data: large batches, and those of huge partitions. Each partition has files of its own, so a batch has one
    /// partition: after a failure no other partition is written again.
    Cold,
}

/// The names of a tier. Java and riffle have their own for the two that they know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TierNames {
    /// In the API and in logs.
    pub name: &'static str,
    /// In sentences.
    pub title: &'static str,
    /// As the value of the label `storage_type`.
    pub label: &'static str,
    /// In riffle's names of metrics.
    pub spill: &'static str,
    /// In Java's names of metrics of events.
    pub events: &'static str,
    /// In Java's names of metrics of queues.
    pub queue: &'static str,
}

impl TierNames {
    /// One name for everything.
    #[must_use]
    pub const fn plain(name: &'static str) -> Self {
        Self { name, title: name, label: name, spill: name, events: name, queue: name }
    }
}

/// What a shuffle has in a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TierUsage {
    /// Files.
    pub files: u64,
    /// Payload bytes.
    pub bytes: u64,
    /// Of those, in an object store.
    pub object_bytes: u64,
    /// What it occupies: payload, what aligns it, index groups, and on disks its records in the metadata log.
    pub occupied_bytes: u64,
}

/// Why shuffles are forgotten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purge {
    /// They go and their app stays.
    Shuffles,
    /// Their app goes.
    App(Cause),
}

/// Why an application goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// Its client said so.
    Unregistered,
    /// Its client was silent for too long.
    Expired,
}

/// Registers a shuffle with further ranges of partitions in the tier that has prepared it; cannot fail.
pub type Admission = Box<dyn Fn(&ShuffleKey, &[(i32, i32)]) + Send + Sync>;

/// Where a client wants a shuffle's cold data, as it says.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteStorage {
    /// Such as `hdfs://namenode:8020/uniffle`.
    pub path: String,
    /// Hadoop settings.
    pub conf: Vec<(String, String)>,
    /// The application's user.
    pub user: String,
    /// Writers per partition that it wants; none = the worker's choice.
    pub writers: Option<usize>,
}

/// Extents of one shuffle that are written together.
#[derive(Debug)]
pub struct TierBatch {
    /// One per partition. At least one.
    pub extents: Vec<ExtentWrite>,
    /// Whether it could not be written before, here or elsewhere.
    pub is_retry: bool,
    /// Payload of huge partitions in it.
    pub huge_bytes: u64,
    /// Whether the process ends: a batch that no tier takes is lost, so watermarks and earlier refusals are ignored.
    pub is_last: bool,
}

impl From<Vec<ExtentWrite>> for TierBatch {
    fn from(extents: Vec<ExtentWrite>) -> Self {
        Self { extents, is_retry: false, huge_bytes: 0, is_last: false }
    }
}

/// One partition's part of a batch. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ExtentWrite {
    /// The partition.
    pub partition: PartitionId,
    /// Its blocks, in the order of their bytes. At least one; none is empty.
    pub blocks: Vec<BlockMeta>,
    /// Bytes of all blocks.
    pub length: u64,
    /// The bytes.
    pub data: ExtentData,
}

/// The bytes of an extent.
#[derive(Debug, Clone)]
pub enum ExtentData {
    /// Page-aligned memory, in all `length` rounded up to 4 KiB, the tail zeroed: written as it lies.
    Aligned(Vec<Bytes>),
    /// Any memory, in all `length` bytes: gathered.
    Pieces(Vec<Bytes>),
}

impl ExtentData {
    pub(super) fn pieces(&self) -> &[Bytes] {
        match self {
            Self::Aligned(pieces) | Self::Pieces(pieces) => pieces,
        }
    }
}

impl ExtentWrite {
    /// Returns whether it has blocks, none of them empty, and their lengths agree with the bytes.
    pub(super) fn is_consistent(&self) -> bool {
        let blocks: u64 = self.blocks.iter().map(|block| u64::from(block.length)).sum();
        let bytes: u64 = self.data.pieces().iter().map(|piece| piece.len() as u64).sum();
        let stored = match self.data {
            ExtentData::Aligned(_) => self.length.next_multiple_of(BLOCK_ALIGN as u64),
            ExtentData::Pieces(_) => self.length,
        };
        let counted = !self.blocks.is_empty() && u32::try_from(self.blocks.len()).is_ok();
        counted
            && self.blocks.iter().all(|block| block.length > 0)
            && blocks == self.length
            && bytes == stored
    }

    /// The bytes without the padding behind them.
    #[must_use]
    pub fn payload(&self) -> Vec<Bytes> {
        let mut left = usize::try_from(self.length).unwrap_or(usize::MAX);
        let mut pieces = Vec::new();
        for piece in self.data.pieces() {
            let taken = piece.len().min(left);
            if taken > 0 {
                pieces.push(piece.slice(..taken));
            }
            left -= taken;
        }
        pieces
    }
}

/// What another machine would not find.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Drained {
    /// Shuffles of which some is only here, or may be: in a directory that is missing or could not be read.
    pub shuffles_left: usize,
    /// Their bytes that are on their way.
    pub bytes_left: u64,
    /// Bytes that cannot be moved: they, or what stands before them in their streams, are lost or cannot be read.
    pub stuck_bytes: u64,
}

/// The tiers of a worker, in the order in which a batch is offered to them.
#[derive(Debug, Clone, Default)]
pub struct Tiers(Arc<[Arc<dyn Tier>]>);

impl Tiers {
    /// `tiers`, the one that is to be tried first first.
    ///
    /// # Errors
    /// More than one is read through this worker: a reader sees one stream of a partition, whose offsets must not move.
    pub fn new(tiers: Vec<Arc<dyn Tier>>) -> Result<Self, StoreError> {
        if tiers.iter().filter(|tier| tier.served().is_some()).count() > 1 {
            let names = tiers.iter().map(|tier| tier.capability().names.name).collect::<Vec<_>>().join(", ");
            return Err(StoreError::new(StoreErrorKind::InvalidBatch, names));
        }
        Ok(Self(tiers.into()))
    }

    /// All, in order.
    pub fn iter(&self) -> std::slice::Iter<'_, Arc<dyn Tier>> {
        self.0.iter()
    }

    /// How many.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is nothing below memory.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The tier at a place of the order.
    #[must_use]
    pub fn at(&self, index: usize) -> &Arc<dyn Tier> {
        &self.0[index]
    }

    /// The tier that is read through this worker.
    #[must_use]
    pub fn served(&self) -> Option<&dyn ServedTier> {
        self.iter().find_map(|tier| tier.served())
    }

    /// Returns what a shuffle occupies in the tier that is read through this worker.
    #[must_use]
    pub fn occupied_bytes(&self, key: &ShuffleKey) -> u64 {
        self.iter().filter(|tier| tier.served().is_some()).map(|tier| tier.usage(key).occupied_bytes).sum()
    }

    /// The tier that keeps registrations and reports.
    #[must_use]
    pub fn metadata(&self) -> Option<&Arc<dyn Tier>> {
        self.iter().find(|tier| tier.capability().role == TierRole::Primary)
    }

    /// The tier of type `T`, for what only it has.
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
