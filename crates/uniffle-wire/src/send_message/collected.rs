//! Block headers that arrive ahead of their bytes (contiguous and combined form), and the delivery
//! of those bytes to the sink.
//!
//! Invariant: after [`CollectedBlocks::seal`] all lengths are positive and sum up to the announced
//! payload. The partitions' block counts sum up to the number of blocks. Growth is bounded by the
//! caller's limit, never by an announced count.

use super::grammar::{block_length, block_too_large};
use crate::{BlockHeader, BlockSink, DecodeError};

/// Reason why headers are rejected. The decoder adds the position in the message.
#[derive(Debug)]
pub(super) enum HeaderRefusal {
    Malformed(&'static str),
    TooLarge(DecodeError),
}

/// Fields 3 to 7 of `CombinedShuffleData`.
const BLOCK_ARRAYS: usize = 5;

#[derive(Debug, Clone, Copy, Default)]
struct CollectedPartition {
    id: i32,
    blocks: u32,
}

/// Partitions and block headers collected from one message.
#[derive(Debug, Default)]
pub(super) struct CollectedBlocks {
    partitions: Vec<CollectedPartition>,
    blocks: Vec<BlockHeader>,
    payload_bytes: u64,

    /// Elements seen of arrays 1 and 2, which fill `partitions` column by column.
    partition_columns: [usize; 2],
    /// Elements seen of arrays 3 to 7, which fill `blocks` column by column.
    block_columns: [usize; BLOCK_ARRAYS],
    /// True once a column was used.
    is_columnar: bool,

    streamed: bool,
    next_partition: usize,
    blocks_left_in_partition: u32,
    next_block: usize,
    bytes_left_in_block: u32,
}

impl CollectedBlocks {
    pub(super) fn is_streamed(&self) -> bool {
        self.streamed
    }

    pub(super) fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    pub(super) fn block_count(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Returns the allocated bytes of both lists.
    pub(super) fn kept_bytes(&self) -> usize {
        self.partitions.capacity() * size_of::<CollectedPartition>()
            + self.blocks.capacity() * size_of::<BlockHeader>()
    }

    /// Adds a partition, to which the blocks pushed next belong.
    pub(super) fn push_partition(&mut self, id: i32, max: usize) -> Result<(), HeaderRefusal> {
        push(&mut self.partitions, CollectedPartition { id, blocks: 0 }, "number of partitions", max)
    }

    /// Adds a block to the last partition. Its length must be positive.
    pub(super) fn push_block(&mut self, block: BlockHeader, max: usize) -> Result<(), HeaderRefusal> {
        push(&mut self.blocks, block, "number of blocks", max)?;
        if let Some(partition) = self.partitions.last_mut() {
            partition.blocks += 1;
        }
        self.payload_bytes += u64::try_from(block.length).unwrap_or(0);
        Ok(())
    }

    pub(super) fn array_partition_id(&mut self, id: i32, max: usize) -> Result<(), HeaderRefusal> {
        self.partition_row(0, max)?.id = id;
        Ok(())
    }

    pub(super) fn array_block_count(&mut self, count: i32, max: usize) -> Result<(), HeaderRefusal> {
        let Ok(count) = u32::try_from(count) else {
            return Err(HeaderRefusal::Malformed("a block count is negative"));
        };
        self.partition_row(1, max)?.blocks = count;
        Ok(())
    }

    pub(super) fn array_block_field(
        &mut self,
        field: u32,
        int32: i32,
        int64: i64,
        max: usize,
    ) -> Result<(), HeaderRefusal> {
        let column = match field {
            3 => 0,
            4 => 1,
            5 => 2,
            6 => 3,
            _ => 4,
        };
        let row = next_row(&mut self.blocks, &mut self.block_columns[column], "number of blocks", max)?;
        self.is_columnar = true;
        match column {
            0 => row.block_id = int64,
            1 => {
                let length = u64::try_from(int32).unwrap_or(0);
                if length == 0 {
                    return Err(HeaderRefusal::Malformed("a block length is not positive"));
                }
                if block_length(length).is_none() {
                    return Err(HeaderRefusal::TooLarge(block_too_large(length)));
                }
                row.length = int32;
                self.payload_bytes += length;
            }
            2 => row.uncompressed_length = int32,
            3 => row.crc = int64,
            _ => row.task_attempt_id = int64,
        }
        Ok(())
    }

    fn partition_row(&mut self, column: usize, max: usize) -> Result<&mut CollectedPartition, HeaderRefusal> {
        self.is_columnar = true;
        next_row(&mut self.partitions, &mut self.partition_columns[column], "number of partitions", max)
    }

    /// Checks the headers against the `payload_bytes` bytes that follow, by the rules of
    /// docs/protocol.md §1.8.
    pub(super) fn seal(&mut self, payload_bytes: u64) -> Result<(), HeaderRefusal> {
        if self.blocks.is_empty() {
            return Err(HeaderRefusal::Malformed("bytes without block headers before them"));
        }
        if self.is_columnar {
            let whole = self.partition_columns.iter().all(|count| *count == self.partitions.len())
                && self.block_columns.iter().all(|count| *count == self.blocks.len());
            if !whole {
                return Err(HeaderRefusal::Malformed("combined arrays differ in length"));
            }
        }
        let announced: u64 = self.partitions.iter().map(|partition| u64::from(partition.blocks)).sum();
        if announced != self.block_count() {
            return Err(HeaderRefusal::Malformed("block counts differ from the number of blocks"));
        }
        if self.payload_bytes != payload_bytes {
            return Err(HeaderRefusal::Malformed("the sum of the block lengths differs from the bytes"));
        }
        self.streamed = true;
        Ok(())
    }

    /// Passes `piece` to the sink, block by block. `seal` has checked that every byte belongs to a
    /// block.
    pub(super) fn stream<S: BlockSink>(&mut self, mut piece: &[u8], sink: &mut S) -> Result<(), S::Error> {
        while !piece.is_empty() {
            if self.bytes_left_in_block == 0 {
                self.begin_next(sink)?;
            }
            let taken = piece.len().min(self.bytes_left_in_block as usize);
            let (bytes, rest) = piece.split_at(taken);
            sink.write(bytes)?;
            piece = rest;
            self.bytes_left_in_block -= u32::try_from(taken).unwrap_or(self.bytes_left_in_block);
            if self.bytes_left_in_block == 0 {
                sink.end_block(self.blocks[self.next_block])?;
                self.next_block += 1;
            }
        }
        Ok(())
    }

    fn begin_next<S: BlockSink>(&mut self, sink: &mut S) -> Result<(), S::Error> {
        while self.blocks_left_in_partition == 0 {
            let partition = self.partitions[self.next_partition];
            self.next_partition += 1;
            self.blocks_left_in_partition = partition.blocks;
            if partition.blocks > 0 {
                sink.partition(partition.id)?;
            }
        }
        self.blocks_left_in_partition -= 1;
        let length = u32::try_from(self.blocks[self.next_block].length).unwrap_or(0);
        self.bytes_left_in_block = length;
        sink.begin_block(length)
    }
}

fn push<T>(list: &mut Vec<T>, item: T, what: &'static str, max: usize) -> Result<(), HeaderRefusal> {
    if list.len() >= max {
        return Err(HeaderRefusal::TooLarge(DecodeError::TooLarge {
            what,
            len: list.len() as u64 + 1,
            max: max as u64,
        }));
    }
    list.push(item);
    Ok(())
}

/// Returns the row of a column's next element. Adds a row if this column is the longest so far.
fn next_row<'a, T: Default>(
    rows: &'a mut Vec<T>,
    column: &mut usize,
    what: &'static str,
    max: usize,
) -> Result<&'a mut T, HeaderRefusal> {
    let index = *column;
    if index == rows.len() {
        push(rows, T::default(), what, max)?;
    }
    *column += 1;
    Ok(&mut rows[index])
}
