//! An in-memory disk that computes the time that a rotating disk would have taken.
//!
//! The model has one head. A non-sequential access costs a seek and half a rotation; bytes cost
//! their transfer time. Every write is appended to the platter, the best case of delayed
//! allocation, so a write only costs a seek after a read, or if its file changes (inode,
//! allocation). A read costs a seek if its bytes do not follow the last access. Creating a file
//! costs a seek. Opening, deleting, renaming, and reads and writes of whole small files
//! (`read_small`, `write_small`) are free. No time passes: the seconds are only added up.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use uniffle_io::{BoxFuture, Disk, File, ReadTarget, WriteOpen};
use uniffle_testkit::memory_disk::MemoryDisk;

/// Seek and half a rotation of a disk with 7,200 rotations per minute.
const SEEK_SECONDS: f64 = 0.0085 + 0.0042;
/// Sequential speed of a rotating disk.
pub(crate) const BYTES_PER_SECOND: f64 = 150e6;

/// Accumulated work of the head.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct HeadWork {
    pub(crate) seconds: f64,
    pub(crate) seeks: u64,
    pub(crate) files: u64,
}

#[derive(Debug, Default)]
struct Platter {
    work: HeadWork,
    /// Position of the next write.
    end: u64,
    /// End of the last access.
    head: u64,
    /// File of the last write.
    last_written: Option<PathBuf>,
    /// (offset in the file, position on the platter, bytes) in the order of writing.
    fragments: HashMap<PathBuf, Vec<(u64, u64, u64)>>,
}

impl Platter {
    fn seek(&mut self) {
        self.work.seconds += SEEK_SECONDS;
        self.work.seeks += 1;
    }

    fn create(&mut self) {
        self.seek();
        self.work.files += 1;
    }

    fn write(&mut self, path: &Path, offset: u64, bytes: u64) {
        if self.last_written.as_deref() != Some(path) || self.head != self.end {
            self.seek();
            self.last_written = Some(path.to_owned());
        }
        self.work.seconds += bytes as f64 / BYTES_PER_SECOND;
        self.fragments.entry(path.to_owned()).or_default().push((offset, self.end, bytes));
        self.end += bytes;
        self.head = self.end;
    }

    fn read(&mut self, path: &Path, offset: u64, bytes: u64) {
        let end = offset + bytes;
        let fragments = self.fragments.get(path).map_or(&[][..], Vec::as_slice);
        let mut wanted: Vec<(u64, u64)> = fragments
            .iter()
            .filter_map(|&(begins, place, length)| {
                let (from, to) = (begins.max(offset), (begins + length).min(end));
                (from < to).then(|| (place + from - begins, to - from))
            })
            .collect();
        wanted.sort_unstable();
        for (place, length) in wanted {
            if self.head != place {
                self.seek();
            }
            self.work.seconds += length as f64 / BYTES_PER_SECOND;
            self.head = place + length;
        }
    }
}

/// The disk. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct SeekDisk {
    disk: MemoryDisk,
    platter: Arc<Mutex<Platter>>,
}

impl SeekDisk {
    pub(crate) fn new() -> Self {
        Self { disk: MemoryDisk::new("/seek", None), platter: Arc::default() }
    }

    /// Returns the work since the last call. The number of files is the total.
    pub(crate) fn take_work(&self) -> HeadWork {
        let mut platter = self.platter.lock();
        let work = platter.work;
        platter.work = HeadWork { files: work.files, ..HeadWork::default() };
        work
    }

    fn file(&self, path: &Path, file: Arc<dyn File>) -> Arc<dyn File> {
        Arc::new(SeekFile { file, path: path.to_owned(), platter: self.platter.clone() })
    }
}

impl Disk for SeekDisk {
    uniffle_io::pass_on!(disk);

    fn open_write(&self, path: &Path, how: WriteOpen) -> BoxFuture<'static, io::Result<Arc<dyn File>>> {
        if how.create {
            self.platter.lock().create();
        }
        let (this, path, opening) = (self.clone(), path.to_owned(), self.disk.open_write(path, how));
        Box::pin(async move { Ok(this.file(&path, opening.await?)) })
    }

    fn open_read(&self, path: &Path) -> BoxFuture<'static, io::Result<Arc<dyn File>>> {
        let (this, path, opening) = (self.clone(), path.to_owned(), self.disk.open_read(path));
        Box::pin(async move { Ok(this.file(&path, opening.await?)) })
    }
}

#[derive(Debug)]
struct SeekFile {
    file: Arc<dyn File>,
    path: PathBuf,
    platter: Arc<Mutex<Platter>>,
}

impl File for SeekFile {
    fn write_at(&self, pieces: Vec<Bytes>, offset: u64) -> BoxFuture<'static, io::Result<()>> {
        let bytes = pieces.iter().map(|piece| piece.len() as u64).sum();
        self.platter.lock().write(&self.path, offset, bytes);
        self.file.write_at(pieces, offset)
    }

    fn read(&self, target: ReadTarget) -> BoxFuture<'static, (ReadTarget, io::Result<()>)> {
        for part in &target.parts {
            self.platter.lock().read(&self.path, part.offset, part.range.len() as u64);
        }
        self.file.read(target)
    }

    fn sync(&self) -> BoxFuture<'static, io::Result<()>> {
        self.file.sync()
    }

    fn size(&self) -> BoxFuture<'static, io::Result<u64>> {
        self.file.size()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeks_are_counted_per_change_of_file_or_position() {
        let mut platter = Platter::default();
        let (a, b) = (Path::new("a"), Path::new("b"));
        for n in 0..10 {
            platter.write(a, n * 100, 100);
        }
        assert_eq!(platter.work.seeks, 1);
        for n in 0..10 {
            platter.write(b, n * 100, 100);
            platter.write(a, 1_000 + n * 100, 100);
        }
        assert_eq!(platter.work.seeks, 21);
        platter.work = HeadWork::default();
        platter.read(a, 0, 1_000);
        assert_eq!(platter.work.seeks, 1);
        platter.read(a, 1_000, 1_000);
        assert_eq!(platter.work.seeks, 11, "a file written in ten pieces must have ten extents");
        assert!((platter.work.seconds - 11.0 * SEEK_SECONDS - 2_000.0 / BYTES_PER_SECOND).abs() < 1e-9);
    }
}
