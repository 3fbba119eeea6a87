//! Reads of streams with extents on disks and in objects.
//!
//! A read proceeds by runs of extents, all or none of which are in objects, and the tier of each
//! run reads it. Index logs stay until a purge, so an index is read from one snapshot. A data file
//! may be removed during a read. Its extents are in objects then, and the read continues there from
//! a new snapshot.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;

use super::tier::OffloadTier;
use crate::store::disk::StreamView;
use crate::store::disk::read::damage::LostTotals;
use crate::store::disk::shuffle::DiskShuffle;
use crate::store::disk::walk::{partitions_of, yield_per_batch};
use crate::store::extents::extent::Extent;
use crate::store::index::index_read::visit_ids;
use crate::store::object::{Bucket, Uploads};
use crate::store::{ChunkRead, LocalStore, ServedData, ServedIndex, ServedTier, StoreError, StoreErrorKind};
use uniffle_base::damage::DamageListener;
use uniffle_io::ReadBuffers;
use uniffle_wire::index::RECORD_BYTES;
use uniffle_wire::types::{PartitionId, ShuffleKey};

impl ServedTier for OffloadTier {
    fn on_damage(&self, on_damage: DamageListener) {
        self.local.on_damage(on_damage);
    }

    fn index(&self, key: &ShuffleKey, partition: PartitionId) -> Result<ServedIndex, StoreError> {
        let view = self.local.view(key, partition)?;
        let (length, data_length) = (view.blocks * RECORD_BYTES as u64, view.bytes);
        Ok(ServedIndex { length, data_length, chunks: StreamRuns::open(self, view, Remaining::Index(0))? })
    }

    fn data(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        offset: u64,
        length: u32,
    ) -> Result<ServedData, StoreError> {
        let range = offset..offset.saturating_add(u64::from(length));
        let view = self.local.view_part(key, partition, &range)?;
        let has_hole = view.has_hole(&range);
        Ok(ServedData { has_hole, chunks: StreamRuns::open(self, view, Remaining::Data(range))? })
    }

    /// Passes the ranges to both tiers. The disks ignore parts that are in objects.
    fn hint(&self, key: &ShuffleKey, partition: PartitionId, ranges: &[Range<u64>]) {
        self.local.hint(key, partition, ranges);
        for range in ranges {
            let Ok(view) = self.local.view_part(key, partition, range) else { continue };
            if let Ok(uploads) = uploads(&self.object, &view) {
                uploads.hint(&view.extents, range);
            }
        }
    }

    fn mark_damaged_lost<'a>(
        &'a self,
        key: &'a ShuffleKey,
        partition: PartitionId,
    ) -> BoxFuture<'a, Option<StoreError>> {
        let marked = async move {
            let on_disks = self.local.mark_damaged_lost(key, partition).await;
            self.mark_deleted_lost(key).await.or(on_disks)
        };
        marked.boxed()
    }
}

impl OffloadTier {
    /// Calls `visit` with the ids of the blocks of a partition that are in objects.
    pub(super) async fn visit_offloaded(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        visit: &mut (dyn FnMut(u64) + Send),
    ) -> Result<(), StoreError> {
        let view = self.local.view(key, partition)?;
        let mut next = 0;
        while let Some(run) = view.run_at(next) {
            next = run.extents.end;
            if run.is_in_object {
                let uploads = uploads(&self.object, &view)?;
                let mut index = uploads.index(view.extents.clone(), run.extents.start, run.blocks);
                visit_ids(&mut index, visit).await?;
            }
        }
        Ok(())
    }

    /// If a read found a segment of the shuffle missing, marks the extents of all deleted segments
    /// as lost. Returns the error of one of them.
    async fn mark_deleted_lost(&self, key: &ShuffleKey) -> Option<StoreError> {
        let (shuffle, uploads) = (self.local.find(key).ok()?, self.object.uploads(key)?);
        if shuffle.incarnation != uploads.incarnation() {
            return None;
        }
        let deleted = match uploads.deleted(segments_of(&shuffle)).await {
            Ok(deleted) => deleted,
            Err(error) => {
                tracing::warn!(shuffle = %key, %error, "cannot check whether segments of a shuffle are missing");
                return None;
            }
        };
        let mut last_error = None;
        for number in deleted {
            let segment = uploads.segment_key(number);
            let error = StoreError::remote(StoreErrorKind::NotFound, &segment, "deleted by another program");
            let is_affected = |it: &Extent| it.is_in_object() && it.object() == number;
            let LostTotals { extents, blocks, bytes } =
                self.local.reader.damage.lose_all(&shuffle, &error, is_affected).await;
            if !shuffle.is_purged() {
                tracing::error!(
                    shuffle = %key, segment, extents, blocks, bytes,
                    "a segment was deleted by another program; its blocks are lost"
                );
            }
            last_error = Some(error);
        }
        last_error
    }
}

/// Returns the numbers of the segments with extents of a shuffle.
async fn segments_of(shuffle: &DiskShuffle) -> BTreeSet<u32> {
    let (mut segments, mut visited) = (BTreeSet::new(), 0);
    for partition in partitions_of(shuffle).await {
        let extents = shuffle.extents(partition);
        segments.extend(extents.iter().filter(|it| it.is_in_object()).map(Extent::object));
        yield_per_batch(&mut visited, 1 + extents.len()).await;
    }
    segments
}

/// Returns the uploads of the registration that a snapshot belongs to.
///
/// # Errors
/// `Purged` if the registration has ended.
fn uploads(object: &Bucket, view: &StreamView) -> Result<Uploads, StoreError> {
    let (key, incarnation) = view.registration();
    let uploads = object.uploads(key).filter(|it| it.incarnation() == incarnation);
    uploads.ok_or_else(|| StoreError::new(StoreErrorKind::Purged, key.to_string()))
}

/// Remainder of a read.
#[derive(Debug)]
enum Remaining {
    /// Records of the extents from this index on.
    Index(usize),
    /// A range of the data.
    Data(Range<u64>),
}

/// A read of index or data, run by run.
#[derive(Debug)]
struct StreamRuns {
    local: Arc<LocalStore>,
    object: Arc<Bucket>,
    view: StreamView,
    remaining: Remaining,
    /// Reader of the current run.
    run: Option<Box<dyn ChunkRead>>,
    has_failed: bool,
}

impl StreamRuns {
    fn open(tier: &OffloadTier, view: StreamView, remaining: Remaining) -> Result<Box<Self>, StoreError> {
        let (local, object) = (Arc::clone(&tier.local), Arc::clone(&tier.object));
        let mut runs = Self { local, object, view, remaining, run: None, has_failed: false };
        runs.open_next()?;
        Ok(Box::new(runs))
    }

    /// Opens the next run. Returns false at the end.
    fn open_next(&mut self) -> Result<bool, StoreError> {
        let (view, extents) = (&self.view, || self.view.extents.clone());
        let run: Box<dyn ChunkRead> = match &mut self.remaining {
            Remaining::Index(next) => {
                let Some(run) = view.run_at(*next) else { return Ok(false) };
                *next = run.extents.end;
                match run.is_in_object {
                    false => self.local.index_of(view, &run),
                    true => {
                        Box::new(uploads(&self.object, view)?.index(extents(), run.extents.start, run.blocks))
                    }
                }
            }
            Remaining::Data(range) if range.is_empty() => return Ok(false),
            Remaining::Data(range) => match view.run_in(range) {
                (end, false) => Box::new(self.local.data_of(view, range.start..end)),
                (end, true) => Box::new(uploads(&self.object, view)?.data(extents(), range.start..end)),
            },
        };
        self.run = Some(run);
        Ok(true)
    }

    /// Takes a new snapshot. Returns whether the next byte of data was on a disk before and is in
    /// an object now.
    fn has_offloaded(&mut self) -> Result<bool, StoreError> {
        let Remaining::Data(range) = &self.remaining else { return Ok(false) };
        let was_in_object = self.view.run_in(range).1;
        self.view = self.view.again(range)?;
        Ok(!was_in_object && self.view.run_in(range).1)
    }

    async fn read_chunk(&mut self, buffers: &dyn ReadBuffers) -> Result<Option<Bytes>, StoreError> {
        loop {
            let Some(run) = &mut self.run else {
                match self.open_next()? {
                    true => continue,
                    false => return Ok(None),
                }
            };
            match run.next_chunk(buffers).await {
                Ok(Some(chunk)) => {
                    if let Remaining::Data(range) = &mut self.remaining {
                        range.start += chunk.len() as u64;
                    }
                    return Ok(Some(chunk));
                }
                Ok(None) => self.run = None,
                // Either the file was removed after an offload, or the read has failed.
                Err(error) => match self.has_offloaded()? {
                    true => self.run = None,
                    false => return Err(error),
                },
            }
        }
    }
}

impl ChunkRead for StreamRuns {
    fn next_chunk<'a>(
        &'a mut self,
        buffers: &'a dyn ReadBuffers,
    ) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        let read = async move {
            if self.has_failed {
                let (key, _) = self.view.registration();
                return Err(StoreError::new(StoreErrorKind::Corrupt, key.to_string()));
            }
            // Reset once the chunk is complete, so that a cancelled call counts as failed.
            self.has_failed = true;
            let chunk = self.read_chunk(buffers).await?;
            self.has_failed = false;
            Ok(chunk)
        };
        read.boxed()
    }

    fn next_room(&self) -> usize {
        self.run.as_ref().map_or(0, |run| run.next_room())
    }

    fn may_have_losses(&self) -> bool {
        self.run.as_ref().is_some_and(|run| run.may_have_losses())
    }
}
