//! Selection of data to be offloaded from the disks to the store. Pure: no clock, no I/O.
//!
//! A disk that is full or above the high watermark is under pressure: its data is offloaded until
//! it is below the low one. The largest shuffle on disks under pressure is offloaded first; among
//! shuffles of similar size, the oldest. Cold partitions are offloaded once they fill an object. A
//! drain offloads everything, the oldest shuffle first, and a shuffle whose offload has just failed
//! last.

use std::cmp::Reverse;

use crate::clock::Instant;

/// Fill levels of a disk's file system, as the share in use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Watermarks {
    /// Level above which a disk is under pressure.
    pub high: f64,
    /// Level at which the pressure ends.
    pub low: f64,
}

/// Fill level and state of a disk.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DiskView {
    /// Share of its file system that is in use.
    pub used_ratio: f64,
    /// True if the disk takes no data because it counts as full.
    pub is_full: bool,
    /// True if the disk is under pressure.
    pub is_under_pressure: bool,
}

/// Data of a shuffle that can be offloaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShuffleView {
    /// Later registrations have greater incarnations.
    pub incarnation: u64,
    /// Bytes of the shuffle's files, by disk.
    pub on_disks: Vec<u64>,
    /// Bytes that can be offloaded.
    pub movable_bytes: u64,
    /// Bytes of cold partitions.
    pub cold_bytes: u64,
    /// True if the store may lack records of the shuffle.
    pub is_unknown: bool,
    /// Time of the latest offload if it has just failed.
    pub last_failure: Option<Instant>,
}

/// Data of one shuffle to be offloaded, with the index of the shuffle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OffloadCandidate {
    /// The oldest data of the shuffle.
    Oldest(usize),
    /// All data of its cold partitions.
    Cold(usize),
}

/// Returns for each disk whether it is under pressure from now on.
#[must_use]
pub fn under_pressure(disks: &[DiskView], marks: Watermarks) -> Vec<bool> {
    let is_under_pressure = |disk: &DiskView| {
        let is_over = disk.used_ratio > if disk.is_under_pressure { marks.low } else { marks.high };
        is_over || disk.is_full
    };
    disks.iter().map(is_under_pressure).collect()
}

/// Returns the data to be offloaded next, with an index into `shuffles`, or `None` if there is
/// none.
#[must_use]
pub fn next(
    shuffles: &[ShuffleView],
    under_pressure: &[bool],
    object_bytes: u64,
    is_draining: bool,
) -> Option<OffloadCandidate> {
    let all = || shuffles.iter().enumerate();
    if is_draining {
        let remaining = all().filter(|(_, it)| it.is_unknown || it.movable_bytes > 0);
        return remaining
            .min_by_key(|(_, it)| (it.last_failure, it.incarnation))
            .map(|(at, _)| OffloadCandidate::Oldest(at));
    }
    let bytes_under_pressure = |it: &ShuffleView| -> u64 {
        let here =
            it.on_disks.iter().zip(under_pressure).filter(|(_, is_under_pressure)| **is_under_pressure);
        here.map(|(bytes, _)| *bytes).sum::<u64>().min(it.movable_bytes)
    };
    let largest = all().filter(|(_, it)| bytes_under_pressure(it) > 0);
    let largest = largest.max_by_key(|(_, it)| (bytes_under_pressure(it).ilog2(), Reverse(it.incarnation)));
    let coldest = || {
        let cold = all().filter(|(_, it)| it.movable_bytes > 0 && it.cold_bytes >= object_bytes);
        cold.max_by_key(|(_, it)| it.cold_bytes)
    };
    let largest = largest.map(|(at, _)| OffloadCandidate::Oldest(at));
    largest.or_else(|| coldest().map(|(at, _)| OffloadCandidate::Cold(at)))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const MARKS: Watermarks = Watermarks { high: 0.6, low: 0.5 };

    fn disk(used_ratio: f64, is_under_pressure: bool) -> DiskView {
        DiskView { used_ratio, is_full: false, is_under_pressure }
    }

    fn shuffle(incarnation: u64, on_disks: &[u64]) -> ShuffleView {
        let movable_bytes = on_disks.iter().sum();
        let (on_disks, is_unknown) = (on_disks.to_vec(), false);
        ShuffleView { incarnation, on_disks, movable_bytes, cold_bytes: 0, is_unknown, last_failure: None }
    }

    #[test]
    fn disk_is_drained_from_high_to_low_watermark() {
        let of = |used, was| under_pressure(&[disk(used, was)], MARKS)[0];
        assert_eq!(
            [of(0.6, false), of(0.61, false), of(0.55, true), of(0.5, true)],
            [false, true, true, false]
        );
        let full = DiskView { is_full: true, ..disk(0.1, false) };
        assert_eq!(under_pressure(&[full, disk(0.2, false)], MARKS), [true, false]);
    }

    #[test]
    fn largest_then_oldest_shuffle_moves_first() {
        let shuffles =
            [shuffle(3, &[900, 0]), shuffle(1, &[600, 5000]), shuffle(2, &[520, 0]), shuffle(0, &[0, 9])];
        let next = |under_pressure: &[bool]| next(&shuffles, under_pressure, 100, false);
        assert_eq!(
            next(&[true, false]),
            Some(OffloadCandidate::Oldest(1)),
            "shuffles of 512 to 1023 bytes count as equally large"
        );
        assert_eq!(next(&[false, true]), Some(OffloadCandidate::Oldest(1)));
        assert_eq!(next(&[false, false]), None);
        let immovable = ShuffleView { movable_bytes: 0, ..shuffle(0, &[100]) };
        assert_eq!(super::next(&[immovable], &[true], 100, false), None);
    }

    #[test]
    fn cold_partitions_move_by_object_and_a_drain_moves_all() {
        let cold = |cold_bytes| ShuffleView { cold_bytes, ..shuffle(5, &[400]) };
        assert_eq!(next(&[cold(99)], &[false], 100, false), None);
        assert_eq!(next(&[cold(99), cold(100)], &[false], 100, false), Some(OffloadCandidate::Cold(1)));
        let unknown = ShuffleView { is_unknown: true, ..shuffle(6, &[0]) };
        assert_eq!(next(&[unknown.clone(), cold(0)], &[false], 100, true), Some(OffloadCandidate::Oldest(1)));
        assert_eq!(
            next(&[unknown], &[false], 100, true),
            Some(OffloadCandidate::Oldest(0)),
            "a drain must also choose a shuffle whose records the store may lack"
        );
        assert_eq!(next(&[shuffle(1, &[0])], &[false], 100, true), None);
    }

    #[test]
    fn drain_tries_failed_shuffles_in_turn_after_all_others() {
        let start = Instant::now();
        let failures = [Some(start + Duration::from_secs(1)), None, Some(start)];
        let mut shuffles: Vec<_> =
            failures.map(|last_failure| ShuffleView { last_failure, ..shuffle(1, &[1000]) }).into();
        let mut order = Vec::new();
        while let Some(OffloadCandidate::Oldest(at)) = next(&shuffles, &[false], 100, true) {
            order.push(at);
            shuffles[at] = shuffle(0, &[0]);
        }
        assert_eq!(order, [1, 2, 0]);
    }
}
