//! A disk whose operations consult the rules first, except those that identify it: mount point,
//! anchor, location, file ids and `verify`.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use uniffle_io::{BoxFuture, Disk, DiskLock, File, FileId, Location, Mount, ReadTarget, Space, WriteOpen};

use super::{Fault, Faults, Operation, never_released, panic_when_polled, slowly};

/// Any disk, with [`Faults`].
#[derive(Debug)]
pub struct FaultDisk {
    disk: Arc<dyn Disk>,
    faults: Faults,
}

impl FaultDisk {
    /// Adds `faults` to `disk`.
    #[must_use]
    pub fn new(disk: Arc<dyn Disk>, faults: Faults) -> Self {
        Self { disk, faults }
    }

    fn open(
        &self,
        path: &Path,
        direct: bool,
        opening: BoxFuture<'static, io::Result<Arc<dyn File>>>,
    ) -> BoxFuture<'static, io::Result<Arc<dyn File>>> {
        let (faults, path) = (self.faults.clone(), path.to_path_buf());
        Box::pin(async move {
            let file: Arc<dyn File> = Arc::new(FaultFile { file: opening.await?, faults, path, direct });
            Ok(file)
        })
    }
}

impl Disk for FaultDisk {
    fn root(&self) -> &Path {
        self.disk.root()
    }

    fn open_write(&self, path: &Path, how: WriteOpen) -> BoxFuture<'static, io::Result<Arc<dyn File>>> {
        let opening = self.faults.change(Operation::OpenWrite, path, self.disk.open_write(path, how));
        self.open(path, how.direct, opening)
    }

    fn open_read(&self, path: &Path) -> BoxFuture<'static, io::Result<Arc<dyn File>>> {
        let opening = self.faults.apply(Operation::OpenRead, path, self.disk.open_read(path));
        self.open(path, false, opening)
    }

    fn create_dir_all(&self, path: &Path) -> BoxFuture<'static, io::Result<()>> {
        let (list, create) = (self.disk.list(path), self.disk.create_dir_all(path));
        self.faults.create(Operation::CreateDir, path, list, create)
    }

    fn remove_dir(&self, path: &Path) -> BoxFuture<'static, io::Result<()>> {
        self.faults.change(Operation::Remove, path, self.disk.remove_dir(path))
    }

    fn remove_dir_all(&self, path: &Path) -> BoxFuture<'static, io::Result<()>> {
        self.faults.change(Operation::Remove, path, self.disk.remove_dir_all(path))
    }

    fn remove_part(&self, path: &Path, bytes_max: u64) -> BoxFuture<'static, io::Result<bool>> {
        self.faults.change(Operation::Remove, path, self.disk.remove_part(path, bytes_max))
    }

    fn rename(&self, from: &Path, to: &Path) -> BoxFuture<'static, io::Result<()>> {
        self.faults.change(Operation::Rename, from, self.disk.rename(from, to))
    }

    fn list(&self, path: &Path) -> BoxFuture<'static, io::Result<Vec<String>>> {
        self.faults.apply(Operation::Other, path, self.disk.list(path))
    }

    fn read_small(&self, path: &Path) -> BoxFuture<'static, io::Result<Vec<u8>>> {
        self.faults.apply(Operation::Other, path, self.disk.read_small(path))
    }

    fn sync_dir(&self, path: &Path) -> BoxFuture<'static, io::Result<()>> {
        self.faults.apply(Operation::SyncDir, path, self.disk.sync_dir(path))
    }

    fn sync_all(&self) -> BoxFuture<'static, io::Result<()>> {
        self.faults.apply(Operation::SyncDir, Path::new(""), self.disk.sync_all())
    }

    fn write_small(&self, path: &Path, content: Vec<u8>) -> BoxFuture<'static, io::Result<()>> {
        self.faults.change(Operation::Other, path, self.disk.write_small(path, content))
    }

    fn lock(&self, path: &Path) -> BoxFuture<'static, io::Result<Box<dyn DiskLock>>> {
        self.faults.change(Operation::Other, path, self.disk.lock(path))
    }

    fn lock_existing(&self, path: &Path) -> BoxFuture<'static, io::Result<Box<dyn DiskLock>>> {
        self.faults.apply(Operation::Other, path, self.disk.lock_existing(path))
    }

    fn space(&self) -> BoxFuture<'static, io::Result<Space>> {
        self.faults.apply(Operation::Space, Path::new(""), self.disk.space())
    }

    fn mount(&self) -> BoxFuture<'static, io::Result<Mount>> {
        self.disk.mount()
    }

    fn anchor(&self) -> BoxFuture<'static, io::Result<()>> {
        self.disk.anchor()
    }

    fn is_anchored(&self) -> BoxFuture<'static, io::Result<bool>> {
        self.disk.is_anchored()
    }

    fn location(&self) -> BoxFuture<'static, io::Result<Location>> {
        self.disk.location()
    }
}

#[derive(Debug)]
struct FaultFile {
    file: Arc<dyn File>,
    faults: Faults,
    path: PathBuf,
    /// Opened for direct writes.
    direct: bool,
}

/// Returns the first `limit` bytes of `pieces`.
fn cut(pieces: Vec<Bytes>, mut limit: usize) -> Vec<Bytes> {
    let mut kept = Vec::new();
    for piece in pieces {
        let taken = piece.len().min(limit);
        kept.push(piece.slice(..taken));
        limit -= taken;
    }
    kept
}

impl File for FaultFile {
    fn write_at(&self, pieces: Vec<Bytes>, offset: u64) -> BoxFuture<'static, io::Result<()>> {
        match self.faults.pick(Operation::Write, &self.path) {
            None | Some(Fault::Flip) if self.direct => {
                let bytes = pieces.iter().map(|piece| piece.len() as u64).sum();
                self.faults.at_speed(bytes, self.file.write_at(pieces, offset))
            }
            None | Some(Fault::Flip) => self.file.write_at(pieces, offset),
            Some(Fault::Zeros) => {
                let zeros = pieces.iter().map(|piece| Bytes::from(vec![0; piece.len()])).collect();
                self.file.write_at(zeros, offset)
            }
            Some(Fault::Errno(errno)) => {
                Box::pin(std::future::ready(Err(io::Error::from_raw_os_error(errno))))
            }
            Some(Fault::Short { bytes, errno }) => {
                let part = self.file.write_at(cut(pieces, bytes), offset);
                Box::pin(async move {
                    part.await?;
                    Err(io::Error::from_raw_os_error(errno))
                })
            }
            Some(Fault::Panic) => panic_when_polled(),
            Some(Fault::Slow(time)) => Box::pin(slowly(time, self.file.write_at(pieces, offset))),
            Some(Fault::Hang) => {
                let waiting = self.faults.hang(self.file.write_at(pieces, offset));
                Box::pin(async move { waiting.await.unwrap_or_else(|| Err(never_released())) })
            }
            Some(Fault::Torn { bytes }) => {
                let part = self.file.write_at(cut(pieces, bytes), offset);
                Box::pin(async move {
                    part.await?;
                    std::future::pending().await
                })
            }
        }
    }

    fn read(&self, target: ReadTarget) -> BoxFuture<'static, (ReadTarget, io::Result<()>)> {
        match self.faults.pick(Operation::Read, &self.path) {
            None | Some(Fault::Zeros) => self.file.read(target),
            Some(Fault::Flip) => {
                let reading = self.file.read(target);
                Box::pin(async move {
                    let (mut target, result) = reading.await;
                    if let Some(bytes) = target.part_mut(0) {
                        let middle = bytes.len() / 2;
                        bytes[middle] ^= 1;
                    }
                    (target, result)
                })
            }
            Some(Fault::Errno(errno) | Fault::Short { errno, .. }) => {
                Box::pin(std::future::ready((target, Err(io::Error::from_raw_os_error(errno)))))
            }
            Some(Fault::Panic) => panic_when_polled(),
            Some(Fault::Torn { .. }) => Box::pin(std::future::pending()),
            Some(Fault::Slow(time)) => Box::pin(slowly(time, self.file.read(target))),
            Some(Fault::Hang) => {
                let waiting = self.faults.hang(self.file.read(target));
                Box::pin(async move {
                    waiting.await.unwrap_or_else(|| (ReadTarget::lost(), Err(never_released())))
                })
            }
        }
    }

    fn advise(&self, ranges: Vec<Range<u64>>) -> BoxFuture<'static, io::Result<()>> {
        self.faults.apply(Operation::Advise, &self.path, self.file.advise(ranges))
    }

    fn sync(&self) -> BoxFuture<'static, io::Result<()>> {
        self.faults.apply(Operation::Sync, &self.path, self.file.sync())
    }

    fn size(&self) -> BoxFuture<'static, io::Result<u64>> {
        self.faults.apply(Operation::Other, &self.path, self.file.size())
    }

    fn id(&self) -> Option<FileId> {
        self.file.id()
    }

    fn verify(&self) -> BoxFuture<'static, io::Result<()>> {
        self.file.verify()
    }
}
