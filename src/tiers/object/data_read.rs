//! A range of a partition's stream, in chunks of the reader's memory, each asked for when there is room for it.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;

use super::core::Core;
use super::fetch::{self, Part};
use super::shuffle::Shuffle;
use super::streams::Stream;
use super::verify::Verifier;
use crate::tiers::{ChunkRead, StoreError, StoreErrorKind};
use uniffle_io::ReadBuffers;
use uniffle_io::buffers::READ_CHUNK_BYTES_MAX;

/// See the module.
pub(super) struct DataRead {
    core: Arc<Core>,
    shuffle: Arc<Shuffle>,
    stream: Stream,
    /// What is left.
    range: Range<u64>,
    verifier: Verifier,
    failed: bool,
}

impl fmt::Debug for DataRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DataRead").field(&self.shuffle.name.key).field(&self.range).finish()
    }
}

impl DataRead {
    /// # Errors
    /// `InvalidRange` when the range is empty or not wholly published.
    pub(super) fn new(
        core: &Arc<Core>,
        shuffle: Arc<Shuffle>,
        stream: Stream,
        (offset, length): (u64, u32),
    ) -> Result<Self, StoreError> {
        let end = offset.checked_add(u64::from(length)).filter(|end| length > 0 && *end <= stream.bytes);
        let Some(end) = end else {
            shuffle.require_present()?;
            return Err(shuffle.error(StoreErrorKind::InvalidRange));
        };
        let range = offset..end;
        let verifier = Verifier::new(stream.touched(offset, end).copied().collect(), range.clone());
        Ok(Self { core: Arc::clone(core), shuffle, stream, range, verifier, failed: false })
    }

    fn left(&self) -> usize {
        usize::try_from(self.range.end - self.range.start).unwrap_or(usize::MAX)
    }

    /// Where the next `len` bytes are.
    fn plan(&self, len: usize) -> Vec<Part> {
        let (start, end) = (self.range.start, self.range.start + len as u64);
        let (mut parts, mut filled) = (Vec::new(), 0);
        for extent in self.stream.touched(start, end) {
            let from = start.max(extent.base);
            let bytes = usize::try_from(end.min(extent.end()) - from).unwrap_or(usize::MAX);
            let range = filled..filled + bytes;
            filled = range.end;
            let offset = extent.offset + (from - extent.base);
            fetch::push(&mut parts, Part { segment: extent.segment, offset, range });
        }
        parts
    }

    async fn read_chunk(&mut self, len: usize, buffers: &dyn ReadBuffers) -> Result<Bytes, StoreError> {
        let (core, shuffle) = (&self.core, &self.shuffle);
        self.verifier.prepare(core, shuffle, len as u64).await?;
        let parts = self.plan(len);
        let mut buffer = buffers.acquire(len).await;
        for is_last in [false, true] {
            let bytes = (*buffer).as_mut().get_mut(..len).unwrap_or_default();
            fetch::fill(core, |number| shuffle.segment_key(number), &parts, bytes).await?;
            let mut verifier = self.verifier.clone();
            let Some(block) = verifier.check(bytes) else {
                self.verifier = verifier;
                break;
            };
            core.metrics.crc_mismatches.inc();
            let segment = self.stream.touched(block.start, block.end).next().map_or(0, |it| it.segment);
            let key = shuffle.segment_key(segment);
            tracing::warn!(key, ?block, "a block was read with other bytes than were written");
            if is_last {
                return Err(StoreError::corrupt(key, "a block has other bytes than were written, twice"));
            }
        }
        Ok(buffer.freeze(len))
    }
}

impl ChunkRead for DataRead {
    fn next_chunk<'a>(
        &'a mut self,
        buffers: &'a dyn ReadBuffers,
    ) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        let read = async move {
            if self.failed {
                return Err(self.shuffle.error(StoreErrorKind::Corrupt));
            }
            let len = self.left().min(buffers.chunk_bytes());
            if len == 0 {
                return Ok(None);
            }
            self.failed = true; // See IndexRead.
            let chunk = self.read_chunk(len, buffers).await;
            let chunk = chunk.map_err(|error| {
                let error = self.core.condition.for_reader(error, self.core.settings.expected_back);
                self.shuffle.require_present().err().unwrap_or(error)
            })?;
            self.failed = false;
            self.range.start += len as u64;
            self.core.metrics.read_bytes.inc_by(len as u64);
            Ok(Some(chunk))
        };
        read.boxed()
    }

    fn next_room(&self) -> usize {
        self.left().min(READ_CHUNK_BYTES_MAX)
    }
}
