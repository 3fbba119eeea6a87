//! A partition's segments in the order in which they were filled, and room for blocks at their end.
//!
//! A chain knows offsets and bytes, not blocks. Segments grow with the chain, so that 20,000 small
//! partitions do not waste the region. When memory is short, smaller segments are taken. Offsets
//! never change: dropping dead segments from the middle leaves a gap that no block points into.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;

use crate::admission::metadata_reserve::MetadataReserve;
use crate::admission::reservation::Reservation;
use crate::error::MemoryError;
use crate::region::{Fill, Region, SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, Segment, Slice};
use uniffle_base::budget::Budget;

/// Growth by doubling ends here. Segments are larger only when a block needs them.
const SEGMENT_BYTES_GROWN: u64 = 1 << 20;

/// Maximum bytes of a chain, so that offsets fit `u32`. `u32::MAX` itself marks a stray.
pub(super) const CHAIN_BYTES_MAX: u64 = u32::MAX as u64 - 1;

/// Source of segments.
///
/// Invariant: the free bytes of the region cover the bytes that tickets and their sends still hold.
#[derive(Debug)]
pub(crate) struct Supply {
    pub(crate) region: Arc<Region>,
    /// Blocks in memory: a budget of blocks rather than bytes.
    pub(crate) blocks: Budget,
    /// Charges of block lists and the memory ceded for them.
    pub(crate) lists: Arc<MetadataReserve>,
}

impl Supply {
    /// Returns by how much `budget` may be overdrawn for segments: by the region's excess over it,
    /// and by list charges that no ceded memory offsets, since lists are not in the region. Lists
    /// exist only while they are charged, so the result is never too large.
    fn overdraft(&self, budget: &Budget) -> u64 {
        let has = self.region.capacity_bytes() + self.lists.charged_bytes();
        has.saturating_sub(budget.capacity() + self.lists.ceded_bytes())
    }
}

#[derive(Debug)]
struct PlacedSegment {
    start: u64,
    segment: Segment,
}

impl PlacedSegment {
    fn end(&self) -> u64 {
        self.start + self.segment.cursor() as u64
    }
}

/// Segments that are filled one after the other.
#[derive(Debug)]
pub(crate) struct Chain {
    /// Compared by a fill to find out whether its chain is still the active one.
    id: u64,
    placed: Vec<PlacedSegment>,
    used: u64,
    capacity: u64,
    aligned_end: bool,
}

impl Chain {
    pub(crate) fn new(id: u64) -> Self {
        Self { id, placed: Vec::new(), used: 0, capacity: 0, aligned_end: false }
    }

    /// Creates a chain of segments that an earlier process filled, in this order. It has no room
    /// for more.
    pub(crate) fn restored(id: u64, segments: Vec<Segment>) -> Self {
        let mut chain = Self::new(id);
        for segment in segments {
            let (start, bytes) = (chain.used, segment.capacity() as u64);
            debug_assert_eq!(segment.remaining(), 0, "restored segments must be full");
            chain.used += bytes;
            chain.capacity += bytes;
            chain.placed.push(PlacedSegment { start, segment });
        }
        chain
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Returns the number of segments.
    pub(crate) fn segments(&self) -> usize {
        self.placed.len()
    }

    /// Returns the bytes handed out, including dead ones.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// Returns the bytes of all segments, which are charged for the chain.
    pub(crate) fn capacity(&self) -> u64 {
        self.capacity
    }

    pub(super) fn has_room_for(&self, len: u32) -> bool {
        self.used + u64::from(len) <= CHAIN_BYTES_MAX
    }

    /// Reserves room for one block at the end. All segments are allocated before any room is taken,
    /// so that a refusal leaves no dead range.
    pub(crate) fn reserve(
        &mut self,
        len: u32,
        supply: &Supply,
        funds: &mut Reservation,
        aborted: &Arc<AtomicBool>,
    ) -> Result<BlockFill, MemoryError> {
        debug_assert!(
            self.has_room_for(len) && !self.aligned_end,
            "the buffer rotates full and sealed chains"
        );
        let offset = u32::try_from(self.used).expect("a chain has at most CHAIN_BYTES_MAX bytes");
        let mut missing = len as usize;
        let room = self.placed.last().map_or(0, |last| last.segment.remaining());
        let grown = self.grow((missing).saturating_sub(room) as u64, supply, funds)?;
        let mut parts = SmallVec::new();
        if room > 0 {
            self.place(&mut missing, &mut parts);
        }
        for segment in grown {
            self.capacity += segment.capacity() as u64;
            if self.placed.is_empty() {
                // Exact, because most of many small partitions have one segment.
                self.placed.reserve_exact(1);
            }
            self.placed.push(PlacedSegment { start: self.used, segment });
            self.place(&mut missing, &mut parts);
        }
        Ok(BlockFill {
            chain: self.id,
            offset,
            len,
            parts,
            next: 0,
            settled: false,
            aborted: Arc::clone(aborted),
        })
    }

    fn place(&mut self, missing: &mut usize, parts: &mut SmallVec<[Fill; 2]>) {
        let Some(last) = self.placed.last_mut() else { return };
        let part = (*missing).min(last.segment.remaining());
        parts.extend(last.segment.fill(part));
        self.used += part as u64;
        *missing -= part;
    }

    /// Allocates segments for at least `missing` bytes.
    fn grow(
        &self,
        mut missing: u64,
        supply: &Supply,
        funds: &mut Reservation,
    ) -> Result<SmallVec<[Segment; 2]>, MemoryError> {
        let mut segments = SmallVec::new();
        let mut capacity = self.capacity;
        // After a size was unavailable, do not ask for it again for the same block.
        let mut at_most = SEGMENT_BYTES_MAX as u64;
        while missing > 0 {
            let wanted = next_segment_bytes(missing, capacity).min(at_most);
            let segment = allocate(missing, wanted, supply, funds)?;
            let got = segment.capacity() as u64;
            if got < wanted {
                at_most = got;
            }
            missing = missing.saturating_sub(got);
            capacity += got;
            segments.push(segment);
        }
        Ok(segments)
    }

    /// Marks a block's bytes as frozen, so that they can be read.
    pub(crate) fn absorb(&mut self, offset: u32, slices: impl IntoIterator<Item = Slice>) {
        let at = self.position(u64::from(offset));
        for (placed, slice) in self.placed[at..].iter_mut().zip(slices) {
            placed.segment.absorb(slice);
        }
    }

    /// Passes the pieces of a committed block to `show` as (segment number, start, end).
    pub(crate) fn pieces(&self, offset: u32, len: u32, mut show: impl FnMut(usize, usize, usize)) {
        let mut at = self.position(u64::from(offset));
        let mut from = u64::from(offset);
        let end = from + u64::from(len);
        while from < end {
            let placed = &self.placed[at];
            let until = end.min(placed.end());
            let in_segment = |position: u64| {
                usize::try_from(position - placed.start).expect("the position is within the segment")
            };
            show(at, in_segment(from), in_segment(until));
            from = until;
            at += 1;
        }
    }

    /// Returns a committed range of one segment.
    pub(crate) fn slice(&self, segment: usize, start: usize, end: usize) -> Slice {
        self.placed[segment].segment.slice(start..end).expect("only ranges of committed blocks are read")
    }

    /// Zeroes the tail up to a page boundary, so that [`Chain::whole`] can be written unchanged.
    /// The chain gives no room after this.
    pub(super) fn pad_end(&mut self) {
        self.aligned_end = true;
        if let Some(last) = self.placed.last_mut() {
            last.segment.pad_to(SEGMENT_BYTES_MIN);
        }
    }

    /// Returns all segments up to their cursors, if every byte is frozen.
    pub(crate) fn whole(&self) -> Option<Vec<Slice>> {
        self.placed.iter().map(|placed| placed.segment.readable()).collect()
    }

    /// Removes dead segments of aborted sends, even the last one, since its room is cheap to
    /// replace.
    pub(super) fn drop_dead(&mut self) -> SmallVec<[Segment; 2]> {
        let mut dead = SmallVec::new();
        for placed in self.placed.extract_if(.., |placed| placed.segment.is_dead()) {
            self.capacity -= placed.segment.capacity() as u64;
            dead.push(placed.segment);
        }
        if !dead.is_empty() {
            self.placed.shrink_to_fit();
        }
        dead
    }

    /// Returns the index of the segment that holds `offset`. For the end of the chain, returns the
    /// last segment.
    fn position(&self, offset: u64) -> usize {
        if let Some(last) = self.placed.last()
            && last.start <= offset
        {
            return self.placed.len() - 1;
        }
        self.placed.partition_point(|placed| placed.start <= offset).saturating_sub(1)
    }
}

/// Returns the size of the next segment: the chain's capacity, so that it doubles, and enough for
/// `missing`, within bounds.
fn next_segment_bytes(missing: u64, capacity: u64) -> u64 {
    if missing >= SEGMENT_BYTES_MAX as u64 {
        return SEGMENT_BYTES_MAX as u64;
    }
    let bytes = missing.max(capacity).clamp(SEGMENT_BYTES_MIN as u64, SEGMENT_BYTES_GROWN);
    // Rounded down to a power of two: a chain of 24 KiB continues with 16 KiB, not 32 KiB.
    let doubled = 1 << bytes.ilog2();
    if doubled < missing.min(SEGMENT_BYTES_GROWN) { doubled * 2 } else { doubled }
}

/// Allocates a segment of `wanted` bytes, or of the largest smaller size that is funded and free.
/// The ticket covers the missing bytes. The rest of the segment is taken only if the budget has
/// spare room.
fn allocate(
    missing: u64,
    wanted: u64,
    supply: &Supply,
    funds: &mut Reservation,
) -> Result<Segment, MemoryError> {
    let smallest = SEGMENT_BYTES_MIN as u64;
    let needed = missing.next_multiple_of(smallest);
    loop {
        let mut bytes = wanted;
        while bytes >= smallest {
            let covered = needed.min(bytes);
            let overdraft = supply.overdraft(funds.budget());
            if let Some(charge) = funds.cover_segment(covered, bytes - covered, overdraft) {
                let size = usize::try_from(bytes).expect("a segment has at most SEGMENT_BYTES_MAX bytes");
                match supply.region.allocate(size, charge) {
                    Ok(segment) => return Ok(segment),
                    Err(charge) => funds.put_back(charge, covered),
                }
            }
            bytes /= 2;
        }
        // Unneeded ceded memory is promised too.
        if !supply.lists.give_back(0) {
            return Err(MemoryError::NoCapacity { requested: missing, free: funds.budget().free() });
        }
    }
}

/// Room for one block, written by its owner alone. If dropped without a commit, written bytes are
/// zeroed and the range is dead: it can never be read.
#[derive(Debug)]
pub struct BlockFill {
    chain: u64,
    offset: u32,
    len: u32,
    parts: SmallVec<[Fill; 2]>,
    next: usize,
    settled: bool,
    /// The buffer's flag that a range in its chain died.
    aborted: Arc<AtomicBool>,
}

impl BlockFill {
    /// Returns the length of the block in bytes.
    #[inline]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Returns true for a block of no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of bytes not written yet.
    #[inline]
    pub fn remaining(&self) -> usize {
        self.parts[self.next..].iter().map(Fill::remaining).sum()
    }

    /// Appends as much of `bytes` as there is room for. Returns the number of bytes appended.
    pub fn write(&mut self, bytes: &[u8]) -> usize {
        let mut taken = 0;
        while taken < bytes.len() && self.next < self.parts.len() {
            let part = &mut self.parts[self.next];
            taken += part.write(&bytes[taken..]);
            if part.remaining() == 0 {
                self.next += 1;
            }
        }
        taken
    }

    pub(crate) fn chain(&self) -> u64 {
        self.chain
    }

    /// Returns the number of segments that hold parts of the block.
    pub(crate) fn pieces(&self) -> usize {
        self.parts.len()
    }

    pub(crate) fn offset(&self) -> u32 {
        self.offset
    }

    /// Freezes the block and returns its bytes.
    pub(crate) fn freeze(mut self) -> SmallVec<[Slice; 2]> {
        self.settled = true;
        std::mem::take(&mut self.parts).into_iter().map(Fill::freeze).collect()
    }
}

impl Drop for BlockFill {
    fn drop(&mut self) {
        if !self.settled {
            // The parts first: a thread that sees the flag must find them dropped.
            self.parts.clear();
            self.aborted.store(true, Ordering::Release);
        }
    }
}
