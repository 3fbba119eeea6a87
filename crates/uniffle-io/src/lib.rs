//! Bytes on a disk: two small traits with owned buffers, and the disks behind them.
//!
//! [`Disk`] names things below one root directory, [`File`] moves bytes. Buffers are owned by the call, so that an
//! engine that outlives its caller (a hung `pwritev`, io_uring) never touches memory that was given back.
//! Errors are plain [`std::io::Error`] with their kinds kept. Not here: what the files mean .
//!
//! | disk | for |
//! | --- | --- |
//! | [`blocking::BlockingDisk`] | the real one: `pwritev` on tokio's blocking threads, bounded per disk |
//! | `uring::UringDisk` | the same by io_uring (feature `io-uring`) |
//!
//! `uniffle-testkit` has two more, for tests: one in memory, and one that adds faults to any other.

pub mod blocking;
pub mod buffers;
mod mount;
mod progress;
#[cfg(feature = "io-uring")]
pub mod uring;
mod vanished;

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::{Component, Path};
use std::sync::Arc;

use bytes::Bytes;
pub use futures::future::BoxFuture;

pub use self::buffers::{HeldTurn, ReadBuffer, ReadBuffers, ReadPart, ReadTarget, Turn};
pub use self::mount::{Media, Mount};
pub use self::vanished::{FileId, Place, Vanished};

/// Alignment of memory, file offset and length of a direct write. Devices ask for 512 or 4,096.
pub const BLOCK_ALIGN: usize = 4096;

/// Largest file that [`Disk::read_small`] returns.
pub const SMALL_FILE_BYTES_MAX: u64 = 64 << 10;

/// An open file.
///
/// Dropping a returned future gives up waiting and nothing else: an operation that has begun runs on, with its buffers.
pub trait File: Send + Sync + fmt::Debug {
    /// Writes all `pieces` one behind the other from `offset`, or fails. After an error any part may have been written.
    /// On a direct file every piece's address and length, and `offset`, are multiples of [`BLOCK_ALIGN`].
    /// Fails as [`File::verify`] does if nobody would find the bytes.
    fn write_at(&self, pieces: Vec<Bytes>, offset: u64) -> BoxFuture<'static, io::Result<()>>;

    /// Fills every part of the target exactly; `UnexpectedEof` when the file ends before. Gives the target back, with
    /// undefined bytes in its parts after an error.
    fn read(&self, target: ReadTarget) -> BoxFuture<'static, (ReadTarget, io::Result<()>)>;

    /// Says which ranges are read soon, so that the page cache has them then. Not for direct files. A disk with as many reads
    /// under way as it takes at a time does nothing, and so does one that has no use for it.
    fn advise(&self, _ranges: Vec<Range<u64>>) -> BoxFuture<'static, io::Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// Waits until written bytes are on the device.
    fn sync(&self) -> BoxFuture<'static, io::Result<()>>;

    /// Waits until what was written to a range by way of the page cache is on the device, and lets go of its pages. One after
    /// another on a disk, and writes around the page cache do not wait for it.
    fn write_back(&self, _range: Range<u64>) -> BoxFuture<'static, io::Result<()>> {
        self.sync()
    }

    /// Writes and waits until it is on the device, as [`File::write_at`] and [`File::sync`] do one after the other, in one go
    /// where that is quicker.
    fn write_synced(self: Arc<Self>, pieces: Vec<Bytes>, offset: u64) -> BoxFuture<'static, io::Result<()>>
    where
        Self: 'static,
    {
        Box::pin(async move {
            self.write_at(pieces, offset).await?;
            self.sync().await
        })
    }

    /// Present size in bytes.
    fn size(&self) -> BoxFuture<'static, io::Result<u64>>;

    /// Identity of a named file that is open for writing; none where the disk has no such thing.
    fn id(&self) -> Option<FileId> {
        None
    }

    /// Checks that a file that is open for writing, and [named](WriteOpen::is_named), is still found at its path, with everything that was written to it.
    /// Fails with [`Vanished`] as its source if it is not.
    fn verify(&self) -> BoxFuture<'static, io::Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// Which writes and syncs of a disk a file's own wait for: those of its lane and no others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Lane {
    /// Small records that a caller waits for: registrations, reports.
    Metadata,
    /// What makes bulk data readable.
    Index,
    /// Data, in calls of megabytes.
    #[default]
    Bulk,
}

/// How [`Disk::open_write`] opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WriteOpen {
    /// True: the file must not exist yet. False: it must exist.
    pub create: bool,
    /// Go around the page cache where the file system allows it.
    pub direct: bool,
    /// Where its writes and syncs queue.
    pub lane: Lane,
    /// Others will look for the file by its path: writes fail with [`Vanished`] as their source once it is not there.
    pub is_named: bool,
}

/// Space of the file system that holds a disk's root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Space {
    /// Size of the file system.
    pub total_bytes: u64,
    /// Bytes that we may still write.
    pub free_bytes: u64,
    /// Files that it can hold; 0 where it has no such limit.
    pub total_inodes: u64,
    /// Files that we may still create.
    pub free_inodes: u64,
    /// Tells file systems apart, so that two roots on one are not counted twice.
    pub file_system: u64,
}

/// A lock that is held until it is dropped.
pub trait DiskLock: Send + Sync + fmt::Debug {}

/// A directory tree below one root. All paths are relative to the root and may not leave it (`InvalidInput`).
pub trait Disk: Send + Sync + fmt::Debug {
    /// The root, for messages and labels.
    fn root(&self) -> &Path;
    /// Opens a file for writing at offsets.
    fn open_write(&self, path: &Path, how: WriteOpen) -> BoxFuture<'static, io::Result<Arc<dyn File>>>;
    /// Opens an existing file for reading.
    fn open_read(&self, path: &Path) -> BoxFuture<'static, io::Result<Arc<dyn File>>>;
    /// The same around the page cache, where the file system allows that. Reads are fastest when offset, length and
    /// memory are multiples of [`BLOCK_ALIGN`].
    fn open_read_direct(&self, path: &Path) -> BoxFuture<'static, io::Result<Arc<dyn File>>> {
        self.open_read(path)
    }
    /// Creates a directory with its parents (the root too); an existing one is fine.
    fn create_dir_all(&self, path: &Path) -> BoxFuture<'static, io::Result<()>>;
    /// Removes a directory only when it is empty.
    fn remove_dir(&self, path: &Path) -> BoxFuture<'static, io::Result<()>>;
    /// Removes a directory with everything in it.
    fn remove_dir_all(&self, path: &Path) -> BoxFuture<'static, io::Result<()>>;
    /// Begins to remove a directory with everything in it, or a file, or goes on with that: frees about `bytes_max` and says
    /// whether it is gone. What is left of files is shorter than before.
    fn remove_part(&self, path: &Path, bytes_max: u64) -> BoxFuture<'static, io::Result<bool>>;
    /// Moves a file or directory to a name that does not exist.
    fn rename(&self, from: &Path, to: &Path) -> BoxFuture<'static, io::Result<()>>;
    /// Names in a directory, sorted.
    fn list(&self, path: &Path) -> BoxFuture<'static, io::Result<Vec<String>>>;
    /// A whole file of at most [`SMALL_FILE_BYTES_MAX`] bytes.
    fn read_small(&self, path: &Path) -> BoxFuture<'static, io::Result<Vec<u8>>>;
    /// Waits until the names in a directory are on the device.
    fn sync_dir(&self, path: &Path) -> BoxFuture<'static, io::Result<()>>;
    /// Waits until everything written to the root's file system is on the device.
    fn sync_all(&self) -> BoxFuture<'static, io::Result<()>>;
    /// Replaces a small file's content in place (the same inode: a lock on it stays), synced.
    fn write_small(&self, path: &Path, content: Vec<u8>) -> BoxFuture<'static, io::Result<()>>;
    /// Locks a file, which is created when absent; `WouldBlock` when another process holds it.
    fn lock(&self, path: &Path) -> BoxFuture<'static, io::Result<Box<dyn DiskLock>>>;
    /// The same for a file that exists, without writing anything: also on a read-only file system.
    fn lock_existing(&self, path: &Path) -> BoxFuture<'static, io::Result<Box<dyn DiskLock>>>;
    /// Space of the file system.
    fn space(&self) -> BoxFuture<'static, io::Result<Space>>;
    /// Where the root is mounted, or will be once it is made.
    fn mount(&self) -> BoxFuture<'static, io::Result<Mount>>;
    /// Remembers which directory the root is. From then on nothing is created or renamed in another one at the same path:
    /// that fails with [`Vanished::Root`] as its source.
    fn anchor(&self) -> BoxFuture<'static, io::Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
    /// Returns whether the root is the directory that was anchored last; false where that cannot be told.
    fn is_anchored(&self) -> BoxFuture<'static, io::Result<bool>> {
        Box::pin(std::future::ready(Ok(false)))
    }
    /// Where the root's path leads. The root need not exist.
    fn place(&self) -> BoxFuture<'static, io::Result<Place>> {
        let place = Place { existing: None, rest: self.root().to_path_buf() };
        Box::pin(std::future::ready(Ok(place)))
    }
}

/// Inside `impl Disk`: what is not written out here goes to the disk in the named field. Files are opened by the
/// implementation itself.
#[macro_export]
macro_rules! pass_on {
    ($disk:ident) => {
        fn root(&self) -> &std::path::Path {
            self.$disk.root()
        }

        $crate::pass_on! { $disk;
            create_dir_all(path: &std::path::Path) -> ();
            remove_dir(path: &std::path::Path) -> ();
            remove_dir_all(path: &std::path::Path) -> ();
            remove_part(path: &std::path::Path, bytes_max: u64) -> bool;
            rename(from: &std::path::Path, to: &std::path::Path) -> ();
            list(path: &std::path::Path) -> Vec<String>;
            read_small(path: &std::path::Path) -> Vec<u8>;
            sync_dir(path: &std::path::Path) -> ();
            sync_all() -> ();
            write_small(path: &std::path::Path, content: Vec<u8>) -> ();
            lock(path: &std::path::Path) -> Box<dyn $crate::DiskLock>;
            lock_existing(path: &std::path::Path) -> Box<dyn $crate::DiskLock>;
            space() -> $crate::Space;
            mount() -> $crate::Mount;
            anchor() -> ();
            is_anchored() -> bool;
            place() -> $crate::Place;
        }
    };
    ($disk:ident; $($name:ident($($argument:ident: $type:ty),*) -> $answer:ty;)*) => {
        $(fn $name(&self, $($argument: $type),*) -> $crate::BoxFuture<'static, std::io::Result<$answer>> {
            self.$disk.$name($($argument),*)
        })*
    };
}

/// Who makes the calls of a real disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// Threads that wait for `pread` and `pwritev`.
    Blocking,
    /// One io_uring per disk.
    Uring,
}

impl Engine {
    /// `disk` with this engine; as it is, with a warning, where there is no io_uring.
    #[must_use]
    pub fn disk(self, disk: blocking::BlockingDisk) -> Arc<dyn Disk> {
        match self {
            Self::Blocking => Arc::new(disk),
            Self::Uring => uring_or_blocking(disk),
        }
    }
}

#[cfg(feature = "io-uring")]
fn uring_or_blocking(disk: blocking::BlockingDisk) -> Arc<dyn Disk> {
    match uring::UringDisk::new(disk.clone()) {
        Ok(disk) => Arc::new(disk),
        Err(error) => {
            let root = disk.root().display();
            tracing::warn!(%root, %error, "no io_uring on this machine, using blocking calls");
            Arc::new(disk)
        }
    }
}

#[cfg(not(feature = "io-uring"))]
fn uring_or_blocking(disk: blocking::BlockingDisk) -> Arc<dyn Disk> {
    tracing::warn!("this program was built without io_uring, using blocking calls");
    Arc::new(disk)
}

/// Refuses a path that is absolute or climbs.
pub fn require_inside(path: &Path) -> io::Result<()> {
    let inside = path.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    if inside {
        Ok(())
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "path leaves the disk's root"))
    }
}
