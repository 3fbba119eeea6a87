//! Encodes `sendShuffleData` as lists of pieces: headers and small blocks come from one arena,
//! other payload directly from the pool.
//!
//! Encoded by hand, because prost would copy every byte. The tests compare gRPC messages with those
//! of the library, and a Netty frame with the protocol's vector. Invariant:
//! [`MessagePieces::length`] is the sum of the pieces' lengths.

use bytes::{BufMut, Bytes, BytesMut};
use uniffle_client::send::BLOCK_OVERHEAD_BYTES;
use uniffle_wire::types::{ShuffleKey, TicketId};

use crate::content::ContentPool;
use crate::plan::{PlannedBlock, PlannedMessage};

/// Blocks up to this length are copied, because a separate piece costs more.
const COPY_BYTES_MAX: u32 = 1 << 10;

/// An encoded message in pieces.
#[derive(Debug, Default)]
pub(crate) struct MessagePieces {
    pub(crate) pieces: Vec<Bytes>,
    pub(crate) length: usize,
}

/// Computes `requireSize` like the gRPC client, in total and per partition.
pub(crate) fn require_sizes(message: &PlannedMessage) -> (i32, Vec<i32>) {
    let size = |planned: &PlannedBlock| u64::from(planned.block.length) + BLOCK_OVERHEAD_BYTES;
    let wire = |bytes: u64| i32::try_from(bytes).unwrap_or(i32::MAX);
    let sizes: Vec<u64> = message.partitions.iter().map(|(_, p)| p.iter().map(size).sum()).collect();
    (wire(sizes.iter().sum()), sizes.into_iter().map(wire).collect())
}

/// Collects headers in an arena and records the positions of the blocks between them.
struct MessageWriter<'a> {
    pool: &'a ContentPool,
    arena: BytesMut,
    /// Arena position and the block that follows it.
    cuts: Vec<(usize, Bytes)>,
}

impl<'a> MessageWriter<'a> {
    fn new(pool: &'a ContentPool, message: &PlannedMessage) -> Self {
        let copied = if pool.sizes().mean() <= u64::from(COPY_BYTES_MAX) { message.payload_bytes } else { 0 };
        let copied = usize::try_from(copied).expect("a message fits into memory");
        let arena =
            BytesMut::with_capacity(copied + message.blocks * 72 + message.partitions.len() * 16 + 256);
        Self { pool, arena, cuts: Vec::with_capacity(message.blocks) }
    }

    fn data(&mut self, planned: &PlannedBlock) {
        if planned.block.length <= COPY_BYTES_MAX {
            self.arena.put_slice(self.pool.view(planned.block));
        } else {
            self.cuts.push((self.arena.len(), self.pool.bytes(planned.block)));
        }
    }

    fn varint_field(&mut self, field: u8, value: u64) {
        self.arena.put_u8(field << 3);
        put_varint(&mut self.arena, value);
    }

    fn length_field(&mut self, field: u8, length: usize) {
        self.arena.put_u8(field << 3 | 2);
        put_varint(&mut self.arena, length as u64);
    }

    fn finish(self) -> MessagePieces {
        let arena = self.arena.freeze();
        let mut pieces = MessagePieces { pieces: Vec::with_capacity(2 * self.cuts.len() + 1), length: 0 };
        let mut begins = 0;
        for (at, data) in self.cuts {
            pieces.push(arena.slice(begins..at));
            pieces.push(data);
            begins = at;
        }
        pieces.push(arena.slice(begins..));
        pieces
    }
}

impl MessagePieces {
    fn push(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.length += piece.len();
            self.pieces.push(piece);
        }
    }
}

/// Encodes the classic form: payload inside each block, as in every stock gRPC client.
pub(crate) fn classic(
    pool: &ContentPool,
    key: &ShuffleKey,
    ticket: TicketId,
    message: &PlannedMessage,
) -> MessagePieces {
    grpc(pool, key, ticket, message, true)
}

/// Encodes the contiguous form: lengths in field 4, all payload in field 7.
pub(crate) fn contiguous(
    pool: &ContentPool,
    key: &ShuffleKey,
    ticket: TicketId,
    message: &PlannedMessage,
) -> MessagePieces {
    grpc(pool, key, ticket, message, false)
}

fn grpc(
    pool: &ContentPool,
    key: &ShuffleKey,
    ticket: TicketId,
    message: &PlannedMessage,
    inline: bool,
) -> MessagePieces {
    let mut writer = MessageWriter::new(pool, message);
    writer.length_field(1, key.app.as_str().len());
    writer.arena.put_slice(key.app.as_str().as_bytes());
    writer.varint_field(2, wide(key.shuffle.0));
    writer.varint_field(3, ticket.0.cast_unsigned());
    let task = message.task.0.cast_unsigned();
    for (partition, planned) in &message.partitions {
        let blocks = planned.iter().map(|planned| {
            let length = block_length(pool, planned, task, inline);
            1 + varint_length(length as u64) + length
        });
        let partition_id = wide(partition.0);
        writer.length_field(4, 1 + varint_length(partition_id) + blocks.sum::<usize>());
        writer.varint_field(1, partition_id);
        for planned in planned {
            writer.length_field(2, block_length(pool, planned, task, inline));
            let length = u64::from(planned.block.length);
            writer.varint_field(1, planned.id.cast_unsigned());
            writer.varint_field(2, length);
            writer.varint_field(3, length);
            writer.varint_field(4, u64::from(pool.crc(planned.block)));
            if inline {
                writer.length_field(5, usize::try_from(length).expect("a u32 fits into usize"));
                writer.data(planned);
            }
            writer.varint_field(6, task);
        }
    }
    if !inline {
        writer.length_field(7, usize::try_from(message.payload_bytes).expect("a message fits into memory"));
        for planned in message.partitions.iter().flat_map(|(_, planned)| planned) {
            writer.data(planned);
        }
    }
    writer.finish()
}

fn block_length(pool: &ContentPool, planned: &PlannedBlock, task: u64, inline: bool) -> usize {
    let length = u64::from(planned.block.length);
    let numbers = [planned.id.cast_unsigned(), length, length, u64::from(pool.crc(planned.block)), task];
    let heads: usize = numbers.iter().map(|&number| 1 + varint_length(number)).sum();
    let data = 1 + varint_length(length) + usize::try_from(length).expect("a u32 fits into usize");
    heads + if inline { data } else { 0 }
}

/// Converts a protobuf `int32`.
fn wide(value: i32) -> u64 {
    i64::from(value).cast_unsigned()
}

fn varint_length(value: u64) -> usize {
    // 7 bits per byte, and one byte for 0.
    usize::try_from((70 - (value | 1).leading_zeros()) / 7).expect("a varint has at most ten bytes")
}

fn put_varint(out: &mut BytesMut, mut value: u64) {
    while value >= 0x80 {
        out.put_u8(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    out.put_u8(value.to_le_bytes()[0]);
}

/// Encodes a whole Netty frame of type 3 (docs/protocol.md §7.4). Each block lists its servers, as
/// in Java.
pub(crate) fn netty(
    pool: &ContentPool,
    key: &ShuffleKey,
    ticket: TicketId,
    request_id: i64,
    message: &PlannedMessage,
) -> MessagePieces {
    let mut writer = MessageWriter::new(pool, message);
    let app = key.app.as_str().as_bytes();
    writer.arena.put_i32(length_i32(netty_length(key, message)));
    writer.arena.put_u8(3);
    writer.arena.put_i32(0);
    writer.arena.put_i64(request_id);
    writer.arena.put_i32(length_i32(app.len()));
    writer.arena.put_slice(app);
    writer.arena.put_i32(key.shuffle.0);
    writer.arena.put_i64(ticket.0);
    writer.arena.put_i32(length_i32(message.partitions.len()));
    for (partition, planned) in &message.partitions {
        writer.arena.put_i32(partition.0);
        writer.arena.put_i32(length_i32(planned.len()));
        for planned in planned {
            let length = planned.block.length.cast_signed();
            writer.arena.put_i32(partition.0);
            writer.arena.put_i64(planned.id);
            writer.arena.put_i32(length);
            writer.arena.put_i32(key.shuffle.0);
            writer.arena.put_i64(i64::from(pool.crc(planned.block)));
            writer.arena.put_i64(message.task.0);
            writer.arena.put_i32(length);
            writer.data(planned);
            writer.arena.put_slice(SERVERS);
            writer.arena.put_i32(length);
            writer.arena.put_i64(0);
        }
    }
    writer.arena.put_i64(0);
    writer.finish()
}

/// An encoded server list with one server, `10.0.0.1-19999-17000`, as in the protocol's test
/// vector.
const SERVERS: &[u8] = b"\0\0\0\x01\0\0\0\x1410.0.0.1-19999-17000\0\0\0\x0810.0.0.1\0\0\x4e\x1f\0\0\x42\x68";

/// Returns the length of the message part of [`netty`].
pub(crate) fn netty_length(key: &ShuffleKey, message: &PlannedMessage) -> usize {
    let heads = 8 + 4 + key.app.as_str().len() + 4 + 8 + 4 + 8;
    let blocks = message.blocks * (40 + SERVERS.len() + 12);
    let payload = usize::try_from(message.payload_bytes).expect("a message fits into memory");
    heads + message.partitions.len() * 8 + blocks + payload
}

fn length_i32(length: usize) -> i32 {
    i32::try_from(length).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use prost::Message as _;
    use uniffle_client::block::Block;
    use uniffle_client::send::{self, SendForm};
    use uniffle_wire::types::{AppId, BlockId, PartitionId, ShuffleId, TaskAttemptId};

    use super::*;
    use crate::content::Sizes;
    use crate::plan::WorkPlan;

    fn key() -> ShuffleKey {
        ShuffleKey::new(AppId::parse("app").unwrap(), ShuffleId(1))
    }

    fn sample(sizes: &str) -> (Arc<ContentPool>, PlannedMessage) {
        let pool = Arc::new(ContentPool::new(1, sizes.parse::<Sizes>().unwrap()));
        let message = WorkPlan::new(pool.clone(), 1, 50, 0.0)
            .with_messages(200_000, 5)
            .messages_of(3)
            .next_message(u64::MAX);
        (pool, message)
    }

    fn joined(pieces: &MessagePieces) -> Vec<u8> {
        let all: Vec<u8> = pieces.pieces.iter().flatten().copied().collect();
        assert_eq!(all.len(), pieces.length);
        all
    }

    fn as_library_blocks(pool: &ContentPool, message: &PlannedMessage) -> Vec<(PartitionId, Vec<Block>)> {
        let block = |p: &PlannedBlock| Block::new(BlockId(p.id), message.task, pool.bytes(p.block));
        message.partitions.iter().map(|(id, p)| (*id, p.iter().map(block).collect())).collect()
    }

    #[test]
    fn grpc_forms_match_the_client_library() {
        for sizes in ["spark-mix", "tiny", "fixed:14KiB"] {
            let (pool, message) = sample(sizes);
            let batch = as_library_blocks(&pool, &message);
            let library = |form| send::request(&key(), TicketId(9), form, &batch).encode_to_vec();
            assert_eq!(joined(&classic(&pool, &key(), TicketId(9), &message)), library(SendForm::Classic));
            let ours = joined(&contiguous(&pool, &key(), TicketId(9), &message));
            let decoded = uniffle_worker::proto::SendShuffleDataRequest::decode(ours.as_slice()).unwrap();
            assert_eq!(decoded, send::request(&key(), TicketId(9), SendForm::Contiguous, &batch));
            assert_eq!(Some(require_sizes(&message).0), send::require_size(&batch));
        }
    }

    #[test]
    fn netty_frame_matches_the_protocol_vector_except_block_bytes() {
        let (pool, mut message) = sample("fixed:3");
        message.partitions.truncate(1);
        message.partitions[0].0 = PartitionId(2);
        message.partitions[0].1.truncate(1);
        message.partitions[0].1[0].id = 0x0102_0304_0506_0708;
        (message.payload_bytes, message.blocks, message.task) = (3, 1, TaskAttemptId(5));
        let frame = joined(&netty(&pool, &key(), TicketId(42), 7, &message));
        let block = message.partitions[0].1[0].block;
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let expected = format!(
            "0000009603000000000000000000000007000000036170700000000100000000000000{}{}{:016x}{}{}{}",
            "2a00000001000000020000000100000002010203040506070800000003",
            "00000001",
            pool.crc(block),
            "000000000000000500000003",
            hex(pool.view(block)),
            "000000010000001431302e302e302e312d31393939392d31373030300000000831302e302e302e31\
             00004e1f00004268000000030000000000000000" // uncompressLength is 3 here
        );
        assert_eq!(hex(&frame), expected + "0000000000000000");
        assert_eq!(frame.len(), 9 + netty_length(&key(), &message));
    }

    #[test]
    fn varint_length_matches_encoding() {
        for value in [0, 1, 127, 128, 16_383, 16_384, u64::from(u32::MAX), u64::MAX] {
            let mut out = BytesMut::new();
            put_varint(&mut out, value);
            assert_eq!(out.len(), varint_length(value), "{value}");
        }
    }
}
