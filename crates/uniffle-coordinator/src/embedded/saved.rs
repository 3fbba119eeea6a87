//! State of the coordinator that outlives its process: applications and nodes.
//!
//! `server::settings` stores it. Times are stored as dates, because clock readings mean
//! nothing to another process.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::{EmbeddedCoordinator, SavedApp, SavedNode};
use uniffle_base::clock::Instant;

impl EmbeddedCoordinator {
    /// Adds the applications that an earlier process saved. This preserves the number of
    /// applications per user and their remote storages.
    pub fn restore_apps(&self, saved: &[SavedApp]) {
        self.0.apps.lock().restore(saved, &self.storage_paths(), Instant::now());
    }

    /// Returns the applications to be saved for the next process and their version, or `None` if
    /// they have not changed since `version`.
    #[must_use]
    pub fn saved_apps(&self, version: Option<u64>) -> Option<(u64, Vec<SavedApp>)> {
        let apps = self.0.apps.lock();
        let now = apps.version();
        (version != Some(now)).then(|| (now, apps.saved(&self.storage_paths())))
    }

    /// Adds the nodes that an earlier process saved. Lost ones stay lost until they report. Live
    /// ones become lost unless they report within the node timeout.
    pub fn restore_nodes(&self, saved: &[SavedNode]) {
        self.0.nodes.lock().restore(saved, Instant::now(), unix_now());
        self.sweep();
    }

    /// Returns the nodes to be saved for the next process and their version, or `None` if they have
    /// not changed since `version`.
    #[must_use]
    pub fn saved_nodes(&self, version: Option<u64>) -> Option<(u64, Vec<SavedNode>)> {
        let nodes = self.0.nodes.lock();
        let now = nodes.version();
        (version != Some(now)).then(|| (now, nodes.saved(Instant::now(), unix_now())))
    }

    fn storage_paths(&self) -> Vec<&str> {
        self.0.storages.iter().map(|storage| storage.path.as_str()).collect()
    }
}

/// Returns the time since the Unix epoch.
fn unix_now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
