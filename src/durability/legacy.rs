//! What versions before the metadata log left: a journal per shuffle in its directory, and a list of data directories. It
//! is read once; from then on all is in the log. What was in doubt for those versions is incomplete here.
//!
//! A journal is a file of records. Everything is big-endian:
//!
//! ```text
//! header, 32 bytes      0  magic "UWNT"            4  version u16 = 1     6  reserved u16 = 0
//!                       8  incarnation u64        16  number u64 (per shuffle)
//!                      24  length u32             28  crc32 of bytes 0..28 and of the content
//! then the content
//! ```
//!
//! A record may appear several times with the same number and the same bytes. Numbers are counted from multiples of 2³² on,
//! so that one that is missing between two of the same multiple is a record that is missing. Pure: no I/O.

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;
use uuid::Uuid;

use super::frame::{Entry, Epoch, Gap, Incarnation, Member};
use super::proof::Judgement;

/// The list of data directories.
pub const LIST: &str = "uniffle-worker.peers";
/// Extension of a journal.
pub const JOURNAL: &str = "journal";

const MAGIC: [u8; 4] = *b"UWNT";
const VERSION: u16 = 1;
const HEADER_BYTES: usize = 32;
/// Numbers begin anew at each multiple.
const NUMBERS: u64 = 1 << 32;

/// Why results are refused after a reset.
const RESET: &str = "the machine was reset while an earlier version ran with localfile_store.sync = \
     \"off\", so the latest writes may be lost; unregister the shuffle or rerun its application";

/// What the directories of an earlier version hold.
#[derive(Debug, Clone, Default)]
pub struct Legacy {
    pub(super) entries: Vec<Entry>,
    gap: Option<Gap>,
    members: Vec<Member>,
    blind_starts: u32,
    doubted_below: u64,
}

impl Legacy {
    /// By the lists of the directories that are here, under the kernel `boot`. A list that cannot be read is an error in
    /// words; a directory without one is new.
    pub fn new(here: &[(Uuid, String)], lists: &[Result<Option<Vec<u8>>, String>], boot: &str) -> Self {
        let mut legacy = Self::default();
        let never = |reason: String| Gap { reason, until_back: Vec::new() };
        for ((_, path), list) in here.iter().zip(lists) {
            let list = match list {
                Ok(None) => continue,
                Ok(Some(bytes)) => List::decode(bytes).ok_or_else(|| "it is damaged".to_owned()),
                Err(error) => Err(error.clone()),
            };
            match list {
                Ok(list) => legacy.take_list(list, boot),
                Err(error) => {
                    legacy.gap.get_or_insert_with(|| never(format!("cannot read {path}/{LIST}: {error}")));
                }
            }
        }
        if lists.iter().all(|list| matches!(list, Ok(None))) {
            let reason = "files of shuffles exist without a metadata log".to_owned();
            legacy.gap.get_or_insert_with(|| never(reason));
        }
        let is_here = |member: &Member| here.iter().any(|(uuid, _)| *uuid == member.uuid());
        let absent = legacy.members.iter().find(|member| !is_here(member));
        if let Some(path) = absent.map(|member| member.path.clone()) {
            let reason = format!("data directory {path} is missing and may have newer metadata");
            legacy.gap.get_or_insert_with(|| never(reason));
        }
        legacy
    }

    fn take_list(&mut self, list: List, boot: &str) {
        self.blind_starts = self.blind_starts.max(list.era);
        self.doubted_below = self.doubted_below.max(list.doubted_below);
        let was_reset = list.is_unsynced && !list.boot.is_empty() && list.boot != boot;
        if was_reset && self.gap.is_none() {
            self.gap = Some(Gap { reason: RESET.to_owned(), until_back: Vec::new() });
        }
        for (uuid, path) in list.directories {
            if self.members.iter().all(|member| member.uuid() != uuid) {
                self.members.push(Member::new(uuid, &path));
            }
        }
    }

    /// Takes what the journals of a shuffle hold.
    pub fn take_shuffle(&mut self, shuffle: &Incarnation, journals: Vec<Journal>) {
        let mut records = BTreeMap::new();
        let mut reason = None;
        for journal in journals {
            reason = reason.or(journal.damage);
            records.extend(journal.records);
        }
        if has_gap(records.keys().copied()) {
            reason.get_or_insert_with(|| "a record of its journal is missing".to_owned());
        }
        if shuffle.number < self.doubted_below {
            reason.get_or_insert_with(|| RESET.to_owned());
        }
        self.entries.extend(records.into_values().map(|content| Entry::Said(shuffle.clone(), content)));
        if let Some(reason) = reason {
            self.entries.push(Entry::Incomplete(shuffle.clone(), Gap { reason, until_back: Vec::new() }));
        }
    }

    pub(super) fn judged(&self) -> Judgement {
        let (members, blind_starts) = (self.members.clone(), self.blind_starts);
        Judgement::of_earlier_version(Epoch { members, blind_starts, ..Epoch::default() }, self.gap.clone())
    }
}

/// One directory's list.
struct List {
    era: u32,
    is_unsynced: bool,
    boot: String,
    doubted_below: u64,
    directories: Vec<(Uuid, String)>,
}

impl List {
    /// None when a line is none of its own: the file was written in place and may be torn.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        let mut list = Self {
            era: 0,
            is_unsynced: false,
            boot: String::new(),
            doubted_below: 0,
            directories: Vec::new(),
        };
        if !text.ends_with('\n') {
            return None;
        }
        for line in text.lines() {
            let (word, rest) = line.split_once(' ')?;
            match word {
                "era" => list.era = rest.parse().ok()?,
                "boot" => {
                    let (state, boot) = rest.split_once(' ')?;
                    (list.is_unsynced, list.boot) = (state == "unsynced", boot.to_owned());
                }
                "doubted" => list.doubted_below = rest.parse().ok()?,
                uuid => list.directories.push((Uuid::parse_str(uuid).ok()?, rest.to_owned())),
            }
        }
        (!list.directories.is_empty()).then_some(list)
    }
}

/// What one journal holds.
#[derive(Debug, Clone, Default)]
pub struct Journal {
    records: HashMap<u64, Bytes>,
    damage: Option<String>,
}

impl Journal {
    /// One that cannot be read.
    pub fn unreadable(path: &str, error: &str) -> Self {
        Self { records: HashMap::new(), damage: Some(format!("cannot read {path}: {error}")) }
    }

    /// Reads the whole file. A record that was not finished may stand at its end, and nowhere else.
    pub fn decode(path: &str, bytes: &Bytes, incarnation: u64) -> Self {
        let mut journal = Self::default();
        let (mut at, mut fits_until) = (0, 0);
        while at + HEADER_BYTES <= bytes.len() {
            let Some((of, number, content)) = record(bytes, at) else {
                let next = bytes[at + 1..].windows(MAGIC.len()).position(|window| window == MAGIC);
                let Some(skipped) = next else { break };
                at += 1 + skipped;
                continue;
            };
            if at > fits_until {
                journal.damage.get_or_insert_with(|| format!("{path} is corrupt at byte {fits_until}"));
            }
            at += HEADER_BYTES + content.len();
            fits_until = at;
            if of == incarnation {
                journal.records.entry(number).or_insert(content);
            }
        }
        journal
    }
}

/// Incarnation, number and content of the record at `at`.
fn record(bytes: &Bytes, at: usize) -> Option<(u64, u64, Bytes)> {
    let header = bytes.get(at..)?.first_chunk::<HEADER_BYTES>()?;
    let word = |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let long = |at: usize| (u64::from(word(at)) << 32) | u64::from(word(at + 4));
    if header[0..4] != MAGIC || header[4..6] != VERSION.to_be_bytes() {
        return None;
    }
    let start = at + HEADER_BYTES;
    let end = start.checked_add(word(24) as usize).filter(|end| *end <= bytes.len())?;
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&header[..28]);
    hasher.update(&bytes[start..end]);
    (hasher.finalize() == word(28)).then(|| (long(8), long(16), bytes.slice(start..end)))
}

/// Whether a number is missing.
fn has_gap(numbers: impl Iterator<Item = u64>) -> bool {
    let mut parts: HashMap<u64, (u64, u64)> = HashMap::new();
    for number in numbers {
        let (count, highest) = parts.entry(number / NUMBERS).or_default();
        *count += 1;
        *highest = (*highest).max(number % NUMBERS);
    }
    parts.values().any(|(count, highest)| *count <= *highest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};

    /// As earlier versions wrote it.
    fn encode(incarnation: u64, number: u64, content: &[u8]) -> Vec<u8> {
        let mut bytes = [&MAGIC[..], &VERSION.to_be_bytes(), &[0; 2]].concat();
        bytes.extend_from_slice(&incarnation.to_be_bytes());
        bytes.extend_from_slice(&number.to_be_bytes());
        bytes.extend_from_slice(&u32::try_from(content.len()).unwrap().to_be_bytes());
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&bytes);
        hasher.update(content);
        bytes.extend_from_slice(&hasher.finalize().to_be_bytes());
        bytes.extend_from_slice(content);
        bytes
    }

    const UUID: Uuid = Uuid::from_u128(7);

    fn lists(text: &str, boot: &str) -> Legacy {
        Legacy::new(&[(UUID, "/a".into())], &[Ok(Some(text.as_bytes().to_vec()))], boot)
    }

    fn shuffle() -> Incarnation {
        Incarnation { key: ShuffleKey::new(AppId::parse("app").unwrap(), ShuffleId(1)), number: 3 }
    }

    fn incomplete(mut legacy: Legacy, journal: &[u8]) -> (usize, Option<String>) {
        let journal = Journal::decode("/a/0.journal", &Bytes::copy_from_slice(journal), 3);
        legacy.take_shuffle(&shuffle(), vec![journal]);
        let reason = legacy.entries.iter().find_map(|entry| match entry {
            Entry::Incomplete(_, gap) => Some(gap.reason.clone()),
            _ => None,
        });
        (legacy.entries.iter().filter(|entry| matches!(entry, Entry::Said(..))).count(), reason)
    }

    #[test]
    fn version_1_of_the_journal_is_read() {
        let hex: String = encode(3, 7, b"hello").iter().map(|byte| format!("{byte:02x}")).collect();
        let golden = [
            "55574e5400010000",
            "0000000000000003",
            "0000000000000007",
            "00000005",
            "21219e7b",
            "68656c6c6f",
        ];
        assert_eq!(hex, golden.concat());
        let whole = [encode(3, 0, b"a"), encode(9, 5, b"another's"), encode(3, 1, b"bc")].concat();
        assert_eq!(incomplete(Legacy::default(), &whole), (2, None));
        assert_eq!(incomplete(Legacy::default(), &whole[..whole.len() - 1]), (1, None), "a torn end");
    }

    #[test]
    fn damaged_or_missing_record_makes_the_shuffle_incomplete() {
        let mut whole = [encode(3, 0, b"a"), encode(3, 1, b"bc")].concat();
        whole[HEADER_BYTES] ^= 1;
        let (said, reason) = incomplete(Legacy::default(), &whole);
        assert_eq!((said, reason.as_deref()), (1, Some("/a/0.journal is corrupt at byte 0")));
        let hole = [encode(3, 0, b"a"), encode(3, 2, b"bc")].concat();
        assert!(incomplete(Legacy::default(), &hole).1.unwrap().contains("is missing"));
        assert!(
            incomplete(lists(&format!("era 0\nboot synced x\ndoubted 4\n{UUID} /a\n"), "x"), &[]).1.is_some()
        );
    }

    #[test]
    fn torn_or_foreign_member_list_is_a_gap() {
        let gap = |text: &str| lists(text, "two").judged().gap.map(|gap| gap.reason);
        let of =
            |state: &str, boot: &str| gap(&format!("era 0\nboot {state} {boot}\ndoubted 0\n{UUID} /a\n"));
        assert_eq!((of("unsynced", "two"), of("synced", "one")), (None, None));
        assert!(of("unsynced", "one").unwrap().contains("was reset"));
        for torn in ["", "era 0", "era 0\nboot uns", "era 0\nboot unsynced two\ndoubted 0\n", "era x\n"] {
            assert!(gap(torn).unwrap().contains("cannot read /a/uniffle-worker.peers"), "{torn:?}");
        }
        let other = Uuid::from_u128(8);
        let absent = gap(&format!("era 0\nboot synced two\ndoubted 0\n{UUID} /a\n{other} /b\n"));
        assert!(absent.unwrap().contains("data directory /b is missing"));
        // What the first versions wrote.
        assert_eq!(gap(&format!("{UUID} /a\n")), None);
    }
}
