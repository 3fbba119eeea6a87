//! Rows in the front of a region: one per block, and one per three further pieces of a block.
//!
//! A list of blocks owns its rows and clears them when it is dropped. Invariant: a row is committed
//! after its bytes are frozen, and cleared before its segments are freed. Decoded rows are checked
//! only against themselves; `restore` compares them with each other.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use super::layout::{NO_ROW, PIECES_PER_ROW, Pieces, ROW_WORDS, RegionRange, Row};
use super::names::NameSlot;
use super::table::{BlockTable, NoSlots};
use crate::region::Slice;
use uniffle_wire::types::{BlockId, BlockMeta, PartitionId};

/// Pieces of a block after its first, and the rows they need beside the block's own. Most blocks
/// have none.
#[derive(Debug, Default)]
pub(super) struct FurtherPieces {
    pub(super) extents: Vec<RegionRange>,
    pub(super) rows: Vec<u32>,
}

/// Taken slots for rows that were not written. They are freed on drop.
#[derive(Debug)]
pub(crate) struct FreeRows {
    table: Arc<BlockTable>,
    rows: Vec<u32>,
}

impl NameSlot {
    /// Takes slots for `count` rows of the shuffle.
    ///
    /// # Errors
    /// When there are too many rows, when there are no pages for more, or when the region is
    /// released.
    pub(crate) fn rows(&self, count: usize) -> Result<FreeRows, NoSlots> {
        let table = &self.table;
        let mut taken = FreeRows { table: Arc::clone(table), rows: Vec::with_capacity(count) };
        let mut state = table.rows.lock();
        let mut refused = Ok(());
        while taken.rows.len() < count && refused.is_ok() {
            refused = table.take(&table.rows, &mut state).map(|row| taken.rows.push(row));
        }
        table.close_idle(&table.rows, &mut state);
        drop(state);
        refused.map(|()| taken)
    }
}

impl BlockTable {
    /// Returns the committed rows of an earlier process at slots with pages
    /// ([`TablePart::chunks_to_be_read`]).
    ///
    /// [`TablePart::chunks_to_be_read`]: super::table::TablePart::chunks_to_be_read
    pub(super) fn found_rows(
        &self,
        slots: impl IntoIterator<Item = u32>,
    ) -> impl Iterator<Item = (u32, Row)> {
        slots.into_iter().filter_map(move |at| Some((at, self.row(at)?)))
    }

    /// Returns the name number and the partition of a possible row at a slot with pages. Only
    /// [`BlockTable::row`] checks whether it is committed.
    #[inline]
    pub(super) fn owner(&self, at: u32) -> Option<(u32, i32)> {
        let row = self.region().front().get(self.rows.word_of(at)..)?.first_chunk::<ROW_WORDS>()?;
        Row::owner(|word| row[word].load(Ordering::Acquire))
    }

    /// Returns the committed row at a slot with pages.
    #[inline]
    pub(super) fn row(&self, at: u32) -> Option<Row> {
        let words = self.words::<ROW_WORDS>(self.rows.word_of(at));
        if words[0] == 0 { None } else { Row::decode(&words, at) }
    }

    /// Returns whether all committed blocks of an earlier process are in the region.
    pub(super) fn has_all_blocks(&self) -> bool {
        self.found_rows(self.rows.to_be_read()).all(|(_, row)| self.pieces(&row).is_some())
    }

    /// Loads rows into the processor's cache, all at once. Decoding alone would wait for one after
    /// the other.
    pub(super) fn prefetch(&self, rows: &[u32]) {
        let front = self.region().front();
        let first_word = |at: &u32| front[self.rows.word_of(*at)].load(Ordering::Relaxed);
        std::hint::black_box(rows.iter().fold(0, |all, at| all ^ first_word(at)));
    }

    /// Returns the words of a slot that a row refers to.
    fn row_words(&self, at: u32) -> Option<[u64; ROW_WORDS]> {
        self.rows.has_pages(at).then(|| self.words(self.rows.word_of(at)))
    }

    /// Returns the pieces of a block. `None` if they do not add up to the block, or are outside the
    /// region.
    pub(super) fn pieces(&self, row: &Row) -> Option<(RegionRange, FurtherPieces)> {
        let mut first = RegionRange { offset: row.offset, len: row.meta.length };
        let mut all = FurtherPieces::default();
        let (mut next, mut further) = (row.next, 0u64);
        while next != NO_ROW {
            let Pieces { pieces, next: following } = Pieces::decode(&self.row_words(next)?, next)?;
            let before = further;
            for piece in pieces.into_iter().filter(|piece| piece.len > 0) {
                further += u64::from(piece.len);
                all.extents.push(piece);
            }
            // Each row must add bytes, so that a cycle ends too.
            if further == before || further > row.meta.length.into() {
                return None;
            }
            all.rows.push(next);
            next = following;
        }
        first.len = row.meta.length.checked_sub(u32::try_from(further).ok()?)?;
        let data_bytes = self.region().capacity_bytes();
        let is_inside = |it: &RegionRange| {
            it.offset.checked_add(it.len.into()).is_some_and(|end| end <= data_bytes) && it.len > 0
        };
        (is_inside(&first) && all.extents.iter().all(is_inside)).then_some((first, all))
    }
}

impl Drop for FreeRows {
    fn drop(&mut self) {
        if !self.rows.is_empty() {
            self.table.put(&self.table.rows, self.rows.drain(..));
        }
    }
}

/// Returns the number of rows for a block of `pieces` pieces.
pub(crate) fn rows_of(pieces: usize) -> usize {
    1 + pieces.saturating_sub(1).div_ceil(PIECES_PER_ROW)
}

/// Committed rows of one list of blocks. Dropping it clears them, unless the table was released to
/// the next process. This must happen before the segments that they point into are freed.
#[derive(Debug)]
pub(crate) struct CommittedRows {
    named: Arc<NameSlot>,
    partition: PartitionId,
    rows: Vec<u32>,
}

impl CommittedRows {
    /// Creates an empty set of rows of `partition`.
    pub(crate) fn new(named: Arc<NameSlot>, partition: PartitionId) -> Self {
        Self { named, partition, rows: Vec::new() }
    }

    /// Commits a block whose bytes are frozen in `slices`.
    pub(crate) fn push(&mut self, meta: &BlockMeta, order: u64, slices: &[Slice], free: &mut FreeRows) {
        let extent = |slice: &Slice| RegionRange {
            offset: slice.place() as u64,
            len: u32::try_from(slice.len()).expect("a segment has at most 2 MiB"),
        };
        let extents = slices.iter().filter(|slice| !slice.is_empty()).map(extent);
        let extents: SmallVec<[RegionRange; 4]> = extents.collect();
        // A block of no bytes has no piece and is not recovered.
        let first = extents.first().map_or(0, |extent| extent.offset);
        let further = extents.get(1..).unwrap_or_default();
        let table = &self.named.table;
        let mut take = || free.rows.pop().expect("`rows_of` took one row per piece");
        let mut next = NO_ROW;
        if self.rows.len() == self.rows.capacity() {
            self.rows.reserve_exact((self.rows.len() / 4).max(4));
        }
        for some in further.rchunks(PIECES_PER_ROW) {
            let at = take();
            let mut pieces = [RegionRange { offset: 0, len: 0 }; PIECES_PER_ROW];
            pieces[..some.len()].copy_from_slice(some);
            table.commit(table.rows.word_of(at), &Pieces { pieces, next }.encode(at));
            self.rows.push(at);
            next = at;
        }
        let at = take();
        let (name, partition) = (self.named.at, self.partition.0);
        let row = Row { meta: *meta, name, partition, order, offset: first, next };
        table.commit(table.rows.word_of(at), &row.encode(at));
        self.rows.push(at);
    }

    /// Adds a row that an earlier process committed.
    pub(super) fn adopt(&mut self, row: u32) {
        self.rows.push(row);
    }

    /// Reserves room for `rows` rows.
    pub(super) fn reserve(&mut self, rows: usize) {
        self.rows.reserve_exact(rows);
    }
}

impl CommittedRows {
    /// Hides the blocks with these ids from the next process.
    pub(crate) fn hide(&self, ids: &HashSet<BlockId>) {
        let table = &self.named.table;
        let hidden = |at: &&u32| {
            table.row(**at).is_some_and(|row| ids.contains(&row.meta.block_id)) && !table.is_released()
        };
        self.rows.iter().filter(hidden).for_each(|at| table.clear(table.rows.word_of(*at)));
    }
}

impl Drop for CommittedRows {
    fn drop(&mut self) {
        let table = &self.named.table;
        if table.is_released() {
            return;
        }
        // A block's own row comes after the rows of its further pieces and is cleared first.
        self.rows.iter().rev().for_each(|at| table.clear(table.rows.word_of(*at)));
        table.put(&table.rows, self.rows.drain(..));
    }
}
