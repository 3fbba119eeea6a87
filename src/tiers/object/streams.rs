//! What is published of a shuffle: the extents of each partition, in the order of its stream.
//!
//! They stay until the shuffle is purged, so they are charged, beyond the first of a partition, which a partition that was
//! ever written to has paid for.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::layout::Entry;
use crate::budget::{Budget, Charge};
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

/// A place in a list that grows by doubling, with what an allocator rounds up to.
const PLACE_BYTES: u64 = size_of::<Extent>() as u64 * 2;

impl Extent {
    pub(super) fn of(segment: u32, entry: &Entry) -> Self {
        let Entry { blocks, base, offset, length, records, records_crc, .. } = *entry;
        Self { base, length, offset, records, segment, blocks, records_crc }
    }

    pub(super) fn end(&self) -> u64 {
        self.base + self.length
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

/// A partition's stream. A copy shares the list until one of the two changes.
#[derive(Debug, Clone, Default)]
pub(super) struct Stream {
    pub(super) extents: Arc<Vec<Extent>>,
    /// Bytes of data.
    pub(super) bytes: u64,
    pub(super) blocks: u64,
}

impl Stream {
    /// The number of the first extent that does not end at or before `start`.
    pub(super) fn first_touched(&self, start: u64) -> usize {
        self.extents.partition_point(|extent| extent.end() <= start)
    }

    /// The extents that hold `start..end`.
    pub(super) fn touched(&self, start: u64, end: u64) -> impl Iterator<Item = &Extent> {
        self.extents.iter().skip(self.first_touched(start)).take_while(move |extent| extent.base < end)
    }
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
        if !stream.extents.is_empty() {
            self.charge.merge(self.charge.budget().force_charge(PLACE_BYTES));
        }
        Arc::make_mut(&mut stream.extents).push(extent);
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
    fn a_stream_has_no_holes_and_further_extents_are_charged() {
        let budget = Budget::new(u64::MAX);
        let mut streams = Streams::new(&budget);
        let p = PartitionId(3);
        assert!(streams.push(p, extent(0, 10)) && budget.used() == 0);
        assert!(!streams.push(p, extent(11, 10)), "a hole");
        assert!(streams.push(p, extent(10, 5)) && streams.push(p, extent(15, 5)));
        assert_eq!(budget.used(), 2 * PLACE_BYTES);
        let stream = streams.get(p).unwrap().clone();
        let touched = |start, end| stream.touched(start, end).map(|it| it.base).collect::<Vec<_>>();
        assert_eq!((touched(0, 10), touched(9, 11), touched(15, 99)), (vec![0], vec![0, 10], vec![15]));
        drop(streams.take());
        assert_eq!((budget.used(), streams.get(p).is_none()), (0, true));
    }
}
