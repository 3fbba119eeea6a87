//! What a reader makes of answers, as pure functions: memory segments, index bytes, ranges to ask for.
//!
//! Follows the Java client (docs/protocol.md §3.4, §5.4) and is stricter: where Java would slice wrong bytes out of a
//! hole in the index, this one says so. One data file per partition is assumed, as this worker answers.

use bytes::{Buf, Bytes};
use croaring::{JvmLegacy, Treemap};

use super::block::Block;
use crate::proto;
use uniffle_wire::types::{BlockId, BlockMeta, TaskAttemptId};

/// Bytes of one index record (docs/protocol.md §5.2).
pub const INDEX_RECORD_BYTES: usize = 40;

/// An answer that contradicts itself or the protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// A number is negative or too large for its meaning.
    #[error("{what} is {value}")]
    Number {
        /// Which one.
        what: &'static str,
        /// Its value.
        value: i64,
    },
    /// The index is not a whole number of records.
    #[error("index has {0} bytes, which is no multiple of 40")]
    IndexLength(usize),
    /// A record does not begin where the one before it ends.
    #[error("index record {record} begins at {begins}, the one before ends at {expected}")]
    Hole {
        /// Number of the record.
        record: usize,
        /// Its offset.
        begins: u64,
        /// The end of the record before.
        expected: u64,
    },
    /// A block lies outside of the bytes that came with it.
    #[error("block {block} ends at byte {end} of {available}")]
    OutOfRange {
        /// The block.
        block: BlockId,
        /// Where it would end.
        end: u64,
        /// How many bytes there are.
        available: usize,
    },
    /// The answer to a data read has not the length that was asked for.
    #[error("expected {expected} bytes of data, got {got}")]
    DataLength {
        /// Bytes asked for.
        expected: u64,
        /// Bytes in the answer.
        got: usize,
    },
    /// The bytes of a block are not those that were sent.
    #[error("block {block} has crc {actual:#010x}, expected {expected:#010x}")]
    Crc {
        /// The block.
        block: BlockId,
        /// By its metadata.
        expected: u32,
        /// Of its bytes.
        actual: u32,
    },
    /// Not a `Roaring64NavigableMap` in its legacy form.
    #[error("the bitmap of {0} bytes is not in Java's legacy form")]
    Bitmap(usize),
    /// The answer is one to another request.
    #[error("the answer belongs to another request")]
    Answer,
    /// A status number that is none.
    #[error("unknown status {0}")]
    Status(i32),
}

/// The set that `getShuffleResult` answers with; no bytes are the empty set.
///
/// # Errors
/// [`Malformed::Bitmap`].
pub fn decode_bitmap(bytes: &[u8]) -> Result<Treemap, Malformed> {
    if bytes.is_empty() {
        return Ok(Treemap::new());
    }
    Treemap::try_deserialize::<JvmLegacy>(bytes).ok_or(Malformed::Bitmap(bytes.len()))
}

/// A set in Java's form, for the task filter of a memory read.
#[must_use]
pub fn encode_bitmap(set: &Treemap) -> Bytes {
    set.serialize::<JvmLegacy>().into()
}

/// Cuts the blocks of a memory answer out of its data.
///
/// # Errors
/// When a segment lies outside of the data, or the segments do not follow each other.
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

/// A block in the data of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexRecord {
    /// First byte in the partition's data.
    pub offset: u64,
    /// The block.
    pub meta: BlockMeta,
}

/// Takes the answer of `getLocalShuffleIndex` apart.
///
/// # Errors
/// When the length is no multiple of 40 or a number makes no sense.
pub fn decode_index(mut index: &[u8]) -> Result<Vec<IndexRecord>, Malformed> {
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
        records.push(IndexRecord { offset, meta });
    }
    Ok(records)
}

/// One `getLocalShuffleData`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// The blocks in it, back to back.
    pub records: Vec<IndexRecord>,
}

/// Cuts the index into reads as Java does: a segment closes when it has `read_buffer_size` bytes, or before a block
/// that is not wanted (AQE's skew readers). Records beyond `data_length` (`None` = unknown) are still being flushed.
///
/// # Errors
/// [`Malformed::Hole`] when records do not follow each other without a gap.
pub fn segments(
    records: &[IndexRecord],
    data_length: Option<u64>,
    read_buffer_size: u64,
    wanted: impl Fn(&IndexRecord) -> bool,
) -> Result<Vec<Segment>, Malformed> {
    let mut done = Vec::new();
    let mut open: Option<Segment> = None;
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
            open.take().unwrap_or(Segment { offset: record.offset, length: 0, records: Vec::new() });
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

/// Records that lie side by side on one disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run<'a> {
    /// The disk's number; −1 where the server has one stream per partition.
    pub storage: i32,
    /// Each begins where the one before ends.
    pub records: &'a [IndexRecord],
}

/// Cuts an index into runs that are read each by itself. A record that begins before the one ahead of it is the first of
/// the next disk in `storage_ids` (docs/protocol.md §5.5); a gap, which an append that failed leaves behind, ends a run
/// too. Records beyond `data_length` in all (`None` = unknown) are still being flushed and left out.
#[must_use]
pub fn runs<'a>(records: &'a [IndexRecord], data_length: Option<u64>, storage_ids: &[i32]) -> Vec<Run<'a>> {
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
        let before = runs.last().and_then(|run: &Run<'_>| run.records.last());
        if before.zip(run.first()).is_some_and(|(before, first)| first.offset <= before.offset) {
            disk += 1;
        }
        runs.push(Run { storage: storage_ids.get(disk).copied().unwrap_or(-1), records: run });
    }
    runs
}

/// Cuts the blocks of `segment` out of the answer to its read.
///
/// # Errors
/// When the answer has not exactly the length of the segment.
pub fn segment_blocks(segment: &Segment, data: &Bytes) -> Result<Vec<Block>, Malformed> {
    if data.len() as u64 != segment.length {
        return Err(Malformed::DataLength { expected: segment.length, got: data.len() });
    }
    let block = |record: &IndexRecord| {
        let data = cut(data, record.offset - segment.offset, &record.meta)?;
        Ok(Block { meta: record.meta, data })
    };
    segment.records.iter().map(block).collect()
}

/// Compares a block's bytes with its checksum, 0 meaning that there is none.
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

    fn record(offset: u64, length: u32, id: i64) -> IndexRecord {
        let meta = BlockMeta {
            block_id: BlockId(id),
            task_attempt_id: TaskAttemptId(id % 2),
            length,
            uncompressed_length: length,
            crc: 0,
        };
        IndexRecord { offset, meta }
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
        assert_eq!(records, [IndexRecord { offset: 64, meta }]);
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
    fn segments_stop_where_data_is_still_being_flushed() {
        let records = [record(0, 10, 1), record(10, 10, 2)];
        assert_eq!(segments(&records, Some(19), 100, |_| true).unwrap()[0].length, 10);
        assert_eq!(segments(&records, None, 100, |_| true).unwrap()[0].length, 20);
    }

    #[test]
    fn segments_skip_blocks_that_are_not_wanted() {
        let records = [record(0, 10, 1), record(10, 10, 2), record(20, 10, 3), record(30, 10, 5)];
        let cut = segments(&records, None, 100, |record| record.meta.task_attempt_id.0 == 1).unwrap();
        let shape: Vec<(u64, u64)> = cut.iter().map(|s| (s.offset, s.length)).collect();
        assert_eq!(shape, [(0, 10), (20, 20)]);
    }

    #[test]
    fn an_index_is_cut_into_runs_at_disks_and_gaps() {
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
    fn a_hole_in_the_index_is_an_error() {
        let records = [record(0, 10, 1), record(11, 10, 2)];
        let hole = Malformed::Hole { record: 1, begins: 11, expected: 10 };
        assert_eq!(segments(&records, None, 100, |_| true), Err(hole));
    }

    #[test]
    fn segment_blocks_demand_the_exact_length() {
        let segment = Segment { offset: 8, length: 3, records: vec![record(8, 1, 1), record(9, 2, 2)] };
        let blocks = segment_blocks(&segment, &Bytes::from_static(b"abc")).unwrap();
        assert_eq!(blocks[1].data, "bc");
        assert!(segment_blocks(&segment, &Bytes::from_static(b"ab")).is_err());
    }

    #[test]
    fn memory_segments_must_follow_each_other_inside_the_data() {
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
    fn a_wrong_crc_is_an_error_and_zero_is_not_checked() {
        let mut block = Block::new(BlockId(1), TaskAttemptId(1), Bytes::from_static(b"x"));
        assert_eq!(check_crc(&block), Ok(()));
        block.meta.crc ^= 1;
        assert!(check_crc(&block).is_err());
        block.meta.crc = 0;
        assert_eq!(check_crc(&block), Ok(()));
    }
}
