//! Data that is moved here from local disks, which know the place of each extent in its stream.

use std::ops::Range;
use std::sync::Arc;

use super::core::Core;
use super::data_read::{DataRead, plan};
use super::reads;
use super::shuffle::Shuffle;
use super::upload::{MOVED_PARTS_IN_FLIGHT, Source, one_from};
use crate::tiers::extent::{Extent, ExtentList};
use crate::tiers::index_read::IndexRead;
use crate::tiers::{ChunkRead, StoreError};
use uniffle_io::buffers::READ_CHUNK_BYTES_MAX;
use uniffle_wire::types::PartitionId;

/// One registration. Clones are the same.
#[derive(Debug, Clone)]
pub struct Uploads {
    pub(super) core: Arc<Core>,
    pub(super) shuffle: Arc<Shuffle>,
}

impl Uploads {
    /// Returns the number of the registration.
    #[must_use]
    pub fn incarnation(&self) -> u64 {
        self.shuffle.name.incarnation
    }

    /// Reads the records of `blocks` blocks in extents of objects, from index `first` on.
    pub(in crate::tiers) fn index(
        &self,
        extents: ExtentList,
        first: usize,
        blocks: u64,
    ) -> impl ChunkRead + use<> {
        IndexRead::new(self.clone(), extents, first, blocks)
    }

    /// Reads a range of a stream that extents of objects cover.
    pub(in crate::tiers) fn data(&self, extents: ExtentList, range: Range<u64>) -> impl ChunkRead + use<> {
        DataRead::new(&self.core, Arc::clone(&self.shuffle), extents, range)
    }

    /// Begins to bring the parts of a range that are in objects into the read cache.
    pub(in crate::tiers) fn hint(&self, extents: &ExtentList, range: &Range<u64>) {
        let some = range.start..range.end.min(range.start.saturating_add(reads::AHEAD_BYTES));
        reads::begin_ahead(&self.core, &self.shuffle, &plan(extents, &some));
    }

    /// Stores one object of what `source` has. Returns its extents, or `None` when there is nothing. When this returns they can be
    /// read from the store.
    ///
    /// # Errors
    /// The source's or the store's: nothing of it counts then.
    pub async fn take(
        &self,
        source: &mut dyn Source,
    ) -> Result<Option<Vec<(PartitionId, Extent)>>, StoreError> {
        one_from(&self.core, &self.shuffle, source).await
    }

    /// Memory that [`Uploads::take`] holds at most beside records: parts on their way, one that fills, and a chunk that is read.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        let part = self.core.settings.part_bytes as u64;
        let held = (MOVED_PARTS_IN_FLIGHT as u64 + 1) * part + READ_CHUNK_BYTES_MAX as u64;
        // What of buffers lies idle (`StreamBuffers`).
        held + held / 16
    }
}
