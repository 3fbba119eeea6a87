//! The local tier's metrics. Names are Java's where Java has them (`ShuffleServerMetrics`), riffle's for the disk
//! operations, so that existing dashboards fill.

use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec,
};

use crate::metrics;

/// Label value under which Java counts all disks together.
pub(super) const ALL_DISKS: &str = "ALL";

/// Seconds of disk calls: 0.5 ms to 131 s.
const CALL_BUCKETS: &[f64] = &metrics::exponential::<10>(0.0005, 4.0);

/// Bytes of extents: 4 KiB to 1 GiB.
const EXTENT_BUCKETS: &[f64] = &metrics::exponential::<10>(4096.0, 4.0);

metrics::table! {
    /// Counters and gauges of the local tier.
    pub(crate) struct Metrics {
        write_data: IntCounter = "total_write_data", "bytes written to local disks";
        write_blocks: IntCounter = "total_write_block", "blocks written to local disks";
        writes: IntCounter = "total_write_num", "batches written to local disks";
        write_exceptions: IntCounter = "total_write_exception", "failed attempts to write a batch";
        write_local: IntCounter = "storage_total_write_local", "batches that local disks were asked to write";
        write_local_retries: IntCounter = "storage_retry_write_local", "batches tried on another disk";
        write_local_failed: IntCounter = "storage_failed_write_local", "batches that no disk took";
        write_local_succeeded: IntCounter = "storage_success_write_local", "batches published";
        localfile_write_data: IntCounterVec["local_disk_path"] =
            "total_localfile_write_data", "payload bytes written";
        localfile_used: IntCounter = "total_localfile_used", "bytes ever occupied in data logs";
        read_data_file: IntCounter = "localfile_disk_data_reads", "reads of data ranges";
        read_index_file: IntCounter = "localfile_disk_index_reads", "reads of partition indexes";
        read_data_bytes: IntCounter = "total_read_data_from_localfile", "data bytes read";
        read_index_bytes: IntCounter = "total_read_index_from_localfile", "index bytes read";
        hints: IntCounter = "read_hint_operations",
            "hints of what is read next that were given to a disk's page cache";
        hinted_bytes: IntCounter =
            "read_hint_bytes", "bytes that clients said they would read next, which the page cache was asked for";
        index_cache_hits: IntCounter =
            "localfile_index_cache_hits", "extents whose index records were in memory";
        index_cache_misses: IntCounter =
            "localfile_index_cache_misses", "extents whose index records were read from disk";
        read_crc_mismatches: IntCounter = "total_read_crc_mismatch",
            "blocks that a disk returned with other bytes", also "total_localfile_detected_in_consistency";
        blocks_damaged: IntCounter = "total_local_blocks_given_up",
            "blocks that had other bytes when they were read again, too, and are lost";
        extents_lost: IntCounter = "total_local_extents_given_up",
            "extents that could not be read again and again, and are holes now";
        files_vanished: IntCounter = "local_files_vanished_total",
            "files that other programs removed, replaced or cut short";
        index_cache_bytes: IntGauge = "localfile_index_cache_bytes", "bytes of cached index records";
        files_opened: IntCounter = "total_flush_file_num", "log files created";
        open_files: IntGauge = "flush_file_num", "cached descriptors";
        deleted_shuffle_directories: IntCounter = "total_delete_file_num", "shuffle directories removed";
        deleted_bytes: IntCounter = "total_delete_data", "payload bytes removed from local disks";
        deletion_failed: IntCounter =
            "total_local_rename_and_deletion_failed", "removals that failed", also "purge_failed_count";
        dirs_total: IntGauge = "local_storage_total_dirs_num", "data directories";
        dirs_corrupted: IntGauge = "local_storage_corrupted_dirs_num", "unhealthy data directories";
        total_space: IntGauge = "local_storage_total_space", "bytes of the file systems";
        whole_disk_used: IntGauge = "local_storage_whole_disk_used_space", "bytes used on it, by any process";
        service_used: IntGauge = "local_storage_service_used_space", "bytes used by this worker";
        used_bytes: IntGauge = "storage_used_bytes", "bytes used by this worker";
        used_ratio: Gauge = "local_storage_used_space_ratio", "used space by all space";
        is_writable: IntGaugeVec["local_disk_path"] =
            "local_storage_is_writable", "0 = takes batches, 1 = does not";
        is_timeout: IntGaugeVec["local_disk_path"] = "local_storage_is_timeout", "1 = did not answer in time";
        disk_is_healthy: IntGaugeVec["root"] = "local_disk_is_healthy", "0 = healthy, 1 = not";
        disk_is_corrupted: IntGaugeVec["root"] =
            "local_disk_is_corrupted", "1 = fails or returns wrong bytes";
        disk_is_read_only: IntGaugeVec["root"] =
            "local_disk_is_read_only", "1 = its file system is read-only: it serves and takes nothing";
        disk_is_detached: IntGaugeVec["root"] = "local_disk_is_detached",
            "1 = its path leads elsewhere, as after an unmount: neither read nor written";
        disk_capacity: IntGaugeVec["root"] = "local_disk_capacity", "bytes of the file system";
        disk_used: IntGaugeVec["root"] = "local_disk_used", "bytes used on it, by any process";
        disk_service_used: IntGaugeVec["root"] = "local_disk_service_used", "bytes used by this worker";
        disk_used_ratio: GaugeVec["root"] = "local_disk_used_ratio", "used space by all space";
        disk_service_used_ratio: GaugeVec["root"] =
            "local_disk_service_used_ratio", "space used by this worker by all space";
        extents: IntGauge = "local_extents", "published extents held in memory";
        extent_list_bytes: IntGauge = "local_extent_list_bytes", "bytes of memory_lists_bytes for lists of extents";
        extent_bytes: Histogram = "local_extent_bytes", "bytes of published extents", in EXTENT_BUCKETS;
        append_operations: IntCounterVec["root"] = "localfile_disk_append_operation_counter", "write calls";
        append_bytes: IntCounterVec["root"] =
            "localfile_disk_append_operation_bytes_counter", "bytes written";
        append_duration: HistogramVec["root"] =
            "localfile_disk_append_operation_duration", "seconds of write calls", in CALL_BUCKETS;
        sync_duration: HistogramVec["root"] = "localfile_disk_sync_operation_duration",
            "seconds of syncs, each for all who wait", in CALL_BUCKETS;
        read_operations: IntCounterVec["root"] = "localfile_disk_read_operation_counter", "read calls";
        read_bytes: IntCounterVec["root"] = "localfile_disk_read_operation_bytes_counter", "bytes read";
        read_duration: HistogramVec["root"] =
            "localfile_disk_read_operation_duration", "seconds of read calls", in CALL_BUCKETS;
        delete_duration: HistogramVec["root"] =
            "localfile_disk_delete_operation_duration", "seconds of removals", in CALL_BUCKETS;
    }
}
