//! A sealed batch: the blocks that one flush takes from a partition, immutable and readable until
//! it is released.
//!
//! It converts its bytes to one extent, either unchanged (page-aligned, without a copy) or piece by
//! piece.

use std::sync::OnceLock;

use bytes::Bytes;

use super::list::{BlockList, Gather};
use crate::region::Slice;
use uniffle_base::budget::Charge;
use uniffle_wire::types::{BlockMeta, Distribution, PartitionId};

/// Blocks of one partition on their way to the next tier.
#[derive(Debug)]
pub struct SealedBatch {
    partition: PartitionId,
    list: BlockList,
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
    pub(super) fn new(partition: PartitionId, mut list: BlockList) -> Self {
        if list.is_linear() {
            list.chain.pad_end();
        }
        Self { partition, list, in_flight: OnceLock::new() }
    }

    /// Counts the batch as in flight. Returns false if it was already.
    pub(super) fn claim(&self, in_flight: InFlightCharges) -> bool {
        self.in_flight.set(in_flight).is_ok()
    }

    pub(super) fn is_claimed(&self) -> bool {
        self.in_flight.get().is_some()
    }

    pub(super) fn list(&self) -> &BlockList {
        &self.list
    }

    /// Returns the partition.
    pub fn partition(&self) -> PartitionId {
        self.partition
    }

    /// Returns the payload bytes of visible blocks.
    pub fn bytes(&self) -> u64 {
        self.list.shown_bytes()
    }

    /// Returns the charge that is freed when the batch is dropped.
    pub fn charged_bytes(&self) -> u64 {
        self.list.charged_bytes()
    }

    /// Returns the number of visible blocks.
    pub fn blocks(&self) -> usize {
        self.list.shown()
    }

    /// Returns the batch as an extent of distribution `d`. It is aligned if the chain holds exactly
    /// these blocks (nothing aborted, nothing late) and, for `LocalOrder`, they happen to be
    /// sorted. The order of reads from memory does not change.
    pub fn extent(&self, d: Distribution) -> SealedExtent {
        self.aligned(d).unwrap_or_else(|| self.pieces(d))
    }

    fn aligned(&self, d: Distribution) -> Option<SealedExtent> {
        if !self.list.is_linear() || self.list.shown() < self.list.len() {
            return None;
        }
        let blocks = self.list.by_offset();
        let in_order = d == Distribution::Normal || blocks.is_sorted_by_key(|block| block.task_attempt_id);
        if !in_order {
            return None;
        }
        let data = self.list.chain.whole()?.into_iter().filter(|slice| !slice.is_empty());
        Some(SealedExtent { blocks, data: SealedData::Aligned(data.map(Slice::into_bytes).collect()) })
    }

    fn pieces(&self, d: Distribution) -> SealedExtent {
        let mut order: Vec<usize> = (0..self.list.len()).filter(|at| !self.list.is_withheld(*at)).collect();
        if d == Distribution::LocalOrder {
            order.sort_by_key(|at| self.list.task(*at));
        }
        let mut gather = Gather::default();
        for at in &order {
            self.list.gather(*at, &mut gather);
        }
        let data = gather.into_slices().into_iter().map(Slice::into_bytes).collect();
        let blocks = order.iter().map(|at| self.list.meta(*at)).collect();
        SealedExtent { blocks, data: SealedData::Pieces(data) }
    }
}
