//! The objects of one registration of a shuffle: their counts, and the queue of batches that wait
//! for a segment. The local store has the shuffle's extents.
//!
//! Invariant: one segment is made at a time (`segment_numbers`), because its tail refers to the
//! previous one. Without disks, its bases also continue the streams after the previous one.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::core::ObjectCore;
use super::layout::{Registered, segment_key, shuffle_prefix};
use super::upload::queue::UploadQueue;
use super::upload::segment::{SegmentNumbers, UploadJob};
use crate::store::extents::extent::Extent;
use crate::store::index::record_cache::RecordsKey;
use crate::store::{StoreError, StoreErrorKind, TierUsage};

/// Duration of an outage during which readers are told to retry. Afterwards they get an error.
const EXPECTED_BACK: Duration = Duration::from_secs(120);

/// State of the registration: statistics, and waiting batches.
#[derive(Debug)]
pub(in crate::store) struct ObjectShuffle {
    pub(in crate::store) name: Registered,
    /// Prefix of the keys of its objects.
    pub(in crate::store) prefix: String,
    purged: AtomicBool,
    /// True if a read did not find a segment, and the segments were not checked since.
    has_missed: AtomicBool,
    segments: AtomicU64,
    payload_bytes: AtomicU64,
    stored_bytes: AtomicU64,
    /// Batches waiting for a segment.
    pub(super) queue: UploadQueue<UploadJob>,
    /// Held while a segment is made.
    pub(in crate::store) segment_numbers: tokio::sync::Mutex<SegmentNumbers>,
}

/// Returns the key of an extent's records in the cache.
pub(super) fn records_key(incarnation: u64, extent: &Extent) -> RecordsKey {
    RecordsKey { incarnation, log: extent.object(), offset: extent.records_range().start }
}

impl ObjectShuffle {
    pub(in crate::store) fn new(core: &ObjectCore, name: Registered) -> Self {
        Self::restored(core, name, SegmentNumbers::default())
    }

    /// Creates the state of a recovered registration.
    pub(in crate::store) fn restored(
        core: &ObjectCore,
        name: Registered,
        segment_numbers: SegmentNumbers,
    ) -> Self {
        let prefix = shuffle_prefix(&core.settings.root, &name);
        Self {
            prefix,
            name,
            purged: AtomicBool::new(false),
            has_missed: AtomicBool::new(false),
            segments: AtomicU64::new(0),
            payload_bytes: AtomicU64::new(0),
            stored_bytes: AtomicU64::new(0),
            queue: UploadQueue::default(),
            segment_numbers: tokio::sync::Mutex::new(segment_numbers),
        }
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
    pub(super) fn for_reader(&self, core: &ObjectCore, error: StoreError) -> StoreError {
        // If the claim is lost, the process that has it may have deleted the shuffle's segments.
        if error.kind == StoreErrorKind::NotFound && !core.claim.is_lost() {
            self.set_missed();
        }
        let error = core.circuit_breaker.for_reader(error, EXPECTED_BACK);
        self.require_present().err().unwrap_or(error)
    }

    /// Returns whether a read did not find a segment, and the segments were not checked since.
    pub(super) fn has_missed(&self) -> bool {
        self.has_missed.load(Ordering::Acquire)
    }

    /// Notes that a read did not find a segment.
    pub(super) fn set_missed(&self) {
        self.has_missed.store(true, Ordering::Release);
    }

    /// Notes that the segments are being checked. Returns [`has_missed`](Self::has_missed) before.
    pub(super) fn take_missed(&self) -> bool {
        self.has_missed.swap(false, Ordering::AcqRel)
    }

    pub(in crate::store) fn segment_key(&self, number: u32) -> String {
        segment_key(&self.prefix, number)
    }

    pub(super) fn records_key(&self, extent: &Extent) -> RecordsKey {
        records_key(self.name.incarnation, extent)
    }

    /// Counts a stored segment. The store's total does not include it if the registration is
    /// purged, also at the same time.
    pub(in crate::store) fn count(&self, core: &ObjectCore, payload_bytes: u64, bytes: u64) {
        self.segments.fetch_add(1, Ordering::Relaxed);
        self.payload_bytes.fetch_add(payload_bytes, Ordering::Relaxed);
        core.add_stored(bytes);
        self.stored_bytes.fetch_add(bytes, Ordering::AcqRel);
        // `forget` either finds these bytes, or has set `purged` before this load.
        if self.is_purged() {
            self.take_stored(core);
        }
    }

    fn take_stored(&self, core: &ObjectCore) {
        core.take_stored(self.stored_bytes.swap(0, Ordering::AcqRel));
    }

    pub(super) fn usage(&self) -> TierUsage {
        let (files, bytes) =
            (self.segments.load(Ordering::Relaxed), self.payload_bytes.load(Ordering::Relaxed));
        let occupied_bytes = self.stored_bytes.load(Ordering::Relaxed);
        TierUsage { files, bytes, object_bytes: bytes, occupied_bytes }
    }

    /// Marks the registration as purged: later writes fail with `Purged`.
    pub(super) fn forget(&self, core: &ObjectCore) {
        self.purged.store(true, Ordering::Release);
        self.take_stored(core);
    }
}
