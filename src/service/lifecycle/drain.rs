//! Drains a worker so that its machine can be removed: its data moves to storage that other
//! machines can read.
//!
//! If a tier has such storage (an object store), the first call already makes the worker refuse new
//! registrations and tickets. Otherwise a drain is a decommissioning, and flushed data stays on
//! this machine's disks.

use crate::service::Lifecycle;
use crate::store::Drained;
use crate::telemetry::AUDIT;

/// Progress of a drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Draining {
    /// Bytes in memory.
    pub in_memory_bytes: u64,
    /// Batches on their way to a tier.
    pub batches: usize,
    /// Data in the tiers that other machines cannot read yet; `None` if no tier has storage for it.
    pub tiers: Option<Drained>,
}

impl Draining {
    /// Returns whether other machines can read everything.
    #[must_use]
    pub fn may_go(&self) -> bool {
        let is_elsewhere = |it: &Drained| it.shuffles_left == 0 && it.stuck_bytes == 0;
        self.in_memory_bytes == 0 && self.batches == 0 && self.tiers.as_ref().is_some_and(is_elsewhere)
    }
}

impl Lifecycle {
    /// Begins or continues a drain, in any state of the worker: flushes memory, and makes the tiers
    /// move their data. Data that no tier accepts stays readable in memory.
    pub fn drain(&self) -> Draining {
        self.decommission();
        let has_place = self.tiers.iter().any(|tier| tier.drain().is_some());
        if has_place && self.status.drain() {
            tracing::info!(target: AUDIT, "draining: new shuffles and data are refused");
        }
        // Without a tier below memory there is nothing to flush to.
        let batches = self.flush_all().unwrap_or(0);
        let tiers = self.tiers.iter().filter_map(|tier| tier.drain()).map(|tier| tier.begin()).reduce(
            |one, other| Drained {
                shuffles_left: one.shuffles_left + other.shuffles_left,
                bytes_left: one.bytes_left + other.bytes_left,
                stuck_bytes: one.stuck_bytes + other.stuck_bytes,
            },
        );
        Draining {
            in_memory_bytes: self.memory.used_bytes().saturating_sub(self.memory.extents().used()),
            batches,
            tiers,
        }
    }
}
