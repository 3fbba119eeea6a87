//! One remote file system as one user, and whether it answers.
//!
//! Failures in a row that are its own fault (it does not answer, its DataNodes fail) suspend it for a moment that grows:
//! batches then go elsewhere or wait, instead of each finding out for itself. After that moment one batch tries, the
//! others wait for how it ends. A quota or a permission is the fault of one
//! path and suspends nothing. One that fails and was not tried for a while is asked whether it answers, so that
//! the worker is not unhealthy forever because nothing is sent to it.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::fs::RemoteFs;
use super::location::RemoteLocation;
use super::metrics::RemoteMetrics;
use crate::clock::Instant;
use crate::tiers::{StoreError, StoreErrorKind};

/// Failures in a row from which on it is suspended.
const FAILURES_MIN: u32 = 3;
/// First suspension; doubles with every further failure.
const SUSPENSION_MIN: Duration = Duration::from_secs(1);
/// Longest suspension.
const SUSPENSION_MAX: Duration = Duration::from_secs(30);

/// For so long after a suspension others may try; then it is asked on purpose.
const PROBE_AFTER: Duration = Duration::from_secs(30);

/// What tells remotes apart: two clients of one file system with different settings must not get each other's.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RemoteTarget {
    /// File system; its path is that of the first application that named it and does not count.
    pub location: RemoteLocation,
    /// Hadoop settings that came with it, sorted.
    pub conf: Vec<(String, String)>,
    /// The user to act as; none = the worker's own.
    pub user: Option<String>,
}

/// A remote file system as one user.
#[derive(Debug)]
pub(super) struct Remote {
    pub(super) authority: String,
    /// A file that never is, by which it is asked whether it answers.
    pub(super) probe_path: String,
    pub(super) fs: Arc<dyn RemoteFs>,
    /// Writes to the file system at a time, all users together.
    pub(super) permits: Arc<Semaphore>,
    pub(super) metrics: RemoteMetrics,
    condition: Mutex<Condition>,
}

#[derive(Debug, Default)]
struct Condition {
    failures: u32,
    suspended_until: Option<Instant>,
    last_error: String,
}

impl Remote {
    pub(super) fn new(
        (authority, probe_path): (String, String),
        fs: Arc<dyn RemoteFs>,
        permits: Arc<Semaphore>,
        metrics: RemoteMetrics,
    ) -> Self {
        Self { authority, probe_path, fs, permits, metrics, condition: Mutex::default() }
    }

    /// Whether it fails and was not tried for a while.
    pub(super) fn is_forgotten(&self) -> bool {
        let suspended_until = self.condition.lock().suspended_until;
        self.is_failing() && suspended_until.is_none_or(|until| Instant::now() >= until + PROBE_AFTER)
    }

    /// Whether to try now.
    pub(super) fn is_available(&self) -> bool {
        self.condition.lock().suspended_until.is_none_or(|until| Instant::now() >= until)
    }

    /// Takes the right to try now. While it fails there is one for each suspension: taking it suspends the others
    /// until the answer is there, or for as long again.
    pub(super) fn try_now(&self) -> Result<(), StoreError> {
        let mut condition = self.condition.lock();
        let now = Instant::now();
        if condition.suspended_until.is_some_and(|until| now < until) {
            drop(condition);
            return Err(self.suspended());
        }
        if let Some(pause) = condition.pause() {
            condition.suspended_until = Some(now + pause);
        }
        Ok(())
    }

    /// Whether its last calls failed for its own fault.
    pub(super) fn is_failing(&self) -> bool {
        self.condition.lock().failures >= FAILURES_MIN
    }

    /// An error for those that may not try now.
    pub(super) fn suspended(&self) -> StoreError {
        let text = format!("skipped because the latest calls failed: {}", self.condition.lock().last_error);
        StoreError::remote(StoreErrorKind::Unreachable, &self.authority, text)
    }

    /// Takes note of how a call ended.
    pub(super) fn note<T>(&self, result: &Result<T, StoreError>) {
        let mut condition = self.condition.lock();
        let Err(error) = result else {
            if condition.failures >= FAILURES_MIN {
                tracing::info!(remote = %self.authority, "remote store responds again");
            }
            *condition = Condition::default();
            return;
        };
        if !is_own_fault(error.kind) {
            return;
        }
        condition.failures = condition.failures.saturating_add(1);
        condition.last_error = error.to_string();
        let Some(pause) = condition.pause() else { return };
        if condition.failures == FAILURES_MIN {
            tracing::error!(
                remote = %self.authority,
                %error,
                "remote store fails; checking it until it responds"
            );
        }
        condition.suspended_until = Some(Instant::now() + pause);
    }
}

impl Condition {
    /// For how long it is suspended after its last failure; none while there were few.
    fn pause(&self) -> Option<Duration> {
        let beyond = self.failures.checked_sub(FAILURES_MIN)?;
        Some(SUSPENSION_MIN.saturating_mul(1 << beyond.min(16)).min(SUSPENSION_MAX))
    }
}

/// Whether a failure says something of the file system, and not of one path.
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
        | StoreErrorKind::InUse
        | StoreErrorKind::Copied
        | StoreErrorKind::NotMounted
        | StoreErrorKind::Exists
        | StoreErrorKind::Denied => false,
    }
}
