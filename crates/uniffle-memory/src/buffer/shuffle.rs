//! The buffers of one shuffle, by partition.
//!
//! A buffer is created by the first write to its partition and exists until the shuffle is purged.
//! Invariant: after a purge no buffer can be created, so a send that is still running cannot bring
//! data of the shuffle back.

use std::sync::Arc;

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use parking_lot::RwLock;

use crate::admission::metadata_reserve::SPARE_BYTES;
use crate::admission::reservation::Reservation;
use crate::buffer::{Buffer, BufferContext, PARTITION_BYTES};
use crate::error::MemoryError;
use crate::persistent::names::ShuffleName;
use uniffle_base::budget::{Budget, Charge, HeapFull, HeapKind, NoCapacity};
use uniffle_wire::types::{Distribution, PartitionId, ShuffleKey};

/// A buffer that a flush could take from.
#[derive(Debug, Clone)]
pub struct FlushableBuffer {
    /// The shuffle.
    pub key: ShuffleKey,
    /// Order of the blocks in the shuffle's extents.
    pub distribution: Distribution,
    /// The buffer.
    pub buffer: Arc<Buffer>,
    /// Payload bytes that a seal would take.
    pub active_bytes: u64,
    /// Number of blocks that a seal would take.
    pub active_blocks: usize,
    /// Number of its batches that are being flushed.
    pub in_flight_batches: usize,
}

/// Buffers of a purged shuffle. Dropping it frees their memory, which takes a while for
/// gigabytes, so it must not be dropped under a lock.
#[derive(Debug)]
#[must_use = "dropped under a lock it keeps others waiting"]
pub struct PurgedBuffers(pub(crate) Arc<ShuffleBuffers>);

impl Drop for PurgedBuffers {
    fn drop(&mut self) {
        self.0.purge();
        self.0.shared.supply.lists.give_back(SPARE_BYTES);
    }
}

/// Amounts of one shuffle in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InMemory {
    /// The shuffle.
    pub shuffle: ShuffleKey,
    /// Number of partitions with blocks in memory.
    pub partitions: usize,
    /// Number of blocks.
    pub blocks: u64,
    /// Payload bytes.
    pub bytes: u64,
}

/// The buffers of one shuffle, created when a partition is first written to.
#[derive(Debug)]
pub struct ShuffleBuffers {
    key: ShuffleKey,
    distribution: Distribution,
    shared: Arc<BufferContext>,
    /// Name for the next process, if the memory outlives this one.
    pub(crate) name: Option<Arc<ShuffleName>>,
    /// Budget of the application.
    pub(crate) budget: Budget,
    /// Buffers by partition. `None` after a purge, so that a concurrent send cannot create a buffer
    /// again.
    buffers: RwLock<Option<HashMap<PartitionId, Arc<Buffer>>>>,
}

impl ShuffleBuffers {
    pub(crate) fn new(
        key: ShuffleKey,
        distribution: Distribution,
        shared: Arc<BufferContext>,
        name: Option<Arc<ShuffleName>>,
        budget: Budget,
    ) -> Self {
        Self { key, distribution, shared, name, budget, buffers: RwLock::new(Some(HashMap::new())) }
    }

    pub(crate) fn contents(&self) -> Option<InMemory> {
        let mut total = InMemory { shuffle: self.key.clone(), partitions: 0, blocks: 0, bytes: 0 };
        for buffer in self.all() {
            let blocks = buffer.block_count() as u64;
            total.partitions += usize::from(blocks > 0);
            total.blocks += blocks;
            total.bytes += buffer.in_memory_bytes();
        }
        (total.blocks > 0).then_some(total)
    }

    /// Returns the shuffle.
    #[must_use]
    pub fn key(&self) -> &ShuffleKey {
        &self.key
    }

    /// Returns the order of the blocks in its extents.
    #[must_use]
    pub fn distribution(&self) -> Distribution {
        self.distribution
    }

    /// Returns the buffer of `partition`, created on demand and charged to `heap`, the
    /// application's part of [`HeapKind::Partitions`].
    ///
    /// # Errors
    /// `Purged` when the shuffle was purged, `NoHeap` when the heap is full.
    pub fn buffer(&self, partition: PartitionId, heap: &Budget) -> Result<Arc<Buffer>, MemoryError> {
        self.buffer_of(partition, |bytes| heap.try_charge(bytes))
    }

    pub(crate) fn buffer_of(
        &self,
        partition: PartitionId,
        charge: impl FnOnce(u64) -> Result<Charge, NoCapacity>,
    ) -> Result<Arc<Buffer>, MemoryError> {
        if let Some(buffer) = self.existing(partition) {
            return Ok(buffer);
        }
        let mut buffers = self.buffers.write();
        match buffers.as_mut().ok_or(MemoryError::Purged)?.entry(partition) {
            Entry::Occupied(there) => Ok(Arc::clone(there.get())),
            Entry::Vacant(place) => {
                let full = |refusal| HeapFull::of(HeapKind::Partitions, refusal);
                let charge = charge(PARTITION_BYTES).map_err(full)?;
                let (shared, name) = (Arc::clone(&self.shared), self.name.clone());
                let buffer = Buffer::new(partition, shared, name, self.budget.clone(), charge);
                Ok(Arc::clone(place.insert(Arc::new(buffer))))
            }
        }
    }

    /// Returns the buffer of `partition` if it was ever written to.
    #[must_use]
    pub fn existing(&self, partition: PartitionId) -> Option<Arc<Buffer>> {
        self.buffers.read().as_ref()?.get(&partition).cloned()
    }

    /// Pays for the metadata of `blocks` blocks at once, so that the commits of their partitions
    /// need not.
    ///
    /// # Errors
    /// `TooManyBlocks` at the limit, `NoCapacity` when the region has no room for their records.
    pub fn pay_for_blocks(&self, blocks: usize, funds: &mut Reservation) -> Result<(), MemoryError> {
        // Blocks that cross segments need more rows. Their commits pay for those.
        let rows = if self.name.as_ref().is_some_and(|name| name.get().is_some()) { blocks } else { 0 };
        self.shared.pay_for_blocks(blocks, rows, funds).map(drop)
    }

    /// Returns all buffers.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<Buffer>> {
        self.buffers.read().as_ref().map_or_else(Vec::new, |buffers| buffers.values().cloned().collect())
    }

    /// Takes a name for the shuffle and creates rows for all its blocks, if they are missing and
    /// there is room now.
    pub(crate) fn protect(&self) {
        let Some(name) = self.name.as_ref().filter(|name| name.is_partial() && name.take()) else { return };
        // Buffers created from here on have rows from the beginning.
        if self.all().iter().all(|buffer| buffer.protect()) {
            name.set_whole();
        }
    }

    pub(crate) fn candidates(&self) -> Vec<FlushableBuffer> {
        let buffers = self.buffers.read();
        let mut found = Vec::new();
        for buffer in buffers.iter().flat_map(HashMap::values) {
            buffer.drop_dead();
            let active_bytes = buffer.active_bytes();
            let active_blocks = buffer.active_blocks();
            if active_blocks > 0 {
                let in_flight_batches = buffer.in_flight_batches();
                let (key, distribution) = (self.key.clone(), self.distribution);
                found.push(FlushableBuffer {
                    key,
                    distribution,
                    buffer: Arc::clone(buffer),
                    active_bytes,
                    active_blocks,
                    in_flight_batches,
                });
            }
        }
        found
    }

    fn purge(&self) {
        let buffers = self.buffers.write().take();
        for buffer in buffers.iter().flat_map(HashMap::values) {
            buffer.purge();
        }
    }
}
