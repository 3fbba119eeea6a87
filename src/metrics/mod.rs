//! How metrics are declared ([`table!`]), told under the names of other servers, and counted.
//!
//! Names are the Java server's and riffle's where a counterpart exists; `docs/metrics.md` lists all of them.

mod fill;
mod renamed;
mod table;
mod transit;

use prometheus::process_collector::ProcessCollector;
use prometheus::{IntGauge, Registry, Result};

pub use fill::{Description, Fill};
pub use renamed::{IN_MS, IN_SECONDS, View};
pub(crate) use table::table;
pub use table::{Family, Metric, Row};
pub use transit::{TRANSIT_MS_BUCKETS, TransitTimes};

/// What has been added to a gauge; taken back when dropped.
#[derive(Debug)]
pub struct GaugeGuard {
    gauge: IntGauge,
    amount: i64,
}

impl GaugeGuard {
    /// One more on `gauge`.
    #[must_use]
    pub fn one(gauge: &IntGauge) -> Self {
        Self::of(gauge, 1)
    }

    /// `amount` more on `gauge`.
    #[must_use]
    pub fn of(gauge: &IntGauge, amount: u64) -> Self {
        let amount = clamped(amount);
        gauge.add(amount);
        Self { gauge: gauge.clone(), amount }
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.gauge.sub(self.amount);
    }
}

/// A count as the signed number that gauges and the protocol have; one that does not fit is the largest.
pub fn clamped(count: impl TryInto<i64>) -> i64 {
    count.try_into().unwrap_or(i64::MAX)
}

/// `N` upper bounds of buckets, from `first` up, each `factor` times the one before.
pub const fn exponential<const N: usize>(first: f64, factor: f64) -> [f64; N] {
    let mut bounds = [first; N];
    let mut at = 1;
    while at < N {
        bounds[at] = bounds[at - 1] * factor;
        at += 1;
    }
    bounds
}

/// Buckets for durations in seconds: 100 µs to 30 s.
pub const SECONDS_BUCKETS: &[f64] =
    &[0.0001, 0.000_3, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0];

/// Buckets for sizes in bytes: 4 KiB to 256 MiB, by fours.
pub const BYTES_BUCKETS: &[f64] = &[
    4096.0,
    16_384.0,
    65_536.0,
    262_144.0,
    1_048_576.0,
    4_194_304.0,
    16_777_216.0,
    67_108_864.0,
    268_435_456.0,
];

/// A registry for one worker, with the standard `process_*` metrics: CPU seconds, resident memory, descriptors, threads.
///
/// # Errors
/// Never on a fresh registry; kept so that the caller has one kind of start-up error.
pub fn registry() -> Result<Registry> {
    let registry = Registry::new();
    registry.register(Box::new(ProcessCollector::for_self()))?;
    Ok(registry)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_ascend() {
        let steps: [f64; 3] = exponential(0.5, 4.0);
        assert_eq!(steps, [0.5, 2.0, 8.0]);
        assert!(SECONDS_BUCKETS.is_sorted() && BYTES_BUCKETS.is_sorted() && TRANSIT_MS_BUCKETS.is_sorted());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_process_is_measured() {
        let families = registry().unwrap().gather();
        let resident =
            families.iter().find(|family| family.name() == "process_resident_memory_bytes").unwrap();
        assert!(resident.get_metric()[0].get_gauge().get_value() > 0.0);
    }
}
