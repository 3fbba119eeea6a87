//! Apps and their shuffles, with the time of their last use.
//!
//! Removal takes the same lock as registration. Callers pass related work as `with` closures, which
//! run under that lock. Invariant: a purge and a registration of the same app never interleave. A
//! shuffle that recovery may have missed is registered as incomplete (`unverified_apps`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dashmap::DashMap;
use parking_lot::Mutex;

use super::AppConfig;
use super::application::{Activity, App, AppBudgets};
use super::block_ids::BlockIds;
use super::quota::{Quota, QuotaExceeded};
use super::ranges::PartitionRanges;
use super::record_counts::RecordCounts;
use super::registration::{RANGE_BYTES, RANGES_MAX, RegisterError, Registration, SHUFFLE_BYTES};
use super::registration_limiter::{RegistrationLimiter, RegistrationRoom};
use super::shuffle::{DiskUsage, RegisteredPartitions, Reports, ShuffleState};
use super::unverified_apps::UnverifiedApps;
use super::usage::{AppUsage, QuotaResource, Quotas, Users};
use crate::clock::Instant;
use crate::log::ShuffleLedger;
use uniffle_base::budget::heap::HeapFull;
use uniffle_base::budget::{Budget, Charge, Heap, HeapKind, NoCapacity};
use uniffle_wire::types::{AppId, ShuffleKey};

/// All applications.
#[derive(Debug)]
pub struct AppRegistry {
    config: AppConfig,
    /// Timeout for apps that register from now on without choosing their own.
    heartbeat_timeout_ms: AtomicU64,
    apps: DashMap<AppId, Arc<App>>,
    heap: Heap,
    answers: Budget,
    block_ids: Quota,
    started: Instant,
    /// Time of the last call for an app that was not known, in ms since `started`.
    unknown_call_ms: AtomicU64,
    /// The longest timeout of any app so far.
    longest_timeout_ms: AtomicU64,
    quotas: Arc<Quotas>,
    /// Locked while an app or a shuffle is added or removed together with its state elsewhere.
    lifecycle: Mutex<LifecycleState>,
}

/// State used only while apps and shuffles are added or removed.
#[derive(Debug)]
struct LifecycleState {
    users: Users,
    limiter: RegistrationLimiter,
    unverified: UnverifiedApps,
}

impl AppRegistry {
    /// Creates an empty registry. Registrations and reports are charged to `heap`. Each app gets a
    /// share of `answers`.
    #[must_use]
    pub fn new(config: AppConfig, heap: &Heap, answers: &Budget) -> Self {
        let block_ids = Quota::new(config.reported_blocks_max);
        let heartbeat_timeout_ms = AtomicU64::new(millis(config.heartbeat_timeout));
        let quotas = Arc::new(Quotas::default());
        Self {
            config,
            heartbeat_timeout_ms,
            apps: DashMap::new(),
            heap: heap.clone(),
            answers: answers.clone(),
            block_ids,
            started: Instant::now(),
            unknown_call_ms: AtomicU64::new(0),
            longest_timeout_ms: AtomicU64::new(0),
            lifecycle: Mutex::new(LifecycleState {
                users: Users::of(Arc::clone(&quotas)),
                limiter: RegistrationLimiter::of(heap),
                unverified: UnverifiedApps::default(),
            }),
            quotas,
        }
    }

    /// Returns the quotas of applications and users.
    #[must_use]
    pub fn quotas(&self) -> &Quotas {
        &self.quotas
    }

    /// Adds or refreshes an app and its shuffle, then runs `with` before they can be removed.
    ///
    /// # Errors
    /// [`RegisterError`]; nothing was changed then.
    pub fn register<T>(
        &self,
        registration: Registration,
        with: impl FnOnce() -> T,
    ) -> Result<T, RegisterError> {
        self.enter(registration, with, |room, budget, bytes| room.try_charge(budget, bytes))
    }

    /// Adds a registration that an earlier process acknowledged, as [`AppRegistry::register`] does.
    /// It is charged even beyond the capacity, in whatever order registrations come, because a
    /// refusal would lose written data.
    ///
    /// # Errors
    /// Those of [`AppRegistry::register`], except for a full heap.
    pub fn take_over<T>(
        &self,
        registration: Registration,
        with: impl FnOnce() -> T,
    ) -> Result<T, RegisterError> {
        self.enter(registration, with, |_, budget, bytes| Ok(budget.charge_unchecked(bytes)))
    }

    fn enter<T>(
        &self,
        registration: Registration,
        with: impl FnOnce() -> T,
        charged: impl Fn(&RegistrationRoom<'_>, &Budget, u64) -> Result<Charge, NoCapacity>,
    ) -> Result<T, RegisterError> {
        let mut alone = self.lifecycle.lock();
        let known = self.find(&registration.key.app);
        if known.is_none() && self.apps.len() >= self.config.apps_max {
            return Err(RegisterError::Apps(QuotaExceeded { max: self.config.apps_max as u64 }));
        }
        let fresh = || {
            let LifecycleState { users, limiter, .. } = &mut *alone;
            let part = limiter.budget(registration.from).share();
            self.fresh(&registration.key.app, part, users.usage(&registration.user))
        };
        let app = known.clone().unwrap_or_else(fresh);
        let room = alone.limiter.room(known.as_ref().map(|app| app.activity.age()));
        let charged = |bytes| {
            let charge = charged(&room, &app.budgets.registrations, bytes);
            charge.map_err(|refusal| HeapFull::of(HeapKind::Registrations, refusal))
        };
        // Only the increase is charged, so an app that fills its part can still repeat its
        // registration.
        let (bytes, before) = (registration.app_bytes(), app.client.charged_bytes());
        let more = charged(bytes.saturating_sub(before))?;
        self.add_shuffle(&app, &registration, &alone.unverified, charged)?;
        alone.unverified.registered(&registration.key);
        if known.is_none() {
            self.apps.insert(app.id().clone(), Arc::clone(&app));
        }
        self.touch(&app);
        let usual_ms = self.heartbeat_timeout_ms.load(Ordering::Relaxed);
        let timeout_ms = registration.heartbeat_timeout.map_or(usual_ms, millis);
        app.client.replace(registration, bytes, more);
        app.activity.set_timeout(timeout_ms);
        self.longest_timeout_ms.fetch_max(timeout_ms, Ordering::Relaxed);
        Ok(with())
    }

    /// Adds the shuffle of a registration, or adds ranges to a known shuffle.
    fn add_shuffle(
        &self,
        app: &App,
        registration: &Registration,
        unverified: &UnverifiedApps,
        charged: impl Fn(u64) -> Result<Charge, HeapFull>,
    ) -> Result<(), RegisterError> {
        let Registration { key, ranges, .. } = registration;
        let known = app.shuffle(key.shuffle);
        let max = self.config.shuffles_per_app_max;
        if known.is_none() && app.shuffles.read().len() >= max {
            return Err(RegisterError::Shuffles(QuotaExceeded { max: max as u64 }));
        }
        let (mut all, fixed) = match &known {
            Some(shuffle) => (shuffle.partitions.ranges(), 0),
            None => (PartitionRanges::default(), SHUFFLE_BYTES),
        };
        let (before, partitions) = (all.range_count(), all.partition_count());
        all.extend(ranges);
        if all.range_count() > RANGES_MAX {
            return Err(RegisterError::Ranges { ranges: all.range_count() });
        }
        // When ranges merge, their charge stays with the shuffle.
        let bytes = fixed + RANGE_BYTES * all.range_count().saturating_sub(before) as u64;
        let charge = charged(bytes)?;
        let partitions =
            app.usage.take(QuotaResource::Partitions, all.partition_count().saturating_sub(partitions))?;
        let Some(shuffle) = known else {
            let heap = &app.budgets.reported_ids;
            let counted = app.usage.count(QuotaResource::ReportedIds, 0);
            let reports =
                Reports::new(BlockIds::new(&self.block_ids, heap, counted), RecordCounts::new(heap));
            let on_disk = DiskUsage::new(app.usage.count(QuotaResource::DiskBytes, 0));
            let partitions = RegisteredPartitions::new(all, charge, partitions);
            let mut fresh =
                ShuffleState::new(key.clone(), partitions, reports, on_disk, ShuffleLedger::new(heap));
            if let Some(reason) = unverified.shuffle_reason(key) {
                fresh.mark_unverified(reason);
            }
            app.shuffles.write().insert(key.shuffle, Arc::new(fresh));
            return Ok(());
        };
        shuffle.partitions.replace(all, charge, partitions);
        Ok(())
    }

    /// Records a shuffle that recovery found, where `reason` may have hidden other shuffles of its
    /// app. A shuffle of that app that is registered later with an id not above the highest found
    /// one counts as incomplete, unless it was unregistered before (`unverified_apps`).
    pub fn found_unverified(&self, key: &ShuffleKey, reason: &Arc<str>) {
        self.lifecycle.lock().unverified.found(key, reason);
    }

    /// Records a shuffle that has files but no registration, as [`AppRegistry::found_unverified`]
    /// does.
    pub fn found_without_registration(&self, key: &ShuffleKey, reason: &Arc<str>) {
        self.lifecycle.lock().unverified.found_without_registration(key, reason);
    }

    /// Returns the shuffles that have files but no registration, and why the registration may be
    /// lost.
    #[must_use]
    pub fn all_without_registration(&self) -> Vec<(ShuffleKey, Arc<str>)> {
        self.lifecycle.lock().unverified.all_without_registration()
    }

    /// Returns why an unknown app may have existed before the start.
    #[must_use]
    pub fn unverified_reason(&self, app: &AppId) -> Option<Arc<str>> {
        self.lifecycle.lock().unverified.app_reason(app)
    }

    /// Forgets which shuffles may have been registered before the start. To be called once no app
    /// is left ([`AppRegistry::is_abandoned`]) and the metadata log has recorded the end of its
    /// gap.
    pub fn forget_unverified(&self) {
        self.lifecycle.lock().unverified = UnverifiedApps::default();
    }

    /// Records a call for an app that is not known, which an earlier process may have known.
    pub fn note_unknown_call(&self) {
        self.unknown_call_ms.fetch_max(self.now_ms(), Ordering::Relaxed);
    }

    /// Returns whether no app is left: none is known, and the last call of an unknown app (or the
    /// start) is longer ago than the longest timeout.
    #[must_use]
    pub fn is_abandoned(&self) -> bool {
        let usual_ms = self.heartbeat_timeout_ms.load(Ordering::Relaxed);
        let timeout_ms = self.longest_timeout_ms.load(Ordering::Relaxed).max(usual_ms);
        let silent_ms = self.now_ms().saturating_sub(self.unknown_call_ms.load(Ordering::Relaxed));
        self.apps.is_empty() && silent_ms > timeout_ms
    }

    /// Replaces the timeout for apps that register from now on.
    pub fn set_heartbeat_timeout(&self, timeout: Duration) {
        self.heartbeat_timeout_ms.store(millis(timeout), Ordering::Relaxed);
    }

    /// Creates an app that is not yet in the registry. It is inserted before it is touched and must
    /// not look expired in between.
    fn fresh(&self, id: &AppId, registrations: Budget, usage: AppUsage) -> Arc<App> {
        let timeout_ms = self.heartbeat_timeout_ms.load(Ordering::Relaxed);
        let budgets = AppBudgets::new(&self.heap, registrations, &self.answers);
        App::new(id, Activity::new(self.now_ms(), timeout_ms), budgets, usage)
    }

    /// Returns the app without refreshing it.
    #[must_use]
    pub fn find(&self, id: &AppId) -> Option<Arc<App>> {
        self.apps.get(id).map(|entry| Arc::clone(&entry))
    }

    /// Marks the app as used now.
    pub fn touch(&self, app: &App) {
        app.activity.touch(self.now_ms());
    }

    /// Marks all apps as used now, including unknown ones: after a restart every app gets its full
    /// timeout.
    pub fn touch_all(&self) {
        self.note_unknown_call();
        self.apps.iter().for_each(|app| self.touch(&app));
    }

    /// Removes one shuffle and runs `with` before it can be registered again. Returns whether the
    /// shuffle was known, and the result of `with` if its app is known. Values that are slow to
    /// drop belong in that result, because it is dropped after the lock is released.
    pub fn remove_shuffle<T>(&self, key: &ShuffleKey, with: impl FnOnce() -> T) -> (bool, Option<T>) {
        let mut alone = self.lifecycle.lock();
        let Some(app) = self.find(&key.app) else { return (false, None) };
        alone.unverified.unregistered(key);
        let removed = app.shuffles.write().remove(&key.shuffle);
        let given = with();
        // The shuffle's reports may hold millions of ids, so they are dropped outside the lock.
        drop(alone);
        (removed.is_some(), Some(given))
    }

    /// Removes an app and runs `with` on its shuffles before it can be registered again. Returns
    /// the result of `with` (see [`AppRegistry::remove_shuffle`]), or `None` if the app is not
    /// known.
    pub fn remove_app<T>(&self, id: &AppId, with: impl FnOnce(Vec<ShuffleKey>) -> T) -> Option<T> {
        self.remove_app_if(id, |_| true, with)
    }

    /// Removes an app as [`AppRegistry::remove_app`] does, but only if it is still expired. Time
    /// passes between finding an expired app and purging it (docs/protocol.md §11 purge-recheck).
    pub fn remove_app_if_expired<T>(&self, id: &AppId, with: impl FnOnce(Vec<ShuffleKey>) -> T) -> Option<T> {
        self.remove_app_if(id, |app| self.is_expired(app), with)
    }

    fn remove_app_if<T>(
        &self,
        id: &AppId,
        condition: impl Fn(&App) -> bool,
        with: impl FnOnce(Vec<ShuffleKey>) -> T,
    ) -> Option<T> {
        let mut alone = self.lifecycle.lock();
        let (_, app) = self.apps.remove_if(id, |_, app| condition(app))?;
        alone.unverified.ended(id);
        let shuffles = std::mem::take(&mut *app.shuffles.write());
        let given = with(shuffles.values().map(|shuffle| shuffle.key().clone()).collect());
        // Large values are dropped outside the lock, as in `remove_shuffle`.
        drop(alone);
        Some(given)
    }

    /// Returns the apps without use for longer than their timeout.
    #[must_use]
    pub fn expired(&self) -> Vec<AppId> {
        self.apps.iter().filter(|app| self.is_expired(app)).map(|app| app.id().clone()).collect()
    }

    /// Returns the time since the app was last used.
    #[must_use]
    pub fn idle(&self, app: &App) -> Duration {
        app.activity.idle(self.now_ms())
    }

    fn is_expired(&self, app: &App) -> bool {
        self.idle(app) > app.activity.timeout()
    }

    fn now_ms(&self) -> u64 {
        millis(self.started.elapsed())
    }

    /// Returns all apps.
    #[must_use]
    pub fn apps(&self) -> Vec<Arc<App>> {
        self.apps.iter().map(|app| Arc::clone(&app)).collect()
    }

    /// Returns the number of known apps.
    #[must_use]
    pub fn app_count(&self) -> usize {
        self.apps.len()
    }

    /// Returns the number of stored block ids from reports.
    #[must_use]
    pub fn block_id_count(&self) -> u64 {
        self.block_ids.used()
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
