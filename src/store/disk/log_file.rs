//! A data or index log: one append-only file of one shuffle on one disk.
//!
//! A reserved range is never returned. After an error or a timeout a log is closed for writing
//! permanently, so a late write can only reach its own range. One `fdatasync` of a log serves all
//! callers that wait for it.

use std::io;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::directories::directory::LocalDisk;
use uniffle_io::{BLOCK_ALIGN, FileId, IoClass};

/// Maximum length of a log: extents store their offset as a 32-bit number of blocks.
pub(super) const LOG_BYTES_MAX: u64 = (u32::MAX as u64) * BLOCK_ALIGN as u64;

/// Content of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store) enum LogKind {
    /// Extents.
    Data,
    /// Index groups.
    Index,
}

impl LogKind {
    pub(in crate::store) fn extension(self) -> &'static str {
        match self {
            Self::Data => "data",
            Self::Index => "index",
        }
    }

    /// Returns the I/O class of its writes.
    pub(super) fn io_class(self) -> IoClass {
        match self {
            Self::Data => IoClass::Bulk,
            Self::Index => IoClass::Index,
        }
    }

    /// Returns the kind of a file with this extension.
    pub(in crate::store) fn of(extension: &str) -> Option<Self> {
        [Self::Data, Self::Index].into_iter().find(|kind| kind.extension() == extension)
    }
}

/// A reserved range of a log.
#[derive(Debug)]
pub(in crate::store) struct LogRange {
    pub(in crate::store) log: LogUse,
    pub(in crate::store) offset: u64,
}

/// One file of a shuffle.
#[derive(Debug)]
pub(in crate::store) struct Log {
    /// Unique in the process: key of cached descriptors.
    pub(in crate::store) id: u64,
    /// Index in the shuffle's table of logs.
    pub(in crate::store) slot: u16,
    pub(in crate::store) kind: LogKind,
    pub(in crate::store) disk: Arc<LocalDisk>,
    /// Relative to the disk's root.
    pub(in crate::store) path: PathBuf,
    /// Number among the shuffle's files on this disk.
    pub(in crate::store) number: u32,
    /// Bytes that were reserved or found.
    next: AtomicU64,
    /// Number of reserved ranges that are not published yet.
    uses: AtomicU32,
    /// A [`LogStage`].
    stage: AtomicU8,
    /// Set once the file was created or found. Contains its identity if it was created.
    file: OnceLock<Option<FileId>>,
    pub(super) syncs: GroupCommit,
    /// True if its descriptors must not be cached. Guarded by the lock of the cache.
    pub(super) forgotten: AtomicBool,
    /// True once its bytes were subtracted from the shuffle's.
    is_uncounted: AtomicBool,
    /// Lowest sequence number of the index groups that refer to a found data log. `u64::MAX` for
    /// other logs.
    first_sequence: AtomicU64,
}

/// Stage of a log. A log only advances, except that a failed removal is repeated.
#[derive(Debug, Clone, Copy)]
#[repr(u8)]
enum LogStage {
    /// It is written. The stage of a new log.
    Open,
    /// No further range of it is reserved.
    Closed,
    /// Another program removed, replaced or truncated the file.
    Vanished,
    /// The extents of the vanished file are being marked as lost.
    Lost,
    /// No extent is left in the file.
    Released,
    /// The file is being removed or is gone.
    Removed,
}

impl Log {
    pub(in crate::store) fn new(
        id: u64,
        slot: u16,
        kind: LogKind,
        disk: Arc<LocalDisk>,
        path: PathBuf,
        number: u32,
    ) -> Self {
        let (next, uses, stage, file, syncs, forgotten, is_uncounted) = Default::default();
        let first_sequence = AtomicU64::new(u64::MAX);
        Self {
            id,
            slot,
            kind,
            disk,
            path,
            number,
            next,
            uses,
            stage,
            file,
            syncs,
            forgotten,
            is_uncounted,
            first_sequence,
        }
    }

    fn is_at(&self, stage: LogStage) -> bool {
        self.stage.load(Ordering::SeqCst) == stage as u8
    }

    fn has_reached(&self, stage: LogStage) -> bool {
        self.stage.load(Ordering::SeqCst) >= stage as u8
    }

    /// Advances the log to a stage, unless it is there or further.
    fn advance(&self, stage: LogStage) {
        self.stage.fetch_max(stage as u8, Ordering::SeqCst);
    }

    /// Moves the log from one stage to another. Returns false if it is at a third one.
    fn step(&self, from: LogStage, to: LogStage) -> bool {
        self.stage.compare_exchange(from as u8, to as u8, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Adopts a file of `bytes` bytes that a start found. It is only read.
    pub(in crate::store) fn adopt(&self, bytes: u64) {
        self.next.store(bytes, Ordering::Relaxed);
        self.created(None);
        self.close();
    }

    /// Notes that the index group `sequence` refers to a data log that a start found.
    pub(in crate::store) fn found_in_group(&self, sequence: u64) {
        self.first_sequence.fetch_min(sequence, Ordering::Relaxed);
    }

    /// Returns a number that orders the data logs of a shuffle by age, oldest first.
    pub(in crate::store) fn order(&self) -> (u64, u16) {
        (self.first_sequence.load(Ordering::Relaxed), self.slot)
    }

    /// Notes that the file exists.
    pub(super) fn created(&self, file: Option<FileId>) {
        self.file.get_or_init(|| file);
    }

    /// Returns whether `file`, which was opened by path, is the file that was created.
    pub(super) fn is_file(&self, file: Option<FileId>) -> bool {
        self.file.get().copied().flatten().zip(file).is_none_or(|(created, opened)| created == opened)
    }

    /// Returns whether the file must be in its directory.
    pub(in crate::store) fn must_exist(&self) -> bool {
        self.file.get().is_some() && !self.has_reached(LogStage::Vanished)
    }

    /// Closes the log for writing, because another program changed its file.
    pub(in crate::store) fn set_vanished(&self) {
        self.advance(LogStage::Vanished);
    }

    /// Returns whether another program removed, replaced or truncated the file.
    pub(super) fn has_vanished(&self) -> bool {
        self.is_at(LogStage::Vanished) || self.is_at(LogStage::Lost)
    }

    /// Returns whether the caller must mark the extents of a vanished file as lost. Returns true
    /// once.
    pub(super) fn begin_loss(&self) -> bool {
        self.step(LogStage::Vanished, LogStage::Lost)
    }

    /// Returns the bytes that were reserved or found.
    pub(in crate::store) fn bytes(&self) -> u64 {
        self.next.load(Ordering::Relaxed)
    }

    /// Returns the bytes to subtract from the shuffle's, as its file is gone. Later calls return 0.
    pub(in crate::store) fn uncount(&self) -> u64 {
        if self.is_uncounted.swap(true, Ordering::Relaxed) { 0 } else { self.bytes() }
    }

    /// Returns whether no further write to it begins and no range of it waits to be published. This
    /// is permanent.
    pub(in crate::store) fn is_settled(&self) -> bool {
        !self.is_open() && self.uses.load(Ordering::Acquire) == 0
    }

    /// Marks the file for removal. A reader that still uses it finds the same bytes in the object
    /// store.
    pub(in crate::store) fn release(&self) {
        self.advance(LogStage::Released);
    }

    pub(in crate::store) fn is_released(&self) -> bool {
        self.has_reached(LogStage::Released)
    }

    /// Starts the removal of a released file. Returns `None` if another caller removes it, or it is
    /// gone.
    pub(in crate::store) fn begin_removal(&self) -> Option<Removal<'_>> {
        self.step(LogStage::Released, LogStage::Removed).then_some(Removal { log: self, is_done: false })
    }

    /// Returns whether the file is being removed, or is gone.
    pub(in crate::store) fn is_removed(&self) -> bool {
        self.is_at(LogStage::Removed)
    }

    /// Reserves a range of `bytes` bytes. Returns its offset, or `None` if the log is closed or
    /// would exceed `limit`, and closes it then. The first range may exceed `limit`.
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

    /// Closes the log for writing, permanently.
    pub(in crate::store) fn close(&self) {
        self.advance(LogStage::Closed);
    }

    pub(super) fn is_open(&self) -> bool {
        self.is_at(LogStage::Open)
    }

    /// Returns the absolute path, for messages.
    pub(in crate::store) fn full_path(&self) -> PathBuf {
        self.disk.io.root().join(&self.path)
    }
}

/// Removal of a log's file. If dropped before [`Removal::done`], another caller may remove it.
#[derive(Debug)]
pub(in crate::store) struct Removal<'a> {
    log: &'a Log,
    is_done: bool,
}

impl Removal<'_> {
    /// Notes that the file is gone.
    pub(in crate::store) fn done(mut self) {
        self.is_done = true;
    }
}

impl Drop for Removal<'_> {
    fn drop(&mut self) {
        if !self.is_done {
            self.log.step(LogStage::Removed, LogStage::Released);
        }
    }
}

/// Guard of a reserved range: the log is not settled while it exists.
#[derive(Debug)]
pub(in crate::store) struct LogUse(Arc<Log>);

impl LogUse {
    /// Called under the lock that replaces the current log.
    pub(in crate::store) fn of(log: &Arc<Log>) -> Self {
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

/// Group commit of a log.
///
/// A caller takes a number and waits for the sync in progress. The next sync covers all numbers
/// that were taken before it began. After a failed sync all later ones are refused: it is unknown
/// what is on the device, because Linux marks the pages clean and lets the next sync succeed. A
/// cancelled sync counts as failed.
#[derive(Debug, Default)]
pub(super) struct GroupCommit {
    /// Number of writes that have ended.
    written: AtomicU64,
    state: tokio::sync::Mutex<SyncState>,
}

#[derive(Debug, Default)]
struct SyncState {
    /// Number of writes that are on the device.
    durable: u64,
    /// True if a sync failed or is in progress.
    unverified: bool,
}

impl GroupCommit {
    /// Waits until everything that the caller has written is on the device. Runs `sync` unless the
    /// sync of another caller covers it.
    ///
    /// # Errors
    /// This or an earlier sync failed. Nothing may be written to the log afterwards.
    pub(in crate::store) async fn cover(&self, sync: impl Future<Output = io::Result<()>>) -> io::Result<()> {
        let number = self.written.fetch_add(1, Ordering::AcqRel) + 1;
        let mut state = self.state.lock().await;
        if state.durable >= number {
            return Ok(());
        }
        if state.unverified {
            return Err(io::Error::other("an earlier sync of this file failed"));
        }
        let covered = self.written.load(Ordering::Acquire);
        // Stays set until `sync` has ended, because the caller may be cancelled.
        state.unverified = true;
        sync.await?;
        (state.durable, state.unverified) = (covered, false);
        Ok(())
    }
}
