//! Purges that are not in the metadata log yet.
//!
//! They are logged in rounds, one at a time. A round covers all purges that are pending when it
//! begins. A caller that arrives during a round waits for the next round, which any waiting caller
//! runs for all.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::store::disk::shuffle::DiskShuffle;
use uniffle_wire::types::{AppId, ShuffleKey};

/// Purges of a store that are not logged yet.
#[derive(Debug, Default)]
pub(in crate::store) struct PurgeNotes {
    pending: Mutex<PendingPurges>,
    /// Number of the last completed round. Locked during a round.
    ended: tokio::sync::Mutex<u64>,
}

#[derive(Debug, Default)]
struct PendingPurges {
    shuffles: Vec<Arc<DiskShuffle>>,
    /// Number of rounds that have begun, including cancelled ones.
    begun: u64,
}

impl PendingPurges {
    fn forget_logged(&mut self) {
        self.shuffles.retain(|shuffle| !shuffle.purge_is_logged());
    }
}

impl PurgeNotes {
    /// Adds a purged shuffle.
    pub(in crate::store) fn add(&self, shuffle: Arc<DiskShuffle>) {
        self.pending.lock().shuffles.push(shuffle);
    }

    /// Returns the incarnations whose purge is not logged.
    pub(super) fn incarnations(&self) -> Vec<u64> {
        let pending = self.pending.lock();
        pending.shuffles.iter().filter(|it| !it.purge_is_logged()).map(|it| it.incarnation).collect()
    }

    /// Returns whether a purge of `app`, or of `key` if given, is not logged.
    pub(in crate::store) fn has(&self, app: &AppId, key: Option<&ShuffleKey>) -> bool {
        let is_of = |it: &Arc<DiskShuffle>| it.key.app == *app && key.is_none_or(|key| it.key == *key);
        self.pending.lock().shuffles.iter().any(|it| is_of(it) && !it.purge_is_logged())
    }

    /// Returns false while a purge is not logged. Logged ones may count until a round has ended.
    pub(in crate::store) fn is_empty(&self) -> bool {
        self.pending.lock().shuffles.is_empty()
    }

    /// Waits for a round that covers all purges pending now. Runs it with `note`, unless another
    /// caller's round covers them. `note` marks the shuffles whose purge it logged. The others stay
    /// for the next round.
    pub(in crate::store) async fn cover<F>(&self, note: impl FnOnce(Vec<Arc<DiskShuffle>>) -> F)
    where
        F: Future<Output = ()>,
    {
        let begun = self.pending.lock().begun;
        let mut ended = self.ended.lock().await;
        // A round that began earlier may have missed later purges.
        if *ended > begun {
            return;
        }
        let (round, shuffles) = self.begin();
        note(shuffles).await;
        self.pending.lock().forget_logged();
        *ended = round;
    }

    /// Returns the number of a new round and its shuffles. They stay on the list until the round
    /// has ended, because it may be cancelled.
    fn begin(&self) -> (u64, Vec<Arc<DiskShuffle>>) {
        let mut pending = self.pending.lock();
        // Removes purges that a cancelled round has logged.
        pending.forget_logged();
        pending.begun += 1;
        (pending.begun, pending.shuffles.clone())
    }
}
