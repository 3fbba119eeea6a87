//! Counters and gauges of the service, with the names of the Java server and riffle.
//!
//! Counters begin with the process. Gauges of live values are old until
//! `Diagnostics::refresh_metrics` sets them, which must run before metrics are gathered.

use prometheus::{Histogram, IntCounter, IntGauge};

use crate::metrics::{self, clamped};
use crate::service::diagnostics::statistics::AppStatistics;
use crate::service::diagnostics::top_apps::TopApps;
use crate::service::quota::QuotaMetrics;
use crate::service::reads::metrics::ReadMetrics;
use crate::service::status::WorkerState;

metrics::table! {
    /// Metrics of the service.
    pub(crate) struct ServiceMetrics {
        received_bytes: IntCounter =
            "total_received_data", "Payload bytes of acknowledged blocks", also "total_memory_used";
        received_blocks: IntCounter = "total_received_blocks", "Acknowledged blocks";
        rejected_sends: IntCounter = "total_rejected_sends",
            "Sends refused or ended early after their header was read";
        slow_sends_ended: IntCounter = "slow_sends_ended_total",
            "Slow sends ended while another application waited for memory";
        crc_mismatches: IntCounter =
            "total_received_crc_mismatch", "Received blocks with a wrong CRC-32";
        lost_blocks: IntCounter = "total_lost_blocks", "Reported blocks that were lost";
        lost_bytes: IntCounter = "total_lost_bytes", "Bytes of extents with lost blocks, if known";
        healed_blocks: IntCounter = "total_healed_blocks", "Lost blocks restored by a resend";
        reads_refused_for_loss: IntCounter =
            "total_reads_refused_for_loss", "Reads refused because a requested block is lost";
        reports_refused_for_loss: IntCounter = "total_reports_refused_for_loss",
            "Reports refused because their blocks were lost with an earlier process";
        lost_blocks_now: IntGauge = "lost_blocks", "Currently lost blocks";
        apps_with_loss: IntGauge = "app_with_lost_blocks_num", "Applications with lost blocks";
        unverified_partitions: IntGauge =
            "unverified_partitions", "Partitions with a block scan in progress after a read error";
        incomplete_shuffles: IntGauge = "incomplete_shuffles",
            "Shuffles whose results are refused because reports may be missing";
        unknown_shuffles_refused: IntCounter = "unknown_shuffles_refused",
            "Result queries refused because metadata of their unknown shuffle may be missing";
        recovered_blocks: IntGauge = "recovered_blocks", "Blocks recovered from an earlier process";
        recovered_bytes: IntGauge = "recovered_bytes", "Payload bytes recovered from an earlier process";
        recovery_ms: IntGauge = "recovery_duration_ms", "Milliseconds that recovery took";
        read_bytes: IntCounter = "total_read_data", "Payload bytes read from all tiers";
        read_memory_bytes: IntCounter =
            "total_read_memory_data", "Payload bytes read from memory", also "total_read_data_from_memory";
        require_buffer_refused: IntCounter =
            "total_require_buffer_failed", "Tickets refused for lack of memory";
        require_buffer_refused_regular: IntCounter =
            "total_require_buffer_failed_for_regular_partition", "Tickets refused because memory is full";
        require_buffer_refused_over_share: IntCounter = "total_require_buffer_failed_over_share",
            "Tickets refused to applications above their fair share while others wait";
        require_buffer_refused_huge: IntCounter = "total_require_buffer_failed_for_huge_partition",
            "Tickets refused because a huge partition fills its memory share",
            also "total_huge_partition_require_buffer_failed";
        require_buffer_waited: IntCounter = "tickets_granted_in_line_total",
            "Tickets granted to requests that had waited for memory";
        ticket_bytes: Histogram = "ticket_bytes", "Bytes of granted tickets", in metrics::BYTES_BUCKETS;
        ticket_wait: Histogram = "ticket_wait_seconds",
            "Seconds from an application's first refusal for lack of memory to its next ticket",
            in metrics::SECONDS_BUCKETS;
        ticket_lifetime: Histogram =
            "ticket_lifetime_seconds", "Seconds from a ticket's grant to its send", in metrics::SECONDS_BUCKETS;
        hard_limit_exceeded: IntCounter = "total_huge_partition_exceed_hard_limit_num",
            "Requests refused permanently because a partition exceeds its hard limit";
        splits: IntCounter = "hard_split_count",
            "Partitions that requireBuffer told clients to write elsewhere, once per response";
        app_removal: Histogram = "total_remove_resource_time",
            "Seconds to remove an application, files included", in metrics::SECONDS_BUCKETS;
        shuffle_removal: Histogram = "total_remove_resource_by_shuffle_ids_time",
            "Seconds to remove a shuffle, files included", in metrics::SECONDS_BUCKETS;
        huge_partitions_marked: IntCounter = "total_huge_partition_num",
            "Partitions marked huge since start", also "total_huge_partition_number";
        apps_with_huge_partition_marked: IntCounter =
            "total_app_with_huge_partition_num", "Applications that had a huge partition since start";
        apps_registered: IntCounter =
            "total_app_num", "Applications registered since start", also "total_app_number";
        partitions_registered: IntCounter =
            "total_partition_num", "Partitions registered since start", also "total_partition_number";
        unregisters: IntCounter =
            "total_unregister", "Unregister calls for registered shuffles and applications";
        apps_expired: IntCounter = "total_expired_app_num", "Applications expired without a heartbeat";
        apps_not_found: IntCounter = "total_app_not_found_num", "Requests of unknown applications";
        read_memory_requests: IntCounter =
            "total_require_read_memory_num", "Local reads that requested read memory";
        read_memory_refused: IntCounter =
            "total_require_read_memory_failed_num", "Local reads that timed out waiting for read memory";
        apps: IntGauge = "app_num_with_node", "Registered applications", also "app_number";
        partitions: IntGauge =
            "partition_num_with_node", "Registered partitions", also "partition_number";
        block_ids: IntGauge = "reported_block_count", "Reported block ids in memory", also "block_id_number";
        unhealthy: IntGauge = "service_is_healthy", "Health of the worker: 0 = healthy, 1 = unhealthy";
        java_unhealthy: IntGauge = "is_healthy", "Health of the worker: 0 = healthy, 1 = unhealthy";
        huge_partitions: IntGauge =
            "huge_partition_num", "Huge partitions", also "huge_partition_number";
        apps_with_huge_partition: IntGauge =
            "app_with_huge_partition_num", "Applications with a huge partition";
    }
    with { reads: ReadMetrics, top: TopApps, quotas: QuotaMetrics }
}

impl ServiceMetrics {
    pub(super) fn count_regular_refusal(&self) {
        self.require_buffer_refused.inc();
        self.require_buffer_refused_regular.inc();
    }

    pub(super) fn count_huge_refusal(&self) {
        self.require_buffer_refused.inc();
        self.require_buffer_refused_huge.inc();
    }

    pub(super) fn set_inventory(&self, apps: &[AppStatistics], block_ids: u64) {
        self.apps.set(clamped(apps.len()));
        self.partitions.set(clamped(apps.iter().map(|app| app.partitions).sum::<u64>()));
        self.huge_partitions.set(clamped(apps.iter().map(|app| app.huge_partitions).sum::<u64>()));
        let with_huge = apps.iter().filter(|app| app.huge_partitions > 0).count();
        self.apps_with_huge_partition.set(clamped(with_huge));
        self.block_ids.set(clamped(block_ids));
        self.top.set(apps);
    }

    pub(super) fn set_state(&self, state: WorkerState) {
        let unhealthy = i64::from(state == WorkerState::Unhealthy);
        self.unhealthy.set(unhealthy);
        self.java_unhealthy.set(unhealthy);
    }
}
