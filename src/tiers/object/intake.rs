//! Data that is moved here from local disks: a registration takes extents whose place in their streams is known.

use std::collections::HashMap;
use std::sync::Arc;

use super::core::Core;
use super::shuffle::Shuffle;
use super::upload::{MOVED_PARTS_IN_FLIGHT, Source, one_from};
use crate::tiers::StoreError;
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

    /// Where a partition's stream ends in the store.
    #[must_use]
    pub fn end(&self, partition: PartitionId) -> u64 {
        self.shuffle.stream_bytes(partition)
    }

    /// Where those of all partitions do.
    #[must_use]
    pub fn ends(&self) -> HashMap<PartitionId, u64> {
        self.shuffle.ends()
    }

    /// Brings up one object of what `source` has; its payload, or none when there is nothing. When this returns it can be
    /// read from the store.
    ///
    /// # Errors
    /// The source's or the store's: nothing of it counts then.
    pub async fn take(&self, source: &mut dyn Source) -> Result<Option<u64>, StoreError> {
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
