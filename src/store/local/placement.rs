//! Which disk takes a batch: pure decisions over a snapshot, no clock and no I/O.

/// What placement knows of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// Answers and keeps what it is given.
    pub healthy: bool,
    /// Above its high watermark (and not yet below the low one), or it said so.
    pub full: bool,
    /// Bytes that fit.
    pub free_bytes: u64,
    /// Bytes being written now.
    pub in_flight_bytes: u64,
}

/// The disk with the least work in flight for its free space among those that can take `bytes`; `None` when there is
/// none. `excluded` disks were tried before.
///
/// Weighing the load by free space fills unequal disks at the same time, and an idle one is found at once because the
/// batch itself counts as load.
#[must_use]
pub fn choose(candidates: &[Candidate], bytes: u64, excluded: &[usize]) -> Option<usize> {
    let fits = |candidate: &Candidate| {
        candidate.healthy && !candidate.full && candidate.free_bytes >= bytes && candidate.free_bytes > 0
    };
    let able = candidates.iter().enumerate().filter(|(index, it)| fits(it) && !excluded.contains(index));
    able.min_by(|(_, left), (_, right)| {
        // left.load / left.free against right.load / right.free, without dividing.
        let load = |it: &Candidate| u128::from(it.in_flight_bytes.saturating_add(bytes.max(1)));
        let (left_side, right_side) =
            (load(left) * u128::from(right.free_bytes), load(right) * u128::from(left.free_bytes));
        left_side.cmp(&right_side)
    })
    .map(|(index, _)| index)
}

/// The watermarks with their hysteresis: full from `high` on, until below `low`.
#[must_use]
pub fn is_full(was_full: bool, used_ratio: f64, high: f64, low: f64) -> bool {
    if was_full { used_ratio >= low } else { used_ratio >= high }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const IDLE: Candidate = Candidate { healthy: true, full: false, free_bytes: 1000, in_flight_bytes: 0 };

    #[test]
    fn the_emptier_and_the_idler_disk_wins() {
        let small = Candidate { free_bytes: 900, ..IDLE };
        assert_eq!(choose(&[small, IDLE], 10, &[]), Some(1));
        let busy = Candidate { in_flight_bytes: 100, ..IDLE };
        assert_eq!(choose(&[small, busy], 10, &[]), Some(0));
        assert_eq!(choose(&[small, busy], 10, &[0]), Some(1));
    }

    #[test]
    fn sick_full_and_too_small_disks_are_left_out() {
        let sick = Candidate { healthy: false, ..IDLE };
        let full = Candidate { full: true, ..IDLE };
        assert_eq!(choose(&[sick, full], 10, &[]), None);
        assert_eq!(choose(&[IDLE], 1001, &[]), None);
        assert_eq!(choose(&[], 1, &[]), None);
    }

    #[test]
    fn between_its_watermarks_a_disk_does_not_flap() {
        assert!(!is_full(false, 0.79, 0.8, 0.7));
        assert!(is_full(false, 0.8, 0.8, 0.7));
        assert!(is_full(true, 0.75, 0.8, 0.7));
        assert!(!is_full(true, 0.69, 0.8, 0.7));
    }

    proptest! {
        #[test]
        fn the_chosen_disk_can_take_it_and_none_is_chosen_only_when_none_can(
            disks in prop::collection::vec((any::<bool>(), any::<bool>(), any::<u64>(), any::<u64>()), 0..6),
            bytes: u64, excluded in prop::collection::vec(0usize..6, 0..3),
        ) {
            let candidates: Vec<_> = disks.into_iter().map(|(healthy, full, free_bytes, in_flight_bytes)| {
                Candidate { healthy, full, free_bytes, in_flight_bytes }
            }).collect();
            let able = |(index, it): (usize, &Candidate)| {
                it.healthy && !it.full && it.free_bytes >= bytes.max(1) && !excluded.contains(&index)
            };
            match choose(&candidates, bytes, &excluded) {
                Some(index) => prop_assert!(able((index, &candidates[index]))),
                None => prop_assert!(!candidates.iter().enumerate().any(able)),
            }
        }
    }
}
