//! The page cache as an overflow: a burst of more than memory holds goes there at the speed of a copy, and from there to its
//! disk at the disk's own.
//!
//! Invariants: what was written there and is not on its disk is charged to a budget and fits into what the machine has to spare,
//! however much the cache itself would take; it is written back at once, and its pages are let go of.
//!
//! Writing around the page cache stays the rule, since it costs half the CPU time and no memory. Through it goes only a batch of a
//! backlog that the disk needs [`BACKLOG_MIN`] for, while writers wait for memory or an earlier batch there is still on its way: a
//! disk writes in order, so a batch written around the cache would hold its memory until all of those are written. With `sync`
//! nothing does: there a batch is on its disk before memory is released. A disk that fails when it is written back to has lost what
//! was acknowledged, as one that fails to read: its extents become holes, and readers are told which blocks are missing.

use std::sync::Arc;
use std::time::Duration;

use super::config::{LocalConfig, SyncWrites};
use super::disk::InFlight;
use crate::budget::{Budget, Charge};
use crate::clock::Instant;
use crate::schema::SpareMemory;
use crate::tiers::Backlog;
use uniffle_io::File;

/// A shorter backlog is gone before writers would have slept.
const BACKLOG_MIN: Duration = Duration::from_millis(500);

/// What of the machine's memory batches may take on their way to the disks.
#[derive(Debug)]
pub(super) struct Overflow {
    budget: Budget,
    spare: SpareMemory,
}

/// A batch that is in the page cache.
#[derive(Debug)]
pub(super) struct Passing {
    pub(super) file: Arc<dyn File>,
    pub(super) charge: Charge,
    pub(super) load: InFlight,
    pub(super) began: Instant,
}

impl Overflow {
    pub(super) fn new(config: &LocalConfig) -> Self {
        let is_used = config.direct_io && config.sync == SyncWrites::Off;
        let capacity = if is_used { config.page_cache_bytes } else { 0 };
        Self { budget: Budget::new(capacity), spare: config.spare_memory }
    }

    /// Bytes that are there and not on their disks.
    pub(super) fn used(&self) -> u64 {
        self.budget.used()
    }

    /// Room for `bytes` of `backlog`, which is written at a pace of `seconds_per_mib`; none where a disk is the better place.
    pub(super) fn admit(&self, bytes: u64, backlog: Backlog, seconds_per_mib: Option<f64>) -> Option<Charge> {
        let on_its_way = self.budget.used();
        let is_called_for = backlog.is_waited_for || on_its_way > 0;
        if !is_called_for || !is_long(backlog.bytes.saturating_add(on_its_way), seconds_per_mib?) {
            return None;
        }
        let charge = self.budget.try_charge(bytes).ok()?;
        (self.budget.used() <= self.spare.bytes()).then_some(charge)
    }
}

#[expect(clippy::cast_precision_loss, reason = "an estimate")]
fn is_long(backlog_bytes: u64, seconds_per_mib: f64) -> bool {
    backlog_bytes as f64 / f64::from(1 << 20) * seconds_per_mib > BACKLOG_MIN.as_secs_f64()
}
