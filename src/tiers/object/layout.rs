//! Keys of the tier's objects, and the format of segments. Version 1 is FROZEN (see the golden
//! test). Pure: no I/O.
//!
//! ```text
//! <prefix>/<worker>/!claim                                              claim
//! <prefix>/<worker>/!log/<generation>.<process>.<first>.<frames>.<copy> metadata log
//! <prefix>/<worker>/!settings/<start>                                   saved settings
//! <prefix>/<worker>/<application>/<shuffle>.<incarnation>/s0000000001   segment
//! ```
//!
//! See `claim`, `durability::objects` and `saved`. In the ids of workers and applications, each
//! byte except `A-Za-z0-9._-` is encoded as `!` and two hexadecimal digits. So a key can be
//! decoded, and no id escapes its prefix. Each registration of a shuffle has its own incarnation,
//! so it can be deleted by its prefix at any time. Segment numbers are never reused, not even after
//! failed uploads.
//!
//! A segment consists of payload, index and footer. It holds many partitions of one shuffle. It is
//! always complete, because an object appears as a whole or not at all. All numbers are big-endian:
//!
//! ```text
//! payload               extents, one after the other, each with contiguous blocks
//! table, 48 per entry    0  partition i32          4  blocks u32        8  base u64 (stream)
//!                       16  offset u64 (in the object)                 24  length u64
//!                       32  records u64 (offset in the object)         40  crc32 of the records
//!                       44  reserved u32 = 0
//! records               40 bytes each (docs/protocol.md §5.2), in entry order,
//!                       with offsets relative to the extent
//! footer, 64 bytes       0  magic "UWOS"           4  version u16 = 1   6  reserved u16 = 0
//!                        8  payload bytes u64     16  bytes of table and records u64
//!                       24  entries u32           28  number u32       32  previous u32
//!                       36  reserved u32 = 0      40  incarnation u64  48  blocks u64
//!                       56  crc32 of the table    60  crc32 of bytes 0..60
//! ```
//!
//! Entries are sorted by partition and base, so the records of a partition are one range.
//! `previous` is the number of the segment published before, or 0. An upload of unknown outcome is
//! therefore in no chain once a later segment has taken its bases.

use std::fmt::Write as _;

use crate::durability::LogObject;
use crate::tiers::extent::Extent;
use object_store::path::Path;
use uniffle_wire::index::RECORD_BYTES;
use uniffle_wire::types::{AppId, PartitionId, ShuffleId, ShuffleKey};

/// First bytes of a footer.
pub const MAGIC: [u8; 4] = *b"UWOS";
/// Version of written segments.
pub const VERSION: u16 = 1;
/// Size of a footer.
pub const FOOTER_BYTES: usize = 64;
/// Size of a table entry.
pub const ENTRY_BYTES: usize = 48;

/// One registration of a shuffle.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Registered {
    /// Key of the shuffle.
    pub key: ShuffleKey,
    /// Number that distinguishes registrations of the shuffle.
    pub incarnation: u64,
}

/// Encodes `text` as a component of a key.
#[must_use]
pub fn part_of(text: &str) -> String {
    let mut part = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-' => part.push(char::from(byte)),
            // Writing to a string does not fail.
            _ => drop(write!(part, "!{byte:02x}")),
        }
    }
    part
}

/// Decodes a component of a key. Returns `None` if [`part_of`] does not produce it.
#[must_use]
pub fn text_of(part: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(part.len());
    let mut rest = part.as_bytes();
    while let Some((&first, others)) = rest.split_first() {
        rest = others;
        if first == b'!' {
            let (digits, others) = rest.split_first_chunk::<2>()?;
            bytes.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
            rest = others;
        } else {
            bytes.push(first);
        }
    }
    String::from_utf8(bytes).ok().filter(|text| part_of(text) == part)
}

/// Returns the prefix of an application below the worker's prefix `root`.
#[must_use]
pub fn app_prefix(root: &str, app: &AppId) -> String {
    format!("{root}/{}", part_of(app.as_str()))
}

/// Returns the prefix of a registration below the worker's prefix `root`.
#[must_use]
pub fn shuffle_prefix(root: &str, shuffle: &Registered) -> String {
    let Registered { key, incarnation } = shuffle;
    format!("{}/{}.{incarnation}", app_prefix(root, &key.app), key.shuffle)
}

/// Returns the key of segment `number` below the prefix of its registration.
#[must_use]
pub fn segment_key(prefix: &str, number: u32) -> String {
    format!("{prefix}/s{number:010}")
}

/// Component of the keys of the metadata log. No application has this name.
const LOG: &str = "!log";

/// Returns the prefix of the metadata log.
#[must_use]
pub fn log_prefix(root: &str) -> String {
    format!("{root}/{LOG}")
}

/// Returns the key of copy `copy` of an object of the metadata log.
#[must_use]
pub fn log_key(root: &str, object: LogObject, copy: usize) -> String {
    format!("{root}/{LOG}/{}", object.name(copy))
}

/// Component of the keys of saved settings. No application has this name.
const SETTINGS: &str = "!settings";

/// Returns the prefix of saved settings.
#[must_use]
pub fn settings_prefix(root: &str) -> String {
    format!("{root}/{SETTINGS}")
}

/// Returns the key of the settings saved by start number `start`.
#[must_use]
pub fn settings_key(root: &str, start: u32) -> String {
    format!("{root}/{SETTINGS}/{start}")
}

/// An object below the worker's prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Name {
    /// A segment of a registration, with its number.
    Segment(Registered, u32),
    /// A copy of an object of the metadata log.
    Log(LogObject, usize),
    /// Settings made at run time, with the number of the start that saved them.
    Settings(u32),
}

/// Parses a key below the worker's prefix. Returns `None` if the tier writes no such key.
#[must_use]
pub fn parse_key(root: &str, key: &str) -> Option<Name> {
    let below = key.strip_prefix(root)?.strip_prefix('/')?;
    if let Some(name) = below.strip_prefix(LOG).and_then(|name| name.strip_prefix('/')) {
        return LogObject::parse(name).map(|(object, copy)| Name::Log(object, copy));
    }
    if let Some(start) = below.strip_prefix(SETTINGS).and_then(|name| name.strip_prefix('/')) {
        let start = start.parse().ok().filter(|start| settings_key(root, *start) == key);
        return start.map(Name::Settings);
    }
    let (registered, name) = parse_registered(below)?;
    let number = name.strip_prefix('s')?.parse().ok()?;
    let is_ours = segment_key(&shuffle_prefix(root, &registered), number) == key;
    is_ours.then_some(Name::Segment(registered, number))
}

/// Returns whether `key` is a page of metadata of earlier development builds.
#[must_use]
pub fn is_page(root: &str, key: &str) -> bool {
    let below = key.strip_prefix(root).and_then(|below| below.strip_prefix('/'));
    let name = below.and_then(parse_registered).map(|(_, name)| name);
    let digits = name.and_then(|name| name.strip_prefix(['m', 'c']));
    digits.is_some_and(|digits| digits.len() == 10 && digits.bytes().all(|byte| byte.is_ascii_digit()))
}

fn parse_registered(below: &str) -> Option<(Registered, &str)> {
    let mut parts = below.split('/');
    let (app, shuffle, name) = (parts.next()?, parts.next()?, parts.next()?);
    let app = AppId::parse(&text_of(app)?).ok()?;
    let (shuffle, incarnation) = shuffle.split_once('.')?;
    let key = ShuffleKey::new(app, ShuffleId(shuffle.parse().ok()?));
    let registered = Registered { key, incarnation: incarnation.parse().ok()? };
    parts.next().is_none().then_some((registered, name))
}

/// Footer of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footer {
    /// Size of the payload, at the beginning of the object.
    pub payload_bytes: u64,
    /// Size of table and records, which follow the payload.
    pub index_bytes: u64,
    /// Number of extents.
    pub entries: u32,
    /// Number of the segment, as in its key.
    pub number: u32,
    /// Number of the segment published before, or 0.
    pub previous: u32,
    /// Incarnation of the registration, as in its key.
    pub incarnation: u64,
    /// Number of blocks in all extents.
    pub blocks: u64,
    /// CRC-32 of the table.
    pub table_crc: u32,
}

/// Table entry of an extent in a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Partition of the extent.
    pub partition: PartitionId,
    /// Number of blocks.
    pub blocks: u32,
    /// Offset of the extent in the partition's stream.
    pub base: u64,
    /// Offset of its data in the object.
    pub offset: u64,
    /// Size of its data.
    pub length: u64,
    /// Offset of its records in the object.
    pub records: u64,
    /// CRC-32 of its records.
    pub records_crc: u32,
}

impl Entry {
    /// Returns the extent, located in the object `number`.
    pub(super) fn extent(&self, number: u32) -> Extent {
        let Self { blocks, base, offset, length, records, records_crc, .. } = *self;
        Extent { blocks, records_crc, ..Extent::gap(base, length) }.in_object(number, offset, records)
    }
}

/// Reason why bytes are not a valid segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SegmentError {
    /// The object does not end with a footer.
    #[error("the object is not a segment")]
    Magic,
    /// The version is not supported.
    #[error("the segment has version {0}, this program supports {VERSION}")]
    Version(u16),
    /// A checksum does not match.
    #[error("checksum of the segment's {0} does not match")]
    Checksum(&'static str),
    /// A field contradicts another one.
    #[error("the segment's {0} is malformed")]
    Malformed(&'static str),
}

/// Encodes the table.
#[must_use]
pub fn encode_table(entries: &[Entry]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(entries.len() * ENTRY_BYTES);
    for entry in entries {
        bytes.extend_from_slice(&entry.partition.0.to_be_bytes());
        bytes.extend_from_slice(&entry.blocks.to_be_bytes());
        for field in [entry.base, entry.offset, entry.length, entry.records] {
            bytes.extend_from_slice(&field.to_be_bytes());
        }
        bytes.extend_from_slice(&entry.records_crc.to_be_bytes());
        bytes.extend_from_slice(&[0; 4]);
    }
    bytes
}

impl Footer {
    /// Encodes the footer.
    #[must_use]
    pub fn encode(&self) -> [u8; FOOTER_BYTES] {
        let mut bytes = [0; FOOTER_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.payload_bytes.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.index_bytes.to_be_bytes());
        bytes[24..28].copy_from_slice(&self.entries.to_be_bytes());
        bytes[28..32].copy_from_slice(&self.number.to_be_bytes());
        bytes[32..36].copy_from_slice(&self.previous.to_be_bytes());
        bytes[40..48].copy_from_slice(&self.incarnation.to_be_bytes());
        bytes[48..56].copy_from_slice(&self.blocks.to_be_bytes());
        bytes[56..60].copy_from_slice(&self.table_crc.to_be_bytes());
        let crc = crc32fast::hash(&bytes[..60]);
        bytes[60..64].copy_from_slice(&crc.to_be_bytes());
        bytes
    }

    /// Decodes the footer of an object of `object_bytes` bytes.
    ///
    /// # Errors
    /// The bytes are not a footer of this version, or contradict each other or `object_bytes`.
    pub fn decode(bytes: &[u8; FOOTER_BYTES], object_bytes: u64) -> Result<Self, SegmentError> {
        if bytes[0..4] != MAGIC {
            return Err(SegmentError::Magic);
        }
        if u32_at(bytes, 60) != crc32fast::hash(&bytes[..60]) {
            return Err(SegmentError::Checksum("footer"));
        }
        let version = u16::from_be_bytes([bytes[4], bytes[5]]);
        if version != VERSION {
            return Err(SegmentError::Version(version));
        }
        let footer = Self {
            payload_bytes: u64_at(bytes, 8),
            index_bytes: u64_at(bytes, 16),
            entries: u32_at(bytes, 24),
            number: u32_at(bytes, 28),
            previous: u32_at(bytes, 32),
            incarnation: u64_at(bytes, 40),
            blocks: u64_at(bytes, 48),
            table_crc: u32_at(bytes, 56),
        };
        let whole = footer.payload_bytes.checked_add(footer.index_bytes);
        let fits = whole.and_then(|it| it.checked_add(FOOTER_BYTES as u64)) == Some(object_bytes);
        let records = footer.blocks.checked_mul(RECORD_BYTES as u64);
        let index = records.and_then(|it| it.checked_add(footer.table_bytes()));
        if fits && index == Some(footer.index_bytes) && footer.previous < footer.number {
            Ok(footer)
        } else {
            Err(SegmentError::Malformed("footer"))
        }
    }

    /// Returns the size of the table, which follows the payload.
    #[must_use]
    pub fn table_bytes(&self) -> u64 {
        u64::from(self.entries) * ENTRY_BYTES as u64
    }

    /// Decodes the table.
    ///
    /// # Errors
    /// The checksum does not match, or entries contradict each other or the footer.
    pub fn table(&self, bytes: &[u8]) -> Result<Vec<Entry>, SegmentError> {
        if bytes.len() as u64 != self.table_bytes() || crc32fast::hash(bytes) != self.table_crc {
            return Err(SegmentError::Checksum("table"));
        }
        let mut records = self.payload_bytes + self.table_bytes();
        let mut entries: Vec<Entry> = Vec::with_capacity(bytes.len() / ENTRY_BYTES);
        for bytes in bytes.as_chunks::<ENTRY_BYTES>().0 {
            let entry = Entry {
                partition: PartitionId(u32_at(bytes, 0).cast_signed()),
                blocks: u32_at(bytes, 4),
                base: u64_at(bytes, 8),
                offset: u64_at(bytes, 16),
                length: u64_at(bytes, 24),
                records: u64_at(bytes, 32),
                records_crc: u32_at(bytes, 40),
            };
            let end = entry.offset.checked_add(entry.length);
            let is_payload = end.is_some_and(|end| end <= self.payload_bytes) && entry.length > 0;
            let end_in_stream = entry.base.checked_add(entry.length).and_then(|end| i64::try_from(end).ok());
            let has_end = end_in_stream.is_some() && entry.blocks > 0;
            let is_behind = entries.last().is_none_or(|last| {
                (last.partition, last.base + last.length) <= (entry.partition, entry.base)
            });
            if !(is_payload && has_end && is_behind && entry.records == records) {
                return Err(SegmentError::Malformed("table"));
            }
            records += u64::from(entry.blocks) * RECORD_BYTES as u64;
            entries.push(entry);
        }
        match records == self.payload_bytes + self.index_bytes {
            true => Ok(entries),
            false => Err(SegmentError::Malformed("table")),
        }
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut field = [0; 4];
    field.copy_from_slice(&bytes[at..at + 4]);
    u32::from_be_bytes(field)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut field = [0; 8];
    field.copy_from_slice(&bytes[at..at + 8]);
    u64::from_be_bytes(field)
}

/// Returns the store's path of a key. Keys of this tier need no escaping.
pub(super) fn path_of(key: &str) -> Path {
    Path::from(key)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use uniffle_wire::types::{BlockId, BlockMeta, TaskAttemptId};

    use super::*;
    use crate::tiers::records::encode_blocks;

    fn registered(app: &str, shuffle: i32, incarnation: u64) -> Registered {
        Registered { key: ShuffleKey::new(AppId::parse(app).unwrap(), ShuffleId(shuffle)), incarnation }
    }

    fn block(id: i64, length: u32) -> BlockMeta {
        let (block_id, task_attempt_id) = (BlockId(id), TaskAttemptId(7));
        BlockMeta { block_id, task_attempt_id, length, uncompressed_length: 2 * length, crc: 0x0102_0304 }
    }

    /// Returns a segment with extents of partitions −1 and 5 and a payload of 30 bytes.
    fn sample() -> (Footer, Vec<Entry>, Vec<u8>) {
        let extents = [(-1, 100, 20, vec![block(1, 4), block(2, 6)]), (5, 0, 0, vec![block(3, 20)])];
        let table_end = 30 + 2 * ENTRY_BYTES as u64;
        let (mut entries, mut records) = (Vec::new(), Vec::new());
        for (partition, base, offset, blocks) in extents {
            let mut bytes = Vec::new();
            let length = encode_blocks(&blocks, 0, &mut bytes);
            entries.push(Entry {
                partition: PartitionId(partition),
                blocks: u32::try_from(blocks.len()).unwrap(),
                base,
                offset,
                length,
                records: table_end + records.len() as u64,
                records_crc: crc32fast::hash(&bytes),
            });
            records.extend(bytes);
        }
        let table = encode_table(&entries);
        let footer = Footer {
            payload_bytes: 30,
            index_bytes: (table.len() + records.len()) as u64,
            entries: 2,
            number: 3,
            previous: 1,
            incarnation: 9,
            blocks: 3,
            table_crc: crc32fast::hash(&table),
        };
        (footer, entries, [table, records].concat())
    }

    #[test]
    fn segment_version_1_is_frozen() {
        let (footer, _, index) = sample();
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        assert_eq!(hex(&index[..2 * ENTRY_BYTES]), TABLE);
        assert_eq!(hex(&footer.encode()), FOOTER);
    }

    const TABLE: &str = "ffffffff0000000200000000000000640000000000000014000000000000000a000000000000007eca765dfb00000000\
        000000050000000100000000000000000000000000000000000000000000001400000000000000ce8bdb617200000000";

    const FOOTER: &str = "55574f5300010000000000000000001e00000000000000d8000000020000000300000001000000000000000000000009\
        000000000000000322aef693d1b82c82";

    #[test]
    fn footer_and_table_are_read_back() {
        let (footer, entries, index) = sample();
        let object = 30 + index.len() as u64 + FOOTER_BYTES as u64;
        assert_eq!(Footer::decode(&footer.encode(), object), Ok(footer));
        let table = usize::try_from(footer.table_bytes()).unwrap();
        assert_eq!(footer.table(&index[..table]).unwrap(), entries);
        assert_eq!(Footer::decode(&footer.encode(), object + 1), Err(SegmentError::Malformed("footer")));
        let mut later = footer.encode();
        later[5] = 2;
        let crc = crc32fast::hash(&later[..60]);
        later[60..].copy_from_slice(&crc.to_be_bytes());
        assert_eq!(Footer::decode(&later, object), Err(SegmentError::Version(2)));
    }

    #[test]
    fn keys_round_trip_and_others_are_foreign() {
        for (app, part) in [("application_1_2", "application_1_2"), ("a b%ü!", "a!20b!25!c3!bc!21")] {
            let shuffle = registered(app, 4, 17);
            let prefix = shuffle_prefix("p/w-1", &shuffle);
            assert_eq!(prefix, format!("p/w-1/{part}/4.17"));
            assert_eq!(parse_key("p/w-1", &segment_key(&prefix, 12)), Some(Name::Segment(shuffle, 12)));
            assert!(is_page("p/w-1", &format!("{prefix}/m0000000001")));
            assert!(!is_page("p/w-1", &format!("{prefix}/s0000000001")));
        }
        assert_eq!(segment_key("x", 12), "x/s0000000012");
        let object = LogObject { generation: 1 << 32, process: 2, first: 3, frames: 4 };
        let key = log_key("p/w-1", object, 1);
        assert_eq!(key, "p/w-1/!log/0000000100000000.00000002.000000000003.00000004.1");
        assert_eq!(parse_key("p/w-1", &key), Some(Name::Log(object, 1)));
        assert_eq!(parse_key("p/w-1", &settings_key("p/w-1", 7)), Some(Name::Settings(7)));
        let others = [
            "p/w-1/!settings/07",
            "p/w-10/app/4.17/s0000000001",
            "p/w-1/app/4.17/s1",
            "p/w-1/app/4/s0000000001",
            "p/w-1/app",
            "p/w-1/app/4.17/x0000000001",
            "p/w-1/app/4.17/m0000000001",
            "p/w-1/!log/1",
            "p/w-1/a!2/4.17/s0000000001",
            "p/w-1/app/4.17/s0000000001/x",
            "p/w-1/a!20/4.17/s0000000001/",
            "p/w-1/app/04.17/s0000000001",
            "p/w-1/a!62/4.17/s0000000001",
        ];
        others.iter().for_each(|key| assert_eq!(parse_key("p/w-1", key), None, "{key}"));
    }

    proptest! {
        #[test]
        fn any_text_is_one_key_component(text in "\\PC{0,40}") {
            let part = part_of(&text);
            prop_assert!(part.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-!".contains(&b)));
            prop_assert_eq!(text_of(&part), Some(text));
        }

        #[test]
        fn flipped_bit_is_noticed(at in 0usize..FOOTER_BYTES + 2 * ENTRY_BYTES, bit in 0u8..8) {
            let (footer, _, index) = sample();
            let mut table = index[..2 * ENTRY_BYTES].to_vec();
            let mut bytes = footer.encode();
            if at < FOOTER_BYTES { bytes[at] ^= 1 << bit } else { table[at - FOOTER_BYTES] ^= 1 << bit }
            let object = 30 + index.len() as u64 + FOOTER_BYTES as u64;
            let read = Footer::decode(&bytes, object).and_then(|footer| footer.table(&table));
            prop_assert!(read.is_err());
        }
    }
}
