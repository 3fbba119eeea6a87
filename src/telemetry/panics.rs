//! The count of panics, and the hook that counts and logs them.

use std::backtrace::Backtrace;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{HistogramOpts, IntGauge};

use crate::metrics::{self, Family};

/// Panics since the process started. The one static of the crate: std's panic hook is process-wide, and a count
/// behind it cannot belong to one of two workers in a process.
static PANICS: AtomicU64 = AtomicU64::new(0);

/// Panics since the process started, counted once [`init`] was called.
pub fn panic_count() -> u64 {
    PANICS.load(Ordering::Relaxed)
}

metrics::table! {
    /// Exports [`panic_count`] under the name that dashboards of riffle know.
    pub(crate) struct PanicMetrics {
        _panics: PanicCount = "panic_signal", "panics since the process started";
    }
}

/// Reads the count when metrics are gathered.
#[derive(Debug, Clone)]
pub(crate) struct PanicCount(IntGauge);

impl Family for PanicCount {
    const KIND: &'static str = IntGauge::KIND;

    fn create(options: HistogramOpts, labels: &[&str]) -> prometheus::Result<Self> {
        IntGauge::create(options, labels).map(Self)
    }
}

impl Collector for PanicCount {
    fn desc(&self) -> Vec<&Desc> {
        self.0.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.0.set(metrics::clamped(panic_count()));
        self.0.collect()
    }
}

/// A panic ends its task, not the process: it is counted and logged with its backtrace, and the worker goes on.
pub(super) fn install_panic_hook() {
    std::panic::set_hook(Box::new(|panic| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        let payload = panic.payload_as_str().unwrap_or("(no text)");
        let location = panic.location().map(ToString::to_string).unwrap_or_default();
        let thread = std::thread::current();
        let thread = thread.name().unwrap_or("unnamed");
        let backtrace = Backtrace::force_capture();
        tracing::error!(%location, thread, "panic: {payload}\n{backtrace}");
    }));
}

#[cfg(test)]
mod tests {
    use prometheus::Registry;

    use super::*;

    #[test]
    fn panics_are_counted_and_exported() {
        let registry = Registry::new();
        let _panics = PanicMetrics::new(&registry).unwrap();
        let exported = || registry.gather()[0].get_metric()[0].get_gauge().get_value();
        let before = exported();
        install_panic_hook();
        std::panic::catch_unwind(|| panic!("counted by a test")).unwrap_err();
        drop(std::panic::take_hook());
        assert!(exported() > before); // other tests may panic meanwhile, on purpose
    }
}
