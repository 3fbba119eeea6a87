//! What an earlier process left in the region, as lists of blocks: found once at the start, taken shuffle by shuffle, and
//! what nobody takes is free.
//!
//! A partition becomes one list. Its rows are sorted by their order; the pieces of the region that they point into are
//! claimed, in the order of their places, and are its chain. A block of one piece has its place in that chain; one whose
//! pieces lay in several segments keeps its slices itself, as a stray does. Rows that contradict others are dropped. Nobody looks
//! at the bytes here: that is done before somebody is given them (`buffer::unverified`).

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use super::super::buddy::{BLOCK_BYTES, UNIT_BYTES};
use super::super::region::{Region, Segment, Slice};
use super::layout::{Extent, Row};
use super::names::Named;
use super::rows::Kept;
use super::table::Table;
use crate::budget::Budget;
use uniffle_wire::types::{BlockId, BlockMeta, PartitionId, ShuffleKey};

/// All that an earlier process left.
#[derive(Debug)]
pub(in crate::memory) struct Leftover {
    table: Arc<Table>,
    names: HashMap<ShuffleKey, u32>,
    /// Those that shuffles have again. Kept until no row of the earlier process points to them.
    named: Vec<Arc<Named>>,
    taken_names: HashSet<u32>,
    /// Names that the earlier process may have used; what is registered meanwhile has others.
    used_names: u32,
    /// Name, partition and number of each row, sorted.
    rows: Vec<(u32, i32, u32)>,
    /// By number.
    taken_rows: Vec<bool>,
}

/// A restored block, with its bytes where they do not lie in one place of the chain.
#[derive(Debug)]
pub(in crate::memory) struct Block {
    pub(in crate::memory) meta: BlockMeta,
    pub(in crate::memory) place: Place,
}

/// Where a restored block's bytes lie.
#[derive(Debug)]
pub(in crate::memory) enum Place {
    /// At this offset of the chain.
    Chain(u32),
    /// In these slices.
    Slices(SmallVec<[Slice; 2]>),
}

/// A restored partition.
#[derive(Debug)]
pub(in crate::memory) struct Partition {
    /// In the order in which they are read.
    pub(in crate::memory) blocks: Vec<Block>,
    /// The chain, in the order of their places; nothing more fits in.
    pub(in crate::memory) segments: Vec<Segment>,
    /// Their rows.
    pub(in crate::memory) kept: Kept,
    /// How many rows that is.
    pub(in crate::memory) rows: usize,
    /// The number of the last chain that it had.
    pub(in crate::memory) last_chain: u64,
}

impl Leftover {
    /// What is in the region.
    pub(in crate::memory) fn of(table: Arc<Table>) -> Self {
        let names: HashMap<_, _> = table.found_names().into_iter().map(|(at, key)| (key, at)).collect();
        let known: HashSet<u32> = names.values().copied().collect();
        let rows = table.found_rows().filter(|(_, row)| known.contains(&row.name));
        let mut rows: Vec<_> = rows.map(|(at, row)| (row.name, row.partition, at)).collect();
        rows.sort_unstable();
        let (named, taken_names) = (Vec::new(), HashSet::new());
        let (used_names, taken_rows) = (table.names.mark(), vec![false; table.rows.mark() as usize]);
        Self { table, names, named, taken_names, used_names, rows, taken_rows }
    }

    /// How many blocks were found.
    pub(in crate::memory) fn blocks(&self) -> usize {
        self.rows.len()
    }

    /// The name of a shuffle that the earlier process had.
    pub(in crate::memory) fn name(&mut self, key: &ShuffleKey) -> Option<Arc<Named>> {
        let at = *self.names.get(key)?;
        if !self.taken_names.insert(at) {
            return None;
        }
        let named = self.table.named(at);
        self.named.push(Arc::clone(&named));
        Some(named)
    }

    /// Partitions of `key` with blocks.
    pub(in crate::memory) fn partitions(&self, key: &ShuffleKey) -> Vec<PartitionId> {
        let mut partitions: Vec<_> =
            self.rows_of(key).iter().map(|(_, partition, _)| PartitionId(*partition)).collect();
        partitions.dedup();
        partitions
    }

    fn rows_of(&self, key: &ShuffleKey) -> &[(u32, i32, u32)] {
        let Some(name) = self.names.get(key) else { return &[] };
        let from = self.rows.partition_point(|row| row.0 < *name);
        let until = self.rows.partition_point(|row| row.0 <= *name);
        &self.rows[from..until]
    }

    /// The blocks of `partition` that are not in a tier (`is_elsewhere`), charged to `budget` by their segments. None if there
    /// are none.
    pub(in crate::memory) fn take(
        &mut self,
        key: &ShuffleKey,
        (partition, named): (PartitionId, &Arc<Named>),
        is_elsewhere: impl Fn(BlockId) -> bool,
        budget: &Budget,
    ) -> Option<Partition> {
        let of_partition = self.rows_of(key).iter().filter(|(_, at, _)| *at == partition.0);
        let numbers: Vec<u32> = of_partition.map(|(_, _, row)| *row).collect();
        let found = numbers.into_iter().filter_map(|at| Some((at, self.table.row(at)?)));
        let mut found: Vec<(u32, Row)> = found.filter(|(_, row)| !is_elsewhere(row.meta.block_id)).collect();
        found.sort_by_key(|(_, row)| row.order);
        let mut ids = HashSet::new();
        found.retain(|(_, row)| ids.insert(row.meta.block_id));
        let last_chain = found.last()?.1.order >> 32;
        let mut wanted = Vec::new();
        for (at, row) in found {
            let Some((extents, rows)) = self.table.extents(at, &row) else { continue };
            if rows.iter().all(|row| !std::mem::replace(&mut self.taken_rows[*row as usize], true)) {
                wanted.push(Wanted { meta: row.meta, extents, rows });
            }
        }
        let mut segments = claim(self.table.region(), &wanted, budget);
        let slices = adopt(&mut segments, &wanted);
        let starts = starts(&segments);
        segments.iter_mut().for_each(Segment::close);
        let mut kept = Kept::new(Arc::clone(named), partition);
        let (mut blocks, mut rows) = (Vec::new(), 0);
        for (Wanted { meta, extents, rows: taken }, slices) in wanted.into_iter().zip(slices) {
            let Some(slices) = slices else {
                for row in taken {
                    self.taken_rows[row as usize] = false;
                }
                continue;
            };
            rows += taken.len();
            kept.adopt(taken);
            let in_chain = slices.first().and_then(|(segment, slice)| {
                let within = (slice.place() - segments[*segment].offset()) as u64;
                let end = starts[*segment] + within + u64::from(meta.length);
                u32::try_from(end).ok().map(|end| end - meta.length)
            });
            let place = match in_chain.filter(|_| extents.len() == 1) {
                Some(at) => {
                    for (segment, slice) in slices {
                        segments[segment].absorb(slice);
                    }
                    Place::Chain(at)
                }
                None => Place::Slices(slices.into_iter().map(|(_, slice)| slice).collect()),
            };
            blocks.push(Block { meta, place });
        }
        Some(Partition { blocks, segments, kept, rows, last_chain })
    }

    /// What was not taken is free.
    pub(in crate::memory) fn finish(self) {
        let Self { table, named, taken_names, used_names, taken_rows, .. } = self;
        let used_rows = u32::try_from(taken_rows.len()).unwrap_or(u32::MAX);
        // Rows first: one must never point to a name that is another shuffle's.
        table.open_found(&table.rows, used_rows, |at| taken_rows[at as usize]);
        table.open_found(&table.names, used_names, |at| taken_names.contains(&at));
        drop(named);
    }
}

/// A block to be restored.
struct Wanted {
    meta: BlockMeta,
    extents: Vec<Extent>,
    rows: Vec<u32>,
}

/// A block's bytes, each slice with the number of its segment; none if they are not all its own.
type Adopted = Option<SmallVec<[(usize, Slice); 2]>>;

/// The same, each with the number of its extent before.
type Numbered = SmallVec<[(usize, usize, Slice); 2]>;

/// Claims the pieces of the region that `wanted` lie in, in the order of their places. What another partition has is left out.
fn claim(region: &Arc<Region>, wanted: &[Wanted], budget: &Budget) -> Vec<Segment> {
    let mut units: Vec<Range<usize>> = wanted.iter().flat_map(|block| &block.extents).map(units_of).collect();
    units.sort_unstable_by_key(|range| range.start);
    let mut segments = Vec::new();
    let mut from = 0;
    for run in merged(units) {
        from = run.start.max(from);
        while from < run.end {
            let bytes = piece_at(from, run.end);
            let charge = budget.force_charge(bytes as u64);
            segments.extend(region.claim(from, bytes, charge).ok());
            from += bytes;
        }
    }
    segments
}

/// The whole units that `extent` touches, in bytes.
fn units_of(extent: &Extent) -> Range<usize> {
    let start = usize::try_from(extent.offset).unwrap_or(usize::MAX) / UNIT_BYTES * UNIT_BYTES;
    let end = usize::try_from(extent.offset + u64::from(extent.len)).unwrap_or(usize::MAX);
    start..end.next_multiple_of(UNIT_BYTES)
}

/// Ranges without overlaps, neighbours as one; `ranges` are sorted by their starts.
fn merged(ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    let mut merged: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

/// Bytes of the largest segment that can begin at `from` and ends at `end` or before.
fn piece_at(from: usize, end: usize) -> usize {
    let aligned = if from == 0 { BLOCK_BYTES } else { 1 << from.trailing_zeros() };
    let fits = 1 << (end - from).ilog2();
    aligned.min(fits).min(BLOCK_BYTES)
}

/// Takes the bytes of each block out of `segments`, in the order of their places.
fn adopt(segments: &mut [Segment], wanted: &[Wanted]) -> Vec<Adopted> {
    let pieces = wanted.iter().enumerate();
    let pieces =
        pieces.flat_map(|(block, it)| it.extents.iter().enumerate().map(move |(n, at)| (*at, block, n)));
    let mut pieces: Vec<_> = pieces.collect();
    pieces.sort_unstable();
    let mut found: Vec<Option<Numbered>> = wanted.iter().map(|_| Some(SmallVec::new())).collect();
    for (extent, block, number) in pieces {
        let slices = adopt_one(segments, extent);
        match (slices, &mut found[block]) {
            (Some(slices), Some(all)) => {
                all.extend(slices.into_iter().map(|(at, slice)| (number, at, slice)))
            }
            (_, dead) => *dead = None,
        }
    }
    let in_order = |mut slices: Numbered| {
        slices.sort_by_key(|(number, ..)| *number);
        slices.into_iter().map(|(_, segment, slice)| (segment, slice)).collect()
    };
    found.into_iter().map(|slices| slices.map(in_order)).collect()
}

fn adopt_one(segments: &mut [Segment], extent: Extent) -> Adopted {
    let mut at = usize::try_from(extent.offset).ok()?;
    let end = at.checked_add(extent.len as usize)?;
    let mut slices = SmallVec::new();
    while at < end {
        let number = segments.partition_point(|segment| segment.offset() <= at).checked_sub(1)?;
        let segment = &mut segments[number];
        let from = at - segment.offset();
        let until = (end - segment.offset()).min(segment.capacity());
        if until <= from {
            return None;
        }
        slices.push((number, segment.adopt(from..until)?));
        at = segment.offset() + until;
    }
    Some(slices)
}

/// Where each segment begins in the chain.
fn starts(segments: &[Segment]) -> Vec<u64> {
    let starts = segments.iter().scan(0, |end, segment| {
        let start = *end;
        *end += segment.capacity() as u64;
        Some(start)
    });
    starts.collect()
}
