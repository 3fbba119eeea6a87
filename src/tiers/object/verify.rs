//! Verifies the CRC-32 of each block that is completely in the range of a data read, while its
//! bytes are read. Finds damage by the store, the network, the cache's disk, and systems between
//! them.
//!
//! Only blocks of the current chunk are known at a time. Their records are read in windows, which
//! stay in the record cache for the next chunk. A window that is not a whole extent has no checksum
//! of its own. If a block of such an extent does not match, its records are read again as well as
//! its bytes, once per chunk ([`Verifier::renew`]).

use std::collections::VecDeque;
use std::io;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use bytes::Bytes;
use futures::stream::{self, StreamExt as _, TryStreamExt as _};

use super::core::Core;
use super::fetch::{self, Part};
use super::reads;
use super::shuffle::Shuffle;
use crate::tiers::StoreError;
use crate::tiers::block_checks::{BlockChecks, Check, Mark};
use crate::tiers::extent::{Extent, ExtentList};
use crate::tiers::index_read::WRONG_RECORDS;
use crate::tiers::record_cache::RecordsKey;
use crate::tiers::records::are_sound;
use uniffle_wire::index::{IndexRecord, RECORD_BYTES, records};

/// Maximum number of records in a window.
const WINDOW: u32 = 4096;
/// Size of a full window in bytes.
const WINDOW_BYTES: usize = WINDOW as usize * RECORD_BYTES;

/// Maximum number of windows read concurrently.
const WINDOWS_AT_ONCE: usize = 8;

/// Maximum number of known blocks. A chunk has more if its blocks are smaller than about 32 bytes.
/// Then not all of them are verified.
const CHECKS_MAX: usize = 1 << 16;

/// Verifier of the blocks of one read, in the order of the stream.
#[derive(Debug)]
pub(super) struct Verifier {
    /// Extents that cover the range, shared with the read.
    extents: Arc<ExtentList>,
    /// Index of the first extent whose records are not all known.
    at: usize,
    /// Number of its known records, and of the bytes of their blocks.
    known: (u32, u64),
    range: Range<u64>,
    checks: BlockChecks,
    mismatches: u32,
}

/// Consecutive records of an extent.
struct Window {
    first: u32,
    blocks: u32,
}

impl Window {
    /// Returns the window with record `number` of an extent.
    fn of(extent: &Extent, number: u32) -> Self {
        let first = number / WINDOW * WINDOW;
        Self { first, blocks: WINDOW.min(extent.blocks - first) }
    }

    /// Returns the range of the records in their segment.
    fn range(&self, extent: &Extent) -> Range<u64> {
        let at = |record: u32| extent.records_range().start + u64::from(record) * RECORD_BYTES as u64;
        at(self.first)..at(self.first + self.blocks)
    }

    /// Returns the base of the extent and the number of the first record.
    fn name(&self, extent: &Extent) -> (u64, u32) {
        (extent.base, self.first)
    }

    /// Returns the key of the records in the record cache. A window that is not a whole extent has
    /// an offset one byte further, where no records begin, so its key differs from that of a whole
    /// extent.
    fn key(&self, shuffle: &Shuffle, extent: &Extent) -> RecordsKey {
        let whole = shuffle.records_key(extent);
        let is_whole = self.blocks == extent.blocks;
        RecordsKey { offset: self.range(extent).start + u64::from(!is_whole), ..whole }
    }
}

/// A window, as the base of its extent and the number of its first record, with its records.
type Loaded = ((u64, u32), Bytes);

/// Windows of adjacent extents whose records are adjacent in one object. One request reads them.
struct Group {
    windows: Vec<(Extent, Window)>,
    /// Range of their records in the object.
    range: Range<u64>,
    /// The records of the only window, if they are in memory.
    found: Option<Bytes>,
}

impl Group {
    /// Returns whether a window with records at `range` can join.
    fn takes(&self, extent: &Extent, range: &Range<u64>) -> bool {
        let is_adjacent = self.windows.last().is_some_and(|(last, _)| last.object() == extent.object())
            && self.range.end == range.start;
        self.found.is_none() && is_adjacent && range.end - self.range.start <= WINDOW_BYTES as u64
    }

    fn add(&mut self, extent: Extent, window: Window, range: Range<u64>) {
        self.windows.push((extent, window));
        self.range.end = range.end;
    }
}

impl Verifier {
    /// Creates the verifier of a read of `range`, which `extents` cover.
    pub(super) fn new(extents: Arc<ExtentList>, range: Range<u64>) -> Self {
        let (at, checks) = (extents.after(range.start), BlockChecks::new(range.start));
        Self { extents, at, known: (0, 0), range, checks, mismatches: 0 }
    }

    /// Saves the current position.
    pub(super) fn mark(&mut self) -> Mark {
        self.checks.mark()
    }

    /// Returns to the last saved position.
    pub(super) fn rewind(&mut self, mark: Mark) {
        self.checks.rewind(mark);
    }

    /// Counts a read from the store with wrong bytes. Returns the number of such reads since the
    /// last correct one.
    pub(super) fn count_mismatch(&mut self) -> u32 {
        self.mismatches += 1;
        self.mismatches
    }

    /// Returns the first block that ends in the next bytes of the range and has a wrong checksum.
    /// Requires that the blocks are [prepared](Self::prepare).
    pub(super) fn check(&mut self, bytes: &[u8]) -> Option<Check> {
        let block = self.checks.check(bytes);
        self.mismatches *= u32::from(block.is_some());
        block
    }

    /// Returns the extents of which more records are needed to read the stream up to `until`.
    fn unknown(&self, until: u64) -> impl Iterator<Item = (usize, &Extent)> {
        let known = self.known.1;
        let begins = move |at: usize, extent: &Extent| extent.base + if at == 0 { known } else { 0 };
        let next = self.extents.iter_from(self.at).enumerate();
        next.take_while(move |(at, extent)| begins(*at, extent) < until)
    }

    /// Returns the maximum memory besides the buffer while the stream is read up to `until`.
    pub(super) fn beside_bytes(&self, until: u64) -> usize {
        let mut blocks = 0;
        for (_, extent) in self.unknown(self.range.end) {
            // Records of adjacent extents are read ahead.
            if extent.base >= until && blocks >= WINDOW as usize {
                break;
            }
            blocks += extent.blocks as usize;
        }
        blocks.min(CHECKS_MAX) * size_of::<Check>()
            + (blocks * RECORD_BYTES).min(WINDOWS_AT_ONCE * WINDOW_BYTES)
    }

    /// Returns the places of the first records that [`Verifier::prepare`] will read because they
    /// are not in memory.
    pub(super) fn missing_records(&self, core: &Core, shuffle: &Shuffle, until: u64) -> Vec<Part> {
        let missing = self.unknown(until).filter_map(|(at, extent)| {
            let window = Window::of(extent, if at == 0 { self.known.0 } else { 0 });
            if find(core, shuffle, extent, &window).is_some() {
                return None;
            }
            let Range { start, end } = window.range(extent);
            let bytes = usize::try_from(end - start).unwrap_or(usize::MAX);
            Some(Part { segment: extent.object(), offset: start, range: 0..bytes })
        });
        missing.collect()
    }

    /// Makes the checksums of the blocks that begin before `until` known, up to [`CHECKS_MAX`].
    ///
    /// # Errors
    /// The records of an extent cannot be read.
    pub(super) async fn prepare(
        &mut self,
        core: &Arc<Core>,
        shuffle: &Arc<Shuffle>,
        until: u64,
    ) -> Result<(), StoreError> {
        let until = until.min(self.range.end);
        let mut loaded = VecDeque::new();
        while let Some(extent) = self.extents.get(self.at).copied()
            && extent.base + self.known.1 < until
            && self.checks.known() < CHECKS_MAX
        {
            let window = Window::of(&extent, self.known.0);
            if loaded.front().is_none_or(|(name, _)| *name != window.name(&extent)) {
                loaded = self.load_some(core, shuffle, until).await?;
            }
            let Some((_, all)) = loaded.pop_front() else { break };
            let left = (self.known.0 - window.first) as usize * RECORD_BYTES;
            // Stops when enough records are known, or at the last one.
            let _ = records(all.get(left..).unwrap_or_default())
                .try_for_each(|record| self.take(&extent, &record, until));
            if self.known.0 >= extent.blocks {
                self.end_extent();
            }
        }
        Ok(())
    }

    /// Loads the next windows of the extents up to `until`, and of later ones whose records are
    /// adjacent. Returns them in order.
    async fn load_some(
        &self,
        core: &Arc<Core>,
        shuffle: &Arc<Shuffle>,
        until: u64,
    ) -> Result<VecDeque<Loaded>, StoreError> {
        let mut groups: Vec<Group> = Vec::with_capacity(WINDOWS_AT_ONCE);
        for (at, extent) in self.unknown(self.range.end) {
            let is_last = extent.base >= until || groups.len() == WINDOWS_AT_ONCE;
            let window = Window::of(extent, if at == 0 { self.known.0 } else { 0 });
            let found = find(core, shuffle, extent, &window);
            let range = window.range(extent);
            match groups.last_mut().filter(|last| found.is_none() && last.takes(extent, &range)) {
                Some(last) => last.add(*extent, window, range),
                None if is_last => break,
                None => groups.push(Group { windows: vec![(*extent, window)], range, found }),
            }
        }
        let loads = groups.into_iter().map(|group| load(core, shuffle, group));
        let loaded: Vec<_> = stream::iter(loads).buffered(WINDOWS_AT_ONCE).try_collect().await?;
        Ok(loaded.into_iter().flatten().collect())
    }

    /// Reads the records of an extent with [several windows](has_windows) from the store again, and
    /// replaces the known blocks by them. The old records are dropped from memory and from the read
    /// cache.
    ///
    /// # Errors
    /// The store fails, or a block that was partly returned has other bounds now.
    pub(super) async fn renew(
        &mut self,
        core: &Core,
        shuffle: &Shuffle,
        extent: &Extent,
        until: u64,
    ) -> Result<(), StoreError> {
        let (until, key) = (until.min(self.range.end), shuffle.segment_key(extent.object()));
        tracing::warn!(key, base = extent.base, "block does not match its index record; reading both again");
        forget_records(core, shuffle, extent);
        reads::discard(core, shuffle, extent.object(), &extent.records_range());
        let is_next = self.unknown(u64::MAX).next().is_some_and(|(_, next)| next.base == extent.base);
        let known = std::mem::take(&mut self.known);
        let anew = self.checks.anew();
        let mut others = std::mem::replace(&mut self.checks, anew);
        while self.known.0 < extent.blocks
            && extent.base + self.known.1 < until
            && self.checks.known() < CHECKS_MAX
        {
            let window = Window::of(extent, self.known.0);
            let all = fetch::read(core, &key, window.range(extent)).await?;
            let _ = records(&all).try_for_each(|record| self.take(extent, &record, until));
            core.records.keep(window.key(shuffle, extent), all);
        }
        std::mem::swap(&mut self.checks, &mut others);
        let fits = self.checks.replace(extent.base, others);
        if !is_next {
            self.known = known;
        } else if self.known.0 >= extent.blocks {
            self.end_extent();
        }
        if fits {
            return Ok(());
        }
        let what = "index records were read with wrong bytes; nothing is lost";
        Err(StoreError::io(key, io::Error::other(what)))
    }

    /// Moves on to the next extent, after all records of the first are known.
    fn end_extent(&mut self) {
        (self.at, self.known) = (self.at + 1, (0, 0));
    }

    fn take(&mut self, extent: &Extent, record: &IndexRecord, until: u64) -> ControlFlow<()> {
        let (blocks, before) = self.known;
        let start = extent.base + before;
        if start >= until || self.checks.known() >= CHECKS_MAX {
            return ControlFlow::Break(());
        }
        let bytes = u64::from(record.length.unsigned_abs());
        self.known = (blocks + 1, before + bytes);
        let place = start..start + bytes;
        if place.start >= self.range.start.max(self.checks.at()) && place.end <= self.range.end {
            let crc = u32::try_from(record.crc).unwrap_or(0);
            self.checks.push(Check { place, crc, base: extent.base });
        }
        ControlFlow::Continue(())
    }
}

/// Returns the records of a window if they are in memory.
fn find(core: &Core, shuffle: &Shuffle, extent: &Extent, window: &Window) -> Option<Bytes> {
    let range = window.range(extent);
    let whole = core.records.find(&shuffle.records_key(extent)).and_then(|all| {
        let at = |place: u64| usize::try_from(place - extent.records_range().start).ok();
        let range = at(range.start)?..at(range.end)?;
        (range.end <= all.len()).then(|| all.slice(range))
    });
    whole.or_else(|| core.records.find(&window.key(shuffle, extent)))
}

/// Returns the records of a group's windows, from memory or from the store.
async fn load(core: &Arc<Core>, shuffle: &Arc<Shuffle>, group: Group) -> Result<Vec<Loaded>, StoreError> {
    let Group { windows, range, found } = group;
    let Some((first, _)) = windows.first() else { return Ok(Vec::new()) };
    let number = first.object();
    let all = match found {
        Some(found) => {
            return Ok(windows.iter().map(|(extent, it)| (it.name(extent), found.clone())).collect());
        }
        None => reads::read(core, shuffle, number, range.clone()).await?,
    };
    let part = |all: &Bytes, extent: &Extent, window: &Window| {
        let part = window.range(extent);
        let at = |place: u64| usize::try_from(place - range.start).unwrap_or(usize::MAX);
        all.slice(at(part.start)..at(part.end))
    };
    let is_wrong = |all: &Bytes| {
        windows.iter().any(|(extent, window)| {
            let is_whole = window.blocks == extent.blocks;
            is_whole && !are_sound(&part(all, extent, window), extent.length, extent.records_crc)
        })
    };
    let all = match is_wrong(&all) {
        false => all,
        true => {
            let key = shuffle.segment_key(number);
            reads::discard(core, shuffle, number, &range);
            let again = fetch::read(core, &key, range.clone()).await?;
            if is_wrong(&again) {
                return Err(StoreError::corrupt(key, WRONG_RECORDS));
            }
            again
        }
    };
    let loaded = windows.iter().map(|(extent, window)| {
        let records = part(&all, extent, window);
        // A slice would keep the records of the whole group in memory.
        let kept = if windows.len() == 1 { records.clone() } else { Bytes::copy_from_slice(&records) };
        core.records.keep(window.key(shuffle, extent), kept);
        (window.name(extent), records)
    });
    Ok(loaded.collect())
}

/// Returns whether the records of an extent are read in several windows, which have no checksums.
pub(super) fn has_windows(extent: &Extent) -> bool {
    extent.blocks > WINDOW
}

/// Drops an extent's records from memory, unless they are cached as a whole: then their checksum
/// was verified.
pub(super) fn forget_records(core: &Core, shuffle: &Shuffle, extent: &Extent) {
    let windows = (0..extent.blocks).step_by(WINDOW as usize).map(|first| Window::of(extent, first));
    let parts = windows.filter(|window| window.blocks < extent.blocks);
    core.records.forget(parts.map(|window| window.key(shuffle, extent)));
}

#[cfg(feature = "jemalloc")]
#[cfg(test)]
mod tests {
    use super::*;

    /// A read is not charged before its first chunk, and there may be many readers.
    #[test]
    fn read_does_not_copy_extent_lists() {
        use tikv_jemalloc_ctl::thread::allocatedp;
        let extent = |at: u64| Extent { blocks: 1, ..Extent::gap(at * 10, 10) }.in_object(1, 0, 0);
        let mut list = ExtentList::default();
        (0..100_000).for_each(|at| list.push(extent(at)));
        let before = allocatedp::read().unwrap().get();
        let verifier = Verifier::new(Arc::new(list.part(25, 5000)), 25..5000);
        let allocated = allocatedp::read().unwrap().get() - before;
        assert!(allocated < 1024, "{allocated} bytes");
        let bases = verifier.unknown(45).map(|(_, extent)| extent.base);
        assert_eq!(bases.collect::<Vec<_>>(), [20, 30, 40]);
    }
}
