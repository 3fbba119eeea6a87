//! The disks by mount point, as coordinators and dashboards count space: several directories on one mount are one
//! (Uniffle #2251). Pure.

use std::path::PathBuf;

use super::disk::DiskInfo;
use super::health::DiskCondition;
use uniffle_io::Media;

/// One mount point with data directories on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountUsage {
    /// The mount point.
    pub point: PathBuf,
    /// Kind of its device.
    pub media: Media,
    /// Size of the file system.
    pub total_bytes: u64,
    /// Bytes in use, by anybody.
    pub used_bytes: u64,
    /// Errors held against the directories on it.
    pub failures: u64,
    /// The worst condition of a directory on it.
    pub condition: DiskCondition,
}

/// Groups `disks`, in the order of their first appearance.
#[must_use]
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
    use uniffle_io::Mount;

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
            disk("/data/a", "/data", DiskCondition::Sound),
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
