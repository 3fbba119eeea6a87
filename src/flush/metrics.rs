//! Metrics of the flusher. Names follow the Java server and riffle where a counterpart exists.
//!
//! Other servers call a sealed batch an event, and its flush a spill. A batch counts once when it
//! is written, and once per attempt in metrics of attempts.

use std::time::Duration;

use prometheus::{
    Counter, Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry,
};

use crate::metrics::{
    self, BYTES_BUCKETS, Description, GaugeGuard, SECONDS_BUCKETS, clamped, exponential_buckets,
};
use crate::remote::hdfs;
use crate::store::{TierNames, disk, object};

/// Names of all tiers that can be configured, for the documentation.
const ALL_TIERS: [TierNames; 3] = [disk::NAMES, hdfs::NAMES, object::NAMES];

/// Duration that Java calls slow (`rss.server.write.slow.threshold`).
const SLOW: Duration = Duration::from_secs(10);

/// Lower bounds in bytes of Java's batch size classes, except for the first class.
const SIZE_CLASSES: [u64; 3] = [200_000, 1_000_000, 10_000_000];

/// Buckets from 4 KiB to 1 GiB.
const EXTENT_BUCKETS: &[f64] = &exponential_buckets::<10>(4096.0, 4.0);

metrics::table! {
    pub(crate) struct FlushMetricTable {
        queued: IntGauge = "event_queue_size", "Sealed batches waiting for a flush worker";
        spilled_bytes: IntCounter = "memory_spill_total_bytes", "Payload bytes flushed from memory";
        failed_writes: IntCounter = "total_failed_written_event_num",
            "Failed writes of a batch to a tier; the batch stays in memory and is retried",
            also "total_memory_spill_failed";
        purged_batches: IntCounter = "total_spill_events_dropped_with_app_not_found",
            "Batches dropped because their shuffle was unregistered";
        write_ms: Counter = "total_write_time", "Milliseconds of batch writes, summed";
        slow_writes: IntCounter = "total_write_slow", "Batch writes of more than 10 s";
        extent_bytes: Histogram = "flush_extent_bytes",
            "Payload bytes of a partition in a batch", in EXTENT_BUCKETS;
        // Also observed for each retry, from the same seal.
        wait: Histogram = "flush_wait_seconds",
            "Seconds from the seal of a batch to each write attempt", in SECONDS_BUCKETS;
        // Until the tier reports that the batch is readable.
        duration: Histogram =
            "flush_duration_seconds", "Seconds to write and publish a batch", in SECONDS_BUCKETS;
        // Metrics of riffle, by tier.
        writing_batches: IntGaugeVec["storage_type"] =
            "memory_spill_in_flushing_operations", "Batches being written";
        writing_bytes: IntGaugeVec["storage_type"] =
            "memory_spill_in_flushing_bytes", "Payload bytes of batches being written";
        attempts: IntCounterVec["storage_type"] = "total_memory_spill_in_flushing_operations",
            "Batch writes, failed attempts included";
        attempt_bytes: HistogramVec["storage_type"] = "memory_spill_in_flushing_bytes_histogram",
            "Payload bytes of a batch write", in BYTES_BUCKETS;
    }
    with { batches: BatchSizes }
}

metrics::table! {
    struct TierCounters each fill {
        written: IntCounter = "{events}_event_flush_num", "Batches written to {title}";
        written_bytes: IntCounter =
            "total_memory_spill_to_{spill}", "Payload bytes flushed to {title}";
        failures: IntCounter = "total_memory_to_{spill}_spill_failed",
            "Failed writes of a batch to {title}; the batch stays in memory and is retried";
        in_flight: IntGauge =
            "memory_spill_to_{spill}", "Batches waiting for {title} or being written to it";
        queued: IntGauge = "{queue}_flush_thread_pool_queue_size",
            "Sealed batches waiting for a flush worker of {title}";
        writing_bytes: IntGauge = "memory_spill_{spill}_in_flushing_bytes",
            "Payload bytes being written to {title}";
    }
}

metrics::table! {
    /// Sizes of batches, as riffle's histogram and in Java's classes.
    pub(crate) struct BatchSizes {
        batch_bytes: Histogram =
            "memory_spill_batch_size_histogram", "Payload bytes of a batch", in BYTES_BUCKETS;
        level1: IntCounter = "event_size_threshold_level1", "Written batches below 200,000 bytes";
        level2: IntCounter = "event_size_threshold_level2", "Written batches of 200,000 to 999,999 bytes";
        level3: IntCounter = "event_size_threshold_level3", "Written batches of 1,000,000 to 9,999,999 bytes";
        level4: IntCounter = "event_size_threshold_level4", "Written batches of 10,000,000 bytes and more";
        // Other servers drop a batch that fails repeatedly. This worker never does, so it exports
        // 0 under the names of both servers.
        _dropped_java_name: IntCounter =
            "total_dropped_event_num", "Batches given up; always 0, because they stay in memory";
        _dropped_riffle_name: IntCounter =
            "total_spill_events_dropped", "Batches given up; always 0, because they stay in memory";
    }
}

#[derive(Debug)]
pub(crate) struct FlushMetrics {
    pub(super) all: FlushMetricTable,
    tiers: Vec<TierMetrics>,
}

#[derive(Debug)]
struct TierMetrics {
    counters: TierCounters,
    writing_batches: IntGauge,
    writing_bytes: IntGauge,
    attempts: IntCounter,
    attempt_bytes: Histogram,
}

/// Returns the values for the placeholders in the names and texts of [`TierCounters`].
fn placeholders(names: &TierNames) -> [(&'static str, &'static str); 4] {
    let TierNames { title, spill, events, queue, .. } = *names;
    [("{title}", title), ("{spill}", spill), ("{events}", events), ("{queue}", queue)]
}

impl FlushMetrics {
    pub(super) fn new(registry: &Registry, tiers: &[TierNames]) -> prometheus::Result<Self> {
        let all = FlushMetricTable::new(registry)?;
        let new_tier = |names: &TierNames| -> prometheus::Result<TierMetrics> {
            let label = [names.label];
            Ok(TierMetrics {
                counters: TierCounters::new(registry, &placeholders(names))?,
                writing_batches: all.writing_batches.with_label_values(&label),
                writing_bytes: all.writing_bytes.with_label_values(&label),
                attempts: all.attempts.with_label_values(&label),
                attempt_bytes: all.attempt_bytes.with_label_values(&label),
            })
        };
        Ok(Self { tiers: tiers.iter().map(new_tier).collect::<Result<_, _>>()?, all })
    }

    /// Returns descriptions of all metrics, for the documentation.
    pub(crate) fn described() -> Vec<Description> {
        let of_tier = |names: &TierNames| TierCounters::described(&placeholders(names));
        [FlushMetricTable::described(), ALL_TIERS.iter().flat_map(of_tier).collect()].concat()
    }

    /// Counts a written batch of `bytes` bytes.
    pub(super) fn count_batch(&self, tier: usize, bytes: u64) {
        self.all.spilled_bytes.inc_by(bytes);
        self.all.batches.count(bytes);
        let tier = &self.tiers[tier].counters;
        tier.written.inc();
        tier.written_bytes.inc_by(bytes);
    }

    /// Counts a failed write of a batch to `tier`.
    pub(super) fn count_failure(&self, tier: usize) {
        self.all.failed_writes.inc();
        self.tiers[tier].counters.failures.inc();
    }

    /// Observes the duration of a successful write.
    pub(super) fn observe_duration(&self, took: Duration) {
        self.all.duration.observe(took.as_secs_f64());
        self.all.write_ms.inc_by(took.as_secs_f64() * 1e3);
        self.all.slow_writes.inc_by(u64::from(took > SLOW));
    }

    /// Counts an attempt to write `bytes` bytes. The gauges include it until the returned guards
    /// are dropped.
    #[must_use]
    pub(super) fn start_write(&self, tier: usize, bytes: u64) -> [GaugeGuard; 2] {
        let tier = &self.tiers[tier];
        tier.attempts.inc();
        #[expect(clippy::cast_precision_loss, reason = "a histogram bucket")]
        tier.attempt_bytes.observe(bytes as f64);
        [GaugeGuard::inc(&tier.writing_batches), GaugeGuard::add(&tier.writing_bytes, bytes)]
    }

    /// Updates the gauges of live values. `queues` has one item per tier.
    pub(super) fn refresh(&self, queues: impl Iterator<Item = QueueLengths>) {
        let mut all_queued = 0;
        for (tier, QueueLengths { queued, in_flight }) in self.tiers.iter().zip(queues) {
            all_queued += queued;
            tier.counters.queued.set(clamped(queued));
            tier.counters.in_flight.set(clamped(in_flight));
            tier.counters.writing_bytes.set(tier.writing_bytes.get());
        }
        self.all.queued.set(clamped(all_queued));
    }
}

/// Numbers of a tier's batches in memory.
pub(super) struct QueueLengths {
    /// Waiting batches.
    pub(super) queued: usize,
    /// Batches in flight, which wait or are being written.
    pub(super) in_flight: usize,
}

impl BatchSizes {
    fn count(&self, bytes: u64) {
        #[expect(clippy::cast_precision_loss, reason = "a histogram bucket")]
        self.batch_bytes.observe(bytes as f64);
        let class = SIZE_CLASSES.iter().filter(|bound| bytes >= **bound).count();
        self.classes()[class].inc();
    }

    fn classes(&self) -> [&IntCounter; 4] {
        [&self.level1, &self.level2, &self.level3, &self.level4]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_counted_in_java_classes() {
        let sizes = BatchSizes::new(&Registry::new()).unwrap();
        for bytes in [0, 199_999, 200_000, 999_999, 1_000_000, 9_999_999, 10_000_000, u64::from(u32::MAX)] {
            sizes.count(bytes);
        }
        assert_eq!(sizes.classes().map(IntCounter::get), [2, 2, 2, 2]);
    }
}
