//! Names and metrics of the tier. The client counts its requests itself (`client::metrics`).

use prometheus::{Histogram, IntCounter, IntGauge};

use crate::metrics;
use crate::store::TierNames;

/// Names of the tier in metrics, logs and the API.
pub(crate) const NAMES: TierNames = TierNames {
    name: "object",
    title: "the object store",
    label: "OBJECT",
    spill: "object",
    events: "object",
    queue: "object",
};

/// Buckets of segment sizes: 64 KiB to 1 GiB.
const SEGMENT_BUCKETS: &[f64] = &metrics::exponential_buckets::<8>(65_536.0, 4.0);

metrics::table! {
    /// Counters and gauges of the object tier.
    pub(crate) struct Metrics {
        write_bytes: IntCounter = "object_write_bytes", "Payload bytes stored in the object store";
        segments: IntCounter = "object_segments_written", "Data objects stored in the object store";
        segment_bytes: Histogram =
            "object_segment_bytes", "Bytes of a data object", in SEGMENT_BUCKETS;
        uploads_failed: IntCounter = "object_uploads_failed",
            "Data objects that failed to be uploaded; their blocks stay in memory";
        log_objects: IntCounter = "object_metadata_writes",
            "Metadata objects written, with registrations and reports";
        read_bytes: IntCounter = "object_read_bytes", "Data bytes read from the object store";
        read_index_bytes: IntCounter = "object_read_index_bytes", "Index bytes sent to readers";
        ranges: IntCounter = "object_read_ranges", "Ranges of objects requested";
        cache_hits: IntCounter = "object_cache_hits",
            "Chunks found in the read cache, or on their way into it";
        cache_misses: IntCounter = "object_cache_misses",
            "Chunks fetched from the object store into the read cache";
        cache_bypassed: IntCounter = "object_cache_bypassed",
            "Chunks read from the object store because the read cache was full";
        cache_read_bytes: IntCounter = "object_cache_read_bytes", "Bytes read from the disks of the read cache";
        cache_write_bytes: IntCounter = "object_cache_write_bytes", "Bytes written to the disks of the read cache";
        cache_failures: IntCounter = "object_cache_failures",
            "Failures of a read cache disk, each of which disables it for a minute";
        cache_bytes: IntGauge = "object_cache_bytes", "Used bytes of the read cache";
        cache_capacity_bytes: IntGauge = "object_cache_capacity_bytes", "Size of the read cache in bytes";
        crc_mismatches: IntCounter = "object_crc_mismatches",
            "Corrupt blocks returned by the object store";
        deletions_failed: IntCounter = "object_deletions_failed",
            "Shuffles and applications whose objects could not be deleted";
        stored_bytes: IntGauge = "object_stored_bytes", "Bytes of data objects of registered shuffles";
        failing: IntGauge = "object_store_is_failing",
            "1 while the latest calls to the object store failed";
    }
}
