//! Shuffles that may have been registered before the start although no record of them was found.
//!
//! If recovery cannot prove that it saw every registration, a client may register a shuffle anew
//! that already had reports. Treating it as new would return short results. A shuffle of an
//! application that recovery found therefore counts as incomplete if it was not found and its id is
//! not above the highest found id: Spark numbers shuffles upwards. It stays incomplete, and its
//! results are refused, until it is unregistered or its application ends.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};

/// Maximum number of unregistered ids remembered per application. Further ids stay unverified.
const UNREGISTERED_MAX: usize = 4096;

/// Applications whose shuffles are unverified; at most as many as recovery found.
#[derive(Debug, Default)]
pub(super) struct UnverifiedApps {
    apps: HashMap<AppId, UnverifiedApp>,
}

#[derive(Debug)]
struct UnverifiedApp {
    reason: Arc<str>,
    /// The highest id that was found.
    highest: i32,
    /// Ids unregistered since the start: a registration with one of these ids is a new shuffle.
    unregistered: HashSet<i32>,
    /// Ids with files but without a registration.
    without_registration: BTreeSet<i32>,
}

impl UnverifiedApps {
    /// Records a found shuffle, where `reason` may have hidden other shuffles of its application.
    pub(super) fn found(&mut self, key: &ShuffleKey, reason: &Arc<str>) {
        let id = key.shuffle.0;
        let fresh = || UnverifiedApp {
            reason: Arc::clone(reason),
            highest: id,
            unregistered: HashSet::new(),
            without_registration: BTreeSet::new(),
        };
        let app = self.apps.entry(key.app.clone()).or_insert_with(fresh);
        app.highest = app.highest.max(id);
    }

    /// Records a shuffle whose files were found but, for `reason`, not its registration.
    pub(super) fn found_without_registration(&mut self, key: &ShuffleKey, reason: &Arc<str>) {
        self.found(key, reason);
        self.apps.entry(key.app.clone()).and_modify(|app| _ = app.without_registration.insert(key.shuffle.0));
    }

    /// Returns the shuffles passed to [`Self::found_without_registration`] that were neither
    /// registered anew nor unregistered since.
    pub(super) fn all_without_registration(&self) -> Vec<(ShuffleKey, Arc<str>)> {
        let of_app = |(app, it): (&AppId, &UnverifiedApp)| {
            let key = |id: &i32| (ShuffleKey::new(app.clone(), ShuffleId(*id)), Arc::clone(&it.reason));
            it.without_registration.iter().map(key).collect::<Vec<_>>()
        };
        self.apps.iter().flat_map(of_app).collect()
    }

    /// Returns why an unknown application may have existed before the start.
    pub(super) fn app_reason(&self, app: &AppId) -> Option<Arc<str>> {
        self.apps.get(app).map(|it| Arc::clone(&it.reason))
    }

    /// Records that the shuffle has a registration again.
    pub(super) fn registered(&mut self, key: &ShuffleKey) {
        self.apps
            .entry(key.app.clone())
            .and_modify(|app| _ = app.without_registration.remove(&key.shuffle.0));
    }

    /// Returns why an unknown shuffle may have been registered before.
    pub(super) fn shuffle_reason(&self, key: &ShuffleKey) -> Option<&Arc<str>> {
        let app = self.apps.get(&key.app)?;
        let is_new = key.shuffle.0 > app.highest || app.unregistered.contains(&key.shuffle.0);
        (!is_new).then_some(&app.reason)
    }

    /// Records that a client has unregistered a shuffle of a known application. The shuffle itself
    /// may be unknown.
    pub(super) fn unregistered(&mut self, key: &ShuffleKey) {
        self.registered(key);
        if let Some(app) = self.apps.get_mut(&key.app)
            && key.shuffle.0 <= app.highest
            && app.unregistered.len() < UNREGISTERED_MAX
        {
            app.unregistered.insert(key.shuffle.0);
        }
    }

    /// Records that the application has ended.
    pub(super) fn ended(&mut self, app: &AppId) {
        self.apps.remove(app);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(app: &str, shuffle: i32) -> ShuffleKey {
        ShuffleKey::new(AppId::parse(app).unwrap(), ShuffleId(shuffle))
    }

    #[test]
    fn shuffles_below_recovered_ids_are_unverified_until_ended() {
        let mut unverified = UnverifiedApps::default();
        let reason: Arc<str> = "a copy is cut short".into();
        unverified.found(&key("app-1", 7), &reason);
        unverified.found(&key("app-1", 3), &reason);
        let is_unverified = |it: &UnverifiedApps, key| it.shuffle_reason(&key).is_some();
        assert!(is_unverified(&unverified, key("app-1", 7)) && is_unverified(&unverified, key("app-1", 4)));
        assert!(!is_unverified(&unverified, key("app-1", 8)), "ids above the highest recovered one are new");
        assert!(!is_unverified(&unverified, key("app-2", 1)), "no shuffle of the application was found");
        unverified.unregistered(&key("app-1", 4));
        assert!(!is_unverified(&unverified, key("app-1", 4)) && is_unverified(&unverified, key("app-1", 5)));
        let max = i32::try_from(UNREGISTERED_MAX).unwrap();
        (0..max).for_each(|id| unverified.unregistered(&key("app-1", -id)));
        assert!(
            is_unverified(&unverified, key("app-1", 1 - max)),
            "the number of unregistered shuffles is limited"
        );
        unverified.found_without_registration(&key("app-1", 9), &reason);
        unverified.found_without_registration(&key("app-3", 1), &reason);
        unverified.registered(&key("app-1", 9));
        assert_eq!(unverified.all_without_registration(), [(key("app-3", 1), Arc::clone(&reason))]);
        assert_eq!(unverified.app_reason(&key("app-3", 1).app), Some(reason));
        unverified.ended(&key("app-1", 0).app);
        assert!(!is_unverified(&unverified, key("app-1", 7)));
    }
}
