//! Apps and their shuffles, with the time of their last use.
//!
//! Removing is done under the lock that registering takes, and the caller passes the work that must happen with it
//! (`with` closures), so that a purge and a registration of the same app never interleave.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use dashmap::DashMap;
use parking_lot::{Mutex, RwLock};
use tokio::time::Instant;

use uniffle_wire::types::{AppId, Distribution, PartitionId, ShuffleId, ShuffleKey};

use super::AppConfig;
use super::account::Account;
use super::block_ids::BlockIds;
use super::losses::Losses;
use super::quota::{Quota, QuotaExceeded};
use super::ranges::PartitionRanges;

/// What `registerShuffle` says.
#[derive(Debug, Clone)]
pub struct Registration {
    /// The shuffle.
    pub key: ShuffleKey,
    /// Its partitions on this worker; added to those already known.
    pub ranges: PartitionRanges,
    /// Order of blocks in extents.
    pub distribution: Distribution,
    /// Spark user.
    pub user: String,
    /// Client configuration, `.rss.` keys only.
    pub properties: HashMap<String, String>,
    /// Whether the client sent any properties, `.rss.` or not.
    pub sent_properties: bool,
    /// What this app wants instead of the configured timeout, within bounds.
    pub heartbeat_timeout: Option<Duration>,
}

/// One shuffle.
#[derive(Debug)]
pub struct ShuffleState {
    key: ShuffleKey,
    ranges: RwLock<PartitionRanges>,
    block_ids: Mutex<BlockIds>,
    losses: Losses,
    /// Digest of the registration that was written down last; 0 = none was.
    noted_registration: AtomicU64,
    /// Touched by sends to partitions beyond the threshold only.
    huge_partitions: Mutex<HashSet<PartitionId>>,
}

impl ShuffleState {
    /// Its key.
    #[must_use]
    pub fn key(&self) -> &ShuffleKey {
        &self.key
    }

    /// Whether the partition was registered.
    #[must_use]
    pub fn has_partition(&self, partition: PartitionId) -> bool {
        self.ranges.read().contains(partition.0)
    }

    /// How many partitions were registered.
    #[must_use]
    pub fn partition_count(&self) -> u64 {
        self.ranges.read().count()
    }

    /// Reported block ids.
    #[must_use]
    pub fn block_ids(&self) -> &Mutex<BlockIds> {
        &self.block_ids
    }

    /// What of it is lost.
    #[must_use]
    pub fn losses(&self) -> &Losses {
        &self.losses
    }

    /// Digest of the registration that was written down last; 0 = none was.
    #[must_use]
    pub fn noted_registration(&self) -> u64 {
        self.noted_registration.load(Ordering::Relaxed)
    }

    /// See [`ShuffleState::noted_registration`].
    pub fn set_noted_registration(&self, digest: u64) {
        self.noted_registration.store(digest, Ordering::Relaxed);
    }

    /// Marks a partition as huge, for good; true the first time.
    #[must_use]
    pub fn mark_huge(&self, partition: PartitionId) -> bool {
        self.huge_partitions.lock().insert(partition)
    }

    /// How many partitions are marked huge.
    #[must_use]
    pub fn huge_partition_count(&self) -> usize {
        self.huge_partitions.lock().len()
    }
}

/// One application.
#[derive(Debug)]
pub struct App {
    id: AppId,
    user: RwLock<String>,
    properties: RwLock<HashMap<String, String>>,
    /// Whether a registration ever carried properties, which clients do since 0.10.
    sends_properties: AtomicBool,
    has_huge_partition: AtomicBool,
    /// Lowest bits of its block ids that are the task attempt; 0 = not known yet.
    task_bits: AtomicU32,
    heartbeat_timeout_ms: AtomicU64,
    /// Milliseconds since the registry was made.
    last_use_ms: AtomicU64,
    shuffles: RwLock<HashMap<ShuffleId, Arc<ShuffleState>>>,
    account: Account,
    since: Instant,
}

impl App {
    /// Its id.
    #[must_use]
    pub fn id(&self) -> &AppId {
        &self.id
    }

    /// Where its time and bytes went.
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Since its first registration.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.since.elapsed()
    }

    /// The user of its latest registration.
    #[must_use]
    pub fn user(&self) -> String {
        self.user.read().clone()
    }

    /// A property of its latest registration.
    #[must_use]
    pub fn property(&self, key: &str) -> Option<String> {
        self.properties.read().get(key).cloned()
    }

    /// Whether its client is known to be 0.10 or later: such clients register with properties (docs/protocol.md §7.5).
    #[must_use]
    pub fn is_since_0_10(&self) -> bool {
        self.sends_properties.load(Ordering::Relaxed)
    }

    /// Notes that one of its partitions is huge; true the first time.
    #[must_use]
    pub fn mark_huge(&self) -> bool {
        !self.has_huge_partition.swap(true, Ordering::Relaxed)
    }

    /// Learns its layout of block ids (docs/protocol.md §3.1): so many lowest bits are the task attempt.
    pub fn learn_task_bits(&self, bits: u32) {
        self.task_bits.store(bits, Ordering::Relaxed);
    }

    /// The task attempt in a block id; `None` while the layout is not known.
    #[must_use]
    pub fn task_of(&self, block_id: u64) -> Option<u64> {
        match self.task_bits.load(Ordering::Relaxed) {
            0 => None,
            bits => Some(block_id & (u64::MAX >> (u64::BITS - bits.min(u64::BITS)))),
        }
    }

    /// After so long without use it is purged.
    #[must_use]
    pub fn heartbeat_timeout(&self) -> Duration {
        Duration::from_millis(self.heartbeat_timeout_ms.load(Ordering::Relaxed))
    }

    /// One of its shuffles.
    #[must_use]
    pub fn shuffle(&self, id: ShuffleId) -> Option<Arc<ShuffleState>> {
        self.shuffles.read().get(&id).cloned()
    }

    /// All its shuffles.
    #[must_use]
    pub fn shuffles(&self) -> Vec<Arc<ShuffleState>> {
        self.shuffles.read().values().cloned().collect()
    }
}

/// All applications.
#[derive(Debug)]
pub struct AppRegistry {
    config: AppConfig,
    /// For apps that register from now on and do not choose another.
    heartbeat_timeout_ms: AtomicU64,
    apps: DashMap<AppId, Arc<App>>,
    block_ids: Quota,
    loss_entries: Quota,
    started: Instant,
    /// Held while an app or shuffle is added or removed together with its state elsewhere.
    lifecycle: Mutex<()>,
}

impl AppRegistry {
    /// No apps.
    #[must_use]
    pub fn new(config: AppConfig) -> Self {
        let block_ids = Quota::new(config.reported_blocks_max);
        let loss_entries = Quota::new(config.loss_entries_max);
        let heartbeat_timeout_ms = AtomicU64::new(millis(config.heartbeat_timeout));
        Self {
            config,
            heartbeat_timeout_ms,
            apps: DashMap::new(),
            block_ids,
            loss_entries,
            started: Instant::now(),
            lifecycle: Mutex::new(()),
        }
    }

    /// Adds or refreshes an app and its shuffle, then runs `with` before anybody can remove them.
    ///
    /// # Errors
    /// [`QuotaExceeded`] if there are too many apps or shuffles.
    pub fn register<T>(
        &self,
        registration: Registration,
        with: impl FnOnce() -> T,
    ) -> Result<T, QuotaExceeded> {
        let _alone = self.lifecycle.lock();
        let Registration { key, ranges, user, properties, sent_properties, heartbeat_timeout, .. } =
            registration;
        let app = match self.find(&key.app) {
            Some(app) => app,
            None if self.apps.len() >= self.config.apps_max => {
                return Err(QuotaExceeded { max: self.config.apps_max as u64 });
            }
            None => self.insert(&key.app),
        };
        self.touch(&app);
        *app.user.write() = user;
        *app.properties.write() = properties;
        app.sends_properties.fetch_or(sent_properties, Ordering::Relaxed);
        let usual_ms = self.heartbeat_timeout_ms.load(Ordering::Relaxed);
        app.heartbeat_timeout_ms.store(heartbeat_timeout.map_or(usual_ms, millis), Ordering::Relaxed);
        let mut shuffles = app.shuffles.write();
        if !shuffles.contains_key(&key.shuffle) && shuffles.len() >= self.config.shuffles_per_app_max {
            return Err(QuotaExceeded { max: self.config.shuffles_per_app_max as u64 });
        }
        let shuffle = shuffles.entry(key.shuffle).or_insert_with(|| {
            Arc::new(ShuffleState {
                key,
                ranges: RwLock::default(),
                block_ids: Mutex::new(BlockIds::new(&self.block_ids)),
                losses: Losses::new(&self.loss_entries),
                noted_registration: AtomicU64::new(0),
                huge_partitions: Mutex::default(),
            })
        });
        shuffle.ranges.write().extend(&ranges);
        drop(shuffles);
        Ok(with())
    }

    /// Replaces the timeout of apps that register from now on.
    pub fn set_heartbeat_timeout(&self, timeout: Duration) {
        self.heartbeat_timeout_ms.store(millis(timeout), Ordering::Relaxed);
    }

    fn insert(&self, id: &AppId) -> Arc<App> {
        let app = Arc::new(App {
            id: id.clone(),
            user: RwLock::default(),
            properties: RwLock::default(),
            sends_properties: AtomicBool::new(false),
            has_huge_partition: AtomicBool::new(false),
            task_bits: AtomicU32::new(0),
            heartbeat_timeout_ms: AtomicU64::new(self.heartbeat_timeout_ms.load(Ordering::Relaxed)),
            // It is visible before it is touched, and must not look expired in between.
            last_use_ms: AtomicU64::new(self.now_ms()),
            shuffles: RwLock::default(),
            account: Account::default(),
            since: Instant::now(),
        });
        self.apps.insert(id.clone(), Arc::clone(&app));
        app
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

    /// Removes one shuffle and runs `with` before it can be registered again. False if it was not known.
    pub fn remove_shuffle(&self, key: &ShuffleKey, with: impl FnOnce()) -> bool {
        let _alone = self.lifecycle.lock();
        let Some(app) = self.find(&key.app) else { return false };
        let removed = app.shuffles.write().remove(&key.shuffle).is_some();
        with();
        removed
    }

    /// Removes an app and runs `with` on its shuffles before it can be registered again. False if it was not known.
    pub fn remove_app(&self, id: &AppId, with: impl FnOnce(Vec<ShuffleKey>)) -> bool {
        self.remove_app_if(id, |_| true, with)
    }

    /// As [`AppRegistry::remove_app`], but only if the app is still expired (docs/protocol.md §11 trap 73: time passes
    /// between finding an expired app and purging it).
    pub fn remove_app_if_expired(&self, id: &AppId, with: impl FnOnce(Vec<ShuffleKey>)) -> bool {
        self.remove_app_if(id, |app| self.is_expired(app), with)
    }

    fn remove_app_if(
        &self,
        id: &AppId,
        condition: impl Fn(&App) -> bool,
        with: impl FnOnce(Vec<ShuffleKey>),
    ) -> bool {
        let _alone = self.lifecycle.lock();
        let Some((_, app)) = self.apps.remove_if(id, |_, app| condition(app)) else { return false };
        let shuffles = std::mem::take(&mut *app.shuffles.write());
        with(shuffles.into_values().map(|shuffle| shuffle.key.clone()).collect());
        true
    }

    /// Apps without use for longer than the timeout.
    #[must_use]
    pub fn expired(&self) -> Vec<AppId> {
        self.apps.iter().filter(|app| self.is_expired(app)).map(|app| app.id.clone()).collect()
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
    use super::*;

    fn registration(app: &str, shuffle: i32, ranges: &[(i32, i32)]) -> Registration {
        Registration {
            key: ShuffleKey::new(AppId::parse(app).unwrap(), ShuffleId(shuffle)),
            ranges: PartitionRanges::parse(ranges).unwrap(),
            distribution: Distribution::Normal,
            user: "u".into(),
            properties: HashMap::new(),
            sent_properties: false,
            heartbeat_timeout: None,
        }
    }

    #[tokio::test]
    async fn unregistering_app_1_leaves_app_10() {
        let registry = AppRegistry::new(AppConfig::default());
        for app in ["app-1", "app-10"] {
            registry.register(registration(app, 1, &[(0, 0)]), || ()).unwrap();
            registry.register(registration(app, 10, &[(0, 0)]), || ()).unwrap();
        }
        let mut purged = Vec::new();
        assert!(registry.remove_app(&AppId::parse("app-1").unwrap(), |keys| purged = keys));
        purged.sort();
        assert_eq!(purged.iter().map(ToString::to_string).collect::<Vec<_>>(), ["app-1/1", "app-1/10"]);
        let other = registry.find(&AppId::parse("app-10").unwrap()).unwrap();
        assert_eq!(other.shuffles().len(), 2);
        assert!(registry.remove_shuffle(&ShuffleKey::new(other.id().clone(), ShuffleId(1)), || ()));
        assert!(other.shuffle(ShuffleId(10)).is_some());
    }

    #[tokio::test]
    async fn registering_again_adds_ranges_and_keeps_reports() {
        let registry = AppRegistry::new(AppConfig::default());
        registry.register(registration("a", 1, &[(0, 1)]), || ()).unwrap();
        let shuffle = registry.find(&AppId::parse("a").unwrap()).unwrap().shuffle(ShuffleId(1)).unwrap();
        shuffle.block_ids().lock().report(1, &[(PartitionId(0), vec![1])]).unwrap();
        registry.register(registration("a", 1, &[(4, 4)]), || ()).unwrap();
        assert_eq!(shuffle.partition_count(), 3);
        assert!(shuffle.has_partition(PartitionId(4)) && !shuffle.has_partition(PartitionId(2)));
        assert_eq!(registry.block_id_count(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn an_app_used_between_check_and_purge_stays() {
        let registry = AppRegistry::new(AppConfig::default());
        registry.register(registration("a", 1, &[(0, 1)]), || ()).unwrap();
        tokio::time::advance(Duration::from_secs(301)).await;
        let expired = registry.expired();
        assert_eq!(expired.len(), 1);
        registry.touch(&registry.find(&expired[0]).unwrap());
        assert!(!registry.remove_app_if_expired(&expired[0], |_| ()));
        assert_eq!(registry.app_count(), 1);
        tokio::time::advance(Duration::from_secs(301)).await;
        assert!(registry.remove_app_if_expired(&expired[0], |_| ()));
        assert_eq!(registry.app_count(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn an_app_may_have_a_timeout_of_its_own() {
        let registry = AppRegistry::new(AppConfig::default());
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
        let registry = AppRegistry::new(AppConfig::default());
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
        let registry =
            AppRegistry::new(AppConfig { apps_max: 1, shuffles_per_app_max: 1, ..AppConfig::default() });
        registry.register(registration("a", 1, &[(0, 1)]), || ()).unwrap();
        assert_eq!(registry.register(registration("b", 1, &[(0, 1)]), || ()), Err(QuotaExceeded { max: 1 }));
        assert_eq!(registry.register(registration("a", 2, &[(0, 1)]), || ()), Err(QuotaExceeded { max: 1 }));
        assert_eq!(registry.app_count(), 1);
    }
}
