//! State that a tier recovers at start, and the heap that it may occupy.
//!
//! Disks above an object store receive the data in the store ([`Stored`]) before they are read.
//! Extents in objects are not expected on the disks. Files without other extents are removed,
//! unless records may be missing.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use parking_lot::Mutex;

use crate::log::{LogInStore, PresentIds, RecordReader};
use crate::store::extents::extent::Extent;
use uniffle_base::budget::{Budget, Charge, Heap, HeapKind};
use uniffle_wire::types::{AppId, PartitionId, ShuffleKey};

pub use crate::log::LostExtent;

/// Recovered state of one shuffle.
#[derive(Debug)]
pub struct RecoveredShuffle {
    /// Key of the shuffle.
    pub key: ShuffleKey,
    /// Reason why records may be missing, or `None` if they are proven to be complete.
    pub incomplete: Option<String>,
    /// True if its records are acknowledged once the object store has them.
    pub is_moved: bool,
    /// Readable blocks.
    pub present: PresentIds,
    /// Known extents that cannot be read.
    pub lost: Vec<LostExtent>,
    /// Reason why unknown blocks may be missing, or empty.
    pub reason: String,
}

/// Recovered state of a tier.
#[derive(Debug, Default)]
pub struct Recovered {
    /// Shuffles, ordered by their keys.
    pub shuffles: Vec<RecoveredShuffle>,
    /// Registrations and reports of all shuffles.
    pub records: RecordReader,
    /// Data directories that were in use before and are missing now.
    pub missing_disks: Vec<String>,
    /// Number of readable published bytes.
    pub bytes: u64,
    /// Number of readable blocks.
    pub blocks: u64,
    /// Duration of the recovery.
    pub took: std::time::Duration,
}

/// Data of a registration in the object store.
#[derive(Debug)]
pub struct StoredShuffle {
    /// Incarnation of the registration.
    pub(in crate::store) incarnation: u64,
    /// Extents of each partition, by base and without overlaps.
    pub(in crate::store) extents: HashMap<PartitionId, BTreeMap<u64, Extent>>,
    /// Blocks of these extents.
    pub(in crate::store) present: PresentIds,
    /// Reason why unknown blocks may be missing, or empty.
    pub(in crate::store) reason: String,
    /// Memory of the extents.
    pub(in crate::store) _charge: Charge,
}

/// Returns an extent that overlaps a part of a partition's stream.
pub(in crate::store) fn overlapping(extents: &BTreeMap<u64, Extent>, place: Range<u64>) -> Option<&Extent> {
    let before = extents.range(..place.end).next_back().map(|(_, extent)| extent);
    before.filter(|extent| extent.base + extent.length > place.start)
}

/// Data of all shuffles in the object store.
#[derive(Debug, Default)]
pub struct Stored {
    /// Registrations with data.
    pub shuffles: HashMap<ShuffleKey, StoredShuffle>,
    /// Lower bound of new incarnations. Registrations of several machines must not be mistaken for
    /// each other.
    pub incarnations_from: u64,
    /// The part of the metadata log in the object store.
    pub log: Option<LogInStore>,
}

/// Heap budgets of a tier.
#[derive(Debug, Clone)]
pub struct TierHeap {
    /// Budget of lists of extents.
    pub extents: Budget,
    /// Heap for block ids found at start, or `None` for no bound.
    pub heap: Option<Heap>,
}

/// Heap of a tier whose recovery is not bounded.
impl From<&Budget> for TierHeap {
    fn from(extents: &Budget) -> Self {
        Self { extents: extents.clone(), heap: None }
    }
}

impl TierHeap {
    /// Returns the heap shares of applications during the recovery.
    pub(super) fn found_ids(&self) -> FoundIds {
        FoundIds { heap: self.heap.clone(), apps: Mutex::default() }
    }
}

/// Heap shares for ids found at start, by application.
#[derive(Debug)]
pub(super) struct FoundIds {
    heap: Option<Heap>,
    apps: Mutex<HashMap<AppId, Budget>>,
}

impl FoundIds {
    /// Drops the shares at the end of the recovery. Tables created from them keep them alive.
    pub(super) fn end(&self) {
        self.apps.lock().clear();
    }

    /// Returns an empty table of a shuffle, charged to its application.
    pub(super) fn of(&self, key: &ShuffleKey) -> PresentIds {
        let share = || match &self.heap {
            Some(heap) => heap.of_one_app(HeapKind::ReportedIds),
            None => Budget::new(u64::MAX),
        };
        PresentIds::new(self.apps.lock().entry(key.app.clone()).or_insert_with(share))
    }
}
