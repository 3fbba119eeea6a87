//! What this module tells a scraper: live values as gauges (refreshed on scrape) and a few counters.
//!
//! Names are those of the Java server and of riffle (docs/protocol.md §10), so that existing dashboards work.

use prometheus::core::Collector;
use prometheus::{IntCounter, IntGauge, Registry};

use crate::metrics;

#[derive(Debug)]
pub(super) struct MemoryMetrics {
    /// Reserved and stored bytes: Java's name and riffle's.
    pub(super) used_buffer_size: IntGauge,
    pub(super) memory_used: IntGauge,
    /// Reserved and not stored yet: Java's name and riffle's.
    pub(super) allocated_buffer_size: IntGauge,
    pub(super) memory_allocated: IntGauge,
    pub(super) memory_capacity: IntGauge,
    pub(super) in_flush_buffer_size: IntGauge,
    pub(super) block_count: IntGauge,
    pub(super) in_flight_blocks: IntGauge,
    pub(super) read_used_buffer_size: IntGauge,
    pub(super) tickets: IntGauge,
    pub(super) shuffles: IntGauge,
    pub(super) buffers: IntGauge,
    /// Bytes of the region that were ever in use: the bound of what it keeps resident. Ours.
    pub(super) region_touched: IntGauge,
    pub(super) evicted_tickets: IntCounter,
    pub(super) expired_tickets: IntCounter,
    pub(super) read_waits: IntCounter,
    duplicate_blocks: IntCounter,
    duplicate_bytes: IntCounter,
}

impl MemoryMetrics {
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let gauge = |name: &str, help: &str| register(registry, IntGauge::new(name, help));
        let counter = |name: &str, help: &str| register(registry, IntCounter::new(name, help));
        let metrics = Self {
            used_buffer_size: gauge("used_buffer_size", "bytes reserved by tickets or held by blocks")?,
            memory_used: gauge("memory_used", "bytes held by blocks")?,
            allocated_buffer_size: gauge(
                "allocated_buffer_size",
                "bytes reserved by tickets, not stored yet",
            )?,
            memory_allocated: gauge("memory_allocated", "bytes reserved by tickets, not stored yet")?,
            memory_capacity: gauge("memory_capacity", "bytes of the memory store")?,
            in_flush_buffer_size: gauge("in_flush_buffer_size", "bytes of batches being flushed")?,
            block_count: gauge("total_in_memory_block_count", "blocks in memory")?,
            in_flight_blocks: gauge("total_in_flush_block_count", "blocks of batches being flushed")?,
            read_used_buffer_size: gauge("read_used_buffer_size", "bytes of read buffers in use")?,
            tickets: gauge("memory_allocated_tickets_num", "tickets neither redeemed nor expired")?,
            shuffles: gauge("shuffle_count_in_buffer_pool", "shuffles registered")?,
            buffers: gauge("buffer_count_in_buffer_pool", "partitions that were written to")?,
            region_touched: gauge(
                "memory_region_touched_bytes",
                "bytes of the region that were ever in use",
            )?,
            evicted_tickets: counter("total_evict_timeout_tickets_num", "tickets that expired")?,
            expired_tickets: counter("total_expired_preAllocated_buffer_num", "tickets that expired")?,
            read_waits: counter(
                "total_require_read_memory_retry_num",
                "times that a local read had to wait for read memory",
            )?,
            duplicate_blocks: counter("total_duplicate_blocks", "resent blocks dropped")?,
            duplicate_bytes: counter("total_duplicate_bytes", "bytes of resent blocks dropped")?,
        };
        for (gauge, name) in [
            (&metrics.block_count, "cached_block_count"),
            (&metrics.block_count, "block_count_in_buffer_pool"),
            (&metrics.in_flight_blocks, "in_flush_block_count_in_buffer_pool"),
            (&metrics.in_flush_buffer_size, "memory_spill_in_flight_bytes"),
            (&metrics.tickets, "require_buffer_count"),
        ] {
            metrics::also(registry, gauge, name)?;
        }
        Ok(metrics)
    }

    pub(super) fn count_duplicates(&self, blocks: usize, bytes: u64) {
        if blocks > 0 {
            self.duplicate_blocks.inc_by(blocks as u64);
            self.duplicate_bytes.inc_by(bytes);
        }
    }
}

fn register<M: Collector + Clone + 'static>(
    registry: &Registry,
    metric: prometheus::Result<M>,
) -> prometheus::Result<M> {
    let metric = metric?;
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}
