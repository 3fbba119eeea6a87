//! The ledgers of a shuffle's partitions, shared: to ask one costs a load where nothing was ever in question.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;
use uniffle_wire::types::PartitionId;

use super::id_set::IdSet;
use super::ledger::{Ledger, Loss, Phase, Verdict};

/// A ledger for each partition that was ever in question, under one lock.
#[derive(Debug, Default)]
pub struct ShuffleLedger {
    state: Mutex<State>,
    /// Some partition has a ledger. Once it is true it stays so.
    is_watched: AtomicBool,
    lost_blocks: AtomicU64,
    verifying: AtomicU64,
    /// A look has ended.
    looked: Notify,
    incomplete: OnceLock<String>,
}

#[derive(Debug, Default)]
struct State {
    partitions: HashMap<PartitionId, Ledger>,
    /// An earlier process left the shuffle, and nothing in the partitions that have no ledger: nothing at all, or nothing
    /// but what may be in remote files. None = nothing was ever in question.
    others_are_empty: Option<bool>,
}

impl ShuffleLedger {
    /// An earlier process left these blocks: all that there are, or there may be more in remote files.
    pub fn take_over(&self, blocks: HashMap<PartitionId, IdSet>, is_all: bool) {
        let mut state = self.state.lock();
        state.others_are_empty = Some(is_all);
        state.partitions =
            blocks.into_iter().map(|(id, blocks)| (id, Ledger::left(blocks, is_all))).collect();
        self.is_watched.store(true, Ordering::Release);
    }

    /// Runs `act` on a partition's ledger, under a lock. One of which nothing was ever in question is not kept.
    pub fn with<T>(&self, partition: PartitionId, act: impl FnOnce(&mut Ledger) -> T) -> T {
        let sizes =
            |it: &Ledger| (it.lost_blocks(), u64::from(it.phase() == Phase::Verifying), it.is_looking());
        let mut state = self.state.lock();
        let known = state.partitions.remove(&partition);
        let left = |is_all| Ledger::left(IdSet::default(), is_all);
        let mut ledger = known.or_else(|| state.others_are_empty.map(left)).unwrap_or_default();
        let before = sizes(&ledger);
        let done = act(&mut ledger);
        let after = sizes(&ledger);
        if ledger.phase() != Phase::Known {
            state.partitions.insert(partition, ledger);
            self.is_watched.store(true, Ordering::Release);
        }
        self.lost_blocks.fetch_add(after.0.wrapping_sub(before.0), Ordering::Release);
        self.verifying.fetch_add(after.1.wrapping_sub(before.1), Ordering::Release);
        drop(state);
        if before.2 && !after.2 {
            self.looked.notify_waiters();
        }
        done
    }

    /// Whether ledgers must hear of commits and reports.
    pub fn is_watched(&self) -> bool {
        self.is_watched.load(Ordering::Acquire)
    }

    /// Lost blocks.
    pub fn lost_blocks(&self) -> u64 {
        self.lost_blocks.load(Ordering::Acquire)
    }

    /// Partitions of which it is being found out what is there.
    pub fn verifying(&self) -> u64 {
        self.verifying.load(Ordering::Acquire)
    }

    /// Waits until a partition is known, or a look has failed.
    pub async fn looked(&self, partition: PartitionId) {
        loop {
            let looked = self.looked.notified();
            let is_looking = || self.state.lock().partitions.get(&partition).is_some_and(Ledger::is_looking);
            if self.verifying() == 0 || !is_looking() {
                return;
            }
            looked.await;
        }
    }

    /// See [`Ledger::verdict`]; `wanted` runs under the lock.
    pub fn verdict(&self, partition: PartitionId, wanted: impl Fn(&IdSet) -> IdSet) -> Verdict {
        if self.lost_blocks() == 0 && self.verifying() == 0 {
            return Verdict::Serve;
        }
        let state = self.state.lock();
        state.partitions.get(&partition).map_or(Verdict::Serve, |ledger| ledger.verdict(wanted))
    }

    /// What is lost.
    pub fn losses(&self) -> Vec<(PartitionId, Loss)> {
        if self.lost_blocks() == 0 {
            return Vec::new();
        }
        let state = self.state.lock();
        let of = |(id, ledger): (&PartitionId, &Ledger)| {
            ledger.losses().iter().map(|loss| (*id, loss.clone())).collect::<Vec<_>>()
        };
        state.partitions.iter().flat_map(of).collect()
    }

    /// Reports may be missing, for this reason.
    pub fn mark_incomplete(&self, reason: String) {
        let _ = self.incomplete.set(reason);
    }

    /// Why reports may be missing, if they may.
    pub fn incomplete(&self) -> Option<&str> {
        self.incomplete.get().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::ledger::Blame;
    use super::*;

    const P: PartitionId = PartitionId(3);
    const OTHER: PartitionId = PartitionId(4);

    fn blame() -> Blame {
        Blame { extents: Vec::new(), reason: Arc::from("disk /a is missing"), at_ms: 7 }
    }

    #[test]
    fn what_is_counted_follows_the_ledgers() {
        let shuffle = ShuffleLedger::default();
        let commit = |id, ids: &[u64]| shuffle.with(id, |it| it.commit(ids));
        assert_eq!((commit(P, &[1]), shuffle.is_watched()), (0, false), "nothing is kept of it");
        assert!(shuffle.state.lock().partitions.is_empty());
        assert_eq!(shuffle.with(P, |it| it.enter(IdSet::from([1, 2, 9]), &blame())).len(), 1);
        assert!(shuffle.with(OTHER, |it| it.question(None) && !it.question(None)));
        assert_eq!((shuffle.lost_blocks(), shuffle.verifying(), shuffle.losses().len()), (3, 1, 1));
        assert_eq!(shuffle.verdict(OTHER, IdSet::clone), Verdict::Wait(None));
        let new = shuffle.with(OTHER, |it| {
            it.begin_look();
            it.settle(IdSet::default(), &IdSet::from([7]), &blame())
        });
        assert_eq!((new.unwrap().len(), shuffle.lost_blocks(), shuffle.verifying()), (1, 4, 0));
        assert_eq!((commit(P, &[1, 2, 9]), commit(OTHER, &[1, 7])), (3, 1));
        assert_eq!((shuffle.lost_blocks(), shuffle.losses()), (0, Vec::new()));
    }

    #[tokio::test]
    async fn what_may_be_in_remote_files_is_in_question_until_it_was_looked_for() {
        let shuffle = ShuffleLedger::default();
        shuffle.take_over(HashMap::from([(P, IdSet::from_iter([1, 2]))]), false);
        let ids = IdSet::from([1, 3, 4]);
        let question = |id, ids: &IdSet| shuffle.with(id, |it| it.question_unknown(ids));
        assert!(!question(P, &IdSet::from([1])) && question(P, &ids));
        assert_eq!(shuffle.verdict(P, IdSet::clone), Verdict::Serve, "the report may still be refused");
        shuffle.with(P, Ledger::begin_look);
        let mut waiting = std::pin::pin!(shuffle.looked(P));
        assert!(futures::poll!(&mut waiting).is_pending());
        shuffle.looked(OTHER).await;
        shuffle.with(P, Ledger::fail_look);
        waiting.await;
        assert_eq!(shuffle.with(P, |it| it.acknowledge(&ids)), Ok(false));
        assert_eq!(shuffle.verdict(P, IdSet::clone), Verdict::Wait(Some(2)));
        let new = shuffle.with(P, |it| {
            it.begin_look();
            it.settle(IdSet::from([3]), &IdSet::default(), &blame())
        });
        assert_eq!(new.unwrap()[0].ids, IdSet::from([4]));
        assert_eq!(shuffle.with(P, |it| it.acknowledge(&IdSet::from([2, 3, 5]))), Err(IdSet::from([5])));
        assert!(question(OTHER, &ids), "nothing is known of it either");
    }
}
