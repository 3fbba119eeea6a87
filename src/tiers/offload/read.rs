//! Reads of streams with extents on disks and in objects.
//!
//! A read goes from run to run of extents of one kind, and each run is read by its tier. Index logs
//! stay until a purge, so an index is read from one snapshot. A data file may be removed during a
//! read. Its extents are in objects then, and the read continues there from a new snapshot.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;

use crate::tiers::local::StreamView;
use crate::tiers::object::{ObjectTier, Uploads};
use crate::tiers::{ChunkRead, LocalStore, ServedData, ServedIndex, ServedTier, StoreError, StoreErrorKind};
use uniffle_io::ReadBuffers;
use uniffle_io::buffers::HeapBuffers;
use uniffle_wire::index::{RECORD_BYTES, records};
use uniffle_wire::types::{PartitionId, ShuffleKey};

/// Both tiers.
#[derive(Debug, Clone)]
pub(super) struct Reads {
    pub(super) local: Arc<LocalStore>,
    pub(super) object: Arc<ObjectTier>,
}

impl Reads {
    /// Returns the registration of a snapshot in the store.
    fn uploads(&self, view: &StreamView) -> Result<Uploads, StoreError> {
        let (key, incarnation) = view.registration();
        let uploads = self.object.uploads(key).filter(|it| it.incarnation() == incarnation);
        uploads.ok_or_else(|| StoreError::new(StoreErrorKind::Purged, key.to_string()))
    }

    pub(super) fn index(&self, key: &ShuffleKey, partition: PartitionId) -> Result<ServedIndex, StoreError> {
        let view = self.local.view(key, partition)?;
        let (length, data_length) = (view.blocks * RECORD_BYTES as u64, view.bytes);
        Ok(ServedIndex { length, data_length, chunks: Runs::open(self, view, Left::Index(0))? })
    }

    pub(super) fn data(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        (offset, length): (u64, u32),
    ) -> Result<ServedData, StoreError> {
        let range = offset..offset.saturating_add(u64::from(length));
        let view = self.local.view_part(key, partition, &range)?;
        let has_hole = view.has_hole(&range);
        Ok(ServedData { has_hole, chunks: Runs::open(self, view, Left::Data(range))? })
    }

    /// Applies hints. The disks ignore parts that are in objects.
    pub(super) fn hint(&self, key: &ShuffleKey, partition: PartitionId, ranges: &[Range<u64>]) {
        ServedTier::hint(&*self.local, key, partition, ranges);
        for range in ranges {
            let Ok(view) = self.local.view_part(key, partition, range) else { continue };
            if let Ok(uploads) = self.uploads(&view) {
                uploads.hint(&view.extents, range);
            }
        }
    }

    /// Calls `visit` with the ids of the blocks of a partition that are in objects.
    pub(super) async fn visit_moved(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        visit: &mut (dyn FnMut(u64) + Send),
    ) -> Result<(), StoreError> {
        let view = self.local.view(key, partition)?;
        let mut next = 0;
        while let Some(run) = view.run_at(next) {
            next = run.extents.end;
            if !run.is_in_object {
                continue;
            }
            let uploads = self.uploads(&view)?;
            let mut index = uploads.index(view.extents.clone(), run.extents.start, run.blocks);
            while let Some(chunk) = index.next_chunk(&HeapBuffers).await? {
                records(&chunk).for_each(|record| visit(record.block_id.unsigned_abs()));
            }
        }
        Ok(())
    }
}

/// What is left of a read.
#[derive(Debug)]
enum Left {
    /// Records of the extents from this index on.
    Index(usize),
    /// A range of the data.
    Data(Range<u64>),
}

/// A read of index or data, run by run.
#[derive(Debug)]
struct Runs {
    reads: Reads,
    view: StreamView,
    left: Left,
    /// Reader of the present run.
    run: Option<Box<dyn ChunkRead>>,
    has_failed: bool,
}

impl Runs {
    fn open(reads: &Reads, view: StreamView, left: Left) -> Result<Box<Self>, StoreError> {
        let mut runs = Self { reads: reads.clone(), view, left, run: None, has_failed: false };
        runs.open_next()?;
        Ok(Box::new(runs))
    }

    /// Opens the next run. Returns false at the end.
    fn open_next(&mut self) -> Result<bool, StoreError> {
        let (reads, view, extents) = (&self.reads, &self.view, || self.view.extents.clone());
        let run: Box<dyn ChunkRead> = match &mut self.left {
            Left::Index(next) => {
                let Some(run) = view.run_at(*next) else { return Ok(false) };
                *next = run.extents.end;
                match run.is_in_object {
                    false => reads.local.index_of(view, &run),
                    true => Box::new(reads.uploads(view)?.index(extents(), run.extents.start, run.blocks)),
                }
            }
            Left::Data(range) if range.is_empty() => return Ok(false),
            Left::Data(range) => match view.run_in(range) {
                (end, false) => Box::new(reads.local.data_of(view, range.start..end)),
                (end, true) => Box::new(reads.uploads(view)?.data(extents(), range.start..end)),
            },
        };
        self.run = Some(run);
        Ok(true)
    }

    /// Returns whether the next byte of data is on a disk in the present snapshot and in an object
    /// in a new one.
    fn has_moved(&mut self) -> Result<bool, StoreError> {
        let Left::Data(range) = &self.left else { return Ok(false) };
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
                    if let Left::Data(range) = &mut self.left {
                        range.start += chunk.len() as u64;
                    }
                    return Ok(Some(chunk));
                }
                Ok(None) => self.run = None,
                // The file was removed or the disk has failed.
                Err(error) => match self.has_moved()? {
                    true => self.run = None,
                    false => return Err(error),
                },
            }
        }
    }
}

impl ChunkRead for Runs {
    fn next_chunk<'a>(
        &'a mut self,
        buffers: &'a dyn ReadBuffers,
    ) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        let read = async move {
            if self.has_failed {
                let (key, _) = self.view.registration();
                return Err(StoreError::new(StoreErrorKind::Corrupt, key.to_string()));
            }
            self.has_failed = true; // Until this chunk is whole: also when the caller gives up in between.
            let chunk = self.read_chunk(buffers).await?;
            self.has_failed = false;
            Ok(chunk)
        };
        read.boxed()
    }

    fn next_room(&self) -> usize {
        self.run.as_ref().map_or(0, |run| run.next_room())
    }

    fn is_suspect(&self) -> bool {
        self.run.as_ref().is_some_and(|run| run.is_suspect())
    }
}
