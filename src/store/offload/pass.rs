//! Offloads chosen extents of a shuffle into objects.
//!
//! Extents are read from the disks partition by partition, with their checksums verified. Once an
//! object is stored, its extents are relocated to it. The memory of a pass, one chunk and the parts
//! of one object, is charged before it begins; records are charged as they are read.
//!
//! An extent that cannot be read is excluded for a while. The first chunk of a run is read before
//! the object gets any of its extents, so most failures only skip the extent. After a later failure
//! the object is abandoned, and the next pass continues without the extent.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;

use super::release::{ChosenExtents, Run};
use super::shuffle::TieredShuffle;
use super::tier::OffloadTier;
use crate::store::disk::DataRead;
use crate::store::extents::extent::Extent;
use crate::store::object::{ExtentIndex, ExtentSource};
use crate::store::{ChunkRead as _, StoreError, StoreErrorKind};
use uniffle_base::budget::Charge;
use uniffle_io::buffers::StreamBuffers;
use uniffle_wire::types::PartitionId;

/// Result of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct PassResult {
    /// Payload bytes offloaded to the store.
    pub(super) bytes: u64,
    pub(super) objects: u64,
    /// True if some data could not be read.
    pub(super) has_unreadable: bool,
}

impl OffloadTier {
    /// Offloads chosen extents of a shuffle to the store.
    ///
    /// # Errors
    /// An error of a disk or of the store. Extents offloaded before the error stay offloaded.
    pub(super) async fn run_pass(
        &self,
        shuffle: &Arc<TieredShuffle>,
        chosen: ChosenExtents,
    ) -> Result<PassResult, StoreError> {
        let uploads = self.make_known(shuffle).await?;
        let mut result = PassResult::default();
        let mut source = Runs {
            charge: self.memory.charge_unchecked(uploads.memory_bytes()),
            given_bytes: 0,
            chosen,
            shuffle: Arc::clone(shuffle),
            reading: None,
            unread: None,
            buffers: StreamBuffers::default(),
        };
        while let Some(copies) = uploads.take(&mut source).await? {
            let bytes = copies.iter().map(|(_, copy)| copy.length).sum();
            result.bytes += bytes;
            result.objects += 1;
            self.metrics.moved_bytes.inc_by(bytes);
            source.release_records();
            self.relocate(shuffle, copies).await;
        }
        if let Some((runs, error)) = source.unread {
            result.has_unreadable = true;
            tracing::warn!(shuffle = %shuffle.key, runs, %error, "unreadable data stays on the disks for now");
        }
        Ok(result)
    }

    async fn relocate(&self, shuffle: &TieredShuffle, copies: Vec<(PartitionId, Extent)>) {
        match self.local.relocate(&shuffle.local, copies).await {
            Ok(bytes) => self.metrics.freed_bytes.inc_by(bytes),
            Err(error) => {
                tracing::warn!(shuffle = %shuffle.key, %error, "cannot delete a data file that was offloaded completely; retrying later");
            }
        }
    }
}

/// Source of chosen extents for objects.
struct Runs {
    /// Memory of the current object.
    charge: Charge,
    /// Bytes of records in the current object, which holds them until it ends.
    given_bytes: u64,
    chosen: ChosenExtents,
    shuffle: Arc<TieredShuffle>,
    buffers: StreamBuffers,
    reading: Option<PassRead>,
    /// Number of runs that could not be read, and the first error.
    unread: Option<(usize, StoreError)>,
}

/// A run that is being read.
struct PassRead {
    run: Run,
    /// Remaining extents, with their records.
    extents: VecDeque<(Extent, Bytes)>,
    /// Base of the current extent.
    base: u64,
    /// Remaining bytes of the current extent.
    remaining_bytes: u64,
    /// Remainder of the last chunk.
    chunk: Bytes,
    data: DataRead,
    /// Memory of the remaining records.
    charge: Charge,
}

impl Runs {
    /// Releases the memory of the records of a completed object.
    fn release_records(&mut self) {
        drop(self.charge.split_up_to(std::mem::take(&mut self.given_bytes)));
    }

    /// Reads the records of a run and its first chunk. Returns the run with the error if that
    /// fails.
    async fn open(&mut self, run: Run) -> Result<PassRead, (Run, StoreError)> {
        let charge =
            self.charge.budget().charge_unchecked(run.extents.iter().map(Extent::records_bytes).sum());
        let mut data = self.chosen.data(&run);
        let opened = async {
            let mut extents = VecDeque::with_capacity(run.extents.len());
            for extent in &run.extents {
                extents.push_back((*extent, self.chosen.records(extent).await?));
            }
            let chunk = data.next_chunk(&self.buffers).await?.unwrap_or_default();
            Ok((extents, chunk))
        };
        match opened.await {
            Ok((extents, chunk)) => {
                Ok(PassRead { run, extents, base: 0, remaining_bytes: 0, chunk, data, charge })
            }
            Err(error) => Err((run, error)),
        }
    }

    /// Gives back an unreadable run. A run of one extent is excluded from offloads; the extents of
    /// a longer run are read one by one.
    fn skip(&mut self, run: &Run, error: StoreError) {
        if let Some((partition, base)) = self.chosen.give_back(run) {
            self.shuffle.exclude(partition, base);
        }
        self.unread.get_or_insert((0, error)).0 += 1;
    }

    /// Returns the next extent of the current run, or `None` at its end.
    fn next_of_run(&mut self) -> Option<ExtentIndex> {
        let reading = self.reading.as_mut()?;
        let (extent, records) = reading.extents.pop_front()?;
        (reading.base, reading.remaining_bytes) = (extent.base, extent.length);
        self.given_bytes += records.len() as u64;
        self.charge.merge(reading.charge.split_up_to(records.len() as u64));
        let Extent { base, length, blocks, records_crc, .. } = extent;
        Some(ExtentIndex { partition: reading.run.partition, base, length, blocks, records, records_crc })
    }
}

impl ExtentSource for Runs {
    fn next_extent(&mut self) -> BoxFuture<'_, Result<Option<ExtentIndex>, StoreError>> {
        let next = async move {
            loop {
                if let Some(moved) = self.next_of_run() {
                    return Ok(Some(moved));
                }
                self.reading = None;
                let Some(run) = self.chosen.next_run().await else { return Ok(None) };
                match self.open(run).await {
                    Ok(reading) => self.reading = Some(reading),
                    Err((_, error)) if error.kind == StoreErrorKind::Purged => return Err(error),
                    Err((run, error)) => self.skip(&run, error),
                }
            }
        };
        next.boxed()
    }

    fn next_bytes(&mut self) -> BoxFuture<'_, Result<Option<Bytes>, StoreError>> {
        let next = async move {
            let Some(reading) = &mut self.reading else { return Ok(None) };
            if reading.chunk.is_empty() {
                let chunk = reading.data.next_chunk(&self.buffers).await;
                // `ChosenExtents` skips extents with damaged blocks anyway.
                if chunk.as_ref().is_err_and(|error| error.kind != StoreErrorKind::Purged)
                    && !self.chosen.has_damage(&reading.run)
                {
                    self.shuffle.exclude(reading.run.partition, reading.base);
                }
                reading.chunk = chunk?.unwrap_or_default();
            }
            let left = usize::try_from(reading.remaining_bytes).unwrap_or(usize::MAX);
            let bytes = reading.chunk.split_to(left.min(reading.chunk.len()));
            reading.remaining_bytes -= bytes.len() as u64;
            Ok((!bytes.is_empty()).then_some(bytes))
        };
        next.boxed()
    }
}
