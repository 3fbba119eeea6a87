//! The registrations of a shuffle as far as the metadata log has them.
//!
//! A record has what the log does not have yet. When such records have become as long as one with everything, the next has
//! everything and replaces them: what a shuffle takes of the log follows what it is registered with, not how often.

use super::ranges::PartitionRanges;

/// See the module. The default is a shuffle of which nothing was written by this process.
#[derive(Debug, Default)]
pub struct NotedRegistrations {
    ranges: PartitionRanges,
    /// Ranges as they were sent, for remote directories.
    remote_ranges: Vec<(i32, i32)>,
    /// Of everything else that was written last; 0: nothing was.
    digest: u64,
    /// Bytes of records since the last that has everything.
    bytes: u64,
    /// Whether later starts know why results are refused.
    is_marked: bool,
}

/// What the next record has.
#[derive(Debug, PartialEq)]
pub struct NextNote {
    /// Ranges of partitions.
    pub ranges: PartitionRanges,
    /// Ranges as they were sent, for remote directories.
    pub remote_ranges: Vec<(i32, i32)>,
    /// Whether it has everything that was written before.
    pub replaces: bool,
}

impl NotedRegistrations {
    /// Returns what has to be written of a shuffle that has `ranges`, of which a client sent `remote_ranges`; none if the log
    /// has it all. `digest` is of everything else, which takes `bytes`.
    #[must_use]
    pub fn next(
        &self,
        ranges: &PartitionRanges,
        remote_ranges: &[(i32, i32)],
        (digest, bytes): (u64, u64),
    ) -> Option<NextNote> {
        let new = ranges.minus(&self.ranges);
        let is_new = |range: &&(i32, i32)| self.remote_ranges.binary_search(range).is_err();
        let new_remote: Vec<_> = remote_ranges.iter().filter(is_new).copied().collect();
        if digest == self.digest && new.ranges() == 0 && new_remote.is_empty() {
            return None;
        }
        let all = bytes + RANGE_BYTES * (ranges.ranges() + self.remote_ranges.len()) as u64;
        if self.bytes < all {
            return Some(NextNote { ranges: new, remote_ranges: new_remote, replaces: false });
        }
        let remote_ranges = [&self.remote_ranges[..], &new_remote].concat();
        Some(NextNote { ranges: ranges.clone(), remote_ranges, replaces: true })
    }

    /// Takes note of a record of `bytes` bytes that was written.
    pub fn written(&mut self, note: NextNote, digest: u64, bytes: u64) {
        self.ranges.extend(&note.ranges);
        self.remote_ranges.extend(note.remote_ranges);
        self.remote_ranges.sort_unstable();
        self.remote_ranges.dedup();
        self.digest = digest;
        self.bytes = if note.replaces { 0 } else { self.bytes + bytes };
    }

    /// Whether nothing was written by this process.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.digest == 0
    }

    /// Whether later starts know why results are refused.
    #[must_use]
    pub fn is_marked(&self) -> bool {
        self.is_marked
    }

    /// Later starts know why results are refused.
    pub fn mark(&mut self) {
        self.is_marked = true;
    }
}

/// Of a range in a record.
const RANGE_BYTES: u64 = 10;

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(of: &[(i32, i32)]) -> PartitionRanges {
        PartitionRanges::parse(of).unwrap()
    }

    fn note(noted: &mut NotedRegistrations, all: &PartitionRanges, digest: u64) -> Option<(u64, bool)> {
        let next = noted.next(all, &[], (digest, 100))?;
        let (written, replaces) = (next.ranges.count(), next.replaces);
        noted.written(next, digest, 100);
        Some((written, replaces))
    }

    #[test]
    fn only_new_ranges_are_written() {
        let mut noted = NotedRegistrations::default();
        assert!(noted.is_empty());
        assert_eq!(note(&mut noted, &ranges(&[(0, 9)]), 7), Some((10, false)));
        assert_eq!(note(&mut noted, &ranges(&[(0, 9)]), 7), None);
        assert_eq!(note(&mut noted, &ranges(&[(0, 12)]), 7), Some((3, false)));
    }

    #[test]
    fn alternating_registrations_are_merged_into_one() {
        let (mut noted, all) = (NotedRegistrations::default(), ranges(&[(0, 9)]));
        let written: Vec<_> = (0..6).map(|n| note(&mut noted, &all, 1 + n % 2).unwrap()).collect();
        assert_eq!(written, [(10, false), (0, false), (10, true), (0, false), (0, false), (10, true)]);
    }

    #[test]
    fn remote_ranges_are_stored_as_sent() {
        let (mut noted, all) = (NotedRegistrations::default(), ranges(&[(0, 9)]));
        let mut sent = |range| {
            let next = noted.next(&all, &[range], (7, 5))?;
            let remote = (next.remote_ranges.clone(), next.replaces);
            noted.written(next, 7, 30);
            Some(remote)
        };
        assert_eq!(sent((0, 4)), Some((vec![(0, 4)], false)));
        assert_eq!(sent((0, 4)), None);
        assert_eq!(sent((5, 9)), Some((vec![(0, 4), (5, 9)], true)));
    }
}
