//! How a tier is now: whether it takes batches, what it holds, and its disks. Pure values.
//!
//! Several directories on one mount point are one to coordinators and dashboards (Uniffle #2251): [`by_mount`].

use std::path::PathBuf;

use uniffle_io::{Media, Mount};
use uuid::Uuid;

/// How a tier is now.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TierState {
    /// Why no new shuffles should come to this worker; none while the tier is healthy.
    pub complaint: Option<&'static str>,
    /// Size of what it writes to; none when that is not known.
    pub capacity_bytes: Option<u64>,
    /// Bytes of ours in it.
    pub used_bytes: u64,
    /// Its disks, where it has any of its own.
    pub disks: Vec<DiskInfo>,
    /// Its object store, where it has one.
    pub object_store: Option<ObjectStoreState>,
}

/// An object store, and the read cache before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ObjectStoreState {
    /// Bytes of the segments of known shuffles.
    pub stored_bytes: u64,
    /// Whether the last calls failed by its fault.
    pub is_failing: bool,
    /// Bytes of the places in use in the read cache.
    pub cache_used_bytes: u64,
    /// Bytes of all its places; 0 = there is none.
    pub cache_capacity_bytes: u64,
    /// Chunks that reads found in it.
    pub cache_hits: u64,
    /// Chunks that were fetched for it.
    pub cache_misses: u64,
}

/// State of a disk, from good to bad.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DiskCondition {
    /// Takes batches.
    Healthy,
    /// Serves; takes batches again below the low watermark.
    Full,
    /// Its file system is read-only: serves, and takes nothing until a probe succeeds.
    ReadOnly,
    /// Its path leads elsewhere, as after an unmount: neither read nor written until it leads back.
    Detached,
    /// Did not answer in time; avoided until a probe succeeds.
    Hung,
    /// Failed; avoided until a probe succeeds.
    Broken,
}

/// What a disk tells about itself.
#[derive(Debug, Clone, PartialEq)]
pub struct DiskInfo {
    /// Root directory.
    pub path: PathBuf,
    /// Persistent identity.
    pub uuid: Uuid,
    /// Whether it takes batches, and why not.
    pub condition: DiskCondition,
    /// What is wrong when it is not healthy; of a full disk with what it lacks and what to do.
    pub fault: Option<String>,
    /// Errors that were held against it.
    pub failures: u64,
    /// Where it is mounted.
    pub mount: Mount,
    /// Size of its file system.
    pub total_bytes: u64,
    /// Bytes that fit.
    pub free_bytes: u64,
    /// Tells file systems apart.
    pub file_system: u64,
    /// Bytes in our data logs.
    pub used_bytes: u64,
    /// Bytes being written now.
    pub in_flight_bytes: u64,
}

impl DiskInfo {
    /// Not read-only, detached, hung or broken; it may be full.
    pub fn is_healthy(&self) -> bool {
        self.condition <= DiskCondition::Full
    }

    /// Healthy, but full.
    pub fn is_full(&self) -> bool {
        self.condition == DiskCondition::Full
    }
}

/// One mount point with data directories on it.
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
    /// Errors held against the directories on it.
    pub failures: u64,
    /// The worst condition of a directory on it.
    pub condition: DiskCondition,
}

/// Groups `disks`, in the order of their first appearance.
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
