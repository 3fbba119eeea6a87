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
    tags: RwLock<Vec<String>>,
    /// The coordinators are to hear of a change now.
    changed: Notify,
    log: Option<LogFilter>,
    pace: OnceLock<Pace>,
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
            tags: RwLock::new(config.worker.tags.clone()),
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

    /// The configured tags as they are now.
    pub(super) fn tags(&self) -> Vec<String> {
        self.tags.read().clone()
    }

    /// Replaces the tags; the coordinators hear of it at once.
    pub(super) fn set_tags(&self, tags: Vec<String>) {
        *self.tags.write() = tags;
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
