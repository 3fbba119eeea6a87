//! What the flusher does; names as in PROTOCOL §10.2 and §10.6 where a counterpart exists.

use prometheus::{Histogram, HistogramOpts, IntCounter, IntGauge, Registry};

use crate::metrics::{BYTES_BUCKETS, SECONDS_BUCKETS, also, histogram};

#[derive(Debug)]
pub(super) struct FlushMetrics {
    pub(super) spilled_bytes: IntCounter,
    pub(super) spilled_batches: IntCounter,
    pub(super) failed_writes: IntCounter,
    pub(super) purged_batches: IntCounter,
    pub(super) hdfs_batches: IntCounter,
    pub(super) hdfs_bytes: IntCounter,
    pub(super) hdfs_failures: IntCounter,
    pub(super) hdfs_in_flight: IntGauge,
    pub(super) queued: IntGauge,
    pub(super) extent_bytes: Histogram,
    batches: BatchSizes,
    /// From the seal to a worker, retries included.
    pub(super) wait: Histogram,
    /// From a worker to the store's word that it is readable there.
    pub(super) duration: Histogram,
}

impl FlushMetrics {
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
        let metrics = Self {
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
        also(registry, &metrics.queued, "localfile_flush_thread_pool_queue_size")?;
        also(registry, &metrics.failed_writes, "total_memory_spill_failed")?;
        Ok(metrics)
    }

    /// Counts a batch of `bytes` that was written.
    pub(super) fn count_batch(&self, bytes: u64) {
        self.spilled_bytes.inc_by(bytes);
        self.batches.count(bytes);
    }
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
