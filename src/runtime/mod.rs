//! Tasks with an owner: everything that is spawned is counted, named and ends on cancel.
//!
//! [`Tasks`] pairs a `TaskTracker` with two `CancellationToken`s: one asks for work to be finished, one to stop at once.
//! There is no global: the composition root makes one and hands clones down, so that two workers can live in one process
//! and a test can assert that no task is left. A task that panics ends alone (`telemetry` counts and logs it); what must
//! go on is spawned with [`Tasks::spawn_again`].

mod aside;
pub(crate) mod metrics;
mod names;
mod polls;
mod probe;
mod turn;

use std::future::Future;
use std::io;
use std::net::TcpStream;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use futures::FutureExt as _;
use parking_lot::Mutex;
use tokio::runtime::{Builder, Handle};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

pub use self::aside::Aside;
pub use self::metrics::RuntimeMetrics;
use self::names::Names;
pub use self::names::RunningTask;
pub use self::probe::{TooFewThreads, probe_threads};
pub(crate) use self::turn::Turn;

/// Between the panic of a task that must go on and its next begin.
const PAUSE_AFTER_PANIC: Duration = Duration::from_secs(1);

/// A group of tasks that is cancelled and awaited together. Clones share the group.
#[derive(Debug, Clone, Default)]
pub struct Tasks {
    tracker: TaskTracker,
    close: CancellationToken,
    cancel: CancellationToken,
    names: Names,
}

impl Tasks {
    /// An empty group.
    pub fn new() -> Self {
        Self::default()
    }

    /// A group whose tasks count here too, but which can be cancelled on its own.
    pub fn child(&self) -> Self {
        let (close, cancel) = (self.close.child_token(), self.cancel.child_token());
        Self { tracker: self.tracker.clone(), close, cancel, names: self.names.clone() }
    }

    /// A group to be cancelled and awaited on its own, whose tasks are listed with this one's by [`Tasks::list`].
    pub fn sibling(&self) -> Self {
        Self { names: self.names.clone(), ..Self::default() }
    }

    /// What runs now, in this group, its children, its parents and its siblings.
    pub fn list(&self) -> Vec<RunningTask> {
        self.names.list()
    }

    /// The longest poll of tasks by their names, in CPU time and since the start, of the same groups; those of less
    /// than a millisecond are not in it.
    pub fn longest_polls(&self) -> Vec<(&'static str, Duration)> {
        self.names.longest_polls()
    }

    /// Spawns `future` on the current runtime. It must end by itself soon after [`Tasks::cancelled`].
    #[expect(clippy::disallowed_methods, reason = "the one place that may spawn")]
    pub fn spawn<F>(&self, name: &'static str, future: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        tracing::trace!(task = name, "spawn");
        drop(tokio::spawn(self.tracker.track_future(self.names.named(name, future))));
    }

    /// As [`Tasks::spawn`], on the runtime behind `handle`.
    pub fn spawn_on<F>(&self, handle: &Handle, name: &'static str, future: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        tracing::trace!(task = name, "spawn");
        drop(handle.spawn(self.tracker.track_future(self.names.named(name, future))));
    }

    /// Spawns what `make` makes, and again if it panics: for loops that the worker cannot do without. The pause keeps a
    /// loop that panics at once from filling the log.
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

    /// As [`Tasks::spawn`]; a panic cancels the whole group, for one of several tasks that wait for each other.
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

    /// Resolves on [`Tasks::close`] or [`Tasks::cancel`]: take nothing new and finish what has begun, or stop.
    pub fn closing(&self) -> WaitForCancellationFutureOwned {
        self.close.clone().cancelled_owned()
    }

    /// Whether [`Tasks::close`] or [`Tasks::cancel`] was called.
    pub fn is_closing(&self) -> bool {
        self.close.is_cancelled()
    }

    /// Asks all tasks of the group to finish what they have begun; returns at once.
    pub fn close(&self) {
        self.close.cancel();
    }

    /// Resolves on [`Tasks::cancel`].
    pub fn cancelled(&self) -> WaitForCancellationFutureOwned {
        self.cancel.clone().cancelled_owned()
    }

    /// Whether [`Tasks::cancel`] was called.
    pub fn is_cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }

    /// Asks all tasks of the group to stop; returns at once.
    pub fn cancel(&self) {
        self.close.cancel();
        self.cancel.cancel();
    }

    /// Counts as a task that has not ended until it is dropped: for work on a thread, which the group is to wait for.
    pub fn token(&self) -> TaskTrackerToken {
        self.tracker.token()
    }

    /// Tasks that have not ended, of this group and of all its children and parents.
    pub fn running(&self) -> usize {
        self.tracker.len()
    }

    /// Waits until every task of the tracker has ended (call [`Tasks::close`] or [`Tasks::cancel`] first).
    pub async fn drained(&self) {
        self.tracker.close();
        self.tracker.wait().await;
    }
}

/// Connections that a listener leaves to the process's successor instead of closing them: nothing of a request is read or
/// owed on them. Clones share the place.
#[derive(Debug, Clone, Default)]
pub struct Handover {
    /// `None`: there is no successor.
    kept: Arc<Mutex<Option<Vec<TcpStream>>>>,
}

impl Handover {
    /// From here on connections are kept.
    pub fn begin(&self) {
        self.kept.lock().get_or_insert_default();
    }

    /// Whether there is a successor.
    pub fn has_begun(&self) -> bool {
        self.kept.lock().is_some()
    }

    /// Keeps `stream` for the successor; without one it is closed.
    pub fn keep(&self, stream: tokio::net::TcpStream) {
        if let (Some(kept), Ok(stream)) = (&mut *self.kept.lock(), stream.into_std()) {
            kept.push(stream);
        }
    }

    /// What was kept; what comes later is closed.
    pub fn take(&self) -> Vec<TcpStream> {
        self.kept.lock().take().unwrap_or_default()
    }
}

/// Threads with a runtime of their own each: what is placed on one stays there, so that its sockets, its chunk and its
/// timers are touched by one core only, and no work is stolen and no thread woken for it.
#[derive(Debug)]
pub struct Cores {
    cores: Vec<Core>,
}

#[derive(Debug)]
struct Core {
    handle: Handle,
    /// As many clones as there is placed on it.
    load: Arc<()>,
}

/// Counts on a core until it is dropped.
#[derive(Debug)]
pub struct CorePlace(#[expect(dead_code, reason = "counted by its clones")] Arc<()>);

impl Cores {
    /// Starts `count` threads, at least one. They end when `tasks` was cancelled and none of its tasks is left; each
    /// may start up to `blocking_threads` for blocking calls.
    ///
    /// # Errors
    /// When a thread or its poller cannot be made.
    pub fn start(
        count: usize,
        blocking_threads: usize,
        name: &'static str,
        tasks: &Tasks,
    ) -> io::Result<Self> {
        let core = |_| {
            let tasks = tasks.clone();
            let (told, begun) = std::sync::mpsc::sync_channel(1);
            thread::Builder::new().name(name.to_owned()).spawn(move || {
                // Made here: a thread that cannot be started would drop a runtime among the tasks of another one.
                let runtime = Builder::new_current_thread()
                    .enable_all()
                    .max_blocking_threads(blocking_threads)
                    .thread_name(name)
                    .build();
                let runtime = match runtime {
                    Ok(runtime) => runtime,
                    Err(error) => return drop(told.send(Err(error))),
                };
                if told.send(Ok(runtime.handle().clone())).is_err() {
                    return;
                }
                runtime.block_on(async {
                    tasks.cancelled().await;
                    tasks.drained().await;
                });
                // A disk call that hangs keeps its own thread, not this one.
                runtime.shutdown_background();
            })?;
            let ended = |_| io::Error::other("a thread for connections ended as it began");
            let handle = begun.recv().map_err(ended)??;
            Ok(Core { handle, load: Arc::new(()) })
        };
        Ok(Self { cores: (0..count.max(1)).map(core).collect::<io::Result<_>>()? })
    }

    /// The core with the least on it, and a place there.
    pub fn place(&self) -> (&Handle, CorePlace) {
        let least = self.cores.iter().min_by_key(|core| Arc::strong_count(&core.load));
        let core = least.expect("there is at least one");
        (&core.handle, CorePlace(Arc::clone(&core.load)))
    }
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
        assert!(!tasks.close.is_cancelled(), "others go on");
        eventually("it begins a third time", || match *begun.lock() {
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
        assert_eq!(cores.place().0.id(), other, "the other one has less to do");
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
