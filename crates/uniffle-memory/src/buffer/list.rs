//! Committed blocks of one generation of a partition: records in commit order, their ids, and the
//! chain with their bytes.
//!
//! A list is first active and then sealed. After the seal only blocks that were being written join,
//! until the flush closes the batch. Sealing drops nothing, and releasing drops the whole list with
//! its ids. A record has 32 bytes and an id 5 to 12. Records grow by quarters, so that the 64 bytes
//! charged per block cover both. [`LIST_BYTES`] and [`SEGMENT_HEAP_BYTES`] cover the list itself
//! and its segments.

use std::hash::BuildHasher;
use std::sync::{Arc, OnceLock};

use hashbrown::{DefaultHashBuilder, HashTable};
use smallvec::SmallVec;

use super::chain::{BlockFill, Chain, Supply};
use crate::admission::metadata_reserve::MetadataReserve;
use crate::admission::reservation::{BlockCharges, METADATA_BYTES};
use crate::persistent::layout::ROW_BYTES;
use crate::persistent::names::NameSlot;
use crate::persistent::rows::{CommittedRows, FreeRows, rows_of};
use crate::region::{Segment, Slice};
use uniffle_base::budget::{Budget, Charge};
use uniffle_wire::types::{BlockId, BlockMeta, PartitionId, TaskAttemptId};

/// Heap of a list with blocks, also as a batch, of its partition's part that exists only with
/// lists, and of one segment. `buffer/tests/heap.rs` checks it.
pub(crate) const LIST_BYTES: u64 = 896;
/// Heap of a further segment, including spare room of growing vectors.
pub(super) const SEGMENT_HEAP_BYTES: u64 = 192;
/// Heap of a stray beside its record, including spare room.
pub(super) const STRAY_BYTES: u64 = 2 * size_of::<(u32, SmallVec<[Slice; 2]>)>() as u64;

/// A list with this number of blocks is closed and waits as a batch. It limits the work of copying
/// and sorting one batch. It matters for small blocks only: with blocks of 2 KiB it is 64 MiB. One
/// send may exceed it.
pub(super) const LIST_BLOCKS_MAX: usize = 32 << 10;

/// Offset of a stray, whose bytes are not in this list's chain.
const STRAY: u32 = u32::MAX;

/// [`BlockMeta`] and an offset, flat, so that the offset fits into the padding.
#[derive(Debug, Clone, Copy)]
struct BlockRecord {
    block_id: BlockId,
    task_attempt_id: TaskAttemptId,
    length: u32,
    uncompressed_length: u32,
    crc: u32,
    offset: u32,
}

impl BlockRecord {
    fn new(meta: &BlockMeta, offset: u32) -> Self {
        let BlockMeta { block_id, task_attempt_id, length, uncompressed_length, crc } = *meta;
        Self { block_id, task_attempt_id, length, uncompressed_length, crc, offset }
    }

    fn meta(&self) -> BlockMeta {
        let Self { block_id, task_attempt_id, length, uncompressed_length, crc, offset: _ } = *self;
        BlockMeta { block_id, task_attempt_id, length, uncompressed_length, crc }
    }
}

// The charge of 64 bytes per block relies on it.
const _: () = assert!(size_of::<BlockRecord>() <= 32);

/// Blocks and the positions of their bytes.
#[derive(Debug)]
pub(super) struct BlockList {
    /// The rows of its blocks in a region that outlives the process, unset in private memory. The
    /// first field, because it must be dropped first: rows go before the segments that they point
    /// into.
    rows: OnceLock<Box<Rows>>,
    records: Vec<BlockRecord>,
    ids: HashTable<u32>,
    hasher: DefaultHashBuilder,
    pub(crate) chain: Chain,
    /// Blocks whose bytes are not in this list's chain, by ascending record. They hold their slices
    /// themselves.
    strays: Vec<(u32, SmallVec<[Slice; 2]>)>,
    bytes: u64,
    /// Ascending record numbers of damaged recovered blocks, which are hidden.
    hidden: OnceLock<Box<[u32]>>,
    /// Number of segments that are paid for. The first is paid together with the list itself.
    paid_segments: usize,
    paid: BlockCharges,
}

/// The rows of a list's blocks, with the charges of rows that were created later than the blocks.
#[derive(Debug)]
struct Rows {
    committed: CommittedRows,
    _late: Option<(Charge, Charge)>,
}

impl BlockList {
    pub(crate) fn new(
        chain: Chain,
        rows: Option<CommittedRows>,
        hasher: DefaultHashBuilder,
        supply: &Supply,
        budget: &Budget,
    ) -> Self {
        let (permits, lists) = (supply.blocks.empty_charge(), supply.lists.empty_charge());
        let paid = BlockCharges { permits, lists, capacity: budget.empty_charge() };
        Self {
            rows: rows.map_or_else(OnceLock::new, |committed| {
                OnceLock::from(Box::new(Rows { committed, _late: None }))
            }),
            records: Vec::new(),
            ids: HashTable::new(),
            hasher,
            chain,
            strays: Vec::new(),
            bytes: 0,
            hidden: OnceLock::new(),
            paid_segments: 0,
            paid,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.records.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Returns the payload bytes of all blocks.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the charge that dropping the list frees. Strays are excluded, because their segments
    /// may be shared.
    pub(crate) fn charged_bytes(&self) -> u64 {
        self.chain.capacity() + self.paid.capacity.bytes()
    }

    pub(crate) fn meta(&self, at: usize) -> BlockMeta {
        self.records[at].meta()
    }

    pub(crate) fn task(&self, at: usize) -> TaskAttemptId {
        self.records[at].task_attempt_id
    }

    /// Returns the record number of a block.
    pub(crate) fn find(&self, id: BlockId) -> Option<usize> {
        let same = |at: &u32| self.records[*at as usize].block_id == id;
        self.ids.find(self.hasher.hash_one(id), same).map(|at| *at as usize)
    }

    /// Returns whether the block is in the list and visible.
    pub(super) fn shows(&self, id: BlockId) -> bool {
        self.find(id).is_some_and(|at| !self.is_hidden(at))
    }

    /// Returns the record numbers of blocks that do not match their senders' checksums.
    pub(crate) fn damaged(&self) -> Vec<u32> {
        let is_damaged = |at: &u32| {
            let mut gather = Gather::default();
            self.gather(*at as usize, &mut gather);
            let mut hasher = crc32fast::Hasher::new();
            gather.into_slices().iter().for_each(|slice| hasher.update(slice.as_ref()));
            let crc = self.records[*at as usize].crc;
            crc != 0 && hasher.finalize() != crc
        };
        (0..self.next_record()).filter(is_damaged).collect()
    }

    /// Hides these blocks from readers and from the next process. Called at most once.
    pub(crate) fn hide(&self, numbers: Vec<u32>) {
        let ids = numbers.iter().map(|at| self.records[*at as usize].block_id).collect();
        self.rows.get().iter().for_each(|rows| rows.committed.hide(&ids));
        let is_first = self.hidden.set(numbers.into()).is_ok();
        debug_assert!(is_first, "a list is scanned once");
    }

    /// Returns whether block `at` is hidden.
    pub(super) fn is_hidden(&self, at: usize) -> bool {
        let is_among = |numbers: &[u32]| u32::try_from(at).is_ok_and(|at| numbers.binary_search(&at).is_ok());
        self.hidden.get().is_some_and(|numbers| is_among(numbers))
    }

    /// Returns the ids of the visible blocks.
    pub(super) fn shown_ids(&self) -> impl Iterator<Item = BlockId> {
        let numbered = self.records.iter().enumerate();
        numbered.filter(|(at, _)| !self.is_hidden(*at)).map(|(_, record)| record.block_id)
    }

    /// Returns the number of visible blocks.
    pub(crate) fn shown(&self) -> usize {
        self.records.len() - self.hidden.get().map_or(0, |numbers| numbers.len())
    }

    /// Returns the payload bytes of the visible blocks.
    pub(super) fn shown_bytes(&self) -> u64 {
        let hidden = self.hidden.get().into_iter().flatten();
        self.bytes - hidden.map(|at| u64::from(self.records[*at as usize].length)).sum::<u64>()
    }

    /// Appends a block that is not in the list yet and whose fill is fully written, and moves the
    /// charges for it out of `paid`. With `rows` the next process can recover it.
    pub(super) fn push(
        &mut self,
        meta: BlockMeta,
        fill: BlockFill,
        rows: Option<&mut FreeRows>,
        paid: &mut BlockCharges,
    ) {
        let row_count = if rows.is_some() { rows_of(fill.pieces()) } else { 0 };
        paid.transfer(1, metadata_bytes(1, row_count), &mut self.paid);
        let at = self.next_record();
        let in_chain = fill.chain() == self.chain.id();
        let offset = if in_chain { fill.offset() } else { STRAY };
        let slices = fill.freeze();
        let order = self.order(at);
        let committed = self.rows.get_mut().map(|rows| &mut rows.committed);
        if let (Some(committed), Some(free)) = (committed, rows) {
            committed.push(&meta, order, &slices, free);
        }
        if in_chain {
            self.chain.absorb(offset, slices);
        } else {
            self.strays.push((at, slices));
        }
        self.enter(meta, offset);
    }

    /// Returns the position of block `at` in its partition. Readers continue behind a block, and
    /// chain numbers follow the read order.
    fn order(&self, at: u32) -> u64 {
        self.chain.id() << 32 | u64::from(at)
    }

    /// Returns whether its blocks have rows.
    pub(super) fn has_rows(&self) -> bool {
        self.rows.get().is_some()
    }

    /// Creates rows for the blocks of a sealed list without rows. Returns whether there was room
    /// for them.
    pub(super) fn make_rows(
        &self,
        named: &Arc<NameSlot>,
        partition: PartitionId,
        lists: &MetadataReserve,
    ) -> bool {
        let slices = |at: u32| {
            let mut gather = Gather::default();
            self.gather(at as usize, &mut gather);
            gather.into_slices()
        };
        let count = (0..self.next_record()).map(|at| rows_of(slices(at).len())).sum();
        let bytes = count as u64 * ROW_BYTES;
        let Ok(mut free) = named.rows(count) else { return false };
        let Ok(of_lists) = lists.charge(bytes) else { return false };
        let of_capacity = self.paid.capacity.budget().charge_unchecked(bytes);
        let mut committed = CommittedRows::new(Arc::clone(named), partition);
        for at in 0..self.next_record() {
            committed.push(&self.meta(at as usize), self.order(at), &slices(at), &mut free);
        }
        self.rows.set(Box::new(Rows { committed, _late: Some((of_lists, of_capacity)) })).is_ok()
    }

    /// Reserves room for `blocks` further blocks.
    pub(crate) fn reserve(&mut self, blocks: usize) {
        self.records.reserve_exact(blocks);
        let Self { ids, records, hasher, .. } = self;
        ids.reserve(blocks, |at| hasher.hash_one(records[*at as usize].block_id));
    }

    /// Appends a recovered block that has a row and whose bytes are in the chain.
    pub(crate) fn restore(&mut self, meta: BlockMeta, offset: u32) {
        self.enter(meta, offset);
    }

    /// Appends a recovered block that holds its slices itself.
    pub(super) fn restore_stray(&mut self, meta: BlockMeta, slices: SmallVec<[Slice; 2]>) {
        self.strays.push((self.next_record(), slices));
        self.enter(meta, STRAY);
    }

    fn next_record(&self) -> u32 {
        u32::try_from(self.records.len()).expect("blocks are limited to u32 in number")
    }

    fn enter(&mut self, meta: BlockMeta, offset: u32) {
        let at = self.next_record();
        if self.records.len() == self.records.capacity() {
            self.records.reserve_exact((self.records.len() / 4).max(4));
        }
        self.records.push(BlockRecord::new(&meta, offset));
        self.bytes += u64::from(meta.length);
        let Self { ids, records, hasher, .. } = self;
        let hash_of = |at: &u32| hasher.hash_one(records[*at as usize].block_id);
        ids.insert_unique(hasher.hash_one(meta.block_id), at, hash_of);
    }

    /// Adds the charges of blocks that were just restored.
    pub(super) fn charge(&mut self, mut paid: BlockCharges) {
        paid.transfer(u64::MAX, u64::MAX, &mut self.paid);
    }

    /// Pays for `strays` blocks that hold their slices themselves.
    pub(super) fn pay_for_strays(&mut self, strays: usize, lists: &MetadataReserve) {
        self.pay(strays as u64 * STRAY_BYTES, lists);
    }

    /// Returns whether the list itself is paid for.
    pub(super) fn is_paid(&self) -> bool {
        self.paid_segments > 0
    }

    /// Pays for the list itself and for new segments. The segments were checked against the
    /// capacity when they were allocated, and the list's heap is small compared with them.
    pub(super) fn pay_for_segments(&mut self, lists: &MetadataReserve) {
        let segments = self.chain.segments().max(1);
        if segments > self.paid_segments {
            let owed = heap_bytes(segments) - heap_bytes(self.paid_segments);
            self.paid_segments = segments;
            self.pay(owed, lists);
        }
    }

    /// Removes and returns dead segments.
    pub(super) fn drop_dead(&mut self) -> SmallVec<[Segment; 2]> {
        let dead = self.chain.drop_dead();
        let segments = self.chain.segments().max(usize::from(!self.is_empty()));
        if segments < self.paid_segments {
            let bytes = heap_bytes(self.paid_segments) - heap_bytes(segments);
            self.paid_segments = segments;
            drop(self.paid.lists.split_up_to(bytes));
            drop(self.paid.capacity.split_up_to(bytes));
        }
        dead
    }

    fn pay(&mut self, bytes: u64, lists: &MetadataReserve) {
        if bytes > 0 {
            let budget = self.paid.capacity.budget().clone();
            self.paid.capacity.merge(budget.charge_unchecked(bytes));
            self.paid.lists.merge(lists.charge_unchecked(bytes));
        }
    }

    /// Returns the number of strays.
    pub(super) fn strays(&self) -> usize {
        self.strays.len()
    }

    /// Returns whether the chain holds exactly these blocks: no dead range, no stray, no
    /// outstanding fill.
    pub(super) fn is_linear(&self) -> bool {
        self.strays.is_empty() && self.bytes == self.chain.used()
    }

    /// Returns the blocks in chain order. Valid only for a linear list.
    pub(super) fn by_offset(&self) -> Vec<BlockMeta> {
        let mut records = self.records.clone();
        // Nearly sorted: runs of one request are in commit order. Stable, for blocks of no bytes.
        records.sort_by_key(|record| record.offset);
        records.iter().map(BlockRecord::meta).collect()
    }

    /// Appends the bytes of block `at` to `out`.
    pub(super) fn gather<'a>(&'a self, at: usize, out: &mut Gather<'a>) {
        let record = &self.records[at];
        if record.offset != STRAY {
            return self.chain.pieces(record.offset, record.length, |segment, start, end| {
                out.range(&self.chain, segment, start, end);
            });
        }
        let record = u32::try_from(at).expect("records are numbered by u32");
        let stray =
            self.strays.binary_search_by_key(&record, |(at, _)| *at).expect("a stray block keeps its slices");
        out.slices(&self.strays[stray].1);
    }
}

/// Returns the bytes charged for `blocks` blocks with `rows` rows beside their payload.
pub(super) fn metadata_bytes(blocks: u64, rows: usize) -> u64 {
    blocks * METADATA_BYTES + rows as u64 * ROW_BYTES
}

/// Returns the heap of a list with `segments` segments, zero without segments.
fn heap_bytes(segments: usize) -> u64 {
    let further = segments.saturating_sub(1) as u64;
    if segments == 0 { 0 } else { LIST_BYTES + further * SEGMENT_HEAP_BYTES }
}

/// Collects the bytes of blocks in order and merges neighbours in one segment into one slice.
#[derive(Debug, Default)]
pub(super) struct Gather<'a> {
    pending: Option<(&'a Chain, usize, usize, usize)>,
    slices: Vec<Slice>,
}

impl<'a> Gather<'a> {
    fn range(&mut self, chain: &'a Chain, segment: usize, start: usize, end: usize) {
        if let Some((of, number, _, until)) = &mut self.pending
            && std::ptr::eq(*of, chain)
            && (*number, *until) == (segment, start)
        {
            *until = end;
            return;
        }
        self.settle();
        self.pending = Some((chain, segment, start, end));
    }

    fn slices(&mut self, slices: &[Slice]) {
        self.settle();
        self.slices.extend(slices.iter().filter(|slice| !slice.is_empty()).cloned());
    }

    fn settle(&mut self) {
        if let Some((chain, segment, start, end)) = self.pending.take() {
            self.slices.push(chain.slice(segment, start, end));
        }
    }

    pub(super) fn into_slices(mut self) -> Vec<Slice> {
        self.settle();
        self.slices
    }
}
