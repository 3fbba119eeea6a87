//! Metrics of the memory store: gauges with live values, refreshed for each scrape, and a few
//! counters.

use prometheus::{IntCounter, IntGauge, IntGaugeVec};

use uniffle_base::metrics;

metrics::table! {
    /// Several values have both Java's name and riffle's.
    pub(crate) struct MemoryMetrics {
        used_buffer_size: IntGauge = "used_buffer_size", "Bytes reserved by tickets or used by blocks";
        memory_used: IntGauge = "memory_used", "Bytes used by blocks";
        allocated_buffer_size: IntGauge =
            "allocated_buffer_size", "Bytes reserved by tickets and not stored yet";
        memory_allocated: IntGauge = "memory_allocated", "Bytes reserved by tickets and not stored yet";
        memory_capacity: IntGauge = "memory_capacity", "Capacity of the memory store in bytes";
        in_flush_buffer_size: IntGauge =
            "in_flush_buffer_size", "Bytes of batches being flushed", also "memory_spill_in_flight_bytes";
        block_count: IntGauge = "total_in_memory_block_count",
            "Blocks in memory", also "cached_block_count", also "block_count_in_buffer_pool";
        in_flight_blocks: IntGauge = "total_in_flush_block_count",
            "Blocks of batches being flushed", also "in_flush_block_count_in_buffer_pool";
        read_used_buffer_size: IntGauge = "read_used_buffer_size", "Bytes of read buffers in use";
        tickets: IntGauge = "memory_allocated_tickets_num",
            "Outstanding tickets", also "require_buffer_count";
        shuffles: IntGauge = "shuffle_count_in_buffer_pool", "Registered shuffles";
        buffers: IntGauge = "buffer_count_in_buffer_pool", "Partitions with received data";
        region_touched: IntGauge = "memory_region_touched_bytes",
            "Highest number of bytes of the region in use at a time";
        unavailable: IntGauge = "memory_withheld_bytes",
            "Bytes of capacity unavailable because the file system of memory_store.backing has no pages \
             for them";
        unprotected: IntGauge = "memory_unprotected_shuffles",
            "Shuffles whose blocks in memory would not survive a kill because memory_store.backing is full";
        backing_vanished: IntGauge = "memory_backing_vanished",
            "State of the file of memory_store.backing: 1 = removed, replaced or truncated";
        lists: IntGauge = "memory_lists_bytes",
            "Heap bytes of block lists, part of the bytes used by blocks";
        ceded: IntGauge = "memory_region_ceded_bytes",
            "Bytes of the region left unused to offset the heap of block lists";
        answered: IntGauge = "memory_answered_bytes",
            "Bytes of blocks in responses that clients have not consumed";
        heap: IntGaugeVec["kind"] = "heap_charged_bytes", "Bytes charged to the heap budget, by kind";
        heap_capacity: IntGauge = "heap_capacity_bytes", "Size of the heap budget in bytes";
        heap_kind_capacity: IntGaugeVec["kind"] =
            "heap_kind_capacity_bytes", "Largest part of the heap budget for a kind, in bytes";
        evicted_tickets: IntCounter = "total_evict_timeout_tickets_num", "Expired tickets";
        expired_tickets: IntCounter = "total_expired_preAllocated_buffer_num", "Expired tickets";
        revoked: IntCounter = "tickets_taken_back_total",
            "Unused tickets revoked for other applications that waited";
        read_waits: IntCounter =
            "total_require_read_memory_retry_num", "Local reads that waited for read memory";
        duplicate_blocks: IntCounter = "total_duplicate_blocks", "Duplicate blocks of resends, dropped";
        duplicate_bytes: IntCounter = "total_duplicate_bytes", "Bytes of duplicate blocks of resends, dropped";
    }
}

impl MemoryMetrics {
    pub(super) fn count_duplicates(&self, blocks: usize, bytes: u64) {
        if blocks > 0 {
            self.duplicate_blocks.inc_by(blocks as u64);
            self.duplicate_bytes.inc_by(bytes);
        }
    }
}
