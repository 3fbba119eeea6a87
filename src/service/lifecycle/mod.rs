//! Registration, heartbeats, unregistration, expiry, decommissioning, and restore at a start.
//!
//! If a tier has a metadata log, a registration is acknowledged once it is on the device, so that
//! it survives a crash and a power loss. An app or shuffle must be removed from the registry,
//! memory, and tiers together, under the registry's lock. A registration that follows at once
//! therefore finds no old state. Files are deleted afterwards, in tasks (`deletions`).

mod deletions;
pub(super) mod end;
pub(super) mod fairness;
mod memory_restorer;
mod registration_log;
mod report_batch;
pub(super) mod restore;

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use parking_lot::RwLock;
use prometheus::HistogramTimer;

use crate::app::{PartitionRanges, Registration};
use crate::clock::Instant;
use crate::compat::HEARTBEAT_TIMEOUT_PROPERTY;
use crate::memory::PurgedBuffers;
use crate::runtime::BlockingPool;
use crate::service::ServiceError;
use crate::service::diagnostics::Diagnostics;
use crate::service::diagnostics::explain::Presence;
use crate::service::parts::{ServiceConfig, ServiceParts, run_blocking};
use crate::service::quota::{self, QuotaConfig};
use crate::service::status::WorkerState;
use crate::store::{Admission, Cause, Purge, RemoteStorage};
use crate::telemetry::AUDIT;
use uniffle_wire::types::{AppId, Distribution, ShuffleId, ShuffleKey};

use deletions::Deletions;
use fairness::{FairnessConfig, Weights};
use registration_log::{NewRegistration, RemoteRegistration, register_and_log};

/// Limit of a week, so that the data of a departed app does not stay on disks forever.
const HEARTBEAT_TIMEOUT_MINUTES_MAX: u64 = 7 * 24 * 60;

/// Maximum bytes of keys and values kept of one registration. Spark's `.rss.` settings have a few
/// KiB.
const PROPERTIES_BYTES_MAX: usize = 64 << 10;

/// Number of characters of a user's name that are logged; clients may send any text.
const USER_CHARS_LOGGED: usize = 100;

/// Maximum length of a user's name. Kerberos principals have about 50 characters.
const USER_BYTES_MAX: usize = 1024;

/// Maximum length of a remote storage path, as in HDFS.
const REMOTE_PATH_BYTES_MAX: usize = 8000;

/// Maximum number of remote storage settings, and of their bytes. Coordinators send those of a name
/// service, a few KiB.
const REMOTE_SETTINGS_MAX: usize = 1000;
const REMOTE_SETTINGS_BYTES_MAX: usize = 64 << 10;

/// Maximum number of ranges of one registration. The registry bounds their union with earlier ones.
const RANGES_SENT_MAX: usize = 1 << 18;

/// Number of ranges above which those of a registration are merged on a blocking thread.
const INLINE_RANGES_MAX: usize = 4096;

/// Storage for decommissioning and tags, which outlives the process.
pub trait SettingsStore: fmt::Debug + Send + Sync {
    /// Saves the current settings.
    ///
    /// # Errors
    /// The path and the error of each file, if none was written.
    fn save(&self) -> BoxFuture<'_, Result<(), String>>;
}

/// Applications and shuffles from registration to removal, and the node's decommissioning.
#[derive(Debug)]
pub struct Lifecycle {
    parts: Arc<ServiceParts>,
    /// Pool for ends requested by clients. Ends of large applications take long, so reports and
    /// results use another pool.
    pub(super) ends: BlockingPool,
    deletions: Deletions,
    weights: Weights,
    diagnostics: Arc<Diagnostics>,
    decommission_check_interval: Duration,
    settings_store: OnceLock<Weak<dyn SettingsStore>>,
}

/// A `registerShuffle` request.
#[derive(Debug, Clone)]
pub struct RegisterRequest<'a> {
    /// Application id as sent.
    pub app: &'a str,
    /// Shuffle id. Those of Tez overflow into negative values.
    pub shuffle: i32,
    /// Closed ranges of partitions.
    pub ranges: Vec<(i32, i32)>,
    /// Spark user.
    pub user: String,
    /// Requested block order inside extents.
    pub distribution: Distribution,
    /// Client configuration.
    pub properties: HashMap<String, String>,
    /// Storage from which the client reads cold data, or `None` if it sent no remote path.
    pub remote_storage: Option<RemoteStorage>,
    /// Client address, if known.
    pub from: Option<IpAddr>,
}

impl Lifecycle {
    pub(super) fn new(
        parts: &Arc<ServiceParts>,
        diagnostics: &Arc<Diagnostics>,
        config: ServiceConfig,
    ) -> Self {
        Self {
            ends: BlockingPool::sized_by_cores(),
            deletions: Deletions::new(parts.tiers.len(), parts.tasks.clone()),
            weights: Weights { config: RwLock::new(config.fairness), memory: parts.memory.clone() },
            diagnostics: Arc::clone(diagnostics),
            decommission_check_interval: config.decommission_check_interval,
            settings_store: OnceLock::new(),
            parts: Arc::clone(parts),
        }
    }

    /// Sets the storage used by [`Lifecycle::save_settings`]. Only the first call counts.
    pub fn set_settings_store(&self, store: Weak<dyn SettingsStore>) {
        let _ = self.settings_store.set(store);
    }

    /// Saves decommissioning and tags, if a storage is set.
    ///
    /// # Errors
    /// [`ServiceError::NotSaved`]. The settings are in effect nevertheless.
    pub async fn save_settings(&self) -> Result<(), ServiceError> {
        match self.settings_store.get().and_then(Weak::upgrade) {
            Some(store) => store.save().await.map_err(ServiceError::NotSaved),
            None => Ok(()),
        }
    }

    /// Registers a shuffle and its partitions. Repeating it is harmless; further ranges are added.
    ///
    /// # Errors
    /// The worker is being drained, a field is invalid or too large, a limit, the heap or a quota
    /// has no room, or the remote storage cannot be used; nothing was registered then. Or the log
    /// fails: the registration is in effect, but a later start may not know it.
    pub async fn register(&self, request: RegisterRequest<'_>) -> Result<(), ServiceError> {
        let key = ShuffleKey::new(AppId::parse(request.app)?, ShuffleId(request.shuffle));
        check_sizes(&request)?;
        if self.parts.status.is_draining() {
            return Err(ServiceError::Stopping);
        }
        let is_small = request.ranges.len() <= INLINE_RANGES_MAX;
        let sent = request.ranges.clone();
        let ranges =
            run_blocking(&self.parts.pool, is_small, move || PartitionRanges::parse(&sent)).await??;
        let wanted_storage = request.remote_storage.as_ref();
        let (admissions, is_remote) = self.admissions(wanted_storage)?;
        let partitions = ranges.partition_count();
        let new_app = self.parts.apps.find(&key.app).is_none();
        let user: String = request.user.chars().take(USER_CHARS_LOGGED).collect();
        let registration = Registration {
            key: key.clone(),
            ranges,
            distribution: request.distribution,
            user: request.user,
            sent_properties: !request.properties.is_empty(),
            heartbeat_timeout: wanted_timeout(&request.properties),
            properties: bounded_properties(request.properties),
            // An HDFS client keeps its settings twice: in its key and in its connection.
            other_modules_bytes: wanted_storage.map_or(0, |storage| 2 * remote_bytes(storage) as u64),
            from: request.from,
        };
        let remote = is_remote.then(|| RemoteRegistration::new(wanted_storage, &request.ranges));
        let logged =
            self.parts.tiers.metadata().map(|tier| (tier, NewRegistration::of(&registration, remote)));
        let apps = &self.parts.apps;
        let register = || {
            apps.register(registration, || {
                self.parts.memory.register(&key, request.distribution);
                admissions.iter().for_each(|admit| admit(&key, &request.ranges));
            })?;
            if let Some(app) = apps.find(&key.app) {
                self.weights.weigh(&app);
            }
            Ok(())
        };
        match logged {
            Some((tier, new)) => register_and_log(apps, &key, tier, &self.parts.tiers, new, register).await?,
            None => register()?,
        }
        self.parts.metrics.apps_registered.inc_by(u64::from(new_app));
        self.parts.metrics.partitions_registered.inc_by(partitions);
        if new_app {
            tracing::info!(target: AUDIT, app = %key.app, user, "registered");
        }
        tracing::debug!(shuffle = %key, partitions, "registered");
        Ok(())
    }

    /// Records that the app is alive.
    ///
    /// # Errors
    /// `NO_REGISTER` if the app is unknown.
    pub fn heartbeat(&self, app: &str) -> Result<(), ServiceError> {
        self.parts.touched_app(app).map(drop)
    }

    /// Removes a shuffle. Its memory is free on return, and its files are deleted soon after.
    ///
    /// # Errors
    /// `NO_REGISTER` if the app is unknown; an unknown shuffle is no error.
    pub fn unregister_shuffle(&self, app: &str, shuffle: i32) -> Result<(), ServiceError> {
        let app = self.parts.app(app)?;
        let key = ShuffleKey::new(app.id().clone(), ShuffleId(shuffle));
        let keys = std::slice::from_ref(&key);
        let remove = || self.purge_state(&key.app, keys, Purge::Shuffles);
        let (removed, _purged) = self.parts.apps.remove_shuffle(&key, remove);
        self.parts.metrics.unregisters.inc_by(u64::from(removed));
        tracing::info!(target: AUDIT, shuffle = %key, "unregistered");
        Ok(())
    }

    /// Removes an app with all its shuffles.
    ///
    /// # Errors
    /// [`ServiceError::NotRegistered`].
    pub fn unregister_app(&self, app: &str) -> Result<(), ServiceError> {
        let id = AppId::parse(app).map_err(|_| ServiceError::NotRegistered)?;
        let remove = || {
            self.parts
                .apps
                .remove_app(&id, |keys| self.purge_state(&id, &keys, Purge::App(Cause::Unregistered)))
                .is_some()
        };
        if !self.diagnostics.remove_explained(&id, Presence::Unregistered, remove) {
            return Err(ServiceError::NotRegistered);
        }
        self.parts.metrics.unregisters.inc();
        tracing::info!(target: AUDIT, app = %id, "unregistered");
        self.note_if_empty();
        Ok(())
    }

    /// Notifies at once those waiting for an idle worker: the coordinators, and through them an
    /// operator.
    fn note_if_empty(&self) {
        if self.parts.apps.app_count() == 0 {
            self.parts.status.note_emptied();
        }
    }

    /// Expiry: purges applications without a heartbeat or call within their timeout. Returns how
    /// many.
    pub fn expire_apps(&self) -> usize {
        let mut purged = 0;
        for id in self.parts.apps.expired() {
            let purge = |keys: Vec<ShuffleKey>| self.purge_state(&id, &keys, Purge::App(Cause::Expired));
            let remove = || self.parts.apps.remove_app_if_expired(&id, purge).is_some();
            if self.diagnostics.remove_explained(&id, Presence::Expired, remove) {
                purged += 1;
                tracing::info!(target: AUDIT, app = %id, "application expired without a heartbeat; purged");
            }
        }
        if purged > 0 {
            self.note_if_empty();
        }
        self.parts.metrics.apps_expired.inc_by(purged);
        usize::try_from(purged).unwrap_or(usize::MAX)
    }

    /// Checks whether a decommissioning is complete: no app is left.
    pub fn check_decommission(&self) {
        let apps = self.parts.apps.app_count();
        if self.parts.status.observe_apps(apps) {
            tracing::info!(target: AUDIT, "decommissioned; no applications are left");
        } else if self.parts.status.state() == WorkerState::Decommissioning {
            tracing::info!(apps, "decommissioning; waiting for applications to end");
        }
    }

    /// Expires tickets and apps, advises the pages of memory, and checks a decommissioning at their
    /// intervals, until the worker stops.
    pub async fn run_expiry(self: Arc<Self>, tickets_every: Duration, apps_every: Duration) {
        let stopped = self.parts.tasks.cancelled();
        tokio::pin!(stopped);
        let mut tickets = tokio::time::interval(tickets_every);
        let mut apps = tokio::time::interval(apps_every);
        let mut decommission = tokio::time::interval(self.decommission_check_interval);
        loop {
            tokio::select! {
                biased;
                () = &mut stopped => return,
                _ = tickets.tick() => {
                    let expired = self.parts.memory.expire_tickets(Instant::now());
                    if expired > 0 {
                        tracing::debug!(expired, "tickets expired");
                    }
                    self.parts.memory.advise_used_pages();
                }
                _ = apps.tick() => {
                    self.end_expired_apps().await;
                    self.end_metadata_gap().await;
                }
                _ = decommission.tick() => self.check_decommission(),
                // The first check runs at once, as in Java, so that an operator with an idle worker
                // need not wait for an interval.
                () = self.parts.status.decommission_began() => decommission.reset_immediately(),
            }
        }
    }

    /// Takes the node out of service for an operator, in any state.
    pub fn decommission(&self) {
        self.parts.status.decommission();
        tracing::info!(target: AUDIT, apps = self.parts.apps.app_count(), "decommissioning");
    }

    /// Takes the node out of service for a coordinator, as [`Lifecycle::decommission`] does.
    ///
    /// # Errors
    /// [`ServiceError::WrongState`] if the node is unhealthy, as the Java server answers.
    pub fn decommission_healthy(&self) -> Result<(), ServiceError> {
        if self.parts.status.state() == WorkerState::Unhealthy {
            return Err(ServiceError::WrongState(
                "an unhealthy worker cannot be decommissioned by a coordinator; use POST \
                 /admin/decommission",
            ));
        }
        self.decommission();
        Ok(())
    }

    /// Puts the node back into service for an operator.
    pub fn cancel_decommission(&self) {
        self.parts.status.cancel_decommission();
        self.parts.tiers.iter().filter_map(|tier| tier.drain()).for_each(|tier| tier.cancel());
        tracing::info!(target: AUDIT, "decommissioning cancelled");
    }

    /// Begins to flush everything in memory to the tiers below, for an operator. Returns how many
    /// batches are in flight.
    ///
    /// # Errors
    /// [`ServiceError::Unsupported`] without a tier below memory.
    pub fn flush_all(&self) -> Result<usize, ServiceError> {
        let Some(flusher) = &self.parts.flusher else {
            return Err(ServiceError::Unsupported("this worker has no tier below memory"));
        };
        flusher.flush_all();
        Ok(flusher.unfinished())
    }

    /// Replaces the weights with immediate effect.
    pub fn set_fairness(&self, fairness: &FairnessConfig) {
        self.weights.config.write().clone_from(fairness);
        self.parts
            .apps
            .apps()
            .iter()
            .filter(|app| app.has_shuffles())
            .for_each(|app| self.weights.weigh(app));
    }

    /// Replaces the quotas with immediate effect.
    pub fn set_quotas(&self, quotas: &QuotaConfig) {
        quota::set(&self.parts.apps, quotas);
    }

    /// Removes the state from memory and every tier, and leaves slow deletions to tasks. Runs under
    /// the registry's lock, except at a restore for a shuffle without a registration. The removal
    /// time is measured until the data that this worker serves is gone. The memory is freed when
    /// the returned values are dropped, which must happen after the lock is released.
    pub(super) fn purge_state(&self, app: &AppId, keys: &[ShuffleKey], purge: Purge) -> Vec<PurgedBuffers> {
        let removal = match purge {
            Purge::Shuffles => &self.parts.metrics.shuffle_removal,
            Purge::App(_) => {
                self.parts.memory.forget_app(app);
                &self.parts.metrics.app_removal
            }
        };
        let timer = Arc::new(removal.start_timer());
        let purged = keys.iter().filter_map(|key| self.parts.memory.forget(key)).collect();
        for (at, tier) in self.parts.tiers.iter().enumerate() {
            let timer: Option<Arc<HistogramTimer>> = tier.served().map(|_| Arc::clone(&timer));
            if let Some(deletion) = Arc::clone(tier).forget(app, keys, purge) {
                let timed = deletion.map(|()| drop(timer));
                self.deletions.add(at, timed.boxed());
            }
        }
        purged
    }

    /// Returns closures that register a shuffle in the tiers that accept it, and whether clients
    /// read one of these tiers directly.
    fn admissions(&self, wanted: Option<&RemoteStorage>) -> Result<(Vec<Admission>, bool), ServiceError> {
        let (mut admissions, mut is_remote) = (Vec::new(), false);
        for tier in self.parts.tiers.iter() {
            let admission = Arc::clone(tier).prepare(wanted).map_err(ServiceError::RemoteStorage)?;
            is_remote |= admission.is_some() && tier.served().is_none();
            admissions.extend(admission);
        }
        if admissions.is_empty() && !self.parts.tiers.is_empty() {
            return Err(ServiceError::NoRemoteStorage);
        }
        Ok((admissions, is_remote))
    }
}

/// Checks the size of each stored field; every legitimate registration is small.
fn check_sizes(request: &RegisterRequest<'_>) -> Result<(), ServiceError> {
    let (path, settings, bytes) = match &request.remote_storage {
        Some(storage) => (storage.path.len(), storage.conf.len(), remote_bytes(storage)),
        None => (0, 0, 0),
    };
    let bounds = [
        ("user", request.user.len(), "bytes", USER_BYTES_MAX),
        ("partitionRanges", request.ranges.len(), "ranges", RANGES_SENT_MAX),
        ("remoteStorage.path", path, "bytes", REMOTE_PATH_BYTES_MAX),
        ("remoteStorage.remoteStorageConf", settings, "settings", REMOTE_SETTINGS_MAX),
        ("remoteStorage.remoteStorageConf", bytes, "bytes", REMOTE_SETTINGS_BYTES_MAX),
    ];
    match bounds.into_iter().find(|(_, size, _, max)| size > max) {
        Some((field, size, unit, max)) => Err(ServiceError::FieldTooLarge { field, size, unit, max }),
        None => Ok(()),
    }
}

fn remote_bytes(storage: &RemoteStorage) -> usize {
    storage.conf.iter().map(|(key, value)| key.len() + value.len()).sum()
}

/// Returns the timeout that an app requests instead of `app_heartbeat_timeout_min`. Text that is
/// not a number of minutes is ignored.
fn wanted_timeout(properties: &HashMap<String, String>) -> Option<Duration> {
    let minutes: u64 = properties.get(HEARTBEAT_TIMEOUT_PROPERTY)?.trim().parse().ok()?;
    Some(Duration::from_secs(60 * minutes.clamp(1, HEARTBEAT_TIMEOUT_MINUTES_MAX)))
}

/// Returns the properties to keep, within bounds. Java keeps properties with the same names.
fn bounded_properties(mut properties: HashMap<String, String>) -> HashMap<String, String> {
    let mut bytes = 0;
    properties.retain(|key, value| {
        let is_ours = key.contains(".rss.");
        let size = key.len() + value.len();
        let fits = bytes + size <= PROPERTIES_BYTES_MAX;
        if is_ours && fits {
            bytes += size;
        }
        is_ours && fits
    });
    properties.shrink_to_fit();
    properties
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeout_of(text: &str) -> Option<u64> {
        let properties = [(HEARTBEAT_TIMEOUT_PROPERTY.to_owned(), text.to_owned())].into();
        wanted_timeout(&properties).map(|timeout| timeout.as_secs())
    }

    #[test]
    fn heartbeat_timeout_is_bounded() {
        assert_eq!(timeout_of("30"), Some(1800));
        assert_eq!(timeout_of("0"), Some(60));
        assert_eq!(timeout_of("18446744073709551615"), Some(7 * 86_400));
        for nonsense in ["", "-1", "soon", "1.5", "18446744073709551616", "\0"] {
            assert_eq!(timeout_of(nonsense), None, "{nonsense:?}");
        }
        assert_eq!(wanted_timeout(&HashMap::new()), None);
    }

    #[test]
    fn properties_are_bounded_and_selected_by_name() {
        let huge = "x".repeat(PROPERTIES_BYTES_MAX);
        let sent = [("spark.rss.a", "1"), ("spark.other", "2"), ("b.rss.huge", huge.as_str())];
        let sent = sent.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let bounded = bounded_properties(sent.into());
        assert_eq!(bounded, HashMap::from([("spark.rss.a".to_owned(), "1".to_owned())]));
    }
}
