//! One remote store, a directory of a file system as one user: the interface of its client, and its
//! circuit breaker.
//!
//! Consecutive failures of the file system itself (it does not answer, its DataNodes fail) open the
//! breaker, which suspends the file system for a growing time (backoff). Batches are then written
//! elsewhere or wait, instead of failing one by one. After a suspension one batch tries
//! (half-open); the others stay suspended until its result. A quota or a permission concerns one
//! path and opens nothing. A failing file system that was not tried for a while is probed, so that
//! the worker does not stay unhealthy for lack of batches.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use prometheus::{IntCounter, IntGauge};

use super::location::RemoteLocation;
use crate::clock::Instant;
use crate::store::{StoreError, StoreErrorKind};
use uniffle_base::sched::FairSemaphore;
use uniffle_io::BoxFuture;

/// Number of consecutive failures that open the circuit breaker.
const FAILURES_MIN: u32 = 3;
/// First suspension. It doubles with every further failure.
const SUSPENSION_MIN: Duration = Duration::from_secs(1);
/// Longest suspension.
const SUSPENSION_MAX: Duration = Duration::from_secs(30);

/// Time after a suspension in which batches may try. After that, the file system is probed.
const PROBE_AFTER: Duration = Duration::from_secs(30);

/// A call in progress.
pub type FsFuture<T> = BoxFuture<'static, Result<T, StoreError>>;

/// An entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteEntry {
    /// Name in the directory.
    pub name: String,
    /// True if the entry is a directory.
    pub is_dir: bool,
    /// Length of a file in bytes.
    pub length: u64,
}

/// A remote file system: eight calls.
///
/// Paths are absolute and belong to one file system, without scheme and host. A call owns its
/// buffers. It has no deadline except that of the implementation. A caller cancels a call by
/// dropping the future, but a cancelled write may still happen.
pub trait RemoteFs: fmt::Debug + Send + Sync {
    /// Creates a directory with its parents, unless it exists.
    fn make_dirs(&self, path: &str) -> FsFuture<()>;
    /// Creates a file with the content `data`, and its directories. Readers see the complete file
    /// when this returns. Fails with `Exists` if the file exists. After any other error a part of
    /// the file may exist.
    fn create(&self, path: &str, data: Vec<Bytes>) -> FsFuture<()>;
    /// Appends `data` to a closed file. All of it is readable when this returns. After an error a
    /// part may have been appended.
    fn append(&self, path: &str, data: Vec<Bytes>) -> FsFuture<()>;
    /// Closes a file that a failed append or a killed process left open, so that its earlier
    /// content is readable again. Returns false while this is in progress, and is to be called
    /// again.
    fn recover(&self, path: &str) -> FsFuture<bool>;
    /// Lists a directory. Fails with `NotFound` if it does not exist.
    fn list(&self, path: &str) -> FsFuture<Vec<RemoteEntry>>;
    /// Removes a file or a directory. Without `recursive` the directory must be empty. Returns
    /// false if nothing existed.
    fn delete(&self, path: &str, recursive: bool) -> FsFuture<bool>;
    /// Reads a whole file.
    fn read(&self, path: &str) -> FsFuture<Bytes>;
    /// Reads up to `length` bytes of a file from `offset` on. Returns fewer at the end of the file.
    fn read_range(&self, path: &str, offset: u64, length: usize) -> FsFuture<Bytes>;
}

/// Key of a remote store. Registrations with another root directory, other settings or another user
/// do not share a client.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RemoteTarget {
    /// File system and root directory, as the client named them.
    pub location: RemoteLocation,
    /// Hadoop settings of the client, sorted.
    pub conf: Vec<(String, String)>,
    /// The user to impersonate, or `None` for the worker's own.
    pub user: Option<String>,
}

/// Metrics of one file system.
#[derive(Debug, Clone)]
pub(super) struct RemoteMetrics {
    pub(super) written_bytes: IntCounter,
    pub(super) huge_bytes: IntCounter,
    pub(super) retries: IntCounter,
    pub(super) writes: IntCounter,
    pub(super) failures: IntCounter,
    pub(super) successes: IntCounter,
    pub(super) failing: IntGauge,
    pub(super) deletions_failed: IntCounter,
}

/// A remote file system as one user.
#[derive(Debug)]
pub(super) struct RemoteClient {
    pub(super) authority: String,
    /// Path of a file that never exists, used by probes.
    pub(super) probe_path: String,
    pub(super) fs: Arc<dyn RemoteFs>,
    /// Permits to write to the file system, shared by all users.
    pub(super) permits: Arc<FairSemaphore>,
    pub(super) metrics: RemoteMetrics,
    breaker: Mutex<BreakerState>,
}

/// State of the circuit breaker: closed while `open_until` is `None`, then open, then half-open.
#[derive(Debug, Default)]
struct BreakerState {
    failures: u32,
    open_until: Option<Instant>,
    last_error: String,
}

impl RemoteClient {
    pub(super) fn new(
        authority: String,
        probe_path: String,
        fs: Arc<dyn RemoteFs>,
        permits: Arc<FairSemaphore>,
        metrics: RemoteMetrics,
    ) -> Self {
        Self { authority, probe_path, fs, permits, metrics, breaker: Mutex::default() }
    }

    /// Returns whether the file system fails and was not tried for a while.
    pub(super) fn needs_probe(&self) -> bool {
        let open_until = self.breaker.lock().open_until;
        self.is_failing() && open_until.is_none_or(|until| Instant::now() >= until + PROBE_AFTER)
    }

    /// Returns whether the file system may be tried now.
    pub(super) fn is_available(&self) -> bool {
        self.breaker.lock().open_until.is_none_or(|until| Instant::now() >= until)
    }

    /// Acquires the right to make an attempt now. A failing file system allows one attempt per
    /// suspension. The attempt suspends the others until its result is known, or for the same time
    /// again.
    pub(super) fn begin_attempt(&self) -> Result<(), StoreError> {
        let mut breaker = self.breaker.lock();
        let now = Instant::now();
        if breaker.open_until.is_some_and(|until| now < until) {
            drop(breaker);
            return Err(self.suspended());
        }
        if let Some(pause) = breaker.pause() {
            breaker.open_until = Some(now + pause);
        }
        Ok(())
    }

    /// Returns whether the last calls failed because of the file system.
    pub(super) fn is_failing(&self) -> bool {
        self.breaker.lock().failures >= FAILURES_MIN
    }

    /// Returns an error for batches that may not try now.
    pub(super) fn suspended(&self) -> StoreError {
        let text = format!("skipped because the latest calls failed: {}", self.breaker.lock().last_error);
        StoreError::remote(StoreErrorKind::Unreachable, &self.authority, text)
    }

    /// Records the result of a call.
    pub(super) fn note<T>(&self, result: &Result<T, StoreError>) {
        let mut breaker = self.breaker.lock();
        let Err(error) = result else {
            if breaker.failures >= FAILURES_MIN {
                tracing::info!(remote = %self.authority, "remote store responds again");
            }
            *breaker = BreakerState::default();
            return;
        };
        if !is_own_fault(error.kind) {
            return;
        }
        breaker.failures = breaker.failures.saturating_add(1);
        breaker.last_error = error.to_string();
        let Some(pause) = breaker.pause() else { return };
        if breaker.failures == FAILURES_MIN {
            tracing::error!(
                remote = %self.authority,
                %error,
                "remote store fails; checking it until it responds"
            );
        }
        breaker.open_until = Some(Instant::now() + pause);
    }
}

impl BreakerState {
    /// Returns the suspension after the last failure, or `None` after few failures.
    fn pause(&self) -> Option<Duration> {
        let beyond = self.failures.checked_sub(FAILURES_MIN)?;
        Some(SUSPENSION_MIN.saturating_mul(1 << beyond.min(16)).min(SUSPENSION_MAX))
    }
}

/// Returns whether a failure concerns the file system and not one path.
fn is_own_fault(kind: StoreErrorKind) -> bool {
    match kind {
        StoreErrorKind::Unreachable
        | StoreErrorKind::Unhealthy
        | StoreErrorKind::Io
        | StoreErrorKind::Corrupt => true,
        StoreErrorKind::NoSpace
        | StoreErrorKind::NotFound
        | StoreErrorKind::Purged
        | StoreErrorKind::InvalidRange
        | StoreErrorKind::InvalidBatch
        | StoreErrorKind::NotOurs
        | StoreErrorKind::Unclaimed
        | StoreErrorKind::Outdated
        | StoreErrorKind::OtherFormat
        | StoreErrorKind::InUse
        | StoreErrorKind::Copied
        | StoreErrorKind::NotMounted
        | StoreErrorKind::Exists
        | StoreErrorKind::Denied => false,
    }
}
