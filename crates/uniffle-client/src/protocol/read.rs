//! Pure functions that decode read responses: bitmaps of block ids, memory segments, index records,
//! and the ranges to read next. They also check blocks against their checksums.
//!
//! They follow the Java client (docs/protocol.md §3.4, §5.4) but are stricter: where Java would
//! slice wrong bytes out of a gap in the index, they return an error. A reader splits the index of
//! a partition into [`runs`], because other servers have several disks and gaps, and each run into
//! [`segments`]. An index of this worker is one run.

use bytes::{Buf, Bytes};
use croaring::Treemap;

use crate::block::Block;
use crate::proto;
use uniffle_wire::bitmap;
use uniffle_wire::types::{BlockId, BlockMeta, TaskAttemptId};

/// Length of one index record (docs/protocol.md §5.2).
pub const INDEX_RECORD_BYTES: usize = 40;

/// A response that contradicts itself or the protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Malformed {
    /// A number is negative or out of range.
    #[error("{what} is {value}")]
    Number {
        /// Name of the number.
        what: &'static str,
        /// Value of the number.
        value: i64,
    },
    /// The index length is not a multiple of the record length.
    #[error("index has {0} bytes, which is not a multiple of 40")]
    IndexLength(usize),
    /// A record does not begin at the end of the previous record.
    #[error("index record {record} begins at {begins}, but the previous record ends at {expected}")]
    Hole {
        /// Number of the record.
        record: usize,
        /// Offset of the record.
        begins: u64,
        /// End of the previous record.
        expected: u64,
    },
    /// A block exceeds the bytes of its response.
    #[error("block {block} ends at byte {end} of {available}")]
    OutOfRange {
        /// The block.
        block: BlockId,
        /// End of the block.
        end: u64,
        /// Number of bytes in the response.
        available: usize,
    },
    /// The response to a data read has a different length than requested.
    #[error("expected {expected} bytes of data, got {got}")]
    DataLength {
        /// Bytes requested.
        expected: u64,
        /// Bytes in the response.
        got: usize,
    },
    /// The bytes of a block do not match its checksum.
    #[error("block {block} has crc {actual:#010x}, expected {expected:#010x}")]
    Crc {
        /// The block.
        block: BlockId,
        /// Checksum in the metadata.
        expected: u32,
        /// Checksum of the bytes.
        actual: u32,
    },
    /// Not a `Roaring64NavigableMap` in its legacy form.
    #[error("the bitmap of {0} bytes is not in Java's legacy form")]
    Bitmap(usize),
    /// The response belongs to another request.
    #[error("the response belongs to another request")]
    Answer,
    /// The status number is unknown.
    #[error("unknown status {0}")]
    Status(i32),
}

/// Decodes the set that `getShuffleResult` returns. Empty input is the empty set.
///
/// # Errors
/// [`Malformed::Bitmap`].
pub fn decode_bitmap(bytes: &[u8]) -> Result<Treemap, Malformed> {
    bitmap::decode(bytes).ok_or(Malformed::Bitmap(bytes.len()))
}

/// Encodes a set in Java's format, for the task filter of a memory read.
#[must_use]
pub fn encode_bitmap(set: &Treemap) -> Bytes {
    bitmap::encode(set)
}

/// Splits the data of a memory response into blocks.
///
/// # Errors
/// Fails if a segment exceeds the data, if the segments are not contiguous, or if a number is out
/// of range.
pub fn memory_blocks(
    segments: &[proto::ShuffleDataBlockSegment],
    data: &Bytes,
) -> Result<Vec<Block>, Malformed> {
    let mut end = 0;
    let mut blocks = Vec::with_capacity(segments.len());
    for (record, segment) in segments.iter().enumerate() {
        let begins = unsigned("offset", segment.offset)?;
        if begins != end {
            return Err(Malformed::Hole { record, begins, expected: end });
        }
        let meta = BlockMeta {
            block_id: BlockId(segment.block_id),
            task_attempt_id: TaskAttemptId(segment.task_attempt_id),
            length: length("length", segment.length)?,
            uncompressed_length: length("uncompressLength", segment.uncompress_length)?,
            crc: crc(segment.crc)?,
        };
        end += u64::from(meta.length);
        blocks.push(Block { meta, data: cut(data, begins, &meta)? });
    }
    Ok(blocks)
}

/// Position of a block in the data of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordPosition {
    /// Offset of the first byte in the partition's data.
    pub offset: u64,
    /// The block.
    pub meta: BlockMeta,
}

/// Decodes the response of `getLocalShuffleIndex`.
///
/// # Errors
/// Fails if the length is not a multiple of 40, or if a number is out of range.
pub fn decode_index(mut index: &[u8]) -> Result<Vec<RecordPosition>, Malformed> {
    if !index.len().is_multiple_of(INDEX_RECORD_BYTES) {
        return Err(Malformed::IndexLength(index.len()));
    }
    let mut records = Vec::with_capacity(index.len() / INDEX_RECORD_BYTES);
    while index.has_remaining() {
        let offset = unsigned("index offset", index.get_i64())?;
        let meta = BlockMeta {
            length: length("index length", index.get_i32())?,
            uncompressed_length: length("index uncompressLength", index.get_i32())?,
            crc: crc(index.get_i64())?,
            block_id: BlockId(index.get_i64()),
            task_attempt_id: TaskAttemptId(index.get_i64()),
        };
        records.push(RecordPosition { offset, meta });
    }
    Ok(records)
}

/// The range of one `getLocalShuffleData` call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataSegment {
    /// Offset of the first byte.
    pub offset: u64,
    /// Number of bytes.
    pub length: u64,
    /// The contiguous blocks of the range.
    pub records: Vec<RecordPosition>,
}

/// Splits contiguous records into reads as Java does. A segment ends once it has `read_buffer_size`
/// bytes, or before an unwanted block (AQE's skew readers). Records beyond `data_length` (`None` =
/// unknown) are still being flushed and are left out.
///
/// # Errors
/// [`Malformed::Hole`] if the records are not contiguous.
pub fn segments(
    records: &[RecordPosition],
    data_length: Option<u64>,
    read_buffer_size: u64,
    wanted: impl Fn(&RecordPosition) -> bool,
) -> Result<Vec<DataSegment>, Malformed> {
    let mut done = Vec::new();
    let mut open: Option<DataSegment> = None;
    let mut expected = records.first().map_or(0, |record| record.offset);
    let mut total = 0;
    for (number, record) in records.iter().enumerate() {
        if record.offset != expected {
            return Err(Malformed::Hole { record: number, begins: record.offset, expected });
        }
        let length = u64::from(record.meta.length);
        expected += length;
        total += length;
        if data_length.is_some_and(|data_length| total > data_length) {
            break;
        }
        if !wanted(record) {
            done.extend(open.take());
            continue;
        }
        let mut segment =
            open.take().unwrap_or(DataSegment { offset: record.offset, length: 0, records: Vec::new() });
        segment.length += length;
        segment.records.push(*record);
        if segment.length >= read_buffer_size {
            done.push(segment);
        } else {
            open = Some(segment);
        }
    }
    done.extend(open);
    Ok(done)
}

/// Contiguous records on one disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordRun<'a> {
    /// Number of the disk, or −1 if the server has one stream per partition.
    pub storage: i32,
    /// Records, each of which begins where the previous one ends.
    pub records: &'a [RecordPosition],
}

/// Splits an index into contiguous runs. Each run is split into [`segments`] on its own.
///
/// A record with a lower offset than its predecessor starts the next disk of `storage_ids`
/// (docs/protocol.md §5.5). A gap, which a failed append leaves behind, also ends a run. Records
/// beyond `data_length` in total (`None` = unknown) are still being flushed and are left out.
#[must_use]
pub fn runs<'a>(
    records: &'a [RecordPosition],
    data_length: Option<u64>,
    storage_ids: &[i32],
) -> Vec<RecordRun<'a>> {
    let mut total = 0_u64;
    let readable = records.iter().take_while(|record| {
        total = total.saturating_add(u64::from(record.meta.length));
        data_length.is_none_or(|data_length| total <= data_length)
    });
    let records = &records[..readable.count()];
    let (mut disk, mut runs) = (0, Vec::new());
    for run in
        records.chunk_by(|one, next| one.offset.checked_add(one.meta.length.into()) == Some(next.offset))
    {
        let before = runs.last().and_then(|run: &RecordRun<'_>| run.records.last());
        if before.zip(run.first()).is_some_and(|(before, first)| first.offset <= before.offset) {
            disk += 1;
        }
        runs.push(RecordRun { storage: storage_ids.get(disk).copied().unwrap_or(-1), records: run });
    }
    runs
}

/// Splits the response to the read of `segment` into blocks.
///
/// # Errors
/// Fails if the response does not have exactly the length of the segment.
pub fn segment_blocks(segment: &DataSegment, data: &Bytes) -> Result<Vec<Block>, Malformed> {
    if data.len() as u64 != segment.length {
        return Err(Malformed::DataLength { expected: segment.length, got: data.len() });
    }
    let block = |record: &RecordPosition| {
        let data = cut(data, record.offset - segment.offset, &record.meta)?;
        Ok(Block { meta: record.meta, data })
    };
    segment.records.iter().map(block).collect()
}

/// Compares a block's bytes with its checksum. Checksum 0 means that there is none.
///
/// # Errors
/// [`Malformed::Crc`].
pub fn check_crc(block: &Block) -> Result<(), Malformed> {
    let expected = block.meta.crc;
    let actual = crc32fast::hash(&block.data);
    if expected == 0 || expected == actual {
        return Ok(());
    }
    Err(Malformed::Crc { block: block.meta.block_id, expected, actual })
}

fn cut(data: &Bytes, begins: u64, meta: &BlockMeta) -> Result<Bytes, Malformed> {
    let end = begins + u64::from(meta.length);
    let range = usize::try_from(begins).ok().zip(usize::try_from(end).ok());
    match range {
        Some((begins, end)) if end <= data.len() => Ok(data.slice(begins..end)),
        _ => Err(Malformed::OutOfRange { block: meta.block_id, end, available: data.len() }),
    }
}

fn unsigned(what: &'static str, value: i64) -> Result<u64, Malformed> {
    u64::try_from(value).map_err(|_| Malformed::Number { what, value })
}

fn length(what: &'static str, value: i32) -> Result<u32, Malformed> {
    u32::try_from(value).map_err(|_| Malformed::Number { what, value: i64::from(value) })
}

fn crc(value: i64) -> Result<u32, Malformed> {
    u32::try_from(value).map_err(|_| Malformed::Number { what: "crc", value })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(offset: u64, length: u32, id: i64) -> RecordPosition {
        let meta = BlockMeta {
            block_id: BlockId(id),
            task_attempt_id: TaskAttemptId(id % 2),
            length,
            uncompressed_length: length,
            crc: 0,
        };
        RecordPosition { offset, meta }
    }

    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
        digits.chunks(2).map(byte).collect()
    }

    #[test]
    fn index_records_match_the_vector_of_the_protocol() {
        let bytes =
            hex("0000000000000040 00000003 00000009 0000000011223344 0102030405060708 0000000000000005");
        let records = decode_index(&bytes).unwrap();
        let meta = BlockMeta {
            block_id: BlockId(0x0102_0304_0506_0708),
            task_attempt_id: TaskAttemptId(5),
            length: 3,
            uncompressed_length: 9,
            crc: 0x1122_3344,
        };
        assert_eq!(records, [RecordPosition { offset: 64, meta }]);
        assert_eq!(decode_index(&bytes[..39]), Err(Malformed::IndexLength(39)));
        assert_eq!(decode_index(&[]), Ok(Vec::new()));
        let mut negative = bytes.clone();
        negative[0] = 0xff;
        assert!(matches!(decode_index(&negative), Err(Malformed::Number { .. })));
    }

    #[test]
    fn bitmaps_match_the_vectors_of_the_protocol() {
        let vectors: [(&[u64], &str); 3] = [
            (&[], "00 00000000"),
            (&[1, 2], "00 00000001 00000000 3a30000001000000000001001000000001000200"),
            (
                &[5, (1 << 33) + 7],
                "00 00000002 00000000 3a3000000100000000000000100000000500 \
                 00000002 3a3000000100000000000000100000000700",
            ),
        ];
        for (set, bytes) in vectors {
            assert_eq!(decode_bitmap(&hex(bytes)).unwrap().to_vec(), set);
            assert_eq!(encode_bitmap(&Treemap::of(set)), hex(bytes));
        }
        let runs = decode_bitmap(&hex("00 00000001 00000000 3b3000000100000f27010000000f27")).unwrap();
        assert_eq!(runs.cardinality(), 10_000);
        assert!(decode_bitmap(&[]).unwrap().is_empty());
        assert_eq!(decode_bitmap(&[0, 0, 0]).unwrap_err(), Malformed::Bitmap(3));
    }

    #[test]
    fn segments_close_at_the_read_buffer_size() {
        let records = [record(0, 10, 1), record(10, 10, 2), record(20, 5, 3)];
        let cut = segments(&records, Some(25), 20, |_| true).unwrap();
        let shape: Vec<(u64, u64)> = cut.iter().map(|s| (s.offset, s.length)).collect();
        assert_eq!(shape, [(0, 20), (20, 5)]);
    }

    #[test]
    fn segments_end_before_unflushed_data() {
        let records = [record(0, 10, 1), record(10, 10, 2)];
        assert_eq!(segments(&records, Some(19), 100, |_| true).unwrap()[0].length, 10);
        assert_eq!(segments(&records, None, 100, |_| true).unwrap()[0].length, 20);
    }

    #[test]
    fn segments_skip_unwanted_blocks() {
        let records = [record(0, 10, 1), record(10, 10, 2), record(20, 10, 3), record(30, 10, 5)];
        let cut = segments(&records, None, 100, |record| record.meta.task_attempt_id.0 == 1).unwrap();
        let shape: Vec<(u64, u64)> = cut.iter().map(|s| (s.offset, s.length)).collect();
        assert_eq!(shape, [(0, 10), (20, 20)]);
    }

    #[test]
    fn index_is_split_at_disks_and_gaps() {
        let records =
            [record(0, 10, 1), record(10, 5, 2), record(20, 5, 3), record(0, 7, 4), record(7, 1, 5)];
        let shape = |data_length, disks: &[i32]| -> Vec<(i32, u64, usize)> {
            let runs = runs(&records, data_length, disks);
            runs.iter().map(|run| (run.storage, run.records[0].offset, run.records.len())).collect()
        };
        assert_eq!(shape(None, &[4, 2]), [(4, 0, 2), (4, 20, 1), (2, 0, 2)]);
        assert_eq!(shape(None, &[]), [(-1, 0, 2), (-1, 20, 1), (-1, 0, 2)]);
        assert_eq!(shape(Some(27), &[4, 2]), [(4, 0, 2), (4, 20, 1), (2, 0, 1)]);
        assert_eq!(shape(Some(9), &[4]), []);
        assert_eq!(runs(&[], None, &[]), []);
    }

    #[test]
    fn index_gap_is_an_error() {
        let records = [record(0, 10, 1), record(11, 10, 2)];
        let hole = Malformed::Hole { record: 1, begins: 11, expected: 10 };
        assert_eq!(segments(&records, None, 100, |_| true), Err(hole));
    }

    #[test]
    fn segment_of_wrong_length_is_refused() {
        let segment = DataSegment { offset: 8, length: 3, records: vec![record(8, 1, 1), record(9, 2, 2)] };
        let blocks = segment_blocks(&segment, &Bytes::from_static(b"abc")).unwrap();
        assert_eq!(blocks[1].data, "bc");
        assert!(segment_blocks(&segment, &Bytes::from_static(b"ab")).is_err());
    }

    #[test]
    fn misplaced_memory_segments_are_refused() {
        let segment =
            |offset, length| proto::ShuffleDataBlockSegment { offset, length, ..Default::default() };
        let data = Bytes::from_static(b"abc");
        let blocks = memory_blocks(&[segment(0, 1), segment(1, 2)], &data).unwrap();
        assert_eq!((blocks[0].data.as_ref(), blocks[1].data.as_ref()), (&b"a"[..], &b"bc"[..]));
        for wrong in
            [[segment(0, 1), segment(2, 1)], [segment(0, 1), segment(1, 3)], [segment(0, -1), segment(0, 1)]]
        {
            assert!(memory_blocks(&wrong, &data).is_err());
        }
    }

    #[test]
    fn wrong_crc_is_an_error_and_zero_is_ignored() {
        let mut block = Block::new(BlockId(1), TaskAttemptId(1), Bytes::from_static(b"x"));
        assert_eq!(check_crc(&block), Ok(()));
        block.meta.crc ^= 1;
        assert!(check_crc(&block).is_err());
        block.meta.crc = 0;
        assert_eq!(check_crc(&block), Ok(()));
    }
}
