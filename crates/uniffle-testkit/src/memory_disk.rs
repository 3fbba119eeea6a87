//! An in-memory disk for tests: a tree of files with an optional capacity.
//!
//! Clones share the tree, so that a test can restart on the same disk. A write to an open file
//! beyond the capacity is partially stored and fails with `StorageFull`, like on a real disk.
//! Removed files stay readable through open handles.
//!
//! The disk tracks synced data: [`MemoryDisk::lose_power`] discards some unsynced bytes and names.
//! Removals and renames are durable at once.

mod tree;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use uniffle_io::{
    BoxFuture, Disk, DiskLock, File, FileId, IoClass, Location, Media, Mount, ReadTarget,
    SMALL_FILE_BYTES_MAX, Space, Vanished, WriteOpen, require_inside, too_short,
};

use self::tree::{FileContent, SharedContent, Tree, not_found};

/// Size that a disk without a capacity reports.
const UNLIMITED_BYTES: u64 = 1 << 40;

/// A tree of directories and files in memory.
#[derive(Debug, Clone)]
pub struct MemoryDisk {
    root: PathBuf,
    tree: Arc<Mutex<Tree>>,
}

impl MemoryDisk {
    /// Creates a disk whose root is an empty directory named `root`.
    #[must_use]
    pub fn new(root: &str, capacity_bytes: Option<u64>) -> Self {
        let directories = BTreeSet::from([PathBuf::new()]);
        let tree = Tree { capacity_bytes, directories, ..Tree::default() };
        Self { root: root.into(), tree: Arc::new(Mutex::new(tree)) }
    }

    /// Returns the same directory under another path.
    #[must_use]
    pub fn by_another_path(&self, root: &str) -> Self {
        Self { root: root.into(), tree: Arc::clone(&self.tree) }
    }

    /// Changes the capacity. Stored data stays.
    pub fn set_capacity(&self, capacity_bytes: Option<u64>) {
        self.tree.lock().capacity_bytes = capacity_bytes;
    }

    /// Changes the maximum number of files and directories. Stored data stays.
    pub fn set_inodes(&self, inodes: Option<u64>) {
        self.tree.lock().inodes = inodes;
    }

    /// Removes files and directories while the disk is in use. Open handles stay valid.
    pub fn remove(&self, path: &Path) {
        self.tree.lock().remove_below(path);
    }

    /// Truncates a file while the disk is in use.
    pub fn cut(&self, path: &Path, bytes: usize) {
        self.change(path, |content| content.truncate(bytes));
    }

    /// Changes a file's content as another program would, while the disk is in use.
    pub fn change(&self, path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
        if let Some(content) = self.tree.lock().files.get(path) {
            let mut stored = content.lock();
            change(&mut stored.bytes);
            stored.changes += 1;
        }
    }

    /// Makes the file system read-only, as Linux does after errors, or writable again.
    pub fn set_read_only(&self, read_only: bool) {
        self.tree.lock().read_only = read_only;
    }

    /// Sets the reported mount point.
    pub fn set_mount_point(&self, point: &str) {
        self.tree.lock().mount_point = Some(point.into());
    }

    /// Returns the paths of all files, relative to the root.
    #[must_use]
    pub fn files(&self) -> Vec<PathBuf> {
        self.tree.lock().files.keys().cloned().collect()
    }

    /// Returns the paths of all directories, relative to the root.
    #[must_use]
    pub fn directories(&self) -> Vec<PathBuf> {
        self.tree.lock().directories.iter().cloned().collect()
    }

    /// Returns a file's content.
    #[must_use]
    pub fn content(&self, path: &Path) -> Option<Vec<u8>> {
        let content = self.tree.lock().files.get(path).cloned()?;
        let bytes = content.lock().bytes.clone();
        Some(bytes)
    }

    /// Returns the announced ranges (`advise`) with the bytes of the file there.
    #[must_use]
    pub fn advised(&self) -> Vec<(Range<u64>, Vec<u8>)> {
        self.tree.lock().advised.clone()
    }

    /// Returns the contents of all files by path relative to the root.
    #[must_use]
    pub fn snapshot(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let tree = self.tree.lock();
        tree.files.iter().map(|(path, content)| (path.clone(), content.lock().bytes.clone())).collect()
    }

    /// Replaces a file's content, on the device too, or removes the file. For disks that are not in
    /// use.
    pub fn put(&self, path: &Path, content: Option<Vec<u8>>) {
        let mut tree = self.tree.lock();
        match content {
            Some(bytes) => {
                let stored = FileContent { durable: bytes.clone(), bytes, ..FileContent::default() };
                tree.files.insert(path.to_path_buf(), Arc::new(Mutex::new(stored)));
            }
            None => tree.remove_below(path),
        }
    }

    /// Simulates a power loss, with random choices from `seed`: unsynced data may be lost. For
    /// disks that are no longer in use.
    pub fn lose_power(&self, seed: u64) {
        let mut random = StdRng::seed_from_u64(seed);
        let mut tree = self.tree.lock();
        for path in std::mem::take(&mut tree.unsynced) {
            if random.random_bool(0.5) {
                tree.remove_below(&path);
            }
        }
        tree.files.values().for_each(|content| content.lock().lose_power(&mut random));
    }

    /// Makes the next `count` syncs of files fail. The data that they were to sync never reaches
    /// the device: Linux marks pages as clean that it could not write.
    pub fn fail_syncs(&self, count: u32) {
        self.tree.lock().failing_syncs = count;
    }

    /// Makes syncs succeed without effect, which a model of power loss must detect.
    pub fn ignore_syncs(&self) {
        self.tree.lock().ignores_syncs = true;
    }

    /// Makes writes to removed or changed files succeed, which a model of removals must detect.
    pub fn ignore_removals(&self) {
        self.tree.lock().ignores_removals = true;
    }

    /// Hides that several paths lead to the directory, which a model of a start must detect.
    pub fn hide_shared_tree(&self) {
        self.tree.lock().hides_shared_tree = true;
    }

    /// Flips bits of one byte of a file, like a faulty disk.
    pub fn corrupt(&self, path: &Path, at: usize, mask: u8) {
        let content = self.tree.lock().files.get(path).cloned();
        if let Some(content) = content
            && let Some(byte) = content.lock().bytes.get_mut(at)
        {
            *byte ^= mask;
        }
    }

    fn run<T: Send + 'static>(
        &self,
        path: &Path,
        work: impl FnOnce(&mut Tree, PathBuf) -> io::Result<T> + Send + 'static,
    ) -> BoxFuture<'static, io::Result<T>> {
        let (tree, path) = (Arc::clone(&self.tree), path.to_path_buf());
        Box::pin(async move {
            require_inside(&path)?;
            work(&mut tree.lock(), path)
        })
    }

    fn file(&self, content: SharedContent) -> Arc<dyn File> {
        Arc::new(MemoryFile { tree: Arc::clone(&self.tree), content, direct: false, expected: None })
    }

    fn file_to_write(&self, path: PathBuf, how: WriteOpen, content: SharedContent) -> Arc<dyn File> {
        let stored = content.lock();
        let end = AtomicUsize::new(stored.bytes.len());
        let changes = (how.class == IoClass::Metadata).then(|| AtomicU64::new(stored.changes));
        drop(stored);
        let expected = how.is_named.then(|| Arc::new(ExpectedState { path, end, changes }));
        Arc::new(MemoryFile { tree: Arc::clone(&self.tree), content, direct: false, expected })
    }
}

impl Disk for MemoryDisk {
    fn root(&self) -> &Path {
        &self.root
    }

    fn open_write(&self, path: &Path, how: WriteOpen) -> BoxFuture<'static, io::Result<Arc<dyn File>>> {
        let disk = self.clone();
        self.run(path, move |tree, path| {
            tree.require_writable()?;
            if !how.create {
                let content = tree.find(&path)?;
                return Ok(disk.file_to_write(path, how, content));
            }
            if tree.files.contains_key(&path) {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            let content = tree.create(path.clone())?;
            Ok(disk.file_to_write(path, how, content))
        })
    }

    fn open_read(&self, path: &Path) -> BoxFuture<'static, io::Result<Arc<dyn File>>> {
        let disk = self.clone();
        self.run(path, move |tree, path| Ok(disk.file(tree.find(&path)?)))
    }

    fn open_read_direct(&self, path: &Path) -> BoxFuture<'static, io::Result<Arc<dyn File>>> {
        let shared = Arc::clone(&self.tree);
        self.run(path, move |tree, path| {
            let content = tree.find(&path)?;
            let file: Arc<dyn File> =
                Arc::new(MemoryFile { tree: shared, content, direct: true, expected: None });
            Ok(file)
        })
    }

    fn create_dir_all(&self, path: &Path) -> BoxFuture<'static, io::Result<()>> {
        self.run(path, |tree, path| {
            for directory in path.ancestors().map(Path::to_path_buf) {
                if !tree.directories.contains(&directory) {
                    tree.require_writable()?;
                    tree.require_inode()?;
                }
                if tree.directories.insert(directory.clone()) {
                    tree.unsynced.insert(directory);
                }
            }
            Ok(())
        })
    }

    fn remove_dir(&self, path: &Path) -> BoxFuture<'static, io::Result<()>> {
        self.run(path, |tree, path| {
            tree.require_writable()?;
            if !tree.is_empty(&path) {
                return Err(io::ErrorKind::DirectoryNotEmpty.into());
            }
            tree.unsynced.remove(&path);
            if tree.directories.remove(&path) { Ok(()) } else { Err(not_found()) }
        })
    }

    fn remove_dir_all(&self, path: &Path) -> BoxFuture<'static, io::Result<()>> {
        self.run(path, |tree, path| {
            tree.require_writable()?;
            if !tree.directories.contains(&path) {
                return Err(not_found());
            }
            tree.remove_below(&path);
            Ok(())
        })
    }

    fn remove_part(&self, path: &Path, bytes_max: u64) -> BoxFuture<'static, io::Result<bool>> {
        self.run(path, move |tree, path| {
            tree.require_writable()?;
            if !tree.directories.contains(&path) && !tree.files.contains_key(&path) {
                return Err(not_found());
            }
            Ok(tree.remove_part(&path, bytes_max))
        })
    }

    fn rename(&self, from: &Path, to: &Path) -> BoxFuture<'static, io::Result<()>> {
        let to = to.to_path_buf();
        self.run(from, move |tree, from| {
            require_inside(&to)?;
            tree.require_writable()?;
            let to_parent = to.parent().is_some_and(|parent| tree.directories.contains(parent));
            let source = tree.directories.contains(&from) || tree.files.contains_key(&from);
            if !to_parent || !source {
                return Err(not_found());
            }
            tree.move_below(&from, &to);
            Ok(())
        })
    }

    fn list(&self, path: &Path) -> BoxFuture<'static, io::Result<Vec<String>>> {
        self.run(path, |tree, path| {
            if !tree.directories.contains(&path) {
                let is_file = tree.files.contains_key(&path);
                return Err(if is_file { io::ErrorKind::NotADirectory.into() } else { not_found() });
            }
            let all = tree.directories.iter().chain(tree.files.keys());
            let children =
                all.filter(|entry| entry.parent() == Some(&path)).filter_map(|entry| entry.file_name());
            let mut names: Vec<_> = children.map(|name| name.to_string_lossy().into_owned()).collect();
            names.sort();
            Ok(names)
        })
    }

    fn read_small(&self, path: &Path) -> BoxFuture<'static, io::Result<Vec<u8>>> {
        self.run(path, |tree, path| {
            let content = tree.find(&path)?.lock().bytes.clone();
            if content.len() as u64 > SMALL_FILE_BYTES_MAX {
                return Err(io::ErrorKind::FileTooLarge.into());
            }
            Ok(content)
        })
    }

    fn sync_dir(&self, path: &Path) -> BoxFuture<'static, io::Result<()>> {
        self.run(path, |tree, path| {
            if !tree.directories.contains(&path) {
                return Err(not_found());
            }
            if !tree.ignores_syncs {
                tree.unsynced.retain(|entry| entry.parent() != Some(&path));
            }
            Ok(())
        })
    }

    fn sync_all(&self) -> BoxFuture<'static, io::Result<()>> {
        self.run(Path::new(""), |tree, _| {
            if tree.ignores_syncs {
                return Ok(());
            }
            tree.unsynced.clear();
            tree.files.values().for_each(|content| content.lock().sync());
            Ok(())
        })
    }

    fn write_small(&self, path: &Path, content: Vec<u8>) -> BoxFuture<'static, io::Result<()>> {
        self.run(path, |tree, path| {
            tree.require_writable()?;
            let durable = content.clone();
            *tree.create(path)?.lock() = FileContent { bytes: content, durable, ..FileContent::default() };
            Ok(())
        })
    }

    fn lock(&self, path: &Path) -> BoxFuture<'static, io::Result<Box<dyn DiskLock>>> {
        let shared = Arc::clone(&self.tree);
        let creating = self.run(path, |tree, path| {
            tree.require_writable()?;
            tree.create(path.clone())?;
            Ok(path)
        });
        Box::pin(async move { Tree::lock(&shared, creating.await?) })
    }

    fn lock_existing(&self, path: &Path) -> BoxFuture<'static, io::Result<Box<dyn DiskLock>>> {
        let shared = Arc::clone(&self.tree);
        let finding = self.run(path, |tree, path| tree.find(&path).map(|_| path));
        Box::pin(async move { Tree::lock(&shared, finding.await?) })
    }

    fn space(&self) -> BoxFuture<'static, io::Result<Space>> {
        let file_system = Arc::as_ptr(&self.tree).addr() as u64;
        self.run(Path::new(""), move |tree, _| {
            let total_bytes = tree.capacity_bytes.unwrap_or(UNLIMITED_BYTES);
            let free_bytes = total_bytes.saturating_sub(tree.used_bytes());
            let total_inodes = tree.inodes.unwrap_or(0);
            let free_inodes = total_inodes.saturating_sub(tree.used_inodes());
            Ok(Space { total_bytes, free_bytes, total_inodes, free_inodes, file_system })
        })
    }

    fn location(&self) -> BoxFuture<'static, io::Result<Location>> {
        let id = FileId { device: 0, inode: Arc::as_ptr(&self.tree).addr() as u64 };
        let place = match self.tree.lock().hides_shared_tree {
            true => Location { existing: None, rest: self.root.clone() },
            false => Location { existing: Some(id), rest: PathBuf::new() },
        };
        Box::pin(std::future::ready(Ok(place)))
    }

    fn mount(&self) -> BoxFuture<'static, io::Result<Mount>> {
        let point = self.tree.lock().mount_point.clone().unwrap_or_else(|| self.root.clone());
        let mount = Mount { point, media: Media::Unknown };
        Box::pin(std::future::ready(Ok(mount)))
    }
}

#[derive(Debug)]
struct MemoryFile {
    tree: Arc<Mutex<Tree>>,
    content: SharedContent,
    /// Reads the content of the device, which differs from the written content only after a failed
    /// sync.
    direct: bool,
    /// State that a write requires, if the file was opened for writing by its name.
    expected: Option<Arc<ExpectedState>>,
}

#[derive(Debug)]
struct ExpectedState {
    path: PathBuf,
    end: AtomicUsize,
    /// Number of changes at the last own write, for a file of [`IoClass::Metadata`].
    changes: Option<AtomicU64>,
}

impl ExpectedState {
    /// Records the state of the file after a write.
    fn wrote(&self, content: &SharedContent) {
        let stored = content.lock();
        self.end.fetch_max(stored.bytes.len(), Ordering::Relaxed);
        self.changes.iter().for_each(|changes| changes.store(stored.changes, Ordering::Relaxed));
    }

    /// Fails if the file is elsewhere or was changed. Only a metadata file must be wholly
    /// unchanged; others must not be shorter.
    fn require(&self, tree: &Tree, content: &SharedContent) -> io::Result<()> {
        if tree.ignores_removals {
            return Ok(());
        }
        let is_there = tree.files.get(&self.path).is_some_and(|it| Arc::ptr_eq(it, content));
        let (stored, end) = (content.lock(), self.end.load(Ordering::Relaxed));
        let is_unchanged = match &self.changes {
            Some(changes) => stored.bytes.len() == end && stored.changes == changes.load(Ordering::Relaxed),
            None => stored.bytes.len() >= end,
        };
        drop(stored);
        if is_there && is_unchanged { Ok(()) } else { Err(Vanished::File.into()) }
    }
}

/// Writes as much as the capacity allows.
fn write(tree: &Tree, content: &SharedContent, pieces: &[Bytes], offset: u64) -> io::Result<()> {
    tree.require_writable()?;
    let capacity = tree.capacity_bytes.unwrap_or(u64::MAX);
    let mut room = capacity.saturating_sub(tree.used_bytes());
    let mut content = content.lock();
    content.changes += 1;
    let content = &mut content.bytes;
    let mut at = usize::try_from(offset).map_err(io::Error::other)?;
    for piece in pieces {
        let size = content.len();
        let growth = ((at + piece.len()).saturating_sub(size)) as u64;
        let fits = growth <= room;
        // A piece that does not fit is written partially.
        let room_end = size.saturating_add(usize::try_from(room).unwrap_or(usize::MAX));
        let end = if fits { at + piece.len() } else { room_end.clamp(at, at + piece.len()) };
        if end > at && size < end {
            content.resize(end, 0);
        }
        if end > at {
            content[at..end].copy_from_slice(&piece[..end - at]);
        }
        if !fits {
            return Err(io::ErrorKind::StorageFull.into());
        }
        room -= growth;
        at = end;
    }
    Ok(())
}

fn read(content: &[u8], target: &mut ReadTarget) -> io::Result<()> {
    for part in 0..target.parts.len() {
        let start = usize::try_from(target.parts[part].offset).unwrap_or(usize::MAX);
        let bytes = target.part_mut(part).ok_or(io::ErrorKind::InvalidInput)?;
        let stored = content.get(start..start.saturating_add(bytes.len()));
        bytes.copy_from_slice(stored.ok_or_else(too_short)?);
    }
    Ok(())
}

impl File for MemoryFile {
    fn write_at(&self, pieces: Vec<Bytes>, offset: u64) -> BoxFuture<'static, io::Result<()>> {
        let (tree, content) = (Arc::clone(&self.tree), Arc::clone(&self.content));
        let expected = self.expected.clone();
        Box::pin(async move {
            let tree = tree.lock();
            if let Some(expected) = &expected {
                expected.require(&tree, &content)?;
            }
            let written = write(&tree, &content, &pieces, offset);
            if let Some(expected) = &expected {
                expected.wrote(&content);
            }
            written
        })
    }

    fn read(&self, mut target: ReadTarget) -> BoxFuture<'static, (ReadTarget, io::Result<()>)> {
        let (content, direct) = (Arc::clone(&self.content), self.direct);
        Box::pin(async move {
            let stored = content.lock();
            let result = if direct && stored.doomed {
                let mut device = stored.durable.clone();
                device.resize(stored.bytes.len(), 0);
                read(&device, &mut target)
            } else {
                read(&stored.bytes, &mut target)
            };
            drop(stored);
            (target, result)
        })
    }

    fn advise(&self, ranges: Vec<Range<u64>>) -> BoxFuture<'static, io::Result<()>> {
        let (tree, content) = (Arc::clone(&self.tree), Arc::clone(&self.content));
        Box::pin(async move {
            let mut tree = tree.lock();
            let stored = content.lock();
            let at = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX).min(stored.bytes.len());
            let bytes = |range: &Range<u64>| stored.bytes[at(range.start)..at(range.end)].to_vec();
            tree.advised.extend(ranges.into_iter().map(|range| (range.clone(), bytes(&range))));
            Ok(())
        })
    }

    fn sync(&self) -> BoxFuture<'static, io::Result<()>> {
        let (tree, content) = (Arc::clone(&self.tree), Arc::clone(&self.content));
        Box::pin(async move {
            let mut tree = tree.lock();
            if tree.ignores_syncs {
                return Ok(());
            }
            if tree.failing_syncs > 0 {
                tree.failing_syncs -= 1;
                content.lock().doomed = true;
                return Err(io::Error::from_raw_os_error(crate::fault::EIO));
            }
            content.lock().sync();
            Ok(())
        })
    }

    fn size(&self) -> BoxFuture<'static, io::Result<u64>> {
        let size = self.content.lock().bytes.len() as u64;
        Box::pin(std::future::ready(Ok(size)))
    }

    fn id(&self) -> Option<FileId> {
        self.expected.as_ref()?;
        Some(FileId { device: 0, inode: Arc::as_ptr(&self.content).addr() as u64 })
    }

    fn verify(&self) -> BoxFuture<'static, io::Result<()>> {
        let there = self.expected.as_ref().map_or(Ok(()), |it| it.require(&self.tree.lock(), &self.content));
        Box::pin(std::future::ready(there))
    }
}
