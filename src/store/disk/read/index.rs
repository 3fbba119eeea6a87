//! Records of extents on disks, for reads of an index: from the record cache, or from index logs
//! through the page cache.
//!
//! Records of damaged blocks become fillers, so that readers skip these blocks. Invariant: records
//! of a purged shuffle do not stay in the record cache.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::view::{StreamView, ViewRun};
use super::{DiskReader, PartsByLog, StreamRead};
use crate::store::disk::files::Mode;
use crate::store::extents::extent::Extent;
use crate::store::index::index_read::{IndexRead, RecordSource, WRONG_RECORDS};
use crate::store::{ChunkRead, StoreError, StoreErrorKind};
use uniffle_io::{ReadBuffers, ReadPart};

impl DiskReader {
    /// Reads the records of `run`, a part of the view whose extents are on disks or lost.
    pub(in crate::store) fn index(&self, view: &StreamView, run: &ViewRun) -> Box<dyn ChunkRead> {
        self.core.metrics.read_index_file.inc();
        let stream = StreamRead::new(Arc::clone(&self.core), Arc::clone(&view.shuffle), view.partition);
        Box::new(IndexRead::new(stream, view.extents.clone(), run.extents.start, run.blocks))
    }
}

impl RecordSource for StreamRead {
    type Parts = PartsByLog;

    fn cached(&self, extent: &Extent) -> Option<Bytes> {
        let metrics = &self.core.metrics;
        let cached = self.core.records.get(&self.shuffle.records_key(extent));
        if cached.is_some() { &metrics.index_cache_hits } else { &metrics.index_cache_misses }.inc();
        cached
    }

    fn cache(&self, extent: &Extent, records: &[u8]) {
        if !self.core.records.admits(records.len()) {
            return;
        }
        let key = self.shuffle.records_key(extent);
        self.core.records.insert(key, Bytes::copy_from_slice(records));
        // A purge before the insertion has not removed these records.
        if self.shuffle.is_purged() {
            self.core.records.remove(std::iter::once(key));
        }
    }

    fn add_part(parts: &mut PartsByLog, extent: &Extent, from: u64, range: Range<usize>) {
        parts.push(extent.index_log, ReadPart { range, offset: extent.index_offset + from });
    }

    async fn read(
        &self,
        len: usize,
        buffers: &dyn ReadBuffers,
        parts: PartsByLog,
        mut complete: impl FnMut(&mut [u8]) -> Result<(), Extent> + Send,
    ) -> Result<Bytes, StoreError> {
        let mut buffer = self.read_all(Mode::Read, len, buffers, parts).await?;
        let bytes = (*buffer).as_mut().get_mut(..len).unwrap_or_default();
        complete(bytes).map_err(|extent| {
            let log = self.shuffle.log_at(extent.index_log);
            self.record_culprit(&log);
            StoreError::corrupt(log.full_path(), WRONG_RECORDS)
        })?;
        // Records of damaged blocks become fillers.
        self.shuffle.damaged.mask(self.partition, bytes);
        Ok(buffer.freeze(len))
    }

    fn finish_chunk(&mut self, chunk: Option<Result<Bytes, StoreError>>) -> Result<Bytes, StoreError> {
        let chunk = chunk.ok_or_else(|| self.shuffle.error(StoreErrorKind::Corrupt))?;
        let chunk = chunk.inspect_err(|error| self.count_failure(error))?;
        self.core.metrics.read_index_bytes.inc_by(chunk.len() as u64);
        Ok(chunk)
    }

    fn has_room(&self, extent: &Extent, len: usize) -> bool {
        self.is_free(extent.index_log, len)
    }

    fn may_have_losses(&self) -> bool {
        self.may_have_losses
    }
}
