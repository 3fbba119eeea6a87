//! Where the published bytes of a shuffle are: by partition, extents one behind the other.
//!
//! They stay until the shuffle is purged, so they are charged: [`Streams`] pays for what grows with the number of extents. A
//! partition's place here and its first extent are paid for with its buffer (`HeapKind::Partitions`), unless a start found them.

use std::collections::HashMap;

use uniffle_io::BLOCK_ALIGN;
use uniffle_wire::types::PartitionId;

use super::extents::{ExtentList, PLACE_BYTES};
use crate::budget::{Budget, Charge};

/// A published extent: 40 bytes, all that is held in memory per extent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    /// Offset of its first byte in the partition's stream.
    pub(super) base: u64,
    /// Bytes of data.
    pub(super) length: u64,
    /// Where its records stand in the index log.
    pub(super) index_offset: u64,
    /// Where its data stands in the data log, in units of [`BLOCK_ALIGN`].
    pub(super) data_page: u32,
    pub(super) blocks: u32,
    /// CRC-32 of its records on disk.
    pub(super) records_crc: u32,
    pub(super) data_log: u16,
    pub(super) index_log: u16,
}

/// Slot of no log: the extent is lost, a hole in the stream, and readers are given filler records. Not the records of
/// its blocks, known or not: one of them may have been sent again and stand further on.
pub(super) const NO_LOG: u16 = u16::MAX;

/// Length of one filler record. Clients fetch what lies between two blocks that they want together with them.
pub(super) const FILLER_BYTES: u64 = 1 << 20;

const _: () = assert!(size_of::<Extent>() == 40, "the sketch of docs/architecture.md §2.3");

/// Heap of a partition that a start found: its place in the table, which doubles when it is full, and its first extent.
const FOUND_PARTITION_BYTES: u64 = 2 * size_of::<(PartitionId, Partition)>() as u64 * 8 / 7 + PLACE_BYTES;

impl Extent {
    pub(super) fn data_offset(&self) -> u64 {
        u64::from(self.data_page) * BLOCK_ALIGN as u64
    }

    /// Bytes of which nothing is known.
    pub(super) fn gap(base: u64, length: u64) -> Self {
        let blocks = u32::try_from(length.div_ceil(FILLER_BYTES)).unwrap_or(u32::MAX);
        let (data_log, index_log) = (NO_LOG, NO_LOG);
        Self { base, length, index_offset: 0, data_page: 0, blocks, records_crc: 0, data_log, index_log }
    }

    pub(super) fn is_lost(&self) -> bool {
        self.data_log == NO_LOG
    }
}

/// What is published of one partition.
#[derive(Debug, Default)]
pub(super) struct Partition {
    /// In the order of their bases, without gaps.
    pub(super) extents: ExtentList,
    /// Length of the stream.
    pub(super) bytes: u64,
    pub(super) blocks: u64,
}

impl Partition {
    /// Nothing of it is known before `base`.
    pub(super) fn from(base: u64) -> Self {
        let mut partition = Self::default();
        partition.extend_to(base);
        partition
    }

    /// Extents whose records are known.
    pub(super) fn known_extents(&self) -> usize {
        self.extents.iter().filter(|extent| extent.index_log != NO_LOG).count()
    }

    /// Makes the stream go on at `base`, with a hole before it.
    pub(super) fn extend_to(&mut self, base: u64) {
        if base > self.bytes {
            self.push(Extent::gap(self.bytes, base - self.bytes));
        }
    }

    /// Appends an extent that begins where the stream ends.
    pub(super) fn push(&mut self, extent: Extent) {
        // A stream with a hole or an overlap would mix blocks up for every reader.
        assert_eq!(self.bytes, extent.base, "bases are assigned in the publish lane");
        self.bytes += extent.length;
        self.blocks += u64::from(extent.blocks);
        self.extents.push(extent);
    }

    /// Heap of the extents after the first.
    fn further_bytes(&self) -> u64 {
        self.extents.heap_bytes().saturating_sub(PLACE_BYTES)
    }
}

/// What is published of a shuffle.
#[derive(Debug)]
pub(super) struct Streams {
    by_partition: HashMap<PartitionId, Partition>,
    /// Given back after the lists.
    charge: Charge,
}

impl Streams {
    /// Nothing; what comes is charged to `budget`.
    pub(super) fn new(budget: &Budget) -> Self {
        Self { by_partition: HashMap::new(), charge: budget.nothing() }
    }

    /// What a start found, charged to the same budget.
    pub(super) fn found(&self, by_partition: HashMap<PartitionId, Partition>) -> Self {
        let further: u64 = by_partition.values().map(Partition::further_bytes).sum();
        let bytes = by_partition.len() as u64 * FOUND_PARTITION_BYTES + further;
        Self { by_partition, charge: self.charge.budget().force_charge(bytes) }
    }

    /// Takes everything out, with its charge.
    pub(super) fn take(&mut self) -> Self {
        let nothing = Self::new(self.charge.budget());
        std::mem::replace(self, nothing)
    }

    pub(super) fn get(&self, partition: PartitionId) -> Option<&Partition> {
        self.by_partition.get(&partition)
    }

    pub(super) fn get_mut(&mut self, partition: PartitionId) -> Option<&mut Partition> {
        self.by_partition.get_mut(&partition)
    }

    /// Appends an extent to a partition, whose stream begins at `first_base` if it is new.
    pub(super) fn push(&mut self, id: PartitionId, extent: Extent, first_base: u64) {
        let partition = self.by_partition.entry(id).or_insert_with(|| Partition::from(first_base));
        let before = partition.further_bytes();
        partition.push(extent);
        let after = partition.further_bytes();
        if after > before {
            self.charge.merge(self.charge.budget().force_charge(after - before));
        } else {
            drop(self.charge.split_up_to(before - after));
        }
    }

    /// All extents.
    pub(super) fn extents(&self) -> impl Iterator<Item = &Extent> {
        self.by_partition.values().flat_map(|partition| partition.extents.iter())
    }
}
