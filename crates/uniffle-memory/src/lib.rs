//! Shuffle data in memory: one bounded region, tickets that promise parts of it, and a buffer per
//! partition.
//!
//! The worker decides when to flush (`flush`), where to (`store`), and who may send (`service`).
//!
//! Invariant: the resident bytes of blocks are at most the region, and nothing enters it without a
//! charge. After all shuffles are purged and all readers are gone, every counter is zero and the
//! region is whole again.

pub mod admission;
pub mod region;

mod buffer;
mod config;
mod error;
mod metrics;
mod persistent;

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dashmap::DashMap;
use parking_lot::Mutex;
use prometheus::Registry;
use tokio::sync::Notify;

pub use admission::fair::Claimant;
pub use admission::fair_shares::Standing;
pub use admission::read_pool::{ReadBuf, ReadPool};
pub use admission::reservation::Reservation;
pub use admission::ticket::{Outstanding, Tickets};
pub use buffer::chain::BlockFill;
pub use buffer::read::{MemoryRead, READ_BLOCKS_MAX, ReadLimit, SMALL_PIECE_BYTES, answer_heap_bytes};
pub use buffer::sealed::{SealedBatch, SealedData, SealedExtent};
pub use buffer::shuffle::{FlushableBuffer, InMemory, PurgedBuffers, ShuffleBuffers};
pub use buffer::{Buffer, CommitOutcome, EarlierBlocks};
pub use config::{BlockPages, HugePages, MemoryConfig, Prefault};
pub use error::MemoryError;
pub use persistent::file::take_inherited;
pub use persistent::file::{Backing, MemoryFileError, Owner};
pub use persistent::huge::describe as describe_huge_pages;
pub use persistent::orphaned::OrphanedMemory;
pub use uniffle_base::budget::{Budget, Charge, NoCapacity};

use uniffle_base::allocator::return_freed;
use uniffle_base::budget::{Heap, HeapKind};
use uniffle_base::clock::Instant;
use uniffle_base::metrics::{Description, clamped};
use uniffle_wire::types::{AppId, BlockId, Distribution, ShuffleKey};

use admission::metadata_reserve::{MetadataReserve, SPARE_BYTES};
use admission::prefaulter::Prefaulter;
use buffer::chain::Supply;
use buffer::{BufferContext, PARTITION_BYTES, Verification};
use config::{blocks_max, region_size};
use metrics::MemoryMetrics;
use persistent::file::{self, BackingFile};
use persistent::names::ShuffleName;
use persistent::restore::{RetainedShuffle, Search};
use persistent::table::BlockTable;
use region::Region;

/// Freed heap bytes that the allocator may keep, and the step of charges after which they are
/// returned. Both are in the base of `budget::memory_plan`.
const FREED_BYTES_MAX: u64 = 8 << 20;

/// Returns the descriptions of all metrics of this crate.
#[must_use]
pub fn metric_descriptions() -> Vec<Description> {
    MemoryMetrics::described()
}

/// All shuffle data in memory.
#[derive(Debug)]
pub struct Memory {
    shared: Arc<BufferContext>,
    heap: Heap,
    answered: Budget,
    tickets: Tickets,
    read_pool: ReadPool,
    shuffles: DashMap<ShuffleKey, Arc<ShuffleBuffers>>,
    persistent: Option<PersistentMemory>,
    /// Allocates pages ahead of promises. Only for memory in a file.
    prefaulter: Option<Arc<Prefaulter>>,
    block_pages: BlockPages,
}

/// Tells whether a tier has a block of a partition ([`Memory::restore`]).
pub type IsElsewhere<'a> = Box<dyn Fn(BlockId) -> bool + 'a>;

/// Memory that outlives the process.
#[derive(Debug)]
struct PersistentMemory {
    table: Arc<BlockTable>,
    /// Recovered blocks until the start is complete.
    recovered: Mutex<Search>,
    /// Recovered blocks of shuffles that only a later start may know. They are kept until the
    /// shuffles are registered or end.
    retained: Mutex<HashMap<ShuffleKey, RetainedShuffle>>,
    file: Arc<BackingFile>,
    /// The file was found removed, replaced or truncated.
    has_vanished: AtomicBool,
}

impl Memory {
    /// Maps private memory, whatever the configured backing. Unused pages cost nothing.
    ///
    /// # Errors
    /// When memory cannot be mapped or a metric's name is taken.
    pub fn new(config: &MemoryConfig, registry: &Registry) -> io::Result<Arc<Self>> {
        Self::in_region(config, None, registry)
    }

    /// Maps memory of the configured backing: `inherited`, if an earlier process handed over a
    /// file, otherwise an existing or a new one. [`Memory::restore`] makes recovered blocks
    /// visible, and [`Memory::finish_restore`] ends the recovery.
    ///
    /// # Errors
    /// Errors of [`Memory::new`], or the reason why the worker may not take the region.
    pub fn open(
        config: &MemoryConfig,
        owner: &Owner,
        inherited: Option<OwnedFd>,
        registry: &Registry,
    ) -> Result<Arc<Self>, MemoryFileError> {
        let opened = file::open(&config.backing, inherited, owner, region_size(config))?;
        Ok(Self::in_region(config, opened, registry)?)
    }

    fn in_region(
        config: &MemoryConfig,
        opened: Option<file::Opened>,
        registry: &Registry,
    ) -> io::Result<Arc<Self>> {
        let capacity = config.capacity_bytes;
        let budget = Budget::new(capacity);
        let region = match &opened {
            Some((table, _)) => Arc::clone(table.region()),
            None => Region::new(region_size(config).bytes)?,
        };
        let block_pages = config.block_pages();
        region.advise_huge_pages(block_pages == BlockPages::Huge);
        // A region that has grown keeps its previous block table.
        let rows_max = opened.as_ref().map_or(u64::MAX, |(table, _)| table.rows_max());
        let blocks = Budget::new(blocks_max(config).min(rows_max));
        let persistent = opened.map(|(table, file)| PersistentMemory {
            recovered: Mutex::new(Search::begin(&table)),
            retained: Mutex::default(),
            table,
            file: Arc::new(file),
            has_vanished: AtomicBool::new(false),
        });
        let heap = Heap::returning(config.heap_bytes, FREED_BYTES_MAX, || return_freed(FREED_BYTES_MAX));
        let lists =
            Arc::new(MetadataReserve::new(Arc::clone(&region), budget.clone(), heap.of(HeapKind::Blocks)));
        if let Some(PersistentMemory { table, .. }) = &persistent {
            if table.was_used() {
                lists.pause();
            }
            table.charge_to(&budget, &lists);
        }
        let extents = lists.extents().clone();
        let prefaulter = persistent.is_some().then(|| Prefaulter::new(Arc::clone(&region), budget.clone()));
        let mut tickets = Tickets::new(budget.clone(), extents, config.ticket_timeout, config.tickets_max);
        if let Some(prefaulter) = &prefaulter {
            tickets.take_pages_by(Arc::clone(prefaulter));
        }
        let shared = BufferContext {
            supply: Supply { lists, region, blocks },
            budget,
            in_flight: Budget::new(u64::MAX),
            in_flight_blocks: Budget::new(u64::MAX),
            hasher: hashbrown::DefaultHashBuilder::default(),
            metrics: MemoryMetrics::new(registry).map_err(io::Error::other)?,
            verification: Verification::default(),
        };
        Ok(Arc::new(Self {
            shared: Arc::new(shared),
            heap,
            answered: Budget::new(capacity / 2),
            tickets,
            read_pool: ReadPool::new(config.read_capacity_bytes)?
                .with_huge_pages(config.has_huge_read_pages()),
            shuffles: DashMap::new(),
            persistent,
            prefaulter,
            block_pages,
        }))
    }

    /// Returns the budget that all shuffle data is charged to.
    #[must_use]
    #[inline]
    pub fn budget(&self) -> &Budget {
        &self.shared.budget
    }

    /// Returns the heap budget for everything except blocks and reads.
    #[must_use]
    #[inline]
    pub fn heap(&self) -> &Heap {
        &self.heap
    }

    /// Returns the part of the capacity for extent lists of blocks that left memory. Charged even
    /// without room, see `metadata_reserve`.
    #[must_use]
    pub fn extents(&self) -> &Budget {
        self.shared.supply.lists.extents()
    }

    /// Makes the region cede the growth of extent lists. Bytes without room now are ceded later.
    pub fn cover_extents(&self) {
        let _ = self.shared.supply.lists.cover(0);
    }

    /// Returns the budget of block bytes in responses that clients have not taken: at most half of
    /// the capacity. These bytes stay in memory, flushed or not, until the reader has them.
    #[must_use]
    pub fn answered(&self) -> &Budget {
        &self.answered
    }

    /// Returns the tickets.
    #[must_use]
    #[inline]
    pub fn tickets(&self) -> &Tickets {
        &self.tickets
    }

    /// Drops the tickets that expired at `now`. Returns their number.
    pub fn expire_tickets(&self, now: Instant) -> usize {
        let expired = self.tickets.expire(now);
        self.shared.metrics.evicted_tickets.inc_by(expired as u64);
        self.shared.metrics.expired_tickets.inc_by(expired as u64);
        expired
    }

    /// Returns the buffers for reads from disk.
    #[must_use]
    #[inline]
    pub fn read_pool(&self) -> &ReadPool {
        &self.read_pool
    }

    /// Returns the buffers for reads of `app` from disk.
    #[must_use]
    pub fn read_pool_of(&self, app: &AppId) -> ReadPool {
        self.read_pool.of(app, self.tickets.weight_of(app))
    }

    /// Returns the buffers of a shuffle, created on demand. Registering again changes nothing.
    pub fn register(&self, key: &ShuffleKey, distribution: Distribution) -> Arc<ShuffleBuffers> {
        let budget = self.tickets.budget_of(&key.app);
        let fresh = || {
            self.drop_retained(|retained| retained == key);
            let (name, shared) = (self.name_of(key), Arc::clone(&self.shared));
            Arc::new(ShuffleBuffers::new(key.clone(), distribution, shared, name, budget))
        };
        Arc::clone(&self.shuffles.entry(key.clone()).or_insert_with(fresh))
    }

    /// Returns the shuffle's name for the next process. Reuses the name that an earlier process
    /// gave it.
    fn name_of(&self, key: &ShuffleKey) -> Option<Arc<ShuffleName>> {
        let PersistentMemory { table, recovered, .. } = self.persistent.as_ref()?;
        let earlier = recovered.lock().found().and_then(|recovered| recovered.name(key));
        Some(ShuffleName::new(table, key, earlier.or_else(|| table.name(key))))
    }

    /// Returns the number of partitions of known shuffles that were ever written to.
    #[must_use]
    pub fn partitions(&self) -> u64 {
        self.heap().of(HeapKind::Partitions).used() / PARTITION_BYTES
    }

    /// Returns the buffers of a registered shuffle.
    #[must_use]
    pub fn shuffle(&self, key: &ShuffleKey) -> Option<Arc<ShuffleBuffers>> {
        self.shuffles.get(key).map(|buffers| Arc::clone(&buffers))
    }

    /// Forgets a shuffle at once. Its buffers are purged when the returned value is dropped; sends
    /// in progress then fail with `Purged`.
    pub fn forget(&self, key: &ShuffleKey) -> Option<PurgedBuffers> {
        self.drop_retained(|retained| retained == key);
        let (_, buffers) = self.shuffles.remove(key)?;
        // Before the shuffle can be registered again: its blocks must not be recovered as those of
        // its successor.
        buffers.name.iter().for_each(|name| name.disown());
        Some(PurgedBuffers(buffers))
    }

    /// Lets the kernel replace the small pages of block memory that is in use by huge ones, if this
    /// is configured. To be called from time to time, because more memory comes into use.
    pub fn advise_used_pages(&self) {
        if self.block_pages == BlockPages::HugeAfterUse {
            self.shared.supply.region.advise_used_pages();
        }
    }

    /// Starts a thread of the lowest priority that allocates the pages of unused block memory. It
    /// ends when all are allocated, when one is refused, or when the memory is dropped.
    pub fn prefault(self: &Arc<Self>) {
        let memory = Arc::downgrade(self);
        let take = move || {
            // Applies to this thread. If it fails, the pages are allocated at the usual priority.
            let _ = rustix::process::setpriority_process(None, 19);
            while let Some(memory) = memory.upgrade() {
                match memory.shared.supply.region.prefault_block() {
                    Ok(true) => {}
                    Ok(false) => {
                        tracing::info!(
                            bytes = memory.capacity_bytes(),
                            "all pages of block memory are allocated"
                        );
                        return;
                    }
                    Err(error) => {
                        tracing::warn!(%error, "memory_store.prefault ended early; requests allocate the other pages");
                        return;
                    }
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("prefault".to_owned()).spawn(take) {
            tracing::warn!(%error, "cannot start a thread for memory_store.prefault; requests allocate pages");
        }
    }

    /// Returns the bytes of the capacity that cannot be used because the file gets no pages for
    /// them.
    #[must_use]
    pub fn unavailable_bytes(&self) -> u64 {
        self.prefaulter.as_ref().map_or(0, |prefaulter| prefaulter.unavailable_bytes())
    }

    /// Returns all buffers with something to flush. Also frees the dead segments of all buffers,
    /// and ceded memory of dropped lists.
    #[must_use]
    pub fn candidates(&self) -> Vec<FlushableBuffer> {
        self.cover_extents();
        self.shared.supply.lists.give_back(SPARE_BYTES);
        // Two steps, so that no lock of the map is held while buffers are queried.
        let shuffles: Vec<_> = self.shuffles.iter().map(|entry| Arc::clone(entry.value())).collect();
        shuffles.iter().flat_map(|shuffle| shuffle.candidates()).collect()
    }

    /// Returns the in-memory amounts per shuffle, the largest first.
    #[must_use]
    pub fn contents(&self) -> Vec<InMemory> {
        let shuffles: Vec<_> = self.shuffles.iter().map(|entry| Arc::clone(entry.value())).collect();
        let mut contents: Vec<_> = shuffles.iter().filter_map(|shuffle| shuffle.contents()).collect();
        contents.sort_unstable_by_key(|shuffle| std::cmp::Reverse(shuffle.bytes));
        contents
    }

    /// Returns the notification of requests refused for lack of bytes or blocks. A successful
    /// commit does not notify: the service lets the flusher check its watermarks after it.
    #[must_use]
    pub fn pressure(&self) -> &Notify {
        self.shared.budget.pressure()
    }

    /// Returns the capacity for shuffle data in bytes.
    #[must_use]
    pub fn capacity_bytes(&self) -> u64 {
        self.shared.budget.capacity()
    }

    /// Returns the bytes reserved or stored, including metadata and batches in flight.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.shared.budget.used()
    }

    /// Returns the bytes reserved and not stored yet.
    #[must_use]
    pub fn pre_allocated_bytes(&self) -> u64 {
        self.tickets.pre_allocated_bytes()
    }

    /// Returns the charged bytes of batches that the flusher took and that still exist.
    #[must_use]
    pub fn in_flight_bytes(&self) -> u64 {
        self.shared.in_flight.used()
    }

    /// Returns the number of blocks of batches that the flusher took and that still exist.
    #[must_use]
    pub fn in_flight_blocks(&self) -> u64 {
        self.shared.in_flight_blocks.used()
    }

    /// Returns the number of blocks in memory.
    #[must_use]
    pub fn block_count(&self) -> u64 {
        self.shared.supply.blocks.used()
    }

    /// Returns the maximum number of blocks in memory.
    #[must_use]
    pub fn blocks_max(&self) -> u64 {
        self.shared.supply.blocks.capacity()
    }

    /// Writes the live values into the gauges. Called before each scrape.
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
        metrics.revoked.inc_by(self.tickets.revoked().saturating_sub(metrics.revoked.get()));
        metrics.tickets.set(clamped(self.tickets.count() as u64));
        metrics.shuffles.set(clamped(self.shuffles.len() as u64));
        let buffers: usize = self.shuffles.iter().map(|shuffle| shuffle.all().len()).sum();
        metrics.buffers.set(clamped(buffers as u64));
        metrics.answered.set(clamped(self.answered.used()));
        for kind in HeapKind::ALL {
            let (label, budget) = ([kind.name()], self.heap.of(kind));
            metrics.heap.with_label_values(&label).set(clamped(budget.used()));
            metrics.heap_kind_capacity.with_label_values(&label).set(clamped(budget.capacity()));
        }
        metrics.heap_capacity.set(clamped(self.heap.whole().capacity()));
        let Supply { region, lists, .. } = &self.shared.supply;
        lists.give_back(SPARE_BYTES);
        metrics.unavailable.set(clamped(self.unavailable_bytes()));
        metrics.unprotected.set(clamped(self.unprotected_shuffles()));
        metrics.backing_vanished.set(i64::from(self.backing_fault().is_some()));
        metrics.region_touched.set(clamped(region.touched_bytes()));
        metrics.lists.set(clamped(lists.charged_bytes()));
        metrics.ceded.set(clamped(lists.ceded_bytes()));
    }
}

impl Drop for Memory {
    /// Releases the table, so that dropping the blocks does not remove them from a region that
    /// outlives the process.
    fn drop(&mut self) {
        if let Some(persistent) = &self.persistent {
            persistent.table.release();
        }
    }
}
