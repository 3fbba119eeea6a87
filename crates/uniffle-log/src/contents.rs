//! Bookkeeping of the metadata log's contents, for its writer and at a start: which shuffles live,
//! the bytes of their entries, and the bytes that a compaction would remove. Pure: no I/O.
//!
//! Besides records, the log has entries that mark a shuffle as incomplete or moved. A registration
//! may replace earlier registrations of its shuffle, which are then dead. Invariant: every counted
//! byte is living or dead, and all entries of a purged incarnation are dead, even those counted
//! after the purge.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use croaring::Treemap;
use parking_lot::Mutex;

use super::format::frame::{FrameContent, Gap, Incarnation};
use super::format::record::Record;
use uniffle_wire::types::ShuffleKey;

/// Bytes of one living shuffle.
#[derive(Debug, Clone)]
struct Living {
    key: ShuffleKey,
    /// Bytes of all entries, without replaced registrations.
    all: u64,
    /// Bytes of registrations, which are included in `all`.
    registrations: u64,
    /// True if it has a record, and not only entries that mark it.
    has_records: bool,
}

/// A living shuffle found in the log at start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FoundShuffle {
    /// Incarnation.
    pub incarnation: u64,
    /// Reason why records may be missing.
    pub incomplete: Option<String>,
    /// True if the shuffle was moved to the object store: its records are acknowledged once the
    /// store has them.
    pub is_moved: bool,
}

/// Bytes of living shuffles in one copy of the log, by incarnation. Clones share them.
#[derive(Debug, Default, Clone)]
pub(crate) struct LogShares(Arc<Mutex<HashMap<u64, Living>>>);

impl LogShares {
    /// Returns the bytes of an incarnation.
    pub(crate) fn of(&self, number: u64) -> u64 {
        self.0.lock().get(&number).map_or(0, |living| living.all)
    }

    /// Replaces the content of all clones by that of `other`.
    pub(crate) fn replace_with(&self, other: &Self) {
        let others = other.0.lock().clone();
        *self.0.lock() = others;
    }
}

/// Contents of the log.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    pub(crate) living: LogShares,
    pub(crate) living_bytes: u64,
    pub(crate) dead_bytes: u64,
    pub(crate) replacements: Replacements,
    /// Incarnations that were purged.
    pub(crate) purged: Treemap,
    pub(crate) incomplete: HashMap<u64, (Incarnation, Gap)>,
    /// Shuffles whose records are acknowledged once the object store has them.
    pub(crate) moved: HashMap<u64, Incarnation>,
    pub(crate) next_incarnation: u64,
}

impl Contents {
    pub(crate) fn is_purged(&self, incarnation: u64) -> bool {
        self.purged.contains(incarnation)
    }

    /// Returns whether a living shuffle has no mark yet that its records are acknowledged by the
    /// object store.
    pub(crate) fn wants_mark(&self, shuffle: &Incarnation) -> bool {
        !self.moved.contains_key(&shuffle.number) && !self.is_purged(shuffle.number)
    }

    /// Counts an entry of `bytes` bytes that is in the log. Entries may come in any order, except
    /// registrations that replace others.
    pub(crate) fn count_entry(&mut self, entry: &FrameContent, bytes: u64) {
        let Some(shuffle) = entry.shuffle() else { return };
        self.next_incarnation = self.next_incarnation.max(shuffle.number.saturating_add(1));
        match entry {
            FrameContent::Record(..) | FrameContent::Incomplete(..) | FrameContent::Moved(_)
                if !self.is_purged(shuffle.number) =>
            {
                if let FrameContent::Moved(_) = entry {
                    self.moved.insert(shuffle.number, shuffle.clone());
                }
                if let FrameContent::Incomplete(_, gap) = entry {
                    self.incomplete.insert(shuffle.number, (shuffle.clone(), gap.clone()));
                }
                self.add(entry, shuffle, bytes);
            }
            FrameContent::Purged(_) => {
                self.incomplete.remove(&shuffle.number);
                self.purge(shuffle.number);
                self.dead_bytes += bytes;
            }
            FrameContent::Epoch(_)
            | FrameContent::Begun
            | FrameContent::Record(..)
            | FrameContent::Incomplete(..)
            | FrameContent::Moved(_) => {
                self.dead_bytes += bytes;
            }
        }
    }

    fn add(&mut self, entry: &FrameContent, shuffle: &Incarnation, bytes: u64) {
        self.replacements.count(entry);
        let mut all = self.living.0.lock();
        let new = || Living { key: shuffle.key.clone(), all: 0, registrations: 0, has_records: false };
        let living = all.entry(shuffle.number).or_insert_with(new);
        if let FrameContent::Record(_, record) = entry
            && Record::is_registration(record)
        {
            let replaced = match Record::replaces_registrations(record) {
                true => std::mem::take(&mut living.registrations),
                false => 0,
            };
            living.all -= replaced;
            living.registrations += bytes;
            self.living_bytes -= replaced;
            self.dead_bytes += replaced;
        }
        living.has_records |= matches!(entry, FrameContent::Record(..));
        living.all += bytes;
        self.living_bytes += bytes;
    }

    /// Returns the living incarnations that have records.
    pub(crate) fn living(&self) -> Vec<Incarnation> {
        let all = self.living.0.lock();
        let known = all.iter().filter(|(_, living)| living.has_records);
        known.map(|(number, living)| Incarnation { key: living.key.clone(), number: *number }).collect()
    }

    /// Returns the latest living incarnation of each shuffle that has records.
    pub(crate) fn shuffles(&self) -> BTreeMap<ShuffleKey, FoundShuffle> {
        let mut shuffles: BTreeMap<ShuffleKey, FoundShuffle> = BTreeMap::new();
        for Incarnation { key, number } in self.living() {
            let found = shuffles.entry(key).or_default();
            found.incarnation = found.incarnation.max(number);
        }
        for found in shuffles.values_mut() {
            let gap = self.incomplete.get(&found.incarnation);
            found.incomplete = gap.map(|(_, gap)| gap.reason.clone());
            found.is_moved = self.moved.contains_key(&found.incarnation);
        }
        shuffles
    }

    /// Returns the filter that selects the entries of a checkpoint of this log. `order` is the
    /// order of the source.
    pub(crate) fn filter(&self, order: Order) -> CheckpointFilter {
        let incomplete = self.incomplete.values();
        let incomplete =
            incomplete.map(|(shuffle, gap)| FrameContent::Incomplete(shuffle.clone(), gap.clone()));
        let all = incomplete.chain(self.moved.values().cloned().map(FrameContent::Moved));
        CheckpointFilter {
            marks: all.filter(|mark| !belongs_to_purged(&self.purged, mark)).collect(),
            purged: self.purged.clone(),
            order,
            replacements: self.replacements.clone(),
        }
    }

    /// Marks shuffles that have no earlier gap as incomplete.
    pub(crate) fn mark_incomplete(&mut self, shuffles: &[Incarnation], gap: &Gap) {
        for shuffle in shuffles {
            self.incomplete.entry(shuffle.number).or_insert_with(|| (shuffle.clone(), gap.clone()));
        }
    }

    /// Marks incarnations that are not in `kept` as purged, because a later one has replaced them.
    pub(crate) fn keep(&mut self, kept: &Treemap) {
        let all: Vec<u64> = self.living.0.lock().keys().copied().collect();
        for number in all.into_iter().filter(|number| !kept.contains(*number)) {
            self.purge(number);
        }
    }

    /// Records that an incarnation has ended.
    pub(crate) fn purge(&mut self, number: u64) {
        self.purged.add(number);
        self.replacements.0.remove(&number);
        self.moved.remove(&number);
        let freed = self.living.0.lock().remove(&number).map_or(0, |living| living.all);
        self.living_bytes -= freed;
        self.dead_bytes += freed;
    }

    /// Returns the contents of the next generation before its first entry.
    pub(crate) fn next(&self) -> Self {
        let (purged, next_incarnation) = (self.purged.clone(), self.next_incarnation);
        Self { purged, next_incarnation, ..Self::default() }
    }

    /// Replaces the contents by those of another generation. Clones of `living` follow.
    pub(crate) fn replace_with(&mut self, other: Self) {
        self.living.replace_with(&other.living);
        let living = self.living.clone();
        *self = Self { living, ..other };
    }
}

/// Order of the entries in the source of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// The entries are in the order in which they were written, and none is missing.
    Complete,
    /// The entries are in that order, but some may be missing.
    Partial,
    /// Copies with different content have no common order.
    None,
}

/// Selects the entries of a log that a checkpoint has: marks and records of living shuffles,
/// without replaced registrations.
#[derive(Debug)]
pub(crate) struct CheckpointFilter {
    /// Marks of living shuffles, with which the checkpoint begins.
    pub(crate) marks: Vec<FrameContent>,
    purged: Treemap,
    order: Order,
    replacements: Replacements,
}

impl CheckpointFilter {
    /// Returns the entry to write into the checkpoint, or `None` for none. Called for each entry in
    /// order.
    pub(crate) fn keep(&mut self, entry: FrameContent) -> Option<FrameContent> {
        if !matches!(entry, FrameContent::Record(..)) || belongs_to_purged(&self.purged, &entry) {
            return None;
        }
        match (self.order, entry) {
            (Order::Complete, entry) => (!self.replacements.replace(&entry)).then_some(entry),
            // Without a common order, it is unknown which registrations it replaced.
            (Order::None, FrameContent::Record(shuffle, record)) => {
                Some(FrameContent::Record(shuffle, Record::without_replacing(&record)))
            }
            (Order::Partial | Order::None, entry) => Some(entry),
        }
    }
}

/// Number of registrations of each living shuffle that replace earlier ones. If the log has more,
/// some dead registrations are kept.
#[derive(Debug, Default, Clone)]
pub(crate) struct Replacements(HashMap<u64, u32>);

impl Replacements {
    fn count(&mut self, entry: &FrameContent) {
        if let FrameContent::Record(shuffle, record) = entry
            && Record::replaces_registrations(record)
        {
            *self.0.entry(shuffle.number).or_default() += 1;
        }
    }

    /// Returns whether a later registration replaces this entry. Called for each entry in order.
    fn replace(&mut self, entry: &FrameContent) -> bool {
        let FrameContent::Record(shuffle, record) = entry else { return false };
        let Some(remaining) = self.0.get_mut(&shuffle.number).filter(|_| Record::is_registration(record))
        else {
            return false;
        };
        *remaining = remaining.saturating_sub(u32::from(Record::replaces_registrations(record)));
        *remaining > 0
    }
}

/// Returns whether an entry belongs to an incarnation in `purged`.
fn belongs_to_purged(purged: &Treemap, entry: &FrameContent) -> bool {
    entry.shuffle().is_some_and(|shuffle| purged.contains(shuffle.number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::record::RegistrationRecord;
    use bytes::Bytes;
    use uniffle_wire::types::{AppId, ShuffleId};

    fn record(number: u64, record: Vec<u8>) -> FrameContent {
        let key = ShuffleKey::new(AppId::parse("app").unwrap(), ShuffleId(1));
        FrameContent::Record(Incarnation { key, number }, Bytes::from(record))
    }

    #[test]
    fn replaced_registrations_are_dead() {
        let registration = RegistrationRecord::default();
        let plain = || Record::Registration(registration.clone()).encode();
        let entries = [
            record(1, plain()),
            record(1, vec![2, 1]),
            record(2, plain()),
            record(1, plain()),
            record(1, Record::encode_replacing(&registration)),
            record(1, plain()),
        ];
        let mut contents = Contents::default();
        entries.iter().for_each(|entry| contents.count_entry(entry, 10));
        assert_eq!((contents.living.of(1), contents.living.of(2), contents.living_bytes), (30, 10, 40));
        assert_eq!(contents.dead_bytes, 20);
        let mut replacements = contents.replacements.clone();
        let dropped: Vec<usize> =
            (0..entries.len()).filter(|at| replacements.replace(&entries[*at])).collect();
        assert_eq!(dropped, [0, 3]);
        contents.count_entry(&FrameContent::Purged(entries[0].shuffle().unwrap().clone()), 5);
        assert_eq!((contents.living.of(1), contents.living_bytes, contents.dead_bytes), (0, 10, 55));
    }
}
