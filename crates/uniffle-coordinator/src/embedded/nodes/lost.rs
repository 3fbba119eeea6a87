//! Lost nodes, and nodes of an earlier process that have not reported yet.
//!
//! Pure state; the clock is a parameter. Invariant: the ids of both take at most [`BYTES_MAX`].

use std::collections::HashMap;
use std::time::Duration;

use uniffle_base::clock::Instant;

/// Maximum size of all ids. 10,000 typical ones take 1.1 MB.
pub(super) const BYTES_MAX: usize = 3 << 19;
/// Time after which a node is no longer listed as lost. It was replaced, or never existed.
pub(super) const KEPT: Duration = Duration::from_secs(24 * 3600);

/// A node as saved for the next process.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SavedNode {
    /// Id of the node.
    pub id: String,
    /// Unix time in seconds at which it was lost, or `None` if it was alive.
    pub lost_at: Option<u64>,
}

/// Ids of lost and of awaited nodes.
#[derive(Debug, Default)]
pub(super) struct LostNodes {
    /// Time of the loss by id.
    lost: HashMap<String, Instant>,
    /// Live nodes of an earlier process by id, with the time from which they are awaited.
    awaited: HashMap<String, Instant>,
    /// Size of all ids.
    pub(super) bytes: usize,
}

impl LostNodes {
    /// Adds a node that was lost at `since`, if there is room.
    pub(super) fn add(&mut self, id: &str, since: Instant) {
        if self.reserve(id) {
            self.lost.insert(id.to_owned(), since);
        }
    }

    /// Adds a live node of an earlier process, if there is room.
    pub(super) fn wait_for(&mut self, id: &str, now: Instant) {
        if self.reserve(id) {
            self.awaited.insert(id.to_owned(), now);
        }
    }

    /// Returns whether `id` is new and fits. Its size is then counted.
    fn reserve(&mut self, id: &str) -> bool {
        let with_it = self.bytes + bytes(id);
        let is_known = self.lost.contains_key(id) || self.awaited.contains_key(id);
        if is_known || with_it > BYTES_MAX {
            return false;
        }
        self.bytes = with_it;
        true
    }

    /// Removes a node that has reported or is forgotten. Returns whether it was lost.
    pub(super) fn remove(&mut self, id: &str) -> bool {
        let was_lost = self.lost.remove(id).is_some();
        if was_lost || self.awaited.remove(id).is_some() {
            self.bytes -= bytes(id);
        }
        was_lost
    }

    /// Removes nodes that were lost long ago, and turns awaited nodes that have not reported within
    /// `timeout` into lost ones. Returns whether there was any.
    pub(super) fn expire(&mut self, timeout: Duration, now: Instant) -> bool {
        let Self { lost, awaited, bytes: all } = self;
        let before = (lost.len(), awaited.len());
        lost.retain(|id, since| {
            let is_kept = now.saturating_duration_since(*since) < KEPT;
            *all -= if is_kept { 0 } else { bytes(id) };
            is_kept
        });
        let overdue = awaited.extract_if(|_, since| now.saturating_duration_since(*since) > timeout);
        for (id, _) in overdue {
            tracing::warn!(node = %id, "no heartbeat since the start of this coordinator; node is lost");
            lost.insert(id, now);
        }
        before != (lost.len(), awaited.len())
    }

    /// Returns the number of lost nodes.
    pub(super) fn len(&self) -> usize {
        self.lost.len()
    }

    /// Returns the lost nodes with the time of the loss.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, Instant)> {
        self.lost.iter().map(|(id, since)| (id.as_str(), *since))
    }

    /// Returns the awaited nodes.
    pub(super) fn awaited(&self) -> impl Iterator<Item = &str> {
        self.awaited.keys().map(String::as_str)
    }
}

/// Returns the size that an id counts towards [`BYTES_MAX`]. A table may be half empty.
pub(super) fn bytes(id: &str) -> usize {
    2 * size_of::<(String, Instant)>() + id.len()
}
