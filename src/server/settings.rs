//! What can be changed while the worker runs: tags, log filter, and the pace of heartbeats.

use std::sync::OnceLock;
use std::time::Duration;

use parking_lot::RwLock;
use tokio::sync::{Notify, watch};

use crate::config::Config;
use crate::coordinator::heartbeat::Heartbeats;
use crate::telemetry::LogFilter;

/// What can be changed while the worker runs, shared by those who change it and those who use it.
#[derive(Debug)]
pub(super) struct RuntimeSettings {
    tags: RwLock<Tags>,
    /// The coordinators are to hear of a change now.
    changed: Notify,
    log: Option<LogFilter>,
    pace: OnceLock<Pace>,
}

/// The worker's own tags, beside those of its listeners.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tags {
    /// In effect.
    pub(super) current: Vec<String>,
    /// In the configuration file. They differ from the current ones after a call replaced those.
    pub(super) configured: Vec<String>,
}

/// Who sends heartbeats, at least one of the two.
#[derive(Debug)]
pub(super) struct Pace {
    /// To the own coordinator.
    pub(super) embedded: Option<watch::Sender<Duration>>,
    pub(super) quorum: Option<Heartbeats>,
}

impl RuntimeSettings {
    pub(super) fn new(config: &Config, log: Option<LogFilter>) -> Self {
        Self {
            tags: RwLock::new(Tags {
                current: config.worker.tags.clone(),
                configured: config.worker.tags.clone(),
            }),
            changed: Notify::new(),
            log,
            pace: OnceLock::new(),
        }
    }

    /// The heartbeats have begun; called once.
    pub(super) fn beating(&self, pace: Pace) {
        let _ = self.pace.set(pace); // the first ones stay
    }

    /// The heartbeats to a quorum, if there is one.
    pub(super) fn heartbeats(&self) -> Option<&Heartbeats> {
        self.pace.get()?.quorum.as_ref()
    }

    /// Heartbeats are so far apart from now on.
    pub(super) fn set_heartbeat_interval(&self, interval: Duration) {
        let Some(Pace { embedded, quorum }) = self.pace.get() else { return };
        if let Some(pace) = embedded {
            pace.send_replace(interval);
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
    pub(super) fn tags_and_configured(&self) -> Tags {
        self.tags.read().clone()
    }

    /// Replaces the tags in effect and notifies the coordinators.
    pub(super) fn set_tags(&self, tags: Vec<String>) {
        self.tags.write().current = tags;
        self.changed.notify_one();
    }

    /// Puts the new tags of the configuration file into effect and notifies the coordinators.
    pub(super) fn reload_tags(&self, tags: Vec<String>) {
        *self.tags.write() = Tags { current: tags.clone(), configured: tags };
        self.changed.notify_one();
    }

    /// Resolves when the coordinators are to be told; for one waiter.
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
