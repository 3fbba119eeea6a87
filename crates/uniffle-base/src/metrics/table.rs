//! Declares metrics in tables, in the modules that use them.
//!
//! [`table!`] generates the struct of handles, the constructor that registers them, and their
//! descriptions, from which `docs/metrics.md` is generated. There is no global registry, so that
//! two workers can run in one process. A failure to register (a malformed or duplicate name) is a
//! programming error and ends the start.

use prometheus::core::Collector;
use prometheus::{
    Counter, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Registry, Result,
};

use super::aliases::also;

/// Values of the placeholders `{…}` in names and help texts.
pub type Placeholders<'a> = &'a [(&'a str, &'a str)];

/// Returns `text` with the placeholders replaced.
pub fn fill_placeholders(text: &str, fill: Placeholders<'_>) -> String {
    fill.iter().fold(text.to_owned(), |text, (placeholder, value)| text.replace(placeholder, value))
}

/// Documentation of a metric.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// The exported name.
    pub name: String,
    /// `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    /// Names of the labels.
    pub labels: &'static [&'static str],
    /// The exported help text.
    pub help: String,
    /// Path of the module that declares it.
    pub module: &'static str,
}

/// A row of a table.
#[derive(Debug)]
pub struct MetricRow {
    /// Name, with placeholders in braces if the table is built several times.
    pub name: &'static str,
    /// Help text, with the same placeholders.
    pub help: &'static str,
    /// Names of the labels.
    pub labels: &'static [&'static str],
    /// Further names under which the same values are exported.
    pub also: &'static [&'static str],
    /// Upper bounds of a histogram's buckets, ascending.
    pub buckets: &'static [f64],
}

impl MetricRow {
    /// Creates the metric and registers it under all its names.
    ///
    /// # Errors
    /// If a name is malformed or taken, or buckets are not ascending.
    pub fn register<M: Metric>(&self, registry: &Registry, fill: Placeholders<'_>) -> Result<M> {
        let mut options =
            HistogramOpts::new(fill_placeholders(self.name, fill), fill_placeholders(self.help, fill));
        if !self.buckets.is_empty() {
            options.buckets = self.buckets.to_vec();
        }
        let family = M::Family::create(options, self.labels)?;
        registry.register(Box::new(family.clone()))?;
        for name in self.also {
            also(registry, &family, &fill_placeholders(name, fill))?;
        }
        Ok(M::of(family))
    }

    /// Returns the documentation under all names.
    pub fn describe<M: Metric>(&self, module: &'static str, fill: Placeholders<'_>) -> Vec<Description> {
        let described = |name: &&str| Description {
            name: fill_placeholders(name, fill),
            kind: M::Family::KIND,
            labels: self.labels,
            help: fill_placeholders(self.help, fill),
            module,
        };
        std::iter::once(&self.name).chain(self.also).map(described).collect()
    }
}

/// A type that a field of a table can have.
pub trait Metric: Sized {
    /// The type that is registered.
    type Family: Family;

    /// Returns the handle of a registered family.
    fn of(family: Self::Family) -> Self;
}

impl<F: Family> Metric for F {
    type Family = F;

    fn of(family: F) -> F {
        family
    }
}

/// A type that can be registered.
pub trait Family: Collector + Clone + 'static {
    /// Name of the type in the exposition format.
    const KIND: &'static str;

    /// Creates the metric without registering it.
    ///
    /// # Errors
    /// If a name or label is malformed, or buckets are not ascending.
    fn create(options: HistogramOpts, labels: &[&str]) -> Result<Self>;
}

macro_rules! families {
    ($($family:ident: $kind:literal, $create:expr;)*) => {$(
        impl Family for $family {
            const KIND: &'static str = $kind;

            fn create(options: HistogramOpts, labels: &[&str]) -> Result<Self> {
                let create: fn(HistogramOpts, &[&str]) -> Result<Self> = $create;
                create(options, labels)
            }
        }
    )*};
}

families! {
    IntCounter: "counter", |options, _| Self::with_opts(options.common_opts);
    Counter: "counter", |options, _| Self::with_opts(options.common_opts);
    IntCounterVec: "counter", |options, labels| Self::new(options.common_opts, labels);
    IntGauge: "gauge", |options, _| Self::with_opts(options.common_opts);
    Gauge: "gauge", |options, _| Self::with_opts(options.common_opts);
    IntGaugeVec: "gauge", |options, labels| Self::new(options.common_opts, labels);
    GaugeVec: "gauge", |options, labels| Self::new(options.common_opts, labels);
    Histogram: "histogram", |options, _| Self::with_opts(options);
    HistogramVec: "histogram", |options, labels| Self::new(options, labels);
}

/// Declares the metrics of a module.
///
/// ```ignore
/// metrics::table! {
///     /// Counters of the cache.
///     pub(super) struct Metrics {
///         hits: IntCounter = "cache_hits", "reads that found their block";
///         used: IntGaugeVec["root"] = "cache_bytes", "bytes held", also "their_name_for_it";
///         wait: Histogram = "cache_wait_seconds", "time until there was room", in SECONDS_BUCKETS;
///     }
///     with { of_disks: DiskMetrics }
/// }
/// ```
///
/// `with` includes other tables. `struct Name each fill { … }` is built several times with
/// different names; see [`Placeholders`].
#[macro_export]
macro_rules! table {
    (
        $(#[$meta:meta])*
        $vis:vis struct $table:ident $(each $fill:ident)? {
            $(
                $(#[$field_meta:meta])*
                $field:ident: $kind:ident $([$($label:literal),+])? = $name:literal, $help:literal
                    $(, also $other:literal)* $(, in $buckets:expr)?;
            )*
        }
        $(with { $($part:ident: $part_table:ident),* $(,)? })?
    ) => {
        $(#[$meta])*
        #[derive(Debug)]
        $vis struct $table {
            $($(#[$field_meta])* $vis $field: $kind,)*
            $($($vis $part: $part_table,)*)?
        }

        impl $table {
            /// Registers all metrics of the table.
            ///
            /// # Errors
            /// If `registry` already has one of the names.
            $vis fn new(registry: &::prometheus::Registry $(, $fill: $crate::metrics::Placeholders<'_>)?) -> ::prometheus::Result<Self> {
                let fill: $crate::metrics::Placeholders<'_> = [$($fill,)? &[]][0];
                Ok(Self {
                    $($field: $crate::metrics::table!(@row $name, $help, [$($($label),+)?], [$($other),*], [$($buckets)?])
                        .register(registry, fill)?,)*
                    $($($part: $part_table::new(registry)?,)*)?
                })
            }

            /// Returns the documentation of the table.
            $vis fn described($($fill: $crate::metrics::Placeholders<'_>)?) -> Vec<$crate::metrics::Description> {
                let fill: $crate::metrics::Placeholders<'_> = [$($fill,)? &[]][0];
                [
                    $($crate::metrics::table!(@row $name, $help, [$($($label),+)?], [$($other),*], [$($buckets)?])
                        .describe::<$kind>(module_path!(), fill),)*
                    $($($part_table::described(),)*)?
                ].concat()
            }
        }
    };
    (@row $name:literal, $help:literal, [$($label:literal),*], [$($other:literal),*], [$($buckets:expr)?]) => {
        $crate::metrics::MetricRow {
            name: $name,
            help: $help,
            labels: &[$($label),*],
            also: &[$($other),*],
            buckets: [$($buckets,)? &[] as &[f64]][0],
        }
    };
}
pub use table;

#[cfg(test)]
mod tests {
    use prometheus::{Histogram, IntCounter, IntGaugeVec, Registry, TextEncoder};

    use super::Description;

    table! {
        struct Table {
            hits: IntCounter = "hits", "help";
            used: IntGaugeVec["root"] = "used", "more help", also "theirs";
        }
        with { part: Part }
    }

    table! {
        struct Part {
            wait: Histogram = "wait", "seconds", in &[0.5, 1.0];
        }
    }

    table! {
        struct Method each fill {
            calls: IntCounter = "{method}_calls", "calls of {method}";
        }
    }

    #[test]
    fn metric_table_generates_struct_and_description() {
        let registry = Registry::new();
        let table = Table::new(&registry).unwrap();
        table.hits.inc_by(3);
        table.used.with_label_values(&["/a"]).set(7);
        table.part.wait.observe(0.7);
        Method::new(&registry, &[("{method}", "read")]).unwrap().calls.inc();
        let text = TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
        for line in ["hits 3", "theirs{root=\"/a\"} 7", "wait_bucket{le=\"1\"} 1", "read_calls 1"] {
            assert!(text.lines().any(|it| it == line), "line {line} is missing: {text}");
        }
        assert!(Table::new(&registry).is_err(), "a registry accepted a name twice");
        let described = [Table::described(), Method::described(&[("{method}", "read")])].concat();
        let names: Vec<_> = described.iter().map(|it| (it.name.as_str(), it.kind, it.labels)).collect();
        let expected: [(_, _, &[&str]); 5] = [
            ("hits", "counter", &[]),
            ("used", "gauge", &["root"]),
            ("theirs", "gauge", &["root"]),
            ("wait", "histogram", &[]),
            ("read_calls", "counter", &[]),
        ];
        assert_eq!(names, expected);
        let module = module_path!();
        let calls = Description {
            name: "read_calls".into(),
            help: "calls of read".into(),
            module,
            kind: "counter",
            labels: &[],
        };
        assert_eq!(described.last(), Some(&calls));
    }
}
