//! The three forms of `SendShuffleDataRequest` (docs/protocol.md §1.8) as pure functions of blocks.
//!
//! Invariant: all forms carry the same blocks in the same order. Stock clients send only
//! [`SendForm::Classic`]; the others exist to test servers.

use bytes::{Bytes, BytesMut};
use prost::Message;

use crate::block::Block;
use crate::proto;
use uniffle_wire::types::{PartitionId, ShuffleKey, TicketId};

/// Bytes that Java adds to a block's length when it requests memory (3 × 8 + 2 × 4 bytes of
/// bookkeeping).
pub const BLOCK_OVERHEAD_BYTES: u64 = 32;

/// Blocks by partition, in the order of sending.
pub type Batch = [(PartitionId, Vec<Block>)];

/// Placement of the block data in the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum SendForm {
    /// Data inside each block, as in every stock client.
    #[default]
    Classic,
    /// Blocks without data in field 4, the data of all blocks in field 7.
    Contiguous,
    /// riffle's struct of arrays in field 7, field 4 empty.
    Combined,
}

/// Returns the `requireSize` of a batch as the Java gRPC client computes it, or `None` if it
/// exceeds an `i32`.
#[must_use]
pub fn require_size(batch: &Batch) -> Option<i32> {
    let sizes =
        batch.iter().flat_map(|(_, blocks)| blocks).map(|b| u64::from(b.meta.length) + BLOCK_OVERHEAD_BYTES);
    i32::try_from(sizes.sum::<u64>()).ok()
}

/// Returns the request that sends `batch` in `form`.
#[must_use]
pub fn request(
    key: &ShuffleKey,
    ticket: TicketId,
    form: SendForm,
    batch: &Batch,
) -> proto::SendShuffleDataRequest {
    let (shuffle_data, contiguous_shuffle_data) = match form {
        SendForm::Classic => (shuffle_data(batch, |block| block.data.clone()), Bytes::new()),
        SendForm::Contiguous => (shuffle_data(batch, |_| Bytes::new()), joined(batch)),
        SendForm::Combined => (Vec::new(), combined(batch).encode_to_vec().into()),
    };
    proto::SendShuffleDataRequest {
        app_id: key.app.as_str().to_owned(),
        shuffle_id: key.shuffle.0,
        require_buffer_id: ticket.0,
        shuffle_data,
        timestamp: 0,
        stage_attempt_number: 0,
        contiguous_shuffle_data,
    }
}

fn shuffle_data(batch: &Batch, data: impl Fn(&Block) -> Bytes) -> Vec<proto::ShuffleData> {
    let block = |block: &Block| proto::ShuffleBlock {
        block_id: block.meta.block_id.0,
        length: wire_length(block.meta.length),
        uncompress_length: wire_length(block.meta.uncompressed_length),
        crc: i64::from(block.meta.crc),
        data: data(block),
        task_attempt_id: block.meta.task_attempt_id.0,
    };
    let partition = |(id, blocks): &(PartitionId, Vec<Block>)| proto::ShuffleData {
        partition_id: id.0,
        block: blocks.iter().map(block).collect(),
    };
    batch.iter().map(partition).collect()
}

fn joined(batch: &Batch) -> Bytes {
    let blocks = || batch.iter().flat_map(|(_, blocks)| blocks);
    let mut all = BytesMut::with_capacity(blocks().map(|block| block.data.len()).sum());
    for block in blocks() {
        all.extend_from_slice(&block.data);
    }
    all.freeze()
}

/// Returns riffle's message for `batch`.
#[must_use]
pub fn combined(batch: &Batch) -> proto::CombinedShuffleData {
    let mut message = proto::CombinedShuffleData { combined_data: joined(batch), ..Default::default() };
    for (partition, blocks) in batch {
        message.partition_ids.push(partition.0);
        message.partition_block_counts.push(i32::try_from(blocks.len()).unwrap_or(i32::MAX));
        for block in blocks {
            message.block_ids.push(block.meta.block_id.0);
            message.lengths.push(wire_length(block.meta.length));
            message.uncompress_lengths.push(wire_length(block.meta.uncompressed_length));
            message.crcs.push(i64::from(block.meta.crc));
            message.task_attempt_ids.push(block.meta.task_attempt_id.0);
        }
    }
    message
}

/// Converts a length. A test may declare one that is too large; it becomes the largest possible.
fn wire_length(length: u32) -> i32 {
    i32::try_from(length).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::sample;
    use uniffle_wire::types::{AppId, ShuffleId, TaskAttemptId};

    fn batch() -> Vec<(PartitionId, Vec<Block>)> {
        let block = |p, s, len| sample(PartitionId(p), TaskAttemptId(4), s, len);
        vec![(PartitionId(3), vec![block(3, 0, 10), block(3, 1, 20)]), (PartitionId(9), vec![block(9, 0, 5)])]
    }

    fn key() -> ShuffleKey {
        ShuffleKey::new(AppId::parse("app").unwrap(), ShuffleId(2))
    }

    #[test]
    fn require_size_adds_the_overhead_of_each_block() {
        assert_eq!(require_size(&batch()), Some(35 + 3 * 32));
        assert_eq!(require_size(&[]), Some(0));
    }

    #[test]
    fn all_forms_carry_the_same_blocks() {
        let batch = batch();
        let all: Vec<u8> = batch.iter().flat_map(|(_, b)| b).flat_map(|b| b.data.to_vec()).collect();
        let classic = request(&key(), TicketId(5), SendForm::Classic, &batch);
        assert_eq!((classic.shuffle_id, classic.require_buffer_id), (2, 5));
        assert!(classic.contiguous_shuffle_data.is_empty());
        assert_eq!(classic.shuffle_data[0].block[1].data, batch[0].1[1].data);

        let mut contiguous = request(&key(), TicketId(5), SendForm::Contiguous, &batch);
        assert_eq!(contiguous.contiguous_shuffle_data, all);
        for (classic, contiguous) in classic.shuffle_data.iter().zip(&mut contiguous.shuffle_data) {
            for (classic, contiguous) in classic.block.iter().zip(&mut contiguous.block) {
                assert!(contiguous.data.is_empty());
                contiguous.data = classic.data.clone();
            }
        }
        assert_eq!(contiguous.shuffle_data, classic.shuffle_data);

        let riffle = request(&key(), TicketId(5), SendForm::Combined, &batch);
        assert!(riffle.shuffle_data.is_empty());
        let message = proto::CombinedShuffleData::decode(riffle.contiguous_shuffle_data).unwrap();
        assert_eq!(message.partition_block_counts, [2, 1]);
        assert_eq!(message.lengths, [10, 20, 5]);
        assert_eq!(message.combined_data, all);
    }
}
