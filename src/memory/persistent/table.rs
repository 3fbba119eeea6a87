//! Names and rows in the front of a region: taken, committed, given up. Every store into the front is made here, and the pages
//! for it are taken before.
//!
//! What is committed is there for the next process, whatever instruction this one died at: other words first, then the
//! commit word with a release store. A place is free for another owner only after its commit word was cleared.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::super::buddy::BlockSet;
use super::super::region::{Region, Slice};
use super::layout::{
    Extent, FRESH_NAMES_AT, FRESH_ROWS_AT, Geometry, HEADER_WORDS, Header, NAME_WORDS, NO_ROW, Name,
    PIECES_PER_ROW, Pieces, ROW_WORDS, Row,
};
use uniffle_wire::types::{BlockMeta, PartitionId, ShuffleKey};

/// By so many the mark of rows ever used goes up.
const FRESH_ROWS_AT_ONCE: u32 = 64;

/// Places whose pages are taken at once: 256 KiB of rows, 1 MiB of names, both whole pages.
const PLACES_AT_ONCE: u32 = 4096;

/// Why there are no places for rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::memory) enum NoRows {
    /// All are taken, or the region is let go of.
    TooMany,
    /// The file gets no more pages.
    NoPages,
}

/// See the module.
pub(in crate::memory) struct Table {
    region: Arc<Region>,
    geometry: Geometry,
    names: Mutex<Places>,
    rows: Mutex<Places>,
    /// Nothing is cleared any more: it is the next process's.
    let_go: AtomicBool,
    #[cfg(test)]
    pub(super) after_store: Mutex<Option<Hook>>,
}

/// Told of every store.
#[cfg(test)]
pub(super) type Hook = Box<dyn FnMut(&Region) + Send>;

/// Which places of one kind are free.
#[derive(Debug)]
struct Places {
    free: BlockSet,
    /// Places from here on were never used.
    fresh: u32,
    /// Places before it have pages.
    ready: u32,
    max: u32,
}

impl Places {
    /// Of which so many were used. Some more are [ready](Places::ready) from the start.
    fn new(fresh: u32, max: u32) -> Self {
        let behind = fresh.saturating_add(1).checked_next_multiple_of(PLACES_AT_ONCE);
        let ready = behind.map_or(max, |behind| behind.min(max));
        Self { free: BlockSet::new(max as usize), fresh, ready, max }
    }

    /// The lowest one, so that as few pages as possible are ever touched. `take_pages` takes those of places never used.
    fn take(&mut self, take_pages: impl FnOnce(Range<u32>) -> io::Result<()>) -> Result<u32, NoRows> {
        if let Some(free) = self.free.first() {
            self.free.remove(free);
            return u32::try_from(free).map_err(|_| NoRows::TooMany);
        }
        let place = self.fresh;
        if place == self.max {
            return Err(NoRows::TooMany);
        }
        if place == self.ready {
            let until = self.ready.saturating_add(PLACES_AT_ONCE).min(self.max);
            take_pages(self.ready..until).map_err(|_| NoRows::NoPages)?;
            self.ready = until;
        }
        self.fresh += 1;
        Ok(place)
    }
}

impl Table {
    /// The tables in the front of `region`, which has `geometry`; nothing of them is free until it was looked for what an earlier
    /// process left. The pages of all places that were ever used are taken: reading one would take it, too.
    ///
    /// # Errors
    /// When the file gets no pages for them.
    pub(super) fn new(region: Arc<Region>, geometry: Geometry) -> io::Result<Arc<Self>> {
        region.take_front_pages(0..8 * HEADER_WORDS)?;
        let mark = |at: usize, max: u32| {
            let mark = region.front().get(at).map_or(0, |word| word.load(Ordering::Relaxed));
            u32::try_from(mark).unwrap_or(max).min(max)
        };
        let (names, rows) = (mark(FRESH_NAMES_AT, geometry.names), mark(FRESH_ROWS_AT, geometry.rows));
        let (names, rows) = (Places::new(names, geometry.names), Places::new(rows, geometry.rows));
        region.take_front_pages(8 * geometry.name_at(0)..8 * geometry.name_at(names.ready))?;
        region.take_front_pages(8 * geometry.row_at(0)..8 * geometry.row_at(rows.ready))?;
        Ok(Arc::new(Self {
            names: Mutex::new(names),
            rows: Mutex::new(rows),
            geometry,
            region,
            let_go: AtomicBool::new(false),
            #[cfg(test)]
            after_store: Mutex::new(None),
        }))
    }

    /// Makes an empty region a region of `header`.
    pub(super) fn begin(&self, header: &Header) {
        let words = header.encode();
        for (at, word) in words.iter().enumerate().skip(1) {
            self.store(at, *word, Ordering::Relaxed);
        }
        self.store(0, words[0], Ordering::Release);
    }

    /// The segments behind it.
    pub(in crate::memory) fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Blocks that there are places for.
    pub(in crate::memory) fn rows_max(&self) -> u64 {
        self.geometry.rows.into()
    }

    /// From now on the region is another process's: no place is taken or cleared.
    pub(in crate::memory) fn let_go(&self) {
        self.let_go.store(true, Ordering::SeqCst);
    }

    /// The region, in which nothing is, is none any more: it can be made anew with another size.
    pub(in crate::memory) fn end(&self) {
        debug_assert!(self.is_let_go(), "nothing is committed any more");
        self.store(0, 0, Ordering::Release);
    }

    fn is_let_go(&self) -> bool {
        self.let_go.load(Ordering::SeqCst)
    }

    fn store(&self, at: usize, value: u64, order: Ordering) {
        self.region.front()[at].store(value, order);
        #[cfg(test)]
        if let Some(hook) = &mut *self.after_store.lock() {
            hook(&self.region);
        }
    }

    fn commit<const WORDS: usize>(&self, at: usize, words: &[u64; WORDS]) {
        for (offset, word) in words.iter().enumerate().skip(1) {
            self.store(at + offset, *word, Ordering::Relaxed);
        }
        self.store(at, words[0], Ordering::Release);
    }

    fn clear(&self, at: usize) {
        self.store(at, 0, Ordering::Release);
    }

    fn words<const WORDS: usize>(&self, at: usize) -> [u64; WORDS] {
        let front = self.region.front();
        std::array::from_fn(|offset| front[at + offset].load(Ordering::Acquire))
    }
}

/// A shuffle's place among the names; its rows refer to it. Given up when the last of them is gone.
#[derive(Debug)]
pub(in crate::memory) struct Named {
    table: Arc<Table>,
    at: u32,
}

impl Table {
    /// A name for `key`; none while there are too many.
    pub(in crate::memory) fn name(self: &Arc<Self>, key: &ShuffleKey) -> Option<Arc<Named>> {
        let mut names = self.names.lock();
        let (region, of) = (&self.region, self.geometry);
        let pages = |names: Range<u32>| {
            region.take_front_pages(8 * of.name_at(names.start)..8 * of.name_at(names.end))
        };
        let at = names.take(pages).ok()?;
        self.store(FRESH_NAMES_AT, names.fresh.into(), Ordering::Release);
        drop(names);
        let named = Arc::new(Named { table: Arc::clone(self), at });
        self.commit(self.geometry.name_at(at), &Name(key.clone()).encode(at));
        Some(named)
    }

    /// The same name as an earlier process had.
    pub(super) fn named(self: &Arc<Self>, at: u32) -> Arc<Named> {
        Arc::new(Named { table: Arc::clone(self), at })
    }

    /// Shuffles that an earlier process had, with the numbers of their names.
    pub(super) fn found_names(&self) -> Vec<(u32, ShuffleKey)> {
        let fresh = self.names.lock().fresh;
        let name = |at| Name::decode(&self.words::<NAME_WORDS>(self.geometry.name_at(at)), at);
        (0..fresh).filter_map(|at| Some((at, name(at)?.0))).collect()
    }

    /// Places for names that were ever used.
    pub(super) fn used_names(&self) -> u32 {
        self.names.lock().fresh
    }

    /// Makes those of the first `used` names free that nobody has.
    pub(super) fn open_names(&self, used: u32, is_taken: impl Fn(u32) -> bool) {
        let mut names = self.names.lock();
        for at in (0..used).filter(|at| !is_taken(*at)) {
            self.clear(self.geometry.name_at(at));
            names.free.insert(at as usize);
        }
    }
}

impl Named {
    /// Places for `count` rows of the shuffle.
    ///
    /// # Errors
    /// While there are too many or no pages for more, and when the region is let go of.
    pub(in crate::memory) fn rows(&self, count: usize) -> Result<FreeRows, NoRows> {
        self.table.rows(count)
    }

    /// The shuffle is purged: its rows count no longer, whatever becomes of this process.
    pub(in crate::memory) fn disown(&self) {
        if !self.table.is_let_go() {
            self.table.clear(self.table.geometry.name_at(self.at));
        }
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        if !self.table.is_let_go() {
            self.disown();
            self.table.names.lock().free.insert(self.at as usize);
        }
    }
}

/// Places for rows that nothing was written to, given back with it.
#[derive(Debug)]
pub(in crate::memory) struct FreeRows {
    table: Arc<Table>,
    rows: Vec<u32>,
}

impl Table {
    fn rows(self: &Arc<Self>, count: usize) -> Result<FreeRows, NoRows> {
        if self.is_let_go() {
            return Err(NoRows::TooMany);
        }
        let mut taken = FreeRows { table: Arc::clone(self), rows: Vec::with_capacity(count) };
        let mut places = self.rows.lock();
        let before = places.fresh.next_multiple_of(FRESH_ROWS_AT_ONCE);
        let (region, of) = (&self.region, self.geometry);
        let mut refused = Ok(());
        for _ in 0..count {
            let pages = |rows: Range<u32>| {
                region.take_front_pages(8 * of.row_at(rows.start)..8 * of.row_at(rows.end))
            };
            match places.take(pages) {
                Ok(row) => taken.rows.push(row),
                Err(no_rows) => {
                    refused = Err(no_rows);
                    break;
                }
            }
        }
        let mark = places.fresh.next_multiple_of(FRESH_ROWS_AT_ONCE);
        if mark > before {
            self.store(FRESH_ROWS_AT, mark.into(), Ordering::Release);
        }
        drop(places);
        refused.map(|()| taken)
    }

    /// Places for rows that were ever used.
    pub(super) fn used_rows(&self) -> u32 {
        self.rows.lock().fresh
    }

    /// Rows of blocks that an earlier process committed, in the order of their numbers.
    pub(super) fn found_rows(&self) -> impl Iterator<Item = (u32, Row)> {
        let fresh = self.rows.lock().fresh;
        (0..fresh).filter_map(|at| Some((at, self.row(at)?)))
    }

    /// A committed row.
    pub(super) fn row(&self, at: u32) -> Option<Row> {
        if at >= self.geometry.rows {
            return None;
        }
        Row::decode(&self.words::<ROW_WORDS>(self.geometry.row_at(at)), at)
    }

    /// The pieces of a block, and the rows that it takes. None if they do not make it whole.
    pub(super) fn extents(&self, at: u32, row: &Row) -> Option<(Vec<Extent>, Vec<u32>)> {
        let mut extents = vec![Extent { offset: row.offset, len: 0 }];
        let (mut rows, mut next, mut further) = (vec![at], row.next, 0u64);
        while next != NO_ROW {
            if next >= self.used_rows() {
                return None;
            }
            let Pieces { pieces, next: behind } =
                Pieces::decode(&self.words(self.geometry.row_at(next)), next)?;
            let before = further;
            for piece in pieces.into_iter().filter(|piece| piece.len > 0) {
                further += u64::from(piece.len);
                extents.push(piece);
            }
            // Each has bytes, so that a circle ends too.
            if further == before || further > row.meta.length.into() {
                return None;
            }
            rows.push(next);
            next = behind;
        }
        extents[0].len = row.meta.length.checked_sub(u32::try_from(further).ok()?)?;
        let data_bytes = self.region.capacity_bytes();
        let is_inside = |it: &Extent| {
            it.offset.checked_add(it.len.into()).is_some_and(|end| end <= data_bytes) && it.len > 0
        };
        extents.iter().all(is_inside).then_some((extents, rows))
    }

    /// Makes those of the first `used` rows free that nobody has.
    pub(super) fn open_rows(&self, used: u32, is_taken: impl Fn(u32) -> bool) {
        let mut rows = self.rows.lock();
        for at in (0..used).filter(|at| !is_taken(*at)) {
            self.clear(self.geometry.row_at(at));
            rows.free.insert(at as usize);
        }
    }

    fn free_rows(&self, rows: &[u32]) {
        let mut places = self.rows.lock();
        rows.iter().for_each(|at| places.free.insert(*at as usize));
    }
}

impl FreeRows {
    /// How many are left.
    pub(in crate::memory) fn len(&self) -> usize {
        self.rows.len()
    }
}

impl Drop for FreeRows {
    fn drop(&mut self) {
        if !self.rows.is_empty() {
            self.table.free_rows(&self.rows);
        }
    }
}

/// Rows that a block with so many pieces takes.
pub(in crate::memory) fn rows_of(pieces: usize) -> usize {
    1 + pieces.saturating_sub(1).div_ceil(PIECES_PER_ROW)
}

/// Committed rows of one list of blocks. Dropped, they are gone from the region; before the segments that they point
/// into are given back.
#[derive(Debug)]
pub(in crate::memory) struct Kept {
    named: Arc<Named>,
    partition: PartitionId,
    rows: Vec<u32>,
}

impl Kept {
    /// None yet of `partition`.
    pub(in crate::memory) fn new(named: Arc<Named>, partition: PartitionId) -> Self {
        Self { named, partition, rows: Vec::new() }
    }

    /// Commits a block whose bytes are frozen in `slices`.
    pub(in crate::memory) fn push(
        &mut self,
        (meta, order): (&BlockMeta, u64),
        slices: &[Slice],
        free: &mut FreeRows,
    ) {
        let extent = |slice: &Slice| Extent {
            offset: slice.place() as u64,
            len: u32::try_from(slice.len()).expect("a segment has at most 2 MiB"),
        };
        let extents = slices.iter().filter(|slice| !slice.is_empty()).map(extent);
        let extents: smallvec::SmallVec<[Extent; 4]> = extents.collect();
        // One of no bytes has no piece, and does not come back.
        let first = extents.first().map_or(0, |extent| extent.offset);
        let further = extents.get(1..).unwrap_or_default();
        let table = &self.named.table;
        let mut take = || free.rows.pop().expect("taken by `rows_of` the pieces");
        let mut next = NO_ROW;
        if self.rows.len() == self.rows.capacity() {
            self.rows.reserve_exact((self.rows.len() / 4).max(4));
        }
        for some in further.rchunks(PIECES_PER_ROW) {
            let at = take();
            let mut pieces = [Extent { offset: 0, len: 0 }; PIECES_PER_ROW];
            pieces[..some.len()].copy_from_slice(some);
            table.commit(table.geometry.row_at(at), &Pieces { pieces, next }.encode(at));
            self.rows.push(at);
            next = at;
        }
        let at = take();
        let (name, partition) = (self.named.at, self.partition.0);
        let row = Row { meta: *meta, name, partition, order, offset: first, next };
        table.commit(table.geometry.row_at(at), &row.encode(at));
        self.rows.push(at);
    }

    /// Takes over rows that an earlier process committed.
    pub(super) fn adopt(&mut self, rows: impl IntoIterator<Item = u32>) {
        self.rows.extend(rows);
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let table = &self.named.table;
        if table.is_let_go() {
            return;
        }
        // A block's own row stands behind those of its further pieces: it goes first.
        self.rows.iter().rev().for_each(|at| table.clear(table.geometry.row_at(*at)));
        table.free_rows(&self.rows);
    }
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Table").field("geometry", &self.geometry).finish_non_exhaustive()
    }
}
