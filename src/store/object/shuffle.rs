//! A registration of a shuffle in the tier.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::RwLock;

use super::core::Core;
use super::layout::{Registered, segment_key, shuffle_prefix};
use super::upload::group::Group;
use super::upload::lane::{Job, Lane};
use crate::log::Incarnation;
use crate::store::extents::extent::{Extent, ExtentList};
use crate::store::extents::streams::{Partition, Streams};
use crate::store::index::record_cache::RecordsKey;
use crate::store::{StoreError, StoreErrorKind, TierUsage};
use uniffle_wire::types::PartitionId;

/// State of the registration: published extents, statistics, and waiting batches.
#[derive(Debug)]
pub(in crate::store) struct Shuffle {
    pub(in crate::store) name: Registered,
    /// Prefix of the keys of its objects.
    pub(in crate::store) prefix: String,
    purged: AtomicBool,
    /// True once the store has a record of the registration.
    is_known: AtomicBool,
    streams: RwLock<Streams>,
    segments: AtomicU64,
    payload_bytes: AtomicU64,
    stored_bytes: AtomicU64,
    /// Batches waiting for a segment.
    pub(super) queue: Group<Job>,
    /// Held while a segment is made, because its bases follow those of the previous segment.
    pub(in crate::store) lane: tokio::sync::Mutex<Lane>,
}

impl Shuffle {
    pub(in crate::store) fn new(core: &Core, name: Registered) -> Self {
        Self::restored(core, name, (Streams::new(&core.extents), Lane::default()))
    }

    /// Creates the state of a recovered registration.
    pub(in crate::store) fn restored(
        core: &Core,
        name: Registered,
        (streams, lane): (Streams, Lane),
    ) -> Self {
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

    /// Returns whether the store has a record of the registration.
    pub(super) fn is_known(&self) -> bool {
        self.is_known.load(Ordering::Acquire)
    }

    pub(in crate::store) fn set_known(&self) {
        self.is_known.store(true, Ordering::Release);
    }

    /// Returns the id of the registration in the metadata log.
    pub(in crate::store) fn incarnation(&self) -> Incarnation {
        Incarnation { key: self.name.key.clone(), number: self.name.incarnation }
    }

    pub(in crate::store) fn error(&self, kind: StoreErrorKind) -> StoreError {
        StoreError::new(kind, self.name.key.to_string())
    }

    pub(super) fn is_purged(&self) -> bool {
        self.purged.load(Ordering::Acquire)
    }

    pub(super) fn require_present(&self) -> Result<(), StoreError> {
        if self.is_purged() { Err(self.error(StoreErrorKind::Purged)) } else { Ok(()) }
    }

    /// Converts the error of a failed read for its client.
    pub(super) fn for_reader(&self, core: &Core, error: StoreError) -> StoreError {
        let error = core.circuit_breaker.for_reader(error, core.settings.expected_back);
        self.require_present().err().unwrap_or(error)
    }

    pub(in crate::store) fn segment_key(&self, number: u32) -> String {
        segment_key(&self.prefix, number)
    }

    pub(super) fn records_key(&self, extent: &Extent) -> RecordsKey {
        let (log, offset) = (extent.object(), extent.records_range().start);
        RecordsKey { incarnation: self.name.incarnation, log, offset }
    }

    /// Returns the published state of a partition.
    pub(in crate::store) fn stream(&self, partition: PartitionId) -> Partition {
        self.streams.read().get(partition).cloned().unwrap_or_default()
    }

    /// Returns the extents that cover a `range` of a partition's stream (see [`ExtentList::part`]),
    /// or `None` if the range is not completely published.
    pub(super) fn part(&self, partition: PartitionId, range: &Range<u64>) -> Option<ExtentList> {
        let streams = self.streams.read();
        let stream = streams.get(partition).filter(|stream| range.end <= stream.bytes)?;
        Some(stream.extents.part(range.start, range.end))
    }

    pub(super) fn stream_bytes(&self, partition: PartitionId) -> u64 {
        self.streams.read().get(partition).map_or(0, |stream| stream.bytes)
    }

    /// Makes all extents of a segment visible at once.
    ///
    /// # Errors
    /// `Purged`: no extent is visible.
    pub(super) fn publish(&self, extents: &[(PartitionId, Extent)]) -> Result<(), StoreError> {
        let mut streams = self.streams.write();
        self.require_present()?;
        for (partition, extent) in extents {
            streams.push(*partition, *extent, 0);
        }
        Ok(())
    }

    /// Counts a stored segment.
    pub(in crate::store) fn count(&self, core: &Core, payload_bytes: u64, bytes: u64) {
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

    /// Marks the registration as purged: later writes fail with `Purged`, and reads find no data.
    /// Returns its extents for [`Shuffle::leave_caches`].
    pub(super) fn forget(&self, core: &Core) -> Streams {
        core.take_stored(self.stored_bytes.swap(0, Ordering::Relaxed));
        let mut streams = self.streams.write();
        self.purged.store(true, Ordering::Release);
        streams.take()
    }

    /// Drops extents returned by [`Shuffle::forget`], and their entries in the caches. Walks over
    /// all extents and chunks, so it must not run on a runtime thread or under a lock. Without this
    /// call the entries are unreachable and are evicted as least recently used.
    pub(super) fn leave_caches(&self, core: &Core, had: Streams) {
        core.records.forget(had.extents().map(|extent| self.records_key(extent)));
        if let Some(cache) = &core.cache {
            cache.forget(&core.metrics, self.name.incarnation);
        }
    }
}
