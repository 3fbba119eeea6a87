//! Tasks with an owner: every spawned task is counted, has a name, and must end soon after a
//! cancel.
//!
//! [`Tasks`] has two requests: [`Tasks::close`] for a graceful end and [`Tasks::cancel`] for an
//! immediate stop. There is no global: the composition root creates a group and hands out clones.
//! Two workers can thus live in one process, and a test can assert that no task is left. [`Cores`]
//! are the threads for TCP connections, and [`Handover`] keeps connections for a successor.
//!
//! A task that panics ends alone (`telemetry` counts and logs it). [`Tasks::spawn_again`] restarts
//! it, and [`Tasks::spawn_linked`] cancels its group.

mod blocking_pool;
mod metrics;
mod names;
mod poll_budget;
mod polls;

use std::future::Future;
use std::io;
use std::net::TcpStream;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use futures::FutureExt as _;
use parking_lot::{Mutex, RwLock};
use tokio::runtime::{Builder, Handle};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

pub use self::metrics::RuntimeMetrics;
pub use self::names::RunningTask;
use self::names::TaskNames;
pub use self::poll_budget::PollBudget;
pub use blocking_pool::BlockingPool;

/// Pause between the panic of an essential task and its restart.
const PAUSE_AFTER_PANIC: Duration = Duration::from_secs(1);

/// Stack size of probing threads. They only wait, so it is small.
const PROBE_STACK_BYTES: usize = 64 << 10;

/// A group of tasks that is cancelled and awaited together. Clones share the group.
#[derive(Debug, Clone, Default)]
pub struct Tasks {
    tracker: TaskTracker,
    close: CancellationToken,
    cancel: CancellationToken,
    names: TaskNames,
}

impl Tasks {
    /// Creates an empty group.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a group whose tasks also count here. It is cancelled with this group, or on its own.
    pub fn child(&self) -> Self {
        let (close, cancel) = (self.close.child_token(), self.cancel.child_token());
        Self { tracker: self.tracker.clone(), close, cancel, names: self.names.clone() }
    }

    /// Creates a group that is cancelled and awaited on its own. [`Tasks::list`] includes its
    /// tasks.
    pub fn sibling(&self) -> Self {
        Self { names: self.names.clone(), ..Self::default() }
    }

    /// Returns the running tasks of all groups that [`Tasks::child`] and [`Tasks::sibling`] made
    /// from the same root.
    pub fn list(&self) -> Vec<RunningTask> {
        self.names.list()
    }

    /// Returns the longest poll since the start in CPU time, by task name, for the same groups.
    /// Polls under one millisecond of wall-clock time are not included.
    pub fn longest_polls(&self) -> Vec<(&'static str, Duration)> {
        self.names.longest_polls()
    }

    /// Spawns `future` on the current runtime. It must end by itself soon after
    /// [`Tasks::cancelled`].
    #[expect(clippy::disallowed_methods, reason = "the one place that may spawn")]
    pub fn spawn<F>(&self, name: &'static str, future: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        tracing::trace!(task = name, "spawn");
        drop(tokio::spawn(self.tracker.track_future(self.names.named(name, future))));
    }

    /// Spawns as [`Tasks::spawn`], on the runtime behind `handle`.
    pub fn spawn_on<F>(&self, handle: &Handle, name: &'static str, future: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        tracing::trace!(task = name, "spawn");
        drop(handle.spawn(self.tracker.track_future(self.names.named(name, future))));
    }

    /// Spawns the future from `make`, and again if it panics: for loops that the worker cannot do
    /// without. The pause keeps a loop that panics at once from filling the log.
    pub fn spawn_again<F>(&self, name: &'static str, make: impl Fn() -> F + Send + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let cancelled = self.cancelled();
        self.spawn(name, async move {
            let mut cancelled = pin!(cancelled);
            while AssertUnwindSafe(make()).catch_unwind().await.is_err() {
                tracing::error!(task = name, "essential task panicked; restarting it");
                tokio::select! {
                    biased;
                    () = cancelled.as_mut() => return,
                    () = crate::clock::sleep(PAUSE_AFTER_PANIC) => {}
                }
            }
        });
    }

    /// Spawns as [`Tasks::spawn`]. A panic cancels the whole group, for tasks that wait for each
    /// other.
    pub fn spawn_linked<F>(&self, name: &'static str, future: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let group = self.clone();
        self.spawn(name, async move {
            if let Err(panic) = AssertUnwindSafe(future).catch_unwind().await {
                group.cancel();
                std::panic::resume_unwind(panic);
            }
        });
    }

    /// Resolves on [`Tasks::close`] or [`Tasks::cancel`]. After a close, accept nothing new and
    /// finish running work; after a cancel, stop.
    pub fn closing(&self) -> WaitForCancellationFutureOwned {
        self.close.clone().cancelled_owned()
    }

    /// Returns whether [`Tasks::close`] or [`Tasks::cancel`] was called.
    pub fn is_closing(&self) -> bool {
        self.close.is_cancelled()
    }

    /// Asks all tasks of the group to finish their current work. Returns at once.
    pub fn close(&self) {
        self.close.cancel();
    }

    /// Resolves on [`Tasks::cancel`].
    pub fn cancelled(&self) -> WaitForCancellationFutureOwned {
        self.cancel.clone().cancelled_owned()
    }

    /// Returns whether [`Tasks::cancel`] was called.
    pub fn is_cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }

    /// Asks all tasks of the group to stop. Returns at once.
    pub fn cancel(&self) {
        self.close.cancel();
        self.cancel.cancel();
    }

    /// Returns a token that counts as a running task until dropped, for thread work that the group
    /// must await.
    pub fn token(&self) -> TaskTrackerToken {
        self.tracker.token()
    }

    /// Returns the number of running tasks of the groups that [`Tasks::drained`] awaits.
    pub fn running(&self) -> usize {
        self.tracker.len()
    }

    /// Waits until every task of this group has ended, and of all groups that [`Tasks::child`] made
    /// from the same root. Call [`Tasks::close`] or [`Tasks::cancel`] first.
    pub async fn drained(&self) {
        self.tracker.close();
        self.tracker.wait().await;
    }
}

/// Connections that a listener hands over to the next process instead of closing them. They have
/// no partly read request and no pending response. Clones share the list.
#[derive(Debug, Clone, Default)]
pub struct Handover {
    /// Is `None` before [`Handover::begin`] and after [`Handover::take`].
    kept: Arc<Mutex<Option<Vec<TcpStream>>>>,
}

impl Handover {
    /// Keeps connections from now on.
    pub fn begin(&self) {
        self.kept.lock().get_or_insert_default();
    }

    /// Returns whether connections are kept now: after [`Handover::begin`], until
    /// [`Handover::take`].
    pub fn has_begun(&self) -> bool {
        self.kept.lock().is_some()
    }

    /// Keeps `stream` for the successor, or closes it without one.
    pub fn keep(&self, stream: tokio::net::TcpStream) {
        if let (Some(kept), Ok(stream)) = (&mut *self.kept.lock(), stream.into_std()) {
            kept.push(stream);
        }
    }

    /// Returns the connections. Later ones are closed.
    pub fn take(&self) -> Vec<TcpStream> {
        self.kept.lock().take().unwrap_or_default()
    }
}

/// Threads with one runtime each. A connection stays on its thread, so only one core touches its
/// sockets, chunks and timers. No work is stolen, and no other thread is woken.
#[derive(Debug)]
pub struct Cores {
    cores: Vec<CoreRuntime>,
}

#[derive(Debug)]
struct CoreRuntime {
    handle: Handle,
    /// Number of clones is the load of the core plus one.
    load: Arc<()>,
}

/// Guard that counts as load of a core until dropped.
#[derive(Debug)]
pub struct CorePlace(#[expect(dead_code, reason = "counted by its clones")] Arc<()>);

impl Cores {
    /// Starts `count` threads, at least one. They end once `tasks` is cancelled and drained. Each
    /// may start up to `blocking_threads` threads for blocking calls.
    ///
    /// # Errors
    /// If a thread or its poller cannot be created.
    pub fn start(
        count: usize,
        blocking_threads: usize,
        name: &'static str,
        tasks: &Tasks,
    ) -> io::Result<Self> {
        let core = |_| {
            let tasks = tasks.clone();
            let (started, begun) = std::sync::mpsc::sync_channel(1);
            thread::Builder::new().name(name.to_owned()).spawn(move || {
                // Built on the new thread: if that cannot start, a runtime would be dropped within
                // another one.
                let runtime = Builder::new_current_thread()
                    .enable_all()
                    .max_blocking_threads(blocking_threads)
                    .thread_name(name)
                    .build();
                let runtime = match runtime {
                    Ok(runtime) => runtime,
                    Err(error) => return drop(started.send(Err(error))),
                };
                if started.send(Ok(runtime.handle().clone())).is_err() {
                    return;
                }
                runtime.block_on(async {
                    tasks.cancelled().await;
                    tasks.drained().await;
                });
                // A hung disk call must not block this thread.
                runtime.shutdown_background();
            })?;
            let ended = |_| io::Error::other("a thread for connections ended as it began");
            let handle = begun.recv().map_err(ended)??;
            Ok(CoreRuntime { handle, load: Arc::new(()) })
        };
        Ok(Self { cores: (0..count.max(1)).map(core).collect::<io::Result<_>>()? })
    }

    /// Returns the core with the least load, and a place on it.
    pub fn place(&self) -> (&Handle, CorePlace) {
        let least = self.cores.iter().min_by_key(|core| Arc::strong_count(&core.load));
        let core = least.expect("there is at least one core");
        (&core.handle, CorePlace(Arc::clone(&core.load)))
    }
}

/// Not all threads could be started.
#[derive(Debug)]
pub struct TooFewThreads {
    /// Number of threads started.
    pub started: usize,
    /// Error of the next thread.
    pub error: io::Error,
}

/// Checks that the system allows this process `count` threads: starts them at the same time, and
/// ends them.
///
/// To be called before any runtime exists: tokio panics or hangs if a thread of a runtime cannot be
/// started.
///
/// # Errors
/// The number of threads started, if not all.
pub fn probe_threads(count: usize) -> Result<(), TooFewThreads> {
    let gate = Arc::new(RwLock::new(()));
    let closed = gate.write();
    let mut threads = Vec::with_capacity(count);
    let probed = (0..count).try_for_each(|started| {
        let gate = Arc::clone(&gate);
        let thread = thread::Builder::new().name("uniffle-probe".to_owned()).stack_size(PROBE_STACK_BYTES);
        let thread = thread.spawn(move || drop(gate.read()));
        threads.push(thread.map_err(|error| TooFewThreads { started, error })?);
        Ok(())
    });
    drop(closed);
    // These threads never panic.
    threads.into_iter().for_each(|thread| drop(thread.join()));
    probed
}

#[cfg(test)]
mod tests {
    use uniffle_testkit::eventually;

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

    #[test]
    fn probed_threads_are_ended() {
        probe_threads(20).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn panicking_loop_restarts_and_a_pair_ends_together() {
        let tasks = Tasks::new();
        let begun = Arc::new(Mutex::new(0));
        let (times, ends) = (Arc::clone(&begun), tasks.clone());
        tasks.spawn_again("panics twice", move || {
            let (times, ends) = (Arc::clone(&times), ends.clone());
            async move {
                *times.lock() += 1;
                assert!(*times.lock() > 2, "on purpose");
                ends.cancelled().await;
            }
        });
        let pair = tasks.child();
        tasks.spawn("waits for the other", pair.cancelled());
        pair.spawn_linked("panics", async { panic!("on purpose") });
        pair.cancelled().await;
        assert!(!tasks.close.is_cancelled(), "a panic must not cancel other tasks");
        eventually("the task begins a third time", || match *begun.lock() {
            3.. => Ok(()),
            times => Err(format!("{times} times")),
        })
        .await;
        tasks.cancel();
        tasks.drained().await;
    }

    #[tokio::test]
    async fn work_is_spread_and_threads_end_with_the_group() {
        let tasks = Tasks::new();
        let cores = Cores::start(2, 1, "test core", &tasks).unwrap();
        let (first, kept) = cores.place();
        let (second, place) = cores.place();
        let (name, other) = (first.id(), second.id());
        assert_ne!(name, other);
        drop(place);
        assert_eq!(cores.place().0.id(), other, "the least loaded core must be chosen");
        let (sender, receiver) = tokio::sync::oneshot::channel();
        tasks.spawn_on(first, "asks", async move {
            let _ = sender.send(Handle::current().id());
        });
        assert_eq!(receiver.await.unwrap(), name);
        tasks.cancel();
        tasks.drained().await;
        drop(kept);
    }
}
