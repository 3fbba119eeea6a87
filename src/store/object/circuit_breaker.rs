//! Circuit breaker of the store: it pauses writes after failed calls, and tells whether the store
//! is expected to recover.
//!
//! Only failures of the store itself count. A missing object does not. The result of a deletion
//! does not either: a store may refuse deletions and accept writes, and remaining objects do no
//! harm.

use std::time::Duration;

use object_store::Error;
use parking_lot::Mutex;

use super::client::{Failure, StoreRefusal, explain};
use crate::clock::Instant;
use crate::store::{StoreError, StoreErrorKind};

/// Backoff: pause of writes after a failed call. Further failures double it, up to `PAUSE_MAX`.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(15);

/// A worker without disks whose store has failed for this long gets no new shuffles.
const COMPLAINT_AFTER: Duration = Duration::from_secs(10);

/// Returns the kind of a failed call.
#[must_use]
pub(super) fn kind_of(error: &Error) -> StoreErrorKind {
    match Failure::classify(error) {
        Failure::NotFound => StoreErrorKind::NotFound,
        Failure::Refused(StoreRefusal::Full) => StoreErrorKind::NoSpace,
        Failure::Refused(_) => StoreErrorKind::Denied,
        // The request is repeated after a response that does not match it.
        Failure::Retryable | Failure::Mismatch => StoreErrorKind::Unreachable,
    }
}

/// Creates the error of a failed call for the object `key`.
pub(in crate::store) fn failed(key: &str, error: &Error) -> StoreError {
    StoreError::remote(kind_of(error), key, explain(error))
}

/// Creates the error of a response that does not match the request.
pub(super) fn wrong_answer(key: &str, what: &str) -> StoreError {
    StoreError::remote(StoreErrorKind::Unreachable, key, what)
}

/// Copies an error.
pub(super) fn copy_of(error: &StoreError) -> StoreError {
    match &error.source {
        None => StoreError::new(error.kind, &error.path),
        Some(source) => StoreError::remote(error.kind, &error.path, source.to_string()),
    }
}

/// Circuit breaker of the store: closed while it is `None`, open until `try_at`, then half-open.
/// Any successful call closes it.
#[derive(Debug, Default)]
pub(in crate::store) struct CircuitBreaker(Mutex<Option<Failing>>);

#[derive(Debug, Clone, Copy)]
struct Failing {
    since: Instant,
    try_at: Instant,
    pause: Duration,
}

impl CircuitBreaker {
    /// Records the result of a call.
    pub(super) fn note<T>(&self, result: &Result<T, StoreError>) {
        let mut failing = self.0.lock();
        match result {
            Ok(_) => *failing = None,
            Err(error) if is_its_fault(error.kind) => {
                let now = Instant::now();
                let next = match *failing {
                    None => Failing { since: now, try_at: now + PAUSE_MIN, pause: PAUSE_MIN },
                    // Concurrent calls that fail count once.
                    Some(before) if now < before.try_at => before,
                    Some(before) => {
                        let pause = (before.pause * 2).min(PAUSE_MAX);
                        Failing { since: before.since, try_at: now + pause, pause }
                    }
                };
                *failing = Some(next);
            }
            Err(_) => {}
        }
    }

    /// Returns whether the store has failed since its last successful call.
    pub(super) fn is_failing(&self) -> bool {
        self.0.lock().is_some()
    }

    /// Returns whether the pause of writes is over.
    pub(super) fn is_worth_trying(&self) -> bool {
        self.0.lock().is_none_or(|failing| Instant::now() >= failing.try_at)
    }

    /// Returns the reason for which the coordinator should assign no new shuffles to a worker
    /// without disks.
    pub(super) fn complaint(&self) -> Option<&'static str> {
        let failing = (*self.0.lock())?;
        (failing.since.elapsed() >= COMPLAINT_AFTER)
            .then_some("the object store does not respond or refuses requests")
    }

    /// Converts the error of a read for its client. If the store has failed for less than `time`,
    /// it is expected to recover, and the client should retry.
    pub(super) fn for_reader(&self, error: StoreError, time: Duration) -> StoreError {
        let is_expected_back = self.0.lock().is_none_or(|failing| failing.since.elapsed() < time);
        match error.kind {
            StoreErrorKind::Unreachable if is_expected_back => {
                StoreError { kind: StoreErrorKind::Unhealthy, ..error }
            }
            _ => error,
        }
    }
}

fn is_its_fault(kind: StoreErrorKind) -> bool {
    matches!(kind, StoreErrorKind::Unreachable | StoreErrorKind::Denied | StoreErrorKind::NoSpace)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(kind: StoreErrorKind) -> Result<(), StoreError> {
        Err(StoreError::new(kind, "s3"))
    }

    #[tokio::test(start_paused = true)]
    async fn circuit_breaker_pauses_writes_of_failing_store() {
        let breaker = CircuitBreaker::default();
        breaker.note(&failure(StoreErrorKind::NotFound));
        assert!(!breaker.is_failing(), "a missing object must not count as failure");
        for pause in [1, 2, 4, 8, 15, 15] {
            breaker.note(&failure(StoreErrorKind::Unreachable));
            breaker.note(&failure(StoreErrorKind::Unreachable));
            assert!(breaker.is_failing() && !breaker.is_worth_trying());
            tokio::time::advance(Duration::from_millis(pause * 1000 - 1)).await;
            assert!(!breaker.is_worth_trying(), "{pause}");
            tokio::time::advance(Duration::from_millis(1)).await;
            assert!(breaker.is_worth_trying(), "{pause}");
        }
        assert!(breaker.complaint().is_some());
        breaker.note(&Ok(()));
        assert!(breaker.complaint().is_none() && breaker.is_worth_trying());
    }

    #[tokio::test(start_paused = true)]
    async fn readers_are_refused_only_during_transient_outages() {
        let (breaker, time) = (CircuitBreaker::default(), Duration::from_secs(120));
        let read = |kind| breaker.for_reader(StoreError::new(kind, "s3"), time).kind;
        breaker.note(&failure(StoreErrorKind::Unreachable));
        assert_eq!(read(StoreErrorKind::Unreachable), StoreErrorKind::Unhealthy);
        assert_eq!(read(StoreErrorKind::NotFound), StoreErrorKind::NotFound);
        tokio::time::advance(time).await;
        assert_eq!(read(StoreErrorKind::Unreachable), StoreErrorKind::Unreachable);
    }
}
