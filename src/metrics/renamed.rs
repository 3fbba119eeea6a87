//! One metric under several names, for dashboards of other servers. What is measured is counted once; a further name
//! costs something only when metrics are gathered.

use std::collections::HashMap;

use prometheus::core::{Collector, Desc};
use prometheus::proto::{Bucket, Metric, MetricFamily, MetricType};
use prometheus::{Histogram, Registry, Result};

/// The values of `metric` under another server's name as well.
///
/// # Errors
/// See [`super::counter`].
pub fn also<M: Collector + Clone + 'static>(registry: &Registry, metric: &M, name: &str) -> Result<()> {
    let desc = metric
        .desc()
        .first()
        .map_or((String::new(), Vec::new()), |desc| (desc.help.clone(), desc.variable_labels.clone()));
    let desc = Desc::new(name.to_owned(), desc.0, desc.1, HashMap::new())?;
    registry.register(Box::new(Renamed { metric: metric.clone(), desc }))
}

/// A histogram of seconds as one of milliseconds, without the labels that it may have.
///
/// # Errors
/// See [`super::counter`].
pub fn also_in_ms(registry: &Registry, seconds: &Histogram, name: &str, help: &str) -> Result<()> {
    also_scaled(registry, seconds, 1e3, name, help)
}

/// A histogram of milliseconds as one of seconds, without the labels that it may have.
///
/// # Errors
/// See [`super::counter`].
pub fn also_in_seconds(registry: &Registry, ms: &Histogram, name: &str, help: &str) -> Result<()> {
    also_scaled(registry, ms, 1e-3, name, help)
}

/// A histogram under another name, without the labels that it may have.
///
/// # Errors
/// See [`super::counter`].
pub fn also_alone(registry: &Registry, histogram: &Histogram, name: &str, help: &str) -> Result<()> {
    also_scaled(registry, histogram, 1.0, name, help)
}

fn also_scaled(
    registry: &Registry,
    histogram: &Histogram,
    factor: f64,
    name: &str,
    help: &str,
) -> Result<()> {
    let desc = Desc::new(name.to_owned(), help.to_owned(), Vec::new(), HashMap::new())?;
    registry.register(Box::new(Scaled { histogram: histogram.clone(), factor, desc }))
}

/// A metric that is exported under another name.
struct Renamed<M> {
    metric: M,
    desc: Desc,
}

impl<M: Collector> Collector for Renamed<M> {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.desc]
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let mut families = self.metric.collect();
        for family in &mut families {
            family.set_name(self.desc.fq_name.clone());
        }
        families
    }
}

/// A histogram that is exported in another unit.
struct Scaled {
    histogram: Histogram,
    factor: f64,
    desc: Desc,
}

impl Collector for Scaled {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.desc]
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let collected = self.histogram.collect();
        let metrics = collected.iter().flat_map(MetricFamily::get_metric).map(|metric| {
            let from = metric.get_histogram();
            let buckets = from.get_bucket().iter().map(|bucket| {
                let mut scaled = Bucket::default();
                scaled.set_cumulative_count(bucket.cumulative_count());
                scaled.set_upper_bound(rounded(bucket.upper_bound() * self.factor));
                scaled
            });
            let mut histogram = prometheus::proto::Histogram::default();
            histogram.set_sample_count(from.get_sample_count());
            histogram.set_sample_sum(from.get_sample_sum() * self.factor);
            histogram.set_bucket(buckets.collect());
            let mut metric = Metric::default();
            metric.set_histogram(histogram);
            metric
        });
        let mut family = MetricFamily::default();
        family.set_name(self.desc.fq_name.clone());
        family.set_help(self.desc.help.clone());
        family.set_field_type(MetricType::HISTOGRAM);
        family.set_metric(metrics.collect());
        vec![family]
    }
}

/// Bounds are labels: 0.3 × 1,000 is to be 300, not 299.99999999999994.
fn rounded(bound: f64) -> f64 {
    (bound * 1e9).round() / 1e9
}

#[cfg(test)]
mod tests {
    use super::super::{counter_vec, histogram_vec};
    use super::*;

    #[test]
    fn one_metric_may_have_two_names() {
        let registry = Registry::new();
        let metric = counter_vec(&registry, "ours", "help", &["path"]).unwrap();
        also(&registry, &metric, "theirs").unwrap();
        assert!(also(&registry, &metric, "ours").is_err());
        metric.with_label_values(&["/a"]).inc();
        let families = registry.gather();
        let told: Vec<_> = families
            .iter()
            .map(|family| (family.name(), family.get_metric()[0].get_counter().get_value()))
            .collect();
        assert_eq!(told, [("ours", 1.0), ("theirs", 1.0)]);
    }

    #[test]
    fn a_histogram_may_be_told_in_another_unit() {
        let registry = Registry::new();
        let all = histogram_vec(&registry, "ours_seconds", "help", &["path"], &[0.001, 0.3]).unwrap();
        let of_a = all.with_label_values(&["/a"]);
        also_in_ms(&registry, &of_a, "theirs_ms", "help").unwrap();
        assert!(also_in_ms(&registry, &of_a, "ours_seconds", "help").is_err());
        of_a.observe(0.25);
        all.with_label_values(&["/b"]).observe(5.0);
        let text = prometheus::TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
        let theirs: Vec<_> = text.lines().filter(|line| line.starts_with("theirs")).collect();
        let expected = [
            "theirs_ms_bucket{le=\"1\"} 0",
            "theirs_ms_bucket{le=\"300\"} 1",
            "theirs_ms_bucket{le=\"+Inf\"} 1",
            "theirs_ms_sum 250",
            "theirs_ms_count 1",
        ];
        assert_eq!(theirs, expected);
    }
}
