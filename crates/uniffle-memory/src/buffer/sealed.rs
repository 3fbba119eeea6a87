//! A sealed batch: the blocks that one flush takes from a partition, readable until it is released.
//!
//! Blocks that were being written at the seal join the batch when they are committed, until the
//! batch is closed for its write. So a chain is usually complete when it is written. A batch
//! converts its bytes to one extent, either unchanged (page-aligned, without a copy) or piece by
//! piece.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use parking_lot::{RwLock, RwLockReadGuard};

use super::chain::BlockFill;
use super::list::{BlockList, Gather};
use crate::admission::reservation::BlockCharges;
use crate::persistent::rows::FreeRows;
use crate::region::Slice;
use uniffle_base::budget::Charge;
use uniffle_wire::types::{BlockMeta, Distribution, PartitionId};

/// Blocks of one partition on their way to the next tier.
#[derive(Debug)]
pub struct SealedBatch {
    partition: PartitionId,
    /// Number of the chain.
    chain: u64,
    list: RwLock<BlockList>,
    /// Whether blocks may join. Cleared under the list's write lock.
    is_open: AtomicBool,
    /// Bytes and blocks of the batch in the in-flight totals, set when the flusher takes the batch.
    in_flight: OnceLock<InFlightCharges>,
}

/// A batch's share of the in-flight totals.
#[derive(Debug)]
pub(super) struct InFlightCharges {
    pub(super) _charged: Charge,
    pub(crate) _blocks: Charge,
}

/// A batch as one extent.
#[derive(Debug)]
pub struct SealedExtent {
    /// The blocks in the order of their bytes in the extent.
    pub blocks: Vec<BlockMeta>,
    /// The bytes.
    pub data: SealedData,
}

/// Bytes of an extent.
#[derive(Debug, Clone)]
pub enum SealedData {
    /// Whole pages that start at page boundaries, to be written unchanged. Together they are the
    /// payload rounded up to 4 KiB, with zeros at the end.
    Aligned(Vec<Bytes>),
    /// The payload in pieces of any size and alignment.
    Pieces(Vec<Bytes>),
}

impl SealedBatch {
    /// Creates an open batch.
    pub(super) fn new(partition: PartitionId, list: BlockList) -> Self {
        let (chain, is_open) = (list.chain.id(), AtomicBool::new(true));
        Self { partition, chain, list: RwLock::new(list), is_open, in_flight: OnceLock::new() }
    }

    /// Returns whether `fill` was reserved in the chain of this batch and may still join it.
    pub(super) fn admits(&self, fill: &BlockFill) -> bool {
        fill.chain() == self.chain && self.is_open.load(Ordering::Relaxed)
    }

    /// Appends a block that was written in the chain of this batch, and moves the charges for it
    /// out of `paid`. Returns the block if the batch is closed. Called under the buffer's lock.
    pub(super) fn push(
        &self,
        (meta, fill): (BlockMeta, BlockFill),
        rows: Option<&mut FreeRows>,
        paid: &mut BlockCharges,
    ) -> Option<(BlockMeta, BlockFill)> {
        let mut list = self.list.write();
        if !self.admits(&fill) {
            return Some((meta, fill));
        }
        list.push(meta, fill, rows, paid);
        None
    }

    /// Ends the time in which blocks join. Returns the list, whose blocks do not change again. Rows
    /// may still be created for them.
    fn close(&self) -> RwLockReadGuard<'_, BlockList> {
        if self.is_open.load(Ordering::Acquire) {
            let mut list = self.list.write();
            if self.is_open.swap(false, Ordering::Release) && list.is_linear() {
                list.chain.pad_end();
            }
        }
        self.list.read()
    }

    /// Counts the batch as in flight. Returns false if it was already.
    pub(super) fn claim(&self, in_flight: InFlightCharges) -> bool {
        self.in_flight.set(in_flight).is_ok()
    }

    pub(super) fn is_claimed(&self) -> bool {
        self.in_flight.get().is_some()
    }

    /// Locks the list for reading. Must not be called twice at a time by one thread.
    pub(super) fn list(&self) -> RwLockReadGuard<'_, BlockList> {
        self.list.read()
    }

    /// Returns the partition.
    pub fn partition(&self) -> PartitionId {
        self.partition
    }

    /// Returns the payload bytes of visible blocks.
    pub fn bytes(&self) -> u64 {
        self.list.read().shown_bytes()
    }

    /// Returns the charge that is freed when the batch is dropped.
    pub fn charged_bytes(&self) -> u64 {
        self.list.read().charged_bytes()
    }

    /// Returns the number of visible blocks.
    pub fn blocks(&self) -> usize {
        self.list.read().shown()
    }

    /// Closes the batch and returns it as an extent of distribution `d`. It is aligned if the chain
    /// holds exactly these blocks (none aborted, stray or hidden) and, for `LocalOrder`, they
    /// happen to be sorted by task. The order of reads from memory does not change.
    pub fn extent(&self, d: Distribution) -> SealedExtent {
        let list = self.close();
        aligned(&list, d).unwrap_or_else(|| pieces(&list, d))
    }
}

fn aligned(list: &BlockList, d: Distribution) -> Option<SealedExtent> {
    if !list.is_linear() || list.shown() < list.len() {
        return None;
    }
    let blocks = list.by_offset();
    let in_order = d == Distribution::Normal || blocks.is_sorted_by_key(|block| block.task_attempt_id);
    if !in_order {
        return None;
    }
    let data = list.chain.whole()?.into_iter().filter(|slice| !slice.is_empty());
    Some(SealedExtent { blocks, data: SealedData::Aligned(data.map(Slice::into_bytes).collect()) })
}

fn pieces(list: &BlockList, d: Distribution) -> SealedExtent {
    let mut order: Vec<usize> = (0..list.len()).filter(|at| !list.is_hidden(*at)).collect();
    if d == Distribution::LocalOrder {
        order.sort_by_key(|at| list.task(*at));
    }
    let mut gather = Gather::default();
    for at in &order {
        list.gather(*at, &mut gather);
    }
    let data = gather.into_slices().into_iter().map(Slice::into_bytes).collect();
    let blocks = order.iter().map(|at| list.meta(*at)).collect();
    SealedExtent { blocks, data: SealedData::Pieces(data) }
}
