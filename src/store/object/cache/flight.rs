//! The outcome of a fetch: one task fetches a chunk, and all its readers wait for the same outcome.

use tokio::sync::watch;

use crate::store::object::circuit_breaker::again;
use crate::store::{StoreError, StoreErrorKind};

/// Outcome of a fetch.
#[derive(Debug)]
pub(super) enum Landed {
    /// The slot has the whole chunk, of this many bytes.
    Whole(u64),
    /// The store failed to return the chunk.
    NotGiven(StoreError),
    /// The disk failed to store the chunk.
    NotKept,
}

/// Reports the outcome of a fetch. If dropped before that, as by a cancelled task, readers get an
/// error.
pub(super) type Landing = watch::Sender<Option<Landed>>;

/// Receives the outcome of a fetch, `None` until the fetch ends.
#[derive(Debug, Clone)]
pub(super) struct Flight(watch::Receiver<Option<Landed>>);

impl Flight {
    pub(super) fn new() -> (Landing, Self) {
        let (landing, landed) = watch::channel(None);
        (landing, Self(landed))
    }

    /// Waits for the outcome. Returns the chunk's size in bytes, or `None` if its disk failed.
    ///
    /// # Errors
    /// The store failed to return the chunk, or the fetch was cancelled.
    pub(super) async fn landed(&self, key: &str) -> Result<Option<u64>, StoreError> {
        let mut landed = self.0.clone();
        let landed = landed.wait_for(Option::is_some).await;
        match landed.as_deref() {
            Ok(Some(Landed::Whole(bytes))) => Ok(Some(*bytes)),
            Ok(Some(Landed::NotKept)) => Ok(None),
            Ok(Some(Landed::NotGiven(error))) => Err(again(error)),
            Ok(None) | Err(_) => Err(StoreError::new(StoreErrorKind::Unhealthy, key)),
        }
    }

    /// Returns whether the fetch has ended without a chunk in the slot.
    pub(super) fn has_failed(&self) -> bool {
        // Looked at first: the outcome of a fetch that has ended does not change.
        let has_ended = self.0.has_changed().is_err();
        match *self.0.borrow() {
            None => has_ended,
            Some(Landed::Whole(_)) => false,
            Some(Landed::NotGiven(_) | Landed::NotKept) => true,
        }
    }
}
