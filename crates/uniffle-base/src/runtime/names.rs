//! Lists running tasks with name and age by the runtime's task id, so that stack dumps can name
//! them.
//!
//! Each task costs one insertion and one removal in a sharded map, far less than a call. Each poll
//! is timed ([`LongestPolls`]) with at least two clock readings.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use dashmap::DashMap;
use pin_project_lite::pin_project;
use tokio::task::{Id, try_id};
use tokio::time::Duration;

use super::polls::LongestPolls;
use crate::clock::Instant;

/// A task that has been polled and has not ended.
#[derive(Debug, Clone, Copy)]
pub struct RunningTask {
    /// Id assigned by the runtime.
    pub id: Id,
    /// Name given at the spawn.
    pub name: &'static str,
    /// Time since its first poll.
    pub age: Duration,
}

/// Running tasks of related groups. Clones share them.
#[derive(Clone, Default)]
pub(super) struct TaskNames {
    running: Arc<DashMap<Id, (&'static str, Instant)>>,
    polls: LongestPolls,
}

impl fmt::Debug for TaskNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Names").field("running", &self.running.len()).finish()
    }
}

impl TaskNames {
    pub(super) fn list(&self) -> Vec<RunningTask> {
        let task = |entry: dashmap::mapref::multiple::RefMulti<'_, Id, (&'static str, Instant)>| {
            let (name, since) = *entry.value();
            RunningTask { id: *entry.key(), name, age: since.elapsed() }
        };
        self.running.iter().map(task).collect()
    }

    /// See [`LongestPolls::longest`].
    pub(super) fn longest_polls(&self) -> Vec<(&'static str, Duration)> {
        self.polls.longest()
    }

    /// Wraps `future`, which is listed under `name` from its first poll until it is dropped.
    pub(super) fn named<F: Future>(&self, name: &'static str, future: F) -> NamedFuture<F> {
        NamedFuture { future, name, names: self.clone(), listed: None }
    }
}

pin_project! {
    /// See [`TaskNames::named`].
    pub(crate) struct NamedFuture<F> {
        #[pin]
        future: F,
        name: &'static str,
        names: TaskNames,
        listed: Option<NameGuard>,
    }
}

impl<F: Future> Future for NamedFuture<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        if this.listed.is_none()
            && let Some(id) = try_id()
        {
            this.names.running.insert(id, (this.name, Instant::now()));
            *this.listed = Some(NameGuard { names: this.names.clone(), id });
        }
        this.names.polls.timed(this.name, || this.future.poll(context))
    }
}

/// An entry of the list, removed on drop.
struct NameGuard {
    names: TaskNames,
    id: Id,
}

impl Drop for NameGuard {
    fn drop(&mut self) {
        self.names.running.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Tasks;

    #[tokio::test]
    async fn tasks_are_listed_while_they_run() {
        let tasks = Tasks::new();
        let other = tasks.sibling();
        tasks.spawn("waits", tasks.cancelled());
        other.spawn("waits too", other.cancelled());
        let both_run = || match tasks.list().len() {
            2 => Ok(()),
            running => Err(format!("{running} run")),
        };
        uniffle_testkit::eventually("both run", both_run).await;
        let mut names: Vec<_> = other.list().iter().map(|task| task.name).collect();
        names.sort_unstable();
        assert_eq!(names, ["waits", "waits too"]);
        tasks.cancel();
        tasks.drained().await;
        assert_eq!(other.list().len(), 1, "a sibling must not be cancelled");
        other.cancel();
        other.drained().await;
        assert!(tasks.list().is_empty());
    }
}
