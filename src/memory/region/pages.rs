//! Pages of a region that lies in a file, taken before they are touched.
//!
//! A touch of a page for which the file's tmpfs has no room ends the process (SIGBUS). The kernel refuses it in order when it
//! is asked before, and then there is less memory. Private memory takes its pages by being touched.
//!
//! Invariant: what is free in the buddy, and every piece but one whose pages were discarded, has its pages. What has none is
//! either beyond the blocks that are *ready*, or a *hole*: a piece that came back and found none.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::mapping::Mapping;
use super::{BLOCK_BYTES, Region};

/// See the module.
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

impl Pages {
    /// Takes the pages of `range`, which counts from the start of the mapping.
    fn take(&self, map: &Mapping, range: Range<usize>) -> io::Result<()> {
        #[cfg(test)]
        if let Some(left) = &mut *self.left.lock() {
            let rest = left.checked_sub(range.len()).ok_or(io::ErrorKind::StorageFull)?;
            *left = rest;
        }
        map.populate(range)
    }

    fn take_segments(&self, map: &Mapping, range: Range<usize>) -> io::Result<()> {
        let front = map.front_bytes();
        let taken = self.take(map, range.start + front..range.end + front);
        self.is_refused.store(taken.is_err(), Ordering::Relaxed);
        taken
    }
}

impl Region {
    /// Bytes of segments that can be used as far as pages go; all of private memory.
    pub fn ready_bytes(&self) -> u64 {
        let ready = self.pages.as_ref().map(|pages| pages.ready_bytes.load(Ordering::Relaxed));
        ready.unwrap_or_else(|| self.capacity_bytes())
    }

    /// Whether the last attempt to take pages was refused.
    pub fn is_refused_pages(&self) -> bool {
        self.pages.as_ref().is_some_and(|pages| pages.is_refused.load(Ordering::Relaxed))
    }

    /// Takes pages until so many bytes are ready, or all; at least tries it when it was refused before.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn take_pages(&self, bytes: u64) -> io::Result<()> {
        let Some(pages) = &self.pages else { return Ok(()) };
        self.fill_holes(pages)?;
        while self.is_refused_pages() || self.ready_bytes() < bytes {
            if !self.make_ready(pages, self.ready_blocks())? {
                pages.is_refused.store(false, Ordering::Relaxed);
                break;
            }
        }
        Ok(())
    }

    /// Takes the pages of so many bytes of the front.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn take_front_pages(&self, range: Range<usize>) -> io::Result<()> {
        assert!(range.end <= self.map.front_bytes(), "{range:?} of the front");
        self.pages.as_ref().map_or(Ok(()), |pages| pages.take(&self.map, range))
    }

    /// One block more, when a segment was not to be had while `seen` were ready; false if there is none.
    pub(super) fn grow(&self, seen: usize) -> bool {
        let Some(pages) = &self.pages else { return false };
        !self.is_refused_pages() && self.make_ready(pages, seen).unwrap_or(false)
    }

    pub(super) fn ready_blocks(&self) -> usize {
        self.buddy.lock().ready()
    }

    fn make_ready(&self, pages: &Pages, seen: usize) -> io::Result<bool> {
        let holes = pages.holes.lock();
        let block = self.ready_blocks();
        if block > seen {
            return Ok(true);
        }
        if (block * BLOCK_BYTES) as u64 == self.capacity_bytes() {
            return Ok(false);
        }
        pages.take_segments(&self.map, block * BLOCK_BYTES..(block + 1) * BLOCK_BYTES)?;
        self.buddy.lock().make_ready(block + 1);
        self.publish(pages, &holes);
        Ok(true)
    }

    fn fill_holes(&self, pages: &Pages) -> io::Result<()> {
        let mut holes = pages.holes.lock();
        while let Some(&(offset, bytes)) = holes.last() {
            pages.take_segments(&self.map, offset..offset + bytes)?;
            holes.pop();
            self.buddy.lock().free(offset, bytes);
            self.publish(pages, &holes);
        }
        Ok(())
    }

    /// Gives back a piece whose pages were discarded; without pages it is a hole.
    pub(super) fn give_back_discarded(&self, offset: usize, bytes: usize) {
        if let Some(pages) = &self.pages {
            let mut holes = pages.holes.lock();
            if pages.take_segments(&self.map, offset..offset + bytes).is_err() {
                holes.push((offset, bytes));
                self.publish(pages, &holes);
                return;
            }
        }
        self.buddy.lock().free(offset, bytes);
    }

    /// What an earlier process left was claimed. Between that, it may have left holes: their pages are taken, and a block that
    /// does not get them has nothing free. Before any segment of the region is written to.
    ///
    /// # Errors
    /// When the file cannot be looked at.
    #[cfg(not(miri))]
    pub fn settle(&self) -> io::Result<()> {
        let Some(pages) = &self.pages else { return Ok(()) };
        let mut left_out = pages.holes.lock();
        let front = self.map.front_bytes();
        let end = self.ready_blocks() * BLOCK_BYTES;
        for hole in self.map.holes(front..front + end)? {
            let mut from = hole.start - front;
            while from < hole.end - front {
                let block = from / BLOCK_BYTES;
                let until = (hole.end - front).min((block + 1) * BLOCK_BYTES);
                if pages.take_segments(&self.map, from..until).is_err() {
                    left_out.extend(self.buddy.lock().take_free(block));
                }
                from = until;
            }
        }
        self.publish(pages, &left_out);
        Ok(())
    }

    fn publish(&self, pages: &Pages, holes: &[(usize, usize)]) {
        let without: usize = holes.iter().map(|(_, bytes)| bytes).sum();
        let ready = self.ready_blocks() * BLOCK_BYTES - without;
        pages.ready_bytes.store(ready as u64, Ordering::Relaxed);
    }

    /// From now on the file's tmpfs has so many bytes left.
    #[cfg(test)]
    pub fn limit_pages(&self, bytes: usize) {
        if let Some(pages) = &self.pages {
            *pages.left.lock() = Some(bytes);
        }
    }
}
