//! Profiles of the running process: where its CPU time and its heap go.
//!
//! Both profilers belong to the process (one signal, one allocator), so that two workers in one process share them:
//! a request while a profile is taken is refused as busy. Invariant: whatever works on a profile or dump holds the
//! [`Turn`] of it until that has ended, though nobody waits for it any more. Not here: addresses and parameters of requests
//! (`http`).
//!
//! Symbols take some 100 MB, in a cache of the crate `backtrace`, which all three kinds resolve with. They are not
//! kept: the process would hold them beside what its memory is promised to be (`budget::allowance`).

pub mod allocator;
pub mod cpu;
pub mod heap;
mod render;
pub mod tasks;

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// What a profile is rendered as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// pprof's protobuf, for `go tool pprof`.
    Protobuf,
    /// A flamegraph, for a browser.
    Svg,
}

/// Why there is no profile.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// A profile of the process is being taken already.
    #[error("another profile or dump is being taken; there can be one at a time")]
    Busy,
    /// The build or the way the process was started rules it out; the text says what would help.
    #[error("{0}")]
    Unavailable(&'static str),
    /// Heap profiling is available, but nothing was recorded yet.
    #[error(
        "heap profiling is not active; POST /admin/heap-profile/activate first and let the worker work for a while"
    )]
    Inactive,
    /// The profiler failed.
    #[error("the profile failed: {0}")]
    Failed(String),
}

/// One at a time of what takes a [`Turn`]. Clones are the same.
#[derive(Debug, Clone)]
pub struct Turns(Arc<Semaphore>);

/// Leave to make something of which there is one at a time, until the last clone of it is dropped.
#[derive(Debug, Clone)]
pub struct Turn {
    _permit: Arc<OwnedSemaphorePermit>,
}

impl Turns {
    /// Nobody has the turn.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }

    /// The turn, now.
    ///
    /// # Errors
    /// [`ProfileError::Busy`] when another one has it.
    pub fn try_take(&self) -> Result<Turn, ProfileError> {
        let permit = Arc::clone(&self.0).try_acquire_owned().map_err(|_| ProfileError::Busy)?;
        Ok(Turn { _permit: Arc::new(permit) })
    }
}

impl Default for Turns {
    fn default() -> Self {
        Self::new()
    }
}

/// Runs `work` on a thread of its own at the lowest priority, since resolving symbols takes seconds of CPU time, which
/// must not come out of the data plane's. The symbols that it has loaded are forgotten. The thread has the turn until then,
/// also when this future is dropped: a client that has gone does not end it.
async fn in_background<T, F>(turn: &Turn, work: F) -> Result<T, ProfileError>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T, ProfileError> + Send + 'static,
{
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let turn = turn.clone();
    let thread = std::thread::Builder::new().name("uniffle-profile".to_owned());
    let spawned = thread.spawn(move || {
        // On Linux this is the priority of the calling thread alone. A failure costs priority, nothing else.
        let _ = rustix::process::setpriority_process(None, 19);
        let result = and_forget(backtrace::clear_symbol_cache, work);
        // Before: who has the answer may ask again.
        drop(turn);
        let _ = sender.send(result);
    });
    spawned.map_err(|error| ProfileError::Failed(format!("no thread for it: {error}")))?;
    receiver.await.unwrap_or_else(|_| Err(ProfileError::Failed("it panicked, see the log".to_owned())))
}

/// Calls `forget` when `work` has ended, well or not.
fn and_forget<T>(forget: impl FnOnce(), work: impl FnOnce() -> T) -> T {
    struct Forget<F: FnOnce()>(Option<F>);

    impl<F: FnOnce()> Drop for Forget<F> {
        fn drop(&mut self) {
            self.0.take().into_iter().for_each(|forget| forget());
        }
    }

    let _forget = Forget(Some(forget));
    work()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn symbols_are_forgotten_after_they_were_resolved_and_when_that_panics() {
        let forgotten = Cell::new(0);
        let forget = || forgotten.set(forgotten.get() + 1);
        assert_eq!(and_forget(forget, || forgotten.get()), 0, "not before");
        assert_eq!(forgotten.get(), 1);
        let panics = || and_forget(forget, || panic!("on purpose"));
        assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
        assert_eq!(forgotten.get(), 2);
    }

    #[tokio::test]
    async fn f9_the_turn_lasts_until_the_work_has_ended_though_nobody_waits_for_it() {
        let turns = Turns::new();
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let turn = turns.try_take().unwrap();
        let mut asked = Box::pin(in_background(&turn, move || Ok(wait.recv().is_ok())));
        assert!((&mut asked).now_or_never().is_none(), "it has begun");
        drop(asked);
        drop(turn);
        assert!(matches!(turns.try_take(), Err(ProfileError::Busy)));
        go.send(()).unwrap();
        while turns.try_take().is_err() {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        let turn = turns.try_take().unwrap();
        assert!(in_background(&turn, || -> Result<(), _> { panic!("on purpose") }).await.is_err());
    }

    /// A second version of the crate would have a cache of its own, which nobody clears.
    #[test]
    fn there_is_one_cache_of_symbols() {
        let lock = include_str!("../../Cargo.lock");
        assert_eq!(lock.matches("\nname = \"backtrace\"\n").count(), 1);
    }
}
