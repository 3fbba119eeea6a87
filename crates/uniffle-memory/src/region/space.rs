//! The space that segments are allocated from: the mapping, its free pieces, and its pages.
//!
//! Invariant: a piece has one owner, and returns to the free pieces only after its last handle was
//! dropped. The caller decides which budget pays for a piece.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::buddy::{BLOCK_BYTES, Buddy};
use super::mapping::{Mapping, too_large};
use super::pages::{PageStates, RegionRef};

/// Memory of a fixed size that is handed out in [`Segment`]s.
///
/// # Why this is safe
///
/// A segment is the only handle that can hand out ranges of its piece, and its cursor only moves
/// forward, so two [`Fill`](super::Fill)s never overlap. A range is either *filling* (exactly one
/// `Fill`, which alone may write) or *frozen* (any number of [`Slice`](super::Slice)s, which may
/// only read). Freezing consumes the `Fill`. [`Segment::slice`] returns a `Slice` only inside
/// ranges that were frozen before and passed to [`Segment::absorb`].
///
/// Every handle holds the piece by `Arc`. A piece returns to the buddy only when no handle is left,
/// and the mapping lives as long as any piece. Bytes are always initialised: the mapping starts as
/// zeros and is only ever overwritten, so `&mut [u8]` over old content is sound. The caller must
/// not expose old content.
///
/// Of the segments, only discarded ones ([`Segment::discard`]) are given back to the kernel. A
/// region may also be in a file in memory ([`Region::shared`]), with a *front* of words before the
/// segments.
/// `persistent` accesses the front only as atomic words, and no segment extends into it. Pages of a
/// file are allocated before they are touched (`pages`).
///
/// [`Segment`]: super::Segment
/// [`Segment::slice`]: super::Segment::slice
/// [`Segment::absorb`]: super::Segment::absorb
/// [`Segment::discard`]: super::Segment::discard
pub struct Region {
    pub(super) map: Mapping,
    pub(super) buddy: Mutex<Buddy>,
    /// Page state. Only for a region in a file.
    pub(super) pages: Option<PageStates>,
    /// Set when the region is released to another process; nothing is freed any longer.
    released: AtomicBool,
}

impl Region {
    /// Maps at least `capacity_bytes` (whole 2 MiB blocks). Unused pages cost nothing.
    ///
    /// # Errors
    /// When the kernel refuses the mapping, or the size exceeds the address space.
    pub fn new(capacity_bytes: u64) -> io::Result<Arc<Self>> {
        let blocks = blocks_of(capacity_bytes)?;
        let map = Mapping::new(blocks)?;
        let (buddy, released) = (Mutex::new(Buddy::new(blocks)), AtomicBool::new(false));
        Ok(Arc::new(Self { map, buddy, pages: None, released }))
    }

    /// Returns the bytes of a region of `capacity_bytes`, in whole blocks.
    ///
    /// # Errors
    /// When the size exceeds the address space.
    pub fn bytes_of(capacity_bytes: u64) -> io::Result<u64> {
        Ok((blocks_of(capacity_bytes)? * BLOCK_BYTES) as u64)
    }

    /// Maps `file` shared, so that stored data outlives the process. The file must have at least
    /// `front_bytes` (whole blocks) plus [`Region::bytes_of`] the capacity. Nobody else may have it
    /// mapped or truncate it.
    ///
    /// # Errors
    /// As for [`Region::new`].
    #[cfg(not(miri))]
    pub fn shared(
        file: impl std::os::fd::AsFd,
        front_bytes: usize,
        capacity_bytes: u64,
    ) -> io::Result<Arc<Self>> {
        let blocks = blocks_of(capacity_bytes)?;
        let map = Mapping::shared(file, front_bytes, blocks)?;
        let buddy = Mutex::new(Buddy::unready(blocks));
        Ok(Arc::new(Self {
            map,
            buddy,
            pages: Some(PageStates::default()),
            released: AtomicBool::new(false),
        }))
    }

    /// Returns the words before the segments. Empty for private memory.
    pub fn front(&self) -> &[AtomicU64] {
        self.map.front()
    }

    /// Returns the bytes of all segments.
    pub fn capacity_bytes(&self) -> u64 {
        self.map.bytes as u64
    }

    /// Advises huge pages, or advises against them. Without advice the machine's default applies.
    /// Pages in use are not changed.
    pub fn advise_huge_pages(&self, is_wanted: bool) {
        self.map.advise_huge_pages(is_wanted);
    }

    /// Advises huge pages for the blocks that were ever used. Their small pages stay until the
    /// kernel (khugepaged) replaces them in the background.
    pub fn advise_used_pages(&self) {
        let used = self.buddy.lock().touched_bytes();
        self.map.advise_used_pages(usize::try_from(used).unwrap_or(self.map.bytes));
    }

    /// Allocates the pages of one block that was never used. Returns false if there is none left.
    ///
    /// # Errors
    /// The error of the kernel.
    pub fn prefault_block(&self) -> io::Result<bool> {
        if self.pages.is_some() {
            let ready = self.ready_bytes();
            self.take_pages(ready.saturating_add(BLOCK_BYTES as u64).min(self.capacity_bytes()))?;
            return Ok(self.ready_bytes() > ready);
        }
        // The block counts as in use meanwhile, so that no sender waits for its pages.
        let Some(offset) = self.buddy.lock().take_fresh() else { return Ok(false) };
        let populated = self.map.populate(offset..offset + BLOCK_BYTES);
        self.buddy.lock().free(offset, BLOCK_BYTES);
        populated.map(|()| true)
    }

    /// Unmaps the pages of a file, so that the end of the mapping is fast even with many small
    /// pages. Works in steps, because other mappings of the process wait during a step.
    pub fn unlink_pages(&self) {
        const STEP: usize = 16 * BLOCK_BYTES;
        for start in (0..self.map.bytes).step_by(STEP) {
            self.map.unlink(start..self.map.bytes.min(start + STEP));
        }
    }

    /// Releases the file to another process. Dropped pieces then stay unchanged: allocating
    /// discarded pages again would be useless, and that process waits for the end of this one.
    pub fn release(&self) {
        self.released.store(true, Ordering::Release);
    }

    pub(super) fn is_released(&self) -> bool {
        self.released.load(Ordering::Acquire)
    }

    /// Returns the bytes that are in no segment.
    pub fn free_bytes(&self) -> u64 {
        self.buddy.lock().free_bytes()
    }

    /// Returns the bytes of the region that have pages, or all bytes for private memory.
    pub fn ready_bytes(&self) -> u64 {
        self.pages.as_ref().map_or_else(|| self.capacity_bytes(), PageStates::ready_bytes)
    }

    /// Returns whether the last allocation of pages was refused.
    pub fn is_refused_pages(&self) -> bool {
        self.pages.as_ref().is_some_and(PageStates::is_refused)
    }

    /// Allocates pages until `bytes` bytes are ready, or all. After a refusal it makes at least one
    /// attempt.
    ///
    /// # Errors
    /// The error of the kernel.
    pub fn take_pages(&self, bytes: u64) -> io::Result<()> {
        self.pages.as_ref().map_or(Ok(()), |pages| pages.take_until(self.of(), bytes))
    }

    /// Allocates the pages of `range` of the front.
    ///
    /// # Errors
    /// The error of the kernel.
    pub fn take_front_pages(&self, range: Range<usize>) -> io::Result<()> {
        self.pages.as_ref().map_or(Ok(()), |pages| pages.take_front(&self.map, range))
    }

    /// Allocates missing pages of `range` of the front for reading.
    ///
    /// # Errors
    /// The error of the kernel.
    #[cfg(not(miri))]
    pub fn fill_front_pages(&self, range: Range<usize>) -> io::Result<()> {
        self.pages.as_ref().map_or(Ok(()), |pages| pages.fill_front(&self.map, range))
    }

    /// Gives the pages of `range` of the front back to the kernel. It reads as zeros. Pages must be
    /// allocated again before a store.
    #[cfg(not(miri))]
    pub fn discard_front_pages(&self, range: Range<usize>) {
        self.pages.iter().for_each(|pages| pages.discard_front(&self.map, range.clone()));
    }

    /// Returns the parts of `range` of the front without pages, in order.
    ///
    /// # Errors
    /// When the file cannot be examined.
    #[cfg(not(miri))]
    pub fn front_holes(&self, range: Range<usize>) -> io::Result<Vec<Range<usize>>> {
        if self.pages.is_some() { self.map.holes(range) } else { Ok(Vec::new()) }
    }

    /// Allocates missing pages between recovered blocks, after all of these were claimed. Free
    /// memory that gets no pages now is not handed out until it has them. Must be called before any
    /// segment is written.
    #[cfg(not(miri))]
    pub fn settle(&self) {
        self.pages.iter().for_each(|pages| pages.settle(self.of()));
    }

    /// Sets the bytes left in the file's simulated tmpfs.
    #[cfg(test)]
    pub fn limit_pages(&self, bytes: usize) {
        self.pages.iter().for_each(|pages| pages.limit(bytes));
    }

    pub(super) fn of(&self) -> RegionRef<'_> {
        RegionRef { map: &self.map, buddy: &self.buddy }
    }

    /// Returns the bytes, in whole blocks, that were ever in a segment or got their pages ahead.
    /// They bound the resident memory of the region.
    pub fn touched_bytes(&self) -> u64 {
        let buddy = self.buddy.lock();
        if self.pages.is_some() { (buddy.ready() * BLOCK_BYTES) as u64 } else { buddy.touched_bytes() }
    }

    /// Returns the size of the largest segment that could be allocated now, 0 when the region is
    /// full.
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
