//! One partition in memory: an active list that takes blocks, and the batches that are being
//! flushed.
//!
//! A block is reserved in the active chain, written by its owner outside any lock, and committed,
//! which makes it visible. A seal moves it into a batch, where it stays visible until it is
//! readable in the next tier. Invariants: readers see the batches, oldest first, and then the
//! active list, each in commit order. Deduplication: a commit drops blocks whose id is visible in
//! memory, so no visible id occurs twice. The lock covers bookkeeping only: payload is copied,
//! zeroed and freed outside.

pub(super) mod chain;
pub(super) mod list;
pub(super) mod read;
mod restored;
pub(super) mod sealed;
mod sealing;
pub(super) mod shuffle;
mod unverified;

use std::collections::VecDeque;
use std::ops::AddAssign;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use croaring::Treemap;
use hashbrown::DefaultHashBuilder;
use parking_lot::Mutex;
use smallvec::SmallVec;

use self::chain::{BlockFill, Chain, Supply};
use self::list::{BlockList, LIST_BLOCKS_MAX, LIST_BYTES, metadata_bytes};
use self::read::{MemoryRead, ReadLimit};
use self::sealed::SealedBatch;
use super::error::MemoryError;
use super::metrics::MemoryMetrics;
use super::persistent::layout::ROW_BYTES;
use super::persistent::names::{NameSlot, ShuffleName};
use super::persistent::rows::{CommittedRows, FreeRows, rows_of};
use super::persistent::table::NoSlots;
use super::region::Segment;
use crate::admission::reservation::{BlockCharges, Reservation};
pub use sealing::EarlierBlocks;
use uniffle_base::budget::{Budget, Charge};
use uniffle_wire::types::{BlockId, BlockMeta, PartitionId};
use unverified::Unverified;
pub(super) use unverified::Verification;

/// Heap of a partition that was ever written to and has nothing in memory: its buffer, its entries
/// in the tables here and in the local tier, and its first extent. `buffer/tests/heap.rs` checks
/// the part in this crate. `tests/process/many_partitions.rs` checks the memory bound with 200,000
/// partitions.
pub(super) const PARTITION_BYTES: u64 = 256;

/// State shared by all buffers of one memory.
#[derive(Debug)]
pub(super) struct BufferContext {
    pub(super) supply: Supply,
    pub(super) budget: Budget,
    /// Total of the charged bytes of batches that are being flushed.
    pub(super) in_flight: Budget,
    /// Total of the blocks of batches that are being flushed.
    pub(super) in_flight_blocks: Budget,
    /// Seeded per process, because clients choose the block ids.
    pub(super) hasher: DefaultHashBuilder,
    pub(super) metrics: MemoryMetrics,
    pub(super) verification: Verification,
}

impl BufferContext {
    /// Pays for `blocks` uncommitted blocks with `rows` rows. They are charged to the capacity
    /// before they count and until they no longer count, see `Supply::overdraft`.
    pub(super) fn pay_for_blocks<'a>(
        &self,
        blocks: usize,
        rows: usize,
        funds: &'a mut Reservation,
    ) -> Result<&'a mut BlockCharges, MemoryError> {
        let Supply { blocks: permits, lists, .. } = &self.supply;
        let bytes = metadata_bytes(blocks as u64, rows);
        funds
            .pay_for_blocks(blocks as u64, bytes, permits, lists)
            .inspect_err(|_| self.budget.notify_pressure())
    }
}

/// The result of a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CommitOutcome {
    /// Blocks that became visible.
    pub blocks: usize,
    /// Payload bytes of these blocks.
    pub bytes: u64,
    /// Blocks dropped because their id was present already.
    pub duplicate_blocks: usize,
    /// Payload bytes of the dropped blocks.
    pub duplicate_bytes: u64,
}

impl AddAssign for CommitOutcome {
    fn add_assign(&mut self, more: Self) {
        self.blocks += more.blocks;
        self.bytes += more.bytes;
        self.duplicate_blocks += more.duplicate_blocks;
        self.duplicate_bytes += more.duplicate_bytes;
    }
}

/// The blocks of one partition that are in memory.
///
/// The buffer never waits: sealing rotates the chain and takes the committed blocks. A fill of
/// the sealed chain joins its batch until the flush closes it. A later one commits into the new
/// list as a *stray* that keeps its bytes in the old segments. A partition without blocks and
/// segments in memory has no list, only its counters and the next chain number.
#[derive(Debug)]
pub struct Buffer {
    partition: PartitionId,
    shared: Arc<BufferContext>,
    /// Name of the shuffle for the next process. `None` in private memory.
    name: Option<Arc<ShuffleName>>,
    /// Budget of the application.
    budget: Budget,
    state: Mutex<State>,
    active_bytes: AtomicU64,
    active_charged_bytes: AtomicU64,
    active_blocks: AtomicUsize,
    /// Unlike the other counters it only grows; flushes do not change it.
    received_bytes: AtomicU64,
    in_flight_bytes: AtomicU64,
    in_flight_batches: AtomicUsize,
    block_count: AtomicUsize,
    /// Charge of [`PARTITION_BYTES`].
    _charge: Charge,
}

#[derive(Debug, Default)]
struct State {
    /// Lists of the partition. `None` while it has nothing in memory.
    lists: Option<Box<Lists>>,
    /// Chain numbers are never reused: a late fill must not mistake another chain for its own.
    next_chain: u64,
    purged: bool,
    overdue: bool,
    /// Recovered blocks of an earlier process until they are verified.
    unverified: Option<Arc<Unverified>>,
}

/// The in-memory contents of a partition.
#[derive(Debug)]
struct Lists {
    active: BlockList,
    batches: VecDeque<Arc<SealedBatch>>,
    /// Set by a dropped fill: the active chain may hold segments without live data.
    aborted: Arc<AtomicBool>,
}

impl Lists {
    /// Removes segments in which everything was aborted.
    fn drop_dead(&mut self) -> SmallVec<[Segment; 2]> {
        // A load first: a swap per block costs more than copying a small one.
        if self.aborted.load(Ordering::Relaxed) && self.aborted.swap(false, Ordering::Acquire) {
            return self.active.drop_dead();
        }
        SmallVec::new()
    }

    /// Returns whether dropping it loses nothing: no block, and no segment that a fill writes to.
    fn is_empty(&self) -> bool {
        self.batches.is_empty() && self.active.is_empty() && self.active.chain.capacity() == 0
    }

    /// Adds a block to the open batch in whose chain it was written, or else to the active list.
    /// Moves the charges for it out of `paid`.
    fn add(
        &mut self,
        mut block: (BlockMeta, BlockFill),
        mut rows: Option<&mut FreeRows>,
        paid: &mut BlockCharges,
    ) {
        if block.1.chain() != self.active.chain.id()
            && let Some(batch) = self.batches.iter().find(|batch| batch.admits(&block.1))
        {
            let late = batch.push(block, rows.as_deref_mut(), paid);
            let Some(late) = late else { return };
            block = late;
        }
        self.active.push(block.0, block.1, rows, paid);
    }

    fn holds(&self, id: BlockId) -> bool {
        self.active.find(id).is_some() || self.batches.iter().any(|batch| batch.list().shows(id))
    }
}

impl Buffer {
    pub(super) fn new(
        partition: PartitionId,
        shared: Arc<BufferContext>,
        name: Option<Arc<ShuffleName>>,
        budget: Budget,
        charge: Charge,
    ) -> Self {
        debug_assert_eq!(charge.bytes(), PARTITION_BYTES, "the charge must be as measured");
        Self {
            partition,
            shared,
            name,
            budget,
            state: Mutex::default(),
            active_bytes: AtomicU64::new(0),
            active_charged_bytes: AtomicU64::new(0),
            received_bytes: AtomicU64::new(0),
            active_blocks: AtomicUsize::new(0),
            in_flight_bytes: AtomicU64::new(0),
            in_flight_batches: AtomicUsize::new(0),
            block_count: AtomicUsize::new(0),
            _charge: charge,
        }
    }

    /// Returns the partition.
    #[must_use]
    #[inline]
    pub fn partition(&self) -> PartitionId {
        self.partition
    }

    /// Reserves room for one block of `len` bytes, paid for by `funds`.
    ///
    /// # Errors
    /// `TicketOverspent` beyond the bytes of the ticket, `Purged` after a purge. `NoCapacity` if
    /// concurrent sends and seals of this partition used up memory that the ticket paid for, and
    /// others used up the slack. Also `NoCapacity` if the region has no room to cede for a list.
    /// Nothing is held after an error.
    pub fn reserve(&self, len: u32, funds: &mut Reservation) -> Result<BlockFill, MemoryError> {
        funds.spend(u64::from(len))?;
        // Dropped after the lock: freeing memory takes the region's lock, and zeroing takes time.
        let (dead, mut abandoned);
        let mut state = self.state.lock();
        if state.purged {
            return Err(MemoryError::Purged);
        }
        let State { lists, next_chain, .. } = &mut *state;
        let lists = self.made(lists, next_chain);
        dead = lists.drop_dead();
        abandoned = None;
        if !lists.active.is_paid() {
            let covered = self.shared.supply.lists.cover(LIST_BYTES);
            covered.inspect_err(|_| self.shared.budget.notify_pressure())?;
        }
        if !lists.active.chain.has_room_for(len) {
            // The chain's offsets are exhausted. If it has blocks, they wait as a batch. If it has
            // only fills, the chain is abandoned; the fills keep their segments and commit as
            // strays.
            if lists.active.is_empty() {
                abandoned = Some(std::mem::replace(&mut lists.active, self.next_list(next_chain)));
            } else {
                self.rotate(lists, next_chain);
            }
        }
        let fill = lists.active.chain.reserve(len, &self.shared.supply, funds, &lists.aborted);
        lists.active.pay_for_segments(&self.shared.supply.lists);
        drop(state);
        drop((dead, abandoned));
        fill
    }

    /// Makes `blocks`, all fully written, visible at once. Resent blocks, whose id is in memory
    /// already, are dropped silently.
    ///
    /// # Errors
    /// `Purged` after a purge, `TooManyBlocks` at the limit, `NoCapacity` when the region has no
    /// room to cede for their records, or its file no pages for their rows. After an error no block
    /// is visible and all memory is freed.
    pub fn commit<B>(&self, blocks: B, funds: &mut Reservation) -> Result<CommitOutcome, MemoryError>
    where
        B: IntoIterator<Item = (BlockMeta, BlockFill)>,
        B::IntoIter: AsRef<[(BlockMeta, BlockFill)]>,
    {
        let blocks = blocks.into_iter();
        for (meta, fill) in blocks.as_ref() {
            // Cannot come from input: the service compared the lengths. Continuing would show bytes
            // of other blocks.
            assert!(
                fill.remaining() == 0 && fill.len() == meta.length,
                "commit of a block not fully written"
            );
        }
        let named = self.named();
        let row_count = if named.is_some() { count_rows(blocks.as_ref()) } else { 0 };
        let paid = self.shared.pay_for_blocks(blocks.as_ref().len(), row_count, funds)?;
        // Rows are paid for before they are taken and until they are freed.
        let rows = named.map(|named| self.rows_of(named, row_count)).transpose();
        let mut rows = rows.inspect_err(|_| self.shared.budget.notify_pressure())?;
        let mut done = CommitOutcome::default();
        let mut duplicates: SmallVec<[BlockFill; 8]> = SmallVec::new();
        let mut state = self.state.lock();
        if state.purged {
            drop(state);
            return Err(MemoryError::Purged);
        }
        if named.is_none() && self.named().is_some() {
            // The shuffle got its name meanwhile, so its blocks need rows now.
            drop(state);
            return self.commit(blocks, funds);
        }
        let State { lists, next_chain, .. } = &mut *state;
        let lists = self.made(lists, next_chain);
        let strays = lists.active.strays();
        for (meta, fill) in blocks {
            let bytes = u64::from(meta.length);
            if lists.holds(meta.block_id) {
                done.duplicate_blocks += 1;
                done.duplicate_bytes += bytes;
                duplicates.push(fill);
                continue;
            }
            done.blocks += 1;
            done.bytes += bytes;
            lists.add((meta, fill), rows.as_mut(), paid);
        }
        let strays = lists.active.strays() - strays;
        lists.active.pay_for_segments(&self.shared.supply.lists);
        lists.active.pay_for_strays(strays, &self.shared.supply.lists);
        if lists.active.len() >= LIST_BLOCKS_MAX {
            self.rotate(lists, next_chain);
        }
        // Changed only under the lock, so it needs no atomic addition.
        self.received_bytes.store(self.received_bytes() + done.bytes, Ordering::Relaxed);
        self.publish_counters(&state);
        drop(state);
        // Zeroing the duplicates' ranges needs no lock.
        drop((duplicates, rows));
        self.shared.metrics.count_duplicates(done.duplicate_blocks, done.duplicate_bytes);
        Ok(done)
    }

    /// Reads blocks after `after`, at least one, until `limit_bytes` or
    /// [`READ_BLOCKS_MAX`](crate::READ_BLOCKS_MAX) blocks are reached. Starts at the head if
    /// `after` is `None` or no longer present. Returns only blocks of `tasks`, if given. See
    /// docs/protocol.md §3.4.
    #[must_use]
    pub fn read(&self, after: Option<BlockId>, limit_bytes: u64, tasks: Option<&Treemap>) -> MemoryRead {
        self.read_some(after, ReadLimit { bytes: limit_bytes, blocks: usize::MAX }, tasks)
    }

    /// Reads like [`Buffer::read`], with limits on the bytes and on the number of blocks.
    #[must_use]
    pub fn read_some(&self, after: Option<BlockId>, limit: ReadLimit, tasks: Option<&Treemap>) -> MemoryRead {
        let state = self.state.lock();
        let mut guards: SmallVec<[_; 8]> = SmallVec::new();
        let mut lists: SmallVec<[&BlockList; 8]> = SmallVec::new();
        if let Some(held) = &state.lists {
            guards.extend(held.batches.iter().map(|batch| batch.list()));
            lists.extend(guards.iter().map(|list| &**list));
            lists.push(&held.active);
        }
        let found = read::walk(&lists, after, limit, tasks);
        drop(lists);
        drop(guards);
        drop(state);
        found.into()
    }

    /// Returns the ids of all visible blocks at one moment, and possibly of blocks that joined a
    /// batch since. Reads with a cursor may miss some, because blocks are released between two
    /// reads. A cursor whose block was released and sent again even skips blocks that are present.
    #[must_use]
    pub fn ids(&self) -> Vec<u64> {
        let state = self.state.lock();
        let lists = state.lists.as_deref();
        let active: Vec<BlockId> = lists.iter().flat_map(|lists| lists.active.shown_ids()).collect();
        let batches: Vec<_> = lists.iter().flat_map(|lists| lists.batches.iter().cloned()).collect();
        drop(state);
        let sealed = batches.iter().flat_map(|batch| batch.list().shown_ids().collect::<Vec<_>>());
        sealed.chain(active).map(|BlockId(id)| id.unsigned_abs()).collect()
    }

    /// Drops everything. Later blocks are refused.
    pub fn purge(&self) {
        let mut state = self.state.lock();
        state.purged = true;
        let (lists, unverified) = (state.lists.take(), state.unverified.take());
        self.publish_counters(&state);
        drop(state);
        unverified.iter().for_each(|it| it.clear(&self.shared.verification));
        drop(lists);
    }

    /// Frees segments in which everything was aborted. The flusher's scan calls it for all buffers,
    /// so that dead sends do not hold memory in partitions without further writes.
    pub fn drop_dead(&self) {
        let mut state = self.state.lock();
        let dead = state.lists.as_mut().map(|lists| lists.drop_dead());
        let emptied = state.lists.take_if(|lists| lists.is_empty());
        drop(state);
        drop((dead, emptied));
    }

    /// Returns the committed payload bytes that no flush has taken.
    #[must_use]
    #[inline]
    pub fn active_bytes(&self) -> u64 {
        self.active_bytes.load(Ordering::Relaxed)
    }

    /// Returns the charge that a flush of the active bytes would free: whole segments and metadata.
    #[must_use]
    pub fn active_charged_bytes(&self) -> u64 {
        self.active_charged_bytes.load(Ordering::Relaxed)
    }

    /// Returns the payload bytes that the partition has ever received, flushed or not. Dropped
    /// duplicates do not count.
    #[must_use]
    #[inline]
    pub fn received_bytes(&self) -> u64 {
        self.received_bytes.load(Ordering::Relaxed)
    }

    /// Returns the payload bytes in memory, being flushed or not.
    #[must_use]
    #[inline]
    pub fn in_memory_bytes(&self) -> u64 {
        self.active_bytes() + self.in_flight_bytes()
    }

    /// Returns the number of committed blocks that no flush has taken.
    #[must_use]
    pub fn active_blocks(&self) -> usize {
        self.active_blocks.load(Ordering::Relaxed)
    }

    /// Returns the payload bytes of batches that are being flushed.
    #[must_use]
    #[inline]
    pub fn in_flight_bytes(&self) -> u64 {
        self.in_flight_bytes.load(Ordering::Relaxed)
    }

    /// Returns the number of batches that are being flushed.
    #[must_use]
    pub fn in_flight_batches(&self) -> usize {
        self.in_flight_batches.load(Ordering::Relaxed)
    }

    /// Returns the number of blocks that readers see.
    #[must_use]
    pub fn block_count(&self) -> usize {
        self.block_count.load(Ordering::Relaxed)
    }

    /// Returns the shuffle's name for the next process. `None` in private memory, or while the file
    /// has no slot for it.
    fn named(&self) -> Option<&Arc<NameSlot>> {
        self.name.as_ref()?.get()
    }

    /// Takes `count` free rows.
    fn rows_of(&self, named: &NameSlot, count: usize) -> Result<FreeRows, MemoryError> {
        named.rows(count).map_err(|no_slots| match no_slots {
            NoSlots::TooMany => MemoryError::TooManyBlocks { max: self.shared.supply.blocks.capacity() },
            NoSlots::NoPages => MemoryError::NoCapacity { requested: count as u64 * ROW_BYTES, free: 0 },
        })
    }

    /// Creates rows for blocks that were committed before the shuffle had a name. Returns whether
    /// all have rows.
    pub(super) fn protect(&self) -> bool {
        let Some(named) = self.named() else { return false };
        let mut abandoned = None;
        let mut state = self.state.lock();
        let State { lists, next_chain, .. } = &mut *state;
        let Some(lists) = lists else { return true };
        if !lists.active.has_rows() {
            // Fills of an abandoned chain commit as strays, as in `reserve`.
            if lists.active.is_empty() {
                abandoned = Some(std::mem::replace(&mut lists.active, self.next_list(next_chain)));
            } else {
                self.rotate(lists, next_chain);
            }
        }
        let batches = lists.batches.iter().filter(|batch| !batch.list().has_rows());
        let batches: Vec<_> = batches.cloned().collect();
        self.publish_counters(&state);
        drop(state);
        drop(abandoned);
        let lists = &self.shared.supply.lists;
        batches.iter().all(|batch| batch.list().make_rows(named, self.partition, lists))
    }

    /// Returns the lists of the partition, created on demand.
    fn made<'a>(&self, lists: &'a mut Option<Box<Lists>>, next_chain: &mut u64) -> &'a mut Lists {
        lists.get_or_insert_with(|| {
            let (batches, aborted) = (VecDeque::new(), Arc::new(AtomicBool::new(false)));
            Box::new(Lists { active: self.next_list(next_chain), batches, aborted })
        })
    }

    fn next_list(&self, next_chain: &mut u64) -> BlockList {
        let chain = Chain::new(*next_chain);
        *next_chain += 1;
        let rows = self.named().map(|named| CommittedRows::new(Arc::clone(named), self.partition));
        self.list(chain, rows)
    }

    fn list(&self, chain: Chain, rows: Option<CommittedRows>) -> BlockList {
        BlockList::new(chain, rows, self.shared.hasher.clone(), &self.shared.supply, &self.budget)
    }

    /// Turns the active list into the youngest batch and replaces it by an empty list.
    fn rotate(&self, lists: &mut Lists, next_chain: &mut u64) -> Arc<SealedBatch> {
        let list = std::mem::replace(&mut lists.active, self.next_list(next_chain));
        let batch = Arc::new(SealedBatch::new(self.partition, list));
        lists.batches.push_back(Arc::clone(&batch));
        batch
    }

    /// Recomputes the counters from the state, under its lock. They are sums, not increments, so
    /// that they cannot drift.
    fn publish_counters(&self, state: &State) {
        let (mut active, mut flying, mut batches) = (0, 0, 0);
        let (mut active_blocks, mut flying_blocks, mut charged) = (0, 0, 0);
        if let Some(lists) = &state.lists {
            (active, active_blocks) = (lists.active.bytes(), lists.active.len());
            charged = lists.active.charged_bytes();
        }
        for batch in state.lists.iter().flat_map(|lists| &lists.batches) {
            if batch.is_claimed() {
                flying += batch.bytes();
                flying_blocks += batch.blocks();
                batches += 1;
            } else {
                active += batch.bytes();
                charged += batch.charged_bytes();
                active_blocks += batch.blocks();
            }
        }
        self.active_bytes.store(active, Ordering::Relaxed);
        self.active_charged_bytes.store(charged, Ordering::Relaxed);
        self.in_flight_bytes.store(flying, Ordering::Relaxed);
        self.in_flight_batches.store(batches, Ordering::Relaxed);
        self.active_blocks.store(active_blocks, Ordering::Relaxed);
        self.block_count.store(active_blocks + flying_blocks, Ordering::Relaxed);
    }
}

/// Returns the number of rows that `blocks` need.
fn count_rows(blocks: &[(BlockMeta, BlockFill)]) -> usize {
    blocks.iter().map(|(_, fill)| rows_of(fill.pieces())).sum()
}

#[cfg(test)]
mod tests;
