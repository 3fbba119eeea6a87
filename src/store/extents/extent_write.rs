//! One partition's part of a batch, as the flusher hands it to a tier. Disks and objects split it
//! into extents of at most `EXTENT_BLOCKS_MAX` blocks. The order of blocks and bytes never changes.
//! Pure: no I/O.

use std::collections::VecDeque;

use bytes::Bytes;

use uniffle_io::BLOCK_ALIGN;
use uniffle_wire::types::{BlockMeta, PartitionId};

/// Maximum number of blocks of an extent on disks or in objects. The records of an extent are read
/// and verified as a whole, so this bounds the memory for them.
pub(in crate::store) const EXTENT_BLOCKS_MAX: usize = 4096;

/// One partition's part of a batch: a future extent, or several if it has too many blocks.
#[derive(Debug, Clone)]
pub struct ExtentWrite {
    /// The partition.
    pub partition: PartitionId,
    /// Blocks, in the order of their bytes. At least one, and none is empty.
    pub blocks: Vec<BlockMeta>,
    /// Length of all blocks in bytes.
    pub length: u64,
    /// Data of the blocks.
    pub data: ExtentData,
}

/// Data of an extent.
#[derive(Debug, Clone)]
pub enum ExtentData {
    /// Page-aligned memory, `length` bytes rounded up to 4 KiB, with a zeroed tail. Written without
    /// a copy.
    Aligned(Vec<Bytes>),
    /// Any memory, `length` bytes in total. Copied before it is written to a disk.
    Pieces(Vec<Bytes>),
}

impl ExtentData {
    pub(in crate::store) fn pieces(&self) -> &[Bytes] {
        match self {
            Self::Aligned(pieces) | Self::Pieces(pieces) => pieces,
        }
    }
}

impl ExtentWrite {
    /// Splits extents with more than [`EXTENT_BLOCKS_MAX`] blocks, and keeps the order. The parts
    /// of a split extent are [`ExtentData::Pieces`]. Inconsistent extents stay as they are, so that
    /// the caller's check refuses them.
    pub(in crate::store) fn split_large(extents: Vec<Self>) -> Vec<Self> {
        if extents.iter().all(|extent| extent.blocks.len() <= EXTENT_BLOCKS_MAX) {
            return extents;
        }
        extents.into_iter().flat_map(Self::split).collect()
    }

    fn split(self) -> Vec<Self> {
        if self.blocks.len() <= EXTENT_BLOCKS_MAX || !self.is_consistent() {
            return vec![self];
        }
        let mut payload = VecDeque::from(self.payload());
        let part = |blocks: &[BlockMeta]| {
            let length = blocks.iter().map(|block| u64::from(block.length)).sum();
            let bytes = usize::try_from(length).unwrap_or(usize::MAX);
            let data = ExtentData::Pieces(take_front(&mut payload, bytes));
            Self { partition: self.partition, blocks: blocks.to_vec(), length, data }
        };
        self.blocks.chunks(EXTENT_BLOCKS_MAX).map(part).collect()
    }

    /// Returns whether the extent has blocks, all are non-empty, and their lengths match its bytes.
    pub(in crate::store) fn is_consistent(&self) -> bool {
        let blocks: u64 = self.blocks.iter().map(|block| u64::from(block.length)).sum();
        let bytes: u64 = self.data.pieces().iter().map(|piece| piece.len() as u64).sum();
        let stored = match self.data {
            ExtentData::Aligned(_) => self.length.next_multiple_of(BLOCK_ALIGN as u64),
            ExtentData::Pieces(_) => self.length,
        };
        let has_valid_count = !self.blocks.is_empty() && u32::try_from(self.blocks.len()).is_ok();
        has_valid_count
            && self.blocks.iter().all(|block| block.length > 0)
            && blocks == self.length
            && bytes == stored
    }

    /// Returns the bytes without padding.
    #[must_use]
    pub fn payload(&self) -> Vec<Bytes> {
        let mut remaining = usize::try_from(self.length).unwrap_or(usize::MAX);
        let mut pieces = Vec::new();
        for piece in self.data.pieces() {
            let taken = piece.len().min(remaining);
            if taken > 0 {
                pieces.push(piece.slice(..taken));
            }
            remaining -= taken;
        }
        pieces
    }
}

/// Takes the first `bytes` bytes of `pieces`, or all if there are fewer.
pub(in crate::store) fn take_front(pieces: &mut VecDeque<Bytes>, bytes: usize) -> Vec<Bytes> {
    let (mut remaining, mut taken) = (bytes, Vec::new());
    while remaining > 0
        && let Some(mut piece) = pieces.pop_front()
    {
        if piece.len() > remaining {
            pieces.push_front(piece.split_off(remaining));
        }
        remaining -= piece.len();
        taken.push(piece);
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;
    use uniffle_wire::types::{BlockId, TaskAttemptId};

    /// Returns an extent whose block `n` has `1 + n % 3` bytes.
    fn extent(partition: i32, blocks: usize, aligned: bool) -> ExtentWrite {
        let block = |n: usize| {
            let length = 1 + u32::try_from(n % 3).unwrap();
            let (block_id, task_attempt_id) = (BlockId(i64::try_from(n).unwrap()), TaskAttemptId(0));
            BlockMeta { block_id, task_attempt_id, length, uncompressed_length: length, crc: 0 }
        };
        let blocks: Vec<_> = (0..blocks).map(block).collect();
        let length = blocks.iter().map(|block| u64::from(block.length)).sum::<u64>();
        let bytes = usize::try_from(length).unwrap();
        let mut payload: Vec<u8> = (0..251).cycle().take(bytes).collect();
        let data = if aligned {
            payload.resize(bytes.next_multiple_of(BLOCK_ALIGN), 0);
            ExtentData::Aligned(vec![payload.into()])
        } else {
            ExtentData::Pieces(payload.chunks(1000).map(Bytes::copy_from_slice).collect())
        };
        ExtentWrite { partition: PartitionId(partition), blocks, length, data }
    }

    #[test]
    fn large_extents_are_split_in_order() {
        let sizes = [1, EXTENT_BLOCKS_MAX, EXTENT_BLOCKS_MAX + 1, 3 * EXTENT_BLOCKS_MAX];
        for aligned in [true, false] {
            let whole: Vec<_> = (0..).zip(sizes).map(|(n, blocks)| extent(n, blocks, aligned)).collect();
            let parts = ExtentWrite::split_large(whole.clone());
            let found: Vec<_> = parts.iter().map(|it| (it.partition.0, it.blocks.len())).collect();
            let most = EXTENT_BLOCKS_MAX;
            assert_eq!(found, [(0, 1), (1, most), (2, most), (2, 1), (3, most), (3, most), (3, most)]);
            assert!(parts.iter().all(ExtentWrite::is_consistent));
            assert_eq!(
                matches!(parts[1].data, ExtentData::Aligned(_)),
                aligned,
                "an extent that is not split must not be copied"
            );
            let content = |all: &[ExtentWrite]| {
                let bytes = all.iter().flat_map(|it| it.payload()).flatten().collect::<Vec<u8>>();
                let ids = all.iter().flat_map(|it| &it.blocks).map(|it| it.block_id).collect::<Vec<_>>();
                (bytes, ids)
            };
            assert_eq!(content(&parts), content(&whole));
        }
    }

    #[test]
    fn inconsistent_extent_is_not_split() {
        let mut short = extent(0, EXTENT_BLOCKS_MAX + 1, true);
        short.length += 1;
        let parts = ExtentWrite::split_large(vec![short]);
        assert!(parts.len() == 1 && !parts[0].is_consistent());
    }
}
