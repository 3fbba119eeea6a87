//! The objects of a registration: writes of batches, offloads from local disks, and reads.
//!
//! A write adds its batch to the queue of the registration. If no task makes segments from the
//! queue, the write starts one. An offload makes its segment in the calling task. The local store
//! has the extents and streams of all data, also without disks.

use std::collections::BTreeSet;
use std::future::ready;
use std::ops::Range;
use std::sync::Arc;

use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use object_store::{ObjectStore as _, ObjectStoreExt as _};
use tokio::sync::oneshot;

use super::segment::{SegmentBatch, SegmentHeap, UploadJob, UploadWaiter, segment_heap_bytes};
use super::uploader::{self, ExtentSource, OFFLOAD_PARTS_IN_FLIGHT, upload_from_disks};
use crate::store::extents::extent::{Extent, ExtentList};
use crate::store::index::index_read::IndexRead;
use crate::store::object::core::ObjectCore;
use crate::store::object::layout::{Name, parse_key, path_of};
use crate::store::object::read::data::{ObjectDataRead, plan};
use crate::store::object::read::ranges;
use crate::store::object::shuffle::ObjectShuffle;
use crate::store::{ChunkRead, DiskShuffleHandle, ExtentWrite, StoreError, StoreErrorKind};
use uniffle_io::buffers::READ_CHUNK_BYTES_MAX;
use uniffle_wire::types::PartitionId;

/// Number of missing segments that are looked up concurrently.
const CONCURRENT_CHECKS: usize = 16;

/// The objects of one incarnation of a shuffle. Clones share them.
#[derive(Debug, Clone)]
pub struct Uploads {
    pub(in crate::store) core: Arc<ObjectCore>,
    pub(in crate::store) shuffle: Arc<ObjectShuffle>,
}

impl Uploads {
    /// Returns the number of the incarnation.
    #[must_use]
    pub fn incarnation(&self) -> u64 {
        self.shuffle.name.incarnation
    }

    /// Returns the key of segment `number`.
    pub(in crate::store) fn segment_key(&self, number: u32) -> String {
        self.shuffle.segment_key(number)
    }

    /// Reads the records of `blocks` blocks in extents of objects, from index `first` on.
    pub(in crate::store) fn index(
        &self,
        extents: ExtentList,
        first: usize,
        blocks: u64,
    ) -> impl ChunkRead + use<> {
        IndexRead::new(self.clone(), extents, first, blocks)
    }

    /// Reads a range of a stream that is covered by extents in objects.
    pub(in crate::store) fn data(&self, extents: ExtentList, range: Range<u64>) -> impl ChunkRead + use<> {
        ObjectDataRead::new(&self.core, Arc::clone(&self.shuffle), extents, range)
    }

    /// Starts to fetch a range into the read cache, as far as it is in objects. Fetches at most its
    /// first [`ranges::AHEAD_BYTES`], and stops when no fetch permit is free.
    pub(in crate::store) fn hint(&self, extents: &ExtentList, range: &Range<u64>) {
        let some = range.start..range.end.min(range.start.saturating_add(ranges::AHEAD_BYTES));
        ranges::begin_ahead(&self.core, &self.shuffle, &plan(extents, &some));
    }

    /// Returns whether a write is worth an attempt now.
    pub(in crate::store) fn is_accepting(&self) -> bool {
        self.core.circuit_breaker.is_worth_trying() && !self.core.claim.is_lost()
    }

    /// Writes a batch of a worker without disks, and appends it to `streams`. After `Ok` readers
    /// find every block.
    ///
    /// # Errors
    /// `Purged`, `InvalidBatch`. The store fails.
    pub(in crate::store) async fn write(
        &self,
        streams: &DiskShuffleHandle,
        extents: Vec<ExtentWrite>,
    ) -> Result<(), StoreError> {
        self.shuffle.require_present()?;
        if self.core.claim.is_lost() {
            self.core.require_claim().await?;
        }
        let key = || self.shuffle.name.key.to_string();
        let extents = ExtentWrite::split_large(extents);
        let bytes = segment_heap_bytes(&extents);
        let _making = SegmentHeap::begin(&self.core.segment_heap, &self.core.extents, bytes).await;
        let prepared = tokio::task::spawn_blocking(move || SegmentBatch::of(extents)).await;
        let batch = prepared.map_err(|error| StoreError::io(key(), error.into()))??;
        let (done, written) = oneshot::channel();
        if self.shuffle.queue.add(UploadJob {
            batch,
            streams: streams.clone(),
            waiter: UploadWaiter { done, _making },
        }) {
            let upload = uploader::run(Arc::clone(&self.core), Arc::clone(&self.shuffle));
            self.core.tasks.spawn("segment upload", upload);
        }
        written.await.unwrap_or_else(|_| Err(self.shuffle.error(StoreErrorKind::Unhealthy)))
    }

    /// Writes blocks of `source` to one object. Returns its extents, which are readable from the
    /// store, or `None` if `source` is empty.
    ///
    /// # Errors
    /// The source or the store fails. Then no extent of the object is published.
    pub async fn take(
        &self,
        source: &mut dyn ExtentSource,
    ) -> Result<Option<Vec<(PartitionId, Extent)>>, StoreError> {
        upload_from_disks(&self.core, &self.shuffle, source).await
    }

    /// Returns the segments among `numbers` that were deleted. Returns none unless a read has
    /// missed one. A store that does not have this process's claim proves nothing, and a list may
    /// be old.
    ///
    /// # Errors
    /// The store does not answer or refuses, or another process has the prefix.
    pub(in crate::store) async fn deleted(
        &self,
        numbers: impl Future<Output = BTreeSet<u32>>,
    ) -> Result<Vec<u32>, StoreError> {
        let Self { core, shuffle } = self;
        if !shuffle.take_missed() {
            return Ok(Vec::new());
        }
        let deleted = async {
            let mut missing = numbers.await;
            core.require_claim().await?;
            let mut listed = core.store.list(Some(&path_of(&shuffle.prefix)));
            while let Some(object) = core.observe(&shuffle.prefix, listed.try_next().await)? {
                if let Some(Name::Segment(_, number)) =
                    parse_key(&core.settings.root, object.location.as_ref())
                {
                    missing.remove(&number);
                }
            }
            let is_deleted = |number: u32| async move {
                let key = shuffle.segment_key(number);
                match core.observe(&key, core.store.head(&path_of(&key)).await) {
                    Ok(_) => Ok(None),
                    Err(error) if error.kind == StoreErrorKind::NotFound => Ok(Some(number)),
                    Err(error) => Err(error),
                }
            };
            let checks = stream::iter(missing).map(is_deleted).buffered(CONCURRENT_CHECKS);
            checks.try_filter_map(|it| ready(Ok(it))).try_collect().await
        };
        deleted.await.inspect_err(|_| shuffle.set_missed())
    }

    /// Returns an upper bound for the memory of [`Uploads::take`] beside records: the parts in
    /// flight, a part being filled, and a chunk being read.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        let part = self.core.settings.part_bytes as u64;
        let held = (OFFLOAD_PARTS_IN_FLIGHT as u64 + 1) * part + READ_CHUNK_BYTES_MAX as u64;
        // Unused space in buffers (`StreamBuffers`).
        held + held / 16
    }
}
