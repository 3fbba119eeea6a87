//! Counters and gauges of the service; names as the Java server's and riffle's (PROTOCOL §10.2, §10.6).

use std::collections::HashSet;

use parking_lot::Mutex;
use prometheus::{IntCounter, IntGauge, IntGaugeVec, Registry};

use super::statistics::{AppStatistics, largest, smallest_blocks};
use super::status::WorkerState;
use crate::metrics;
use crate::types::AppId;

/// Applications that one of the top-N metrics shows: bounds the number of series (PROTOCOL §10.2).
const TOP_APPS: usize = 10;

/// See the module.
#[derive(Debug)]
pub struct ServiceMetrics {
    pub(super) received_bytes: IntCounter,
    pub(super) received_blocks: IntCounter,
    pub(super) rejected_sends: IntCounter,
    pub(super) crc_mismatches: IntCounter,
    pub(super) read_bytes: IntCounter,
    pub(super) read_memory_bytes: IntCounter,
    pub(super) read_local_data_bytes: IntCounter,
    pub(super) read_local_index_bytes: IntCounter,
    require_buffer_refused: IntCounter,
    require_buffer_refused_regular: IntCounter,
    require_buffer_refused_huge: IntCounter,
    pub(super) hard_limit_exceeded: IntCounter,
    pub(super) huge_partitions_marked: IntCounter,
    pub(super) apps_with_huge_partition_marked: IntCounter,
    pub(super) apps_registered: IntCounter,
    pub(super) partitions_registered: IntCounter,
    pub(super) unregisters: IntCounter,
    pub(super) apps_expired: IntCounter,
    apps: IntGauge,
    partitions: IntGauge,
    block_ids: IntGauge,
    unhealthy: IntGauge,
    java_unhealthy: IntGauge,
    huge_partitions: IntGauge,
    apps_with_huge_partition: IntGauge,
    top: TopApps,
}

impl ServiceMetrics {
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let counter = |name: &str, help: &str| -> prometheus::Result<IntCounter> {
            let counter = IntCounter::new(name, help)?;
            registry.register(Box::new(counter.clone()))?;
            Ok(counter)
        };
        let gauge = |name: &str, help: &str| -> prometheus::Result<IntGauge> {
            let gauge = IntGauge::new(name, help)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        Ok(Self {
            received_bytes: counter("total_received_data", "Payload bytes of blocks that were acknowledged")?,
            received_blocks: counter("total_received_blocks", "Blocks that were acknowledged and stored")?,
            rejected_sends: counter("total_rejected_sends", "Sends refused after their header was read")?,
            crc_mismatches: counter(
                "total_received_crc_mismatch",
                "Blocks whose bytes did not have their CRC-32",
            )?,
            read_bytes: counter("total_read_data", "Payload bytes read, all tiers")?,
            read_memory_bytes: counter("total_read_memory_data", "Payload bytes read from memory")?,
            read_local_data_bytes: counter(
                "total_read_local_data_file",
                "Payload bytes read from local disks",
            )?,
            read_local_index_bytes: counter(
                "total_read_local_index_file",
                "Index bytes read from local disks",
            )?,
            require_buffer_refused: counter(
                "total_require_buffer_failed",
                "Tickets refused for lack of memory",
            )?,
            require_buffer_refused_regular: counter(
                "total_require_buffer_failed_for_regular_partition",
                "Tickets refused because the memory is full",
            )?,
            require_buffer_refused_huge: counter(
                "total_require_buffer_failed_for_huge_partition",
                "Tickets refused because a huge partition fills its share of the memory",
            )?,
            hard_limit_exceeded: counter(
                "total_huge_partition_exceed_hard_limit_num",
                "Requests refused for good because a partition is too large",
            )?,
            huge_partitions_marked: counter(
                "total_huge_partition_num",
                "Partitions marked huge since start",
            )?,
            apps_with_huge_partition_marked: counter(
                "total_app_with_huge_partition_num",
                "Applications that had a huge partition since start",
            )?,
            apps_registered: counter("total_app_num", "Applications registered since start")?,
            partitions_registered: counter("total_partition_num", "Partitions registered since start")?,
            unregisters: counter(
                "total_unregister",
                "Unregister calls of shuffles and applications that were known",
            )?,
            apps_expired: counter("total_expired_app_num", "Applications purged for want of a heartbeat")?,
            apps: gauge("app_num_with_node", "Applications known now")?,
            partitions: gauge("partition_num_with_node", "Partitions registered now")?,
            block_ids: gauge("reported_block_count", "Reported block ids held")?,
            unhealthy: gauge("service_is_healthy", "0 = healthy, 1 = not")?,
            java_unhealthy: gauge("is_healthy", "0 = healthy, 1 = not")?,
            huge_partitions: gauge("huge_partition_num", "Partitions marked huge now")?,
            apps_with_huge_partition: gauge(
                "app_with_huge_partition_num",
                "Applications with a huge partition now",
            )?,
            top: TopApps::new(registry)?,
        })
    }

    pub(super) fn count_regular_refusal(&self) {
        self.require_buffer_refused.inc();
        self.require_buffer_refused_regular.inc();
    }

    pub(super) fn count_huge_refusal(&self) {
        self.require_buffer_refused.inc();
        self.require_buffer_refused_huge.inc();
    }

    pub(super) fn set_inventory(&self, apps: &[AppStatistics], block_ids: u64) {
        self.apps.set(clamped(apps.len() as u64));
        self.partitions.set(clamped(apps.iter().map(|app| app.partitions).sum()));
        self.huge_partitions.set(clamped(apps.iter().map(|app| app.huge_partitions).sum()));
        let with_huge = apps.iter().filter(|app| app.huge_partitions > 0).count();
        self.apps_with_huge_partition.set(clamped(with_huge as u64));
        self.block_ids.set(clamped(block_ids));
        self.top.set(apps);
    }

    pub(super) fn set_state(&self, state: WorkerState) {
        let unhealthy = i64::from(state == WorkerState::Unhealthy);
        self.unhealthy.set(unhealthy);
        self.java_unhealthy.set(unhealthy);
    }
}

fn clamped(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// The applications that stand out, by several measures.
#[derive(Debug)]
struct TopApps {
    received: RankedGauge,
    in_memory: RankedGauge,
    in_memory_blocks: RankedGauge,
    small_blocks: RankedGauge,
    flushed: RankedGauge,
}

impl TopApps {
    fn new(registry: &Registry) -> prometheus::Result<Self> {
        let ranked = |name: &str, help: &str| RankedGauge::new(registry, name, help);
        Ok(Self {
            received: ranked(
                "topN_of_total_data_size_for_app",
                "Payload bytes received, of the ten largest applications",
            )?,
            in_memory: ranked(
                "topN_of_in_memory_data_size_for_app",
                "Payload bytes in memory, of the ten largest applications",
            )?,
            in_memory_blocks: ranked(
                "topN_of_in_memory_block_count_for_app",
                "Blocks in memory, of the ten applications with the most",
            )?,
            small_blocks: ranked(
                "bottomN_of_in_memory_avg_block_size_for_app",
                "Mean payload bytes of blocks in memory, of the ten applications with the smallest",
            )?,
            flushed: ranked(
                "topN_of_on_localfile_data_size_for_app",
                "Payload bytes brought to local disks, of the ten largest applications",
            )?,
        })
    }

    fn set(&self, apps: &[AppStatistics]) {
        self.received.set(&largest(apps, TOP_APPS, |app| app.received_bytes));
        self.in_memory.set(&largest(apps, TOP_APPS, |app| app.in_memory_bytes));
        self.in_memory_blocks.set(&largest(apps, TOP_APPS, |app| app.in_memory_blocks));
        self.small_blocks.set(&smallest_blocks(apps, TOP_APPS));
        self.flushed.set(&largest(apps, TOP_APPS, AppStatistics::flushed_bytes));
    }
}

/// A gauge by application of which only those that were set last have a series.
#[derive(Debug)]
struct RankedGauge {
    gauge: IntGaugeVec,
    shown: Mutex<HashSet<AppId>>,
}

impl RankedGauge {
    fn new(registry: &Registry, name: &str, help: &str) -> prometheus::Result<Self> {
        let gauge = metrics::gauge_vec(registry, name, help, &["app_id"])?;
        Ok(Self { gauge, shown: Mutex::default() })
    }

    fn set(&self, ranked: &[(&AppId, u64)]) {
        let mut shown = self.shown.lock();
        let now: HashSet<AppId> = ranked.iter().map(|(app, _)| (*app).clone()).collect();
        for (app, value) in ranked {
            self.gauge.with_label_values(&[app.as_str()]).set(clamped(*value));
        }
        for gone in shown.difference(&now) {
            // It was set before, so that there is nothing that can fail.
            let _ = self.gauge.remove_label_values(&[gone.as_str()]);
        }
        *shown = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_application_that_left_the_top_has_no_series() {
        let registry = Registry::new();
        let ranked = RankedGauge::new(&registry, "top", "help").unwrap();
        let (a, b) = (AppId::parse("a").unwrap(), AppId::parse("b").unwrap());
        ranked.set(&[(&a, 7), (&b, 5)]);
        ranked.set(&[(&b, 6)]);
        let families = registry.gather();
        let series = families[0].get_metric();
        assert_eq!(series.len(), 1);
        assert_eq!(series[0].get_label()[0].value(), "b");
        ranked.set(&[]);
        assert!(registry.gather().is_empty());
    }
}
