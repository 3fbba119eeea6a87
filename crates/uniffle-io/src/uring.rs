//! The real disk by io_uring: bytes by one ring with its own thread per disk, names by [`BlockingDisk`].
//!
//! Everything that a call touches (file, pieces, buffer, permits) belongs to the ring's thread until the kernel has
//! answered, even when the caller's future was dropped. The thread ends when the disk was dropped and nothing is under way.
//!
//! # Why this is safe
//!
//! The one `unsafe` is the hand-over of an entry to the kernel. What entries point to is owned by the call's [`Running`],
//! on the heap, and neither moved, read nor freed while one of its entries is under way: pieces are immutable
//! [`bytes::Bytes`], a read's buffer is exclusive and not used until then, the descriptor is open as
//! long as its `Arc`.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::io::{Read as _, Write as _};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use io_uring::{IoUring, opcode, squeue, types::Fd};
use parking_lot::Mutex;
use rustix::io::Errno;
use tokio::sync::oneshot;

use super::blocking::{BlockingDisk, Gate, OpenFile, Permits};
use super::progress::{Detour, ReadProgress, WriteProgress};
use super::{BLOCK_ALIGN, BoxFuture, Disk, File, FileId, Lane, ReadTarget, WriteOpen};

/// Entries that are handed over at once; more follow at once.
const ENTRIES: u32 = 256;

/// Marks the answer to the poll for wake-ups.
const WAKE: u64 = u64::MAX;

/// `POLLIN`.
const READABLE: u32 = 1;

/// A directory of the operating system.
#[derive(Debug)]
pub struct UringDisk {
    disk: BlockingDisk,
    ring: Arc<Ring>,
}

impl UringDisk {
    /// The same directory as `disk`, with its bounds.
    ///
    /// # Errors
    /// The kernel does not know io_uring or does not permit it.
    pub fn new(disk: BlockingDisk) -> io::Result<Self> {
        Ok(Self { disk, ring: Arc::new(Ring::start()?) })
    }

    fn file(
        &self,
        lane: Lane,
        opening: BoxFuture<'static, io::Result<OpenFile>>,
    ) -> BoxFuture<'static, io::Result<Arc<dyn File>>> {
        let (ring, (writes, reads)) = (Arc::clone(&self.ring), self.disk.gates(lane));
        let back = self.disk.back_gate();
        Box::pin(async move {
            let open = opening.await?;
            let file: Arc<dyn File> = Arc::new(UringFile { open, ring, writes, reads, back });
            Ok(file)
        })
    }
}

impl Disk for UringDisk {
    crate::pass_on!(disk);

    fn open_write(&self, path: &Path, how: WriteOpen) -> BoxFuture<'static, io::Result<Arc<dyn File>>> {
        self.file(how.lane, self.disk.open_write_file(path, how))
    }

    fn open_read(&self, path: &Path) -> BoxFuture<'static, io::Result<Arc<dyn File>>> {
        self.file(Lane::Bulk, self.disk.open_read_file(path, false))
    }

    fn open_read_direct(&self, path: &Path) -> BoxFuture<'static, io::Result<Arc<dyn File>>> {
        self.file(Lane::Bulk, self.disk.open_read_file(path, true))
    }
}

/// An open file of an [`UringDisk`].
#[derive(Debug)]
struct UringFile {
    open: OpenFile,
    ring: Arc<Ring>,
    writes: Gate,
    reads: Gate,
    back: Gate,
}

impl File for UringFile {
    fn write_at(&self, pieces: Vec<Bytes>, offset: u64) -> BoxFuture<'static, io::Result<()>> {
        let (open, ring, gate) = (self.open.clone(), Arc::clone(&self.ring), self.writes.clone());
        let (written, reads) = (self.open.clone(), self.reads.clone());
        let end = pieces.iter().fold(offset, |end, piece| end + piece.len() as u64);
        Box::pin(async move {
            let permits = gate.enter().await;
            let (done, answer) = oneshot::channel();
            let progress = WriteProgress::new(pieces, offset, open.direct);
            ring.post(Job { open, work: Work::Write(progress, done), _permits: permits })?;
            answer.await.unwrap_or_else(|_| Err(ended()))?;
            written.wrote(end);
            // Not by the ring, whose thread must not wait for a path.
            written.verify(reads).await
        })
    }

    fn read(&self, target: ReadTarget) -> BoxFuture<'static, (ReadTarget, io::Result<()>)> {
        let (open, ring, gate) = (self.open.clone(), Arc::clone(&self.ring), self.reads.clone());
        Box::pin(async move {
            let permits = gate.enter().await;
            let (done, answer) = oneshot::channel();
            let posted = ring.post(Job { open, work: Work::Read(target, done), _permits: permits });
            match posted {
                Ok(()) => answer.await.unwrap_or_else(|_| (ReadTarget::lost(), Err(ended()))),
                Err(error) => (ReadTarget::lost(), Err(error)),
            }
        })
    }

    fn advise(&self, ranges: Vec<Range<u64>>) -> BoxFuture<'static, io::Result<()>> {
        self.open.advise(&self.reads, ranges)
    }

    fn sync(&self) -> BoxFuture<'static, io::Result<()>> {
        self.open.sync(self.writes.clone())
    }

    fn write_back(&self, range: Range<u64>) -> BoxFuture<'static, io::Result<()>> {
        self.open.write_back(self.back.clone(), range)
    }

    fn size(&self) -> BoxFuture<'static, io::Result<u64>> {
        self.open.size(self.reads.clone())
    }

    fn id(&self) -> Option<FileId> {
        self.open.id()
    }

    fn verify(&self) -> BoxFuture<'static, io::Result<()>> {
        self.open.verify(self.reads.clone())
    }
}

fn ended() -> io::Error {
    io::Error::other("the disk's io_uring thread has ended")
}

/// A call, from where it was made to its end.
struct Job {
    open: OpenFile,
    work: Work,
    _permits: Permits,
}

enum Work {
    Write(WriteProgress, oneshot::Sender<io::Result<()>>),
    Read(ReadTarget, oneshot::Sender<(ReadTarget, io::Result<()>)>),
}

/// The way to the ring's thread.
struct Ring {
    inbox: Arc<Inbox>,
}

struct Inbox {
    jobs: Mutex<Jobs>,
    /// A byte here makes the ring's thread look.
    wake: UnixStream,
}

#[derive(Default)]
struct Jobs {
    waiting: Vec<Job>,
    /// No job will be added, or none will be taken.
    closed: bool,
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring").finish_non_exhaustive()
    }
}

impl Ring {
    fn start() -> io::Result<Self> {
        let ring = IoUring::new(ENTRIES)?;
        let mut probe = io_uring::Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if ![opcode::Read::CODE, opcode::Writev::CODE, opcode::PollAdd::CODE]
            .into_iter()
            .all(|code| probe.is_supported(code))
        {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let (wake, woken) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        let inbox = Arc::new(Inbox { jobs: Mutex::default(), wake });
        let of_driver = Arc::clone(&inbox);
        std::thread::Builder::new().name("uniffle-uring".to_owned()).spawn(move || {
            Driver { ring, inbox: of_driver, woken, running: HashMap::new(), next_id: 0 }.run();
        })?;
        Ok(Self { inbox })
    }

    fn post(&self, job: Job) -> io::Result<()> {
        let mut jobs = self.inbox.jobs.lock();
        if jobs.closed {
            return Err(ended());
        }
        jobs.waiting.push(job);
        // The first job wakes the thread for all.
        let first = jobs.waiting.len() == 1;
        drop(jobs);
        if first {
            self.inbox.wake_up();
        }
        Ok(())
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.inbox.jobs.lock().closed = true;
        self.inbox.wake_up();
    }
}

impl Inbox {
    fn wake_up(&self) {
        // Fails when many bytes wait, and then the thread will look, or when it has ended.
        let _written = (&self.wake).write(&[0]);
    }
}

/// A call whose entries are with the kernel.
struct Running {
    job: Job,
    /// Entries that are not answered.
    entries: usize,
    error: Option<io::Error>,
    /// The vector that a write's entry points to.
    slices: Vec<KernelSlice>,
    /// Of a read.
    parts: Vec<RunningPart>,
}

struct RunningPart {
    progress: ReadProgress,
    detour: Option<Detour>,
}

/// `struct iovec`.
#[repr(C)]
struct KernelSlice {
    base: *const u8,
    bytes: usize,
}

/// The ring's thread.
struct Driver {
    ring: IoUring,
    inbox: Arc<Inbox>,
    woken: UnixStream,
    running: HashMap<u32, Running>,
    next_id: u32,
}

impl Driver {
    fn run(mut self) {
        self.poll_wake_up();
        loop {
            let (jobs, closed) = {
                let mut jobs = self.inbox.jobs.lock();
                (std::mem::take(&mut jobs.waiting), jobs.closed)
            };
            jobs.into_iter().for_each(|job| self.begin(job));
            if closed && self.running.is_empty() {
                return;
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    // Nothing is lost: the entries are still queued. Not a loop that burns a core.
                    tracing::error!(%error, "io_uring does not take calls");
                    std::thread::park_timeout(std::time::Duration::from_millis(100));
                }
            }
            let answers: Vec<_> =
                self.ring.completion().map(|answer| (answer.user_data(), answer.result())).collect();
            for (tag, result) in answers {
                self.answered(tag, result);
            }
        }
    }

    fn poll_wake_up(&mut self) {
        let poll = opcode::PollAdd::new(Fd(self.woken.as_raw_fd()), READABLE);
        self.push(&poll.build().user_data(WAKE));
    }

    /// Gives an entry to the kernel, in the order of these calls.
    fn push(&mut self, entry: &squeue::Entry) {
        loop {
            // SAFETY: what the entry points to is owned by a `Running` that stays until it is answered (see the module).
            let pushed = unsafe { self.ring.submission().push(entry) };
            if pushed.is_ok() {
                return;
            }
            if let Err(error) = self.ring.submit() {
                tracing::debug!(%error, "io_uring is full");
                std::thread::yield_now();
            }
        }
    }

    fn begin(&mut self, job: Job) {
        let id = self.next_id;
        self.next_id = id.wrapping_add(1);
        let mut running = Running::new(job);
        // At least one, for what ends at once.
        for part in 0..running.parts.len().max(1) {
            self.push_next(&mut running, id, part);
        }
        self.keep(id, running);
    }

    fn push_next(&mut self, running: &mut Running, id: u32, part: usize) {
        if let Some(entry) = running.next_entry(part) {
            running.entries += 1;
            self.push(&entry.user_data(u64::from(id) << 32 | part as u64));
        }
    }

    fn answered(&mut self, tag: u64, result: i32) {
        if tag == WAKE {
            // What does not fit makes the next poll answer at once.
            let _count = self.woken.read(&mut [0; 64]);
            return self.poll_wake_up();
        }
        let id = u32::try_from(tag >> 32).unwrap_or(0);
        let part = usize::try_from(tag & u64::from(u32::MAX)).unwrap_or(usize::MAX);
        let Some(mut running) = self.running.remove(&id) else { return };
        running.entries -= 1;
        running.answered(part, outcome(result));
        self.push_next(&mut running, id, part);
        self.keep(id, running);
    }

    fn keep(&mut self, id: u32, running: Running) {
        if running.entries > 0 {
            self.running.insert(id, running);
        } else {
            running.finish();
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let mut jobs = self.inbox.jobs.lock();
        jobs.closed = true;
        jobs.waiting.clear();
        // Only after a panic: the kernel may still use what is under way.
        std::mem::forget(std::mem::take(&mut self.running));
    }
}

/// What the kernel's answer means.
fn outcome(result: i32) -> io::Result<usize> {
    match usize::try_from(result) {
        Ok(count) => Ok(count),
        Err(_) if result == -Errno::AGAIN.raw_os_error() => Err(io::ErrorKind::Interrupted.into()),
        Err(_) => Err(io::Error::from_raw_os_error(-result)),
    }
}

impl Running {
    fn new(mut job: Job) -> Self {
        let (mut parts, mut error) = (Vec::new(), None);
        if let Work::Read(target, _) = &mut job.work {
            for part in 0..target.parts.len() {
                let offset = target.parts[part].offset;
                let Some(bytes) = target.part_mut(part) else {
                    error = Some(io::Error::new(io::ErrorKind::InvalidInput, "range outside the buffer"));
                    break;
                };
                let detour = if job.open.direct { Detour::of(bytes, offset) } else { None };
                let needed = detour.as_ref().map_or(bytes.len(), Detour::needed);
                parts.push(RunningPart { progress: ReadProgress::new(needed, job.open.direct), detour });
            }
        }
        Self { job, entries: 0, error, slices: Vec::new(), parts }
    }

    /// What the kernel is to do next for a part (a write has one); `None` when nothing is left.
    fn next_entry(&mut self, part: usize) -> Option<squeue::Entry> {
        if self.error.is_some() {
            return None;
        }
        let fd = Fd(self.job.open.file.as_raw_fd());
        match &mut self.job.work {
            Work::Write(progress, _) if progress.is_done() => None,
            Work::Write(progress, _) => {
                let slices =
                    progress.next().map(|slice| KernelSlice { base: slice.as_ptr(), bytes: slice.len() });
                self.slices = slices.collect();
                let count = u32::try_from(self.slices.len()).expect("at most IOVECS_MAX");
                let entry = opcode::Writev::new(fd, self.slices.as_ptr().cast(), count);
                Some(entry.offset(progress.offset()).build())
            }
            Work::Read(target, _) => {
                let offset = target.parts.get(part)?.offset;
                let RunningPart { progress, detour } = self.parts.get_mut(part)?;
                if progress.is_done() {
                    return None;
                }
                let (room, start) = match detour {
                    Some(detour) => (detour.blocks(), offset - offset % BLOCK_ALIGN as u64),
                    None => (target.part_mut(part)?, offset),
                };
                let filled = progress.filled();
                let room = &mut room[filled..];
                let bytes = u32::try_from(room.len()).unwrap_or(u32::MAX);
                let entry = opcode::Read::new(fd, room.as_mut_ptr(), bytes);
                Some(entry.offset(start + filled as u64).build())
            }
        }
    }

    fn answered(&mut self, part: usize, result: io::Result<usize>) {
        let advanced = match (&mut self.job.work, self.parts.get_mut(part)) {
            (Work::Write(progress, _), _) => progress.advance(result),
            (Work::Read(..), Some(part)) => part.progress.advance(result),
            (Work::Read(..), None) => Ok(()),
        };
        if let Err(error) = advanced {
            self.error.get_or_insert(error);
        }
    }

    /// Answers the call, whose entries are all answered.
    fn finish(self) {
        let result = self.error.map_or(Ok(()), Err);
        // The permits last until here; the caller may have gone.
        match self.job.work {
            Work::Write(_, done) => drop(done.send(result)),
            Work::Read(mut target, done) => {
                for (part, running) in self.parts.iter().enumerate() {
                    if let (Some(bytes), Some(detour)) = (target.part_mut(part), &running.detour) {
                        bytes.copy_from_slice(detour.bytes());
                    }
                }
                drop(done.send((target, result)));
            }
        }
    }
}
