//! Counts and logs panics.
//!
//! Invariant: nothing here reads debug information. That takes more than 100 MiB, which is not part
//! of the memory bound (`budget::memory_plan`) and is not returned. A stack is therefore logged as
//! addresses in the program's file; another process resolves them
//! (`uniffle_profile::name_addresses`).

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use procfs::process::{MMapPath, Process};
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{HistogramOpts, IntGauge};

use uniffle_base::metrics::{self, Family};

/// Panics since the hook was installed. A static, because std's panic hook belongs to the process
/// and cannot tell its workers apart.
static PANICS: AtomicU64 = AtomicU64::new(0);

/// Returns the number of panics since [`init`](crate::init) was called.
pub fn panic_count() -> u64 {
    PANICS.load(Ordering::Relaxed)
}

/// Metric that reads the count when metrics are gathered.
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

/// Maximum number of logged stack frames.
const FRAMES_MAX: usize = 100;

/// Installs the hook that counts and logs panics with their stacks. A panic ends its task only.
pub(super) fn install_panic_hook() {
    let program = program();
    std::panic::set_hook(Box::new(move |panic| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        let payload = panic.payload_as_str().unwrap_or("(no text)");
        let location = panic.location().map(ToString::to_string).unwrap_or_default();
        let thread = std::thread::current();
        let thread = thread.name().unwrap_or("unnamed");
        let stack = stack(&program);
        tracing::error!(%location, thread, stack, "panic: {payload}");
    }));
}

/// Returns the address range of the program's file in memory, or an empty range if unknown.
fn program() -> Range<u64> {
    let file = std::fs::read_link("/proc/self/exe").unwrap_or_default();
    let maps = Process::myself().and_then(|process| process.maps()).into_iter().flatten();
    let parts = maps.filter(|map| matches!(&map.pathname, MMapPath::Path(path) if *path == file));
    let parts: Vec<(u64, u64)> = parts.map(|map| map.address).collect();
    let began = parts.iter().map(|part| part.0).min().unwrap_or(0);
    began..parts.iter().map(|part| part.1).max().unwrap_or(0)
}

/// Returns the program's frames of this thread, innermost first, as addresses in the program's
/// file.
fn stack(program: &Range<u64>) -> String {
    let mut calls = Vec::new();
    backtrace::trace(|frame| {
        // A return address points behind the call, so subtract 1.
        let call = (frame.ip().addr() as u64).saturating_sub(1);
        calls.extend(program.contains(&call).then(|| format!("{:#x}", call - program.start)));
        calls.len() < FRAMES_MAX
    });
    calls.join(" ")
}

#[cfg(test)]
mod tests {
    use prometheus::Registry;

    use super::*;
    use crate::TelemetryMetrics;
    use uniffle_testkit::captured_log::CapturedLog;

    #[test]
    fn panics_are_counted_and_logged_by_addresses() {
        let registry = Registry::new();
        let _metrics = TelemetryMetrics::new(&registry).unwrap();
        let exported = || {
            let families = registry.gather();
            let family = families.iter().find(|family| family.name() == "panic_signal").unwrap();
            family.get_metric()[0].get_gauge().get_value()
        };
        let (before, log) = (exported(), CapturedLog::of_this_thread());
        install_panic_hook();
        std::panic::catch_unwind(|| panic!("counted by a test")).unwrap_err();
        drop(std::panic::take_hook());
        assert!(exported() > before); // other tests may panic meanwhile, on purpose
        let log = log.text();
        assert_eq!(log.lines().count(), 1, "{log}");
        assert!(
            log.contains("panic: counted by a test location=crates/uniffle-telemetry/src/panics.rs:"),
            "{log}"
        );
        let stack = log.split("stack=\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
        let length = program().end - program().start;
        let address = |text: &str| u64::from_str_radix(text.strip_prefix("0x").unwrap(), 16).unwrap();
        let calls: Vec<u64> = stack.split(' ').map(address).collect();
        assert!(calls.len() > 3 && calls.iter().all(|call| *call < length), "{log}");
    }
}
