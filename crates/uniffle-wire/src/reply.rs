//! Replies of the raw TCP protocol (docs/protocol.md §7.5).
//!
//! The worker encodes only the head of a frame: header and message. The body is sent to the socket
//! from its own buffers. Decoding is for the client and for tests. Clients take all bytes after the
//! parsed fields as the body, so no field may ever be added to a message.

use bytes::{BufMut, Bytes, BytesMut};

use super::DecodeError;
use super::frame::{
    FRAME_BYTES_LIMIT, FrameFields, FrameHeader, FrameType, HEADER_BYTES, put_string, wire_length,
};
use crate::types::BlockMeta;

/// requestId, statusCode, length of retMessage.
const PREFIX_BYTES: u64 = 16;
/// blockId, offset, length, uncompressLength, crc, taskAttemptId.
const SEGMENT_BYTES: usize = 36;

/// Common prefix of every reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplyPrefix<'a> {
    /// Id of the request, as the client chose it.
    pub request_id: i64,
    /// Number of `StatusCode`.
    pub status: i32,
    /// Text for the client's log.
    pub message: &'a str,
}

/// Fields of a reply besides its prefix and its body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyFields<'a> {
    /// Type 0.
    Rpc,
    /// Type 14.
    LocalIndex {
        /// Length of the partition's data.
        data_length: i64,
    },
    /// Type 23.
    LocalIndexV2 {
        /// Length of the partition's data.
        data_length: i64,
        /// Disks in Java's numbering.
        storage_ids: &'a [i32],
    },
    /// Type 15.
    LocalData,
    /// Type 16. The body holds the blocks in this order, without gaps.
    Memory(&'a [BlockMeta]),
    /// Type 22.
    Sorted {
        /// Cursor.
        next_block_id: i64,
        /// `MergeState`.
        state: i32,
    },
}

impl ReplyFields<'_> {
    /// Returns the frame type of a reply with these fields.
    pub fn kind(&self) -> FrameType {
        match self {
            Self::Rpc => FrameType::RpcReply,
            Self::LocalIndex { .. } => FrameType::LocalIndexReply,
            Self::LocalIndexV2 { .. } => FrameType::LocalIndexV2Reply,
            Self::LocalData => FrameType::LocalDataReply,
            Self::Memory(_) => FrameType::MemoryReply,
            Self::Sorted { .. } => FrameType::SortedReply,
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Rpc | Self::LocalData => 0,
            Self::LocalIndex { .. } => 8,
            Self::LocalIndexV2 { storage_ids, .. } => 12 + 4 * storage_ids.len() as u64,
            Self::Memory(blocks) => 4 + (SEGMENT_BYTES as u64) * blocks.len() as u64,
            Self::Sorted { .. } => 12,
        }
    }
}

/// Appends the head (header and message) of a reply whose body has `body_bytes` bytes.
///
/// # Errors
/// Fails if head and body together do not fit into a frame. Nothing is written then.
pub fn encode_head(
    prefix: ReplyPrefix<'_>,
    fields: ReplyFields<'_>,
    body_bytes: u64,
    out: &mut BytesMut,
) -> Result<(), DecodeError> {
    let message_bytes = PREFIX_BYTES + prefix.message.len() as u64 + fields.bytes();
    let max = u64::from(FRAME_BYTES_LIMIT - 1);
    let too_large =
        DecodeError::TooLarge { what: "reply", len: message_bytes.saturating_add(body_bytes), max };
    if message_bytes.saturating_add(body_bytes) > max {
        return Err(too_large);
    }
    let message_bytes = u32::try_from(message_bytes).map_err(|_| too_large)?;
    let body_bytes = u32::try_from(body_bytes).map_err(|_| too_large)?;
    out.reserve(HEADER_BYTES + message_bytes as usize);
    FrameHeader { message_bytes, kind: fields.kind(), body_bytes }.encode(out);
    out.put_i64(prefix.request_id);
    out.put_i32(prefix.status);
    put_string(out, prefix.message);
    match fields {
        ReplyFields::Rpc | ReplyFields::LocalData => {}
        ReplyFields::LocalIndex { data_length } => out.put_i64(data_length),
        ReplyFields::LocalIndexV2 { data_length, storage_ids } => {
            out.put_i64(data_length);
            out.put_i32(wire_length(storage_ids.len()));
            storage_ids.iter().for_each(|&id| out.put_i32(id));
        }
        ReplyFields::Memory(blocks) => encode_segments(blocks, out),
        ReplyFields::Sorted { next_block_id, state } => {
            out.put_i64(next_block_id);
            out.put_i32(state);
        }
    }
    Ok(())
}

fn encode_segments(blocks: &[BlockMeta], out: &mut BytesMut) {
    out.put_i32(wire_length(blocks.len()));
    let mut offset = 0_u32;
    for block in blocks {
        out.put_i64(block.block_id.0);
        out.put_u32(offset);
        out.put_u32(block.length);
        out.put_u32(block.uncompressed_length);
        out.put_i64(i64::from(block.crc));
        out.put_i64(block.task_attempt_id.0);
        // The sum of the lengths is the body length, which was checked to fit.
        offset = offset.wrapping_add(block.length);
    }
}

/// A block of a memory reply, as the client decodes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplySegment {
    /// Block id.
    pub block_id: i64,
    /// Offset in the body.
    pub offset: i32,
    /// Bytes.
    pub length: i32,
    /// Bytes after decompression.
    pub uncompressed_length: i32,
    /// CRC-32 of the bytes as stored, 0 = not computed.
    pub crc: i64,
    /// Task attempt that wrote the block.
    pub task_attempt_id: i64,
}

/// A decoded reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// Id of the request, as the client chose it.
    pub request_id: i64,
    /// Number of `StatusCode`.
    pub status: i32,
    /// Text of the status.
    pub message: String,
    /// Fields that depend on the frame type.
    pub answer: ReplyAnswer,
    /// Payload.
    pub body: Bytes,
}

/// Fields that a frame type adds to a [`Reply`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplyAnswer {
    /// Type 0.
    Rpc,
    /// Types 14 and 23.
    LocalIndex {
        /// Length of the partition's data.
        data_length: i64,
        /// Only in type 23.
        storage_ids: Option<Vec<i32>>,
    },
    /// Type 15.
    LocalData,
    /// Type 16.
    Memory(Vec<ReplySegment>),
    /// Type 26.
    MemoryV2 {
        /// Segments as in type 16.
        segments: Vec<ReplySegment>,
        /// True if no data follows.
        is_end: bool,
    },
    /// Type 22.
    Sorted {
        /// Cursor.
        next_block_id: i64,
        /// `MergeState`.
        state: i32,
    },
}

impl Reply {
    /// Decodes message and body of a frame of type `kind`.
    ///
    /// # Errors
    /// Fails if the message is not exactly one reply of that type, or if `kind` is no reply.
    pub fn decode(kind: FrameType, message: &[u8], body: Bytes) -> Result<Self, DecodeError> {
        let mut fields = FrameFields::new(message);
        let (request_id, status) = (fields.i64()?, fields.i32()?);
        let text = fields.string("retMessage")?.to_owned();
        let answer = match kind {
            FrameType::RpcReply => ReplyAnswer::Rpc,
            FrameType::LocalIndexReply => {
                ReplyAnswer::LocalIndex { data_length: fields.i64()?, storage_ids: None }
            }
            FrameType::LocalIndexV2Reply => {
                let data_length = fields.i64()?;
                let count = fields.count("storage id count", 4)?;
                let ids = (0..count).map(|_| fields.i32()).collect::<Result<_, _>>()?;
                ReplyAnswer::LocalIndex { data_length, storage_ids: Some(ids) }
            }
            FrameType::LocalDataReply => ReplyAnswer::LocalData,
            FrameType::MemoryReply => ReplyAnswer::Memory(ReplySegment::decode_all(&mut fields)?),
            FrameType::MemoryV2Reply => ReplyAnswer::MemoryV2 {
                segments: ReplySegment::decode_all(&mut fields)?,
                is_end: fields.take(1)? == [1],
            },
            FrameType::SortedReply => {
                ReplyAnswer::Sorted { next_block_id: fields.i64()?, state: fields.i32()? }
            }
            FrameType::Send
            | FrameType::LocalIndex
            | FrameType::LocalData
            | FrameType::Memory
            | FrameType::Sorted
            | FrameType::LocalDataV2
            | FrameType::LocalDataV3 => return Err(DecodeError::UnknownType(kind.id())),
        };
        fields.finish()?;
        Ok(Self { request_id, status, message: text, answer, body })
    }
}

impl ReplySegment {
    fn decode_all(fields: &mut FrameFields<'_>) -> Result<Vec<Self>, DecodeError> {
        let count = fields.count("segment count", SEGMENT_BYTES)?;
        (0..count).map(|_| Self::decode(fields)).collect()
    }

    fn decode(fields: &mut FrameFields<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            block_id: fields.i64()?,
            offset: fields.i32()?,
            length: fields.i32()?,
            uncompressed_length: fields.i32()?,
            crc: fields.i64()?,
            task_attempt_id: fields.i64()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oversized_reply_is_refused_before_any_write() {
        let prefix = ReplyPrefix { request_id: 1, status: 0, message: "OK" };
        let mut out = BytesMut::new();
        for body_bytes in [u64::from(FRAME_BYTES_LIMIT) - 18, u64::from(FRAME_BYTES_LIMIT), u64::MAX] {
            assert!(encode_head(prefix, ReplyFields::LocalData, body_bytes, &mut out).is_err());
            assert!(out.is_empty());
        }
        assert!(
            encode_head(prefix, ReplyFields::LocalData, u64::from(FRAME_BYTES_LIMIT) - 19, &mut out).is_ok()
        );
    }

    #[test]
    fn memory_reply_of_java_main_has_the_end_flag() {
        let mut message = BytesMut::new();
        message.put_i64(7);
        message.put_i32(0);
        put_string(&mut message, "OK");
        encode_segments(&[], &mut message);
        message.put_u8(1);
        let reply = Reply::decode(FrameType::MemoryV2Reply, &message, Bytes::new()).unwrap();
        assert_eq!(reply.answer, ReplyAnswer::MemoryV2 { segments: Vec::new(), is_end: true });
        assert!(Reply::decode(FrameType::MemoryV2Reply, &message[..20], Bytes::new()).is_err());
    }

    #[test]
    fn count_beyond_the_message_is_refused() {
        let mut message = vec![0; 12];
        message.extend_from_slice(&[0, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff]);
        let decoded = Reply::decode(FrameType::MemoryReply, &message, Bytes::new());
        assert!(matches!(decoded, Err(DecodeError::TooLarge { what: "segment count", .. })), "{decoded:?}");
    }
}
