//! Uploads of segments: objects with extents of one shuffle. A shuffle has a task while batches
//! wait.
//!
//! A batch joins the open segment while that has room. Full parts are uploaded while others fill.
//! Once all started part uploads are done, the segment ends, unless a batch waits that still fits.
//! So a lone batch is written at once, and concurrent batches share an object. The memory of a
//! batch is released when the store has confirmed the whole object.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt as _;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use object_store::path::Path;
use object_store::{MultipartUpload, ObjectStoreExt as _, PutPayload, UploadPart};

use super::segment::{ExtentIndex, OpenSegment, SegmentNumbers, SegmentSummary, UploadJob, UploadWaiter};
use crate::clock::timeout;
use crate::store::extents::extent::Extent;
use crate::store::object::circuit_breaker::copy_of;
use crate::store::object::core::ObjectCore;
use crate::store::object::layout::{SegmentId, path_of};
use crate::store::object::shuffle::ObjectShuffle;
use crate::store::{DiskShuffleHandle, StoreError, StoreErrorKind};
use uniffle_wire::types::PartitionId;

/// Maximum number of concurrently uploaded parts of a segment.
const PARTS_IN_FLIGHT: usize = 4;

/// Maximum number of concurrently uploaded parts while an object is filled from local disks. It is
/// small, because such data can wait.
pub(super) const OFFLOAD_PARTS_IN_FLIGHT: usize = 2;

/// Number of extents whose records are cached before the task yields. A segment of small blocks has
/// tens of thousands of extents.
const EXTENTS_PER_YIELD: usize = 512;

/// Maximum duration of the removal of a failed upload's remains.
const CLEAN_UP_TIMEOUT: Duration = Duration::from_secs(5);

/// Source of extents to upload, one after the other.
pub trait ExtentSource: Send {
    /// Returns the next extent, or `None` at the end. Its base is greater than those of earlier
    /// extents of its partition.
    fn next_extent(&mut self) -> BoxFuture<'_, Result<Option<ExtentIndex>, StoreError>>;

    /// Returns the next bytes of the extent, or `None` if there are no more.
    fn next_bytes(&mut self) -> BoxFuture<'_, Result<Option<Bytes>, StoreError>>;
}

/// Writes the waiting batches until there are none.
pub(in crate::store::object) async fn run(core: Arc<ObjectCore>, shuffle: Arc<ObjectShuffle>) {
    let mut segment_numbers = shuffle.segment_numbers.lock().await;
    let mut running = shuffle.queue.running();
    while let Some(job) = running.take_or_end() {
        upload_batches(&core, &shuffle, &mut segment_numbers, job).await;
    }
}

/// Uploads the next segment with the batch `first` and those that join it, and answers them.
async fn upload_batches(
    core: &ObjectCore,
    shuffle: &ObjectShuffle,
    segment_numbers: &mut SegmentNumbers,
    first: UploadJob,
) {
    let mut upload = Upload::begin(core, shuffle, segment_numbers);
    let streams = first.streams.clone();
    upload.join(first);
    let result = upload.store(segment_numbers, UploadOrigin::Batches(&streams)).await.map(drop);
    if let Err(error) = result.as_ref()
        && error.kind != StoreErrorKind::Purged
    {
        tracing::warn!(key = upload.key, %error, "segment upload failed; its blocks stay in memory");
    }
    upload.answer(&result);
}

/// Stores the next segment of `source`. Returns its extents, which can be read from the store now,
/// or `None` if the source has no more.
///
/// # Errors
/// The source or the store fails, the prefix was lost, the worker stops, or `Purged`. The object
/// may exist then, but none of its extents is used.
pub(super) async fn upload_from_disks(
    core: &ObjectCore,
    shuffle: &ObjectShuffle,
    source: &mut dyn ExtentSource,
) -> Result<Option<Vec<(PartitionId, Extent)>>, StoreError> {
    let mut segment_numbers = shuffle.segment_numbers.lock().await;
    let mut upload = Upload::begin(core, shuffle, &mut segment_numbers);
    upload.store(&mut segment_numbers, UploadOrigin::Disks(source)).await
}

/// Origin of a segment's extents.
enum UploadOrigin<'a> {
    /// Waiting batches of a worker without disks. Their extents are appended to these streams.
    Batches(&'a DiskShuffleHandle),
    /// Extents on disks, which are relocated by the caller.
    Disks(&'a mut dyn ExtentSource),
}

/// Makes the extents of a segment visible in `streams`, and counts the segment. Returns them.
async fn publish(
    core: &ObjectCore,
    shuffle: &ObjectShuffle,
    sealed: SegmentSummary,
    streams: Option<&DiskShuffleHandle>,
) -> Result<Vec<(PartitionId, Extent)>, StoreError> {
    let SegmentSummary { extents, payload_bytes, bytes } = sealed;
    // Cached before the extents are visible: a purge drops the records of visible extents only, so
    // later additions would remain.
    for some in extents.chunks(EXTENTS_PER_YIELD) {
        for (_, extent, records) in some {
            core.records.insert(shuffle.records_key(extent), records.clone());
        }
        tokio::task::yield_now().await;
    }
    let visible: Vec<_> = extents.iter().map(|(partition, extent, _)| (*partition, *extent)).collect();
    let published = streams.map_or(Ok(()), |streams| streams.publish_stored(&visible));
    if let Err(error) = published.and_then(|()| shuffle.require_present()) {
        core.records.remove(visible.iter().map(|(_, extent)| shuffle.records_key(extent)));
        return Err(error);
    }
    shuffle.count(core, payload_bytes, bytes);
    core.metrics.write_bytes.inc_by(payload_bytes);
    core.metrics.segments.inc();
    #[expect(clippy::cast_precision_loss, reason = "a histogram's observation")]
    core.metrics.segment_bytes.observe(bytes as f64);
    Ok(visible)
}

/// A segment that is being uploaded.
struct Upload<'a> {
    core: &'a ObjectCore,
    shuffle: &'a ObjectShuffle,
    number: u32,
    key: String,
    path: Path,
    open: OpenSegment,
    /// `None` while the segment may still be uploaded with a single request.
    multipart: Option<Box<dyn MultipartUpload>>,
    parts: FuturesUnordered<UploadPart>,
    waiting: Vec<UploadWaiter>,
}

impl<'a> Upload<'a> {
    /// Begins a segment with the next number.
    fn begin(core: &'a ObjectCore, shuffle: &'a ObjectShuffle, segment_numbers: &mut SegmentNumbers) -> Self {
        segment_numbers.last_number += 1;
        let number = segment_numbers.last_number;
        let id = SegmentId { incarnation: shuffle.name.incarnation, number };
        let open = OpenSegment::new(id, segment_numbers.published);
        let key = shuffle.segment_key(number);
        let (path, parts, waiting) = (path_of(&key), FuturesUnordered::new(), Vec::new());
        Self { core, shuffle, number, key, path, open, multipart: None, parts, waiting }
    }

    /// Stores the segment with extents of `origin`. Returns its extents, or `None` if there are
    /// none.
    async fn store(
        &mut self,
        segment_numbers: &mut SegmentNumbers,
        origin: UploadOrigin<'_>,
    ) -> Result<Option<Vec<(PartitionId, Extent)>>, StoreError> {
        let (core, shuffle) = (self.core, self.shuffle);
        let streams = match &origin {
            UploadOrigin::Batches(streams) => Some(*streams),
            UploadOrigin::Disks(_) => None,
        };
        let filling = async {
            let source = match origin {
                UploadOrigin::Batches(_) => return self.fill_from_batches().await.map(Some),
                UploadOrigin::Disks(source) => source,
            };
            let sealed = self.fill_from_disks(source).await?;
            if sealed.is_some() {
                // Local disks release their copies afterwards, so this prefix must still be the one
                // that the next start reads.
                core.require_claim().await?;
            }
            Ok(sealed)
        };
        let filled = tokio::select! {
            biased;
            () = core.tasks.cancelled() => Err(shuffle.error(StoreErrorKind::Unhealthy)),
            filled = filling => filled,
        };
        if let Err(error) = &filled {
            self.clean_up(error).await;
            core.metrics.uploads_failed.inc_by(u64::from(error.kind != StoreErrorKind::Purged));
        }
        let Some(sealed) = filled? else { return Ok(None) };
        let extents = publish(core, shuffle, sealed, streams).await?;
        segment_numbers.published = self.number;
        Ok(Some(extents))
    }

    fn join(&mut self, job: UploadJob) {
        self.open.push(job.batch, |partition| job.streams.stream_bytes(partition));
        self.waiting.push(job.waiter);
    }

    /// Uploads the whole segment, including all batches that arrive meanwhile and fit.
    async fn fill_from_batches(&mut self) -> Result<SegmentSummary, StoreError> {
        let settings = &self.core.settings;
        loop {
            self.shuffle.require_present()?;
            while self.open.has_room(settings.segment_bytes)
                && let Some(job) = self.shuffle.queue.take()
            {
                self.join(job);
            }
            while self.parts.len() < PARTS_IN_FLIGHT
                && let Some(part) = self.open.take_part(settings.part_bytes)
            {
                self.send(part).await?;
            }
            match self.parts.next().await {
                Some(answer) => self.core.observe(&self.key, answer)?,
                None => break,
            }
        }
        self.finish().await
    }

    /// Completes the segment and uploads the rest of it.
    async fn finish(&mut self) -> Result<SegmentSummary, StoreError> {
        let sealed = self.seal().await?;
        match self.multipart.is_some() {
            true => self.finish_parts(sealed.bytes).await?,
            false => {
                let payload = payload(self.open.take(usize::MAX));
                let put = self.core.store.put(&self.path, payload).await;
                self.confirm_created(put, sealed.bytes).await?;
            }
        }
        Ok(sealed)
    }

    /// Uploads extents of `source` until the segment is full or the source ends, and completes the
    /// segment. Returns `None` if the source has no extent.
    async fn fill_from_disks(
        &mut self,
        source: &mut dyn ExtentSource,
    ) -> Result<Option<SegmentSummary>, StoreError> {
        let settings = &self.core.settings;
        let mut is_empty = true;
        while self.open.has_room(settings.segment_bytes) {
            self.shuffle.require_present()?;
            let Some(extent) = self.while_sending(source.next_extent()).await? else { break };
            let (partition, mut remaining) = (extent.partition, extent.length);
            self.open.begin(extent);
            is_empty = false;
            while remaining > 0 {
                let bytes = self.while_sending(source.next_bytes()).await?.unwrap_or_default();
                let length = bytes.len() as u64;
                remaining = remaining
                    .checked_sub(length)
                    .filter(|_| length > 0)
                    .ok_or_else(|| StoreError::new(StoreErrorKind::InvalidBatch, partition.to_string()))?;
                self.open.add(bytes);
                while let Some(part) = self.open.take_part(settings.part_bytes) {
                    self.make_room(OFFLOAD_PARTS_IN_FLIGHT).await?;
                    self.send(part).await?;
                }
            }
        }
        if is_empty { Ok(None) } else { self.finish().await.map(Some) }
    }

    /// Waits for `what` while the uploads of parts continue.
    async fn while_sending<T>(
        &mut self,
        what: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let mut what = std::pin::pin!(what);
        loop {
            tokio::select! {
                biased;
                done = &mut what => return done,
                Some(answer) = self.parts.next() => self.core.observe(&self.key, answer)?,
            }
        }
    }

    /// Waits until fewer than `parts` parts are being uploaded.
    async fn make_room(&mut self, parts: usize) -> Result<(), StoreError> {
        while self.parts.len() >= parts
            && let Some(answer) = self.parts.next().await
        {
            self.core.observe(&self.key, answer)?;
        }
        Ok(())
    }

    /// Sorts and encodes the index on a blocking thread: many extents take milliseconds.
    async fn seal(&mut self) -> Result<SegmentSummary, StoreError> {
        let empty = OpenSegment::new(SegmentId { incarnation: 0, number: 0 }, 0);
        let mut open = std::mem::replace(&mut self.open, empty);
        let sealed = tokio::task::spawn_blocking(move || {
            let sealed = open.seal();
            (open, sealed)
        });
        let (open, sealed) = sealed.await.map_err(|error| StoreError::io(&self.key, error.into()))?;
        self.open = open;
        Ok(sealed)
    }

    async fn send(&mut self, part: Vec<Bytes>) -> Result<(), StoreError> {
        if self.multipart.is_none() {
            let begun = self.core.store.put_multipart(&self.path).await;
            self.multipart = Some(self.core.observe(&self.key, begun)?);
        }
        if let Some(multipart) = &mut self.multipart {
            self.parts.push(multipart.put_part(payload(part)));
        }
        Ok(())
    }

    async fn finish_parts(&mut self, bytes: u64) -> Result<(), StoreError> {
        while self.open.pending_bytes() > 0 {
            self.make_room(PARTS_IN_FLIGHT).await?;
            let part = self.open.take(self.core.settings.part_bytes);
            self.send(part).await?;
        }
        while let Some(answer) = self.parts.next().await {
            self.core.observe(&self.key, answer)?;
        }
        let Some(multipart) = &mut self.multipart else { return Ok(()) };
        let completed = multipart.complete().await;
        self.confirm_created(completed, bytes).await?;
        self.multipart = None;
        Ok(())
    }

    /// Handles the result of the request that creates the object. If it failed, only the response
    /// may be lost, so this asks the store whether the object exists. An object of this size is the
    /// whole segment, because no other upload has its name.
    async fn confirm_created<T>(
        &mut self,
        result: object_store::Result<T>,
        bytes: u64,
    ) -> Result<(), StoreError> {
        let Err(error) = self.core.observe(&self.key, result) else { return Ok(()) };
        match self.core.store.head(&self.path).await {
            Ok(found) if found.size == bytes => {
                tracing::info!(key = self.key, %error, "upload reported a failure, but the object exists");
                Ok(())
            }
            _ => Err(error),
        }
    }

    /// Removes the remains of a failed upload, if the store answers. No later segment names an
    /// object that remains as its predecessor.
    async fn clean_up(&mut self, error: &StoreError) {
        self.parts.clear();
        if error.kind == StoreErrorKind::InUse {
            return; // The prefix is another process's.
        }
        let clean_up = async {
            if let Some(multipart) = &mut self.multipart {
                multipart.abort().await?;
            }
            self.core.store.delete(&self.path).await
        };
        match timeout(CLEAN_UP_TIMEOUT, clean_up).await {
            Ok(Ok(()) | Err(object_store::Error::NotFound { .. })) => {}
            remaining => {
                tracing::debug!(key = self.key, ?remaining, %error, "cannot remove parts of a failed upload")
            }
        }
    }

    /// Answers the batches of this segment. After a failure of the store, also fails the batches
    /// that wait for the next segment, because each would wait for a failure of its own.
    fn answer(self, result: &Result<(), StoreError>) {
        let others = match result {
            Err(error) if error.kind != StoreErrorKind::Purged => {
                std::iter::from_fn(|| self.shuffle.queue.take()).map(|job| job.waiter).collect()
            }
            _ => Vec::new(),
        };
        for waiter in self.waiting.into_iter().chain(others) {
            // The flusher may no longer wait.
            let _ = waiter.done.send(match result {
                Ok(()) => Ok(()),
                Err(error) => Err(copy_of(error)),
            });
        }
    }
}

fn payload(pieces: Vec<Bytes>) -> PutPayload {
    pieces.into_iter().collect()
}
