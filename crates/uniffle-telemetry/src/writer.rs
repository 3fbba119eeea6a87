//! Queues log lines in memory and writes them on a thread of its own.
//!
//! A pipe without a reader or a hanging disk stops only that thread. If the queue is full, lines
//! are dropped and counted, and a later line reports the number. The order of lines is kept. Other
//! text for users is written with [`print`], which waits only briefly.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, Builder};
use std::time::Duration;

use anyhow::Context as _;
use parking_lot::{Condvar, Mutex};
use tokio::time::Instant;

use super::repeats::Repeats;

/// Capacity of the queue of lines. The thread holds at most the same amount in addition.
const QUEUE_BYTES_MAX: usize = 1 << 20;

/// Deadline for queued lines when the process ends.
const LAST_WRITE_DEADLINE: Duration = Duration::from_secs(2);

/// Deadline for text that is not a log line.
const PRINT_DEADLINE: Duration = Duration::from_millis(500);

/// Minimum time between two reports of dropped lines.
const NOTICE_INTERVAL: Duration = Duration::from_secs(10);

/// Interval of the reports of suppressed lines.
const REPEATS_INTERVAL: Duration = Duration::from_secs(10);

/// Pause before the next attempt to write to a non-blocking descriptor that is full.
const FULL_PAUSE: Duration = Duration::from_millis(10);

/// Lines dropped since the process started.
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// Returns the number of lines dropped since the process started.
pub(super) fn dropped_lines() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

/// Queues lines, one per call of `write_all`. Never fails and never waits for the writer.
#[derive(Debug, Clone)]
pub(super) struct LogWriter(Arc<WriterState>);

#[derive(Debug, Default)]
struct WriterState {
    queue: Mutex<LineQueue>,
    /// Signalled when there are lines or the queue is closed.
    filled: Condvar,
    /// Signalled when the thread has written all lines that it took.
    written: Condvar,
}

#[derive(Debug, Default)]
struct LineQueue {
    lines: Vec<u8>,
    /// Start of the current write, if the thread is writing.
    writing_since: Option<Instant>,
    /// Lines dropped since the thread last took lines.
    dropped: u64,
    is_closed: bool,
}

impl Write for LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut queue = self.0.queue.lock();
        if queue.is_closed || queue.lines.len() + line.len() > QUEUE_BYTES_MAX {
            queue.dropped += 1;
            DROPPED.fetch_add(1, Ordering::Relaxed);
        } else {
            queue.lines.extend_from_slice(line);
            self.0.filled.notify_one();
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The writing thread. Dropping this writes queued lines, within a deadline.
#[derive(Debug)]
pub(super) struct LogThread {
    shared: Arc<WriterState>,
    repeats: Option<Arc<Repeats>>,
}

impl LogThread {
    /// Starts to write to `sink`, and to report the lines that `repeats` suppresses.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(super) fn start(sink: Box<dyn Write + Send>, repeats: Option<Arc<Repeats>>) -> anyhow::Result<Self> {
        let this = Self { shared: Arc::default(), repeats };
        let (queue, repeats) = (Arc::clone(&this.shared), this.repeats());
        // The test kit finds the thread under this name.
        let thread = Builder::new()
            .name("uniffle-log".to_owned())
            .spawn(move || run(&queue, sink, repeats.as_deref()));
        thread.context("cannot start the thread that writes the log")?;
        Ok(this)
    }

    /// Returns a writer that queues lines for this thread.
    pub(super) fn writer(&self) -> LogWriter {
        LogWriter(Arc::clone(&self.shared))
    }

    /// Returns the limit of repeated lines for this thread.
    pub(super) fn repeats(&self) -> Option<Arc<Repeats>> {
        self.repeats.clone()
    }

    /// Logs the number of suppressed lines, then waits until all lines are written, at most for
    /// `deadline`. Does not wait if a write has already taken that long.
    pub(super) fn flush(&self, deadline: Duration) {
        if let Some(repeats) = &self.repeats {
            repeats.log_held_back(true);
        }
        let until = Instant::now() + deadline;
        let mut queue = self.shared.queue.lock();
        while !queue.lines.is_empty() || queue.writing_since.is_some() {
            let is_stuck = queue.writing_since.is_some_and(|since| since.elapsed() >= deadline);
            let remaining = until.saturating_duration_since(Instant::now());
            if is_stuck || self.shared.written.wait_for(&mut queue, remaining).timed_out() {
                return;
            }
        }
    }
}

impl Drop for LogThread {
    fn drop(&mut self) {
        self.flush(LAST_WRITE_DEADLINE);
        self.shared.queue.lock().is_closed = true;
        self.shared.filled.notify_one();
    }
}

/// Writes lines until the queue is closed and empty.
fn run(shared: &WriterState, mut sink: Box<dyn Write + Send>, repeats: Option<&Repeats>) {
    let (mut lines, mut notice) = (Vec::new(), Notice::default());
    while shared.take(&mut lines, &mut notice) {
        let written = catch_unwind(AssertUnwindSafe(|| write(&mut sink, &lines)));
        match written.unwrap_or_else(|_| Err(Unwritten::all(&lines, io::Error::other("the writer panicked"))))
        {
            Ok(()) => notice.log_if_due(),
            Err(Unwritten { lines, error }) => {
                DROPPED.fetch_add(lines, Ordering::Relaxed);
                notice.lines += lines;
                notice.error = Some(error);
            }
        }
        lines.clear();
        if let Some(repeats) = repeats {
            repeats.log_held_back(false);
        }
    }
}

impl WriterState {
    /// Takes all queued lines. Waits for a limited time if there are none. Returns false once the
    /// queue is closed and empty.
    fn take(&self, lines: &mut Vec<u8>, notice: &mut Notice) -> bool {
        let mut queue = self.queue.lock();
        queue.writing_since = None;
        self.written.notify_all();
        if queue.lines.is_empty() && !queue.is_closed {
            self.filled.wait_for(&mut queue, REPEATS_INTERVAL);
        }
        if queue.lines.is_empty() {
            return !queue.is_closed;
        }
        std::mem::swap(&mut queue.lines, lines);
        queue.writing_since = Some(Instant::now());
        notice.lines += std::mem::take(&mut queue.dropped);
        true
    }
}

/// Number of lines that were not written, and the error.
#[derive(Debug)]
struct Unwritten {
    lines: u64,
    error: io::Error,
}

impl Unwritten {
    fn all(bytes: &[u8], error: io::Error) -> Self {
        Self { lines: bytes.iter().filter(|byte| **byte == b'\n').count() as u64, error }
    }
}

fn write(sink: &mut impl Write, mut bytes: &[u8]) -> Result<(), Unwritten> {
    while !bytes.is_empty() {
        let error = match sink.write(bytes) {
            Ok(0) => ErrorKind::WriteZero.into(),
            Ok(written) => {
                bytes = bytes.get(written..).unwrap_or_default();
                continue;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                thread::park_timeout(FULL_PAUSE);
                continue;
            }
            Err(error) => error,
        };
        return Err(Unwritten::all(bytes, error));
    }
    Ok(())
}

/// Dropped lines that have not been reported yet.
#[derive(Debug, Default)]
struct Notice {
    lines: u64,
    error: Option<io::Error>,
    logged: Option<Instant>,
}

impl Notice {
    /// Called only after a successful write, so that a failing sink causes no further lines.
    fn log_if_due(&mut self) {
        let is_recent = self.logged.is_some_and(|at| at.elapsed() < NOTICE_INTERVAL);
        if self.lines == 0 || is_recent {
            return;
        }
        let error = self.error.take().map(|error| error.to_string());
        let lines = std::mem::take(&mut self.lines);
        tracing::warn!(
            lines,
            error,
            "log lines were dropped; the reader of the log is too slow, or its disk fails"
        );
        self.logged = Some(Instant::now());
    }
}

/// Returns the process's stderr as a sink that shares no lock with other writers.
pub(super) fn stderr() -> Box<dyn Write + Send> {
    match io::stderr().as_fd().try_clone_to_owned() {
        Ok(stderr) => Box::new(File::from(stderr)),
        Err(_) => Box::new(io::sink()),
    }
}

/// Writes `text` to a `stream` for users. Gives up after a deadline if the reader has stopped.
pub fn print(stream: impl AsFd, text: &str) {
    let Ok(stream) = stream.as_fd().try_clone_to_owned() else { return };
    let (text, (done, printed)) = (text.as_bytes().to_vec(), mpsc::channel());
    let print = move || {
        // A reader that has gone is not a failure.
        let _ = File::from(stream).write_all(&text);
        let _ = done.send(());
    };
    if Builder::new().name("uniffle-print".to_owned()).spawn(print).is_ok() {
        let _ = printed.recv_timeout(PRINT_DEADLINE);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Written text.
    #[derive(Debug, Clone, Default)]
    pub(crate) struct CapturedText(Arc<Mutex<Vec<u8>>>);

    impl CapturedText {
        pub(crate) fn text(&self) -> String {
            String::from_utf8(self.0.lock().clone()).unwrap()
        }
    }

    impl Write for CapturedText {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// A sink whose writes wait for the next result from `permits`. Writes succeed once the sender
    /// is dropped.
    #[derive(Debug)]
    struct Sink {
        permits: mpsc::Receiver<io::Result<()>>,
        written: CapturedText,
    }

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.permits.recv().unwrap_or(Ok(()))?;
            self.written.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn started() -> (LogThread, mpsc::Sender<io::Result<()>>, CapturedText) {
        let ((permit, permits), written) = (mpsc::channel(), CapturedText::default());
        let sink = Sink { permits, written: written.clone() };
        (LogThread::start(Box::new(sink), None).unwrap(), permit, written)
    }

    #[test]
    fn lines_are_written_in_order_before_the_end() {
        let (thread, permit, written) = started();
        drop(permit);
        let lines: Vec<String> = (0..1000).map(|number| format!("line {number}\n")).collect();
        lines.iter().for_each(|line| thread.writer().write_all(line.as_bytes()).unwrap());
        drop(thread);
        assert_eq!(written.text(), lines.concat());
    }

    #[test]
    fn stuck_sink_delays_no_line_and_no_flush() {
        let ((thread, permit, written), before) = (started(), dropped_lines());
        let line = [b'x'; 1023].into_iter().chain([b'\n']).collect::<Vec<u8>>();
        let lines = 3 * QUEUE_BYTES_MAX / line.len();
        (0..lines).for_each(|_| thread.writer().write_all(&line).unwrap());
        assert!(dropped_lines() - before >= (lines / 3) as u64);
        thread.flush(Duration::ZERO);
        assert_eq!(written.text(), "");
        drop(permit);
        thread.flush(60 * LAST_WRITE_DEADLINE);
        assert!(written.text().ends_with("x\n"), "the sink must accept lines again");
    }

    #[test]
    fn lines_of_a_failed_write_are_counted() {
        let ((thread, permit, written), before) = (started(), dropped_lines());
        permit.send(Err(ErrorKind::StorageFull.into())).unwrap();
        drop(permit);
        thread.writer().write_all(b"lost\n").unwrap();
        thread.flush(LAST_WRITE_DEADLINE);
        assert!(dropped_lines() > before);
        thread.writer().write_all(b"written\n").unwrap();
        drop(thread);
        assert_eq!(written.text(), "written\n");
    }
}
