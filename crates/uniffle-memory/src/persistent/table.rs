//! The front of a region: its stores and their pages. All stores into the front are made here.
//!
//! A commit stores the other words first and then the commit word with a release store, so the next
//! process finds it whatever instruction this one died at. A slot gets another owner only after
//! its commit word was cleared.
//!
//! A chunk of slots gets pages before its first use and loses them when all slots are free
//! (`slots`). A chunk of zeros has nothing committed, so a process may die at any moment of this.
//!
//! Invariant: pages that are neither paid by their slots nor free of charge are charged to the
//! capacity before they are allocated, and the region cedes the same amount.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};

use super::layout::{
    FRESH_NAMES_AT, FRESH_ROWS_AT, Geometry, HEADER_WORDS, Header, NAME_WORDS, ROW_BYTES, ROW_WORDS,
};
use super::slots::TableSlots;
use crate::admission::metadata_reserve::MetadataReserve;
use crate::region::Region;
use crate::region::parts::{in_parts, threads_for};
use uniffle_base::budget::{Budget, Charge};

/// Reasons for the lack of slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoSlots {
    /// All are taken, or the region is released.
    TooMany,
    /// The file gets no more pages, or the region has none to cede for them.
    NoPages,
}

/// The parts of the front, names and rows, and their region.
///
/// Rows are in a separate table, because a sealed chain is written to disk unchanged
/// (`docs/architecture.md` §2.2). Rows point directly to bytes, so nothing else must be consistent.
/// These invariants hold at every store, and `tests.rs` checks every store of random histories:
///
/// 1. *The bytes of a committed row are final.* The order is bytes, words of the row, commit word.
/// 2. *Bytes have no other user while a row points to them.* A list clears its rows before it frees
///    its segments.
/// 3. *Slots have no other user while they are committed.* They are cleared, then freed. A name is
///    freed with its last row.
/// 4. *A purged shuffle is gone at once.* Its name is cleared before the shuffle can be registered
///    again.
///
/// A send is acknowledged after all its blocks are committed. Part of an unacknowledged send may be
/// present. The client sends it again, and its blocks are deduplicated by their ids. If a published
/// batch still has rows, recovery finds its blocks in the tier's index and uses that copy. Tickets
/// and unfinished sends have no rows, so their segments are free.
///
/// A commit writes one cache line beside the payload and takes one lock per run of slots. Rows are
/// charged like lists, so the region cedes the same amount. The unused rest of a chunk of slots is
/// charged too.
pub(crate) struct BlockTable {
    region: Arc<Region>,
    pub(super) geometry: Geometry,
    pub(super) names: TablePart,
    pub(super) rows: TablePart,
    /// Set when the table is released to the next process; nothing is cleared any longer. Set while
    /// both parts are locked.
    released: AtomicBool,
    /// Number of shuffles with blocks that the next process does not find.
    unprotected: AtomicU64,
    #[cfg(test)]
    pub(super) after_store: Mutex<Option<Hook>>,
}

/// Called after every store, and when pages are allocated or freed.
#[cfg(test)]
pub(super) type Hook = Box<dyn FnMut(&Region) + Send>;

/// The names or the rows of a table.
#[derive(Debug)]
pub(super) struct TablePart {
    /// Word of the first slot, and words per slot.
    first: usize,
    words: usize,
    /// Word of the header with the number of slots ever used.
    mark_at: usize,
    /// Bytes that the owner of a slot pays for it.
    paid_each: u64,
    state: Mutex<State>,
}

/// Position of a part in the region.
struct PartLayout {
    /// Word of the first slot.
    first: usize,
    /// Words per slot.
    words: usize,
    /// Number of slots.
    max: u32,
    /// Word of the header with the number of slots ever used.
    mark_at: usize,
}

/// Free slots and the charges of their pages.
#[derive(Debug)]
pub(super) struct State {
    pub(super) slots: TableSlots,
    /// Charges of the pages. `None` until the capacity is known.
    charged: Option<PageCharges>,
}

/// Charges of equal size for pages of the table: to the capacity, and to the memory that the region
/// cedes.
#[derive(Debug)]
struct PageCharges {
    capacity: Charge,
    ceded: Charge,
    lists: Arc<MetadataReserve>,
}

impl State {
    /// Charges the growth by one further chunk.
    fn grow(&mut self, paid_each: u64) -> Result<(), NoSlots> {
        let wanted = self.slots.unpaid_bytes(1, paid_each);
        let Some(PageCharges { capacity, ceded, lists }) = &mut self.charged else { return Ok(()) };
        let lacking = wanted.saturating_sub(capacity.bytes());
        if lacking > 0 {
            let paid = capacity.budget().charge_unchecked(lacking);
            ceded.merge(lists.charge(lacking).map_err(|_| NoSlots::NoPages)?);
            capacity.merge(paid);
        }
        Ok(())
    }

    /// Adjusts the charges to the pages that are not paid by owners. An increase was paid by an
    /// owner until now.
    fn settle(&mut self, paid_each: u64) {
        let wanted = self.slots.unpaid_bytes(0, paid_each);
        let Some(PageCharges { capacity, ceded, lists }) = &mut self.charged else { return };
        let has = capacity.bytes();
        if wanted > has {
            capacity.merge(capacity.budget().charge_unchecked(wanted - has));
            ceded.merge(lists.charge_unchecked(wanted - has));
        } else if wanted < has {
            drop((ceded.split_up_to(has - wanted), capacity.split_up_to(has - wanted)));
        }
    }
}

impl TablePart {
    /// Opens the part. The owner of a slot pays `paid_each` bytes for it.
    fn new(
        region: &Region,
        PartLayout { first, words, max, mark_at }: PartLayout,
        paid_each: u64,
    ) -> io::Result<Self> {
        let mark = region.front().get(mark_at).map_or(0, |word| word.load(Ordering::Relaxed));
        let mark = u32::try_from(mark).unwrap_or(max).min(max);
        let bytes_of = |slots: Range<u32>| {
            8 * (first + slots.start as usize * words)..8 * (first + slots.end as usize * words)
        };
        let empty = TableSlots::new(8 * words as u64, max, 0, |_| false);
        let holes = region.front_holes(bytes_of(0..mark))?;
        let is_hole = |chunk: u32| {
            let of = bytes_of(empty.of_chunk(chunk));
            let before = holes.partition_point(|hole| hole.start <= of.start);
            before.checked_sub(1).is_some_and(|at| holes[at].end >= of.end.min(bytes_of(0..mark).end))
        };
        let slots = TableSlots::new(8 * words as u64, max, mark, |chunk| !is_hole(chunk));
        // Pages are filled first: a read of a hole would allocate pages too, and end the process if
        // there are none.
        let fill = |some: &[u32]| {
            some.iter().try_for_each(|chunk| region.fill_front_pages(bytes_of(slots.of_chunk(*chunk))))
        };
        let used = usize::try_from(mark).unwrap_or(usize::MAX);
        in_parts(&slots.with_pages(), threads_for(used), fill).into_iter().collect::<io::Result<()>>()?;
        let state = Mutex::new(State { slots, charged: None });
        Ok(Self { first, words, mark_at, paid_each, state })
    }

    fn bytes_of(&self, slots: Range<u32>) -> Range<usize> {
        8 * self.word_of(slots.start)..8 * self.word_of(slots.end)
    }

    /// Returns the first word of a slot.
    #[inline]
    pub(super) fn word_of(&self, slot: u32) -> usize {
        self.first + slot as usize * self.words
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Returns the bound below which all slots are that were ever used.
    pub(super) fn mark(&self) -> u32 {
        self.lock().slots.mark()
    }

    /// Returns whether a slot can be read.
    pub(super) fn has_pages(&self, slot: u32) -> bool {
        self.lock().slots.has_pages(slot)
    }

    /// Returns the chunks of slots that may be in use.
    pub(super) fn chunks_to_be_read(&self) -> Vec<Range<u32>> {
        let state = self.lock();
        state.slots.with_pages().into_iter().map(|chunk| state.slots.of_chunk(chunk)).collect()
    }

    /// Returns the slots that may be in use.
    pub(super) fn to_be_read(&self) -> impl Iterator<Item = u32> {
        self.chunks_to_be_read().into_iter().flatten()
    }
}

impl BlockTable {
    /// Opens the tables in the front of `region`, which has `geometry`. Used slots are not free
    /// before the recovery has searched them.
    ///
    /// # Errors
    /// When the file gets no pages for used slots.
    pub(super) fn new(region: Arc<Region>, geometry: Geometry) -> io::Result<Arc<Self>> {
        region.take_front_pages(0..8 * HEADER_WORDS)?;
        let names = PartLayout {
            first: geometry.name_at(0),
            words: NAME_WORDS,
            max: geometry.names,
            mark_at: FRESH_NAMES_AT,
        };
        let rows = PartLayout {
            first: geometry.row_at(0),
            words: ROW_WORDS,
            max: geometry.rows,
            mark_at: FRESH_ROWS_AT,
        };
        Ok(Arc::new(Self {
            names: TablePart::new(&region, names, 0)?,
            rows: TablePart::new(&region, rows, ROW_BYTES)?,
            geometry,
            region,
            released: AtomicBool::new(false),
            unprotected: AtomicU64::new(0),
            #[cfg(test)]
            after_store: Mutex::new(None),
        }))
    }

    /// Starts charging pages to `capacity`, and makes `lists` cede memory for them.
    pub(crate) fn charge_to(&self, capacity: &Budget, lists: &Arc<MetadataReserve>) {
        for part in [&self.names, &self.rows] {
            let mut state = part.lock();
            let (capacity, ceded) = (capacity.empty_charge(), lists.charge_unchecked(0));
            state.charged = Some(PageCharges { capacity, ceded, lists: Arc::clone(lists) });
            state.settle(part.paid_each);
        }
    }

    /// Initializes an empty region with `header`.
    pub(super) fn begin(&self, header: &Header) {
        let words = header.encode();
        for (at, word) in words.iter().enumerate().skip(1) {
            self.store(at, *word, Ordering::Relaxed);
        }
        self.store(0, words[0], Ordering::Release);
    }

    /// Counts `less` shuffles as protected and `more` as unprotected.
    pub(super) fn count_unprotected(&self, less: u64, more: u64) {
        self.unprotected.fetch_add(more, Ordering::Relaxed);
        self.unprotected.fetch_sub(less, Ordering::Relaxed);
    }

    /// Returns the number of shuffles with blocks that are lost if the process is killed.
    pub(crate) fn unprotected(&self) -> u64 {
        self.unprotected.load(Ordering::Relaxed)
    }

    /// Returns the region with the segments.
    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns whether an earlier process may have left rows.
    pub(crate) fn was_used(&self) -> bool {
        self.rows.mark() > 0
    }

    /// Returns the number of slots for blocks.
    pub(crate) fn rows_max(&self) -> u64 {
        self.geometry.rows.into()
    }

    /// Releases the region to another process: slots are neither taken nor cleared, and pages are
    /// neither allocated nor freed.
    pub(crate) fn release(&self) {
        let _locked = (self.names.lock(), self.rows.lock());
        self.released.store(true, Ordering::SeqCst);
    }

    /// Invalidates an empty region, so that it can be created again with another size.
    pub(crate) fn end(&self) {
        debug_assert!(self.is_released(), "nothing may be committed after the release");
        self.store(0, 0, Ordering::Release);
    }

    pub(super) fn is_released(&self) -> bool {
        self.released.load(Ordering::SeqCst)
    }
}

impl BlockTable {
    /// Takes a free slot of `part`, in a chunk with pages.
    pub(super) fn take(&self, part: &TablePart, state: &mut State) -> Result<u32, NoSlots> {
        loop {
            if self.is_released() {
                return Err(NoSlots::TooMany);
            }
            if let Some(slot) = state.slots.take() {
                return Ok(slot);
            }
            let chunk = state.slots.next_chunk().ok_or(NoSlots::TooMany)?;
            let opened = self.open(part, state, chunk);
            if opened.is_err() {
                state.settle(part.paid_each);
            }
            opened?;
        }
    }

    fn open(&self, part: &TablePart, state: &mut State, chunk: u32) -> Result<(), NoSlots> {
        let range = part.bytes_of(state.slots.of_chunk(chunk));
        state.grow(part.paid_each)?;
        self.region.take_front_pages(range).map_err(|_| NoSlots::NoPages)?;
        self.note();
        let before = state.slots.mark();
        state.slots.open(chunk);
        let mark = state.slots.mark();
        if mark > before {
            self.store(part.mark_at, mark.into(), Ordering::Release);
        }
        Ok(())
    }

    /// Frees slots whose commit words are clear.
    pub(super) fn put(&self, part: &TablePart, slots: impl IntoIterator<Item = u32>) {
        let mut state = part.lock();
        slots.into_iter().for_each(|slot| state.slots.put(slot));
        self.close_idle(part, &mut state);
    }

    /// Frees unneeded pages and adjusts the charges.
    pub(super) fn close_idle(&self, part: &TablePart, state: &mut State) {
        while !self.is_released()
            && let Some(chunk) = state.slots.close_one()
        {
            self.region.discard_front_pages(part.bytes_of(state.slots.of_chunk(chunk)));
            self.note();
        }
        state.settle(part.paid_each);
    }

    /// Frees `slots` that an earlier process used and no recovered block keeps. They were not free
    /// before, so no new block has taken them.
    pub(super) fn open_found(&self, part: &TablePart, slots: &[u32]) {
        for slot in slots {
            let word = part.word_of(*slot);
            if self.region.front()[word].load(Ordering::Relaxed) != 0 {
                self.clear(word);
            }
        }
        self.put(part, slots.iter().copied());
    }

    pub(super) fn store(&self, at: usize, value: u64, order: Ordering) {
        self.region.front()[at].store(value, order);
        self.note();
    }

    /// Marks a point at which a process may die.
    fn note(&self) {
        #[cfg(test)]
        if let Some(hook) = &mut *self.after_store.lock() {
            hook(&self.region);
        }
    }

    pub(super) fn commit<const WORDS: usize>(&self, at: usize, words: &[u64; WORDS]) {
        for (offset, word) in words.iter().enumerate().skip(1) {
            self.store(at + offset, *word, Ordering::Relaxed);
        }
        self.store(at, words[0], Ordering::Release);
    }

    pub(super) fn clear(&self, at: usize) {
        self.store(at, 0, Ordering::Release);
    }

    #[inline]
    pub(super) fn words<const WORDS: usize>(&self, at: usize) -> [u64; WORDS] {
        let mut words = [0; WORDS];
        for (word, stored) in words.iter_mut().zip(&self.region.front()[at..at + WORDS]) {
            *word = stored.load(Ordering::Acquire);
        }
        words
    }
}

impl fmt::Debug for BlockTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Table").field("geometry", &self.geometry).finish_non_exhaustive()
    }
}
