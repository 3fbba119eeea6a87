//! Choice of the disk for a batch, from a snapshot and the recent write speed of the disks. Pure:
//! no I/O, and the clock is an argument.
//!
//! Full disks are only chosen for the final flush (`choose_any`), and unhealthy ones never. Some
//! space always stays free for the metadata log (`free_for_batches`).

use std::time::Duration;

use crate::clock::Instant;
use crate::store::DiskCondition;
use uniffle_io::Space;

/// Weight of the fastest disk. Disks slower by [`SLOWER_MIN`] or more have more.
const WEIGHT: f64 = 16.0;
/// Maximum factor by which a disk counts as slower than the fastest.
const SLOWER_MAX: f64 = 64.0;
/// Differences below this factor are noise.
const SLOWER_MIN: f64 = 1.5;
/// Disks faster than this (1 GB/s) count as equal.
const SECONDS_PER_MIB_MIN: f64 = 0.001;

/// Bytes of a disk that batches must leave free, but at most a 64th of the disk.
const LOG_RESERVE_BYTES: u64 = 1 << 20;

/// Returns the free bytes that batches may use. The rest is left to the metadata log: without room
/// for the record of a purge, a full disk would stay full.
pub(in crate::store) fn free_for_batches(space: Space) -> u64 {
    space.free_bytes.saturating_sub(LOG_RESERVE_BYTES.min(space.total_bytes / 64))
}

/// State of a disk that placement uses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DiskCandidate {
    /// Whether the disk takes batches.
    pub condition: DiskCondition,
    /// Free bytes that batches may use.
    pub free_bytes: u64,
    /// Bytes being written now.
    pub in_flight_bytes: u64,
    /// Recent write speed, if known.
    pub pace: Option<WritePace>,
}

impl DiskCandidate {
    fn has_room(&self, bytes: u64) -> bool {
        self.free_bytes >= bytes.max(1)
    }

    fn fits(&self, bytes: u64) -> bool {
        self.condition == DiskCondition::Healthy && self.has_room(bytes)
    }

    /// Returns the weight of the disk's load: [`WEIGHT`] times its slowness relative to `fastest`.
    /// An old measurement counts less.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between two small constants"
    )]
    fn weight(&self, fastest: f64) -> u128 {
        let slower = self.pace.map_or(1.0, |pace| {
            let ratio = pace.seconds_per_mib.max(SECONDS_PER_MIB_MIN) / fastest;
            1.0 + (ratio - 1.0) * pace.belief
        });
        let slower = if slower >= SLOWER_MIN { slower.min(SLOWER_MAX) } else { 1.0 };
        (slower * WEIGHT) as u128
    }
}

/// Returns the disk with the least weighted load per free space among those that have room for
/// `bytes` bytes, or `None`. `excluded` disks were tried before.
///
/// Load is weighted by the recent slowness of a disk, so that a slow disk gets about as much as it
/// can sustain. It is divided by free space, so that unequal disks fill at the same time. The batch
/// itself counts as load, so an idle disk is chosen at once. A measurement loses weight with time,
/// so a slow disk is tried again.
pub fn choose(candidates: &[DiskCandidate], bytes: u64, excluded: &[usize]) -> Option<usize> {
    let able: Vec<(usize, &DiskCandidate)> = candidates
        .iter()
        .enumerate()
        .filter(|(index, it)| it.fits(bytes) && !excluded.contains(index))
        .collect();
    let paces = able.iter().filter_map(|(_, it)| it.pace).map(|pace| pace.seconds_per_mib);
    let fastest = paces.fold(f64::INFINITY, f64::min).max(SECONDS_PER_MIB_MIN);
    let load = |it: &DiskCandidate| {
        let bytes = u128::from(it.in_flight_bytes.saturating_add(bytes.max(1)));
        bytes.saturating_mul(it.weight(fastest))
    };
    able.iter()
        .min_by(|(_, left), (_, right)| {
            // Compares left.load / left.free with right.load / right.free without a division.
            let left_side = load(left).saturating_mul(u128::from(right.free_bytes));
            left_side.cmp(&load(right).saturating_mul(u128::from(left.free_bytes)))
        })
        .map(|(index, _)| *index)
}

/// Returns the disk with the most free bytes of those that have room for `bytes` bytes, also above
/// the watermark.
pub fn choose_any(candidates: &[DiskCandidate], bytes: u64, excluded: &[usize]) -> Option<usize> {
    let works = |it: &DiskCandidate| it.condition <= DiskCondition::Full && it.has_room(bytes);
    let able = candidates.iter().enumerate().filter(|(index, it)| works(it) && !excluded.contains(index));
    able.max_by_key(|(_, it)| it.free_bytes).map(|(index, _)| index)
}

/// Applies the watermarks with hysteresis: full from `high` on, until below `low`.
pub fn is_full(was_full: bool, used_ratio: f64, high: f64, low: f64) -> bool {
    if was_full { used_ratio >= low } else { used_ratio >= high }
}

/// Weight of the latest batch.
const LATEST: f64 = 0.25;
/// Fixed cost of a batch in bytes, so that small batches do not look slow.
const BATCH_BYTES: u64 = 1 << 20;
/// Half-life of the average: a slow disk that gets no batches is tried again after a while.
const HALF_LIFE: Duration = Duration::from_secs(10);

/// Average seconds per MiB, and the remaining weight of that average.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WritePace {
    /// Average seconds per MiB.
    pub seconds_per_mib: f64,
    /// Remaining weight: 1 just after a measurement, and half of that after [`HALF_LIFE`].
    pub belief: f64,
}

/// Average write speed of one disk.
#[derive(Debug, Default)]
pub(super) struct Paces {
    latest: Option<(f64, Instant)>,
}

impl Paces {
    /// Records a batch that took `elapsed` while `in_flight_bytes`, including its own, shared the
    /// disk.
    #[expect(clippy::cast_precision_loss, reason = "an average")]
    pub(in crate::store) fn record(&mut self, in_flight_bytes: u64, elapsed: Duration, now: Instant) {
        let mib = in_flight_bytes.saturating_add(BATCH_BYTES) as f64 / f64::from(1 << 20);
        let sample = elapsed.as_secs_f64() / mib;
        let average = match self.at(now) {
            None => sample,
            Some(before) => {
                let kept = (1.0 - LATEST) * before.belief;
                kept * before.seconds_per_mib + (1.0 - kept) * sample
            }
        };
        self.latest = Some((average, now));
    }

    /// Returns the average at `now`, or `None` before the first batch.
    pub(in crate::store) fn at(&self, now: Instant) -> Option<WritePace> {
        let (seconds_per_mib, measured) = self.latest?;
        let half_lives = now.duration_since(measured).as_secs_f64() / HALF_LIFE.as_secs_f64();
        Some(WritePace { seconds_per_mib, belief: 0.5f64.powf(half_lives) })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const IDLE: DiskCandidate =
        DiskCandidate { condition: DiskCondition::Healthy, free_bytes: 1000, in_flight_bytes: 0, pace: None };

    fn paced(seconds_per_mib: f64, belief: f64) -> DiskCandidate {
        DiskCandidate { pace: Some(WritePace { seconds_per_mib, belief }), ..IDLE }
    }

    #[test]
    fn emptier_and_the_idler_disk_wins() {
        let small = DiskCandidate { free_bytes: 900, ..IDLE };
        assert_eq!(choose(&[small, IDLE], 10, &[]), Some(1));
        let busy = DiskCandidate { in_flight_bytes: 100, ..IDLE };
        assert_eq!(choose(&[small, busy], 10, &[]), Some(0));
        assert_eq!(choose(&[small, busy], 10, &[0]), Some(1));
    }

    #[test]
    fn slow_disk_waits_until_the_fast_one_is_as_busy() {
        let (slow, fast) = (paced(0.1, 1.0), paced(0.01, 1.0));
        let busy = |bytes| DiskCandidate { in_flight_bytes: bytes, ..fast };
        assert_eq!(choose(&[slow, fast], 10, &[]), Some(1));
        assert_eq!(choose(&[slow, busy(80)], 10, &[]), Some(1));
        assert_eq!(choose(&[slow, busy(100)], 10, &[]), Some(0));
        assert_eq!(
            choose(&[slow, IDLE], 10, &[]),
            Some(0),
            "a disk without measurements must not count as faster"
        );
        assert_eq!(
            choose(&[paced(0.1, 0.05), fast], 10, &[]),
            Some(0),
            "an old measurement must lose its weight"
        );
        assert_eq!(
            choose(&[paced(0.012, 1.0), fast], 10, &[]),
            Some(0),
            "a small difference of speed must not decide"
        );
        assert_eq!(choose(&[paced(0.0009, 1.0), paced(0.0001, 1.0)], 10, &[]), Some(0));
    }

    #[test]
    fn failed_full_and_small_disks_are_excluded() {
        let sick = DiskCandidate { condition: DiskCondition::Broken, ..IDLE };
        let full = DiskCandidate { condition: DiskCondition::Full, ..IDLE };
        assert_eq!(choose(&[sick, full], 10, &[]), None);
        assert_eq!(choose(&[IDLE], 1001, &[]), None);
        assert_eq!(choose(&[], 1, &[]), None);
    }

    #[test]
    fn last_batch_is_tried_on_every_disk_with_room() {
        let full = |free_bytes| DiskCandidate { condition: DiskCondition::Full, free_bytes, ..IDLE };
        let disks = [full(1), full(5), DiskCandidate { condition: DiskCondition::Broken, ..IDLE }];
        assert_eq!(choose_any(&disks, 1, &[]), Some(1));
        assert_eq!(choose_any(&disks, 1, &[1]), Some(0));
        assert_eq!(choose_any(&disks, 2, &[1]), None);
        assert_eq!(choose_any(&disks, 1, &[0, 1]), None);
    }

    #[test]
    fn disk_state_is_stable_between_watermarks() {
        assert!(!is_full(false, 0.79, 0.8, 0.7));
        assert!(is_full(false, 0.8, 0.8, 0.7));
        assert!(is_full(true, 0.75, 0.8, 0.7));
        assert!(!is_full(true, 0.69, 0.8, 0.7));
    }

    /// A disk in the simulation below. It writes its queue in order.
    struct Disk {
        mib_per_second: f64,
        paces: Paces,
        /// Time at which each queued write ends, with its bytes.
        queue: Vec<(Instant, u64)>,
        batches: u32,
    }

    /// Simulates `writers` that write one batch after the other for `seconds`. Returns the number
    /// of batches per disk.
    fn simulate(disks: &mut [Disk], writers: usize, batch: u64, start: Instant, seconds: u64) -> Vec<u32> {
        let mut free_at = vec![start; writers];
        disks.iter_mut().for_each(|disk| disk.batches = 0);
        loop {
            let writer = (0..writers).min_by_key(|writer| free_at[*writer]).unwrap();
            let now = free_at[writer];
            if now >= start + Duration::from_secs(seconds) {
                return disks.iter().map(|disk| disk.batches).collect();
            }
            let mut candidates = Vec::new();
            for disk in disks.iter_mut() {
                disk.queue.retain(|(end, _)| *end > now);
                let in_flight_bytes = disk.queue.iter().map(|(_, bytes)| bytes).sum();
                let pace = disk.paces.at(now);
                candidates.push(DiskCandidate { free_bytes: 1 << 40, in_flight_bytes, pace, ..IDLE });
            }
            let chosen = choose(&candidates, batch, &[]).unwrap();
            let disk = &mut disks[chosen];
            let begin = disk.queue.last().map_or(now, |(end, _)| *end);
            let mib = batch as f64 / f64::from(1 << 20);
            let end = begin + Duration::from_secs_f64(mib / disk.mib_per_second);
            let in_flight = candidates[chosen].in_flight_bytes + batch;
            disk.queue.push((end, batch));
            disk.batches += 1;
            // Recorded at the beginning, a simplification that only updates the average one batch
            // earlier.
            disk.paces.record(in_flight, end - now, now);
            free_at[writer] = end;
        }
    }

    fn disk(mib_per_second: f64) -> Disk {
        Disk { mib_per_second, paces: Paces::default(), queue: Vec::new(), batches: 0 }
    }

    proptest! {
        /// The slow disk gets at most one and a half times its relative speed and is tried
        /// repeatedly. It gets half of the batches once it is as fast as the other.
        #[test]
        fn slower_disk_gets_a_smaller_share_until_it_recovers(
            slower in 4f64..40.0, writers in 2usize..20, batch_mib in 4u64..64, first: bool,
        ) {
            let (fast, slow) = (usize::from(first), usize::from(!first));
            let mut disks = [disk(500.0), disk(500.0)];
            disks[slow].mib_per_second = 500.0 / slower;
            let start = Instant::now();
            let batches = simulate(&mut disks, writers, batch_mib << 20, start, 120);
            let share = f64::from(batches[slow]) / f64::from(batches[fast] + batches[slow]);
            prop_assert!(share <= 1.5 / slower, "{batches:?}");
            prop_assert!(batches[slow] >= 2, "{batches:?}");

            disks[slow].mib_per_second = 500.0;
            let settled = start + Duration::from_secs(240);
            simulate(&mut disks, writers, batch_mib << 20, start + Duration::from_secs(120), 120);
            let batches = simulate(&mut disks, writers, batch_mib << 20, settled, 60);
            let share = f64::from(batches[slow]) / f64::from(batches[fast] + batches[slow]);
            prop_assert!((0.35..0.65).contains(&share), "{batches:?}");
        }

        #[test]
        fn disk_is_chosen_exactly_if_one_is_usable(
            disks in prop::collection::vec(
                (0..3usize, any::<u64>(), any::<u64>(), any::<Option<f64>>(), 0f64..=1.0), 0..6),
            bytes: u64, excluded in prop::collection::vec(0usize..6, 0..3),
        ) {
            let candidates: Vec<_> = disks.into_iter().map(|(condition, free_bytes, in_flight_bytes, pace, belief)| {
                let condition = [DiskCondition::Healthy, DiskCondition::Full, DiskCondition::Broken][condition];
                let pace = pace.map(|seconds_per_mib| WritePace { seconds_per_mib, belief });
                DiskCandidate { condition, free_bytes, in_flight_bytes, pace }
            }).collect();
            let able = |(index, it): (usize, &DiskCandidate)| {
                it.condition == DiskCondition::Healthy && it.free_bytes >= bytes.max(1) && !excluded.contains(&index)
            };
            match choose(&candidates, bytes, &excluded) {
                Some(index) => prop_assert!(able((index, &candidates[index]))),
                None => prop_assert!(!candidates.iter().enumerate().any(able)),
            }
        }
    }

    #[test]
    fn recent_samples_count_most() {
        let mut paces = Paces::default();
        let mut now = Instant::now();
        assert_eq!(paces.at(now), None);
        paces.record(15 << 20, Duration::from_millis(160), now);
        assert_eq!(paces.at(now), Some(WritePace { seconds_per_mib: 0.01, belief: 1.0 }));
        paces.record(15 << 20, Duration::from_millis(1600), now);
        let slower = paces.at(now).unwrap().seconds_per_mib;
        assert!((0.0324..0.0326).contains(&slower), "{slower}");
        now += HALF_LIFE;
        assert!((0.499..0.501).contains(&paces.at(now).unwrap().belief));
        now += 10 * HALF_LIFE;
        paces.record(0, Duration::from_millis(10), now);
        let fresh = paces.at(now).unwrap().seconds_per_mib;
        assert!((0.0099..0.0101).contains(&fresh), "an old measurement has too much weight: {fresh}");
    }
}
