//! Profiles of the running process: where its CPU time and its heap go.
//!
//! Both profilers belong to the process (one signal, one allocator), so that two workers in one process share them:
//! a request while a profile is taken is refused as busy. Invariant: whatever works on a profile or dump holds the
//! [`Turn`] of it until that has ended, though nobody waits for it any more. Not here: addresses and parameters of requests
//! (`http`).
//!
//! Functions are named, and pictures drawn, by another process (`child`): this one holds stacks as addresses and what is
//! sent of it, a few megabytes. `uniffle_sampler` says what that asks of the start of a CPU profile.

pub mod allocator;
mod child;
pub mod cpu;
pub mod heap;
mod job;
mod maps;
mod render;
mod symbols;
pub mod tasks;
mod tree;
mod wire;

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

pub use child::SUBCOMMAND;
pub use symbols::{answer_on_stdin, name_addresses};

/// What a profile is rendered as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
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

/// Runs `work` on a thread of its own at the lowest priority, which a child of it has too, since naming functions takes
/// seconds of CPU time, which must not come out of the data plane's. The thread has the turn until then, also when this
/// future is dropped: a client that has gone does not end it.
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
        let result = work();
        // Before: who has the answer may ask again.
        drop(turn);
        let _ = sender.send(result);
    });
    spawned.map_err(|error| ProfileError::Failed(format!("no thread for it: {error}")))?;
    receiver.await.unwrap_or_else(|_| Err(ProfileError::Failed("it panicked, see the log".to_owned())))
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use uniffle_testkit::eventually;

    use super::*;

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
        let taken = || turns.try_take().map_err(|error| error.to_string());
        let turn = eventually("the turn ends with the work", taken).await;
        assert!(in_background(&turn, || -> Result<(), _> { panic!("on purpose") }).await.is_err());
    }
}
