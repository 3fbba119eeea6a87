//! Shuffles that may have been registered before the start although nothing of it is known.
//!
//! When recovery cannot prove that it has seen every registration, a client may register one anew that had reports. Were
//! it taken for a new one its results would be short. So of every application that is found then, a shuffle that was not
//! found counts as one that was lost if its id is not above all that were: Spark numbers shuffles upwards. It stays
//! incomplete until it is unregistered.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use uniffle_wire::types::{AppId, ShuffleKey};

/// Ids of one application that are remembered as unregistered since the start; one beyond them stays in question.
const UNREGISTERED_MAX: usize = 4096;

/// By application; as many as recovery found.
#[derive(Debug, Default)]
pub(super) struct Unproven {
    apps: HashMap<AppId, Questioned>,
}

#[derive(Debug)]
struct Questioned {
    reason: Arc<str>,
    /// The highest id that was found.
    highest: i32,
    /// What is registered now under these ids is new.
    unregistered: HashSet<i32>,
}

impl Unproven {
    /// A shuffle was found, and for `reason` others of its application may not have been.
    pub(super) fn found(&mut self, key: &ShuffleKey, reason: &Arc<str>) {
        let id = key.shuffle.0;
        let fresh = || Questioned { reason: Arc::clone(reason), highest: id, unregistered: HashSet::new() };
        let app = self.apps.entry(key.app.clone()).or_insert_with(fresh);
        app.highest = app.highest.max(id);
    }

    /// Why a shuffle that is not known may have been registered before.
    pub(super) fn reason(&self, key: &ShuffleKey) -> Option<&Arc<str>> {
        let app = self.apps.get(&key.app)?;
        let is_new = key.shuffle.0 > app.highest || app.unregistered.contains(&key.shuffle.0);
        (!is_new).then_some(&app.reason)
    }

    /// A client has unregistered it, known or not.
    pub(super) fn unregistered(&mut self, key: &ShuffleKey) {
        if let Some(app) = self.apps.get_mut(&key.app)
            && key.shuffle.0 <= app.highest
            && app.unregistered.len() < UNREGISTERED_MAX
        {
            app.unregistered.insert(key.shuffle.0);
        }
    }

    /// The application has ended.
    pub(super) fn ended(&mut self, app: &AppId) {
        self.apps.remove(app);
    }
}

#[cfg(test)]
mod tests {
    use uniffle_wire::types::ShuffleId;

    use super::*;

    fn key(app: &str, shuffle: i32) -> ShuffleKey {
        ShuffleKey::new(AppId::parse(app).unwrap(), ShuffleId(shuffle))
    }

    #[test]
    fn what_is_not_above_those_found_is_in_question_until_it_is_unregistered() {
        let mut unproven = Unproven::default();
        let reason: Arc<str> = "a copy is cut short".into();
        unproven.found(&key("app-1", 7), &reason);
        unproven.found(&key("app-1", 3), &reason);
        let is_questioned = |it: &Unproven, key| it.reason(&key).is_some();
        assert!(is_questioned(&unproven, key("app-1", 7)) && is_questioned(&unproven, key("app-1", 4)));
        assert!(!is_questioned(&unproven, key("app-1", 8)), "it is new");
        assert!(!is_questioned(&unproven, key("app-2", 1)), "nothing was found of its application");
        unproven.unregistered(&key("app-1", 4));
        assert!(!is_questioned(&unproven, key("app-1", 4)) && is_questioned(&unproven, key("app-1", 5)));
        (0..UNREGISTERED_MAX as i32).for_each(|id| unproven.unregistered(&key("app-1", -id)));
        assert!(is_questioned(&unproven, key("app-1", 1 - UNREGISTERED_MAX as i32)), "bounded");
        unproven.ended(&key("app-1", 0).app);
        assert!(!is_questioned(&unproven, key("app-1", 7)));
    }
}
