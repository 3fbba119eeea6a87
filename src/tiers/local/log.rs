//! A data or index log: one append-only file of one shuffle on one disk.
//!
//! Ranges are reserved, never given back. A log that saw an error or a timeout is closed for writing forever, so a
//! late write can only land on a range that no other write was given.

use std::ops::Deref;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::disk::LocalDisk;
use super::sync::Syncs;
use uniffle_io::{BLOCK_ALIGN, FileId, Lane};

/// Longest log: extents keep their offset as a 32-bit number of blocks. A longer one is continued in a new file.
pub(super) const LOG_BYTES_MAX: u64 = (u32::MAX as u64) * BLOCK_ALIGN as u64;

/// What a log holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LogKind {
    /// Extents.
    Data,
    /// Index groups.
    Index,
}

impl LogKind {
    pub(super) fn extension(self) -> &'static str {
        match self {
            Self::Data => "data",
            Self::Index => "index",
        }
    }

    /// Where its writes queue on a disk.
    pub(super) fn lane(self) -> Lane {
        match self {
            Self::Data => Lane::Bulk,
            Self::Index => Lane::Index,
        }
    }

    /// The kind of a file by its extension.
    pub(super) fn of(extension: &str) -> Option<Self> {
        [Self::Data, Self::Index].into_iter().find(|kind| kind.extension() == extension)
    }
}

/// One file.
#[derive(Debug)]
pub(super) struct Log {
    /// Unique in the process: key of cached descriptors.
    pub(super) id: u64,
    /// Place in the shuffle's table of logs.
    pub(super) slot: u16,
    pub(super) kind: LogKind,
    pub(super) disk: Arc<LocalDisk>,
    /// Relative to the disk's root.
    pub(super) path: PathBuf,
    /// Its number among the shuffle's files on this disk.
    pub(super) number: u32,
    next: AtomicU64,
    closed: AtomicBool,
    /// Ranges of it that were reserved and are not published yet.
    uses: AtomicU32,
    /// Nothing of it is needed any more.
    released: AtomicBool,
    /// Its file is being removed, or is gone.
    removed: AtomicBool,
    /// Its file was created, or found by a start.
    exists: AtomicBool,
    /// Identity of the file that was created.
    file: OnceLock<FileId>,
    /// Its file was removed, replaced or cut short by somebody else ...
    vanished: AtomicBool,
    /// ... and somebody sees to what was in it.
    loss_begun: AtomicBool,
    pub(super) syncs: Syncs,
    /// Its descriptors may not be cached any more; guarded by the lock of the cache.
    pub(super) forgotten: AtomicBool,
}

impl Log {
    pub(super) fn new(
        id: u64,
        slot: u16,
        kind: LogKind,
        disk: Arc<LocalDisk>,
        (path, number): (PathBuf, u32),
    ) -> Self {
        let (next, closed, forgotten) = (AtomicU64::new(0), AtomicBool::new(false), AtomicBool::new(false));
        let (syncs, uses) = (Syncs::default(), AtomicU32::new(0));
        let (released, removed) = (AtomicBool::new(false), AtomicBool::new(false));
        let (exists, vanished, loss_begun) =
            (AtomicBool::new(false), AtomicBool::new(false), AtomicBool::new(false));
        Self {
            id,
            slot,
            kind,
            disk,
            path,
            number,
            next,
            closed,
            uses,
            released,
            removed,
            exists,
            file: OnceLock::new(),
            vanished,
            loss_begun,
            syncs,
            forgotten,
        }
    }

    /// It was found with so many bytes, and is only read.
    pub(super) fn adopt(&self, bytes: u64) {
        self.next.store(bytes, Ordering::Relaxed);
        self.exists.store(true, Ordering::Release);
        self.close();
    }

    /// Its file was created.
    pub(super) fn created(&self, file: Option<FileId>) {
        if let Some(file) = file {
            self.file.get_or_init(|| file);
        }
        self.exists.store(true, Ordering::Release);
    }

    /// Whether `file`, which was opened by its path, is the one that was created.
    pub(super) fn is_file(&self, file: Option<FileId>) -> bool {
        self.file.get().copied().zip(file).is_none_or(|(created, opened)| created == opened)
    }

    /// Whether its file must be in its directory.
    pub(super) fn must_exist(&self) -> bool {
        self.exists.load(Ordering::Acquire)
            && !(self.is_released() || self.is_removed() || self.has_vanished())
    }

    /// Closes it for writing, since its file is not what it was.
    pub(super) fn set_vanished(&self) {
        self.close();
        self.vanished.store(true, Ordering::SeqCst);
    }

    /// Whether its file was removed, replaced or cut short by somebody else.
    pub(super) fn has_vanished(&self) -> bool {
        self.vanished.load(Ordering::SeqCst)
    }

    /// Whether the caller is the one that sees to what was in a file that has vanished.
    pub(super) fn begin_loss(&self) -> bool {
        self.has_vanished() && !self.loss_begun.swap(true, Ordering::AcqRel)
    }

    /// Bytes that were reserved or found.
    pub(super) fn bytes(&self) -> u64 {
        self.next.load(Ordering::Relaxed)
    }

    /// Whether nothing is written to it any more and nothing of it waits to be published. That stays so.
    pub(super) fn is_settled(&self) -> bool {
        !self.is_open() && self.uses.load(Ordering::Acquire) == 0
    }

    /// Nothing of it is needed any more: its file is to be removed, and who still reads it finds the same bytes elsewhere.
    pub(super) fn release(&self) {
        self.released.store(true, Ordering::Release);
    }

    pub(super) fn is_released(&self) -> bool {
        self.released.load(Ordering::Acquire)
    }

    /// The file is the caller's to remove; none when it is another's, or is gone.
    pub(super) fn begin_removal(&self) -> Option<Removal<'_>> {
        let is_ours = !self.removed.swap(true, Ordering::AcqRel);
        is_ours.then_some(Removal { log: self, is_done: false })
    }

    /// Whether its file is being removed, or is gone.
    pub(super) fn is_removed(&self) -> bool {
        self.removed.load(Ordering::Acquire)
    }

    /// A range of `bytes` that is the caller's alone; `None` when the log is closed, has `limit` bytes, or would grow too long.
    pub(super) fn reserve(&self, bytes: u64, limit: u64) -> Option<u64> {
        let fits = |next: u64| {
            next.checked_add(bytes).filter(|end| *end <= LOG_BYTES_MAX && (next == 0 || *end <= limit))
        };
        if !self.is_open() {
            return None;
        }
        let reserved = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok();
        if reserved.is_none() {
            self.close();
        }
        reserved
    }

    /// Closes it for writing, forever.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    pub(super) fn is_open(&self) -> bool {
        !self.closed.load(Ordering::Acquire)
    }

    /// The whole path, for messages.
    pub(super) fn full_path(&self) -> PathBuf {
        self.disk.io.root().join(&self.path)
    }
}

/// A log's file is being removed. When this is dropped before that is done, another may do it.
#[derive(Debug)]
pub(super) struct Removal<'a> {
    log: &'a Log,
    is_done: bool,
}

impl Removal<'_> {
    /// The file is gone from its place.
    pub(super) fn done(mut self) {
        self.is_done = true;
    }
}

impl Drop for Removal<'_> {
    fn drop(&mut self) {
        if !self.is_done {
            self.log.removed.store(false, Ordering::Release);
        }
    }
}

/// A log of which a range was reserved: it is not settled before this is gone.
#[derive(Debug)]
pub(super) struct LogUse(Arc<Log>);

impl LogUse {
    /// Under the lock under which the log stops to be the current one.
    pub(super) fn of(log: &Arc<Log>) -> Self {
        log.uses.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(log))
    }
}

impl Clone for LogUse {
    fn clone(&self) -> Self {
        Self::of(&self.0)
    }
}

impl Deref for LogUse {
    type Target = Log;

    fn deref(&self) -> &Log {
        &self.0
    }
}

impl Drop for LogUse {
    fn drop(&mut self) {
        self.0.uses.fetch_sub(1, Ordering::AcqRel);
    }
}
