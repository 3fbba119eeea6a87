//! What the administration changes beside the service: the tags and the log filter; and its token.

use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context as _;
use parking_lot::RwLock;
use tokio::sync::{Notify, watch};

use crate::config::{self, Config};
use crate::coordinator::heartbeat::Heartbeats;
use crate::listeners::http::admin::{AdminHooks, Token};
use crate::service::Service;
use crate::telemetry::LogFilter;

use super::reload::{Reloaded, Reloader};

/// Largest token file read.
const TOKEN_FILE_BYTES_MAX: u64 = 4 << 10;

/// What can be changed while the worker runs, shared by whoever changes and whoever uses it.
#[derive(Debug)]
pub(super) struct Live {
    tags: RwLock<Vec<String>>,
    /// The coordinators are to hear of a change now.
    changed: Notify,
    log: Option<LogFilter>,
    pace: OnceLock<Pace>,
}

/// Who sends heartbeats.
#[derive(Debug)]
pub(super) enum Pace {
    /// To the own coordinator.
    Embedded(watch::Sender<Duration>),
    /// To a quorum.
    Quorum(Heartbeats),
}

impl Live {
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
        match self.pace.get()? {
            Pace::Embedded(_) => None,
            Pace::Quorum(heartbeats) => Some(heartbeats),
        }
    }

    /// Heartbeats are so far apart from now on.
    pub(super) fn set_heartbeat_interval(&self, interval: Duration) {
        match self.pace.get() {
            Some(Pace::Embedded(pace)) => drop(pace.send_replace(interval)),
            Some(Pace::Quorum(heartbeats)) => heartbeats.set_interval(interval),
            None => {}
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

/// The calls that need more than the service.
pub(super) fn hooks(service: Arc<Service>, live: &Arc<Live>, reloader: Arc<Reloader>) -> AdminHooks {
    let (tags, log) = (Arc::clone(live), Arc::clone(live));
    let set_tags = move |wanted: Vec<String>| {
        config::check_tags(&wanted)?;
        tags.set_tags(wanted);
        Ok(())
    };
    let set_log_filter = move |filter: &str| log.set_log_filter(filter);
    let reload = move || {
        let Reloaded { changed, waiting } = reloader.reload("call")?;
        Ok((changed, waiting))
    };
    AdminHooks {
        service,
        set_tags: Arc::new(set_tags),
        set_log_filter: Arc::new(set_log_filter),
        reload: Arc::new(reload),
    }
}

/// The token that callers must show, if there is one.
pub(super) fn token(config: &Config) -> anyhow::Result<Option<Token>> {
    let Some(path) = &config.admin.token_file else { return Ok(config.admin.token.clone()) };
    let read = || -> anyhow::Result<Token> { Ok(Token::parse(&small_file(path)?)?) };
    read().map(Some).with_context(|| format!("admin.token_file = {}", path.display()))
}

fn small_file(path: &Path) -> std::io::Result<String> {
    let metadata = std::fs::metadata(path)?;
    if !metadata.is_file() || metadata.len() > TOKEN_FILE_BYTES_MAX {
        return Err(std::io::Error::other("not a small ordinary file"));
    }
    std::fs::read_to_string(path)
}
