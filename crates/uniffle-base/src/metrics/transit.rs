//! Transport time of requests, as the Java server reports it (docs/protocol.md §10.3): the time of
//! arrival minus the `timestamp` that the client put into the request.
//!
//! The two clocks belong to different machines. Implausible values are dropped: no timestamp, a
//! timestamp in the future, or one older than any client waits for an answer.

use std::time::{SystemTime, UNIX_EPOCH};

use prometheus::Histogram;

use super::Metric;

/// Java clients time out after 60 s and servers after minutes. A longer time means a wrong clock.
const MAX_MS: i64 = 3_600_000;

/// Bucket bounds in milliseconds, as for other latencies of the Java server.
pub const TRANSIT_MS_BUCKETS: &[f64] =
    &[0.5, 1.25, 3.0, 8.0, 20.0, 50.0, 125.0, 300.0, 800.0, 2000.0, 5000.0, 12_500.0, 30_000.0, 75_000.0];

/// Transport times of one kind of request, in milliseconds.
#[derive(Debug, Clone)]
pub struct TransitTimes(Histogram);

impl Metric for TransitTimes {
    type Family = Histogram;

    fn of(family: Histogram) -> Self {
        Self(family)
    }
}

impl TransitTimes {
    /// Records the arrival of a request that was sent at `sent_ms`, in milliseconds since 1970.
    pub fn arrived(&self, sent_ms: i64) {
        // Many clients and most tests send no timestamp. The clock is not read for those.
        if sent_ms <= 0 {
            return;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now_ms = super::clamped(now.as_millis());
        if let Some(ms) = transit_ms(now_ms, sent_ms) {
            self.0.observe(f64::from(ms));
        }
    }

    /// Returns the histogram of the times.
    pub fn histogram(&self) -> &Histogram {
        &self.0
    }
}

/// Returns the difference of two clock readings in milliseconds, or `None` if it is implausible.
fn transit_ms(now_ms: i64, sent_ms: i64) -> Option<i32> {
    let ms = now_ms.checked_sub(sent_ms).filter(|ms| sent_ms > 0 && (0..=MAX_MS).contains(ms))?;
    i32::try_from(ms).ok()
}

#[cfg(test)]
mod tests {
    use prometheus::HistogramOpts;

    use super::*;

    #[test]
    fn clock_step_is_not_transport_time() {
        let now = 1_763_715_000_000;
        assert_eq!(transit_ms(now, now - 250), Some(250));
        assert_eq!(transit_ms(now, now), Some(0));
        assert_eq!(transit_ms(now, now - MAX_MS), Some(3_600_000));
        for nonsense in [now + 1, now - MAX_MS - 1, 1, 0, -1, i64::MIN, i64::MAX] {
            assert_eq!(transit_ms(now, nonsense), None, "{nonsense}");
        }
    }

    #[test]
    fn wrong_clocks_are_ignored() {
        let times = TransitTimes(Histogram::with_opts(HistogramOpts::new("x", "help")).unwrap());
        for nonsense in [i64::MIN, -1, 0, 1, i64::MAX] {
            times.arrived(nonsense);
        }
        assert_eq!(times.histogram().get_sample_count(), 0);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        times.arrived(i64::try_from(now.as_millis()).unwrap() - 70);
        assert_eq!(times.histogram().get_sample_count(), 1);
        assert!(times.histogram().get_sample_sum() >= 70.0);
    }
}
