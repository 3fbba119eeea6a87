//! Reads of a range of a partition's data.
//!
//! A read is a plan of pieces of logs. Large pieces bypass the page cache, and are read in whole
//! blocks and several per call. Small ones are read through it. The result of one call is verified
//! together and returned piece by piece.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use smallvec::SmallVec;

use super::checksums::{DiskChecksums, SAMPLE};
use super::damage::DamageMarker;
use super::{DIRECT_BYTES_MIN, DiskReader, LogPiece, PartsByLog, StreamRead, piece_of};
use crate::store::disk::config::VerifyReads;
use crate::store::disk::files::Mode;
use crate::store::disk::log_file::Log;
use crate::store::disk::shuffle::DiskShuffle;
use crate::store::extents::extent::{Extent, NO_LOG};
use crate::store::index::block_verifier::BlockCheck;
use crate::store::tier::RemainingRead;
use crate::store::{ChunkRead, StoreError, StoreErrorKind};
use uniffle_io::buffers::READ_CHUNK_BYTES_MAX;
use uniffle_io::{BLOCK_ALIGN, ReadBuffer, ReadBuffers, ReadPart};
use uniffle_wire::types::PartitionId;

/// A read of a range of a partition's data.
pub struct DataRead {
    damage: Arc<DamageMarker>,
    stream: StreamRead,
    progress: RemainingRead,
    range: Range<u64>,
    pieces: Vec<LogPiece>,
    /// Index of the next piece.
    next: usize,
    /// Rest of the current piece.
    current: Option<LogPiece>,
    /// Chunks that were read and verified together with the last one.
    ready: VecDeque<Bytes>,
    checksums: Option<DiskChecksums>,
}

/// The whole disk blocks that contain the first bytes of a [`LogPiece`].
struct Aligned {
    /// Offset in the log.
    start: u64,
    /// Bytes before the first requested one.
    skip: usize,
    /// Requested bytes.
    part: usize,
    /// Bytes of all blocks. An extent fills its last block, so bytes after `part` exist.
    blocks: usize,
}

impl Aligned {
    /// Returns the blocks of `piece` that fit into `room` bytes. `room` must hold at least one
    /// block.
    fn of(piece: &LogPiece, room: usize) -> Self {
        let start = piece.offset / BLOCK_ALIGN as u64 * BLOCK_ALIGN as u64;
        let skip = usize::try_from(piece.offset - start).unwrap_or(0);
        let left = usize::try_from(piece.length).unwrap_or(usize::MAX);
        let part = left.min((room / BLOCK_ALIGN * BLOCK_ALIGN).saturating_sub(skip));
        Self { start, skip, part, blocks: (skip + part).next_multiple_of(BLOCK_ALIGN) }
    }
}

impl fmt::Debug for DataRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DataRead").field(&self.stream.shuffle.key).field(&self.progress).finish()
    }
}

impl DiskReader {
    /// Returns whether the next data read is verified.
    fn verifies_next(&self) -> bool {
        match self.core.config.verify_reads {
            VerifyReads::Always => true,
            VerifyReads::Sampled => self.data_reads.fetch_add(1, Ordering::Relaxed).is_multiple_of(SAMPLE),
            VerifyReads::Off => false,
        }
    }
}

impl DataRead {
    /// Creates a read of a range that `extents` cover, none of them in an object.
    pub(in crate::store) fn new<'a>(
        reader: &DiskReader,
        shuffle: Arc<DiskShuffle>,
        partition: PartitionId,
        extents: impl Iterator<Item = &'a Extent> + Clone,
        range: Range<u64>,
    ) -> Self {
        let mut pieces: Vec<_> =
            extents.clone().map(|extent| piece_of(extent, range.start, range.end)).collect();
        find_runs(&mut pieces);
        reader.core.metrics.read_data_file.inc();
        let checksums = reader.verifies_next().then(|| checksums_of(partition, extents, &range));
        let stream = StreamRead::new(Arc::clone(&reader.core), shuffle, partition);
        let (damage, ready) = (Arc::clone(&reader.damage), VecDeque::new());
        let progress = RemainingRead::new(range.end - range.start);
        Self { damage, stream, progress, range, pieces, next: 0, current: None, ready, checksums }
    }

    /// Converts the read to a read of an offload: always verified, and failures are not counted.
    /// Only failed reads of clients trigger the search for lost blocks, but a block that was wrong
    /// twice is marked as damaged here too.
    pub(in crate::store) fn for_offload<'a>(mut self, extents: impl Iterator<Item = &'a Extent>) -> Self {
        self.checksums = Some(checksums_of(self.stream.partition, extents, &self.range));
        self.stream.is_for_client = false;
        self
    }

    /// Reads and verifies the next bytes, at most `len` unless they bypass the page cache. A block
    /// with a wrong checksum is first read again.
    async fn fetch(&mut self, len: usize, buffers: &dyn ReadBuffers) -> Result<(), StoreError> {
        if let Some(checksums) = &mut self.checksums {
            let StreamRead { core, shuffle, .. } = &self.stream;
            if let Err((error, log)) = checksums.prepare(core, shuffle, READ_CHUNK_BYTES_MAX as u64).await {
                shuffle.require_present()?;
                self.stream.record_culprit(&log);
                return Err(error);
            }
        }
        let before = (self.current, self.next, self.checksums.as_mut().map(|it| it.verifier.mark()));
        let Some(block) = self.fetch_once(len, buffers).await? else { return Ok(()) };
        let StreamRead { core, shuffle, partition, .. } = &self.stream;
        core.metrics.read_crc_mismatches.inc();
        let is_sound = self.damage.is_sound(shuffle, *partition, &block).await;
        shuffle.require_present()?;
        if !is_sound? {
            return Err(self.found_damaged(&block));
        }
        tracing::warn!(
            shuffle = %shuffle.key,
            %partition,
            "block does not match its checksum; reading it again"
        );
        let mark;
        (self.current, self.next, mark) = before;
        if let (Some(checksums), Some(mark)) = (&mut self.checksums, mark) {
            checksums.verifier.rewind(mark);
        }
        match self.fetch_once(len, buffers).await? {
            None => Ok(()),
            // The client may already have the first bytes of the block.
            Some(_) => {
                let what = "a block was read with wrong bytes; nothing is lost";
                Err(StoreError::io(self.stream.shuffle.key.to_string(), io::Error::other(what)))
            }
        }
    }

    /// Marks a block as damaged that was wrong twice. Returns the error of the read.
    fn found_damaged(&mut self, block: &BlockCheck) -> StoreError {
        let StreamRead { shuffle, partition, .. } = &self.stream;
        let error = self.damage.mark_damaged(shuffle, *partition, block);
        self.stream.may_have_losses = true;
        error
    }

    /// Reads the next bytes once. Returns the first block with a wrong checksum.
    async fn fetch_once(
        &mut self,
        len: usize,
        buffers: &dyn ReadBuffers,
    ) -> Result<Option<BlockCheck>, StoreError> {
        let next = self.current.take().or_else(|| self.next_piece());
        let piece = next.expect("the length is the sum over the pieces");
        let chunks = if self.bypasses_page_cache(&piece) {
            self.read_aligned(piece, buffers).await?
        } else {
            VecDeque::from([self.gather(piece, len, buffers).await?])
        };
        if let Some(checksums) = &mut self.checksums
            && let Some(block) = chunks.iter().find_map(|chunk| checksums.verifier.check(chunk))
        {
            return Ok(Some(block));
        }
        self.ready = chunks;
        Ok(None)
    }

    fn next_piece(&mut self) -> Option<LogPiece> {
        let piece = self.pieces.get(self.next).copied();
        self.next += usize::from(piece.is_some());
        piece
    }

    /// Returns whether a piece is read without the page cache.
    fn bypasses_page_cache(&self, piece: &LogPiece) -> bool {
        let direct = |log: Arc<Log>| self.stream.core.files.is_direct(&log);
        piece.length.max(u64::from(piece.run)) >= DIRECT_BYTES_MIN
            && self.stream.log(*piece).is_some_and(direct)
    }

    /// Reads `piece` and following pieces that fit and are direct too, as whole blocks into one
    /// buffer.
    async fn read_aligned(
        &mut self,
        piece: LogPiece,
        buffers: &dyn ReadBuffers,
    ) -> Result<VecDeque<Bytes>, StoreError> {
        let room = buffers.chunk_bytes();
        let (mut parts, mut ranges) = (PartsByLog::default(), SmallVec::<[_; 8]>::new());
        let mut filled = 0;
        let mut next = Some(piece);
        while let Some(piece) = next.take() {
            let aligned = Aligned::of(&piece, room - filled);
            ranges.push(filled + aligned.skip..filled + aligned.skip + aligned.part);
            let range = filled..filled + aligned.blocks;
            parts.push(piece.log, ReadPart { range, offset: aligned.start });
            filled += aligned.blocks;
            self.keep_rest(piece, aligned.part);
            if self.current.is_none() {
                next = self.next_piece();
            }
            // A piece that does not fit begins the next buffer.
            let fits = |piece: &LogPiece| Aligned::of(piece, usize::MAX).blocks <= room - filled;
            if next.is_some_and(|piece| !fits(&piece) || !self.bypasses_page_cache(&piece)) {
                self.current = next.take();
            }
        }
        let read = self.stream.read_all(Mode::ReadDirect, filled, buffers, parts).await?;
        let bytes = read.freeze(filled);
        Ok(ranges.into_iter().map(|range| bytes.slice(range)).collect())
    }

    /// Reads at most `len` bytes from `piece` on, over several pieces. Ends before a piece that
    /// bypasses the page cache.
    async fn gather(
        &mut self,
        piece: LogPiece,
        len: usize,
        buffers: &dyn ReadBuffers,
    ) -> Result<Bytes, StoreError> {
        let (mut parts, mut holes) = (PartsByLog::default(), Vec::new());
        let mut filled = 0;
        let mut next = Some(piece);
        while let Some(piece) = next {
            let part = usize::try_from(piece.length).unwrap_or(usize::MAX).min(len - filled);
            let range = filled..filled + part;
            match piece.log {
                NO_LOG => holes.push(range),
                log => parts.push(log, ReadPart { range, offset: piece.offset }),
            }
            filled += part;
            self.keep_rest(piece, part);
            if filled == len {
                break;
            }
            next = self.next_piece();
            if next.is_some_and(|piece| self.bypasses_page_cache(&piece)) {
                self.current = next.take();
            }
        }
        let buffer = self.stream.read_all(Mode::Read, filled, buffers, parts).await?;
        let buffer = holes.into_iter().fold(buffer, zeroed);
        Ok(buffer.freeze(filled))
    }

    fn keep_rest(&mut self, piece: LogPiece, read: usize) {
        let (offset, length) = (piece.offset + read as u64, piece.length - read as u64);
        self.current = (length > 0).then_some(LogPiece { offset, length, ..piece });
    }
}

impl ChunkRead for DataRead {
    fn next_chunk<'a>(
        &'a mut self,
        buffers: &'a dyn ReadBuffers,
    ) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        let read = async move {
            let failed = || self.stream.shuffle.error(StoreErrorKind::Corrupt);
            let len = self.progress.begin(buffers.chunk_bytes()).ok_or_else(failed)?;
            if self.ready.is_empty() && len > 0 {
                let fetched = self.fetch(len, buffers).await;
                fetched.inspect_err(|error| self.stream.count_failure(error))?;
            }
            let Some(chunk) = self.ready.pop_front() else { return Ok(None) };
            self.progress.end(chunk.len());
            self.stream.core.metrics.read_data_bytes.inc_by(chunk.len() as u64);
            Ok(Some(chunk))
        };
        read.boxed()
    }

    /// Returns 0 also if the disk of the next chunk has no capacity.
    fn next_room(&self) -> usize {
        if !self.ready.is_empty() || self.progress.remaining() == 0 {
            return 0;
        }
        // A direct read may begin and end within a block.
        let ends = 2 * BLOCK_ALIGN * (self.pieces.len() - self.next + 1);
        let room = self
            .progress
            .next_len(usize::MAX)
            .saturating_add(ends)
            .next_multiple_of(BLOCK_ALIGN)
            .min(READ_CHUNK_BYTES_MAX);
        let next = self.current.as_ref().or_else(|| self.pieces.get(self.next));
        if next.is_some_and(|piece| self.stream.is_free(piece.log, room)) { room } else { 0 }
    }

    fn may_have_losses(&self) -> bool {
        self.stream.may_have_losses
    }
}

fn zeroed(mut buffer: Box<dyn ReadBuffer>, range: std::ops::Range<usize>) -> Box<dyn ReadBuffer> {
    if let Some(bytes) = (*buffer).as_mut().get_mut(range) {
        bytes.fill(0);
    }
    buffer
}

/// Returns the checksums of a read of a range that `extents` cover.
fn checksums_of<'a>(
    partition: PartitionId,
    extents: impl Iterator<Item = &'a Extent>,
    range: &Range<u64>,
) -> DiskChecksums {
    let known = extents.filter(|extent| !extent.is_lost());
    DiskChecksums::new(partition, known.copied().collect(), range.clone())
}

/// Finds pieces that are contiguous in their log. They are read as one longer piece.
fn find_runs(pieces: &mut [LogPiece]) {
    if pieces.len() < 2 {
        return;
    }
    // The first pass sums each run up to the piece. The second pass spreads the total to all its
    // pieces.
    let mut before: SmallVec<[usize; 2]> = SmallVec::new();
    for at in 0..pieces.len() {
        let earlier = replace_last_of_log(&mut before, pieces, at).map(|at| pieces[at]);
        let run = earlier.filter(|it| pieces[at].follows(it)).map_or(0, |it| it.run);
        pieces[at].run = run.saturating_add(short(pieces[at].length));
    }
    let mut after: SmallVec<[usize; 2]> = SmallVec::new();
    for at in (0..pieces.len()).rev() {
        let later = replace_last_of_log(&mut after, pieces, at).map(|at| pieces[at]);
        if let Some(later) = later.filter(|it| it.follows(&pieces[at])) {
            pieces[at].run = later.run;
        }
    }
    pieces.iter_mut().filter(|it| it.run == short(it.length)).for_each(|it| it.run = 0);
}

fn short(length: u64) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

/// Returns the previous piece of the same log, and replaces it in `last` by the piece at `at`.
fn replace_last_of_log(last: &mut SmallVec<[usize; 2]>, pieces: &[LogPiece], at: usize) -> Option<usize> {
    // Searches from the newest log on: a stream moves from log to log and leaves full ones behind.
    let known = last.iter_mut().rev().find(|known| pieces[**known].log == pieces[at].log);
    if known.is_none() {
        last.push(at);
        return None;
    }
    known.map(|known| std::mem::replace(known, at))
}
