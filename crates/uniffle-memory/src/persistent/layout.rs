//! The layout of memory that outlives its process, version 2. Pure conversions between words and
//! values.
//!
//! All numbers are 64-bit words in the machine's byte order; [`Geometry`] has their offsets. The
//! first word of a name or row is its *commit*: a tag and a checksum of the other words and of its
//! number, stored last. A slot with zero or an invalid commit is free. Invariant: every change of
//! the layout gets another version, because a process refuses memory of other versions.

use std::fmt;

use uniffle_wire::types::{
    APP_ID_BYTES_MAX, AppId, BlockId, BlockMeta, ShuffleId, ShuffleKey, TaskAttemptId,
};

/// First word of a memory file: `UNIFFLE` and a zero.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"UNIFFLE\0");
/// Version of the layout. Version 1 had the same words, but its programs did not expect a file
/// longer than its header states, nor holes between rows.
pub(crate) const VERSION: u64 = 2;

/// Words of the header: one page.
pub(super) const HEADER_WORDS: usize = 512;
/// Words of a name.
pub(super) const NAME_WORDS: usize = 32;
/// Words of a row: one cache line.
pub(super) const ROW_WORDS: usize = 8;
/// Bytes of a row.
pub(crate) const ROW_BYTES: u64 = 8 * ROW_WORDS as u64;

/// Words of the header covered by the checksum, which follows them.
const CHECKED_WORDS: usize = 47;
const NODE_AT: usize = 8;
/// Maximum bytes of a node id.
pub(super) const NODE_BYTES_MAX: usize = 8 * (CHECKED_WORDS - NODE_AT);
/// Word with the number of names ever used. It grows before a name beyond it is used.
pub(super) const FRESH_NAMES_AT: usize = 48;
/// Word with the number of rows ever used. It grows before a row beyond it is used.
pub(super) const FRESH_ROWS_AT: usize = 49;

/// Maximum number of shuffles at a time. Blocks of further shuffles do not survive the process.
const NAMES: u32 = 1 << 16;
/// Marks the absence of a further row.
pub(super) const NO_ROW: u32 = u32::MAX;
/// Pieces of a block in one further row.
pub(super) const PIECES_PER_ROW: usize = 3;

/// Resident bytes of the front that are not offset by ceded segments: the header, the first names
/// and rows, and rows whose pages are ceded with a delay.
const FRONT_RESIDENT_BYTES: u64 = 4 << 20;

const BLOCK_BYTES: u64 = 2 << 20;
const UNIT_BYTES: u64 = 4 << 10;

const _: () = assert!(APP_ID_BYTES_MAX <= 8 * (NAME_WORDS - 2));

/// Sizes of the parts of a region, whose segments have `data_bytes` (with slack, in whole 2 MiB
/// blocks):
///
/// | at | words | content |
/// | --- | --- | --- |
/// | 0 | 512 | header: [`Header`], then the numbers of names and rows that were ever used |
/// | 4 KiB | 32 × names | shuffles of applications: [`NameRecord`]; may have holes |
/// | behind | 8 × rows | a [`Row`] per block, [`Pieces`] per three more pieces; may have holes |
/// | next multiple of 2 MiB | `data_bytes` / 8 | segments |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Geometry {
    /// Bytes of segments, in whole blocks.
    pub(super) data_bytes: u64,
    pub(super) names: u32,
    pub(super) rows: u32,
}

impl Geometry {
    /// Returns the geometry for `blocks` blocks in `data_bytes`. Every further piece of a block
    /// begins a segment, which bounds the number of rows.
    pub(crate) fn of(data_bytes: u64, blocks: u64) -> Self {
        let rows = blocks.saturating_add(data_bytes / UNIT_BYTES).min(u64::from(NO_ROW - 1));
        Self { data_bytes, names: NAMES, rows: u32::try_from(rows).unwrap_or(NO_ROW - 1) }
    }

    /// Returns the first word of a name.
    pub(super) fn name_at(self, name: u32) -> usize {
        HEADER_WORDS + name as usize * NAME_WORDS
    }

    /// Returns the first word of a row.
    pub(super) fn row_at(self, row: u32) -> usize {
        self.name_at(self.names) + row as usize * ROW_WORDS
    }

    /// Returns the bytes before the segments.
    pub(crate) fn front_bytes(self) -> u64 {
        (8 * self.row_at(self.rows) as u64).next_multiple_of(BLOCK_BYTES)
    }

    /// Returns the bytes of the file. Most of the front has no pages.
    pub(super) fn bytes(self) -> u64 {
        self.front_bytes().saturating_add(self.data_bytes)
    }

    /// Returns the maximum bytes of allocated pages. Segments cede the pages of further rows.
    pub(super) fn resident_bytes(self) -> u64 {
        self.data_bytes.saturating_add(FRONT_RESIDENT_BYTES)
    }
}

/// The header of a region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) geometry: Geometry,
    /// Id of the machine's boot in which the region was created.
    pub(super) boot: u128,
    /// Node that created it.
    pub(super) node: String,
}

/// Reasons why a header is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeaderDamage {
    /// Not written by this program.
    Foreign,
    /// Written by another version.
    Version(u64),
    /// The checksum is wrong.
    Checksum,
}

impl Header {
    /// Encodes the header. The magic word must be stored last.
    pub(super) fn encode(&self) -> [u64; CHECKED_WORDS + 1] {
        let Geometry { data_bytes, names, rows } = self.geometry;
        let mut words = [0; CHECKED_WORDS + 1];
        words[..5].copy_from_slice(&[MAGIC, VERSION, data_bytes, names.into(), rows.into()]);
        let boot = self.boot.to_le_bytes();
        let halves = boot.as_chunks::<8>().0;
        words[5..7].iter_mut().zip(halves).for_each(|(word, half)| *word = u64::from_le_bytes(*half));
        words[7] = self.node.len() as u64;
        put_text(&mut words[NODE_AT..CHECKED_WORDS], &self.node);
        words[CHECKED_WORDS] = u64::from(checksum(&words[..CHECKED_WORDS], 0));
        words
    }

    /// Decodes a header. Returns `None` for a region whose creation was not completed.
    pub(super) fn decode(words: &[u64]) -> Result<Option<Self>, HeaderDamage> {
        let Some((head, rest)) = words.split_at_checked(CHECKED_WORDS) else { return Ok(None) };
        match (head[0], head[1]) {
            (0, _) => return Ok(None),
            (MAGIC, VERSION) => {}
            (MAGIC, version) => return Err(HeaderDamage::Version(version)),
            _ => return Err(HeaderDamage::Foreign),
        }
        if rest.first() != Some(&u64::from(checksum(head, 0))) {
            return Err(HeaderDamage::Checksum);
        }
        let decoded = || {
            let [names, rows] = [head[3], head[4]].map(|count| u32::try_from(count).ok());
            let geometry = Geometry { data_bytes: head[2], names: names?, rows: rows? };
            let boot = u128::from(head[5]) | u128::from(head[6]) << 64;
            let node = text_of(&head[NODE_AT..], usize::try_from(head[7]).ok()?)?;
            Some(Self { geometry, boot, node })
        };
        decoded().map(Some).ok_or(HeaderDamage::Checksum)
    }
}

/// A shuffle that rows belong to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NameRecord(pub(super) ShuffleKey);

const NAME_TAG: u32 = 0x4e41_4d45;

impl NameRecord {
    /// Encodes the name as number `at`, the commit first.
    pub(super) fn encode(&self, at: u32) -> [u64; NAME_WORDS] {
        let app = self.0.app.as_str();
        let mut words = [0; NAME_WORDS];
        words[1] = pair(self.0.shuffle.0.cast_unsigned(), u32::try_from(app.len()).unwrap_or(0));
        put_text(&mut words[2..], app);
        words[0] = commit_word(NAME_TAG, &words[1..], at);
        words
    }

    /// Decodes the name with number `at`.
    pub(super) fn decode(words: &[u64; NAME_WORDS], at: u32) -> Option<Self> {
        let rest = committed(NAME_TAG, words, at)?;
        let (shuffle, len) = halves(rest[0]);
        let app = AppId::parse(&text_of(&rest[1..], len as usize)?).ok()?;
        Some(Self(ShuffleKey::new(app, ShuffleId(shuffle.cast_signed()))))
    }
}

/// A committed block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) meta: BlockMeta,
    /// Number of the shuffle's name.
    pub(super) name: u32,
    pub(super) partition: i32,
    /// Read position within the partition.
    pub(super) order: u64,
    /// Offset of the first piece in the segments. That piece has all bytes that the other pieces do
    /// not have.
    pub(super) offset: u64,
    /// Number of the row with the other pieces, or [`NO_ROW`].
    pub(super) next: u32,
}

const ROW_TAG: u32 = 0x424c_4f43;

impl Row {
    /// Encodes the row as number `at`, the commit first.
    pub(super) fn encode(&self, at: u32) -> [u64; ROW_WORDS] {
        let BlockMeta { block_id, task_attempt_id, length, uncompressed_length, crc } = self.meta;
        let mut words = [
            0,
            block_id.0.cast_unsigned(),
            task_attempt_id.0.cast_unsigned(),
            self.order,
            self.offset,
            pair(length, uncompressed_length),
            pair(crc, self.name),
            pair(self.partition.cast_unsigned(), self.next),
        ];
        words[0] = commit_word(ROW_TAG, &words[1..], at);
        words
    }

    /// Returns the name number and the partition of a row without checking its commit. `word`
    /// returns its words.
    #[inline]
    pub(super) fn owner(word: impl Fn(usize) -> u64) -> Option<(u32, i32)> {
        let is_block = halves(word(0)).1 == ROW_TAG;
        is_block.then(|| (halves(word(6)).1, halves(word(7)).0.cast_signed()))
    }

    /// Decodes the row with number `at`.
    #[inline]
    pub(super) fn decode(words: &[u64; ROW_WORDS], at: u32) -> Option<Self> {
        let rest = committed(ROW_TAG, words, at)?;
        let (length, uncompressed_length) = halves(rest[4]);
        let (crc, name) = halves(rest[5]);
        let (partition, next) = halves(rest[6]);
        let meta = BlockMeta {
            block_id: BlockId(rest[0].cast_signed()),
            task_attempt_id: TaskAttemptId(rest[1].cast_signed()),
            length,
            uncompressed_length,
            crc,
        };
        let partition = partition.cast_signed();
        Some(Self { meta, name, partition, order: rest[2], offset: rest[3], next })
    }
}

/// A contiguous part of a block, as an offset in the segments and a length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RegionRange {
    pub(crate) offset: u64,
    pub(crate) len: u32,
}

/// Further pieces of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pieces {
    /// The pieces. Unused ones have no bytes.
    pub(super) pieces: [RegionRange; PIECES_PER_ROW],
    /// Number of the next row with pieces, or [`NO_ROW`].
    pub(super) next: u32,
}

const PIECES_TAG: u32 = 0x5049_4543;

impl Pieces {
    /// Encodes the pieces as number `at`, the commit first.
    pub(super) fn encode(&self, at: u32) -> [u64; ROW_WORDS] {
        let mut words = [0; ROW_WORDS];
        words[1] = self.next.into();
        let (places, _) = words[2..].as_chunks_mut::<2>();
        for (place, piece) in places.iter_mut().zip(self.pieces) {
            *place = [piece.offset, piece.len.into()];
        }
        words[0] = commit_word(PIECES_TAG, &words[1..], at);
        words
    }

    /// Decodes the pieces with number `at`.
    pub(super) fn decode(words: &[u64; ROW_WORDS], at: u32) -> Option<Self> {
        let rest = committed(PIECES_TAG, words, at)?;
        let mut pieces = [RegionRange { offset: 0, len: 0 }; PIECES_PER_ROW];
        for (piece, place) in pieces.iter_mut().zip(rest[1..].as_chunks::<2>().0) {
            *piece = RegionRange { offset: place[0], len: u32::try_from(place[1]).ok()? };
        }
        Some(Self { pieces, next: u32::try_from(rest[0]).ok()? })
    }
}

#[inline]
fn commit_word(tag: u32, rest: &[u64], at: u32) -> u64 {
    pair(checksum(rest, at), tag)
}

#[inline]
fn committed<const WORDS: usize>(tag: u32, words: &[u64; WORDS], at: u32) -> Option<&[u64]> {
    let (commit, rest) = words.split_first()?;
    (*commit == commit_word(tag, rest, at)).then_some(rest)
}

/// A checksum that detects foreign words and is much cheaper than a CRC. Words are never torn, and
/// no word is visible before earlier stores, so it guards only against files of another origin.
#[inline]
fn checksum(words: &[u64], seed: u32) -> u32 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |hash: u64, word: &u64| {
        let product = (hash ^ word).wrapping_mul(FACTOR);
        product ^ (product >> 29)
    };
    let hash = words.iter().fold(mix(FACTOR, &seed.into()), mix);
    halves(hash.wrapping_mul(FACTOR)).1
}

#[inline]
fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the lower half")]
fn halves(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

fn put_text(words: &mut [u64], text: &str) {
    for (word, bytes) in words.iter_mut().zip(text.as_bytes().chunks(8)) {
        let mut eight = [0; 8];
        eight[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_le_bytes(eight);
    }
}

fn text_of(words: &[u64], len: usize) -> Option<String> {
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    if len > bytes.len() {
        return None;
    }
    bytes.truncate(len);
    String::from_utf8(bytes).ok()
}

impl fmt::Display for HeaderDamage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Foreign => f.write_str("not a memory file of a worker"),
            Self::Version(version) => {
                write!(f, "memory file has layout version {version}, this program supports only {VERSION}")
            }
            Self::Checksum => f.write_str("memory file has a corrupt header"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header() -> Header {
        let geometry = Geometry::of(64 << 20, 1000);
        Header { geometry, boot: 1 << 100 | 7, node: "10.0.0.1-19999".to_owned() }
    }

    #[test]
    fn header_round_trips_or_is_damaged() {
        let words = header().encode();
        assert_eq!(Header::decode(&words), Ok(Some(header())));
        assert_eq!(Header::decode(&words[..5]), Ok(None));
        for bit in 0..64 * words.len() {
            let mut damaged = words;
            damaged[bit / 64] ^= 1 << (bit % 64);
            let decoded = Header::decode(&damaged);
            let expected = match bit / 64 {
                0 => HeaderDamage::Foreign,
                1 => HeaderDamage::Version(damaged[1]),
                _ => HeaderDamage::Checksum,
            };
            assert_eq!(decoded, Err(expected), "bit {bit} is flipped");
        }
    }

    #[test]
    fn parts_do_not_overlap_and_segments_begin_at_a_block() {
        let geometry = Geometry::of(64 << 20, 1000);
        assert_eq!(geometry.rows, 1000 + (64 << 20) / 4096);
        assert!(geometry.front_bytes().is_multiple_of(BLOCK_BYTES));
        assert!(8 * geometry.row_at(geometry.rows) as u64 <= geometry.front_bytes());
        assert_eq!(Geometry::of(u64::MAX / 2, u64::MAX).rows, NO_ROW - 1);
    }

    fn row() -> impl Strategy<Value = Row> {
        let meta = (any::<i64>(), any::<i64>(), any::<u32>(), any::<u32>(), any::<u32>());
        let meta = meta.prop_map(|(id, task, length, uncompressed_length, crc)| BlockMeta {
            block_id: BlockId(id),
            task_attempt_id: TaskAttemptId(task),
            length,
            uncompressed_length,
            crc,
        });
        let rest = (any::<u32>(), any::<i32>(), any::<u64>(), any::<u64>(), any::<u32>());
        (meta, rest).prop_map(|(meta, (name, partition, order, offset, next))| Row {
            meta,
            name,
            partition,
            order,
            offset,
            next,
        })
    }

    proptest! {
        #[test]
        fn row_is_valid_only_at_its_place(row in row(), at in any::<u32>(), bit in 0usize..512) {
            let words = row.encode(at);
            prop_assert_eq!(Row::decode(&words, at), Some(row));
            prop_assert_eq!(Row::decode(&words, at ^ 1), None);
            prop_assert_eq!(Pieces::decode(&words, at), None);
            let mut damaged = words;
            damaged[bit / 64] ^= 1 << (bit % 64);
            prop_assert_eq!(Row::decode(&damaged, at), None);
        }

        #[test]
        fn arbitrary_bytes_are_decoded_without_panic(words in any::<[u64; NAME_WORDS]>(), tag in 0usize..3) {
            let mut words = words;
            let rest = words[1..].to_vec();
            words[0] = commit_word([NAME_TAG, ROW_TAG, PIECES_TAG][tag], &rest, 7);
            let _ = NameRecord::decode(&words, 7);
            let mut row = [0; ROW_WORDS];
            row.copy_from_slice(&words[..ROW_WORDS]);
            row[0] = commit_word([NAME_TAG, ROW_TAG, PIECES_TAG][tag], &rest[..ROW_WORDS - 1], 7);
            let _ = (Row::decode(&row, 7), Pieces::decode(&row, 7));
            let _ = Header::decode(&words);
        }
    }

    #[test]
    fn names_and_pieces_round_trip() {
        let key = ShuffleKey::new(AppId::parse(&"a".repeat(APP_ID_BYTES_MAX)).unwrap(), ShuffleId(-3));
        let name = NameRecord(key);
        assert_eq!(NameRecord::decode(&name.encode(9), 9), Some(name.clone()));
        assert_eq!(NameRecord::decode(&name.encode(9), 8), None);
        let piece = |offset| RegionRange { offset, len: 4096 };
        let pieces =
            Pieces { pieces: [piece(1), piece(1 << 40), RegionRange { offset: 0, len: 0 }], next: 12 };
        assert_eq!(Pieces::decode(&pieces.encode(3), 3), Some(pieces));
    }
}
