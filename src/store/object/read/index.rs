//! Reads the index records of extents in objects: the [`RecordSource`] of an `IndexRead`.
//!
//! The `IndexRead` verifies the records of each extent by their checksum, in the `complete` that is
//! passed to [`RecordSource::read`]. Wrong records from the read cache are discarded there, and
//! read again from the store. Wrong records from the store are an error. Invariant: records enter
//! the record cache only after their verification.

use std::ops::Range;

use bytes::Bytes;

use super::fetch::{self, RangePart, RangeReadState};
use super::ranges::{self, BufferRequest};
use crate::store::extents::extent::Extent;
use crate::store::index::index_read::{RecordSource, WRONG_RECORDS};
use crate::store::object::upload::intake::Uploads;
use crate::store::{StoreError, StoreErrorKind};
use uniffle_io::ReadBuffers;

impl RecordSource for Uploads {
    type Parts = Vec<RangePart>;

    fn cached(&self, extent: &Extent) -> Option<Bytes> {
        self.core.records.get(&self.shuffle.records_key(extent))
    }

    fn cache(&self, extent: &Extent, records: &[u8]) {
        // Readers of the data need the records next.
        if self.core.records.admits(records.len()) {
            self.core.records.insert(self.shuffle.records_key(extent), Bytes::copy_from_slice(records));
        }
    }

    fn add_part(parts: &mut Vec<RangePart>, extent: &Extent, from: u64, range: Range<usize>) {
        let offset = extent.records_range().start + from;
        fetch::push(parts, RangePart { segment: extent.object(), offset, range });
    }

    async fn read(
        &self,
        len: usize,
        buffers: &dyn ReadBuffers,
        parts: Vec<RangePart>,
        mut complete: impl FnMut(&mut [u8]) -> Result<(), Extent> + Send,
    ) -> Result<Bytes, StoreError> {
        let Self { core, shuffle } = self;
        let mut located = ranges::locate(core, shuffle, parts, &[]).await?;
        let request = BufferRequest { len, extra_bytes: Some(0), buffers };
        let mut room = located.room(core, &request).await;
        loop {
            room = located.read(core, shuffle, &request, room, &mut RangeReadState::default()).await?;
            let Err(extent) = complete(room.bytes(len)) else { return Ok(room.freeze(len)) };
            core.metrics.crc_mismatches.inc();
            // Chunks of the cache that were read earlier may contain records of the extent.
            ranges::discard(core, shuffle, extent.object(), &extent.records_range());
            let corrupt = || StoreError::corrupt(shuffle.segment_key(extent.object()), WRONG_RECORDS);
            located = located.of_store_instead(core).ok_or_else(corrupt)?;
        }
    }

    fn finish_chunk(&mut self, chunk: Option<Result<Bytes, StoreError>>) -> Result<Bytes, StoreError> {
        let chunk = chunk.ok_or_else(|| self.shuffle.error(StoreErrorKind::Corrupt))?;
        let chunk = chunk.map_err(|error| self.shuffle.for_reader(&self.core, error))?;
        self.core.metrics.read_index_bytes.inc_by(chunk.len() as u64);
        Ok(chunk)
    }

    fn has_room(&self, _: &Extent, len: usize) -> bool {
        self.core.store_reads.has_room(len)
    }

    fn may_have_losses(&self) -> bool {
        self.shuffle.has_missed()
    }
}
