//! Pages of a file-backed region, allocated before they are touched.
//!
//! Touching a page for which the file's tmpfs has no room ends the process (SIGBUS). If the kernel
//! is asked before, it refuses with an error, and less memory is usable. Private memory gets its
//! pages by being touched.
//!
//! Invariant: free memory in the buddy has its pages, and so does every piece whose pages were not
//! discarded. Memory without pages is either beyond the *ready* blocks or a *hole*: a piece that
//! was returned and got no pages, or that a start left for later.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

#[cfg(not(miri))]
use super::buddy::UNIT_BYTES;
use super::buddy::{BLOCK_BYTES, Buddy};
use super::mapping::Mapping;
#[cfg(not(miri))]
use super::parts::{in_parts, threads_for};

/// Free bytes between recovered blocks that a start makes ready.
#[cfg(not(miri))]
const SETTLED_BYTES: usize = if cfg!(test) { 2 * BLOCK_BYTES } else { 64 << 20 };

/// Ready memory and holes.
#[derive(Debug, Default)]
pub(super) struct PageStates {
    /// Copy of the number of segment bytes with pages, readable without the lock.
    ready_bytes: AtomicU64,
    /// Set after a failed attempt, until another one succeeds. Meanwhile only the periodic upkeep
    /// and returned pieces make attempts.
    is_refused: AtomicBool,
    /// Locked while pages of segments are allocated, so that only one caller does it.
    holes: Mutex<Vec<Range<usize>>>,
    /// Bytes left in a simulated tmpfs.
    #[cfg(test)]
    remaining: Mutex<Option<usize>>,
}

/// The region for which pages are allocated.
#[derive(Clone, Copy)]
pub(super) struct RegionRef<'a> {
    pub(super) map: &'a Mapping,
    pub(super) buddy: &'a Mutex<Buddy>,
}

impl RegionRef<'_> {
    fn ready_blocks(self) -> usize {
        self.buddy.lock().ready()
    }
}

impl PageStates {
    /// Allocates the pages of `range`, which counts from the start of the mapping.
    fn take(&self, map: &Mapping, range: Range<usize>) -> io::Result<()> {
        #[cfg(test)]
        self.count(range.len())?;
        map.populate(range)
    }

    fn take_segments(&self, map: &Mapping, range: Range<usize>) -> io::Result<()> {
        let front = map.front_bytes();
        let taken = self.take(map, range.start + front..range.end + front);
        self.is_refused.store(taken.is_err(), Ordering::Relaxed);
        taken
    }

    /// Allocates pages like [`PageStates::take`], at little cost where most pages exist.
    #[cfg(not(miri))]
    fn fill(&self, map: &Mapping, range: Range<usize>) -> io::Result<()> {
        #[cfg(test)]
        self.count(map.holes(range.clone())?.iter().map(ExactSizeIterator::len).sum())?;
        map.fill(range)
    }

    #[cfg(not(miri))]
    fn fill_segments(&self, map: &Mapping, range: Range<usize>) -> io::Result<()> {
        let front = map.front_bytes();
        let filled = self.fill(map, range.start + front..range.end + front);
        self.is_refused.fetch_or(filled.is_err(), Ordering::Relaxed);
        filled
    }

    /// Takes `bytes` from the simulated tmpfs.
    #[cfg(test)]
    fn count(&self, bytes: usize) -> io::Result<()> {
        if let Some(remaining) = &mut *self.remaining.lock() {
            *remaining = remaining.checked_sub(bytes).ok_or(io::ErrorKind::StorageFull)?;
        }
        Ok(())
    }
}

impl PageStates {
    /// Returns the bytes of segments that have pages.
    pub(super) fn ready_bytes(&self) -> u64 {
        self.ready_bytes.load(Ordering::Relaxed)
    }

    /// Returns whether the last allocation of segment pages was refused.
    pub(super) fn is_refused(&self) -> bool {
        self.is_refused.load(Ordering::Relaxed)
    }

    /// Allocates pages until `bytes` bytes are ready, or all. After a refusal it makes at least one
    /// attempt.
    pub(super) fn take_until(&self, of: RegionRef<'_>, bytes: u64) -> io::Result<()> {
        self.fill_holes(of)?;
        while self.is_refused() || self.ready_bytes() < bytes {
            if !self.make_ready(of, of.ready_blocks())? {
                self.is_refused.store(false, Ordering::Relaxed);
                break;
            }
        }
        Ok(())
    }

    /// Allocates the pages of `range` of the front.
    pub(super) fn take_front(&self, map: &Mapping, range: Range<usize>) -> io::Result<()> {
        assert!(range.end <= map.front_bytes(), "{range:?} exceeds the front");
        self.take(map, range)
    }

    /// Allocates missing pages of `range` of the front, where most may exist.
    #[cfg(not(miri))]
    pub(super) fn fill_front(&self, map: &Mapping, range: Range<usize>) -> io::Result<()> {
        assert!(range.end <= map.front_bytes(), "{range:?} exceeds the front");
        self.fill(map, range)
    }

    /// Gives the pages of `range` of the front back to the kernel.
    #[cfg(not(miri))]
    pub(super) fn discard_front(&self, map: &Mapping, range: Range<usize>) {
        #[cfg(test)]
        if let Some(remaining) = &mut *self.remaining.lock() {
            *remaining = remaining.saturating_add(range.len());
        }
        map.discard_front(range);
    }

    /// Makes one more block or hole usable after an allocation failed with `seen` ready blocks.
    /// Returns false if there is none.
    pub(super) fn grow(&self, of: RegionRef<'_>, seen: usize) -> bool {
        !self.is_refused()
            && (self.make_ready(of, seen).unwrap_or(false) || self.fill_hole(of).unwrap_or(false))
    }

    fn make_ready(&self, of: RegionRef<'_>, seen: usize) -> io::Result<bool> {
        let holes = self.holes.lock();
        let block = of.ready_blocks();
        if block > seen {
            return Ok(true);
        }
        if block * BLOCK_BYTES == of.map.bytes {
            return Ok(false);
        }
        self.take_segments(of.map, block * BLOCK_BYTES..(block + 1) * BLOCK_BYTES)?;
        of.buddy.lock().make_ready(block + 1);
        self.publish(of, &holes);
        Ok(true)
    }

    /// One piece at a time, so that nobody waits for all of them.
    fn fill_holes(&self, of: RegionRef<'_>) -> io::Result<()> {
        while self.fill_hole(of)? {}
        Ok(())
    }

    /// Allocates the pages of one hole. Returns false if there is none.
    fn fill_hole(&self, of: RegionRef<'_>) -> io::Result<bool> {
        let mut holes = self.holes.lock();
        let Some(hole) = holes.last().cloned() else { return Ok(false) };
        self.take_segments(of.map, hole.clone())?;
        holes.pop();
        of.buddy.lock().free(hole.start, hole.len());
        self.publish(of, &holes);
        Ok(true)
    }

    /// Frees a piece whose pages were discarded. It becomes a hole if it gets no pages.
    pub(super) fn give_back(&self, of: RegionRef<'_>, offset: usize, bytes: usize) {
        let mut holes = self.holes.lock();
        if self.take_segments(of.map, offset..offset + bytes).is_ok() {
            of.buddy.lock().free(offset, bytes);
        } else {
            holes.push(offset..offset + bytes);
            self.publish(of, &holes);
        }
    }

    /// Allocates missing pages of free memory between recovered blocks, as far as writers need them
    /// at once. Other free memory becomes holes that are filled on demand, so that a start does not
    /// wait for them. A block that gets no pages has nothing free. Claimed memory has its pages.
    ///
    /// It does not ask the file for holes: the kernel finds the next hole by visiting all pages
    /// before it, also of other ranges.
    #[cfg(not(miri))]
    pub(super) fn settle(&self, of: RegionRef<'_>) {
        let mut left_out = self.holes.lock();
        let free = of.buddy.lock().free_ranges();
        let mut at_once = SETTLED_BYTES;
        let (pieces, later): (Vec<_>, Vec<_>) = free.into_iter().flat_map(by_block).partition(|piece| {
            let is_first = at_once > 0;
            at_once = at_once.saturating_sub(piece.len());
            is_first
        });
        let pages = pieces.iter().map(|piece| piece.len() / UNIT_BYTES).sum();
        let without_pages = |part: &[Range<usize>]| {
            let refused = part.iter().filter(|piece| self.fill_segments(of.map, (*piece).clone()).is_err());
            refused.map(|piece| piece.start / BLOCK_BYTES).collect::<Vec<_>>()
        };
        let refused = in_parts(&pieces, threads_for(pages), without_pages).concat();
        let later = later.into_iter().map(|piece| piece.start / BLOCK_BYTES);
        for block in refused.into_iter().chain(later.rev()) {
            left_out.extend(of.buddy.lock().take_free(block));
        }
        self.publish(of, &left_out);
    }

    fn publish(&self, of: RegionRef<'_>, holes: &[Range<usize>]) {
        let without: usize = holes.iter().map(ExactSizeIterator::len).sum();
        let ready = of.ready_blocks() * BLOCK_BYTES - without;
        self.ready_bytes.store(ready as u64, Ordering::Relaxed);
    }

    /// Sets the bytes left in the simulated tmpfs.
    #[cfg(test)]
    pub(super) fn limit(&self, bytes: usize) {
        *self.remaining.lock() = Some(bytes);
    }
}

/// Splits `range` at block boundaries.
#[cfg(not(miri))]
fn by_block(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let blocks = range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES);
    blocks.map(move |block| range.start.max(block * BLOCK_BYTES)..range.end.min((block + 1) * BLOCK_BYTES))
}
