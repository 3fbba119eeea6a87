//! The ledger of one partition: which of its acknowledged blocks are readable, and which are lost,
//! by id.
//!
//! ```text
//! Known ──mark_unverified──▶ Verifying ──resolve──▶ Complete | Lossy
//!   all acknowledged blocks are present ▲                  │ │ ▲
//!                                       └─mark_unverified──┘ └─┘ enter, commit
//! ```
//!
//! While a partition is *verifying*, the caller chosen by [`Ledger::mark_unverified`] scans for
//! present blocks. Unverified blocks are neither served nor reported as lost. A block that is
//! committed (again) is present from then on, regardless of the scan. Ids are charged to the
//! application. Without heap for them the ledger holds none, and memory and the tiers are queried.
//! [`super::shuffle::ShuffleLedger`] shares the ledgers of a shuffle. Scans and responses belong to
//! `service`. Pure: no lock, no clock, no I/O.

use std::sync::Arc;

use super::loss::{Loss, LossCause, LostExtent, NewLosses};
use crate::ids::id_set::IdSet;
use crate::ids::present::HeldIds;
use uniffle_base::budget::{Budget, Charge};

/// Maximum heap of a lost id, including a copy that is made while a read is refused.
const LOST_ID_BYTES: u64 = 16;

/// Heap of an unverified id.
const UNVERIFIED_ID_BYTES: u64 = 8;

/// Knowledge about a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LedgerPhase {
    /// No block was ever unverified.
    Known,
    /// The present blocks are being determined.
    Verifying,
    /// No block is being verified, and none is lost.
    Complete,
    /// No block is being verified, and some are lost.
    Lossy,
}

/// State machine of one partition, as in the diagram above.
#[derive(Debug)]
pub struct Ledger {
    heap: Budget,
    readable: Readable,
    verifying: Option<Verifying>,
    losses: Vec<Loss>,
    /// Charge of the losses.
    charge: Charge,
    /// Reason and number of lost blocks whose ids are not listed: the budget for losses is full, or
    /// a scan found too many.
    unlisted: Option<(Arc<str>, u64)>,
}

/// Readable blocks.
#[derive(Debug)]
enum Readable {
    /// All acknowledged blocks.
    All,
    /// These blocks, and perhaps further blocks of an earlier process in remote files.
    AtLeast(HeldIds),
    /// Exactly these blocks.
    Exactly(HeldIds),
    /// The blocks in memory and tiers. There is no heap for their ids.
    InTiers,
}

/// A scan of memory and the tiers, in progress or to be repeated.
#[derive(Debug)]
struct Verifying {
    /// True if every block is unverified: stored data became unreadable, or there is no heap for
    /// unverified ids.
    is_all: bool,
    /// Acknowledged blocks that are not known to be present, sorted.
    unverified: Vec<u64>,
    unverified_charge: Charge,
    /// True if some of these were added since the scan began.
    has_newer: bool,
    /// Blocks committed since the scan began.
    meanwhile: HeldIds,
    /// True if the scan must be repeated: all blocks became unverified since it began, or there is
    /// no heap for `meanwhile`.
    is_stale: bool,
    /// True if the last scan failed. It is repeated later.
    has_failed: bool,
    /// Number of unlisted lost blocks when the scan began, which counts them again.
    unlisted: u64,
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
    /// This number of blocks of the partition is lost for this reason, too many to list. It is
    /// unknown whether requested blocks are among them.
    LostUnlisted(u64, Arc<str>),
}

/// Result of a scan of memory and the tiers.
#[derive(Debug)]
pub struct ScanResult {
    /// All present blocks, or `None` if there is no heap for their ids.
    pub found: Option<HeldIds>,
    /// Blocks that were searched and not found.
    pub missing: Vec<u64>,
    /// Number of further missing blocks.
    pub more_missing: u64,
}

impl Ledger {
    /// Creates a ledger for a partition of which no block was ever unverified. Its ids are charged
    /// to `heap`.
    #[must_use]
    pub fn new(heap: &Budget) -> Self {
        let heap = heap.clone();
        let charge = heap.empty_charge();
        Self { heap, readable: Readable::All, verifying: None, losses: Vec::new(), charge, unlisted: None }
    }

    /// Creates a ledger for a recovered partition. `is_all` is false if remote files may have
    /// further blocks. `blocks` is `None` if there is no heap for their ids.
    #[must_use]
    pub fn recovered(heap: &Budget, blocks: Option<HeldIds>, is_all: bool) -> Self {
        let readable = match blocks {
            None => Readable::InTiers,
            Some(blocks) if is_all => Readable::Exactly(blocks),
            Some(blocks) => Readable::AtLeast(blocks),
        };
        Self { readable, ..Self::new(heap) }
    }

    /// Returns the current phase.
    #[must_use]
    pub fn phase(&self) -> LedgerPhase {
        match (&self.verifying, self.lost_blocks() == 0, &self.readable) {
            (Some(_), ..) => LedgerPhase::Verifying,
            (None, false, _) => LedgerPhase::Lossy,
            (None, true, Readable::All) => LedgerPhase::Known,
            (None, true, Readable::AtLeast(_) | Readable::Exactly(_) | Readable::InTiers) => {
                LedgerPhase::Complete
            }
        }
    }

    /// Returns whether only memory and the tiers know which blocks are present: there is no heap
    /// for their ids.
    #[must_use]
    pub fn is_in_tiers(&self) -> bool {
        matches!(self.readable, Readable::InTiers)
    }

    /// Marks sorted acknowledged blocks as unverified, or all blocks if `ids` is `None` or there is
    /// no heap for them. Returns true if the caller has to scan. Returns false if another caller
    /// scans, or will repeat a failed scan, which also decides about these blocks.
    pub fn mark_unverified(&mut self, ids: Option<&[u64]>) -> bool {
        let is_first = self.verifying.is_none();
        let heap = &self.heap;
        let verifying = self.verifying.get_or_insert_with(|| Verifying::new(heap));
        if !ids.is_some_and(|ids| verifying.add(ids)) {
            (verifying.is_all, verifying.is_stale) = (true, true);
        }
        is_first
    }

    /// Begins a scan of memory and the tiers. Blocks committed from now on are present. Returns the
    /// unverified blocks, sorted.
    pub fn begin_scan(&mut self) -> Vec<u64> {
        let heap = &self.heap;
        let verifying = self.verifying.get_or_insert_with(|| Verifying::new(heap));
        verifying.meanwhile = HeldIds::new(heap);
        verifying.unlisted = self.unlisted.as_ref().map_or(0, |(_, count)| *count);
        (verifying.is_stale, verifying.has_failed, verifying.has_newer) = (false, false, false);
        verifying.unverified.clone()
    }

    /// Ends a failed scan. Unverified blocks stay so until the next one.
    pub fn fail_scan(&mut self) {
        if let Some(verifying) = &mut self.verifying {
            verifying.has_failed = true;
        }
    }

    /// Returns whether a scan is in progress or imminent.
    #[must_use]
    pub fn is_scanning(&self) -> bool {
        self.verifying.as_ref().is_some_and(|verifying| !verifying.has_failed)
    }

    /// Ends a scan of all reported and unverified blocks. Blocks that were not found are lost.
    /// Returns the newly lost ones, or `None` if the scan must be repeated or none is in progress.
    pub fn resolve(&mut self, scan: ScanResult, cause: &LossCause) -> Option<NewLosses> {
        let Verifying { is_all, unverified, meanwhile, unlisted, .. } = {
            // A scan without all present ids only searches reported blocks, and those that were
            // unverified before it began.
            let lists_all = scan.found.is_some();
            self.verifying.take_if(|it| !it.is_stale && (lists_all || !it.has_newer))?
        };
        let known = match &self.readable {
            Readable::AtLeast(known) | Readable::Exactly(known) if !is_all => Some(known),
            Readable::All | Readable::AtLeast(_) | Readable::Exactly(_) | Readable::InTiers => None,
        };
        let readable = [Some(&meanwhile), known].into_iter().flatten();
        let mut readable: Vec<_> = readable.map(|it| it.ids().lookup()).collect();
        let mut is_present = |id: u64| readable.iter_mut().any(|it| it.contains(id));
        let mut missing: Vec<u64> = scan.missing.into_iter().filter(|id| !is_present(*id)).collect();
        if let Some(found) = &scan.found {
            let mut found = found.ids().lookup();
            missing.extend(unverified.iter().filter(|id| !found.contains(**id) && !is_present(**id)));
        }
        missing.sort_unstable();
        missing.dedup();
        self.readable = match scan.found {
            None => Readable::InTiers,
            Some(mut found) => {
                let more = [Some(&meanwhile), known].into_iter().flatten();
                let all: Vec<u64> = more.flat_map(|it| it.ids().iter()).collect();
                if found.add(&all) { Readable::Exactly(found) } else { Readable::InTiers }
            }
        };
        self.unlisted.take_if(|(_, count)| {
            *count -= unlisted;
            *count == 0
        });
        let mut entered = self.enter(&missing, cause);
        self.add_unlisted(scan.more_missing, &cause.reason);
        entered.unlisted = (entered.unlisted + scan.more_missing).saturating_sub(unlisted);
        Some(entered)
    }

    /// Returns those of `ids` that are not known to be present, and whether it is known that they
    /// are missing.
    fn absent(&self, ids: &[u64]) -> (Vec<u64>, bool) {
        let lacking = |readable: &HeldIds| {
            let mut readable = readable.ids().lookup();
            ids.iter().copied().filter(|id| !readable.contains(*id)).collect()
        };
        match (&self.readable, &self.verifying) {
            (_, Some(Verifying { is_all: true, .. })) | (Readable::InTiers, _) => (ids.to_vec(), false),
            (Readable::All, _) => (Vec::new(), true),
            (Readable::AtLeast(readable), _) => (lacking(readable), false),
            (Readable::Exactly(readable), _) => (lacking(readable), true),
        }
    }

    /// Begins to verify if it is unknown whether `ids` are present. Returns like
    /// [`Ledger::mark_unverified`].
    pub fn verify_if_unknown(&mut self, ids: &[u64]) -> bool {
        let (absent, is_known) = self.absent(ids);
        !is_known && !absent.is_empty() && self.mark_unverified(Some(&[]))
    }

    /// Acknowledges sorted `ids`. Ids that are not known to be present are marked as unverified.
    /// Returns the same as [`Ledger::mark_unverified`].
    ///
    /// # Errors
    /// Returns the ids that are missing. Nothing is acknowledged then.
    pub fn acknowledge(&mut self, ids: &[u64]) -> Result<bool, Vec<u64>> {
        match self.absent(ids) {
            (absent, _) if absent.is_empty() => Ok(false),
            (absent, true) => Err(absent),
            (absent, false) => Ok(self.mark_unverified(Some(&absent))),
        }
    }

    /// Enters blocks as lost. Returns the newly lost ones.
    pub fn enter(&mut self, ids: &[u64], cause: &LossCause) -> NewLosses {
        // One lookup per set decodes each of its chunks once for ascending ids.
        let mut known: Vec<_> = self.losses.iter().map(|loss| loss.ids.lookup()).collect();
        let mut is_new = |id: &u64| !known.iter_mut().any(|known| known.contains(*id));
        let new: Vec<u64> = ids.iter().copied().filter(&mut is_new).collect();
        if self.charge.try_grow(LOST_ID_BYTES * new.len() as u64).is_err() {
            self.add_unlisted(new.len() as u64, &cause.reason);
            return NewLosses { losses: Vec::new(), unlisted: new.len() as u64 };
        }
        let mut remaining = IdSet::from_unsorted(new);
        if let Readable::AtLeast(readable) | Readable::Exactly(readable) = &mut self.readable {
            readable.remove_all(&remaining);
        }
        let mut new = Vec::new();
        let at_ms = cause.at_ms;
        for LostExtent { blocks, reason, .. } in &cause.extents {
            let mut lost = remaining.lookup();
            let here: Vec<_> = blocks.iter().filter(|(id, _)| lost.contains(id.0.unsigned_abs())).collect();
            let bytes = Some(here.iter().map(|(_, length)| u64::from(*length)).sum());
            let ids: IdSet = here.iter().map(|(id, _)| id.0.unsigned_abs()).collect();
            remaining.remove_all(&ids);
            new.push(Loss { ids, bytes, reason: Arc::clone(reason), at_ms });
        }
        new.push(Loss { ids: remaining, bytes: None, reason: Arc::clone(&cause.reason), at_ms });
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

    /// Notes that blocks have become readable (again), in memory or a tier. Returns how many were
    /// lost until now.
    pub fn commit(&mut self, ids: &[u64]) -> u64 {
        if let Readable::AtLeast(readable) | Readable::Exactly(readable) = &mut self.readable
            && !readable.add(ids)
        {
            self.readable = Readable::InTiers;
        }
        if let Some(verifying) = &mut self.verifying
            && !verifying.meanwhile.add(ids)
        {
            // The scan is repeated, and finds the blocks.
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
    pub fn availability(&self, wanted: impl Fn(&IdSet) -> IdSet) -> Availability {
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
        let unverified = self.verifying.as_ref().map_or(&[][..], |verifying| &verifying.unverified);
        match wanted(&IdSet::from_ascending(unverified.iter().copied())).len() {
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
            unverified: Vec::new(),
            unverified_charge: heap.empty_charge(),
            has_newer: false,
            meanwhile: HeldIds::new(heap),
            is_stale: false,
            has_failed: false,
            unlisted: 0,
        }
    }

    /// Adds unverified blocks. Returns false if there is no heap for them.
    fn add(&mut self, ids: &[u64]) -> bool {
        let is_paid = self.unverified_charge.try_grow(UNVERIFIED_ID_BYTES * ids.len() as u64).is_ok();
        if is_paid {
            self.has_newer |= !ids.is_empty();
            self.unverified.extend_from_slice(ids);
            self.unverified.sort_unstable();
            self.unverified.dedup();
        }
        is_paid
    }
}

#[cfg(test)]
mod tests;
