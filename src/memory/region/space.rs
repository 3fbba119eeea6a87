//! The space that segments are made of: the mapping, what of it is free, and its pages.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::super::buddy::{BLOCK_BYTES, Buddy};
use super::mapping::{Mapping, too_large};
use super::pages::{Of, Pages};

/// Memory of a fixed size that is handed out in [`Segment`]s.
pub struct Region {
    pub(super) map: Mapping,
    pub(super) buddy: Mutex<Buddy>,
    /// Of a region in a file.
    pub(super) pages: Option<Pages>,
    /// It is another process's: nothing of it is given back any more.
    let_go: AtomicBool,
}

impl Region {
    /// Maps at least `capacity_bytes` (whole 2 MiB blocks). Pages that are never used cost nothing.
    ///
    /// # Errors
    /// When the kernel refuses the mapping, or the size is beyond the address space.
    pub fn new(capacity_bytes: u64) -> io::Result<Arc<Self>> {
        let blocks = blocks_of(capacity_bytes)?;
        let map = Mapping::new(blocks)?;
        let (buddy, let_go) = (Mutex::new(Buddy::new(blocks)), AtomicBool::new(false));
        Ok(Arc::new(Self { map, buddy, pages: None, let_go }))
    }

    /// Bytes of a region of `capacity_bytes`: whole blocks.
    ///
    /// # Errors
    /// A size beyond the address space.
    pub fn bytes_of(capacity_bytes: u64) -> io::Result<u64> {
        Ok((blocks_of(capacity_bytes)? * BLOCK_BYTES) as u64)
    }

    /// Maps `file`, of at least `front_bytes` (whole blocks) and [`Region::bytes_of`] the capacity, shared: what is stored
    /// outlives the process. Nobody else may have it mapped, nor cut it short.
    ///
    /// # Errors
    /// As [`Region::new`].
    #[cfg(not(miri))]
    pub fn shared(
        file: impl std::os::fd::AsFd,
        front_bytes: usize,
        capacity_bytes: u64,
    ) -> io::Result<Arc<Self>> {
        let blocks = blocks_of(capacity_bytes)?;
        let map = Mapping::shared(file, front_bytes, blocks)?;
        let buddy = Mutex::new(Buddy::unready(blocks));
        Ok(Arc::new(Self { map, buddy, pages: Some(Pages::default()), let_go: AtomicBool::new(false) }))
    }

    /// The words before the segments; none of private memory.
    pub fn front(&self) -> &[AtomicU64] {
        self.map.front()
    }

    /// Bytes of the mapping.
    pub fn capacity_bytes(&self) -> u64 {
        self.map.bytes as u64
    }

    /// Asks the kernel for huge pages, or for none (the default of a new mapping is the machine's). Pages
    /// that are in use stay as they are.
    pub fn advise_huge_pages(&self, is_wanted: bool) {
        self.map.advise_huge_pages(is_wanted);
    }

    /// Takes the pages of one block that was never used. Returns false if there is none left.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn prefault_block(&self) -> io::Result<bool> {
        if self.pages.is_some() {
            let ready = self.ready_bytes();
            self.take_pages(ready.saturating_add(BLOCK_BYTES as u64).min(self.capacity_bytes()))?;
            return Ok(self.ready_bytes() > ready);
        }
        // While its pages are taken the block is in use, so that no sender waits for them.
        let Some(offset) = self.buddy.lock().take_fresh() else { return Ok(false) };
        let populated = self.map.populate(offset..offset + BLOCK_BYTES);
        self.buddy.lock().free(offset, BLOCK_BYTES);
        populated.map(|()| true)
    }

    /// Makes the end of the mapping short, which takes 0.1 s for each GB of small pages in use otherwise. In steps, since others
    /// of the process that map something wait for one.
    pub fn unlink_pages(&self) {
        const STEP: usize = 16 * BLOCK_BYTES;
        for start in (0..self.map.bytes).step_by(STEP) {
            self.map.unlink(start..self.map.bytes.min(start + STEP));
        }
    }

    /// From now on the file is another process's, and pieces that are dropped here stay as they are: to take the pages of those that were
    /// given back to the kernel would be for nobody, and that process waits for the end of this one.
    pub fn let_go(&self) {
        self.let_go.store(true, Ordering::Release);
    }

    pub(super) fn is_let_go(&self) -> bool {
        self.let_go.load(Ordering::Acquire)
    }

    /// Bytes in no segment.
    pub fn free_bytes(&self) -> u64 {
        self.buddy.lock().free_bytes()
    }

    /// Bytes of segments that can be used as far as pages go; all of private memory.
    pub fn ready_bytes(&self) -> u64 {
        self.pages.as_ref().map_or_else(|| self.capacity_bytes(), Pages::ready_bytes)
    }

    /// Whether the last attempt to take pages was refused.
    pub fn is_refused_pages(&self) -> bool {
        self.pages.as_ref().is_some_and(Pages::is_refused)
    }

    /// Takes pages until so many bytes are ready, or all; at least tries it when it was refused before.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn take_pages(&self, bytes: u64) -> io::Result<()> {
        self.pages.as_ref().map_or(Ok(()), |pages| pages.take_until(self.of(), bytes))
    }

    /// Takes the pages of so many bytes of the front.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn take_front_pages(&self, range: Range<usize>) -> io::Result<()> {
        self.pages.as_ref().map_or(Ok(()), |pages| pages.take_front(&self.map, range))
    }

    /// The same of what may have its pages, to be read.
    ///
    /// # Errors
    /// The kernel's refusal.
    #[cfg(not(miri))]
    pub fn fill_front_pages(&self, range: Range<usize>) -> io::Result<()> {
        self.pages.as_ref().map_or(Ok(()), |pages| pages.fill_front(&self.map, range))
    }

    /// Gives the pages of so many bytes of the front back to the kernel; they are zeroes until something is stored there, for which
    /// pages are to be taken again.
    #[cfg(not(miri))]
    pub fn discard_front_pages(&self, range: Range<usize>) {
        self.pages.iter().for_each(|pages| pages.discard_front(&self.map, range.clone()));
    }

    /// Parts of so many bytes of the front that have no pages, in their order.
    ///
    /// # Errors
    /// When the file cannot be looked at.
    #[cfg(not(miri))]
    pub fn front_holes(&self, range: Range<usize>) -> io::Result<Vec<Range<usize>>> {
        if self.pages.is_some() { self.map.holes(range) } else { Ok(Vec::new()) }
    }

    /// What an earlier process left was claimed. Between that, it may have left holes: their pages are taken, and a block that
    /// does not get them has nothing free. Before any segment of the region is written to.
    #[cfg(not(miri))]
    pub fn settle(&self) {
        self.pages.iter().for_each(|pages| pages.settle(self.of()));
    }

    /// From now on the file's tmpfs has so many bytes left.
    #[cfg(test)]
    pub fn limit_pages(&self, bytes: usize) {
        self.pages.iter().for_each(|pages| pages.limit(bytes));
    }

    pub(super) fn of(&self) -> Of<'_> {
        Of { map: &self.map, buddy: &self.buddy }
    }

    /// Bytes that were ever in a segment, or had their pages taken before, in whole blocks: the bound of what the region keeps
    /// resident.
    pub fn touched_bytes(&self) -> u64 {
        let buddy = self.buddy.lock();
        if self.pages.is_some() { (buddy.ready() * BLOCK_BYTES) as u64 } else { buddy.touched_bytes() }
    }

    /// The largest segment that could be had now; 0 when the region is full.
    pub fn largest_free(&self) -> usize {
        self.buddy.lock().largest_free()
    }
}

fn blocks_of(capacity_bytes: u64) -> io::Result<usize> {
    let bytes = usize::try_from(capacity_bytes).map_err(|_| too_large())?;
    Ok(bytes.div_ceil(BLOCK_BYTES).max(1))
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("bytes", &self.map.bytes).field("free", &self.free_bytes()).finish()
    }
}
