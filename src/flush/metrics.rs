//! Metrics of the flusher. Names follow the Java server and riffle where a counterpart exists.

use std::time::Duration;

use prometheus::{
    Counter, Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry,
};

use crate::metrics::{self, BYTES_BUCKETS, Description, GaugeGuard, SECONDS_BUCKETS, clamped, exponential};
use crate::remote::hdfs;
use crate::store::{TierNames, disk, object};

/// The names of the tiers of this crate, for the documentation.
const BUILT_IN: [TierNames; 3] = [disk::NAMES, hdfs::NAMES, object::NAMES];

/// Duration that Java calls slow (`rss.server.write.slow.threshold`).
const SLOW: Duration = Duration::from_secs(10);

/// Lower bounds in bytes of Java's batch size classes, except for the first class.
const SIZE_CLASSES: [u64; 3] = [200_000, 1_000_000, 10_000_000];

/// Buckets from 4 KiB to 1 GiB.
const EXTENT_BUCKETS: &[f64] = &exponential::<10>(4096.0, 4.0);

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
        // From the seal to a worker, retries included.
        wait: Histogram = "flush_wait_seconds",
            "Seconds from the seal of a batch, or its previous attempt, to its next attempt", in SECONDS_BUCKETS;
        // From a worker until the store reports that the batch is readable.
        duration: Histogram =
            "flush_duration_seconds", "Seconds to write and publish a batch", in SECONDS_BUCKETS;
        // Metrics of riffle, by tier.
        writes: IntGaugeVec["storage_type"] =
            "memory_spill_in_flushing_operations", "Batches being written";
        bytes: IntGaugeVec["storage_type"] =
            "memory_spill_in_flushing_bytes", "Payload bytes of batches being written";
        started: IntCounterVec["storage_type"] = "total_memory_spill_in_flushing_operations",
            "Batch writes, failed attempts included";
        sizes: HistogramVec["storage_type"] = "memory_spill_in_flushing_bytes_histogram",
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
        // Other servers drop a batch that fails repeatedly. This worker never does, so dashboards
        // show 0.
        _dropped_by_java: IntCounter =
            "total_dropped_event_num", "Batches given up; always 0, because they stay in memory";
        _dropped_by_riffle: IntCounter =
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
    named: TierCounters,
    writes: IntGauge,
    bytes: IntGauge,
    started: IntCounter,
    sizes: Histogram,
}

/// Returns the values for the placeholders in the names and texts of [`TierCounters`].
fn fill(names: &TierNames) -> [(&'static str, &'static str); 4] {
    let TierNames { title, spill, events, queue, .. } = *names;
    [("{title}", title), ("{spill}", spill), ("{events}", events), ("{queue}", queue)]
}

impl FlushMetrics {
    pub(super) fn new(registry: &Registry, tiers: &[TierNames]) -> prometheus::Result<Self> {
        let all = FlushMetricTable::new(registry)?;
        let of = |names: &TierNames| -> prometheus::Result<TierMetrics> {
            let label = [names.label];
            Ok(TierMetrics {
                named: TierCounters::new(registry, &fill(names))?,
                writes: all.writes.with_label_values(&label),
                bytes: all.bytes.with_label_values(&label),
                started: all.started.with_label_values(&label),
                sizes: all.sizes.with_label_values(&label),
            })
        };
        Ok(Self { tiers: tiers.iter().map(of).collect::<Result<_, _>>()?, all })
    }

    /// Returns descriptions of all metrics, for the documentation.
    pub(crate) fn described() -> Vec<Description> {
        let of_tier = |names: &TierNames| TierCounters::described(&fill(names));
        [FlushMetricTable::described(), BUILT_IN.iter().flat_map(of_tier).collect()].concat()
    }

    /// Counts a written batch of `bytes` bytes.
    pub(super) fn count_batch(&self, tier: usize, bytes: u64) {
        self.all.spilled_bytes.inc_by(bytes);
        self.all.batches.count(bytes);
        let tier = &self.tiers[tier].named;
        tier.written.inc();
        tier.written_bytes.inc_by(bytes);
    }

    /// Counts a failed write of a batch to `tier`.
    pub(super) fn count_failure(&self, tier: usize) {
        self.all.failed_writes.inc();
        self.tiers[tier].named.failures.inc();
    }

    /// Counts the time of a successful write.
    pub(super) fn count_time(&self, took: Duration) {
        self.all.duration.observe(took.as_secs_f64());
        self.all.write_ms.inc_by(took.as_secs_f64() * 1e3);
        self.all.slow_writes.inc_by(u64::from(took > SLOW));
    }

    /// Counts a write of `bytes` until the returned value is dropped.
    pub(super) fn writing(&self, tier: usize, bytes: u64) -> [GaugeGuard; 2] {
        let tier = &self.tiers[tier];
        tier.started.inc();
        #[expect(clippy::cast_precision_loss, reason = "a histogram bucket")]
        tier.sizes.observe(bytes as f64);
        [GaugeGuard::one(&tier.writes), GaugeGuard::of(&tier.bytes, bytes)]
    }

    /// Updates the gauges of live values. `queues` has one item per tier.
    pub(super) fn refresh(&self, queues: impl Iterator<Item = QueueLengths>) {
        let mut all_queued = 0;
        for (tier, QueueLengths { queued, in_flight }) in self.tiers.iter().zip(queues) {
            all_queued += queued;
            tier.named.queued.set(clamped(queued));
            tier.named.in_flight.set(clamped(in_flight));
            tier.named.writing_bytes.set(tier.bytes.get());
        }
        self.all.queued.set(clamped(all_queued));
    }
}

/// Numbers of a tier's batches.
pub(super) struct QueueLengths {
    /// Waiting batches.
    pub(super) queued: usize,
    /// Batches that wait or are being written.
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
