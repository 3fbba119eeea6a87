//! The index group: the durable record of one published batch on disks, and the index of a segment
//! in an object store. FROZEN as version 1 (see the golden test).
//!
//! An index log is a sequence of groups. Everything is big-endian:
//!
//! ```text
//! header, 64 bytes      0  magic "UWIG"            4  version u16 = 1     6  reserved u16 = 0
//!                       8  total bytes u64        16  sequence u64 (batch of this shuffle)
//!                      24  disk uuid, 16 bytes    40  data file number u32
//!                      44  entries u32            48  incarnation u64     56  reserved u32 = 0
//!                      60  crc32 of bytes 0..60 and of the entry table
//! per entry, 40 bytes   0  partition i32           4  blocks u32           8  base u64 (in stream)
//!                      16  data offset u64 (in the data log, multiple of 4,096; or in the object)
//!                      24  length u64             32  reserved u32 = 0    36  crc32 of its records
//! then the records      40 bytes each (docs/protocol.md §5.2), in the order of the entries;
//!                       offsets are relative to the extent
//! ```
//!
//! The blocks of an extent are contiguous, so a record's offset is the sum of the lengths before
//! it. [`RecordCheck`](crate::store::index::records::RecordCheck) verifies that. The bases are
//! promises to clients, so the group stores them and recovery restores them. A group may appear in
//! several index logs, after appends with an unknown outcome. All have the same sequence and the
//! same bytes. A damaged record costs an index log the whole group, and a segment one extent. The
//! object store's `layout` has the header of a segment's index. Pure: no I/O.

use bytes::Bytes;
use uuid::Uuid;

use super::records::{are_sound, encode_blocks};
use uniffle_io::BLOCK_ALIGN;
use uniffle_wire::index::{IndexRecord, RECORD_BYTES, records};
use uniffle_wire::types::{BlockMeta, PartitionId};

/// Magic bytes of a group.
pub const MAGIC: [u8; 4] = *b"UWIG";
pub const VERSION: u16 = 1;
pub const HEADER_BYTES: usize = 64;
pub const ENTRY_BYTES: usize = 40;

/// Header of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupHeader {
    /// Position among the shuffle's published batches.
    pub sequence: u64,
    /// Incarnation of the shuffle, as in its directory's name.
    pub incarnation: u64,
    /// Disk of the data log.
    pub disk: Uuid,
    /// Number of the data log.
    pub file_number: u32,
}

/// One extent to be encoded.
#[derive(Debug, Clone, Copy)]
pub struct GroupExtent<'a> {
    pub partition: PartitionId,
    /// Offset of the extent in the partition's stream.
    pub base: u64,
    /// Offset of the extent in the data log.
    pub data_offset: u64,
    /// Blocks of the extent, in order.
    pub blocks: &'a [BlockMeta],
}

/// An encoded group.
#[derive(Debug, Clone)]
pub struct EncodedGroup {
    pub bytes: Bytes,
    /// Extents in order.
    pub entries: Vec<GroupEntry>,
}

/// Place of an extent's records in their group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordsPlace {
    /// Offset from the group's first byte.
    pub offset: u64,
    /// CRC-32 of the records.
    pub crc: u32,
}

/// An extent in a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupEntry {
    pub partition: PartitionId,
    /// Number of blocks. At least one.
    pub blocks: u32,
    /// Offset of the extent in the partition's stream.
    pub base: u64,
    /// Offset of the extent in the data log or object.
    pub data_offset: u64,
    /// Length of the data in bytes.
    pub length: u64,
    /// Place of the records in the group.
    pub place: RecordsPlace,
}

impl GroupEntry {
    /// Returns the size of its records.
    pub fn records_bytes(&self) -> u64 {
        u64::from(self.blocks) * RECORD_BYTES as u64
    }

    /// Returns its records in the bytes of the group, or `None` if they are damaged.
    pub fn records<'a>(&self, group: &'a [u8]) -> Option<&'a [u8]> {
        let at = |place: u64| usize::try_from(place).ok();
        let (start, end) = (self.place.offset, self.place.offset + self.records_bytes());
        let records = group.get(at(start)?..at(end)?)?;
        are_sound(records, self.length, self.place.crc).then_some(records)
    }
}

/// A decoded head of a group. The records are not verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupHead {
    pub header: GroupHeader,
    pub entries: Vec<GroupEntry>,
    /// Size of the whole group.
    pub bytes: usize,
}

/// A decoded group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexGroup {
    /// Header of the group.
    pub header: GroupHeader,
    /// Extents of the group, with their records. The offsets of records are relative to the extent.
    pub entries: Vec<(GroupEntry, Vec<IndexRecord>)>,
}

/// Reason why bytes are not a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    /// The bytes end before the group does.
    #[error("index group is truncated")]
    Incomplete,
    /// The bytes do not begin with the magic.
    #[error("not an index group")]
    Magic,
    /// A later program version wrote the group.
    #[error("index group has version {0}, this program supports {VERSION}")]
    Version(u16),
    /// The checksum of the header and the entry table does not match.
    #[error("checksum of the index group's head does not match")]
    Checksum,
    /// A field contradicts another.
    #[error("index group's {0} is malformed")]
    Malformed(&'static str),
}

/// Returns the bytes that `length` bytes of data occupy in a data log.
pub fn occupied_bytes(length: u64) -> u64 {
    length.next_multiple_of(BLOCK_ALIGN as u64)
}

/// Returns the size of an encoded group of `extents` extents with `blocks` blocks.
pub fn group_bytes(extents: usize, blocks: usize) -> usize {
    HEADER_BYTES + extents * ENTRY_BYTES + blocks * RECORD_BYTES
}

/// Encodes a group. The caller has checked that no block is empty and that counts fit `u32`.
pub fn encode(header: &GroupHeader, extents: &[GroupExtent<'_>]) -> EncodedGroup {
    let blocks: usize = extents.iter().map(|extent| extent.blocks.len()).sum();
    let head_bytes = group_bytes(extents.len(), 0);
    let mut bytes = vec![0; head_bytes];
    bytes.reserve_exact(blocks * RECORD_BYTES);
    let mut entries = Vec::with_capacity(extents.len());
    for extent in extents {
        let GroupExtent { partition, base, data_offset, blocks } = *extent;
        let start = bytes.len();
        let length = encode_blocks(blocks, 0, &mut bytes);
        let place = RecordsPlace { offset: start as u64, crc: crc32fast::hash(&bytes[start..]) };
        entries.push(GroupEntry { partition, blocks: count(blocks.len()), base, data_offset, length, place });
    }
    encode_head(header, &entries, &mut bytes[..head_bytes]);
    EncodedGroup { bytes: bytes.into(), entries }
}

/// Encodes the header and the entry table of a group into `head`, which has exactly their size.
pub fn encode_head(header: &GroupHeader, entries: &[GroupEntry], head: &mut [u8]) {
    for (bytes, entry) in head[HEADER_BYTES..].chunks_exact_mut(ENTRY_BYTES).zip(entries) {
        bytes[0..4].copy_from_slice(&entry.partition.0.to_be_bytes());
        bytes[4..8].copy_from_slice(&entry.blocks.to_be_bytes());
        bytes[8..16].copy_from_slice(&entry.base.to_be_bytes());
        bytes[16..24].copy_from_slice(&entry.data_offset.to_be_bytes());
        bytes[24..32].copy_from_slice(&entry.length.to_be_bytes());
        bytes[36..40].copy_from_slice(&entry.place.crc.to_be_bytes());
    }
    let total = head.len() as u64 + entries.iter().map(GroupEntry::records_bytes).sum::<u64>();
    head[0..4].copy_from_slice(&MAGIC);
    head[4..6].copy_from_slice(&VERSION.to_be_bytes());
    head[8..16].copy_from_slice(&total.to_be_bytes());
    head[16..24].copy_from_slice(&header.sequence.to_be_bytes());
    head[24..40].copy_from_slice(header.disk.as_bytes());
    head[40..44].copy_from_slice(&header.file_number.to_be_bytes());
    head[44..48].copy_from_slice(&count(entries.len()).to_be_bytes());
    head[48..56].copy_from_slice(&header.incarnation.to_be_bytes());
    let crc = head_crc(head);
    head[60..64].copy_from_slice(&crc.to_be_bytes());
}

/// Returns the size of the header and entry table of the group that begins `bytes`, as its
/// unchecked header states.
///
/// # Errors
/// A [`GroupError`] if no group begins here.
pub fn head_bytes(bytes: &[u8]) -> Result<usize, GroupError> {
    let header = bytes.first_chunk::<HEADER_BYTES>().ok_or(GroupError::Incomplete)?;
    if header[0..4] != MAGIC {
        return Err(GroupError::Magic);
    }
    let entries = u32::from_be_bytes([header[44], header[45], header[46], header[47]]) as usize;
    let table = entries.checked_mul(ENTRY_BYTES).and_then(|table| table.checked_add(HEADER_BYTES));
    table.ok_or(GroupError::Malformed("entry count"))
}

/// Returns the size of the whole group that begins with `head`, after verifying the checksum.
///
/// # Errors
/// A [`GroupError`] if the head is incomplete or its checksum does not match.
pub fn total_bytes(head: &[u8]) -> Result<u64, GroupError> {
    let head = head.get(..head_bytes(head)?).ok_or(GroupError::Incomplete)?;
    let word = |at: usize| head[at..].first_chunk().copied().map(u32::from_be_bytes);
    if word(60) != Some(head_crc(head)) {
        return Err(GroupError::Checksum);
    }
    head[8..].first_chunk().copied().map(u64::from_be_bytes).ok_or(GroupError::Incomplete)
}

/// Decodes the group of an index log at the start of `bytes`. Returns the group and its size in
/// bytes. Allocations are bounded by the length of `bytes`, whatever their content.
///
/// # Errors
/// A [`GroupError`]. `Incomplete` means that further bytes could complete the group.
pub fn decode(bytes: &[u8]) -> Result<(IndexGroup, usize), GroupError> {
    let head = decode_head(bytes)?;
    let whole = |entry: GroupEntry| {
        if !entry.data_offset.is_multiple_of(BLOCK_ALIGN as u64) {
            return Err(GroupError::Malformed("data offset"));
        }
        let all = entry.records(bytes).ok_or(GroupError::Malformed("records"))?;
        Ok((entry, records(all).collect()))
    };
    let entries = head.entries.into_iter().map(whole).collect::<Result<_, _>>()?;
    Ok((IndexGroup { header: head.header, entries }, head.bytes))
}

/// Decodes the head of the group at the start of `bytes`, which must have the whole group.
///
/// # Errors
/// See [`decode`].
pub fn decode_head(bytes: &[u8]) -> Result<GroupHead, GroupError> {
    let fixed = bytes.first_chunk::<HEADER_BYTES>().ok_or(GroupError::Incomplete)?;
    if fixed[0..4] != MAGIC {
        return Err(GroupError::Magic);
    }
    let mut fields = Fields(&fixed[4..]);
    let version = u16::from_be_bytes(fields.take());
    if version != VERSION {
        return Err(GroupError::Version(version));
    }
    let reserved = u16::from_be_bytes(fields.take());
    let total = u64::from_be_bytes(fields.take());
    let sequence = u64::from_be_bytes(fields.take());
    let disk = Uuid::from_bytes(fields.take());
    let file_number = u32::from_be_bytes(fields.take());
    let entry_count = u32::from_be_bytes(fields.take()) as usize;
    let incarnation = u64::from_be_bytes(fields.take());
    let reserved = u64::from(reserved) + u64::from(u32::from_be_bytes(fields.take()));
    let crc = u32::from_be_bytes(fields.take());

    let head_bytes = entry_count
        .checked_mul(ENTRY_BYTES)
        .and_then(|table| table.checked_add(HEADER_BYTES))
        .ok_or(GroupError::Malformed("entry count"))?;
    let head = bytes.get(..head_bytes).ok_or(GroupError::Incomplete)?;
    if head_crc(head) != crc {
        return Err(GroupError::Checksum);
    }
    if reserved != 0 {
        return Err(GroupError::Malformed("reserved field"));
    }
    if entry_count == 0 {
        return Err(GroupError::Malformed("entry count"));
    }
    let mut at = head_bytes as u64;
    let mut entries = Vec::with_capacity(entry_count);
    for entry in head[HEADER_BYTES..].chunks_exact(ENTRY_BYTES) {
        let entry = decode_entry(entry, at)?;
        at = at.checked_add(entry.records_bytes()).ok_or(GroupError::Malformed("block count"))?;
        entries.push(entry);
    }
    if total != at {
        return Err(GroupError::Malformed("total length"));
    }
    let bytes = usize::try_from(at).ok().filter(|end| *end <= bytes.len()).ok_or(GroupError::Incomplete)?;
    Ok(GroupHead { header: GroupHeader { sequence, incarnation, disk, file_number }, entries, bytes })
}

/// Decodes one entry whose records begin at offset `at` of the whole group.
fn decode_entry(entry: &[u8], at: u64) -> Result<GroupEntry, GroupError> {
    let mut fields = Fields(entry);
    let partition = PartitionId(i32::from_be_bytes(fields.take()));
    let blocks = u32::from_be_bytes(fields.take());
    let base = u64::from_be_bytes(fields.take());
    let data_offset = u64::from_be_bytes(fields.take());
    let length = u64::from_be_bytes(fields.take());
    let reserved = u32::from_be_bytes(fields.take());
    let crc = u32::from_be_bytes(fields.take());
    if reserved != 0 {
        return Err(GroupError::Malformed("reserved field"));
    }
    if blocks == 0 {
        return Err(GroupError::Malformed("records"));
    }
    let in_range = base.checked_add(length).is_some_and(|end| i64::try_from(end).is_ok());
    if !in_range || data_offset.checked_add(length).is_none() {
        return Err(GroupError::Malformed("extent"));
    }
    Ok(GroupEntry { partition, blocks, base, data_offset, length, place: RecordsPlace { offset: at, crc } })
}

/// Returns the CRC of the header, except its CRC field, and of the entry table.
fn head_crc(head: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&head[..HEADER_BYTES - 4]);
    hasher.update(&head[HEADER_BYTES..]);
    hasher.finalize()
}

/// Converts a count that the caller of [`encode`] has bounded.
fn count(value: usize) -> u32 {
    u32::try_from(value).expect("a batch is checked for its counts before it is written")
}

/// Reader of fixed-size fields from a slice that covers them all.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (field, rest) = self.0.split_first_chunk::<N>().expect("header and entries have their full size");
        self.0 = rest;
        *field
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use uniffle_wire::types::{BlockId, TaskAttemptId};

    fn block(length: u32, id: i64) -> BlockMeta {
        BlockMeta {
            block_id: BlockId(id),
            task_attempt_id: TaskAttemptId(id / 2),
            length,
            uncompressed_length: length + 1,
            crc: length ^ 0xdead_beef,
        }
    }

    const HEADER: GroupHeader =
        GroupHeader { sequence: 7, incarnation: 3, disk: Uuid::from_u128(0x0102_0304), file_number: 9 };

    /// The format is a promise to every later version: these bytes must not change while the
    /// version is 1.
    #[test]
    fn version_1_is_frozen() {
        let blocks = [block(3, 5), block(4, 6)];
        let extents =
            [GroupExtent { partition: PartitionId(11), base: 64, data_offset: 8192, blocks: &blocks }];
        let encoded = encode(&HEADER, &extents);
        let hex: String = encoded.bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let golden = [
            "555749470001000000000000000000b8",
            "00000000000000070000000000000000",
            "00000000010203040000000900000001",
            "00000000000000030000000090f5c7df",
            "0000000b000000020000000000000040",
            "00000000000020000000000000000007",
            "00000000f6881d73",
            "0000000000000000000000030000000400000000deadbeec00000000000000050000000000000002",
            "0000000000000003000000040000000500000000deadbeeb00000000000000060000000000000003",
        ];
        assert_eq!(hex, golden.concat());
        assert_eq!(encoded.entries[0].place.offset, 104);
        assert_eq!(decode(&encoded.bytes).unwrap().1, 184);
    }

    fn arbitrary_extents() -> impl Strategy<Value = Vec<(i32, u64, u64, Vec<BlockMeta>)>> {
        let blocks = prop::collection::vec((1u32..1 << 29, any::<i64>()), 1..20)
            .prop_map(|blocks| blocks.into_iter().map(|(length, id)| block(length, id)).collect::<Vec<_>>());
        prop::collection::vec((any::<i32>(), 0u64..1 << 50, 0u64..1 << 40, blocks), 1..6)
    }

    fn encoded(extents: &[(i32, u64, u64, Vec<BlockMeta>)]) -> EncodedGroup {
        let extents: Vec<_> = extents
            .iter()
            .map(|(partition, base, page, blocks)| GroupExtent {
                partition: PartitionId(*partition),
                base: *base,
                data_offset: page * BLOCK_ALIGN as u64,
                blocks,
            })
            .collect();
        encode(&HEADER, &extents)
    }

    proptest! {
        #[test]
        fn groups_round_trip_and_damage_is_detected(
            extents in arbitrary_extents(), at: prop::sample::Index, bit in 0u8..8, cut: prop::sample::Index,
        ) {
            let group = encoded(&extents);
            let (decoded, consumed) = decode(&[&group.bytes[..], b"next"].concat()).unwrap();
            prop_assert_eq!(consumed, group.bytes.len());
            prop_assert_eq!(decoded.header, HEADER);
            for (((entry, records), written), (partition, base, page, blocks)) in
                decoded.entries.iter().zip(&group.entries).zip(&extents)
            {
                prop_assert_eq!((entry.partition.0, entry.base), (*partition, *base));
                prop_assert_eq!(entry.data_offset, page * BLOCK_ALIGN as u64);
                prop_assert_eq!(entry, written);
                prop_assert_eq!(entry.length, blocks.iter().map(|b| u64::from(b.length)).sum::<u64>());
                let ids: Vec<_> = records.iter().map(|record| record.block_id).collect();
                prop_assert_eq!(ids, blocks.iter().map(|b| b.block_id.0).collect::<Vec<_>>());
            }
            prop_assert_eq!(decoded.entries.len(), extents.len());

            let mut flipped = group.bytes.to_vec();
            let at = at.index(flipped.len());
            flipped[at] ^= 1 << bit;
            prop_assert!(decode(&flipped).is_err(), "bit {} of byte {} is flipped", at, bit);
            let cut = cut.index(group.bytes.len());
            prop_assert_eq!(decode(&group.bytes[..cut]).unwrap_err(), GroupError::Incomplete);
        }

        #[test]
        fn random_bytes_are_refused(mut bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            prop_assert!(decode(&bytes).is_err());
            if bytes.len() >= 6 {
                bytes[..6].copy_from_slice(b"UWIG\0\x01");
                prop_assert!(decode(&bytes).is_err());
            }
        }
    }

    /// An index log refuses the group. A segment loses one extent.
    #[test]
    fn damaged_record_costs_the_head_one_extent() {
        let mut group = encoded(&[(1, 0, 1, vec![block(3, 5)]), (2, 0, 2, vec![block(4, 6)])]).bytes.to_vec();
        *group.last_mut().unwrap() ^= 1;
        assert_eq!(decode(&group), Err(GroupError::Malformed("records")));
        let head = decode_head(&group).unwrap();
        let found: Vec<_> = head.entries.iter().map(|entry| entry.records(&group).is_some()).collect();
        assert_eq!((found, head.bytes), (vec![true, false], group.len()));
        assert_eq!(decode_head(&group[..group.len() - 1]), Err(GroupError::Incomplete));
    }

    #[test]
    fn contradictions_under_a_valid_checksum_are_refused() {
        let encoded = encoded(&[(1, 0, 1, vec![block(3, 5)])]).bytes.to_vec();
        let with = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = encoded.clone();
            change(&mut bytes);
            let records = bytes.len().min(HEADER_BYTES + ENTRY_BYTES);
            let crc = crc32fast::hash(&bytes[records..]);
            bytes[100..104].copy_from_slice(&crc.to_be_bytes());
            let crc = head_crc(&bytes[..HEADER_BYTES + ENTRY_BYTES]);
            bytes[60..64].copy_from_slice(&crc.to_be_bytes());
            decode(&bytes).unwrap_err()
        };
        assert_eq!(with(&|bytes| bytes[7] = 1), GroupError::Malformed("reserved field"));
        assert_eq!(with(&|bytes| bytes[15] += 1), GroupError::Malformed("total length"));
        assert_eq!(with(&|bytes| bytes[87] = 1), GroupError::Malformed("data offset"));
        assert_eq!(with(&|bytes| bytes[95] += 1), GroupError::Malformed("records"));
        assert_eq!(with(&|bytes| bytes[111] = 1), GroupError::Malformed("records"));
        assert_eq!(with(&|bytes| bytes[72] = 0xff), GroupError::Malformed("extent"));
        assert_eq!(with(&|bytes| bytes[5] = 2), GroupError::Version(2));
    }
}
