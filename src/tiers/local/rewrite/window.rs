//! A window: some of the extents that are copied, in the order of their partitions, read in the order of the disk and checked.

use std::ops::Range;

use bytes::Bytes;

use crate::tiers::block_checks::Check;
use crate::tiers::local::core::Core;
use crate::tiers::local::damage::Damage;
use crate::tiers::local::disk::LocalDisk;
use crate::tiers::local::extent::Extent;
use crate::tiers::local::files::Mode;
use crate::tiers::local::index::{RecordCheck, occupied_bytes};
use crate::tiers::local::log::LogKind;
use crate::tiers::local::shuffle::Shuffle;
use crate::tiers::{ExtentData, ExtentWrite, StoreError};
use uniffle_io::BLOCK_ALIGN;
use uniffle_io::buffers::READ_CHUNK_BYTES_MAX;
use uniffle_wire::index::{IndexRecord, RECORD_BYTES, records};
use uniffle_wire::types::{BlockId, BlockMeta, PartitionId, TaskAttemptId};

/// What a window has at most, and so the longest extent that is copied. Of a longer one a rotating disk would seek less for what it
/// copies; it is memory.
pub(in crate::tiers::local) const WINDOW_BYTES: u64 = 8 << 20;
/// Blocks of a window.
const WINDOW_BLOCKS: u64 = 16 << 10;
/// What a pass, which copies windows one after the other, holds at most: the bytes of one, of which an allocator may make a quarter more, a
/// read call, and what is known of its blocks and extents.
pub(in crate::tiers::local) const PASS_BYTES: u64 = 2 * WINDOW_BYTES;
/// Of a block: its record as it was read and as it stands in the new group, and what it is checked and written by; lists grow by doubling.
const BLOCK_BYTES: u64 = 2 * (RECORD_BYTES + size_of::<BlockMeta>()) as u64;
/// Of an extent: its places, its buffers, what is published of it.
const EXTENT_BYTES: u64 = 768;

const _: () = {
    let data = WINDOW_BYTES * 5 / 4 + READ_CHUNK_BYTES_MAX as u64;
    let known = WINDOW_BLOCKS * BLOCK_BYTES + WINDOW_BYTES / BLOCK_ALIGN as u64 * EXTENT_BYTES;
    assert!(data + known <= PASS_BYTES);
};

/// What lies between two parts that are read in one go: a rotating disk passes over it faster than it seeks.
const GAP_BYTES: u64 = 128 << 10;
/// What is checked before others go on: some 100 µs.
const CHECKED_BYTES: usize = 1 << 20;
/// What is read in one go.
const READ_BYTES: u64 = (READ_CHUNK_BYTES_MAX - BLOCK_ALIGN) as u64;

/// Extents that are copied together, and what they take.
#[derive(Debug, Default)]
pub(super) struct Window {
    pub(super) extents: Vec<(PartitionId, Extent)>,
    /// In a data log.
    pub(super) bytes: u64,
    blocks: u64,
}

impl Window {
    /// Whether a window can have an extent.
    pub(super) fn fits(extent: &Extent) -> bool {
        Self::default().has_room(extent)
    }

    fn has_room(&self, extent: &Extent) -> bool {
        let (bytes, blocks) = (occupied_bytes(extent.length), u64::from(extent.blocks));
        self.bytes + bytes <= WINDOW_BYTES && self.blocks + blocks <= WINDOW_BLOCKS
    }

    /// Takes an extent; false when it has no room for it.
    pub(super) fn take(&mut self, partition: PartitionId, extent: &Extent) -> bool {
        let has_room = self.has_room(extent);
        if has_room {
            self.bytes += occupied_bytes(extent.length);
            self.blocks += u64::from(extent.blocks);
            self.extents.push((partition, *extent));
        }
        has_room
    }

    /// Reads the extents and compares every block with what was written. A block that has other bytes, also when it is read again, is
    /// marked as damaged. None when it does not go on: somebody else needs the disk.
    ///
    /// # Errors
    /// What the disk says, or `Corrupt`: nothing of the window is to be copied.
    pub(super) async fn read(
        &self,
        (core, damage): (&Core, &Damage),
        (shuffle, disk): (&Shuffle, &LocalDisk),
        goes_on: &(impl Fn() -> bool + Sync),
    ) -> Result<Option<Vec<ExtentWrite>>, StoreError> {
        let of_records = self.extents.iter().map(|(_, it)| {
            let length = u64::from(it.blocks) * RECORD_BYTES as u64;
            Place { log: it.index_log, offset: it.index_offset, length }
        });
        let of_data = self.extents.iter().map(|(_, it)| Place {
            log: it.data_log,
            offset: it.data_offset(),
            length: it.length,
        });
        let (of_records, of_data) = (of_records.collect::<Vec<_>>(), of_data.collect::<Vec<_>>());
        let Some(indexes) = gather(core, (shuffle, disk), &of_records, goes_on).await? else {
            return Ok(None);
        };
        let Some(data) = gather(core, (shuffle, disk), &of_data, goes_on).await? else { return Ok(None) };
        let (mut copies, mut checked) = (Vec::with_capacity(self.extents.len()), 0);
        for ((partition, extent), (index, data)) in self.extents.iter().zip(indexes.iter().zip(data)) {
            let Some(blocks) = blocks_of(extent, index) else {
                let path = shuffle.log_at(extent.index_log).full_path();
                return Err(StoreError::corrupt(path, "index records fail their check"));
            };
            if let Some(block) = other_than_written(extent, &blocks, &data) {
                return Err(found_other_bytes(core, damage, (shuffle, *partition), &block).await);
            }
            checked += data.len();
            if checked >= CHECKED_BYTES {
                checked = 0;
                tokio::task::yield_now().await;
            }
            let data = ExtentData::Pieces(vec![data]);
            copies.push(ExtentWrite { partition: *partition, blocks, length: extent.length, data });
        }
        Ok(Some(copies))
    }
}

/// Where something stands.
#[derive(Debug, Clone, Copy)]
struct Place {
    log: u16,
    offset: u64,
    length: u64,
}

impl Place {
    fn end(&self) -> u64 {
        self.offset + self.length
    }
}

/// Ranges of logs in their order, each read in one go, and which places lie in them.
fn reads(places: &[Place]) -> Vec<(u16, Range<u64>, Vec<usize>)> {
    let mut order: Vec<usize> = (0..places.len()).collect();
    order.sort_unstable_by_key(|at| (places[*at].log, places[*at].offset));
    let mut reads: Vec<(u16, Range<u64>, Vec<usize>)> = Vec::new();
    for at in order {
        let place = places[at];
        match reads.last_mut() {
            Some((log, range, members))
                if *log == place.log
                    && place.offset <= range.end + GAP_BYTES
                    && place.end().max(range.end) - range.start <= READ_BYTES =>
            {
                range.end = range.end.max(place.end());
                members.push(at);
            }
            _ => reads.push((place.log, place.offset..place.end(), vec![at])),
        }
    }
    reads
}

/// What of `bytes`, which stand at `offset`, lies at a place.
fn part_of<'a>(bytes: &'a [u8], offset: u64, place: &Place) -> &'a [u8] {
    let at = |it: u64| usize::try_from(it.saturating_sub(offset)).unwrap_or(usize::MAX).min(bytes.len());
    bytes.get(at(place.offset)..at(place.end())).unwrap_or_default()
}

/// What stands at these places; none when it does not go on.
async fn gather(
    core: &Core,
    (shuffle, disk): (&Shuffle, &LocalDisk),
    places: &[Place],
    goes_on: &(impl Fn() -> bool + Sync),
) -> Result<Option<Vec<Bytes>>, StoreError> {
    let mut gathered = vec![Bytes::new(); places.len()];
    for (slot, range, members) in reads(places) {
        shuffle.require_present()?;
        if !goes_on() {
            return Ok(None);
        }
        let log = shuffle.log_at(slot);
        log.disk.require_answering()?;
        let mode = if log.kind == LogKind::Data { Mode::ReadDirect } else { Mode::Read };
        let bytes = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let length = |at: usize| usize::try_from(places[at].length).unwrap_or(usize::MAX);
        let mut parts: Vec<_> = members.iter().map(|at| Vec::with_capacity(length(*at))).collect();
        let mut offset = range.start;
        let take = |read: &[u8]| {
            for (at, part) in members.iter().zip(&mut parts) {
                part.extend_from_slice(part_of(read, offset, &places[*at]));
            }
            offset += read.len() as u64;
        };
        let turn = disk.reads.take(&shuffle.key.app, bytes).await;
        core.read_range((shuffle, &log), mode, range, take).await?;
        drop(turn);
        // Shorter than asked for: the checks refuse it.
        members.into_iter().zip(parts).for_each(|(at, part)| gathered[at] = part.into());
    }
    Ok(Some(gathered))
}

/// The blocks of an extent by its records; none when these are not what was written.
fn blocks_of(extent: &Extent, index: &[u8]) -> Option<Vec<BlockMeta>> {
    let mut check = RecordCheck::default();
    let mut intact = crc32fast::hash(index) == extent.records_crc;
    let block = |record: IndexRecord| {
        intact &= check.accept(&record);
        BlockMeta {
            block_id: BlockId(record.block_id),
            task_attempt_id: TaskAttemptId(record.task_attempt_id),
            length: record.length.cast_unsigned(),
            uncompressed_length: record.uncompressed_length.cast_unsigned(),
            crc: u32::try_from(record.crc).unwrap_or(0),
        }
    };
    let blocks: Vec<_> = records(index).map(block).collect();
    (intact && check.length == extent.length && blocks.len() == extent.blocks as usize).then_some(blocks)
}

/// The first block of an extent that has other bytes than were written.
fn other_than_written(extent: &Extent, blocks: &[BlockMeta], data: &[u8]) -> Option<Check> {
    let mut at = 0;
    for block in blocks {
        let end = at + u64::from(block.length);
        let range = usize::try_from(at).ok()..usize::try_from(end).ok();
        let bytes = range.start.zip(range.end).and_then(|(from, to)| data.get(from..to));
        // 0 = was not computed.
        let is_sound = bytes.is_some_and(|bytes| block.crc == 0 || crc32fast::hash(bytes) == block.crc);
        if !is_sound {
            let place = extent.base + at..extent.base + end;
            return Some(Check { place, crc: block.crc, base: extent.base });
        }
        at = end;
    }
    None
}

async fn found_other_bytes(
    core: &Core,
    damage: &Damage,
    (shuffle, partition): (&Shuffle, PartitionId),
    block: &Check,
) -> StoreError {
    core.metrics.read_crc_mismatches.inc();
    match damage.is_sound(shuffle, partition, block).await {
        Err(error) => error,
        Ok(_) if shuffle.is_purged() => shuffle.error(crate::tiers::StoreErrorKind::Purged),
        Ok(false) => damage.mark_damaged(shuffle, partition, block),
        Ok(true) => {
            let what = "a block was read with other bytes than are stored; nothing is lost";
            StoreError::io(shuffle.key.to_string(), std::io::Error::other(what))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_extents_are_read_together() {
        let at = |log: u16, offset: u64, length: u64| Place { log, offset, length };
        let far = 10 * GAP_BYTES;
        let places =
            [at(1, far, 100), at(0, 500, 100), at(1, 0, 100), at(1, 100 + GAP_BYTES, 50), at(0, 0, 100)];
        let reads = reads(&places);
        let told: Vec<_> =
            reads.iter().map(|(log, range, at)| (*log, range.clone(), at.as_slice())).collect();
        let expected: [(u16, Range<u64>, &[usize]); 3] =
            [(0, 0..600, &[4, 1]), (1, 0..150 + GAP_BYTES, &[2, 3]), (1, far..far + 100, &[0])];
        assert_eq!(told, expected);
    }

    #[test]
    fn extent_receives_its_bytes_from_every_part() {
        let all: Vec<u8> = (0..100).collect();
        let place = Place { log: 0, offset: 1025, length: 30 };
        for part in [1, 7, 25, 30, 100] {
            let parts = all.chunks(part).enumerate();
            let of_place = parts.flat_map(|(n, bytes)| part_of(bytes, 1000 + (n * part) as u64, &place));
            assert_eq!(of_place.copied().collect::<Vec<_>>(), (25..55).collect::<Vec<u8>>(), "by {part}");
        }
    }

    #[test]
    fn window_is_bounded_by_bytes_and_by_blocks() {
        let extent = |length: u64, blocks: u32| Extent { data_log: 0, blocks, ..Extent::gap(0, length) };
        assert!(Window::fits(&extent(WINDOW_BYTES, 1)) && !Window::fits(&extent(WINDOW_BYTES + 1, 1)));
        assert!(Window::fits(&extent(1, 16 << 10)) && !Window::fits(&extent(1, (16 << 10) + 1)));
        let mut window = Window::default();
        let taken = (0..).take_while(|_| window.take(PartitionId(1), &extent(1, 1))).count();
        assert_eq!((taken as u64, window.bytes), (WINDOW_BYTES / BLOCK_ALIGN as u64, WINDOW_BYTES));
    }

    #[test]
    fn combined_read_is_limited_except_for_one_extent() {
        let at = |offset: u64, length: u64| Place { log: 0, offset, length };
        let reads = reads(&[at(0, READ_BYTES), at(READ_BYTES, 10), at(READ_BYTES + 10, 2 * READ_BYTES)]);
        let lengths: Vec<_> = reads.iter().map(|(_, range, _)| range.end - range.start).collect();
        assert_eq!(lengths, [READ_BYTES, 10, 2 * READ_BYTES]);
    }
}
