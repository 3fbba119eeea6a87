//! Segments: the owners of pieces of a region, which hand out ranges of them in order.
//!
//! The cursor of a segment only moves forward, so no byte is handed out twice. A segment remembers
//! the frozen ranges that it may hand out to readers. It does not know blocks; `chain` places them.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use super::range::{Fill, RegionPiece, Slice};
use super::space::Region;
use uniffle_base::budget::Charge;

impl Region {
    /// Takes the segment of `bytes` at `offset`, which contains recovered data, paid for by
    /// `charge`.
    ///
    /// # Errors
    /// Returns the charge if no segment can be there, or if a part of it is not free.
    pub fn claim(self: &Arc<Self>, offset: usize, bytes: usize, charge: Charge) -> Result<Segment, Charge> {
        debug_assert_eq!(charge.bytes(), bytes as u64, "a segment must be charged by its size");
        if !self.buddy.lock().take(offset, bytes) {
            return Err(charge);
        }
        Ok(self.segment(offset, bytes, charge))
    }

    fn segment(self: &Arc<Self>, offset: usize, bytes: usize, charge: Charge) -> Segment {
        let piece = RegionPiece::new(Arc::clone(self), offset, bytes, charge);
        Segment { piece: Arc::new(piece), cursor: 0, frozen: SmallVec::new() }
    }

    /// Allocates a segment of `bytes`, a power of two from 4 KiB to 2 MiB, paid for by `charge`.
    ///
    /// # Errors
    /// Returns the charge if no such piece is free; a smaller one may be.
    pub fn allocate(self: &Arc<Self>, bytes: usize, charge: Charge) -> Result<Segment, Charge> {
        debug_assert_eq!(charge.bytes(), bytes as u64, "a segment must be charged by its size");
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
}

/// The owner of one piece of a [`Region`]. Hands out ranges to fill, in order, and reads frozen
/// ranges.
pub struct Segment {
    piece: Arc<RegionPiece>,
    cursor: usize,
    /// Frozen ranges, ascending and never adjacent. A single one if each range that was handed out
    /// was frozen and absorbed.
    pub(super) frozen: SmallVec<[Range<usize>; 1]>,
}

impl Segment {
    /// Returns the size of the segment in bytes.
    pub fn capacity(&self) -> usize {
        self.piece.bytes
    }

    /// Returns the number of bytes handed out so far.
    pub fn cursor(&self) -> usize {
        self.cursor
    }

    /// Returns the number of bytes not handed out yet.
    pub fn remaining(&self) -> usize {
        self.piece.bytes - self.cursor
    }

    /// Hands out the next `len` bytes, to be written by the caller alone. Returns `None` when fewer
    /// remain.
    pub fn fill(&mut self, len: usize) -> Option<Fill> {
        debug_assert!(!self.piece.is_discarded.load(Ordering::Relaxed), "the segment has no pages");
        if len > self.remaining() {
            return None;
        }
        let start = self.cursor;
        self.cursor += len;
        Some(Fill::of(Arc::clone(&self.piece), start, len))
    }

    /// Returns a slice of a recovered range behind everything handed out so far. Skipped bytes are
    /// dead. Returns `None` if the range does not fit there.
    pub fn adopt(&mut self, range: Range<usize>) -> Option<Slice> {
        let fits = self.cursor <= range.start && range.start <= range.end && range.end <= self.piece.bytes;
        if !fits {
            return None;
        }
        self.cursor = range.start;
        Some(self.fill(range.len())?.freeze_prefix(range.len()))
    }

    /// Adopts a range like [`Segment::adopt`] and makes it readable ([`Segment::slice`]), as if its
    /// slice were absorbed. Returns false if the range does not fit.
    pub fn keep(&mut self, range: Range<usize>) -> bool {
        let fits = self.cursor <= range.start && range.start <= range.end && range.end <= self.piece.bytes;
        if fits && !range.is_empty() {
            self.cursor = range.end;
            match self.frozen.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => self.frozen.push(range),
            }
        }
        fits
    }

    /// Ends handing out ranges.
    pub fn close(&mut self) {
        self.cursor = self.piece.bytes;
    }

    /// Returns its offset in the region.
    pub fn offset(&self) -> usize {
        self.piece.offset
    }

    /// Records that `slice` is frozen, so that [`Segment::slice`] can return it. It must be of this
    /// segment.
    pub fn absorb(&mut self, slice: Slice) {
        assert!(slice.is_of(&self.piece), "the slice belongs to another segment");
        let start = slice.place() - self.piece.offset;
        let end = start + slice.len();
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

    /// Hands out, zeroes and freezes the bytes up to the next multiple of `align`.
    pub fn pad_to(&mut self, align: usize) {
        let missing = (self.cursor.next_multiple_of(align) - self.cursor).min(self.remaining());
        if let Some(mut fill) = self.fill(missing) {
            fill.bytes_mut().fill(0);
            self.absorb(fill.freeze_prefix(missing));
        }
    }

    /// Returns a frozen range. `None` unless all of it was frozen and absorbed.
    pub fn slice(&self, range: Range<usize>) -> Option<Slice> {
        let at = self.frozen.partition_point(|frozen| frozen.end < range.end);
        let frozen = self.frozen.get(at)?;
        let inside = frozen.start <= range.start && range.start <= range.end && range.end <= frozen.end;
        inside.then(|| Slice::of(Arc::clone(&self.piece), range))
    }

    /// Returns everything handed out, if all of it is frozen.
    pub fn readable(&self) -> Option<Slice> {
        self.slice(0..self.cursor)
    }

    /// Gives the pages of a segment without any handed-out range back to the kernel. They are zeros
    /// at the next use. For a file they are allocated again when the segment is dropped, and
    /// nothing is handed out before.
    pub fn discard(&mut self) {
        if self.cursor == 0 && Arc::strong_count(&self.piece) == 1 {
            self.piece.region.map.discard(self.piece.offset, self.piece.bytes);
            self.piece.is_discarded.store(self.piece.region.pages.is_some(), Ordering::Relaxed);
        }
    }

    /// Returns true when nothing in it can ever be read: nothing is frozen, being filled or being
    /// read.
    pub fn is_dead(&self) -> bool {
        // A count of one is the owner's own. No handle exists that another thread could clone, and
        // the owner creates new ones only by `fill`, or by `slice` of frozen ranges.
        self.frozen.is_empty() && Arc::strong_count(&self.piece) == 1
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let piece = (self.piece.offset, self.piece.bytes);
        f.debug_struct("Segment").field("piece", &piece).field("cursor", &self.cursor).finish_non_exhaustive()
    }
}
