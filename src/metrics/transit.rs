//! How long requests were on their way, as the Java server tells it (docs/protocol.md §10.3): the time at which one is
//! here less the `timestamp` that its client has put into it.
//!
//! Both are wall clocks of two machines. What cannot be a time on the way is dropped: no timestamp, one that is ahead,
//! and one that lies further back than any request is waited for.

use std::time::{SystemTime, UNIX_EPOCH};

use prometheus::Histogram;

use super::Metric;

/// Java's clients give up a call after 60 s and servers after minutes; more than this is a clock that is wrong.
const MAX_MS: i64 = 3_600_000;

/// Upper bounds in milliseconds, as other latencies of the Java server.
pub const TRANSIT_MS_BUCKETS: &[f64] =
    &[0.5, 1.25, 3.0, 8.0, 20.0, 50.0, 125.0, 300.0, 800.0, 2000.0, 5000.0, 12_500.0, 30_000.0, 75_000.0];

/// Times on the way of one kind of request, in milliseconds.
#[derive(Debug, Clone)]
pub struct TransitTimes(Histogram);

impl Metric for TransitTimes {
    type Family = Histogram;

    fn of(family: Histogram) -> Self {
        Self(family)
    }
}

impl TransitTimes {
    /// A request is here that was sent at `sent_ms`, milliseconds since 1970.
    pub fn arrived(&self, sent_ms: i64) {
        // Many clients and all tests say nothing: the clock is not read for them.
        if sent_ms <= 0 {
            return;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now_ms = super::clamped(now.as_millis());
        if let Some(ms) = time_on_the_way(now_ms, sent_ms) {
            self.0.observe(f64::from(ms));
        }
    }

    /// The times.
    pub fn histogram(&self) -> &Histogram {
        &self.0
    }
}

/// Milliseconds between two readings of clocks, if that can be one.
fn time_on_the_way(now_ms: i64, sent_ms: i64) -> Option<i32> {
    let ms = now_ms.checked_sub(sent_ms).filter(|ms| sent_ms > 0 && (0..=MAX_MS).contains(ms))?;
    i32::try_from(ms).ok()
}

#[cfg(test)]
mod tests {
    use prometheus::HistogramOpts;

    use super::*;

    #[test]
    fn a_step_of_a_clock_is_no_time_on_the_way() {
        let now = 1_763_715_000_000;
        assert_eq!(time_on_the_way(now, now - 250), Some(250));
        assert_eq!(time_on_the_way(now, now), Some(0));
        assert_eq!(time_on_the_way(now, now - MAX_MS), Some(3_600_000));
        for nonsense in [now + 1, now - MAX_MS - 1, 1, 0, -1, i64::MIN, i64::MAX] {
            assert_eq!(time_on_the_way(now, nonsense), None, "{nonsense}");
        }
    }

    #[test]
    fn clocks_that_are_wrong_leave_no_trace() {
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
