//! Failed reads by partition and disk. A failed read may succeed later, so failures are only
//! counted.
//!
//! Clients with default settings try a task four times within a second. After three failures the
//! extents are verified, so that the fourth attempt fails with the list of lost blocks. Errors that
//! do not concern stored bytes (no descriptors, a deadline) are not counted. Reads of offloads are
//! not counted either, because no client waits for them.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;

use crate::clock::Instant;
use crate::store::disk::directories::health::{ErrorClass, classify};
use crate::store::{StoreError, StoreErrorKind};
use uniffle_wire::types::PartitionId;

/// Failures before the extents are verified: clients try four times within a second.
const FAILED_READS_MAX: u32 = 3;
/// Failures further apart than this are unrelated.
const FAILURES_FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// Failed reads of one shuffle, by partition and disk.
#[derive(Debug, Default)]
pub(in crate::store::disk) struct FailedReads(Mutex<HashMap<(PartitionId, usize), Failures>>);

#[derive(Debug)]
struct Failures {
    count: u32,
    last: Instant,
}

impl FailedReads {
    /// Counts a failure if its error means that stored bytes cannot be read. Returns true once, at
    /// the limit.
    pub(in crate::store::disk) fn count_damage(
        &self,
        partition: PartitionId,
        disk: usize,
        error: &StoreError,
    ) -> bool {
        is_damage(error) && self.count(partition, disk, Instant::now())
    }

    /// Counts a failure of a partition on a disk. Returns true once, at the limit.
    fn count(&self, partition: PartitionId, disk: usize, now: Instant) -> bool {
        let mut failed = self.0.lock();
        let failures = failed.entry((partition, disk)).or_insert(Failures { count: 0, last: now });
        if now - failures.last >= FAILURES_FORGOTTEN_AFTER {
            failures.count = 0;
        }
        failures.last = now;
        failures.count = failures.count.saturating_add(1);
        failures.count == FAILED_READS_MAX
    }

    /// Sets the count to the limit.
    fn set_to_limit(&self, partition: PartitionId, disk: usize) {
        let failures = Failures { count: FAILED_READS_MAX, last: Instant::now() };
        self.0.lock().insert((partition, disk), failures);
    }

    /// Sets the count to the limit if a scan for lost blocks cannot read index records.
    pub(in crate::store::disk) fn index_unreadable(
        &self,
        partition: PartitionId,
        disk: usize,
        error: &StoreError,
    ) {
        if is_damage(error) {
            self.set_to_limit(partition, disk);
        }
    }

    /// Returns the disks at the limit for a partition, and resets their counts.
    pub(in crate::store::disk) fn take_failed_disks(&self, partition: PartitionId) -> Vec<usize> {
        let is_one = |(id, _): &(PartitionId, usize), it: &mut Failures| {
            *id == partition && it.count >= FAILED_READS_MAX
        };
        self.0.lock().extract_if(is_one).map(|((_, disk), _)| disk).collect()
    }
}

/// Returns whether an error means that stored bytes cannot be read.
pub(super) fn is_damage(error: &StoreError) -> bool {
    match (error.kind, &error.source) {
        (StoreErrorKind::Corrupt | StoreErrorKind::NotFound, _) => true,
        (_, Some(source)) => classify(source) == ErrorClass::Broken,
        _ => false,
    }
}

/// Returns whether an error of a write concerns the file and not its disk: a new file may work.
pub(in crate::store::disk) fn wants_new_file(error: &StoreError) -> bool {
    error.source.as_ref().is_some_and(|source| classify(source) == ErrorClass::TheFile)
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn third_failure_is_reported_once() {
        let failed = FailedReads::default();
        let (p, mut now) = (PartitionId(1), Instant::now());
        let at_limit: Vec<bool> = (0..5).map(|_| failed.count(p, 0, now)).collect();
        assert_eq!(at_limit, [false, false, true, false, false]);
        assert!(!failed.count(p, 1, now));
        assert!(!failed.count(PartitionId(2), 0, now));
        failed.set_to_limit(PartitionId(2), 1);
        assert_eq!(failed.take_failed_disks(p), [0]);
        assert!(!failed.count(p, 0, now), "the count of failed reads must restart");
        assert!(!failed.count(p, 0, now));
        now += FAILURES_FORGOTTEN_AFTER;
        assert!(!failed.count(p, 0, now));
    }

    #[test]
    fn transient_failure_is_no_damage() {
        let errno = |errno: i32| StoreError::io("/d", io::Error::from_raw_os_error(errno));
        assert!(is_damage(&errno(uniffle_testkit::fault::EIO)));
        assert!(is_damage(&StoreError::corrupt("/d", "x")));
        assert!(is_damage(&StoreError::io("/d", io::ErrorKind::NotFound.into())));
        assert!(!is_damage(&errno(uniffle_testkit::fault::EMFILE)));
        assert!(!is_damage(&StoreError::io("/d", io::ErrorKind::TimedOut.into())));
        assert!(!is_damage(&StoreError::new(StoreErrorKind::Purged, "app/1")));
    }
}
