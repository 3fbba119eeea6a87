//! One registration of a shuffle in the tier.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::RwLock;

use super::core::Core;
use super::group::Group;
use super::lane::{Job, Lane};
use super::layout::{Registered, segment_key, shuffle_prefix};
use crate::durability::Incarnation;
use crate::tiers::extent::{Extent, ExtentList};
use crate::tiers::record_cache::RecordsKey;
use crate::tiers::streams::{Partition, Streams};
use crate::tiers::{StoreError, StoreErrorKind, TierUsage};
use uniffle_wire::types::PartitionId;

/// What it has in the store, and what is on its way there.
#[derive(Debug)]
pub(super) struct Shuffle {
    pub(super) name: Registered,
    /// Of its objects' keys.
    pub(super) prefix: String,
    purged: AtomicBool,
    /// The store knows a record of it.
    is_known: AtomicBool,
    streams: RwLock<Streams>,
    segments: AtomicU64,
    payload_bytes: AtomicU64,
    stored_bytes: AtomicU64,
    /// Batches that wait for a segment.
    pub(super) queue: Group<Job>,
    /// Held while a segment is made: its bases follow those of the one before.
    pub(super) lane: tokio::sync::Mutex<Lane>,
}

impl Shuffle {
    pub(super) fn new(core: &Core, name: Registered) -> Self {
        Self::restored(core, name, (Streams::new(&core.extents), Lane::default()))
    }

    /// Returns one that an earlier process left.
    pub(super) fn restored(core: &Core, name: Registered, (streams, lane): (Streams, Lane)) -> Self {
        let prefix = shuffle_prefix(&core.settings.root, &name);
        Self {
            prefix,
            name,
            purged: AtomicBool::new(false),
            is_known: AtomicBool::new(false),
            streams: RwLock::new(streams),
            segments: AtomicU64::new(0),
            payload_bytes: AtomicU64::new(0),
            stored_bytes: AtomicU64::new(0),
            queue: Group::default(),
            lane: tokio::sync::Mutex::new(lane),
        }
    }

    /// Returns whether the store knows a record of it.
    pub(super) fn is_known(&self) -> bool {
        self.is_known.load(Ordering::Acquire)
    }

    pub(super) fn set_known(&self) {
        self.is_known.store(true, Ordering::Release);
    }

    /// Returns the registration as the metadata log names it.
    pub(super) fn incarnation(&self) -> Incarnation {
        Incarnation { key: self.name.key.clone(), number: self.name.incarnation }
    }

    pub(super) fn error(&self, kind: StoreErrorKind) -> StoreError {
        StoreError::new(kind, self.name.key.to_string())
    }

    pub(super) fn is_purged(&self) -> bool {
        self.purged.load(Ordering::Acquire)
    }

    pub(super) fn require_present(&self) -> Result<(), StoreError> {
        if self.is_purged() { Err(self.error(StoreErrorKind::Purged)) } else { Ok(()) }
    }

    /// Returns the error of a failed read for its client.
    pub(super) fn for_reader(&self, core: &Core, error: StoreError) -> StoreError {
        let error = core.condition.for_reader(error, core.settings.expected_back);
        self.require_present().err().unwrap_or(error)
    }

    pub(super) fn segment_key(&self, number: u32) -> String {
        segment_key(&self.prefix, number)
    }

    pub(super) fn records_key(&self, extent: &Extent) -> RecordsKey {
        let (log, offset) = (extent.object(), extent.records_range().start);
        RecordsKey { incarnation: self.name.incarnation, log, offset }
    }

    /// What is published of a partition.
    pub(super) fn stream(&self, partition: PartitionId) -> Partition {
        self.streams.read().get(partition).cloned().unwrap_or_default()
    }

    /// The extents that hold a `range` of a partition's stream, as [`ExtentList::part`]; none when it is not wholly published.
    pub(super) fn part(&self, partition: PartitionId, range: &Range<u64>) -> Option<ExtentList> {
        let streams = self.streams.read();
        let stream = streams.get(partition).filter(|stream| range.end <= stream.bytes)?;
        Some(stream.extents.part(range.start, range.end))
    }

    pub(super) fn stream_bytes(&self, partition: PartitionId) -> u64 {
        self.streams.read().get(partition).map_or(0, |stream| stream.bytes)
    }

    /// Makes a segment's extents visible, all or none.
    ///
    /// # Errors
    /// `Purged`.
    pub(super) fn publish(&self, extents: &[(PartitionId, Extent)]) -> Result<(), StoreError> {
        let mut streams = self.streams.write();
        self.require_present()?;
        for (partition, extent) in extents {
            streams.push(*partition, *extent, 0);
        }
        Ok(())
    }

    /// Counts a segment that is there.
    pub(super) fn count(&self, core: &Core, payload_bytes: u64, bytes: u64) {
        self.segments.fetch_add(1, Ordering::Relaxed);
        self.payload_bytes.fetch_add(payload_bytes, Ordering::Relaxed);
        self.stored_bytes.fetch_add(bytes, Ordering::Relaxed);
        core.add_stored(bytes);
    }

    pub(super) fn usage(&self) -> TierUsage {
        let (files, bytes) =
            (self.segments.load(Ordering::Relaxed), self.payload_bytes.load(Ordering::Relaxed));
        let occupied_bytes = self.stored_bytes.load(Ordering::Relaxed);
        TierUsage { files, bytes, object_bytes: bytes, occupied_bytes }
    }

    /// From now on writes end with `Purged`, and nothing is found. What it had, for [`Shuffle::leave_caches`].
    pub(super) fn forget(&self, core: &Core) -> Streams {
        core.take_stored(self.stored_bytes.swap(0, Ordering::Relaxed));
        let mut streams = self.streams.write();
        self.purged.store(true, Ordering::Release);
        streams.take()
    }

    /// Takes out of the caches what it `had` when it was forgotten, and drops it: a walk over all extents and chunks, not for a
    /// runtime thread, nor under a lock. Without it nothing finds them, and they leave as the least recently used.
    pub(super) fn leave_caches(&self, core: &Core, had: Streams) {
        core.records.forget(had.extents().map(|extent| self.records_key(extent)));
        if let Some(cache) = &core.cache {
            cache.forget(&core.metrics, self.name.incarnation);
        }
    }
}
