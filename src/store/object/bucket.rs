//! The objects of the worker: what a start finds, the registrations with objects, and the metadata
//! log in the store. The tier on it is `offload`, with or without local disks.
//!
//! Invariant: objects of a removed shuffle are deleted only once the store has the log up to its
//! end, and only while this process has the claim of its prefix.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dashmap::DashMap;
use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _};
use object_store::ObjectStore;
use parking_lot::Mutex;
use prometheus::Registry;
use tokio::sync::{RwLock, RwLockReadGuard};

use super::cache::Cache;
use super::claim::Claim;
use super::core::{ObjectCore, ObjectSettings};
use super::layout::{Registered, part_of, path_of, shuffle_prefix};
use super::log_objects::StoredLog;
use super::metrics::Metrics;
use super::shuffle::{ObjectShuffle, records_key};
use super::upload::intake::Uploads;
use super::workers::{self, RemovalReport, WorkerObjects};
use crate::clock::{Instant, timeout_at};
use crate::log::{LogInStore, Shipper};
use crate::runtime::Tasks;
use crate::store::recovery::objects::survey;
use crate::store::removal::deletion_queue::DetachedShuffle;
use crate::store::removal::object_purge::{self, DeletionScope, DetachedApp};
use crate::store::{ObjectStoreState, Purge, SavedSettings, StoreError, StoreErrorKind, Stored, TierUsage};
use uniffle_base::budget::Budget;
use uniffle_wire::types::{AppId, ShuffleKey};

/// Interval of probes of a failing store.
const PROBE_INTERVAL: Duration = Duration::from_secs(5);

/// Number of probe intervals between checks of the claim.
const PROBES_PER_CLAIM: u32 = 6;

/// Maximum time to wait until the store has the end of an earlier registration. Shorter than the
/// timeout of clients, which is a minute.
const ENDS_WAIT: Duration = Duration::from_secs(20);
const ENDS_PAUSE: Duration = Duration::from_secs(1);

/// The objects of this worker in an object store.
#[derive(Debug)]
pub struct Bucket {
    pub(in crate::store) core: Arc<ObjectCore>,
    shuffles: DashMap<ShuffleKey, Arc<ObjectShuffle>>,
    log: Shipper,
    next_incarnation: AtomicU64,
    /// Held for reading while data or records come to the local disks, and for writing while the
    /// claim changes.
    disk_writes: RwLock<()>,
    /// Recovered state, until it is taken.
    found: Mutex<Option<Stored>>,
}

impl Bucket {
    /// Claims the worker's prefix and recovers the state of the previous process. Extents are
    /// charged to `extents`, even beyond its capacity. Uploads run as tasks of `tasks`.
    ///
    /// # Errors
    /// The store does not answer or refuses, another process of the worker starts at the same time,
    /// or `registry` has the metrics already.
    pub async fn open(
        store: Arc<dyn ObjectStore>,
        settings: ObjectSettings,
        extents: &Budget,
        tasks: Tasks,
        registry: &Registry,
    ) -> Result<Arc<Self>, StoreError> {
        let metrics = Metrics::new(registry);
        let metrics = metrics.map_err(|error| StoreError::io("metrics", std::io::Error::other(error)))?;
        let claim = Claim::take(&*store, &settings.root).await?;
        let core = Arc::new(ObjectCore::open(store, claim, settings, metrics, extents.clone(), tasks).await);
        let survey = survey(&core).await?;
        let start = core.claim.start().max(survey.log.last_start().saturating_add(1));
        let objects = Arc::new(StoredLog(Arc::clone(&core)));
        let log = Shipper::open(objects, &survey.log, start, &core.extents, &core.tasks);
        let (objects, mut strays, mut shuffles) = (DashMap::new(), Vec::new(), HashMap::new());
        for found in survey.found {
            strays.extend(found.strays);
            shuffles.insert(found.shuffle.name.key.clone(), found.stored);
            objects.insert(found.shuffle.name.key.clone(), found.shuffle);
        }
        clean_up(&core, survey.abandoned, strays);
        let incarnations_from = numbers_from(survey.next_incarnation);
        let in_store = LogInStore { found: survey.log, shipper: log.clone() };
        let stored = Stored { shuffles, incarnations_from, log: Some(in_store) };
        let (next_incarnation, found) = (AtomicU64::new(incarnations_from), Mutex::new(Some(stored)));
        let disk_writes = RwLock::default();
        Ok(Arc::new(Self { core, shuffles: objects, log, next_incarnation, disk_writes, found }))
    }

    /// Checks that no earlier development build has written below the prefix `root`. Writes
    /// nothing.
    ///
    /// # Errors
    /// `NotOurs` if one has. The store does not answer or refuses.
    pub async fn require_layout(store: &dyn ObjectStore, root: &str) -> Result<(), StoreError> {
        Claim::require_layout(store, root).await
    }

    /// Takes the state found at start for the local store, which owns the log from now on. Returns
    /// `None` from the second call on.
    pub fn take_found(&self) -> Option<Stored> {
        self.found.lock().take()
    }

    /// Returns the handle of the metadata log in the store.
    #[must_use]
    pub fn log(&self) -> &Shipper {
        &self.log
    }

    /// Waits until the store has all entries of the log up to `position`.
    ///
    /// # Errors
    /// The store does not accept them now.
    pub async fn known(&self, position: u64) -> Result<(), StoreError> {
        self.log.known(position).await.map_err(|error| StoreError::of_log(&error, &self.core.settings.root))
    }

    /// Returns whether the claim in the store says that the store has all data of the local disks.
    /// At a start, the previous process has written that.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.core.claim.is_drained()
    }

    /// Records whether the store has all data of the local disks (`is_drained`), for a start with
    /// empty disks. Does nothing while the disks receive data, because the store has no such record
    /// then. Sends no request if the state is already recorded.
    ///
    /// # Errors
    /// The store does not answer or refuses, or another process has the prefix.
    pub async fn set_drained(&self, is_drained: impl FnOnce() -> bool + Send) -> Result<(), StoreError> {
        let Ok(_alone) = self.disk_writes.try_write() else { return Ok(()) };
        self.core.set_drained(is_drained()).await
    }

    /// Ensures that the store does not accept a start with empty disks, as long as the returned
    /// guard lives. Required before data or records of which the store has no copy come to the
    /// disks.
    ///
    /// # Errors
    /// See [`Bucket::set_drained`].
    pub async fn require_disks(&self) -> Result<RwLockReadGuard<'_, ()>, StoreError> {
        loop {
            let writing = self.disk_writes.read().await;
            if !self.core.claim.may_be_drained() {
                return Ok(writing);
            }
            drop(writing);
            let _alone = self.disk_writes.write().await;
            self.core.set_drained(false).await?;
        }
    }

    /// Registers a shuffle with data here, with its incarnation in the local store. May be
    /// repeated.
    ///
    /// # Errors
    /// `Purged` if another registration of the shuffle is here.
    pub fn begin(&self, key: &ShuffleKey, incarnation: u64) -> Result<Uploads, StoreError> {
        let name = Registered { key: key.clone(), incarnation };
        self.next_incarnation.fetch_max(incarnation.saturating_add(1), Ordering::Relaxed);
        let create = || Arc::new(ObjectShuffle::new(&self.core, name));
        self.shuffles.entry(key.clone()).or_insert_with(create);
        let uploads = self.uploads(key).filter(|uploads| uploads.incarnation() == incarnation);
        uploads.ok_or_else(|| StoreError::new(StoreErrorKind::Purged, key.to_string()))
    }

    /// Waits until the store has the end of a registration of `key`, which the log has before
    /// `position`.
    ///
    /// # Errors
    /// The store does not accept it in time, or another process has the prefix.
    pub async fn end_known(&self, position: u64, key: &ShuffleKey) -> Result<(), StoreError> {
        let deadline = Instant::now() + ENDS_WAIT;
        loop {
            let known = timeout_at(deadline, self.known(position)).await;
            let silent =
                || StoreError::remote(StoreErrorKind::Unreachable, &self.core.settings.root, "no answer");
            let Err(error) = known.unwrap_or_else(|_| Err(silent())) else { return Ok(()) };
            if error.kind == StoreErrorKind::InUse {
                // A repeated call fails too.
                return Err(error);
            }
            if error.kind != StoreErrorKind::Unreachable || Instant::now() + ENDS_PAUSE >= deadline {
                let what = "an earlier registration of the shuffle has not been ended in the object store yet; retry";
                return Err(StoreError::remote(error.kind, key.to_string(), format!("{what}: {error}")));
            }
            crate::clock::sleep(ENDS_PAUSE).await;
        }
    }

    /// Returns the current registration of a shuffle, if there is one.
    #[must_use]
    pub fn uploads(&self, key: &ShuffleKey) -> Option<Uploads> {
        Some(Uploads { core: Arc::clone(&self.core), shuffle: self.find(key)? })
    }

    /// Returns the payload size at which an object takes no more data.
    #[must_use]
    pub fn segment_bytes(&self) -> u64 {
        self.core.settings.segment_bytes
    }

    /// Returns whether a write is worth an attempt now.
    #[must_use]
    pub fn is_worth_trying(&self) -> bool {
        self.core.circuit_breaker.is_worth_trying() && !self.core.claim.is_lost()
    }

    /// Returns a complaint if another process had the prefix at the last check.
    #[must_use]
    pub fn claim_complaint(&self) -> Option<&'static str> {
        self.core
            .claim
            .is_lost()
            .then_some("another process has claimed this worker's prefix of the object store")
    }

    /// Returns all workers that have objects below the same URL.
    ///
    /// # Errors
    /// The store does not answer or refuses.
    pub async fn workers(&self) -> Result<Vec<WorkerObjects>, StoreError> {
        workers::list(&self.core).await
    }

    /// Deletes some hundred objects of another worker at most. To be repeated until none is left.
    ///
    /// # Errors
    /// `InUse` for this worker. The store does not answer or refuses.
    pub async fn remove_worker(&self, worker: &str) -> Result<RemovalReport, StoreError> {
        workers::remove(&self.core, &part_of(worker)).await
    }

    pub(in crate::store) fn find(&self, key: &ShuffleKey) -> Option<Arc<ObjectShuffle>> {
        self.shuffles.get(key).map(|shuffle| Arc::clone(&*shuffle))
    }

    /// Waits, without a time limit, until the store has the log up to its present end. Returns
    /// false if nothing may be deleted any more, because the worker stops or has lost its prefix.
    async fn end_is_known(&self) -> bool {
        let position = self.log.end_position();
        loop {
            match self.known(position).await {
                Ok(()) => return true,
                Err(_) if self.core.tasks.is_cancelled() || self.core.claim.is_lost() => return false,
                Err(_) => crate::clock::sleep(ENDS_PAUSE).await,
            }
        }
    }

    /// Returns the number of batches that may be written concurrently.
    #[must_use]
    pub fn writers(&self) -> usize {
        self.core.settings.writers
    }

    /// Returns why a worker without disks should get no new shuffles, or `None`.
    #[must_use]
    pub fn complaint(&self) -> Option<&'static str> {
        self.claim_complaint().or(self.core.circuit_breaker.complaint())
    }

    /// Returns the storage of settings made at run time.
    #[must_use]
    pub fn saved_settings(&self) -> &dyn SavedSettings {
        &*self.core
    }

    /// Returns the bytes of the segments of all known shuffles.
    #[must_use]
    pub fn stored_bytes(&self) -> u64 {
        self.core.stored_bytes()
    }

    /// Returns the state of the store.
    #[must_use]
    pub fn state(&self) -> ObjectStoreState {
        let (metrics, cache) = (&self.core.metrics, self.core.cache.as_ref());
        ObjectStoreState {
            stored_bytes: self.core.stored_bytes(),
            is_failing: self.core.circuit_breaker.is_failing(),
            cache_used_bytes: cache.map_or(0, Cache::used_bytes),
            cache_capacity_bytes: cache.map_or(0, Cache::capacity_bytes),
            cache_hits: metrics.cache_hits.get(),
            cache_misses: metrics.cache_misses.get(),
        }
    }

    /// Probes a failing store with a request.
    async fn probe(&self) {
        let root = &self.core.settings.root;
        let mut listed = self.core.store.list(Some(&path_of(root)));
        let answer = listed.next().await.transpose();
        if self.core.observe(root, answer).is_ok() {
            tracing::info!("object store responds again");
        }
    }

    /// Returns the usage of a shuffle.
    #[must_use]
    pub fn usage(&self, key: &ShuffleKey) -> TierUsage {
        self.find(key).map_or_else(TierUsage::default, |shuffle| shuffle.usage())
    }

    /// Forgets shuffles of an application at once. The returned future, if there is one, deletes
    /// their objects once the store has the log up to the end that it has when the future is first
    /// polled.
    pub fn forget(
        self: Arc<Self>,
        app: &AppId,
        keys: &[ShuffleKey],
        why: Purge,
    ) -> Option<BoxFuture<'static, ()>> {
        let before = self.next_incarnation.load(Ordering::Relaxed);
        let forgotten: Vec<_> = keys.iter().filter_map(|key| self.remove(key)).collect();
        let app = match why {
            Purge::App(_) => Some(DetachedApp { app: app.clone(), before }),
            Purge::Shuffles if forgotten.is_empty() => return None,
            Purge::Shuffles => None,
        };
        // Counted before the future is polled: a stop may wait for deletions right after this call.
        let counted = object_purge::CountedDeletion::new(Arc::clone(&self.core));
        let purge = async move {
            if self.end_is_known().await {
                object_purge::purge(Arc::clone(&self.core), forgotten, app).await;
            }
            drop(counted);
        };
        Some(purge.boxed())
    }

    fn remove(&self, key: &ShuffleKey) -> Option<Arc<ObjectShuffle>> {
        let (_, shuffle) = self.shuffles.remove(key)?;
        shuffle.forget(&self.core);
        Some(shuffle)
    }

    /// Forgets a shuffle whose objects stay for a later process.
    pub fn leave(&self, key: &ShuffleKey) {
        self.remove(key);
    }

    /// Drops the cached records and chunks of a forgotten shuffle. Visits its extents and
    /// chunks, which may be many, so it must not run on a runtime thread or under a lock.
    pub(in crate::store) fn leave_caches(&self, forgotten: &DetachedShuffle) {
        let (incarnation, extents) = forgotten.in_objects();
        let mut extents = extents.peekable();
        if extents.peek().is_none() {
            return;
        }
        self.core.records.remove(extents.map(|extent| records_key(incarnation, extent)));
        if let Some(cache) = &self.core.cache {
            cache.purge(&self.core.metrics, incarnation);
        }
    }

    /// Waits for deletions in progress, for `time` at most.
    pub async fn end_deletions(&self, time: Duration) {
        let mut deletions = self.core.deletions.subscribe();
        if crate::clock::timeout(time, deletions.wait_for(|under_way| *under_way == 0)).await.is_err() {
            let left = *deletions.borrow();
            tracing::warn!(
                left,
                "objects of removed shuffles or applications are not deleted yet; the next start \
                 continues"
            );
        }
    }

    /// Updates gauges of live values.
    pub fn refresh_metrics(&self) {
        self.core.metrics.failing.set(i64::from(self.core.circuit_breaker.is_failing()));
    }

    /// Probes a failing store and checks the claim, forever.
    pub async fn maintain(&self) {
        for n in 1_u32.. {
            crate::clock::sleep(PROBE_INTERVAL).await;
            if self.core.circuit_breaker.is_failing() {
                self.probe().await;
            } else if n % PROBES_PER_CLAIM == 0 {
                // A lost claim is remembered by this call.
                drop(self.core.require_claim().await);
            }
        }
    }
}

/// Returns the larger of `least` and the clock. `least` exceeds all known numbers. Removed
/// registrations have left no number, but the clock exceeds theirs.
fn numbers_from(least: u64) -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX).max(least)
}

/// Deletes abandoned registrations and stray objects that a start has found.
fn clean_up(core: &Arc<ObjectCore>, abandoned: Vec<Registered>, strays: Vec<String>) {
    let root = &core.settings.root;
    let prefixes = abandoned.iter().map(|name| shuffle_prefix(root, name)).chain(strays);
    let scope: Vec<DeletionScope> = prefixes.map(DeletionScope::all).collect();
    let core = Arc::clone(core);
    core.tasks.clone().spawn("object clean-up", async move {
        for scope in scope {
            object_purge::delete(&core, &scope).await;
        }
    });
}
