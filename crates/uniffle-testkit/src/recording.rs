//! File format of recorded client sessions: the requests of one real client and the responses.
//!
//! `tests/contract/replay/README.md` describes the format. Sessions are replayed there, and give
//! `uniffle-bench` its shapes. Recordings are in Git, so a changed format needs a new magic. Pure
//! functions between bytes and values. Integers are big-endian. A truncated file or trailing bytes
//! are an error.

use bytes::{Buf, BufMut, Bytes};
use prost::Message as _;

use uniffle_client::block::Block;
use uniffle_wire::DecodeError;
use uniffle_wire::frame::{FRAME_BYTES_LIMIT, FrameFields, FrameHeader, FrameType, HEADER_BYTES};
use uniffle_wire::proto;
use uniffle_wire::types::{BlockId, BlockMeta, TaskAttemptId};

const MAGIC: &[u8] = b"uniffle session 1\n";

/// All exchanges of one client.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RecordedSession {
    /// One line of description: client, Spark, job, server.
    pub title: String,
    /// Exchanges in the order of `began_us`.
    pub exchanges: Vec<RecordedExchange>,
}

/// One request and its response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedExchange {
    /// Time from the start of the recording to the complete request.
    pub began_us: u64,
    /// Time from the start of the recording to the complete response.
    pub ended_us: u64,
    /// Number of the client's connection, counted per plane.
    pub connection: u32,
    /// Transport.
    pub plane: Plane,
    /// Request. gRPC: the message without its prefix. TCP: the frame.
    pub request: Bytes,
    /// Response, in the same form.
    pub answer: Bytes,
}

/// gRPC or raw TCP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Plane {
    /// A unary call.
    Grpc {
        /// `/rss.common.ShuffleServer/requireBuffer`
        path: String,
        /// `grpc-status` of the response.
        status: u32,
    },
    /// A frame.
    Tcp,
}

/// A `sendShuffleData` of either plane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SentBlocks {
    /// Application as sent.
    pub app: String,
    /// Shuffle.
    pub shuffle: i32,
    /// Ticket.
    pub ticket: i64,
    /// Partitions in the order of the message, each with its blocks.
    pub partitions: Vec<(i32, Vec<Block>)>,
}

impl RecordedSession {
    /// Encodes the session as a file.
    ///
    /// # Panics
    /// Panics if a field has 4 GiB or more.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        put_bytes(&mut out, self.title.as_bytes());
        out.put_u32(u32::try_from(self.exchanges.len()).expect("a recording has few exchanges"));
        for exchange in &self.exchanges {
            out.put_u64(exchange.began_us);
            out.put_u64(exchange.ended_us);
            out.put_u32(exchange.connection);
            match &exchange.plane {
                Plane::Grpc { path, status } => {
                    put_bytes(&mut out, path.as_bytes());
                    out.put_u32(*status);
                }
                Plane::Tcp => {
                    put_bytes(&mut out, b"");
                    out.put_u32(0);
                }
            }
            put_bytes(&mut out, &exchange.request);
            put_bytes(&mut out, &exchange.answer);
        }
        out
    }

    /// Decodes a file.
    ///
    /// # Errors
    /// Returns a description of the error.
    pub fn decode(file: impl Into<Bytes>) -> Result<Self, String> {
        let mut file = file.into();
        if take(&mut file, MAGIC.len()).ok().as_deref() != Some(MAGIC) {
            return Err("this is not a recorded session".to_owned());
        }
        let title = take_text(&mut file)?;
        let count = take_u32(&mut file)?;
        let exchanges = (0..count)
            .map(|number| {
                RecordedExchange::decode(&mut file).map_err(|error| format!("exchange {number}: {error}"))
            })
            .collect::<Result<_, _>>()?;
        if file.has_remaining() {
            return Err(format!("{} bytes follow the last exchange", file.remaining()));
        }
        Ok(Self { title, exchanges })
    }
}

impl RecordedExchange {
    /// Returns the blocks that the exchange sends, or `None` if it is not a send.
    ///
    /// # Errors
    /// Returns a description of a malformed request.
    pub fn sent(&self) -> Result<Option<SentBlocks>, String> {
        match &self.plane {
            Plane::Grpc { path, .. } if path.ends_with("/sendShuffleData") => {
                grpc_send(&self.request).map(Some)
            }
            Plane::Grpc { .. } => Ok(None),
            Plane::Tcp => tcp_send(&self.request).map_err(|error| error.to_string()),
        }
    }

    fn decode(file: &mut Bytes) -> Result<Self, String> {
        let (began_us, ended_us) = (take_u64(file)?, take_u64(file)?);
        let connection = take_u32(file)?;
        let (path, status) = (take_text(file)?, take_u32(file)?);
        let plane = if path.is_empty() { Plane::Tcp } else { Plane::Grpc { path, status } };
        let (request, answer) = (take_bytes(file)?, take_bytes(file)?);
        Ok(Self { began_us, ended_us, connection, plane, request, answer })
    }
}

fn grpc_send(message: &Bytes) -> Result<SentBlocks, String> {
    let send = proto::SendShuffleDataRequest::decode(message.clone()).map_err(|error| error.to_string())?;
    if !send.contiguous_shuffle_data.is_empty() {
        return Err("a send in another form than the classic one".to_owned());
    }
    let mut partitions = Vec::new();
    for part in send.shuffle_data {
        let blocks = part.block.into_iter().map(block).collect::<Result<_, _>>()?;
        partitions.push((part.partition_id, blocks));
    }
    Ok(SentBlocks { app: send.app_id, shuffle: send.shuffle_id, ticket: send.require_buffer_id, partitions })
}

fn block(block: proto::ShuffleBlock) -> Result<Block, String> {
    let number = |value: i64| u32::try_from(value).map_err(|_| format!("{value} does not fit 32 bits"));
    let meta = BlockMeta {
        block_id: BlockId(block.block_id),
        task_attempt_id: TaskAttemptId(block.task_attempt_id),
        length: number(block.length.into())?,
        uncompressed_length: number(block.uncompress_length.into())?,
        crc: number(block.crc)?,
    };
    Ok(Block { meta, data: block.data })
}

/// Decodes a `SendShuffleDataRequest` (docs/protocol.md §7.4), if the frame is one.
fn tcp_send(frame: &Bytes) -> Result<Option<SentBlocks>, String> {
    let header = frame.first_chunk().ok_or("a cut frame")?;
    let header = FrameHeader::decode(header, FRAME_BYTES_LIMIT).map_err(|error| error.to_string())?;
    if header.kind != FrameType::Send {
        return Ok(None);
    }
    let mut raw = Vec::new();
    let sent = walk_send(&frame[HEADER_BYTES..], &mut raw).map_err(|error| error.to_string())?;
    let mut partitions = Vec::new();
    for (partition, blocks) in raw {
        partitions.push((partition, blocks.into_iter().map(block).collect::<Result<_, _>>()?));
    }
    Ok(Some(SentBlocks { partitions, ..sent }))
}

fn walk_send(
    message: &[u8],
    parts: &mut Vec<(i32, Vec<proto::ShuffleBlock>)>,
) -> Result<SentBlocks, DecodeError> {
    let mut fields = FrameFields::new(message);
    let _request_id = fields.i64()?;
    let (app, shuffle, ticket) = (fields.string("appId")?.to_owned(), fields.i32()?, fields.i64()?);
    for _ in 0..fields.i32()? {
        let (partition, mut blocks) = (fields.i32()?, Vec::new());
        for _ in 0..fields.i32()? {
            blocks.push(walk_block(&mut fields)?);
        }
        parts.push((partition, blocks));
    }
    let _timestamp = fields.i64()?;
    fields.finish()?;
    Ok(SentBlocks { app, shuffle, ticket, partitions: Vec::new() })
}

fn walk_block(fields: &mut FrameFields<'_>) -> Result<proto::ShuffleBlock, DecodeError> {
    let _partition = fields.i32()?;
    let block_id = fields.i64()?;
    let (length, _shuffle) = (fields.i32()?, fields.i32()?);
    let (crc, task_attempt_id) = (fields.i64()?, fields.i64()?);
    let data = Bytes::copy_from_slice(fields.bytes("data")?.unwrap_or_default());
    for _ in 0..fields.i32()? {
        let _server = (fields.string("id")?, fields.string("host")?, fields.i32()?, fields.i32()?);
    }
    let (uncompress_length, _free_memory) = (fields.i32()?, fields.i64()?);
    Ok(proto::ShuffleBlock { block_id, length, uncompress_length, crc, data, task_attempt_id })
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    out.put_u32(u32::try_from(bytes.len()).expect("a field of a recording has less than 4 GiB"));
    out.put_slice(bytes);
}

fn take(file: &mut Bytes, length: usize) -> Result<Bytes, String> {
    if file.remaining() < length {
        return Err(format!("the file ends {} bytes early", length - file.remaining()));
    }
    Ok(file.split_to(length))
}

fn take_u32(file: &mut Bytes) -> Result<u32, String> {
    Ok(take(file, 4)?.get_u32())
}

fn take_u64(file: &mut Bytes) -> Result<u64, String> {
    Ok(take(file, 8)?.get_u64())
}

fn take_bytes(file: &mut Bytes) -> Result<Bytes, String> {
    let length = take_u32(file)?;
    take(file, length as usize)
}

fn take_text(file: &mut Bytes) -> Result<String, String> {
    String::from_utf8(take_bytes(file)?.to_vec()).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn session_round_trips_and_truncation_is_an_error() {
        let exchange = RecordedExchange {
            began_us: 1,
            ended_us: u64::MAX,
            connection: 3,
            plane: Plane::Grpc { path: "/a/b".to_owned(), status: 12 },
            request: Bytes::from_static(b"request"),
            answer: Bytes::new(),
        };
        let tcp = RecordedExchange { plane: Plane::Tcp, ..exchange.clone() };
        let session = RecordedSession { title: "title".to_owned(), exchanges: vec![exchange, tcp] };
        let file = session.encode();
        assert_eq!(RecordedSession::decode(file.clone()), Ok(session));
        for length in 0..file.len() {
            assert!(
                RecordedSession::decode(file[..length].to_vec()).is_err(),
                "a recording cut to {length} of {} bytes was accepted",
                file.len()
            );
        }
        assert!(RecordedSession::decode([file, vec![0]].concat()).is_err());
    }
}
