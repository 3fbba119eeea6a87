//! What a tier finds at the start of a worker that an earlier process left there, and the heap that it may take.

use std::collections::HashMap;

use parking_lot::Mutex;

use crate::budget::{Budget, Heap, HeapKind};
use crate::durability::{PresentIds, Said};
use uniffle_wire::types::{AppId, ShuffleKey};

pub use crate::durability::LostExtent;

/// What was found of one shuffle.
#[derive(Debug)]
pub struct RecoveredShuffle {
    /// The shuffle.
    pub key: ShuffleKey,
    /// Why records may be missing; none when it is proven that none are.
    pub incomplete: Option<String>,
    /// Records of it are acknowledged once the object store has them.
    pub is_moved: bool,
    /// Blocks that can be read.
    pub present: PresentIds,
    /// Extents that are known and cannot be read.
    pub lost: Vec<LostExtent>,
    /// Why more may be missing than is known; empty when nothing is.
    pub reason: String,
}

/// What was found on all disks.
#[derive(Debug, Default)]
pub struct Recovered {
    /// Shuffles, in the order of their keys.
    pub shuffles: Vec<RecoveredShuffle>,
    /// Registrations and reports of all of them.
    pub said: Said,
    /// Data directories that were in use before and are not now.
    pub missing_disks: Vec<String>,
    /// Published bytes that can be read.
    pub bytes: u64,
    /// Their blocks.
    pub blocks: u64,
    /// How long it took.
    pub took: std::time::Duration,
}

/// Budgets of what a tier holds in the heap.
#[derive(Debug, Clone)]
pub struct TierHeap {
    /// Lists of extents.
    pub extents: Budget,
    /// Block ids that a start finds; none: they are not bounded.
    pub heap: Option<Heap>,
}

/// A tier whose recovery is not bounded.
impl From<&Budget> for TierHeap {
    fn from(extents: &Budget) -> Self {
        Self { extents: extents.clone(), heap: None }
    }
}

impl TierHeap {
    /// Returns the shares of the heap that applications have while a start reads what is there.
    pub(super) fn found_ids(&self) -> FoundIds {
        FoundIds { heap: self.heap.clone(), apps: Mutex::default() }
    }
}

/// Shares of the heap for ids that a start finds, by application.
#[derive(Debug)]
pub(super) struct FoundIds {
    heap: Option<Heap>,
    apps: Mutex<HashMap<AppId, Budget>>,
}

impl FoundIds {
    /// Forgets the shares, which live on in the tables that were made of them. For the end of a start.
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
