//! A disk of the operating system: positioned vectored calls on tokio's blocking threads, bounded
//! per disk and kind of call.
//!
//! Invariant: every call holds a permit of its disk until the system call returns, even if its
//! future was dropped. A hung disk therefore occupies a bounded number of threads, and queued calls
//! are cancelled by dropping their futures. Writes have a queue per [`IoClass`], so that a small
//! record that a client waits for is not queued behind calls of 16 MiB.

mod file;
mod gates;
mod read;
mod remove;

use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::FlockOperation;

use self::file::{BlockingFile, OpenedFile, open_read, open_write};
use self::gates::{CallGate, NAME_CALLS_MAX, REMOVALS_MAX, WriteGates, blocking, permits};
use super::vanished::Root;
use super::{
    BoxFuture, Disk, DiskLock, File, IoClass, Location, Mount, SMALL_FILE_BYTES_MAX, Space, WriteOpen, mount,
    require_inside,
};

/// A directory of the operating system.
#[derive(Debug, Clone)]
pub struct BlockingDisk {
    root: Root,
    writes: WriteGates,
    reads: CallGate,
    names: CallGate,
    removals: CallGate,
}

impl BlockingDisk {
    /// Creates the disk below `root` with the given concurrency limits. Does not access the disk.
    #[must_use]
    pub fn new(root: &Path, write_concurrency: usize, read_concurrency: usize) -> Self {
        Self {
            root: Root::new(root),
            writes: WriteGates::new(write_concurrency),
            reads: CallGate::new(read_concurrency),
            names: CallGate::new(NAME_CALLS_MAX),
            removals: CallGate::new(REMOVALS_MAX),
        }
    }

    /// Limits reads and writes together to `calls_max` at a time. Calls on names, removals, and
    /// writes of metadata are exempt: they must succeed even on a busy disk. A health check that
    /// writes and reads waits like others; one of the free space does not.
    #[must_use]
    pub fn with_max_concurrency(self, calls_max: usize) -> Self {
        let disk = Some(permits(calls_max));
        let WriteGates { metadata, index, bulk } = self.writes;
        let counted = |gate| CallGate { disk: disk.clone(), ..gate };
        let writes = WriteGates { metadata, index: counted(index), bulk: counted(bulk) };
        let reads = counted(self.reads);
        Self { writes, reads, ..self }
    }

    /// Runs `work` on the absolute form of `path`.
    fn on_path<T: Send + 'static>(
        &self,
        gate: &CallGate,
        path: &Path,
        work: impl FnOnce(PathBuf) -> io::Result<T> + Send + 'static,
    ) -> BoxFuture<'static, io::Result<T>> {
        if let Err(error) = require_inside(path) {
            return Box::pin(std::future::ready(Err(error)));
        }
        let path = self.absolute(path);
        Box::pin(blocking(gate.clone(), move || work(path)))
    }

    /// Runs `work` like `on_path` for calls that create or rename. Fails if another directory is
    /// now at the root's path.
    fn on_own_path<T: Send + 'static>(
        &self,
        path: &Path,
        work: impl FnOnce(PathBuf) -> io::Result<T> + Send + 'static,
    ) -> BoxFuture<'static, io::Result<T>> {
        let root = self.root.clone();
        self.on_path(&self.names, path, move |path| {
            root.require()?;
            work(path)
        })
    }

    fn absolute(&self, path: &Path) -> PathBuf {
        let root = &self.root.path;
        // Joining an empty path would append a slash.
        if path.as_os_str().is_empty() { root.to_path_buf() } else { root.join(path) }
    }

    fn file(
        &self,
        path: &Path,
        class: IoClass,
        open: impl FnOnce(PathBuf) -> io::Result<OpenedFile> + Send + 'static,
    ) -> BoxFuture<'static, io::Result<Arc<dyn File>>> {
        let (writes, reads) = (self.writes.of(class), self.reads.clone());
        self.on_path(&self.names, path, move |path| {
            let file: Arc<dyn File> = Arc::new(BlockingFile { open: Arc::new(open(path)?), writes, reads });
            Ok(file)
        })
    }
}

impl Disk for BlockingDisk {
    fn root(&self) -> &Path {
        &self.root.path
    }

    fn open_write(&self, path: &Path, how: WriteOpen) -> BoxFuture<'static, io::Result<Arc<dyn File>>> {
        let root = self.root.clone();
        self.file(path, how.class, move |path| {
            if how.create {
                root.require()?;
            }
            open_write(path, how, root)
        })
    }

    fn open_read(&self, path: &Path) -> BoxFuture<'static, io::Result<Arc<dyn File>>> {
        self.file(path, IoClass::Bulk, |path| open_read(&path, false))
    }

    fn open_read_direct(&self, path: &Path) -> BoxFuture<'static, io::Result<Arc<dyn File>>> {
        self.file(path, IoClass::Bulk, |path| open_read(&path, true))
    }

    fn create_dir_all(&self, path: &Path) -> BoxFuture<'static, io::Result<()>> {
        self.on_own_path(path, std::fs::create_dir_all)
    }

    fn remove_dir(&self, path: &Path) -> BoxFuture<'static, io::Result<()>> {
        self.on_path(&self.names, path, std::fs::remove_dir)
    }

    fn remove_dir_all(&self, path: &Path) -> BoxFuture<'static, io::Result<()>> {
        self.on_path(&self.removals, path, std::fs::remove_dir_all)
    }

    fn remove_part(&self, path: &Path, bytes_max: u64) -> BoxFuture<'static, io::Result<bool>> {
        self.on_path(&self.removals, path, move |path| remove::remove_part(&path, bytes_max))
    }

    fn rename(&self, from: &Path, to: &Path) -> BoxFuture<'static, io::Result<()>> {
        if let Err(error) = require_inside(to) {
            return Box::pin(std::future::ready(Err(error)));
        }
        let to = self.absolute(to);
        self.on_own_path(from, move |from| std::fs::rename(from, to))
    }

    fn list(&self, path: &Path) -> BoxFuture<'static, io::Result<Vec<String>>> {
        self.on_path(&self.names, path, |path| {
            let mut names = Vec::new();
            for entry in std::fs::read_dir(path)? {
                names.push(entry?.file_name().to_string_lossy().into_owned());
            }
            names.sort();
            Ok(names)
        })
    }

    fn read_small(&self, path: &Path) -> BoxFuture<'static, io::Result<Vec<u8>>> {
        self.on_path(&self.names, path, |path| {
            let mut content = Vec::new();
            let file = OpenOptions::new().read(true).open(path)?;
            file.take(SMALL_FILE_BYTES_MAX + 1).read_to_end(&mut content)?;
            if content.len() as u64 > SMALL_FILE_BYTES_MAX {
                return Err(io::Error::new(io::ErrorKind::FileTooLarge, "file is larger than expected"));
            }
            Ok(content)
        })
    }

    fn sync_dir(&self, path: &Path) -> BoxFuture<'static, io::Result<()>> {
        self.on_path(&self.names, path, |path| open_to_sync(&path)?.sync_all())
    }

    fn sync_all(&self) -> BoxFuture<'static, io::Result<()>> {
        self.on_path(&self.names, Path::new(""), |root| Ok(rustix::fs::syncfs(open_to_sync(&root)?)?))
    }

    fn write_small(&self, path: &Path, content: Vec<u8>) -> BoxFuture<'static, io::Result<()>> {
        self.on_own_path(path, move |path| {
            let mut file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
            file.write_all(&content)?;
            file.sync_all()
        })
    }

    fn lock(&self, path: &Path) -> BoxFuture<'static, io::Result<Box<dyn DiskLock>>> {
        self.on_own_path(path, |path| {
            lock(OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?)
        })
    }

    fn lock_existing(&self, path: &Path) -> BoxFuture<'static, io::Result<Box<dyn DiskLock>>> {
        self.on_path(&self.names, path, |path| lock(OpenOptions::new().read(true).open(path)?))
    }

    fn space(&self) -> BoxFuture<'static, io::Result<Space>> {
        self.on_path(&self.names, Path::new(""), |path| {
            let stat = rustix::fs::statvfs(path)?;
            // Counted as `df` does: used space plus the space that this user may still use. Blocks
            // reserved for root belong to neither. Counted as used, they would push a half-empty
            // disk over its watermark.
            let blocks = stat.f_blocks.saturating_sub(stat.f_bfree).saturating_add(stat.f_bavail);
            Ok(Space {
                total_bytes: blocks.saturating_mul(stat.f_frsize),
                free_bytes: stat.f_bavail.saturating_mul(stat.f_frsize),
                total_inodes: stat.f_files,
                free_inodes: stat.f_favail,
                file_system: stat.f_fsid,
            })
        })
    }

    fn mount(&self) -> BoxFuture<'static, io::Result<Mount>> {
        self.on_path(&self.names, Path::new(""), |path| {
            let existing = path.ancestors().find(|path| path.exists());
            mount::mount_of(existing.unwrap_or(&path))
        })
    }

    fn anchor(&self) -> BoxFuture<'static, io::Result<()>> {
        let root = self.root.clone();
        Box::pin(blocking(self.names.clone(), move || root.anchor()))
    }

    fn is_anchored(&self) -> BoxFuture<'static, io::Result<bool>> {
        let root = self.root.clone();
        Box::pin(blocking(self.names.clone(), move || root.is_anchored()))
    }

    fn location(&self) -> BoxFuture<'static, io::Result<Location>> {
        let root = self.root.clone();
        Box::pin(blocking(self.names.clone(), move || root.location()))
    }
}

/// A `flock` that is released when its descriptor is closed.
#[derive(Debug)]
struct FileLock {
    _file: std::fs::File,
}

impl DiskLock for FileLock {}

fn lock(file: std::fs::File) -> io::Result<Box<dyn DiskLock>> {
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    Ok(Box::new(FileLock { _file: file }))
}

/// Opens a directory.
fn open_to_sync(path: &Path) -> io::Result<std::fs::File> {
    OpenOptions::new().read(true).open(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use bytes::Bytes;

    use super::*;
    use crate::Vanished;

    #[tokio::test]
    async fn reads_and_writes_share_one_limit() {
        let disk = BlockingDisk::new(Path::new("/"), 2, 2).with_max_concurrency(1);
        let writing = disk.writes.of(IoClass::Bulk).enter().await;
        let mut reading = std::pin::pin!(disk.reads.clone().enter());
        assert!(futures::poll!(reading.as_mut()).is_pending());
        drop(disk.names.clone().enter().await);
        drop(disk.writes.of(IoClass::Metadata).enter().await);
        drop(writing);
        drop(reading.await);
    }

    #[tokio::test]
    async fn metadata_and_index_writes_do_not_wait_for_bulk() {
        let root = tempfile::tempdir().unwrap();
        let disk = BlockingDisk::new(root.path(), 1, 1);
        let open = async |name: &str, class| {
            let how = WriteOpen { create: true, class, ..WriteOpen::default() };
            disk.open_write(Path::new(name), how).await.unwrap()
        };
        let write = |file: &Arc<dyn File>| file.write_at(vec![Bytes::from_static(b"x")], 0);
        let bulk = open("bulk", IoClass::Bulk).await;
        // A bulk call is running, and another one waits for it.
        let at_work = disk.writes.of(IoClass::Bulk).enter().await;
        let mut waiting = write(&bulk);
        assert!(futures::poll!(&mut waiting).is_pending());
        for class in [IoClass::Metadata, IoClass::Index] {
            let file = open(&format!("{class:?}"), class).await;
            write(&file).await.unwrap();
            file.sync().await.unwrap();
        }
        assert!(futures::poll!(&mut waiting).is_pending());
        drop(at_work);
        waiting.await.unwrap();
    }

    fn bytes(disk_file: &Arc<dyn File>, at: u64) -> BoxFuture<'static, io::Result<()>> {
        disk_file.write_at(vec![Bytes::from_static(b"12345678")], at)
    }

    async fn created(disk: &BlockingDisk, name: &str) -> Arc<dyn File> {
        let how = WriteOpen { create: true, is_named: true, ..WriteOpen::default() };
        let file = disk.open_write(Path::new(name), how).await.unwrap();
        bytes(&file, 0).await.unwrap();
        file
    }

    #[tokio::test]
    async fn hard_link_does_not_hide_a_removed_file() {
        let root = tempfile::tempdir().unwrap();
        let disk = BlockingDisk::new(root.path(), 1, 1);
        let file = created(&disk, "log").await;
        std::fs::hard_link(root.path().join("log"), root.path().join("link")).unwrap();
        bytes(&file, 8).await.unwrap();
        std::fs::remove_file(root.path().join("log")).unwrap();
        assert!(bytes(&file, 16).await.is_err() && file.verify().await.is_err());
    }

    #[tokio::test]
    async fn metadata_file_changed_by_another_program_is_detected() {
        let root = tempfile::tempdir().unwrap();
        let disk = BlockingDisk::new(root.path(), 1, 1);
        let path = root.path().join("log");
        let changes: [fn(&std::fs::File); 3] = [
            |file| file.set_len(0).unwrap(),
            |file| file.set_len(17).unwrap(),
            |file| file.write_all_at(b"other", 4).unwrap(),
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let how =
                WriteOpen { create: true, is_named: true, class: IoClass::Metadata, ..WriteOpen::default() };
            let file = disk.open_write(Path::new("log"), how).await.unwrap();
            bytes(&file, 0).await.unwrap();
            Arc::clone(&file).write_synced(vec![Bytes::from_static(b"12345678")], 8).await.unwrap();
            file.verify().await.unwrap();
            let before = std::fs::metadata(&path).unwrap().modified().unwrap();
            let other = OpenOptions::new().write(true).open(&path).unwrap();
            // Two writes within one tick of the kernel's clock have the same time.
            while other.metadata().unwrap().modified().unwrap() == before {
                change(&other);
            }
            assert_eq!(Vanished::of(&file.verify().await.unwrap_err()), Some(Vanished::File), "{number}");
            assert!(bytes(&file, 16).await.is_err(), "{number}");
            std::fs::remove_file(&path).unwrap();
        }
    }

    #[tokio::test]
    async fn moved_root_is_not_recreated() {
        let parent = tempfile::tempdir().unwrap();
        let (root, moved) = (parent.path().join("data"), parent.path().join("moved"));
        let disk = BlockingDisk::new(&root, 1, 1);
        disk.create_dir_all(Path::new("apps")).await.unwrap();
        disk.anchor().await.unwrap();
        let file = created(&disk, "apps/log").await;
        std::fs::rename(&root, &moved).unwrap();
        assert!(!disk.is_anchored().await.unwrap());
        let how = WriteOpen { create: true, ..WriteOpen::default() };
        let errors = [
            disk.create_dir_all(Path::new("apps/1")).await.unwrap_err(),
            disk.create_dir_all(Path::new("")).await.unwrap_err(),
            disk.write_small(Path::new("list"), Vec::new()).await.unwrap_err(),
            disk.rename(Path::new("apps"), Path::new("trash")).await.unwrap_err(),
            disk.open_write(Path::new("other"), how).await.unwrap_err(),
            // Reports the root and not the file: the file moved with its directory and may return
            // with it.
            bytes(&file, 8).await.unwrap_err(),
        ];
        for error in errors {
            assert_eq!(Vanished::of(&error), Some(Vanished::Root), "{error}");
        }
        assert!(!root.exists());
        std::fs::create_dir(&root).unwrap();
        assert!(
            disk.create_dir_all(Path::new("apps")).await.is_err(),
            "a new directory at the same path was accepted"
        );
        std::fs::remove_dir(&root).unwrap();
        std::fs::rename(&moved, &root).unwrap();
        bytes(&file, 8).await.unwrap();
        disk.create_dir_all(Path::new("apps/1")).await.unwrap();
    }

    #[tokio::test]
    async fn paths_to_one_directory_have_one_location() {
        let parent = tempfile::tempdir().unwrap();
        let (real, link) = (parent.path().join("real"), parent.path().join("link"));
        std::fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let location = async |path: PathBuf| BlockingDisk::new(&path, 1, 1).location().await.unwrap();
        assert_eq!(location(real.clone()).await, location(link.clone()).await);
        assert_eq!(location(real.join("a/b")).await, location(link.join("a/b")).await);
        assert_ne!(location(real.join("a")).await, location(link.join("b")).await);
    }
}
