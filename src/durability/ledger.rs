//! The ledger of one partition: which of its acknowledged blocks can be read, and which are lost, by id.
//!
//! ```text
//! Known ──question──▶ Verifying ──settle──▶ Complete | Lossy
//!   all that this process acknowledged is there   ▲             │ │ ▲
//!                                                 └──question───┘ └─┘ enter, commit
//! ```
//!
//! While it is *verifying* one caller looks which blocks there are ([`Ledger::question`] says who), and what is in question
//! is neither served nor called lost. A block that is committed (again) is there from then on, whatever the look has found.
//! Pure: no lock, no clock, no I/O. [`super::ShuffleLedger`] shares those of a shuffle; who looks, and how reads are
//! answered, is `service`'s.

use std::sync::Arc;

use uniffle_wire::types::{BlockId, PartitionId};

use super::id_set::IdSet;

/// Ranges of ids listed of one loss.
const RANGES_MAX: usize = 16;

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

/// Where a partition stands in the picture above. The default is a partition of which nothing was ever in question.
#[derive(Debug, Default)]
pub struct Ledger {
    there: There,
    verifying: Option<Verifying>,
    losses: Vec<Loss>,
}

/// Blocks that can be read.
#[derive(Debug, Default)]
enum There {
    /// Whatever was acknowledged.
    #[default]
    All,
    /// These, and perhaps more that an earlier process left in remote files.
    AtLeast(IdSet),
    /// These.
    Exactly(IdSet),
}

/// A look at the tiers, under way or to be repeated.
#[derive(Debug, Default)]
struct Verifying {
    /// Something that was there cannot be read any more: every block is in question.
    is_all: bool,
    /// Acknowledged blocks that are not known to be there.
    asked: IdSet,
    /// Committed since the look began.
    meanwhile: IdSet,
    /// More could not be read since the look began.
    is_stale: bool,
    /// The last look came to nothing; it is repeated later.
    has_failed: bool,
}

/// Blocks that were lost together.
#[derive(Debug, Clone, PartialEq)]
pub struct Loss {
    /// Those that are still lost.
    pub ids: IdSet,
    /// Their bytes when they were lost, if known.
    pub bytes: Option<u64>,
    /// The disk or the event.
    pub reason: Arc<str>,
    /// When it was found out, in milliseconds since 1970.
    pub at_ms: u64,
}

/// An extent whose data is gone.
#[derive(Debug, Clone)]
pub struct LostExtent {
    /// Its partition.
    pub partition: PartitionId,
    /// Its blocks and their lengths.
    pub blocks: Vec<(BlockId, u32)>,
    /// What is wrong.
    pub reason: Arc<str>,
}

/// Why blocks that are nowhere are lost.
#[derive(Debug, Clone)]
pub struct Blame {
    /// Extents of which it is known.
    pub extents: Vec<LostExtent>,
    /// For all others.
    pub reason: Arc<str>,
    /// When that was found out.
    pub at_ms: u64,
}

/// How a read of a partition is to be answered.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// What it wants is there.
    Serve,
    /// It is not known yet whether so many blocks are there; none = any of them.
    Wait(Option<u64>),
    /// It wants these, which are lost for this reason.
    Lost(IdSet, Arc<str>),
}

impl Ledger {
    /// One of which an earlier process left these blocks: all that there are, or there may be more in remote files.
    #[must_use]
    pub fn left(blocks: IdSet, is_all: bool) -> Self {
        let there = if is_all { There::Exactly(blocks) } else { There::AtLeast(blocks) };
        Self { there, ..Self::default() }
    }

    /// How much is known.
    #[must_use]
    pub fn phase(&self) -> Phase {
        match (&self.verifying, self.losses.is_empty(), &self.there) {
            (Some(_), ..) => Phase::Verifying,
            (None, false, _) => Phase::Lossy,
            (None, true, There::All) => Phase::Known,
            (None, true, There::AtLeast(_) | There::Exactly(_)) => Phase::Complete,
        }
    }

    /// These acknowledged blocks, or all, are in question. True for the caller that has to look; false when another does,
    /// who looks once more if all are in question.
    pub fn question(&mut self, ids: Option<&IdSet>) -> bool {
        let is_first = self.verifying.is_none();
        let verifying = self.verifying.get_or_insert_default();
        match ids {
            Some(ids) => verifying.asked.add_all(ids),
            None => (verifying.is_all, verifying.is_stale) = (true, true),
        }
        is_first
    }

    /// The tiers are looked at from now on: what is committed meanwhile is there.
    pub fn begin_look(&mut self) {
        let verifying = self.verifying.get_or_insert_default();
        verifying.meanwhile = IdSet::default();
        (verifying.is_stale, verifying.has_failed) = (false, false);
    }

    /// The look came to nothing. What is in question stays so until the next one.
    pub fn fail_look(&mut self) {
        if let Some(verifying) = &mut self.verifying {
            verifying.has_failed = true;
        }
    }

    /// Whether a look is under way, or about to be.
    #[must_use]
    pub fn is_looking(&self) -> bool {
        self.verifying.as_ref().is_some_and(|verifying| !verifying.has_failed)
    }

    /// The look has `found` these blocks: those of `reported` and of what is in question that are nowhere are lost. What
    /// was not lost before, or none when it has to be looked again.
    pub fn settle(&mut self, mut found: IdSet, reported: &IdSet, blame: &Blame) -> Option<Vec<Loss>> {
        let Verifying { is_all, asked, meanwhile, .. } = self.verifying.take_if(|it| !it.is_stale)?;
        found.add_all(&meanwhile);
        if let (There::AtLeast(known) | There::Exactly(known), false) = (&self.there, is_all) {
            found.add_all(known);
        }
        let mut missing = reported.minus(&found);
        missing.add_all(&asked.minus(&found));
        self.there = There::Exactly(found);
        Some(self.enter(missing, blame))
    }

    /// Those of `ids` that are not known to be there, and whether it is known that they are nowhere.
    fn absent(&self, ids: &IdSet) -> (IdSet, bool) {
        match (&self.there, &self.verifying) {
            (_, Some(Verifying { is_all: true, .. })) => (ids.clone(), false),
            (There::All, _) => (IdSet::default(), true),
            (There::AtLeast(there), _) => (ids.minus(there), false),
            (There::Exactly(there), _) => (ids.minus(there), true),
        }
    }

    /// Begins to verify if it is not known whether `ids` are there; as [`Ledger::question`].
    pub fn question_unknown(&mut self, ids: &IdSet) -> bool {
        let (absent, is_known) = self.absent(ids);
        !is_known && !absent.is_empty() && self.question(Some(&IdSet::default()))
    }

    /// `ids` are acknowledged, and in question from now on as far as they are not known to be there; as
    /// [`Ledger::question`].
    ///
    /// # Errors
    /// Those of `ids` that are nowhere; nothing is acknowledged then.
    pub fn acknowledge(&mut self, ids: &IdSet) -> Result<bool, IdSet> {
        match self.absent(ids) {
            (absent, _) if absent.is_empty() => Ok(false),
            (absent, true) => Err(absent),
            (absent, false) => Ok(self.question(Some(&absent))),
        }
    }

    /// Enters blocks as lost; what was not lost before.
    pub fn enter(&mut self, ids: IdSet, blame: &Blame) -> Vec<Loss> {
        let mut left = ids;
        for loss in &self.losses {
            left.remove_all(&loss.ids);
        }
        if let There::AtLeast(there) | There::Exactly(there) = &mut self.there {
            there.remove_all(&left);
        }
        let mut new = Vec::new();
        let at_ms = blame.at_ms;
        for LostExtent { blocks, reason, .. } in &blame.extents {
            let mut lost = left.lookup();
            let here: Vec<_> = blocks.iter().filter(|(id, _)| lost.contains(id.0.unsigned_abs())).collect();
            let bytes = Some(here.iter().map(|(_, length)| u64::from(*length)).sum());
            let ids: IdSet = here.iter().map(|(id, _)| id.0.unsigned_abs()).collect();
            left.remove_all(&ids);
            new.push(Loss { ids, bytes, reason: Arc::clone(reason), at_ms });
        }
        new.push(Loss { ids: left, bytes: None, reason: Arc::clone(&blame.reason), at_ms });
        new.retain(|loss| !loss.ids.is_empty());
        new.iter().for_each(|loss| self.add(loss));
        new
    }

    fn add(&mut self, loss: &Loss) {
        match self.losses.iter_mut().find(|known| known.reason == loss.reason) {
            Some(known) => {
                known.ids.add_all(&loss.ids);
                known.bytes = known.bytes.zip(loss.bytes).map(|(known, more)| known + more);
            }
            None => self.losses.push(loss.clone()),
        }
    }

    /// Blocks are in a tier (again); returns how many were lost until now.
    pub fn commit(&mut self, ids: &[u64]) -> u64 {
        let there = match &mut self.there {
            There::All => None,
            There::AtLeast(there) | There::Exactly(there) => Some(there),
        };
        let ids: IdSet = ids.iter().copied().collect();
        if let Some(there) = there {
            there.add_all(&ids);
        }
        if let Some(verifying) = &mut self.verifying {
            verifying.meanwhile.add_all(&ids);
        }
        let healed = self.losses.iter_mut().map(|loss| loss.ids.remove_all(&ids)).sum();
        self.losses.retain(|loss| !loss.ids.is_empty());
        healed
    }

    /// How a read is answered that wants those blocks which `wanted` chooses.
    pub fn verdict(&self, wanted: impl Fn(&IdSet) -> IdSet) -> Verdict {
        if self.verifying.as_ref().is_some_and(|verifying| verifying.is_all) {
            return Verdict::Wait(None);
        }
        let mut lost = IdSet::default();
        let mut reason = None;
        for loss in &self.losses {
            let ids = wanted(&loss.ids);
            if !ids.is_empty() {
                lost.add_all(&ids);
                reason.get_or_insert(&loss.reason);
            }
        }
        if let Some(reason) = reason {
            return Verdict::Lost(lost, Arc::clone(reason));
        }
        match self.verifying.as_ref().map_or(0, |verifying| wanted(&verifying.asked).len()) {
            0 => Verdict::Serve,
            unknown => Verdict::Wait(Some(unknown)),
        }
    }

    /// What is lost, by reason.
    #[must_use]
    pub fn losses(&self) -> &[Loss] {
        &self.losses
    }

    /// How many blocks that is.
    #[must_use]
    pub fn lost_blocks(&self) -> u64 {
        self.losses.iter().map(|loss| loss.ids.len()).sum()
    }
}

/// The first ranges of consecutive ids.
#[must_use]
pub fn ranges(ids: &IdSet) -> Vec<(i64, i64)> {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for id in ids.iter() {
        let full = ranges.len() == RANGES_MAX;
        match ranges.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(id) => *last = id,
            _ if full => break,
            _ => ranges.push((id, id)),
        }
    }
    ranges.into_iter().map(|(first, last)| (first.cast_signed(), last.cast_signed())).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    type Ids = BTreeSet<u64>;

    #[derive(Debug, Clone)]
    enum Step {
        Look,
        Fail,
        Settle,
        Commit(Ids),
        Report(Ids),
        /// A tier cannot read blocks any more, and says so.
        Vanish(Ids),
    }

    fn ids() -> impl Strategy<Value = Ids> {
        prop::collection::btree_set(0u64..12, 0..5)
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            Just(Step::Look),
            Just(Step::Fail),
            Just(Step::Settle),
            ids().prop_map(Step::Commit),
            ids().prop_map(Step::Report),
            ids().prop_map(Step::Vanish),
        ];
        prop::collection::vec(step, 0..30)
    }

    fn set(ids: &Ids) -> IdSet {
        ids.iter().copied().collect()
    }

    fn blame(reason: &str) -> Blame {
        Blame { extents: Vec::new(), reason: Arc::from(reason), at_ms: 7 }
    }

    /// The ledger beside what is true, and a caller that looks as it is told.
    struct Model {
        ledger: Ledger,
        there: Ids,
        acknowledged: Ids,
        /// What the look under way has found.
        look: Option<Ids>,
        has_looker: bool,
    }

    impl Model {
        /// `left` by an earlier process: acknowledged blocks, those on local disks and those in remote files.
        fn new(left: Option<(Ids, Ids, Ids)>, has_remote: bool) -> Self {
            let Some((acknowledged, local, remote)) = left else {
                let none = Ids::new;
                let ledger = Ledger::default();
                return Self { ledger, there: none(), acknowledged: none(), look: None, has_looker: false };
            };
            let mut ledger = Ledger::left(set(&local), !has_remote);
            let remote = if has_remote { remote } else { Ids::new() };
            let has_looker = ledger.acknowledge(&set(&acknowledged)).unwrap_or_else(|missing| {
                ledger.enter(missing, &blame("killed"));
                false
            });
            Self { ledger, there: &local | &remote, acknowledged, look: None, has_looker }
        }

        fn question(&mut self, ids: Option<&IdSet>) {
            assert_eq!(self.ledger.question(ids), !self.has_looker, "exactly one looks");
            self.has_looker = true;
        }

        fn step(&mut self, step: Step) {
            match step {
                Step::Look if self.has_looker => {
                    self.ledger.begin_look();
                    self.look = Some(self.there.clone());
                }
                Step::Fail if self.look.take().is_some() => {
                    self.ledger.fail_look();
                    assert!(!self.ledger.is_looking());
                }
                Step::Settle => self.settle(),
                Step::Look | Step::Fail => {}
                Step::Commit(ids) => {
                    let before = self.ledger.lost_blocks();
                    let list: Vec<u64> = ids.iter().copied().collect();
                    assert_eq!(self.ledger.commit(&list), before - self.ledger.lost_blocks());
                    self.there.extend(ids);
                }
                Step::Report(ids) => match self.ledger.acknowledge(&set(&ids)) {
                    Err(missing) => {
                        assert!(missing.iter().all(|id| ids.contains(&id) && !self.there.contains(&id)));
                    }
                    Ok(is_first) => {
                        assert!(!(is_first && self.has_looker), "exactly one looks");
                        self.has_looker |= is_first;
                        // Tasks report what they have sent.
                        let is_sent = |id: &&u64| self.has_looker || self.there.contains(id);
                        self.acknowledged.extend(ids.iter().filter(is_sent));
                    }
                },
                Step::Vanish(ids) => {
                    self.question(None);
                    self.there.retain(|id| !ids.contains(id));
                    self.question(None);
                }
            }
        }

        fn settle(&mut self) {
            let Some(found) = self.look.take() else { return };
            let before = self.ledger.lost_blocks();
            match self.ledger.settle(set(&found), &set(&self.acknowledged), &blame("disk")) {
                None => self.look = None,
                Some(new) => {
                    let new: u64 = new.iter().map(|loss| loss.ids.len()).sum();
                    assert_eq!(self.ledger.lost_blocks(), before + new);
                    assert_ne!(self.ledger.phase(), Phase::Verifying);
                    self.has_looker = false;
                }
            }
        }

        fn check(&self) {
            assert_eq!(self.ledger.phase() == Phase::Verifying, self.has_looker);
            assert_eq!(
                self.ledger.phase() == Phase::Lossy,
                !self.has_looker && self.ledger.lost_blocks() > 0
            );
            for id in &self.acknowledged {
                let verdict = self.ledger.verdict(|ids| ids.and(&IdSet::from([*id])));
                match (self.there.contains(id), self.has_looker, &verdict) {
                    (false, _, Verdict::Serve) => panic!("{id} is not there, and no read hears of it"),
                    (false, false, Verdict::Wait(_)) => panic!("no one looks for {id}"),
                    (true, _, Verdict::Lost(..)) => panic!("{id} is there and called lost"),
                    (true, false, Verdict::Wait(_)) => panic!("{id} is waited for forever"),
                    _ => {}
                }
            }
        }
    }

    proptest! {
        /// No acknowledged block that is gone is ever served as if it were there, and none that is there is called lost.
        #[test]
        fn what_is_gone_is_told_and_what_is_there_is_served(
            left: Option<(u16, u16, u16)>, has_remote: bool, steps in steps(),
        ) {
            let ids = |bits: u16| (0..12).filter(|n| bits >> n & 1 == 1).collect::<Ids>();
            let left = left.map(|(acknowledged, local, remote)| (ids(acknowledged), ids(local), ids(remote)));
            let mut model = Model::new(left, has_remote);
            model.check();
            for step in steps {
                model.step(step);
                model.check();
            }
            if model.has_looker {
                model.step(Step::Look);
                model.step(Step::Settle);
                model.check();
                prop_assert!(!model.has_looker);
            }
        }
    }

    #[test]
    fn losses_are_told_by_extent_and_merged_by_reason() {
        let extent = |id: i64, reason: &str| LostExtent {
            partition: PartitionId(1),
            blocks: vec![(BlockId(id), 10), (BlockId(id + 1), 20)],
            reason: Arc::from(reason),
        };
        let mut ledger = Ledger::left(IdSet::default(), true);
        let why =
            Blame { extents: vec![extent(1, "/a"), extent(5, "/b"), extent(3, "/a")], ..blame("killed") };
        let new = ledger.enter(IdSet::from([1, 2, 3, 9]), &why);
        let told: Vec<_> = new.iter().map(|it| (ranges(&it.ids), it.bytes, &*it.reason)).collect();
        assert_eq!(
            told,
            [(vec![(1, 2)], Some(30), "/a"), (vec![(3, 3)], Some(10), "/a"), (vec![(9, 9)], None, "killed")]
        );
        let listed: Vec<_> =
            ledger.losses().iter().map(|it| (ranges(&it.ids), it.bytes, &*it.reason)).collect();
        assert_eq!(listed, [(vec![(1, 3)], Some(40), "/a"), (vec![(9, 9)], None, "killed")]);
        assert!(ledger.enter(IdSet::from([1, 9]), &why).is_empty(), "known already");
        let wants_9 = ledger.verdict(|ids| ids.and(&IdSet::from([9, 10])));
        assert_eq!(wants_9, Verdict::Lost(IdSet::from([9]), Arc::from("killed")));
        assert_eq!(ledger.verdict(|ids| ids.and(&IdSet::from([4]))), Verdict::Serve);
        assert_eq!((ledger.commit(&[3, 4, 9]), ledger.losses().len(), ledger.lost_blocks()), (2, 1, 2));
    }
}
