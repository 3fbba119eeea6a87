//! Failed reads by partition and disk. A read that fails may succeed later, so it only counts.
//!
//! Why three: clients with default settings try a task four times within a second, and the fourth is to be told what is
//! lost. What says nothing about stored bytes (no descriptors, a deadline) is not counted.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::health::{Verdict, judge};
use crate::tiers::{StoreError, StoreErrorKind};
use uniffle_wire::types::PartitionId;

/// Clients try four times within a second: the fourth is to be told what is lost.
const FAILED_READS_MAX: u32 = 3;
/// Failures that lie so long apart have nothing to do with each other.
const FAILURES_FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// Failed reads of one shuffle.
#[derive(Debug, Default)]
pub(super) struct FailedReads(Mutex<HashMap<(PartitionId, usize), Failures>>);

#[derive(Debug)]
struct Failures {
    count: u32,
    last: Instant,
    /// A reader was told that there were too many.
    told: bool,
}

impl FailedReads {
    /// Counts one, if its error says that stored bytes cannot be read; true once when there have been too many.
    pub(super) fn count_damage(&self, partition: PartitionId, disk: usize, error: &StoreError) -> bool {
        is_damage(error) && self.count(partition, disk, Instant::now())
    }

    /// Counts one of a partition on a disk; true once when there have been too many.
    fn count(&self, partition: PartitionId, disk: usize, now: Instant) -> bool {
        let mut failed = self.0.lock();
        let fresh = Failures { count: 0, last: now, told: false };
        let failures = failed.entry((partition, disk)).or_insert(fresh);
        if now - failures.last >= FAILURES_FORGOTTEN_AFTER {
            (failures.count, failures.told) = (0, false);
        }
        failures.last = now;
        failures.count = failures.count.saturating_add(1);
        let due = failures.count >= FAILED_READS_MAX && !failures.told;
        failures.told |= due;
        due
    }

    pub(super) fn forget(&self, partition: PartitionId, disk: usize) {
        self.0.lock().remove(&(partition, disk));
    }
}

/// Whether an error says that stored bytes cannot be read.
pub(super) fn is_damage(error: &StoreError) -> bool {
    match (error.kind, &error.source) {
        (StoreErrorKind::Corrupt | StoreErrorKind::NotFound, _) => true,
        (_, Some(source)) => judge(source) == Verdict::Broken,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn one_caller_is_told_of_the_third_failure() {
        let failed = FailedReads::default();
        let (p, mut now) = (PartitionId(1), Instant::now());
        let told: Vec<bool> = (0..5).map(|_| failed.count(p, 0, now)).collect();
        assert_eq!(told, [false, false, true, false, false]);
        assert!(!failed.count(p, 1, now), "another disk");
        assert!(!failed.count(PartitionId(2), 0, now), "another partition");
        failed.forget(p, 0);
        assert!(!failed.count(p, 0, now), "it begins anew");
        assert!(!failed.count(p, 0, now));
        now += FAILURES_FORGOTTEN_AFTER;
        assert!(!failed.count(p, 0, now), "long ago");
    }

    #[test]
    fn what_passes_is_no_damage() {
        let errno = |errno: i32| StoreError::io("/d", io::Error::from_raw_os_error(errno));
        assert!(is_damage(&errno(uniffle_testkit::fault::EIO)));
        assert!(is_damage(&StoreError::corrupt("/d", "x")));
        assert!(is_damage(&StoreError::io("/d", io::ErrorKind::NotFound.into())), "a deleted file");
        assert!(!is_damage(&errno(uniffle_testkit::fault::EMFILE)));
        assert!(!is_damage(&StoreError::io("/d", io::ErrorKind::TimedOut.into())));
        assert!(!is_damage(&StoreError::new(StoreErrorKind::Purged, "app/1")));
    }
}
