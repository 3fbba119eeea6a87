//! Recent write speed of a disk: a decaying average over batches. Pure: the clock is an argument.

use std::time::Duration;

use crate::clock::Instant;

/// Weight of the latest batch.
const LATEST: f64 = 0.25;
/// Fixed cost of a batch in bytes, so that small batches do not look slow.
const BATCH_BYTES: u64 = 1 << 20;
/// Half-life of the average: a slow disk that gets no batches is tried again after a while.
const HALF_LIFE: Duration = Duration::from_secs(10);

/// Average seconds per MiB, and the remaining weight of that average.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
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
    pub(super) fn record(&mut self, in_flight_bytes: u64, elapsed: Duration, now: Instant) {
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
    pub(super) fn at(&self, now: Instant) -> Option<Pace> {
        let (seconds_per_mib, measured) = self.latest?;
        let half_lives = now.duration_since(measured).as_secs_f64() / HALF_LIFE.as_secs_f64();
        Some(Pace { seconds_per_mib, belief: 0.5f64.powf(half_lives) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recent_samples_count_most() {
        let mut paces = Paces::default();
        let mut now = Instant::now();
        assert_eq!(paces.at(now), None);
        paces.record(15 << 20, Duration::from_millis(160), now);
        assert_eq!(paces.at(now), Some(Pace { seconds_per_mib: 0.01, belief: 1.0 }));
        paces.record(15 << 20, Duration::from_millis(1600), now);
        let slower = paces.at(now).unwrap().seconds_per_mib;
        assert!((0.0324..0.0326).contains(&slower), "{slower}");
        now += HALF_LIFE;
        assert!((0.499..0.501).contains(&paces.at(now).unwrap().belief));
        now += 10 * HALF_LIFE;
        paces.record(0, Duration::from_millis(10), now);
        let fresh = paces.at(now).unwrap().seconds_per_mib;
        assert!((0.0099..0.0101).contains(&fresh), "what was long ago hardly counts: {fresh}");
    }
}
