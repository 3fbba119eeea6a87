//! Loads the CRC-32 of each block that is completely in the range of a data read, and passes it to
//! the [`BlockVerifier`]. That finds damage by the store, the network, the cache's disk, and
//! systems between them.
//!
//! Only blocks of the current chunk are known at a time. Their records are read by whole extents,
//! because only those have a checksum, and stay in the record cache for the next chunk.

use std::collections::VecDeque;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use bytes::Bytes;
use futures::stream::{self, StreamExt as _, TryStreamExt as _};

use super::fetch::{self, RangePart};
use super::ranges;
use crate::store::StoreError;
use crate::store::extents::extent::{Extent, ExtentList};
use crate::store::extents::extent_write::EXTENT_BLOCKS_MAX;
use crate::store::index::block_verifier::{BlockCheck, BlockVerifier, VerifierMark};
use crate::store::index::index_read::WRONG_RECORDS;
use crate::store::index::records::are_sound;
use crate::store::object::core::ObjectCore;
use crate::store::object::shuffle::ObjectShuffle;
use uniffle_wire::index::{IndexRecord, RECORD_BYTES, records};

/// Maximum size of records that are read with one request, unless an extent of an earlier version
/// has more.
const RECORDS_BYTES: usize = EXTENT_BLOCKS_MAX * RECORD_BYTES;

/// Maximum number of such requests at a time.
const LOADS_AT_ONCE: usize = 8;

/// Maximum number of known blocks. A chunk has more if its blocks are smaller than about 32 bytes.
/// Then not all of them are verified.
const CHECKS_MAX: usize = 1 << 16;

/// Checksums of the blocks of one read from the object store, in the order of the stream.
#[derive(Debug)]
pub(super) struct ObjectChecksums {
    /// Extents that cover the range, shared with the read.
    extents: Arc<ExtentList>,
    /// Index of the first extent whose records are not all known.
    at: usize,
    /// Number of its known records, and of the bytes of their blocks.
    known: (u32, u64),
    range: Range<u64>,
    verifier: BlockVerifier,
    mismatches: u32,
}

/// Adjacent extents whose records are adjacent in one object. One request reads them.
struct RecordsGroup {
    extents: Vec<Extent>,
    /// Range of their records in the object.
    range: Range<u64>,
    /// The records of the only extent, if they are in memory.
    found: Option<Bytes>,
}

impl RecordsGroup {
    /// Returns whether the records of `extent` can join.
    fn takes(&self, extent: &Extent) -> bool {
        let range = extent.records_range();
        let is_adjacent = self.extents.last().is_some_and(|last| last.object() == extent.object())
            && self.range.end == range.start;
        self.found.is_none() && is_adjacent && range.end - self.range.start <= RECORDS_BYTES as u64
    }

    fn add(&mut self, extent: Extent) {
        self.range.end = extent.records_range().end;
        self.extents.push(extent);
    }

    /// Returns the records of an extent.
    fn part(&self, all: &Bytes, extent: &Extent) -> Bytes {
        let Range { start, end } = extent.records_range();
        let at = |place: u64| usize::try_from(place - self.range.start).unwrap_or(usize::MAX);
        all.slice(at(start)..at(end))
    }
}

impl ObjectChecksums {
    /// Returns the checksums of a read of `range`, which `extents` cover.
    pub(in crate::store) fn new(extents: Arc<ExtentList>, range: Range<u64>) -> Self {
        let (at, verifier) = (extents.after(range.start), BlockVerifier::new(range.start));
        Self { extents, at, known: (0, 0), range, verifier, mismatches: 0 }
    }

    /// Saves the current position.
    pub(super) fn mark(&mut self) -> VerifierMark {
        self.verifier.mark()
    }

    /// Returns to the last saved position.
    pub(super) fn rewind(&mut self, mark: VerifierMark) {
        self.verifier.rewind(mark);
    }

    /// Counts a read from the store with wrong bytes. Returns the number of such reads since the
    /// last correct one.
    pub(super) fn count_mismatch(&mut self) -> u32 {
        self.mismatches += 1;
        self.mismatches
    }

    /// Returns the first block that ends in the next bytes of the range and has a wrong checksum.
    /// Requires that the blocks are [prepared](Self::prepare).
    pub(in crate::store::object) fn check(&mut self, bytes: &[u8]) -> Option<BlockCheck> {
        let block = self.verifier.check(bytes);
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
        let (mut blocks, mut ahead, mut largest) = (0, 0, EXTENT_BLOCKS_MAX);
        for (_, extent) in self.unknown(self.range.end) {
            // The last request includes records of adjacent later extents.
            ahead += if extent.base >= until { extent.blocks as usize } else { 0 };
            if ahead > EXTENT_BLOCKS_MAX {
                break;
            }
            blocks += extent.blocks as usize;
            largest = largest.max(extent.blocks as usize);
        }
        let records = blocks.min(largest * LOADS_AT_ONCE);
        blocks.min(CHECKS_MAX) * size_of::<BlockCheck>() + records * RECORD_BYTES
    }

    /// Returns the places of the records that [`ObjectChecksums::prepare`] will read because they
    /// are not in memory.
    pub(super) fn missing_records(
        &self,
        core: &ObjectCore,
        shuffle: &ObjectShuffle,
        until: u64,
    ) -> Vec<RangePart> {
        let missing = self.unknown(until).filter_map(|(_, extent)| {
            if core.records.get(&shuffle.records_key(extent)).is_some() {
                return None;
            }
            let Range { start, end } = extent.records_range();
            let bytes = usize::try_from(end - start).unwrap_or(usize::MAX);
            Some(RangePart { segment: extent.object(), offset: start, range: 0..bytes })
        });
        missing.collect()
    }

    /// Makes the checksums of the blocks that begin before `until` known, up to [`CHECKS_MAX`].
    ///
    /// # Errors
    /// The records of an extent cannot be read.
    pub(in crate::store::object) async fn prepare(
        &mut self,
        core: &Arc<ObjectCore>,
        shuffle: &Arc<ObjectShuffle>,
        until: u64,
    ) -> Result<(), StoreError> {
        let until = until.min(self.range.end);
        let mut loaded = VecDeque::new();
        while let Some(extent) = self.extents.get(self.at).copied()
            && extent.base + self.known.1 < until
            && self.verifier.known() < CHECKS_MAX
        {
            if loaded.is_empty() {
                loaded = self.load_some(core, shuffle, until).await?;
            }
            let Some(all) = loaded.pop_front() else { break };
            let skipped = self.known.0 as usize * RECORD_BYTES;
            // Stops when enough records are known, or at the last one.
            let _ = records(all.get(skipped..).unwrap_or_default())
                .try_for_each(|record| self.take(&extent, &record, until));
            if self.known.0 >= extent.blocks {
                (self.at, self.known) = (self.at + 1, (0, 0));
            }
        }
        Ok(())
    }

    /// Loads the records of the next extents up to `until`, and of later ones whose records are
    /// adjacent. Returns them in order.
    async fn load_some(
        &self,
        core: &Arc<ObjectCore>,
        shuffle: &Arc<ObjectShuffle>,
        until: u64,
    ) -> Result<VecDeque<Bytes>, StoreError> {
        let mut groups: Vec<RecordsGroup> = Vec::with_capacity(LOADS_AT_ONCE);
        for (_, extent) in self.unknown(self.range.end) {
            let is_last = extent.base >= until || groups.len() == LOADS_AT_ONCE;
            let found = core.records.get(&shuffle.records_key(extent));
            match groups.last_mut().filter(|last| found.is_none() && last.takes(extent)) {
                Some(last) => last.add(*extent),
                None if is_last => break,
                None => {
                    groups.push(RecordsGroup { extents: vec![*extent], range: extent.records_range(), found })
                }
            }
        }
        let loads = groups.into_iter().map(|group| load(core, shuffle, group));
        let loaded: Vec<_> = stream::iter(loads).buffered(LOADS_AT_ONCE).try_collect().await?;
        Ok(loaded.into_iter().flatten().collect())
    }

    fn take(&mut self, extent: &Extent, record: &IndexRecord, until: u64) -> ControlFlow<()> {
        let (blocks, before) = self.known;
        let start = extent.base + before;
        if start >= until || self.verifier.known() >= CHECKS_MAX {
            return ControlFlow::Break(());
        }
        let bytes = u64::from(record.length.unsigned_abs());
        self.known = (blocks + 1, before + bytes);
        let place = start..start + bytes;
        if place.start >= self.range.start.max(self.verifier.at()) && place.end <= self.range.end {
            let crc = u32::try_from(record.crc).unwrap_or(0);
            self.verifier.push(BlockCheck { place, crc, base: extent.base });
        }
        ControlFlow::Continue(())
    }
}

/// Returns the records of a group's extents, from memory, the cache's disk or the store.
async fn load(
    core: &Arc<ObjectCore>,
    shuffle: &Arc<ObjectShuffle>,
    mut group: RecordsGroup,
) -> Result<Vec<Bytes>, StoreError> {
    if let Some(found) = group.found.take() {
        return Ok(vec![found]);
    }
    let (number, range) = (group.extents.first().map_or(0, Extent::object), group.range.clone());
    let is_wrong = |all: &Bytes| {
        let is_sound = |it: &Extent| are_sound(&group.part(all, it), it.length, it.records_crc);
        !group.extents.iter().all(is_sound)
    };
    let mut all = ranges::read(core, shuffle, number, range.clone()).await?;
    if is_wrong(&all) {
        let key = shuffle.segment_key(number);
        ranges::discard(core, shuffle, number, &range);
        all = fetch::read(core, &key, range).await?;
        if is_wrong(&all) {
            return Err(StoreError::corrupt(key, WRONG_RECORDS));
        }
    }
    let loaded = group.extents.iter().map(|extent| {
        let records = group.part(&all, extent);
        // A slice would keep the records of the whole group in memory.
        let to_cache =
            if group.extents.len() == 1 { records.clone() } else { Bytes::copy_from_slice(&records) };
        core.records.insert(shuffle.records_key(extent), to_cache);
        records
    });
    Ok(loaded.collect())
}

#[cfg(feature = "jemalloc")]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimate_includes_records_that_are_read_ahead() {
        let extent = |base: u64, blocks: u32, object: u32, record: u64| {
            let extent = Extent { blocks, ..Extent::gap(base, u64::from(blocks) * 10) };
            extent.in_object(object, 0, record * RECORD_BYTES as u64)
        };
        let mut list = ExtentList::default();
        [extent(0, 4000, 1, 0), extent(40_000, 100, 2, 0), extent(41_000, 3996, 2, 100)]
            .into_iter()
            .for_each(|extent| list.push(extent));
        let checksums = ObjectChecksums::new(Arc::new(list), 0..80_960);
        // The records of the third extent are read with those of the second.
        let used = 8096 * RECORD_BYTES + 4100 * size_of::<BlockCheck>();
        let estimate = checksums.beside_bytes(41_000);
        assert!(estimate >= used, "{estimate} bytes are charged, {used} are used");
    }

    /// A read is not charged before its first chunk, and there may be many readers.
    #[test]
    fn read_does_not_copy_extent_lists() {
        use tikv_jemalloc_ctl::thread::allocatedp;
        let extent = |at: u64| Extent { blocks: 1, ..Extent::gap(at * 10, 10) }.in_object(1, 0, 0);
        let mut list = ExtentList::default();
        (0..100_000).for_each(|at| list.push(extent(at)));
        let before = allocatedp::read().unwrap().get();
        let checksums = ObjectChecksums::new(Arc::new(list.part(25, 5000)), 25..5000);
        let allocated = allocatedp::read().unwrap().get() - before;
        assert!(allocated < 1024, "the checksums allocated {allocated} bytes");
        let bases = checksums.unknown(45).map(|(_, extent)| extent.base);
        assert_eq!(bases.collect::<Vec<_>>(), [20, 30, 40]);
    }
}
