//! Keeps writes and deletions of one application apart.
//!
//! The directories are named by the protocol, so that a shuffle that is registered anew has those of the one before. A
//! deletion therefore waits for the writes under way, and writes that come after it was ordered wait until it is done:
//! otherwise it would take new files with it. Ordering is synchronous ([`DeletionGate::order_deletion`]), together with
//! forgetting the shuffle.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

#[derive(Debug, Default)]
struct State {
    writes: usize,
    deletions: usize,
}

/// Of one application: writes and deletions exclude each other, in the order in which deletions are ordered.
#[derive(Debug, Default)]
pub(super) struct DeletionGate {
    state: Mutex<State>,
    changed: Notify,
}

/// A write under way.
#[derive(Debug)]
pub(super) struct Writing(Arc<DeletionGate>);

/// A deletion that was ordered and is not done.
#[derive(Debug)]
pub(super) struct Deleting(Arc<DeletionGate>);

impl DeletionGate {
    /// Waits for deletions.
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

    /// From now on writes wait.
    pub(super) fn order_deletion(self: &Arc<Self>) -> Deleting {
        self.state.lock().deletions += 1;
        Deleting(Arc::clone(self))
    }

    async fn wait(&self, mut passes: impl FnMut(&mut State) -> bool) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // Before the look, so that no change between the two is missed.
            changed.as_mut().enable();
            if passes(&mut self.state.lock()) {
                return;
            }
            changed.await;
        }
    }
}

impl Deleting {
    /// Waits for the writes that were under way.
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
