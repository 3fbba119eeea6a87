//! Counters of a phase: latencies by operation, bytes, refusals.
//!
//! Shared by all writers and readers of a phase. The server's figures are in [`super::process`],
//! their output is in [`super::report`].

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hdrhistogram::Histogram;
use parking_lot::Mutex;
use serde::Serialize;

/// Timed operations: single calls, and two operations of several calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) enum TimedOperation {
    RegisterShuffle,
    RequireBuffer,
    SendShuffleData,
    /// Delivery of one message: from its due time until the successful response, with all waits and
    /// retries.
    Push,
    ReportShuffleResult,
    GetShuffleResult,
    GetMemoryShuffleData,
    GetLocalShuffleIndex,
    GetLocalShuffleData,
    /// Read of a whole partition.
    ReadPartition,
    UnregisterShuffle,
}

impl TimedOperation {
    pub(crate) const ALL: [Self; 11] = [
        Self::RegisterShuffle,
        Self::RequireBuffer,
        Self::SendShuffleData,
        Self::Push,
        Self::ReportShuffleResult,
        Self::GetShuffleResult,
        Self::GetMemoryShuffleData,
        Self::GetLocalShuffleIndex,
        Self::GetLocalShuffleData,
        Self::ReadPartition,
        Self::UnregisterShuffle,
    ];

    /// Returns true for a single call, false for an operation of several calls.
    fn is_request(self) -> bool {
        !matches!(self, Self::Push | Self::ReadPartition)
    }
}

/// Largest latency in a histogram, in microseconds: ten minutes.
const LATENCY_US_MAX: u64 = 600_000_000;

/// The counters of a phase.
#[derive(Debug)]
pub(crate) struct Stats {
    latencies: Vec<Mutex<Histogram<u64>>>,
    pub(crate) written_bytes: AtomicU64,
    pub(crate) read_bytes: AtomicU64,
    pub(crate) blocks_written: AtomicU64,
    pub(crate) blocks_from_memory: AtomicU64,
    pub(crate) blocks_from_disk: AtomicU64,
    pub(crate) blocks_repeated: AtomicU64,
    pub(crate) retries: AtomicU64,
    pub(crate) no_buffer_waits: AtomicU64,
    pub(crate) no_buffer_wait_us: AtomicU64,
}

impl Default for Stats {
    fn default() -> Self {
        let histogram = || Histogram::new_with_bounds(1, LATENCY_US_MAX, 3).expect("bounds are in order");
        let zero = || AtomicU64::new(0);
        Self {
            latencies: TimedOperation::ALL.iter().map(|_| Mutex::new(histogram())).collect(),
            written_bytes: zero(),
            read_bytes: zero(),
            blocks_written: zero(),
            blocks_from_memory: zero(),
            blocks_from_disk: zero(),
            blocks_repeated: zero(),
            retries: zero(),
            no_buffer_waits: zero(),
            no_buffer_wait_us: zero(),
        }
    }
}

impl Stats {
    pub(crate) fn record(&self, operation: TimedOperation, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let index = TimedOperation::ALL
            .iter()
            .position(|&known| known == operation)
            .expect("ALL contains every call");
        self.latencies[index].lock().saturating_record(micros.max(1));
    }

    pub(crate) fn waited_for_buffer(&self, pause: Duration) {
        add(&self.no_buffer_waits, 1);
        add(&self.no_buffer_wait_us, u64::try_from(pause.as_micros()).unwrap_or(u64::MAX));
    }

    pub(crate) fn bytes(&self) -> u64 {
        get(&self.written_bytes) + get(&self.read_bytes)
    }

    /// Returns the number of single calls.
    pub(crate) fn requests(&self) -> u64 {
        let counted =
            TimedOperation::ALL.iter().zip(&self.latencies).filter(|(operation, _)| operation.is_request());
        counted.map(|(_, histogram)| histogram.lock().len()).sum()
    }

    /// Returns the latencies of all operations that occurred.
    pub(crate) fn latencies(&self) -> Vec<Latency> {
        let made = TimedOperation::ALL
            .iter()
            .zip(&self.latencies)
            .map(|(&operation, h)| Latency::of(operation, &h.lock()));
        made.filter(|latency| latency.count > 0).collect()
    }
}

pub(crate) fn add(counter: &AtomicU64, value: u64) {
    counter.fetch_add(value, Ordering::Relaxed);
}

pub(crate) fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// Latencies of one kind of operation, in milliseconds.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Latency {
    #[serde(rename = "rpc")]
    pub(crate) operation: TimedOperation,
    pub(crate) count: u64,
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
    pub(crate) p999_ms: f64,
    pub(crate) max_ms: f64,
    /// (quantile, latency) for a plot.
    pub(crate) curve: Vec<(f64, f64)>,
}

impl Latency {
    fn of(operation: TimedOperation, histogram: &Histogram<u64>) -> Self {
        let at = |quantile: f64| histogram.value_at_quantile(quantile) as f64 / 1e3;
        let curve = [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9999, 1.0];
        Self {
            operation,
            count: histogram.len(),
            p50_ms: at(0.5),
            p99_ms: at(0.99),
            p999_ms: at(0.999),
            max_ms: histogram.max() as f64 / 1e3,
            curve: curve.map(|quantile| (quantile, at(quantile))).to_vec(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_latencies_have_correct_quantiles() {
        let stats = Stats::default();
        for ms in 1..=1_000 {
            stats.record(TimedOperation::RequireBuffer, Duration::from_millis(ms));
        }
        let latencies = stats.latencies();
        assert_eq!(latencies.len(), 1);
        let latency = &latencies[0];
        assert_eq!((latency.operation, latency.count), (TimedOperation::RequireBuffer, 1_000));
        assert!((latency.p50_ms - 500.0).abs() < 1.0, "{latency:?}");
        assert!((latency.p99_ms - 990.0).abs() < 2.0 && (latency.max_ms - 1_000.0).abs() < 2.0);
    }

    #[test]
    fn composite_operations_are_not_counted_as_requests() {
        let stats = Stats::default();
        for operation in [
            TimedOperation::RequireBuffer,
            TimedOperation::SendShuffleData,
            TimedOperation::Push,
            TimedOperation::ReadPartition,
        ] {
            stats.record(operation, Duration::from_millis(1));
        }
        assert_eq!(stats.requests(), 2);
    }

    #[test]
    fn latency_beyond_the_range_is_the_maximum() {
        let stats = Stats::default();
        stats.record(TimedOperation::Push, Duration::from_secs(100_000));
        assert!(stats.latencies()[0].max_ms >= 600_000.0);
    }
}
