//! Counters and gauges of the service; names as the Java server's and riffle's (docs/protocol.md §10.2, §10.6).

use prometheus::{Histogram, IntCounter, IntGauge, Registry};

use super::read_metrics::ReadMetrics;
use super::statistics::AppStatistics;
use super::status::WorkerState;
use super::top_apps::TopApps;
use crate::metrics;
use crate::metrics::clamped;

/// See the module.
#[derive(Debug)]
pub struct ServiceMetrics {
    pub(super) received_bytes: IntCounter,
    pub(super) received_blocks: IntCounter,
    pub(super) rejected_sends: IntCounter,
    pub(super) crc_mismatches: IntCounter,
    pub(super) lost_blocks: IntCounter,
    pub(super) lost_bytes: IntCounter,
    pub(super) healed_blocks: IntCounter,
    pub(super) reads_refused_for_loss: IntCounter,
    pub(super) reports_refused_for_loss: IntCounter,
    pub(super) lost_blocks_now: IntGauge,
    pub(super) apps_with_loss: IntGauge,
    pub(super) partitions_in_doubt: IntGauge,
    pub(super) reports_in_doubt: IntGauge,
    pub(super) recovered_blocks: IntGauge,
    pub(super) recovered_bytes: IntGauge,
    pub(super) recovery_ms: IntGauge,
    pub(super) reads: ReadMetrics,
    pub(super) read_bytes: IntCounter,
    pub(super) read_memory_bytes: IntCounter,
    pub(super) read_local_data_bytes: IntCounter,
    pub(super) read_local_index_bytes: IntCounter,
    require_buffer_refused: IntCounter,
    require_buffer_refused_regular: IntCounter,
    require_buffer_refused_huge: IntCounter,
    pub(super) ticket_bytes: Histogram,
    pub(super) ticket_wait: Histogram,
    pub(super) ticket_lifetime: Histogram,
    pub(super) hard_limit_exceeded: IntCounter,
    pub(super) splits_asked: IntCounter,
    pub(super) app_removal: Histogram,
    pub(super) shuffle_removal: Histogram,
    pub(super) huge_partitions_marked: IntCounter,
    pub(super) apps_with_huge_partition_marked: IntCounter,
    pub(super) apps_registered: IntCounter,
    pub(super) partitions_registered: IntCounter,
    pub(super) unregisters: IntCounter,
    pub(super) apps_expired: IntCounter,
    pub(super) apps_not_found: IntCounter,
    pub(super) read_memory_asked: IntCounter,
    pub(super) read_memory_refused: IntCounter,
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
    #[expect(clippy::too_many_lines, reason = "a list of names")]
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let counter = |name: &str, help: &str| metrics::counter(registry, name, help);
        let gauge = |name: &str, help: &str| metrics::gauge(registry, name, help);
        let removal = |name: &str, what: &str| {
            let help = format!("Seconds that it took to forget {what}");
            metrics::histogram(registry, name, &help, metrics::SECONDS_BUCKETS)
        };
        let metrics = Self {
            received_bytes: counter("total_received_data", "Payload bytes of blocks that were acknowledged")?,
            received_blocks: counter("total_received_blocks", "Blocks that were acknowledged and stored")?,
            rejected_sends: counter("total_rejected_sends", "Sends refused after their header was read")?,
            crc_mismatches: counter(
                "total_received_crc_mismatch",
                "Blocks whose bytes did not have their CRC-32",
            )?,
            lost_blocks: counter("total_lost_blocks", "Reported blocks that were found lost")?,
            lost_bytes: counter("total_lost_bytes", "Bytes of extents with lost blocks, as far as known")?,
            healed_blocks: counter("total_healed_blocks", "Lost blocks that were sent again")?,
            reads_refused_for_loss: counter(
                "total_reads_refused_for_loss",
                "Reads refused because a block that they want is lost",
            )?,
            reports_refused_for_loss: counter(
                "total_reports_refused_for_loss",
                "Reports refused because blocks of theirs were lost with an earlier process",
            )?,
            lost_blocks_now: gauge("lost_blocks", "Lost blocks now")?,
            apps_with_loss: gauge("app_with_lost_blocks_num", "Applications with lost blocks now")?,
            reports_in_doubt: gauge(
                "shuffles_with_reports_in_doubt",
                "Shuffles whose results are refused, as reports of them may be missing",
            )?,
            partitions_in_doubt: gauge(
                "partitions_in_doubt",
                "Partitions with reported blocks that are sought in remote stores now",
            )?,
            recovered_blocks: gauge("recovered_blocks", "Blocks taken over from an earlier process")?,
            recovered_bytes: gauge("recovered_bytes", "Payload bytes taken over from an earlier process")?,
            recovery_ms: gauge("recovery_duration_ms", "Milliseconds that taking over took")?,
            reads: ReadMetrics::new(registry)?,
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
            ticket_bytes: metrics::histogram(
                registry,
                "ticket_bytes",
                "Bytes of granted tickets",
                metrics::BYTES_BUCKETS,
            )?,
            ticket_wait: metrics::histogram(
                registry,
                "ticket_wait_seconds",
                "Time from an application's first refusal for lack of memory to its next ticket",
                metrics::SECONDS_BUCKETS,
            )?,
            ticket_lifetime: metrics::histogram(
                registry,
                "ticket_lifetime_seconds",
                "Time from a ticket's grant to its send",
                metrics::SECONDS_BUCKETS,
            )?,
            hard_limit_exceeded: counter(
                "total_huge_partition_exceed_hard_limit_num",
                "Requests refused for good because a partition is too large",
            )?,
            splits_asked: counter(
                "hard_split_count",
                "Partitions that a client was told to write elsewhere, in answers to requireBuffer",
            )?,
            app_removal: removal("total_remove_resource_time", "an application, files included")?,
            shuffle_removal: removal(
                "total_remove_resource_by_shuffle_ids_time",
                "a shuffle, files included",
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
            apps_not_found: counter(
                "total_app_not_found_num",
                "Requests of applications that are not known",
            )?,
            read_memory_asked: counter(
                "total_require_read_memory_num",
                "Local reads that asked for read memory",
            )?,
            read_memory_refused: counter(
                "total_require_read_memory_failed_num",
                "Local reads that got no read memory in time",
            )?,
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
        };
        metrics.name_as_riffle_does(registry)?;
        Ok(metrics)
    }

    fn name_as_riffle_does(&self, registry: &Registry) -> prometheus::Result<()> {
        let gauges = [
            (&self.apps, "app_number"),
            (&self.partitions, "partition_number"),
            (&self.huge_partitions, "huge_partition_number"),
            (&self.block_ids, "block_id_number"),
        ];
        let counters = [
            (&self.apps_registered, "total_app_number"),
            (&self.partitions_registered, "total_partition_number"),
            (&self.huge_partitions_marked, "total_huge_partition_number"),
            (&self.require_buffer_refused_huge, "total_huge_partition_require_buffer_failed"),
            (&self.read_memory_bytes, "total_read_data_from_memory"),
            (&self.received_bytes, "total_memory_used"),
        ];
        for (gauge, name) in gauges {
            metrics::also(registry, gauge, name)?;
        }
        for (counter, name) in counters {
            metrics::also(registry, counter, name)?;
        }
        Ok(())
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
        self.partitions.set(clamped(apps.iter().map(|app| app.partitions).sum::<u64>()));
        self.huge_partitions.set(clamped(apps.iter().map(|app| app.huge_partitions).sum::<u64>()));
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
