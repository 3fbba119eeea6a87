//! Reads of published extents, streamed in chunks.
//!
//! A read is a plan made from one snapshot. Bytes are fetched when a chunk is requested. A read is
//! never short: a failure is an error, and after an error a stream returns only errors. Index
//! records are first verified (order, sums, CRC). Large parts of data logs bypass the page cache,
//! which costs less CPU time than reading through it.

mod data;
pub(super) mod hints;

use std::fmt;
use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use smallvec::SmallVec;

use super::core::Core;
use super::damage::Damage;
use super::damaged::filler;
use super::extent::{Extent, ExtentList, FILLER_BYTES, NO_LOG};
use super::files::Mode;
use super::index::occupied_bytes;
use super::log::Log;
use super::share::ReadShare;
use super::shuffle::Shuffle;
use super::view::{StreamView, ViewRun};
use crate::clock::Instant;
use crate::runtime::Tasks;
use crate::tiers::records::RecordCheck;
use crate::tiers::{ChunkRead, StoreError, StoreErrorKind};
use uniffle_io::buffers::READ_CHUNK_BYTES_MAX;
use uniffle_io::{ReadBuffer, ReadBuffers, ReadPart, ReadTarget};
use uniffle_wire::index::{IndexRecord, RECORD_BYTES, rebase};
use uniffle_wire::types::PartitionId;

pub use data::DataRead;

/// Largest chunk of an index: whole records.
const INDEX_CHUNK_BYTES_MAX: usize = whole_records(READ_CHUNK_BYTES_MAX);

const fn whole_records(bytes: usize) -> usize {
    bytes / RECORD_BYTES * RECORD_BYTES
}

/// Minimum length of a part that is read around the page cache.
const DIRECT_BYTES_MIN: u64 = 64 << 10;

/// Shared state of all reads.
#[derive(Debug)]
pub(super) struct Reader {
    pub(super) core: Arc<Core>,
    pub(super) damage: Arc<Damage>,
    /// Number of data reads, for sampling.
    data_reads: AtomicU64,
    /// Tasks of hints.
    pub(super) tasks: Tasks,
}

impl Reader {
    pub(super) fn new(core: &Arc<Core>) -> Self {
        let damage = Damage::new(Arc::clone(core));
        Self { core: Arc::clone(core), damage, data_reads: AtomicU64::new(0), tasks: Tasks::new() }
    }
}

/// The index of a partition: the records of all its extents, with offsets in the partition's data
/// stream.
pub struct IndexRead {
    /// Length of all records in bytes: 40 per block.
    pub length: u64,
    /// Length of the partition's data stream.
    pub data_length: u64,
    stream: Stream,
    extents: ExtentList,
    /// Index of the next extent.
    next: usize,
    /// The extent being read.
    current: Option<ExtentRecords>,
    /// Number of filler records returned for the next extent, which is lost.
    fillers: u32,
}

/// Progress inside one extent's records.
struct ExtentRecords {
    extent: Extent,
    done_bytes: u64,
    check: RecordCheck,
}

impl ExtentRecords {
    fn new(extent: Extent) -> Self {
        Self { extent, done_bytes: 0, check: RecordCheck::default() }
    }

    fn left_bytes(&self) -> u64 {
        u64::from(self.extent.blocks) * RECORD_BYTES as u64 - self.done_bytes
    }
}

/// Records to be verified, and their range in the buffer.
struct Step {
    records: ExtentRecords,
    range: std::ops::Range<usize>,
}

/// Sources of the bytes of a chunk.
#[derive(Default)]
struct Plan {
    /// Cached records, with their places in the buffer.
    copies: Vec<(usize, Bytes)>,
    /// Records that are read and verified.
    steps: Vec<Step>,
    parts: PartsByLog,
}

/// A part of a data log.
#[derive(Debug, Clone, Copy)]
struct Piece {
    log: u16,
    offset: u64,
    length: u64,
    /// Length of the run of pieces that are contiguous in the log and include this one, at most
    /// `u32::MAX`.
    run: u32,
}

/// A read has one piece for each extent of its range before anything is charged for it.
const _: () = assert!(size_of::<Piece>() == 24, "the run takes no room of its own");

impl Piece {
    /// Returns whether it begins at the end of the extent of `before` in their log.
    fn is_behind(&self, before: &Self) -> bool {
        let end = occupied_bytes(before.offset + before.length);
        self.log != NO_LOG && self.log == before.log && self.offset == end
    }
}

/// Returns the part of `extent` in `offset..end`, which it overlaps.
fn piece_of(extent: &Extent, offset: u64, end: u64) -> Piece {
    let from = offset.max(extent.base) - extent.base;
    let to = end.min(extent.base + extent.length) - extent.base;
    Piece { log: extent.data_log, offset: extent.data_offset() + from, length: to - from, run: 0 }
}

/// State of index and data reads.
struct Stream {
    core: Arc<Core>,
    shuffle: Arc<Shuffle>,
    partition: PartitionId,
    left: u64,
    failed: bool,
    /// Index of the disk that failed or returned wrong bytes.
    culprit: OnceLock<usize>,
    /// True if the last error means that blocks are or may be lost.
    is_suspect: bool,
    /// True if the read is for a client, which learns about lost blocks.
    is_readers: bool,
}

impl fmt::Debug for IndexRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lengths = (self.length, self.stream.left);
        f.debug_tuple("IndexRead").field(&self.stream.shuffle.key).field(&lengths).finish()
    }
}

impl Stream {
    fn new(core: Arc<Core>, (shuffle, partition): (Arc<Shuffle>, PartitionId), left: u64) -> Self {
        let (failed, is_suspect, is_readers, culprit) = (false, false, true, OnceLock::new());
        Self { core, shuffle, partition, left, failed, culprit, is_suspect, is_readers }
    }

    fn blame(&self, log: &Log) {
        let _ = self.culprit.set(log.disk.index);
    }

    /// Counts a chunk that could not be read.
    fn count_failure(&mut self, error: &StoreError) {
        if !self.is_readers {
            return;
        }
        let (shuffle, partition) = (&self.shuffle, self.partition);
        let culprit = self.culprit.get();
        let is_one_too_many = culprit.is_some_and(|disk| shuffle.count_failed_read(partition, *disk, error));
        if is_one_too_many {
            // Reads of migrations are not for a client.
            self.core.hearer.tell(&shuffle.key, partition, &error.to_string());
        }
        self.is_suspect |= is_one_too_many;
    }

    /// Returns the log of a piece, or `None` for a hole.
    fn log(&self, piece: Piece) -> Option<Arc<Log>> {
        (piece.log != NO_LOG).then(|| self.shuffle.log_at(piece.log))
    }

    /// Returns the size of the next chunk, or 0 at the end.
    fn next_len(&self, max: usize) -> Result<usize, StoreError> {
        if self.failed {
            return Err(self.shuffle.error(StoreErrorKind::Corrupt));
        }
        Ok(usize::try_from(self.left).unwrap_or(max).min(max))
    }

    /// Fills parts of the buffer from a log, in one call.
    async fn read(
        &self,
        (log, mode): (&Log, Mode),
        buffer: Box<dyn ReadBuffer>,
        parts: Vec<ReadPart>,
    ) -> Result<Box<dyn ReadBuffer>, StoreError> {
        let bytes: usize = parts.iter().map(|part| part.range.len()).sum();
        let started = Instant::now();
        let result = self.read_file((log, mode), ReadTarget { buffer, parts }).await;
        let metrics = &self.core.metrics;
        let root = [log.disk.label.as_str()];
        metrics.read_operations.with_label_values(&root).inc();
        metrics.read_duration.with_label_values(&root).observe(started.elapsed().as_secs_f64());
        match result {
            Ok(target) => {
                if self.core.files.proves_progress(log, mode) {
                    log.disk.progressed();
                }
                metrics.read_bytes.with_label_values(&root).inc_by(bytes as u64);
                Ok(target.buffer)
            }
            Err(error) => {
                self.shuffle.require_present()?;
                if log.is_released() {
                    return Err(StoreError::new(StoreErrorKind::NotFound, log.full_path()));
                }
                self.blame(log);
                Err(StoreError::io(log.full_path(), error))
            }
        }
    }

    async fn read_file(&self, (log, mode): (&Log, Mode), target: ReadTarget) -> io::Result<ReadTarget> {
        let opened = self.core.files.open_read(log, mode).await;
        let reading = opened.inspect_err(|error| log.disk.note(error))?.read(target);
        let call = log.disk.call(self.core.config.read_timeout, async {
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
        (len, buffers): (usize, &dyn ReadBuffers),
        parts: PartsByLog,
    ) -> Result<Box<dyn ReadBuffer>, StoreError> {
        let logs: SmallVec<[_; 2]> = parts.0.iter().map(|(slot, _)| self.shuffle.log_at(*slot)).collect();
        let require_answering = || logs.iter().try_for_each(|log| log.disk.require_answering());
        require_answering()?;
        let turns = ReadShare::turns(logs.iter().map(|log| &log.disk.reads), &self.shuffle.key.app, len);
        let (mut buffer, _turns) = buffers.acquire_with(len, Arc::new(turns)).await;
        require_answering()?;
        for (log, (_, parts)) in logs.iter().zip(parts.0) {
            buffer = self.read((log, mode), buffer, parts).await?;
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
                Some(last) if goes_on(last, &part) => last.range.end = part.range.end,
                _ => parts.push(part),
            },
            None => self.0.push((log, vec![part])),
        }
    }
}

/// Returns whether a part continues `last` in the log and in the buffer: both are one read.
fn goes_on(last: &ReadPart, part: &ReadPart) -> bool {
    last.range.end == part.range.start && last.offset + last.range.len() as u64 == part.offset
}

impl IndexRead {
    /// Creates a read of the records of a run without objects.
    pub(super) fn new(reader: &Reader, view: &StreamView, run: &ViewRun) -> Self {
        let StreamView { shuffle, partition, extents, bytes: data_length, .. } = view.clone();
        let (length, next) = (run.blocks * RECORD_BYTES as u64, run.extents.start);
        reader.core.metrics.read_index_file.inc();
        let stream = Stream::new(Arc::clone(&reader.core), (shuffle, partition), length);
        Self { length, data_length, stream, extents, next, current: None, fillers: 0 }
    }

    async fn read_chunk(&mut self, len: usize, buffers: &dyn ReadBuffers) -> Result<Bytes, StoreError> {
        let Plan { copies, steps, parts } = self.plan(len);
        let mut buffer = self.stream.read_all(Mode::Read, (len, buffers), parts).await?;
        for (at, records) in copies {
            if let Some(room) = (*buffer).as_mut().get_mut(at..at + records.len()) {
                room.copy_from_slice(&records);
            }
        }
        for step in steps {
            let bytes = (*buffer).as_mut().get_mut(step.range).unwrap_or_default();
            self.check(step.records, bytes)?;
        }
        let Stream { shuffle, partition, .. } = &self.stream;
        shuffle.damaged.mask(*partition, (*buffer).as_mut().get_mut(..len).unwrap_or_default());
        Ok(buffer.freeze(len))
    }

    /// Returns the sources of the next `len` bytes. Allocates no buffer: the disks are asked first.
    fn plan(&mut self, len: usize) -> Plan {
        let mut plan = Plan::default();
        let mut filled = 0;
        while filled < len {
            if self.current.is_none()
                && let Some(records) = self.gap(len - filled).or_else(|| self.cached(len - filled))
            {
                let at = filled;
                filled += records.len();
                plan.copies.push((at, records));
                continue;
            }
            let records = self.current.take().unwrap_or_else(|| {
                let extent = self.extents.get(self.next).expect("the length is the sum over the extents");
                self.next += 1;
                ExtentRecords::new(*extent)
            });
            // An extent that does not end in this chunk is the last one, and `check` makes it the
            // current one again.
            let left = usize::try_from(records.left_bytes()).unwrap_or(usize::MAX);
            let range = filled..filled + left.min(len - filled);
            let offset = records.extent.index_offset + records.done_bytes;
            plan.parts.push(records.extent.index_log, ReadPart { range: range.clone(), offset });
            filled = range.end;
            plan.steps.push(Step { records, range });
        }
        plan
    }

    /// Verifies the next `bytes` of an extent's records, and converts their offsets to the stream.
    fn check(&mut self, mut current: ExtentRecords, bytes: &mut [u8]) -> Result<(), StoreError> {
        let mut intact = current.check.accept(bytes);
        rebase(bytes, current.extent.base);
        current.done_bytes += bytes.len() as u64;
        let complete = current.left_bytes() == 0;
        if complete {
            let check = std::mem::take(&mut current.check);
            intact = check.matches(current.extent.length, current.extent.records_crc);
        }
        if !intact {
            let log = self.stream.shuffle.log_at(current.extent.index_log);
            self.stream.blame(&log);
            return Err(StoreError::corrupt(log.full_path(), "index records are corrupt"));
        }
        if !complete {
            self.current = Some(current);
        } else if current.done_bytes == bytes.len() as u64 {
            self.keep(&current.extent, bytes);
        }
        Ok(())
    }
}

impl IndexRead {
    /// Returns up to `room` bytes of filler records if the next extent is lost.
    fn gap(&mut self, room: usize) -> Option<Bytes> {
        let gap = *self.extents.get(self.next).filter(|it| it.index_log == NO_LOG)?;
        let count = u32::try_from(room / RECORD_BYTES).ok()?.min(gap.blocks - self.fillers);
        let numbers = self.fillers..self.fillers + count;
        self.fillers += count;
        if self.fillers == gap.blocks {
            self.next += 1;
            self.fillers = 0;
        }
        Some(numbers.flat_map(|number| gap_filler(&gap, number).encode()).collect())
    }

    /// Returns the next extent's records if they are cached and fit.
    fn cached(&mut self, room: usize) -> Option<Bytes> {
        let Stream { core, shuffle, .. } = &self.stream;
        let extent = self.extents.get(self.next)?;
        let Some(records) = core.records.find(&shuffle.records_key(extent)) else {
            core.metrics.index_cache_misses.inc();
            return None;
        };
        if records.len() > room {
            return None;
        }
        core.metrics.index_cache_hits.inc();
        self.next += 1;
        Some(records)
    }

    /// Caches the verified records of a whole extent.
    fn keep(&self, extent: &Extent, records: &[u8]) {
        let Stream { core, shuffle, .. } = &self.stream;
        if !core.records.takes(records.len()) {
            return;
        }
        let key = shuffle.records_key(extent);
        core.records.keep(key, Bytes::copy_from_slice(records));
        if shuffle.is_purged() {
            core.records.forget(std::iter::once(key));
        }
    }
}

impl ChunkRead for IndexRead {
    fn next_chunk<'a>(
        &'a mut self,
        buffers: &'a dyn ReadBuffers,
    ) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        let read = async move {
            let len = self.stream.next_len(whole_records(buffers.chunk_bytes()))?;
            if len == 0 {
                return Ok(None);
            }
            self.stream.failed = true; // Until this chunk is whole: also when the caller gives up in between.
            let chunk = self.read_chunk(len, buffers).await;
            let chunk = chunk.inspect_err(|error| self.stream.count_failure(error))?;
            self.stream.failed = false;
            self.stream.left -= len as u64;
            self.stream.core.metrics.read_index_bytes.inc_by(len as u64);
            Ok(Some(chunk))
        };
        read.boxed()
    }

    /// Returns 0 also if the disk of the next chunk has no capacity.
    fn next_room(&self) -> usize {
        let room = usize::try_from(self.stream.left).unwrap_or(usize::MAX).min(INDEX_CHUNK_BYTES_MAX);
        let current = self.current.as_ref().map(|it| &it.extent).or_else(|| self.extents.get(self.next));
        let current = current.filter(|_| room > 0);
        if current.is_some_and(|extent| self.stream.is_free(extent.index_log, room)) { room } else { 0 }
    }

    fn is_suspect(&self) -> bool {
        self.stream.is_suspect
    }
}

fn gap_filler(gap: &Extent, number: u32) -> IndexRecord {
    let within = u64::from(number) * FILLER_BYTES;
    let length = (gap.length - within).min(FILLER_BYTES);
    filler((gap.base + within).cast_signed(), i32::try_from(length).unwrap_or(i32::MAX))
}
