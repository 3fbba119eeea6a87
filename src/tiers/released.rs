//! The moment in which memory and a tier both have a batch: readers find it in the tier before memory releases it.
//!
//! Invariant: what is gone of it by then is named only after that moment. Who looks before which blocks are there finds these
//! in memory, and nobody would look again when memory releases them.

use std::convert::Infallible;

use tokio::sync::oneshot;

/// Memory has a batch, at least while this is there.
#[derive(Debug)]
pub struct InMemory {
    _dropped: oneshot::Sender<Infallible>,
}

/// The end of that.
#[derive(Debug, Default)]
pub struct Released(Option<oneshot::Receiver<Infallible>>);

impl InMemory {
    /// From now on, and what the tier is told of its end.
    #[must_use]
    pub fn begin() -> (Self, Released) {
        let (_dropped, released) = oneshot::channel();
        (Self { _dropped }, Released(Some(released)))
    }
}

impl Released {
    /// Waits for it; of what memory never had there is nothing to wait for.
    pub async fn wait(self) {
        if let Some(released) = self.0 {
            let _dropped = released.await;
        }
    }
}
