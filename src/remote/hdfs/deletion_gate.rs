//! Separates the writes and deletions of one application.
//!
//! Directory names are defined by the protocol, so a shuffle that is registered again has those of
//! its predecessor. A deletion therefore waits for earlier writes (`purge` limits this to ten
//! minutes). Writes that begin after it was ordered wait until its guard is dropped, because it
//! would delete their files. A deletion is ordered synchronously
//! ([`DeletionGate::order_deletion`]), together with forgetting the shuffle or application.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

#[derive(Debug, Default)]
struct State {
    writes: usize,
    deletions: usize,
}

/// Gate of one application. Writes wait for deletions that were ordered before, and deletions can
/// wait for writes that began before.
#[derive(Debug, Default)]
pub(super) struct DeletionGate {
    state: Mutex<State>,
    changed: Notify,
}

/// Guard of a write in progress.
#[derive(Debug)]
pub(super) struct Writing(Arc<DeletionGate>);

/// Guard of an ordered deletion. Dropped when the deletion has ended, even without success.
#[derive(Debug)]
pub(super) struct Deleting(Arc<DeletionGate>);

impl DeletionGate {
    /// Begins a write, after all ordered deletions.
    pub(super) async fn write(self: &Arc<Self>) -> Writing {
        self.wait(|state| {
            if state.deletions > 0 {
                return false;
            }
            state.writes += 1;
            true
        })
        .await;
        Writing(Arc::clone(self))
    }

    /// Orders a deletion. Later writes wait for it.
    pub(super) fn order_deletion(self: &Arc<Self>) -> Deleting {
        self.state.lock().deletions += 1;
        Deleting(Arc::clone(self))
    }

    async fn wait(&self, mut passes: impl FnMut(&mut State) -> bool) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // Enabled before the check, so that no change between the two is missed.
            changed.as_mut().enable();
            if passes(&mut self.state.lock()) {
                return;
            }
            changed.await;
        }
    }
}

impl Deleting {
    /// Waits for the writes that began before.
    pub(super) async fn clear(&self) {
        self.0.wait(|state| state.writes == 0).await;
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.0.state.lock().writes -= 1;
        self.0.changed.notify_waiters();
    }
}

impl Drop for Deleting {
    fn drop(&mut self) {
        self.0.state.lock().deletions -= 1;
        self.0.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt as _;

    #[tokio::test]
    async fn deletion_waits_for_older_writes_and_delays_newer_ones() {
        let gate = Arc::new(DeletionGate::default());
        let older = gate.write().await;
        let deleting = gate.order_deletion();
        let mut newer = Box::pin(gate.write());
        assert!(deleting.clear().now_or_never().is_none());
        assert!(newer.as_mut().now_or_never().is_none());
        drop(older);
        deleting.clear().await;
        assert!(newer.as_mut().now_or_never().is_none());
        drop(deleting);
        drop(newer.await);
    }
}
