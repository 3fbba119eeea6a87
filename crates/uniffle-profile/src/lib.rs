//! Profiles of the running process: CPU time, heap and waiting tasks.
//!
//! Profilers belong to the process (one signal, one allocator), so workers in one process share
//! them. A request while a profile is taken is refused as busy. A child process resolves names and
//! renders (`child`); this process holds only addresses and the result, a few megabytes. Invariant:
//! work on a profile or dump holds its [`ExclusivePermit`] until the work has ended, even if the
//! client has gone. URLs and parameters of requests are in `http`.

mod child;
pub mod cpu;
pub mod heap;
mod job;
mod maps;
mod render;
mod sampler;
mod symbols;
pub mod tasks;
mod tree;
mod wire;

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

pub use child::SUBCOMMAND;
pub use symbols::{answer_on_stdin, name_addresses};

/// Output format of a profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Format {
    /// pprof's protobuf, for `go tool pprof`.
    Protobuf,
    /// A flamegraph for a browser.
    Svg,
}

/// Reason why no profile was taken.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// Another profile is being taken.
    #[error("another profile or dump is being taken; there can be one at a time")]
    Busy,
    /// The build or the start options do not support it. The text says how to change that.
    #[error("{0}")]
    Unavailable(&'static str),
    /// Heap profiling is available, but not active.
    #[error(
        "heap profiling is not active; POST /admin/heap-profile/activate first and let the worker work for a while"
    )]
    Inactive,
    /// The profiler failed.
    #[error("the profile failed: {0}")]
    Failed(String),
}

/// Source of [`ExclusivePermit`]s, of which one exists at a time. Clones share it.
#[derive(Debug, Clone)]
pub struct PermitSource(Arc<Semaphore>);

/// An exclusive permit, held until its last clone is dropped.
#[derive(Debug, Clone)]
pub struct ExclusivePermit {
    _permit: Arc<OwnedSemaphorePermit>,
}

impl PermitSource {
    /// Creates the source with its permit available.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }

    /// Takes the permit without waiting.
    ///
    /// # Errors
    /// [`ProfileError::Busy`] if it is taken.
    pub fn try_take(&self) -> Result<ExclusivePermit, ProfileError> {
        let permit = Arc::clone(&self.0).try_acquire_owned().map_err(|_| ProfileError::Busy)?;
        Ok(ExclusivePermit { _permit: Arc::new(permit) })
    }
}

impl Default for PermitSource {
    fn default() -> Self {
        Self::new()
    }
}

/// Runs `work` on a thread of its own.
///
/// The thread, and a child that it starts, run at the lowest priority: resolving names takes
/// seconds of CPU time, which must not slow down clients. The thread holds the permit until it
/// ends, even if this future is dropped because the client has gone.
async fn in_background<T, F>(permit: &ExclusivePermit, work: F) -> Result<T, ProfileError>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T, ProfileError> + Send + 'static,
{
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let permit = permit.clone();
    let thread = std::thread::Builder::new().name("uniffle-profile".to_owned());
    let spawned = thread.spawn(move || {
        // On Linux this changes only the calling thread. Failing is harmless.
        let _ = rustix::process::setpriority_process(None, 19);
        let result = work();
        // Released first, because the receiver may ask for the next profile at once.
        drop(permit);
        let _ = sender.send(result);
    });
    spawned.map_err(|error| ProfileError::Failed(format!("cannot start a thread: {error}")))?;
    receiver
        .await
        .unwrap_or_else(|_| Err(ProfileError::Failed("the thread panicked; see the log".to_owned())))
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use uniffle_testkit::eventually;

    use super::*;

    #[tokio::test]
    async fn permit_lasts_until_abandoned_work_ends() {
        let permits = PermitSource::new();
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let permit = permits.try_take().unwrap();
        let mut asked = Box::pin(in_background(&permit, move || Ok(wait.recv().is_ok())));
        assert!((&mut asked).now_or_never().is_none(), "the work ended early");
        drop(asked);
        drop(permit);
        assert!(matches!(permits.try_take(), Err(ProfileError::Busy)));
        go.send(()).unwrap();
        let taken = || permits.try_take().map_err(|error| error.to_string());
        let permit = eventually("the permit ends with the work", taken).await;
        assert!(in_background(&permit, || -> Result<(), _> { panic!("on purpose") }).await.is_err());
    }
}
