//! The shared ledgers of a shuffle's partitions.
//!
//! A query takes no lock while no block is lost and no partition is verified. Invariant: the
//! numbers of lost blocks and of partitions being verified change under the lock of the ledgers.
//! Otherwise a read could be served although its blocks are unverified.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;
use uniffle_wire::types::PartitionId;

use super::loss::Loss;
use super::partition::{Availability, Ledger, LedgerPhase};
use crate::ids::id_set::IdSet;
use crate::ids::present::{HeldIds, PresentIds};
use uniffle_base::budget::Budget;

/// A ledger for each partition whose blocks were recovered, lost or ever unverified, under one
/// lock.
#[derive(Debug)]
pub struct ShuffleLedger {
    /// Budget to which ids are charged.
    heap: Budget,
    state: Mutex<State>,
    /// True once some partition has a ledger, or blocks of an earlier process were entered.
    is_watched: AtomicBool,
    lost_blocks: AtomicU64,
    verifying: AtomicU64,
    /// Notified when a scan has ended.
    scanned: Notify,
    incomplete: OnceLock<String>,
    /// Number of calls of [`ShuffleLedger::mark_all_unverified`].
    alarms: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    partitions: HashMap<PartitionId, Ledger>,
    /// Set for a shuffle of an earlier process. Partitions without a ledger are then empty if true,
    /// or have blocks at most in remote files if false. `None` for a shuffle of this process.
    others_are_empty: Option<bool>,
}

impl ShuffleLedger {
    /// Creates a table without partitions, whose ids are charged to `heap`.
    #[must_use]
    pub fn new(heap: &Budget) -> Self {
        Self {
            heap: heap.clone(),
            state: Mutex::default(),
            is_watched: AtomicBool::default(),
            lost_blocks: AtomicU64::default(),
            verifying: AtomicU64::default(),
            scanned: Notify::default(),
            incomplete: OnceLock::default(),
            alarms: AtomicU64::default(),
        }
    }

    /// Returns the budget to which ids are charged.
    pub fn heap(&self) -> &Budget {
        &self.heap
    }

    /// Enters the blocks of an earlier process. `is_all` is false if remote files may have further
    /// blocks.
    pub fn take_over(&self, blocks: PresentIds, is_all: bool) {
        let mut state = self.state.lock();
        state.others_are_empty = Some(is_all);
        let recovered = |(id, blocks)| (id, Ledger::recovered(&self.heap, blocks, is_all));
        state.partitions = blocks.charged_to(&self.heap).map(recovered).collect();
        self.is_watched.store(true, Ordering::Release);
    }

    /// Runs `act` on a partition's ledger, under a lock. The ledger is stored unless its phase is
    /// then [`LedgerPhase::Known`].
    pub fn with<T>(&self, partition: PartitionId, act: impl FnOnce(&mut Ledger) -> T) -> T {
        let sizes = |it: &Ledger| {
            (it.lost_blocks(), u64::from(it.phase() == LedgerPhase::Verifying), it.is_scanning())
        };
        let mut state = self.state.lock();
        let known = state.partitions.remove(&partition);
        let recovered = |is_all| Ledger::recovered(&self.heap, Some(HeldIds::new(&self.heap)), is_all);
        let unknown = || state.others_are_empty.map_or_else(|| Ledger::new(&self.heap), recovered);
        let mut ledger = known.unwrap_or_else(unknown);
        let before = sizes(&ledger);
        let done = act(&mut ledger);
        let after = sizes(&ledger);
        if ledger.phase() != LedgerPhase::Known {
            state.partitions.insert(partition, ledger);
            self.is_watched.store(true, Ordering::Release);
        }
        self.lost_blocks.fetch_add(after.0.wrapping_sub(before.0), Ordering::Release);
        self.verifying.fetch_add(after.1.wrapping_sub(before.1), Ordering::Release);
        drop(state);
        if before.2 && !after.2 {
            self.scanned.notify_waiters();
        }
        done
    }

    /// Marks all blocks of a partition as unverified. Returns like [`Ledger::mark_unverified`].
    pub fn mark_all_unverified(&self, partition: PartitionId) -> bool {
        self.alarms.fetch_add(1, Ordering::AcqRel);
        self.with(partition, |it| it.mark_unverified(None))
    }

    /// Returns the number of calls of [`ShuffleLedger::mark_all_unverified`].
    pub fn alarms(&self) -> u64 {
        self.alarms.load(Ordering::Acquire)
    }

    /// Returns whether ledgers must be informed of commits and reports.
    pub fn is_watched(&self) -> bool {
        self.is_watched.load(Ordering::Acquire)
    }

    /// Returns the number of lost blocks.
    pub fn lost_blocks(&self) -> u64 {
        self.lost_blocks.load(Ordering::Acquire)
    }

    /// Returns the number of partitions that are being verified.
    pub fn verifying(&self) -> u64 {
        self.verifying.load(Ordering::Acquire)
    }

    /// Waits until a partition is verified, or a scan has failed.
    pub async fn scanned(&self, partition: PartitionId) {
        loop {
            let scanned = self.scanned.notified();
            let is_scanning =
                || self.state.lock().partitions.get(&partition).is_some_and(Ledger::is_scanning);
            if self.verifying() == 0 || !is_scanning() {
                return;
            }
            scanned.await;
        }
    }

    /// Returns the decision about a read, see [`Ledger::availability`]. `wanted` runs under the
    /// lock.
    pub fn availability(&self, partition: PartitionId, wanted: impl Fn(&IdSet) -> IdSet) -> Availability {
        if self.lost_blocks() == 0 && self.verifying() == 0 {
            return Availability::Serve;
        }
        let state = self.state.lock();
        state.partitions.get(&partition).map_or(Availability::Serve, |ledger| ledger.availability(wanted))
    }

    /// Returns all losses whose ids are listed.
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

    /// Notes that reports may be missing, with the reason. The first reason stays.
    pub fn mark_incomplete(&self, reason: String) {
        let _ = self.incomplete.set(reason);
    }

    /// Returns the reason why reports may be missing.
    pub fn incomplete(&self) -> Option<&str> {
        self.incomplete.get().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::loss::LossCause;
    use super::*;
    use crate::ledger::partition::ScanResult;

    const P: PartitionId = PartitionId(3);
    const OTHER: PartitionId = PartitionId(4);

    fn scan(heap: &Budget, found: &[u64], missing: &[u64]) -> ScanResult {
        let mut held = HeldIds::new(heap);
        assert!(held.add(found));
        ScanResult { found: Some(held), missing: missing.to_vec(), more_missing: 0 }
    }

    fn cause() -> LossCause {
        LossCause { extents: Vec::new(), reason: Arc::from("disk /a is missing"), at_ms: 7 }
    }

    #[test]
    fn counters_follow_the_ledgers() {
        let heap = Budget::new(1 << 20);
        let shuffle = ShuffleLedger::new(&heap);
        let commit = |id, ids: &[u64]| shuffle.with(id, |it| it.commit(ids));
        assert_eq!((commit(P, &[1]), shuffle.is_watched()), (0, false), "a commit alone creates no ledger");
        assert!(shuffle.state.lock().partitions.is_empty());
        assert_eq!(shuffle.with(P, |it| it.enter(&[1, 2, 9], &cause())).losses.len(), 1);
        assert!(shuffle.with(OTHER, |it| it.mark_unverified(None) && !it.mark_unverified(None)));
        assert_eq!((shuffle.lost_blocks(), shuffle.verifying(), shuffle.losses().len()), (3, 1, 1));
        assert_eq!(shuffle.availability(OTHER, IdSet::clone), Availability::Wait(None));
        let new = shuffle.with(OTHER, |it| {
            it.begin_scan();
            it.resolve(scan(&heap, &[], &[7]), &cause())
        });
        assert_eq!((new.unwrap().losses.len(), shuffle.lost_blocks(), shuffle.verifying()), (1, 4, 0));
        assert_eq!((commit(P, &[1, 2, 9]), commit(OTHER, &[1, 7])), (3, 1));
        assert_eq!((shuffle.lost_blocks(), shuffle.losses()), (0, Vec::new()));
    }

    #[tokio::test]
    async fn blocks_of_remote_files_are_unverified_until_scanned() {
        let heap = Budget::new(1 << 20);
        let shuffle = ShuffleLedger::new(&heap);
        let mut recovered = PresentIds::new(&heap);
        recovered.add(P, &[1, 2]);
        shuffle.take_over(recovered, false);
        let ids = [1, 3, 4];
        let mark_unverified = |id, ids: &[u64]| shuffle.with(id, |it| it.verify_if_unknown(ids));
        assert!(!mark_unverified(P, &[1]) && mark_unverified(P, &ids));
        assert_eq!(
            shuffle.availability(P, IdSet::clone),
            Availability::Serve,
            "the report may still be refused"
        );
        drop(shuffle.with(P, Ledger::begin_scan));
        let mut waiting = std::pin::pin!(shuffle.scanned(P));
        assert!(futures::poll!(&mut waiting).is_pending());
        shuffle.scanned(OTHER).await;
        shuffle.with(P, Ledger::fail_scan);
        waiting.await;
        assert_eq!(shuffle.with(P, |it| it.acknowledge(&ids)), Ok(false));
        assert_eq!(shuffle.availability(P, IdSet::clone), Availability::Wait(Some(2)));
        let new = shuffle.with(P, |it| {
            it.begin_scan();
            it.resolve(scan(&heap, &[3], &[]), &cause())
        });
        assert_eq!(new.unwrap().losses[0].ids, IdSet::from([4]));
        assert_eq!(shuffle.with(P, |it| it.acknowledge(&[2, 3, 5])), Err(vec![5]));
        assert!(mark_unverified(OTHER, &ids), "the partition may have blocks in remote files");
    }
}
