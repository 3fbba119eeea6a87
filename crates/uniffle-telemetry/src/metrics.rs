//! Metrics of the process's telemetry. They count since the start of the process, across workers.

use std::fmt::Debug;
use std::marker::PhantomData;

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{HistogramOpts, IntCounter, Opts};

use super::panics::PanicCount;
use super::spans::SPANS;
use super::writer::dropped_lines;
use uniffle_base::metrics::{self, Family};

metrics::table! {
    /// Dashboards of riffle know the name `panic_signal`.
    pub struct TelemetryMetrics {
        _panics: PanicCount = "panic_signal", "Panics since the process started";
        _lost_spans: LostSpans =
            "trace_spans_lost_total", "Trace spans lost because the collector failed or the queue was full";
        _dropped_lines: DroppedLines =
            "log_lines_dropped_total",
            "Log lines dropped because the log's reader was too slow or its disk failed";
    }
}

/// A count of the whole process.
pub(crate) trait Total: Debug + Clone + Send + Sync + 'static {
    /// Returns the count.
    fn total() -> u64;
}

/// Spans that were not exported.
#[derive(Debug, Clone)]
pub(crate) struct LostSpansTotal;

impl Total for LostSpansTotal {
    fn total() -> u64 {
        SPANS.lost()
    }
}

/// Log lines that were not written.
#[derive(Debug, Clone)]
pub(crate) struct DroppedLinesTotal;

impl Total for DroppedLinesTotal {
    fn total() -> u64 {
        dropped_lines()
    }
}

type LostSpans = ProcessCounter<LostSpansTotal>;
type DroppedLines = ProcessCounter<DroppedLinesTotal>;

/// A counter that reads its value when metrics are gathered.
#[derive(Debug, Clone)]
pub(crate) struct ProcessCounter<T> {
    options: Opts,
    described: IntCounter,
    total: PhantomData<T>,
}

impl<T: Total> Family for ProcessCounter<T> {
    const KIND: &'static str = IntCounter::KIND;

    fn create(options: HistogramOpts, _labels: &[&str]) -> prometheus::Result<Self> {
        let described = IntCounter::with_opts(options.common_opts.clone())?;
        Ok(Self { options: options.common_opts, described, total: PhantomData })
    }
}

impl<T: Total> Collector for ProcessCounter<T> {
    fn desc(&self) -> Vec<&Desc> {
        self.described.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        // Created each time: gatherings may overlap, and a counter cannot be set.
        let Ok(counter) = IntCounter::with_opts(self.options.clone()) else { return Vec::new() };
        counter.inc_by(T::total());
        counter.collect()
    }
}

#[cfg(test)]
mod tests {
    use prometheus::Registry;

    use super::*;

    #[derive(Debug, Clone)]
    struct Seven;

    impl Total for Seven {
        fn total() -> u64 {
            7
        }
    }

    #[test]
    fn process_counter_shows_the_total_of_each_gathering() {
        let registry = Registry::new();
        let options = HistogramOpts::new("lost_total", "lost");
        registry.register(Box::new(ProcessCounter::<Seven>::create(options, &[]).unwrap())).unwrap();
        for _ in 0..2 {
            assert_eq!(registry.gather()[0].get_metric()[0].get_counter().get_value(), 7.0);
        }
    }
}
