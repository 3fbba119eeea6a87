//! Reserve of region memory that offsets the heap of block lists.
//!
//! Blocks in memory have records, ids and chains on the heap. Their heap is charged to the
//! application's part of the capacity, but a region that was full once stays resident. The region
//! therefore cedes pieces of the same size as the lists. A ceded piece has no pages and belongs to
//! no chain until it is returned. A ticket does not reserve memory for its lists, so lists borrow
//! from the heap budget (kind `unfinished_blocks`) while the whole region is promised.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::region::{Region, SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, Segment};
use uniffle_base::budget::{Budget, Charge, NoCapacity};

/// List bytes that need no ceded memory: part of the process without clients
/// (`budget::memory_plan`). At least one piece, so that ceding never exceeds the charge of the
/// lists and of the next one.
pub(crate) const FREE_BYTES: u64 = 2 << 20;

/// Surplus that stays ceded, so that a piece is not moved back and forth with every flush.
pub(crate) const SPARE_BYTES: u64 = FREE_BYTES;

/// Step in which the heap budget is borrowed.
const BORROWED_AT_ONCE: u64 = 64 << 10;

const _: () = assert!(FREE_BYTES >= SEGMENT_BYTES_MAX as u64);

/// The charges of lists and the memory ceded for them.
///
/// Lists of extents, which tiers keep for blocks that left memory, count here too
/// ([`crate::Memory::extents`]). They cannot be refused, because the blocks are in a tier
/// already. The total charge does not grow by them: for each extent a batch frees its list
/// (`buffer::list::LIST_BYTES`), its records and at least a page of segments.
///
/// Invariant: lists are charged at most [`FREE_BYTES`] plus the ceded and the borrowed bytes.
/// Single lists and segments may exceed this until the next checked request pays for them. The
/// resident region and the lists together thus stay within the region, [`FREE_BYTES`] and the heap.
#[derive(Debug)]
pub(crate) struct MetadataReserve {
    region: Arc<Region>,
    /// The capacity, to which blocks, tickets and lists are charged.
    budget: Budget,
    /// The part of the capacity that lists of extents use.
    extents: Budget,
    /// Charges of all lists except those of extents. Without a limit.
    charged: Budget,
    /// Bytes of the ceded pieces. Without a limit.
    ceded: Budget,
    /// A part of the heap budget.
    borrowed: Budget,
    /// Set while the region must not cede anything ([`MetadataReserve::pause`]).
    is_paused: AtomicBool,
    held: Mutex<CededMemory>,
}

#[derive(Debug)]
struct CededMemory {
    pieces: Vec<Segment>,
    borrowed: Charge,
}

impl MetadataReserve {
    pub(crate) fn new(region: Arc<Region>, budget: Budget, heap: &Budget) -> Self {
        let total = || Budget::new(u64::MAX);
        let (extents, borrowed) = (budget.child(u64::MAX), heap.child(u64::MAX));
        let held = Mutex::new(CededMemory { pieces: Vec::new(), borrowed: borrowed.empty_charge() });
        let is_paused = AtomicBool::new(false);
        Self { region, budget, extents, charged: total(), ceded: total(), borrowed, is_paused, held }
    }

    /// Stops covering lists. Free space in the region may hold recovered blocks that are not
    /// claimed yet, and a ceded piece loses its pages.
    pub(crate) fn pause(&self) {
        self.is_paused.store(true, Ordering::Relaxed);
    }

    /// Resumes covering lists after all recovered blocks are claimed, and covers earlier charges as
    /// far as there is room.
    pub(crate) fn resume(&self) {
        self.is_paused.store(false, Ordering::Relaxed);
        // The next checked list pays for the part without room.
        let _ = self.cover(0);
    }

    /// Returns the budget of lists of extents.
    pub(crate) fn extents(&self) -> &Budget {
        &self.extents
    }

    /// Returns the charge of all lists, of blocks and of extents.
    pub(crate) fn charged_bytes(&self) -> u64 {
        self.charged.used() + self.extents.used()
    }

    /// Returns the bytes that the region has ceded.
    pub(crate) fn ceded_bytes(&self) -> u64 {
        self.ceded.used()
    }

    /// Returns an empty charge to merge others into.
    pub(crate) fn empty_charge(&self) -> Charge {
        self.charged.empty_charge()
    }

    /// Charges `bytes` regardless of room. They must be charged to the capacity already.
    pub(crate) fn charge_unchecked(&self, bytes: u64) -> Charge {
        self.charged.charge_unchecked(bytes)
    }

    /// Charges `bytes` if there is room for them. They must be charged to the capacity already.
    pub(crate) fn charge(&self, bytes: u64) -> Result<Charge, NoCapacity> {
        let charge = self.charge_unchecked(bytes);
        self.cover(0)?;
        Ok(charge)
    }

    /// Makes room for all charges and for `more` bytes.
    pub(crate) fn cover(&self, more: u64) -> Result<(), NoCapacity> {
        if self.is_paused.load(Ordering::Relaxed) || self.lacking(more) == 0 {
            return Ok(());
        }
        let mut held = self.held.lock();
        let mut at_most = SEGMENT_BYTES_MAX;
        loop {
            let lacking = self.lacking(more);
            if lacking == 0 {
                return Ok(());
            }
            let Some(mut piece) = self.piece(at_most) else {
                return held.borrowed.try_grow(lacking.next_multiple_of(BORROWED_AT_ONCE));
            };
            at_most = piece.capacity();
            piece.discard();
            held.pieces.push(piece);
        }
    }

    fn lacking(&self, more: u64) -> u64 {
        (self.charged_bytes() + more).saturating_sub(self.paid_bytes())
    }

    /// Returns the list bytes for which there is room.
    fn paid_bytes(&self) -> u64 {
        FREE_BYTES + self.ceded_bytes() + self.borrowed.used()
    }

    /// Returns the bytes of the region that are neither promised nor ceded. Charges of lists are
    /// not promises.
    fn room(&self) -> u64 {
        let has = self.region.capacity_bytes() + self.charged_bytes();
        has.saturating_sub(self.budget.used() + self.ceded_bytes())
    }

    /// Takes the largest free piece of at most `at_most` bytes.
    fn piece(&self, at_most: usize) -> Option<Segment> {
        let mut bytes = at_most;
        while bytes >= SEGMENT_BYTES_MIN {
            if bytes as u64 <= self.room()
                && let Ok(piece) = self.region.allocate(bytes, self.ceded.charge_unchecked(bytes as u64))
            {
                return Some(piece);
            }
            bytes /= 2;
        }
        None
    }

    /// Replaces borrowed heap by pieces of the region as far as it has room.
    fn repay(&self, held: &mut CededMemory) {
        while held.borrowed.bytes() >= SEGMENT_BYTES_MIN as u64 {
            let at_most = usize::try_from(held.borrowed.bytes()).unwrap_or(usize::MAX).min(SEGMENT_BYTES_MAX);
            let Some(mut piece) = self.piece(1 << at_most.ilog2()) else { return };
            piece.discard();
            drop(held.borrowed.split_up_to(piece.capacity() as u64));
            held.pieces.push(piece);
        }
    }

    /// Gives back borrowed heap beyond the need, and then ceded pieces beyond the need and `spare`
    /// bytes. If `spare` is not 0, pieces of the region replace borrowed heap in between. Returns
    /// whether the region got pieces back.
    pub(crate) fn give_back(&self, spare: u64) -> bool {
        if self.paid_bytes() == FREE_BYTES {
            return false;
        }
        let mut held = self.held.lock();
        let surplus = self.paid_bytes().saturating_sub(self.charged_bytes());
        drop(held.borrowed.split_up_to(surplus));
        if spare > 0 {
            self.repay(&mut held);
        }
        let before = held.pieces.len();
        while let Some(last) = held.pieces.last() {
            let needed = self.charged_bytes() + spare + last.capacity() as u64;
            if needed > self.paid_bytes() {
                break;
            }
            held.pieces.pop();
        }
        held.pieces.len() < before
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn ceded(capacity: u64, region: u64, heap: u64) -> (Budget, MetadataReserve) {
        let budget = Budget::new(capacity);
        let region = Region::new(region).unwrap();
        (budget.clone(), MetadataReserve::new(region, budget, &Budget::new(heap)))
    }

    #[test]
    fn region_lends_memory_for_lists_and_gets_it_back() {
        let (budget, lists) = ceded(8 * MIB, 8 * MIB, 0);
        let paid = budget.try_charge(5 * MIB).unwrap();
        let first = lists.charge(FREE_BYTES).unwrap();
        assert_eq!(lists.ceded_bytes(), 0);
        let more = lists.charge(1).unwrap();
        assert_eq!((lists.ceded_bytes(), lists.region.free_bytes()), (2 * MIB, 6 * MIB));
        drop(more);
        assert!(!lists.give_back(SPARE_BYTES + 1) && lists.give_back(0) && !lists.give_back(0));
        drop((first, paid));
        assert_eq!((lists.ceded_bytes(), lists.region.free_bytes()), (0, 8 * MIB));
    }

    /// The flusher's scan covers lists while blocks of an earlier process are still being
    /// recovered.
    #[test]
    fn region_with_unclaimed_blocks_lends_nothing() {
        let (budget, lists) = ceded(8 * MIB, 8 * MIB, 0);
        lists.pause();
        let paid = budget.try_charge(5 * MIB).unwrap();
        let charged = lists.charge_unchecked(4 * MIB);
        lists.cover(0).unwrap();
        assert_eq!((lists.ceded_bytes(), lists.region.free_bytes()), (0, 8 * MIB));
        // A block that is claimed meanwhile is still in its place.
        let claimed = lists.region.claim(0, 2 << 20, budget.try_charge(2 * MIB).unwrap()).unwrap();
        lists.resume();
        assert_eq!((lists.ceded_bytes(), lists.region.free_bytes()), (2 * MIB, 4 * MIB));
        drop((claimed, charged, paid));
    }

    #[test]
    fn reserved_memory_is_not_lent() {
        let (budget, lists) = ceded(8 * MIB, 8 * MIB, MIB);
        let ticket = budget.try_charge(4 * MIB).unwrap();
        let paid = budget.try_charge(4 * MIB).unwrap();
        let first = lists.charge(4 * MIB).unwrap();
        assert_eq!(lists.ceded_bytes(), 2 * MIB);
        // More than was paid for, like a charge beyond the capacity.
        let over = budget.charge_unchecked(3 * MIB);
        let second = lists.charge(3 * MIB).unwrap();
        assert_eq!(
            (lists.ceded_bytes(), lists.borrowed.used()),
            (4 * MIB, MIB),
            "the heap must lend the missing bytes"
        );
        assert_eq!(lists.charge(1).unwrap_err(), NoCapacity { requested: 64 << 10, free: 0 });
        drop(over);
        lists.give_back(SPARE_BYTES);
        assert_eq!(
            (lists.ceded_bytes(), lists.borrowed.used()),
            (5 * MIB, 0),
            "the heap must get its bytes back"
        );
        drop((ticket, paid, first, second));
        lists.give_back(0);
        assert_eq!(lists.region.free_bytes(), 8 * MIB);
    }

    proptest! {
        /// The bound of the README: segments of chains and bytes of lists.
        #[test]
        fn chains_and_lists_stay_within_the_region(
            steps in prop::collection::vec((0u8..5, 1u64..3 * MIB, any::<prop::sample::Index>()), 1..120),
        ) {
            let (capacity, slack) = (16 * MIB, 2 * MIB);
            let (budget, lists) = ceded(capacity, capacity + slack, MIB);
            let (mut held, mut segments) = (Vec::new(), Vec::new());
            for (what, bytes, at) in steps {
                match what {
                    // A list: charged to the capacity, even beyond it, and then here.
                    0 | 1 => {
                        let paid = budget.charge_unchecked(bytes);
                        held.extend(lists.charge(bytes).map(|charge| (charge, paid)));
                    }
                    // A segment, allocated like a chain's.
                    2 | 3 => {
                        let size = (bytes >> 1).next_power_of_two().clamp(4096, 2 * MIB);
                        let beyond = (lists.region.capacity_bytes() + lists.charged_bytes())
                            .saturating_sub(capacity + lists.ceded_bytes());
                        if let Ok(charge) = budget.try_charge_beyond(size, beyond) {
                            let size = usize::try_from(size).unwrap();
                            let promised = lists.region.allocate(size, charge).or_else(|charge| {
                                lists.give_back(0);
                                lists.region.allocate(size, charge)
                            });
                            // The free bytes may be fragmented.
                            prop_assert!(promised.is_ok() || lists.region.free_bytes() >= size as u64);
                            segments.extend(promised);
                        }
                    }
                    _ if at.index(2) == 0 && !held.is_empty() => drop(held.swap_remove(at.index(held.len()))),
                    _ if !segments.is_empty() => drop(segments.swap_remove(at.index(segments.len()))),
                    _ => drop(lists.give_back(SPARE_BYTES)),
                }
                let chains: u64 = segments.iter().map(|it: &Segment| it.capacity() as u64).sum();
                let listed: u64 = held.iter().map(|(charge, _)| charge.bytes()).sum();
                prop_assert_eq!(listed, lists.charged_bytes());
                prop_assert!(listed <= lists.paid_bytes() && lists.borrowed.used() <= MIB);
                prop_assert!(chains + lists.ceded_bytes() <= lists.region.capacity_bytes());
                prop_assert!(chains + listed <= capacity + slack + FREE_BYTES + lists.borrowed.used());
            }
            drop((held, segments));
            lists.give_back(0);
            prop_assert_eq!((budget.used(), lists.borrowed.used()), (0, 0));
            prop_assert_eq!(lists.region.free_bytes(), lists.region.capacity_bytes());
        }

        /// Lists of extents cannot be refused, and their number has no limit.
        #[test]
        fn extent_lists_are_charged_within_the_limit(
            steps in prop::collection::vec((0u8..6, 1u64..3 * MIB, any::<prop::sample::Index>()), 1..200),
        ) {
            let (capacity, slack) = (16 * MIB, 2 * MIB);
            let (budget, lists) = ceded(capacity, capacity + slack, MIB);
            let (mut batches, mut segments, mut shuffles) = (Vec::new(), Vec::new(), Vec::new());
            for (what, bytes, at) in steps {
                match what {
                    0 => batches.extend(budget.try_charge(bytes).ok().and_then(|paid| {
                        lists.charge(bytes).ok().map(|list| (list, paid))
                    })),
                    1 | 2 => {
                        let size = (bytes >> 1).next_power_of_two().clamp(4096, 2 * MIB);
                        let beyond = (lists.region.capacity_bytes() + lists.charged_bytes())
                            .saturating_sub(capacity + lists.ceded_bytes());
                        if let Ok(charge) = budget.try_charge_beyond(size, beyond) {
                            segments.extend(lists.region.allocate(usize::try_from(size).unwrap(), charge));
                        }
                    }
                    // A batch is published: its extents are charged, and then its own memory is
                    // freed.
                    3 | 4 if !batches.is_empty() && !segments.is_empty() => {
                        let batch = batches.swap_remove(at.index(batches.len()));
                        let segment = segments.swap_remove(at.index(segments.len()));
                        let had = batch.0.bytes() + segment.capacity() as u64;
                        shuffles.push(lists.extents().charge_unchecked(had / 8));
                        drop((batch, segment));
                        prop_assert!(lists.cover(0).is_ok(), "{lists:?}");
                    }
                    _ if !shuffles.is_empty() => {
                        drop(shuffles.swap_remove(at.index(shuffles.len())));
                        lists.give_back(SPARE_BYTES);
                    }
                    _ => {}
                }
                let chains: u64 = segments.iter().map(|it: &Segment| it.capacity() as u64).sum();
                prop_assert!(lists.charged_bytes() <= lists.paid_bytes() && lists.borrowed.used() <= MIB);
                let resident = chains + lists.charged_bytes();
                prop_assert!(resident <= capacity + slack + FREE_BYTES + lists.borrowed.used());
            }
            drop((batches, segments, shuffles));
            lists.give_back(0);
            prop_assert_eq!((budget.used(), lists.extents().used(), lists.ceded_bytes()), (0, 0, 0));
        }
    }
}
