//! Renders a [`NodeSnapshot`](super::snapshot::NodeSnapshot) as a heartbeat report.
//!
//! A report needs current figures, because coordinators assign by them: every report takes a new
//! snapshot.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::metrics::clamped;
use crate::proto::storage_info::{StorageMedia, StorageStatus};
use crate::proto::{ApplicationInfo, ServerStatus, StorageInfo};
use crate::service::{AppStatistics, WorkerState};
use crate::store::{DiskCondition, MountUsage, by_mount};
use uniffle_coordinator::embedded::DISKS_USED;
use uniffle_coordinator::{ReportSource, identity};
use uniffle_io::Media;

use super::snapshot::{Inspector, NodeSnapshot};

/// Returns a source of reports. Each report has the current figures.
pub(in crate::server) fn source(node: Arc<Inspector>) -> ReportSource {
    ReportSource::new(move || {
        let mut report = node.fixed.clone();
        report.tags = identity::tags(report.netty_port.is_some(), &node.live.tags());
        report.status = node_status(node.service.status().state());
        let snapshot = node.snapshot(Duration::ZERO);
        let memory = &snapshot.memory;
        report.used_memory_bytes = memory.used_bytes;
        report.available_memory_bytes = memory.capacity_bytes.saturating_sub(memory.used_bytes);
        report.pre_allocated_memory_bytes = memory.reserved_bytes;
        report.events_in_flush = u32::try_from(snapshot.flush.unfinished_batches).unwrap_or(u32::MAX);
        report.storage = storage(&by_mount(&snapshot.disks));
        report.applications = application_info(&snapshot.apps);
        report.display_metrics = display_metrics(&snapshot);
        report
    })
}

fn node_status(state: WorkerState) -> ServerStatus {
    match state {
        WorkerState::Active => ServerStatus::Active,
        WorkerState::Unhealthy => ServerStatus::Unhealthy,
        WorkerState::Decommissioning => ServerStatus::Decommissioning,
        WorkerState::Decommissioned => ServerStatus::Decommissioned,
    }
}

/// Returns the storage by mount point, as coordinators key it. Speeds are 0, as in the Java server.
fn storage(mounts: &[MountUsage]) -> HashMap<String, StorageInfo> {
    let info = |mount: &MountUsage| {
        let mount_point = mount.point.display().to_string();
        let info = StorageInfo {
            mount_point: mount_point.clone(),
            storage_media: match mount.media {
                Media::Unknown => StorageMedia::StorageTypeUnknown,
                Media::Hdd => StorageMedia::Hdd,
                Media::Ssd => StorageMedia::Ssd,
            }
            .into(),
            capacity: clamped(mount.total_bytes),
            used_bytes: clamped(mount.used_bytes),
            num_of_writing_failures: clamped(mount.failures),
            status: match mount.condition {
                DiskCondition::Healthy => StorageStatus::Normal,
                DiskCondition::Full => StorageStatus::Overused,
                DiskCondition::ReadOnly
                | DiskCondition::Detached
                | DiskCondition::Hung
                | DiskCondition::Broken => StorageStatus::Unhealthy,
            }
            .into(),
            ..StorageInfo::default()
        };
        (mount_point, info)
    };
    mounts.iter().map(info).collect()
}

/// Returns the figures on the coordinator's dashboard, under the names of metrics.
fn display_metrics(snapshot: &NodeSnapshot) -> HashMap<String, String> {
    let partitions: u64 = snapshot.apps.iter().map(|app| app.partitions).sum();
    let on_disks = snapshot.disks.iter().map(|disk| disk.used_bytes).sum();
    let shown = [
        ("app_num_with_node", snapshot.apps.len() as u64),
        ("partition_num_with_node", partitions),
        ("event_queue_size", snapshot.flush.queued_batches as u64),
        ("in_flush_buffer_size", snapshot.memory.in_flight_bytes),
        (DISKS_USED, on_disks),
    ];
    shown.map(|(name, value)| (name.to_owned(), value.to_string())).into()
}

/// Maximum number of applications in a heartbeat, largest first. They are for dashboards, and the
/// report must stay small.
const REPORTED_APPS_MAX: usize = 1_000;

fn application_info(apps: &[AppStatistics]) -> Vec<ApplicationInfo> {
    let mut largest: Vec<&AppStatistics> = apps.iter().collect();
    largest.sort_unstable_by_key(|app| std::cmp::Reverse(app.received_bytes));
    largest.truncate(REPORTED_APPS_MAX);
    let info = |app: &&AppStatistics| ApplicationInfo {
        app_id: app.app.to_string(),
        partition_num: clamped(app.partitions),
        memory_size: clamped(app.in_memory_bytes),
        local_file_num: clamped(app.local_files),
        local_total_size: clamped(app.local_bytes),
        hadoop_file_num: clamped(app.remote_files),
        hadoop_total_size: clamped(app.remote_bytes),
        total_size: clamped(app.received_bytes),
    };
    largest.iter().map(info).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_is_reported_with_media_sizes_and_status() {
        let mount = |point: &str, media, condition| MountUsage {
            point: point.into(),
            media,
            total_bytes: u64::MAX,
            used_bytes: 5,
            failures: 3,
            condition,
        };
        let info = storage(&[
            mount("/a", Media::Hdd, DiskCondition::Healthy),
            mount("/b", Media::Ssd, DiskCondition::Full),
            mount("/c", Media::Unknown, DiskCondition::Hung),
        ]);
        assert_eq!(info["/a"].storage_media(), StorageMedia::Hdd);
        assert_eq!((info["/a"].capacity, info["/a"].num_of_writing_failures), (i64::MAX, 3));
        assert_eq!(info["/b"].status(), StorageStatus::Overused);
        assert_eq!((info["/c"].status(), info["/c"].used_bytes), (StorageStatus::Unhealthy, 5));
    }
}
