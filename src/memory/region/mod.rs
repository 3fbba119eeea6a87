//! One mapping of memory, handed out in segments; with its `copy`, and `mapping`, and `io::uring`, the only `unsafe` of the crate.
//!
//! Not here: who pays ([`super::budget`]), which piece is free ([`super::buddy`]), what the bytes mean.
//!
//! # Why this is safe
//!
//! A [`Segment`] is the only handle that can hand out ranges of its piece, and its cursor only moves forward: two
//! [`Fill`]s never overlap. A range is either *filling* (exactly one `Fill`, which alone may write) or *frozen* (any
//! number of [`Slice`]s, which may only read), and a `Fill` is consumed by freezing. [`Segment::slice`] gives a
//! `Slice` only inside ranges that were frozen before and told to the segment by [`Segment::absorb`]. Every handle
//! holds the piece by `Arc`, so a piece returns to the buddy only when no handle is left, and the mapping lives as
//! long as any piece. Bytes are always initialised: the mapping starts as zeroes and is only ever overwritten, so
//! `&mut [u8]` over old content is sound (what may be *shown* is the caller's care).
//!
//! Freed memory stays resident and is reused first (see `buddy`), so resident memory never exceeds the region; only what is
//! ceded ([`Segment::discard`]) goes back to the kernel.
//!
//! A region may also lie in a file in memory ([`Region::shared`]), with a *front* of words before the segments. What
//! [`super::persistent`] keeps there is only ever touched as atomic words, and no segment reaches into it. Its pages are taken
//! before they are touched (`pages`).
//!
//! Checked by Miri on a plain allocation instead of the mapping:
//! `cargo +nightly miri test --manifest-path tests/miri/Cargo.toml` (seconds; needs `rustup +nightly component add miri`).

mod copy;
mod mapping;
mod pages;

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::buddy::{BLOCK_BYTES, Buddy, UNIT_BYTES};
use crate::budget::Charge;
use mapping::{Mapping, too_large};
use pages::{Of, Pages};

/// Smallest segment, and the unit of alignment of every segment.
pub const SEGMENT_BYTES_MIN: usize = UNIT_BYTES;
/// Largest segment.
pub const SEGMENT_BYTES_MAX: usize = BLOCK_BYTES;

/// Memory of a fixed size that is handed out in [`Segment`]s.
pub struct Region {
    map: Mapping,
    buddy: Mutex<Buddy>,
    /// Of a region in a file.
    pages: Option<Pages>,
}

impl Region {
    /// Maps at least `capacity_bytes` (whole 2 MiB blocks). Pages that are never used cost nothing.
    ///
    /// # Errors
    /// When the kernel refuses the mapping, or the size is beyond the address space.
    pub fn new(capacity_bytes: u64) -> io::Result<Arc<Self>> {
        let blocks = blocks_of(capacity_bytes)?;
        let map = Mapping::new(blocks)?;
        Ok(Arc::new(Self { map, buddy: Mutex::new(Buddy::new(blocks)), pages: None }))
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
        Ok(Arc::new(Self { map, buddy, pages: Some(Pages::default()) }))
    }

    /// The words before the segments; none of private memory.
    pub fn front(&self) -> &[AtomicU64] {
        self.map.front()
    }

    /// The segment of `bytes` at `offset`, in which an earlier process left something, paid for by `charge`.
    ///
    /// # Errors
    /// The charge comes back when that is no place of a segment, or a part of it is not free.
    pub fn claim(self: &Arc<Self>, offset: usize, bytes: usize, charge: Charge) -> Result<Segment, Charge> {
        debug_assert_eq!(charge.bytes(), bytes as u64, "a segment is charged by its size");
        if !self.buddy.lock().take(offset, bytes) {
            return Err(charge);
        }
        Ok(self.segment(offset, bytes, charge))
    }

    fn segment(self: &Arc<Self>, offset: usize, bytes: usize, charge: Charge) -> Segment {
        let region = Arc::clone(self);
        let piece = Piece { region, offset, bytes, is_discarded: AtomicBool::new(false), _charge: charge };
        Segment { piece: Arc::new(piece), cursor: 0, frozen: SmallVec::new() }
    }

    /// A segment of `bytes`, a power of two from 4 KiB to 2 MiB, paid for by `charge`.
    ///
    /// # Errors
    /// The charge comes back when no such piece is free; a smaller one may be.
    pub fn allocate(self: &Arc<Self>, bytes: usize, charge: Charge) -> Result<Segment, Charge> {
        debug_assert_eq!(charge.bytes(), bytes as u64, "a segment is charged by its size");
        loop {
            let ready = {
                let mut buddy = self.buddy.lock();
                if let Some(offset) = buddy.allocate(bytes) {
                    drop(buddy);
                    return Ok(self.segment(offset, bytes, charge));
                }
                buddy.ready()
            };
            if !self.pages.as_ref().is_some_and(|pages| pages.grow(self.of(), ready)) {
                return Err(charge);
            }
        }
    }

    /// Bytes of the mapping.
    pub fn capacity_bytes(&self) -> u64 {
        self.map.bytes as u64
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
    ///
    /// # Errors
    /// When the file cannot be looked at.
    #[cfg(not(miri))]
    pub fn settle(&self) -> io::Result<()> {
        self.pages.as_ref().map_or(Ok(()), |pages| pages.settle(self.of()))
    }

    /// From now on the file's tmpfs has so many bytes left.
    #[cfg(test)]
    pub fn limit_pages(&self, bytes: usize) {
        self.pages.iter().for_each(|pages| pages.limit(bytes));
    }

    fn of(&self) -> Of<'_> {
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

/// An allocated piece of a region, alive while any handle is.
struct Piece {
    region: Arc<Region>,
    offset: usize,
    bytes: usize,
    /// Its pages are to be taken before it is used again.
    is_discarded: AtomicBool,
    /// Given back by the field's drop, which runs after [`Piece::drop`]: memory first, then the charge. The other
    /// way round, a new charge could be granted for which there is no memory yet.
    _charge: Charge,
}

impl Piece {
    fn at(&self, start: usize, len: usize) -> *mut u8 {
        assert!(start + len <= self.bytes, "range {start}+{len} of a piece of {}", self.bytes);
        self.region.map.at(self.offset + start, len)
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if let (true, Some(pages)) = (*self.is_discarded.get_mut(), &self.region.pages) {
            return pages.give_back(self.region.of(), self.offset, self.bytes);
        }
        self.region.buddy.lock().free(self.offset, self.bytes);
    }
}

/// The owner of one piece of a [`Region`]: hands out ranges to fill, in order, and reads what was frozen.
pub struct Segment {
    piece: Arc<Piece>,
    cursor: usize,
    /// Frozen ranges, ascending, never touching each other: one when nothing was aborted and nothing is late.
    frozen: SmallVec<[Range<usize>; 1]>,
}

impl Segment {
    /// Bytes of the segment.
    pub fn capacity(&self) -> usize {
        self.piece.bytes
    }

    /// Bytes handed out so far.
    pub fn cursor(&self) -> usize {
        self.cursor
    }

    /// Bytes not handed out yet.
    pub fn remaining(&self) -> usize {
        self.piece.bytes - self.cursor
    }

    /// The next `len` bytes, to be written by the caller alone; `None` when fewer remain.
    pub fn fill(&mut self, len: usize) -> Option<Fill> {
        debug_assert!(!self.piece.is_discarded.load(Ordering::Relaxed), "it has no pages");
        if len > self.remaining() {
            return None;
        }
        let start = self.cursor;
        self.cursor += len;
        Some(Fill { piece: Some(Arc::clone(&self.piece)), start, len, written: 0, dirty: 0 })
    }

    /// A range that an earlier process filled, behind all that was handed out so far; what is skipped is dead. `None` if that is
    /// no such range.
    pub fn adopt(&mut self, range: Range<usize>) -> Option<Slice> {
        let fits = self.cursor <= range.start && range.start <= range.end && range.end <= self.piece.bytes;
        if !fits {
            return None;
        }
        self.cursor = range.start;
        Some(self.fill(range.len())?.freeze_prefix(range.len()))
    }

    /// Hands out nothing more.
    pub fn close(&mut self) {
        self.cursor = self.piece.bytes;
    }

    /// Where it lies in the region.
    pub fn offset(&self) -> usize {
        self.piece.offset
    }

    /// Notes that `slice` is frozen, so that [`Segment::slice`] can show it. It must be of this segment.
    pub fn absorb(&mut self, slice: Slice) {
        assert!(Arc::ptr_eq(&self.piece, &slice.piece), "a slice of another segment");
        let Range { start, end } = slice.start..slice.start + slice.len;
        if start == end {
            return;
        }
        if let Some(last) = self.frozen.last_mut()
            && last.end == start
        {
            last.end = end;
            return;
        }
        let at = self.frozen.partition_point(|range| range.start < start);
        self.frozen.insert(at, start..end);
        if at + 1 < self.frozen.len() && self.frozen[at + 1].start == end {
            self.frozen[at].end = self.frozen.remove(at + 1).end;
        }
        if at > 0 && self.frozen[at - 1].end == start {
            self.frozen[at - 1].end = self.frozen.remove(at).end;
        }
    }

    /// Hands out, zeroes and freezes what is missing to a multiple of `align`.
    pub fn pad_to(&mut self, align: usize) {
        let missing = (self.cursor.next_multiple_of(align) - self.cursor).min(self.remaining());
        if let Some(mut fill) = self.fill(missing) {
            fill.bytes_mut().fill(0);
            self.absorb(fill.freeze_prefix(missing));
        }
    }

    /// A frozen range; `None` unless all of it was frozen and absorbed.
    pub fn slice(&self, range: Range<usize>) -> Option<Slice> {
        let at = self.frozen.partition_point(|frozen| frozen.end < range.end);
        let frozen = self.frozen.get(at)?;
        let inside = frozen.start <= range.start && range.start <= range.end && range.end <= frozen.end;
        inside.then(|| Slice { piece: Arc::clone(&self.piece), start: range.start, len: range.len() })
    }

    /// All that was handed out, if all of it is frozen.
    pub fn readable(&self) -> Option<Slice> {
        self.slice(0..self.cursor)
    }

    /// Gives the pages of a segment of which nothing was ever handed out back to the kernel; they are zeroes when they are
    /// next used. In a file they are taken again when the segment is dropped, and nothing is handed out of it meanwhile.
    pub fn discard(&mut self) {
        if self.cursor == 0 && Arc::strong_count(&self.piece) == 1 {
            self.piece.region.map.discard(self.piece.offset, self.piece.bytes);
            self.piece.is_discarded.store(self.piece.region.pages.is_some(), Ordering::Relaxed);
        }
    }

    /// True when nothing in it can ever be read: nothing is frozen, being filled or being read.
    pub fn is_dead(&self) -> bool {
        // A count of one is the owner's own: there is no handle that another thread could clone, and the owner
        // makes new ones only by `fill`, or by `slice` of what is frozen.
        self.frozen.is_empty() && Arc::strong_count(&self.piece) == 1
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let piece = (self.piece.offset, self.piece.bytes);
        f.debug_struct("Segment").field("piece", &piece).field("cursor", &self.cursor).finish_non_exhaustive()
    }
}

/// A range that only its owner may write. Dropped without freezing, what was written is zeroed and can never be read.
///
/// What was not written is left alone: it is no more readable than the rest, and zeroing it would touch untouched
/// pages and let a sender that announces 512 MiB and hangs up cost the worker a memset of 512 MiB.
pub struct Fill {
    /// `None` only after freezing, so that `drop` knows.
    piece: Option<Arc<Piece>>,
    start: usize,
    len: usize,
    written: usize,
    /// The prefix that may differ from what was here before.
    dirty: usize,
}

impl Fill {
    /// Bytes of the range.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a range of no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes not written yet.
    pub fn remaining(&self) -> usize {
        self.len - self.written
    }

    /// Appends as much of `bytes` as there is room for and says how much that was.
    pub fn write(&mut self, bytes: &[u8]) -> usize {
        let taken = bytes.len().min(self.remaining());
        let from = self.written;
        copy::copy(&mut self.range_mut()[from..from + taken], &bytes[..taken]);
        self.written += taken;
        self.dirty = self.dirty.max(self.written);
        taken
    }

    /// The whole range. It may show what an earlier owner of the memory left there: write before showing it.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.dirty = self.len;
        self.range_mut()
    }

    fn range_mut(&mut self) -> &mut [u8] {
        let Some(piece) = &self.piece else { return &mut [] };
        let start = piece.at(self.start, self.len);
        // SAFETY: `at` checked that the range lies in the piece, which `self` keeps alive and mapped; its bytes are
        // always initialised. No other `Fill` or `Slice` covers it: the segment handed it out once, and it becomes
        // readable only through `freeze*`, which consumes `self`.
        unsafe { std::slice::from_raw_parts_mut(start, self.len) }
    }

    /// Ends writing. The slice covers what was written; the rest, if any, is dead.
    #[must_use]
    pub fn freeze(self) -> Slice {
        let written = self.written;
        self.freeze_prefix(written)
    }

    /// Ends writing that went through [`Fill::bytes_mut`]: the first `len` bytes are good, the rest is dead.
    #[must_use]
    pub fn freeze_prefix(mut self, len: usize) -> Slice {
        assert!(len <= self.len, "{len} bytes frozen of {}", self.len);
        self.zero_dirty_from(len);
        let piece = self.piece.take().expect("only freezing takes the piece, and it consumes the fill");
        Slice { piece, start: self.start, len }
    }

    fn zero_dirty_from(&mut self, start: usize) {
        let dirty = self.dirty;
        if let Some(bytes) = self.range_mut().get_mut(start..dirty) {
            bytes.fill(0);
        }
    }
}

impl Drop for Fill {
    fn drop(&mut self) {
        self.zero_dirty_from(0);
    }
}

impl fmt::Debug for Fill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fill").field("len", &self.len).field("written", &self.written).finish_non_exhaustive()
    }
}

/// A frozen range. Keeps its segment's memory, and what was charged for it, until it is dropped.
#[derive(Clone)]
pub struct Slice {
    piece: Arc<Piece>,
    start: usize,
    len: usize,
}

impl Slice {
    /// Bytes of the range.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a range of no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it lies in the region.
    pub fn place(&self) -> usize {
        self.piece.offset + self.start
    }

    /// A part of it.
    pub fn slice(&self, range: Range<usize>) -> Slice {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of a slice of {}", self.len);
        Slice { piece: Arc::clone(&self.piece), start: self.start + range.start, len: range.len() }
    }

    /// The same memory as `Bytes`, not copied.
    #[must_use]
    pub fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Slice {
    fn as_ref(&self) -> &[u8] {
        let start = self.piece.at(self.start, self.len);
        // SAFETY: `at` checked that the range lies in the piece, which `self` keeps alive and mapped; its bytes are
        // always initialised. A slice only exists for frozen ranges, which no `Fill` covers any more, so there is no writer.
        unsafe { std::slice::from_raw_parts(start, self.len) }
    }
}

impl fmt::Debug for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slice").field("start", &self.start).field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
