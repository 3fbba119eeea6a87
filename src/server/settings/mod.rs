//! Settings that can change while the worker runs: tags, log filter, and the heartbeat interval.
//!
//! A change is in effect at once, and coordinators are notified of new tags. `runtime_state` saves
//! the tags that a call has set, and `reload` applies those of the configuration file.

pub(super) mod reload;
pub(super) mod runtime_state;

use std::sync::OnceLock;
use std::time::Duration;

use parking_lot::RwLock;
use tokio::sync::{Notify, watch};

use crate::config::Config;
use crate::telemetry::LogFilter;
use uniffle_coordinator::heartbeat::Heartbeats;

/// Settings that can change while the worker runs, shared by their writers and readers.
#[derive(Debug)]
pub(super) struct RuntimeSettings {
    tags: RwLock<WorkerTags>,
    /// Wakes the watch that sends a heartbeat after a change.
    changed: Notify,
    log: Option<LogFilter>,
    senders: OnceLock<HeartbeatSenders>,
}

/// The worker's own tags, beside those of its listeners.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WorkerTags {
    /// Tags in effect.
    pub(super) current: Vec<String>,
    /// Tags of the configuration file. They differ from `current` after a call has replaced those.
    pub(super) configured: Vec<String>,
}

/// The senders of heartbeats. At least one is set.
#[derive(Debug)]
pub(super) struct HeartbeatSenders {
    /// Sets the interval of heartbeats to the worker's own coordinator.
    pub(super) embedded: Option<watch::Sender<Duration>>,
    pub(super) quorum: Option<Heartbeats>,
}

impl RuntimeSettings {
    pub(super) fn new(config: &Config, log: Option<LogFilter>) -> Self {
        Self {
            tags: RwLock::new(WorkerTags {
                current: config.worker.tags.clone(),
                configured: config.worker.tags.clone(),
            }),
            changed: Notify::new(),
            log,
            senders: OnceLock::new(),
        }
    }

    /// Registers the started heartbeats. Called once.
    pub(super) fn set_heartbeat_senders(&self, senders: HeartbeatSenders) {
        let _ = self.senders.set(senders); // the first ones stay
    }

    /// Returns the heartbeats to a quorum, if there is one.
    pub(super) fn heartbeats(&self) -> Option<&Heartbeats> {
        self.senders.get()?.quorum.as_ref()
    }

    /// Sets the interval of all heartbeats.
    pub(super) fn set_heartbeat_interval(&self, interval: Duration) {
        let Some(HeartbeatSenders { embedded, quorum }) = self.senders.get() else { return };
        if let Some(embedded) = embedded {
            embedded.send_replace(interval);
        }
        if let Some(heartbeats) = quorum {
            heartbeats.set_interval(interval);
        }
    }

    /// Returns the worker's own tags in effect.
    pub(super) fn tags(&self) -> Vec<String> {
        self.tags.read().current.clone()
    }

    /// Returns the tags in effect and those of the configuration file.
    pub(super) fn tags_and_configured(&self) -> WorkerTags {
        self.tags.read().clone()
    }

    /// Replaces the tags in effect and notifies the coordinators.
    pub(super) fn set_tags(&self, tags: Vec<String>) {
        self.tags.write().current = tags;
        self.changed.notify_one();
    }

    /// Puts the new tags of the configuration file into effect and notifies the coordinators.
    pub(super) fn reload_tags(&self, tags: Vec<String>) {
        *self.tags.write() = WorkerTags { current: tags.clone(), configured: tags };
        self.changed.notify_one();
    }

    /// Waits until the coordinators must be notified. Supports one waiter.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Replaces the log filter.
    pub(super) fn set_log_filter(&self, filter: &str) -> Result<(), String> {
        match &self.log {
            Some(log) => log.set(filter),
            None => Err("the logs of this process are not the worker's".to_owned()),
        }
    }
}
