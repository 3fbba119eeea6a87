//! Reads that do not follow a partition's stream: the index records of an extent, or a range of a
//! data log.
//!
//! For checksums, offloads, scans and damage. Nothing is cached. The memory is not charged to the
//! budget for reads: at most 256 KiB of records or 2 MiB of data per call.

use std::io;
use std::ops::{ControlFlow, Range};

use crate::log::within;
use crate::store::StoreError;
use crate::store::disk::config::READ_TIMEOUT;
use crate::store::disk::core::DiskCore;
use crate::store::disk::files::Mode;
use crate::store::disk::log_file::Log;
use crate::store::disk::shuffle::DiskShuffle;
use crate::store::extents::extent::Extent;
use crate::store::index::index_read::WRONG_RECORDS;
use crate::store::index::records::RecordCheck;
use uniffle_io::BLOCK_ALIGN;
use uniffle_io::buffers::READ_CHUNK_BYTES_MAX;
use uniffle_wire::index::{IndexRecord, RECORD_BYTES, records};

/// Bytes of whole records that are read at a time.
const VISITED_BYTES: usize = (256 << 10) / RECORD_BYTES * RECORD_BYTES;

impl DiskCore {
    /// Calls `show` with the index records of an extent, from record `from` on, until `show`
    /// breaks. Offsets in the records are relative to the extent. Records are read in small parts.
    /// If `from` is 0, all records are read and verified, even after a break, and the records shown
    /// are valid only if this returns `Ok`.
    pub(in crate::store) async fn visit_records(
        &self,
        shuffle: &DiskShuffle,
        extent: &Extent,
        from: u32,
        mut show: impl FnMut(&IndexRecord) -> ControlFlow<()>,
    ) -> Result<(), StoreError> {
        let log = shuffle.log_at(extent.index_log);
        log.disk.require_answering()?;
        let failed = |error| self.read_failed(shuffle, &log, error);
        let file = self.files.reader(&log).await.map_err(failed)?;
        let (mut at, end) = (from as usize * RECORD_BYTES, extent.blocks as usize * RECORD_BYTES);
        let (mut check, mut wants_more) = (RecordCheck::default(), true);
        while at < end && (wants_more || from == 0) {
            let bytes = VISITED_BYTES.min(end - at);
            let start = extent.index_offset + at as u64;
            let reading = file.read_range(start..start + bytes as u64);
            let bytes = within(READ_TIMEOUT, reading).await.map_err(failed)?;
            check.accept(&bytes);
            wants_more = wants_more && records(&bytes).try_for_each(|record| show(&record)).is_continue();
            at += bytes.len();
        }
        if from == 0 && !check.matches(extent.length, extent.records_crc) {
            return Err(StoreError::corrupt(log.full_path(), WRONG_RECORDS));
        }
        Ok(())
    }

    /// Reads a range of a data log again, past the page cache, to tell wrong bytes on the device
    /// from wrong bytes in memory. Passes it to `take` in parts. Reads whole disk blocks, which
    /// exist because extents are padded to them.
    pub(super) async fn read_again(
        &self,
        shuffle: &DiskShuffle,
        log: &Log,
        range: Range<u64>,
        mut take: impl FnMut(&[u8]),
    ) -> Result<(), StoreError> {
        let failed = |error| self.read_failed(shuffle, log, error);
        let file = self.files.open_read(log, Mode::ReadDirect).await.map_err(failed)?;
        let mut at = range.start;
        while at < range.end {
            let start = at - at % BLOCK_ALIGN as u64;
            let skip = usize::try_from(at - start).unwrap_or(0);
            let remaining = usize::try_from(range.end - start).unwrap_or(usize::MAX);
            let part = remaining.min(READ_CHUNK_BYTES_MAX);
            let blocks = part.next_multiple_of(BLOCK_ALIGN);
            let reading = file.read_range(start..start + blocks as u64);
            let bytes = within(READ_TIMEOUT, reading).await.map_err(failed)?;
            take(bytes.get(skip..part).unwrap_or_default());
            at = start + part as u64;
        }
        Ok(())
    }

    /// Returns the error of a failed read. It counts against the disk unless the file is being
    /// removed.
    fn read_failed(&self, shuffle: &DiskShuffle, log: &Log, error: io::Error) -> StoreError {
        match shuffle.is_purged() || log.is_released() {
            true => StoreError::io(log.full_path(), error),
            false => self.failed(&log.disk, log.full_path(), error),
        }
    }
}
