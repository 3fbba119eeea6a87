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
                self.purged.add(shuffle.number);
                self.incomplete.remove(&shuffle.number);
                let freed = self.living.remove(&shuffle.number).unwrap_or(0);
                self.living_bytes -= freed;
                self.dead_bytes += freed + bytes;
            }
            Entry::Epoch(_) | Entry::Said(..) | Entry::Incomplete(..) => self.dead_bytes += bytes,
        }
    }

    /// Nothing is in the generation that begins.
    pub(super) fn begin(&mut self) {
        self.living.clear();
        (self.living_bytes, self.dead_bytes) = (0, 0);
    }
}
