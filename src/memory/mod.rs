//! Shuffle data in memory: one bounded region, tickets that promise parts of it, and a buffer per partition.
//!
//! Not here: when to flush ([`crate::flush`]), where to ([`crate::tiers`]), who may send ([`crate::service`]).
//!
//! | file | holds |
//! | --- | --- |
//! | [`region`], `buddy` | the mapping, its segments; which of them are free |
//! | [`ticket`], `reservation` | capacity promised by `requireBuffer`, and what is left of it |
//! | [`fair`], [`claims`] | who may have how much when there is not enough for all; who holds and who waits |
//! | `shuffle` | the buffers of one shuffle |
//! | [`chain`], `list`, [`buffer`], [`sealed`], [`read`] | one partition: segments, blocks, batches, reads |
//! | `persistent` | what of it outlives the process, where it is to |
//! | `outlives` | that, from the start that restores it to the end that leaves it |
//! | `ahead` | pages for it, taken before they are needed |
//! | `ceded` | heap for the lists of blocks, with room of the region |
//! | `parts` | work of a start, divided among threads |
//! | `config` | how much there is |
//! | [`pool`] | buffers for reads from disk |
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

mod ahead;
mod buddy;
mod ceded;
mod config;
mod list;
pub(crate) mod metrics;
mod outlives;
mod parts;
mod persistent;
mod protection;
mod shuffle;

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dashmap::DashMap;
use parking_lot::Mutex;
use prometheus::Registry;
use tokio::sync::Notify;

pub use crate::budget::{Budget, Charge, NoCapacity};
pub use buffer::{Before, Buffer, Committed};
pub use chain::BlockFill;
pub use claims::Standing;
pub use config::{HugePages, MemoryConfig, Prefault};
pub use error::MemoryError;
pub use fair::Claimant;
pub use persistent::file::{Backing, Owner, Refusal};
pub use persistent::huge::describe as describe_huge_pages;
pub use persistent::left::LeftMemory;
pub use persistent::passed::take as take_passed;
pub use pool::{ReadBuf, ReadPool};
pub use read::{MemoryRead, READ_BLOCKS_MAX, SMALL_PIECE_BYTES, answer_heap_bytes};
pub use reservation::Reservation;
pub use sealed::{SealedBatch, SealedData, SealedExtent};
pub use shuffle::{Candidate, Evicted, InMemory, ShuffleBuffers};
pub use ticket::{Outstanding, Tickets};

use crate::budget::{Heap, HeapKind};
use crate::clock::Instant;

use ahead::Ahead;
use buffer::{PARTITION_BYTES, Shared, Verification};
use ceded::{Ceded, SPARE_BYTES};
use chain::Supply;
use config::{blocks_max, region_size};
use metrics::MemoryMetrics;
use persistent::file::{self, Held};
use persistent::names::ShuffleName;
use persistent::restore::{LeftShuffle, Search};
use persistent::table::Table;
use region::Region;

use uniffle_wire::types::{AppId, BlockId, Distribution, ShuffleKey};

use crate::metrics::clamped;
use crate::profile::allocator::return_freed;

/// Bytes that the allocator may keep of what was freed of the heap, and steps of charges in which that is looked at. Both are
/// in the base of `budget::allowance`.
const FREED_BYTES_MAX: u64 = 8 << 20;

/// All shuffle data in memory.
#[derive(Debug)]
pub struct Memory {
    shared: Arc<Shared>,
    heap: Heap,
    answered: Budget,
    tickets: Tickets,
    read_pool: ReadPool,
    shuffles: DashMap<ShuffleKey, Arc<ShuffleBuffers>>,
    kept: Option<KeptMemory>,
    /// Of memory in a file.
    ahead: Option<Arc<Ahead>>,
}

/// Whether a tier has a block of a partition ([`Memory::restore`]).
pub type IsElsewhere<'a> = Box<dyn Fn(BlockId) -> bool + 'a>;

/// Memory that outlives the process.
#[derive(Debug)]
struct KeptMemory {
    table: Arc<Table>,
    /// Until the start is over.
    leftover: Mutex<Search>,
    /// What an earlier process left of shuffles that only a later start may know, until they are registered or end.
    for_later: Mutex<HashMap<ShuffleKey, LeftShuffle>>,
    file: Held,
    /// The file is not found by its path any more.
    has_vanished: AtomicBool,
}

impl Memory {
    /// Maps private memory, whatever the configured backing. Pages that are never used cost nothing.
    ///
    /// # Errors
    /// When memory cannot be mapped or a metric's name is taken.
    pub fn new(config: &MemoryConfig, registry: &Registry) -> io::Result<Arc<Self>> {
        Self::in_region(config, None, registry)
    }

    /// Maps the memory of the configured backing: `inherited`, if a process before handed over such a file, or as one left
    /// it. What is in it becomes visible by [`Memory::restore`]; [`Memory::finish_restore`] ends that.
    ///
    /// # Errors
    /// As [`Memory::new`], and a region that is not this worker's to take, by name.
    pub fn open(
        config: &MemoryConfig,
        owner: &Owner,
        inherited: Option<OwnedFd>,
        registry: &Registry,
    ) -> Result<Arc<Self>, Refusal> {
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
            None => Region::new(region_size(config).0)?,
        };
        region.advise_huge_pages(config.has_huge_block_pages());
        // One that has grown has the table of before.
        let rows_max = opened.as_ref().map_or(u64::MAX, |(table, _)| table.rows_max());
        let blocks = Budget::new(blocks_max(config).min(rows_max));
        let kept = opened.map(|(table, file)| KeptMemory {
            leftover: Mutex::new(Search::begin(&table)),
            for_later: Mutex::default(),
            table,
            file,
            has_vanished: AtomicBool::new(false),
        });
        let heap = Heap::returning(config.heap_bytes, FREED_BYTES_MAX, || return_freed(FREED_BYTES_MAX));
        let lists = Arc::new(Ceded::new(Arc::clone(&region), budget.clone(), heap.of(HeapKind::Blocks)));
        if let Some(kept) = &kept {
            if kept.table.was_used() {
                lists.wait();
            }
            kept.table.charge_to(&budget, &lists);
        }
        let extents = lists.extents().clone();
        let ahead = kept.is_some().then(|| Ahead::new(Arc::clone(&region), budget.clone()));
        let mut tickets = Tickets::new(budget.clone(), extents, config.ticket_timeout, config.tickets_max);
        if let Some(ahead) = &ahead {
            tickets.take_pages_by(Arc::clone(ahead));
        }
        let shared = Shared {
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
            kept,
            ahead,
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
        let fresh = || {
            self.drop_left_for_later(|left| left == key);
            let (name, shared) = (self.name_of(key), Arc::clone(&self.shared));
            Arc::new(ShuffleBuffers::new(key.clone(), distribution, shared, name, budget))
        };
        Arc::clone(&self.shuffles.entry(key.clone()).or_insert_with(fresh))
    }

    /// Its name for the next process: the one that it had in the process before, if there is that.
    fn name_of(&self, key: &ShuffleKey) -> Option<Arc<ShuffleName>> {
        let KeptMemory { table, leftover, .. } = self.kept.as_ref()?;
        let left = leftover.lock().found().and_then(|left| left.name(key));
        Some(ShuffleName::new(table, key, left.or_else(|| table.name(key))))
    }

    /// Shuffles with blocks in memory that are lost if the process is killed, although memory outlives it: there was no place for
    /// the shuffle in the file when it was registered.
    #[must_use]
    pub fn unprotected_shuffles(&self) -> u64 {
        self.kept.as_ref().map_or(0, |kept| kept.table.unprotected())
    }

    /// Tries again to find places for these. May take milliseconds for each shuffle: not on a runtime's thread.
    pub fn protect_shuffles(&self) {
        let lack =
            |shuffle: &Arc<ShuffleBuffers>| shuffle.name.as_ref().is_some_and(|name| name.is_partial());
        let lacking: Vec<_> =
            self.shuffles.iter().filter(|shuffle| lack(shuffle)).map(|it| Arc::clone(&it)).collect();
        lacking.iter().for_each(|shuffle| shuffle.protect());
    }

    /// Partitions that were ever written to, of all shuffles that are known.
    #[must_use]
    pub fn partitions(&self) -> u64 {
        self.heap().of(HeapKind::Partitions).used() / PARTITION_BYTES
    }

    /// The buffers of a registered shuffle.
    #[must_use]
    pub fn shuffle(&self, key: &ShuffleKey) -> Option<Arc<ShuffleBuffers>> {
        self.shuffles.get(key).map(|buffers| Arc::clone(&buffers))
    }

    /// Forgets a shuffle at once; its buffers are evicted when the returned value is dropped, and sends under way find them
    /// so.
    pub fn forget(&self, key: &ShuffleKey) -> Option<Evicted> {
        self.drop_left_for_later(|left| left == key);
        let (_, buffers) = self.shuffles.remove(key)?;
        // Before the shuffle can be registered again: its blocks must not be found as those of its successor.
        buffers.name.iter().for_each(|name| name.disown());
        Some(Evicted(buffers))
    }

    /// Takes pages ahead of what is promised, and places for shuffles that have none, until it is dropped. Returns at once in
    /// private memory.
    pub async fn run_ahead(self: Arc<Self>) {
        let (ahead, memory) = (self.ahead.clone(), Arc::downgrade(&self));
        drop(self);
        if let Some(ahead) = ahead {
            let protected = memory.clone();
            let unprotected = move || Some(memory.upgrade()?.unprotected_shuffles());
            let protect = move || {
                let memory = protected.upgrade()?;
                memory.protect_shuffles();
                Some(memory.unprotected_shuffles())
            };
            tokio::join!(ahead.run(), protection::run(unprotected, protect));
        }
    }

    /// Starts a thread of the lowest priority that takes the pages of block memory that was never used. It
    /// ends when it has all of them, is refused one, or the memory is dropped.
    pub fn prefault(self: &Arc<Self>) {
        let memory = Arc::downgrade(self);
        let take = move || {
            // Of this thread. Without it the pages are taken at the usual priority.
            let _ = rustix::process::setpriority_process(None, 19);
            while let Some(memory) = memory.upgrade() {
                match memory.shared.supply.region.prefault_block() {
                    Ok(true) => {}
                    Ok(false) => {
                        tracing::info!(
                            bytes = memory.capacity_bytes(),
                            "all pages of block memory are taken"
                        );
                        return;
                    }
                    Err(error) => {
                        tracing::warn!(%error, "memory_store.prefault ended early; requests take the other pages");
                        return;
                    }
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("prefault".to_owned()).spawn(take) {
            tracing::warn!(%error, "memory_store.prefault is off: no thread");
        }
    }

    /// Bytes of the capacity that cannot be used, since the file that they would lie in gets no pages.
    #[must_use]
    pub fn withheld_bytes(&self) -> u64 {
        self.ahead.as_ref().map_or(0, |ahead| ahead.withheld_bytes())
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
        metrics.withheld.set(clamped(self.withheld_bytes()));
        metrics.unprotected.set(clamped(self.unprotected_shuffles()));
        metrics.backing_vanished.set(i64::from(self.backing_fault().is_some()));
        metrics.region_touched.set(clamped(region.touched_bytes()));
        metrics.lists.set(clamped(lists.charged_bytes()));
        metrics.ceded.set(clamped(lists.ceded_bytes()));
    }
}

impl Drop for Memory {
    /// Blocks that are dropped with it are not gone from a region that outlives it.
    fn drop(&mut self) {
        if let Some(kept) = &self.kept {
            kept.table.let_go();
        }
    }
}
