//! Emptying a worker so that its machine may go: what it has is brought to where another finds it.
//!
//! Where a tier has such a place (an object store), nothing new is taken from the first call on: no registrations, no tickets.
//! Without one a drain is a decommissioning, and what is flushed stays on this machine's disks.

use super::lifecycle::Lifecycle;
use crate::telemetry::AUDIT;
use crate::tiers::Drained;

/// How far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Draining {
    /// Bytes in memory.
    pub in_memory_bytes: u64,
    /// Batches on their way to a tier.
    pub batches: usize,
    /// What another machine would not find of what is in the tiers; none if no tier has a place for it.
    pub tiers: Option<Drained>,
}

impl Draining {
    /// Whether another machine finds everything.
    #[must_use]
    pub fn may_go(&self) -> bool {
        let is_elsewhere = |it: &Drained| it.shuffles_left == 0 && it.stuck_bytes == 0;
        self.in_memory_bytes == 0 && self.batches == 0 && self.tiers.as_ref().is_some_and(is_elsewhere)
    }
}

impl Lifecycle {
    /// Begins or continues a drain, in whatever state the worker is: flushes what is in memory, and has the tiers bring away
    /// what they have. What no tier takes stays readable in memory.
    pub fn drain(&self) -> Draining {
        self.decommission();
        let has_place = self.tiers.iter().any(|tier| tier.drained().is_some());
        if has_place && self.status.drain() {
            tracing::info!(target: AUDIT, "draining: new shuffles and data are refused");
        }
        // Without a tier below memory there is nothing to flush to.
        let batches = self.flush_all().unwrap_or(0);
        let tiers = self.tiers.iter().filter_map(|tier| tier.drain()).reduce(|one, other| Drained {
            shuffles_left: one.shuffles_left + other.shuffles_left,
            bytes_left: one.bytes_left + other.bytes_left,
            stuck_bytes: one.stuck_bytes + other.stuck_bytes,
        });
        Draining {
            in_memory_bytes: self.memory.used_bytes().saturating_sub(self.memory.extents().used()),
            batches,
            tiers,
        }
    }
}
