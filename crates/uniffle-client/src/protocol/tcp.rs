//! Client of the raw TCP data protocol, with any number of concurrent requests on one connection.
//!
//! It does not retry or reconnect, and obtains no tickets (they come over gRPC). Golden tests
//! compare the frames of `wire` with the bytes of Java's client. They detect a mistake that encoder
//! and decoder have in common. Invariant: while the driver runs, each call ends with its own
//! response, or with [`TcpClientError::Closed`] when the connection ends.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, oneshot};

use crate::block::Block;
use crate::grpc::{ClientError, IndexResponse, MemoryResponse};
use crate::proto::{ShuffleDataBlockSegment, StatusCode};
use crate::read::{self, Malformed};
use crate::send::Batch;
use uniffle_wire::DecodeError;
use uniffle_wire::frame::{FRAME_BYTES_LIMIT, FrameHeader, HEADER_BYTES};
use uniffle_wire::reply::{self, Reply, ReplyAnswer};
use uniffle_wire::request::{
    BlockServer, LocalDataRequest, LocalDataVersion, LocalIndexRequest, MemoryRequest, PartitionTarget,
    Placement, ReadRequest, SendBlock, SendRequest,
};
use uniffle_wire::types::{PartitionId, ShuffleKey, TicketId};

/// Maximum number of queued requests. Further callers wait.
const QUEUE_LENGTH: usize = 16;

/// Error of a request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TcpClientError {
    /// The connection ended before the response.
    #[error("the connection ended before the response")]
    Closed,
    /// The server responded with a status other than SUCCESS.
    #[error("{status:?}: {text}")]
    Refused {
        /// The status.
        status: StatusCode,
        /// `retMessage`.
        text: String,
    },
    /// The response is malformed.
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

impl TcpClientError {
    /// Returns the server's status, if it responded with one.
    #[must_use]
    pub fn status(&self) -> Option<StatusCode> {
        if let Self::Refused { status, .. } = self { Some(*status) } else { None }
    }

    /// Converts the error into one of the call `rpc`.
    #[must_use]
    pub fn in_call(self, rpc: &'static str) -> ClientError {
        match self {
            Self::Closed => ClientError::Connection { source: io::ErrorKind::UnexpectedEof.into() },
            Self::Refused { status, text } => ClientError::Refused { rpc, status, text },
            Self::Malformed(source) => ClientError::Malformed { rpc, source },
        }
    }
}

/// Pending responses by request id.
type PendingReplies = Arc<Mutex<HashMap<i64, oneshot::Sender<Reply>>>>;

/// A client on one connection, which is closed on drop.
#[derive(Debug)]
pub struct TcpClient {
    outgoing: mpsc::Sender<Bytes>,
    waiting: PendingReplies,
    next_id: AtomicI64,
    servers: Vec<BlockServer>,
}

impl TcpClient {
    /// Connects to a worker's TCP listener. The caller must run the returned future as a task: it
    /// performs all I/O. It ends with the connection, or after the client is dropped.
    ///
    /// # Errors
    /// Fails if the connection cannot be established.
    pub async fn connect(
        address: SocketAddr,
    ) -> io::Result<(Self, impl Future<Output = ()> + Send + 'static)> {
        Self::connect_bounded(address, FRAME_BYTES_LIMIT as usize).await
    }

    /// Connects like [`TcpClient::connect`]. Closes the connection at a response of more than
    /// `answer_bytes_max` bytes.
    ///
    /// # Errors
    /// Fails if the connection cannot be established.
    pub async fn connect_bounded(
        address: SocketAddr,
        answer_bytes_max: usize,
    ) -> io::Result<(Self, impl Future<Output = ()> + Send + 'static)> {
        let answer_bytes_max = u32::try_from(answer_bytes_max).unwrap_or(FRAME_BYTES_LIMIT);
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let (read_half, write_half) = stream.into_split();
        let (outgoing, queue) = mpsc::channel(QUEUE_LENGTH);
        let waiting = PendingReplies::default();
        let answers = Arc::clone(&waiting);
        let driver = async move {
            tokio::select! {
                _ = write(write_half, queue) => {}
                _ = read(read_half, answer_bytes_max, &answers) => {}
            }
            // The queue is closed, so later requests fail. Waiting callers learn that no response
            // will come.
            answers.lock().clear();
        };
        // A stock client repeats the server in every block.
        let (host, port) = (address.ip().to_string(), i32::from(address.port()));
        let server =
            BlockServer { id: format!("{host}-{port}-{port}"), host, grpc_port: port, netty_port: port };
        Ok((Self { outgoing, waiting, next_id: AtomicI64::new(0), servers: vec![server] }, driver))
    }

    /// Returns a new request id.
    pub fn next_request_id(&self) -> i64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Sends `frame`, whose request id is `request_id`. Returns the response with any status.
    ///
    /// # Errors
    /// [`TcpClientError::Closed`].
    pub async fn exchange(&self, request_id: i64, frame: Bytes) -> Result<Reply, TcpClientError> {
        let (answer, answered) = oneshot::channel();
        self.waiting.lock().insert(request_id, answer);
        let _guard = PendingGuard { waiting: &self.waiting, request_id };
        self.outgoing.send(frame).await.map_err(|_| TcpClientError::Closed)?;
        answered.await.map_err(|_| TcpClientError::Closed)
    }

    /// Returns true if the connection has ended.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.outgoing.is_closed()
    }

    /// Returns the length of the message that sends `batch`, without the frame header.
    #[must_use]
    pub fn send_message_bytes(&self, key: &ShuffleKey, batch: &Batch) -> u64 {
        let servers: usize = self.servers.iter().map(|server| 16 + server.id.len() + server.host.len()).sum();
        let blocks = batch.iter().flat_map(|(_, blocks)| blocks);
        let blocks: u64 = blocks.map(|block| (56 + servers + block.data.len()) as u64).sum();
        let around = 8 + (4 + key.app.as_str().len()) + 4 + 8 + 4 + 8 * batch.len() + 8;
        around as u64 + blocks
    }

    /// Sends `batch` with a ticket.
    ///
    /// # Errors
    /// See [`TcpClientError`].
    pub async fn send(
        &self,
        key: &ShuffleKey,
        ticket: TicketId,
        batch: &Batch,
    ) -> Result<(), TcpClientError> {
        let request_id = self.next_request_id();
        let blocks = |blocks: &[Block]| blocks.iter().map(|block| self.block(block)).collect();
        let request = SendRequest {
            request_id,
            app: key.app.as_str().to_owned(),
            shuffle: key.shuffle.0,
            ticket: ticket.0,
            partitions: batch.iter().map(|(partition, list)| (partition.0, blocks(list))).collect(),
            timestamp_ms: 0,
        };
        let mut frame = BytesMut::new();
        request.encode_frame(&mut frame);
        success(self.exchange(request_id, frame.freeze()).await?).map(drop)
    }

    fn block(&self, block: &Block) -> SendBlock {
        SendBlock {
            block_id: block.meta.block_id.0,
            crc: i64::from(block.meta.crc),
            task_attempt_id: block.meta.task_attempt_id.0,
            data: block.data.clone(),
            servers: self.servers.clone(),
            uncompressed_length: i32::try_from(block.meta.uncompressed_length).unwrap_or(i32::MAX),
            free_memory: 0,
        }
    }

    /// Sends a read request and waits for the response.
    ///
    /// # Errors
    /// See [`TcpClientError`].
    pub async fn read(&self, request: &ReadRequest<'_>) -> Result<Reply, TcpClientError> {
        let mut frame = BytesMut::new();
        request.encode_frame(&mut frame);
        success(self.exchange(request.target().request_id, frame.freeze()).await?)
    }

    /// Reads blocks from memory after `last_block_id` (−1: from the start).
    ///
    /// # Errors
    /// See [`TcpClientError`].
    pub async fn read_memory(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        last_block_id: i64,
        read_buffer_size: i32,
        task_filter: Option<&[u8]>,
    ) -> Result<Reply, TcpClientError> {
        let target = self.target(key, partition);
        let request = MemoryRequest { target, last_block_id, read_buffer_size, timestamp_ms: 0, task_filter };
        self.read(&ReadRequest::Memory(request)).await
    }

    /// Reads the index of a partition.
    ///
    /// # Errors
    /// See [`TcpClientError`].
    pub async fn read_index(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
    ) -> Result<Reply, TcpClientError> {
        let request =
            LocalIndexRequest { target: self.target(key, partition), placement: placement(partition) };
        self.read(&ReadRequest::LocalIndex(request)).await
    }

    /// Reads a range of a partition's data.
    ///
    /// # Errors
    /// See [`TcpClientError`].
    pub async fn read_data(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        offset: i64,
        length: i32,
    ) -> Result<Reply, TcpClientError> {
        self.read_range(key, partition, LocalDataVersion::V1, offset, length).await
    }

    /// Reads exactly `length` bytes of a partition's data on the disk with number `storage`, or −1
    /// if the server's index has no storage ids.
    ///
    /// # Errors
    /// See [`TcpClientError`]. A response of another length is [`Malformed::DataLength`].
    pub async fn read_data_of(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        storage: i32,
        offset: u64,
        length: u64,
    ) -> Result<Bytes, TcpClientError> {
        let number = |what, value: u64| Malformed::Number { what, value: value.cast_signed() };
        let from = i64::try_from(offset).map_err(|_| number("offset", offset))?;
        let bytes = i32::try_from(length).map_err(|_| number("length", length))?;
        let version = match storage {
            ..0 => LocalDataVersion::V1,
            storage_id => LocalDataVersion::V2 { storage_id },
        };
        let reply = self.read_range(key, partition, version, from, bytes).await?;
        if reply.body.len() as u64 != length {
            return Err(Malformed::DataLength { expected: length, got: reply.body.len() }.into());
        }
        Ok(reply.body)
    }

    async fn read_range(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
        version: LocalDataVersion<'_>,
        offset: i64,
        length: i32,
    ) -> Result<Reply, TcpClientError> {
        let (target, placement) = (self.target(key, partition), placement(partition));
        let request = LocalDataRequest { target, placement, offset, length, timestamp_ms: 0, version };
        self.read(&ReadRequest::LocalData(request)).await
    }

    /// Decodes the response to a memory read.
    ///
    /// # Errors
    /// Fails if it is another response or is malformed.
    pub fn memory_answer(reply: Reply) -> Result<MemoryResponse, TcpClientError> {
        let (segments, is_end) = match reply.answer {
            ReplyAnswer::Memory(segments) => (segments, None),
            ReplyAnswer::MemoryV2 { segments, is_end } => (segments, Some(is_end)),
            _ => return Err(Malformed::Answer.into()),
        };
        let segment = |segment: &reply::ReplySegment| ShuffleDataBlockSegment {
            block_id: segment.block_id,
            offset: i64::from(segment.offset),
            length: segment.length,
            uncompress_length: segment.uncompressed_length,
            crc: segment.crc,
            task_attempt_id: segment.task_attempt_id,
        };
        let segments: Vec<_> = segments.iter().map(segment).collect();
        Ok(MemoryResponse { blocks: read::memory_blocks(&segments, &reply.body)?, is_end })
    }

    /// Decodes the response to an index read.
    ///
    /// # Errors
    /// Fails if it is another response or is malformed.
    pub fn index_answer(reply: Reply) -> Result<IndexResponse, TcpClientError> {
        let ReplyAnswer::LocalIndex { data_length, storage_ids } = reply.answer else {
            return Err(Malformed::Answer.into());
        };
        Ok(IndexResponse {
            records: read::decode_index(&reply.body)?,
            data_length: u64::try_from(data_length).ok(),
            storage_ids: storage_ids.unwrap_or_default(),
        })
    }

    fn target<'a>(&self, key: &'a ShuffleKey, partition: PartitionId) -> PartitionTarget<'a> {
        PartitionTarget {
            request_id: self.next_request_id(),
            app: key.app.as_str(),
            shuffle: key.shuffle.0,
            partition: partition.0,
        }
    }
}

/// Removes a waiter on drop, so that cancelled calls leave none.
struct PendingGuard<'a> {
    waiting: &'a PendingReplies,
    request_id: i64,
}

impl Drop for PendingGuard<'_> {
    fn drop(&mut self) {
        self.waiting.lock().remove(&self.request_id);
    }
}

/// Returns the numbers from which Java derives a partition's directory: each partition has its own.
fn placement(partition: PartitionId) -> Placement {
    Placement { partitions_per_range: 1, partitions: partition.0.saturating_add(1) }
}

fn success(reply: Reply) -> Result<Reply, TcpClientError> {
    let status = StatusCode::try_from(reply.status).unwrap_or(StatusCode::InternalError);
    if status == StatusCode::Success {
        return Ok(reply);
    }
    Err(TcpClientError::Refused { status, text: reply.message })
}

async fn write(mut socket: OwnedWriteHalf, mut queue: mpsc::Receiver<Bytes>) -> io::Result<()> {
    while let Some(frame) = queue.recv().await {
        socket.write_all(&frame).await?;
    }
    Ok(())
}

async fn read(mut socket: OwnedReadHalf, answer_bytes_max: u32, waiting: &PendingReplies) -> io::Result<()> {
    loop {
        let reply = read_bounded(&mut socket, answer_bytes_max).await?;
        // A response that nobody waits for is dropped, as in Java's client.
        if let Some(waits) = waiting.lock().remove(&reply.request_id) {
            let _ = waits.send(reply);
        }
    }
}

/// Reads one whole reply from `socket`.
///
/// # Errors
/// Fails if the connection ends or the bytes are not a reply.
pub async fn read_reply(socket: &mut (impl AsyncReadExt + Unpin)) -> io::Result<Reply> {
    read_bounded(socket, FRAME_BYTES_LIMIT).await
}

async fn read_bounded(socket: &mut (impl AsyncReadExt + Unpin), bytes_max: u32) -> io::Result<Reply> {
    let invalid = |error: DecodeError| io::Error::new(io::ErrorKind::InvalidData, error);
    let mut header = [0; HEADER_BYTES];
    socket.read_exact(&mut header).await?;
    let header = FrameHeader::decode(&header, bytes_max).map_err(invalid)?;
    let message_bytes = header.message_bytes as usize;
    let frame_bytes = message_bytes + header.body_bytes as usize;
    let mut frame = BytesMut::with_capacity(frame_bytes);
    while frame.len() < frame_bytes {
        let remaining = frame_bytes - frame.len();
        let mut limited = bytes::BufMut::limit(&mut frame, remaining);
        if socket.read_buf(&mut limited).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    let message = frame.split_to(message_bytes);
    Reply::decode(header.kind, &message, frame.freeze()).map_err(invalid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::sample;
    use tokio::net::TcpListener;
    use uniffle_wire::types::{AppId, ShuffleId, TaskAttemptId};

    fn key() -> ShuffleKey {
        ShuffleKey::new(AppId::parse("app").unwrap(), ShuffleId(1))
    }

    #[tokio::test]
    async fn send_message_length_matches_frame() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (client, driver) = TcpClient::connect(listener.local_addr().unwrap()).await.unwrap();
        let block = |p, s, len| sample(PartitionId(p), TaskAttemptId(4), s, len);
        let batch = [
            (PartitionId(3), vec![block(3, 0, 10), block(3, 1, 20)]),
            (PartitionId(9), vec![block(9, 0, 5)]),
        ];
        let request_sent = async {
            let (mut socket, _) = listener.accept().await.unwrap();
            let mut header = [0; HEADER_BYTES];
            socket.read_exact(&mut header).await.unwrap();
            FrameHeader::decode(&header, FRAME_BYTES_LIMIT).unwrap().message_bytes
        };
        let key = key();
        tokio::select! {
            bytes = request_sent => assert_eq!(u64::from(bytes), client.send_message_bytes(&key, &batch)),
            sent = client.send(&key, TicketId(1), &batch) => panic!("{sent:?}"),
            () = driver => panic!("the connection ended early"),
        }
        assert!(client.waiting.lock().is_empty(), "an abandoned request still has a waiter");
    }

    #[tokio::test]
    async fn oversized_response_ends_the_connection_before_it_is_read() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (client, driver) = TcpClient::connect_bounded(address, 1000).await.unwrap();
        let serve = async {
            let (mut socket, _) = listener.accept().await.unwrap();
            socket.write_all(&[0, 0, 0, 16, 15, 0x7f, 0, 0, 0]).await.unwrap();
            std::future::pending::<()>().await;
        };
        let key = key();
        let read = async { tokio::join!(client.read_index(&key, PartitionId(0)), driver) };
        tokio::select! {
            (answer, ()) = read => assert!(matches!(answer, Err(TcpClientError::Closed))),
            () = serve => {}
        }
        assert!(client.is_closed());
    }
}
