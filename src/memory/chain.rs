//! A partition's segments in the order in which they were filled, and room for blocks at their end.
//!
//! A chain knows offsets and bytes, not blocks. Segments grow with the chain, so that 20,000 small partitions do not
//! waste the region; when memory is short, smaller ones are taken. An offset, once given, stays: segments in which
//! everything died are dropped out of the middle, which leaves a gap that no block points into.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;

use super::ceded::Ceded;
use super::error::MemoryError;
use super::region::{Fill, Region, SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, Segment, Slice};
use super::reservation::Reservation;
use crate::budget::Budget;

/// Growth by doubling ends here; larger segments only when a block needs them.
const SEGMENT_BYTES_GROWN: u64 = 1 << 20;

/// Bytes a chain may hold, so that offsets fit `u32` (`u32::MAX` itself marks a stray).
pub(super) const CHAIN_BYTES_MAX: u64 = u32::MAX as u64 - 1;

/// Where segments come from.
///
/// Invariant: what is free in the region is at least what tickets and their sends still hold, so that they find it.
#[derive(Debug)]
pub(super) struct Supply {
    pub(super) region: Arc<Region>,
    /// Blocks in memory, a budget of blocks rather than bytes.
    pub(super) blocks: Budget,
    /// What the lists of blocks take, and what the region cedes for it.
    pub(super) lists: Arc<Ceded>,
}

impl Supply {
    /// By how much `budget` may be overdrawn for segments: by the room that the region has on top of it, and by what is
    /// charged for lists, which are not in the region, as far as nothing is ceded for them. Lists count only after they were
    /// charged, and as long as they are; so this is never too much.
    fn overdraft(&self, budget: &Budget) -> u64 {
        let has = self.region.capacity_bytes() + self.lists.charged_bytes();
        has.saturating_sub(budget.capacity() + self.lists.ceded_bytes())
    }
}

#[derive(Debug)]
struct Placed {
    start: u64,
    segment: Segment,
}

impl Placed {
    fn end(&self) -> u64 {
        self.start + self.segment.cursor() as u64
    }
}

/// Segments, filled one after the other.
#[derive(Debug)]
pub(super) struct Chain {
    /// Tells a fill whether the chain it was reserved in is still the active one.
    id: u64,
    placed: Vec<Placed>,
    used: u64,
    capacity: u64,
    aligned_end: bool,
}

impl Chain {
    pub(super) fn new(id: u64) -> Self {
        Self { id, placed: Vec::new(), used: 0, capacity: 0, aligned_end: false }
    }

    /// Segments that an earlier process filled, in this order. Nothing more fits in.
    pub(super) fn restored(id: u64, segments: Vec<Segment>) -> Self {
        let mut chain = Self::new(id);
        for segment in segments {
            let (start, bytes) = (chain.used, segment.capacity() as u64);
            debug_assert_eq!(segment.remaining(), 0, "it is closed");
            chain.used += bytes;
            chain.capacity += bytes;
            chain.placed.push(Placed { start, segment });
        }
        chain
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Segments that it has.
    pub(super) fn segments(&self) -> usize {
        self.placed.len()
    }

    /// Bytes handed out, the dead ones included.
    pub(super) fn used(&self) -> u64 {
        self.used
    }

    /// Bytes of the segments it holds: what is charged for it.
    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    pub(super) fn has_room_for(&self, len: u32) -> bool {
        self.used + u64::from(len) <= CHAIN_BYTES_MAX
    }

    /// Room for one block at the end. All segments are found before any room is taken, so that a refusal leaves no
    /// dead range.
    pub(super) fn reserve(
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
        let offset = u32::try_from(self.used).expect("at most CHAIN_BYTES_MAX");
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
                // Of many small partitions most have one.
                self.placed.reserve_exact(1);
            }
            self.placed.push(Placed { start: self.used, segment });
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

    /// Segments for at least `missing` bytes.
    fn grow(
        &self,
        mut missing: u64,
        supply: &Supply,
        funds: &mut Reservation,
    ) -> Result<SmallVec<[Segment; 2]>, MemoryError> {
        let mut segments = SmallVec::new();
        let mut capacity = self.capacity;
        // Once a size was not to be had, do not ask for it again for the same block.
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

    /// Notes a block's bytes as frozen, so that they can be read.
    pub(super) fn absorb(&mut self, offset: u32, slices: impl IntoIterator<Item = Slice>) {
        let at = self.position(u64::from(offset));
        for (placed, slice) in self.placed[at..].iter_mut().zip(slices) {
            placed.segment.absorb(slice);
        }
    }

    /// Shows the pieces of a committed block to `show`, as (segment's number, start, end).
    pub(super) fn pieces(&self, offset: u32, len: u32, mut show: impl FnMut(usize, usize, usize)) {
        let mut at = self.position(u64::from(offset));
        let mut from = u64::from(offset);
        let end = from + u64::from(len);
        while from < end {
            let placed = &self.placed[at];
            let until = end.min(placed.end());
            let in_segment =
                |position: u64| usize::try_from(position - placed.start).expect("within a segment");
            show(at, in_segment(from), in_segment(until));
            from = until;
            at += 1;
        }
    }

    /// A committed range of one segment.
    pub(super) fn slice(&self, segment: usize, start: usize, end: usize) -> Slice {
        self.placed[segment].segment.slice(start..end).expect("only ranges of committed blocks are read")
    }

    /// Zeroes the tail up to a page, so that [`Chain::whole`] can be written as it is. No room is given after this.
    pub(super) fn pad_end(&mut self) {
        self.aligned_end = true;
        if let Some(last) = self.placed.last_mut() {
            last.segment.pad_to(SEGMENT_BYTES_MIN);
        }
    }

    /// All segments up to their cursors, if every byte is frozen.
    pub(super) fn whole(&self) -> Option<Vec<Slice>> {
        self.placed.iter().map(|placed| placed.segment.readable()).collect()
    }

    /// Drops the segments in which everything died (aborted sends); the last one too, its room is cheap to replace.
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

    /// The segment that holds `offset`; for the end of a chain, the one after the last.
    fn position(&self, offset: u64) -> usize {
        if let Some(last) = self.placed.last()
            && last.start <= offset
        {
            return self.placed.len() - 1;
        }
        self.placed.partition_point(|placed| placed.start <= offset).saturating_sub(1)
    }
}

/// As large as the chain already is, so that it doubles, and large enough for what is missing, within bounds.
fn next_segment_bytes(missing: u64, capacity: u64) -> u64 {
    if missing >= SEGMENT_BYTES_MAX as u64 {
        return SEGMENT_BYTES_MAX as u64;
    }
    let bytes = missing.max(capacity).clamp(SEGMENT_BYTES_MIN as u64, SEGMENT_BYTES_GROWN);
    // Doubling is by the power of two below: a chain of 24 KiB goes on with 16, not with 32.
    let doubled = 1 << bytes.ilog2();
    if doubled < missing.min(SEGMENT_BYTES_GROWN) { doubled * 2 } else { doubled }
}

/// A segment of `wanted` bytes, or of the largest smaller size that can be paid for and is free. What is missing is
/// covered by the ticket; the rest of the segment is taken only while the budget has it to spare.
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
            if let Some(charge) = funds.cover_segment((covered, bytes - covered), overdraft) {
                let size = usize::try_from(bytes).expect("at most SEGMENT_BYTES_MAX");
                match supply.region.allocate(size, charge) {
                    Ok(segment) => return Ok(segment),
                    Err(charge) => funds.put_back(charge, covered),
                }
            }
            bytes /= 2;
        }
        // What was ceded and is not needed any more is promised too.
        if !supply.lists.give_back(0) {
            return Err(MemoryError::NoCapacity { asked: missing, free: funds.budget().free() });
        }
    }
}

/// Room for one block, to be written by its owner alone. Dropped without commit, what was
/// written is zeroed and the range is dead: it can never be read.
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
    /// Bytes of the block.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// True for a block of no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes not written yet.
    pub fn remaining(&self) -> usize {
        self.parts[self.next..].iter().map(Fill::remaining).sum()
    }

    /// Appends as much of `bytes` as there is room for and says how much that was.
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

    pub(super) fn chain(&self) -> u64 {
        self.chain
    }

    /// Segments that it lies in.
    pub(super) fn pieces(&self) -> usize {
        self.parts.len()
    }

    pub(super) fn offset(&self) -> u32 {
        self.offset
    }

    /// The block's bytes, frozen.
    pub(super) fn freeze(mut self) -> SmallVec<[Slice; 2]> {
        self.settled = true;
        std::mem::take(&mut self.parts).into_iter().map(Fill::freeze).collect()
    }
}

impl Drop for BlockFill {
    fn drop(&mut self) {
        if !self.settled {
            // The parts first: a thread that sees the flag must find them gone.
            self.parts.clear();
            self.aborted.store(true, Ordering::Release);
        }
    }
}
