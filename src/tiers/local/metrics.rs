//! The local store's metrics. Names are Java's where Java has them (`ShuffleServerMetrics`), riffle's for the disk
//! operations, so that existing dashboards fill.

use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry,
};

use crate::metrics::also;

/// Label value under which Java counts all disks together.
pub(super) const ALL_DISKS: &str = "ALL";

/// Counters and gauges of the local store.
#[derive(Debug)]
pub(super) struct Metrics {
    pub(super) write_data: IntCounter,
    pub(super) write_blocks: IntCounter,
    pub(super) writes: IntCounter,
    pub(super) write_exceptions: IntCounter,
    pub(super) write_local: IntCounter,
    pub(super) write_local_retries: IntCounter,
    pub(super) write_local_failed: IntCounter,
    pub(super) write_local_succeeded: IntCounter,
    pub(super) localfile_write_data: IntCounterVec,
    pub(super) localfile_used: IntCounter,
    pub(super) read_data_file: IntCounter,
    pub(super) read_index_file: IntCounter,
    pub(super) read_data_bytes: IntCounter,
    pub(super) read_index_bytes: IntCounter,
    pub(super) index_cache_hits: IntCounter,
    pub(super) index_cache_misses: IntCounter,
    pub(super) read_crc_mismatches: IntCounter,
    pub(super) extents_given_up: IntCounter,
    pub(super) index_cache_bytes: IntGauge,
    pub(super) files_opened: IntCounter,
    pub(super) open_files: IntGauge,
    pub(super) deleted_shuffle_directories: IntCounter,
    pub(super) deleted_bytes: IntCounter,
    pub(super) deletion_failed: IntCounter,
    pub(super) dirs_total: IntGauge,
    pub(super) dirs_corrupted: IntGauge,
    pub(super) total_space: IntGauge,
    pub(super) whole_disk_used: IntGauge,
    pub(super) service_used: IntGauge,
    pub(super) used_bytes: IntGauge,
    pub(super) used_ratio: Gauge,
    pub(super) is_writable: IntGaugeVec,
    pub(super) is_timeout: IntGaugeVec,
    pub(super) disk_is_healthy: IntGaugeVec,
    pub(super) disk_is_corrupted: IntGaugeVec,
    pub(super) disk_capacity: IntGaugeVec,
    pub(super) disk_used: IntGaugeVec,
    pub(super) disk_service_used: IntGaugeVec,
    pub(super) disk_used_ratio: GaugeVec,
    pub(super) disk_service_used_ratio: GaugeVec,
    pub(super) extents: IntGauge,
    pub(super) extent_bytes: Histogram,
    pub(super) append_operations: IntCounterVec,
    pub(super) append_bytes: IntCounterVec,
    pub(super) append_duration: HistogramVec,
    pub(super) sync_duration: HistogramVec,
    pub(super) read_operations: IntCounterVec,
    pub(super) read_bytes: IntCounterVec,
    pub(super) read_duration: HistogramVec,
    pub(super) delete_duration: HistogramVec,
}

/// Registers metrics one by one.
struct Register<'a>(&'a Registry);

impl Register<'_> {
    fn keep<M: prometheus::core::Collector + Clone + 'static>(
        &self,
        metric: prometheus::Result<M>,
    ) -> prometheus::Result<M> {
        let metric = metric?;
        self.0.register(Box::new(metric.clone()))?;
        Ok(metric)
    }

    fn counter(&self, name: &str, help: &str) -> prometheus::Result<IntCounter> {
        self.keep(IntCounter::new(name, help))
    }

    fn gauge(&self, name: &str, help: &str) -> prometheus::Result<IntGauge> {
        self.keep(IntGauge::new(name, help))
    }

    fn counters(&self, name: &str, help: &str, label: &str) -> prometheus::Result<IntCounterVec> {
        self.keep(IntCounterVec::new(Opts::new(name, help), &[label]))
    }

    fn gauges(&self, name: &str, help: &str, label: &str) -> prometheus::Result<IntGaugeVec> {
        self.keep(IntGaugeVec::new(Opts::new(name, help), &[label]))
    }

    fn ratios(&self, name: &str, help: &str) -> prometheus::Result<GaugeVec> {
        self.keep(GaugeVec::new(Opts::new(name, help), &["root"]))
    }

    fn durations(&self, name: &str, help: &str) -> prometheus::Result<HistogramVec> {
        let buckets = prometheus::exponential_buckets(0.0005, 4.0, 10)?;
        self.keep(HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets), &["root"]))
    }
}

impl Metrics {
    /// Registers everything.
    ///
    /// # Errors
    /// A name that is taken.
    #[expect(clippy::too_many_lines, reason = "a list of names")]
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let it = Register(registry);
        let extent_bytes = HistogramOpts::new("local_extent_bytes", "bytes of published extents")
            .buckets(prometheus::exponential_buckets(4096.0, 4.0, 10)?);
        let disk = "local_disk_path";
        let metrics = Self {
            write_data: it.counter("total_write_data", "bytes written to local disks")?,
            write_blocks: it.counter("total_write_block", "blocks written to local disks")?,
            writes: it.counter("total_write_num", "batches written to local disks")?,
            write_exceptions: it.counter("total_write_exception", "failed attempts to write a batch")?,
            write_local: it
                .counter("storage_total_write_local", "batches that local disks were asked to write")?,
            write_local_retries: it.counter("storage_retry_write_local", "batches tried on another disk")?,
            write_local_failed: it.counter("storage_failed_write_local", "batches that no disk took")?,
            write_local_succeeded: it.counter("storage_success_write_local", "batches published")?,
            localfile_write_data: it.counters("total_localfile_write_data", "payload bytes written", disk)?,
            localfile_used: it.counter("total_localfile_used", "bytes ever occupied in data logs")?,
            read_data_file: it.counter("localfile_disk_data_reads", "reads of data ranges")?,
            read_index_file: it.counter("localfile_disk_index_reads", "reads of partition indexes")?,
            read_data_bytes: it.counter("total_read_data_from_localfile", "data bytes read")?,
            read_index_bytes: it.counter("total_read_index_from_localfile", "index bytes read")?,
            index_cache_hits: it
                .counter("localfile_index_cache_hits", "extents whose index records were in memory")?,
            read_crc_mismatches: it
                .counter("total_read_crc_mismatch", "blocks that a disk returned with other bytes")?,
            extents_given_up: it.counter(
                "total_local_extents_given_up",
                "extents that could not be read again and again, and are holes now",
            )?,
            index_cache_misses: it
                .counter("localfile_index_cache_misses", "extents whose index records were read from disk")?,
            index_cache_bytes: it.gauge("localfile_index_cache_bytes", "bytes of cached index records")?,
            files_opened: it.counter("total_flush_file_num", "log files created")?,
            open_files: it.gauge("flush_file_num", "cached descriptors")?,
            deleted_shuffle_directories: it
                .counter("total_delete_file_num", "shuffle directories removed")?,
            deleted_bytes: it.counter("total_delete_data", "payload bytes removed from local disks")?,
            deletion_failed: it.counter("total_local_rename_and_deletion_failed", "removals that failed")?,
            dirs_total: it.gauge("local_storage_total_dirs_num", "data directories")?,
            dirs_corrupted: it.gauge("local_storage_corrupted_dirs_num", "unhealthy data directories")?,
            total_space: it.gauge("local_storage_total_space", "bytes of the file systems")?,
            whole_disk_used: it.gauge("local_storage_whole_disk_used_space", "bytes used by anybody")?,
            service_used: it.gauge("local_storage_service_used_space", "bytes used by this worker")?,
            used_bytes: it.gauge("storage_used_bytes", "bytes used by this worker")?,
            used_ratio: it.keep(Gauge::new("local_storage_used_space_ratio", "used space by all space"))?,
            is_writable: it.gauges("local_storage_is_writable", "0 = takes batches, 1 = does not", disk)?,
            is_timeout: it.gauges("local_storage_is_timeout", "1 = did not answer in time", disk)?,
            disk_is_healthy: it.gauges("local_disk_is_healthy", "0 = healthy, 1 = not", "root")?,
            disk_is_corrupted: it.gauges(
                "local_disk_is_corrupted",
                "1 = fails or returns wrong bytes",
                "root",
            )?,
            disk_capacity: it.gauges("local_disk_capacity", "bytes of the file system", "root")?,
            disk_used: it.gauges("local_disk_used", "bytes used by anybody", "root")?,
            disk_service_used: it.gauges("local_disk_service_used", "bytes used by this worker", "root")?,
            disk_used_ratio: it.ratios("local_disk_used_ratio", "used space by all space")?,
            disk_service_used_ratio: it
                .ratios("local_disk_service_used_ratio", "space used by this worker by all space")?,
            extents: it.gauge("local_extents", "published extents held in memory")?,
            extent_bytes: it.keep(Histogram::with_opts(extent_bytes))?,
            append_operations: it.counters(
                "localfile_disk_append_operation_counter",
                "write calls",
                "root",
            )?,
            append_bytes: it.counters(
                "localfile_disk_append_operation_bytes_counter",
                "bytes written",
                "root",
            )?,
            append_duration: it
                .durations("localfile_disk_append_operation_duration", "seconds of write calls")?,
            sync_duration: it.durations(
                "localfile_disk_sync_operation_duration",
                "seconds of syncs, each for all who wait",
            )?,
            read_operations: it.counters("localfile_disk_read_operation_counter", "read calls", "root")?,
            read_bytes: it.counters("localfile_disk_read_operation_bytes_counter", "bytes read", "root")?,
            read_duration: it.durations("localfile_disk_read_operation_duration", "seconds of read calls")?,
            delete_duration: it
                .durations("localfile_disk_delete_operation_duration", "seconds of removals")?,
        };
        also(registry, &metrics.deletion_failed, "purge_failed_count")?;
        also(registry, &metrics.read_crc_mismatches, "total_localfile_detected_in_consistency")?;
        Ok(metrics)
    }
}
