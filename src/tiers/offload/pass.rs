//! Moving of a shuffle: objects are made of runs of its partitions' streams, partition after partition, each read from the
//! disks with its checksums checked. What an object has is released on the disks once the store has answered that it is whole.
//!
//! A pass holds one chunk that is read, and the parts of one object; both are charged before it begins.
//!
//! What cannot be read holds up nothing else: from there on its stream is left alone for a while. Mostly that turns out before
//! the object that is being made has anything of the run; else that object is given up, and the next pass does without.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;

use super::shuffle::Shuffle;
use super::tier::OffloadTier;
use crate::budget::Charge;
use crate::tiers::local::{DataRead, Moving, Oldest, Run};
use crate::tiers::object::{Moved, Source, Uploads};
use crate::tiers::{ChunkRead as _, StoreError, StoreErrorKind};
use uniffle_io::buffers::StreamBuffers;
use uniffle_wire::index::RECORD_BYTES;
use uniffle_wire::types::PartitionId;

/// What a pass did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Passed {
    /// Payload that is in the store now.
    pub(super) bytes: u64,
    pub(super) objects: u64,
    /// Some of it cannot be read.
    pub(super) has_stopped: bool,
}

impl OffloadTier {
    /// Moves what was chosen of a shuffle.
    ///
    /// # Errors
    /// What a disk or the store says; what was moved before stays so.
    pub(super) async fn pass(&self, shuffle: &Arc<Shuffle>, oldest: Oldest) -> Result<Passed, StoreError> {
        let uploads = self.make_known(shuffle).await?;
        let mut passed = Passed::default();
        let mut source = Runs {
            charge: self.memory.force_charge(uploads.memory_bytes()),
            records_bytes: 0,
            moving: self.local.moving(&shuffle.local),
            uploads: uploads.clone(),
            shuffle: Arc::clone(shuffle),
            left: oldest.ends.iter().copied().collect(),
            at: None,
            reading: None,
            unread: None,
            buffers: StreamBuffers::default(),
        };
        // An earlier process, or a pass that was dropped, may have stopped before it released what it had moved.
        self.release(shuffle, &uploads, &oldest).await;
        while let Some(bytes) = uploads.take(&mut source).await? {
            passed.bytes += bytes;
            passed.objects += 1;
            self.metrics.moved_bytes.inc_by(bytes);
            source.give_records_back();
            self.release(shuffle, &uploads, &oldest).await;
        }
        if let Some((partitions, error)) = source.unread {
            passed.has_stopped = true;
            tracing::warn!(shuffle = %shuffle.key, partitions, %error, "unreadable data; it and later data of the partitions stay on the disks for now");
        }
        Ok(passed)
    }

    /// Gives up on the disks what the store has.
    async fn release(&self, shuffle: &Shuffle, uploads: &Uploads, oldest: &Oldest) {
        let ends = oldest.ends.iter().map(|(partition, _)| (*partition, uploads.end(*partition)));
        match self.local.release(&shuffle.local, ends.collect::<Vec<_>>()).await {
            Ok(bytes) => self.metrics.freed_bytes.inc_by(bytes),
            Err(error) => {
                tracing::warn!(shuffle = %shuffle.key, %error, "cannot delete a data file that was moved completely; retrying later");
            }
        }
    }
}

/// The runs of chosen partitions, as objects are made of them.
struct Runs {
    /// For what is held of the present object.
    charge: Charge,
    /// Records of it, which stay until it ends.
    records_bytes: u64,
    moving: Moving,
    uploads: Uploads,
    shuffle: Arc<Shuffle>,
    /// Partitions and until where, the present one first.
    left: VecDeque<(PartitionId, u64)>,
    /// Where the next run of the present one begins, once it has begun.
    at: Option<u64>,
    buffers: StreamBuffers,
    reading: Option<Reading>,
    /// Partitions that were left because they cannot be read, and the first one's error.
    unread: Option<(usize, StoreError)>,
}

/// A run that is read.
struct Reading {
    partition: PartitionId,
    /// Where in the stream the next chunk begins.
    at: u64,
    /// Its first chunk, until it is given.
    first: Option<Bytes>,
    data: DataRead,
}

impl Runs {
    /// The object has ended.
    fn give_records_back(&mut self) {
        drop(self.charge.split_up_to(std::mem::take(&mut self.records_bytes)));
    }

    /// Where the next run of a partition begins; none where the store does not have all that stands before what the disks have.
    fn begin(&self, partition: PartitionId) -> Option<u64> {
        let there = self.uploads.end(partition);
        (there >= self.moving.start(partition)).then_some(there)
    }

    /// Begins to read a run.
    async fn open(&mut self, run: &Run) -> Result<Moved, StoreError> {
        let bytes = u64::from(run.blocks) * RECORD_BYTES as u64;
        self.charge.merge(self.charge.budget().force_charge(bytes));
        self.records_bytes += bytes;
        let records = self.moving.records(run).await?;
        let mut data = self.moving.data(run)?;
        let first = data.next_chunk(&self.buffers).await?;
        let (partition, at) = (run.partition, run.range.start);
        self.reading = Some(Reading { partition, at, first, data });
        Ok(Moved { partition, length: run.range.end - at, blocks: run.blocks, records })
    }

    fn next_partition(&mut self) {
        self.left.pop_front();
        self.at = None;
    }

    /// Leaves the present partition, which cannot be read from `at` on.
    fn leave(&mut self, partition: PartitionId, at: u64, error: StoreError) {
        self.shuffle.stop(partition, at);
        self.unread.get_or_insert((0, error)).0 += 1;
        self.next_partition();
    }
}

impl Source for Runs {
    fn next_extent(&mut self) -> BoxFuture<'_, Result<Option<Moved>, StoreError>> {
        let next = async move {
            while let Some((partition, end)) = self.left.front().copied() {
                let at = self.at.or_else(|| self.begin(partition));
                let run = at.and_then(|at| self.moving.next_run(partition, at, end));
                let Some(run) = run else {
                    self.next_partition();
                    continue;
                };
                match self.open(&run).await {
                    Ok(moved) => {
                        self.at = Some(run.range.end);
                        return Ok(Some(moved));
                    }
                    Err(error) if error.kind == StoreErrorKind::Purged => return Err(error),
                    Err(error) => self.leave(partition, run.range.start, error),
                }
            }
            Ok(None)
        };
        next.boxed()
    }

    fn next_bytes(&mut self) -> BoxFuture<'_, Result<Option<Bytes>, StoreError>> {
        let next = async move {
            let Some(reading) = &mut self.reading else { return Ok(None) };
            let chunk = match reading.first.take() {
                Some(first) => Ok(Some(first)),
                None => reading.data.next_chunk(&self.buffers).await,
            };
            match chunk {
                Ok(chunk) => {
                    reading.at += chunk.as_ref().map_or(0, |chunk| chunk.len() as u64);
                    Ok(chunk)
                }
                Err(error) => {
                    if error.kind != StoreErrorKind::Purged {
                        self.shuffle.stop(reading.partition, reading.at);
                    }
                    Err(error)
                }
            }
        };
        next.boxed()
    }
}
