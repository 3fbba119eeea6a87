//! Reads a range of a partition's stream from objects, in chunks.
//!
//! The checksum of a block that is completely in the range is verified before the chunk with its
//! last byte is returned, for up to 65,536 blocks per chunk. A block with wrong bytes is read
//! again: first from the store instead of the cache, then once more from the store. A second
//! mismatch from the store is an error.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;

use super::checksums::ObjectChecksums;
use super::fetch::{self, RangePart, RangeReadState};
use super::ranges::{self, BufferRequest, Located};
use crate::store::extents::extent::{Extent, ExtentList};
use crate::store::extents::extent_list::InStream as _;
use crate::store::index::block_verifier::BlockCheck;
use crate::store::object::core::ObjectCore;
use crate::store::object::shuffle::ObjectShuffle;
use crate::store::tier::RemainingRead;
use crate::store::{ChunkRead, StoreError, StoreErrorKind};
use uniffle_io::ReadBuffers;
use uniffle_io::buffers::READ_CHUNK_BYTES_MAX;

/// Maximum number of bytes requested beyond a chunk, without a cache, if they follow it in the same
/// object. Without them, each chunk would be a request of its own.
const BEYOND_CHUNK_BYTES_MAX: u64 = 16 << 20;

/// A read of a range. Each chunk continues where the previous one ended.
pub(in crate::store::object) struct ObjectDataRead {
    core: Arc<ObjectCore>,
    shuffle: Arc<ObjectShuffle>,
    progress: RemainingRead,
    /// Extents that cover the range.
    extents: Arc<ExtentList>,
    /// End of the range in the stream.
    end: u64,
    checksums: ObjectChecksums,
    state: RangeReadState,
}

impl fmt::Debug for ObjectDataRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DataRead").field(&self.shuffle.name.key).field(&self.range()).finish()
    }
}

/// Returns the parts of objects that have a range of a stream, in the order of a buffer that takes
/// it. Extents on disks are left out.
pub(in crate::store::object) fn plan(extents: &ExtentList, range: &Range<u64>) -> Vec<RangePart> {
    let (mut parts, mut filled) = (Vec::new(), 0);
    for extent in extents.touched(range.start, range.end).filter(|extent| extent.is_in_object()) {
        let from = range.start.max(extent.base);
        let bytes = usize::try_from(range.end.min(extent.end()) - from).unwrap_or(usize::MAX);
        let place = filled..filled + bytes;
        filled = place.end;
        let offset = extent.object_offset() + (from - extent.base);
        fetch::push(&mut parts, RangePart { segment: extent.object(), offset, range: place });
    }
    parts
}

/// Returns how many bytes of the stream, from `range.start` on, directly follow `last` in its
/// object. Bytes beyond `range.end` do not count.
fn adjacent_bytes(last: &RangePart, extents: &ExtentList, range: &Range<u64>) -> u64 {
    let mut bytes = 0;
    for extent in extents.touched(range.start, range.end) {
        let from = range.start.max(extent.base);
        let place = (extent.object(), extent.object_offset() + (from - extent.base));
        if !extent.is_in_object() || place != (last.segment, last.end() + bytes) {
            break;
        }
        bytes += range.end.min(extent.end()) - from;
    }
    bytes
}

impl ObjectDataRead {
    /// Creates a read of a range that `extents` cover, all of them in objects.
    pub(in crate::store) fn new(
        core: &Arc<ObjectCore>,
        shuffle: Arc<ObjectShuffle>,
        extents: ExtentList,
        range: Range<u64>,
    ) -> Self {
        let extents = Arc::new(extents);
        Self {
            core: Arc::clone(core),
            shuffle,
            progress: RemainingRead::new(range.end - range.start),
            end: range.end,
            checksums: ObjectChecksums::new(Arc::clone(&extents), range),
            extents,
            state: RangeReadState::default(),
        }
    }

    /// Returns the part of the range that was not read yet.
    fn range(&self) -> Range<u64> {
        self.end - self.progress.remaining()..self.end
    }

    async fn read_chunk(&mut self, len: usize, buffers: &dyn ReadBuffers) -> Result<Bytes, StoreError> {
        let (core, shuffle) = (Arc::clone(&self.core), Arc::clone(&self.shuffle));
        let Range { start, end } = self.range();
        let until = start + len as u64;
        let records = match core.cache.is_some() {
            true => self.checksums.missing_records(&core, &shuffle, until),
            false => Vec::new(),
        };
        let parts = plan(&self.extents, &(start..until));
        let next = |bytes| until..end.min(until.saturating_add(bytes));
        self.state.more = match parts.last().filter(|_| core.cache.is_none()) {
            Some(last) => adjacent_bytes(last, &self.extents, &next(BEYOND_CHUNK_BYTES_MAX)),
            // The cache stores whole chunks, so nothing is requested beyond a chunk.
            None => 0,
        };
        let mut located = ranges::locate(&core, &shuffle, parts, &records).await?;
        if core.cache.is_some() && until < end {
            ranges::begin_ahead(&core, &shuffle, &plan(&self.extents, &next(ranges::AHEAD_BYTES)));
        }
        let request = BufferRequest { len, extra_bytes: Some(self.checksums.beside_bytes(until)), buffers };
        let mut room = located.room(&core, &request).await;
        self.checksums.prepare(&core, &shuffle, until).await?;
        loop {
            let mark = self.checksums.mark();
            room = located.read(&core, &shuffle, &request, room, &mut self.state).await?;
            let Some(block) = self.checksums.check(room.bytes(len)) else { return Ok(room.freeze(len)) };
            self.state.forget();
            self.checksums.rewind(mark);
            located = self.reread_source(&located, &block)?;
        }
    }

    /// Decides from where a block with wrong bytes is read again.
    ///
    /// # Errors
    /// The store has returned wrong bytes for the second time.
    fn reread_source(&mut self, located: &Located, block: &BlockCheck) -> Result<Located, StoreError> {
        let Self { core, shuffle, .. } = self;
        core.metrics.crc_mismatches.inc();
        let Range { start, end } = block.place;
        let extent = self.extents.touched(start, end).next();
        let key = shuffle.segment_key(extent.map_or(0, Extent::object));
        tracing::warn!(key, start, end, "block does not match its checksum; reading it again");
        if let Some(of_store) = located.of_store_instead(core) {
            return Ok(of_store);
        }
        match self.checksums.count_mismatch() {
            1 => Ok(located.of_store()),
            _ => Err(StoreError::corrupt(key, "a block has wrong bytes, confirmed by a second read")),
        }
    }
}

impl ChunkRead for ObjectDataRead {
    fn next_chunk<'a>(
        &'a mut self,
        buffers: &'a dyn ReadBuffers,
    ) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        let read = async move {
            let failed = || self.shuffle.error(StoreErrorKind::Corrupt);
            let len = self.progress.begin(buffers.chunk_bytes()).ok_or_else(failed)?;
            if len == 0 {
                return Ok(None);
            }
            let chunk = self.read_chunk(len, buffers).await;
            let chunk = chunk.map_err(|error| self.shuffle.for_reader(&self.core, error))?;
            self.progress.end(len);
            self.core.metrics.read_bytes.inc_by(len as u64);
            Ok(Some(chunk))
        };
        read.boxed()
    }

    fn next_room(&self) -> usize {
        let room = self.progress.next_len(READ_CHUNK_BYTES_MAX);
        if self.core.store_reads.has_room(room) { room } else { 0 }
    }

    fn may_have_losses(&self) -> bool {
        self.shuffle.has_missed()
    }
}
