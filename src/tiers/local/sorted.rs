//! Orders the extents that a start finds into streams: pure.
//!
//! Each extent has the sequence of its group. Two may overlap if an earlier start that did not see
//! all disks assigned the same place again.

use super::extent::Extent;
use super::streams::Partition;

/// Orders extents, given with their sequences, into a stream. Also returns whether some were left
/// out, because they overlap extents that were published later.
pub(super) fn sort_extents(mut extents: Vec<(u64, Extent)>) -> (Partition, bool) {
    // The extent published later comes first, so that it takes precedence at its place.
    extents.sort_by_key(|(sequence, extent)| (extent.base, std::cmp::Reverse(*sequence)));
    let mut kept: Vec<(u64, Extent)> = Vec::with_capacity(extents.len());
    let mut left_out = false;
    for (sequence, extent) in extents {
        let overlaps = |kept: &[(u64, Extent)]| {
            kept.last().is_some_and(|(_, last)| last.base + last.length > extent.base)
        };
        while overlaps(&kept) && kept.last().is_some_and(|(last, _)| *last < sequence) {
            kept.pop();
            left_out = true;
        }
        if overlaps(&kept) {
            left_out = true;
        } else {
            kept.push((sequence, extent));
        }
    }
    let mut partition = Partition::default();
    for (_, extent) in kept {
        partition.extend_to(extent.base);
        partition.push(extent);
    }
    (partition, left_out)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Base sequence of a later epoch.
    const LATER: u64 = 1 << 32;

    fn extent(base: u64, length: u64) -> Extent {
        Extent { data_log: 0, index_log: 0, blocks: 1, ..Extent::gap(base, length) }
    }

    #[test]
    fn stream_keeps_holes_and_later_extents() {
        let (partition, left_out) = sort_extents(vec![(2, extent(300, 50)), (0, extent(0, 100))]);
        let places: Vec<_> = partition.extents.iter().map(|it| (it.base, it.length, it.is_lost())).collect();
        assert_eq!(places, [(0, 100, false), (100, 200, true), (300, 50, false)]);
        assert_eq!((partition.bytes, left_out), (350, false));

        let overlapping = vec![(0, extent(0, 100)), (1, extent(100, 100)), (LATER, extent(150, 20))];
        let (partition, left_out) = sort_extents(overlapping);
        let places: Vec<_> = partition.extents.iter().map(|it| (it.base, it.length, it.is_lost())).collect();
        assert_eq!(places, [(0, 100, false), (100, 50, true), (150, 20, false)]);
        assert!(left_out);
    }
}
