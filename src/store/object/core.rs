//! Settings and state shared by all parts of the tier.
//!
//! Invariant: the circuit breaker must know the results of reads and writes of the store
//! ([`ObjectCore::observe`]), but not the results of deletions. The claim is verified
//! ([`ObjectCore::require_claim`]) before metadata is acknowledged or objects of this worker's
//! shuffles are deleted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use futures::stream::TryStreamExt as _;
use object_store::{ObjectStore, ObjectStoreExt as _};
use tokio::sync::{Semaphore, watch};

use super::cache::Cache;
use super::circuit_breaker::{CircuitBreaker, failed};
use super::claim::Claim;
use super::layout::{Name, parse_key, path_of, settings_key, settings_prefix};
use super::metrics::Metrics;
use crate::metrics::clamped;
use crate::runtime::Tasks;
use crate::store::index::record_cache::RecordCache;
use crate::store::{SavedSettings, StoreError};
use uniffle_base::budget::Budget;
use uniffle_io::{DeviceShare, Disk};

/// Reads from the store get this fraction of the memory for reads, and so do reads from the cache.
const READS_DIVISOR: u64 = 3;

/// Sizes and limits of the tier. The address of the store and the settings of its client are in
/// `config`.
#[derive(Debug, Clone)]
pub struct ObjectSettings {
    /// Prefix of all keys, below the configured prefix: this worker's id in the cluster. Workers
    /// that run concurrently must have different prefixes.
    pub root: String,
    /// Payload size at which a segment takes no more batches.
    pub segment_bytes: u64,
    /// Size of a part of an upload. A segment with a smaller payload is uploaded with one request.
    pub part_bytes: usize,
    /// Maximum number of concurrently written batches. Batches of one shuffle share segments.
    pub writers: usize,
    /// Heap for records, extents and lists of pieces of segments that are being made.
    pub segment_heap_bytes: u64,
    /// Memory for reads of clients. Reads from the store and from the read cache may each use a
    /// part.
    pub read_memory_bytes: u64,
    /// Maximum number of open responses that are longer than one chunk of their reader. Each
    /// occupies a connection that waits for the reader, so there must be more connections.
    pub answers_ahead: usize,
    /// Memory for index records of segments.
    pub index_cache_bytes: u64,
    /// Disks of the read cache, which stores chunks of segments. Empty for no read cache.
    pub cache_disks: Vec<Arc<dyn Disk>>,
    /// Capacity of the read cache on all its disks.
    pub cache_bytes: u64,
}

impl ObjectSettings {
    /// Returns the defaults for a worker whose keys begin with `root`.
    #[must_use]
    pub fn new(root: impl Into<String>) -> Self {
        Self {
            root: root.into(),
            segment_bytes: 128 << 20,
            part_bytes: 8 << 20,
            writers: 16,
            segment_heap_bytes: 16 << 20,
            read_memory_bytes: 64 << 20,
            answers_ahead: 8,
            index_cache_bytes: 16 << 20,
            cache_disks: Vec::new(),
            cache_bytes: 0,
        }
    }
}

/// State of the tier, shared by its shuffles, reads and tasks.
#[derive(Debug)]
pub(in crate::store) struct ObjectCore {
    pub(in crate::store) store: Arc<dyn ObjectStore>,
    pub(in crate::store) settings: ObjectSettings,
    pub(in crate::store) metrics: Metrics,
    pub(in crate::store) circuit_breaker: CircuitBreaker,
    pub(in crate::store) claim: Claim,
    pub(in crate::store) records: RecordCache,
    /// Cached chunks of segments on local disks.
    pub(super) cache: Option<Cache>,
    /// Share of the memory for reads of each device: the store and the read cache.
    pub(super) store_reads: Arc<DeviceShare>,
    pub(super) cache_reads: Arc<DeviceShare>,
    /// Permits for responses that contain more than a reader's chunk. The reader may be slow to
    /// take the rest.
    pub(super) answers_ahead: Arc<Semaphore>,
    /// Heap budget for extents, indexes and the table of the read cache.
    pub(in crate::store) extents: Budget,
    /// Budget for segments under construction, without their blocks.
    pub(super) segment_heap: Budget,
    /// Tasks that continue when their caller is dropped, such as uploads.
    pub(in crate::store) tasks: Tasks,
    /// Number of deletions in progress.
    pub(in crate::store) deletions: watch::Sender<usize>,
    stored_bytes: AtomicU64,
    /// Number for the settings of this process, above that of the settings that were read.
    settings_start: AtomicU32,
}

impl ObjectCore {
    pub(super) async fn open(
        store: Arc<dyn ObjectStore>,
        claim: Claim,
        settings: ObjectSettings,
        metrics: Metrics,
        extents: Budget,
        tasks: Tasks,
    ) -> Self {
        let cache = Cache::open(&settings.cache_disks, settings.cache_bytes, &extents).await;
        if let Some(cache) = &cache {
            metrics.cache_capacity_bytes.set(clamped(cache.capacity_bytes()));
        }
        let reads_bytes = settings.read_memory_bytes / READS_DIVISOR;
        Self {
            records: RecordCache::new(settings.index_cache_bytes),
            cache,
            store_reads: DeviceShare::new(reads_bytes),
            cache_reads: DeviceShare::new(reads_bytes),
            answers_ahead: Arc::new(Semaphore::new(settings.answers_ahead)),
            segment_heap: Budget::new(settings.segment_heap_bytes),
            circuit_breaker: CircuitBreaker::default(),
            settings_start: AtomicU32::new(claim.start()),
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

    /// Checks that this process still owns the worker's prefix ([`Claim`]).
    ///
    /// # Errors
    /// The store fails, or another process owns the prefix.
    pub(in crate::store) async fn require_claim(&self) -> Result<(), StoreError> {
        let claimed = self.claim.require(&*self.store).await;
        self.circuit_breaker.note(&claimed);
        claimed
    }

    /// Writes whether the store has all data of the local disks ([`Claim::set_drained`]).
    ///
    /// # Errors
    /// See [`Claim::set_drained`].
    pub(super) async fn set_drained(&self, is_drained: bool) -> Result<(), StoreError> {
        let written = self.claim.set_drained(&*self.store, is_drained).await;
        self.circuit_breaker.note(&written);
        written
    }

    /// Records the result of a call for the object `key`, and converts its error.
    pub(in crate::store) fn observe<T>(
        &self,
        key: &str,
        result: object_store::Result<T>,
    ) -> Result<T, StoreError> {
        let result = result.map_err(|error| failed(key, &error));
        self.circuit_breaker.note(&result);
        result
    }

    /// Returns the bytes of the segments of all known shuffles.
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

/// Settings made at run time. Each process writes an object of its own, whose key has the number of
/// its start. So a late request of an earlier process replaces nothing. A start reads the object
/// with the greatest number and deletes the others.
impl SavedSettings for ObjectCore {
    fn read(&self) -> BoxFuture<'_, Result<Option<Bytes>, StoreError>> {
        let read = async {
            let (root, mut starts) = (&self.settings.root, Vec::new());
            let prefix = settings_prefix(root);
            let mut listed = self.store.list(Some(&path_of(&prefix)));
            while let Some(object) = self.observe(&prefix, listed.try_next().await)? {
                if let Some(Name::Settings(start)) = parse_key(root, object.location.as_ref()) {
                    starts.push(start);
                }
            }
            starts.sort_unstable();
            let Some(latest) = starts.pop() else { return Ok(None) };
            // Greater than the claim's number if another program deleted the claim.
            self.settings_start.fetch_max(latest.saturating_add(1), Ordering::Relaxed);
            let key = settings_key(root, latest);
            let answer = async { self.store.get(&path_of(&key)).await?.bytes().await };
            let text = self.observe(&key, answer.await)?;
            for start in starts {
                // The next start deletes the rest.
                let _: Result<(), _> = self.store.delete(&path_of(&settings_key(root, start))).await;
            }
            Ok(Some(text))
        };
        read.boxed()
    }

    fn save(&self, text: Bytes) -> BoxFuture<'_, Result<(), StoreError>> {
        let save = async move {
            self.require_claim().await?;
            let key = settings_key(&self.settings.root, self.settings_start.load(Ordering::Relaxed));
            let put = self.store.put(&path_of(&key), text.into()).await;
            self.observe(&key, put).map(drop)
        };
        save.boxed()
    }
}
