//! The index of a partition: the records of all its extents, with offsets into its stream, checked before they leave.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;

use super::core::Core;
use super::fetch::{self, Part};
use super::shuffle::Shuffle;
use super::streams::{Extent, Stream};
use crate::tiers::{ChunkRead, StoreError, StoreErrorKind};
use uniffle_io::ReadBuffers;
use uniffle_io::buffers::READ_CHUNK_BYTES_MAX;
use uniffle_wire::index::{RECORD_BYTES, rebase};

/// See the module.
pub(super) struct IndexRead {
    core: Arc<Core>,
    shuffle: Arc<Shuffle>,
    stream: Stream,
    /// Of its extents the one that is read.
    at: usize,
    /// Bytes of its records that were given.
    done: u64,
    crc: crc32fast::Hasher,
    left: u64,
    failed: bool,
}

impl fmt::Debug for IndexRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("IndexRead").field(&self.shuffle.name.key).field(&self.left).finish()
    }
}

const fn whole_records(bytes: usize) -> usize {
    bytes / RECORD_BYTES * RECORD_BYTES
}

/// Records of an extent that are in a chunk.
struct Piece {
    extent: Extent,
    range: std::ops::Range<usize>,
    /// Where in its records they begin.
    from: u64,
}

impl IndexRead {
    pub(super) fn new(core: &Arc<Core>, shuffle: Arc<Shuffle>, stream: Stream) -> Self {
        let left = stream.blocks * RECORD_BYTES as u64;
        let (core, crc) = (Arc::clone(core), crc32fast::Hasher::new());
        Self { core, shuffle, stream, at: 0, done: 0, crc, left, failed: false }
    }

    /// Bytes of all records that are left.
    pub(super) fn left(&self) -> u64 {
        self.left
    }

    /// What the next `len` bytes consist of.
    fn plan(&self, len: usize) -> Vec<Piece> {
        let (mut pieces, mut filled, mut from) = (Vec::new(), 0, self.done);
        for extent in self.stream.extents.iter().skip(self.at) {
            if filled == len {
                break;
            }
            let rest = usize::try_from(extent.records_bytes() - from).unwrap_or(usize::MAX);
            let range = filled..filled + rest.min(len - filled);
            filled = range.end;
            pieces.push(Piece { extent: *extent, range, from });
            from = 0;
        }
        pieces
    }

    async fn read_chunk(&mut self, len: usize, buffers: &dyn ReadBuffers) -> Result<Bytes, StoreError> {
        let pieces = self.plan(len);
        let mut buffer = buffers.acquire(len).await;
        let bytes = (*buffer).as_mut().get_mut(..len).unwrap_or_default();
        let mut parts = Vec::new();
        for Piece { extent, range, from } in &pieces {
            let cached = self.core.records.find(&self.shuffle.records_key(extent));
            let start = usize::try_from(*from).unwrap_or(usize::MAX);
            let cached = cached.as_ref().and_then(|it| it.get(start..start.checked_add(range.len())?));
            match (cached, bytes.get_mut(range.clone())) {
                (Some(cached), Some(room)) => room.copy_from_slice(cached),
                _ => {
                    let (segment, offset) = (extent.segment, extent.records + from);
                    fetch::push(&mut parts, Part { segment, offset, range: range.clone() });
                }
            }
        }
        fetch::fill(&self.core, |number| self.shuffle.segment_key(number), &parts, bytes).await?;
        for piece in pieces {
            let bytes = bytes.get_mut(piece.range.clone()).unwrap_or_default();
            self.check(&piece, bytes)?;
            rebase(bytes, piece.extent.base);
        }
        Ok(buffer.freeze(len))
    }

    /// Checks the next records, as they stand in the segment.
    fn check(&mut self, piece: &Piece, bytes: &[u8]) -> Result<(), StoreError> {
        self.crc.update(bytes);
        self.done = piece.from + bytes.len() as u64;
        if self.done < piece.extent.records_bytes() {
            return Ok(());
        }
        let crc = std::mem::take(&mut self.crc).finalize();
        (self.at, self.done) = (self.at + 1, 0);
        if crc != piece.extent.records_crc {
            let key = self.shuffle.segment_key(piece.extent.segment);
            return Err(StoreError::corrupt(key, "checksum of a partition's index records does not fit"));
        }
        // What was read whole is what a reader of the data needs next.
        if piece.from == 0 && self.core.records.takes(bytes.len()) {
            self.core.records.keep(self.shuffle.records_key(&piece.extent), Bytes::copy_from_slice(bytes));
        }
        Ok(())
    }
}

impl ChunkRead for IndexRead {
    fn next_chunk<'a>(
        &'a mut self,
        buffers: &'a dyn ReadBuffers,
    ) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        let read = async move {
            if self.failed {
                return Err(self.shuffle.error(StoreErrorKind::Corrupt));
            }
            let max = whole_records(buffers.chunk_bytes());
            let len = usize::try_from(self.left).unwrap_or(max).min(max);
            if len == 0 {
                return Ok(None);
            }
            self.failed = true; // Until this chunk is whole: also when the caller gives up in between.
            let chunk = self.read_chunk(len, buffers).await;
            let chunk = chunk.map_err(|error| {
                let error = self.core.condition.for_reader(error, self.core.settings.expected_back);
                self.shuffle.require_present().err().unwrap_or(error)
            })?;
            self.failed = false;
            self.left -= len as u64;
            self.core.metrics.read_index_bytes.inc_by(len as u64);
            Ok(Some(chunk))
        };
        read.boxed()
    }

    fn next_room(&self) -> usize {
        usize::try_from(self.left).unwrap_or(usize::MAX).min(whole_records(READ_CHUNK_BYTES_MAX))
    }
}
