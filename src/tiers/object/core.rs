//! What all parts of the tier share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use object_store::ObjectStore;
use object_store::path::Path;

use super::condition::{Condition, failed};
use super::metrics::Metrics;
use super::settings::ObjectSettings;
use crate::budget::Budget;
use crate::metrics::clamped;
use crate::runtime::Tasks;
use crate::tiers::StoreError;
use crate::tiers::record_cache::RecordCache;

/// See the module.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) settings: ObjectSettings,
    pub(super) metrics: Metrics,
    pub(super) condition: Condition,
    pub(super) records: RecordCache,
    /// What is held of extents and open pages is charged to this.
    pub(super) extents: Budget,
    /// Uploads, which go on when who waits for them gives up.
    pub(super) tasks: Tasks,
    stored_bytes: AtomicU64,
}

impl Core {
    pub(super) fn new(
        store: Arc<dyn ObjectStore>,
        settings: ObjectSettings,
        metrics: Metrics,
        extents: Budget,
        tasks: Tasks,
    ) -> Self {
        let records = RecordCache::new(settings.index_cache_bytes);
        let stored_bytes = AtomicU64::new(0);
        let condition = Condition::default();
        Self { store, settings, metrics, condition, records, extents, tasks, stored_bytes }
    }

    /// Takes note of how a call went, and says for which object it was.
    pub(super) fn noted<T>(&self, key: &str, result: object_store::Result<T>) -> Result<T, StoreError> {
        let result = result.map_err(|error| failed(key, &error));
        self.condition.note(&result);
        result
    }

    /// Bytes of the segments of known shuffles.
    pub(super) fn stored_bytes(&self) -> u64 {
        self.stored_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn add_stored(&self, bytes: u64) {
        let before = self.stored_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.metrics.stored_bytes.set(clamped(before + bytes));
    }

    pub(super) fn take_stored(&self, bytes: u64) {
        let before = self.stored_bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.metrics.stored_bytes.set(clamped(before.saturating_sub(bytes)));
    }
}

/// A key as the store wants it: keys of this tier have nothing that it would write differently.
pub(super) fn path_of(key: &str) -> Path {
    Path::from(key)
}
