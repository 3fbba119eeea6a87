//! The ledger of one partition: which of its acknowledged blocks are readable, and which are lost,
//! by id.
//!
//! ```text
//! Known ──question──▶ Verifying ──settle──▶ Complete | Lossy
//!   all that this process acknowledged is there   ▲             │ │ ▲
//!                                                 └──question───┘ └─┘ enter, commit
//! ```
//!
//! While a partition is *verifying*, the caller chosen by [`Ledger::question`] looks for present
//! blocks. Blocks in question are neither served nor reported as lost. A block that is committed
//! (again) is present from then on, regardless of the look. Ids are charged to the application.
//! Without heap for them the ledger holds none, and the tiers are asked.
//! [`super::shuffle::ShuffleLedger`] shares the ledgers of a shuffle. Looks and responses belong to
//! `service`. Pure: no lock, no clock, no I/O.

use std::sync::Arc;

use super::loss::{Loss, LossReasons, LostExtent, NewLosses};
use crate::ids::id_set::IdSet;
use crate::ids::present::HeldIds;
use uniffle_base::budget::{Budget, Charge};

/// Maximum heap of a lost id, including a copy that is made while a read is refused.
const LOST_ID_BYTES: u64 = 16;

/// Heap of an id in question.
const ASKED_ID_BYTES: u64 = 8;

/// Knowledge about a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LedgerPhase {
    /// No block was ever in question.
    Known,
    /// The present blocks are being determined.
    Verifying,
    /// The present blocks are known, and none is lost.
    Complete,
    /// The present blocks are known, and some are lost.
    Lossy,
}

/// State machine of one partition, as in the diagram above.
#[derive(Debug)]
pub struct Ledger {
    heap: Budget,
    there: There,
    verifying: Option<Verifying>,
    losses: Vec<Loss>,
    /// Charge of the losses.
    charge: Charge,
    /// Reason and number of lost blocks that exceeded the budget for losses.
    unlisted: Option<(Arc<str>, u64)>,
}

/// Readable blocks.
#[derive(Debug)]
enum There {
    /// All acknowledged blocks.
    All,
    /// These blocks, and perhaps others that an earlier process left in remote files.
    AtLeast(HeldIds),
    /// Exactly these blocks.
    Exactly(HeldIds),
    /// The blocks that memory and tiers have. There is no heap for their ids.
    InTiers,
}

/// A look at the tiers, in progress or to be repeated.
#[derive(Debug)]
struct Verifying {
    /// True if stored data became unreadable, so every block is in question.
    is_all: bool,
    /// Acknowledged blocks that are not known to be present, sorted.
    asked: Vec<u64>,
    asked_charge: Charge,
    /// True if some of these were added since the look began.
    has_more_asked: bool,
    /// Blocks committed since the look began.
    meanwhile: HeldIds,
    /// True if further data became unreadable, or in question, since the look began.
    is_stale: bool,
    /// True if the last look failed. It is repeated later.
    has_failed: bool,
}

/// Decision about a read of a partition.
#[derive(Debug, Clone, PartialEq)]
pub enum Availability {
    /// All requested blocks are present.
    Serve,
    /// The presence of this number of blocks is not known yet. `None` means any of them.
    Wait(Option<u64>),
    /// These requested blocks are lost for this reason.
    Lost(IdSet, Arc<str>),
    /// This number of blocks is lost for this reason, too many to list.
    LostUnlisted(u64, Arc<str>),
}

/// Result of a look at memory and the tiers.
#[derive(Debug)]
pub struct Look {
    /// All present blocks, or `None` if there is no heap for their ids.
    pub found: Option<HeldIds>,
    /// Blocks that were searched and not found.
    pub missing: Vec<u64>,
    /// Number of further missing blocks.
    pub more_missing: u64,
}

impl Ledger {
    /// Creates a ledger for a partition of which no block was ever in question. Its ids are charged
    /// to `heap`.
    #[must_use]
    pub fn new(heap: &Budget) -> Self {
        let heap = heap.clone();
        let charge = heap.empty_charge();
        Self { heap, there: There::All, verifying: None, losses: Vec::new(), charge, unlisted: None }
    }

    /// Creates a ledger for a recovered partition. `is_all` is false if remote files may have
    /// further blocks. `blocks` is `None` if there is no heap for their ids.
    #[must_use]
    pub fn left(heap: &Budget, blocks: Option<HeldIds>, is_all: bool) -> Self {
        let there = match blocks {
            None => There::InTiers,
            Some(blocks) if is_all => There::Exactly(blocks),
            Some(blocks) => There::AtLeast(blocks),
        };
        Self { there, ..Self::new(heap) }
    }

    /// Returns the current phase.
    #[must_use]
    pub fn phase(&self) -> LedgerPhase {
        match (&self.verifying, self.lost_blocks() == 0, &self.there) {
            (Some(_), ..) => LedgerPhase::Verifying,
            (None, false, _) => LedgerPhase::Lossy,
            (None, true, There::All) => LedgerPhase::Known,
            (None, true, There::AtLeast(_) | There::Exactly(_) | There::InTiers) => LedgerPhase::Complete,
        }
    }

    /// Returns whether the tiers have to be asked which blocks are present.
    #[must_use]
    pub fn is_in_tiers(&self) -> bool {
        matches!(self.there, There::InTiers)
    }

    /// Puts sorted acknowledged blocks in question, or all blocks if `ids` is `None`. Returns true
    /// if the caller has to look. Returns false if another caller is looking, which will look
    /// again.
    pub fn question(&mut self, ids: Option<&[u64]>) -> bool {
        let is_first = self.verifying.is_none();
        let heap = &self.heap;
        let verifying = self.verifying.get_or_insert_with(|| Verifying::new(heap));
        if !ids.is_some_and(|ids| verifying.ask(ids)) {
            (verifying.is_all, verifying.is_stale) = (true, true);
        }
        is_first
    }

    /// Begins a look at the tiers. Blocks committed from now on are present. Returns the blocks in
    /// question, sorted.
    pub fn begin_look(&mut self) -> Vec<u64> {
        let heap = &self.heap;
        let verifying = self.verifying.get_or_insert_with(|| Verifying::new(heap));
        verifying.meanwhile = HeldIds::new(heap);
        (verifying.is_stale, verifying.has_failed, verifying.has_more_asked) = (false, false, false);
        verifying.asked.clone()
    }

    /// Ends a failed look. The blocks in question stay so until the next one.
    pub fn fail_look(&mut self) {
        if let Some(verifying) = &mut self.verifying {
            verifying.has_failed = true;
        }
    }

    /// Returns whether a look is in progress or imminent.
    #[must_use]
    pub fn is_looking(&self) -> bool {
        self.verifying.as_ref().is_some_and(|verifying| !verifying.has_failed)
    }

    /// Ends a look that searched all reported blocks and those in question. Blocks that were not
    /// found are lost. Returns the newly lost ones, or `None` if the look must be repeated.
    pub fn settle(&mut self, look: Look, blame: &LossReasons) -> Option<NewLosses> {
        let Verifying { is_all, asked, meanwhile, .. } = {
            // A look without all present ids only searches blocks that were in question before it
            // began.
            let seeks_all = look.found.is_some();
            self.verifying.take_if(|it| !it.is_stale && (seeks_all || !it.has_more_asked))?
        };
        let known = match &self.there {
            There::AtLeast(known) | There::Exactly(known) if !is_all => Some(known),
            There::All | There::AtLeast(_) | There::Exactly(_) | There::InTiers => None,
        };
        let there = [Some(&meanwhile), known].into_iter().flatten();
        let mut there: Vec<_> = there.map(|it| it.ids().lookup()).collect();
        let mut is_there = |id: u64| there.iter_mut().any(|it| it.contains(id));
        let mut missing: Vec<u64> = look.missing.into_iter().filter(|id| !is_there(*id)).collect();
        if let Some(found) = &look.found {
            let mut found = found.ids().lookup();
            missing.extend(asked.iter().filter(|id| !found.contains(**id) && !is_there(**id)));
        }
        missing.sort_unstable();
        missing.dedup();
        self.there = match look.found {
            None => There::InTiers,
            Some(mut found) => {
                let more = [Some(&meanwhile), known].into_iter().flatten();
                let all: Vec<u64> = more.flat_map(|it| it.ids().iter()).collect();
                if found.add(&all) { There::Exactly(found) } else { There::InTiers }
            }
        };
        let mut entered = self.enter(&missing, blame);
        entered.unlisted += look.more_missing;
        self.add_unlisted(look.more_missing, &blame.reason);
        Some(entered)
    }

    /// Returns those of `ids` that are not known to be present, and whether it is known that they
    /// are missing.
    fn absent(&self, ids: &[u64]) -> (Vec<u64>, bool) {
        let lacking = |there: &HeldIds| {
            let mut there = there.ids().lookup();
            ids.iter().copied().filter(|id| !there.contains(*id)).collect()
        };
        match (&self.there, &self.verifying) {
            (_, Some(Verifying { is_all: true, .. })) | (There::InTiers, _) => (ids.to_vec(), false),
            (There::All, _) => (Vec::new(), true),
            (There::AtLeast(there), _) => (lacking(there), false),
            (There::Exactly(there), _) => (lacking(there), true),
        }
    }

    /// Begins to verify if it is unknown whether `ids` are present. Returns like
    /// [`Ledger::question`].
    pub fn question_unknown(&mut self, ids: &[u64]) -> bool {
        let (absent, is_known) = self.absent(ids);
        !is_known && !absent.is_empty() && self.question(Some(&[]))
    }

    /// Acknowledges sorted `ids`. Ids that are not known to be present are marked as unverified.
    /// Returns the same as [`Ledger::question`].
    ///
    /// # Errors
    /// Returns the ids that are missing. Nothing is acknowledged then.
    pub fn acknowledge(&mut self, ids: &[u64]) -> Result<bool, Vec<u64>> {
        match self.absent(ids) {
            (absent, _) if absent.is_empty() => Ok(false),
            (absent, true) => Err(absent),
            (absent, false) => Ok(self.question(Some(&absent))),
        }
    }

    /// Enters blocks as lost. Returns the newly lost ones.
    pub fn enter(&mut self, ids: &[u64], blame: &LossReasons) -> NewLosses {
        // One lookup per set decodes each of its chunks once for ascending ids.
        let mut known: Vec<_> = self.losses.iter().map(|loss| loss.ids.lookup()).collect();
        let mut is_new = |id: &u64| !known.iter_mut().any(|known| known.contains(*id));
        let new: Vec<u64> = ids.iter().copied().filter(&mut is_new).collect();
        if self.charge.try_grow(LOST_ID_BYTES * new.len() as u64).is_err() {
            self.add_unlisted(new.len() as u64, &blame.reason);
            return NewLosses { losses: Vec::new(), unlisted: new.len() as u64 };
        }
        let mut left = IdSet::from_unsorted(new);
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
        NewLosses { losses: new, unlisted: 0 }
    }

    fn add_unlisted(&mut self, count: u64, reason: &Arc<str>) {
        if count > 0 {
            self.unlisted.get_or_insert_with(|| (Arc::clone(reason), 0)).1 += count;
        }
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

    /// Notes that blocks are in a tier (again). Returns how many were lost until now.
    pub fn commit(&mut self, ids: &[u64]) -> u64 {
        if let There::AtLeast(there) | There::Exactly(there) = &mut self.there
            && !there.add(ids)
        {
            self.there = There::InTiers;
        }
        if let Some(verifying) = &mut self.verifying
            && !verifying.meanwhile.add(ids)
        {
            // The look is repeated, and finds the blocks.
            verifying.is_stale = true;
        }
        let committed =
            if self.losses.is_empty() { IdSet::default() } else { IdSet::from_unsorted(ids.to_vec()) };
        let healed: u64 = self.losses.iter_mut().map(|loss| loss.ids.remove_all(&committed)).sum();
        self.losses.retain(|loss| !loss.ids.is_empty());
        drop(self.charge.split_up_to(LOST_ID_BYTES * healed));
        healed
    }

    /// Returns the decision about a read of the blocks chosen by `wanted`.
    pub fn verdict(&self, wanted: impl Fn(&IdSet) -> IdSet) -> Availability {
        if self.verifying.as_ref().is_some_and(|verifying| verifying.is_all) {
            return Availability::Wait(None);
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
            return Availability::Lost(lost, Arc::clone(reason));
        }
        if let Some((reason, count)) = &self.unlisted {
            return Availability::LostUnlisted(*count, Arc::clone(reason));
        }
        let asked = self.verifying.as_ref().map_or(&[][..], |verifying| &verifying.asked);
        match wanted(&IdSet::from_ascending(asked.iter().copied())).len() {
            0 => Availability::Serve,
            unknown => Availability::Wait(Some(unknown)),
        }
    }

    /// Returns the losses by reason.
    #[must_use]
    pub fn losses(&self) -> &[Loss] {
        &self.losses
    }

    /// Returns the number of lost blocks, listed or not.
    #[must_use]
    pub fn lost_blocks(&self) -> u64 {
        let unlisted = self.unlisted.as_ref().map_or(0, |(_, count)| *count);
        unlisted + self.losses.iter().map(|loss| loss.ids.len()).sum::<u64>()
    }
}

impl Verifying {
    fn new(heap: &Budget) -> Self {
        Self {
            is_all: false,
            asked: Vec::new(),
            asked_charge: heap.empty_charge(),
            has_more_asked: false,
            meanwhile: HeldIds::new(heap),
            is_stale: false,
            has_failed: false,
        }
    }

    /// Adds blocks that are in question. Returns false if there is no heap for them.
    fn ask(&mut self, ids: &[u64]) -> bool {
        let is_paid = self.asked_charge.try_grow(ASKED_ID_BYTES * ids.len() as u64).is_ok();
        if is_paid {
            self.has_more_asked |= !ids.is_empty();
            self.asked.extend_from_slice(ids);
            self.asked.sort_unstable();
            self.asked.dedup();
        }
        is_paid
    }
}

#[cfg(test)]
mod tests;
