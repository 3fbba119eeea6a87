//! What is worth to be rewritten: pure decisions over a snapshot, no clock and no I/O.

use std::time::Duration;

/// Reads that a partition costs on a disk before it is worth it: fewer save too little of what the copying costs.
pub(super) const RUNS_MIN: u64 = 4;

/// Numbers of the configuration.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    /// What is read at a time has fewer bytes than this.
    pub(super) below_bytes: u64,
    /// So long nothing has been written.
    pub(super) after: Duration,
}

/// How what a shuffle has on a disk lies there, without what was put in order before.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Scattered {
    pub(super) partitions: u64,
    /// Pieces that are read at a time: extents of a partition that stand one behind the other are one.
    pub(super) runs: u64,
    /// What it occupies.
    pub(super) bytes: u64,
    /// Extents that cannot be copied: they are too long, or have too many blocks. The logs that have them would stay.
    pub(super) oversized: u64,
}

/// What is decided on.
#[derive(Debug, Clone, Copy)]
pub(super) struct View {
    pub(super) scattered: Scattered,
    /// Since when nothing was written.
    pub(super) idle: Duration,
    /// Nobody reads from the disk or writes to it.
    pub(super) is_disk_idle: bool,
    /// What fits on the disk before it is at its low watermark.
    pub(super) room_bytes: u64,
}

/// Whether a shuffle may be looked at: that costs time for each of its extents.
pub(super) fn is_worth_a_look(idle: Duration, rules: &Rules) -> bool {
    rules.below_bytes > 0 && idle >= rules.after
}

/// Whether what a shuffle has on a disk is to be rewritten now.
pub(super) fn is_worth_it(view: &View, rules: &Rules) -> bool {
    let Scattered { partitions, runs, bytes, oversized } = view.scattered;
    let is_idle = is_worth_a_look(view.idle, rules) && view.is_disk_idle;
    let are_many = partitions > 0 && runs >= partitions.saturating_mul(RUNS_MIN);
    let are_small = bytes < runs.saturating_mul(rules.below_bytes);
    let has_room = bytes <= view.room_bytes;
    is_idle && are_many && are_small && has_room && oversized == 0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RULES: Rules = Rules { below_bytes: 1000, after: Duration::from_secs(30) };

    const WORTH: View = View {
        scattered: Scattered { partitions: 10, runs: 40, bytes: 39_999, oversized: 0 },
        idle: Duration::from_secs(30),
        is_disk_idle: true,
        room_bytes: 39_999,
    };

    #[test]
    fn small_extents_on_an_idle_disk_are_rewritten() {
        assert!(is_worth_it(&WORTH, &RULES));
        let scattered = WORTH.scattered;
        for not in [
            View { idle: Duration::from_secs(29), ..WORTH },
            View { is_disk_idle: false, ..WORTH },
            View { room_bytes: 39_998, ..WORTH },
            View { scattered: Scattered { runs: 39, ..scattered }, ..WORTH },
            View { scattered: Scattered { bytes: 40_000, ..scattered }, ..WORTH },
            View { scattered: Scattered { oversized: 1, ..scattered }, ..WORTH },
            View { scattered: Scattered::default(), ..WORTH },
        ] {
            assert!(!is_worth_it(&not, &RULES), "{not:?}");
        }
        assert!(!is_worth_it(&WORTH, &Rules { below_bytes: 0, ..RULES }), "it is off");
    }

    proptest! {
        #[test]
        fn ordered_extents_stay(partitions in 0u64..1 << 40, bytes: u64) {
            let scattered = Scattered { partitions, runs: partitions, bytes, oversized: 0 };
            let view = View { scattered, room_bytes: u64::MAX, ..WORTH };
            prop_assert!(!is_worth_it(&view, &RULES));
        }
    }
}
