//! The application table: users of the cluster, and the remote storage of each application.
//!
//! Pure state; the clock is a parameter. Invariants: the table uses at most [`TABLE_BYTES_MAX`] of
//! heap, which are part of the memory that the process needs without clients
//! (`budget::memory_plan`). A listed application keeps its remote storage until it expires, and the
//! storage of one that finds no room follows from its id: its clients must agree on the path.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use uniffle_base::clock::Instant;
use uniffle_wire::types::{APP_ID_BYTES_MAX, AppId};

/// Number of applications that are listed whatever the length of their ids. With usual ids the
/// table lists about 12,000.
pub(super) const APPS_LISTED_MIN: usize = TABLE_BYTES_MAX / (APP_BYTES + USER_BYTES_MAX + APP_ID_BYTES_MAX);
/// Maximum heap of the table. Applications beyond that are served, but not listed, so quotas do not
/// count them.
const TABLE_BYTES_MAX: usize = 4 << 20;
/// Heap per application besides its names: its entry in a doubled table, and allocator overhead.
const APP_BYTES: usize = 256;
/// Length to which user names are cut.
const USER_BYTES_MAX: usize = 64;
/// Maximum number of users with a count of their own. The rest is counted as [`OTHER_USERS`].
const USERS_MAX: usize = 64;
/// Label of users beyond [`USERS_MAX`].
const OTHER_USERS: &str = "(others)";

/// An application as saved for the next process.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SavedApp {
    /// Id of the application.
    pub id: String,
    /// User that registered it, or empty if unknown.
    pub user: String,
    /// Path of its remote storage, if one was chosen.
    pub storage: Option<String>,
}

#[derive(Debug, Clone)]
struct AppEntry {
    user: String,
    touched: Instant,
    storage: Option<usize>,
}

/// Applications by id.
#[derive(Debug)]
pub(super) struct AppTable {
    timeout: Duration,
    apps: HashMap<AppId, AppEntry>,
    /// Heap of all applications; see [`cost`].
    bytes: usize,
    /// Time of the next full sweep. Until then an expired application may still be counted.
    sweep_at: Option<Instant>,
    /// Increases with each change that must be saved.
    version: u64,
}

impl AppTable {
    pub(super) fn new(timeout: Duration) -> Self {
        Self { timeout, apps: HashMap::new(), bytes: 0, sweep_at: None, version: 0 }
    }

    /// Adds or refreshes an application. A given `user` replaces the known one. Returns whether the
    /// application was added.
    pub(super) fn touch(&mut self, id: &AppId, user: Option<&str>, now: Instant) -> bool {
        self.sweep_if_due(now);
        if let Some(app) = self.apps.get_mut(id) {
            app.touched = now;
            if let Some(user) = user.map(cut).filter(|user| *user != app.user) {
                app.user = user;
                self.version += 1;
            }
            return false;
        }
        let bytes = cost(id);
        if self.bytes + bytes > TABLE_BYTES_MAX {
            return false;
        }
        let user = cut(user.unwrap_or_default());
        self.bytes += bytes;
        self.version += 1;
        self.apps.insert(id.clone(), AppEntry { user, touched: now, storage: None });
        true
    }

    /// Returns the index of the application's remote storage. At the first call, the storage with
    /// the fewest applications is chosen.
    pub(super) fn storage(&mut self, id: &AppId, storages: usize, now: Instant) -> Option<usize> {
        self.touch(id, None, now);
        if storages == 0 {
            return None;
        }
        if let Some(known) = self.apps.get(id).and_then(|app| app.storage).filter(|&at| at < storages) {
            return Some(known);
        }
        let uses = self.storage_uses(storages);
        let Some(app) = self.apps.get_mut(id) else {
            // The table is full. A hash gives the same choice next time without memory.
            return usize::try_from(crc32fast::hash(id.as_str().as_bytes())).ok().map(|hash| hash % storages);
        };
        app.storage = (0..storages).min_by_key(|&at| uses[at]);
        self.version += 1;
        app.storage
    }

    /// Adds applications of an earlier process as if each had just sent a heartbeat. `storages` are
    /// the paths of the remote storages in order.
    pub(super) fn restore(&mut self, saved: &[SavedApp], storages: &[&str], now: Instant) {
        for saved in saved {
            let Ok(id) = AppId::parse(&saved.id) else { continue };
            self.touch(&id, Some(&saved.user), now);
            let storage = saved.storage.as_deref();
            if let Some(app) = self.apps.get_mut(&id) {
                app.storage = storages.iter().position(|path| Some(*path) == storage);
            }
        }
    }

    /// Returns the applications in the form that [`AppTable::restore`] takes.
    pub(super) fn saved(&self, storages: &[&str]) -> Vec<SavedApp> {
        let path = |app: &AppEntry| app.storage.and_then(|at| storages.get(at)).map(|&path| path.to_owned());
        let saved = |(id, app): (&AppId, &AppEntry)| SavedApp {
            id: id.as_str().to_owned(),
            user: app.user.clone(),
            storage: path(app),
        };
        self.apps.iter().map(saved).collect()
    }

    /// Returns a number that increases whenever [`AppTable::saved`] changes.
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// Returns the number of applications per storage.
    pub(super) fn storage_uses(&self, storages: usize) -> Vec<u64> {
        let mut uses = vec![0; storages];
        for at in self.apps.values().filter_map(|app| app.storage) {
            if let Some(count) = uses.get_mut(at) {
                *count += 1;
            }
        }
        uses
    }

    /// Expiry: removes applications without a heartbeat within the timeout.
    pub(super) fn expire(&mut self, now: Instant) {
        let Self { timeout, apps, bytes, version, .. } = self;
        let before = apps.len();
        apps.retain(|id, app| {
            let is_kept = now.saturating_duration_since(app.touched) <= *timeout;
            *bytes -= if is_kept { 0 } else { cost(id) };
            is_kept
        });
        *version += u64::from(apps.len() != before);
        if apps.is_empty() {
            // Also frees the table's own memory after many applications.
            apps.shrink_to_fit();
        }
        self.sweep_at = Some(now + self.timeout / 2);
    }

    /// Returns the number of applications per user, with a bounded number of labels.
    pub(super) fn users(&self) -> BTreeMap<String, u64> {
        let mut users = BTreeMap::new();
        for app in self.apps.values() {
            let room = users.len() < USERS_MAX || users.contains_key(&app.user);
            let label = if room { app.user.as_str() } else { OTHER_USERS };
            *users.entry(label.to_owned()).or_insert(0) += 1;
        }
        users
    }

    /// Returns the number of applications of a user.
    pub(super) fn count_of(&mut self, user: &str, now: Instant) -> usize {
        self.expire(now);
        let user = cut(user);
        self.apps.values().filter(|app| app.user == user).count()
    }

    pub(super) fn len(&self) -> usize {
        self.apps.len()
    }

    fn sweep_if_due(&mut self, now: Instant) {
        if self.sweep_at.is_none_or(|at| now >= at) {
            self.expire(now);
        }
    }
}

/// Returns an upper bound of an application's heap, independent of its user.
fn cost(id: &AppId) -> usize {
    APP_BYTES + USER_BYTES_MAX + id.as_str().len()
}

fn cut(user: &str) -> String {
    user[..user.floor_char_boundary(USER_BYTES_MAX)].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::embedded::AccessRules;

    fn app(id: &str) -> AppId {
        AppId::parse(id).unwrap()
    }

    #[test]
    fn app_keeps_its_storage_until_expiry() {
        let start = Instant::now();
        let mut table = AppTable::new(Duration::from_secs(60));
        assert_eq!(table.storage(&app("a"), 2, start), Some(0));
        assert_eq!(table.storage(&app("b"), 2, start), Some(1));
        assert_eq!(table.storage(&app("a"), 2, start), Some(0));
        assert_eq!(table.storage_uses(2), [1, 1]);
        let later = start + Duration::from_secs(50);
        table.touch(&app("b"), None, later);
        table.expire(start + Duration::from_secs(61));
        assert_eq!(table.len(), 1);
        assert_eq!(table.storage(&app("b"), 2, later), Some(1));
        assert_eq!(table.storage(&app("c"), 0, later), None);
    }

    #[test]
    fn apps_beyond_the_table_limit_are_served_but_not_listed() {
        let start = Instant::now();
        let mut table = AppTable::new(Duration::from_secs(60));
        let name = |n: usize| app(&format!("application-{n}-{}", "x".repeat(80)));
        let listed =
            (0..100_000).take_while(|n| table.touch(&name(*n), Some(&"u".repeat(999)), start)).count();
        assert!(listed > APPS_LISTED_MIN, "{listed}");
        assert!(table.bytes <= TABLE_BYTES_MAX && table.len() == listed);
        assert!(!table.touch(&name(0), Some("other"), start), "a listed application counts as new");
        let beyond = table.storage(&app("beyond"), 2, start);
        assert!(beyond.is_some() && beyond == table.storage(&app("beyond"), 2, start));
        table.expire(start + Duration::from_secs(61));
        assert_eq!((table.len(), table.bytes), (0, 0));
        assert!(table.touch(&app("beyond"), None, start + Duration::from_secs(61)));
    }

    #[test]
    fn largest_quota_is_enforced() {
        let now = Instant::now();
        let mut table = AppTable::new(Duration::from_secs(60));
        for n in 0..APPS_LISTED_MIN {
            table.touch(&app(&format!("{n:0APP_ID_BYTES_MAX$}")), Some("anna"), now);
        }
        let rules = AccessRules { apps_per_user_max: APPS_LISTED_MIN, ..AccessRules::default() };
        assert!(rules.check_user("anna", || table.count_of("anna", now)).is_err());
    }

    #[test]
    fn apps_are_counted_by_user_with_bounded_labels() {
        let now = Instant::now();
        let mut table = AppTable::new(Duration::from_secs(60));
        for n in 0..USERS_MAX + 10 {
            table.touch(&app(&format!("a{n}")), Some(&format!("user{n}")), now);
        }
        assert!(!table.touch(&app("a1"), Some(&"é".repeat(100)), now));
        let users = table.users();
        assert!(users.len() <= USERS_MAX + 1);
        assert_eq!(users.values().sum::<u64>(), (USERS_MAX + 10) as u64);
        assert!(users.keys().all(|user| user.len() <= USER_BYTES_MAX));
    }

    #[test]
    fn restored_apps_keep_user_and_storage() {
        let now = Instant::now();
        let mut before = AppTable::new(Duration::from_secs(60));
        for (id, user) in [("a", "anna"), ("b", "anna"), ("c", "carl")] {
            before.touch(&app(id), Some(user), now);
        }
        assert_eq!(before.storage(&app("a"), 2, now), Some(0));
        assert_eq!(before.storage(&app("b"), 2, now), Some(1));
        let saved = before.saved(&["hdfs://one", "hdfs://two"]);
        let mut after = AppTable::new(Duration::from_secs(60));
        // The order of the paths in the configuration has changed.
        after.restore(&saved, &["hdfs://two", "hdfs://one"], now);
        assert_eq!((after.count_of("anna", now), after.count_of("carl", now)), (2, 1));
        assert_eq!(after.storage(&app("a"), 2, now), Some(1));
        assert_eq!(after.storage(&app("b"), 2, now), Some(0));
        after.expire(now + Duration::from_secs(61));
        assert_eq!(after.len(), 0);
    }

    #[test]
    fn version_changes_only_with_saved_state() {
        let now = Instant::now();
        let mut table = AppTable::new(Duration::from_secs(60));
        table.touch(&app("a"), Some("anna"), now);
        let version = table.version();
        table.touch(&app("a"), None, now);
        table.touch(&app("a"), Some("anna"), now);
        table.expire(now);
        assert_eq!(table.version(), version);
        table.touch(&app("a"), Some("berta"), now);
        assert!(table.version() > version);
        let version = table.version();
        table.expire(now + Duration::from_secs(61));
        assert!(table.version() > version);
    }

    #[test]
    fn expired_apps_are_removed_on_the_next_access() {
        let start = Instant::now();
        let mut table = AppTable::new(Duration::from_secs(60));
        table.touch(&app("a"), None, start);
        table.touch(&app("b"), None, start + Duration::from_secs(120));
        assert_eq!(table.len(), 1);
    }
}
