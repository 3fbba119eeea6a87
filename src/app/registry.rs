//! Apps and their shuffles, with the time of their last use.
//!
//! Removing is done under the lock that registering takes, and the caller passes the work that must happen with it
//! (`with` closures), so that a purge and a registration of the same app never interleave.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dashmap::DashMap;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::AppConfig;
use super::application::App;
use super::block_ids::BlockIds;
use super::quota::{Quota, QuotaExceeded};
use super::ranges::PartitionRanges;
use super::record_counts::RecordCounts;
use super::registration::{RANGE_BYTES, RANGES_MAX, RegisterError, Registration, SHUFFLE_BYTES};
use super::shuffle::ShuffleState;
use super::sources::Sources;
use super::unproven::Unproven;
use super::usage::{Counted, Quotas, Usage, Users};
use crate::budget::heap::HeapFull;
use crate::budget::{Budget, Charge, Heap, HeapKind, NoCapacity};
use uniffle_wire::types::{AppId, ShuffleKey};

/// All applications.
#[derive(Debug)]
pub struct AppRegistry {
    config: AppConfig,
    /// For apps that register from now on and do not choose another.
    heartbeat_timeout_ms: AtomicU64,
    apps: DashMap<AppId, Arc<App>>,
    heap: Heap,
    answers: Budget,
    block_ids: Quota,
    started: Instant,
    quotas: Arc<Quotas>,
    /// Held while an app or shuffle is added or removed together with its state elsewhere.
    lifecycle: Mutex<Alone>,
}

/// What only those see that add and remove.
#[derive(Debug)]
struct Alone {
    users: Users,
    sources: Sources,
    unproven: Unproven,
}

impl AppRegistry {
    /// No apps. What is registered and reported is charged to `heap`; of `answers` each app may have half.
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
            lifecycle: Mutex::new(Alone {
                users: Users::of(Arc::clone(&quotas)),
                sources: Sources::of(heap),
                unproven: Unproven::default(),
            }),
            quotas,
        }
    }

    /// What one application and one user may have.
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
        self.enter(registration, with, Budget::try_charge)
    }

    /// As [`AppRegistry::register`], of a registration that an earlier process acknowledged: there is heap for it, in
    /// whatever order they come, or what was written would be lost.
    ///
    /// # Errors
    /// As there, but for the heap.
    pub fn take_over<T>(
        &self,
        registration: Registration,
        with: impl FnOnce() -> T,
    ) -> Result<T, RegisterError> {
        self.enter(registration, with, |budget, bytes| Ok(budget.force_charge(bytes)))
    }

    fn enter<T>(
        &self,
        registration: Registration,
        with: impl FnOnce() -> T,
        charged: impl Fn(&Budget, u64) -> Result<Charge, NoCapacity>,
    ) -> Result<T, RegisterError> {
        let mut alone = self.lifecycle.lock();
        let known = self.find(&registration.key.app);
        if known.is_none() && self.apps.len() >= self.config.apps_max {
            return Err(RegisterError::Apps(QuotaExceeded { max: self.config.apps_max as u64 }));
        }
        let fresh = || {
            let Alone { users, sources, .. } = &mut *alone;
            let part = sources.budget(registration.from).share();
            self.fresh(&registration.key.app, part, users.usage(&registration.user))
        };
        let app = known.clone().unwrap_or_else(fresh);
        let charged = |bytes| {
            let charge = charged(&app.registrations, bytes);
            charge.map_err(|refusal| HeapFull::of(HeapKind::Registrations, refusal))
        };
        // Only what it has more: one that fills its part can still register what it has.
        let (bytes, before) = (registration.app_bytes(), app.charge.lock().bytes());
        let more = charged(bytes.saturating_sub(before))?;
        self.add_shuffle(&app, &registration, &alone.unproven, charged)?;
        alone.unproven.registered(&registration.key);
        if known.is_none() {
            self.apps.insert(app.id().clone(), Arc::clone(&app));
        }
        self.touch(&app);
        let Registration { user, properties, sent_properties, heartbeat_timeout, .. } = registration;
        *app.user.write() = user;
        *app.properties.write() = properties;
        let less = {
            let mut charge = app.charge.lock();
            charge.merge(more);
            let surplus = charge.bytes() - bytes;
            charge.split_up_to(surplus)
        };
        drop(less);
        app.sends_properties.fetch_or(sent_properties, Ordering::Relaxed);
        let usual_ms = self.heartbeat_timeout_ms.load(Ordering::Relaxed);
        app.heartbeat_timeout_ms.store(heartbeat_timeout.map_or(usual_ms, millis), Ordering::Relaxed);
        Ok(with())
    }

    /// Adds the shuffle of a registration, or its ranges.
    fn add_shuffle(
        &self,
        app: &App,
        registration: &Registration,
        unproven: &Unproven,
        charged: impl Fn(u64) -> Result<Charge, HeapFull>,
    ) -> Result<(), RegisterError> {
        let Registration { key, ranges, .. } = registration;
        let known = app.shuffle(key.shuffle);
        let max = self.config.shuffles_per_app_max;
        if known.is_none() && app.shuffles.read().len() >= max {
            return Err(RegisterError::Shuffles(QuotaExceeded { max: max as u64 }));
        }
        let (mut all, fixed) = match &known {
            Some(shuffle) => (shuffle.ranges.read().clone(), 0),
            None => (PartitionRanges::default(), SHUFFLE_BYTES),
        };
        let (before, partitions) = (all.ranges(), all.count());
        all.extend(ranges);
        if all.ranges() > RANGES_MAX {
            return Err(RegisterError::Ranges { ranges: all.ranges() });
        }
        // Ranges that grow together leave what they were charged with the shuffle.
        let bytes = fixed + RANGE_BYTES * all.ranges().saturating_sub(before) as u64;
        let charge = charged(bytes)?;
        let partitions = app.usage().take(Counted::Partitions, all.count().saturating_sub(partitions))?;
        let Some(shuffle) = known else {
            let counted = app.usage().count(Counted::ReportedIds, 0);
            let block_ids = BlockIds::new(&self.block_ids, &app.reported_ids, counted);
            let on_disk = app.usage().count(Counted::DiskBytes, 0);
            let reported = (block_ids, RecordCounts::new(&app.reported_ids));
            let mut fresh = ShuffleState::new(key.clone(), (all, charge), reported, (partitions, on_disk));
            if let Some(reason) = unproven.reason(key) {
                fresh.mark_unproven(reason);
            }
            app.shuffles.write().insert(key.shuffle, Arc::new(fresh));
            return Ok(());
        };
        shuffle.charge.lock().merge(charge);
        shuffle.partitions.lock().merge(partitions);
        *shuffle.ranges.write() = all;
        Ok(())
    }

    /// Recovery found a shuffle, and for `reason` may not have found others of its app: from now on one that is registered
    /// anew may be one of those, and is incomplete then (`unproven`).
    pub fn found_unproven(&self, key: &ShuffleKey, reason: &Arc<str>) {
        self.lifecycle.lock().unproven.found(key, reason);
    }

    /// As [`AppRegistry::found_unproven`], of a shuffle that has files and no registration.
    pub fn left_unproven(&self, key: &ShuffleKey, reason: &Arc<str>) {
        self.lifecycle.lock().unproven.left(key, reason);
    }

    /// Shuffles that have files and no registration, and why that may be lost.
    #[must_use]
    pub fn all_left_unproven(&self) -> Vec<(ShuffleKey, Arc<str>)> {
        self.lifecycle.lock().unproven.all_left()
    }

    /// Why an app that is not known may have been before the start.
    #[must_use]
    pub fn unproven_reason(&self, app: &AppId) -> Option<Arc<str>> {
        self.lifecycle.lock().unproven.reason_of(app)
    }

    /// Replaces the timeout of apps that register from now on.
    pub fn set_heartbeat_timeout(&self, timeout: Duration) {
        self.heartbeat_timeout_ms.store(millis(timeout), Ordering::Relaxed);
    }

    /// An app that is not in the registry yet. It is in there before it is touched, and must not look expired in between.
    fn fresh(&self, id: &AppId, registrations: Budget, usage: Usage) -> Arc<App> {
        let timeout_ms = self.heartbeat_timeout_ms.load(Ordering::Relaxed);
        App::new(id, (&self.heap, registrations), &self.answers, (self.now_ms(), timeout_ms), usage)
    }

    /// The app, without refreshing it.
    #[must_use]
    pub fn find(&self, id: &AppId) -> Option<Arc<App>> {
        self.apps.get(id).map(|entry| Arc::clone(&entry))
    }

    /// Marks the app as used now.
    pub fn touch(&self, app: &App) {
        app.last_use_ms.fetch_max(self.now_ms(), Ordering::Relaxed);
    }

    /// Marks all apps as used now: after a restart every one gets its full timeout.
    pub fn touch_all(&self) {
        self.apps.iter().for_each(|app| self.touch(&app));
    }

    /// Removes one shuffle and runs `with` before it can be registered again. Whether it was known, and what `with` gave if
    /// its app is; what takes long to drop belongs in there, because it is dropped after the lock is free.
    pub fn remove_shuffle<T>(&self, key: &ShuffleKey, with: impl FnOnce() -> T) -> (bool, Option<T>) {
        let mut alone = self.lifecycle.lock();
        let Some(app) = self.find(&key.app) else { return (false, None) };
        alone.unproven.unregistered(key);
        let removed = app.shuffles.write().remove(&key.shuffle);
        let given = with();
        // What was reported of it may be millions of ids.
        drop(alone);
        (removed.is_some(), Some(given))
    }

    /// Removes an app and runs `with` on its shuffles before it can be registered again; what that gave, see
    /// [`AppRegistry::remove_shuffle`]. None if the app was not known.
    pub fn remove_app<T>(&self, id: &AppId, with: impl FnOnce(Vec<ShuffleKey>) -> T) -> Option<T> {
        self.remove_app_if(id, |_| true, with)
    }

    /// As [`AppRegistry::remove_app`], but only if the app is still expired (docs/protocol.md §11 trap 73: time passes
    /// between finding an expired app and purging it).
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
        alone.unproven.ended(id);
        let shuffles = std::mem::take(&mut *app.shuffles.write());
        let given = with(shuffles.values().map(|shuffle| shuffle.key().clone()).collect());
        // As there.
        drop(alone);
        Some(given)
    }

    /// Apps without use for longer than the timeout.
    #[must_use]
    pub fn expired(&self) -> Vec<AppId> {
        self.apps.iter().filter(|app| self.is_expired(app)).map(|app| app.id().clone()).collect()
    }

    /// Since the app was last used.
    #[must_use]
    pub fn idle(&self, app: &App) -> Duration {
        Duration::from_millis(self.now_ms().saturating_sub(app.last_use_ms.load(Ordering::Relaxed)))
    }

    fn is_expired(&self, app: &App) -> bool {
        let idle_ms = self.now_ms().saturating_sub(app.last_use_ms.load(Ordering::Relaxed));
        idle_ms > app.heartbeat_timeout_ms.load(Ordering::Relaxed)
    }

    fn now_ms(&self) -> u64 {
        millis(self.started.elapsed())
    }

    /// All apps.
    #[must_use]
    pub fn apps(&self) -> Vec<Arc<App>> {
        self.apps.iter().map(|app| Arc::clone(&app)).collect()
    }

    /// How many apps are known.
    #[must_use]
    pub fn app_count(&self) -> usize {
        self.apps.len()
    }

    /// How many reported block ids are held.
    #[must_use]
    pub fn block_id_count(&self) -> u64 {
        self.block_ids.used()
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use uniffle_wire::types::{Distribution, PartitionId, ShuffleId};

    fn registration(app: &str, shuffle: i32, ranges: &[(i32, i32)]) -> Registration {
        Registration {
            key: ShuffleKey::new(AppId::parse(app).unwrap(), ShuffleId(shuffle)),
            ranges: PartitionRanges::parse(ranges).unwrap(),
            distribution: Distribution::Normal,
            user: "u".into(),
            properties: HashMap::new(),
            sent_properties: false,
            heartbeat_timeout: None,
            kept_elsewhere_bytes: 0,
            from: None,
        }
    }

    /// What takes long to drop; tells whether others could register meanwhile.
    struct Large<'a>(&'a AppRegistry, &'a std::cell::Cell<u32>);

    impl Drop for Large<'_> {
        fn drop(&mut self) {
            self.1.set(self.1.get() + u32::from(self.0.lifecycle.try_lock().is_some()));
        }
    }

    #[tokio::test]
    async fn d13_others_register_while_what_was_removed_is_evicted() {
        let registry = registry();
        let free = std::cell::Cell::new(0);
        for shuffle in [1, 2] {
            registry.register(registration("app", shuffle, &[(0, 0)]), || ()).unwrap();
        }
        let id = AppId::parse("app").unwrap();
        drop(registry.remove_shuffle(&ShuffleKey::new(id.clone(), ShuffleId(1)), || Large(&registry, &free)));
        drop(registry.remove_app(&id, |_| Large(&registry, &free)));
        assert_eq!(free.get(), 2);
    }

    #[tokio::test]
    async fn what_was_reported_is_dropped_when_others_can_register() {
        let registry = registry();
        for shuffle in [1, 2] {
            registry.register(registration("app", shuffle, &[(0, 0)]), || ()).unwrap();
        }
        let app = registry.find(&AppId::parse("app").unwrap()).unwrap();
        let of = |shuffle| Arc::downgrade(&app.shuffle(ShuffleId(shuffle)).unwrap());
        let (first, second) = (of(1), of(2));
        let key = ShuffleKey::new(app.id().clone(), ShuffleId(1));
        let (_, is_whole) = registry.remove_shuffle(&key, || first.upgrade().is_some());
        assert_eq!((is_whole, first.upgrade().is_none()), (Some(true), true));
        let is_whole = registry.remove_app(app.id(), |_| second.upgrade().is_some());
        assert_eq!((is_whole, second.upgrade().is_none()), (Some(true), true));
    }

    fn registry() -> AppRegistry {
        registry_of(AppConfig::default(), &Heap::new(64 << 20))
    }

    fn registry_of(config: AppConfig, heap: &Heap) -> AppRegistry {
        AppRegistry::new(config, heap, &Budget::new(1 << 20))
    }

    #[tokio::test]
    async fn unregistering_app_1_leaves_app_10() {
        let registry = registry();
        for app in ["app-1", "app-10"] {
            registry.register(registration(app, 1, &[(0, 0)]), || ()).unwrap();
            registry.register(registration(app, 10, &[(0, 0)]), || ()).unwrap();
        }
        let mut purged = Vec::new();
        registry.remove_app(&AppId::parse("app-1").unwrap(), |keys| purged = keys).unwrap();
        purged.sort();
        assert_eq!(purged.iter().map(ToString::to_string).collect::<Vec<_>>(), ["app-1/1", "app-1/10"]);
        let other = registry.find(&AppId::parse("app-10").unwrap()).unwrap();
        assert_eq!(other.shuffles().len(), 2);
        assert!(registry.remove_shuffle(&ShuffleKey::new(other.id().clone(), ShuffleId(1)), || ()).0);
        assert!(other.shuffle(ShuffleId(10)).is_some());
    }

    #[tokio::test]
    async fn registering_again_adds_ranges_and_keeps_reports() {
        let registry = registry();
        registry.register(registration("a", 1, &[(0, 1)]), || ()).unwrap();
        let shuffle = registry.find(&AppId::parse("a").unwrap()).unwrap().shuffle(ShuffleId(1)).unwrap();
        shuffle.block_ids().lock().take_over(1, &[(PartitionId(0), vec![1])]).unwrap();
        registry.register(registration("a", 1, &[(4, 4)]), || ()).unwrap();
        assert_eq!(shuffle.partition_count(), 3);
        assert!(shuffle.has_partition(PartitionId(4)) && !shuffle.has_partition(PartitionId(2)));
        assert_eq!(registry.block_id_count(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn an_app_used_between_check_and_purge_stays() {
        let registry = registry();
        registry.register(registration("a", 1, &[(0, 1)]), || ()).unwrap();
        tokio::time::advance(Duration::from_secs(301)).await;
        let expired = registry.expired();
        assert_eq!(expired.len(), 1);
        registry.touch(&registry.find(&expired[0]).unwrap());
        assert!(registry.remove_app_if_expired(&expired[0], |_| ()).is_none());
        assert_eq!(registry.app_count(), 1);
        tokio::time::advance(Duration::from_secs(301)).await;
        registry.remove_app_if_expired(&expired[0], |_| ()).unwrap();
        assert_eq!(registry.app_count(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn an_app_may_have_a_timeout_of_its_own() {
        let registry = registry();
        let patient = Some(Duration::from_secs(3600));
        let request = Registration { heartbeat_timeout: patient, ..registration("patient", 1, &[(0, 1)]) };
        registry.register(request, || ()).unwrap();
        registry.register(registration("usual", 1, &[(0, 1)]), || ()).unwrap();
        tokio::time::advance(Duration::from_secs(301)).await;
        assert_eq!(registry.expired(), [AppId::parse("usual").unwrap()]);
        tokio::time::advance(Duration::from_secs(3300)).await;
        assert_eq!(registry.expired().len(), 2);
    }

    #[tokio::test]
    async fn marks_stick_and_are_told_once() {
        let registry = registry();
        let newer = Registration { sent_properties: true, ..registration("a", 1, &[(0, 1)]) };
        registry.register(newer, || ()).unwrap();
        registry.register(registration("a", 2, &[(0, 1)]), || ()).unwrap();
        let app = registry.find(&AppId::parse("a").unwrap()).unwrap();
        assert!(app.is_since_0_10());
        assert!(app.mark_huge() && !app.mark_huge());
        let shuffle = app.shuffle(ShuffleId(1)).unwrap();
        assert!(shuffle.mark_huge(PartitionId(0)) && !shuffle.mark_huge(PartitionId(0)));
        assert!(shuffle.mark_huge(PartitionId(1)));
        assert_eq!(shuffle.huge_partition_count(), 2);
    }

    #[tokio::test]
    async fn too_many_apps_are_refused_with_the_limit() {
        let few = AppConfig { apps_max: 1, shuffles_per_app_max: 1, ..AppConfig::default() };
        let registry = registry_of(few, &Heap::new(64 << 20));
        registry.register(registration("a", 1, &[(0, 1)]), || ()).unwrap();
        let max = QuotaExceeded { max: 1 };
        let refused = |app, shuffle| registry.register(registration(app, shuffle, &[(0, 1)]), || ());
        assert_eq!(refused("b", 1), Err(RegisterError::Apps(max)));
        assert_eq!(refused("a", 2), Err(RegisterError::Shuffles(max)));
        assert_eq!(registry.app_count(), 1);
    }

    #[tokio::test]
    async fn n7_what_registrations_keep_is_bounded_by_the_heap() {
        let heap = Heap::new(64 << 20);
        let registry = registry_of(AppConfig::default(), &heap);
        let kept = heap.of(HeapKind::Registrations);
        let refused = (0..100_000).find_map(|app| {
            let with =
                Registration { user: "u".repeat(1000), ..registration(&format!("app-{app}"), 1, &[(0, 1)]) };
            registry.register(with, || ()).err()
        });
        assert!(
            matches!(refused, Some(RegisterError::NoHeap(full)) if full.kind == "registrations"),
            "{refused:?}"
        );
        let apps = registry.app_count();
        assert!((1000..10_000).contains(&apps) && kept.used() <= kept.capacity(), "{apps} apps");
        let known = registry.apps()[0].id().clone();
        assert!(registry.remove_app(&known, |_| ()).is_some());
        registry.register(registration("late", 1, &[(0, 1)]), || ()).unwrap();
        for app in registry.apps() {
            registry.remove_app(app.id(), |_| ());
        }
        assert_eq!(heap.whole().used(), 0);
    }

    #[tokio::test]
    async fn n7_whoever_registers_from_one_address_leaves_room_for_others() {
        let heap = Heap::new(64 << 20);
        let registry = registry_of(AppConfig::default(), &heap);
        let from = |address: [u8; 4], app: &str, shuffle: i32| {
            let from = Some(address.into());
            let user = format!("user of {app}");
            registry.register(Registration { from, user, ..registration(app, shuffle, &[(0, 1)]) }, || ())
        };
        let (flood, honest) = ([10, 0, 0, 1], [10, 0, 0, 2]);
        from(honest, "known", 0).unwrap();
        let refused = (0..100_000).find_map(|app| from(flood, &format!("flood-{app}"), 0).err());
        assert!(matches!(refused, Some(RegisterError::NoHeap(_))), "{refused:?}");
        from(honest, "known", 1).unwrap();
        (0..10).for_each(|app| from(honest, &format!("new-{app}"), 0).unwrap());
        for app in registry.apps() {
            registry.remove_app(app.id(), |_| ());
        }
        from(flood, "late", 0).unwrap();
        registry.remove_app(&AppId::parse("late").unwrap(), |_| ());
        assert_eq!(heap.whole().used(), 0);
    }

    #[tokio::test]
    async fn an_application_that_fills_its_part_can_still_register_what_it_has() {
        let heap = Heap::new(16 << 20);
        let registry = registry_of(AppConfig::default(), &heap);
        let with = |user: usize, shuffle: i32| Registration {
            user: "u".repeat(user),
            ..registration("a", shuffle, &[(0, 1)])
        };
        registry.register(with(1000, 0), || ()).unwrap();
        let first = heap.whole().used();
        let refused = (1..).find_map(|shuffle| registry.register(with(1000, shuffle), || ()).err());
        assert!(matches!(refused, Some(RegisterError::NoHeap(_))), "{refused:?}");
        let used = heap.whole().used();
        registry.register(with(1000, 0), || ()).unwrap();
        assert_eq!(heap.whole().used(), used);
        registry.register(with(10, 0), || ()).unwrap();
        assert_eq!(heap.whole().used(), used - 990);
        registry.register(with(1000, 0), || ()).unwrap();
        assert_eq!(heap.whole().used(), used, "back to what it was");
        registry.register(registration("other", 0, &[(0, 1)]), || ()).unwrap();
        assert!(heap.whole().used() > used + first / 2);
        for app in ["a", "other"] {
            registry.remove_app(&AppId::parse(app).unwrap(), |_| ()).unwrap();
        }
        assert_eq!(heap.whole().used(), 0);
    }

    #[tokio::test]
    async fn what_was_registered_before_a_start_is_taken_over_in_any_order() {
        let before = registry_of(AppConfig::default(), &Heap::new(16 << 20));
        let mut known = Vec::new();
        for app in ["first", "second"] {
            let all = (0..).map(|shuffle| registration(app, shuffle, &[(0, 1)]));
            let taken = all.take_while(|it| before.register(it.clone(), || ()).is_ok());
            known.extend(taken);
        }
        known.reverse();
        let heap = Heap::new(16 << 20);
        let after = registry_of(AppConfig::default(), &heap);
        for registration in known {
            after.take_over(registration, || ()).unwrap();
        }
        assert_eq!(heap.whole().used(), before.heap.whole().used());
        assert!(after.register(registration("first", i32::MAX, &[(0, 1)]), || ()).is_err());
        after.register(registration("third", 0, &[(0, 1)]), || ()).unwrap();
    }

    #[tokio::test]
    async fn n7_ranges_of_one_shuffle_are_bounded_and_merged() {
        let heap = Heap::new(256 << 20);
        let registry = registry_of(AppConfig::default(), &heap);
        let scattered =
            |from: i32| (0..100_000).map(|n| (2 * (from + n), 2 * (from + n))).collect::<Vec<_>>();
        for from in [0, 100_000] {
            registry.register(registration("a", 1, &scattered(from)), || ()).unwrap();
        }
        let used = heap.whole().used();
        let refused = registry.register(registration("a", 1, &scattered(200_000)), || ()).unwrap_err();
        assert_eq!(refused, RegisterError::Ranges { ranges: 300_000 });
        assert!(refused.to_string().starts_with("partitionRanges has 300000 ranges"), "{refused}");
        let shuffle = registry.apps()[0].shuffle(ShuffleId(1)).unwrap();
        assert_eq!(
            (shuffle.partition_count(), heap.whole().used()),
            (200_000, used),
            "nothing of it was taken"
        );
        registry.register(registration("a", 1, &[(0, 399_999)]), || ()).unwrap();
        assert_eq!(shuffle.partition_count(), 400_000);
        registry.register(registration("a", 1, &scattered(200_000)), || ()).unwrap();
    }
}
