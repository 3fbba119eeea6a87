//! Pages of a region that lies in a file, taken before they are touched.
//!
//! A touch of a page for which the file's tmpfs has no room ends the process (SIGBUS). The kernel refuses it in order when it
//! is asked before, and then there is less memory. Private memory takes its pages by being touched.
//!
//! Invariant: what is free in the buddy, and every piece but one whose pages were discarded, has its pages. What has none is
//! either beyond the blocks that are *ready*, or a *hole*: a piece that came back and found none, or that a start left for later.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::super::buddy::{BLOCK_BYTES, Buddy};
#[cfg(not(miri))]
use super::super::{
    buddy::UNIT_BYTES,
    parts::{in_parts, threads_for},
};
use super::mapping::Mapping;

/// What a start makes ready of what is free where another process was.
#[cfg(not(miri))]
const SETTLED_BYTES: usize = if cfg!(test) { 2 * BLOCK_BYTES } else { 64 << 20 };

/// How much is ready, and the holes.
#[derive(Debug, Default)]
pub(super) struct Pages {
    /// Mirror of the state: bytes of segments with pages.
    ready_bytes: AtomicU64,
    /// The last attempt failed: the next one is the upkeep's.
    is_refused: AtomicBool,
    /// Held while pages are taken, so that it is done by one at a time.
    holes: Mutex<Vec<(usize, usize)>>,
    /// Stands in for a tmpfs of so many bytes.
    #[cfg(test)]
    left: Mutex<Option<usize>>,
}

/// The region that pages are taken for.
#[derive(Clone, Copy)]
pub(super) struct Of<'a> {
    pub(super) map: &'a Mapping,
    pub(super) buddy: &'a Mutex<Buddy>,
}

impl Of<'_> {
    fn ready_blocks(self) -> usize {
        self.buddy.lock().ready()
    }
}

impl Pages {
    /// Takes the pages of `range`, which counts from the start of the mapping.
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

    /// As [`Pages::take`], of a range most of which may have its pages, which costs little then.
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

    /// Takes so many bytes of what stands in for a tmpfs.
    #[cfg(test)]
    fn count(&self, bytes: usize) -> io::Result<()> {
        if let Some(left) = &mut *self.left.lock() {
            *left = left.checked_sub(bytes).ok_or(io::ErrorKind::StorageFull)?;
        }
        Ok(())
    }
}

impl Pages {
    /// Bytes of segments that can be used as far as pages go.
    pub(super) fn ready_bytes(&self) -> u64 {
        self.ready_bytes.load(Ordering::Relaxed)
    }

    /// Whether the last attempt to take pages of segments was refused.
    pub(super) fn is_refused(&self) -> bool {
        self.is_refused.load(Ordering::Relaxed)
    }

    /// Takes pages until so many bytes are ready, or all; at least tries it when it was refused before.
    pub(super) fn take_until(&self, of: Of<'_>, bytes: u64) -> io::Result<()> {
        self.fill_holes(of)?;
        while self.is_refused() || self.ready_bytes() < bytes {
            if !self.make_ready(of, of.ready_blocks())? {
                self.is_refused.store(false, Ordering::Relaxed);
                break;
            }
        }
        Ok(())
    }

    /// Takes the pages of so many bytes of the front.
    pub(super) fn take_front(&self, map: &Mapping, range: Range<usize>) -> io::Result<()> {
        assert!(range.end <= map.front_bytes(), "{range:?} of the front");
        self.take(map, range)
    }

    /// The same where most of them may be there.
    #[cfg(not(miri))]
    pub(super) fn fill_front(&self, map: &Mapping, range: Range<usize>) -> io::Result<()> {
        assert!(range.end <= map.front_bytes(), "{range:?} of the front");
        self.fill(map, range)
    }

    /// Gives the pages of so many bytes of the front back.
    #[cfg(not(miri))]
    pub(super) fn discard_front(&self, map: &Mapping, range: Range<usize>) {
        #[cfg(test)]
        if let Some(left) = &mut *self.left.lock() {
            *left = left.saturating_add(range.len());
        }
        map.discard_front(range);
    }

    /// One block or hole more, when a segment was not to be had while `seen` blocks were ready; false if there is none.
    pub(super) fn grow(&self, of: Of<'_>, seen: usize) -> bool {
        !self.is_refused()
            && (self.make_ready(of, seen).unwrap_or(false) || self.fill_hole(of).unwrap_or(false))
    }

    fn make_ready(&self, of: Of<'_>, seen: usize) -> io::Result<bool> {
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

    /// A piece at a time, so that nobody waits for all of them.
    fn fill_holes(&self, of: Of<'_>) -> io::Result<()> {
        while self.fill_hole(of)? {}
        Ok(())
    }

    /// Takes the pages of one hole; false if there is none.
    fn fill_hole(&self, of: Of<'_>) -> io::Result<bool> {
        let mut holes = self.holes.lock();
        let Some(&(offset, bytes)) = holes.last() else { return Ok(false) };
        self.take_segments(of.map, offset..offset + bytes)?;
        holes.pop();
        of.buddy.lock().free(offset, bytes);
        self.publish(of, &holes);
        Ok(true)
    }

    /// Gives back a piece whose pages were discarded; without pages it is a hole.
    pub(super) fn give_back(&self, of: Of<'_>, offset: usize, bytes: usize) {
        let mut holes = self.holes.lock();
        if self.take_segments(of.map, offset..offset + bytes).is_ok() {
            of.buddy.lock().free(offset, bytes);
        } else {
            holes.push((offset, bytes));
            self.publish(of, &holes);
        }
    }

    /// Takes the pages of holes that an earlier process left in what is free, as far as writers need them at once; all else that is
    /// free counts as holes, which are filled when they are wanted: a start does not wait for it. A block that does not get
    /// its pages has nothing free. What was claimed has its pages. Nothing is asked of the kernel but that: where the next hole of a
    /// file is it finds by looking at all pages before it, of other ranges too.
    #[cfg(not(miri))]
    pub(super) fn settle(&self, of: Of<'_>) {
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

    fn publish(&self, of: Of<'_>, holes: &[(usize, usize)]) {
        let without: usize = holes.iter().map(|(_, bytes)| bytes).sum();
        let ready = of.ready_blocks() * BLOCK_BYTES - without;
        self.ready_bytes.store(ready as u64, Ordering::Relaxed);
    }

    /// From now on the file's tmpfs has so many bytes left.
    #[cfg(test)]
    pub(super) fn limit(&self, bytes: usize) {
        *self.left.lock() = Some(bytes);
    }
}

/// The parts of `range` that lie in one block each.
#[cfg(not(miri))]
fn by_block(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let blocks = range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES);
    blocks.map(move |block| range.start.max(block * BLOCK_BYTES)..range.end.min((block + 1) * BLOCK_BYTES))
}
