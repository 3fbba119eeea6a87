//! Damaged blocks: their disk returned wrong bytes twice. Readers of the index get filler records
//! in their place. The other blocks of their extents are served. The list is only in memory: after
//! a start, a damaged block is found again by the reads that verify it.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;

use crate::store::index::records::filler;
use uniffle_wire::index::RECORD_BYTES;
use uniffle_wire::types::PartitionId;

/// Damaged blocks of one shuffle.
#[derive(Debug, Default)]
pub(in crate::store) struct DamagedBlocks {
    /// True if the shuffle has damaged blocks. Otherwise readers skip the lock.
    any: AtomicBool,
    /// Ends of the damaged blocks in the partition's stream, by their starts.
    blocks: RwLock<HashMap<PartitionId, BTreeMap<u64, u64>>>,
}

impl DamagedBlocks {
    /// Adds a block by its place in the stream.
    pub(in crate::store) fn add(&self, partition: PartitionId, place: &Range<u64>) {
        self.blocks.write().entry(partition).or_default().insert(place.start, place.end);
        self.any.store(true, Ordering::Release);
    }

    /// Returns whether a damaged block overlaps a range of the stream.
    pub(in crate::store) fn touches(&self, partition: PartitionId, range: &Range<u64>) -> bool {
        self.any.load(Ordering::Acquire)
            && self.blocks.read().get(&partition).is_some_and(|blocks| {
                let before_end = blocks.range(..range.end).next_back();
                before_end.is_some_and(|(_, end)| *end > range.start)
            })
    }

    /// Replaces the records of damaged blocks in `records`, whose offsets are relative to the
    /// stream.
    pub(super) fn mask(&self, partition: PartitionId, records: &mut [u8]) {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        let blocks = self.blocks.read();
        let Some(blocks) = blocks.get(&partition) else { return };
        for bytes in records.chunks_exact_mut(RECORD_BYTES) {
            let Some(record) = uniffle_wire::index::records(bytes).next() else { continue };
            if blocks.contains_key(&record.offset.unsigned_abs()) {
                bytes.copy_from_slice(&filler(record.offset, record.length).encode());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_is_affected_by_overlapping_damage() {
        let damaged = DamagedBlocks::default();
        let p = PartitionId(1);
        assert!(!damaged.touches(p, &(0..u64::MAX)));
        damaged.add(p, &(100..200));
        damaged.add(p, &(300..400));
        for (range, expected) in [
            (0..100, false),
            (0..101, true),
            (150..160, true),
            (199..200, true),
            (200..300, false),
            (200..301, true),
            (399..1000, true),
            (400..1000, false),
        ] {
            assert_eq!(damaged.touches(p, &range), expected, "{range:?}");
        }
        assert!(!damaged.touches(PartitionId(2), &(0..1000)));
    }
}
