//! The local disks as a [`Tier`] that is read through the worker.
//!
//! [`LocalStore`] does the work. With an object store, `OffloadTier` is the tier instead, and calls
//! this one for its disks. Reads here fail if an extent is in an object.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt as _, TryFutureExt as _};
use tokio::sync::watch;

use super::read::view::ViewRun;
use super::shuffle::DiskShuffle;
use super::store::{DiskShuffleHandle, LocalStore};
use crate::log::{self, Scratch};
use crate::store::recovery::take_over;
use crate::store::removal::deletion_queue::drop_blocking;
use crate::store::{
    Admission, Capability, MaintainedTier, MetadataTier, Purge, Recovered, RegistrationLog, RemoteStorage,
    SavedSettings, ServedData, ServedIndex, ServedTier, StoreError, Tier, TierBatch, TierNames, TierRole,
    TierShuffle, TierState, TierUsage,
};
use uniffle_base::damage::DamageListener;
use uniffle_wire::index::RECORD_BYTES;
use uniffle_wire::types::{AppId, PartitionId, ShuffleKey};

pub(crate) const NAMES: TierNames = TierNames {
    name: "local",
    title: "local disks",
    label: "LOCALFILE",
    spill: "localfile",
    events: "local_file",
    queue: "localfile",
};

impl TierShuffle for DiskShuffleHandle {
    fn is_accepting(&self) -> bool {
        self.writer.core.available_disks() > 0
    }

    fn write(&self, batch: TierBatch) -> BoxFuture<'_, Result<(), StoreError>> {
        self.writer.write(&self.shuffle, batch.extents, batch.is_last).map_ok(drop).boxed()
    }
}

/// The metadata log, for one incarnation of a shuffle.
struct ShuffleMetadata {
    log: log::MetadataLog,
    shuffle: Arc<DiskShuffle>,
}

impl RegistrationLog for ShuffleMetadata {
    fn is_recovered_durable(&self) -> bool {
        self.log.is_begun()
    }

    fn append(&self, record: Bytes) -> BoxFuture<'_, Result<(), StoreError>> {
        take_over::append(&self.log, &self.shuffle, record).map_ok(drop).boxed()
    }

    fn mark_incomplete<'a>(&'a self, reason: &'a str) -> BoxFuture<'a, Result<(), StoreError>> {
        take_over::mark_incomplete(&self.log, &self.shuffle, reason).map_ok(drop).boxed()
    }
}

impl Tier for LocalStore {
    fn capability(&self) -> Capability {
        Capability {
            names: NAMES,
            writers: self.core.disks.len() * self.core.config.write_concurrency_per_disk,
            in_flight_max: usize::MAX,
            role: TierRole::Primary,
        }
    }

    fn state(&self) -> TierState {
        let disks = self.disks();
        let too_few = self.core.available_disks() < self.min_disks.load(Ordering::Relaxed);
        TierState {
            complaint: too_few
                .then_some("fewer disks are writable than localfile_store.healthy_check_min_disks"),
            capacity_bytes: Some(disks.iter().map(|disk| disk.total_bytes).sum()),
            used_bytes: disks.iter().map(|disk| disk.used_bytes).sum(),
            disks,
            ..TierState::default()
        }
    }

    fn prepare(self: Arc<Self>, _: Option<&RemoteStorage>) -> Result<Option<Admission>, StoreError> {
        Ok(Some(Box::new(move |key, _| drop(self.register(key)))))
    }

    fn shuffle(&self, key: &ShuffleKey) -> Option<Arc<dyn TierShuffle>> {
        Some(Arc::new(self.handle(key)?))
    }

    fn visit_present<'a>(
        &'a self,
        key: &'a ShuffleKey,
        partition: PartitionId,
        visit: &'a mut (dyn FnMut(u64) + Send),
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.visit_records_of(key, partition, visit).boxed()
    }

    fn usage(&self, key: &ShuffleKey) -> TierUsage {
        let Ok(shuffle) = self.find(key) else { return TierUsage::default() };
        let mut usage = shuffle.usage();
        usage.occupied_bytes += self.metadata.disk_bytes(shuffle.incarnation);
        usage
    }

    fn forget(self: Arc<Self>, app: &AppId, keys: &[ShuffleKey], _: Purge) -> Option<BoxFuture<'static, ()>> {
        let detached = keys.iter().filter_map(|key| self.forget_shuffle(key)).collect();
        let app = app.clone();
        let remove = async move {
            drop_blocking(detached).await;
            self.remove_files(&app).await;
        };
        Some(remove.boxed())
    }

    fn served(&self) -> Option<&dyn ServedTier> {
        Some(self)
    }

    fn metadata(&self) -> Option<&dyn MetadataTier> {
        Some(self)
    }

    fn maintenance(self: Arc<Self>) -> Option<Arc<dyn MaintainedTier>> {
        Some(self)
    }
}

impl MetadataTier for LocalStore {
    fn metadata_log(&self, key: &ShuffleKey) -> Option<Arc<dyn RegistrationLog>> {
        Some(Arc::new(ShuffleMetadata { log: self.metadata.clone(), shuffle: self.find(key).ok()? }))
    }

    fn scratch(&self) -> Option<Arc<Scratch>> {
        Some(Arc::clone(&self.scratch))
    }

    fn saved_settings(&self) -> Option<&dyn SavedSettings> {
        None
    }

    fn take_recovered(&self) -> Recovered {
        LocalStore::take_recovered(self)
    }

    fn recovered_durable(&self) -> BoxFuture<'_, ()> {
        self.metadata.begun().boxed()
    }

    fn metadata_gap(&self) -> Option<Arc<str>> {
        self.metadata.gap()
    }

    fn end_metadata_gap(&self) -> BoxFuture<'_, Result<bool, StoreError>> {
        let end = async { self.metadata.end_gap().await.map_err(|error| take_over::failed_log(&error)) };
        end.boxed()
    }

    fn successor_doubts(&self) -> Option<String> {
        let damage = self.metadata.damage()?;
        Some(format!("{damage}; wait until the applications of that time have ended"))
    }

    fn forgotten_durable<'a>(
        &'a self,
        app: &'a AppId,
        key: Option<&'a ShuffleKey>,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.purges_logged(app, key).boxed()
    }

    fn leave(&self, key: &ShuffleKey) {
        drop(LocalStore::leave(self, key));
    }
}

impl MaintainedTier for LocalStore {
    fn maintain(self: Arc<Self>, stop: BoxFuture<'static, ()>) -> BoxFuture<'static, ()> {
        LocalStore::maintain(self, stop).boxed()
    }

    fn refresh_metrics(&self) {
        LocalStore::refresh_metrics(self);
    }

    fn state_changes(&self) -> Option<watch::Receiver<()>> {
        Some(self.core.changes.subscribe())
    }

    fn sync(&self, time: Duration) -> BoxFuture<'_, ()> {
        self.sync_disks(time).boxed()
    }
}

/// Reads of shuffles without extents in objects.
impl ServedTier for LocalStore {
    fn on_damage(&self, on_damage: DamageListener) {
        self.core.damage.set(on_damage);
    }

    fn index(&self, key: &ShuffleKey, partition: PartitionId) -> Result<ServedIndex, StoreError> {
        let view = self.view(key, partition)?;
        view.require_on_disks()?;
        let all = ViewRun { extents: 0..view.extents.len(), blocks: view.blocks, is_in_object: false };
        let (length, data_length) = (view.blocks * RECORD_BYTES as u64, view.bytes);
        Ok(ServedIndex { length, data_length, chunks: self.index_of(&view, &all) })
    }

    fn data(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        offset: u64,
        length: u32,
    ) -> Result<ServedData, StoreError> {
        let range = offset..offset.saturating_add(u64::from(length));
        let view = self.view_part(key, partition, &range)?;
        view.require_on_disks()?;
        Ok(ServedData { has_hole: view.has_hole(&range), chunks: Box::new(self.data_of(&view, range)) })
    }

    /// Prefetches into the page cache ([`read::hints`](super::read)).
    fn hint(&self, key: &ShuffleKey, partition: PartitionId, ranges: &[Range<u64>]) {
        if let Ok(shuffle) = self.find(key) {
            self.reader.hint(&shuffle, partition, ranges);
        }
    }

    /// Tries the partition's extents on disks with too many failed reads, for half a second, and
    /// marks the unreadable ones as lost. Returns the last error of these.
    fn mark_damaged_lost<'a>(
        &'a self,
        key: &'a ShuffleKey,
        partition: PartitionId,
    ) -> BoxFuture<'a, Option<StoreError>> {
        let marked = async move {
            let shuffle = self.find(key).ok()?;
            let damage = &self.reader.damage;
            let mut last_error = None;
            for disk in shuffle.failed_reads.take_failed_disks(partition) {
                if let Some((extents, error)) = damage.probe_extents(&shuffle, partition, disk).await {
                    damage.mark_all_lost(&shuffle, partition, &extents, &error);
                    last_error = Some(error);
                }
            }
            last_error
        };
        marked.boxed()
    }
}
