//! Reads outside of any stream: the index records of an extent, a range of a data log. For rare paths: nothing is cached,
//! and nothing counts against the memory for reads.

use std::ops::Range;

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

impl Core {
    /// All index records of an extent, checked, with offsets in it. For rare paths: nothing is cached.
    pub(super) async fn records_of(
        &self,
        shuffle: &Shuffle,
        extent: &Extent,
    ) -> Result<Vec<IndexRecord>, StoreError> {
        let log = shuffle.log_at(extent.index_log);
        log.disk.require_answering()?;
        let failed = |error| self.failed(&log.disk, log.full_path(), error);
        let file = self.files.reader(&log).await.map_err(failed)?;
        let bytes = extent.blocks as usize * RECORD_BYTES;
        let reading = file.read(ReadTarget::one(Box::new(vec![0; bytes]), 0..bytes, extent.index_offset));
        let target = within(self.config.read_timeout, async {
            let (target, result) = reading.await;
            result.map(|()| target)
        });
        let bytes = target.await.map_err(failed)?.buffer.freeze(bytes);
        if crc32fast::hash(&bytes) != extent.records_crc {
            return Err(StoreError::corrupt(log.full_path(), "index records fail their check"));
        }
        Ok(records(&bytes).collect())
    }

    /// Reads a range of a data log around the page cache, whole disk blocks at a time: an extent fills its last one.
    pub(super) async fn read_again(
        &self,
        log: &Log,
        range: Range<u64>,
        mut take: impl FnMut(&[u8]),
    ) -> Result<(), StoreError> {
        let failed = |error| self.failed(&log.disk, log.full_path(), error);
        let file = self.files.open_read(log, Mode::ReadDirect).await.map_err(failed)?;
        let mut at = range.start;
        while at < range.end {
            let start = at - at % BLOCK_ALIGN as u64;
            let skip = usize::try_from(at - start).unwrap_or(0);
            let left = usize::try_from(range.end - start).unwrap_or(usize::MAX);
            let part = left.min(READ_CHUNK_BYTES_MAX);
            let blocks = part.next_multiple_of(BLOCK_ALIGN);
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
}
