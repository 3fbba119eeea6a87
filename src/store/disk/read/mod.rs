//! Reads of published extents, streamed in chunks.
//!
//! A read is a plan made from one snapshot. Bytes are fetched when a chunk is requested. A read is
//! never short: a failure is an error, and after an error a stream returns only errors. Index
//! records are first verified (order, sums, CRC). Large parts of data logs bypass the page cache,
//! which costs less CPU time than reading through it.

mod checksums;
pub(in crate::store) mod damage;
pub(super) mod damaged;
mod data;
pub(super) mod failures;
mod fetch;
pub(super) mod hints;
mod index;
pub(super) mod view;

use std::fmt;
use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;

use super::config::READ_TIMEOUT;
use super::core::DiskCore;
use super::files::Mode;
use super::log_file::Log;
use super::read::damage::DamageMarker;
use super::shuffle::DiskShuffle;
use crate::clock::Instant;
use crate::runtime::Tasks;
use crate::store::extents::extent::{Extent, NO_LOG};
use crate::store::index::codec::occupied_bytes;
use crate::store::{StoreError, StoreErrorKind};
use uniffle_io::{ReadBuffer, ReadBuffers, ReadPart, ReadTarget, ShareParts};
use uniffle_wire::types::PartitionId;

pub use data::DataRead;

/// Minimum length of a part that is read without the page cache.
const DIRECT_BYTES_MIN: u64 = 64 << 10;

/// Shared state of all reads.
#[derive(Debug)]
pub(in crate::store) struct DiskReader {
    pub(in crate::store) core: Arc<DiskCore>,
    pub(in crate::store) damage: Arc<DamageMarker>,
    /// Number of data reads, for sampling.
    data_reads: AtomicU64,
    /// Tasks of hints.
    pub(in crate::store) tasks: Tasks,
}

impl DiskReader {
    pub(in crate::store) fn new(core: &Arc<DiskCore>) -> Self {
        let damage = DamageMarker::new(Arc::clone(core));
        Self { core: Arc::clone(core), damage, data_reads: AtomicU64::new(0), tasks: Tasks::new() }
    }
}

/// A part of a data log, or a hole ([`NO_LOG`]).
#[derive(Debug, Clone, Copy)]
struct LogPiece {
    log: u16,
    offset: u64,
    length: u64,
    /// Length of the run of pieces that are contiguous in the log and include this one, at most
    /// `u32::MAX`.
    run: u32,
}

/// A read has one piece for each extent of its range before anything is charged for it.
const _: () = assert!(size_of::<LogPiece>() == 24, "the field `run` must fit into padding");

impl LogPiece {
    /// Returns whether it begins at the end of the extent of `before` in their log.
    fn follows(&self, before: &Self) -> bool {
        let end = occupied_bytes(before.offset + before.length);
        self.log != NO_LOG && self.log == before.log && self.offset == end
    }
}

/// Returns the part of `extent` in `offset..end`, which it overlaps.
fn piece_of(extent: &Extent, offset: u64, end: u64) -> LogPiece {
    let from = offset.max(extent.base) - extent.base;
    let to = end.min(extent.base + extent.length) - extent.base;
    LogPiece { log: extent.data_log, offset: extent.data_offset() + from, length: to - from, run: 0 }
}

/// State of index and data reads.
struct StreamRead {
    core: Arc<DiskCore>,
    shuffle: Arc<DiskShuffle>,
    partition: PartitionId,
    /// Index of the disk that failed or returned wrong bytes.
    culprit: OnceLock<usize>,
    /// True if the last error means that blocks are or may be lost.
    may_have_losses: bool,
    /// True if the read is for a client, which learns about lost blocks.
    is_for_client: bool,
}

impl fmt::Debug for StreamRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Stream").field(&self.shuffle.key).finish()
    }
}

impl StreamRead {
    fn new(core: Arc<DiskCore>, shuffle: Arc<DiskShuffle>, partition: PartitionId) -> Self {
        Self {
            core,
            shuffle,
            partition,
            culprit: OnceLock::new(),
            may_have_losses: false,
            is_for_client: true,
        }
    }

    fn record_culprit(&self, log: &Log) {
        let _ = self.culprit.set(log.disk.index);
    }

    /// Counts a chunk that could not be read.
    fn count_failure(&mut self, error: &StoreError) {
        if !self.is_for_client {
            return;
        }
        let (shuffle, partition) = (&self.shuffle, self.partition);
        let culprit = self.culprit.get();
        let is_one_too_many = culprit.is_some_and(|disk| shuffle.count_failed_read(partition, *disk, error));
        if is_one_too_many {
            // Reads of offloads are not for a client.
            self.core.damage.notify(&shuffle.key, partition, &error.to_string());
        }
        self.may_have_losses |= is_one_too_many;
    }

    /// Returns the log of a piece, or `None` for a hole.
    fn log(&self, piece: LogPiece) -> Option<Arc<Log>> {
        (piece.log != NO_LOG).then(|| self.shuffle.log_at(piece.log))
    }

    /// Fills parts of the buffer from a log, in one call.
    async fn read(
        &self,
        log: &Log,
        mode: Mode,
        buffer: Box<dyn ReadBuffer>,
        parts: Vec<ReadPart>,
    ) -> Result<Box<dyn ReadBuffer>, StoreError> {
        let bytes: usize = parts.iter().map(|part| part.range.len()).sum();
        let started = Instant::now();
        let result = self.read_file(log, mode, ReadTarget { buffer, parts }).await;
        let metrics = &self.core.metrics;
        let root = [log.disk.label.as_str()];
        metrics.read_operations.with_label_values(&root).inc();
        metrics.read_duration.with_label_values(&root).observe(started.elapsed().as_secs_f64());
        match result {
            Ok(target) => {
                if self.core.files.proves_progress(log, mode) {
                    log.disk.note_progress();
                }
                metrics.read_bytes.with_label_values(&root).inc_by(bytes as u64);
                Ok(target.buffer)
            }
            Err(error) => {
                self.shuffle.require_present()?;
                if log.is_released() {
                    return Err(StoreError::new(StoreErrorKind::NotFound, log.full_path()));
                }
                self.record_culprit(log);
                Err(StoreError::io(log.full_path(), error))
            }
        }
    }

    async fn read_file(&self, log: &Log, mode: Mode, target: ReadTarget) -> io::Result<ReadTarget> {
        let opened = self.core.files.open_read(log, mode).await;
        let reading = opened.inspect_err(|error| log.disk.note(error))?.read(target);
        let call = log.disk.call(READ_TIMEOUT, async {
            let (target, result) = reading.await;
            match result {
                // The file is being truncated for removal: the disk is not at fault.
                Err(error) if self.shuffle.is_purged() || log.is_released() => Ok(Err(error)),
                result => result.map(|()| Ok(target)),
            }
        });
        call.await?
    }

    /// Returns a buffer of `len` bytes with filled parts, with one call per log. Fails if a disk
    /// hangs, also during the wait.
    async fn read_all(
        &self,
        mode: Mode,
        len: usize,
        buffers: &dyn ReadBuffers,
        parts: PartsByLog,
    ) -> Result<Box<dyn ReadBuffer>, StoreError> {
        let logs: SmallVec<[_; 2]> = parts.0.iter().map(|(slot, _)| self.shuffle.log_at(*slot)).collect();
        let require_answering = || logs.iter().try_for_each(|log| log.disk.require_answering());
        require_answering()?;
        let shares = ShareParts::of(logs.iter().map(|log| &log.disk.reads), len);
        let (mut buffer, _permit) = buffers.acquire_with(len, shares).await;
        require_answering()?;
        for (log, (_, parts)) in logs.iter().zip(parts.0) {
            buffer = self.read(log, mode, buffer, parts).await?;
        }
        Ok(buffer)
    }

    /// Returns whether a log's disk answers and has capacity for a read of `len` bytes now.
    fn is_free(&self, slot: u16, len: usize) -> bool {
        if slot == NO_LOG {
            return true;
        }
        let log = self.shuffle.log_at(slot);
        log.disk.reads.has_room(len) && log.disk.require_answering().is_ok()
    }
}

/// Reads from several logs.
#[derive(Default)]
struct PartsByLog(SmallVec<[(u16, Vec<ReadPart>); 2]>);

impl PartsByLog {
    fn push(&mut self, log: u16, part: ReadPart) {
        match self.0.iter_mut().find(|(slot, _)| *slot == log) {
            Some((_, parts)) => match parts.last_mut() {
                Some(last) if continues(last, &part) => last.range.end = part.range.end,
                _ => parts.push(part),
            },
            None => self.0.push((log, vec![part])),
        }
    }
}

/// Returns whether a part continues `last` in the log and in the buffer: both are one read.
fn continues(last: &ReadPart, part: &ReadPart) -> bool {
    last.range.end == part.range.start && last.offset + last.range.len() as u64 == part.offset
}
