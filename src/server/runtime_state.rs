//! Settings made at run time that outlive the process: decommissioning, tags, and the applications
//! known to the embedded coordinator.
//!
//! They are one JSON file beside each copy of the metadata log, rewritten as a whole after a
//! change. A start reads the newest readable copy. An upgrade and a kill keep everything. An
//! orderly stop keeps everything but the decommissioning: the stop completes it, and the next start
//! accepts shuffles again.
//!
//! Registrations and reports are not stored here but in the metadata log.

use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::future::join_all;
use serde::{Deserialize, Serialize};
use tokio::sync::{Mutex, Notify};
use tokio::time::MissedTickBehavior;

use crate::config::Config;
use crate::coordinator::embedded::{EmbeddedCoordinator, SavedApp};
use crate::service::Service;

use super::memory_backing::{beside_log, within};
use super::settings::{RuntimeSettings, Tags};

/// Name of the file beside the metadata log.
const FILE: &str = "state";
/// Largest file read. A full table of applications takes less than half of it.
const FILE_BYTES_MAX: u64 = 8 << 20;
/// Interval at which changes of the applications are saved.
const SAVE_INTERVAL: Duration = Duration::from_secs(2);

/// Content of the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RuntimeState {
    /// Increases with each file written. The file with the greatest number is the newest.
    sequence: u64,
    /// Decommissioning was requested.
    pub(super) decommission: bool,
    /// Tags set by a call, together with the configured tags at that time.
    tags: Option<SavedTags>,
    /// Applications of the embedded coordinator.
    pub(super) apps: Vec<SavedApp>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct SavedTags {
    current: Vec<String>,
    configured: Vec<String>,
}

impl RuntimeState {
    /// Reads the newest file of all data directories.
    pub(super) async fn read(config: &Config) -> Self {
        let reads = beside_log(config, FILE).map(|path| async move {
            let shown = path.display().to_string();
            within(move || read(&path)).await.unwrap_or_else(|error| {
                tracing::warn!(path = shown, %error, "cannot read the settings made at run time; ignoring \
                     this copy");
                None
            })
        });
        let read = join_all(reads.collect::<Vec<_>>()).await;
        read.into_iter().flatten().max_by_key(|state| state.sequence).unwrap_or_default()
    }

    /// Returns the tags set by a call, or `None` if the configured tags have changed since.
    pub(super) fn tags(&self, configured: &[String]) -> Option<Vec<String>> {
        let saved = self.tags.as_ref()?;
        (saved.configured == configured).then(|| saved.current.clone())
    }
}

fn read(path: &Path) -> io::Result<Option<RuntimeState>> {
    let file = match fs::OpenOptions::new().read(true).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut text = Vec::new();
    file.take(FILE_BYTES_MAX).read_to_end(&mut text)?;
    Ok(Some(serde_json::from_slice(&text)?))
}

/// Replaces the file as a whole, so that a reader never sees a part of it.
fn write(path: &Path, text: &[u8]) -> io::Result<()> {
    let beside = path.with_extension("new");
    fs::write(&beside, text)?;
    fs::rename(beside, path)
}

/// Saves the settings to the file after changes.
#[derive(Debug)]
pub(super) struct StateWriter {
    service: Arc<Service>,
    live: Arc<RuntimeSettings>,
    embedded: Option<EmbeddedCoordinator>,
    paths: Vec<PathBuf>,
    changed: Notify,
    /// The worker is stopping in order.
    is_stopping: AtomicBool,
    latest: Mutex<Latest>,
}

/// The state most recently written.
#[derive(Debug, Default)]
struct Latest {
    state: RuntimeState,
    apps_version: Option<u64>,
}

impl StateWriter {
    /// Creates a writer that continues from `state`, which was read at the start.
    pub(super) fn new(
        config: &Config,
        state: RuntimeState,
        (service, live, embedded): (Arc<Service>, Arc<RuntimeSettings>, Option<EmbeddedCoordinator>),
    ) -> Self {
        let paths = beside_log(config, FILE).collect();
        let latest = Mutex::new(Latest { state, apps_version: None });
        Self {
            service,
            live,
            embedded,
            paths,
            changed: Notify::new(),
            is_stopping: AtomicBool::new(false),
            latest,
        }
    }

    /// Requests a write of the file, because the state or the tags have changed.
    pub(super) fn notify(&self) {
        self.changed.notify_one();
    }

    /// Writes the file after each change, until dropped.
    pub(super) async fn run(self: Arc<Self>) {
        let mut ticks = tokio::time::interval(SAVE_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = self.changed.notified() => {}
                _ = ticks.tick() => {}
            }
            self.save().await;
        }
    }

    /// Writes the file for an orderly stop, which completes a decommissioning.
    pub(super) async fn save_for_stop(&self) {
        self.is_stopping.store(true, Ordering::Release);
        self.save().await;
    }

    /// Writes the file if anything has changed.
    pub(super) async fn save(&self) {
        let mut latest = self.latest.lock().await;
        let mut state = latest.state.clone();
        let is_stopping = self.is_stopping.load(Ordering::Acquire);
        state.decommission = self.service.status().is_decommission_wanted() && !is_stopping;
        let Tags { current, configured } = self.live.tags_and_configured();
        state.tags = (current != configured).then_some(SavedTags { current, configured });
        let saved = self.embedded.as_ref().and_then(|embedded| embedded.saved_apps(latest.apps_version));
        if let Some((version, apps)) = saved {
            latest.apps_version = Some(version);
            state.apps = apps;
        }
        if state == latest.state {
            return;
        }
        state.sequence += 1;
        // A state of strings, numbers and lists always has a JSON form.
        let Ok(text) = serde_json::to_vec(&state) else { return };
        let text: Arc<[u8]> = text.into();
        let writes = self.paths.iter().map(|path| {
            let (path, text, shown) = (path.clone(), Arc::clone(&text), path.display().to_string());
            async move {
                if let Err(error) = within(move || write(&path, &text)).await {
                    tracing::debug!(path = shown, %error, "cannot save the settings made at run time");
                    return false;
                }
                true
            }
        });
        let written = join_all(writes.collect::<Vec<_>>()).await;
        if !written.is_empty() && !written.contains(&true) {
            tracing::warn!(
                decommission = state.decommission,
                "cannot save the settings made at run time in any data directory; they are lost with this \
                 process"
            );
        }
        latest.state = state;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::config::Machine;
    use crate::durability::METADATA;

    fn config(directories: &[&Path]) -> Config {
        let paths: Vec<String> = directories.iter().map(|path| path.display().to_string()).collect();
        let machine = Machine { memory_bytes: 1 << 30, cores: 2, state_dir: "/nonexistent".into() };
        let text = format!("[localfile_store]\ndata_paths = {paths:?}\n");
        Config::parse(&text, &HashMap::new(), &machine).unwrap()
    }

    fn put(directory: &Path, text: &[u8]) {
        fs::create_dir_all(directory.join(METADATA)).unwrap();
        write(&directory.join(METADATA).join(FILE), text).unwrap();
    }

    #[tokio::test]
    async fn latest_readable_copy_is_taken() {
        let [first, second, third] = [(); 3].map(|()| tempfile::tempdir().unwrap());
        let config = config(&[first.path(), second.path(), third.path()]);
        assert_eq!(RuntimeState::read(&config).await, RuntimeState::default());
        let tags = SavedTags { current: vec!["ssd".into()], configured: vec!["hdd".into()] };
        let old = RuntimeState { sequence: 7, ..RuntimeState::default() };
        let new =
            RuntimeState { sequence: 8, decommission: true, tags: Some(tags), ..RuntimeState::default() };
        put(first.path(), &serde_json::to_vec(&old).unwrap());
        put(second.path(), &serde_json::to_vec(&new).unwrap());
        put(third.path(), b"{\"sequence\": 9, ");
        let read = RuntimeState::read(&config).await;
        assert_eq!(read, new);
        assert_eq!(read.tags(&["hdd".to_owned()]), Some(vec!["ssd".to_owned()]));
        assert_eq!(read.tags(&["nvme".to_owned()]), None, "the file's own value has changed");
    }
}
