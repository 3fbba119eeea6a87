//! The real disk: positioned vectored calls on tokio's blocking threads, bounded per disk and kind.
//!
//! Every call takes a permit of its disk and keeps it until the system call returns, even when nobody waits any more.
//! So a hung disk costs a bounded number of threads, and what queues behind it is cancelled by dropping its future.

use std::fs::OpenOptions;
use std::io::{self, IoSlice, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use rustix::fs::FlockOperation;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{
    BLOCK_ALIGN, BoxFuture, Disk, DiskLock, File, Mount, ReadTarget, SMALL_FILE_BYTES_MAX, Space, WriteOpen,
    mount, require_inside,
};

/// Pieces per `pwritev` call: Linux's `UIO_MAXIOV`.
const IOVECS_MAX: usize = 1024;

/// Calls on names (open, rename, list, …) at a time. They are short; more would only occupy threads of a hung disk.
const NAME_CALLS_MAX: usize = 4;

/// Recursive removals at a time: long, so they must not queue in front of opens.
const REMOVALS_MAX: usize = 2;

/// Direct writes may end short of a block, which has to be written again; a file system that never gets further is
/// broken.
const SHORT_WRITES_WITHOUT_PROGRESS_MAX: u32 = 8;

/// Bounds the calls of one kind, and with others those of the whole disk.
///
/// The kind's permit is taken first and the disk's last, so whoever holds one of the disk waits for nothing.
#[derive(Debug, Clone)]
struct Gate {
    kind: Arc<Semaphore>,
    disk: Option<Arc<Semaphore>>,
}

/// Held by a call from its start to its end.
type Permits = (OwnedSemaphorePermit, Option<OwnedSemaphorePermit>);

fn permits(count: usize) -> Arc<Semaphore> {
    Arc::new(Semaphore::new(count.clamp(1, Semaphore::MAX_PERMITS)))
}

impl Gate {
    fn new(calls_max: usize) -> Self {
        Self { kind: permits(calls_max), disk: None }
    }

    async fn enter(self) -> Permits {
        const OPEN: &str = "a disk never closes its semaphores";
        let kind = self.kind.acquire_owned().await.expect(OPEN);
        let disk = match self.disk {
            Some(disk) => Some(disk.acquire_owned().await.expect(OPEN)),
            None => None,
        };
        (kind, disk)
    }
}

/// A directory of the operating system.
#[derive(Debug, Clone)]
pub struct BlockingDisk {
    root: Arc<Path>,
    writes: Gate,
    reads: Gate,
    names: Gate,
    removals: Gate,
}

impl BlockingDisk {
    /// The disk below `root`, with at most so many writes and reads at a time. Touches nothing yet.
    #[must_use]
    pub fn new(root: &Path, write_concurrency: usize, read_concurrency: usize) -> Self {
        Self {
            root: root.into(),
            writes: Gate::new(write_concurrency),
            reads: Gate::new(read_concurrency),
            names: Gate::new(NAME_CALLS_MAX),
            removals: Gate::new(REMOVALS_MAX),
        }
    }

    /// The same disk with at most `calls_max` reads and writes together at a time. Calls on names are not counted:
    /// they must get through for the disk to be told healthy.
    #[must_use]
    pub fn with_max_concurrency(self, calls_max: usize) -> Self {
        let disk = Some(permits(calls_max));
        let writes = Gate { disk: disk.clone(), ..self.writes };
        let reads = Gate { disk, ..self.reads };
        Self { writes, reads, ..self }
    }

    /// Runs `work` on the absolute form of `path`.
    fn on_path<T: Send + 'static>(
        &self,
        gate: &Gate,
        path: &Path,
        work: impl FnOnce(PathBuf) -> io::Result<T> + Send + 'static,
    ) -> BoxFuture<'static, io::Result<T>> {
        if let Err(error) = require_inside(path) {
            return Box::pin(std::future::ready(Err(error)));
        }
        // Joining an empty path would end in a slash.
        let path = if path.as_os_str().is_empty() { self.root.to_path_buf() } else { self.root.join(path) };
        Box::pin(blocking(gate.clone(), move || work(path)))
    }

    fn file(&self, file: std::fs::File, direct: bool) -> Arc<dyn File> {
        let (writes, reads) = (self.writes.clone(), self.reads.clone());
        Arc::new(BlockingFile { file: Arc::new(file), direct, writes, reads })
    }
}

/// Runs `work` on a blocking thread under a permit that it keeps until it ends.
async fn blocking<T: Send + 'static>(
    gate: Gate,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let permit = gate.enter().await;
    let joined = tokio::task::spawn_blocking(move || {
        let done = work();
        drop(permit);
        done
    });
    // A panic of the thread, or the end of the runtime.
    joined.await.unwrap_or_else(|error| Err(io::Error::other(error)))
}

impl Disk for BlockingDisk {
    fn root(&self) -> &Path {
        &self.root
    }

    fn open_write(&self, path: &Path, how: WriteOpen) -> BoxFuture<'static, io::Result<Arc<dyn File>>> {
        let disk = self.clone();
        self.on_path(&self.names, path, move |path| {
            let (file, direct) = open_write(&path, how)?;
            Ok(disk.file(file, direct))
        })
    }

    fn open_read(&self, path: &Path) -> BoxFuture<'static, io::Result<Arc<dyn File>>> {
        let disk = self.clone();
        self.on_path(&self.names, path, move |path| {
            Ok(disk.file(OpenOptions::new().read(true).open(path)?, false))
        })
    }

    fn open_read_direct(&self, path: &Path) -> BoxFuture<'static, io::Result<Arc<dyn File>>> {
        let disk = self.clone();
        self.on_path(&self.names, path, move |path| {
            let flags = rustix::fs::OFlags::DIRECT.bits().cast_signed();
            match OpenOptions::new().read(true).custom_flags(flags).open(&path) {
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                    Ok(disk.file(OpenOptions::new().read(true).open(path)?, false))
                }
                opened => Ok(disk.file(opened?, true)),
            }
        })
    }

    fn create_dir_all(&self, path: &Path) -> BoxFuture<'static, io::Result<()>> {
        self.on_path(&self.names, path, std::fs::create_dir_all)
    }

    fn remove_dir(&self, path: &Path) -> BoxFuture<'static, io::Result<()>> {
        self.on_path(&self.names, path, std::fs::remove_dir)
    }

    fn remove_dir_all(&self, path: &Path) -> BoxFuture<'static, io::Result<()>> {
        self.on_path(&self.removals, path, std::fs::remove_dir_all)
    }

    fn rename(&self, from: &Path, to: &Path) -> BoxFuture<'static, io::Result<()>> {
        if let Err(error) = require_inside(to) {
            return Box::pin(std::future::ready(Err(error)));
        }
        let to = self.root.join(to);
        self.on_path(&self.names, from, move |from| std::fs::rename(from, to))
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

    fn write_small(&self, path: &Path, content: Vec<u8>) -> BoxFuture<'static, io::Result<()>> {
        self.on_path(&self.names, path, move |path| {
            let mut file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
            file.write_all(&content)?;
            file.sync_all()
        })
    }

    fn lock(&self, path: &Path) -> BoxFuture<'static, io::Result<Box<dyn DiskLock>>> {
        self.on_path(&self.names, path, |path| {
            let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
            rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
            let lock: Box<dyn DiskLock> = Box::new(FileLock { _file: file });
            Ok(lock)
        })
    }

    fn space(&self) -> BoxFuture<'static, io::Result<Space>> {
        self.on_path(&self.names, Path::new(""), |path| {
            let stat = rustix::fs::statvfs(path)?;
            // As `df` counts: what is in use and what this user may still take. Blocks reserved for root are neither;
            // counted as used they would push a disk over its watermark that is half empty.
            let blocks = stat.f_blocks.saturating_sub(stat.f_bfree).saturating_add(stat.f_bavail);
            Ok(Space {
                total_bytes: blocks.saturating_mul(stat.f_frsize),
                free_bytes: stat.f_bavail.saturating_mul(stat.f_frsize),
                file_system: stat.f_fsid,
            })
        })
    }

    fn mount(&self) -> BoxFuture<'static, io::Result<Mount>> {
        self.on_path(&self.names, Path::new(""), |path| mount::mount_of(&path))
    }
}

/// A `flock` that ends with its descriptor.
#[derive(Debug)]
struct FileLock {
    _file: std::fs::File,
}

impl DiskLock for FileLock {}

/// Opens for writing; falls back to the page cache where the file system refuses `O_DIRECT` (EINVAL).
fn open_write(path: &Path, how: WriteOpen) -> io::Result<(std::fs::File, bool)> {
    let mut options = OpenOptions::new();
    options.write(true);
    if how.direct {
        let direct = rustix::fs::OFlags::DIRECT.bits().cast_signed();
        match options.clone().create_new(how.create).custom_flags(direct).open(path) {
            Ok(file) => return Ok((file, true)),
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                // Linux may have created the file before it refused the flag.
                options.create(how.create);
                return options.open(path).map(|file| (file, false));
            }
            Err(error) => return Err(error),
        }
    }
    options.create_new(how.create).open(path).map(|file| (file, false))
}

/// An open file of a [`BlockingDisk`].
#[derive(Debug)]
struct BlockingFile {
    file: Arc<std::fs::File>,
    direct: bool,
    writes: Gate,
    reads: Gate,
}

impl File for BlockingFile {
    fn write_at(&self, pieces: Vec<Bytes>, offset: u64) -> BoxFuture<'static, io::Result<()>> {
        let (file, direct) = (Arc::clone(&self.file), self.direct);
        Box::pin(blocking(self.writes.clone(), move || {
            let grain = if direct { BLOCK_ALIGN } else { 1 };
            write_all(&pieces, offset, grain, |slices, at| Ok(rustix::io::pwritev(&file, slices, at)?))
        }))
    }

    fn read_at(&self, target: ReadTarget, offset: u64) -> BoxFuture<'static, (ReadTarget, io::Result<()>)> {
        let (file, direct, reads) = (Arc::clone(&self.file), self.direct, self.reads.clone());
        Box::pin(async move {
            let permit = reads.enter().await;
            let joined = tokio::task::spawn_blocking(move || {
                let mut target = target;
                let result = match target.bytes_mut() {
                    Some(bytes) if direct => read_direct(&file, bytes, offset),
                    Some(bytes) => file.read_exact_at(bytes, offset),
                    None => Err(io::Error::new(io::ErrorKind::InvalidInput, "range outside the buffer")),
                };
                drop(permit);
                (target, result)
            });
            match joined.await {
                Ok(done) => done,
                // The buffer went down with its thread: hand back an empty one.
                Err(error) => {
                    let lost = ReadTarget { buffer: Box::new(Vec::new()), range: 0..0 };
                    (lost, Err(io::Error::other(error)))
                }
            }
        })
    }

    fn sync(&self) -> BoxFuture<'static, io::Result<()>> {
        let file = Arc::clone(&self.file);
        Box::pin(blocking(self.writes.clone(), move || file.sync_data()))
    }

    fn size(&self) -> BoxFuture<'static, io::Result<u64>> {
        let file = Arc::clone(&self.file);
        Box::pin(blocking(self.reads.clone(), move || Ok(file.metadata()?.len())))
    }
}

/// Fills `bytes` from a direct file: at once when everything is aligned, else by way of aligned memory.
fn read_direct(file: &std::fs::File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    let grain = BLOCK_ALIGN as u64;
    let whole = offset.is_multiple_of(grain) && bytes.len().is_multiple_of(BLOCK_ALIGN);
    if whole && bytes.as_ptr().addr().is_multiple_of(BLOCK_ALIGN) {
        let needed = bytes.len();
        return read_blocks(file, bytes, offset, needed);
    }
    let start = offset / grain * grain;
    let skip = usize::try_from(offset - start).unwrap_or(0);
    let needed = skip + bytes.len();
    let room = needed.next_multiple_of(BLOCK_ALIGN);
    let mut memory = vec![0; room + BLOCK_ALIGN];
    let aligned = memory.as_ptr().align_offset(BLOCK_ALIGN);
    let blocks = &mut memory[aligned..aligned + room];
    read_blocks(file, blocks, start, needed)?;
    bytes.copy_from_slice(&blocks[skip..needed]);
    Ok(())
}

/// Reads at least the first `needed` bytes of `blocks`, which is aligned as `start` is.
fn read_blocks(file: &std::fs::File, blocks: &mut [u8], start: u64, needed: usize) -> io::Result<()> {
    let mut filled = 0;
    while filled < needed {
        match file.read_at(&mut blocks[filled..], start + filled as u64) {
            Ok(count) => {
                filled += count;
                // A call that ends inside a block has seen the end of the file.
                if filled < needed && (count == 0 || !filled.is_multiple_of(BLOCK_ALIGN)) {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Drives `write` until every piece is written: at most [`IOVECS_MAX`] pieces a call, short writes completed, EINTR
/// retried. `grain` is the unit in which progress counts: a direct write that ended inside a block begins again with
/// that block.
fn write_all(
    pieces: &[Bytes],
    offset: u64,
    grain: usize,
    mut write: impl FnMut(&[IoSlice<'_>], u64) -> io::Result<usize>,
) -> io::Result<()> {
    let mut piece = 0; // first piece that is not written whole
    let mut inside = 0; // bytes of it that are written
    let mut at = offset;
    let mut stuck = 0;
    while piece < pieces.len() {
        let slices = pieces[piece..].iter().take(IOVECS_MAX).enumerate();
        let slices: Vec<_> =
            slices.map(|(n, bytes)| IoSlice::new(if n == 0 { &bytes[inside..] } else { bytes })).collect();
        let asked: usize = slices.iter().map(|slice| slice.len()).sum();
        let written = match write(&slices, at) {
            Ok(0) if asked > 0 => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => written,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        let mut advance = if written == asked { written } else { written - written % grain };
        if advance == 0 && asked > 0 {
            stuck += 1;
            if stuck > SHORT_WRITES_WITHOUT_PROGRESS_MAX {
                return Err(io::ErrorKind::WriteZero.into());
            }
            continue;
        }
        stuck = 0;
        at += advance as u64;
        while piece < pieces.len() && pieces[piece].len() - inside <= advance {
            advance -= pieces[piece].len() - inside;
            (piece, inside) = (piece + 1, 0);
        }
        inside += advance;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::{Rng, SeedableRng};

    use super::*;

    #[tokio::test]
    async fn one_bound_holds_for_reads_and_writes_together() {
        let disk = BlockingDisk::new(Path::new("/"), 2, 2).with_max_concurrency(1);
        let writing = disk.writes.clone().enter().await;
        let mut reading = std::pin::pin!(disk.reads.clone().enter());
        assert!(futures::poll!(reading.as_mut()).is_pending());
        drop(disk.names.clone().enter().await);
        drop(writing);
        drop(reading.await);
    }

    proptest! {
        /// Whatever the file system does short of failing, the file is the pieces.
        #[test]
        fn short_and_interrupted_writes_are_completed(
            lengths in prop::collection::vec(0usize..40, 0..3000), seed: u64,
        ) {
            let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
            let pieces: Vec<Bytes> =
                lengths.iter().map(|len| (0..*len).map(|_| random.random()).collect::<Vec<u8>>().into()).collect();
            let mut file = Vec::new();
            write_all(&pieces, 10, 1, |slices, at| {
                assert!(slices.len() <= IOVECS_MAX);
                if random.random_bool(0.2) {
                    return Err(io::ErrorKind::Interrupted.into());
                }
                assert_eq!(at, 10 + file.len() as u64);
                let all: Vec<u8> = slices.iter().flat_map(|slice| slice.iter().copied()).collect();
                let written = if all.is_empty() { 0 } else { random.random_range(1..=all.len()) };
                file.extend_from_slice(&all[..written]);
                Ok(written)
            }).unwrap();
            prop_assert_eq!(file, pieces.concat());
        }
    }

    #[test]
    fn a_direct_write_that_ends_inside_a_block_begins_again_with_it() {
        let pieces = vec![Bytes::from(vec![1; BLOCK_ALIGN]), Bytes::from(vec![2; 2 * BLOCK_ALIGN])];
        let mut calls = Vec::new();
        write_all(&pieces, 0, BLOCK_ALIGN, |slices, at| {
            let asked: usize = slices.iter().map(|slice| slice.len()).sum();
            calls.push((at, asked));
            Ok(if calls.len() == 1 { BLOCK_ALIGN + 512 } else { asked })
        })
        .unwrap();
        assert_eq!(calls, [(0, 3 * BLOCK_ALIGN), (BLOCK_ALIGN as u64, 2 * BLOCK_ALIGN)]);
    }

    #[test]
    fn no_progress_and_errors_end_the_write() {
        let pieces = vec![Bytes::from(vec![1; BLOCK_ALIGN])];
        let stuck = write_all(&pieces, 0, BLOCK_ALIGN, |_, _| Ok(512)).unwrap_err();
        assert_eq!(stuck.kind(), io::ErrorKind::WriteZero);
        let zero = write_all(&pieces, 0, 1, |_, _| Ok(0)).unwrap_err();
        assert_eq!(zero.kind(), io::ErrorKind::WriteZero);
        let full = write_all(&pieces, 0, 1, |_, _| Err(io::ErrorKind::StorageFull.into())).unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
    }
}
