//! Detects truncation: other programs truncated, removed or replaced a file that is open for
//! writing, or moved a root directory.
//!
//! Only named files are checked ([`WriteOpen::is_named`](super::WriteOpen::is_named)). Files of
//! [`IoClass::Metadata`](super::IoClass::Metadata) must also not be written to by others.
//! Invariant: a write to a file that has vanished fails. Otherwise data would be acknowledged that
//! no start can find.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// Identity of a file. Two paths with the same identity lead to the same file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileId {
    /// Device number.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
}

impl FileId {
    fn of(metadata: &std::fs::Metadata) -> Self {
        Self { device: metadata.dev(), inode: metadata.ino() }
    }
}

/// Resolved location of a path. Two paths with equal locations lead to the same directory, or would
/// if it existed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Location {
    /// Identity of the longest existing part of the path, or `None` if the disk has no identities.
    pub existing: Option<FileId>,
    /// The rest of the path.
    pub rest: PathBuf,
}

/// Reason why an open file or a root directory is no longer usable. It is the source of an
/// [`io::Error`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vanished {
    /// The file was removed, replaced by another one, cut short, or written by another program.
    File,
    /// The root directory was unmounted, moved or replaced.
    Root,
}

impl Vanished {
    /// Returns the reason if `error` was caused by a vanished file or root.
    #[must_use]
    pub fn of(error: &io::Error) -> Option<Self> {
        error.get_ref()?.downcast_ref().copied()
    }
}

impl fmt::Display for Vanished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::File => "the file was removed, replaced, truncated or changed while it was in use",
            Self::Root => "the path no longer leads to the directory: it was unmounted, moved or replaced",
        })
    }
}

impl std::error::Error for Vanished {}

impl From<Vanished> for io::Error {
    fn from(vanished: Vanished) -> Self {
        Self::other(vanished)
    }
}

/// A root directory and its recorded identity. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct Root {
    pub(super) path: Arc<Path>,
    anchor: Arc<Mutex<Option<FileId>>>,
}

impl Root {
    pub(super) fn new(path: &Path) -> Self {
        Self { path: path.into(), anchor: Arc::default() }
    }

    /// Records the identity of the directory at the path.
    pub(super) fn anchor(&self) -> io::Result<()> {
        let id = FileId::of(&std::fs::metadata(&self.path)?);
        *self.anchor.lock() = Some(id);
        Ok(())
    }

    /// Returns true if the path leads to the recorded directory, and false if none is recorded.
    pub(super) fn is_anchored(&self) -> io::Result<bool> {
        let Some(anchor) = *self.anchor.lock() else { return Ok(false) };
        match std::fs::metadata(&self.path) {
            Ok(metadata) => Ok(FileId::of(&metadata) == anchor),
            Err(error) if is_absent(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Fails with [`Vanished::Root`] if the path does not lead to the recorded directory.
    pub(super) fn require(&self) -> io::Result<()> {
        let is_free = self.anchor.lock().is_none();
        if is_free || self.is_anchored()? { Ok(()) } else { Err(Vanished::Root.into()) }
    }

    /// Resolves the path. The directory need not exist.
    pub(super) fn location(&self) -> io::Result<Location> {
        let path = &self.path;
        let existing = path.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(path);
        let rest = path.strip_prefix(existing).map_err(io::Error::other)?.to_path_buf();
        Ok(Location { existing: Some(FileId::of(&std::fs::metadata(existing)?)), rest })
    }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Expected path, identity and length of a file that is open for writing.
#[derive(Debug)]
pub(super) struct ExpectedFile {
    root: Root,
    path: PathBuf,
    id: FileId,
    /// End of the bytes that are known to be written.
    end: AtomicU64,
    /// Modification time after the last own write, or when the file was opened. Only for files
    /// whose writes never overlap, since only their exact state is known.
    modified: Option<Mutex<Modified>>,
}

/// Seconds and nanoseconds of a modification time.
type Modified = (i64, i64);

fn modified(metadata: &std::fs::Metadata) -> Modified {
    (metadata.mtime(), metadata.mtime_nsec())
}

impl ExpectedFile {
    /// Expects the current state of `file`. If `is_exact`, also detects that another program
    /// extends or overwrites it.
    pub(super) fn new(root: Root, path: PathBuf, file: &File, is_exact: bool) -> io::Result<Self> {
        let metadata = file.metadata()?;
        let modified = is_exact.then(|| Mutex::new(modified(&metadata)));
        Ok(Self { root, path, id: FileId::of(&metadata), end: AtomicU64::new(metadata.len()), modified })
    }

    pub(super) fn id(&self) -> FileId {
        self.id
    }

    /// Records that the bytes before `end` were written.
    pub(super) fn wrote(&self, file: &File, end: u64) -> io::Result<()> {
        self.end.fetch_max(end, Ordering::Release);
        if let Some(expected) = &self.modified {
            *expected.lock() = modified(&file.metadata()?);
        }
        Ok(())
    }

    /// Checks that no other program truncated the file. Called before a write, because writing past
    /// the end would hide it. Checks also that nobody extended or changed an exact file.
    pub(super) fn require_unchanged(&self, file: &File) -> io::Result<()> {
        // Loaded first: a write that ends in between makes the file longer than this, never
        // shorter.
        let end = self.end.load(Ordering::Acquire);
        let metadata = file.metadata()?;
        let is_unchanged = match &self.modified {
            Some(expected) => metadata.len() == end && modified(&metadata) == *expected.lock(),
            None => metadata.len() >= end,
        };
        if is_unchanged { Ok(()) } else { Err(self.vanished()) }
    }

    /// Checks that the file still exists at its path. Called after a write.
    pub(super) fn require_place(&self) -> io::Result<()> {
        match std::fs::symlink_metadata(&self.path) {
            Ok(metadata) if FileId::of(&metadata) == self.id => Ok(()),
            Ok(_) => Err(self.vanished()),
            Err(error) if is_absent(&error) => Err(self.vanished()),
            Err(error) => Err(error),
        }
    }

    /// Returns the error of a vanished file. Reports the root instead if the whole directory is
    /// gone, because it may come back.
    fn vanished(&self) -> io::Error {
        self.root.require().err().unwrap_or_else(|| Vanished::File.into())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use super::*;

    #[test]
    fn concurrent_own_write_is_no_truncation() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        let file = File::create(&path).unwrap();
        let expected = ExpectedFile::new(Root::new(dir.path()), path, &file, false).unwrap();
        std::thread::scope(|scope| {
            let writing = scope.spawn(|| {
                for at in 0..20_000 {
                    file.write_all_at(b"x", at).unwrap();
                    expected.wrote(&file, at + 1).unwrap();
                }
            });
            while !writing.is_finished() {
                expected.require_unchanged(&file).unwrap();
            }
        });
        file.set_len(1).unwrap();
        expected.require_unchanged(&file).unwrap_err();
    }
}
