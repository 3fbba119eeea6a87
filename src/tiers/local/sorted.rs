//! Which of the extents that a start finds make up a stream: pure.
//!
//! Each has the sequence of its group. Two may have the same place: one is a copy of the other (`rewrite`), or a start that
//! could not see a disk has given a place away a second time.

use super::extent::Extent;
use super::streams::Partition;

/// Of extents (with their sequences) that say the same one stays, the last published of those whose data is there: the others are its
/// originals. `tell` hears of those whose data is there, too.
pub(super) fn take_once(extents: &mut Vec<(u64, Extent)>, mut tell: impl FnMut(&Extent)) {
    let rank = |(sequence, extent): &(u64, Extent)| (extent.is_lost(), std::cmp::Reverse(*sequence));
    let says = |it: &Extent| (it.base, it.length, it.records_crc);
    extents.sort_by_key(|it| (says(&it.1), rank(it)));
    extents.dedup_by(|(_, later), (_, kept)| {
        let is_copied = later.says_the_same(kept);
        if is_copied && !later.is_lost() {
            tell(later);
        }
        is_copied
    });
}

/// Puts extents (with their sequences) into a stream that begins at `start`. Returns whether some had to be left out: others, published
/// later, have their place, or they begin before the stream does.
pub(super) fn sort_extents(start: u64, mut extents: Vec<(u64, Extent)>) -> (Partition, bool) {
    // The later published first, so that it is met when it claims its place.
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
    let mut partition = Partition::beginning_at(start);
    for (_, extent) in kept {
        if extent.base < start {
            left_out |= extent.base + extent.length > start;
            continue;
        }
        partition.extend_to(extent.base);
        partition.push(extent);
    }
    (partition, left_out)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a later epoch.
    const LATER: u64 = 1 << 32;

    fn extent(base: u64, length: u64) -> Extent {
        Extent { data_log: 0, index_log: 0, blocks: 1, ..Extent::gap(base, length) }
    }

    #[test]
    fn stream_keeps_holes_and_later_extents() {
        let (partition, left_out) = sort_extents(0, vec![(2, extent(300, 50)), (0, extent(0, 100))]);
        let places: Vec<_> = partition.extents.iter().map(|it| (it.base, it.length, it.is_lost())).collect();
        assert_eq!(places, [(0, 100, false), (100, 200, true), (300, 50, false)]);
        assert_eq!((partition.bytes, left_out), (350, false));

        let overlapping = vec![(0, extent(0, 100)), (1, extent(100, 100)), (LATER, extent(150, 20))];
        let (partition, left_out) = sort_extents(0, overlapping);
        let places: Vec<_> = partition.extents.iter().map(|it| (it.base, it.length, it.is_lost())).collect();
        assert_eq!(places, [(0, 100, false), (100, 50, true), (150, 20, false)]);
        assert!(left_out);
    }

    #[test]
    fn extent_across_the_stream_start_is_reported() {
        let places = |start, at: u64| {
            let (partition, left_out) = sort_extents(start, vec![(0, extent(at, 100)), (1, extent(300, 50))]);
            let places: Vec<_> =
                partition.extents.iter().filter(|it| !it.is_lost()).map(|it| it.base).collect();
            (places, left_out)
        };
        assert_eq!(places(200, 150), (vec![300], true));
        assert_eq!(places(200, 100), (vec![300], false), "all of it is elsewhere");
        assert_eq!(places(200, 200), (vec![200, 300], false));
    }

    #[test]
    fn copy_with_existing_data_is_chosen() {
        let at = |log: u16, base: u64| Extent { data_log: log, records_crc: 7, ..extent(base, 100) };
        let lost = |base: u64| Extent { records_crc: 7, ..Extent::gap(base, 100) };
        let other = Extent { records_crc: 8, data_log: 9, ..extent(300, 100) };
        let mut all = vec![
            (0, at(0, 0)),
            (1, at(0, 100)),
            (2, lost(200)),
            (3, other),
            (10, at(5, 0)),
            (11, lost(100)),
            (12, at(5, 200)),
            (13, at(5, 300)),
        ];
        all.reverse();
        let mut originals = Vec::new();
        take_once(&mut all, |it| originals.push((it.data_log, it.base)));
        let taken: Vec<_> = all.iter().map(|(sequence, it)| (it.base, *sequence, it.data_log)).collect();
        assert_eq!(taken, [(0, 10, 5), (100, 1, 0), (200, 12, 5), (300, 13, 5), (300, 3, 9)]);
        assert_eq!(
            originals,
            [(0, 0)],
            "a hole is nobody's original, and what says something else is no copy"
        );
    }
}
