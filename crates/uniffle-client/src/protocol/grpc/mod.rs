//! Client of the gRPC data protocol.
//!
//! [`ShuffleClient`] has typed methods for the usual RPCs. All but [`ShuffleClient::require_raw`]
//! fail unless the status is SUCCESS. [`ShuffleClient::raw`] is the generated client, for calls
//! that a well-behaved client does not make. `reader` reads whole partitions as Java does.
//! Invariant: only NO_BUFFER, also of a huge partition, is retried, and only by
//! [`ShuffleClient::require_buffer`] and reads. The caller sees all other failures.

mod reader;

use std::net::SocketAddr;
use std::time::Duration;

use croaring::Treemap;
use tokio::time::sleep;
use tonic::transport::{Channel, Endpoint};

use crate::block::{Block, IdLayout};
use crate::proto::shuffle_server_client::ShuffleServerClient;
use crate::proto::{self, StatusCode};
use crate::read::{self, Malformed, RecordPosition};
use crate::send::{self, Batch, SendForm};
use uniffle_wire::types::{BlockId, PartitionId, ShuffleKey, TaskAttemptId, TicketId};

pub(crate) use self::reader::REPEATED_RESPONSES_MAX;
pub use self::reader::{PartitionRead, ReadOptions};

/// Deadline of each RPC of a client from [`ShuffleClient::connect`]
/// (`rss.client.rpc.timeout.ms`).
const RPC_TIMEOUT: Duration = Duration::from_secs(60);
/// Largest accepted message: protobuf's own limit, as in Java.
const MESSAGE_BYTES_MAX: usize = i32::MAX as usize;
/// HTTP/2 windows. Large enough that window updates do not limit loopback throughput.
const STREAM_WINDOW_BYTES: u32 = 4 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;

/// Formats code, message and causes. tonic's own text shows the causes in Rust's debug format.
fn describe(status: &tonic::Status) -> String {
    let mut text = format!("{:?}: {}", status.code(), status.message());
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text.push_str(&format!(": {more}"));
        }
        cause = error.source();
    }
    text
}

/// Error of one call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No connection.
    #[error("connect: {0}")]
    Connect(#[from] tonic::transport::Error),
    /// The RPC failed below Uniffle's protocol.
    #[error("{rpc}: {}", describe(status))]
    Rpc {
        /// Name of the RPC.
        rpc: &'static str,
        /// Status from tonic.
        status: Box<tonic::Status>,
    },
    /// The server responded with a status other than SUCCESS.
    #[error("{rpc}: {status:?}: {text}")]
    Refused {
        /// Name of the RPC.
        rpc: &'static str,
        /// The status.
        status: StatusCode,
        /// `retMsg`.
        text: String,
    },
    /// The response is malformed.
    #[error("{rpc}: {source}")]
    Malformed {
        /// Name of the RPC.
        rpc: &'static str,
        /// Reason.
        source: Malformed,
    },
    /// The memory tier repeats itself endlessly.
    #[error("{answers} consecutive memory responses without a new block")]
    Endless {
        /// Number of responses.
        answers: u32,
    },
    /// The deadline expired.
    #[error("{rpc}: no response within {after:?}")]
    Timeout {
        /// Name of the RPC.
        rpc: &'static str,
        /// The deadline.
        after: Duration,
    },
    /// The TCP connection could not be established, or ended before the response.
    #[error("TCP connection: {source}")]
    Connection {
        /// Reason.
        source: std::io::Error,
    },
    /// The batch is too large for one request.
    #[error("the batch does not fit one request")]
    BatchTooLarge,
}

impl ClientError {
    /// Returns the server's status, if it responded with one.
    #[must_use]
    pub fn status(&self) -> Option<StatusCode> {
        if let Self::Refused { status, .. } = self { Some(*status) } else { None }
    }
}

/// Number of attempts and pauses between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    /// Number of calls in total, at least 1.
    pub attempts: u32,
    /// Pause after the first failure. Doubles each time.
    pub first: Duration,
    /// Longest pause.
    pub longest: Duration,
}

impl Default for Backoff {
    /// The Java client's values (docs/protocol.md §2.4).
    fn default() -> Self {
        Self { attempts: 50, first: Duration::from_secs(2), longest: Duration::from_secs(10) }
    }
}

impl Backoff {
    /// Returns the pause after failure number `n`, counted from 0. Until it reaches `longest`, a
    /// random part of up to `first` spreads writers that were refused at the same time.
    pub(crate) fn pause(&self, n: u32) -> Duration {
        let doubled = self.first.saturating_mul(1 << n.min(16));
        doubled.saturating_add(self.first.min(self.longest).mul_f64(rand::random::<f64>())).min(self.longest)
    }
}

/// Response of a memory read.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct MemoryResponse {
    /// Blocks in the server's order.
    pub blocks: Vec<Block>,
    /// True if the server has no further blocks in memory. Absent from older servers.
    pub is_end: Option<bool>,
}

/// Response of an index read.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct IndexResponse {
    /// Blocks on disk.
    pub records: Vec<RecordPosition>,
    /// Number of readable bytes, or `None` if the server does not report it.
    pub data_length: Option<u64>,
    /// Disks. Empty for a server with one logical stream.
    pub storage_ids: Vec<i32>,
}

/// A client on one HTTP/2 connection. Clones share it.
#[derive(Debug, Clone)]
pub struct ShuffleClient {
    inner: ShuffleServerClient<Channel>,
    backoff: Backoff,
}

impl ShuffleClient {
    /// Connects to a worker's gRPC listener.
    ///
    /// # Errors
    /// Fails if the connection cannot be established.
    pub async fn connect(address: SocketAddr) -> Result<Self, ClientError> {
        let endpoint = tuned(Endpoint::from_shared(format!("http://{address}"))?).timeout(RPC_TIMEOUT);
        Ok(Self::on(endpoint.connect().await?))
    }

    /// Creates a client on an existing channel.
    #[must_use]
    pub fn on(channel: Channel) -> Self {
        let inner = ShuffleServerClient::new(channel)
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        Self { inner, backoff: Backoff::default() }
    }

    /// Returns the client with another retry policy for NO_BUFFER.
    #[must_use]
    pub fn with_backoff(self, backoff: Backoff) -> Self {
        Self { backoff, ..self }
    }

    /// Returns the client with a limit on the size of responses.
    #[must_use]
    pub fn with_answer_bytes_max(self, bytes: usize) -> Self {
        Self { inner: self.inner.max_decoding_message_size(bytes), ..self }
    }

    /// Returns the generated client, for any request and any response.
    #[must_use]
    pub fn raw(&self) -> ShuffleServerClient<Channel> {
        self.inner.clone()
    }

    /// Calls `registerShuffle` for the inclusive `ranges` with [`register_request`].
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn register(&self, key: &ShuffleKey, ranges: &[(i32, i32)]) -> Result<(), ClientError> {
        self.register_with(register_request(key, ranges)).await
    }

    /// Calls `registerShuffle` with `request`, which [`register_request`] prepares.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn register_with(&self, request: proto::ShuffleRegisterRequest) -> Result<(), ClientError> {
        const RPC: &str = "registerShuffle";
        let answer = self.raw().register_shuffle(request).await.map_err(failed(RPC))?.into_inner();
        check(RPC, answer.status, answer.ret_msg)
    }

    /// Calls `requireBuffer` once. Returns the response with any status.
    ///
    /// # Errors
    /// Fails only if the RPC itself fails.
    pub async fn require_raw(
        &self,
        request: proto::RequireBufferRequest,
    ) -> Result<proto::RequireBufferResponse, ClientError> {
        Ok(self.raw().require_buffer(request).await.map_err(failed("requireBuffer"))?.into_inner())
    }

    /// Requires a ticket for `batch`. Retries on NO_BUFFER.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn require_buffer(&self, key: &ShuffleKey, batch: &Batch) -> Result<TicketId, ClientError> {
        let request = require_request(key, batch)?;
        self.retry_no_buffer(|| self.require_once(request.clone())).await
    }

    /// Requires a ticket once.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn require_once(&self, request: proto::RequireBufferRequest) -> Result<TicketId, ClientError> {
        let answer = self.require_raw(request).await?;
        check("requireBuffer", answer.status, answer.ret_msg)?;
        Ok(TicketId(answer.require_buffer_id))
    }

    /// Calls `sendShuffleData` with a ticket.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn send(
        &self,
        key: &ShuffleKey,
        ticket: TicketId,
        form: SendForm,
        batch: &Batch,
    ) -> Result<(), ClientError> {
        const RPC: &str = "sendShuffleData";
        let request = send::request(key, ticket, form, batch);
        let answer = self.raw().send_shuffle_data(request).await.map_err(failed(RPC))?.into_inner();
        check(RPC, answer.status, answer.ret_msg)
    }

    /// Requires a ticket and sends `batch` with it.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn push(&self, key: &ShuffleKey, form: SendForm, batch: &Batch) -> Result<(), ClientError> {
        let ticket = self.require_buffer(key, batch).await?;
        self.send(key, ticket, form, batch).await
    }

    /// Calls `reportShuffleResult` for one task.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn report(
        &self,
        key: &ShuffleKey,
        task: TaskAttemptId,
        blocks: &[(PartitionId, Vec<BlockId>)],
    ) -> Result<(), ClientError> {
        const RPC: &str = "reportShuffleResult";
        let partition = |(partition, ids): &(PartitionId, Vec<BlockId>)| proto::PartitionToBlockIds {
            partition_id: partition.0,
            block_ids: ids.iter().map(|id| id.0).collect(),
        };
        let request = proto::ReportShuffleResultRequest {
            app_id: key.app.as_str().to_owned(),
            shuffle_id: key.shuffle.0,
            task_attempt_id: task.0,
            bitmap_num: 1,
            partition_to_block_ids: blocks.iter().map(partition).collect(),
            partition_stats: Vec::new(),
        };
        let answer = self.raw().report_shuffle_result(request).await.map_err(failed(RPC))?.into_inner();
        check(RPC, answer.status, answer.ret_msg)
    }

    /// Calls `getShuffleResultForMultiPart`. Returns the ids reported for `partitions`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn results(
        &self,
        key: &ShuffleKey,
        partitions: &[PartitionId],
        layout: Option<IdLayout>,
    ) -> Result<Treemap, ClientError> {
        const RPC: &str = "getShuffleResultForMultiPart";
        let bits = |bits: u32| i32::try_from(bits).unwrap_or(i32::MAX);
        let request = proto::GetShuffleResultForMultiPartRequest {
            app_id: key.app.as_str().to_owned(),
            shuffle_id: key.shuffle.0,
            partitions: partitions.iter().map(|partition| partition.0).collect(),
            block_id_layout: layout.map(|layout| proto::BlockIdLayout {
                sequence_no_bits: bits(layout.sequence_bits),
                partition_id_bits: bits(layout.partition_bits),
                task_attempt_id_bits: bits(layout.task_bits),
            }),
        };
        let answer = self.raw().get_shuffle_result_for_multi_part(request).await;
        let answer = answer.map_err(failed(RPC))?.into_inner();
        check(RPC, answer.status, answer.ret_msg)?;
        read::decode_bitmap(&answer.serialized_bitmap).map_err(malformed(RPC))
    }

    /// Calls `appHeartbeat`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn heartbeat(&self, app_id: &str) -> Result<(), ClientError> {
        const RPC: &str = "appHeartbeat";
        let request = proto::AppHeartBeatRequest { app_id: app_id.to_owned() };
        let answer = self.raw().app_heartbeat(request).await.map_err(failed(RPC))?.into_inner();
        check(RPC, answer.status, answer.ret_msg)
    }

    /// Calls `unregisterShuffle`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn unregister(&self, key: &ShuffleKey) -> Result<(), ClientError> {
        const RPC: &str = "unregisterShuffle";
        let request = proto::ShuffleUnregisterRequest {
            app_id: key.app.as_str().to_owned(),
            shuffle_id: key.shuffle.0,
        };
        let answer = self.raw().unregister_shuffle(request).await.map_err(failed(RPC))?.into_inner();
        check(RPC, answer.status, answer.ret_msg)
    }

    /// Calls `unregisterShuffleByAppId`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn unregister_app(&self, app_id: &str) -> Result<(), ClientError> {
        const RPC: &str = "unregisterShuffleByAppId";
        let request = proto::ShuffleUnregisterByAppIdRequest { app_id: app_id.to_owned() };
        let answer =
            self.raw().unregister_shuffle_by_app_id(request).await.map_err(failed(RPC))?.into_inner();
        check(RPC, answer.status, answer.ret_msg)
    }

    /// Calls until the response is not NO_BUFFER, or until the attempts are used up.
    async fn retry_no_buffer<T, F>(&self, mut call: impl FnMut() -> F) -> Result<T, ClientError>
    where
        F: Future<Output = Result<T, ClientError>>,
    {
        let mut refusals = 0;
        loop {
            let result = call().await;
            let no_buffer = |error: &ClientError| {
                matches!(error.status(), Some(StatusCode::NoBuffer | StatusCode::NoBufferForHugePartition))
            };
            let last = refusals + 1 >= self.backoff.attempts;
            if last || !result.as_ref().is_err_and(no_buffer) {
                return result;
            }
            sleep(self.backoff.pause(refusals)).await;
            refusals += 1;
        }
    }
}

/// Returns a plain registration, to be adapted and passed to [`ShuffleClient::register_with`].
#[must_use]
pub fn register_request(key: &ShuffleKey, ranges: &[(i32, i32)]) -> proto::ShuffleRegisterRequest {
    let range = |&(start, end): &(i32, i32)| proto::ShufflePartitionRange { start, end };
    proto::ShuffleRegisterRequest {
        app_id: key.app.as_str().to_owned(),
        shuffle_id: key.shuffle.0,
        partition_ranges: ranges.iter().map(range).collect(),
        user: "uniffle-worker-client".to_owned(),
        ..Default::default()
    }
}

/// Returns the `requireBuffer` request of a batch, as a 0.10 client sends it.
///
/// # Errors
/// [`ClientError::BatchTooLarge`] if a size exceeds an `i32`.
pub fn require_request(key: &ShuffleKey, batch: &Batch) -> Result<proto::RequireBufferRequest, ClientError> {
    let mut sizes = Vec::with_capacity(batch.len());
    for part in batch {
        sizes.push(send::require_size(std::slice::from_ref(part)).ok_or(ClientError::BatchTooLarge)?);
    }
    Ok(proto::RequireBufferRequest {
        require_size: send::require_size(batch).ok_or(ClientError::BatchTooLarge)?,
        app_id: key.app.as_str().to_owned(),
        shuffle_id: key.shuffle.0,
        partition_ids: batch.iter().map(|(partition, _)| partition.0).collect(),
        partition_require_sizes: sizes,
    })
}

/// Configures an endpoint so that neither window updates nor Nagle's algorithm limit its
/// throughput.
pub(crate) fn tuned(endpoint: Endpoint) -> Endpoint {
    endpoint
        .tcp_nodelay(true)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
}

pub(crate) fn check(rpc: &'static str, status: i32, text: String) -> Result<(), ClientError> {
    match StatusCode::try_from(status) {
        Ok(StatusCode::Success) => Ok(()),
        Ok(status) => Err(ClientError::Refused { rpc, status, text }),
        Err(_) => Err(ClientError::Malformed { rpc, source: Malformed::Status(status) }),
    }
}

pub(crate) fn failed(rpc: &'static str) -> impl FnOnce(tonic::Status) -> ClientError {
    move |status| ClientError::Rpc { rpc, status: Box::new(status) }
}

fn malformed(rpc: &'static str) -> impl FnOnce(Malformed) -> ClientError {
    move |source| ClientError::Malformed { rpc, source }
}

#[cfg(test)]
pub(crate) mod tests;
