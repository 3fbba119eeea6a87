//! The local tier's metrics. Names are Java's (`ShuffleServerMetrics`) where they exist, and
//! riffle's for disk operations, so that existing dashboards work.

use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec,
};

use crate::metrics;

/// Label value under which Java counts all disks together.
pub(super) const ALL_DISKS: &str = "ALL";

/// Buckets for the duration of disk calls: 0.5 ms to 131 s.
const CALL_BUCKETS: &[f64] = &metrics::exponential_buckets::<10>(0.0005, 4.0);

/// Buckets for the size of extents: 4 KiB to 1 GiB.
const EXTENT_BUCKETS: &[f64] = &metrics::exponential_buckets::<10>(4096.0, 4.0);

metrics::table! {
    /// Counters and gauges of the local tier.
    pub(crate) struct Metrics {
        write_data: IntCounter = "total_write_data", "Bytes written to local disks";
        write_data_copied: IntCounter = "total_write_data_copied",
            "Payload bytes copied into aligned buffers before they are written to local disks";
        write_blocks: IntCounter = "total_write_block", "Blocks written to local disks";
        writes: IntCounter = "total_write_num", "Batches written to local disks";
        write_exceptions: IntCounter = "total_write_exception", "Failed attempts to write a batch or an index group";
        write_local: IntCounter = "storage_total_write_local", "Batches to be written to local disks";
        write_local_retries: IntCounter = "storage_retry_write_local", "Batches and index groups retried on another disk";
        write_local_failed: IntCounter = "storage_failed_write_local", "Batches that failed on all disks";
        write_local_succeeded: IntCounter = "storage_success_write_local", "Batches published";
        localfile_write_data: IntCounterVec["local_disk_path"] =
            "total_localfile_write_data", "Payload bytes written to local disks";
        localfile_used: IntCounter = "total_localfile_used", "Bytes of data logs written since start, \
             alignment included";
        read_data_file: IntCounter = "localfile_disk_data_reads", "Reads of data ranges";
        read_index_file: IntCounter = "localfile_disk_index_reads", "Reads of partition indexes";
        read_data_bytes: IntCounter = "total_read_data_from_localfile", "Data bytes read from local disks",
            also "total_read_local_data_file";
        read_index_bytes: IntCounter = "total_read_index_from_localfile", "Index bytes read from local disks",
            also "total_read_local_index_file";
        hints: IntCounter = "read_hint_operations",
            "Read-ahead hints passed to the page cache of a disk";
        hinted_bytes: IntCounter =
            "read_hint_bytes", "Bytes announced by clients and prefetched into the page cache";
        index_cache_hits: IntCounter =
            "localfile_index_cache_hits", "Extents whose index records were cached";
        index_cache_misses: IntCounter =
            "localfile_index_cache_misses", "Extents whose index records were read from disk";
        read_crc_mismatches: IntCounter = "total_read_crc_mismatch",
            "Corrupt blocks returned by a disk", also "total_localfile_detected_in_consistency";
        blocks_damaged: IntCounter = "total_local_blocks_given_up",
            "Blocks still corrupt after a second read, and lost";
        extents_lost: IntCounter = "total_local_extents_given_up",
            "Extents given up after repeated read errors, and lost";
        files_vanished: IntCounter = "local_files_vanished_total",
            "Files removed, replaced or truncated by other programs";
        index_cache_bytes: IntGauge = "localfile_index_cache_bytes", "Bytes of cached index records";
        files_opened: IntCounter = "total_flush_file_num", "Log files created";
        open_files: IntGauge = "flush_file_num", "Cached descriptors";
        deleted_shuffle_directories: IntCounter = "total_delete_file_num", "Shuffle directories removed";
        deleted_bytes: IntCounter = "total_delete_data", "Payload bytes removed from local disks";
        deletion_failed: IntCounter =
            "total_local_rename_and_deletion_failed", "Failed removals of shuffle directories", also "purge_failed_count";
        dirs_total: IntGauge = "local_storage_total_dirs_num", "Data directories";
        dirs_corrupted: IntGauge = "local_storage_corrupted_dirs_num", "Unhealthy data directories";
        total_space: IntGauge = "local_storage_total_space", "Total bytes of the file systems";
        whole_disk_used: IntGauge = "local_storage_whole_disk_used_space", "Bytes used on the file system, by any process";
        service_used: IntGauge = "local_storage_service_used_space", "Bytes used by this worker";
        used_bytes: IntGauge = "storage_used_bytes", "Bytes used by this worker";
        used_ratio: Gauge = "local_storage_used_space_ratio", "Used share of the file system";
        is_writable: IntGaugeVec["local_disk_path"] =
            "local_storage_is_writable", "Writability of the disk: 0 = accepts batches, 1 = does not";
        is_timeout: IntGaugeVec["local_disk_path"] = "local_storage_is_timeout", "Whether the disk hangs: \
             1 = did not respond in time";
        disk_is_healthy: IntGaugeVec["root"] = "local_disk_is_healthy", "Health of the disk: 0 = healthy, 1 = unhealthy";
        disk_faults: IntGaugeVec["root"] =
            "local_disk_faults", "Number of times since the start that the disk became unhealthy";
        disk_is_corrupted: IntGaugeVec["root"] =
            "local_disk_is_corrupted", "Whether the disk is broken: 1 = fails or returns wrong bytes";
        disk_is_read_only: IntGaugeVec["root"] =
            "local_disk_is_read_only", "Whether the file system is read-only: 1 = serves reads and accepts \
                 no data";
        disk_is_detached: IntGaugeVec["root"] = "local_disk_is_detached",
            "Whether the path leads to another file system, as after an unmount: 1 = neither read nor \
             written";
        disk_capacity: IntGaugeVec["root"] = "local_disk_capacity", "Total bytes of the file system";
        disk_used: IntGaugeVec["root"] = "local_disk_used", "Bytes used on the file system, by any process";
        disk_service_used: IntGaugeVec["root"] = "local_disk_service_used", "Bytes used by this worker";
        disk_used_ratio: GaugeVec["root"] = "local_disk_used_ratio", "Used share of the file system";
        disk_service_used_ratio: GaugeVec["root"] =
            "local_disk_service_used_ratio", "Share of the file system used by this worker";
        extents: IntGauge = "local_extents", "Published extents held in memory";
        extent_list_bytes: IntGauge = "local_extent_list_bytes", "Bytes of extent lists, part of memory_lists_bytes";
        extent_bytes: Histogram = "local_extent_bytes", "Bytes of published extents", in EXTENT_BUCKETS;
        append_operations: IntCounterVec["root"] = "localfile_disk_append_operation_counter", "Write calls of a disk";
        append_bytes: IntCounterVec["root"] =
            "localfile_disk_append_operation_bytes_counter", "Bytes written";
        append_duration: HistogramVec["root"] =
            "localfile_disk_append_operation_duration", "Seconds of write calls", in CALL_BUCKETS;
        sync_duration: HistogramVec["root"] = "localfile_disk_sync_operation_duration",
            "Seconds of syncs; one sync serves all waiting writes", in CALL_BUCKETS;
        read_operations: IntCounterVec["root"] = "localfile_disk_read_operation_counter", "Read calls of a disk";
        read_bytes: IntCounterVec["root"] = "localfile_disk_read_operation_bytes_counter", "Bytes read";
        read_duration: HistogramVec["root"] =
            "localfile_disk_read_operation_duration", "Seconds of read calls", in CALL_BUCKETS;
        delete_duration: HistogramVec["root"] =
            "localfile_disk_delete_operation_duration", "Seconds of removals", in CALL_BUCKETS;
    }
}
