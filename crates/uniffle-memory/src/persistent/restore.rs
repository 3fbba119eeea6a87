//! Recovery of the blocks in a region: found once at the start, taken shuffle by shuffle, and freed
//! if no shuffle takes them.
//!
//! A block has one row in the table, and further rows if it has several pieces (`layout`). The
//! blocks of a partition become one list, sorted by the order in their rows. The segments that they
//! point into are claimed in ascending order and form the chain of the list. A block of one piece
//! has an offset in that chain. A block with several pieces holds its slices itself, like a stray.
//!
//! Rows that contradict others are dropped. Block contents are not checked here, but before they
//! are served (`buffer::unverified`).

use std::collections::{HashMap, HashSet};
use std::iter;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::layout::{RegionRange, Row};
use super::names::NameSlot;
use super::rows::{CommittedRows, FurtherPieces};
use super::table::BlockTable;
use crate::InMemory;
use crate::region::buddy::{BLOCK_BYTES, UNIT_BYTES};
use crate::region::parts::{on_threads, threads_for};
use crate::region::{Region, Segment, Slice};
use uniffle_base::budget::{Budget, Charge};
use uniffle_wire::types::{BlockId, BlockMeta, PartitionId, ShuffleKey};

/// Row numbers by partition, by the number of their shuffle's name.
type Groups = hashbrown::HashMap<u32, hashbrown::HashMap<i32, Vec<u32>>>;

/// Number of rows that are loaded into the processor's cache together, because the rows of a
/// partition are far apart.
const ROWS_AT_ONCE: usize = 32;

/// All blocks that an earlier process left. Shared by registrations and restores.
#[derive(Debug)]
pub(crate) struct RecoveredBlocks {
    table: Arc<BlockTable>,
    names: HashMap<ShuffleKey, u32>,
    /// Names that registered shuffles use again.
    taken_names: Mutex<TakenNames>,
    found: FoundSlots,
    /// Row numbers found by each search thread.
    groups: Vec<Groups>,
    blocks: usize,
    taken_rows: TakenRows,
}

#[derive(Debug, Default)]
struct TakenNames {
    numbers: HashSet<u32>,
    /// Names kept until no row of the earlier process points to them.
    named: Vec<Arc<NameSlot>>,
}

/// Slots in the tables of names and rows that the earlier process may have used. Registrations
/// during the recovery get other slots, possibly between these.
#[derive(Debug)]
struct FoundSlots {
    names: Vec<Range<u32>>,
    rows: Vec<Range<u32>>,
}

/// Bitmap of the rows of restored blocks. Shared by the threads that restore partitions.
#[derive(Debug)]
struct TakenRows {
    bits: Vec<AtomicU64>,
}

impl TakenRows {
    fn new(rows: u32) -> Self {
        Self { bits: (0..rows.div_ceil(64)).map(|_| AtomicU64::new(0)).collect() }
    }

    #[inline]
    fn place(&self, row: u32) -> (&AtomicU64, u64) {
        (&self.bits[row as usize / 64], 1 << (row % 64))
    }

    /// Takes `row`. Returns false if another block has it.
    #[inline]
    fn take(&self, row: u32) -> bool {
        let (word, bit) = self.place(row);
        word.fetch_or(bit, Ordering::Relaxed) & bit == 0
    }

    fn give_back(&self, row: u32) {
        let (word, bit) = self.place(row);
        word.fetch_and(!bit, Ordering::Relaxed);
    }

    /// Returns those of `rows` that no block has. Words with all rows taken are common and skipped.
    fn not_taken(&self, rows: Range<u32>) -> impl Iterator<Item = u32> {
        let words = rows.start / 64..rows.end.div_ceil(64);
        let not_all = words.filter(|word| self.bits[*word as usize].load(Ordering::Relaxed) != u64::MAX);
        let near = not_all.flat_map(move |word| (64 * word).max(rows.start)..(64 * (word + 1)).min(rows.end));
        near.filter(|row| {
            let (word, bit) = self.place(*row);
            word.load(Ordering::Relaxed) & bit == 0
        })
    }
}

/// A search for recovered blocks on its own thread, while the start scans its disks.
#[derive(Debug)]
pub(crate) enum Search {
    /// The search runs.
    Running(JoinHandle<RecoveredBlocks>),
    /// Result of the search, until the recovery ends.
    Found(Arc<RecoveredBlocks>),
    /// The recovery has ended.
    Ended,
}

impl Search {
    /// Begins the search. Until it ends, no name and no row of `table` may be taken.
    pub(crate) fn begin(table: &Arc<BlockTable>) -> Self {
        if !table.was_used() {
            return Self::Found(Arc::new(RecoveredBlocks::of(Arc::clone(table))));
        }
        let searched = Arc::clone(table);
        let search = move || RecoveredBlocks::of(searched);
        let thread = std::thread::Builder::new().name("memory search".to_owned()).spawn(search);
        thread.map_or_else(|_| Self::Found(Arc::new(RecoveredBlocks::of(Arc::clone(table)))), Self::Running)
    }

    /// Waits for the search and returns its result. `None` when the start is complete.
    pub(crate) fn found(&mut self) -> Option<Arc<RecoveredBlocks>> {
        let found = self.end()?;
        *self = Self::Found(Arc::clone(&found));
        Some(found)
    }

    /// Ends the recovery and returns the result of the search once.
    pub(crate) fn end(&mut self) -> Option<Arc<RecoveredBlocks>> {
        match std::mem::replace(self, Self::Ended) {
            Self::Running(thread) => Some(Arc::new(joined(thread))),
            Self::Found(found) => Some(found),
            Self::Ended => None,
        }
    }
}

/// Returns the result of a thread and propagates its panic.
pub(crate) fn joined<T>(thread: JoinHandle<T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// A restored block and the position of its bytes.
#[derive(Debug)]
pub(crate) struct RestoredBlock {
    pub(crate) meta: BlockMeta,
    pub(crate) place: BlockPosition,
}

/// Position of a restored block's bytes.
#[derive(Debug)]
pub(crate) enum BlockPosition {
    /// An offset in the chain.
    Chain(u32),
    /// Slices that the block holds itself.
    Slices(Box<SmallVec<[Slice; 2]>>),
}

/// A restored partition.
#[derive(Debug)]
pub(crate) struct RestoredPartition {
    /// Blocks in read order.
    pub(crate) blocks: Vec<RestoredBlock>,
    /// Segments of the chain in ascending order. The chain has no room for more.
    pub(crate) segments: Vec<Segment>,
    /// Rows of the blocks.
    pub(crate) rows: CommittedRows,
    /// Number of rows.
    pub(crate) row_count: usize,
    /// Number of the last chain of the partition.
    pub(crate) last_chain: u64,
}

/// A shuffle that is kept for a later start: its rows and the segments that they point into.
#[derive(Debug)]
pub(crate) struct RetainedShuffle {
    named: Arc<NameSlot>,
    partitions: Vec<RestoredPartition>,
    rows: Charge,
}

impl RetainedShuffle {
    pub(crate) fn blocks(&self) -> usize {
        self.partitions.iter().map(|partition| partition.blocks.len()).sum()
    }

    /// Returns the number of rows that count as blocks in memory.
    pub(crate) fn rows(&self) -> u64 {
        self.rows.bytes()
    }

    pub(crate) fn contents(&self, shuffle: &ShuffleKey) -> InMemory {
        let blocks = self.partitions.iter().flat_map(|partition| &partition.blocks);
        InMemory {
            shuffle: shuffle.clone(),
            partitions: self.partitions.len(),
            blocks: self.blocks() as u64,
            bytes: blocks.map(|block| u64::from(block.meta.length)).sum(),
        }
    }
}

impl Drop for RetainedShuffle {
    fn drop(&mut self) {
        // Before the rows are freed, so that a later registration cannot get these blocks.
        self.named.disown();
    }
}

impl RecoveredBlocks {
    /// Finds the blocks in the region.
    pub(crate) fn of(table: Arc<BlockTable>) -> Self {
        let found =
            FoundSlots { names: table.names.chunks_to_be_read(), rows: table.rows.chunks_to_be_read() };
        let names: HashMap<_, _> = table.found_names().into_iter().map(|(at, key)| (key, at)).collect();
        let known: hashbrown::HashSet<u32> = names.values().copied().collect();
        let groups = grouped(&table, &found.rows, &known);
        let all = groups.iter().flat_map(hashbrown::HashMap::values);
        let blocks = all.flat_map(hashbrown::HashMap::values).map(Vec::len).sum();
        let (taken_names, taken_rows) = (Mutex::default(), TakenRows::new(table.rows.mark()));
        Self { table, names, taken_names, found, groups, blocks, taken_rows }
    }

    /// Returns the number of blocks found.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Takes the name that the earlier process gave a shuffle. Works once per name.
    pub(crate) fn name(&self, key: &ShuffleKey) -> Option<Arc<NameSlot>> {
        let at = *self.names.get(key)?;
        let mut taken = self.taken_names.lock();
        if !taken.numbers.insert(at) {
            return None;
        }
        let named = self.table.named(at);
        taken.named.push(Arc::clone(&named));
        Some(named)
    }

    /// Returns the partitions of `key` with blocks and the number of rows of each.
    pub(crate) fn partitions(&self, key: &ShuffleKey) -> Vec<(PartitionId, usize)> {
        let mut all: HashMap<PartitionId, usize> = HashMap::new();
        for (partition, rows) in self.groups_of(key).flatten() {
            *all.entry(PartitionId(*partition)).or_default() += rows.len();
        }
        all.into_iter().collect()
    }

    fn groups_of(&self, key: &ShuffleKey) -> impl Iterator<Item = &hashbrown::HashMap<i32, Vec<u32>>> {
        let name = self.names.get(key);
        self.groups.iter().filter_map(move |groups| groups.get(name?))
    }

    /// Returns the intact rows of a partition whose blocks are not elsewhere, in read order. Of
    /// rows with the same id, only the first is returned.
    fn rows(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        is_elsewhere: impl Fn(BlockId) -> bool,
    ) -> Vec<(u32, Row)> {
        let numbers = || self.groups_of(key).filter_map(|groups| groups.get(&partition.0));
        let mut found: Vec<(u32, Row)> = Vec::with_capacity(numbers().map(Vec::len).sum());
        for some in numbers().flat_map(|numbers| numbers.chunks(ROWS_AT_ONCE)) {
            self.table.prefetch(some);
            for at in some {
                if let Some(row) = self.table.row(*at).filter(|row| !is_elsewhere(row.meta.block_id)) {
                    found.push((*at, row));
                }
            }
        }
        found.sort_unstable_by_key(|(at, row)| (row.order, *at));
        keep_first(&mut found);
        found
    }

    /// Takes the blocks of `partition` that are not in a tier (`is_elsewhere`). Their segments are
    /// charged to `budget`. Returns `None` if there are none.
    pub(crate) fn take(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        name: &Arc<NameSlot>,
        is_elsewhere: impl Fn(BlockId) -> bool,
        budget: &Budget,
    ) -> Option<RestoredPartition> {
        let found = self.rows(key, partition, is_elsewhere);
        let last_chain = found.last()?.1.order >> 32;
        let mut wanted: Vec<BlockToRestore> = Vec::with_capacity(found.len());
        found.iter().for_each(|(at, row)| wanted.extend(self.wanted(*at, row)));
        drop(found);
        let pieces = pieces(&wanted);
        let mut segments = claim(self.table.region(), &pieces, budget);
        let places = adopt(&mut segments, &wanted, &pieces);
        segments.iter_mut().for_each(Segment::close);
        let mut rows = CommittedRows::new(Arc::clone(name), partition);
        let (mut blocks, mut row_count) = (Vec::with_capacity(wanted.len()), 0);
        rows.reserve(wanted.iter().map(|block| 1 + block.further.rows.len()).sum());
        for (wanted, place) in wanted.iter().zip(places) {
            let Some(place) = place else {
                wanted.rows().for_each(|row| self.taken_rows.give_back(row));
                continue;
            };
            row_count += 1 + wanted.further.rows.len();
            wanted.rows().for_each(|row| rows.adopt(row));
            blocks.push(RestoredBlock { meta: wanted.meta, place });
        }
        Some(RestoredPartition { blocks, segments, rows, row_count, last_chain })
    }

    /// Returns the block of a row, if it is complete and no other block has its rows.
    fn wanted(&self, at: u32, row: &Row) -> Option<BlockToRestore> {
        let (first, further) = self.table.pieces(row)?;
        // A row that another block has taken stays with it. In a table without contradictions, a
        // block gets all its rows or none.
        let is_its_own =
            self.taken_rows.take(at) && further.rows.iter().all(|row| self.taken_rows.take(*row));
        is_its_own.then_some(BlockToRestore { meta: row.meta, row: at, first, further })
    }

    /// Takes all unregistered shuffles that `is_awaited` accepts. Segments are charged to `budget`
    /// and rows to `rows`.
    pub(super) fn take_shuffles(
        &self,
        is_awaited: impl Fn(&ShuffleKey) -> bool,
        budget: &Budget,
        rows: &Budget,
    ) -> HashMap<ShuffleKey, RetainedShuffle> {
        let mut all = HashMap::new();
        for key in self.names.keys().filter(|key| is_awaited(key)) {
            let Some(named) = self.name(key) else { continue };
            let ids = self.partitions(key).into_iter();
            let taken = ids.filter_map(|(id, _)| self.take(key, id, &named, |_| false, budget));
            let partitions: Vec<_> = taken.collect();
            let count: usize = partitions.iter().map(|partition| partition.row_count).sum();
            let rows = rows.charge_unchecked(count as u64);
            all.insert(key.clone(), RetainedShuffle { named, partitions, rows });
        }
        all
    }

    /// Frees everything that was not taken. Called once, when all restores have ended.
    pub(crate) fn finish(&self) {
        let Self { table, found, taken_rows, .. } = self;
        let taken_names = std::mem::take(&mut *self.taken_names.lock());
        // Rows first: a row must never point to a name of another shuffle.
        let rows: Vec<u32> = found.rows.iter().flat_map(|rows| taken_rows.not_taken(rows.clone())).collect();
        table.open_found(&table.rows, &rows);
        let names = found.names.iter().cloned().flatten();
        let names: Vec<u32> = names.filter(|at| !taken_names.numbers.contains(at)).collect();
        table.open_found(&table.names, &names);
        drop(taken_names);
    }
}

/// Keeps the first of blocks with the same id. Duplicates are rare.
fn keep_first(found: &mut Vec<(u32, Row)>) {
    let ids = found.iter().map(|(_, row)| row.meta.block_id);
    // Ids ascend if tasks ran one after the other, which is common.
    if ids.clone().is_sorted_by(|one, next| one < next) {
        return;
    }
    let mut ids: Vec<BlockId> = ids.collect();
    ids.sort_unstable();
    if ids.is_sorted_by(|one, next| one < next) {
        return;
    }
    let mut seen = hashbrown::HashSet::with_capacity(ids.len());
    found.retain(|(_, row)| seen.insert(row.meta.block_id));
}

/// Groups the rows of named shuffles by partition. Each thread takes one chunk after the other and
/// returns its own groups.
fn grouped(table: &BlockTable, chunks: &[Range<u32>], known: &hashbrown::HashSet<u32>) -> Vec<Groups> {
    let (rows, next) = (chunks.iter().map(|chunk| chunk.len()).sum(), AtomicUsize::new(0));
    on_threads(threads_for(rows), || {
        let mut groups = Groups::new();
        let taken = std::iter::from_fn(|| chunks.get(next.fetch_add(1, Ordering::Relaxed)));
        for at in taken.cloned().flatten() {
            let Some((name, partition)) = table.owner(at) else { continue };
            if known.contains(&name) {
                groups.entry(name).or_default().entry(partition).or_default().push(at);
            }
        }
        groups
    })
}

/// A block to restore. Most have one piece.
struct BlockToRestore {
    meta: BlockMeta,
    row: u32,
    first: RegionRange,
    further: FurtherPieces,
}

impl BlockToRestore {
    fn extents(&self) -> impl Iterator<Item = RegionRange> {
        iter::once(self.first).chain(self.further.extents.iter().copied())
    }

    /// Returns all rows of the block. Its own row is the last, because it is cleared first.
    fn rows(&self) -> impl Iterator<Item = u32> {
        self.further.rows.iter().copied().chain(iter::once(self.row))
    }

    fn has_one_piece(&self) -> bool {
        self.further.extents.is_empty()
    }
}

/// Slices of a scattered block, each with its piece number.
type NumberedSlices = SmallVec<[(usize, Slice); 2]>;

/// A piece of a block, ordered by its place in the region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct BlockPiece {
    extent: RegionRange,
    /// Index of the block.
    block: usize,
    /// Number of the piece within the block.
    number: usize,
}

/// Returns the pieces of `wanted` in ascending order.
fn pieces(wanted: &[BlockToRestore]) -> Vec<BlockPiece> {
    let mut pieces = Vec::with_capacity(wanted.len());
    for (block, it) in wanted.iter().enumerate() {
        let piece = |(number, extent)| BlockPiece { extent, block, number };
        pieces.extend(it.extents().enumerate().map(piece));
    }
    pieces.sort_unstable();
    pieces
}

/// Claims the segments that `pieces` are in, in the same order. Parts of other partitions are
/// skipped.
fn claim(region: &Arc<Region>, pieces: &[BlockPiece], budget: &Budget) -> Vec<Segment> {
    let mut segments = Vec::new();
    let mut from = 0;
    for run in merged(pieces.iter().map(|piece| units_of(&piece.extent))) {
        from = run.start.max(from);
        while from < run.end {
            let bytes = piece_at(from, run.end);
            let charge = budget.charge_unchecked(bytes as u64);
            segments.extend(region.claim(from, bytes, charge).ok());
            from += bytes;
        }
    }
    segments
}

/// Returns the byte range of all units that `extent` touches.
fn units_of(extent: &RegionRange) -> Range<usize> {
    let start = usize::try_from(extent.offset).unwrap_or(usize::MAX) / UNIT_BYTES * UNIT_BYTES;
    let end = usize::try_from(extent.offset + u64::from(extent.len)).unwrap_or(usize::MAX);
    start..end.next_multiple_of(UNIT_BYTES)
}

/// Merges overlapping and adjacent ranges. `ranges` are sorted by their starts.
fn merged(ranges: impl Iterator<Item = Range<usize>>) -> Vec<Range<usize>> {
    let mut merged: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

/// Returns the size of the largest segment that can begin at `from` and ends at `end` or before.
fn piece_at(from: usize, end: usize) -> usize {
    let aligned = if from == 0 { BLOCK_BYTES } else { 1 << from.trailing_zeros() };
    let fits = 1 << (end - from).ilog2();
    aligned.min(fits).min(BLOCK_BYTES)
}

/// Takes the bytes of each block out of `segments`. Returns their positions, with `None` for a
/// block that shares bytes with another.
fn adopt(
    segments: &mut [Segment],
    wanted: &[BlockToRestore],
    pieces: &[BlockPiece],
) -> Vec<Option<BlockPosition>> {
    let starts = starts(segments);
    let mut places: Vec<Option<BlockPosition>> = Vec::new();
    places.resize_with(wanted.len(), || None);
    let mut scattered: HashMap<usize, Option<NumberedSlices>> = HashMap::new();
    let mut near = 0;
    for BlockPiece { extent, block, number } in pieces.iter().copied() {
        near = segment_of(segments, near, extent);
        if wanted[block].has_one_piece()
            && let Some(at) = place_in_chain(&starts, segments, near, extent)
        {
            places[block] = absorbed(segments, near, extent).then_some(BlockPosition::Chain(at));
            continue;
        }
        let all = scattered.entry(block).or_insert_with(|| Some(SmallVec::new()));
        match (adopt_one(segments, near, extent), &mut *all) {
            (Some(slices), Some(all)) => all.extend(slices.into_iter().map(|slice| (number, slice))),
            (_, dead) => *dead = None,
        }
    }
    for (block, slices) in scattered {
        places[block] = slices.map(|mut slices| {
            slices.sort_by_key(|(number, _)| *number);
            BlockPosition::Slices(Box::new(slices.into_iter().map(|(_, slice)| slice).collect()))
        });
    }
    places
}

/// Returns the last segment that begins at `extent` or before, searching from `near`.
fn segment_of(segments: &[Segment], near: usize, extent: RegionRange) -> usize {
    let begins_before = |segment: &Segment| segment.offset() as u64 <= extent.offset;
    let further = segments.get(near + 1..).unwrap_or_default();
    near + further.iter().take_while(|segment| begins_before(segment)).count()
}

/// Returns the chain offset of an extent that begins in segment `at`. `None` beyond the offsets
/// that a chain can express.
fn place_in_chain(starts: &[u64], segments: &[Segment], at: usize, extent: RegionRange) -> Option<u32> {
    let within = extent.offset.checked_sub(segments.get(at)?.offset() as u64)?;
    let end = u32::try_from(starts[at] + within + u64::from(extent.len)).ok()?;
    Some(end - extent.len)
}

/// Segment numbers, each with a range in the segment.
type SegmentRanges = SmallVec<[(usize, Range<usize>); 2]>;

/// Splits an extent that begins in segment `at` into parts. Returns `None` if the segments are not
/// adjacent.
fn parts(segments: &[Segment], at: usize, extent: RegionRange) -> Option<SegmentRanges> {
    let mut from = usize::try_from(extent.offset).ok()?;
    let end = from.checked_add(extent.len as usize)?;
    let (mut parts, mut number) = (SegmentRanges::new(), at);
    while from < end {
        let segment = segments.get(number)?;
        let start = from.checked_sub(segment.offset())?;
        let until = (end - segment.offset()).min(segment.capacity());
        if until <= start {
            return None;
        }
        parts.push((number, start..until));
        from = segment.offset() + until;
        number += 1;
    }
    Some(parts)
}

/// Makes an extent readable as a part of the chain. Returns false if part of it is in use.
fn absorbed(segments: &mut [Segment], at: usize, extent: RegionRange) -> bool {
    if let Some(segment) = segments.get_mut(at)
        && let Some(range) = within(segment, extent)
    {
        return segment.keep(range);
    }
    let Some(parts) = parts(segments, at, extent) else { return false };
    parts.into_iter().all(|(number, range)| segments[number].keep(range))
}

/// Returns the range of an extent in a segment that contains all of it. Most extents are in one
/// segment.
fn within(segment: &Segment, extent: RegionRange) -> Option<Range<usize>> {
    let start = usize::try_from(extent.offset).ok()?.checked_sub(segment.offset())?;
    let end = start.checked_add(extent.len as usize)?;
    (extent.len > 0 && end <= segment.capacity()).then_some(start..end)
}

fn adopt_one(segments: &mut [Segment], at: usize, extent: RegionRange) -> Option<SmallVec<[Slice; 2]>> {
    let parts = parts(segments, at, extent)?;
    parts.into_iter().map(|(number, range)| segments[number].adopt(range)).collect()
}

/// Returns the chain offset at which each segment begins.
fn starts(segments: &[Segment]) -> Vec<u64> {
    let starts = segments.iter().scan(0, |end, segment| {
        let start = *end;
        *end += segment.capacity() as u64;
        Some(start)
    });
    starts.collect()
}
