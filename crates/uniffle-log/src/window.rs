//! Reads a file forwards, window by window.
//!
//! Invariant: every read of a disk has a deadline, so that one that hangs cannot block its reader.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use uniffle_io::File;

/// Runs `operation`, or fails with `TimedOut`. The operation itself may continue.
pub async fn within<T>(deadline: Duration, operation: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let ended = uniffle_base::clock::timeout(deadline, operation).await;
    ended.unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "disk timeout")))
}

/// A position in a file, and the bytes around it.
#[derive(Debug)]
pub struct FileWindow {
    file: Arc<dyn File>,
    deadline: Duration,
    /// Minimum number of bytes read at a time.
    step: u64,
    size: u64,
    /// Offset of `window` in the file.
    start: u64,
    window: Bytes,
    /// The position.
    pub at: u64,
}

impl FileWindow {
    /// Opens a window at the beginning of a file of `size` bytes.
    #[must_use]
    pub fn new(file: Arc<dyn File>, size: u64, step: u64, deadline: Duration) -> Self {
        Self { file, deadline, step, size, start: 0, window: Bytes::new(), at: 0 }
    }

    /// Returns whether the position is at the end of the file.
    #[must_use]
    pub fn is_at_end(&self) -> bool {
        self.at >= self.size
    }

    /// Returns `len` bytes from the position on, or `None` if the file ends before.
    ///
    /// # Errors
    /// A read fails, or does not end in time.
    pub async fn bytes(&mut self, len: u64) -> io::Result<Option<Bytes>> {
        if self.at.checked_add(len).is_none_or(|end| end > self.size) {
            return Ok(None);
        }
        if self.at < self.start || self.at + len > self.start + self.window.len() as u64 {
            let end = self.at + len.max(self.step).min(self.size - self.at);
            self.window = within(self.deadline, self.file.read_range(self.at..end)).await?;
            self.start = self.at;
        }
        let from = self.offset()?;
        let len = usize::try_from(len).map_err(io::Error::other)?;
        Ok(Some(self.window.slice(from..from + len)))
    }

    /// Returns the position as an offset in the window.
    fn offset(&self) -> io::Result<usize> {
        usize::try_from(self.at - self.start).map_err(io::Error::other)
    }

    /// Moves to the next occurrence of `magic`, or to the end of the file. Returns whether there is
    /// one.
    ///
    /// # Errors
    /// See [`FileWindow::bytes`].
    pub async fn find(&mut self, magic: [u8; 4]) -> io::Result<bool> {
        loop {
            if self.bytes(magic.len() as u64).await?.is_none() {
                self.at = self.size;
                return Ok(false);
            }
            let window = self.window.get(self.offset()?..).unwrap_or_default();
            match window.windows(magic.len()).position(|bytes| bytes == magic) {
                Some(skipped) => {
                    self.at += skipped as u64;
                    return Ok(true);
                }
                // The remaining bytes may be the beginning of a record.
                None => self.at += (window.len() + 1 - magic.len()) as u64,
            }
        }
    }
}
