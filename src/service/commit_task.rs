//! Commits of tasks, for clients whose storage type has no MEMORY: `commitShuffleTask` and `finishShuffle`
//! (docs/protocol.md §2.6).
//!
//! Such a client does not read memory, so whatever it was told was taken must be in a tier below before it reports. Memory
//! stays the buffer: a commit flushes what the shuffle has there, waits for it, and counts.

use std::sync::Arc;
use std::time::Duration;

use crate::app::ShuffleState;
use crate::clock::Instant;

use super::ServiceError;
use super::ingest::Ingest;
use super::known::shuffle_of;

/// As Java's `rss.server.commit.timeout`; a client that gives up sooner asks again and finds less to do.
const TIMEOUT: Duration = Duration::from_secs(600);

impl Ingest {
    /// Flushes what a shuffle has in memory and counts the task; returns how many have committed.
    ///
    /// # Errors
    /// Unknown app or shuffle, also one that went meanwhile; no tier below memory; disks that take too long.
    pub async fn commit_task(&self, app: &str, shuffle: i32) -> Result<i32, ServiceError> {
        Ok(self.flushed(app, shuffle).await?.commits().count_one())
    }

    /// Flushes what a shuffle has in memory: the last task has committed.
    ///
    /// # Errors
    /// As [`Ingest::commit_task`].
    pub async fn finish_shuffle(&self, app: &str, shuffle: i32) -> Result<(), ServiceError> {
        self.flushed(app, shuffle).await.map(drop)
    }

    async fn flushed(&self, app_id: &str, shuffle: i32) -> Result<Arc<ShuffleState>, ServiceError> {
        let unknown = || ServiceError::NotRegisteredPart(format!("shuffle {shuffle}"));
        let find = || {
            let app = self.known.touched_app(app_id)?;
            shuffle_of(&app, shuffle).ok_or_else(unknown)
        };
        let (key, state) = find()?;
        let flusher = self.flusher.as_ref();
        let flusher =
            flusher.ok_or(ServiceError::Unsupported("this worker has no tier below memory to commit to"))?;
        let buffers = self.memory.shuffle(&key).ok_or_else(unknown)?;
        let flush = async {
            let is_done = flusher.flush_shuffle(&buffers, Instant::now() + TIMEOUT).await;
            is_done.then_some(()).ok_or(ServiceError::NotFlushed { seconds: TIMEOUT.as_secs() })
        };
        state.commits().flushed(flush).await?;
        // What was unregistered meanwhile has gone nowhere.
        let (_, now) = find()?;
        if Arc::ptr_eq(&now, &state) { Ok(state) } else { Err(unknown()) }
    }
}
