//! Reads of a partition's index: the records of all its extents, verified, with offsets in the
//! partition's stream.
//!
//! A [`RecordSource`] has the records: index logs on disks, or objects. Lost extents have filler
//! records.

use std::fmt;
use std::ops::Range;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;

use super::records::{RecordCheck, filler};
use crate::store::extents::extent::{Extent, ExtentList, FILLER_BYTES};
use crate::store::tier::RemainingRead;
use crate::store::{ChunkRead, StoreError};
use uniffle_io::ReadBuffers;
use uniffle_io::buffers::READ_CHUNK_BYTES_MAX;
#[cfg(feature = "object")]
use uniffle_wire::index::records;
use uniffle_wire::index::{RECORD_BYTES, rebase};

/// Storage of records, for one read.
pub(in crate::store) trait RecordSource: fmt::Debug + Send + Sync {
    /// Locations of records that are read together.
    type Parts: Default + Send;

    /// Returns the records of an extent if they are cached.
    fn cached(&self, extent: &Extent) -> Option<Bytes>;

    /// Caches the verified records of an extent.
    fn cache(&self, extent: &Extent, records: &[u8]);

    /// Adds the records of an extent from byte `from` on, which fill `range` of the buffer.
    fn add_part(parts: &mut Self::Parts, extent: &Extent, from: u64, range: Range<usize>);

    /// Reads `parts` into a buffer of `len` bytes, and calls `complete` with it. `complete` returns
    /// the extent whose records are wrong, and may be called again with the same parts.
    ///
    /// # Errors
    /// The records cannot be read, or are corrupt.
    fn read(
        &self,
        len: usize,
        buffers: &dyn ReadBuffers,
        parts: Self::Parts,
        complete: impl FnMut(&mut [u8]) -> Result<(), Extent> + Send,
    ) -> impl Future<Output = Result<Bytes, StoreError>> + Send;

    /// Notes the result of a chunk, or of a chunk after a failed one (`None`). Returns it for the
    /// reader.
    ///
    /// # Errors
    /// The chunk has failed.
    fn finish_chunk(&mut self, chunk: Option<Result<Bytes, StoreError>>) -> Result<Bytes, StoreError>;

    /// Returns whether `len` bytes can be read from the extent's device now.
    fn has_room(&self, extent: &Extent, len: usize) -> bool;

    /// See [`ChunkRead::may_have_losses`].
    fn may_have_losses(&self) -> bool {
        false
    }
}

/// Text of errors about records with wrong bytes.
pub(in crate::store) const WRONG_RECORDS: &str = "index records are corrupt";

/// A read of the records of consecutive extents.
#[derive(Debug)]
pub(in crate::store) struct IndexRead<S> {
    source: S,
    extents: ExtentList,
    place: RecordsCursor,
    progress: RemainingRead,
}

/// Position of a read, with the verifier of the current extent.
#[derive(Debug, Clone, Default)]
struct RecordsCursor {
    /// Index of the current extent.
    at: usize,
    /// Bytes of the extent's records that were returned.
    done: u64,
    check: RecordCheck,
}

/// Origin of the records of a step.
enum RecordsOrigin {
    Cache(Bytes),
    Filler,
    Parts,
}

/// Records of one extent in a chunk.
struct RecordsStep {
    extent: Extent,
    /// Range in the chunk.
    range: Range<usize>,
    /// Offset in the records of the extent.
    from: u64,
    origin: RecordsOrigin,
}

const fn whole_records(bytes: usize) -> usize {
    bytes / RECORD_BYTES * RECORD_BYTES
}

impl<S: RecordSource> IndexRead<S> {
    /// Creates a read of the records of `blocks` blocks in `extents`, from index `first` on.
    pub(in crate::store) fn new(source: S, extents: ExtentList, first: usize, blocks: u64) -> Self {
        let place = RecordsCursor { at: first, ..RecordsCursor::default() };
        Self { source, extents, place, progress: RemainingRead::new(blocks * RECORD_BYTES as u64) }
    }

    /// Returns the steps of the next chunk, at most `max` bytes, and its length. Allocates no
    /// buffer: the devices are asked first.
    fn plan(&self, max: usize) -> (Vec<RecordsStep>, S::Parts, usize) {
        let (mut steps, mut parts, mut len, mut from) = (Vec::new(), S::Parts::default(), 0, self.place.done);
        for extent in self.extents.iter_from(self.place.at) {
            if len == max {
                break;
            }
            let origin = match extent.is_lost() {
                true => RecordsOrigin::Filler,
                false if from > 0 => RecordsOrigin::Parts,
                false => self.source.cached(extent).map_or(RecordsOrigin::Parts, RecordsOrigin::Cache),
            };
            let origin = match origin {
                // The next chunk has room for all these records.
                RecordsOrigin::Cache(all) if len > 0 && len + all.len() > max && all.len() <= max => break,
                RecordsOrigin::Cache(all) if len + all.len() > max => RecordsOrigin::Parts,
                origin => origin,
            };
            let rest = usize::try_from(extent.records_bytes() - from).unwrap_or(usize::MAX);
            let range = len..len + rest.min(max - len);
            if matches!(origin, RecordsOrigin::Parts) {
                S::add_part(&mut parts, extent, from, range.clone());
            }
            len = range.end;
            steps.push(RecordsStep { extent: *extent, range, from, origin });
            from = 0;
        }
        (steps, parts, len)
    }

    async fn read_chunk(&mut self, max: usize, buffers: &dyn ReadBuffers) -> Result<Bytes, StoreError> {
        let (steps, parts, len) = self.plan(max);
        let (source, place) = (&self.source, &mut self.place);
        source.read(len, buffers, parts, |bytes| place.complete(&steps, bytes, source)).await
    }
}

impl RecordsCursor {
    /// Verifies and completes the records of a chunk, and advances. Returns the extent whose
    /// records are wrong.
    fn complete(
        &mut self,
        steps: &[RecordsStep],
        bytes: &mut [u8],
        source: &impl RecordSource,
    ) -> Result<(), Extent> {
        let mut place = self.clone();
        for RecordsStep { extent, range, from, origin } in steps {
            let bytes = bytes.get_mut(range.clone()).unwrap_or_default();
            place.done = from + bytes.len() as u64;
            let is_end = place.done >= extent.records_bytes();
            match origin {
                RecordsOrigin::Cache(records) => bytes.copy_from_slice(records),
                RecordsOrigin::Filler => fill(bytes, extent, *from),
                RecordsOrigin::Parts => {
                    let mut is_sound = place.check.accept(bytes);
                    if is_end {
                        let check = std::mem::take(&mut place.check);
                        is_sound = check.matches(extent.length, extent.records_crc);
                    }
                    if !is_sound {
                        return Err(*extent);
                    }
                    if is_end && *from == 0 {
                        source.cache(extent, bytes);
                    }
                }
            }
            rebase(bytes, extent.base);
            if is_end {
                (place.at, place.done) = (place.at + 1, 0);
            }
        }
        *self = place;
        Ok(())
    }
}

/// Writes the filler records of a lost extent, from byte `from` of its records on.
fn fill(bytes: &mut [u8], gap: &Extent, from: u64) {
    for (bytes, number) in bytes.chunks_exact_mut(RECORD_BYTES).zip(from / RECORD_BYTES as u64..) {
        let offset = number * FILLER_BYTES;
        let length = (gap.length - offset).min(FILLER_BYTES);
        bytes.copy_from_slice(
            &filler(offset.cast_signed(), i32::try_from(length).unwrap_or(i32::MAX)).encode(),
        );
    }
}

/// Calls `visit` with the ids of all blocks of an index.
#[cfg(feature = "object")]
pub(in crate::store) async fn visit_ids(
    index: &mut dyn ChunkRead,
    visit: &mut (dyn FnMut(u64) + Send),
) -> Result<(), StoreError> {
    while let Some(chunk) = index.next_chunk(&uniffle_io::buffers::HeapBuffers).await? {
        records(&chunk).for_each(|record| visit(record.block_id.unsigned_abs()));
    }
    Ok(())
}

impl<S: RecordSource> ChunkRead for IndexRead<S> {
    fn next_chunk<'a>(
        &'a mut self,
        buffers: &'a dyn ReadBuffers,
    ) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        let read = async move {
            let chunk = match self.progress.begin(whole_records(buffers.chunk_bytes())) {
                Some(0) => return Ok(None),
                Some(len) => Some(self.read_chunk(len, buffers).await),
                None => None,
            };
            let chunk = self.source.finish_chunk(chunk)?;
            self.progress.end(chunk.len());
            Ok(Some(chunk))
        };
        read.boxed()
    }

    /// Returns 0 also if the device of the next chunk has no capacity.
    fn next_room(&self) -> usize {
        let room = self.progress.next_len(whole_records(READ_CHUNK_BYTES_MAX));
        let next = self.extents.get(self.place.at).filter(|_| room > 0);
        if next.is_some_and(|extent| self.source.has_room(extent, room)) { room } else { 0 }
    }

    fn may_have_losses(&self) -> bool {
        self.source.may_have_losses()
    }
}
