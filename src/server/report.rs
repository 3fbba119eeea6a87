//! What a heartbeat says of this worker: collected from the parts when it is about to leave.
//!
//! Applications are the service's statistics.

use std::collections::HashMap;
use std::sync::Arc;

use crate::coordinator::{NodeReport, ReportSource, identity};
use crate::memory::Memory;
use crate::metrics::clamped;
use crate::proto::storage_info::{StorageMedia, StorageStatus};
use crate::proto::{ApplicationInfo, ServerStatus, StorageInfo};
use crate::service::{AppStatistics, Service, WorkerState};
use crate::tiers::{DiskCondition, MountUsage, by_mount};
use uniffle_io::Media;

use super::settings::RuntimeSettings;

/// The parts that are asked.
#[derive(Debug, Clone)]
pub(super) struct Parts {
    pub(super) service: Arc<Service>,
    pub(super) memory: Arc<Memory>,
    pub(super) live: Arc<RuntimeSettings>,
}

/// `fixed` with the figures of the moment.
pub(super) fn source(fixed: NodeReport, parts: Parts) -> ReportSource {
    ReportSource::new(move || {
        let mut report = fixed.clone();
        let Parts { service, memory, live } = &parts;
        report.tags = identity::tags(report.netty_port.is_some(), &live.tags());
        report.status = node_status(service.status().state());
        report.used_memory_bytes = memory.budget().used();
        report.available_memory_bytes = memory.budget().capacity().saturating_sub(memory.budget().used());
        report.pre_allocated_memory_bytes = memory.tickets().pre_allocated_bytes();
        if let Some(flusher) = service.flusher() {
            report.events_in_flush = u32::try_from(flusher.unfinished()).unwrap_or(u32::MAX);
        }
        let disks: Vec<_> = service.tiers().iter().flat_map(|tier| tier.state().disks).collect();
        report.storage = storage(&by_mount(&disks));
        report.applications = application_info(&service.app_statistics());
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

/// By mount point, as coordinators keep it. Speeds are 0, as the Java server sends them.
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
                DiskCondition::Hung | DiskCondition::Broken => StorageStatus::Unhealthy,
            }
            .into(),
            ..StorageInfo::default()
        };
        (mount_point, info)
    };
    mounts.iter().map(info).collect()
}

/// Applications that a heartbeat tells of, the largest first: it is for dashboards, and must stay small.
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
    fn a_mount_is_told_with_its_worst_condition() {
        let mount = |point: &str, media, condition| MountUsage {
            point: point.into(),
            media,
            total_bytes: u64::MAX,
            used_bytes: 5,
            failures: 3,
            condition,
        };
        let told = storage(&[
            mount("/a", Media::Hdd, DiskCondition::Healthy),
            mount("/b", Media::Ssd, DiskCondition::Full),
            mount("/c", Media::Unknown, DiskCondition::Hung),
        ]);
        assert_eq!(told["/a"].storage_media(), StorageMedia::Hdd);
        assert_eq!((told["/a"].capacity, told["/a"].num_of_writing_failures), (i64::MAX, 3));
        assert_eq!(told["/b"].status(), StorageStatus::Overused);
        assert_eq!((told["/c"].status(), told["/c"].used_bytes), (StorageStatus::Unhealthy, 5));
    }
}
