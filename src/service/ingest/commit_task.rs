//! Commits of tasks, for clients whose storage type has no MEMORY: `commitShuffleTask` and
//! `finishShuffle` (docs/protocol.md §2.6).
//!
//! Such a client does not read memory, so all its acknowledged blocks must be in a tier below
//! before it reports. Memory remains the buffer: a commit flushes the shuffle's blocks from memory,
//! waits for the flush, and counts the task.

use std::sync::Arc;
use std::time::Duration;

use crate::app::ShuffleState;
use crate::clock::Instant;

use super::Ingest;
use crate::service::ServiceError;
use crate::service::parts::shuffle_of;

/// Same value as Java's `rss.server.commit.timeout`. A client that gives up sooner asks again and
/// finds less left to flush.
const TIMEOUT: Duration = Duration::from_secs(600);

impl Ingest {
    /// Flushes a shuffle's blocks from memory and counts the task. Returns how many tasks have
    /// committed.
    ///
    /// # Errors
    /// The app or shuffle is unknown or was removed meanwhile, there is no tier below memory, or
    /// the disks take too long.
    pub async fn commit_task(&self, app: &str, shuffle: i32) -> Result<i32, ServiceError> {
        Ok(self.flushed(app, shuffle).await?.commits.count_one())
    }

    /// Flushes a shuffle's blocks from memory after its last task has committed.
    ///
    /// # Errors
    /// The errors of [`Ingest::commit_task`].
    pub async fn finish_shuffle(&self, app: &str, shuffle: i32) -> Result<(), ServiceError> {
        self.flushed(app, shuffle).await.map(drop)
    }

    async fn flushed(&self, app_id: &str, shuffle: i32) -> Result<Arc<ShuffleState>, ServiceError> {
        let unknown = || ServiceError::NotRegisteredPart(format!("shuffle {shuffle}"));
        let find = || {
            let app = self.parts.touched_app(app_id)?;
            shuffle_of(&app, shuffle).ok_or_else(unknown)
        };
        let (key, state) = find()?;
        let flusher = self.parts.flusher.as_ref();
        let flusher =
            flusher.ok_or(ServiceError::Unsupported("this worker has no tier below memory to commit to"))?;
        let buffers = self.parts.memory.shuffle(&key).ok_or_else(unknown)?;
        let flush = async {
            let is_done = flusher.flush_shuffle(&buffers, Instant::now() + TIMEOUT).await;
            is_done.then_some(()).ok_or(ServiceError::NotFlushed { seconds: TIMEOUT.as_secs() })
        };
        state.commits.flushed(flush).await?;
        // A shuffle that was unregistered meanwhile was not flushed.
        let (_, now) = find()?;
        if Arc::ptr_eq(&now, &state) { Ok(state) } else { Err(unknown()) }
    }
}
