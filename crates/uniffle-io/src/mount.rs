//! Mount point and device type of a directory, read from `/proc` and `/sys`.
//!
//! The type is only reported. The mount point also tells the store whether an empty directory is a
//! new disk or one whose device is not mounted. An unknown type is [`Media::Unknown`] and an
//! unknown mount point is the directory itself, rather than an error. Free space is in
//! [`super::Space`].

use std::io;
use std::path::{Path, PathBuf};

/// Type of a storage device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Media {
    /// Unknown, or no block device of its own (tmpfs, overlay, network).
    #[default]
    Unknown,
    /// Rotating disk.
    Hdd,
    /// Non-rotating device.
    Ssd,
}

/// Mount of a disk's root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Mount point, or the root itself if it is unknown.
    pub point: PathBuf,
    /// Type of the device.
    pub media: Media,
}

/// An entry of `mountinfo`.
#[derive(Debug, PartialEq, Eq)]
struct MountEntry {
    point: PathBuf,
    /// `major:minor`, as `/sys/dev/block` names devices.
    device: String,
}

/// Returns the mount of `path`, which must exist.
pub(super) fn mount_of(path: &Path) -> io::Result<Mount> {
    let path = path.canonicalize()?;
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    Ok(match find(&path, &table) {
        Some(found) => {
            Mount { media: media_of(Path::new("/sys/dev/block"), &found.device), point: found.point }
        }
        None => Mount { point: path, media: Media::Unknown },
    })
}

/// Returns the mount with the longest mount point above `path`. Of two mounts on the same point the
/// later one hides the other.
fn find(path: &Path, mountinfo: &str) -> Option<MountEntry> {
    let mounts = mountinfo.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(2);
        let device = fields.next()?.to_owned();
        let point = PathBuf::from(unescape(fields.nth(1)?));
        Some(MountEntry { point, device })
    });
    // `max_by_key` returns the last of several equal elements.
    mounts.filter(|mount| path.starts_with(&mount.point)).max_by_key(|mount| mount.point.components().count())
}

/// Decodes the kernel's escapes: blanks and backslashes are written as three octal digits.
fn unescape(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                plain.push(char::from(byte));
                plain.push_str(&part[3..]);
            }
            None => {
                plain.push('\\');
                plain.push_str(part);
            }
        }
    }
    plain
}

/// Returns the type of a device. A partition has no queue of its own, so its disk one directory up
/// is checked too.
fn media_of(devices: &Path, device: &str) -> Media {
    let device = devices.join(device);
    let read = |below: &str| std::fs::read_to_string(device.join(below)).ok();
    match read("queue/rotational").or_else(|| read("../queue/rotational")).as_deref().map(str::trim) {
        Some("0") => Media::Ssd,
        Some("1") => Media::Hdd,
        _ => Media::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw
40 22 8:17 / /data rw - xfs /dev/sdb1 rw
41 22 8:33 / /data\\0401 rw master:1 - xfs /dev/sdc1 rw
42 40 0:44 / /data/fast rw - tmpfs tmpfs rw
43 40 8:49 / /data/fast rw - ext4 /dev/sdd1 rw
short line
";

    #[test]
    fn longest_and_latest_mount_point_wins() {
        let of = |path: &str| find(Path::new(path), TABLE).unwrap();
        assert_eq!(of("/var/x").point, Path::new("/"));
        assert_eq!(of("/data/x").device, "8:17");
        assert_eq!(of("/data 1/x"), MountEntry { point: "/data 1".into(), device: "8:33".into() });
        assert_eq!(of("/data/fast").device, "8:49");
        assert_eq!(of("/database").point, Path::new("/"));
        assert_eq!(find(Path::new("/x"), "").map(|found| found.point), None);
    }

    #[test]
    fn disk_partition_has_the_media_of_its_disk() {
        let sys = tempfile::tempdir().unwrap();
        for (disk, rotational) in [("sda", "1\n"), ("nvme0", "0\n")] {
            let queue = sys.path().join(disk).join("queue");
            std::fs::create_dir_all(&queue).unwrap();
            std::fs::write(queue.join("rotational"), rotational).unwrap();
        }
        std::fs::create_dir(sys.path().join("sda/sda1")).unwrap();
        std::os::unix::fs::symlink("sda/sda1", sys.path().join("8:1")).unwrap();
        std::os::unix::fs::symlink("nvme0", sys.path().join("259:0")).unwrap();
        assert_eq!(media_of(sys.path(), "8:1"), Media::Hdd);
        assert_eq!(media_of(sys.path(), "259:0"), Media::Ssd);
        assert_eq!(media_of(sys.path(), "0:44"), Media::Unknown);
    }

    #[test]
    fn directory_has_a_mount_point() {
        let directory = tempfile::tempdir().unwrap();
        let mount = mount_of(directory.path()).unwrap();
        assert!(directory.path().canonicalize().unwrap().starts_with(&mount.point), "{mount:?}");
        assert!(mount_of(&directory.path().join("absent")).is_err());
    }
}
