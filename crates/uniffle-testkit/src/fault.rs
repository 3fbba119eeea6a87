//! A disk with injected faults ([`FaultDisk`]): rules, or random choices, make operations of any
//! disk fail, end short, hang, delay, panic or damage bytes. It can also be read-only or slow.
//!
//! Rules are consumed in order, and a rule may let some matching calls pass first. A hanging
//! operation has begun: it takes effect on release ([`Faults::release`]), even if its caller has
//! given up, like a thread in `pwritev`.

mod disk;

use std::borrow::Cow;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::Instant;
use uniffle_io::BoxFuture;

pub use disk::FaultDisk;

/// Kinds of operations that rules match.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// [`Disk::open_write`].
    OpenWrite,
    /// [`Disk::open_read`].
    OpenRead,
    /// [`File::write_at`].
    Write,
    /// [`File::read`].
    Read,
    /// [`File::advise`].
    Advise,
    /// [`File::sync`].
    Sync,
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
    /// [`Disk::list`], [`Disk::read_small`], [`Disk::write_small`], [`Disk::lock`],
    /// [`Disk::lock_existing`] and [`File::size`].
    Other,
}

/// Fault of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It fails with this `errno` and does nothing.
    Errno(i32),
    /// A write stores this number of bytes, then fails with this `errno`. Other operations only
    /// fail.
    Short {
        /// Bytes that are stored.
        bytes: usize,
        /// The error.
        errno: i32,
    },
    /// A write stores zeros of the same length and succeeds. Other operations are unaffected.
    Zeros,
    /// The operation does not return before [`Faults::release`].
    Hang,
    /// The operation takes this much longer.
    Slow(Duration),
    /// A read returns one wrong byte, in the middle of its first part. Other operations are
    /// unaffected.
    Flip,
    /// The operation panics when its caller polls it.
    Panic,
    /// The call never returns, as if the process died in it. A write stores this number of bytes.
    /// Other operations do nothing.
    Torn {
        /// Bytes that are stored.
        bytes: usize,
    },
}

/// "Input/output error".
pub const EIO: i32 = rustix::io::Errno::IO.raw_os_error();
/// "No space left on device".
pub const ENOSPC: i32 = rustix::io::Errno::NOSPC.raw_os_error();
/// "File too large".
pub const EFBIG: i32 = rustix::io::Errno::FBIG.raw_os_error();
/// "Read-only file system".
pub const EROFS: i32 = rustix::io::Errno::ROFS.raw_os_error();
/// "Permission denied".
pub const EACCES: i32 = rustix::io::Errno::ACCESS.raw_os_error();
/// "Too many open files".
pub const EMFILE: i32 = rustix::io::Errno::MFILE.raw_os_error();

/// A rule that injects a fault into one kind of operation.
#[derive(Debug, Clone)]
pub struct Rule {
    /// The kind of operation.
    pub operation: Operation,
    /// Path suffix that must match, as text. `None` matches all paths. For renames the source
    /// counts.
    pub suffix: Option<Cow<'static, str>>,
    /// Number of matching calls that pass first.
    pub after: u32,
    /// Number of matching calls that then fail.
    pub times: u32,
    /// Fault of these calls.
    pub fault: Fault,
}

impl Rule {
    /// Matches the next call of this kind.
    #[must_use]
    pub fn once(operation: Operation, fault: Fault) -> Self {
        Self { operation, suffix: None, after: 0, times: 1, fault }
    }

    /// Matches all calls of this kind until [`Faults::clear`].
    #[must_use]
    pub fn always(operation: Operation, fault: Fault) -> Self {
        Self { times: u32::MAX, ..Self::once(operation, fault) }
    }

    /// Restricts the rule to paths that end with `suffix`.
    #[must_use]
    pub fn on(self, suffix: impl Into<Cow<'static, str>>) -> Self {
        Self { suffix: Some(suffix.into()), ..self }
    }

    /// Lets `after` calls pass first.
    #[must_use]
    pub fn after(self, after: u32) -> Self {
        Self { after, ..self }
    }
}

/// The rules of a [`FaultDisk`] and its hung operations. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    inner: Arc<Mutex<FaultState>>,
}

#[derive(Default)]
struct FaultState {
    rules: Vec<Rule>,
    hung: Vec<BoxFuture<'static, ()>>,
    random: Option<SeededRandom>,
    injected: u64,
    read_only: bool,
    device: Option<Device>,
}

/// A device with limited speed that serves one direct write after another. Other operations take
/// no time.
#[derive(Debug)]
struct Device {
    bytes_per_second: u64,
    free_at: Instant,
}

impl std::fmt::Debug for FaultState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FaultState")
            .field("rules", &self.rules)
            .field("hung", &self.hung.len())
            .finish_non_exhaustive()
    }
}

/// A splitmix64 sequence, deterministic for a seed.
struct SeededRandom {
    state: u64,
    one_in: u64,
    faults: Vec<(Operation, Fault)>,
}

impl SeededRandom {
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
    /// Adds a rule after the others.
    pub fn add(&self, rule: Rule) {
        self.inner.lock().rules.push(rule);
    }

    /// From now on one in `one_in` calls of the given kinds fails, chosen by `seed`.
    pub fn seed(&self, seed: u64, one_in: u64, faults: Vec<(Operation, Fault)>) {
        self.inner.lock().random = Some(SeededRandom { state: seed, one_in: one_in.max(1), faults });
    }

    /// Removes all rules, including the random choices. Hanging operations stay hanging.
    pub fn clear(&self) {
        let mut inner = self.inner.lock();
        inner.rules.clear();
        inner.random = None;
    }

    /// Limits direct writes to `bytes_per_second`, by the clock of the runtime.
    pub fn set_speed(&self, bytes_per_second: u64) {
        self.inner.lock().device = Some(Device { bytes_per_second, free_at: Instant::now() });
    }

    /// Runs `work` once the device has written `bytes`.
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

    /// Mounts the file system read-only, or writable again.
    pub fn set_read_only(&self, read_only: bool) {
        self.inner.lock().read_only = read_only;
    }

    /// Returns true if the file system is mounted read-only.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.inner.lock().read_only
    }

    /// Applies the rules to an operation that modifies something.
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

    /// Applies the rules to a creation. On a read-only file system it succeeds if the target
    /// exists, which `there` checks.
    fn create<T: Send + 'static, S: Send + 'static>(
        &self,
        operation: Operation,
        path: &Path,
        there: BoxFuture<'static, io::Result<S>>,
        work: BoxFuture<'static, io::Result<T>>,
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

    /// Returns the number of hanging operations.
    #[must_use]
    pub fn hung(&self) -> usize {
        self.inner.lock().hung.len()
    }

    /// Returns how often a rule or a random choice applied. Errors of a read-only file system do
    /// not count.
    #[must_use]
    pub fn injected(&self) -> u64 {
        self.inner.lock().injected
    }

    /// Resumes all hanging operations, in order.
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

    /// Runs `work`, subject to the rules.
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

    /// Stores `work` until the release.
    fn hang<T: Send + 'static>(&self, work: BoxFuture<'static, T>) -> BoxFuture<'static, Option<T>> {
        let (done, waiting) = oneshot::channel();
        self.inner.lock().hung.push(Box::pin(async move {
            // The caller may be gone, but the work is done anyway.
            let _ = done.send(work.await);
        }));
        Box::pin(async move { waiting.await.ok() })
    }
}

#[expect(clippy::panic, reason = "the fault is a panic")]
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
