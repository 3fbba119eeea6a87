//! Shuffle data in memory: one bounded region, tickets that promise parts of it, and a buffer per partition.
//!
//! Not here: when to flush ([`crate::flush`]), where to ([`crate::tiers`]), who may send ([`crate::service`]).
//!
//! | file | holds |
//! | --- | --- |
//! | [`region`], `buddy` | the mapping, its segments; which of them are free |
//! | [`ticket`], `reservation` | capacity promised by `requireBuffer`, and what is left of it |
//! | [`fair`], [`claims`] | who may have how much when there is not enough for all; who holds and who waits |
//! | [`chain`], `list`, [`buffer`], [`sealed`], [`read`] | one partition: segments, blocks, batches, reads |
//! | `ceded` | heap for the lists of blocks, with room of the region |
//! | [`pool`], `line` | buffers for reads from disk; who is next when they are short |
//!
//! Bounded by construction: resident memory is at most the region, and nothing enters it without a charge. After all
//! shuffles are purged and all readers gone, every counter is zero and the region is whole again.

pub mod buffer;
pub mod chain;
pub mod claims;
pub mod error;
pub mod fair;
pub mod pool;
pub mod read;
pub mod region;
pub mod reservation;
pub mod sealed;
pub mod ticket;

mod buddy;
mod ceded;
mod line;
mod list;
pub(crate) mod metrics;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use dashmap::DashMap;
use parking_lot::RwLock;
use prometheus::Registry;
use tokio::sync::Notify;
use tokio::time::Instant;

pub use crate::budget::{Budget, Charge, NoCapacity};
pub use buffer::{Before, Buffer, Committed};
pub use chain::BlockFill;
pub use claims::Standing;
pub use error::MemoryError;
pub use fair::Claimant;
pub use pool::{ReadBuf, ReadPool};
pub use read::{MemoryRead, READ_BLOCKS_MAX, SMALL_PIECE_BYTES, answer_heap_bytes};
pub use reservation::Reservation;
pub use sealed::{SealedBatch, SealedData, SealedExtent};
pub use ticket::Tickets;

use crate::budget::allowance::{divide, slack};
use crate::budget::{Heap, HeapFull, HeapKind};
use crate::schema::kind::{DAY, GIB, MIB, SECOND, TIB, count, seconds, size};
use crate::schema::section;

use buffer::{PARTITION_BYTES, Shared};
use ceded::{Ceded, SPARE_BYTES};
use chain::Supply;
use metrics::MemoryMetrics;
use region::Region;

use uniffle_wire::types::{AppId, Distribution, PartitionId, ShuffleKey};

use crate::metrics::clamped;

/// Least capacity: room for a handful of the largest segments.
const CAPACITY_BYTES_MIN: u64 = 16 << 20;

section! {
    /// How much memory there is and how it is promised.
    #[table("memory_store", "Memory for shuffle blocks, and for reads from disk.")]
    pub struct MemoryConfig |machine| {
        /// Bytes for shuffle blocks, reserved or stored. Default: 40 % of the machine's (or container's) memory, at least
        /// 256 MiB, at most 16 GiB, never more than half of it.
        #[key("memory_store.capacity", size(CAPACITY_BYTES_MIN..=16 * TIB), Restart, example "\"10G\"")]
        pub capacity_bytes: u64 = default_capacity_bytes(machine.memory_bytes),
        /// Bytes for reads from disk under way. Not part of the capacity. Default: its part of capacity × 1.05 + 200 MiB
        /// (docs/operations.md), 40 MiB and more.
        #[key("memory_store.read_buffer_capacity", size(4 * MIB..=64 * GIB), Restart, example "\"64MiB\"")]
        pub read_capacity_bytes: u64 = divide(capacity_bytes, machine.cores).reads,
        /// Bytes of heap for what clients make the worker hold beside blocks: requests that arrive, block metadata of sends
        /// that are not complete, registrations, reported block ids, partitions that were written to, answers. When a kind is
        /// used up, requests of that kind wait or are refused by its name. Not part of the capacity. Default: its part of capacity × 1.05 +
        /// 200 MiB, 68 MiB and a sixty-fourth of the capacity.
        #[key("memory_store.heap_capacity", size(32 * MIB..=TIB), Restart, example "\"1GiB\"")]
        pub heap_bytes: u64 = divide(capacity_bytes, machine.cores).heap,
        /// Life of a granted buffer ticket that is not used. While others wait for memory, one that its application has not
        /// used for half a second is taken back if the application has more than its share.
        #[key("memory_store.buffer_ticket_timeout_sec", seconds(SECOND..=DAY), Restart)]
        pub ticket_timeout: Duration = 20 * SECOND,
        /// Tickets outstanding at once.
        #[key("memory_store.buffer_ticket_max_count", count(1..=100_000_000), NextUse)]
        pub tickets_max: usize = 1_000_000,
        /// Blocks in memory at once; bounds their metadata. Default: one per 512 bytes of capacity.
        #[key("memory_store.block_max_count", count(1000..=1 << 32), Restart, example "20000000")]
        pub blocks_max: u64 = (capacity_bytes / 512).min(1 << 32),
    }
}

/// 40 % of the memory, from 256 MiB to 16 GiB, in whole 2 MiB blocks. A small machine gets less than the lower bound
/// rather than more than half of its memory.
fn default_capacity_bytes(memory_bytes: u64) -> u64 {
    const LEAST: u64 = 256 << 20;
    const MOST: u64 = 16 << 30;
    const BLOCK: u64 = 2 << 20;
    let share = (memory_bytes / 5).saturating_mul(2).clamp(LEAST, MOST);
    let capacity = share.min(memory_bytes / 2).max(CAPACITY_BYTES_MIN);
    capacity / BLOCK * BLOCK
}

/// All shuffle data in memory.
#[derive(Debug)]
pub struct Memory {
    shared: Arc<Shared>,
    heap: Heap,
    answered: Budget,
    tickets: Tickets,
    read_pool: ReadPool,
    shuffles: DashMap<ShuffleKey, Arc<ShuffleBuffers>>,
}

/// A buffer that a flush could take from.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// Its shuffle.
    pub key: ShuffleKey,
    /// How the shuffle's extents are ordered.
    pub distribution: Distribution,
    /// The buffer.
    pub buffer: Arc<Buffer>,
    /// Payload that a seal would take.
    pub active_bytes: u64,
    /// Blocks that a seal would take.
    pub active_blocks: usize,
    /// Batches taken from it and not released.
    pub in_flight_batches: usize,
}

impl Memory {
    /// Maps the memory. Pages that are never used cost nothing.
    ///
    /// # Errors
    /// When memory cannot be mapped or a metric's name is taken.
    pub fn new(config: &MemoryConfig, registry: &Registry) -> io::Result<Arc<Self>> {
        let capacity = config.capacity_bytes;
        let budget = Budget::new(capacity);
        let region = Region::new(capacity.saturating_add(slack(capacity)))?;
        let heap = Heap::new(config.heap_bytes);
        let lists = Ceded::new(Arc::clone(&region), budget.clone(), heap.of(HeapKind::Blocks));
        let extents = lists.extents().clone();
        let shared = Shared {
            supply: Supply { lists, region, blocks: Budget::new(config.blocks_max.min(u64::from(u32::MAX))) },
            budget: budget.clone(),
            in_flight: Budget::new(u64::MAX),
            in_flight_blocks: Budget::new(u64::MAX),
            hasher: hashbrown::DefaultHashBuilder::default(),
            metrics: MemoryMetrics::new(registry).map_err(io::Error::other)?,
        };
        Ok(Arc::new(Self {
            shared: Arc::new(shared),
            heap,
            answered: Budget::new(capacity / 2),
            tickets: Tickets::new(budget, extents, config.ticket_timeout, config.tickets_max),
            read_pool: ReadPool::new(config.read_capacity_bytes)?,
            shuffles: DashMap::new(),
        }))
    }

    /// What everything here is charged to.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.shared.budget
    }

    /// What is held beside blocks and reads is charged to.
    #[must_use]
    pub fn heap(&self) -> &Heap {
        &self.heap
    }

    /// What tiers remember of blocks that left memory is charged to this part of the capacity, whether there is room or not: see
    /// `ceded`.
    #[must_use]
    pub fn extents(&self) -> &Budget {
        self.shared.supply.lists.extents()
    }

    /// The region cedes what lists of extents have grown by. What it has no room for now it cedes later.
    pub fn cover_extents(&self) {
        let _ = self.shared.supply.lists.cover(0);
    }

    /// Bytes of blocks in answers that are not taken: half of the capacity at most. They stay where they are, flushed or
    /// not, until the reader has them.
    #[must_use]
    pub fn answered(&self) -> &Budget {
        &self.answered
    }

    /// The tickets.
    #[must_use]
    pub fn tickets(&self) -> &Tickets {
        &self.tickets
    }

    /// Drops tickets whose time ran out at `now` and counts them.
    pub fn expire_tickets(&self, now: Instant) -> usize {
        let expired = self.tickets.expire(now);
        self.shared.metrics.evicted_tickets.inc_by(expired as u64);
        self.shared.metrics.expired_tickets.inc_by(expired as u64);
        expired
    }

    /// Buffers for reads from disk.
    #[must_use]
    pub fn read_pool(&self) -> &ReadPool {
        &self.read_pool
    }

    /// The same for reads of `app`.
    #[must_use]
    pub fn read_pool_of(&self, app: &AppId) -> ReadPool {
        self.read_pool.of(app, self.tickets.weight_of(app))
    }

    /// The buffers of a shuffle, made if there are none. Registering again changes nothing.
    pub fn register(&self, key: &ShuffleKey, distribution: Distribution) -> Arc<ShuffleBuffers> {
        let budget = self.tickets.budget_of(&key.app);
        let fresh =
            || Arc::new(ShuffleBuffers::new(key.clone(), distribution, Arc::clone(&self.shared), budget));
        Arc::clone(&self.shuffles.entry(key.clone()).or_insert_with(fresh))
    }

    /// The buffers of a registered shuffle.
    #[must_use]
    pub fn shuffle(&self, key: &ShuffleKey) -> Option<Arc<ShuffleBuffers>> {
        self.shuffles.get(key).map(|buffers| Arc::clone(&buffers))
    }

    /// Forgets a shuffle at once; its buffers are evicted when the returned value is dropped, and sends under way find them
    /// so.
    pub fn forget(&self, key: &ShuffleKey) -> Option<Evicted> {
        self.shuffles.remove(key).map(|(_, buffers)| Evicted(buffers))
    }

    /// All buffers with something to flush. Gives back dead segments of the others in passing, and what is ceded for lists
    /// that are gone.
    #[must_use]
    pub fn candidates(&self) -> Vec<Candidate> {
        self.cover_extents();
        self.shared.supply.lists.give_back(SPARE_BYTES);
        // Two steps, so that no lock of the map is held while buffers are asked.
        let shuffles: Vec<_> = self.shuffles.iter().map(|entry| Arc::clone(entry.value())).collect();
        shuffles.iter().flat_map(|shuffle| shuffle.candidates()).collect()
    }

    /// What is in memory, the shuffle with the most bytes first.
    #[must_use]
    pub fn contents(&self) -> Vec<InMemory> {
        let shuffles: Vec<_> = self.shuffles.iter().map(|entry| Arc::clone(entry.value())).collect();
        let mut contents: Vec<_> = shuffles.iter().filter_map(|shuffle| shuffle.contents()).collect();
        contents.sort_unstable_by_key(|shuffle| std::cmp::Reverse(shuffle.bytes));
        contents
    }

    /// Notified when a request was refused for want of bytes or blocks. The watermarks are the flusher's own affair:
    /// it looks after every commit.
    #[must_use]
    pub fn pressure(&self) -> &Notify {
        self.shared.budget.pressure()
    }

    /// Bytes for shuffle data in all.
    #[must_use]
    pub fn capacity_bytes(&self) -> u64 {
        self.shared.budget.capacity()
    }

    /// Bytes reserved or stored, metadata and batches in flight included.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.shared.budget.used()
    }

    /// Bytes reserved and not stored yet.
    #[must_use]
    pub fn pre_allocated_bytes(&self) -> u64 {
        self.tickets.pre_allocated_bytes()
    }

    /// Charged bytes of batches taken by the flusher and still alive.
    #[must_use]
    pub fn in_flight_bytes(&self) -> u64 {
        self.shared.in_flight.used()
    }

    /// Blocks of batches taken by the flusher and still alive.
    #[must_use]
    pub fn in_flight_blocks(&self) -> u64 {
        self.shared.in_flight_blocks.used()
    }

    /// Blocks in memory.
    #[must_use]
    pub fn block_count(&self) -> u64 {
        self.shared.supply.blocks.used()
    }

    /// Largest number of blocks in memory.
    #[must_use]
    pub fn blocks_max(&self) -> u64 {
        self.shared.supply.blocks.capacity()
    }

    /// Writes the live values into the gauges; the scraper calls it before it gathers.
    pub fn refresh_metrics(&self) {
        let metrics = &self.shared.metrics;
        let (used, reserved) = (self.used_bytes(), self.pre_allocated_bytes());
        metrics.used_buffer_size.set(clamped(used));
        metrics.memory_used.set(clamped(used.saturating_sub(reserved)));
        metrics.allocated_buffer_size.set(clamped(reserved));
        metrics.memory_allocated.set(clamped(reserved));
        metrics.memory_capacity.set(clamped(self.capacity_bytes()));
        metrics.in_flush_buffer_size.set(clamped(self.in_flight_bytes()));
        metrics.block_count.set(clamped(self.block_count()));
        metrics.in_flight_blocks.set(clamped(self.in_flight_blocks()));
        metrics.read_used_buffer_size.set(clamped(self.read_pool.used_bytes()));
        metrics.read_waits.inc_by(self.read_pool.waits().saturating_sub(metrics.read_waits.get()));
        metrics.taken_back.inc_by(self.tickets.taken_back().saturating_sub(metrics.taken_back.get()));
        metrics.tickets.set(clamped(self.tickets.count() as u64));
        metrics.shuffles.set(clamped(self.shuffles.len() as u64));
        let buffers: usize = self.shuffles.iter().map(|shuffle| shuffle.all().len()).sum();
        metrics.buffers.set(clamped(buffers as u64));
        metrics.answered.set(clamped(self.answered.used()));
        for kind in HeapKind::ALL {
            metrics.heap.with_label_values(&[kind.name()]).set(clamped(self.heap.of(kind).used()));
        }
        metrics.heap_capacity.set(clamped(self.heap.whole().capacity()));
        let Supply { region, lists, .. } = &self.shared.supply;
        lists.give_back(SPARE_BYTES);
        metrics.region_touched.set(clamped(region.touched_bytes()));
        metrics.lists.set(clamped(lists.charged_bytes()));
        metrics.ceded.set(clamped(lists.ceded_bytes()));
    }
}

/// Buffers of a shuffle that was forgotten. Dropping it gives their memory back, which takes a while when it is gigabytes:
/// not under a lock.
#[derive(Debug)]
#[must_use = "dropped under a lock it keeps others waiting"]
pub struct Evicted(Arc<ShuffleBuffers>);

impl Drop for Evicted {
    fn drop(&mut self) {
        self.0.purge();
        self.0.shared.supply.lists.give_back(SPARE_BYTES);
    }
}

/// What one shuffle has in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InMemory {
    /// Which.
    pub shuffle: ShuffleKey,
    /// Partitions with something in memory.
    pub partitions: usize,
    /// Blocks.
    pub blocks: u64,
    /// Payload bytes.
    pub bytes: u64,
}

/// The buffers of one shuffle, made when a partition is first written to.
#[derive(Debug)]
pub struct ShuffleBuffers {
    key: ShuffleKey,
    distribution: Distribution,
    shared: Arc<Shared>,
    /// Its application's.
    budget: Budget,
    /// `None` once purged, so that a send that raced with the purge cannot bring a buffer back.
    buffers: RwLock<Option<HashMap<PartitionId, Arc<Buffer>>>>,
}

impl ShuffleBuffers {
    fn new(key: ShuffleKey, distribution: Distribution, shared: Arc<Shared>, budget: Budget) -> Self {
        Self { key, distribution, shared, budget, buffers: RwLock::new(Some(HashMap::new())) }
    }

    fn contents(&self) -> Option<InMemory> {
        let mut total = InMemory { shuffle: self.key.clone(), partitions: 0, blocks: 0, bytes: 0 };
        for buffer in self.all() {
            let blocks = buffer.block_count() as u64;
            total.partitions += usize::from(blocks > 0);
            total.blocks += blocks;
            total.bytes += buffer.in_memory_bytes();
        }
        (total.blocks > 0).then_some(total)
    }

    /// The shuffle.
    #[must_use]
    pub fn key(&self) -> &ShuffleKey {
        &self.key
    }

    /// How its extents are ordered.
    #[must_use]
    pub fn distribution(&self) -> Distribution {
        self.distribution
    }

    /// The buffer of `partition`, made if there is none and charged to `heap`, its application's part of the kind
    /// [`HeapKind::Partitions`].
    ///
    /// # Errors
    /// `Evicted` when the shuffle was purged, `NoHeap`.
    pub fn buffer(&self, partition: PartitionId, heap: &Budget) -> Result<Arc<Buffer>, MemoryError> {
        if let Some(buffer) = self.existing(partition) {
            return Ok(buffer);
        }
        let mut buffers = self.buffers.write();
        match buffers.as_mut().ok_or(MemoryError::Evicted)?.entry(partition) {
            Entry::Occupied(there) => Ok(Arc::clone(there.get())),
            Entry::Vacant(place) => {
                let full = |refusal| HeapFull::of(HeapKind::Partitions, refusal);
                let charge = heap.try_charge(PARTITION_BYTES).map_err(full)?;
                let buffer = Buffer::new(partition, Arc::clone(&self.shared), self.budget.clone(), charge);
                Ok(Arc::clone(place.insert(Arc::new(buffer))))
            }
        }
    }

    /// The buffer of `partition` if it was ever written to.
    #[must_use]
    pub fn existing(&self, partition: PartitionId) -> Option<Arc<Buffer>> {
        self.buffers.read().as_ref()?.get(&partition).cloned()
    }

    /// All buffers there are.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<Buffer>> {
        self.buffers.read().as_ref().map_or_else(Vec::new, |buffers| buffers.values().cloned().collect())
    }

    fn candidates(&self) -> Vec<Candidate> {
        let buffers = self.buffers.read();
        let mut found = Vec::new();
        for buffer in buffers.iter().flat_map(HashMap::values) {
            buffer.drop_dead();
            let active_bytes = buffer.active_bytes();
            let active_blocks = buffer.active_blocks();
            if active_blocks > 0 {
                let in_flight_batches = buffer.in_flight_batches();
                let (key, distribution) = (self.key.clone(), self.distribution);
                found.push(Candidate {
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
            buffer.evict();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacity_is_a_share_within_bounds() {
        assert_eq!(default_capacity_bytes(10 << 30), 4 << 30);
        assert_eq!(default_capacity_bytes(1 << 40), 16 << 30);
        assert_eq!(default_capacity_bytes(600 << 20), 256 << 20);
        assert_eq!(default_capacity_bytes(256 << 20), 128 << 20);
        assert_eq!(default_capacity_bytes(0), CAPACITY_BYTES_MIN);
    }
}
