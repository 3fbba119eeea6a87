//! A disk that misbehaves on purpose: any disk, with rules that make chosen operations fail, end short or hang.
//!
//! Rules are consumed in order; a rule may let some matching calls pass first. A hung operation has begun: it does its
//! work when it is released ([`Faults::release`]), even when its caller has given up, as a thread in `pwritev` would.

use std::borrow::Cow;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::Instant;

use uniffle_io::{BoxFuture, Disk, DiskLock, File, Mount, ReadTarget, Space, WriteOpen};

/// Kinds of operations that rules choose by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// [`Disk::open_write`].
    OpenWrite,
    /// [`Disk::open_read`].
    OpenRead,
    /// [`File::write_at`].
    Write,
    /// [`File::read_at`].
    Read,
    /// [`File::advise`].
    Advise,
    /// [`File::sync`].
    Sync,
    /// [`File::write_back`].
    WriteBack,
    /// [`Disk::sync_dir`] and [`Disk::sync_all`].
    SyncDir,
    /// [`Disk::create_dir_all`].
    CreateDir,
    /// [`Disk::rename`].
    Rename,
    /// [`Disk::remove_dir`], [`Disk::remove_dir_all`] and [`Disk::remove_part`].
    Remove,
    /// [`Disk::space`].
    Space,
    /// [`Disk::list`], [`Disk::read_small`], [`Disk::write_small`], [`Disk::lock`], [`Disk::lock_existing`] and [`File::size`].
    Other,
}

/// What happens to an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It fails with this `errno` and does nothing.
    Errno(i32),
    /// A write stores so many bytes, then fails with this `errno`. Other operations just fail.
    Short {
        /// Bytes that are stored.
        bytes: usize,
        /// The error.
        errno: i32,
    },
    /// A write stores zeros, as many as there were bytes, and succeeds. Other operations just succeed.
    Zeros,
    /// It does not return before [`Faults::release`].
    Hang,
    /// It takes so much longer.
    Slow(Duration),
    /// A read gives one byte other than it is stored, the one in the middle of its first part. Other operations are not
    /// concerned.
    Flip,
    /// The caller that waits for it panics.
    Panic,
    /// The process dies in it: a write stores so many bytes, and no call returns any more. Other operations do nothing.
    Torn {
        /// Bytes that are stored.
        bytes: usize,
    },
}

/// "Input/output error".
pub const EIO: i32 = rustix::io::Errno::IO.raw_os_error();
/// "No space left on device".
pub const ENOSPC: i32 = rustix::io::Errno::NOSPC.raw_os_error();
/// "Read-only file system".
pub const EROFS: i32 = rustix::io::Errno::ROFS.raw_os_error();
/// "Permission denied".
pub const EACCES: i32 = rustix::io::Errno::ACCESS.raw_os_error();
/// "Too many open files".
pub const EMFILE: i32 = rustix::io::Errno::MFILE.raw_os_error();

/// Makes one kind of operation fail.
#[derive(Debug, Clone)]
pub struct Rule {
    /// The kind of operation.
    pub operation: Operation,
    /// Only paths that end so (as text); `None` = all. For renames it is the source that counts.
    pub suffix: Option<Cow<'static, str>>,
    /// Matching calls that pass first.
    pub after: u32,
    /// Matching calls that then fail.
    pub times: u32,
    /// What happens to them.
    pub fault: Fault,
}

impl Rule {
    /// The next call of this kind.
    #[must_use]
    pub fn once(operation: Operation, fault: Fault) -> Self {
        Self { operation, suffix: None, after: 0, times: 1, fault }
    }

    /// All calls of this kind until [`Faults::clear`].
    #[must_use]
    pub fn always(operation: Operation, fault: Fault) -> Self {
        Self { times: u32::MAX, ..Self::once(operation, fault) }
    }

    /// The same rule for paths that end with `suffix`.
    #[must_use]
    pub fn on(self, suffix: impl Into<Cow<'static, str>>) -> Self {
        Self { suffix: Some(suffix.into()), ..self }
    }

    /// The same rule after so many calls that pass.
    #[must_use]
    pub fn after(self, after: u32) -> Self {
        Self { after, ..self }
    }
}

/// The rules of a [`FaultDisk`] and its hung operations. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Default)]
struct Inner {
    rules: Vec<Rule>,
    hung: Vec<BoxFuture<'static, ()>>,
    random: Option<Random>,
    injected: u64,
    read_only: bool,
    device: Option<Device>,
}

/// A device that writes so fast and one call after another. What goes by way of the page cache costs its time when it is
/// written back.
#[derive(Debug)]
struct Device {
    bytes_per_second: u64,
    free_at: Instant,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner")
            .field("rules", &self.rules)
            .field("hung", &self.hung.len())
            .finish_non_exhaustive()
    }
}

/// A splitmix64 sequence: deterministic for a seed, which is all that a replay needs.
struct Random {
    state: u64,
    one_in: u64,
    faults: Vec<(Operation, Fault)>,
}

impl Random {
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn pick(&mut self, operation: Operation) -> Option<Fault> {
        let mut candidates: Vec<Fault> = Vec::new();
        candidates.extend(self.faults.iter().filter(|(of, _)| *of == operation).map(|(_, fault)| *fault));
        if candidates.is_empty() || !self.next().is_multiple_of(self.one_in) {
            return None;
        }
        let chosen = self.next() % candidates.len() as u64;
        candidates.get(usize::try_from(chosen).unwrap_or(0)).copied()
    }
}

impl Faults {
    /// Adds a rule behind the others.
    pub fn add(&self, rule: Rule) {
        self.inner.lock().rules.push(rule);
    }

    /// From now on one in `one_in` calls of the named kinds fails, as `seed` decides.
    pub fn seed(&self, seed: u64, one_in: u64, faults: Vec<(Operation, Fault)>) {
        self.inner.lock().random = Some(Random { state: seed, one_in: one_in.max(1), faults });
    }

    /// Forgets all rules; hung operations stay hung.
    pub fn clear(&self) {
        let mut inner = self.inner.lock();
        inner.rules.clear();
        inner.random = None;
    }

    /// From now on the device writes so many bytes in a second, by the clock of the runtime.
    pub fn set_speed(&self, bytes_per_second: u64) {
        self.inner.lock().device = Some(Device { bytes_per_second, free_at: Instant::now() });
    }

    /// `work` when the device has written `bytes`.
    fn at_speed(
        &self,
        bytes: u64,
        work: BoxFuture<'static, io::Result<()>>,
    ) -> BoxFuture<'static, io::Result<()>> {
        let mut inner = self.inner.lock();
        let Some(Device { bytes_per_second, free_at }) = &mut inner.device else { return work };
        let micros = bytes.saturating_mul(1_000_000) / (*bytes_per_second).max(1);
        *free_at = (*free_at).max(Instant::now()) + Duration::from_micros(micros);
        let done = *free_at;
        Box::pin(async move {
            tokio::time::sleep_until(done).await;
            work.await
        })
    }

    /// From now on the file system is mounted read-only, or no longer.
    pub fn set_read_only(&self, read_only: bool) {
        self.inner.lock().read_only = read_only;
    }

    /// Whether it is.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.inner.lock().read_only
    }

    /// An operation that would change something.
    fn change<T: Send + 'static>(
        &self,
        operation: Operation,
        path: &Path,
        work: BoxFuture<'static, io::Result<T>>,
    ) -> BoxFuture<'static, io::Result<T>> {
        if self.inner.lock().read_only {
            return Box::pin(std::future::ready(Err(io::Error::from_raw_os_error(EROFS))));
        }
        self.apply(operation, path, work)
    }

    /// An operation that changes nothing when `there` answers, as that is there already.
    fn create<T: Send + 'static, S: Send + 'static>(
        &self,
        operation: Operation,
        path: &Path,
        (there, work): (BoxFuture<'static, io::Result<S>>, BoxFuture<'static, io::Result<T>>),
    ) -> BoxFuture<'static, io::Result<T>> {
        if !self.inner.lock().read_only {
            return self.apply(operation, path, work);
        }
        let work = async move {
            there.await.map_err(|_| io::Error::from_raw_os_error(EROFS))?;
            work.await
        };
        self.apply(operation, path, Box::pin(work))
    }

    /// Operations that hang now.
    #[must_use]
    pub fn hung(&self) -> usize {
        self.inner.lock().hung.len()
    }

    /// Faults injected so far.
    #[must_use]
    pub fn injected(&self) -> u64 {
        self.inner.lock().injected
    }

    /// Lets every hung operation do its work, in order.
    pub async fn release(&self) {
        let hung = std::mem::take(&mut self.inner.lock().hung);
        for operation in hung {
            operation.await;
        }
    }

    fn pick(&self, operation: Operation, path: &Path) -> Option<Fault> {
        let mut inner = self.inner.lock();
        if inner.read_only && operation == Operation::Write {
            return Some(Fault::Errno(EROFS));
        }
        let text = path.to_string_lossy();
        let matches = |rule: &Rule| {
            let suffix_fits = rule.suffix.as_deref().is_none_or(|suffix| text.ends_with(suffix));
            rule.operation == operation && rule.times > 0 && suffix_fits
        };
        let mut fault = None;
        if let Some(rule) = inner.rules.iter_mut().find(|rule| matches(rule)) {
            if rule.after > 0 {
                rule.after -= 1;
            } else {
                rule.times = rule.times.saturating_sub(u32::from(rule.times != u32::MAX));
                fault = Some(rule.fault);
            }
        }
        let fault = fault.or_else(|| inner.random.as_mut().and_then(|random| random.pick(operation)));
        inner.injected += u64::from(fault.is_some());
        fault
    }

    /// `work`, or what the rules make of it.
    fn apply<T: Send + 'static>(
        &self,
        operation: Operation,
        path: &Path,
        work: BoxFuture<'static, io::Result<T>>,
    ) -> BoxFuture<'static, io::Result<T>> {
        match self.pick(operation, path) {
            None | Some(Fault::Zeros | Fault::Flip) => work,
            Some(Fault::Errno(errno) | Fault::Short { errno, .. }) => {
                Box::pin(std::future::ready(Err(io::Error::from_raw_os_error(errno))))
            }
            Some(Fault::Slow(time)) => Box::pin(slowly(time, work)),
            Some(Fault::Hang) => {
                let waiting = self.hang(work);
                Box::pin(async move { waiting.await.unwrap_or_else(|| Err(never_released())) })
            }
            Some(Fault::Panic) => panic_when_polled(),
            Some(Fault::Torn { .. }) => Box::pin(std::future::pending()),
        }
    }

    /// Puts `work` aside until release.
    fn hang<T: Send + 'static>(&self, work: BoxFuture<'static, T>) -> BoxFuture<'static, Option<T>> {
        let (done, waiting) = oneshot::channel();
        self.inner.lock().hung.push(Box::pin(async move {
            // The caller may have gone, but the work is done all the same.
            let _ = done.send(work.await);
        }));
        Box::pin(async move { waiting.await.ok() })
    }
}

#[expect(clippy::panic, reason = "that is the fault")]
fn panic_when_polled<T: Send + 'static>() -> BoxFuture<'static, T> {
    Box::pin(async { panic!("injected by a fault rule") })
}

async fn slowly<T>(time: Duration, work: BoxFuture<'static, T>) -> T {
    tokio::time::sleep(time).await;
    work.await
}

fn never_released() -> io::Error {
    io::Error::other("hung operation was dropped")
}

/// Any disk, with [`Faults`].
#[derive(Debug)]
pub struct FaultDisk {
    disk: Arc<dyn Disk>,
    faults: Faults,
}

impl FaultDisk {
    /// `disk` with the faults of `faults`.
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
        let ways = (self.disk.list(path), self.disk.create_dir_all(path));
        self.faults.create(Operation::CreateDir, path, ways)
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
}

#[derive(Debug)]
struct FaultFile {
    file: Arc<dyn File>,
    faults: Faults,
    path: PathBuf,
    /// Opened to be written around the page cache.
    direct: bool,
}

/// The first `limit` bytes of `pieces`.
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

    fn write_back(&self, range: Range<u64>) -> BoxFuture<'static, io::Result<()>> {
        let bytes = range.end - range.start;
        let work = self.faults.apply(Operation::WriteBack, &self.path, self.file.write_back(range));
        self.faults.at_speed(bytes, work)
    }

    fn size(&self) -> BoxFuture<'static, io::Result<u64>> {
        self.faults.apply(Operation::Other, &self.path, self.file.size())
    }
}
