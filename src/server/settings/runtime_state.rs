//! Settings made at run time that outlive the process: decommissioning, tags, and the applications
//! and nodes known to the embedded coordinator.
//!
//! They are one JSON file in every data directory, or an object in the object store
//! (`MEMORY_OBJECT`), rewritten as a whole after a change. A start reads the newest readable copy.
//! An upgrade hands everything to the successor. With a metadata log, a kill keeps everything but
//! the last seconds of applications and nodes, and a graceful stop everything but the
//! decommissioning: the stop completes it.
//!
//! Registrations and reports are not stored here but in the metadata log.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::{BoxFuture, join_all};
use serde::{Deserialize, Serialize};
use tokio::sync::{Mutex, Notify};
use tokio::time::MissedTickBehavior;

use crate::clock::{Instant, timeout};
use crate::config::Config;
use crate::service::{Service, SettingsStore};
use crate::store::SavedSettings;
use uniffle_coordinator::embedded::{EmbeddedCoordinator, SavedApp, SavedNode};

use super::{RuntimeSettings, WorkerTags};
use crate::server::start::memory_backing::{paths_near_log, within};
use crate::server::upgrade::{read_from_predecessor, write_for_successor};

/// Name of the file beside the metadata log.
const FILE: &str = "state";
/// Largest file read. Full tables of applications and nodes fit.
const FILE_BYTES_MAX: u64 = 16 << 20;
/// Interval at which changes of applications and nodes are saved, and failed writes are repeated.
const SAVE_INTERVAL: Duration = Duration::from_secs(2);
/// Age at which settings in an object store are written again: a rule of the bucket may delete old
/// objects, after one day at the earliest.
const REFRESH: Duration = Duration::from_hours(12);
/// Time limit of a request to the object store.
const STORE_DEADLINE: Duration = Duration::from_secs(10);

/// Content of the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::server) struct RuntimeState {
    /// Increases with each change of the state. The file with the greatest number is the newest.
    sequence: u64,
    /// Decommissioning was requested.
    pub(in crate::server) decommission: bool,
    /// Tags set by a call, together with the configured tags at that time.
    tags: Option<SavedTags>,
    /// Applications of the embedded coordinator.
    pub(in crate::server) apps: Vec<SavedApp>,
    /// Nodes of the embedded coordinator. Earlier versions do not save them.
    #[serde(default)]
    pub(in crate::server) nodes: Vec<SavedNode>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct SavedTags {
    current: Vec<String>,
    configured: Vec<String>,
}

impl RuntimeState {
    /// Returns the settings `inherited` from the predecessor of an upgrade, otherwise the saved
    /// ones.
    pub(in crate::server) async fn recover(
        config: &Config,
        service: &Service,
        inherited: Option<OwnedFd>,
    ) -> Self {
        let stored = settings_in_store(service);
        Self::read(config, stored, inherited).await
    }

    /// Returns the settings `inherited` from the predecessor of an upgrade, otherwise those of the
    /// newest file, or of the object store.
    async fn read(config: &Config, stored: Option<&dyn SavedSettings>, inherited: Option<OwnedFd>) -> Self {
        match inherited.map(read_from_predecessor) {
            Some(Ok(state)) => return state,
            Some(Err(error)) => {
                tracing::warn!(%error, "cannot read the settings made at run time of the previous process");
            }
            None => {}
        }
        if let Some(stored) = stored {
            return read_stored(stored)
                .await
                .unwrap_or_else(|error| {
                    tracing::warn!(
                        error,
                        "cannot read the settings made at run time in the object store; ignoring them"
                    );
                    None
                })
                .unwrap_or_default();
        }
        let reads = paths_near_log(config, FILE).map(|path| async move {
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
    pub(in crate::server) fn tags(&self, configured: &[String]) -> Option<Vec<String>> {
        let saved = self.tags.as_ref()?;
        (saved.configured == configured).then(|| saved.current.clone())
    }
}

async fn read_stored(stored: &dyn SavedSettings) -> Result<Option<RuntimeState>, String> {
    let read = timeout(STORE_DEADLINE, stored.read()).await.map_err(|error| error.to_string())?;
    let Some(text) = read.map_err(|error| error.to_string())? else { return Ok(None) };
    serde_json::from_slice(&text).map_err(|error| error.to_string())
}

/// Returns where a worker without data directories saves its settings.
fn settings_in_store(service: &Service) -> Option<&dyn SavedSettings> {
    service.flusher()?.tiers().metadata()?.saved_settings()
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

/// Replaces the file as a whole, so that a reader never sees a part of it, also after a loss of
/// power.
fn write(path: &Path, text: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension("new");
    let mut file = File::create(&temporary)?;
    file.write_all(text)?;
    file.sync_data()?;
    fs::rename(temporary, path)?;
    let directory = path.parent().ok_or(io::ErrorKind::NotFound)?;
    fs::OpenOptions::new().read(true).open(directory)?.sync_all()
}

/// Saves the settings to the file after changes.
#[derive(Debug)]
pub(in crate::server) struct StateWriter {
    service: Arc<Service>,
    live: Arc<RuntimeSettings>,
    embedded: Option<EmbeddedCoordinator>,
    /// Paths of the copies. Each is locked while it is written, which may take longer than anyone
    /// waits for it.
    paths: Vec<(PathBuf, Arc<parking_lot::Mutex<()>>)>,
    /// The coordinator counts the applications of a user.
    has_quota: bool,
    changed: Notify,
    /// The worker is stopping in order.
    is_stopping: AtomicBool,
    latest: Mutex<Latest>,
}

/// The most recent state.
#[derive(Debug, Default)]
struct Latest {
    state: RuntimeState,
    apps_version: Option<u64>,
    nodes_version: Option<u64>,
    /// A copy of the state has been written.
    is_saved: bool,
    /// Time of the last attempt to write.
    saved_at: Option<Instant>,
    /// A warning about a state that was not saved has been logged.
    has_warned: bool,
}

impl StateWriter {
    /// Creates a writer that continues from `state`, which was read at the start.
    pub(in crate::server) fn new(
        config: &Config,
        state: RuntimeState,
        service: Arc<Service>,
        live: Arc<RuntimeSettings>,
        embedded: Option<EmbeddedCoordinator>,
    ) -> Self {
        // Written again at the start, also to directories that were added.
        let is_saved = state == RuntimeState::default();
        let latest = Mutex::new(Latest { state, is_saved, ..Latest::default() });
        Self {
            service,
            live,
            embedded,
            paths: paths_near_log(config, FILE).map(|path| (path, Arc::default())).collect(),
            has_quota: config.embedded.access.apps_per_user_max > 0,
            changed: Notify::new(),
            is_stopping: AtomicBool::new(false),
            latest,
        }
    }

    /// Requests a write of the file, because the state or the tags have changed.
    pub(in crate::server) fn notify(&self) {
        self.changed.notify_one();
    }

    /// Writes the file after each change, until dropped. Changes of applications and nodes are
    /// noticed every [`SAVE_INTERVAL`].
    pub(in crate::server) async fn run(self: Arc<Self>) {
        let mut ticks = tokio::time::interval(SAVE_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = self.changed.notified() => {}
                _ = ticks.tick() => {}
            }
            // An error has been logged.
            let _ = self.save().await;
        }
    }

    /// Writes the file for a graceful stop, which completes a decommissioning.
    pub(in crate::server) async fn save_for_stop(&self) {
        self.is_stopping.store(true, Ordering::Release);
        // An error has been logged.
        let _ = self.save().await;
    }

    /// Writes the file if anything has changed since it was last written, and the object also if it
    /// is older than [`REFRESH`]. Without data directories with recovery or an object store, it
    /// writes nothing and warns once.
    ///
    /// # Errors
    /// The path and error of each copy, if none was written. The first such error is logged.
    pub(in crate::server) async fn save(&self) -> Result<(), String> {
        let mut latest = self.latest.lock().await;
        self.update(&mut latest);
        let stored = settings_in_store(&self.service);
        let is_old = stored.is_some() && latest.saved_at.is_some_and(|at| at.elapsed() >= REFRESH);
        if latest.is_saved && !is_old {
            return Ok(());
        }
        if self.paths.is_empty() && stored.is_none() {
            latest.is_saved = true;
            self.warn_of_loss(&mut latest);
            return Ok(());
        }
        let written = self.write(&latest.state, stored).await;
        latest.is_saved = written.is_ok();
        latest.saved_at = Some(Instant::now());
        let had_warned = std::mem::replace(&mut latest.has_warned, written.is_err());
        written.inspect_err(|error| {
            if !had_warned {
                tracing::warn!(
                    decommission = latest.state.decommission,
                    error,
                    "cannot save the settings made at run time; a kill loses them; retrying"
                );
            }
        })
    }

    /// Returns a file with the latest state for a successor. Returns `None` if nothing was ever
    /// set, or the file cannot be written.
    pub(in crate::server) async fn write_for_successor(&self) -> Option<OwnedFd> {
        let mut latest = self.latest.lock().await;
        self.update(&mut latest);
        if latest.state == RuntimeState::default() {
            return None;
        }
        let written = write_for_successor("uniffle-worker-state", &latest.state);
        written.inspect_err(|error| tracing::warn!(%error, "cannot hand over settings made at run time")).ok()
    }

    /// Updates `latest` from the running worker.
    fn update(&self, latest: &mut Latest) {
        let mut state = latest.state.clone();
        let is_stopping = self.is_stopping.load(Ordering::Acquire);
        state.decommission = self.service.status().is_decommission_wanted() && !is_stopping;
        let WorkerTags { current, configured } = self.live.tags_and_configured();
        state.tags = (current != configured).then_some(SavedTags { current, configured });
        let embedded = self.embedded.as_ref();
        let apps = embedded.and_then(|embedded| embedded.saved_apps(latest.apps_version));
        if let Some((version, apps)) = apps {
            latest.apps_version = Some(version);
            state.apps = apps;
        }
        let nodes = embedded.and_then(|embedded| embedded.saved_nodes(latest.nodes_version));
        if let Some((version, nodes)) = nodes {
            latest.nodes_version = Some(version);
            state.nodes = nodes;
        }
        if state != latest.state {
            state.sequence += 1;
            (latest.state, latest.is_saved) = (state, false);
        }
    }

    /// Warns once if there is a setting that a restart forgets.
    fn warn_of_loss(&self, latest: &mut Latest) {
        let RuntimeState { decommission, tags, apps, .. } = &latest.state;
        let counts_users = self.has_quota && !apps.is_empty();
        if !latest.has_warned && (*decommission || tags.is_some() || counts_users) {
            latest.has_warned = true;
            tracing::warn!(
                decommission,
                tags = tags.is_some(),
                counts_users,
                "a restart forgets decommissioning, tags set by a call, and the users of applications, because \
                 there is no metadata log (store_type, localfile_store.recovery); set them again after a \
                 restart"
            );
        }
    }

    /// Writes `state` to all copies, or to the object store.
    ///
    /// # Errors
    /// The path and error of each copy, if none was written.
    async fn write(&self, state: &RuntimeState, stored: Option<&dyn SavedSettings>) -> Result<(), String> {
        let text = serde_json::to_vec(state).map_err(|error| error.to_string())?;
        if let Some(stored) = stored {
            let saved = timeout(STORE_DEADLINE, stored.save(text.into())).await;
            return saved.map_err(|error| error.to_string())?.map_err(|error| error.to_string());
        }
        let text: Arc<[u8]> = text.into();
        let writes = self.paths.iter().map(|(path, lock)| {
            let (path, text, shown) = (path.clone(), Arc::clone(&text), path.display().to_string());
            let lock = Arc::clone(lock);
            async move {
                let written = within(move || {
                    let busy = || io::Error::other("an earlier write has not ended");
                    let _lock = lock.try_lock().ok_or_else(busy)?;
                    write(&path, &text)
                });
                let written = written.await;
                written.map_err(|error| format!("{shown}: {error}")).inspect_err(|error| {
                    tracing::debug!(error, "cannot write a copy of the settings made at run time")
                })
            }
        });
        let written = join_all(writes.collect::<Vec<_>>()).await;
        if written.iter().any(Result::is_ok) {
            return Ok(());
        }
        Err(written.into_iter().filter_map(Result::err).collect::<Vec<_>>().join(", "))
    }
}

impl SettingsStore for StateWriter {
    fn save(&self) -> BoxFuture<'_, Result<(), String>> {
        Self::save(self).boxed()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::config::Machine;
    use crate::log::METADATA;

    fn config(directories: &[&Path]) -> Config {
        let paths: Vec<String> = directories.iter().map(|path| path.display().to_string()).collect();
        let machine = Machine { memory_bytes: 1 << 30, cores: 2, state_dir: "/nonexistent".into() };
        let text = format!("[localfile_store]\ndata_paths = {paths:?}\n");
        Config::parse(&text, &HashMap::new(), &machine).unwrap()
    }

    #[tokio::test]
    async fn inherited_state_is_preferred_to_files() {
        let directory = tempfile::tempdir().unwrap();
        let config = config(&[directory.path()]);
        let file = RuntimeState { sequence: 9, ..RuntimeState::default() };
        put(directory.path(), &serde_json::to_vec(&file).unwrap());
        let state = RuntimeState { sequence: 3, decommission: true, ..RuntimeState::default() };
        let inherited = write_for_successor("state", &state).unwrap();
        assert_eq!(RuntimeState::read(&config, None, Some(inherited)).await, state);
        let unreadable = write_for_successor("state", &"").unwrap();
        assert_eq!(RuntimeState::read(&config, None, Some(unreadable)).await, file);
    }

    fn put(directory: &Path, text: &[u8]) {
        fs::create_dir_all(directory.join(METADATA)).unwrap();
        write(&directory.join(METADATA).join(FILE), text).unwrap();
    }

    #[tokio::test]
    async fn latest_readable_copy_is_taken() {
        let [first, second, third] = [(); 3].map(|()| tempfile::tempdir().unwrap());
        let config = config(&[first.path(), second.path(), third.path()]);
        assert_eq!(RuntimeState::read(&config, None, None).await, RuntimeState::default());
        let tags = SavedTags { current: vec!["ssd".into()], configured: vec!["hdd".into()] };
        let old = RuntimeState { sequence: 7, ..RuntimeState::default() };
        let new =
            RuntimeState { sequence: 8, decommission: true, tags: Some(tags), ..RuntimeState::default() };
        put(first.path(), &serde_json::to_vec(&old).unwrap());
        put(second.path(), &serde_json::to_vec(&new).unwrap());
        put(third.path(), b"{\"sequence\": 9, ");
        let read = RuntimeState::read(&config, None, None).await;
        assert_eq!(read, new);
        assert_eq!(read.tags(&["hdd".to_owned()]), Some(vec!["ssd".to_owned()]));
        assert_eq!(
            read.tags(&["nvme".to_owned()]),
            None,
            "saved tags must be dropped once the file's own value has changed"
        );
    }
}
