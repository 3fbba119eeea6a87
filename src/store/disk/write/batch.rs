//! Writes a batch to one disk, as one contiguous range of one data log, and publishes it.
//!
//! A partition with more than 4,096 blocks in the batch gets several extents. Extents begin on
//! block boundaries. Aligned memory is written without a copy, many partitions per call. Other
//! memory is gathered through staging buffers. A writer that needs another staging buffer first
//! writes the one it holds, so writers cannot starve each other.

use std::sync::Arc;

use bytes::Bytes;

use super::append::{DiskSearch, DiskWriter, ErrorCount};
use crate::clock::Instant;
use crate::store::disk::directories::directory::{InFlightWrite, LocalDisk};
use crate::store::disk::files::Mode;
use crate::store::disk::log_file::{Log, LogKind, LogRange};
use crate::store::disk::metrics::ALL_DISKS;
use crate::store::disk::shuffle::DiskShuffle;
use crate::store::index::codec::{group_bytes, occupied_bytes};
use crate::store::{ExtentData, ExtentWrite, StoreError, StoreErrorKind};
use uniffle_io::buffers::AlignedBuffer;
use uniffle_io::{BLOCK_ALIGN, File};

/// Maximum bytes of one write call, unless a single piece has more: large enough that the number of
/// calls does not matter, small enough that a missed deadline means a hung disk and not a slow one
/// (16 MiB in 60 s).
const CALL_BYTES_MAX: usize = 16 << 20;

/// Maximum number of pieces of one write call (one `pwritev`).
const CALL_PIECES_MAX: usize = 1024;

/// Summary of a published batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchSummary {
    /// Sequence among the shuffle's batches.
    pub sequence: u64,
    /// Index of the disk with the data.
    pub disk: usize,
    /// Number of extents.
    pub extents: usize,
    /// Number of blocks.
    pub blocks: usize,
    /// Payload bytes.
    pub bytes: u64,
}

/// Checks that a batch is consistent. Returns the bytes that it occupies in a data log.
fn validate(shuffle: &DiskShuffle, extents: &[ExtentWrite]) -> Result<u64, StoreError> {
    let counts_fit = !extents.is_empty() && u32::try_from(extents.len()).is_ok();
    if !counts_fit || !extents.iter().all(ExtentWrite::is_consistent) {
        return Err(shuffle.error(StoreErrorKind::InvalidBatch));
    }
    Ok(extents.iter().map(|extent| occupied_bytes(extent.length)).sum())
}

/// Returns whether every piece can be written without a copy.
fn is_aligned(pieces: &[Bytes]) -> bool {
    pieces.iter().all(|piece| {
        piece.as_ptr().addr().is_multiple_of(BLOCK_ALIGN) && piece.len().is_multiple_of(BLOCK_ALIGN)
    })
}

impl DiskWriter {
    /// Writes a batch to one disk and publishes it. After `Ok` every block is readable. If a disk
    /// fails, the next one is tried.
    ///
    /// # Errors
    /// The error of the last disk, or `NoSpace` or `Unhealthy` if none can be tried. The caller
    /// keeps the batch and may retry. Also `Purged` and `InvalidBatch`.
    pub(in crate::store) async fn write(
        &self,
        shuffle: &Arc<DiskShuffle>,
        extents: Vec<ExtentWrite>,
        is_last: bool,
    ) -> Result<BatchSummary, StoreError> {
        let extents = ExtentWrite::split_large(extents);
        let bytes = validate(shuffle, &extents)?;
        let blocks = extents.iter().map(|extent| extent.blocks.len()).sum();
        let index_bytes = group_bytes(extents.len(), blocks) as u64;
        self.core.metrics.write_local.inc();
        let written = async {
            shuffle.require_present()?;
            let mut search = DiskSearch::new(self, shuffle, bytes + index_bytes, is_last);
            let data = loop {
                let disk = search.next_disk().await?;
                match self.write_to(disk, shuffle, &extents, bytes).await {
                    Ok(data) => break data,
                    Err(error) => search.failed(disk.index, error)?,
                }
            };
            // Other batches of the final flush leave room for the index group meanwhile.
            let _index = InFlightWrite::begin(&data.log.disk, index_bytes);
            // Publishing may search again.
            drop(search);
            let sequence = self.publish(shuffle, &data, &extents, is_last).await?;
            Ok(BatchSummary {
                sequence,
                disk: data.log.disk.index,
                extents: extents.len(),
                blocks,
                bytes: extents.iter().map(|extent| extent.length).sum(),
            })
        };
        let result: Result<BatchSummary, StoreError> = written.await;
        match &result {
            Ok(published) => self.count_published(published, bytes),
            Err(error) if error.kind == StoreErrorKind::Purged => {}
            Err(_) => self.core.metrics.write_local_failed.inc(),
        }
        result
    }

    fn count_published(&self, published: &BatchSummary, occupied_bytes: u64) {
        let metrics = &self.core.metrics;
        metrics.writes.inc();
        metrics.write_local_succeeded.inc();
        metrics.write_data.inc_by(published.bytes);
        metrics.write_blocks.inc_by(published.blocks as u64);
        metrics.localfile_used.inc_by(occupied_bytes);
        let label = self.core.disks[published.disk].label.as_str();
        metrics.localfile_write_data.with_label_values(&[label]).inc_by(published.bytes);
        metrics.localfile_write_data.with_label_values(&[ALL_DISKS]).inc_by(published.bytes);
    }

    /// Writes a batch of `bytes` bytes to one disk. An error closes the log and counts against the
    /// disk.
    async fn write_to(
        &self,
        disk: &Arc<LocalDisk>,
        shuffle: &DiskShuffle,
        extents: &[ExtentWrite],
        bytes: u64,
    ) -> Result<LogRange, StoreError> {
        let load = InFlightWrite::begin(disk, bytes);
        let data = self.reserve(shuffle, disk, LogKind::Data, bytes).await?;
        let file = self.writer(&data.log).await?;
        let began = Instant::now();
        let mut call = WriteCall::new(self, &data, &file);
        let mut staging: Option<AlignedBuffer> = None;
        for extent in extents {
            let pieces = extent.data.pieces();
            let zero_copy = matches!(extent.data, ExtentData::Aligned(_)) && is_aligned(pieces);
            if !zero_copy {
                self.core.metrics.write_data_copied.inc_by(extent.length);
                call.gather(&mut staging, pieces, extent.length).await?;
                continue;
            }
            call.push_staging(staging.take()).await?;
            for piece in pieces {
                if call.is_full(piece.len()) {
                    call.send().await?;
                }
                call.push(piece.clone());
            }
        }
        call.push_staging(staging.take()).await?;
        call.send().await?;
        assert_eq!(call.at, data.offset + bytes, "a batch must fill its reserved range");
        self.make_durable(&data.log, &file).await?;
        disk.record_write_speed(load.with_others, began);
        Ok(data)
    }
}

/// Assembles write calls to a log, and makes them one after another.
pub(super) struct WriteCall<'a> {
    writer: &'a DiskWriter,
    log: &'a Log,
    file: &'a Arc<dyn File>,
    pieces: Vec<Bytes>,
    bytes: usize,
    at: u64,
    /// True if the call holds a staging buffer.
    staged: bool,
}

impl<'a> WriteCall<'a> {
    /// Begins to write at the start of a reserved range.
    pub(super) fn new(writer: &'a DiskWriter, to: &'a LogRange, file: &'a Arc<dyn File>) -> Self {
        Self { writer, log: &to.log, file, pieces: Vec::new(), bytes: 0, at: to.offset, staged: false }
    }

    /// Returns whether a piece of `bytes` bytes belongs to the next call.
    fn is_full(&self, bytes: usize) -> bool {
        let too_large = self.bytes + bytes > CALL_BYTES_MAX && self.bytes > 0;
        too_large || self.pieces.len() == CALL_PIECES_MAX
    }

    pub(super) fn push(&mut self, piece: Bytes) {
        self.bytes += piece.len();
        self.pieces.push(piece);
    }

    async fn push_staging(&mut self, staging: Option<AlignedBuffer>) -> Result<(), StoreError> {
        if let Some(staging) = staging
            && staging.filled() > 0
        {
            let piece = staging.freeze();
            if self.is_full(piece.len()) {
                self.send().await?;
            }
            self.push(piece);
            self.staged = true;
        }
        Ok(())
    }

    /// Copies the first `length` bytes of `pieces` through staging buffers, padded to a whole
    /// block.
    async fn gather(
        &mut self,
        staging: &mut Option<AlignedBuffer>,
        pieces: &[Bytes],
        length: u64,
    ) -> Result<(), StoreError> {
        let mut remaining = usize::try_from(length).unwrap_or(usize::MAX);
        for piece in pieces {
            let mut piece = &piece[..piece.len().min(remaining)];
            remaining -= piece.len();
            while !piece.is_empty() {
                let mut buffer = self.staging_with_room(staging.take()).await?;
                piece = &piece[buffer.put(piece)..];
                *staging = Some(buffer);
            }
        }
        if let Some(buffer) = staging {
            buffer.pad();
        }
        Ok(())
    }

    /// Returns the given buffer if it has room, else a new one. Never waits for a buffer while
    /// holding another.
    async fn staging_with_room(
        &mut self,
        staging: Option<AlignedBuffer>,
    ) -> Result<AlignedBuffer, StoreError> {
        match staging {
            Some(buffer) if buffer.room() > 0 => Ok(buffer),
            full => {
                self.push_staging(full).await?;
                if self.staged {
                    self.send().await?;
                }
                Ok(self.writer.staging.acquire().await)
            }
        }
    }

    /// Writes the pieces within the deadline of a write. A failure closes the log.
    pub(super) async fn send(&mut self) -> Result<(), StoreError> {
        if self.pieces.is_empty() {
            return Ok(());
        }
        let (log, core) = (self.log, &self.writer.core);
        let started = Instant::now();
        let writing = self.file.write_at(std::mem::take(&mut self.pieces), self.at);
        let result = log.disk.call(core.config.write_timeout, writing).await;
        let root = [log.disk.label.as_str()];
        core.metrics.append_operations.with_label_values(&root).inc();
        core.metrics.append_duration.with_label_values(&root).observe(started.elapsed().as_secs_f64());
        result.map_err(|error| self.writer.failed_log(log, error, ErrorCount::Already))?;
        if core.files.proves_progress(log, Mode::Write) {
            log.disk.note_progress();
        }
        core.metrics.append_bytes.with_label_values(&root).inc_by(self.bytes as u64);
        self.at += self.bytes as u64;
        (self.bytes, self.staged) = (0, false);
        Ok(())
    }
}
