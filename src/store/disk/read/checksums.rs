//! Loads the CRC-32 of the blocks that a data read covers completely, and passes it to the
//! [`BlockVerifier`].
//!
//! Clients verify too, but only the worker knows which disk returned wrong bytes.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use crate::store::StoreError;
use crate::store::disk::core::DiskCore;
use crate::store::disk::log_file::Log;
use crate::store::disk::shuffle::DiskShuffle;
use crate::store::extents::extent::Extent;
use crate::store::index::block_verifier::{BlockCheck, BlockVerifier};
use uniffle_wire::index::{IndexRecord, RECORD_BYTES, records};
use uniffle_wire::types::PartitionId;

/// Sampling verifies one read in this number.
pub(super) const SAMPLE: u64 = 16;

/// Maximum number of blocks loaded at a time. Blocks below about 32 bytes may be skipped.
const CHECKS_MAX: usize = 1 << 16;

/// Checksums of the blocks of one read from disk, in the order of the stream.
#[derive(Debug)]
pub(super) struct DiskChecksums {
    partition: PartitionId,
    extents: std::vec::IntoIter<Extent>,
    /// Number of records of the first extent that are loaded.
    known: u32,
    range: Range<u64>,
    /// Verifier of the [prepared](Self::prepare) bytes.
    pub(super) verifier: BlockVerifier,
}

impl DiskChecksums {
    /// Returns the checksums of a read of `range`, which `extents` cover except for holes.
    pub(in crate::store) fn new(partition: PartitionId, extents: Vec<Extent>, range: Range<u64>) -> Self {
        let verifier = BlockVerifier::new(range.start);
        Self { partition, extents: extents.into_iter(), known: 0, range, verifier }
    }

    /// Loads the checksums of the next `bytes` bytes of the range.
    ///
    /// # Errors
    /// The records of an extent cannot be read. The error comes with their log.
    pub(in crate::store::disk) async fn prepare(
        &mut self,
        core: &DiskCore,
        shuffle: &DiskShuffle,
        bytes: u64,
    ) -> Result<(), (StoreError, Arc<Log>)> {
        let until = self.verifier.at().saturating_add(bytes);
        while let Some(extent) = self.extents.as_slice().first().filter(|extent| extent.base < until).copied()
        {
            self.load(core, shuffle, &extent, until).await?;
            if self.known < extent.blocks {
                break;
            }
            self.extents.next();
            self.known = 0;
        }
        Ok(())
    }

    /// Loads the blocks of an extent that begin before `until`, at most [`CHECKS_MAX`].
    async fn load(
        &mut self,
        core: &DiskCore,
        shuffle: &DiskShuffle,
        extent: &Extent,
        until: u64,
    ) -> Result<(), (StoreError, Arc<Log>)> {
        let from = self.known;
        let cached = core.records.get(&shuffle.records_key(extent));
        let mut take = |record: &IndexRecord| {
            let start = extent.base + record.offset.unsigned_abs();
            if start >= until || self.verifier.known() >= CHECKS_MAX {
                return ControlFlow::Break(());
            }
            self.known += 1;
            let place = start..start + u64::from(record.length.unsigned_abs());
            let first = self.range.start.max(self.verifier.at());
            let whole = place.start >= first && place.end <= self.range.end;
            if whole && !shuffle.damaged.touches(self.partition, &place) {
                let crc = u32::try_from(record.crc).unwrap_or(0);
                self.verifier.push(BlockCheck { place, crc, base: extent.base });
            }
            ControlFlow::Continue(())
        };
        match cached {
            Some(cached) => {
                let remaining = cached.get(from as usize * RECORD_BYTES..).unwrap_or_default();
                // Stops when enough records are loaded.
                let _ = records(remaining).try_for_each(|record| take(&record));
                Ok(())
            }
            None => {
                let visited = core.visit_records(shuffle, extent, from, take).await;
                visited.map_err(|error| (error, shuffle.log_at(extent.index_log)))
            }
        }
    }
}
