//! The tier's metrics. Requests of the client are counted where they are made.

use prometheus::{Histogram, IntCounter, IntGauge};

use crate::metrics;

/// Bytes of segments: 64 KiB to 1 GiB.
const SEGMENT_BUCKETS: &[f64] = &metrics::exponential::<8>(65_536.0, 4.0);

metrics::table! {
    /// Counters and gauges of the object tier.
    pub(crate) struct Metrics {
        write_bytes: IntCounter = "object_write_bytes", "payload bytes that the object store has taken";
        segments: IntCounter = "object_segments_written", "objects of data that the object store has taken";
        segment_bytes: Histogram =
            "object_segment_bytes", "bytes of an object of data", in SEGMENT_BUCKETS;
        uploads_failed: IntCounter = "object_uploads_failed",
            "objects of data that the object store did not take; what was to be in them stays in memory";
        pages: IntCounter = "object_metadata_writes", "objects with registrations and reports that were written";
        read_bytes: IntCounter = "object_read_bytes", "data bytes read from the object store";
        read_index_bytes: IntCounter = "object_read_index_bytes", "index bytes given to readers";
        ranges: IntCounter = "object_read_ranges", "ranges of objects that were asked for";
        cache_hits: IntCounter = "object_cache_hits",
            "chunks that a read found in the read cache, or on their way into it";
        cache_misses: IntCounter = "object_cache_misses", "chunks that were asked for at the object store, for the read cache";
        cache_bypassed: IntCounter = "object_cache_bypassed",
            "chunks that got no place in the read cache, so that reads of them went to the object store";
        cache_read_bytes: IntCounter = "object_cache_read_bytes", "bytes read from the read cache's disks";
        cache_write_bytes: IntCounter = "object_cache_write_bytes", "bytes written to the read cache's disks";
        cache_failures: IntCounter = "object_cache_failures",
            "failures of a disk of the read cache, after which it is left alone for a minute";
        cache_bytes: IntGauge = "object_cache_bytes", "bytes of the places in use in the read cache";
        cache_capacity_bytes: IntGauge = "object_cache_capacity_bytes", "bytes of all places of the read cache";
        crc_mismatches: IntCounter = "object_crc_mismatches",
            "blocks that the object store returned with other bytes than were written";
        deletions_failed: IntCounter = "object_deletions_failed",
            "shuffles and applications of which objects could not be deleted and were left";
        stored_bytes: IntGauge = "object_stored_bytes", "bytes of the segments of known shuffles";
        failing: IntGauge = "object_store_is_failing", "1 while the last calls failed by the object store's fault";
    }
}
