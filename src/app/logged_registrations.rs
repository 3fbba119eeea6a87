//! The registrations of one shuffle that the metadata log already contains.
//!
//! A partial record contains the ranges that the log lacks, and all other data. When the partial
//! records together are as long as a complete one, the next record is complete and replaces them.
//! The size of a shuffle in the log therefore depends on its registered data, not on the number of
//! registrations.

use super::ranges::PartitionRanges;

/// Registrations of one shuffle in the metadata log. The default describes a shuffle of which this
/// process has written nothing.
#[derive(Debug, Default)]
pub struct LoggedRegistrations {
    ranges: PartitionRanges,
    /// Ranges as sent, for remote directories.
    remote_ranges: Vec<(i32, i32)>,
    /// Digest of the last written registration data without ranges; 0 if nothing was written.
    digest: u64,
    /// Bytes of the records since the last complete one.
    bytes: u64,
    /// True if results are refused and the log lacks the mark with the reason, which later starts
    /// need.
    needs_incomplete_mark: bool,
}

/// Contents of the next record.
#[derive(Debug, PartialEq)]
pub struct NextRecord {
    /// Partition ranges.
    pub ranges: PartitionRanges,
    /// Ranges as sent, for remote directories.
    pub remote_ranges: Vec<(i32, i32)>,
    /// True if the record is complete, including everything written before.
    pub replaces: bool,
}

impl LoggedRegistrations {
    /// Returns the next record for a shuffle with `ranges`, of which a client sent `remote_ranges`.
    /// Returns `None` if the log has everything. `digest` covers all other data, which takes
    /// `bytes` bytes.
    #[must_use]
    pub fn next(
        &self,
        ranges: &PartitionRanges,
        remote_ranges: &[(i32, i32)],
        digest: u64,
        bytes: u64,
    ) -> Option<NextRecord> {
        let new = ranges.minus(&self.ranges);
        let is_new = |range: &&(i32, i32)| self.remote_ranges.binary_search(range).is_err();
        let new_remote: Vec<_> = remote_ranges.iter().filter(is_new).copied().collect();
        if digest == self.digest && new.range_count() == 0 && new_remote.is_empty() {
            return None;
        }
        let all = bytes + RANGE_BYTES * (ranges.range_count() + self.remote_ranges.len()) as u64;
        if self.bytes < all {
            return Some(NextRecord { ranges: new, remote_ranges: new_remote, replaces: false });
        }
        let remote_ranges = [&self.remote_ranges[..], &new_remote].concat();
        Some(NextRecord { ranges: ranges.clone(), remote_ranges, replaces: true })
    }

    /// Records that a record of `bytes` bytes was written.
    pub fn written(&mut self, note: NextRecord, digest: u64, bytes: u64) {
        self.ranges.extend(&note.ranges);
        self.remote_ranges.extend(note.remote_ranges);
        self.remote_ranges.sort_unstable();
        self.remote_ranges.dedup();
        self.digest = digest;
        self.bytes = if note.replaces { 0 } else { self.bytes + bytes };
    }

    /// Returns the number of ranges for remote directories that the log has after `next`.
    #[must_use]
    pub fn remote_range_count(&self, next: &NextRecord) -> usize {
        let before = if next.replaces { 0 } else { self.remote_ranges.len() };
        before + next.remote_ranges.len()
    }

    /// Returns whether this process has written nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.digest == 0
    }

    /// Returns whether the log needs a mark with the reason why results are refused.
    #[must_use]
    pub fn needs_incomplete_mark(&self) -> bool {
        self.needs_incomplete_mark
    }

    /// Requires a mark in the log with the reason why results are refused.
    pub(super) fn require_incomplete_mark(&mut self) {
        self.needs_incomplete_mark = true;
    }

    /// Records that the log has the mark.
    pub fn incomplete_mark_written(&mut self) {
        self.needs_incomplete_mark = false;
    }
}

/// Bytes of a range in a record.
const RANGE_BYTES: u64 = 10;

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(of: &[(i32, i32)]) -> PartitionRanges {
        PartitionRanges::parse(of).unwrap()
    }

    fn note(logged: &mut LoggedRegistrations, all: &PartitionRanges, digest: u64) -> Option<(u64, bool)> {
        let next = logged.next(all, &[], digest, 100)?;
        let (written, replaces) = (next.ranges.partition_count(), next.replaces);
        logged.written(next, digest, 100);
        Some((written, replaces))
    }

    #[test]
    fn only_new_ranges_are_written() {
        let mut logged = LoggedRegistrations::default();
        assert!(logged.is_empty());
        assert_eq!(note(&mut logged, &ranges(&[(0, 9)]), 7), Some((10, false)));
        assert_eq!(note(&mut logged, &ranges(&[(0, 9)]), 7), None);
        assert_eq!(note(&mut logged, &ranges(&[(0, 12)]), 7), Some((3, false)));
    }

    #[test]
    fn alternating_registrations_are_merged_into_one() {
        let (mut logged, all) = (LoggedRegistrations::default(), ranges(&[(0, 9)]));
        let written: Vec<_> = (0..6).map(|n| note(&mut logged, &all, 1 + n % 2).unwrap()).collect();
        assert_eq!(written, [(10, false), (0, false), (10, true), (0, false), (0, false), (10, true)]);
    }

    #[test]
    fn remote_ranges_are_stored_as_sent() {
        let (mut logged, all) = (LoggedRegistrations::default(), ranges(&[(0, 9)]));
        let mut sent = |range| {
            let next = logged.next(&all, &[range], 7, 5)?;
            let remote = (next.remote_ranges.clone(), next.replaces);
            logged.written(next, 7, 30);
            Some(remote)
        };
        assert_eq!(sent((0, 4)), Some((vec![(0, 4)], false)));
        assert_eq!(sent((0, 4)), None);
        assert_eq!(sent((5, 9)), Some((vec![(0, 4), (5, 9)], true)));
    }
}
