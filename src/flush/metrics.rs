//! What the flusher does; names as in PROTOCOL §10.2 and §10.6 where a counterpart exists.

use prometheus::{Histogram, HistogramOpts, IntCounter, IntGauge, Registry};

#[derive(Debug)]
pub(super) struct FlushMetrics {
    pub(super) spilled_bytes: IntCounter,
    pub(super) spilled_batches: IntCounter,
    pub(super) failed_writes: IntCounter,
    pub(super) purged_batches: IntCounter,
    pub(super) queued: IntGauge,
    pub(super) extent_bytes: Histogram,
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
                "Times that a batch could be written to no disk; it stays in memory and is tried again",
            )?,
            purged_batches: counter(
                "total_spill_events_dropped_with_app_not_found",
                "Batches dropped because their shuffle was unregistered meanwhile",
            )?,
            queued,
            extent_bytes,
        })
    }
}
