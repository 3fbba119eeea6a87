//! Declaration of metrics ([`table!`]), their aliases for dashboards of other servers, and counting
//! helpers.
//!
//! Names follow Uniffle's Java server and riffle (a Uniffle server in Rust) where a counterpart
//! exists. `docs/metrics.md` lists all metrics.

mod aliases;
mod table;
mod transit;

use prometheus::process_collector::ProcessCollector;
use prometheus::{IntGauge, Registry, Result};

pub use table::{Description, Family, Metric, MetricRow, Placeholders, fill_placeholders, table};
pub use transit::{TRANSIT_MS_BUCKETS, TransitTimes};

/// An amount added to a gauge, which is subtracted again when this is dropped.
#[derive(Debug)]
pub struct GaugeGuard {
    gauge: IntGauge,
    amount: i64,
}

impl GaugeGuard {
    /// Adds 1 to `gauge`.
    #[must_use]
    pub fn inc(gauge: &IntGauge) -> Self {
        Self::add(gauge, 1)
    }

    /// Adds `amount` to `gauge`.
    #[must_use]
    pub fn add(gauge: &IntGauge, amount: u64) -> Self {
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

/// Converts a count to the signed type of gauges and the protocol. Saturates at the maximum.
pub fn clamped(count: impl TryInto<i64>) -> i64 {
    count.try_into().unwrap_or(i64::MAX)
}

/// Returns `N` bucket bounds. The first is `first`, and each is `factor` times the previous one.
pub const fn exponential_buckets<const N: usize>(first: f64, factor: f64) -> [f64; N] {
    let mut bounds = [first; N];
    let mut index = 1;
    while index < N {
        bounds[index] = bounds[index - 1] * factor;
        index += 1;
    }
    bounds
}

/// Buckets for durations in seconds: 100 µs to 30 s.
pub const SECONDS_BUCKETS: &[f64] =
    &[0.0001, 0.000_3, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0];

/// Buckets for sizes in bytes: 4 KiB to 256 MiB, in steps of factor 4.
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

/// Creates the registry of a worker, with the standard `process_*` metrics.
///
/// # Errors
/// Cannot fail on a fresh registry. The result only has the type of other start-up errors.
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
        let steps: [f64; 3] = exponential_buckets(0.5, 4.0);
        assert_eq!(steps, [0.5, 2.0, 8.0]);
        assert!(SECONDS_BUCKETS.is_sorted() && BYTES_BUCKETS.is_sorted() && TRANSIT_MS_BUCKETS.is_sorted());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn process_metrics_are_exported() {
        let families = registry().unwrap().gather();
        let resident =
            families.iter().find(|family| family.name() == "process_resident_memory_bytes").unwrap();
        assert!(resident.get_metric()[0].get_gauge().get_value() > 0.0);
    }
}
