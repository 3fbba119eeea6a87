//! Test support for tiers that serve clients: blocks with content derived from their ids, and reads
//! like those of a client.

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;
use uniffle_io::buffers::HeapBuffers;
use uniffle_wire::index::records;
use uniffle_wire::types::{BlockId, BlockMeta, PartitionId, ShuffleKey, TaskAttemptId};

use super::{ChunkRead, ExtentData, ExtentWrite, ServedTier, StoreError};

/// Returns the content of a block, derived from its id.
pub(super) fn content(id: i64, length: u32) -> Bytes {
    (0..length).map(|at| (i64::from(at) * 31 + id * 7).to_le_bytes()[0]).collect::<Vec<u8>>().into()
}

/// Creates an extent of blocks with these ids, of `length` bytes each.
pub(super) fn extent(partition: i32, ids: Range<i64>, length: u32) -> ExtentWrite {
    let pieces: Vec<Bytes> = ids.clone().map(|id| content(id, length)).collect();
    let meta = |(id, bytes): (i64, &Bytes)| BlockMeta {
        block_id: BlockId(id),
        task_attempt_id: TaskAttemptId(1),
        length,
        uncompressed_length: length,
        crc: crc32fast::hash(bytes),
    };
    ExtentWrite {
        partition: PartitionId(partition),
        blocks: ids.zip(&pieces).map(meta).collect(),
        length: pieces.iter().map(|bytes| bytes.len() as u64).sum(),
        data: ExtentData::Pieces(pieces),
    }
}

/// Returns the expected result of reading such blocks.
pub(super) fn expected(ids: Range<i64>, length: u32) -> BTreeMap<i64, Bytes> {
    ids.map(|id| (id, content(id, length))).collect()
}

/// Returns the bytes of all chunks of a read.
pub(super) async fn read_to_end(mut read: Box<dyn ChunkRead>) -> Result<Vec<u8>, StoreError> {
    let mut bytes = Vec::new();
    while let Some(chunk) = read.next_chunk(&HeapBuffers).await? {
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

/// Returns the index of a partition, and the length of its data.
pub(super) async fn index(
    tier: &dyn ServedTier,
    key: &ShuffleKey,
    partition: PartitionId,
) -> Result<(Vec<u8>, u64), StoreError> {
    let index = tier.index(key, partition)?;
    let (length, data_length) = (index.length, index.data_length);
    let index = read_to_end(index.chunks).await?;
    assert_eq!(index.len() as u64, length);
    Ok((index, data_length))
}

/// Returns all blocks by id, duplicates once. Reads each block with a request of its own, and the
/// whole stream with one request.
pub(super) async fn read(
    tier: &dyn ServedTier,
    key: &ShuffleKey,
    partition: i32,
) -> Result<BTreeMap<i64, Bytes>, StoreError> {
    let partition = PartitionId(partition);
    let (index, data_length) = index(tier, key, partition).await?;
    let mut found = BTreeMap::new();
    if data_length == 0 {
        return Ok(found);
    }
    let whole =
        read_to_end(tier.data(key, partition, 0, u32::try_from(data_length).unwrap())?.chunks).await?;
    assert_eq!(whole.len() as u64, data_length);
    for record in records(&index) {
        let (offset, length) = (record.offset.cast_unsigned(), record.length.cast_unsigned());
        let data = read_to_end(tier.data(key, partition, offset, length)?.chunks).await?;
        let at = usize::try_from(record.offset).unwrap();
        assert_eq!(whole[at..at + data.len()], data);
        found.insert(record.block_id, data.into());
    }
    Ok(found)
}
