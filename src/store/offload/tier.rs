//! Local disks, if there are any, and an object store as one tier that is read through the worker.
//! Without disks, batches are written to objects.
//!
//! Invariant: the end of an offloaded registration is noted under the lock that removes it here
//! (`ends`). Otherwise a new registration could be acknowledged before the store knows that end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dashmap::DashMap;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use prometheus::{IntCounter, IntGauge};
use tokio::sync::{Notify, watch};

use super::policy::Watermarks;
use super::shuffle::{Handle, TieredShuffle};
use super::shuffle_log::{Ends, ShuffleLog, forget_end};
use crate::log::Scratch;
use crate::metrics;
use crate::runtime::Tasks;
use crate::store::object::{Bucket, NAMES};
use crate::store::removal::deletion_queue::DetachedShuffle;
use crate::store::{
    Admission, Capability, DiskShuffleHandle, DrainBacklog, DrainableTier, LocalConfig, LocalStore,
    MaintainedTier, MetadataTier, Purge, Recovered, RegistrationLog, RemoteStorage, SavedSettings,
    ServedTier, StoreError, Tier, TierRole, TierShuffle, TierState, TierUsage,
};
use uniffle_base::budget::Budget;
use uniffle_io::Disk;
use uniffle_wire::types::{AppId, PartitionId, ShuffleKey};

/// Limits that determine when data is offloaded.
#[derive(Debug, Clone, Copy)]
pub struct OffloadSettings {
    /// Fill levels that apply to each disk.
    pub watermarks: Watermarks,
    /// Length above which an extent makes its partition cold.
    pub cold_bytes: u64,
    /// Approximate number of bytes offloaded from one shuffle before the policy selects again.
    pub pass_bytes: u64,
}

/// Data directories to open, with their settings.
#[derive(Debug)]
pub struct LocalDisks {
    /// Settings of the disks.
    pub config: LocalConfig,
    /// Data directories.
    pub disks: Vec<Arc<dyn Disk>>,
}

metrics::table! {
    /// Counters and gauges of offloads from local disks to the object store.
    pub(crate) struct Metrics {
        moved_bytes: IntCounter = "offload_bytes",
            "Payload bytes offloaded from local disks to the object store";
        freed_bytes: IntCounter =
            "offload_freed_bytes",
            "Bytes of local files deleted after their data was offloaded";
        passes: IntCounter = "offload_passes", "Offload passes, each over data of one shuffle";
        failures: IntCounter = "offload_failures",
            "Failed offload passes; the data stays on the disks";
        disks_under_pressure: IntGauge =
            "offload_disks_relieved",
            "Disks whose data is offloaded: above offload_high_watermark, and not yet below offload_low_watermark";
        left_bytes: IntGauge = "offload_drain_left_bytes",
            "During a drain, bytes on local disks that are not in the object store yet";
    }
}

/// Local disks and an object store as one tier, or an object store alone.
#[derive(Debug)]
pub struct OffloadTier {
    pub(super) local: Arc<LocalStore>,
    pub(super) object: Arc<Bucket>,
    pub(super) settings: OffloadSettings,
    pub(super) metrics: Metrics,
    /// Budget that the memory of passes is charged to.
    pub(super) memory: Budget,
    pub(super) tasks: Tasks,
    pub(super) shuffles: DashMap<ShuffleKey, Arc<TieredShuffle>>,
    pub(super) ends: Arc<Ends>,
    pub(super) recovered: Mutex<Recovered>,
    pub(super) is_draining: AtomicBool,
    /// Notified when a drain begins or is cancelled.
    pub(super) wake: Notify,
    /// Disks under pressure, by index.
    pub(super) under_pressure: Mutex<Vec<bool>>,
    /// Held during an offload, so that there is one at a time.
    pub(super) pass_lock: tokio::sync::Mutex<()>,
}

impl OffloadTier {
    /// Returns the current registration of a shuffle.
    pub(super) fn find(&self, key: &ShuffleKey) -> Option<Arc<TieredShuffle>> {
        self.shuffles.get(key).map(|shuffle| Arc::clone(&*shuffle))
    }

    /// Returns whether `shuffle` is the current registration of its key.
    pub(super) fn is_present(&self, shuffle: &Arc<TieredShuffle>) -> bool {
        self.shuffles.get(&shuffle.key).is_some_and(|present| Arc::ptr_eq(&present, shuffle))
    }

    /// Drops detached shuffles and their entries in the caches on a blocking thread. Completes even
    /// if the caller is dropped.
    async fn leave_caches(&self, detached: Vec<DetachedShuffle>) {
        let object = Arc::clone(&self.object);
        let leave = move || detached.into_iter().for_each(|it| object.leave_caches(&it));
        // A panic was reported already, and the caller cannot do more about it.
        let _left = tokio::task::spawn_blocking(leave).await;
    }

    fn register(&self, key: &ShuffleKey) {
        let local = self.local.register(key);
        let create = || Arc::new(self.shuffle_of(key, local, false));
        self.shuffles.entry(key.clone()).or_insert_with(create);
    }

    pub(super) fn shuffle_of(
        &self,
        key: &ShuffleKey,
        local: DiskShuffleHandle,
        is_offloaded: bool,
    ) -> TieredShuffle {
        let begin = || self.object.begin(key, local.incarnation());
        // An earlier registration has been forgotten here and there, so this one begins.
        let direct = if self.local.has_disks() { None } else { begin().ok() };
        TieredShuffle::new(key.clone(), local, is_offloaded, direct)
    }

    /// Returns the objects of the worker.
    #[must_use]
    pub fn objects(&self) -> &Arc<Bucket> {
        &self.object
    }
}

impl Tier for OffloadTier {
    fn capability(&self) -> Capability {
        match self.local.has_disks() {
            true => Tier::capability(&*self.local),
            false => Capability {
                names: NAMES,
                writers: self.object.writers(),
                in_flight_max: usize::MAX,
                role: TierRole::Primary,
            },
        }
    }

    fn parts(&self) -> Vec<Arc<dyn Tier>> {
        let local = self.local.has_disks().then(|| Arc::clone(&self.local) as Arc<dyn Tier>);
        local.into_iter().collect()
    }

    fn state(&self) -> TierState {
        let object_store = Some(self.object.state());
        if !self.local.has_disks() {
            let (complaint, used_bytes) = (self.object.complaint(), self.object.stored_bytes());
            return TierState { complaint, used_bytes, object_store, ..TierState::default() };
        }
        // A failing store does not affect the disks, but another process that claims this worker's
        // prefix does.
        let local = Tier::state(&*self.local);
        let complaint = local.complaint.or(self.object.claim_complaint());
        TierState { complaint, object_store, ..local }
    }

    fn prepare(self: Arc<Self>, _: Option<&RemoteStorage>) -> Result<Option<Admission>, StoreError> {
        Ok(Some(Box::new(move |key, _| self.register(key))))
    }

    fn shuffle(&self, key: &ShuffleKey) -> Option<Arc<dyn TierShuffle>> {
        let (shuffle, object) = (self.find(key)?, Arc::clone(&self.object));
        Some(Arc::new(Handle { shuffle, object, cold_bytes: self.settings.cold_bytes }))
    }

    fn visit_present<'a>(
        &'a self,
        key: &'a ShuffleKey,
        partition: PartitionId,
        visit: &'a mut (dyn FnMut(u64) + Send),
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        let read = async move {
            // The disks come first: extents that are offloaded meanwhile are visited in objects.
            self.local.visit_present(key, partition, visit).await?;
            self.visit_offloaded(key, partition, visit).await
        };
        read.boxed()
    }

    fn usage(&self, key: &ShuffleKey) -> TierUsage {
        let (local, object) = (Tier::usage(&*self.local, key), self.object.usage(key));
        TierUsage {
            files: local.files + object.files,
            bytes: local.bytes + object.bytes,
            object_bytes: object.object_bytes,
            occupied_bytes: local.occupied_bytes + object.occupied_bytes,
        }
    }

    fn forget(
        self: Arc<Self>,
        app: &AppId,
        keys: &[ShuffleKey],
        why: Purge,
    ) -> Option<BoxFuture<'static, ()>> {
        let ended: Vec<_> = {
            let mut ends = self.ends.lock();
            let removed = keys.iter().filter_map(|key| self.shuffles.remove(key));
            let moved = removed.filter(|(_, shuffle)| shuffle.is_offloaded());
            let ended: Vec<_> = moved.map(|(key, shuffle)| (key, shuffle.local.incarnation())).collect();
            ends.extend(ended.iter().cloned());
            ended
        };
        let detached: Vec<_> = keys.iter().filter_map(|key| self.local.forget_shuffle(key)).collect();
        let deletion = Arc::clone(&self.object).forget(app, keys, why);
        let app = app.clone();
        let forget = async move {
            self.leave_caches(detached).await;
            if !self.local.has_disks() {
                self.local.log().ship_by(self.object.log());
            }
            // The disks come first: segments are deleted once the store has all records that the
            // log has by then.
            self.local.remove_files(&app).await;
            if let Some(deletion) = deletion {
                deletion.await;
            }
            // If the store does not know of an end yet, the next registration waits for that.
            if !ended.is_empty() && self.object.known(self.object.log().end_position()).await.is_ok() {
                ended.iter().for_each(|(key, incarnation)| forget_end(&self.ends, key, *incarnation));
            }
        };
        Some(forget.boxed())
    }

    fn served(&self) -> Option<&dyn ServedTier> {
        Some(self)
    }

    fn metadata(&self) -> Option<&dyn MetadataTier> {
        Some(self)
    }

    fn drain(&self) -> Option<&dyn DrainableTier> {
        Some(self)
    }

    fn maintenance(self: Arc<Self>) -> Option<Arc<dyn MaintainedTier>> {
        Some(self)
    }
}

impl MetadataTier for OffloadTier {
    fn metadata_log(&self, key: &ShuffleKey) -> Option<Arc<dyn RegistrationLog>> {
        let (local, object) = (Arc::clone(&self.local), Arc::clone(&self.object));
        let (ends, shuffle) = (Arc::clone(&self.ends), self.find(key)?);
        Some(Arc::new(ShuffleLog { local, object, ends, shuffle }))
    }

    fn scratch(&self) -> Option<Arc<Scratch>> {
        self.local.scratch().filter(|_| self.local.has_disks())
    }

    fn saved_settings(&self) -> Option<&dyn SavedSettings> {
        (!self.local.has_disks()).then(|| self.object.saved_settings())
    }

    fn take_recovered(&self) -> Recovered {
        if !self.local.has_disks() {
            // Nothing is stored before the start succeeds.
            self.local.log().ship_by(self.object.log());
        }
        std::mem::take(&mut *self.recovered.lock())
    }

    fn recovered_durable(&self) -> BoxFuture<'_, ()> {
        self.local.recovered_durable()
    }

    fn metadata_gap(&self) -> Option<Arc<str>> {
        self.local.metadata_gap()
    }

    fn end_metadata_gap(&self) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.local.end_metadata_gap()
    }

    fn successor_doubts(&self) -> Option<String> {
        self.local.successor_doubts()
    }

    fn forgotten_durable<'a>(
        &'a self,
        app: &'a AppId,
        key: Option<&'a ShuffleKey>,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        let durable = async move {
            MetadataTier::forgotten_durable(&*self.local, app, key).await?;
            if self.local.has_disks() {
                return Ok(());
            }
            // Only the store can know of an end.
            let is_of = |it: &ShuffleKey| it.app == *app && key.is_none_or(|key| it == key);
            let ended: Vec<_> = {
                let ends = self.ends.lock();
                let of_it = ends.iter().filter(|(it, _)| is_of(it));
                of_it.map(|(key, incarnation)| (key.clone(), *incarnation)).collect()
            };
            let Some((last, _)) = ended.last() else { return Ok(()) };
            self.object.end_known(self.object.log().end_position(), last).await?;
            ended.iter().for_each(|(key, incarnation)| forget_end(&self.ends, key, *incarnation));
            Ok(())
        };
        durable.boxed()
    }

    fn leave(&self, key: &ShuffleKey) {
        {
            // Held, so that no offload marks the shuffle as offloaded after the check.
            let mut ends = self.ends.lock();
            if let Some((_, shuffle)) = self.shuffles.remove(key)
                && shuffle.is_offloaded()
            {
                ends.insert(key.clone(), shuffle.local.incarnation());
            }
        }
        self.object.leave(key);
        if let Some(detached) = self.local.leave(key) {
            self.object.leave_caches(&detached);
        }
    }
}

impl DrainableTier for OffloadTier {
    fn begin(&self) -> DrainBacklog {
        self.begin_drain()
    }

    fn cancel(&self) {
        self.is_draining.store(false, Ordering::Release);
        self.wake.notify_one();
    }
}

impl MaintainedTier for OffloadTier {
    fn maintain(self: Arc<Self>, stop: BoxFuture<'static, ()>) -> BoxFuture<'static, ()> {
        let stop = stop.shared();
        let local = LocalStore::maintain(Arc::clone(&self.local), stop.clone().boxed());
        let maintain = async move {
            let others = async {
                tokio::select! {
                    biased;
                    () = stop => {}
                    () = self.object.maintain() => {}
                    () = self.run_offload(), if self.local.has_disks() => {}
                }
            };
            futures::join!(local, others);
        };
        maintain.boxed()
    }

    fn refresh_metrics(&self) {
        LocalStore::refresh_metrics(&self.local);
        self.object.refresh_metrics();
    }

    fn state_changes(&self) -> Option<watch::Receiver<()>> {
        self.local.state_changes().filter(|_| self.local.has_disks())
    }

    fn sync(&self, time: Duration) -> BoxFuture<'_, ()> {
        self.local.sync(time)
    }

    fn end_deletions(&self, time: Duration) -> BoxFuture<'_, ()> {
        self.object.end_deletions(time).boxed()
    }
}
