//! Purges that the metadata log does not know of yet.
//!
//! They are written down in rounds, one at a time. A round is for all purges that are pending when it begins, so that those that
//! come together are noted once each: who comes while one is under way waits for the next, which any of those who wait runs
//! for all of them.

use std::sync::Arc;

use parking_lot::Mutex;

use super::shuffle::Shuffle;
use uniffle_wire::types::{AppId, ShuffleKey};

/// The purges of a store that are not noted yet.
#[derive(Debug, Default)]
pub(super) struct PurgeNotes {
    pending: Mutex<PendingPurges>,
    /// The last round that came to its end. Locked while one is under way.
    ended: tokio::sync::Mutex<u64>,
}

#[derive(Debug, Default)]
struct PendingPurges {
    shuffles: Vec<Arc<Shuffle>>,
    /// Rounds that have begun, also those that were dropped.
    begun: u64,
}

impl PendingPurges {
    fn forget_noted(&mut self) {
        self.shuffles.retain(|shuffle| !shuffle.purge_is_noted());
    }
}

impl PurgeNotes {
    /// A shuffle is gone.
    pub(super) fn add(&self, shuffle: Arc<Shuffle>) {
        self.pending.lock().shuffles.push(shuffle);
    }

    /// The registrations of which the purge is not noted.
    pub(super) fn incarnations(&self) -> Vec<u64> {
        let pending = self.pending.lock();
        pending.shuffles.iter().filter(|it| !it.purge_is_noted()).map(|it| it.incarnation).collect()
    }

    /// Whether the purge of a shuffle of `app`, or of `key` if that is given, is not noted.
    pub(super) fn has(&self, app: &AppId, key: Option<&ShuffleKey>) -> bool {
        let is_of = |it: &Arc<Shuffle>| it.key.app == *app && key.is_none_or(|key| it.key == *key);
        self.pending.lock().shuffles.iter().any(|it| is_of(it) && !it.purge_is_noted())
    }

    /// Whether all purges are noted.
    pub(super) fn is_empty(&self) -> bool {
        self.pending.lock().shuffles.is_empty()
    }

    /// Waits until a round was run for everything that is pending now: by way of `note`, unless another caller's round covers
    /// it. `note` marks the shuffles of which it wrote down the purge; the others stay for the next round.
    pub(super) async fn cover<F>(&self, note: impl FnOnce(Vec<Arc<Shuffle>>) -> F)
    where
        F: Future<Output = ()>,
    {
        let begun = self.pending.lock().begun;
        let mut ended = self.ended.lock().await;
        // One that began before may have missed what came since.
        if *ended > begun {
            return;
        }
        let (round, shuffles) = self.begin();
        note(shuffles).await;
        self.pending.lock().forget_noted();
        *ended = round;
    }

    /// The number of a round, and what it is for, which stays on the list until it is done: the caller may go away.
    fn begin(&self) -> (u64, Vec<Arc<Shuffle>>) {
        let mut pending = self.pending.lock();
        // Of a round that was dropped.
        pending.forget_noted();
        pending.begun += 1;
        (pending.begun, pending.shuffles.clone())
    }
}
