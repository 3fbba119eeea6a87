//! The registered partitions of a shuffle as merged, closed ranges.
//!
//! In this form 100,000 consecutive partitions take a few words. Invariant: ids are not negative,
//! ranges are sorted and disjoint, and adjacent ones are merged. Pure functions of values.

/// Error: an invalid range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RangeError {
    /// Negative start, or end before start.
    #[error("partition range {start}..={end} is invalid: start must be 0 or more, and end at least start")]
    Invalid {
        /// First id as sent.
        start: i32,
        /// Last id as sent.
        end: i32,
    },
}

/// A set of partition ids as sorted, disjoint, closed ranges.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PartitionRanges(Vec<(i32, i32)>);

impl PartitionRanges {
    /// Merges `ranges`.
    ///
    /// # Errors
    /// Returns the first invalid range.
    pub fn parse(ranges: &[(i32, i32)]) -> Result<Self, RangeError> {
        if let Some(&(start, end)) = ranges.iter().find(|(start, end)| *start < 0 || end < start) {
            return Err(RangeError::Invalid { start, end });
        }
        Ok(Self(merge(ranges.to_vec())))
    }

    /// Adds all ranges of `other`.
    pub fn extend(&mut self, other: &Self) {
        let mut all = std::mem::take(&mut self.0);
        all.extend_from_slice(&other.0);
        self.0 = merge(all);
    }

    /// Returns the partitions that are not in `other`.
    #[must_use]
    pub fn minus(&self, other: &Self) -> Self {
        let mut remaining = Vec::new();
        for &(start, end) in &self.0 {
            let mut from = Some(start);
            let first = other.0.partition_point(|(_, last)| *last < start);
            for &(taken, until) in other.0[first..].iter().take_while(|(taken, _)| *taken <= end) {
                let Some(begins) = from else { break };
                if begins < taken {
                    remaining.push((begins, taken - 1));
                }
                from = until.checked_add(1).filter(|next| *next <= end);
            }
            remaining.extend(from.map(|begins| (begins, end)));
        }
        Self(remaining)
    }

    /// Returns whether `partition` is in one of the ranges.
    pub fn contains(&self, partition: i32) -> bool {
        let after = self.0.partition_point(|(start, _)| *start <= partition);
        after > 0 && partition <= self.0[after - 1].1
    }

    /// Returns the ranges, sorted.
    pub fn to_vec(&self) -> Vec<(i32, i32)> {
        self.0.clone()
    }

    /// Returns the number of ranges.
    pub fn range_count(&self) -> usize {
        self.0.len()
    }

    /// Returns the number of partitions in the ranges.
    pub fn partition_count(&self) -> u64 {
        self.0.iter().map(|(start, end)| u64::from(end.abs_diff(*start)) + 1).sum()
    }
}

fn merge(mut ranges: Vec<(i32, i32)>) -> Vec<(i32, i32)> {
    // In `extend` both lists are sorted, and the stable sort merges them in linear time.
    ranges.sort();
    let mut merged: Vec<(i32, i32)> = Vec::new();
    for (start, end) in ranges {
        match merged.last_mut() {
            Some(last) if start <= last.1.saturating_add(1) => last.1 = last.1.max(end),
            _ => merged.push((start, end)),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn negative_and_reversed_ranges_are_refused() {
        assert!(PartitionRanges::parse(&[(0, 3), (-1, 2)]).is_err());
        assert!(PartitionRanges::parse(&[(3, 2)]).is_err());
        let whole = PartitionRanges::parse(&[(0, i32::MAX), (5, i32::MAX)]).unwrap();
        assert_eq!(whole.partition_count(), 1 << 31);
        assert!(whole.contains(i32::MAX) && !whole.contains(-1));
    }

    proptest! {
        #[test]
        fn difference_contains_only_missing_ranges(
            some in proptest::collection::vec((0i32..50, 0i32..9), 0..12),
            others in proptest::collection::vec((0i32..50, 0i32..9), 0..12),
        ) {
            let parse = |ranges: Vec<(i32, i32)>| {
                let ranges: Vec<_> = ranges.into_iter().map(|(start, more)| (start, start + more)).collect();
                PartitionRanges::parse(&ranges).unwrap()
            };
            let (some, others) = (parse(some), parse(others));
            let remaining = some.minus(&others);
            for partition in 0..60 {
                let is_left = some.contains(partition) && !others.contains(partition);
                prop_assert_eq!(remaining.contains(partition), is_left, "{}", partition);
            }
            let mut all = remaining.clone();
            all.extend(&others);
            prop_assert_eq!(all.partition_count(), remaining.partition_count() + others.partition_count());
        }

        #[test]
        fn ranges_are_a_set(first in proptest::collection::vec((0i32..50, 0i32..9), 0..12),
                            second in proptest::collection::vec((0i32..50, 0i32..9), 0..12)) {
            let closed = |v: &[(i32, i32)]| v.iter().map(|(s, n)| (*s, s + n)).collect::<Vec<_>>();
            let mut ranges = PartitionRanges::parse(&closed(&first)).unwrap();
            ranges.extend(&PartitionRanges::parse(&closed(&second)).unwrap());
            let model: BTreeSet<i32> =
                closed(&first).into_iter().chain(closed(&second)).flat_map(|(s, e)| s..=e).collect();
            prop_assert_eq!(ranges.partition_count(), model.len() as u64);
            for p in 0..70 {
                prop_assert_eq!(ranges.contains(p), model.contains(&p));
            }
        }
    }
}
