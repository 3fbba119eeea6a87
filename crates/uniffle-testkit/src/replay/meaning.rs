//! Meaning of an exchange of either plane, as far as a replay needs it.
//!
//! Code that uses this module does not depend on the plane. Recorded bytes must be well-formed.

use bytes::{BufMut as _, Bytes, BytesMut};

use crate::recording::{Plane, RecordedExchange, SentBlocks};
use uniffle_client::block::Block;
use uniffle_client::read::{self, RecordPosition};
use uniffle_wire::frame::{FRAME_BYTES_LIMIT, FrameHeader, FrameType, HEADER_BYTES};
use uniffle_wire::reply::{self, Reply};
use uniffle_wire::request::{LocalDataRequest, ReadRequest};
use uniffle_wire::types::{AppId, PartitionId, ShuffleId, ShuffleKey};
use uniffle_worker::proto;

use super::call::{varint, with_varint};

/// One partition of one shuffle.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PartitionKey {
    pub key: ShuffleKey,
    pub partition: PartitionId,
}

/// Meaning of a request.
#[derive(Debug)]
pub enum MeantRequest {
    Ticket,
    Send {
        ticket: u64,
        blocks: Vec<(PartitionKey, Block)>,
    },
    Memory {
        place: PartitionKey,
        cursor: i64,
        filter: Option<Bytes>,
    },
    Index {
        place: PartitionKey,
    },
    Data {
        place: PartitionKey,
        offset: u64,
        length: u64,
    },
    /// Requests the block ids of partitions.
    Result,
    Assignments,
    /// Unregisters one shuffle or all.
    Unregister {
        app: AppId,
        shuffle: Option<ShuffleId>,
    },
    /// A request of which only the status matters.
    Other,
}

/// A response, recorded or new.
#[derive(Debug)]
pub enum MeantResponse {
    Grpc { path: String, status: u32, message: Bytes },
    Tcp(Reply),
}

fn key(app: &str, shuffle: i32) -> ShuffleKey {
    ShuffleKey::new(AppId::parse(app).expect("a client sent an invalid application id"), ShuffleId(shuffle))
}

fn place(app: &str, shuffle: i32, partition: i32) -> PartitionKey {
    PartitionKey { key: key(app, shuffle), partition: PartitionId(partition) }
}

fn unsigned(value: i64) -> u64 {
    u64::try_from(value).unwrap()
}

/// Decodes recorded bytes as a generated message type.
fn grpc<T: prost::Message + Default>(message: &Bytes) -> T {
    T::decode(message.clone()).unwrap()
}

/// Returns the last part of a path.
fn method(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

/// Access to the meaning of an exchange.
pub trait Meaning {
    /// Returns the meaning of the request.
    fn parsed_request(&self) -> MeantRequest;
    /// Returns the recorded response.
    fn parsed_answer(&self) -> MeantResponse;
    /// Returns the request with another ticket. It must be a send.
    fn with_ticket(&self, ticket: u64) -> Bytes;
    /// Returns the request with another `lastBlockId`. It must be a read of memory.
    fn with_cursor(&self, cursor: i64) -> Bytes;
    /// Returns the request with another range. It must be a read of local data.
    fn with_range(&self, offset: u64, length: u64) -> Bytes;
}

impl Meaning for RecordedExchange {
    fn parsed_request(&self) -> MeantRequest {
        if let Some(sent) = self.sent().unwrap() {
            return send_request(sent);
        }
        match &self.plane {
            Plane::Grpc { path, .. } => grpc_request(method(path), &self.request),
            Plane::Tcp => {
                let header = header(&self.request);
                tcp_request(header.kind, &self.request[HEADER_BYTES..])
            }
        }
    }

    fn parsed_answer(&self) -> MeantResponse {
        match &self.plane {
            Plane::Grpc { path, status } => {
                MeantResponse::Grpc { path: path.clone(), status: *status, message: self.answer.clone() }
            }
            Plane::Tcp => {
                let header = header(&self.answer);
                let body_at = HEADER_BYTES + header.message_bytes as usize;
                let message = &self.answer[HEADER_BYTES..body_at];
                let reply = Reply::decode(header.kind, message, self.answer.slice(body_at..));
                MeantResponse::Tcp(reply.unwrap())
            }
        }
    }

    fn with_ticket(&self, ticket: u64) -> Bytes {
        match self.plane {
            Plane::Grpc { .. } => with_varint(&self.request, 3, ticket),
            Plane::Tcp => overwritten(self, 0, &ticket.to_be_bytes()),
        }
    }

    fn with_cursor(&self, cursor: i64) -> Bytes {
        match self.plane {
            Plane::Grpc { .. } => with_varint(&self.request, 4, cursor.cast_unsigned()),
            Plane::Tcp => overwritten(self, 4, &cursor.to_be_bytes()),
        }
    }

    fn with_range(&self, offset: u64, length: u64) -> Bytes {
        match self.plane {
            Plane::Grpc { .. } => with_varint(&with_varint(&self.request, 6, offset), 7, length),
            Plane::Tcp => {
                let mut range = BytesMut::new();
                range.put_u64(offset);
                range.put_u32(u32::try_from(length).unwrap());
                overwritten(self, 12, &range)
            }
        }
    }
}

/// Returns a frame with other bytes at `at` bytes after request id, application and shuffle
/// (docs/protocol.md §7.4).
fn overwritten(exchange: &RecordedExchange, at: usize, bytes: &[u8]) -> Bytes {
    let app_at = HEADER_BYTES + 8;
    let app_bytes = exchange.request[app_at..].first_chunk().map(|length| u32::from_be_bytes(*length));
    let start = app_at + 4 + app_bytes.unwrap() as usize + 4 + at;
    let mut frame = BytesMut::from(&exchange.request[..]);
    frame[start..start + bytes.len()].copy_from_slice(bytes);
    frame.freeze()
}

fn header(frame: &Bytes) -> FrameHeader {
    let bytes = frame.first_chunk().unwrap();
    FrameHeader::decode(bytes, FRAME_BYTES_LIMIT).unwrap()
}

fn send_request(sent: SentBlocks) -> MeantRequest {
    let mut blocks = Vec::new();
    for (partition, part) in sent.partitions {
        let place = place(&sent.app, sent.shuffle, partition);
        blocks.extend(part.into_iter().map(|block| (place.clone(), block)));
    }
    MeantRequest::Send { ticket: sent.ticket.cast_unsigned(), blocks }
}

fn grpc_request(method: &str, message: &Bytes) -> MeantRequest {
    match method {
        "requireBuffer" => MeantRequest::Ticket,
        "getMemoryShuffleData" => {
            let read: proto::GetMemoryShuffleDataRequest = grpc(message);
            let place = place(&read.app_id, read.shuffle_id, read.partition_id);
            // 0.9.2 sends an empty filter instead of none.
            let filter = read.serialized_expected_task_ids_bitmap.filter(|bytes| !bytes.is_empty());
            MeantRequest::Memory { place, cursor: read.last_block_id, filter }
        }
        "getLocalShuffleIndex" => {
            let read: proto::GetLocalShuffleIndexRequest = grpc(message);
            MeantRequest::Index { place: place(&read.app_id, read.shuffle_id, read.partition_id) }
        }
        "getLocalShuffleData" => {
            let read: proto::GetLocalShuffleDataRequest = grpc(message);
            let place = place(&read.app_id, read.shuffle_id, read.partition_id);
            MeantRequest::Data { place, offset: unsigned(read.offset), length: unsigned(read.length.into()) }
        }
        "getShuffleResult" | "getShuffleResultForMultiPart" => MeantRequest::Result,
        "getShuffleAssignments" => MeantRequest::Assignments,
        "unregisterShuffle" => {
            let request: proto::ShuffleUnregisterRequest = grpc(message);
            let ShuffleKey { app, shuffle } = key(&request.app_id, request.shuffle_id);
            MeantRequest::Unregister { app, shuffle: Some(shuffle) }
        }
        "unregisterShuffleByAppId" => {
            let request: proto::ShuffleUnregisterByAppIdRequest = grpc(message);
            MeantRequest::Unregister { app: key(&request.app_id, 0).app, shuffle: None }
        }
        _ => MeantRequest::Other,
    }
}

fn tcp_request(kind: FrameType, message: &[u8]) -> MeantRequest {
    let read = ReadRequest::decode(kind, message).unwrap();
    let target = read.target();
    let place = place(target.app, target.shuffle, target.partition);
    match read {
        ReadRequest::LocalIndex(_) => MeantRequest::Index { place },
        ReadRequest::LocalData(LocalDataRequest { offset, length, .. }) => {
            MeantRequest::Data { place, offset: unsigned(offset), length: unsigned(length.into()) }
        }
        ReadRequest::Memory(read) => {
            let filter = read.task_filter.map(Bytes::copy_from_slice);
            MeantRequest::Memory { place, cursor: read.last_block_id, filter }
        }
        ReadRequest::Sorted(_) => MeantRequest::Other,
    }
}

impl MeantResponse {
    /// Returns `grpc-status` and the protocol's own status, which is 0 for SUCCESS.
    pub fn status(&self) -> (u32, i32) {
        match self {
            Self::Grpc { path, status, message } => {
                let field = match method(path) {
                    "requireBuffer" | "getLocalShuffleIndex" | "getLocalShuffleData" => 2,
                    "getMemoryShuffleData" => 3,
                    _ => 1,
                };
                (*status, i32::try_from(varint(message, field)).unwrap())
            }
            Self::Tcp(reply) => (0, reply.status),
        }
    }

    /// Returns true if the protocol's status is `code`.
    pub fn is(&self, code: proto::StatusCode) -> bool {
        self.status() == (0, code.into())
    }

    /// Returns the granted ticket.
    pub fn ticket(&self) -> u64 {
        varint(self.message(), 1)
    }

    /// Returns the set of block ids.
    pub fn block_ids(&self) -> Result<croaring::Treemap, String> {
        // Both response types have the bitmap in the same field.
        let answer: proto::GetShuffleResultResponse = grpc(self.message());
        read::decode_bitmap(&answer.serialized_bitmap).map_err(|error| error.to_string())
    }

    /// Returns first partition, last partition and number of servers of each range, in order.
    pub fn assigned(&self) -> Vec<(i32, i32, usize)> {
        let answer: proto::GetShuffleAssignmentsResponse = grpc(self.message());
        let range = |range: &proto::PartitionRangeAssignment| {
            (range.start_partition, range.end_partition, range.server.len())
        };
        let mut ranges: Vec<_> = answer.assignments.iter().map(range).collect();
        ranges.sort_unstable();
        ranges
    }

    /// Returns the blocks of a read of memory.
    pub fn memory_blocks(&self) -> Result<Vec<Block>, String> {
        let blocks = match self {
            Self::Grpc { message, .. } => {
                let answer: proto::GetMemoryShuffleDataResponse = grpc(message);
                read::memory_blocks(&answer.shuffle_data_block_segments, &answer.data)
            }
            Self::Tcp(reply) => {
                let reply::ReplyAnswer::Memory(segments) = &reply.answer else {
                    return Err(format!("the response to a read of memory is {reply:?}"));
                };
                let segments: Vec<_> = segments.iter().map(grpc_segment).collect();
                read::memory_blocks(&segments, &reply.body)
            }
        };
        blocks.map_err(|error| error.to_string())
    }

    /// Returns the index of a partition.
    pub fn index(&self) -> Result<Vec<RecordPosition>, String> {
        let bytes = match self {
            Self::Grpc { message, .. } => grpc::<proto::GetLocalShuffleIndexResponse>(message).index_data,
            Self::Tcp(reply) => reply.body.clone(),
        };
        read::decode_index(&bytes).map_err(|error| error.to_string())
    }

    /// Returns data of a partition.
    pub fn data(&self) -> Bytes {
        match self {
            Self::Grpc { message, .. } => grpc::<proto::GetLocalShuffleDataResponse>(message).data,
            Self::Tcp(reply) => reply.body.clone(),
        }
    }

    fn message(&self) -> &Bytes {
        match self {
            Self::Grpc { message, .. } => message,
            Self::Tcp(reply) => panic!("TCP has no such request: {reply:?}"),
        }
    }
}

fn grpc_segment(segment: &reply::ReplySegment) -> proto::ShuffleDataBlockSegment {
    proto::ShuffleDataBlockSegment {
        block_id: segment.block_id,
        offset: segment.offset.into(),
        length: segment.length,
        uncompress_length: segment.uncompressed_length,
        crc: segment.crc,
        task_attempt_id: segment.task_attempt_id,
    }
}
