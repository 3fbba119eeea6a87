//! What the flusher does; names as in PROTOCOL §10.2 and §10.6 where a counterpart exists.

use prometheus::{Histogram, HistogramOpts, IntCounter, IntGauge, Registry};

use crate::metrics::{SECONDS_BUCKETS, histogram};

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
        Ok(Self {
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
        })
    }
}
