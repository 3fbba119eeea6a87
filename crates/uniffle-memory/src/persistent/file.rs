//! The file of a region: created or found, locked, and checked by its header before any of it is
//! used.
//!
//! A larger capacity grows the file and keeps its contents. A file that is longer than the capacity
//! is shortened if no block is beyond it. A file is refused if its header is not of this version or
//! it is truncated, if it has blocks beyond the capacity, if it is from another worker or an
//! earlier boot, held by another process or not in a tmpfs, or if the tmpfs has no room. The error
//! states the reason. Invariant: the blocks of a refused file are kept.

use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use listenfd::ListenFd;
use rustix::fs::{Access, FlockOperation, MemfdFlags, Mode, OFlags, StatVfs};
use rustix::io::Errno;

use super::layout::{Geometry, HEADER_WORDS, Header, HeaderDamage, NODE_BYTES_MAX};
use super::table::BlockTable;
use crate::region::Region;

/// Name of the file in the directory of `memory_store.backing`.
const FILE: &str = "uniffle-worker.memory";
/// Attempts at opening a file that its owner deletes concurrently.
const OPEN_TRIES: usize = 10;
/// Unit of `st_blocks`.
const STAT_BLOCK_BYTES: u64 = 512;
/// `f_type` of tmpfs (`linux/magic.h`).
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Storage of blocks in memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Backing {
    /// The best choice for this machine, see [`Backing::settled`]. Private until it is settled.
    #[default]
    Auto,
    /// Private memory that ends with the process.
    Private,
    /// An unnamed file that is handed over to a successor.
    Memfd,
    /// A file in this directory of a tmpfs.
    Directory(PathBuf),
}

impl Backing {
    /// Parses the configured value.
    ///
    /// # Errors
    /// A list of the allowed values.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "private" => Ok(Self::Private),
            "memfd" => Ok(Self::Memfd),
            path if Path::new(path).is_absolute() => Ok(Self::Directory(path.into())),
            _ => {
                Err("\"auto\", \"private\", \"memfd\" or the absolute path of a directory in a tmpfs"
                    .to_owned())
            }
        }
    }

    /// Resolves `auto` and returns other values unchanged. The result is an unnamed file if the
    /// service manager keeps it after a crash and the metadata log knows its shuffles (`has_log`).
    /// Otherwise it is private memory: after a crash no process would have the file, or know its
    /// shuffles. A directory must be configured explicitly: somebody has to free memory left there.
    #[must_use]
    pub fn settled(&self, is_kept_by_manager: bool, has_log: bool) -> Self {
        match self {
            Self::Auto if is_kept_by_manager && has_log => Self::Memfd,
            Self::Auto => Self::Private,
            named => named.clone(),
        }
    }

    /// Returns whether the memory ends with the process.
    #[must_use]
    pub fn is_private(&self) -> bool {
        matches!(self, Self::Auto | Self::Private)
    }
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Private => f.write_str("private"),
            Self::Memfd => f.write_str("memfd"),
            Self::Directory(path) => path.display().fmt(f),
        }
    }
}

/// Owner of a memory file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// Id of the server, known to clients and coordinators.
    pub node: String,
    /// Id of the machine's boot.
    pub boot: u128,
}

impl Owner {
    /// Returns an owner for the current boot of the machine.
    ///
    /// # Errors
    /// When the boot id cannot be read.
    pub fn current(node: impl Into<String>) -> io::Result<Self> {
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        let boot = u128::from_str_radix(&text.trim().replace('-', ""), 16).map_err(io::Error::other)?;
        let mut node = node.into();
        node.truncate(node.floor_char_boundary(NODE_BYTES_MAX));
        Ok(Self { node, boot })
    }
}

/// Reasons for refusing a region.
#[derive(Debug, thiserror::Error)]
pub enum MemoryFileError {
    /// The file would not be in memory and be slow.
    #[error("not on a tmpfs; memory would be written to a disk")]
    NoTmpfs,
    /// Another worker uses it.
    #[error("locked by another process; every worker needs its own directory")]
    InUse,
    /// The tmpfs has too little free space for the region.
    #[error("tmpfs has room for {has} bytes, {needs} are needed; mount it with size={size} or more")]
    NoRoom {
        /// Bytes of missing pages.
        needs: u64,
        /// Free bytes of the tmpfs.
        has: u64,
        /// Size of the tmpfs with enough free bytes.
        size: u64,
    },
    /// The tmpfs is full.
    #[error("cannot allocate pages for the block table ({0}); free space in the tmpfs")]
    NoPages(#[source] io::Error),
    /// The header is of another program, corrupt, or of another version.
    #[error("{0}; {REMEDY}")]
    Damaged(HeaderDamage),
    /// There are blocks beyond the configured capacity.
    #[error(
        "memory file has room for {found} bytes, and not all of its blocks are in the first {wanted} of \
         memory_store.capacity; start with the previous capacity and stop the worker cleanly, or {REMEDY}"
    )]
    Size {
        /// Bytes of segments in the file.
        found: u64,
        /// Requested bytes of segments.
        wanted: u64,
    },
    /// The file is shorter than its header states.
    #[error("memory file was truncated to {has} of {needs} bytes; {REMEDY}")]
    Short {
        /// Bytes of the file.
        has: u64,
        /// Bytes according to its header.
        needs: u64,
    },
    /// The file belongs to another worker.
    #[error("memory file belongs to worker {found}, this is {wanted}; {REMEDY}")]
    Node {
        /// Node that created it.
        found: String,
        /// Node that wants it.
        wanted: String,
    },
    /// The machine was rebooted since the file was written.
    #[error("memory file is older than the last boot of the machine, so it is a copy; {REMEDY}")]
    Boot,
    /// An error of the kernel.
    #[error(transparent)]
    Io(#[from] io::Error),
}

const REMEDY: &str = "delete it to give up its blocks";

impl From<Errno> for MemoryFileError {
    fn from(error: Errno) -> Self {
        Self::Io(error.into())
    }
}

/// Converts damage for the public error.
impl From<HeaderDamage> for MemoryFileError {
    fn from(damage: HeaderDamage) -> Self {
        Self::Damaged(damage)
    }
}

/// A file that belongs to this process while this value exists.
#[derive(Debug)]
pub(crate) struct BackingFile {
    file: OwnedFd,
    path: Option<PathBuf>,
    /// Length that the mapping needs. 0 before there is a mapping.
    bytes: u64,
    /// True if the file was found to be shorter than that.
    is_truncated: AtomicBool,
}

impl BackingFile {
    fn new(file: OwnedFd, path: Option<PathBuf>) -> Self {
        Self { file, path, bytes: 0, is_truncated: AtomicBool::new(false) }
    }

    /// Deletes the file from its directory. The memory is freed when nobody has it mapped. A
    /// replacement at the same path is kept.
    pub(crate) fn remove(&self) -> io::Result<()> {
        let path = self.path.as_ref().filter(|_| !self.has_vanished());
        path.map_or(Ok(()), std::fs::remove_file)
    }

    /// Returns whether it has a path that no longer leads to it. The next process would not find
    /// it.
    pub(crate) fn has_vanished(&self) -> bool {
        let Some(path) = &self.path else { return false };
        let Ok(ours) = rustix::fs::fstat(&self.file) else { return false };
        match rustix::fs::lstat(path) {
            Ok(there) => (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino),
            Err(error) => matches!(error, Errno::NOENT | Errno::NOTDIR),
        }
    }

    /// Returns whether the file was ever truncated, and restores a changed length. A longer file
    /// would be shortened by the next process.
    pub(super) fn was_truncated(&self) -> bool {
        if let Err(error) = self.restore_length() {
            tracing::error!(%error, "the length of the file of memory_store.backing was changed and cannot be restored; if it is shorter, an access to a missing page ends the process");
        }
        self.is_truncated.load(Ordering::Relaxed)
    }

    /// Restores a changed length. Returns whether the file was shorter. Its missing pages then read
    /// as zeros. Async-signal-safe.
    pub(super) fn restore_length(&self) -> io::Result<bool> {
        let bytes = u64::try_from(rustix::fs::fstat(&self.file)?.st_size).unwrap_or_default();
        if bytes == self.bytes {
            return Ok(false);
        }
        let is_truncated = bytes < self.bytes;
        self.is_truncated.fetch_or(is_truncated, Ordering::Relaxed);
        rustix::fs::ftruncate(&self.file, self.bytes)?;
        Ok(is_truncated)
    }

    /// Returns whether the file has a path.
    pub(super) fn has_path(&self) -> bool {
        self.path.is_some()
    }

    /// Unlocks the file for another process, although it is still mapped here.
    pub(super) fn unlock(&self) -> io::Result<()> {
        match self.path {
            Some(_) => Ok(rustix::fs::flock(&self.file, FlockOperation::NonBlockingUnlock)?),
            None => Ok(()),
        }
    }

    /// Duplicates an unnamed file for a successor. Returns `None` for a file with a path.
    pub(crate) fn duplicate(&self) -> io::Result<Option<OwnedFd>> {
        self.path.is_none().then(|| self.file.try_clone()).transpose()
    }

    fn in_directory(directory: &Path) -> Result<Self, MemoryFileError> {
        if let Some(tmpfs) = tmpfs_without(directory) {
            match rustix::fs::mkdir(directory, Mode::RWXU) {
                Ok(()) => {
                    tracing::info!(
                        path = %directory.display(),
                        tmpfs = %tmpfs.display(),
                        "created the directory that memory_store.backing names"
                    )
                }
                Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let path = check_directory(directory)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        for _ in 0..OPEN_TRIES {
            let file = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR)?;
            lock(&file)?;
            // The previous owner may have deleted the file before it unlocked it.
            let ours = rustix::fs::fstat(&file)?;
            let same = |there: rustix::fs::Stat| (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino);
            if rustix::fs::stat(&path).is_ok_and(same) {
                return Ok(Self::new(file, Some(path)));
            }
        }
        Err(MemoryFileError::InUse)
    }

    /// Opens and locks the file in `directory`, if there is one.
    pub(super) fn existing(directory: &Path) -> Result<Option<Self>, MemoryFileError> {
        let path = match check_directory(directory) {
            Err(MemoryFileError::Io(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            // No worker could have its memory there.
            Err(MemoryFileError::NoTmpfs) => return Ok(None),
            checked => checked?,
        };
        match rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty()) {
            Ok(file) => {
                lock(&file)?;
                Ok(Some(Self::new(file, Some(path))))
            }
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the path of the file, if it has one.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    fn without_name() -> Result<Self, MemoryFileError> {
        let file = rustix::fs::memfd_create("uniffle-worker-memory", MemfdFlags::CLOEXEC)?;
        Ok(Self::new(file, None))
    }

    /// Wraps an inherited descriptor. The file needs no lock, because it has no name: only a
    /// process that was handed a descriptor can open it.
    pub(super) fn inherited(file: OwnedFd) -> Result<Self, MemoryFileError> {
        rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::CLOEXEC)?;
        Ok(Self::new(file, None))
    }

    pub(super) fn header(&self) -> Result<Option<Header>, MemoryFileError> {
        let mut bytes = [0; 8 * HEADER_WORDS];
        let mut read = 0;
        loop {
            match rustix::io::pread(&self.file, &mut bytes[read..], read as u64) {
                Ok(0) => break,
                Ok(more) => read += more,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let words: Vec<u64> =
            bytes[..read].as_chunks::<8>().0.iter().copied().map(u64::from_ne_bytes).collect();
        Ok(Header::decode(&words)?)
    }

    pub(super) fn bytes(&self) -> Result<u64, MemoryFileError> {
        Ok(u64::try_from(rustix::fs::fstat(&self.file)?.st_size).unwrap_or_default())
    }

    fn resident_bytes(&self) -> Result<u64, MemoryFileError> {
        let blocks = u64::try_from(rustix::fs::fstat(&self.file)?.st_blocks).unwrap_or_default();
        Ok(blocks * STAT_BLOCK_BYTES)
    }

    /// Extends the file to the length of a region of `geometry`. Allocates no page.
    fn grow(&mut self, geometry: Geometry) -> Result<(), MemoryFileError> {
        let (needs, has) = (geometry.bytes(), self.bytes()?);
        if needs > has {
            if self.path.is_some() {
                let lacks = geometry.resident_bytes().saturating_sub(self.resident_bytes()?);
                room(&rustix::fs::fstatvfs(&self.file)?, lacks)?;
            }
            rustix::fs::ftruncate(&self.file, needs)?;
        }
        self.bytes = needs;
        Ok(())
    }

    /// Removes the part of the file that is beyond the region.
    fn shorten(&self) -> Result<(), MemoryFileError> {
        let has = self.bytes()?;
        if has > self.bytes {
            let (bytes, capacity_end) = (has, self.bytes);
            tracing::warn!(
                bytes,
                capacity_end,
                "the file of memory_store.backing is longer than memory_store.capacity requires; no block is \
                 there, shortening it"
            );
            rustix::fs::ftruncate(&self.file, self.bytes)?;
        }
        Ok(())
    }
}

fn lock(file: &OwnedFd) -> Result<(), MemoryFileError> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Err(MemoryFileError::InUse),
        locked => Ok(locked?),
    }
}

/// Returns the geometry for continuing with a region whose header is `found`: as large as `wanted`,
/// with its existing table.
///
/// The header states only the initial size. The region grows with its file, so that no store
/// changes the header.
fn check_header(found: &Header, wanted: &Header, file_bytes: u64) -> Result<Geometry, MemoryFileError> {
    if found.boot != wanted.boot {
        return Err(MemoryFileError::Boot);
    }
    if found.node != wanted.node {
        return Err(MemoryFileError::Node { found: found.node.clone(), wanted: wanted.node.clone() });
    }
    let (has, wants) = (found.geometry, wanted.geometry.data_bytes);
    if file_bytes < has.bytes() {
        return Err(MemoryFileError::Short { has: file_bytes, needs: has.bytes() });
    }
    Ok(Geometry { data_bytes: wants, ..has })
}

/// Maps the region of `geometry`. Fails if an existing file has blocks beyond it.
fn map(held: &BackingFile, geometry: Geometry) -> Result<Arc<BlockTable>, MemoryFileError> {
    let front = usize::try_from(geometry.front_bytes()).map_err(io::Error::other)?;
    let region = Region::shared(&held.file, front, geometry.data_bytes)?;
    let table = BlockTable::new(region, geometry).map_err(MemoryFileError::NoPages)?;
    let file_bytes = held.bytes()?;
    if file_bytes > geometry.bytes() && !table.has_all_blocks() {
        table.release();
        let found = file_bytes - geometry.front_bytes();
        return Err(MemoryFileError::Size { found, wanted: geometry.data_bytes });
    }
    Ok(table)
}

impl AsFd for BackingFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// A region in a file, which is locked while both exist.
pub(crate) type Opened = (Arc<BlockTable>, BackingFile);

/// Size of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RegionSize {
    pub(crate) bytes: u64,
    /// Number of blocks that the region may have.
    pub(crate) blocks: u64,
}

/// Opens the region of `backing`, existing or new. Returns `None` for private memory.
pub(crate) fn open(
    backing: &Backing,
    inherited: Option<OwnedFd>,
    owner: &Owner,
    size: RegionSize,
) -> Result<Option<Opened>, MemoryFileError> {
    let mut held = match (backing, inherited) {
        (Backing::Auto | Backing::Private, _) => return Ok(None),
        (Backing::Memfd, Some(file)) => BackingFile::inherited(file)?,
        (Backing::Memfd, None) => BackingFile::without_name()?,
        (Backing::Directory(path), _) => BackingFile::in_directory(path)?,
    };
    let geometry = Geometry::of(Region::bytes_of(size.bytes)?, size.blocks);
    let wanted = Header { geometry, boot: owner.boot, node: owner.node.clone() };
    let found = held.header()?;
    let geometry = match &found {
        Some(found) => check_header(found, &wanted, held.bytes()?)?,
        None => {
            rustix::fs::ftruncate(&held.file, 0)?;
            geometry
        }
    };
    held.grow(geometry)?;
    let table = map(&held, geometry)?;
    held.shorten()?;
    if found.is_none() {
        table.begin(&wanted);
    }
    Ok(Some((table, held)))
}

/// Checks whether a worker could start with `backing` and take over an existing file.
pub(crate) fn check(backing: &Backing, owner: &Owner, size: RegionSize) -> Result<(), MemoryFileError> {
    let Backing::Directory(directory) = backing else { return Ok(()) };
    let geometry = Geometry::of(Region::bytes_of(size.bytes)?, size.blocks);
    if let Some(tmpfs) = tmpfs_without(directory) {
        rustix::fs::access(tmpfs, Access::WRITE_OK | Access::EXEC_OK)?;
        return room(&rustix::fs::statvfs(tmpfs)?, geometry.resident_bytes());
    }
    let path = check_directory(directory)?;
    let file = match rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty())
    {
        Ok(file) => BackingFile::new(file, None),
        Err(Errno::NOENT) => {
            rustix::fs::access(directory, Access::WRITE_OK | Access::EXEC_OK)?;
            let of = rustix::fs::statvfs(directory)?;
            return room(&of, geometry.resident_bytes());
        }
        Err(error) => return Err(error.into()),
    };
    lock(&file.file)?;
    let wanted = Header { geometry, boot: owner.boot, node: owner.node.clone() };
    let bytes = file.bytes()?;
    let Some(found) = file.header()? else { return Ok(()) };
    let needs = check_header(&found, &wanted, bytes)?;
    if needs.bytes() <= bytes {
        map(&file, needs)?.release();
        return Ok(());
    }
    let lacks = needs.resident_bytes().saturating_sub(file.resident_bytes()?);
    room(&rustix::fs::statvfs(directory)?, lacks)
}

/// Returns the path of the file in `directory`, which must be in a tmpfs.
fn check_directory(directory: &Path) -> Result<PathBuf, MemoryFileError> {
    if is_of_tmpfs(directory)? { Ok(directory.join(OsStr::new(FILE))) } else { Err(MemoryFileError::NoTmpfs) }
}

fn is_of_tmpfs(directory: &Path) -> Result<bool, Errno> {
    let kind = rustix::fs::statfs(directory)?.f_type;
    #[allow(clippy::unnecessary_cast, clippy::useless_conversion, reason = "its type is the machine's")]
    let is_tmpfs = kind as i64 == TMPFS_MAGIC;
    Ok(is_tmpfs)
}

/// Returns the parent of a missing `directory` if the parent is in a tmpfs. A directory in a tmpfs
/// is missing after a reboot, and a worker that refused to start would need an operator.
fn tmpfs_without(directory: &Path) -> Option<&Path> {
    let is_missing = rustix::fs::statfs(directory).is_err_and(|error| error == Errno::NOENT);
    let parent = directory.parent().filter(|_| is_missing)?;
    is_of_tmpfs(parent).is_ok_and(|is_tmpfs| is_tmpfs).then_some(parent)
}

/// Checks whether a region of another size fits after a running worker deleted its own.
pub(super) fn check_free_space(backing: &Backing, size: RegionSize) -> Result<(), MemoryFileError> {
    let Backing::Directory(directory) = backing else { return Ok(()) };
    let there = rustix::fs::stat(check_directory(directory)?);
    let freed = there.map_or(0, |file| u64::try_from(file.st_blocks).unwrap_or(0) * STAT_BLOCK_BYTES);
    let geometry = Geometry::of(Region::bytes_of(size.bytes)?, size.blocks);
    room(&rustix::fs::statvfs(directory)?, geometry.resident_bytes().saturating_sub(freed))
}

/// Checks whether `needs` bytes fit into a file system. A tmpfs without a limit reports 0 blocks in
/// total.
fn room(of: &StatVfs, needs: u64) -> Result<(), MemoryFileError> {
    let has = of.f_bavail.saturating_mul(of.f_frsize);
    if of.f_blocks == 0 || has >= needs {
        return Ok(());
    }
    let size = of.f_blocks.saturating_mul(of.f_frsize).saturating_add(needs - has);
    Err(MemoryFileError::NoRoom { needs, has, size })
}

/// Takes ownership of the descriptor at `index` of `inherited`, whatever it is. Works once.
pub fn take_inherited(inherited: &mut ListenFd, index: usize) -> Option<OwnedFd> {
    let descriptor = inherited.take_raw_fd(index).ok().flatten()?;
    // SAFETY: the parent process opened it for this process (`LISTEN_FDS`), and `ListenFd` gives
    // each descriptor away once.
    Some(unsafe { OwnedFd::from_raw_fd(descriptor) })
}
