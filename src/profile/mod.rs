//! Profiles of the running process: where its CPU time and its heap go.
//!
//! Both profilers belong to the process (one signal, one allocator), so that two workers in one process share them:
//! a request while a profile is taken is refused as busy. Not here: addresses and parameters of requests (`http`).

pub mod allocator;
pub mod cpu;
pub mod heap;
mod render;
pub mod tasks;

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

/// Runs `work` on a thread of its own at the lowest priority, since resolving symbols takes seconds of CPU time, which
/// must not come out of the data plane's.
async fn in_background<T, F>(work: F) -> Result<T, ProfileError>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T, ProfileError> + Send + 'static,
{
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let thread = std::thread::Builder::new().name("uniffle-profile".to_owned());
    let spawned = thread.spawn(move || {
        // On Linux this is the priority of the calling thread alone. A failure costs priority, nothing else.
        let _ = rustix::process::setpriority_process(None, 19);
        let _ = sender.send(work());
    });
    spawned.map_err(|error| ProfileError::Failed(format!("no thread for it: {error}")))?;
    receiver.await.unwrap_or_else(|_| Err(ProfileError::Failed("it panicked, see the log".to_owned())))
}
