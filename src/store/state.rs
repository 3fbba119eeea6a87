//! State of a tier: whether it takes batches, its usage, and its disks. Pure values.
//!
//! Several directories on one mount point count as one for coordinators and dashboards (Uniffle
//! #2251): [`by_mount`].

use std::path::PathBuf;

use serde::Serialize;
use uniffle_io::{Media, Mount};
use uuid::Uuid;

/// State of a tier.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TierState {
    /// Reason why this worker should get no new shuffles, or `None` if the tier is healthy.
    pub complaint: Option<&'static str>,
    /// Capacity in bytes, if known.
    pub capacity_bytes: Option<u64>,
    /// Bytes of our data in the tier.
    pub used_bytes: u64,
    /// Disks of the tier, if it has any.
    pub disks: Vec<DiskInfo>,
    /// Object store of the tier, if it has one.
    pub object_store: Option<ObjectStoreState>,
    /// HDFS clusters of the tier, if it writes to any.
    pub hdfs: Option<HdfsState>,
}

/// The HDFS clusters to which known shuffles write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct HdfsState {
    /// Number of remote stores in use. Each combination of path, settings and user is one.
    pub stores: usize,
    /// Number of remote stores that fail.
    pub failing_stores: usize,
    /// Payload written for known shuffles.
    pub written_bytes: u64,
}

/// An object store, and the read cache in front of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct ObjectStoreState {
    /// Bytes of the segments of known shuffles.
    pub stored_bytes: u64,
    /// True if the last calls failed because of the store.
    pub is_failing: bool,
    /// Bytes in use in the read cache.
    pub cache_used_bytes: u64,
    /// Capacity of the read cache, or 0 without a cache.
    pub cache_capacity_bytes: u64,
    /// Number of chunks that reads found in the cache.
    pub cache_hits: u64,
    /// Number of chunks that were fetched into the cache.
    pub cache_misses: u64,
}

/// Condition of a disk, from good to bad.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DiskCondition {
    /// Takes batches.
    Healthy,
    /// Serves data. Takes batches again below the low watermark. If a write found no space, also a
    /// probe must succeed, or files must have been removed.
    Full,
    /// The file system is read-only. Serves data, but takes none until a probe succeeds.
    ReadOnly,
    /// The path leads elsewhere, as after an unmount. Neither read nor written until it leads back.
    Detached,
    /// Did not answer in time. Avoided until a probe succeeds.
    Hung,
    /// Failed. Avoided until a probe succeeds.
    Broken,
}

/// State of a disk.
#[derive(Debug, Clone, PartialEq)]
pub struct DiskInfo {
    /// Root directory.
    pub path: PathBuf,
    /// Persistent identity.
    pub uuid: Uuid,
    /// Condition of the disk.
    pub condition: DiskCondition,
    /// Description of the fault of an unhealthy disk. For a full disk, also the missing space and
    /// the remedy.
    pub fault: Option<String>,
    /// Number of errors counted against the disk.
    pub failures: u64,
    /// Number of times that the healthy disk became read-only, detached, hung or broken.
    pub faults: u64,
    /// Mount point of the disk.
    pub mount: Mount,
    /// Size of the file system.
    pub total_bytes: u64,
    /// Free space in bytes.
    pub free_bytes: u64,
    /// Id of the file system.
    pub file_system: u64,
    /// Bytes in our data and index logs.
    pub used_bytes: u64,
    /// Bytes being written now.
    pub in_flight_bytes: u64,
}

impl DiskInfo {
    /// Returns whether the disk is not read-only, detached, hung or broken. It may be full.
    pub fn is_healthy(&self) -> bool {
        self.condition <= DiskCondition::Full
    }

    /// Returns whether the disk is healthy, but full.
    pub fn is_full(&self) -> bool {
        self.condition == DiskCondition::Full
    }
}

/// A mount point with data directories on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountUsage {
    /// The mount point.
    pub point: PathBuf,
    /// Kind of its device.
    pub media: Media,
    /// Size of the file system.
    pub total_bytes: u64,
    /// Bytes in use, by any process.
    pub used_bytes: u64,
    /// Number of errors counted against its directories.
    pub failures: u64,
    /// Worst condition of its directories.
    pub condition: DiskCondition,
}

/// Groups `disks` by mount point, in the order of their first appearance.
pub fn by_mount(disks: &[DiskInfo]) -> Vec<MountUsage> {
    let mut mounts: Vec<MountUsage> = Vec::new();
    for disk in disks {
        match mounts.iter_mut().find(|mount| mount.point == disk.mount.point) {
            Some(mount) => {
                mount.failures = mount.failures.saturating_add(disk.failures);
                mount.condition = mount.condition.max(disk.condition);
            }
            None => mounts.push(MountUsage {
                point: disk.mount.point.clone(),
                media: disk.mount.media,
                total_bytes: disk.total_bytes,
                used_bytes: disk.total_bytes.saturating_sub(disk.free_bytes),
                failures: disk.failures,
                condition: disk.condition,
            }),
        }
    }
    mounts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(path: &str, point: &str, condition: DiskCondition) -> DiskInfo {
        DiskInfo {
            path: path.into(),
            uuid: uuid::Uuid::nil(),
            condition,
            fault: None,
            failures: 2,
            faults: 0,
            mount: Mount { point: point.into(), media: Media::Ssd },
            total_bytes: 1000,
            free_bytes: 400,
            file_system: 7,
            used_bytes: 100,
            in_flight_bytes: 0,
        }
    }

    #[test]
    fn directories_on_one_mount_are_counted_once() {
        let disks = [
            disk("/data/a", "/data", DiskCondition::Healthy),
            disk("/other/a", "/other", DiskCondition::Full),
            disk("/data/b", "/data", DiskCondition::Broken),
        ];
        let mounts = by_mount(&disks);
        let expected = MountUsage {
            point: "/data".into(),
            media: Media::Ssd,
            total_bytes: 1000,
            used_bytes: 600,
            failures: 4,
            condition: DiskCondition::Broken,
        };
        assert_eq!(mounts.len(), 2);
        assert_eq!(mounts[0], expected);
        assert_eq!((mounts[1].condition, mounts[1].failures), (DiskCondition::Full, 2));
    }
}
