//! A chunk on its way into its slot: one fetches it, all who want it wait for the same outcome.

use std::sync::Arc;

use tokio::sync::watch;

use crate::tiers::object::condition::again;
use crate::tiers::{StoreError, StoreErrorKind};

/// How it ended.
#[derive(Debug)]
pub(super) enum Landed {
    /// So many bytes are in the slot.
    Whole(u64),
    /// The store did not give them.
    NotGiven(StoreError),
    /// The disk did not take them.
    NotKept,
}

/// What lands with an error when it is dropped: also of a task that is cancelled.
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

    /// The object that the chunk is of.
    pub(super) fn key(&self) -> &str {
        &self.key
    }

    /// Tells those who wait.
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

/// The outcome, empty until it has landed.
#[derive(Debug)]
pub(super) struct Flight(watch::Sender<Option<Landed>>);

impl Default for Flight {
    fn default() -> Self {
        Self(watch::Sender::new(None))
    }
}

impl Flight {
    /// Bytes in the slot once they are there; none when the disk did not take them.
    ///
    /// # Errors
    /// The store's.
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

    /// Whether it ended, and nothing is in the slot.
    pub(super) fn has_failed(&self) -> bool {
        matches!(*self.0.borrow(), Some(Landed::NotGiven(_) | Landed::NotKept))
    }
}
