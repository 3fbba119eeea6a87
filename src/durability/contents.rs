//! What the metadata log holds, as far as its writer has to know: how much of it is dead, and which shuffles are incomplete.
//! Pure: no I/O.

use std::collections::HashMap;

use croaring::Treemap;

use super::frame::{Entry, Gap, Incarnation};

/// What the log holds.
#[derive(Debug, Default)]
pub(super) struct Contents {
    /// Bytes of living shuffles, by incarnation.
    pub(super) living: HashMap<u64, u64>,
    pub(super) living_bytes: u64,
    pub(super) dead_bytes: u64,
    /// Shuffles that are gone.
    pub(super) purged: Treemap,
    pub(super) incomplete: HashMap<u64, (Incarnation, Gap)>,
    pub(super) next_incarnation: u64,
}

impl Contents {
    pub(super) fn is_purged(&self, incarnation: u64) -> bool {
        self.purged.contains(incarnation)
    }

    /// An entry of so many bytes is in the log.
    pub(super) fn took(&mut self, entry: &Entry, bytes: u64) {
        let Some(shuffle) = entry.shuffle() else { return };
        self.next_incarnation = self.next_incarnation.max(shuffle.number.saturating_add(1));
        match entry {
            Entry::Said(..) | Entry::Incomplete(..) if !self.is_purged(shuffle.number) => {
                if let Entry::Incomplete(_, gap) = entry {
                    self.incomplete.insert(shuffle.number, (shuffle.clone(), gap.clone()));
                }
                *self.living.entry(shuffle.number).or_default() += bytes;
                self.living_bytes += bytes;
            }
            Entry::Purged(_) => {
                self.incomplete.remove(&shuffle.number);
                self.purge(shuffle.number);
                self.dead_bytes += bytes;
            }
            Entry::Epoch(_) | Entry::Said(..) | Entry::Incomplete(..) => self.dead_bytes += bytes,
        }
    }

    /// Incarnations that are not `kept`, since a later one has replaced them, are as good as purged.
    pub(super) fn keep(&mut self, kept: &Treemap) {
        let others: Vec<u64> = self.living.keys().copied().filter(|number| !kept.contains(*number)).collect();
        for number in others {
            self.purge(number);
        }
    }

    fn purge(&mut self, number: u64) {
        self.purged.add(number);
        let freed = self.living.remove(&number).unwrap_or(0);
        self.living_bytes -= freed;
        self.dead_bytes += freed;
    }

    /// Nothing is in the generation that begins.
    pub(super) fn begin(&mut self) {
        self.living.clear();
        (self.living_bytes, self.dead_bytes) = (0, 0);
    }
}
