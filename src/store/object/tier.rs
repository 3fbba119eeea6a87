//! The object store as a [`Tier`] that is read through the worker.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use dashmap::DashMap;
use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _};
use object_store::ObjectStore;
use parking_lot::Mutex;
use prometheus::Registry;
use tokio::sync::oneshot;

use super::cache::Cache;
use super::claim::Claim;
use super::core::Core;
use super::layout::{Registered, part_of, path_of, shuffle_prefix};
use super::log_objects::{StoredLog, from_log};
use super::metrics::Metrics;
use super::names::NAMES;
use super::settings::ObjectSettings;
use super::shuffle::Shuffle;
use super::upload::intake::Uploads;
use super::upload::lane::{Job, Making, Waiter};
use super::upload::segment::{Prepared, making_bytes};
use super::upload::uploader;
use super::workers::{self, Removed, WorkerObjects};
use crate::budget::Budget;
use crate::clock::{Instant, timeout_at};
use crate::log::{LogInStore, Said, ShippedLog, Shipper};
use crate::runtime::Tasks;
use crate::store::extents::streams::{Partition, Streams};
use crate::store::index::index_read::visit_ids;
use crate::store::recovery::numbers::numbers_from;
use crate::store::recovery::objects::survey;
use crate::store::removal::object_purge::{self, Going};
use crate::store::{
    Admission, Capability, Drained, ExtentWrite, MetadataLog, ObjectStoreState, Purge, Recovered,
    RecoveredShuffle, RemoteStorage, SavedSettings, ServedData, ServedIndex, ServedTier, StoreError,
    StoreErrorKind, StoredShuffle, Tier, TierBatch, TierRole, TierShuffle, TierState, TierUsage,
};
use uniffle_wire::index::RECORD_BYTES;
use uniffle_wire::types::{AppId, PartitionId, ShuffleKey};

/// Interval of probes of a failing store.
const PROBE_INTERVAL: Duration = Duration::from_secs(5);

/// Number of probe intervals between checks of the claim.
const PROBES_PER_CLAIM: u32 = 6;

/// Maximum time to wait until the store has the end of an earlier registration. Shorter than the
/// timeout of clients, which is a minute.
const ENDS_WAIT: Duration = Duration::from_secs(20);
const ENDS_PAUSE: Duration = Duration::from_secs(1);

/// Recovered metadata log, and recovered shuffles of a tier below local disks.
type FoundAtStart = (Arc<ShippedLog>, HashMap<ShuffleKey, StoredShuffle>);

/// An object store as a tier of this worker.
#[derive(Debug)]
pub struct ObjectTier {
    pub(in crate::store) core: Arc<Core>,
    shuffles: DashMap<ShuffleKey, Arc<Shuffle>>,
    log: Shipper,
    /// Log positions after the ends of registrations that the store may not have yet.
    ends: Mutex<BTreeMap<ShuffleKey, u64>>,
    next_incarnation: AtomicU64,
    /// Reason why unknown shuffles may exist, or `None`.
    gap: Option<Arc<str>>,
    recovered: Mutex<Recovered>,
    /// Recovered state, until it is taken.
    found: Mutex<Option<FoundAtStart>>,
}

impl ObjectTier {
    /// Claims the worker's prefix and recovers the state of the previous process. Extents are
    /// charged to `extents`, even beyond its capacity. Uploads run as tasks of `tasks`.
    ///
    /// # Errors
    /// The store does not answer or refuses, or another process of the worker starts at the same
    /// time.
    pub async fn open(
        store: Arc<dyn ObjectStore>,
        settings: ObjectSettings,
        extents: &Budget,
        tasks: Tasks,
        registry: &Registry,
    ) -> Result<Arc<Self>, StoreError> {
        let began = Instant::now();
        let metrics = Metrics::new(registry);
        let metrics = metrics.map_err(|error| StoreError::io("metrics", std::io::Error::other(error)))?;
        let claim = Claim::take(&*store, &settings.root).await?;
        let core = Arc::new(Core::open((store, claim), settings, metrics, extents.clone(), tasks).await);
        let survey = survey(&core).await?;
        let start = core.claim.start().max(survey.log.last_start().saturating_add(1));
        let objects = Arc::new(StoredLog(Arc::clone(&core)));
        let log = Shipper::open(objects, &survey.log, start, &core.extents, &core.tasks);
        let mut recovered = Recovered::default();
        let (shuffles, mut strays, mut stored) = (DashMap::new(), Vec::new(), HashMap::new());
        for found in survey.found {
            recovered.bytes += found.bytes;
            recovered.blocks += found.blocks;
            let incarnation = found.shuffle.name.incarnation;
            if core.settings.is_below_disks {
                let RecoveredShuffle { key, present, reason, .. } = found.told;
                let (extents, _charge) = (found.extents, found.charge);
                stored.insert(key, StoredShuffle { incarnation, extents, present, reason, _charge });
            } else {
                recovered.shuffles.push(found.told);
            }
            strays.extend(found.strays);
            shuffles.insert(found.shuffle.name.key.clone(), found.shuffle);
        }
        recovered.took = began.elapsed();
        clean_up(&core, survey.abandoned, strays);
        Ok(Arc::new(Self {
            core,
            shuffles,
            log,
            ends: Mutex::default(),
            next_incarnation: AtomicU64::new(numbers_from(survey.next_incarnation)),
            gap: survey.log.unknown_gap().map(Arc::from),
            recovered: Mutex::new(recovered),
            found: Mutex::new(Some((survey.log, stored))),
        }))
    }

    /// Checks that no earlier development build has written below the prefix `root`. Writes
    /// nothing.
    ///
    /// # Errors
    /// `NotOurs` if one has. The store does not answer or refuses.
    pub async fn require_layout(store: &dyn ObjectStore, root: &str) -> Result<(), StoreError> {
        Claim::require_layout(store, root).await
    }

    /// Takes the state found at start for the local disks above the store, which own the log from
    /// now on. Returns `None` without such disks, and from the second call on.
    pub fn take_found(&self) -> Option<(HashMap<ShuffleKey, StoredShuffle>, LogInStore)> {
        let (found, stored) = self.found.lock().take_if(|_| self.core.settings.is_below_disks)?;
        Some((stored, LogInStore { found, shipper: self.log.clone() }))
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
        self.log.known(position).await.map_err(|error| from_log(&error, &self.core.settings.root))
    }

    /// Returns whether the store had all data of the local disks of the previous process.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.core.claim.is_drained()
    }

    /// Records whether the store has all data of the local disks, for a start with empty disks.
    /// Sends no request if this is already recorded.
    ///
    /// # Errors
    /// The store does not answer or refuses, or another process has the prefix.
    pub async fn set_drained(&self, is_drained: bool) -> Result<(), StoreError> {
        self.core.set_drained(is_drained).await
    }

    /// Registers a shuffle whose data is moved here, with its incarnation on the disks. May be
    /// repeated.
    ///
    /// # Errors
    /// `Purged` if another registration of the shuffle is here.
    pub fn begin(&self, key: &ShuffleKey, incarnation: u64) -> Result<Uploads, StoreError> {
        let name = Registered { key: key.clone(), incarnation };
        self.next_incarnation.fetch_max(incarnation.saturating_add(1), Ordering::Relaxed);
        let create = || Arc::new(Shuffle::new(&self.core, name));
        self.shuffles.entry(key.clone()).or_insert_with(create);
        let uploads = self.uploads(key).filter(|uploads| uploads.incarnation() == incarnation);
        uploads.ok_or_else(|| StoreError::new(StoreErrorKind::Purged, key.to_string()))
    }

    /// Waits until the store has the ends of all registrations of shuffle `key`, or of all of `app`
    /// without a key, that were forgotten before the call. Usually it has them already.
    ///
    /// # Errors
    /// The store does not accept them in time, or another process has the prefix.
    async fn ends_known(&self, app: &AppId, key: Option<&ShuffleKey>) -> Result<(), StoreError> {
        let is_of = |it: &ShuffleKey| it.app == *app && key.is_none_or(|key| it == key);
        let last =
            self.ends.lock().iter().filter(|(it, _)| is_of(it)).map(|(it, at)| (*at, it.clone())).max();
        let Some((position, last)) = last else { return Ok(()) };
        self.end_known(position, &last).await?;
        self.ends.lock().retain(|it, at| *at > position || !is_of(it));
        Ok(())
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
            if error.kind != StoreErrorKind::Unreachable || Instant::now() + ENDS_PAUSE >= deadline {
                let what = "an earlier registration of the shuffle has not been ended in the object store yet; retry";
                return Err(StoreError::remote(error.kind, key.to_string(), format!("{what}: {error}")));
            }
            crate::clock::sleep(ENDS_PAUSE).await;
        }
    }

    /// Notes the log position of the end of a registration. Drops positions that the store has.
    fn note_end(&self, key: ShuffleKey, position: u64) {
        let mut ends = self.ends.lock();
        ends.retain(|_, at| !self.log.knows(*at));
        ends.insert(key, position);
    }

    /// Returns the current registration of a shuffle, if there is one.
    #[must_use]
    pub fn uploads(&self, key: &ShuffleKey) -> Option<Uploads> {
        self.registered(key).ok()
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
    pub async fn remove_worker(&self, worker: &str) -> Result<Removed, StoreError> {
        workers::remove(&self.core, &part_of(worker)).await
    }

    fn registered(&self, key: &ShuffleKey) -> Result<Uploads, StoreError> {
        Ok(Uploads { core: Arc::clone(&self.core), shuffle: self.find(key)? })
    }

    pub(in crate::store) fn find(&self, key: &ShuffleKey) -> Result<Arc<Shuffle>, StoreError> {
        let found = self.shuffles.get(key).map(|shuffle| Arc::clone(&*shuffle));
        found.ok_or_else(|| StoreError::new(StoreErrorKind::NotFound, key.to_string()))
    }

    fn register(&self, key: &ShuffleKey) {
        let create = || {
            let incarnation = self.next_incarnation.fetch_add(1, Ordering::Relaxed);
            Arc::new(Shuffle::new(&self.core, Registered { key: key.clone(), incarnation }))
        };
        self.shuffles.entry(key.clone()).or_insert_with(create);
    }

    /// Waits, without a time limit, until the store has the log up to its present end. Returns
    /// false if nothing may be deleted any more, because the worker stops or has lost its prefix.
    async fn end_is_known(&self) -> bool {
        if !self.core.settings.is_below_disks {
            self.log.begin();
        }
        let position = self.log.end_position();
        loop {
            match self.known(position).await {
                Ok(()) => return true,
                Err(_) if self.core.tasks.is_cancelled() || self.core.claim.is_lost() => return false,
                Err(_) => crate::clock::sleep(ENDS_PAUSE).await,
            }
        }
    }

    fn object_store(&self) -> ObjectStoreState {
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
        if self.core.noted(root, answer).is_ok() {
            tracing::info!("object store responds again");
        }
    }
}

/// Deletes abandoned registrations and stray objects that a start has found.
fn clean_up(core: &Arc<Core>, abandoned: Vec<Registered>, strays: Vec<String>) {
    let root = &core.settings.root;
    let prefixes = abandoned.iter().map(|name| shuffle_prefix(root, name)).chain(strays);
    let going: Vec<Going> = prefixes.map(Going::all).collect();
    let core = Arc::clone(core);
    core.tasks.clone().spawn("object clean-up", async move {
        for going in going {
            object_purge::delete(&core, &going).await;
        }
    });
}

/// Calls [`Shuffle::leave_caches`] for several shuffles on a blocking thread. Completes even if the
/// caller is dropped.
async fn leave_caches(core: &Arc<Core>, had: Vec<(Arc<Shuffle>, Streams)>) {
    let core = Arc::clone(core);
    let leave = move || had.into_iter().for_each(|(shuffle, had)| shuffle.leave_caches(&core, had));
    // A panic was reported already, and the caller cannot do more about it.
    let _left = tokio::task::spawn_blocking(leave).await;
}

/// The metadata log of one registration, in a worker without disks.
#[derive(Debug)]
struct ShuffleMetadata {
    log: Shipper,
    shuffle: Arc<Shuffle>,
}

impl TierShuffle for Uploads {
    fn is_accepting(&self) -> bool {
        self.core.circuit_breaker.is_worth_trying() && !self.core.claim.is_lost()
    }

    fn write(&self, batch: TierBatch) -> BoxFuture<'_, Result<(), StoreError>> {
        let write = async move {
            self.shuffle.require_present()?;
            if self.core.claim.is_lost() {
                self.core.require_claim().await?;
            }
            let key = || self.shuffle.name.key.to_string();
            let extents = ExtentWrite::bounded(batch.extents);
            let bytes = making_bytes(&extents);
            let _making = Making::begin(&self.core.making, &self.core.extents, bytes).await;
            let prepared = tokio::task::spawn_blocking(move || Prepared::of(extents)).await;
            let batch = prepared.map_err(|error| StoreError::io(key(), error.into()))??;
            let (done, written) = oneshot::channel();
            if self.shuffle.queue.add(Job { batch, waiter: Waiter { done, _making } }) {
                let upload = uploader::run(Arc::clone(&self.core), Arc::clone(&self.shuffle));
                self.core.tasks.spawn("segment upload", upload);
            }
            written.await.unwrap_or_else(|_| Err(self.shuffle.error(StoreErrorKind::Unhealthy)))
        };
        write.boxed()
    }
}

impl MetadataLog for ShuffleMetadata {
    fn append(&self, record: Bytes) -> BoxFuture<'_, Result<(), StoreError>> {
        let append = async move {
            self.shuffle.require_present()?;
            let is_first = !self.shuffle.is_known();
            let appended = self.log.append(self.shuffle.incarnation(), record, is_first).await;
            // If the shuffle was purged meanwhile, its end may precede this record in the log.
            self.shuffle.require_present()?;
            appended.map_err(|error| from_log(&error, self.shuffle.name.key.to_string()))?;
            self.shuffle.set_known();
            Ok(())
        };
        append.boxed()
    }

    fn mark_incomplete<'a>(&'a self, reason: &'a str) -> BoxFuture<'a, Result<(), StoreError>> {
        let mark = async move {
            self.shuffle.require_present()?;
            let marked = self.log.mark_incomplete(self.shuffle.incarnation(), reason).await;
            marked.map_err(|error| from_log(&error, self.shuffle.name.key.to_string()))
        };
        mark.boxed()
    }
}

impl Tier for ObjectTier {
    fn capability(&self) -> Capability {
        Capability {
            names: NAMES,
            writers: self.core.settings.writers,
            in_flight_max: usize::MAX,
            role: TierRole::Primary,
        }
    }

    fn state(&self) -> TierState {
        TierState {
            complaint: self.claim_complaint().or(self.core.circuit_breaker.complaint()),
            used_bytes: self.core.stored_bytes(),
            object_store: Some(self.object_store()),
            ..TierState::default()
        }
    }

    fn prepare(self: Arc<Self>, _: Option<&RemoteStorage>) -> Result<Option<Admission>, StoreError> {
        Ok(Some(Box::new(move |key, _| self.register(key))))
    }

    fn shuffle(&self, key: &ShuffleKey) -> Option<Arc<dyn TierShuffle>> {
        Some(Arc::new(self.uploads(key)?))
    }

    fn metadata_log(&self, key: &ShuffleKey) -> Option<Arc<dyn MetadataLog>> {
        self.log.begin();
        Some(Arc::new(ShuffleMetadata { log: self.log.clone(), shuffle: self.find(key).ok()? }))
    }

    fn metadata_gap(&self) -> Option<Arc<str>> {
        self.gap.clone()
    }

    fn saved_settings(&self) -> Option<&dyn SavedSettings> {
        (!self.core.settings.is_below_disks).then_some(&*self.core)
    }

    fn visit_present<'a>(
        &'a self,
        key: &'a ShuffleKey,
        partition: PartitionId,
        visit: &'a mut (dyn FnMut(u64) + Send),
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        async move { visit_ids(&mut *self.index(key, partition)?.chunks, visit).await }.boxed()
    }

    fn usage(&self, key: &ShuffleKey) -> TierUsage {
        self.find(key).map_or_else(|_| TierUsage::default(), |shuffle| shuffle.usage())
    }

    fn served(&self) -> Option<&dyn ServedTier> {
        Some(self)
    }

    fn forget(
        self: Arc<Self>,
        app: &AppId,
        keys: &[ShuffleKey],
        why: Purge,
    ) -> Option<BoxFuture<'static, ()>> {
        let before = self.next_incarnation.load(Ordering::Relaxed);
        let removed = keys.iter().filter_map(|key| self.shuffles.remove(key));
        let forgotten: Vec<_> = removed.map(|(_, shuffle)| shuffle).collect();
        let had: Vec<_> =
            forgotten.iter().map(|shuffle| (Arc::clone(shuffle), shuffle.forget(&self.core))).collect();
        if !self.core.settings.is_below_disks {
            for shuffle in &forgotten {
                let position = self.log.purge(shuffle.incarnation());
                self.note_end(shuffle.name.key.clone(), position);
            }
        }
        let app = match why {
            Purge::App(_) => Some((app.clone(), before)),
            Purge::Shuffles if forgotten.is_empty() => return None,
            Purge::Shuffles => None,
        };
        // Counted before the future is polled: a stop may wait for deletions right after this call.
        let counted = object_purge::Counted::new(Arc::clone(&self.core));
        let purge = async move {
            let core = Arc::clone(&self.core);
            leave_caches(&core, had).await;
            if self.end_is_known().await {
                object_purge::purge(core, forgotten, app).await;
            }
            drop(counted);
        };
        Some(purge.boxed())
    }

    fn forgotten_durable<'a>(
        &'a self,
        app: &'a AppId,
        key: Option<&'a ShuffleKey>,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.ends_known(app, key).boxed()
    }

    fn leave(&self, key: &ShuffleKey) {
        if let Some((_, shuffle)) = self.shuffles.remove(key) {
            shuffle.leave_caches(&self.core, shuffle.forget(&self.core));
        }
    }

    fn end_deletions(&self, time: Duration) -> BoxFuture<'_, ()> {
        let ended = async move {
            let mut deletions = self.core.deletions.subscribe();
            if crate::clock::timeout(time, deletions.wait_for(|under_way| *under_way == 0)).await.is_err() {
                let left = *deletions.borrow();
                tracing::warn!(
                    left,
                    "objects of removed shuffles or applications are not deleted yet; the next start \
                     continues"
                );
            }
        };
        ended.boxed()
    }

    fn take_recovered(&self) -> Recovered {
        let mut recovered = std::mem::take(&mut *self.recovered.lock());
        if let Some((found, _)) = self.found.lock().take() {
            let living = self.shuffles.iter().map(|shuffle| shuffle.name.incarnation).collect();
            recovered.said = Said::stored(found, living);
        }
        self.log.begin();
        recovered
    }

    fn drained(&self) -> Option<Drained> {
        Some(Drained::default())
    }

    fn refresh_metrics(&self) {
        self.core.metrics.failing.set(i64::from(self.core.circuit_breaker.is_failing()));
    }

    fn maintain(self: Arc<Self>, stop: BoxFuture<'static, ()>) -> BoxFuture<'static, ()> {
        let probe = async move {
            for n in 1_u32.. {
                crate::clock::sleep(PROBE_INTERVAL).await;
                if self.core.circuit_breaker.is_failing() {
                    self.probe().await;
                } else if n % PROBES_PER_CLAIM == 0 {
                    // A lost claim is remembered by this call.
                    drop(self.core.require_claim().await);
                }
            }
        };
        let maintain = async move {
            tokio::select! {
                biased;
                () = stop => {}
                () = probe => {}
            }
        };
        maintain.boxed()
    }
}

impl ServedTier for ObjectTier {
    fn index(&self, key: &ShuffleKey, partition: PartitionId) -> Result<ServedIndex, StoreError> {
        let uploads = self.registered(key)?;
        let Partition { extents, blocks, bytes: data_length, .. } = uploads.shuffle.stream(partition);
        let length = blocks * RECORD_BYTES as u64;
        Ok(ServedIndex { length, data_length, chunks: Box::new(uploads.index(extents, 0, blocks)) })
    }

    fn data(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        (offset, length): (u64, u32),
    ) -> Result<ServedData, StoreError> {
        let (uploads, range) = (self.registered(key)?, offset..offset.saturating_add(u64::from(length)));
        let Some(extents) = uploads.shuffle.part(partition, &range).filter(|_| length > 0) else {
            uploads.shuffle.require_present()?;
            return Err(uploads.shuffle.error(StoreErrorKind::InvalidRange));
        };
        Ok(ServedData { has_hole: false, chunks: Box::new(uploads.data(extents, range)) })
    }

    fn hint(&self, key: &ShuffleKey, partition: PartitionId, ranges: &[Range<u64>]) {
        let Some(uploads) = self.uploads(key) else { return };
        for range in ranges {
            if let Some(extents) = uploads.shuffle.part(partition, range) {
                uploads.hint(&extents, range);
            }
        }
    }
}
