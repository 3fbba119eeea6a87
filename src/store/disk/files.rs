//! The bounded cache of open descriptors, with eviction of the least recently used.
//!
//! A worker may have far more logs than it may have descriptors. An evicted file is opened again
//! when needed; calls under way keep it open until they end.

use std::io;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lru::LruCache;
use parking_lot::Mutex;

use super::config::NAME_TIMEOUT;
use super::log_file::{Log, LogKind};
use crate::clock::Instant;
use crate::log::within;
use uniffle_io::{File, Vanished, WriteOpen};

/// A cached descriptor that is not used for this long is closed.
const IDLE: Duration = Duration::from_secs(60);

/// Mode in which a log is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::store) enum Mode {
    /// Through the page cache.
    Read,
    /// Around the page cache, in whole blocks.
    ReadDirect,
    Write,
}

#[derive(Debug)]
struct OpenFile {
    file: Arc<dyn File>,
    used: Instant,
}

/// Open files by log and mode.
#[derive(Debug)]
pub(in crate::store) struct FileCache {
    open: Mutex<LruCache<(u64, Mode), OpenFile>>,
    next_id: AtomicU64,
    direct: bool,
}

impl FileCache {
    pub(in crate::store) fn new(max: usize, direct: bool) -> Self {
        let max = NonZeroUsize::new(max).unwrap_or(NonZeroUsize::MIN);
        Self { open: Mutex::new(LruCache::new(max)), next_id: AtomicU64::new(0), direct }
    }

    /// Returns an id for a new log.
    pub(in crate::store) fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the number of cached descriptors.
    pub(in crate::store) fn len(&self) -> usize {
        self.open.lock().len()
    }

    /// Creates the log's file, whose directory exists.
    pub(super) async fn create(&self, log: &Log) -> io::Result<()> {
        let file = self.open_write(log, true).await?;
        log.created(file.id());
        Ok(())
    }

    /// Returns the log's file for writing.
    pub(in crate::store) async fn writer(&self, log: &Log) -> io::Result<Arc<dyn File>> {
        match self.cached(log, Mode::Write) {
            Some(file) => Ok(file),
            None => self.open_write(log, false).await,
        }
    }

    /// Returns the log's file for reading through the page cache.
    pub(in crate::store) async fn reader(&self, log: &Log) -> io::Result<Arc<dyn File>> {
        self.open_read(log, Mode::Read).await
    }

    /// Returns the log's file for reading.
    pub(in crate::store) async fn open_read(&self, log: &Log, mode: Mode) -> io::Result<Arc<dyn File>> {
        if let Some(file) = self.cached(log, mode) {
            return Ok(file);
        }
        let opening = match mode {
            Mode::ReadDirect => log.disk.io.open_read_direct(&log.path),
            Mode::Read | Mode::Write => log.disk.io.open_read(&log.path),
        };
        let file = within(NAME_TIMEOUT, opening).await?;
        self.keep(log, mode, &file);
        Ok(file)
    }

    /// Closes the descriptors of a log, including those being opened: a deleted file occupies space
    /// while it is open.
    pub(in crate::store) fn forget(&self, log: &Log) {
        let mut open = self.open.lock();
        log.forgotten.store(true, Ordering::Relaxed);
        let closed = [Mode::Read, Mode::ReadDirect, Mode::Write].map(|mode| open.pop(&(log.id, mode)));
        drop(open);
        drop(closed);
    }

    /// Closes descriptors that were not used for a minute.
    pub(in crate::store) fn close_idle(&self) {
        let mut closed = Vec::new();
        let mut open = self.open.lock();
        // The order of the cache is the order of last use.
        while open.peek_lru().is_some_and(|(_, file)| file.used.elapsed() >= IDLE) {
            closed.extend(open.pop_lru());
        }
        drop(open);
        drop(closed); // Closed outside the lock.
    }

    async fn open_write(&self, log: &Log, create: bool) -> io::Result<Arc<dyn File>> {
        let direct = self.is_direct(log);
        let how = WriteOpen { create, direct, class: log.kind.io_class(), is_named: true };
        let file = self.open_same(log, how).await?;
        self.keep(log, Mode::Write, &file);
        Ok(file)
    }

    /// Opens a log's file for writing. Fails if another file has replaced it.
    async fn open_same(&self, log: &Log, how: WriteOpen) -> io::Result<Arc<dyn File>> {
        let opened = within(NAME_TIMEOUT, log.disk.io.open_write(&log.path, how)).await;
        let is_gone = |error: &io::Error| !how.create && error.kind() == io::ErrorKind::NotFound;
        match opened {
            Ok(file) if log.is_file(file.id()) => Ok(file),
            Ok(_) => Err(Vanished::File.into()),
            Err(error) if is_gone(&error) => Err(Vanished::File.into()),
            Err(error) => Err(error),
        }
    }

    /// Returns whether a log is written, and read in large parts, without the page cache: directly
    /// written data is not cached, and a single read does not pay for caching it. Index groups are
    /// small and unaligned, and go through the cache.
    pub(super) fn is_direct(&self, log: &Log) -> bool {
        self.direct && log.kind == LogKind::Data
    }

    /// Returns whether a successful call on a log proves that its device answers. A call through
    /// the page cache does not, unless all calls go there.
    pub(super) fn proves_progress(&self, log: &Log, mode: Mode) -> bool {
        !self.direct || (self.is_direct(log) && matches!(mode, Mode::ReadDirect | Mode::Write))
    }

    fn cached(&self, log: &Log, mode: Mode) -> Option<Arc<dyn File>> {
        let mut open = self.open.lock();
        let found = open.get_mut(&(log.id, mode))?;
        found.used = Instant::now();
        Some(Arc::clone(&found.file))
    }

    fn keep(&self, log: &Log, mode: Mode, file: &Arc<dyn File>) {
        let mut open = self.open.lock();
        if log.forgotten.load(Ordering::Relaxed) {
            return;
        }
        let used = Instant::now();
        let evicted = open.push((log.id, mode), OpenFile { file: Arc::clone(file), used });
        drop(open);
        drop(evicted); // Closed outside the lock.
    }
}
