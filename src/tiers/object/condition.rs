//! Whether the store works, as its answers show: when it is worth trying, and whether it is expected back.

use std::time::Duration;

use object_store::Error;
use parking_lot::Mutex;

use super::client::{Failure, Refusal, explain};
use crate::clock::Instant;
use crate::tiers::{StoreError, StoreErrorKind};

/// After a failed call nothing is written for so long; doubles up to the second.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(15);

/// A store that fails for so long gets no new shuffles.
const COMPLAINT_AFTER: Duration = Duration::from_secs(10);

/// What a failed call means for others.
#[must_use]
pub(super) fn kind_of(error: &Error) -> StoreErrorKind {
    match Failure::of(error) {
        Failure::NotFound => StoreErrorKind::NotFound,
        Failure::Refused(Refusal::Full) => StoreErrorKind::NoSpace,
        Failure::Refused(_) => StoreErrorKind::Denied,
        // An answer that is damaged is asked for again.
        Failure::ExpectedBack | Failure::Damaged => StoreErrorKind::Unreachable,
    }
}

/// A failed call of the store, with the object that it was for.
pub(super) fn failed(key: &str, error: &Error) -> StoreError {
    StoreError::remote(kind_of(error), key, explain(error))
}

/// An answer that is not what was asked for.
pub(super) fn wrong_answer(key: &str, what: &str) -> StoreError {
    StoreError::remote(StoreErrorKind::Unreachable, key, what)
}

/// The same error for another.
pub(super) fn again(error: &StoreError) -> StoreError {
    match &error.source {
        None => StoreError::new(error.kind, &error.path),
        Some(source) => StoreError::remote(error.kind, &error.path, source.to_string()),
    }
}

/// Empty while it works; else since when it fails, and when it is tried again.
#[derive(Debug, Default)]
pub(super) struct Condition(Mutex<Option<Failing>>);

#[derive(Debug, Clone, Copy)]
struct Failing {
    since: Instant,
    try_at: Instant,
    pause: Duration,
}

impl Condition {
    /// Takes note of how a call went.
    pub(super) fn note<T>(&self, result: &Result<T, StoreError>) {
        let mut failing = self.0.lock();
        match result {
            Ok(_) => *failing = None,
            Err(error) if is_its_fault(error.kind) => {
                let now = Instant::now();
                let next = match *failing {
                    None => Failing { since: now, try_at: now + PAUSE_MIN, pause: PAUSE_MIN },
                    // Calls that were under way together count once.
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

    /// Whether the last calls failed by the store's fault.
    pub(super) fn is_failing(&self) -> bool {
        self.0.lock().is_some()
    }

    /// Whether it is worth trying to write now.
    pub(super) fn is_worth_trying(&self) -> bool {
        self.0.lock().is_none_or(|failing| Instant::now() >= failing.try_at)
    }

    /// Why no new shuffles should come.
    pub(super) fn complaint(&self) -> Option<&'static str> {
        let failing = (*self.0.lock())?;
        (failing.since.elapsed() >= COMPLAINT_AFTER)
            .then_some("the object store does not respond or refuses requests")
    }

    /// A failed read, as its reader is told: of a store that is expected back within `time` it is worth asking again.
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
    async fn failing_store_is_retried_with_growing_pauses() {
        let condition = Condition::default();
        condition.note(&failure(StoreErrorKind::NotFound));
        assert!(!condition.is_failing(), "an answer is no failure");
        for pause in [1, 2, 4, 8, 15, 15] {
            condition.note(&failure(StoreErrorKind::Unreachable));
            condition.note(&failure(StoreErrorKind::Unreachable));
            assert!(condition.is_failing() && !condition.is_worth_trying());
            tokio::time::advance(Duration::from_millis(pause * 1000 - 1)).await;
            assert!(!condition.is_worth_trying(), "{pause}");
            tokio::time::advance(Duration::from_millis(1)).await;
            assert!(condition.is_worth_trying(), "{pause}");
        }
        assert!(condition.complaint().is_some());
        condition.note(&Ok(()));
        assert!(condition.complaint().is_none() && condition.is_worth_trying());
    }

    #[tokio::test(start_paused = true)]
    async fn readers_are_refused_only_during_transient_outages() {
        let (condition, time) = (Condition::default(), Duration::from_secs(120));
        let read = |kind| condition.for_reader(StoreError::new(kind, "s3"), time).kind;
        condition.note(&failure(StoreErrorKind::Unreachable));
        assert_eq!(read(StoreErrorKind::Unreachable), StoreErrorKind::Unhealthy);
        assert_eq!(read(StoreErrorKind::NotFound), StoreErrorKind::NotFound);
        tokio::time::advance(time).await;
        assert_eq!(read(StoreErrorKind::Unreachable), StoreErrorKind::Unreachable);
    }
}
