//! What this module tells a scraper: live values as gauges, refreshed for each scrape, and a few counters.

use prometheus::{IntCounter, IntGauge, IntGaugeVec};

use crate::metrics;

metrics::table! {
    /// Several values have both Java's name and riffle's.
    pub(crate) struct MemoryMetrics {
        used_buffer_size: IntGauge = "used_buffer_size", "bytes reserved by tickets or held by blocks";
        memory_used: IntGauge = "memory_used", "bytes held by blocks";
        allocated_buffer_size: IntGauge =
            "allocated_buffer_size", "bytes reserved by tickets, not stored yet";
        memory_allocated: IntGauge = "memory_allocated", "bytes reserved by tickets, not stored yet";
        memory_capacity: IntGauge = "memory_capacity", "bytes of the memory store";
        in_flush_buffer_size: IntGauge =
            "in_flush_buffer_size", "bytes of batches being flushed", also "memory_spill_in_flight_bytes";
        block_count: IntGauge = "total_in_memory_block_count",
            "blocks in memory", also "cached_block_count", also "block_count_in_buffer_pool";
        in_flight_blocks: IntGauge = "total_in_flush_block_count",
            "blocks of batches being flushed", also "in_flush_block_count_in_buffer_pool";
        read_used_buffer_size: IntGauge = "read_used_buffer_size", "bytes of read buffers in use";
        tickets: IntGauge = "memory_allocated_tickets_num",
            "tickets neither redeemed nor expired", also "require_buffer_count";
        shuffles: IntGauge = "shuffle_count_in_buffer_pool", "shuffles registered";
        buffers: IntGauge = "buffer_count_in_buffer_pool", "partitions that were written to";
        region_touched: IntGauge = "memory_region_touched_bytes", "bytes of the region that were ever in use";
        withheld: IntGauge = "memory_withheld_bytes",
            "bytes of the capacity that cannot be used, since the file of memory_store.backing gets no pages for them";
        unprotected: IntGauge = "memory_unprotected_shuffles",
            "shuffles whose blocks in memory are lost if the process is killed, since the file of memory_store.backing has no place for them";
        backing_vanished: IntGauge = "memory_backing_vanished",
            "1 = the file of memory_store.backing was removed or replaced";
        lists: IntGauge = "memory_lists_bytes", "bytes of heap for the lists of blocks in memory; part of what blocks hold";
        ceded: IntGauge = "memory_region_ceded_bytes",
            "bytes of the region that are left unused for the heap of lists";
        answered: IntGauge = "memory_answered_bytes", "bytes of blocks in answers that are not taken";
        heap: IntGaugeVec["kind"] = "heap_charged_bytes", "bytes charged to the heap budget, by kind";
        heap_capacity: IntGauge = "heap_capacity_bytes", "bytes of the heap budget";
        evicted_tickets: IntCounter = "total_evict_timeout_tickets_num", "tickets that expired";
        expired_tickets: IntCounter = "total_expired_preAllocated_buffer_num", "tickets that expired";
        taken_back: IntCounter = "tickets_taken_back_total",
            "unused tickets taken back from applications over their shares, for others that waited";
        read_waits: IntCounter =
            "total_require_read_memory_retry_num", "times that a local read had to wait for read memory";
        duplicate_blocks: IntCounter = "total_duplicate_blocks", "resent blocks dropped";
        duplicate_bytes: IntCounter = "total_duplicate_bytes", "bytes of resent blocks dropped";
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
