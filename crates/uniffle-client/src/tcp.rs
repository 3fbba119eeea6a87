//! The raw TCP data protocol from a client's side: any number of requests under way on one connection.
//!
//! Not here: retries, reconnecting, tickets (those come over gRPC). Its frames are those of `wire`, which are held to
//! the bytes of Java's client by golden tests, so a mistake cannot hide by being on both sides.

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

use super::block::Block;
use super::send::Batch;
use crate::proto::StatusCode;
use uniffle_wire::DecodeError;
use uniffle_wire::frame::{FRAME_BYTES_LIMIT, FrameHeader, HEADER_BYTES};
use uniffle_wire::reply::Reply;
use uniffle_wire::request::{
    BlockServer, LocalDataRequest, LocalDataVersion, LocalIndexRequest, MemoryRequest, Placement,
    ReadRequest, SendBlock, SendRequest, Target,
};
use uniffle_wire::types::{PartitionId, ShuffleKey, TicketId};

/// Requests that wait to be written, beyond which callers wait.
const QUEUE_LENGTH: usize = 16;
/// What a request says of Java's directories; this worker looks at neither.
const PLACEMENT: Placement = Placement { partitions_per_range: 1, partitions: 1 };

/// Why a request has no good answer.
#[derive(Debug, thiserror::Error)]
pub enum TcpClientError {
    /// The connection ended before the answer came.
    #[error("the connection ended before the answer")]
    Closed,
    /// The server answered with another status than SUCCESS.
    #[error("{status:?}: {text}")]
    Refused {
        /// The status.
        status: StatusCode,
        /// `retMessage`.
        text: String,
    },
}

impl TcpClientError {
    /// The server's status, if it answered with one.
    #[must_use]
    pub fn status(&self) -> Option<StatusCode> {
        if let Self::Refused { status, .. } = self { Some(*status) } else { None }
    }
}

/// Answers that are waited for, by request id.
type Waiting = Arc<Mutex<HashMap<i64, oneshot::Sender<Reply>>>>;

/// A client on one connection. Dropped, the connection ends.
#[derive(Debug)]
pub struct TcpClient {
    outgoing: mpsc::Sender<Bytes>,
    waiting: Waiting,
    next_id: AtomicI64,
    servers: Vec<BlockServer>,
}

impl TcpClient {
    /// Connects to a worker's TCP listener. Nothing moves unless the future that comes with the client is driven, as a
    /// task of the caller's; it ends with the connection, or when the client was dropped.
    ///
    /// # Errors
    /// No connection.
    pub async fn connect(
        address: SocketAddr,
    ) -> io::Result<(Self, impl Future<Output = ()> + Send + 'static)> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let (read_half, write_half) = stream.into_split();
        let (outgoing, queue) = mpsc::channel(QUEUE_LENGTH);
        let waiting = Waiting::default();
        let answers = Arc::clone(&waiting);
        let driver = async move {
            tokio::select! {
                _ = write(write_half, queue) => {}
                _ = read(read_half, &answers) => {}
            }
            // The queue is gone, so nobody can add to this: whoever waits learns that no answer will come.
            answers.lock().clear();
        };
        // What a stock client repeats in every block.
        let (host, port) = (address.ip().to_string(), i32::from(address.port()));
        let server =
            BlockServer { id: format!("{host}-{port}-{port}"), host, grpc_port: port, netty_port: port };
        Ok((Self { outgoing, waiting, next_id: AtomicI64::new(0), servers: vec![server] }, driver))
    }

    /// An id that this client has not used yet.
    pub fn next_request_id(&self) -> i64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Sends `frame`, whose request id is `request_id`, and waits for its answer, whatever its status is.
    ///
    /// # Errors
    /// [`TcpClientError::Closed`].
    pub async fn exchange(&self, request_id: i64, frame: Bytes) -> Result<Reply, TcpClientError> {
        let (answer, answered) = oneshot::channel();
        self.waiting.lock().insert(request_id, answer);
        if self.outgoing.send(frame).await.is_err() {
            self.waiting.lock().remove(&request_id);
            return Err(TcpClientError::Closed);
        }
        answered.await.map_err(|_| TcpClientError::Closed)
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

    /// Sends any read and waits for its answer.
    ///
    /// # Errors
    /// See [`TcpClientError`].
    pub async fn read(&self, request: &ReadRequest<'_>) -> Result<Reply, TcpClientError> {
        let mut frame = BytesMut::new();
        request.encode_frame(&mut frame);
        success(self.exchange(request.target().request_id, frame.freeze()).await?)
    }

    /// Blocks in memory after `last_block_id` (−1: from the start).
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

    /// Index bytes of a partition.
    ///
    /// # Errors
    /// See [`TcpClientError`].
    pub async fn read_index(
        &self,
        key: &ShuffleKey,
        partition: PartitionId,
    ) -> Result<Reply, TcpClientError> {
        let request = LocalIndexRequest { target: self.target(key, partition), placement: PLACEMENT };
        self.read(&ReadRequest::LocalIndex(request)).await
    }

    /// A range of a partition's data.
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
        self.read(&ReadRequest::LocalData(LocalDataRequest {
            target: self.target(key, partition),
            placement: PLACEMENT,
            offset,
            length,
            timestamp_ms: 0,
            version: LocalDataVersion::V1,
        }))
        .await
    }

    fn target<'a>(&self, key: &'a ShuffleKey, partition: PartitionId) -> Target<'a> {
        Target {
            request_id: self.next_request_id(),
            app: key.app.as_str(),
            shuffle: key.shuffle.0,
            partition: partition.0,
        }
    }
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

async fn read(mut socket: OwnedReadHalf, waiting: &Waiting) -> io::Result<()> {
    loop {
        let reply = read_reply(&mut socket).await?;
        // An answer that nobody waits for any more is dropped, as Java's client does.
        if let Some(waits) = waiting.lock().remove(&reply.request_id) {
            let _ = waits.send(reply);
        }
    }
}

/// Reads one whole reply from `socket`.
///
/// # Errors
/// The connection ends, or what comes is no reply.
pub async fn read_reply(socket: &mut (impl AsyncReadExt + Unpin)) -> io::Result<Reply> {
    let invalid = |error: DecodeError| io::Error::new(io::ErrorKind::InvalidData, error);
    let mut header = [0; HEADER_BYTES];
    socket.read_exact(&mut header).await?;
    let header = FrameHeader::decode(&header, FRAME_BYTES_LIMIT).map_err(invalid)?;
    let message_bytes = header.message_bytes as usize;
    let frame_bytes = message_bytes + header.body_bytes as usize;
    let mut frame = BytesMut::with_capacity(frame_bytes);
    while frame.len() < frame_bytes {
        let left = frame_bytes - frame.len();
        let mut limited = bytes::BufMut::limit(&mut frame, left);
        if socket.read_buf(&mut limited).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    let message = frame.split_to(message_bytes);
    Reply::decode(header.kind, &message, frame.freeze()).map_err(invalid)
}
