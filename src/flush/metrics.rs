//! What the flusher does; names as in docs/protocol.md §10.2 and §10.6 where a counterpart exists.

use std::time::Duration;

use prometheus::{Counter, Histogram, HistogramOpts, IntCounter, IntGauge, Registry};

use super::tier::Tier;
use crate::metrics::{self, BYTES_BUCKETS, GaugeGuard, SECONDS_BUCKETS, also, clamped, histogram};

/// What Java calls slow (`rss.server.write.slow.threshold`).
const SLOW: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct FlushMetrics {
    pub(super) spilled_bytes: IntCounter,
    spilled_batches: IntCounter,
    pub(super) failed_writes: IntCounter,
    pub(super) purged_batches: IntCounter,
    hdfs_batches: IntCounter,
    hdfs_bytes: IntCounter,
    hdfs_failures: IntCounter,
    hdfs_in_flight: IntGauge,
    local_bytes: IntCounter,
    local_failures: IntCounter,
    local_in_flight: IntGauge,
    local_writing_bytes: IntGauge,
    queued: IntGauge,
    local_queued: IntGauge,
    hdfs_queued: IntGauge,
    write_ms: Counter,
    slow_writes: IntCounter,
    local: TierMetrics,
    hdfs: TierMetrics,
    pub(super) extent_bytes: Histogram,
    batches: BatchSizes,
    /// From the seal to a worker, retries included.
    pub(super) wait: Histogram,
    /// From a worker to the store's word that it is readable there.
    duration: Histogram,
}

impl FlushMetrics {
    #[expect(clippy::too_many_lines, reason = "a list of names")]
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let counter = |name: &str, help: &str| -> prometheus::Result<IntCounter> {
            let counter = IntCounter::new(name, help)?;
            registry.register(Box::new(counter.clone()))?;
            Ok(counter)
        };
        let queued = IntGauge::new("event_queue_size", "Sealed batches that wait for a flush worker")?;
        registry.register(Box::new(queued.clone()))?;
        let hdfs_in_flight =
            IntGauge::new("memory_spill_to_hdfs", "Batches that wait for HDFS or are being written there")?;
        registry.register(Box::new(hdfs_in_flight.clone()))?;
        let buckets = prometheus::exponential_buckets(4096.0, 4.0, 10)?;
        let extent_bytes = Histogram::with_opts(
            HistogramOpts::new("flush_extent_bytes", "Payload bytes of one partition in one batch")
                .buckets(buckets),
        )?;
        registry.register(Box::new(extent_bytes.clone()))?;
        let gauge = |name: &str, help: &str| metrics::gauge(registry, name, help);
        let write_ms = Counter::new("total_write_time", "Milliseconds that writing batches took, summed")?;
        registry.register(Box::new(write_ms.clone()))?;
        let tiers = Tiers::new(registry)?;
        let metrics = Self {
            local_bytes: counter(
                "total_memory_spill_to_localfile",
                "Payload bytes brought from memory to local disks",
            )?,
            local_failures: counter(
                "total_memory_to_localfile_spill_failed",
                "Times that local disks did not take a batch; it stays in memory and goes elsewhere or is tried again",
            )?,
            local_in_flight: gauge(
                "memory_spill_to_localfile",
                "Batches that wait for local disks or are being written there",
            )?,
            local_writing_bytes: gauge(
                "memory_spill_localfile_in_flushing_bytes",
                "Payload bytes that are being written to local disks now",
            )?,
            local_queued: gauge(
                "localfile_flush_thread_pool_queue_size",
                "Sealed batches that wait for a flush worker of the local disks",
            )?,
            hdfs_queued: gauge(
                "hadoop_flush_thread_pool_queue_size",
                "Sealed batches that wait for a flush worker of HDFS",
            )?,
            write_ms,
            slow_writes: counter("total_write_slow", "Batches whose write took more than 10 s")?,
            local: tiers.of("LOCALFILE"),
            hdfs: tiers.of("HDFS"),
            batches: BatchSizes::new(registry)?,
            spilled_bytes: counter(
                "memory_spill_total_bytes",
                "Payload bytes brought from memory to a store",
            )?,
            spilled_batches: counter("local_file_event_flush_num", "Batches written to local disks")?,
            failed_writes: counter(
                "total_failed_written_event_num",
                "Times that a tier did not take a batch; it stays in memory and goes elsewhere or is tried again",
            )?,
            purged_batches: counter(
                "total_spill_events_dropped_with_app_not_found",
                "Batches dropped because their shuffle was unregistered meanwhile",
            )?,
            hdfs_batches: counter("hadoop_event_flush_num", "Batches written to HDFS")?,
            hdfs_bytes: counter("total_memory_spill_to_hdfs", "Payload bytes brought from memory to HDFS")?,
            hdfs_failures: counter(
                "total_memory_to_hdfs_spill_failed",
                "Times that HDFS did not take a batch; it stays in memory and goes elsewhere or is tried again",
            )?,
            hdfs_in_flight,
            queued,
            extent_bytes,
            wait: histogram(
                registry,
                "flush_wait_seconds",
                "time from a batch's seal to its (or its next) attempt",
                SECONDS_BUCKETS,
            )?,
            duration: histogram(
                registry,
                "flush_duration_seconds",
                "time to write and publish a batch",
                SECONDS_BUCKETS,
            )?,
        };
        also(registry, &metrics.failed_writes, "total_memory_spill_failed")?;
        Ok(metrics)
    }

    /// Counts a batch of `bytes` that was written.
    pub(super) fn count_batch(&self, tier: Tier, bytes: u64) {
        self.spilled_bytes.inc_by(bytes);
        self.batches.count(bytes);
        match tier {
            Tier::Local => {
                self.spilled_batches.inc();
                self.local_bytes.inc_by(bytes);
            }
            Tier::Hdfs => {
                self.hdfs_batches.inc();
                self.hdfs_bytes.inc_by(bytes);
            }
        }
    }

    /// Counts a batch that `tier` did not take.
    pub(super) fn count_failure(&self, tier: Tier) {
        self.failed_writes.inc();
        match tier {
            Tier::Local => self.local_failures.inc(),
            Tier::Hdfs => self.hdfs_failures.inc(),
        }
    }

    /// Counts the time of a write that succeeded.
    pub(super) fn count_time(&self, took: Duration) {
        self.duration.observe(took.as_secs_f64());
        self.write_ms.inc_by(took.as_secs_f64() * 1e3);
        self.slow_writes.inc_by(u64::from(took > SLOW));
    }

    /// Counts a write of `bytes` until the returned value is dropped.
    pub(super) fn writing(&self, tier: Tier, bytes: u64) -> [GaugeGuard; 2] {
        let tier = match tier {
            Tier::Local => &self.local,
            Tier::Hdfs => &self.hdfs,
        };
        tier.started.inc();
        #[expect(clippy::cast_precision_loss, reason = "a histogram bucket")]
        tier.sizes.observe(bytes as f64);
        [GaugeGuard::one(&tier.writes), GaugeGuard::of(&tier.bytes, bytes)]
    }

    /// Brings gauges of live values up to date: batches that wait for either tier, and all of HDFS's.
    pub(super) fn refresh(&self, local_queued: usize, hdfs_queued: usize, hdfs_in_flight: usize) {
        let set = |gauge: &IntGauge, count: usize| gauge.set(clamped(count));
        set(&self.queued, local_queued + hdfs_queued);
        set(&self.local_queued, local_queued);
        set(&self.hdfs_queued, hdfs_queued);
        set(&self.hdfs_in_flight, hdfs_in_flight);
        self.local_in_flight.set(self.local_queued.get() + self.local.writes.get());
        self.local_writing_bytes.set(self.local.bytes.get());
    }
}

/// riffle's metrics of writes, by tier.
struct Tiers {
    writes: prometheus::IntGaugeVec,
    bytes: prometheus::IntGaugeVec,
    started: prometheus::IntCounterVec,
    sizes: prometheus::HistogramVec,
}

impl Tiers {
    fn new(registry: &Registry) -> prometheus::Result<Self> {
        let label = ["storage_type"];
        Ok(Self {
            writes: metrics::gauge_vec(
                registry,
                "memory_spill_in_flushing_operations",
                "Batches that are being written now",
                &label,
            )?,
            bytes: metrics::gauge_vec(
                registry,
                "memory_spill_in_flushing_bytes",
                "Payload bytes of batches that are being written now",
                &label,
            )?,
            started: metrics::counter_vec(
                registry,
                "total_memory_spill_in_flushing_operations",
                "Writes of batches, attempts that failed included",
                &label,
            )?,
            sizes: metrics::histogram_vec(
                registry,
                "memory_spill_in_flushing_bytes_histogram",
                "Payload bytes of one write of a batch",
                &label,
                BYTES_BUCKETS,
            )?,
        })
    }

    fn of(&self, tier: &str) -> TierMetrics {
        TierMetrics {
            writes: self.writes.with_label_values(&[tier]),
            bytes: self.bytes.with_label_values(&[tier]),
            started: self.started.with_label_values(&[tier]),
            sizes: self.sizes.with_label_values(&[tier]),
        }
    }
}

#[derive(Debug)]
struct TierMetrics {
    writes: IntGauge,
    bytes: IntGauge,
    started: IntCounter,
    sizes: Histogram,
}

/// Bytes at which Java's next class of batch sizes begins.
const SIZE_CLASSES: [u64; 3] = [200_000, 1_000_000, 10_000_000];

/// How large batches are, by riffle's histogram and by Java's classes, smallest first.
#[derive(Debug)]
struct BatchSizes {
    bytes: Histogram,
    classes: [IntCounter; 4],
}

impl BatchSizes {
    fn new(registry: &Registry) -> prometheus::Result<Self> {
        let counter = |name: &str, help: &str| crate::metrics::counter(registry, name, help);
        // What other servers do with a batch that fails again and again is never done here: dashboards see a 0.
        counter("total_dropped_event_num", "Batches given up: always 0, they stay in memory")?;
        counter("total_spill_events_dropped", "Batches given up: always 0, they stay in memory")?;
        let help = "Payload bytes of one batch";
        Ok(Self {
            bytes: histogram(registry, "memory_spill_batch_size_histogram", help, BYTES_BUCKETS)?,
            classes: [
                counter("event_size_threshold_level1", "Batches written of less than 200,000 bytes")?,
                counter("event_size_threshold_level2", "Batches written of 200,000 to 999,999 bytes")?,
                counter("event_size_threshold_level3", "Batches written of 1,000,000 to 9,999,999 bytes")?,
                counter("event_size_threshold_level4", "Batches written of 10,000,000 or more bytes")?,
            ],
        })
    }

    fn count(&self, bytes: u64) {
        #[expect(clippy::cast_precision_loss, reason = "a histogram bucket")]
        self.bytes.observe(bytes as f64);
        let class = SIZE_CLASSES.iter().filter(|bound| bytes >= **bound).count();
        self.classes[class].inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_counted_in_javas_classes() {
        let sizes = BatchSizes::new(&Registry::new()).unwrap();
        for bytes in [0, 199_999, 200_000, 999_999, 1_000_000, 9_999_999, 10_000_000, u64::from(u32::MAX)] {
            sizes.count(bytes);
        }
        assert_eq!(sizes.classes.each_ref().map(IntCounter::get), [2, 2, 2, 2]);
    }
}
