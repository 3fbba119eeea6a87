//! The outcome of a fetch: one task fetches a chunk, and all its readers wait for the same outcome.

use std::sync::Arc;

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

/// Reports the outcome of a fetch. If dropped before that, as by a cancelled task, reports an
/// error.
#[derive(Debug)]
pub(super) struct Landing {
    flight: Arc<Flight>,
    key: String,
    has_landed: bool,
}

impl Landing {
    pub(super) fn of(flight: &Arc<Flight>, key: String) -> Self {
        Self { flight: Arc::clone(flight), key, has_landed: false }
    }

    /// Returns the key of the chunk's object.
    pub(super) fn key(&self) -> &str {
        &self.key
    }

    /// Reports the outcome to all waiting readers.
    pub(super) fn land(mut self, landed: Landed) {
        self.has_landed = true;
        self.flight.0.send_replace(Some(landed));
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        if !self.has_landed {
            let error = StoreError::new(StoreErrorKind::Unhealthy, &self.key);
            self.flight.0.send_replace(Some(Landed::NotGiven(error)));
        }
    }
}

/// Outcome of a fetch, `None` until the fetch ends.
#[derive(Debug)]
pub(super) struct Flight(watch::Sender<Option<Landed>>);

impl Default for Flight {
    fn default() -> Self {
        Self(watch::Sender::new(None))
    }
}

impl Flight {
    /// Waits for the outcome. Returns the chunk's size in bytes, or `None` if its disk failed.
    ///
    /// # Errors
    /// The store failed to return the chunk.
    pub(super) async fn landed(&self, key: &str) -> Result<Option<u64>, StoreError> {
        let mut landed = self.0.subscribe();
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
        matches!(*self.0.borrow(), Some(Landed::NotGiven(_) | Landed::NotKept))
    }
}
