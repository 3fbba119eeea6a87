//! Deletion (docs/protocol.md §6.5). An unregistered shuffle or application is deleted with
//! everything below it. For an expired one only our own files and then empty directories are
//! deleted, because other servers may still serve it.
//!
//! Forgetting is synchronous and returns a [`HdfsRemoval`]. From then on, new writes of the old
//! registration end with `Purged`. The removal waits for those in progress. Writes of a new
//! registration wait until the removal is done or dropped.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::stream::{self, StreamExt as _};

use super::deletion_gate::Deleting;
use super::remote::{FsFuture, RemoteClient, RemoteEntry, RemoteFs};
use super::{AppState, HdfsCore, HdfsStore, layout};
use crate::clock::{Instant, sleep, timeout};
use crate::store::{Cause, StoreError, StoreErrorKind};
use uniffle_wire::types::{AppId, ShuffleKey};

/// Number of attempts, and the pause between them, like Java's. A file system that does not answer
/// is tried for `TRIED_FOR`. After `ATTEMPTS`, its pauses double up to `PAUSE_MAX` (backoff).
const ATTEMPTS: u32 = 5;
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(30);
const TRIED_FOR: Duration = Duration::from_secs(600);
/// Time for one call that moves no data.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Number of directories of an expired application that are listed concurrently.
const WALKS: usize = 8;

#[derive(Debug)]
enum PurgeScope {
    Everything,
    Own,
}

#[derive(Debug)]
struct PendingDelete {
    remote: Arc<RemoteClient>,
    path: String,
    what: PurgeScope,
}

/// A deletion that was ordered. [`HdfsRemoval::run`] executes it.
#[derive(Debug)]
#[must_use = "nothing is deleted before it runs"]
pub struct HdfsRemoval {
    store: Arc<HdfsStore>,
    app: AppId,
    pending: Vec<PendingDelete>,
    deleting: Option<Deleting>,
}

impl HdfsStore {
    /// Forgets shuffles of an application. Returns `None` if none of them is known here.
    pub fn forget_shuffles(self: &Arc<Self>, app: &AppId, keys: &[ShuffleKey]) -> Option<HdfsRemoval> {
        let mut pending = Vec::new();
        for key in keys {
            if let Some((_, shuffle)) = self.shuffles.remove(key) {
                shuffle.purged.store(true, Ordering::Release);
                let path = layout::shuffle_directory(&shuffle.root, key);
                pending.push(PendingDelete {
                    remote: Arc::clone(&shuffle.remote),
                    path,
                    what: PurgeScope::Everything,
                });
            }
        }
        let state = self.apps.get(app).filter(|_| !pending.is_empty()).map(|state| Arc::clone(&*state))?;
        Some(self.removal(app, &state, pending))
    }

    /// Forgets an application with these shuffles. Returns `None` if the application is not known
    /// here.
    pub fn forget_app(
        self: &Arc<Self>,
        app: &AppId,
        keys: &[ShuffleKey],
        cause: Cause,
    ) -> Option<HdfsRemoval> {
        for key in keys {
            if let Some((_, shuffle)) = self.shuffles.remove(key) {
                shuffle.purged.store(true, Ordering::Release);
            }
        }
        let state = self.apps.get(app).map(|state| Arc::clone(&*state))?;
        let roots = std::mem::take(&mut *state.roots.lock());
        let pending = roots.into_iter().map(|(remote, root)| PendingDelete {
            remote,
            path: layout::app_directory(&root, app),
            what: match cause {
                Cause::Unregistered => PurgeScope::Everything,
                Cause::Expired => PurgeScope::Own,
            },
        });
        Some(self.removal(app, &state, pending.collect()))
    }

    fn removal(self: &Arc<Self>, app: &AppId, state: &AppState, pending: Vec<PendingDelete>) -> HdfsRemoval {
        let deleting = Some(state.gate.order_deletion());
        HdfsRemoval { store: Arc::clone(self), app: app.clone(), pending, deleting }
    }
}

impl HdfsRemoval {
    /// Waits for writes in progress, at most ten minutes, then deletes. Directories that cannot be
    /// deleted in the end are logged and left.
    pub async fn run(self) {
        let core = &self.store.core;
        if let Some(deleting) = &self.deleting {
            // A hung write ends eventually. The directories of a removed application cannot wait
            // longer than this.
            drop(timeout(TRIED_FOR, deleting.clear()).await);
        }
        for it in &self.pending {
            if let Err(error) = core.remove(it).await {
                it.remote.metrics.deletions_failed.inc();
                tracing::error!(
                    path = %it.path,
                    remote = %it.remote.authority,
                    %error,
                    "deletion failed; the directory remains"
                );
            }
        }
    }
}

impl Drop for HdfsRemoval {
    fn drop(&mut self) {
        self.deleting = None;
        let is_unused =
            |state: &Arc<AppState>| Arc::strong_count(state) == 1 && state.roots.lock().is_empty();
        self.store.apps.remove_if(&self.app, |_, state| is_unused(state));
    }
}

impl HdfsCore {
    async fn remove(&self, it: &PendingDelete) -> Result<(), StoreError> {
        let deadline = Instant::now() + TRIED_FOR;
        let mut pause = PAUSE;
        for attempt in 1.. {
            let Err(error) = self.remove_once(it).await else { return Ok(()) };
            let hopeless = match error.kind {
                StoreErrorKind::Unreachable | StoreErrorKind::Unhealthy => Instant::now() + pause > deadline,
                _ => attempt >= ATTEMPTS,
            };
            if hopeless || self.tasks.is_cancelled() {
                return Err(error);
            }
            tracing::debug!(path = %it.path, attempt, %error, "deletion failed; retrying");
            tokio::select! {
                biased;
                () = self.tasks.cancelled() => {}
                () = sleep(pause) => {}
            }
            if attempt >= ATTEMPTS {
                pause = (pause * 2).min(PAUSE_MAX);
            }
        }
        Ok(())
    }

    async fn remove_once(&self, it: &PendingDelete) -> Result<(), StoreError> {
        let fs = &*it.remote.fs;
        match it.what {
            PurgeScope::Everything => self.timed(&it.path, fs.delete(&it.path, true)).await.map(drop),
            PurgeScope::Own => self.remove_own(fs, &it.path).await,
        }
    }

    /// Removes our files of an application: `<app>/<shuffle>/<range>/<file>`.
    async fn remove_own(&self, fs: &dyn RemoteFs, app: &str) -> Result<(), StoreError> {
        for shuffle in self.directories(fs, app).await? {
            let mut walks = Vec::new();
            for range in self.directories(fs, &shuffle).await? {
                walks.push(self.remove_own_files(fs, range));
            }
            let mut walks = stream::iter(walks).buffer_unordered(WALKS);
            while let Some(walked) = walks.next().await {
                walked?;
            }
            self.remove_if_empty(fs, &shuffle).await?;
        }
        self.remove_if_empty(fs, app).await
    }

    async fn remove_own_files(&self, fs: &dyn RemoteFs, range: String) -> Result<(), StoreError> {
        let entries = self.list(fs, &range).await?;
        for entry in
            entries.iter().filter(|entry| !entry.is_dir && layout::is_own(&entry.name, &self.server_id))
        {
            let path = format!("{range}/{}", entry.name);
            self.timed(&path, fs.delete(&path, false)).await?;
        }
        self.remove_if_empty(fs, &range).await
    }

    /// Lists the directory first, because the error of a NameNode for a directory that is not empty
    /// is hard to distinguish. If a file is created in between, the directory stays: the deletion
    /// is not recursive.
    async fn remove_if_empty(&self, fs: &dyn RemoteFs, path: &str) -> Result<(), StoreError> {
        if !self.list(fs, path).await?.is_empty() {
            return Ok(());
        }
        match self.timed(path, fs.delete(path, false)).await {
            Err(error) if self.list(fs, path).await?.is_empty() => Err(error),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    async fn directories(&self, fs: &dyn RemoteFs, path: &str) -> Result<Vec<String>, StoreError> {
        let entries = self.list(fs, path).await?;
        Ok(entries
            .iter()
            .filter(|entry| entry.is_dir)
            .map(|entry| format!("{path}/{}", entry.name))
            .collect())
    }

    /// Lists a directory. A missing directory is empty.
    pub(super) async fn list(&self, fs: &dyn RemoteFs, path: &str) -> Result<Vec<RemoteEntry>, StoreError> {
        match self.timed(path, fs.list(path)).await {
            Err(error) if error.kind == StoreErrorKind::NotFound => Ok(Vec::new()),
            result => result,
        }
    }

    pub(super) async fn timed<T>(&self, path: &str, call: FsFuture<T>) -> Result<T, StoreError> {
        match timeout(CALL_TIMEOUT, call).await {
            Ok(result) => result,
            Err(late) => Err(StoreError::io(path, late.into())),
        }
    }
}
