//! Content of an in-memory disk: names, bytes, and the durable part of them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use rand::RngExt;
use rand::rngs::StdRng;

use uniffle_io::DiskLock;

/// Unit that a device writes atomically.
const SECTOR_BYTES: usize = 512;

pub(super) type SharedContent = Arc<Mutex<FileContent>>;

/// Content of a file.
#[derive(Debug, Default)]
pub(super) struct FileContent {
    pub(super) bytes: Vec<u8>,
    /// Content that is on the device.
    pub(super) durable: Vec<u8>,
    /// Set after a failed sync: no further data reaches the device, whatever later syncs report.
    pub(super) doomed: bool,
    /// Number of changes, in place of a modification time.
    pub(super) changes: u64,
}

impl FileContent {
    pub(super) fn sync(&mut self) {
        if !self.doomed {
            self.durable.clone_from(&self.bytes);
        }
    }

    /// Each unsynced sector keeps its new content, its old content or zeros. A file that grew ends
    /// anywhere from the old to the new end.
    pub(super) fn lose_power(&mut self, random: &mut StdRng) {
        let (old, new) = (std::mem::take(&mut self.durable), std::mem::take(&mut self.bytes));
        let length = match random.random_range(0..3) {
            0 => old.len().min(new.len()),
            1 => new.len(),
            _ => random.random_range(old.len().min(new.len())..=new.len()),
        };
        self.bytes = old;
        self.bytes.resize(length, 0);
        for (sector, new) in self.bytes.chunks_mut(SECTOR_BYTES).zip(new.chunks(SECTOR_BYTES)) {
            if random.random_bool(0.5) {
                let length = sector.len();
                sector.copy_from_slice(&new[..length]);
            }
        }
        self.doomed = false;
        self.sync();
    }
}

#[derive(Debug, Default)]
pub(super) struct Tree {
    pub(super) capacity_bytes: Option<u64>,
    /// Maximum number of files and directories.
    pub(super) inodes: Option<u64>,
    /// Rejects all modifications.
    pub(super) read_only: bool,
    /// Reported mount point. `None` is the root.
    pub(super) mount_point: Option<PathBuf>,
    pub(super) directories: BTreeSet<PathBuf>,
    pub(super) files: BTreeMap<PathBuf, SharedContent>,
    /// Files and directories whose names may not be on the device.
    pub(super) unsynced: BTreeSet<PathBuf>,
    /// Number of file syncs that will fail.
    pub(super) failing_syncs: u32,
    /// Makes syncs succeed without effect.
    pub(super) ignores_syncs: bool,
    /// Hides removals and changes of open files from their writers.
    pub(super) ignores_removals: bool,
    /// Hides that two disks share the tree.
    pub(super) hides_shared_tree: bool,
    pub(super) locked: BTreeSet<PathBuf>,
    /// Announced ranges and their bytes.
    pub(super) advised: Vec<(Range<u64>, Vec<u8>)>,
}

impl Tree {
    pub(super) fn used_bytes(&self) -> u64 {
        self.files.values().map(|content| content.lock().bytes.len() as u64).sum()
    }

    pub(super) fn used_inodes(&self) -> u64 {
        (self.files.len() + self.directories.len()) as u64
    }

    pub(super) fn require_inode(&self) -> io::Result<()> {
        let is_full = self.inodes.is_some_and(|inodes| self.used_inodes() >= inodes);
        if is_full { Err(io::Error::from_raw_os_error(crate::fault::ENOSPC)) } else { Ok(()) }
    }

    pub(super) fn require_writable(&self) -> io::Result<()> {
        if self.read_only { Err(io::Error::from_raw_os_error(crate::fault::EROFS)) } else { Ok(()) }
    }

    pub(super) fn lock(tree: &Arc<Mutex<Self>>, path: PathBuf) -> io::Result<Box<dyn DiskLock>> {
        if !tree.lock().locked.insert(path.clone()) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(Box::new(MemoryLock { tree: Arc::clone(tree), path }))
    }

    pub(super) fn find(&self, path: &Path) -> io::Result<SharedContent> {
        self.files.get(path).cloned().ok_or_else(not_found)
    }

    pub(super) fn create(&mut self, path: PathBuf) -> io::Result<SharedContent> {
        let parent = path.parent().ok_or_else(not_found)?;
        if !self.directories.contains(parent) {
            return Err(not_found());
        }
        if !self.files.contains_key(&path) {
            self.require_inode()?;
            self.unsynced.insert(path.clone());
        }
        Ok(Arc::clone(self.files.entry(path).or_default()))
    }

    pub(super) fn remove_below(&mut self, path: &Path) {
        self.directories.retain(|directory| !directory.starts_with(path));
        self.files.retain(|file, _| !file.starts_with(path));
        self.unsynced.retain(|entry| !entry.starts_with(path));
    }

    /// Frees up to `bytes_max` bytes below `path`: the first files first, each from its end.
    /// Returns true once everything is gone.
    pub(super) fn remove_part(&mut self, path: &Path, bytes_max: u64) -> bool {
        let mut remaining = usize::try_from(bytes_max).unwrap_or(usize::MAX);
        for (_, content) in self.files.iter().filter(|(file, _)| file.starts_with(path)) {
            let mut stored = content.lock();
            let kept = stored.bytes.len().saturating_sub(remaining);
            remaining -= stored.bytes.len() - kept;
            stored.bytes.truncate(kept);
            if remaining == 0 {
                return false;
            }
        }
        self.remove_below(path);
        true
    }

    pub(super) fn is_empty(&self, directory: &Path) -> bool {
        let below = |path: &PathBuf| path != directory && path.starts_with(directory);
        !self.directories.iter().any(below) && !self.files.keys().any(below)
    }

    pub(super) fn move_below(&mut self, from: &Path, to: &Path) {
        let moved = |path: &PathBuf| match path.strip_prefix(from) {
            Ok(rest) if rest.as_os_str().is_empty() => to.to_path_buf(),
            Ok(rest) => to.join(rest),
            Err(_) => path.clone(),
        };
        self.directories = self.directories.iter().map(moved).collect();
        self.unsynced = self.unsynced.iter().map(moved).collect();
        self.files =
            std::mem::take(&mut self.files).into_iter().map(|(path, file)| (moved(&path), file)).collect();
    }
}

pub(super) fn not_found() -> io::Error {
    io::ErrorKind::NotFound.into()
}

#[derive(Debug)]
struct MemoryLock {
    tree: Arc<Mutex<Tree>>,
    path: PathBuf,
}

impl DiskLock for MemoryLock {}

impl Drop for MemoryLock {
    fn drop(&mut self) {
        self.tree.lock().locked.remove(&self.path);
    }
}
