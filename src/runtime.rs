//! Tasks with an owner: everything that is spawned is counted, named and ends on cancel.
//!
//! [`Tasks`] pairs a `TaskTracker` with a `CancellationToken`. There is no global: the composition root makes one and
//! hands clones down, so that two workers can live in one process and a test can assert that no task is left.

use std::future::Future;

use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tokio_util::task::TaskTracker;

/// A group of tasks that is cancelled and awaited together. Clones share the group.
#[derive(Debug, Clone, Default)]
pub struct Tasks {
    tracker: TaskTracker,
    cancel: CancellationToken,
}

impl Tasks {
    /// An empty group.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A group whose tasks count here too, but which can be cancelled on its own.
    #[must_use]
    pub fn child(&self) -> Self {
        Self { tracker: self.tracker.clone(), cancel: self.cancel.child_token() }
    }

    /// Spawns `future` on the current runtime. It must end by itself soon after [`Tasks::cancelled`].
    #[expect(clippy::disallowed_methods, reason = "the one place that may spawn")]
    pub fn spawn<F>(&self, name: &'static str, future: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        tracing::trace!(task = name, "spawn");
        drop(tokio::spawn(self.tracker.track_future(future)));
    }

    /// Resolves when the group is told to stop.
    pub fn cancelled(&self) -> WaitForCancellationFutureOwned {
        self.cancel.clone().cancelled_owned()
    }

    /// True once the group was told to stop.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }

    /// Tells all tasks of the group to stop; returns at once.
    pub fn cancel(&self) {
        self.cancel.cancel();
    }

    /// Tasks that have not ended, of this group and of all its children and parents.
    #[must_use]
    pub fn running(&self) -> usize {
        self.tracker.len()
    }

    /// Waits until every task of the tracker has ended (call [`Tasks::cancel`] first).
    pub async fn drained(&self) {
        self.tracker.close();
        self.tracker.wait().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn cancelled_tasks_are_awaited() {
        let tasks = Tasks::new();
        let stop = tasks.child().cancelled();
        tasks.spawn("waits", stop);
        assert_eq!(tasks.running(), 1);
        tasks.cancel();
        tasks.drained().await;
        assert_eq!(tasks.running(), 0);
    }
}
