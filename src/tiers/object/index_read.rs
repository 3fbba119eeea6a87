//! The index of a partition: the records of all its extents, with offsets into its stream, checked before they leave.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;

use super::answer::Answer;
use super::core::Core;
use super::fetch::{self, Ahead, Part};
use super::reads::{self, Asked, Located};
use super::shuffle::Shuffle;
use super::verify::WRONG_RECORDS;
use crate::tiers::extent::{Extent, ExtentList};
use crate::tiers::records::RecordCheck;
use crate::tiers::{ChunkRead, StoreError};
use uniffle_io::ReadBuffers;
use uniffle_io::buffers::READ_CHUNK_BYTES_MAX;
use uniffle_wire::index::{RECORD_BYTES, rebase};

/// Goes from extent to extent, each with its checksum.
pub(super) struct IndexRead {
    answer: Answer,
    extents: ExtentList,
    place: Place,
}

/// How far the records are read and checked.
#[derive(Clone, Default)]
struct Place {
    /// Of the extents the one that is read.
    at: usize,
    /// Bytes of its records that were given.
    done: u64,
    check: RecordCheck,
}

impl fmt::Debug for IndexRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("IndexRead").field(&self.answer.shuffle.name.key).field(&self.left()).finish()
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
    /// Creates a read of the records of `blocks` blocks in `extents`, from index `at` on.
    pub(super) fn new(
        core: &Arc<Core>,
        shuffle: Arc<Shuffle>,
        (extents, at): (ExtentList, usize),
        blocks: u64,
    ) -> Self {
        let left = blocks * RECORD_BYTES as u64;
        Self { answer: Answer::new(core, shuffle, left), extents, place: Place { at, ..Place::default() } }
    }

    /// Bytes of all records that are left.
    pub(super) fn left(&self) -> u64 {
        self.answer.left()
    }

    /// What the next `len` bytes consist of.
    fn plan(&self, len: usize) -> Vec<Piece> {
        let (mut pieces, mut filled, mut from) = (Vec::new(), 0, self.place.done);
        for extent in self.extents.iter_from(self.place.at) {
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
        let (core, shuffle) = (Arc::clone(&self.answer.core), Arc::clone(&self.answer.shuffle));
        let pieces = self.plan(len);
        let (mut in_memory, mut parts) = (Vec::new(), Vec::new());
        for Piece { extent, range, from } in &pieces {
            let cached = core.records.find(&shuffle.records_key(extent));
            let start = usize::try_from(*from).unwrap_or(usize::MAX);
            let cached = cached.and_then(|it| {
                let end = start.checked_add(range.len()).filter(|end| *end <= it.len())?;
                Some(it.slice(start..end))
            });
            match cached {
                Some(cached) => in_memory.push((range.clone(), cached)),
                None => {
                    let (segment, offset) = (extent.object(), extent.records_range().start + from);
                    fetch::push(&mut parts, Part { segment, offset, range: range.clone() });
                }
            }
        }
        let mut located = reads::locate(&core, &shuffle, parts, &[]).await?;
        let asked = Asked { len, beside: Some(0), buffers };
        let mut room = located.room(&core, &shuffle, &asked).await;
        loop {
            room = located.read(&core, &shuffle, (&asked, room), &mut Ahead::default()).await?;
            let bytes = room.bytes(len);
            for (range, records) in &in_memory {
                bytes.get_mut(range.clone()).unwrap_or_default().copy_from_slice(records);
            }
            match self.check_all(&pieces, bytes) {
                Ok(()) => return Ok(room.freeze(len)),
                Err(error) => located = instead(&core, &located).ok_or(error)?,
            }
        }
    }

    /// Checks the records of a chunk and gives them their offsets in the stream; after an error it is where it was.
    fn check_all(&mut self, pieces: &[Piece], bytes: &mut [u8]) -> Result<(), StoreError> {
        let before = self.place.clone();
        for piece in pieces {
            let bytes = bytes.get_mut(piece.range.clone()).unwrap_or_default();
            if let Err(error) = self.check(piece, bytes) {
                self.place = before;
                return Err(error);
            }
            rebase(bytes, piece.extent.base);
        }
        Ok(())
    }

    /// Checks the next records, as they stand in the segment.
    fn check(&mut self, piece: &Piece, bytes: &[u8]) -> Result<(), StoreError> {
        let Answer { core, shuffle, .. } = &self.answer;
        let place = &mut self.place;
        let mut is_sound = place.check.accept(bytes);
        place.done = piece.from + bytes.len() as u64;
        let is_end = place.done >= piece.extent.records_bytes();
        if is_end {
            let check = std::mem::take(&mut place.check);
            is_sound = check.matches(piece.extent.length, piece.extent.records_crc);
            (place.at, place.done) = (place.at + 1, 0);
        }
        if !is_sound {
            // Also those that were given before this chunk.
            reads::discard(core, shuffle, piece.extent.object(), &piece.extent.records_range());
            return Err(StoreError::corrupt(shuffle.segment_key(piece.extent.object()), WRONG_RECORDS));
        }
        // What was read whole is what a reader of the data needs next.
        if is_end && piece.from == 0 && core.records.takes(bytes.len()) {
            core.records.keep(shuffle.records_key(&piece.extent), Bytes::copy_from_slice(bytes));
        }
        Ok(())
    }
}

/// Of records that are not what was written, what the cache had is read of the store.
fn instead(core: &Core, located: &Located) -> Option<Located> {
    core.metrics.crc_mismatches.inc();
    located.of_store_instead(core)
}

impl ChunkRead for IndexRead {
    fn next_chunk<'a>(
        &'a mut self,
        buffers: &'a dyn ReadBuffers,
    ) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        let read = async move {
            let len = self.answer.begin(whole_records(buffers.chunk_bytes()))?;
            if len == 0 {
                return Ok(None);
            }
            let chunk = self.read_chunk(len, buffers).await;
            let chunk = self.answer.end(chunk)?;
            self.answer.core.metrics.read_index_bytes.inc_by(len as u64);
            Ok(chunk)
        };
        read.boxed()
    }

    fn next_room(&self) -> usize {
        let room = self.answer.next_len(whole_records(READ_CHUNK_BYTES_MAX));
        if self.answer.core.turns.has_room(room) { room } else { 0 }
    }
}
