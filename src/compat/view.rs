//! Exports a histogram under another name and in another unit.

use std::collections::HashMap;

use prometheus::core::{Collector, Desc};
use prometheus::proto::{Bucket, Metric, MetricFamily, MetricType};
use prometheus::{Histogram, Registry, Result};

use crate::metrics::{Description, Placeholders, fill_placeholders};

/// Factor of a [`View`] that converts seconds to milliseconds.
pub(crate) const IN_MS: f64 = 1e3;

/// Factor of a [`View`] that converts milliseconds to seconds.
pub(crate) const IN_SECONDS: f64 = 1e-3;

/// A histogram under another name and in another unit. The source may be one series of a labelled
/// histogram, which is exported without its label.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View {
    name: &'static str,
    help: &'static str,
    factor: f64,
}

impl View {
    /// Creates a view. `name` and `help` may contain placeholders. Values are multiplied by
    /// `factor`.
    pub(crate) const fn new(name: &'static str, help: &'static str, factor: f64) -> Self {
        Self { name, help, factor }
    }

    /// Exports `histogram` under this name. `fill` replaces the placeholders of name and help.
    ///
    /// # Errors
    /// If the name is malformed or taken.
    pub(crate) fn register(
        &self,
        registry: &Registry,
        histogram: &Histogram,
        fill: Placeholders<'_>,
    ) -> Result<()> {
        let (name, help) = (fill_placeholders(self.name, fill), fill_placeholders(self.help, fill));
        let desc = Desc::new(name, help, Vec::new(), HashMap::new())?;
        registry.register(Box::new(ScaledHistogram {
            histogram: histogram.clone(),
            factor: self.factor,
            desc,
        }))
    }

    /// Returns its entry for docs/metrics.md. `module` is the one that registers it.
    pub(crate) fn describe(&self, module: &'static str, fill: Placeholders<'_>) -> Description {
        let (name, help) = (fill_placeholders(self.name, fill), fill_placeholders(self.help, fill));
        Description { name, kind: "histogram", labels: &[], help, module }
    }
}

/// A histogram exported in another unit.
struct ScaledHistogram {
    histogram: Histogram,
    factor: f64,
    desc: Desc,
}

impl Collector for ScaledHistogram {
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
                // Rounded, because the bound becomes a label: 300 instead of 299.99999999999994.
                let bound = bucket.upper_bound() * self.factor;
                scaled.set_upper_bound((bound * 1e9).round() / 1e9);
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

#[cfg(test)]
mod tests {
    use prometheus::{HistogramOpts, HistogramVec};

    use super::*;

    #[test]
    fn histogram_may_be_exported_in_another_unit() {
        let registry = Registry::new();
        let options = HistogramOpts::new("ours_seconds", "help").buckets(vec![0.001, 0.3]);
        let all = HistogramVec::new(options, &["path"]).unwrap();
        registry.register(Box::new(all.clone())).unwrap();
        let of_a = all.with_label_values(&["/a"]);
        View::new("{whose}_ms", "help", IN_MS).register(&registry, &of_a, &[("{whose}", "theirs")]).unwrap();
        assert!(View::new("ours_seconds", "help", 1.0).register(&registry, &of_a, &[]).is_err());
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
