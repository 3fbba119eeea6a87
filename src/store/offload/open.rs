//! Recovery of the disks and the store as one tier.
//!
//! The metadata log of both (`log`) tells which registrations are alive, by incarnations that are
//! never reused. The disks take over the extents in objects ([`Stored`]). Segments of ended
//! registrations are deleted unless records of the log are missing. A file on a disk is deleted
//! because of the store only if the store has a copy of each of its extents.
//!
//! A start on disks that are all empty is refused if the store knows that they had data. It
//! succeeds if the worker was drained or the configuration says that the disks are new.

use std::collections::HashMap;
use std::sync::Arc;

use dashmap::DashMap;
use parking_lot::Mutex;
use prometheus::Registry;

use super::policy::Watermarks;
use super::tier::{LocalDisks, Metrics, OffloadSettings, OffloadTier};
use crate::runtime::Tasks;
use crate::store::object::Bucket;
use crate::store::{
    LocalConfig, LocalStore, MetadataTier as _, Purge, Recovered, StoreError, StoreErrorKind, TierHeap,
};
use uniffle_wire::types::ShuffleKey;

/// Evidence that the disks had data, for the error of a refused start.
const HAD_DATA_EVIDENCE: &str = "the object store has shuffles of this worker with data on its local disks";

impl OffloadTier {
    /// Opens a worker without disks on an open store.
    ///
    /// # Errors
    /// `InUse` if the store already has a tier above it. See also [`LocalStore::open_beside`].
    pub async fn without_disks(
        object: Arc<Bucket>,
        heap: impl Into<TierHeap>,
        tasks: Tasks,
        registry: &Registry,
    ) -> Result<Arc<Self>, StoreError> {
        let watermarks = Watermarks { high: 1.0, low: 1.0 };
        let settings = OffloadSettings { watermarks, cold_bytes: u64::MAX, pass_bytes: u64::MAX };
        let none = LocalDisks { config: LocalConfig::default(), disks: Vec::new() };
        Self::open_with(settings, none, object, heap, tasks, registry).await
    }

    /// Opens the disks above an open store.
    ///
    /// # Errors
    /// See [`LocalStore::open`]. `InUse` if the store already has a tier above it. The store does
    /// not answer.
    pub async fn open(
        settings: OffloadSettings,
        local: LocalDisks,
        object: Arc<Bucket>,
        heap: impl Into<TierHeap>,
        tasks: Tasks,
        registry: &Registry,
    ) -> Result<Arc<Self>, StoreError> {
        if local.disks.is_empty() {
            return Err(StoreError::new(StoreErrorKind::Unhealthy, "no data directory"));
        }
        Self::open_with(settings, local, object, heap, tasks, registry).await
    }

    async fn open_with(
        settings: OffloadSettings,
        local: LocalDisks,
        object: Arc<Bucket>,
        heap: impl Into<TierHeap>,
        tasks: Tasks,
        registry: &Registry,
    ) -> Result<Arc<Self>, StoreError> {
        let LocalDisks { mut config, disks } = local;
        let metrics = Metrics::new(registry);
        let metrics = metrics.map_err(|error| StoreError::io("metrics", std::io::Error::other(error)))?;
        let taken =
            || StoreError::new(StoreErrorKind::InUse, "the object store already belongs to another tier");
        let stored = object.take_found().ok_or_else(taken)?;
        let shuffles = stored.shuffles.iter();
        let found: HashMap<_, _> = shuffles.map(|(key, it)| (key.clone(), it.incarnation)).collect();
        let log = stored.log.as_ref().filter(|_| !object.is_drained());
        let directories = log.iter().flat_map(|log| log.found.directories());
        let directories: Vec<_> = directories.map(|(uuid, path)| (uuid, path.to_owned())).collect();
        if !directories.is_empty() && !found.is_empty() {
            config.had_data.get_or_insert_with(|| HAD_DATA_EVIDENCE.to_owned());
        }
        let heap = heap.into();
        let memory = heap.extents.clone();
        let local = LocalStore::open_beside(config, disks, stored, heap, registry).await?;
        if local.has_disks() {
            local.log().ship_by(object.log());
        }
        let tier = Self {
            settings,
            metrics,
            memory,
            tasks,
            shuffles: DashMap::new(),
            ends: Arc::default(),
            recovered: Mutex::default(),
            is_draining: false.into(),
            wake: tokio::sync::Notify::new(),
            under_pressure: Mutex::default(),
            pass_lock: tokio::sync::Mutex::default(),
            local,
            object,
        };
        let is_here = |uuid| tier.local.core.disks.iter().any(|disk| disk.uuid == uuid);
        let missing = directories.iter().find(|(uuid, _)| !is_here(*uuid));
        let recovered = tier.take_over(found, missing.map(|(_, path)| path));
        *tier.recovered.lock() = recovered;
        if tier.local.has_disks() {
            // From now on the disks may have data that the store does not have.
            drop(tier.object.require_disks().await?);
        }
        Ok(Arc::new(tier))
    }

    /// Registers the shuffles that the disks recovered. Discards registrations in the store that
    /// are not among them, by key and incarnation. `missing` is a data directory that may have more
    /// of their blocks.
    fn take_over(&self, mut found: HashMap<ShuffleKey, u64>, missing: Option<&String>) -> Recovered {
        let mut recovered = self.local.take_recovered();
        for it in &mut recovered.shuffles {
            let key = &it.key;
            if let Some(path) = missing.filter(|_| it.reason.is_empty()) {
                it.reason = format!("data directory {path} is missing, or the blocks were in memory");
            }
            let Some(handle) = self.local.handle(key) else { continue };
            if found.get(key) == Some(&handle.incarnation()) {
                found.remove(key);
            }
            self.shuffles.insert(key.clone(), Arc::new(self.shuffle_of(key, handle, it.is_moved)));
        }
        for key in found.into_keys() {
            self.discard_found(&key);
        }
        recovered
    }

    /// Deletes the segments of a registration that has ended according to the metadata log. Keeps
    /// them if records of the log are missing.
    fn discard_found(&self, key: &ShuffleKey) {
        if self.local.metadata_gap().is_some() {
            tracing::warn!(shuffle = %key, "metadata is missing; keeping segments of an unknown registration");
            return self.object.leave(key);
        }
        if let Some(uploads) = self.object.uploads(key) {
            // A start on empty disks would recover this registration until the store knows of its
            // end. The next registration of the shuffle waits for that.
            self.ends.lock().insert(key.clone(), uploads.incarnation());
        }
        let deletion = Arc::clone(&self.object).forget(&key.app, std::slice::from_ref(key), Purge::Shuffles);
        if let Some(deletion) = deletion {
            self.tasks.spawn("object clean-up", deletion);
        }
    }
}
