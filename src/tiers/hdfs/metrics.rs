//! The tier's metrics. Names are Java's where Java has them, with its label; the rest are riffle's.

use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

/// Java's label: the host part of the remote path.
const LABEL: &str = "storage_host";

#[derive(Debug)]
pub(super) struct Metrics {
    written_bytes: IntCounterVec,
    huge_bytes: IntCounterVec,
    retries: IntCounterVec,
    writes: IntCounterVec,
    failures: IntCounterVec,
    successes: IntCounterVec,
    failing: IntGaugeVec,
    deletions_failed: IntCounterVec,
    pub(super) used_bytes: IntCounter,
    pub(super) writing_bytes: IntGauge,
    pub(super) remotes: IntGauge,
}

/// Those of one file system.
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
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let counters = |name: &str, help: &str| -> prometheus::Result<IntCounterVec> {
            let counters = IntCounterVec::new(Opts::new(name, help), &[LABEL])?;
            registry.register(Box::new(counters.clone()))?;
            Ok(counters)
        };
        let gauge = |name: &str, help: &str| -> prometheus::Result<IntGauge> {
            let gauge = IntGauge::new(name, help)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        let failing = IntGaugeVec::new(
            Opts::new(
                "remote_storage_is_failing",
                "1 while a remote store's last calls failed for its own fault",
            ),
            &[LABEL],
        )?;
        registry.register(Box::new(failing.clone()))?;
        let used_bytes =
            IntCounter::new("total_hdfs_used", "Payload bytes written to remote stores, all together")?;
        registry.register(Box::new(used_bytes.clone()))?;
        Ok(Self {
            written_bytes: counters("total_hadoop_write_data", "Payload bytes written to a remote store")?,
            huge_bytes: counters(
                "total_hadoop_write_data_for_huge_partition",
                "Payload bytes of huge partitions written to a remote store",
            )?,
            retries: counters(
                "storage_retry_write_remote",
                "Batches that were to be written to a remote store and had failed before, there or elsewhere",
            )?,
            writes: counters(
                "storage_total_write_remote",
                "Batches that were to be written to a remote store",
            )?,
            failures: counters("storage_failed_write_remote", "Batches that a remote store did not take")?,
            successes: counters("storage_success_write_remote", "Batches that a remote store took")?,
            failing,
            deletions_failed: counters(
                "total_remote_storage_deletion_failed",
                "Directories of a remote store that could not be removed and were left",
            )?,
            used_bytes,
            writing_bytes: gauge(
                "memory_spill_hdfs_in_flushing_bytes",
                "Payload bytes that are being written to remote stores now",
            )?,
            remotes: gauge("remote_storage_connections", "Remote file systems in use, by settings and user")?,
        })
    }

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
