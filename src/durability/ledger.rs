//! The ledger of one partition: which of its acknowledged blocks can be read, and which are lost, by id.
//!
//! ```text
//! Known ──begin_count, mark_unverified, mark_damaged──▶ Verifying ──▶ Complete | Lossy
//!   all that this process acknowledged is there              ▲              │ │ ▲
//!                                                            └──────────────┘ └─┘ lose, commit
//! ```
//!
//! While it is *verifying* nothing is called missing by a count that has not ended, and a read of what is not known yet
//! waits. A block that is committed (again) is there from then on, whatever else is known: also if it was counted before.
//! Pure: no lock, no clock, no I/O; who counts, and how reads are answered, is `service`'s.

use croaring::Treemap;

/// How much is known of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Nothing of it was ever in question.
    Known,
    /// What is there is being found out.
    Verifying,
    /// It is known, and nothing is lost.
    Complete,
    /// It is known, and some is lost.
    Lossy,
}

/// See the module. The default is a partition of which nothing was ever in question.
#[derive(Debug, Default)]
pub struct Ledger {
    /// Blocks that can be read; none = whatever was acknowledged.
    present: Option<Treemap>,
    /// Commits since a count has begun.
    meanwhile: Option<Treemap>,
    /// A count has come to its end.
    is_counted: bool,
    /// Reported blocks that are in remote files or nowhere.
    unverified: Treemap,
    /// An extent is damaged, and it is not known yet which blocks it had.
    is_damaged: bool,
    lost: Treemap,
}

impl Ledger {
    /// One of which an earlier process left these blocks.
    #[must_use]
    pub fn left(present: Treemap) -> Self {
        Self { present: Some(present), ..Self::default() }
    }

    /// How much is known.
    #[must_use]
    pub fn phase(&self) -> Phase {
        let is_verifying = self.meanwhile.is_some() || self.is_damaged || !self.unverified.is_empty();
        match (is_verifying, self.lost.is_empty(), &self.present) {
            (true, ..) => Phase::Verifying,
            (false, false, _) => Phase::Lossy,
            (false, true, Some(_)) => Phase::Complete,
            (false, true, None) => Phase::Known,
        }
    }

    /// Its blocks are about to be counted: what is committed meanwhile is there.
    pub fn begin_count(&mut self) {
        self.meanwhile.get_or_insert_default();
    }

    /// A count came to nothing; true when it had begun.
    pub fn abandon_count(&mut self) {
        self.meanwhile = None;
    }

    /// These blocks were found, and those that were committed meanwhile.
    pub fn end_count(&mut self, mut found: Treemap) {
        if let Some(meanwhile) = self.meanwhile.take() {
            found.or_inplace(&meanwhile);
        }
        self.present = Some(found);
        self.is_counted = true;
    }

    /// Whether a count has come to its end.
    #[must_use]
    pub fn is_counted(&self) -> bool {
        self.is_counted
    }

    /// Those of `ids` that no count has found yet and none was looked for in remote files.
    #[must_use]
    pub fn uncounted(&self, ids: &Treemap) -> Treemap {
        match &self.present {
            _ if self.is_counted => Treemap::new(),
            Some(present) => ids.andnot(present),
            None => ids.clone(),
        }
    }

    /// Those of `ids` that are nowhere. Nothing is while it is being counted.
    #[must_use]
    pub fn missing(&self, ids: &Treemap) -> Treemap {
        match &self.present {
            Some(present) if self.meanwhile.is_none() => ids.andnot(present),
            Some(_) | None => Treemap::new(),
        }
    }

    /// Blocks are in remote files or nowhere; true when none was so before.
    pub fn mark_unverified(&mut self, ids: &Treemap) -> bool {
        let is_first = self.unverified.is_empty();
        self.unverified.or_inplace(ids);
        is_first
    }

    /// These were counted, and the lost ones entered; true when none is unverified any more.
    pub fn mark_verified(&mut self, ids: &Treemap) -> bool {
        self.unverified.andnot_inplace(ids);
        self.unverified.is_empty()
    }

    /// Blocks in remote files or nowhere.
    #[must_use]
    pub fn unverified(&self) -> &Treemap {
        &self.unverified
    }

    /// Whether it has damage whose blocks are not known yet.
    pub fn set_damaged(&mut self, is_damaged: bool) {
        self.is_damaged = is_damaged;
    }

    /// See [`Ledger::set_damaged`].
    #[must_use]
    pub fn is_damaged(&self) -> bool {
        self.is_damaged
    }

    /// Enters `ids` as lost; returns those that were not.
    pub fn lose(&mut self, ids: &Treemap) -> Treemap {
        let new = ids.andnot(&self.lost);
        self.lost.or_inplace(&new);
        if let Some(present) = &mut self.present {
            present.andnot_inplace(&new);
        }
        new
    }

    /// Blocks are in a tier (again); returns how many were lost until now.
    pub fn commit(&mut self, ids: &[u64]) -> u64 {
        for set in self.present.iter_mut().chain(&mut self.meanwhile) {
            ids.iter().for_each(|id| set.add(*id));
        }
        ids.iter().filter(|id| self.lost.remove_checked(**id)).count() as u64
    }

    /// Lost blocks.
    #[must_use]
    pub fn lost(&self) -> &Treemap {
        &self.lost
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Step {
        Begin,
        Abandon,
        End,
        Commit(Vec<u64>),
        LoseMissing,
        Unverified(Vec<u64>),
        Verified(Vec<u64>),
        Damaged(bool),
        /// A tier loses blocks; it is found by the next count.
        Vanish(Vec<u64>),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let ids = || prop::collection::vec(0u64..12, 0..5);
        let step = prop_oneof![
            Just(Step::Begin),
            Just(Step::Abandon),
            Just(Step::End),
            ids().prop_map(Step::Commit),
            Just(Step::LoseMissing),
            ids().prop_map(Step::Unverified),
            ids().prop_map(Step::Verified),
            any::<bool>().prop_map(Step::Damaged),
            ids().prop_map(Step::Vanish),
        ];
        prop::collection::vec(step, 0..30)
    }

    fn set(ids: &BTreeSet<u64>) -> Treemap {
        ids.iter().copied().collect()
    }

    proptest! {
        #[test]
        fn what_is_committed_is_never_called_lost_and_what_a_count_missed_always_is(
            left: Option<BTreeSet<u64>>, steps in steps(),
        ) {
            let all: Treemap = (0..12).collect();
            let mut tiers: BTreeSet<u64> = left.iter().flatten().map(|id| id % 12).collect();
            let mut ledger = left.map_or_else(Ledger::default, |_| Ledger::left(set(&tiers)));
            let mut looked: Option<BTreeSet<u64>> = None;
            for step in steps {
                match step {
                    Step::Begin => {
                        ledger.begin_count();
                        looked = Some(tiers.clone());
                    }
                    Step::Abandon => {
                        ledger.abandon_count();
                        looked = None;
                    }
                    Step::End => {
                        if let Some(found) = looked.take() {
                            ledger.end_count(set(&found));
                            // Exactly what was there at the look or came since.
                            let present = all.andnot(&ledger.missing(&all));
                            prop_assert!(set(&found).is_subset(&present));
                            prop_assert!(ledger.is_counted());
                        }
                    }
                    Step::Commit(ids) => {
                        let before = ledger.lost().cardinality();
                        let healed = ledger.commit(&ids);
                        prop_assert_eq!(before - healed, ledger.lost().cardinality());
                        tiers.extend(&ids);
                        let ids: Treemap = ids.into_iter().collect();
                        prop_assert!(ledger.missing(&ids).is_empty() && ledger.lost().and(&ids).is_empty());
                    }
                    Step::LoseMissing => {
                        let missing = ledger.missing(&all);
                        let before = ledger.lost().clone();
                        let new = ledger.lose(&missing);
                        prop_assert_eq!(&new, &missing.andnot(&before));
                        prop_assert!(missing.is_subset(ledger.lost()));
                    }
                    Step::Unverified(ids) => {
                        let was_empty = ledger.unverified().is_empty();
                        let ids: Treemap = ids.into_iter().collect();
                        prop_assert_eq!(ledger.mark_unverified(&ids), was_empty);
                    }
                    Step::Verified(ids) => {
                        let done = ledger.mark_verified(&ids.into_iter().collect());
                        prop_assert_eq!(done, ledger.unverified().is_empty());
                    }
                    Step::Damaged(is_damaged) => ledger.set_damaged(is_damaged),
                    Step::Vanish(ids) => ids.iter().for_each(|id| {
                        tiers.remove(id);
                    }),
                }
                let is_verifying = looked.is_some() || ledger.is_damaged() || !ledger.unverified().is_empty();
                prop_assert_eq!(ledger.phase() == Phase::Verifying, is_verifying);
                if ledger.phase() == Phase::Complete || ledger.phase() == Phase::Known {
                    prop_assert!(ledger.lost().is_empty());
                }
                if looked.is_some() {
                    prop_assert!(ledger.missing(&all).is_empty(), "nothing is missing while it is counted");
                }
            }
        }
    }
}
