//! Requests of the raw TCP protocol (docs/protocol.md §7.4). A received send is decoded by
//! `send_frame` instead.
//!
//! Decoding borrows from a whole message. Most have a few hundred bytes, but a task filter can be
//! much longer. Decoded ids must still be validated (`types`). Encoding is for the client and for
//! tests.

use bytes::{BufMut, Bytes, BytesMut};

use super::DecodeError;
use super::frame::{FrameFields, FrameHeader, FrameType, HEADER_BYTES, put_string, wire_length};

/// Length of one read-ahead hint of a [`FrameType::LocalDataV3`].
const HINT_BYTES: usize = 16;

/// A read request of any type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadRequest<'a> {
    /// Type 4.
    LocalIndex(LocalIndexRequest<'a>),
    /// Types 5, 24 and 25.
    LocalData(LocalDataRequest<'a>),
    /// Type 6.
    Memory(MemoryRequest<'a>),
    /// Type 21.
    Sorted(SortedRequest<'a>),
}

/// Partition to read, at the start of every read request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartitionTarget<'a> {
    /// Chosen by the client. Not unique: retries reuse it.
    pub request_id: i64,
    /// Application id, not validated.
    pub app: &'a str,
    /// Shuffle id, not validated.
    pub shuffle: i32,
    /// Partition id, not validated.
    pub partition: i32,
}

/// Numbers from which Java derives a partition's directory. The worker needs neither.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Number of partitions that share a directory.
    pub partitions_per_range: i32,
    /// Number of partitions of the shuffle.
    pub partitions: i32,
}

/// `GetLocalShuffleIndexRequest`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalIndexRequest<'a> {
    /// Partition to read.
    pub target: PartitionTarget<'a>,
    /// Used by Java only.
    pub placement: Placement,
}

/// Range that a client announces to read next, as sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnnouncedRange {
    /// Offset of the first byte.
    pub offset: i64,
    /// Number of bytes.
    pub length: i64,
}

/// `GetLocalShuffleDataRequest`, `…V2Request` and `…V3Request`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalDataRequest<'a> {
    /// Partition to read.
    pub target: PartitionTarget<'a>,
    /// Used by Java only.
    pub placement: Placement,
    /// Offset of the first byte.
    pub offset: i64,
    /// Number of bytes.
    pub length: i32,
    /// Client's clock in milliseconds.
    pub timestamp_ms: i64,
    /// Request version and the fields it adds.
    pub version: LocalDataVersion<'a>,
}

/// Fields that later versions add to a [`LocalDataRequest`]. None of them changes the response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LocalDataVersion<'a> {
    /// Type 5.
    V1,
    /// Type 24.
    V2 {
        /// Disk in Java's numbering.
        storage_id: i32,
    },
    /// Type 25.
    V3 {
        /// Disk in Java's numbering.
        storage_id: i32,
        /// Ranges that will be read next: pairs of i64, undecoded.
        hints: &'a [u8],
        /// Task attempt that reads.
        task_attempt_id: i64,
    },
}

/// `GetMemoryShuffleDataRequest`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryRequest<'a> {
    /// Partition to read.
    pub target: PartitionTarget<'a>,
    /// Cursor: last block received, −1 at the start.
    pub last_block_id: i64,
    /// Number of bytes after which the response ends.
    pub read_buffer_size: i32,
    /// Client's clock in milliseconds.
    pub timestamp_ms: i64,
    /// Bitmap of the wanted task attempts, undecoded. `None` means all.
    pub task_filter: Option<&'a [u8]>,
}

/// `GetSortedShuffleDataRequest`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SortedRequest<'a> {
    /// Partition to read.
    pub target: PartitionTarget<'a>,
    /// Cursor.
    pub block_id: i64,
    /// Number of bytes wanted.
    pub length: i32,
    /// Client's clock in milliseconds.
    pub timestamp_ms: i64,
}

/// Returns the request id of a message of any request type, or `None` if the message is too short.
pub fn request_id(message: &[u8]) -> Option<i64> {
    message.first_chunk().map(|bytes| i64::from_be_bytes(*bytes))
}

impl<'a> ReadRequest<'a> {
    /// Decodes the message of a frame of type `kind`.
    ///
    /// # Errors
    /// Fails if the message is not exactly one request of that type, or if `kind` is no read.
    pub fn decode(kind: FrameType, message: &'a [u8]) -> Result<Self, DecodeError> {
        let mut fields = FrameFields::new(message);
        let target = PartitionTarget::decode(&mut fields)?;
        let request = match kind {
            FrameType::LocalIndex => {
                Self::LocalIndex(LocalIndexRequest { target, placement: Placement::decode(&mut fields)? })
            }
            FrameType::LocalData | FrameType::LocalDataV2 | FrameType::LocalDataV3 => {
                Self::LocalData(LocalDataRequest::decode(kind, target, &mut fields)?)
            }
            FrameType::Memory => Self::Memory(MemoryRequest {
                target,
                last_block_id: fields.i64()?,
                read_buffer_size: fields.i32()?,
                timestamp_ms: fields.i64()?,
                task_filter: fields.bytes("task filter")?,
            }),
            FrameType::Sorted => Self::Sorted(SortedRequest {
                target,
                block_id: fields.i64()?,
                length: fields.i32()?,
                timestamp_ms: fields.i64()?,
            }),
            FrameType::Send
            | FrameType::RpcReply
            | FrameType::LocalIndexReply
            | FrameType::LocalDataReply
            | FrameType::MemoryReply
            | FrameType::MemoryV2Reply
            | FrameType::SortedReply
            | FrameType::LocalIndexV2Reply => return Err(DecodeError::UnknownType(kind.id())),
        };
        fields.finish()?;
        Ok(request)
    }

    /// Returns the partition to read.
    pub fn target(&self) -> &PartitionTarget<'a> {
        match self {
            Self::LocalIndex(request) => &request.target,
            Self::LocalData(request) => &request.target,
            Self::Memory(request) => &request.target,
            Self::Sorted(request) => &request.target,
        }
    }

    /// Returns the frame type of the request.
    pub fn kind(&self) -> FrameType {
        match self {
            Self::LocalIndex(_) => FrameType::LocalIndex,
            Self::LocalData(request) => match request.version {
                LocalDataVersion::V1 => FrameType::LocalData,
                LocalDataVersion::V2 { .. } => FrameType::LocalDataV2,
                LocalDataVersion::V3 { .. } => FrameType::LocalDataV3,
            },
            Self::Memory(_) => FrameType::Memory,
            Self::Sorted(_) => FrameType::Sorted,
        }
    }

    /// Writes the whole frame.
    pub fn encode_frame(&self, out: &mut BytesMut) {
        framed(self.kind(), out, |out| {
            self.target().encode(out);
            match self {
                Self::LocalIndex(request) => request.placement.encode(out),
                Self::LocalData(request) => request.encode_rest(out),
                Self::Memory(request) => {
                    out.put_i64(request.last_block_id);
                    out.put_i32(request.read_buffer_size);
                    out.put_i64(request.timestamp_ms);
                    out.put_i32(request.task_filter.map_or(-1, |filter| wire_length(filter.len())));
                    out.put_slice(request.task_filter.unwrap_or_default());
                }
                Self::Sorted(request) => {
                    out.put_i64(request.block_id);
                    out.put_i32(request.length);
                    out.put_i64(request.timestamp_ms);
                }
            }
        });
    }
}

impl<'a> PartitionTarget<'a> {
    fn decode(fields: &mut FrameFields<'a>) -> Result<Self, DecodeError> {
        Ok(Self {
            request_id: fields.i64()?,
            app: fields.string("appId")?,
            shuffle: fields.i32()?,
            partition: fields.i32()?,
        })
    }

    fn encode(&self, out: &mut BytesMut) {
        out.put_i64(self.request_id);
        put_string(out, self.app);
        out.put_i32(self.shuffle);
        out.put_i32(self.partition);
    }
}

impl Placement {
    fn decode(fields: &mut FrameFields<'_>) -> Result<Self, DecodeError> {
        Ok(Self { partitions_per_range: fields.i32()?, partitions: fields.i32()? })
    }

    fn encode(self, out: &mut BytesMut) {
        out.put_i32(self.partitions_per_range);
        out.put_i32(self.partitions);
    }
}

impl<'a> LocalDataRequest<'a> {
    /// Returns the ranges that the client announces to read next. Not validated.
    pub fn hints(&self) -> impl ExactSizeIterator<Item = AnnouncedRange> + 'a {
        let hints = match self.version {
            LocalDataVersion::V1 | LocalDataVersion::V2 { .. } => &[],
            LocalDataVersion::V3 { hints, .. } => hints.as_chunks::<HINT_BYTES>().0,
        };
        let number = |bytes: &[u8]| bytes.first_chunk().map_or(0, |bytes| i64::from_be_bytes(*bytes));
        hints
            .iter()
            .map(move |hint| AnnouncedRange { offset: number(hint), length: number(&hint[HINT_BYTES / 2..]) })
    }

    fn decode(
        kind: FrameType,
        target: PartitionTarget<'a>,
        fields: &mut FrameFields<'a>,
    ) -> Result<Self, DecodeError> {
        let placement = Placement::decode(fields)?;
        let (offset, length, timestamp_ms) = (fields.i64()?, fields.i32()?, fields.i64()?);
        let version = match kind {
            FrameType::LocalDataV2 => LocalDataVersion::V2 { storage_id: fields.i32()? },
            FrameType::LocalDataV3 => {
                let storage_id = fields.i32()?;
                let hints = fields.count("read-ahead hint count", HINT_BYTES)?;
                let hints = fields.take(hints * HINT_BYTES)?;
                LocalDataVersion::V3 { storage_id, hints, task_attempt_id: fields.i64()? }
            }
            _ => LocalDataVersion::V1,
        };
        Ok(Self { target, placement, offset, length, timestamp_ms, version })
    }

    fn encode_rest(&self, out: &mut BytesMut) {
        self.placement.encode(out);
        out.put_i64(self.offset);
        out.put_i32(self.length);
        out.put_i64(self.timestamp_ms);
        match self.version {
            LocalDataVersion::V1 => {}
            LocalDataVersion::V2 { storage_id } => out.put_i32(storage_id),
            LocalDataVersion::V3 { storage_id, hints, task_attempt_id } => {
                out.put_i32(storage_id);
                out.put_i32(wire_length(hints.len() / HINT_BYTES));
                out.put_slice(hints);
                out.put_i64(task_attempt_id);
            }
        }
    }
}

/// A whole `SendShuffleDataRequest`, as a client builds it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SendRequest {
    /// Chosen by the client.
    pub request_id: i64,
    /// Application id.
    pub app: String,
    /// Shuffle id.
    pub shuffle: i32,
    /// Ticket of `requireBuffer`.
    pub ticket: i64,
    /// Partition ids with their blocks, in the order of sending.
    pub partitions: Vec<(i32, Vec<SendBlock>)>,
    /// Client's clock in milliseconds.
    pub timestamp_ms: i64,
}

/// A block of a [`SendRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SendBlock {
    /// Block id.
    pub block_id: i64,
    /// CRC-32 of the data.
    pub crc: i64,
    /// Task attempt that wrote the block.
    pub task_attempt_id: i64,
    /// Content, at most [`BLOCK_BYTES_MAX`](crate::types::BLOCK_BYTES_MAX) bytes.
    pub data: Bytes,
    /// Servers that the client sends the block to. Servers ignore them.
    pub servers: Vec<BlockServer>,
    /// Length after decompression.
    pub uncompressed_length: i32,
    /// Internal to the client.
    pub free_memory: i64,
}

/// One entry of a block's server list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BlockServer {
    /// `ip-grpcPort-nettyPort`
    pub id: String,
    /// Host name or IP address.
    pub host: String,
    /// gRPC port.
    pub grpc_port: i32,
    /// Port of the raw TCP protocol.
    pub netty_port: i32,
}

impl SendRequest {
    /// Writes the whole frame.
    pub fn encode_frame(&self, out: &mut BytesMut) {
        framed(FrameType::Send, out, |out| {
            out.put_i64(self.request_id);
            put_string(out, &self.app);
            out.put_i32(self.shuffle);
            out.put_i64(self.ticket);
            out.put_i32(wire_length(self.partitions.len()));
            for (partition, blocks) in &self.partitions {
                out.put_i32(*partition);
                out.put_i32(wire_length(blocks.len()));
                for block in blocks {
                    block.encode(out, *partition, self.shuffle);
                }
            }
            out.put_i64(self.timestamp_ms);
        });
    }
}

impl SendBlock {
    fn encode(&self, out: &mut BytesMut, partition: i32, shuffle: i32) {
        let length = wire_length(self.data.len());
        out.put_i32(partition);
        out.put_i64(self.block_id);
        out.put_i32(length);
        out.put_i32(shuffle);
        out.put_i64(self.crc);
        out.put_i64(self.task_attempt_id);
        out.put_i32(length);
        out.put_slice(&self.data);
        out.put_i32(wire_length(self.servers.len()));
        for server in &self.servers {
            put_string(out, &server.id);
            put_string(out, &server.host);
            out.put_i32(server.grpc_port);
            out.put_i32(server.netty_port);
        }
        out.put_i32(self.uncompressed_length);
        out.put_i64(self.free_memory);
    }
}

/// Writes a frame without body. `message` writes the message.
fn framed(kind: FrameType, out: &mut BytesMut, message: impl FnOnce(&mut BytesMut)) {
    let start = out.len();
    out.put_bytes(0, HEADER_BYTES);
    message(out);
    let message_bytes = u32::try_from(out.len() - start - HEADER_BYTES).unwrap_or(u32::MAX);
    let header = FrameHeader { message_bytes, kind, body_bytes: 0 };
    header.encode(&mut &mut out[start..start + HEADER_BYTES]);
}
