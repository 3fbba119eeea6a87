//! Reads of object ranges, from chunks of the read cache or from the store.
//!
//! A read first waits for its chunks to arrive in the cache, and then for its permit together with
//! its memory.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::fetch::{self, RangePart, RangeReadState};
use crate::store::StoreError;
use crate::store::object::cache::{self, CHUNK_BYTES, CachedPart, ChunkKey};
use crate::store::object::core::ObjectCore;
use crate::store::object::shuffle::ObjectShuffle;
use uniffle_base::budget::{Budget, Charge};
use uniffle_io::buffers::HeapBuffers;
use uniffle_io::{ReadBuffer, ReadBuffers, ReadPermit, ShareParts};

/// Maximum distance of prefetching ahead of a reader.
pub(in crate::store::object) const AHEAD_BYTES: u64 = 8 << 20;

/// Parts of objects that are read together, with their source.
#[derive(Debug)]
pub(super) struct Located {
    parts: Vec<RangePart>,
    cached: Vec<CachedPart>,
    /// Parts that are not in the cache.
    stored: Vec<RangePart>,
}

/// Memory requirements of a read.
pub(in crate::store) struct BufferRequest<'a> {
    pub(in crate::store) len: usize,
    /// Memory besides the buffer, or `None` if a waiting read already holds the permit for this
    /// one.
    pub(super) extra_bytes: Option<usize>,
    pub(in crate::store::object) buffers: &'a dyn ReadBuffers,
}

/// The buffer of a read, with the charge for other memory and the permit.
pub(in crate::store) struct ReadRoom {
    buffer: Box<dyn ReadBuffer>,
    /// Released before the permit.
    _extra: Charge,
    _permit: ReadPermit,
}

impl ReadRoom {
    /// Charges `extra_bytes` to `heap`, even beyond its capacity: the permit accounts for them.
    /// Must not run under the lock that grants permits, because the heap may return memory to the
    /// system.
    fn new(buffer: Box<dyn ReadBuffer>, _permit: ReadPermit, heap: &Budget, extra_bytes: usize) -> Self {
        Self { buffer, _extra: heap.charge_unchecked(extra_bytes as u64), _permit }
    }

    /// Returns the first `len` bytes.
    pub(in crate::store) fn bytes(&mut self, len: usize) -> &mut [u8] {
        (*self.buffer).as_mut().get_mut(..len).unwrap_or_default()
    }

    /// Converts the first `len` bytes into an immutable buffer.
    pub(in crate::store::object) fn freeze(self, len: usize) -> Bytes {
        self.buffer.freeze(len)
    }
}

/// A part of an object within one chunk.
struct ChunkPiece {
    key: ChunkKey,
    part: RangePart,
}

fn pieces<'a>(shuffle: &'a ObjectShuffle, parts: &'a [RangePart]) -> impl Iterator<Item = ChunkPiece> + 'a {
    let incarnation = shuffle.name.incarnation;
    parts.iter().flat_map(move |part| {
        let mut part = part.clone();
        std::iter::from_fn(move || {
            if part.range.is_empty() {
                return None;
            }
            let number = u32::try_from(part.offset / CHUNK_BYTES).unwrap_or(u32::MAX);
            let remaining = usize::try_from(CHUNK_BYTES - part.offset % CHUNK_BYTES).unwrap_or(usize::MAX);
            let head = part.split_to(remaining.min(part.range.len()));
            Some(ChunkPiece { key: ChunkKey { incarnation, segment: part.segment, number }, part: head })
        })
    })
}

/// Locates `parts`. Also waits until their chunks, and those of `others`, which are read soon, have
/// arrived in the cache.
///
/// # Errors
/// The store fails.
pub(super) async fn locate(
    core: &Arc<ObjectCore>,
    shuffle: &Arc<ObjectShuffle>,
    parts: Vec<RangePart>,
    others: &[RangePart],
) -> Result<Located, StoreError> {
    if core.cache.is_none() {
        return Ok(Located::stored(parts));
    }
    let mut wanted: BTreeMap<ChunkKey, u64> = BTreeMap::new();
    for piece in pieces(shuffle, &parts).chain(pieces(shuffle, others)) {
        *wanted.entry(piece.key).or_default() += piece.part.range.len() as u64;
    }
    // Starts all fetches before it waits for the first.
    let begun: Vec<_> =
        wanted.into_iter().map(|(key, bytes)| (key, cache::begin_fetch(core, shuffle, key, bytes))).collect();
    let mut ready = BTreeMap::new();
    for (key, pinned) in begun {
        let Some(pinned) = pinned else { continue };
        if let Some(bytes) = pinned.ready(&shuffle.segment_key(key.segment)).await? {
            ready.insert(key, (Arc::new(pinned), bytes));
        }
    }
    let (mut cached, mut stored) = (Vec::new(), Vec::new());
    for ChunkPiece { key, part } in pieces(shuffle, &parts) {
        let offset = part.offset - key.start();
        let end = offset + part.range.len() as u64;
        match ready.get(&key).filter(|(_, bytes)| end <= *bytes) {
            Some((pinned, _)) => {
                cached.push(CachedPart { pinned: Arc::clone(pinned), offset, range: part.range });
            }
            None => fetch::push(&mut stored, part),
        }
    }
    Ok(Located { parts, cached, stored })
}

/// Starts to fetch the chunks of `parts` into the cache while a fetch permit is free, up to
/// [`AHEAD_BYTES`]. Never waits.
pub(in crate::store::object) fn begin_ahead(
    core: &Arc<ObjectCore>,
    shuffle: &Arc<ObjectShuffle>,
    parts: &[RangePart],
) {
    let Some(cache) = &core.cache else { return };
    let (mut bytes, mut begun) = (0, None);
    for piece in pieces(shuffle, parts) {
        bytes += piece.part.range.len() as u64;
        if bytes > AHEAD_BYTES || !cache.has_fetch_permit() {
            break;
        }
        if begun.replace(piece.key) != Some(piece.key) {
            cache::begin_fetch(core, shuffle, piece.key, piece.part.range.len() as u64);
        }
    }
}

impl Located {
    /// Locates all parts in the store, whatever is in the cache.
    pub(in crate::store) fn stored(parts: Vec<RangePart>) -> Self {
        Self { stored: parts.clone(), cached: Vec::new(), parts }
    }

    /// Waits for a buffer together with a part of the source's share. Waits for the buffer alone if
    /// a waiting read already holds the permit.
    pub(in crate::store) async fn room(&self, core: &ObjectCore, request: &BufferRequest<'_>) -> ReadRoom {
        let Some(extra_bytes) = request.extra_bytes else {
            let buffer = request.buffers.acquire(request.len).await;
            return ReadRoom::new(buffer, Box::new(()), &core.extents, 0);
        };
        let share = if self.stored.is_empty() { &core.cache_reads } else { &core.store_reads };
        let parts = ShareParts::of([share], request.len + extra_bytes);
        let (buffer, permit) = request.buffers.acquire_with(request.len, parts).await;
        ReadRoom::new(buffer, permit, &core.extents, extra_bytes)
    }

    /// Reads the parts into a buffer.
    ///
    /// # Errors
    /// The store fails. Failures of the cache are not errors: the store is read instead.
    pub(in crate::store) async fn read(
        &self,
        core: &ObjectCore,
        shuffle: &ObjectShuffle,
        request: &BufferRequest<'_>,
        mut room: ReadRoom,
        state: &mut RangeReadState,
    ) -> Result<ReadRoom, StoreError> {
        let key_of = |number| shuffle.segment_key(number);
        let mut stored = &self.stored;
        if let Some(cache) = core.cache.as_ref().filter(|_| !self.cached.is_empty()) {
            let ReadRoom { buffer, _extra, _permit } = room;
            room = match cache.read(&core.metrics, buffer, &self.cached).await {
                Ok(buffer) => ReadRoom { buffer, _extra, _permit },
                Err(_) => {
                    // The cache has logged the error. A hung disk may still use the buffer.
                    stored = &self.parts;
                    drop((_extra, _permit));
                    self.of_store().room(core, request).await
                }
            };
        }
        fetch::fill(core, key_of, stored, room.bytes(request.len), state).await?;
        Ok(room)
    }

    /// Returns the same parts, all to be read from the store.
    pub(super) fn of_store(&self) -> Self {
        Self::stored(self.parts.clone())
    }

    /// Drops the chunks of the parts from the cache after they were read with wrong bytes. Returns
    /// the same parts, all to be read from the store, or `None` if none came from the cache.
    pub(super) fn of_store_instead(&self, core: &ObjectCore) -> Option<Self> {
        let cache = core.cache.as_ref().filter(|_| !self.cached.is_empty())?;
        cache.discard_corrupt(&core.metrics, &self.cached);
        Some(self.of_store())
    }
}

/// Drops the chunks of a segment's range from the cache. The next reader fetches them again.
pub(in crate::store::object) fn discard(
    core: &ObjectCore,
    shuffle: &ObjectShuffle,
    segment: u32,
    range: &Range<u64>,
) {
    let Some(cache) = &core.cache else { return };
    let bytes = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
    let parts = [RangePart { segment, offset: range.start, range: 0..bytes }];
    cache.discard(&core.metrics, pieces(shuffle, &parts).map(|piece| piece.key));
}

/// Reads a small range of a segment into a buffer of its own, for a read that already holds its
/// permit.
///
/// # Errors
/// The store fails.
pub(in crate::store) async fn read(
    core: &Arc<ObjectCore>,
    shuffle: &Arc<ObjectShuffle>,
    segment: u32,
    range: Range<u64>,
) -> Result<Bytes, StoreError> {
    let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
    let part = RangePart { segment, offset: range.start, range: 0..len };
    let located = locate(core, shuffle, vec![part], &[]).await?;
    let request = BufferRequest { len, extra_bytes: None, buffers: &HeapBuffers };
    let room = located.room(core, &request).await;
    let room = located.read(core, shuffle, &request, room, &mut RangeReadState::default()).await?;
    Ok(room.freeze(len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_beside_a_buffer_is_charged_until_it_is_moved() {
        let heap = Budget::new(1 << 10);
        let room = ReadRoom::new(Box::new(vec![7; 100]), Box::new(()), &heap, 124 << 10);
        assert_eq!(heap.used(), 124 << 10);
        assert_eq!((room.freeze(10), heap.used()), (Bytes::from_static(&[7; 10]), 0));
    }
}
