//! What all parts of the tier share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use object_store::{ObjectMeta, ObjectStore};
use tokio::sync::{Semaphore, watch};

use super::cache::Cache;
use super::claim::Claim;
use super::condition::{Condition, failed};
use super::metrics::Metrics;
use super::settings::ObjectSettings;
use super::shuffle::Shuffle;
use super::turns::Turns;
use crate::budget::Budget;
use crate::metrics::clamped;
use crate::runtime::Tasks;
use crate::tiers::StoreError;
use crate::tiers::record_cache::RecordCache;

/// One for the tier, which its shuffles, reads and tasks hold.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) settings: ObjectSettings,
    pub(super) metrics: Metrics,
    pub(super) condition: Condition,
    claim: Claim,
    pub(super) records: RecordCache,
    /// Of segments, on local disks.
    pub(super) cache: Option<Cache>,
    pub(super) turns: Turns,
    /// Answers that go on with the next chunk of their readers, who may be slow to take it.
    pub(super) answers_ahead: Arc<Semaphore>,
    /// What is held of extents and open pages is charged to this.
    pub(super) extents: Budget,
    /// All that segments in the making hold beside their blocks.
    pub(super) making: Budget,
    /// Uploads, which go on when who waits for them gives up.
    pub(super) tasks: Tasks,
    /// How many deletions are under way.
    pub(super) deletions: watch::Sender<usize>,
    stored_bytes: AtomicU64,
}

impl Core {
    pub(super) async fn open(
        (store, claim): (Arc<dyn ObjectStore>, Claim),
        settings: ObjectSettings,
        metrics: Metrics,
        extents: Budget,
        tasks: Tasks,
    ) -> Self {
        let cache = Cache::open(&settings.cache_disks, settings.cache_bytes, &extents).await;
        if let Some(cache) = &cache {
            metrics.cache_capacity_bytes.set(clamped(cache.capacity_bytes()));
        }
        Self {
            records: RecordCache::new(settings.index_cache_bytes),
            cache,
            turns: Turns::new(settings.read_memory_bytes),
            answers_ahead: Arc::new(Semaphore::new(settings.answers_ahead)),
            making: Budget::new(settings.making_bytes),
            condition: Condition::default(),
            claim,
            deletions: watch::Sender::new(0),
            stored_bytes: AtomicU64::new(0),
            store,
            settings,
            metrics,
            extents,
            tasks,
        }
    }

    /// Whether the worker's prefix is still this process's ([`Claim`]).
    ///
    /// # Errors
    /// The store's, or another process has it.
    pub(super) async fn require_claim(&self) -> Result<(), StoreError> {
        let claimed = self.claim.require(&*self.store).await;
        self.condition.note(&claimed);
        claimed
    }

    /// [`Claim::start`].
    pub(super) fn claim_start(&self) -> u32 {
        self.claim.start()
    }

    /// [`Claim::is_listed`].
    ///
    /// # Errors
    /// As there.
    pub(super) async fn is_claim_listed(&self, listed: Option<&ObjectMeta>) -> Result<bool, StoreError> {
        self.claim.is_listed(&*self.store, listed).await
    }

    /// [`Claim::is_drained`].
    pub(super) fn is_drained(&self) -> bool {
        self.claim.is_drained()
    }

    /// [`Claim::set_drained`].
    ///
    /// # Errors
    /// As there.
    pub(super) async fn set_drained(&self, is_drained: bool) -> Result<(), StoreError> {
        let written = self.claim.set_drained(&*self.store, is_drained).await;
        self.condition.note(&written);
        written
    }

    /// Whether another process has the prefix, as far as was looked.
    pub(super) fn has_lost_claim(&self) -> bool {
        self.claim.is_lost()
    }

    /// Takes note of how a call went, and says for which object it was.
    pub(super) fn noted<T>(&self, key: &str, result: object_store::Result<T>) -> Result<T, StoreError> {
        let result = result.map_err(|error| failed(key, &error));
        self.condition.note(&result);
        result
    }

    /// Returns the error of a failed read for its client.
    pub(super) fn for_reader(&self, shuffle: &Shuffle, error: StoreError) -> StoreError {
        let error = self.condition.for_reader(error, self.settings.expected_back);
        shuffle.require_present().err().unwrap_or(error)
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
