//! Keys of the tier's objects, and the format of segments. FROZEN (see the golden test). Pure: no
//! I/O.
//!
//! ```text
//! <prefix>/<worker>/!claim                                              claim
//! <prefix>/<worker>/!log/<generation>.<process>.<first>.<frames>.<copy> metadata log
//! <prefix>/<worker>/!settings/<start>                                   saved settings
//! <prefix>/<worker>/<application>/<shuffle>.<incarnation>/s0000000001   segment
//! ```
//!
//! See `claim`, `uniffle_log::objects` and `core`. In the ids of workers and applications, each
//! byte except `A-Za-z0-9._-` is encoded as `!` and two hexadecimal digits. So a key can be
//! decoded, and no id escapes its prefix. Each registration of a shuffle has its own incarnation,
//! so it can be deleted by its prefix at any time. Segment numbers are never reused, not even after
//! failed uploads.
//!
//! A segment consists of payload, index and tail. It holds many partitions of one shuffle. It is
//! always complete, because an object appears as a whole or not at all. All numbers are big-endian:
//!
//! ```text
//! payload           extents, one after the other, each with contiguous blocks
//! index             a group (see `store::index`) of the extents, with data offsets in the object
//! tail, 16 bytes     0  bytes of the index u64      8  previous u32
//!                   12  crc32 of incarnation u64, number u32 and bytes 0..12
//! ```
//!
//! Extents in the index are sorted by partition and base, so the records of a partition are one
//! range. `previous` is the number of the segment published before, or 0. An upload of unknown
//! outcome is therefore in no chain once a later segment has taken its bases. The header of the
//! group has `previous` as its sequence, no disk, and the number of the segment as the data file.

use std::fmt::Write as _;

use crate::log::LogObject;
use crate::store::index::codec::GroupHeader;
use object_store::path::Path;
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};
use uuid::Uuid;

/// Size of a tail.
pub const TAIL_BYTES: usize = 16;

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

/// An object below the worker's prefix, except the claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Name {
    /// A segment of a registration, with its number.
    Segment(Registered, u32),
    /// A copy of an object of the metadata log.
    Log(LogObject, usize),
    /// Settings made at run time, with the number of the start that saved them.
    Settings(u32),
}

/// Parses a key below the worker's prefix. Returns `None` for the claim, and for keys that the tier
/// does not write.
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

/// Incarnation of a registration, and number of one of its segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentId {
    /// Incarnation of the registration, as in the key.
    pub incarnation: u64,
    /// Number of the segment, as in the key.
    pub number: u32,
}

/// Tail of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentTail {
    /// Size of the payload, at the beginning of the object.
    pub payload_bytes: u64,
    /// Size of the index, which follows the payload.
    pub index_bytes: u64,
    /// Number of the segment published before, or 0.
    pub previous: u32,
}

impl SegmentId {
    /// Returns the header of the segment's index.
    pub(in crate::store) fn header(self, previous: u32) -> GroupHeader {
        let Self { incarnation, number } = self;
        let (sequence, disk) = (u64::from(previous), Uuid::nil());
        GroupHeader { sequence, incarnation, disk, file_number: number }
    }

    /// Returns the checksum of the segment's tail. The tail of another segment has another one.
    fn crc_of(self, fields: &[u8]) -> [u8; 4] {
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&self.incarnation.to_be_bytes());
        hasher.update(&self.number.to_be_bytes());
        hasher.update(fields);
        hasher.finalize().to_be_bytes()
    }
}

impl SegmentTail {
    /// Encodes the tail of a segment.
    #[must_use]
    pub fn encode(&self, id: SegmentId) -> [u8; TAIL_BYTES] {
        let mut bytes = [0; TAIL_BYTES];
        bytes[0..8].copy_from_slice(&self.index_bytes.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.previous.to_be_bytes());
        let crc = id.crc_of(&bytes[..12]);
        bytes[12..].copy_from_slice(&crc);
        bytes
    }

    /// Decodes the tail of an object of `object_bytes` bytes. Returns `None` if it is not the tail
    /// of the segment, or contradicts `object_bytes`.
    #[must_use]
    pub fn decode(bytes: &[u8; TAIL_BYTES], id: SegmentId, object_bytes: u64) -> Option<Self> {
        let index_bytes = u64::from_be_bytes(*bytes.first_chunk()?);
        let previous = u32::from_be_bytes(*bytes[8..].first_chunk()?);
        let payload_bytes = object_bytes.checked_sub(TAIL_BYTES as u64)?.checked_sub(index_bytes)?;
        let is_sound = bytes[12..] == id.crc_of(&bytes[..12]) && previous < id.number;
        is_sound.then_some(Self { payload_bytes, index_bytes, previous })
    }
}

/// Returns the store's path of a key. Keys of this tier need no escaping.
pub(in crate::store) fn path_of(key: &str) -> Path {
    Path::from(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn registered(app: &str, shuffle: i32, incarnation: u64) -> Registered {
        Registered { key: ShuffleKey::new(AppId::parse(app).unwrap(), ShuffleId(shuffle)), incarnation }
    }

    const ID: SegmentId = SegmentId { incarnation: 9, number: 3 };

    #[test]
    fn tail_is_frozen_and_read_back() {
        let tail = SegmentTail { payload_bytes: 30, index_bytes: 264, previous: 1 };
        let bytes = tail.encode(ID);
        assert_eq!(bytes[..12], [0, 0, 0, 0, 0, 0, 1, 8, 0, 0, 0, 1]);
        let checked = [0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 1, 8, 0, 0, 0, 1];
        assert_eq!(bytes[12..], crc32fast::hash(&checked).to_be_bytes());
        assert_eq!(SegmentTail::decode(&bytes, ID, 310), Some(tail));
        assert_eq!(
            SegmentTail::decode(&bytes, ID, 279),
            None,
            "an object shorter than its index was accepted"
        );
        for other in [SegmentId { incarnation: 8, ..ID }, SegmentId { number: 4, ..ID }] {
            assert_eq!(SegmentTail::decode(&bytes, other, 310), None, "{other:?}");
        }
        let later = SegmentTail { previous: 3, ..tail };
        assert_eq!(
            SegmentTail::decode(&later.encode(ID), ID, 310),
            None,
            "a segment that is its own predecessor was accepted"
        );
        let head = ID.header(1);
        assert_eq!((head.sequence, head.incarnation, head.file_number, head.disk), (1, 9, 3, Uuid::nil()));
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
        fn flipped_bit_is_noticed(at in 0usize..TAIL_BYTES, bit in 0u8..8) {
            let mut bytes = SegmentTail { payload_bytes: 30, index_bytes: 264, previous: 1 }.encode(ID);
            bytes[at] ^= 1 << bit;
            prop_assert_eq!(SegmentTail::decode(&bytes, ID, 310), None);
        }
    }
}
