//! Disk access: two small traits with owned buffers, and the disks that implement them.
//!
//! [`Disk`] handles names below one root directory, [`File`] reads and writes bytes. Every call
//! owns its buffers, so that an operation that outlives its caller (a hung `pwritev`) never touches
//! released memory. Errors are plain [`std::io::Error`] with their original kinds.
//!
//! [`blocking::BlockingDisk`] runs `pwritev` on tokio's blocking threads, bounded per disk.
//! `uniffle-testkit` has two more for tests: an in-memory disk and a disk with injected faults.

pub mod blocking;
pub mod buffers;
mod mount;
mod progress;
mod vanished;

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::{Component, Path};
use std::sync::Arc;

use bytes::Bytes;
pub use futures::future::BoxFuture;

pub use self::buffers::{DeviceShare, ReadBuffer, ReadBuffers, ReadPart, ReadPermit, ReadTarget, ShareParts};
pub use self::mount::{Media, Mount};
pub use self::progress::too_short;
pub use self::vanished::{FileId, Location, Vanished};

/// Alignment of memory, file offset and length of a direct write. Devices require 512 or 4,096.
pub const BLOCK_ALIGN: usize = 4096;

/// Largest file that [`Disk::read_small`] returns.
pub const SMALL_FILE_BYTES_MAX: u64 = 64 << 10;

/// An open file.
///
/// Dropping a returned future only stops the wait: an operation that has begun continues, with its
/// buffers.
pub trait File: Send + Sync + fmt::Debug {
    /// Writes all `pieces` contiguously from `offset`, or fails. After an error any part may have
    /// been written. For a direct file, every piece's address and length and `offset` are multiples
    /// of [`BLOCK_ALIGN`]. Fails like [`File::verify`] if the file can no longer be found.
    fn write_at(&self, pieces: Vec<Bytes>, offset: u64) -> BoxFuture<'static, io::Result<()>>;

    /// Fills every part of the target exactly, or fails with `UnexpectedEof` at the end of the
    /// file. Returns the target. After an error the bytes of its parts are undefined.
    fn read(&self, target: ReadTarget) -> BoxFuture<'static, (ReadTarget, io::Result<()>)>;

    /// Returns the bytes of a range, or fails like [`File::read`].
    fn read_range(&self, range: Range<u64>) -> BoxFuture<'static, io::Result<Bytes>> {
        let length = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let reading = self.read(ReadTarget::one(Box::new(vec![0; length]), 0..length, range.start));
        Box::pin(async move {
            let (target, result) = reading.await;
            result.map(|()| target.buffer.freeze(length))
        })
    }

    /// Announces ranges that will be read soon, so that the page cache loads them. Not for direct
    /// files. Does nothing if the disk's read concurrency is exhausted or if the disk cannot
    /// prefetch.
    fn advise(&self, _ranges: Vec<Range<u64>>) -> BoxFuture<'static, io::Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// Waits until written bytes are on the device.
    fn sync(&self) -> BoxFuture<'static, io::Result<()>>;

    /// Writes and waits until the bytes are on the device, like [`File::write_at`] followed by
    /// [`File::sync`]. Implementations may do both in one step.
    fn write_synced(self: Arc<Self>, pieces: Vec<Bytes>, offset: u64) -> BoxFuture<'static, io::Result<()>>
    where
        Self: 'static,
    {
        Box::pin(async move {
            self.write_at(pieces, offset).await?;
            self.sync().await
        })
    }

    /// Returns the current size in bytes.
    fn size(&self) -> BoxFuture<'static, io::Result<u64>>;

    /// Returns the identity of a [named](WriteOpen::is_named) file that is open for writing.
    /// Returns `None` for other files, or if the disk has no identities.
    fn id(&self) -> Option<FileId> {
        None
    }

    /// Checks that a [named](WriteOpen::is_named) file that is open for writing still exists at its
    /// path, with everything that was written to it, and in [`IoClass::Metadata`] nothing else.
    /// Fails with [`Vanished`] as the source otherwise.
    fn verify(&self) -> BoxFuture<'static, io::Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// Queue of a file's writes and syncs. Calls only wait for calls of the same class, unless the disk
/// limits its writes and reads together: then `Index` calls, `Bulk` calls and reads wait for each
/// other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IoClass {
    /// Small records that a caller waits for, such as registrations and reports. Writes to a file
    /// of this class must not overlap.
    Metadata,
    /// Index records, which make bulk data readable.
    Index,
    /// Data, in calls of megabytes.
    #[default]
    Bulk,
}

/// Options of [`Disk::open_write`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WriteOpen {
    /// If true, the file must not exist yet. If false, it must exist.
    pub create: bool,
    /// Bypasses the page cache if the file system allows it.
    pub direct: bool,
    /// Queue of its writes and syncs.
    pub class: IoClass,
    /// The file will be opened again by its path. Writes fail with [`Vanished`] as their source if
    /// the file is no longer at its path, or was truncated. In [`IoClass::Metadata`] they also fail
    /// if another program has written to the file.
    pub is_named: bool,
}

/// Space of the file system that holds a disk's root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Space {
    /// Size of the file system.
    pub total_bytes: u64,
    /// Number of bytes that this process may still write.
    pub free_bytes: u64,
    /// Number of files that it can hold, or 0 if it has no such limit.
    pub total_inodes: u64,
    /// Number of files that this process may still create.
    pub free_inodes: u64,
    /// Id of the file system, so that two roots on it are not counted twice.
    pub file_system: u64,
}

/// A lock that is released on drop.
pub trait DiskLock: Send + Sync + fmt::Debug {}

/// A directory tree below one root. All paths are relative and must stay inside the root
/// (`InvalidInput` otherwise).
pub trait Disk: Send + Sync + fmt::Debug {
    /// Returns the root, for messages and labels.
    fn root(&self) -> &Path;
    /// Opens a file for writing at offsets.
    fn open_write(&self, path: &Path, how: WriteOpen) -> BoxFuture<'static, io::Result<Arc<dyn File>>>;
    /// Opens an existing file for reading.
    fn open_read(&self, path: &Path) -> BoxFuture<'static, io::Result<Arc<dyn File>>>;
    /// Opens an existing file for reading, bypassing the page cache if the file system allows it.
    /// Reads are fastest if offset, length and memory are multiples of [`BLOCK_ALIGN`].
    fn open_read_direct(&self, path: &Path) -> BoxFuture<'static, io::Result<Arc<dyn File>>> {
        self.open_read(path)
    }
    /// Creates a directory with its parents, including the root. Succeeds if it exists.
    fn create_dir_all(&self, path: &Path) -> BoxFuture<'static, io::Result<()>>;
    /// Removes an empty directory.
    fn remove_dir(&self, path: &Path) -> BoxFuture<'static, io::Result<()>>;
    /// Removes a directory with its contents.
    fn remove_dir_all(&self, path: &Path) -> BoxFuture<'static, io::Result<()>>;
    /// Removes a part of a file, or of a directory with its contents: frees about `bytes_max`
    /// bytes. Returns true once everything is gone. Remaining files may have been truncated.
    fn remove_part(&self, path: &Path, bytes_max: u64) -> BoxFuture<'static, io::Result<bool>>;
    /// Renames a file or directory. A file replaces an existing one. A directory's target must not
    /// exist.
    fn rename(&self, from: &Path, to: &Path) -> BoxFuture<'static, io::Result<()>>;
    /// Returns the names in a directory, sorted.
    fn list(&self, path: &Path) -> BoxFuture<'static, io::Result<Vec<String>>>;
    /// Reads a whole file of at most [`SMALL_FILE_BYTES_MAX`] bytes. Fails with `FileTooLarge` if
    /// it is larger.
    fn read_small(&self, path: &Path) -> BoxFuture<'static, io::Result<Vec<u8>>>;
    /// Waits until the entries of a directory are on the device.
    fn sync_dir(&self, path: &Path) -> BoxFuture<'static, io::Result<()>>;
    /// Waits until all writes to the root's file system are on the device.
    fn sync_all(&self) -> BoxFuture<'static, io::Result<()>>;
    /// Replaces the content of a small file in place and syncs it. Creates the file if it is
    /// absent. The inode stays the same, so a lock on it remains.
    fn write_small(&self, path: &Path, content: Vec<u8>) -> BoxFuture<'static, io::Result<()>>;
    /// Locks a file and creates it if it is absent. Fails with `WouldBlock` if another process
    /// holds the lock.
    fn lock(&self, path: &Path) -> BoxFuture<'static, io::Result<Box<dyn DiskLock>>>;
    /// Locks an existing file without writing. Also works on a read-only file system.
    fn lock_existing(&self, path: &Path) -> BoxFuture<'static, io::Result<Box<dyn DiskLock>>>;
    /// Returns the space of the file system.
    fn space(&self) -> BoxFuture<'static, io::Result<Space>>;
    /// Returns the mount of the root, or of the path where it will be created.
    fn mount(&self) -> BoxFuture<'static, io::Result<Mount>>;
    /// Records the identity of the root directory. From then on, creating or renaming in another
    /// directory at the same path fails with [`Vanished::Root`] as the source.
    fn anchor(&self) -> BoxFuture<'static, io::Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
    /// Returns true if the root still is the anchored directory. Returns false if that is unknown.
    fn is_anchored(&self) -> BoxFuture<'static, io::Result<bool>> {
        Box::pin(std::future::ready(Ok(false)))
    }
    /// Resolves the root's path. The root need not exist.
    fn location(&self) -> BoxFuture<'static, io::Result<Location>> {
        let location = Location { existing: None, rest: self.root().to_path_buf() };
        Box::pin(std::future::ready(Ok(location)))
    }
}

/// Forwards all methods of `Disk` except the `open_*` methods to the disk in field `$disk`. For use
/// inside `impl Disk`.
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
            location() -> $crate::Location;
        }
    };
    ($disk:ident; $($name:ident($($argument:ident: $type:ty),*) -> $answer:ty;)*) => {
        $(fn $name(&self, $($argument: $type),*) -> $crate::BoxFuture<'static, std::io::Result<$answer>> {
            self.$disk.$name($($argument),*)
        })*
    };
}

/// Rejects a path that is absolute or contains `..`.
pub fn require_inside(path: &Path) -> io::Result<()> {
    let inside = path.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    if inside {
        Ok(())
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "path is outside the disk's root"))
    }
}
