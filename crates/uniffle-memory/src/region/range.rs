//! Ranges of a piece of a region: a range that only its owner writes, or a frozen range with many
//! readers.
//!
//! Invariant: a frozen range is never written again. A range that is dropped before it is frozen is
//! zeroed as far as it was written, and can never be read.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bytes::Bytes;

use super::copy;
use super::space::Region;
use uniffle_base::budget::Charge;

/// An allocated piece of a region, alive while any handle exists.
pub(super) struct RegionPiece {
    pub(super) region: Arc<Region>,
    pub(super) offset: usize,
    pub(super) bytes: usize,
    /// True if the pages must be allocated again before reuse.
    pub(super) is_discarded: AtomicBool,
    /// Released by the field's drop, which runs after [`RegionPiece::drop`]: memory first, then the
    /// charge. In the other order, a new charge could be granted for which there is no memory yet.
    _charge: Charge,
}

impl RegionPiece {
    /// Creates a piece of `bytes` at `offset`, which must have no other owner.
    pub(super) fn new(region: Arc<Region>, offset: usize, bytes: usize, charge: Charge) -> Self {
        Self { region, offset, bytes, is_discarded: AtomicBool::new(false), _charge: charge }
    }

    /// Returns the address of a range of the piece.
    pub(super) fn at(&self, start: usize, len: usize) -> *mut u8 {
        assert!(start + len <= self.bytes, "range {start}+{len} exceeds a piece of {} bytes", self.bytes);
        self.region.map.at(self.offset + start, len)
    }
}

impl Drop for RegionPiece {
    fn drop(&mut self) {
        if self.region.is_released() {
            return;
        }
        if let (true, Some(pages)) = (*self.is_discarded.get_mut(), &self.region.pages) {
            return pages.give_back(self.region.of(), self.offset, self.bytes);
        }
        self.region.buddy.lock().free(self.offset, self.bytes);
    }
}

/// A range that only its owner may write. If dropped without freezing, written bytes are zeroed and
/// can never be read.
///
/// Unwritten bytes are left alone. They are no more readable than the rest, and zeroing them would
/// touch unused pages. A sender that announces 512 MiB and disconnects would then cost the worker a
/// memset of 512 MiB.
pub struct Fill {
    /// Empty only after freezing, which tells `drop` that nothing must be zeroed.
    piece: Option<Arc<RegionPiece>>,
    start: usize,
    len: usize,
    written: usize,
    /// Length of the prefix that may differ from the previous content.
    dirty: usize,
}

impl Fill {
    /// Creates a fill of a range that was handed out just now, and only once.
    pub(super) fn of(piece: Arc<RegionPiece>, start: usize, len: usize) -> Self {
        Self { piece: Some(piece), start, len, written: 0, dirty: 0 }
    }

    /// Returns the length of the range in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true for a range of no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of bytes not written yet.
    pub fn remaining(&self) -> usize {
        self.len - self.written
    }

    /// Appends as much of `bytes` as there is room for. Returns the number of bytes appended.
    pub fn write(&mut self, bytes: &[u8]) -> usize {
        let taken = bytes.len().min(self.remaining());
        let from = self.written;
        copy::copy(&mut self.range_mut()[from..from + taken], &bytes[..taken]);
        self.written += taken;
        self.dirty = self.dirty.max(self.written);
        taken
    }

    /// Returns the whole range. It may contain data of an earlier owner: overwrite it before
    /// exposing it.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.dirty = self.len;
        self.range_mut()
    }

    fn range_mut(&mut self) -> &mut [u8] {
        let Some(piece) = &self.piece else { return &mut [] };
        let start = piece.at(self.start, self.len);
        // SAFETY: `at` checked that the range is in the piece, which `self` keeps alive and mapped.
        // Its bytes are always initialised. No other `Fill` or `Slice` covers it: the segment
        // handed it out once, and it becomes readable only through `freeze*`, which consumes
        // `self`.
        unsafe { std::slice::from_raw_parts_mut(start, self.len) }
    }

    /// Ends writing. The slice covers the written bytes; the rest, if any, is dead.
    #[must_use]
    pub fn freeze(self) -> Slice {
        let written = self.written;
        self.freeze_prefix(written)
    }

    /// Ends writing through [`Fill::bytes_mut`]. The first `len` bytes are valid, the rest is dead.
    #[must_use]
    pub fn freeze_prefix(mut self, len: usize) -> Slice {
        assert!(len <= self.len, "cannot freeze {len} of {} bytes", self.len);
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

/// A frozen range. Keeps its segment's memory and charge until it is dropped.
#[derive(Clone)]
pub struct Slice {
    piece: Arc<RegionPiece>,
    start: usize,
    len: usize,
}

impl Slice {
    /// Creates a slice of a range that was frozen completely.
    pub(super) fn of(piece: Arc<RegionPiece>, range: Range<usize>) -> Self {
        Self { piece, start: range.start, len: range.len() }
    }

    pub(super) fn is_of(&self, piece: &Arc<RegionPiece>) -> bool {
        Arc::ptr_eq(&self.piece, piece)
    }

    /// Returns the length of the range in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true for a range of no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns its offset in the region.
    pub fn place(&self) -> usize {
        self.piece.offset + self.start
    }

    /// Returns a part of the slice.
    pub fn slice(&self, range: Range<usize>) -> Slice {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "{range:?} exceeds a slice of {} bytes",
            self.len
        );
        Slice { piece: Arc::clone(&self.piece), start: self.start + range.start, len: range.len() }
    }

    /// Converts the slice to `Bytes` without a copy.
    #[must_use]
    pub fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Slice {
    fn as_ref(&self) -> &[u8] {
        let start = self.piece.at(self.start, self.len);
        // SAFETY: `at` checked that the range is in the piece, which `self` keeps alive and mapped.
        // Its bytes are always initialised. A slice exists only for frozen ranges, which no `Fill`
        // covers any longer, so there is no writer.
        unsafe { std::slice::from_raw_parts(start, self.len) }
    }
}

impl fmt::Debug for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slice").field("start", &self.start).field("len", &self.len).finish_non_exhaustive()
    }
}
