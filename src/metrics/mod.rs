//! Small constructors that create a metric and register it in one step.
//!
//! Each module holds a struct of its own metrics, built from the [`Registry`] it is given; there is no global registry,
//! so that two workers can live in one process. A failure (bad or duplicate name) is a mistake in the program and ends
//! the start-up. Names follow docs/protocol.md §10 where a counterpart exists.

mod renamed;
mod transit;

use prometheus::core::Collector;
use prometheus::process_collector::ProcessCollector;
use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry, Result,
};

pub use renamed::{also, also_alone, also_in_ms, also_in_seconds};
pub use transit::TransitTimes;

/// All values of a registry at one moment, by name.
#[derive(Debug)]
pub struct Values(std::collections::HashMap<String, f64>);

impl Values {
    /// Gathers them; of metrics with labels the sum.
    #[must_use]
    pub fn gather(registry: &Registry) -> Self {
        let of = |metric: &prometheus::proto::Metric| {
            metric.get_counter().get_value() + metric.get_gauge().get_value()
        };
        let families = registry.gather();
        Self(families.iter().map(|it| (it.name().to_owned(), it.get_metric().iter().map(of).sum())).collect())
    }

    /// The counter or gauge `name`; 0 when there is none.
    #[must_use]
    pub fn value(&self, name: &str) -> f64 {
        self.0.get(name).copied().unwrap_or(0.0)
    }

    /// The same as a whole number.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a count; the cast saturates"
    )]
    pub fn whole(&self, name: &str) -> u64 {
        self.value(name) as u64
    }
}

fn registered<M: Collector + Clone + 'static>(registry: &Registry, metric: M) -> Result<M> {
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}

/// A counter.
///
/// # Errors
/// A name that is malformed or registered already; the same holds for every function here.
pub fn counter(registry: &Registry, name: &str, help: &str) -> Result<IntCounter> {
    registered(registry, IntCounter::new(name, help)?)
}

/// Counters told apart by labels.
///
/// # Errors
/// See [`counter`].
pub fn counter_vec(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> Result<IntCounterVec> {
    registered(registry, IntCounterVec::new(Opts::new(name, help), labels)?)
}

/// A gauge of whole numbers.
///
/// # Errors
/// See [`counter`].
pub fn gauge(registry: &Registry, name: &str, help: &str) -> Result<IntGauge> {
    registered(registry, IntGauge::new(name, help)?)
}

/// Gauges of whole numbers told apart by labels.
///
/// # Errors
/// See [`counter`].
pub fn gauge_vec(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> Result<IntGaugeVec> {
    registered(registry, IntGaugeVec::new(Opts::new(name, help), labels)?)
}

/// A gauge of ratios.
///
/// # Errors
/// See [`counter`].
pub fn ratio_gauge(registry: &Registry, name: &str, help: &str) -> Result<Gauge> {
    registered(registry, Gauge::new(name, help)?)
}

/// Gauges of ratios told apart by labels.
///
/// # Errors
/// See [`counter`].
pub fn ratio_gauge_vec(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> Result<GaugeVec> {
    registered(registry, GaugeVec::new(Opts::new(name, help), labels)?)
}

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

/// A histogram with upper bounds `buckets`, ascending.
///
/// # Errors
/// See [`counter`]; also buckets that do not ascend.
pub fn histogram(registry: &Registry, name: &str, help: &str, buckets: &[f64]) -> Result<Histogram> {
    let options = HistogramOpts::new(name, help).buckets(buckets.to_vec());
    registered(registry, Histogram::with_opts(options)?)
}

/// Histograms told apart by labels, with upper bounds `buckets`, ascending.
///
/// # Errors
/// See [`histogram`].
pub fn histogram_vec(
    registry: &Registry,
    name: &str,
    help: &str,
    labels: &[&str],
    buckets: &[f64],
) -> Result<HistogramVec> {
    let options = HistogramOpts::new(name, help).buckets(buckets.to_vec());
    registered(registry, HistogramVec::new(options, labels)?)
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

/// A registry for one worker, with the standard `process_*` metrics: CPU seconds, resident memory, descriptors,
/// threads.
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
    fn a_name_can_be_registered_once_per_registry() {
        let registry = Registry::new();
        counter(&registry, "a", "help").unwrap().inc_by(3);
        assert!(gauge(&registry, "a", "help").is_err());
        assert!(counter(&registry, "not a name", "help").is_err());
        assert!(counter(&Registry::new(), "a", "help").is_ok());
        let families = registry.gather();
        assert_eq!(families.len(), 1);
        assert!((families[0].get_metric()[0].get_counter().get_value() - 3.0).abs() < f64::EPSILON);
    }

    #[test]
    fn the_shared_buckets_ascend() {
        let registry = Registry::new();
        histogram(&registry, "seconds", "help", SECONDS_BUCKETS).unwrap();
        histogram_vec(&registry, "bytes", "help", &["kind"], BYTES_BUCKETS).unwrap();
        assert!(histogram(&registry, "bad", "help", &[2.0, 1.0]).is_err());
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
