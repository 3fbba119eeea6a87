//! The io_uring engine: one ring and one thread per disk read and write bytes. Path operations go
//! through [`BlockingDisk`].
//!
//! The ring's thread owns everything that a call uses (file, pieces, buffer, permits) until the
//! kernel has answered, even if the caller's future was dropped. The thread ends after the disk was
//! dropped and all calls are complete.
//!
//! # Safety
//! The only `unsafe` passes an entry to the kernel. The call's [`RunningCall`] owns the memory that
//! its entries point to, on the heap. The memory is not moved, read or freed while an entry is in
//! flight. Pieces are immutable [`bytes::Bytes`], a read's buffer is exclusive, and an `Arc` keeps
//! the descriptor open.

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

use super::blocking::{BlockingDisk, CallGate, OpenedFile, Permits};
use super::progress::{BounceBuffer, ReadProgress, WriteProgress};
use super::{BLOCK_ALIGN, BoxFuture, Disk, File, FileId, Lane, ReadTarget, WriteOpen};

/// Size of the submission queue. Further entries follow after a submit.
const ENTRIES: u32 = 256;

/// Tag of the completion of the wake-up poll.
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
    /// Creates a disk for the directory of `disk`, with its limits.
    ///
    /// # Errors
    /// Fails if the kernel does not support or permit io_uring.
    pub fn new(disk: BlockingDisk) -> io::Result<Self> {
        Ok(Self { disk, ring: Arc::new(Ring::start()?) })
    }

    fn file(
        &self,
        lane: Lane,
        opening: BoxFuture<'static, io::Result<OpenedFile>>,
    ) -> BoxFuture<'static, io::Result<Arc<dyn File>>> {
        let (ring, (writes, reads)) = (Arc::clone(&self.ring), self.disk.gates(lane));
        Box::pin(async move {
            let open = opening.await?;
            let file: Arc<dyn File> = Arc::new(UringFile { open, ring, writes, reads });
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
    open: OpenedFile,
    ring: Arc<Ring>,
    writes: CallGate,
    reads: CallGate,
}

impl File for UringFile {
    fn write_at(&self, pieces: Vec<Bytes>, offset: u64) -> BoxFuture<'static, io::Result<()>> {
        let (open, ring, gate) = (self.open.clone(), Arc::clone(&self.ring), self.writes.clone());
        let (written, reads) = (self.open.clone(), self.reads.clone());
        let end = pieces.iter().fold(offset, |end, piece| end + piece.len() as u64);
        Box::pin(async move {
            let permits = open.require_unchanged(gate.enter().await).await?;
            let (done, answer) = oneshot::channel();
            let progress = WriteProgress::new(pieces, offset, open.direct);
            ring.post(RingCall { open, work: CallWork::Write(progress, done), _permits: permits })?;
            answer.await.unwrap_or_else(|_| Err(ring_ended()))?;
            // Checked on another thread: the ring's thread must not block on a path lookup.
            written.wrote(end, reads).await
        })
    }

    fn read(&self, target: ReadTarget) -> BoxFuture<'static, (ReadTarget, io::Result<()>)> {
        let (open, ring, gate) = (self.open.clone(), Arc::clone(&self.ring), self.reads.clone());
        Box::pin(async move {
            let permits = gate.enter().await;
            let (done, answer) = oneshot::channel();
            let posted = ring.post(RingCall { open, work: CallWork::Read(target, done), _permits: permits });
            match posted {
                Ok(()) => answer.await.unwrap_or_else(|_| (ReadTarget::lost(), Err(ring_ended()))),
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

fn ring_ended() -> io::Error {
    io::Error::other("the disk's io_uring thread has ended")
}

/// A call, from its submission to its end.
struct RingCall {
    open: OpenedFile,
    work: CallWork,
    _permits: Permits,
}

enum CallWork {
    Write(WriteProgress, oneshot::Sender<io::Result<()>>),
    Read(ReadTarget, oneshot::Sender<(ReadTarget, io::Result<()>)>),
}

/// Handle of the ring's thread.
struct Ring {
    inbox: Arc<Inbox>,
}

struct Inbox {
    jobs: Mutex<Jobs>,
    /// A byte written here wakes the ring's thread.
    wake: UnixStream,
}

#[derive(Default)]
struct Jobs {
    waiting: Vec<RingCall>,
    /// Set when no more jobs are added, or when the thread has ended.
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
        let driver_inbox = Arc::clone(&inbox);
        std::thread::Builder::new().name("uniffle-uring".to_owned()).spawn(move || {
            Driver { ring, inbox: driver_inbox, woken, running: HashMap::new(), next_id: 0 }.run();
        })?;
        Ok(Self { inbox })
    }

    fn post(&self, job: RingCall) -> io::Result<()> {
        let mut jobs = self.inbox.jobs.lock();
        if jobs.closed {
            return Err(ring_ended());
        }
        jobs.waiting.push(job);
        // Only the first job of a batch wakes the thread.
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
        // Fails if many bytes are pending, in which case the thread wakes up anyway, or if the
        // thread has ended.
        let _written = (&self.wake).write(&[0]);
    }
}

/// A call with entries in flight.
struct RunningCall {
    job: RingCall,
    /// Number of entries in flight.
    entries: usize,
    error: Option<io::Error>,
    /// Vector that the entry of a write points to.
    slices: Vec<KernelSlice>,
    /// Parts of a read.
    parts: Vec<RunningPart>,
}

struct RunningPart {
    progress: ReadProgress,
    bounce: Option<BounceBuffer>,
}

/// `struct iovec`.
#[repr(C)]
struct KernelSlice {
    base: *const u8,
    bytes: usize,
}

/// State of the ring's thread.
struct Driver {
    ring: IoUring,
    inbox: Arc<Inbox>,
    woken: UnixStream,
    running: HashMap<u32, RunningCall>,
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
                    // The entries remain queued. The pause prevents a busy loop.
                    tracing::error!(%error, "io_uring rejects the submission; retrying");
                    std::thread::park_timeout(std::time::Duration::from_millis(100));
                }
            }
            let answers: Vec<_> =
                self.ring.completion().map(|answer| (answer.user_data(), answer.result())).collect();
            for (tag, result) in answers {
                self.completed(tag, result);
            }
        }
    }

    fn poll_wake_up(&mut self) {
        let poll = opcode::PollAdd::new(Fd(self.woken.as_raw_fd()), READABLE);
        self.push(&poll.build().user_data(WAKE));
    }

    /// Submits an entry, in the order of these calls.
    fn push(&mut self, entry: &squeue::Entry) {
        loop {
            // SAFETY: a `RunningCall` owns the memory of the entry until its completion (see the
            // module).
            let pushed = unsafe { self.ring.submission().push(entry) };
            if pushed.is_ok() {
                return;
            }
            if let Err(error) = self.ring.submit() {
                tracing::debug!(%error, "io_uring submission queue is full; retrying");
                std::thread::yield_now();
            }
        }
    }

    fn begin(&mut self, job: RingCall) {
        let id = self.next_id;
        self.next_id = id.wrapping_add(1);
        let mut running = RunningCall::new(job);
        // At least one round, so that a call without parts finishes too.
        for part in 0..running.parts.len().max(1) {
            self.push_next(&mut running, id, part);
        }
        self.keep(id, running);
    }

    fn push_next(&mut self, running: &mut RunningCall, id: u32, part: usize) {
        if let Some(entry) = running.next_entry(part) {
            running.entries += 1;
            self.push(&entry.user_data(u64::from(id) << 32 | part as u64));
        }
    }

    fn completed(&mut self, tag: u64, result: i32) {
        if tag == WAKE {
            // Bytes beyond the buffer complete the next poll at once.
            let _count = self.woken.read(&mut [0; 64]);
            return self.poll_wake_up();
        }
        let id = u32::try_from(tag >> 32).unwrap_or(0);
        let part = usize::try_from(tag & u64::from(u32::MAX)).unwrap_or(usize::MAX);
        let Some(mut running) = self.running.remove(&id) else { return };
        running.entries -= 1;
        running.completed(part, outcome(result));
        self.push_next(&mut running, id, part);
        self.keep(id, running);
    }

    fn keep(&mut self, id: u32, running: RunningCall) {
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
        // Leaked on purpose: calls are only in flight here after a panic, and the kernel may still
        // use their memory.
        std::mem::forget(std::mem::take(&mut self.running));
    }
}

/// Converts the result of a completion.
fn outcome(result: i32) -> io::Result<usize> {
    match usize::try_from(result) {
        Ok(count) => Ok(count),
        Err(_) if result == -Errno::AGAIN.raw_os_error() => Err(io::ErrorKind::Interrupted.into()),
        Err(_) => Err(io::Error::from_raw_os_error(-result)),
    }
}

impl RunningCall {
    fn new(mut job: RingCall) -> Self {
        let (mut parts, mut error) = (Vec::new(), None);
        if let CallWork::Read(target, _) = &mut job.work {
            for part in 0..target.parts.len() {
                let offset = target.parts[part].offset;
                let Some(bytes) = target.part_mut(part) else {
                    error = Some(io::Error::new(io::ErrorKind::InvalidInput, "range outside the buffer"));
                    break;
                };
                let bounce = if job.open.direct { BounceBuffer::of(bytes, offset) } else { None };
                let needed = bounce.as_ref().map_or(bytes.len(), BounceBuffer::needed);
                parts.push(RunningPart { progress: ReadProgress::new(needed, job.open.direct), bounce });
            }
        }
        Self { job, entries: 0, error, slices: Vec::new(), parts }
    }

    /// Returns the next entry for a part (a write has one), or `None` if nothing remains.
    fn next_entry(&mut self, part: usize) -> Option<squeue::Entry> {
        if self.error.is_some() {
            return None;
        }
        let fd = Fd(self.job.open.file.as_raw_fd());
        match &mut self.job.work {
            CallWork::Write(progress, _) if progress.is_done() => None,
            CallWork::Write(progress, _) => {
                let slices =
                    progress.next().map(|slice| KernelSlice { base: slice.as_ptr(), bytes: slice.len() });
                self.slices = slices.collect();
                let count = u32::try_from(self.slices.len()).expect("at most IOVECS_MAX");
                let entry = opcode::Writev::new(fd, self.slices.as_ptr().cast(), count);
                Some(entry.offset(progress.offset()).build())
            }
            CallWork::Read(target, _) => {
                let offset = target.parts.get(part)?.offset;
                let RunningPart { progress, bounce } = self.parts.get_mut(part)?;
                if progress.is_done() {
                    return None;
                }
                let (room, start) = match bounce {
                    Some(bounce) => (bounce.blocks(), offset - offset % BLOCK_ALIGN as u64),
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

    fn completed(&mut self, part: usize, result: io::Result<usize>) {
        let advanced = match (&mut self.job.work, self.parts.get_mut(part)) {
            (CallWork::Write(progress, _), _) => progress.advance(result),
            (CallWork::Read(..), Some(part)) => part.progress.advance(result),
            (CallWork::Read(..), None) => Ok(()),
        };
        if let Err(error) = advanced {
            self.error.get_or_insert(error);
        }
    }

    /// Sends the result of a call whose entries are all complete.
    fn finish(self) {
        let result = self.error.map_or(Ok(()), Err);
        // The permits are held until here. The caller may be gone.
        match self.job.work {
            CallWork::Write(_, done) => drop(done.send(result)),
            CallWork::Read(mut target, done) => {
                for (part, running) in self.parts.iter().enumerate() {
                    if let (Some(bytes), Some(bounce)) = (target.part_mut(part), &running.bounce) {
                        bytes.copy_from_slice(bounce.bytes());
                    }
                }
                drop(done.send((target, result)));
            }
        }
    }
}
