//! What is published of a shuffle: the extents of each partition, in the order of its stream.
//!
//! They stay until the shuffle is purged, so they are charged, beyond the first of a partition, which a partition that was
//! ever written to has paid for.

use std::collections::HashMap;
use std::ops::Range;

use super::layout::Entry;
use crate::budget::{Budget, Charge};
use crate::tiers::extents::{self, InStream, chunk_of, recharge};
use uniffle_wire::index::RECORD_BYTES;
use uniffle_wire::types::PartitionId;

/// A piece of a partition's stream that lies in one segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent {
    /// Where it begins in the stream.
    pub(super) base: u64,
    /// Bytes of data.
    pub(super) length: u64,
    /// Where it begins in the segment.
    pub(super) offset: u64,
    /// Where its records begin in the segment.
    pub(super) records: u64,
    /// The segment's number.
    pub(super) segment: u32,
    pub(super) blocks: u32,
    /// CRC-32 of its records.
    pub(super) records_crc: u32,
}

/// Those of a partition.
pub(super) type ExtentList = extents::ExtentList<Extent, { chunk_of::<Extent>() }>;

impl Extent {
    pub(super) fn of(segment: u32, entry: &Entry) -> Self {
        let Entry { blocks, base, offset, length, records, records_crc, .. } = *entry;
        Self { base, length, offset, records, segment, blocks, records_crc }
    }

    /// Bytes of its records.
    pub(super) fn records_bytes(&self) -> u64 {
        u64::from(self.blocks) * RECORD_BYTES as u64
    }

    /// Where its records stand in the segment.
    pub(super) fn records_range(&self) -> Range<u64> {
        self.records..self.records + self.records_bytes()
    }
}

impl InStream for Extent {
    fn base(&self) -> u64 {
        self.base
    }

    fn end(&self) -> u64 {
        self.base + self.length
    }
}

/// A partition's stream.
#[derive(Debug, Clone, Default)]
pub(super) struct Stream {
    pub(super) extents: ExtentList,
    /// Bytes of data.
    pub(super) bytes: u64,
    pub(super) blocks: u64,
}

/// Those of a shuffle.
#[derive(Debug)]
pub(super) struct Streams {
    by_partition: HashMap<PartitionId, Stream>,
    /// Given back after the lists.
    charge: Charge,
}

impl Streams {
    /// Nothing; what comes is charged to `budget`.
    pub(super) fn new(budget: &Budget) -> Self {
        Self { by_partition: HashMap::new(), charge: budget.nothing() }
    }

    pub(super) fn get(&self, partition: PartitionId) -> Option<&Stream> {
        self.by_partition.get(&partition)
    }

    /// Appends an extent to a partition's stream; false if it does not begin where that ends.
    pub(super) fn push(&mut self, partition: PartitionId, extent: Extent) -> bool {
        let stream = self.by_partition.entry(partition).or_default();
        if extent.base != stream.bytes {
            return false;
        }
        let before = stream.extents.further_bytes();
        stream.extents.push(extent);
        recharge(&mut self.charge, before, stream.extents.further_bytes());
        stream.bytes = extent.end();
        stream.blocks += u64::from(extent.blocks);
        true
    }

    /// The streams of all partitions.
    pub(super) fn iter(&self) -> impl Iterator<Item = (PartitionId, &Stream)> {
        self.by_partition.iter().map(|(partition, stream)| (*partition, stream))
    }

    /// Takes everything out, with its charge.
    pub(super) fn take(&mut self) -> Self {
        let nothing = Self::new(self.charge.budget());
        std::mem::replace(self, nothing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(base: u64, length: u64) -> Extent {
        Extent { base, length, offset: 0, records: 0, segment: 1, blocks: 1, records_crc: 0 }
    }

    #[test]
    fn stream_has_no_holes_and_further_extents_are_charged() {
        let budget = Budget::new(u64::MAX);
        let mut streams = Streams::new(&budget);
        let p = PartitionId(3);
        assert!(streams.push(p, extent(0, 10)) && budget.used() == 0);
        assert!(!streams.push(p, extent(11, 10)), "a hole");
        assert!(streams.push(p, extent(10, 5)) && streams.push(p, extent(15, 5)));
        assert_eq!(budget.used(), 3 * ExtentList::PLACE_BYTES, "there is room for a fourth one");
        let of_stream = streams.get(p).map(|it| (it.extents.len(), it.bytes, it.blocks));
        assert_eq!(of_stream, Some((3, 20, 3)));
        drop(streams.take());
        assert_eq!((budget.used(), streams.get(p).is_none()), (0, true));
    }
    /// Writers and readers of the shuffle wait meanwhile.
    #[cfg(feature = "jemalloc")]
    #[test]
    fn extent_is_appended_in_place_beside_a_reader() {
        use tikv_jemalloc_ctl::thread::allocatedp;
        let (mut streams, p) = (Streams::new(&Budget::new(u64::MAX)), PartitionId(0));
        (0..100_000).for_each(|at| assert!(streams.push(p, extent(10 * at, 10))));
        let readers = streams.get(p).unwrap().clone();
        let before = allocatedp::read().unwrap().get();
        (100_000..100_100).for_each(|at| assert!(streams.push(p, extent(10 * at, 10))));
        let allocated = allocatedp::read().unwrap().get() - before;
        assert!(allocated < 64 << 10, "{allocated} bytes");
        assert_eq!((readers.extents.len(), streams.get(p).unwrap().extents.len()), (100_000, 100_100));
    }
}
