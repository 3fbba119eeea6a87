//! A segment while it is filled: its pending bytes, and its index. Pure: no I/O.
//!
//! Extents get their bases when they are appended. Invariant: a shuffle has one open segment at a
//! time, or two segments would assign the same bases.

use std::collections::{HashMap, VecDeque};

use bytes::Bytes;
use tokio::sync::oneshot;

use crate::store::extents::extent::Extent;
use crate::store::extents::extent_write::take_front;
use crate::store::index::codec::{ENTRY_BYTES, GroupEntry, HEADER_BYTES, RecordsPlace, encode_head};
use crate::store::index::records::encode_blocks;
use crate::store::object::layout::{SegmentId, SegmentTail, TAIL_BYTES};
use crate::store::{DiskShuffleHandle, ExtentWrite, StoreError, StoreErrorKind};
use uniffle_base::budget::{Budget, Charge};
use uniffle_wire::index::RECORD_BYTES;
use uniffle_wire::types::PartitionId;

/// A segment with this number of blocks takes no more batches, because the records of its blocks
/// stay in memory until it is uploaded.
const BLOCKS_MAX: u64 = 256 << 10;

/// Index data of an extent that is appended to a segment. Its bytes follow separately.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtentIndex {
    /// The partition.
    pub partition: PartitionId,
    /// Offset of the extent in the partition's stream.
    pub base: u64,
    /// Bytes of data.
    pub length: u64,
    /// Number of blocks.
    pub blocks: u32,
    /// Records of the blocks, with offsets relative to the extent.
    pub records: Bytes,
    /// CRC-32 of the records.
    pub records_crc: u32,
}

/// Heap per extent until its segment is written, besides its records: the prepared and the
/// published extent, the entries in the segment and its table, and the end of the stream. Includes
/// the growth of lists, which double.
const EXTENT_BYTES: u64 = 512;
/// Heap per piece of an extent's payload, including the growth of lists.
const PIECE_BYTES: u64 = 2 * size_of::<Bytes>() as u64;

/// Returns the heap that a batch takes until its segment is written.
pub(in crate::store::object) fn segment_heap_bytes(extents: &[ExtentWrite]) -> u64 {
    let of_extent = |extent: &ExtentWrite| {
        let (blocks, pieces) = (extent.blocks.len() as u64, extent.data.pieces().len() as u64);
        EXTENT_BYTES + blocks * RECORD_BYTES as u64 + pieces * PIECE_BYTES
    };
    extents.iter().map(of_extent).sum()
}

/// A batch with encoded records, ready to be appended to a segment.
#[derive(Debug)]
pub(in crate::store) struct SegmentBatch {
    extents: Vec<SegmentExtent>,
    pub(in crate::store) bytes: u64,
    blocks: u64,
}

#[derive(Debug)]
struct SegmentExtent {
    /// The base is assigned when the extent is appended to a segment.
    extent: ExtentIndex,
    payload: Vec<Bytes>,
}

impl SegmentBatch {
    /// Encodes the records of a batch. Takes milliseconds for a large batch.
    ///
    /// # Errors
    /// `InvalidBatch` if the batch is empty or inconsistent.
    pub(in crate::store::object) fn of(extents: Vec<ExtentWrite>) -> Result<Self, StoreError> {
        let mut prepared = Self { extents: Vec::with_capacity(extents.len()), bytes: 0, blocks: 0 };
        for extent in extents {
            let payload = extent.payload();
            let invalid = || StoreError::new(StoreErrorKind::InvalidBatch, extent.partition.to_string());
            let blocks = u32::try_from(extent.blocks.len()).map_err(|_| invalid())?;
            if !extent.is_consistent() {
                return Err(invalid());
            }
            let mut records = Vec::new();
            let length = encode_blocks(&extent.blocks, 0, &mut records);
            let (partition, records_crc) = (extent.partition, crc32fast::hash(&records));
            prepared.bytes += length;
            prepared.blocks += u64::from(blocks);
            let extent =
                ExtentIndex { partition, base: 0, length, blocks, records: records.into(), records_crc };
            prepared.extents.push(SegmentExtent { extent, payload });
        }
        match prepared.extents.is_empty() {
            true => Err(StoreError::new(StoreErrorKind::InvalidBatch, "an empty batch")),
            false => Ok(prepared),
        }
    }
}

/// A segment that takes extents.
#[derive(Debug)]
pub(super) struct OpenSegment {
    id: SegmentId,
    /// Number of the segment published before, or 0.
    previous: u32,
    entries: Vec<(GroupEntry, Bytes)>,
    /// Ends of the streams of partitions in this segment.
    ends: HashMap<PartitionId, u64>,
    payload_bytes: u64,
    blocks: u64,
    /// Bytes to be uploaded next.
    pending: VecDeque<Bytes>,
    pending_bytes: usize,
}

/// Description of a complete segment.
#[derive(Debug)]
pub(super) struct SegmentSummary {
    /// Extents ordered by partition and base, with their records.
    pub(in crate::store) extents: Vec<(PartitionId, Extent, Bytes)>,
    pub(in crate::store) payload_bytes: u64,
    /// Size of the whole object.
    pub(in crate::store) bytes: u64,
}

impl OpenSegment {
    pub(in crate::store) fn new(id: SegmentId, previous: u32) -> Self {
        Self {
            id,
            previous,
            entries: Vec::new(),
            ends: HashMap::new(),
            payload_bytes: 0,
            blocks: 0,
            pending: VecDeque::new(),
            pending_bytes: 0,
        }
    }

    /// Returns whether the segment takes another batch.
    pub(in crate::store::object) fn has_room(&self, segment_bytes: u64) -> bool {
        self.payload_bytes < segment_bytes && self.blocks < BLOCKS_MAX
    }

    /// Appends a batch. `published` returns the end of the published stream of a partition that has
    /// no extent in this segment yet.
    pub(in crate::store) fn push(&mut self, batch: SegmentBatch, published: impl Fn(PartitionId) -> u64) {
        for SegmentExtent { mut extent, payload } in batch.extents {
            let end = self.ends.entry(extent.partition).or_insert_with(|| published(extent.partition));
            extent.base = *end;
            *end += extent.length;
            self.begin(extent);
            self.pending_bytes += payload.iter().map(Bytes::len).sum::<usize>();
            self.pending.extend(payload);
        }
    }

    /// Begins an extent. Its bytes follow with [`OpenSegment::add`].
    pub(in crate::store::object) fn begin(&mut self, extent: ExtentIndex) {
        let ExtentIndex { partition, base, length, blocks, records, records_crc } = extent;
        let data_offset = self.payload_bytes;
        self.payload_bytes += length;
        self.blocks += u64::from(blocks);
        // `seal` sets the offset, which depends on all extents.
        let place = RecordsPlace { offset: 0, crc: records_crc };
        let entry = GroupEntry { partition, blocks, base, data_offset, length, place };
        self.entries.push((entry, records));
    }

    /// Appends bytes of the extent that was begun last.
    pub(in crate::store) fn add(&mut self, bytes: Bytes) {
        self.pending_bytes += bytes.len();
        self.pending.push_back(bytes);
    }

    /// Takes the next `bytes` pending bytes, or returns `None` if there are fewer.
    pub(super) fn take_part(&mut self, bytes: usize) -> Option<Vec<Bytes>> {
        (self.pending_bytes >= bytes).then(|| self.take(bytes))
    }

    /// Returns the number of pending bytes.
    pub(super) fn pending_bytes(&self) -> usize {
        self.pending_bytes
    }

    /// Takes the next `bytes` pending bytes, or all if there are fewer.
    pub(in crate::store) fn take(&mut self, bytes: usize) -> Vec<Bytes> {
        self.pending_bytes -= bytes.min(self.pending_bytes);
        take_front(&mut self.pending, bytes)
    }

    /// Completes the segment. Index and tail become pending after the payload.
    pub(super) fn seal(&mut self) -> SegmentSummary {
        let mut entries = std::mem::take(&mut self.entries);
        entries.sort_unstable_by_key(|(entry, _)| (entry.partition, entry.base));
        let (payload_bytes, previous) = (self.payload_bytes, self.previous);
        let mut head = vec![0; HEADER_BYTES + entries.len() * ENTRY_BYTES];
        let mut index_bytes = head.len() as u64;
        for (entry, records) in &mut entries {
            entry.place.offset = index_bytes;
            index_bytes += records.len() as u64;
        }
        let extents: Vec<_> = entries
            .iter()
            .map(|(it, records)| {
                (it.partition, Extent::of_segment(it, self.id.number, payload_bytes), records.clone())
            })
            .collect();
        let (entries, records): (Vec<GroupEntry>, Vec<Bytes>) = entries.into_iter().unzip();
        encode_head(&self.id.header(previous), &entries, &mut head);
        let tail = SegmentTail { payload_bytes, index_bytes, previous }.encode(self.id);
        let pieces = std::iter::once(head.into()).chain(records).chain([Bytes::copy_from_slice(&tail)]);
        pieces.for_each(|piece| self.add(piece));
        SegmentSummary { extents, payload_bytes, bytes: payload_bytes + index_bytes + TAIL_BYTES as u64 }
    }
}

/// A batch to be written.
#[derive(Debug)]
pub(in crate::store::object) struct UploadJob {
    pub(in crate::store::object) batch: SegmentBatch,
    /// Streams to which its extents are appended.
    pub(super) streams: DiskShuffleHandle,
    pub(super) waiter: UploadWaiter,
}

/// Response channel of a batch, with the memory charged until the response.
#[derive(Debug)]
pub(super) struct UploadWaiter {
    pub(in crate::store::object) done: oneshot::Sender<Result<(), StoreError>>,
    pub(super) _making: SegmentHeap,
}

/// Heap for the records and extents of a batch while its segment is made, out of a bounded budget
/// for all batches. A batch takes its share once, before it is prepared, so batches cannot
/// deadlock.
#[derive(Debug)]
pub(super) struct SegmentHeap {
    _part: Charge,
    _held: Charge,
}

impl SegmentHeap {
    /// Waits for a share of `all`. Also charges `held`, even beyond its capacity.
    pub(in crate::store::object) async fn begin(all: &Budget, held: &Budget, bytes: u64) -> Self {
        // A batch larger than the capacity takes all of it.
        let part = all.charge(bytes.min(all.capacity())).await;
        let _part = part.unwrap_or_else(|_| all.charge_unchecked(bytes));
        Self { _part, _held: held.charge_unchecked(bytes) }
    }
}

/// Numbers of a shuffle's segments.
#[derive(Debug, Default)]
pub(in crate::store) struct SegmentNumbers {
    /// Largest number in use, also by failed uploads.
    pub(in crate::store) last_number: u32,
    /// Number of the segment published last, or 0.
    pub(in crate::store) published: u32,
}

#[cfg(test)]
mod tests {
    use uniffle_wire::types::{BlockId, BlockMeta, TaskAttemptId};

    use super::*;
    use crate::store::ExtentData;
    use crate::store::index::codec::decode_head;

    fn extent(partition: i32, id: i64, bytes: &'static [u8]) -> ExtentWrite {
        let length = u32::try_from(bytes.len()).unwrap();
        let meta = BlockMeta {
            block_id: BlockId(id),
            task_attempt_id: TaskAttemptId(1),
            length,
            uncompressed_length: length,
            crc: crc32fast::hash(bytes),
        };
        ExtentWrite {
            partition: PartitionId(partition),
            blocks: vec![meta],
            length: u64::from(length),
            data: ExtentData::Pieces(vec![Bytes::from_static(bytes)]),
        }
    }

    #[test]
    fn segment_round_trips_in_parts() {
        let id = SegmentId { incarnation: 7, number: 4 };
        let mut open = OpenSegment::new(id, 2);
        let published = |partition: PartitionId| if partition.0 == 1 { 1000 } else { 0 };
        open.push(
            SegmentBatch::of(vec![extent(2, 1, b"second"), extent(1, 2, b"first")]).unwrap(),
            published,
        );
        open.push(SegmentBatch::of(vec![extent(1, 3, b"again!!")]).unwrap(), published);
        let mut object = Vec::new();
        while let Some(part) = open.take_part(5) {
            assert_eq!(part.iter().map(Bytes::len).sum::<usize>(), 5);
            object.extend(part.concat());
        }
        let sealed = open.seal();
        object.extend(open.take(usize::MAX).concat());
        assert_eq!((object.len() as u64, open.pending_bytes()), (sealed.bytes, 0));
        assert!(object.starts_with(b"secondfirstagain!!"));

        let tail = SegmentTail::decode(object.last_chunk().unwrap(), id, sealed.bytes).unwrap();
        assert_eq!((tail.payload_bytes, tail.previous), (18, 2));
        let index = &object[18..object.len() - TAIL_BYTES];
        let head = decode_head(index).unwrap();
        assert_eq!((head.header, head.bytes), (id.header(2), index.len()));
        let places: Vec<_> =
            head.entries.iter().map(|it| (it.partition.0, it.base, it.data_offset, it.length)).collect();
        assert_eq!(places, [(1, 1000, 6, 5), (1, 1005, 11, 7), (2, 0, 0, 6)]);
        for (entry, (partition, extent, records)) in head.entries.iter().zip(&sealed.extents) {
            assert_eq!(entry.records(index).unwrap(), records);
            let range = extent.records_range();
            let range = usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap();
            assert_eq!(&object[range], records);
            assert_eq!((*extent, *partition), (Extent::of_segment(entry, 4, 18), entry.partition));
        }
    }

    #[test]
    fn contradictory_batch_is_refused() {
        let mut short = extent(1, 1, b"abc");
        short.length = 2;
        for extents in [vec![], vec![short]] {
            assert_eq!(SegmentBatch::of(extents).unwrap_err().kind, StoreErrorKind::InvalidBatch);
        }
    }
}
