//! Removal of a directory tree in parts.
//!
//! Freeing a gigabyte can take a file system seconds, above all if it is mounted with `discard`.
//! Writes to the same device wait meanwhile. A caller that pauses between parts lets them proceed.

use std::fs::{FileType, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;

/// Bytes that a name counts for, so that many small files make up several parts too.
const NAME_BYTES: u64 = 64 << 10;

/// Files are truncated at multiples of this, so that a reader never sees zeros in a partly
/// truncated page.
const CUT_ALIGN: u64 = 1 << 20;

/// Frees about `bytes_max` bytes, or [`CUT_ALIGN`] if that is more, of the file `path` or of the
/// tree below it. Returns true once `path` is gone.
///
/// Every part removes a name or truncates a file: fewer bytes than [`CUT_ALIGN`] remain only after
/// a name was removed.
pub(super) fn remove_part(path: &Path, bytes_max: u64) -> io::Result<bool> {
    let mut left = bytes_max.max(CUT_ALIGN);
    remove_entry(path, path.symlink_metadata()?.file_type(), &mut left)
}

fn remove_entry(path: &Path, kind: FileType, left: &mut u64) -> io::Result<bool> {
    match kind.is_dir() {
        true => remove_below(path, left),
        false => remove_file(path, kind.is_file(), left),
    }
}

fn remove_below(path: &Path, left: &mut u64) -> io::Result<bool> {
    for entry in std::fs::read_dir(path)? {
        let (entry, is_spent) = (entry?, *left == 0);
        if is_spent {
            return Ok(false);
        }
        if !remove_entry(&entry.path(), entry.file_type()?, left)? {
            return Ok(false);
        }
    }
    std::fs::remove_dir(path)?;
    *left = left.saturating_sub(NAME_BYTES);
    Ok(true)
}

/// Removes a file, or truncates it if it exceeds the remaining bytes by more than [`CUT_ALIGN`].
/// If no aligned length frees anything, the file stays as it is for the next part.
fn remove_file(path: &Path, is_regular: bool, left: &mut u64) -> io::Result<bool> {
    let length = path.symlink_metadata()?.len();
    if is_regular && length > left.saturating_add(CUT_ALIGN) {
        let kept = (length - *left).next_multiple_of(CUT_ALIGN);
        if kept < length {
            let flags = OFlags::NOFOLLOW.bits().cast_signed();
            OpenOptions::new().write(true).custom_flags(flags).open(path)?.set_len(kept)?;
        }
        *left = 0;
        return Ok(false);
    }
    std::fs::remove_file(path)?;
    *left = left.saturating_sub(length.max(NAME_BYTES));
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn tree_is_removed_in_parts_and_large_files_are_truncated() {
        let root = tempfile::tempdir().unwrap();
        let tree = root.path().join("tree");
        std::fs::create_dir_all(tree.join("app/shuffle")).unwrap();
        let large = tree.join("app/shuffle/0.data");
        std::fs::write(&large, vec![7; usize::try_from(10 * MIB + 5).unwrap()]).unwrap();
        let mut lengths = Vec::new();
        while !remove_part(&tree, 3 * MIB).unwrap() {
            lengths.extend(large.metadata().map(|it| it.len()));
        }
        assert_eq!(
            lengths,
            [8 * MIB, 5 * MIB, 2 * MIB],
            "a file must be truncated to whole MiB, and the remainder removed with its name"
        );
        assert!(!tree.exists());
        assert_eq!(remove_part(&tree, MIB).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn single_file_is_removed_in_parts() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("file");
        std::fs::write(&file, vec![7; usize::try_from(5 * MIB).unwrap()]).unwrap();
        assert!(!remove_part(&file, 3 * MIB).unwrap());
        assert_eq!(file.metadata().unwrap().len(), 2 * MIB);
        assert!(remove_part(&file, 3 * MIB).unwrap() && !file.exists());
    }

    #[test]
    fn cuts_are_aligned_if_few_bytes_of_a_part_remain() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("file");
        let length = || file.metadata().unwrap().len();
        std::fs::write(&file, vec![7; usize::try_from(7 * MIB / 4).unwrap()]).unwrap();
        let mut left = MIB / 2;
        assert!(!remove_file(&file, true, &mut left).unwrap());
        assert_eq!((length(), left), (7 * MIB / 4, 0), "a cut of less than a MiB must wait");

        std::fs::write(&file, vec![7; usize::try_from(3 * MIB + 5).unwrap()]).unwrap();
        let mut lengths = Vec::new();
        while !remove_part(&file, 0).unwrap() {
            lengths.push(length());
            assert!(lengths.len() < 10, "every part must free something: {lengths:?}");
        }
        assert_eq!(lengths, [3 * MIB, 2 * MIB]);
        assert!(!file.exists());
    }

    #[test]
    fn many_small_files_are_removed_in_several_parts() {
        let root = tempfile::tempdir().unwrap();
        let tree = root.path().join("tree");
        std::fs::create_dir(&tree).unwrap();
        (0..40).for_each(|number| std::fs::write(tree.join(number.to_string()), b"x").unwrap());
        assert!(!remove_part(&tree, MIB).unwrap());
        assert_eq!(std::fs::read_dir(&tree).unwrap().count(), 40 - 16);
        assert!(!remove_part(&tree, MIB).unwrap());
        assert!(remove_part(&tree, MIB).unwrap());
    }

    #[test]
    fn target_of_a_link_is_not_removed() {
        let root = tempfile::tempdir().unwrap();
        let (tree, other) = (root.path().join("tree"), root.path().join("other"));
        std::fs::create_dir(&tree).unwrap();
        std::fs::write(&other, vec![7; usize::try_from(4 * MIB).unwrap()]).unwrap();
        std::os::unix::fs::symlink(&other, tree.join("file")).unwrap();
        std::os::unix::fs::symlink(root.path(), tree.join("directory")).unwrap();
        assert!(remove_part(&tree, MIB).unwrap());
        assert_eq!(other.metadata().unwrap().len(), 4 * MIB);
    }
}
