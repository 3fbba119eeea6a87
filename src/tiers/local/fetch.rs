//! Reads outside of any stream: the index records of an extent, a range of a data log. For rare paths: nothing is cached,
//! and nothing counts against the memory for reads.

use std::io;
use std::ops::{ControlFlow, Range};

use super::core::Core;
use super::disk::within;
use super::extent::Extent;
use super::files::Mode;
use super::log::Log;
use super::shuffle::Shuffle;
use crate::tiers::StoreError;
use uniffle_io::buffers::READ_CHUNK_BYTES_MAX;
use uniffle_io::{BLOCK_ALIGN, ReadTarget};
use uniffle_wire::index::{IndexRecord, RECORD_BYTES, records};

/// Records read at a time: whole ones, 256 KiB.
const VISITED_BYTES: usize = (256 << 10) / RECORD_BYTES * RECORD_BYTES;

impl Core {
    /// Shows the index records of an extent, from one on, with offsets in it, until `show` has enough. A few are read at a
    /// time. From the first on all are checked together: what was shown counts if this returns `Ok`.
    pub(super) async fn visit_records(
        &self,
        shuffle: &Shuffle,
        extent: &Extent,
        from: u32,
        mut show: impl FnMut(&IndexRecord) -> ControlFlow<()>,
    ) -> Result<(), StoreError> {
        let log = shuffle.log_at(extent.index_log);
        log.disk.require_answering()?;
        let failed = |error| self.read_failed(shuffle, &log, error);
        let file = self.files.reader(&log).await.map_err(failed)?;
        let (mut at, end) = (from as usize * RECORD_BYTES, extent.blocks as usize * RECORD_BYTES);
        let (mut hasher, mut wants_more) = (crc32fast::Hasher::new(), true);
        while at < end && (wants_more || from == 0) {
            let bytes = VISITED_BYTES.min(end - at);
            let place = extent.index_offset + at as u64;
            let reading = file.read(ReadTarget::one(Box::new(vec![0; bytes]), 0..bytes, place));
            let target = within(self.config.read_timeout, async {
                let (target, result) = reading.await;
                result.map(|()| target)
            });
            let bytes = target.await.map_err(failed)?.buffer.freeze(bytes);
            hasher.update(&bytes);
            wants_more = wants_more && records(&bytes).try_for_each(|record| show(&record)).is_continue();
            at += bytes.len();
        }
        if from == 0 && hasher.finalize() != extent.records_crc {
            return Err(StoreError::corrupt(log.full_path(), "index records fail their check"));
        }
        Ok(())
    }

    /// Reads a range of a data log around the page cache, whole disk blocks at a time: an extent fills its last one.
    pub(super) async fn read_again(
        &self,
        (shuffle, log): (&Shuffle, &Log),
        range: Range<u64>,
        mut take: impl FnMut(&[u8]),
    ) -> Result<(), StoreError> {
        self.read_range((shuffle, log), Mode::ReadDirect, range, |bytes| take(bytes)).await
    }

    /// Reads a range of a log.
    pub(super) async fn read_range(
        &self,
        (shuffle, log): (&Shuffle, &Log),
        mode: Mode,
        range: Range<u64>,
        mut take: impl FnMut(&[u8]),
    ) -> Result<(), StoreError> {
        let failed = |error| self.read_failed(shuffle, log, error);
        let file = self.files.open_read(log, mode).await.map_err(failed)?;
        let align = if mode == Mode::ReadDirect { BLOCK_ALIGN } else { 1 };
        let mut at = range.start;
        while at < range.end {
            let start = at - at % align as u64;
            let skip = usize::try_from(at - start).unwrap_or(0);
            let left = usize::try_from(range.end - start).unwrap_or(usize::MAX);
            let part = left.min(READ_CHUNK_BYTES_MAX);
            let blocks = part.next_multiple_of(align);
            let reading = file.read(ReadTarget::one(Box::new(vec![0; blocks]), 0..blocks, start));
            let target = within(self.config.read_timeout, async {
                let (target, result) = reading.await;
                result.map(|()| target)
            });
            let mut target = target.await.map_err(failed)?;
            take(target.part_mut(0).and_then(|bytes| bytes.get(skip..part)).unwrap_or_default());
            at = start + part as u64;
        }
        Ok(())
    }

    /// A read that failed: the disk's doing, unless the file is being removed.
    fn read_failed(&self, shuffle: &Shuffle, log: &Log, error: io::Error) -> StoreError {
        match shuffle.is_purged() || log.is_released() {
            true => StoreError::io(log.full_path(), error),
            false => self.failed(&log.disk, log.full_path(), error),
        }
    }
}
