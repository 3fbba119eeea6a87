//! Frames, the elements of a copy of the worker's metadata log. Version 1 is FROZEN (see the golden
//! test).
//!
//! A copy is a file of frames; the first is the epoch. In an object store, a generation is divided
//! into objects (`objects`). Everything is big-endian:
//!
//! ```text
//! header, 40 bytes      0  magic "UWML"            4  version u16 = 1     6  kind u16
//!                       8  generation u64         16  sequence u64 (0 is the epoch)
//!                      24  length u32             28  frames before it in the same write, u32
//!                      32  crc32 of the frame before (0 before the first)
//!                      36  crc32 of bytes 0..36 and of the payload
//! then the payload      postcard's format; the record of a shuffle follows its name (`record`)
//! ```
//!
//! A frame's checksum covers that of the frame before. A file with valid checksums up to its end
//! therefore has all frames up to there: none is missing, repeated or from another file. The number
//! of copies is in the epoch. Pure: no I/O.

use bytes::{BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};
use uuid::Uuid;

/// Directory of the log in a data directory.
pub const METADATA: &str = "uniffle-worker.metadata";
/// Magic bytes of a frame.
pub const MAGIC: [u8; 4] = *b"UWML";
/// Magic bytes of a mark.
const MARK_MAGIC: [u8; 4] = *b"UWMK";
/// The only version.
const VERSION: u16 = 1;
/// Size of the header.
pub const HEADER_BYTES: usize = 40;
/// Maximum length of a payload: eight times the largest report or registration that a listener
/// accepts (64 MiB).
pub const PAYLOAD_BYTES_MAX: usize = 512 << 20;
/// Number of earlier epochs in an epoch's lineage while every directory has the newest one.
pub const LINEAGE_MAX: usize = 64;
/// Like [`LINEAGE_MAX`], while a directory is absent. If it is absent for longer, it is unknown
/// whether it was used alone.
pub const LINEAGE_AWAY_MAX: usize = 4096;

const TRUNCATED: &str = "record is truncated";
const MALFORMED: &str = "record is malformed";

const EPOCH: u16 = 0;
const RECORD: u16 = 1;
const PURGED: u16 = 2;
const INCOMPLETE: u16 = 3;
const MOVED: u16 = 4;
const BEGUN: u16 = 5;

/// One registration of a shuffle. Its files have the number in their directory's name.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Incarnation {
    /// The shuffle.
    pub key: ShuffleKey,
    /// Number of the registration. A worker never assigns it twice.
    pub number: u64,
}

/// Content of a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FrameContent {
    /// The holders of copies from here on. The first frame of a file; the log in an object store
    /// also has later ones.
    Epoch(Box<Epoch>),
    /// A registration or a report (see `record`).
    Record(Incarnation, Bytes),
    /// The shuffle was purged. Its files are removed after this is written.
    Purged(Incarnation),
    /// Records of the shuffle may be missing.
    Incomplete(Incarnation, Gap),
    /// All earlier records of the shuffle are in the object store. Later ones are acknowledged once
    /// they are there.
    Moved(Incarnation),
    /// Ends the checkpoint that begins a generation in the object store. A generation without it is
    /// ignored. After the checkpoint it has no effect.
    Begun,
}

/// Reason why acknowledged records may be missing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gap {
    /// Description, with what to do.
    pub reason: String,
    /// Directories that end the gap once they have returned and were not used alone meanwhile. If
    /// empty, no directory ends it.
    pub until_returned: Vec<[u8; 16]>,
}

/// A data directory in an epoch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    uuid: [u8; 16],
    /// Path of the directory at that time.
    pub path: String,
    /// True if the member counts when it is decided whether a newer epoch can exist.
    pub votes: bool,
    /// True if the member is absent, and its own epoch allows it to recover alone.
    pub may_recover_alone: bool,
}

impl Member {
    /// Creates a voting member.
    #[must_use]
    pub fn new(uuid: Uuid, path: &str) -> Self {
        Self { uuid: uuid.into_bytes(), path: path.to_owned(), votes: true, may_recover_alone: false }
    }

    /// Returns the identity of the directory.
    #[must_use]
    pub fn uuid(&self) -> Uuid {
        Uuid::from_bytes(self.uuid)
    }
}

/// The data directories that hold the log, and those that may have data, until the next epoch. A
/// new epoch begins at a start that does not resume the copies, and when copies move or fail, the
/// usable directories change, or a gap begins or ends. Compaction alone does not begin one.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Epoch {
    /// Random id of the epoch.
    pub id: u64,
    /// Ids of earlier epochs, the latest last, at most [`LINEAGE_AWAY_MAX`].
    pub lineage: Vec<u64>,
    /// All directories that may have data of living shuffles.
    pub members: Vec<Member>,
    /// Directories with copies. A directory with both copies is listed twice.
    pub holders: Vec<[u8; 16]>,
    /// Number greater than any incarnation that the log has had.
    pub next_incarnation: u64,
    /// Number of earlier starts that may have missed shuffles. Each of them assigned incarnations
    /// from a range of its own, which must not be used again.
    pub blind_starts: u32,
    /// Reason why unknown shuffles may exist.
    pub gap: Option<Gap>,
}

impl Epoch {
    /// Returns whether `other` is this epoch or one of its predecessors.
    #[must_use]
    pub fn follows(&self, other: &Self) -> bool {
        self.id == other.id || self.lineage.contains(&other.id)
    }

    /// Returns the next epoch with a new id. It remembers `remembered` predecessors, and is
    /// otherwise the same.
    #[must_use]
    pub fn next(&self, id: u64, remembered: usize) -> Self {
        let mut lineage = self.lineage.clone();
        if self.id != 0 {
            lineage.push(self.id);
        }
        let surplus = lineage.len().saturating_sub(remembered);
        lineage.drain(..surplus);
        Self { id, lineage, ..self.clone() }
    }

    /// Returns the members with a vote.
    #[must_use]
    pub fn voters(&self) -> Vec<&Member> {
        self.members.iter().filter(|member| member.votes).collect()
    }
}

/// A decoded frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Generation of the file.
    pub generation: u64,
    /// Number of frames before it in the file.
    pub sequence: u64,
    /// Number of earlier frames that were written together with it.
    pub batch: u32,
    /// Checksum of the previous frame.
    pub previous: u32,
    /// Checksum of the frame.
    pub crc: u32,
    /// Content of the frame.
    pub entry: FrameContent,
}

/// Encodes the frames of one file in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoder {
    generation: u64,
    sequence: u64,
    previous: u32,
}

impl Encoder {
    /// Creates an encoder for the first frame.
    #[must_use]
    pub fn new(generation: u64) -> Self {
        Self { generation, sequence: 0, previous: 0 }
    }

    /// Creates an encoder after `frames` frames, the last of which has the checksum `crc`.
    #[must_use]
    pub fn after(generation: u64, frames: u64, crc: u32) -> Self {
        Self { generation, sequence: frames, previous: crc }
    }

    /// Returns the number of frames so far.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.sequence
    }

    /// Appends the next frame to `out`. `batch` earlier frames are written together with it. If the
    /// entry is longer than [`PAYLOAD_BYTES_MAX`], returns false and appends nothing.
    #[must_use]
    pub fn encode(&mut self, entry: &FrameContent, batch: u32, out: &mut BytesMut) -> bool {
        let (kind, name, content) = entry.parts();
        let length = name.len() + content.len();
        let Some(length) = u32::try_from(length).ok().filter(|_| length <= PAYLOAD_BYTES_MAX) else {
            return false;
        };
        let start = out.len();
        out.reserve(HEADER_BYTES + name.len() + content.len());
        out.put_slice(&MAGIC);
        out.put_u16(VERSION);
        out.put_u16(kind);
        out.put_u64(self.generation);
        out.put_u64(self.sequence);
        out.put_u32(length);
        out.put_u32(batch);
        out.put_u32(self.previous);
        let mut hasher = crc32fast::Hasher::new();
        for part in [&out[start..], &name, &content] {
            hasher.update(part);
        }
        let crc = hasher.finalize();
        out.put_u32(crc);
        out.put_slice(&name);
        out.put_slice(&content);
        (self.sequence, self.previous) = (self.sequence + 1, crc);
        true
    }
}

/// Returns the size of the frame that begins `bytes`, as its unchecked header states.
///
/// # Errors
/// A description if no frame begins here.
pub fn total_bytes(bytes: &[u8]) -> Result<usize, String> {
    let header = bytes.first_chunk::<HEADER_BYTES>().ok_or(TRUNCATED)?;
    if header[0..4] != MAGIC {
        return Err("not a record".to_owned());
    }
    let version = u16::from_be_bytes([header[4], header[5]]);
    if version != VERSION {
        return Err(format!("record has version {version}, this program supports {VERSION}"));
    }
    let length = u32::from_be_bytes([header[24], header[25], header[26], header[27]]) as usize;
    if length > PAYLOAD_BYTES_MAX {
        return Err(MALFORMED.to_owned());
    }
    Ok(HEADER_BYTES + length)
}

/// Decodes the frame at the start of `bytes`, and ignores the rest. Allocations are bounded by the
/// length of `bytes`, whatever their content.
///
/// # Errors
/// A description if no valid frame begins here.
pub fn decode(bytes: &[u8]) -> Result<Frame, String> {
    let frame = bytes.get(..total_bytes(bytes)?).ok_or(TRUNCATED)?;
    let (header, payload) = frame.split_first_chunk::<HEADER_BYTES>().ok_or(TRUNCATED)?;
    let word = |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let long = |at: usize| (u64::from(word(at)) << 32) | u64::from(word(at + 4));
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&header[..36]);
    hasher.update(payload);
    let crc = hasher.finalize();
    if crc != word(36) {
        return Err("checksum does not match".to_owned());
    }
    let kind = u16::from_be_bytes([header[6], header[7]]);
    let entry = FrameContent::from_parts(kind, payload).ok_or(MALFORMED)?;
    Ok(Frame { generation: long(8), sequence: long(16), batch: word(28), previous: word(32), crc, entry })
}

/// Encodes the mark beside a copy: "UWMK", generation u64, acknowledged frames u64, crc32 of these.
#[must_use]
pub fn encode_mark(generation: u64, frames: u64) -> Bytes {
    let mut out = BytesMut::new();
    out.put_slice(&MARK_MAGIC);
    out.put_u64(generation);
    out.put_u64(frames);
    out.put_u32(crc32fast::hash(&out));
    out.freeze()
}

/// Returns the number of acknowledged frames of a generation according to a mark. An invalid mark
/// counts as 0.
#[must_use]
pub fn decode_mark(mark: &[u8], generation: u64) -> u64 {
    let frames = mark.get(12..20).and_then(|bytes| bytes.first_chunk()).copied().map(u64::from_be_bytes);
    frames.filter(|frames| mark == encode_mark(generation, *frames)).unwrap_or(0)
}

/// Encoded name of an incarnation.
#[derive(Serialize, Deserialize)]
struct IncarnationFields<'a> {
    app: &'a str,
    shuffle: i32,
    number: u64,
}

impl Incarnation {
    fn fields(&self) -> IncarnationFields<'_> {
        let ShuffleKey { app, shuffle } = &self.key;
        IncarnationFields { app: app.as_str(), shuffle: shuffle.0, number: self.number }
    }

    fn from_fields(fields: IncarnationFields<'_>) -> Option<Self> {
        let IncarnationFields { app, shuffle, number } = fields;
        Some(Self { key: ShuffleKey::new(AppId::parse(app).ok()?, ShuffleId(shuffle)), number })
    }
}

impl FrameContent {
    /// Returns the kind, the fields in postcard's format, and the content after them.
    fn parts(&self) -> (u16, Vec<u8>, Bytes) {
        let (kind, fields, content) = match self {
            Self::Epoch(epoch) => (EPOCH, postcard::to_allocvec(epoch), Bytes::new()),
            Self::Record(shuffle, content) => {
                (RECORD, postcard::to_allocvec(&shuffle.fields()), content.clone())
            }
            Self::Purged(shuffle) => (PURGED, postcard::to_allocvec(&shuffle.fields()), Bytes::new()),
            Self::Incomplete(shuffle, gap) => {
                (INCOMPLETE, postcard::to_allocvec(&(shuffle.fields(), gap)), Bytes::new())
            }
            Self::Moved(shuffle) => (MOVED, postcard::to_allocvec(&shuffle.fields()), Bytes::new()),
            Self::Begun => (BEGUN, Ok(Vec::new()), Bytes::new()),
        };
        (kind, fields.expect("lists and texts of known length always have a form"), content)
    }

    fn from_parts(kind: u16, payload: &[u8]) -> Option<Self> {
        let shuffle = |payload| Incarnation::from_fields(whole(payload)?);
        match kind {
            EPOCH => Some(Self::Epoch(Box::new(whole(payload)?))),
            RECORD => {
                let (name, content) = postcard::take_from_bytes(payload).ok()?;
                Some(Self::Record(Incarnation::from_fields(name)?, Bytes::copy_from_slice(content)))
            }
            PURGED => Some(Self::Purged(shuffle(payload)?)),
            INCOMPLETE => {
                let (name, gap) = whole(payload)?;
                Some(Self::Incomplete(Incarnation::from_fields(name)?, gap))
            }
            MOVED => Some(Self::Moved(shuffle(payload)?)),
            BEGUN => payload.is_empty().then_some(Self::Begun),
            _ => None,
        }
    }

    /// Returns the shuffle of the entry, or `None` for an epoch or the end of a checkpoint.
    #[must_use]
    pub fn shuffle(&self) -> Option<&Incarnation> {
        match self {
            Self::Epoch(_) | Self::Begun => None,
            Self::Record(shuffle, _)
            | Self::Purged(shuffle)
            | Self::Incomplete(shuffle, _)
            | Self::Moved(shuffle) => Some(shuffle),
        }
    }
}

/// Decodes fields that occupy all of `bytes`. Lists grow as they are read, so allocations are
/// bounded by the length of `bytes`.
pub(crate) fn whole<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Option<T> {
    let (fields, rest) = postcard::take_from_bytes(bytes).ok()?;
    rest.is_empty().then_some(fields)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shuffle(number: u64) -> Incarnation {
        Incarnation { key: ShuffleKey::new(AppId::parse("app").unwrap(), ShuffleId(7)), number }
    }

    /// The format is a promise to every later version: these bytes must not change while the
    /// version is 1.
    #[test]
    fn version_1_is_frozen() {
        let gap = Gap { reason: "no".into(), until_returned: vec![[2; 16]] };
        let epoch = Epoch {
            id: 300,
            lineage: vec![5],
            members: vec![Member::new(Uuid::from_bytes([1; 16]), "/a")],
            holders: vec![[1; 16]],
            next_incarnation: 4,
            blind_starts: 1,
            gap: Some(gap.clone()),
        };
        let entries = [
            FrameContent::Epoch(Box::new(epoch)),
            FrameContent::Record(shuffle(3), Bytes::from_static(b"hello")),
            FrameContent::Purged(shuffle(3)),
            FrameContent::Incomplete(shuffle(4), gap),
            FrameContent::Moved(shuffle(3)),
            FrameContent::Begun,
        ];
        let (mut encoder, mut out) = (Encoder::new(9), BytesMut::new());
        for (batch, entry) in (0..).zip(&entries) {
            assert!(encoder.encode(entry, batch, &mut out));
        }
        let hex: String = out.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, GOLDEN.concat());
        let mut rest = &out[..];
        for entry in &entries {
            let frame = decode(rest).unwrap();
            assert_eq!(&frame.entry, entry);
            rest = &rest[total_bytes(rest).unwrap()..];
        }
    }

    const GOLDEN: [&str; 8] = [
        "55574d4c00010000000000000000000900000000000000000000004200000000000000002613ce0aac02010501010101",
        "01010101010101010101010101022f6101000101010101010101010101010101010101040101026e6f01020202020202",
        "0202020202020202020255574d4c00010001000000000000000900000000000000010000000b000000012613ce0a3871",
        "c4a1036170700e0368656c6c6f55574d4c000100020000000000000009000000000000000200000006000000023871c4",
        "a1453e4a2f036170700e0355574d4c00010003000000000000000900000000000000030000001a00000003453e4a2ffc",
        "254d88036170700e04026e6f0102020202020202020202020202020202",
        "55574d4c00010004000000000000000900000000000000040000000600000004fc254d88b43bad13036170700e03",
        "55574d4c00010005000000000000000900000000000000050000000000000005b43bad13749a6e41",
    ];

    fn any_entry() -> impl Strategy<Value = FrameContent> {
        let name = any::<u64>().prop_map(shuffle);
        let gap = ("[a-z]{0,9}", prop::collection::vec(any::<[u8; 16]>(), 0..3))
            .prop_map(|(reason, until_returned)| Gap { reason, until_returned });
        prop_oneof![
            (name.clone(), prop::collection::vec(any::<u8>(), 0..200))
                .prop_map(|(shuffle, content)| FrameContent::Record(shuffle, content.into())),
            name.clone().prop_map(FrameContent::Purged),
            (name, gap).prop_map(|(shuffle, gap)| FrameContent::Incomplete(shuffle, gap)),
        ]
    }

    #[test]
    fn damaged_mark_is_ignored() {
        let mark = encode_mark(7, 300).to_vec();
        assert_eq!((decode_mark(&mark, 7), decode_mark(&mark, 8), decode_mark(&[], 7)), (300, 0, 0));
        for bit in 0..mark.len() * 8 {
            let mut damaged = mark.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode_mark(&damaged, 7), 0, "bit {bit} is flipped");
        }
    }

    proptest! {
        #[test]
        fn frames_round_trip_and_damage_is_detected(
            entries in prop::collection::vec(any_entry(), 1..4), at: prop::sample::Index, bit in 0u8..8,
        ) {
            let (mut encoder, mut out) = (Encoder::new(1), BytesMut::new());
            let mut previous = 0;
            for (sequence, entry) in (0..).zip(&entries) {
                let start = out.len();
                prop_assert!(encoder.encode(entry, 0, &mut out));
                let frame = decode(&out[start..]).unwrap();
                prop_assert_eq!((frame.generation, frame.sequence, frame.previous), (1, sequence, previous));
                prop_assert_eq!(&frame.entry, entry);
                previous = frame.crc;
                let one = &out[start..];
                prop_assert!(decode(&one[..at.index(one.len())]).is_err());
                let mut damaged = one.to_vec();
                damaged[at.index(one.len())] ^= 1 << bit;
                prop_assert!(decode(&damaged).is_err());
            }
        }

        #[test]
        fn arbitrary_payloads_do_not_panic(kind in 0u16..7, payload in prop::collection::vec(any::<u8>(), 0..60)) {
            let _ = FrameContent::from_parts(kind, &payload);
        }
    }
}
