//! The tier's metrics. Names are Java's where they exist, with its label, the host of the remote
//! path. The others are riffle's.

use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec};

use crate::metrics;

metrics::table! {
    /// Counters and gauges of all file systems.
    pub(crate) struct Metrics {
        written_bytes: IntCounterVec["storage_host"] =
            "total_hadoop_write_data", "Payload bytes written to a remote store";
        huge_bytes: IntCounterVec["storage_host"] = "total_hadoop_write_data_for_huge_partition",
            "Payload bytes of huge partitions written to a remote store";
        retries: IntCounterVec["storage_host"] = "storage_retry_write_remote",
            "Retried batches for a remote store, after a failure there or elsewhere";
        writes: IntCounterVec["storage_host"] =
            "storage_total_write_remote", "Batches to be written to a remote store";
        failures: IntCounterVec["storage_host"] =
            "storage_failed_write_remote", "Batches that failed to be written to a remote store";
        successes: IntCounterVec["storage_host"] =
            "storage_success_write_remote", "Batches written to a remote store";
        failing: IntGaugeVec["storage_host"] = "remote_storage_is_failing",
            "Availability of a remote store: 1 while its latest calls failed";
        deletions_failed: IntCounterVec["storage_host"] = "total_remote_storage_deletion_failed",
            "Directories of a remote store that could not be deleted";
        used_bytes: IntCounter = "total_hdfs_used", "Payload bytes written to all remote stores";
        remotes: IntGauge = "remote_storage_connections", "Remote file systems in use, by settings and user";
    }
}

/// Metrics of one file system.
#[derive(Debug, Clone)]
pub(super) struct RemoteMetrics {
    pub(super) written_bytes: IntCounter,
    pub(super) huge_bytes: IntCounter,
    pub(super) retries: IntCounter,
    pub(super) writes: IntCounter,
    pub(super) failures: IntCounter,
    pub(super) successes: IntCounter,
    pub(super) failing: IntGauge,
    pub(super) deletions_failed: IntCounter,
}

impl Metrics {
    pub(super) fn of(&self, authority: &str) -> RemoteMetrics {
        let label = [authority];
        RemoteMetrics {
            written_bytes: self.written_bytes.with_label_values(&label),
            huge_bytes: self.huge_bytes.with_label_values(&label),
            retries: self.retries.with_label_values(&label),
            writes: self.writes.with_label_values(&label),
            failures: self.failures.with_label_values(&label),
            successes: self.successes.with_label_values(&label),
            failing: self.failing.with_label_values(&label),
            deletions_failed: self.deletions_failed.with_label_values(&label),
        }
    }
}
