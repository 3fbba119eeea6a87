//! The loss ledger of a shuffle: blocks that were acknowledged and are in no tier any more.
//!
//! What is known of each partition is its `Ledger`'s; here these are shared, counted, so that to ask costs one load where
//! there is nothing, and listed. Ids are kept exactly, so that reads that do not ask for a lost block are served and a
//! block that is sent again is no longer lost. The entries listed for operators are bounded; beyond the bound losses are
//! only counted.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::SystemTime;

use croaring::Treemap;
use parking_lot::Mutex;

use super::quota::{Quota, Share};
use crate::durability::Ledger;
use uniffle_wire::types::{BlockId, PartitionId};

/// Entries listed of one shuffle.
const ENTRIES_MAX: usize = 256;
/// Ranges of ids listed of one entry.
const RANGES_MAX: usize = 16;

/// A loss as it is listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loss {
    /// The partition.
    pub partition: PartitionId,
    /// Lost blocks.
    pub blocks: u64,
    /// Closed ranges of their ids, the first ones.
    pub ranges: Vec<(BlockId, BlockId)>,
    /// Their bytes when they were lost, if known.
    pub bytes: Option<u64>,
    /// The disk or the event.
    pub reason: Arc<str>,
    /// When it was found out.
    pub at: SystemTime,
}

#[derive(Debug)]
struct Entry {
    partition: PartitionId,
    ids: Treemap,
    bytes: Option<u64>,
    reason: Arc<str>,
    at: SystemTime,
}

/// Losses of one shuffle. Without any, asking costs one load.
#[derive(Debug)]
pub struct Losses {
    state: Mutex<State>,
    /// Lost ids, so that readers need no lock to find none.
    lost: AtomicU64,
    watched: AtomicBool,
    /// Partitions with unverified blocks, likewise.
    unverified_count: AtomicU64,
    /// Partitions with damage whose blocks are not known yet, likewise.
    damaged_count: AtomicUsize,
    incomplete: OnceLock<String>,
    /// Held while counting: two counts at once would not see what is committed during the other.
    turn: tokio::sync::Mutex<()>,
}

#[derive(Debug)]
struct State {
    /// Every partition is watched: one without a ledger has nothing.
    whole: bool,
    /// An earlier process may have left blocks in remote files, which are not known before they are counted.
    left_remote: bool,
    partitions: HashMap<PartitionId, Ledger>,
    entries: Vec<Entry>,
    /// What the entries take of the bound for all shuffles.
    share: Share,
}

impl State {
    fn ledger(&mut self, partition: PartitionId) -> &mut Ledger {
        let whole = self.whole;
        let new = || if whole { Ledger::left(Treemap::new()) } else { Ledger::default() };
        self.partitions.entry(partition).or_insert_with(new)
    }
}

impl Losses {
    pub(super) fn new(entries: &Quota) -> Self {
        let state = State {
            whole: false,
            left_remote: false,
            partitions: HashMap::new(),
            entries: Vec::new(),
            share: entries.share(),
        };
        Self {
            state: Mutex::new(state),
            lost: AtomicU64::new(0),
            watched: AtomicBool::new(false),
            unverified_count: AtomicU64::new(0),
            damaged_count: AtomicUsize::new(0),
            incomplete: OnceLock::new(),
            turn: tokio::sync::Mutex::new(()),
        }
    }

    /// The shuffle was taken over from an earlier process with these blocks readable. From now on blocks are counted.
    pub fn watch(&self, present: HashMap<PartitionId, Treemap>) {
        let mut state = self.state.lock();
        state.whole = true;
        state.partitions = present.into_iter().map(|(id, present)| (id, Ledger::left(present))).collect();
        drop(state);
        self.watched.store(true, Ordering::Release);
    }

    /// There may be more, in remote files, that only a count of each partition finds.
    pub fn expect_remote(&self) {
        self.state.lock().left_remote = true;
    }

    /// Waits until no other count runs.
    pub async fn turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.turn.lock().await
    }

    /// The caller, whose turn it is, is about to count the blocks of a partition: what is committed meanwhile is added.
    /// A count that is dropped comes to nothing.
    pub fn begin_count(&self, partition: PartitionId) -> Count<'_> {
        self.state.lock().ledger(partition).begin_count();
        self.watched.store(true, Ordering::Release);
        Count { losses: self, partition }
    }

    /// Those of `ids` that only remote files can have, which were not searched yet.
    #[must_use]
    pub fn uncounted(&self, partition: PartitionId, ids: &Treemap) -> Treemap {
        let state = self.state.lock();
        match state.partitions.get(&partition) {
            _ if !state.left_remote => Treemap::new(),
            Some(ledger) => ledger.uncounted(ids),
            None => ids.clone(),
        }
    }

    /// Whether a count of the partition has come to its end.
    #[must_use]
    pub fn is_counted(&self, partition: PartitionId) -> bool {
        self.state.lock().partitions.get(&partition).is_some_and(Ledger::is_counted)
    }

    /// Reported blocks are unverified; true when none of the partition were.
    pub fn mark_unverified(&self, partition: PartitionId, ids: &Treemap) -> bool {
        let is_first = self.state.lock().ledger(partition).mark_unverified(ids);
        self.unverified_count.fetch_add(u64::from(is_first && !ids.is_empty()), Ordering::Release);
        is_first
    }

    /// Unverified blocks of a partition; none costs no lock.
    #[must_use]
    pub fn unverified(&self, partition: PartitionId) -> Option<Treemap> {
        if self.unverified_partitions() == 0 {
            return None;
        }
        let state = self.state.lock();
        let unverified = state.partitions.get(&partition).map(Ledger::unverified);
        unverified.filter(|ids| !ids.is_empty()).cloned()
    }

    /// These blocks were counted, and the lost ones entered; true when none of the partition is unverified any more.
    pub fn mark_verified(&self, partition: PartitionId, ids: &Treemap) -> bool {
        let mut state = self.state.lock();
        let ledger = state.ledger(partition);
        let had_some = !ledger.unverified().is_empty();
        let is_done = ledger.mark_verified(ids);
        self.unverified_count.fetch_sub(u64::from(had_some && is_done), Ordering::Release);
        is_done
    }

    /// Partitions with unverified blocks.
    #[must_use]
    pub fn unverified_partitions(&self) -> u64 {
        self.unverified_count.load(Ordering::Acquire)
    }

    /// An extent of a partition is found damaged.
    pub fn mark_damaged(&self, partition: PartitionId) {
        let mut state = self.state.lock();
        let ledger = state.ledger(partition);
        self.damaged_count.fetch_add(usize::from(!ledger.is_damaged()), Ordering::Release);
        ledger.set_damaged(true);
    }

    /// The blocks that the damage cost the partition are entered.
    pub fn clear_damaged(&self, partition: PartitionId) {
        let mut state = self.state.lock();
        let ledger = state.ledger(partition);
        self.damaged_count.fetch_sub(usize::from(ledger.is_damaged()), Ordering::Release);
        ledger.set_damaged(false);
    }

    /// Whether a partition has damage whose blocks are not known yet; none such costs no lock.
    #[must_use]
    pub fn is_damaged(&self, partition: PartitionId) -> bool {
        let is_damaged = || self.state.lock().partitions.get(&partition).is_some_and(Ledger::is_damaged);
        self.damaged_count.load(Ordering::Acquire) > 0 && is_damaged()
    }

    /// Whether blocks of it are counted.
    #[must_use]
    pub fn is_watched(&self) -> bool {
        self.watched.load(Ordering::Acquire)
    }

    /// Lost blocks now.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.lost.load(Ordering::Acquire)
    }

    /// Whether [`Losses::committed`] must be called for committed blocks.
    #[must_use]
    pub fn cares(&self) -> bool {
        self.is_watched() || self.count() > 0
    }

    /// Reports may be missing, for this reason.
    pub fn mark_incomplete(&self, reason: String) {
        let _ = self.incomplete.set(reason);
    }

    /// Why reports may be missing, if they may.
    #[must_use]
    pub fn incomplete(&self) -> Option<&str> {
        self.incomplete.get().map(String::as_str)
    }

    /// Those of `ids` that are nowhere. Nothing is missing of a partition that is not watched.
    #[must_use]
    pub fn missing(&self, partition: PartitionId, ids: &Treemap) -> Treemap {
        if !self.is_watched() {
            return Treemap::new();
        }
        let state = self.state.lock();
        match state.partitions.get(&partition) {
            Some(ledger) => ledger.missing(ids),
            None if state.whole => ids.clone(),
            None => Treemap::new(),
        }
    }

    /// Enters `ids` as lost; returns how many are new.
    pub fn lose(&self, partition: PartitionId, ids: &Treemap, bytes: Option<u64>, reason: &Arc<str>) -> u64 {
        let mut state = self.state.lock();
        let new = state.ledger(partition).lose(ids);
        let count = new.cardinality();
        if count == 0 {
            return 0;
        }
        let State { entries, share, .. } = &mut *state;
        self.lost.fetch_add(count, Ordering::Release);
        if entries.len() < ENTRIES_MAX && share.grow(1).is_ok() {
            let (reason, at) = (Arc::clone(reason), SystemTime::now());
            entries.push(Entry { partition, ids: new, bytes, reason, at });
        }
        count
    }

    /// Blocks are in a tier (again); returns how many were lost until now.
    pub fn committed(&self, partition: PartitionId, ids: &[u64]) -> u64 {
        let mut state = self.state.lock();
        if !state.whole && !state.partitions.contains_key(&partition) {
            return 0;
        }
        let healed = state.ledger(partition).commit(ids);
        if healed == 0 {
            return 0;
        }
        let State { entries, share, .. } = &mut *state;
        for entry in entries.iter_mut().filter(|entry| entry.partition == partition) {
            ids.iter().for_each(|id| entry.ids.remove(*id));
        }
        entries.retain(|entry| !entry.ids.is_empty());
        share.shrink_to(entries.len() as u64);
        self.lost.fetch_sub(healed, Ordering::Release);
        healed
    }

    /// The lost ids of a partition; none costs no lock.
    #[must_use]
    pub fn of(&self, partition: PartitionId) -> Option<Treemap> {
        if self.count() == 0 {
            return None;
        }
        let state = self.state.lock();
        state.partitions.get(&partition).map(Ledger::lost).filter(|ids| !ids.is_empty()).cloned()
    }

    /// The entries, and how many lost blocks they leave out.
    #[must_use]
    pub fn list(&self) -> (Vec<Loss>, u64) {
        let state = self.state.lock();
        let entries: Vec<Loss> = state.entries.iter().map(Entry::listed).collect();
        let listed: u64 = entries.iter().map(|loss| loss.blocks).sum();
        (entries, self.count().saturating_sub(listed))
    }

    /// Why a block is lost.
    #[must_use]
    pub fn reason_of(&self, partition: PartitionId, id: u64) -> Option<Arc<str>> {
        let state = self.state.lock();
        let mut entries = state.entries.iter().filter(|entry| entry.partition == partition);
        entries.find(|entry| entry.ids.contains(id)).map(|entry| Arc::clone(&entry.reason))
    }
}

/// A partition that is being counted.
#[derive(Debug)]
pub struct Count<'a> {
    losses: &'a Losses,
    partition: PartitionId,
}

impl Count<'_> {
    /// These blocks are readable, and those that were committed meanwhile.
    pub fn end(self, found: Treemap) {
        self.losses.state.lock().ledger(self.partition).end_count(found);
    }
}

impl Drop for Count<'_> {
    fn drop(&mut self) {
        self.losses.state.lock().ledger(self.partition).abandon_count();
    }
}

impl Entry {
    fn listed(&self) -> Loss {
        let (blocks, reason) = (self.ids.cardinality(), Arc::clone(&self.reason));
        let (partition, bytes, at) = (self.partition, self.bytes, self.at);
        Loss { partition, blocks, ranges: ranges(&self.ids), bytes, reason, at }
    }
}

/// The first ranges of consecutive ids.
#[must_use]
pub fn ranges(ids: &Treemap) -> Vec<(BlockId, BlockId)> {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for id in ids.iter() {
        let full = ranges.len() == RANGES_MAX;
        match ranges.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(id) => *last = id,
            _ if full => break,
            _ => ranges.push((id, id)),
        }
    }
    let block = |id: u64| BlockId(id.cast_signed());
    ranges.into_iter().map(|(first, last)| (block(first), block(last))).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    use super::*;

    const P: PartitionId = PartitionId(3);

    fn set(ids: &[u64]) -> Treemap {
        Treemap::of(ids)
    }

    #[test]
    fn a_block_sent_again_heals_its_entry() {
        let quota = Quota::new(10);
        let losses = Losses::new(&quota);
        let reason: Arc<str> = Arc::from("disk /a is missing");
        assert_eq!(losses.lose(P, &set(&[1, 2, 3, 9]), Some(400), &reason), 4);
        assert_eq!(losses.lose(P, &set(&[3, 9]), None, &reason), 0, "known already");
        let (entries, more) = losses.list();
        assert_eq!((entries.len(), more, entries[0].blocks), (1, 0, 4));
        assert_eq!(entries[0].ranges, [(BlockId(1), BlockId(3)), (BlockId(9), BlockId(9))]);
        assert_eq!(losses.committed(P, &[2, 5]), 1);
        assert_eq!(losses.committed(PartitionId(4), &[1]), 0, "another partition's");
        assert_eq!(losses.of(P), Some(set(&[1, 3, 9])));
        assert_eq!(losses.committed(P, &[1, 3, 9]), 3);
        assert_eq!((losses.count(), losses.list(), quota.used()), (0, (Vec::new(), 0), 0));
    }

    #[test]
    fn entries_are_bounded_and_ids_are_not_forgotten() {
        let quota = Quota::new(2);
        let losses = Losses::new(&quota);
        let reason: Arc<str> = Arc::from("x");
        for id in 0..5 {
            losses.lose(P, &set(&[id]), None, &reason);
        }
        let (entries, more) = losses.list();
        assert_eq!((entries.len(), more, losses.count()), (2, 3, 5));
        drop(losses);
        assert_eq!(quota.used(), 0);
    }

    #[test]
    fn what_may_be_in_remote_files_is_unverified_until_it_is_counted() {
        let losses = Losses::new(&Quota::new(10));
        losses.watch(HashMap::from([(P, set(&[1, 2]))]));
        assert!(losses.uncounted(P, &set(&[3])).is_empty(), "there are no remote files");
        losses.expect_remote();
        losses.committed(P, &[3]);
        assert_eq!(losses.uncounted(P, &set(&[1, 3, 4, 5])), set(&[4, 5]));
        assert!(losses.mark_unverified(P, &set(&[4, 5])) && !losses.mark_unverified(P, &set(&[6])));
        drop(losses.begin_count(P));
        assert_eq!(losses.uncounted(P, &set(&[4])), set(&[4]), "that count came to nothing");
        let count = losses.begin_count(P);
        losses.committed(P, &[7]);
        count.end(set(&[1, 2, 3, 4]));
        assert!(losses.uncounted(P, &set(&[9])).is_empty());
        assert_eq!(losses.missing(P, &set(&[4, 5, 6, 7])), set(&[5, 6]));
        assert_eq!((losses.unverified(P), losses.unverified_partitions()), (Some(set(&[4, 5, 6])), 1));
        assert!(!losses.mark_verified(P, &set(&[4, 5])), "6 came later");
        assert!(losses.mark_verified(P, &set(&[6])));
        assert_eq!((losses.unverified(P), losses.unverified_partitions()), (None, 0));
    }

    #[test]
    fn damage_is_known_until_the_lost_blocks_are_entered() {
        let losses = Losses::new(&Quota::new(10));
        assert!(!losses.is_damaged(P));
        losses.mark_damaged(P);
        losses.mark_damaged(P);
        assert!(losses.is_damaged(P) && !losses.is_damaged(PartitionId(4)));
        losses.clear_damaged(P);
        assert!(!losses.is_damaged(P));
    }

    proptest! {
        /// Lost is what was lost and not committed since; missing is what is neither present nor committed.
        #[test]
        fn ids_are_a_set(
            present in prop::collection::btree_set(0u64..30, 0..20),
            steps in prop::collection::vec((any::<bool>(), prop::collection::btree_set(0u64..30, 0..8)), 0..12),
        ) {
            let losses = Losses::new(&Quota::new(1000));
            losses.watch(HashMap::from([(P, present.iter().copied().collect())]));
            let (mut there, mut lost) = (present, BTreeSet::new());
            for (lose, ids) in steps {
                let list: Vec<u64> = ids.iter().copied().collect();
                if lose {
                    let new = losses.lose(P, &set(&list), None, &Arc::from("y"));
                    prop_assert_eq!(new, ids.difference(&lost).count() as u64);
                    there.retain(|id| !ids.contains(id) || lost.contains(id));
                    lost.extend(ids);
                } else {
                    let healed = losses.committed(P, &list);
                    prop_assert_eq!(healed, ids.intersection(&lost).count() as u64);
                    lost.retain(|id| !ids.contains(id));
                    there.extend(ids);
                }
                prop_assert_eq!(losses.count(), lost.len() as u64);
                prop_assert_eq!(losses.of(P).unwrap_or_default(), lost.iter().copied().collect::<Treemap>());
                let all: Treemap = (0..30).collect();
                let missing: Treemap = (0..30).filter(|id| !there.contains(id)).collect();
                prop_assert_eq!(losses.missing(P, &all), missing);
            }
        }
    }
}
