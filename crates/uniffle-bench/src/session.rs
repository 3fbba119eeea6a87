//! The calls of a client over one connection (two with raw TCP), timed and counted.
//!
//! Calls are retried after NO_BUFFER. Sends are retried with a new ticket after NO_BUFFER,
//! INTERNAL_ERROR and TIMEOUT. Any other failure ends the run. Failures of heartbeats and of the
//! application's end are ignored. The order of the calls is in [`super::write`] and
//! [`super::read`].

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use croaring::Treemap;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use uniffle_client::block::Block;
use uniffle_client::read::{self, RecordPosition};
use uniffle_wire::types::{BlockId, PartitionId, ShuffleKey, TaskAttemptId, TicketId};
use uniffle_worker::proto::{self, StatusCode};

use crate::content::ContentPool;
use crate::grpc_connection::GrpcConnection;
use crate::message::{self, MessagePieces};
use crate::plan::{LAYOUT, PlannedMessage};
use crate::stats::{Stats, TimedOperation, add};
use crate::tcp_connection::{RawConnection, TcpResponse};

/// Attempts to send one message, each with a new ticket (`rss.client.rpc.maxAttempts`).
const SEND_ATTEMPTS: u32 = 3;

/// Transport of block data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DataTransport {
    /// gRPC with the bytes inside each block, as stock clients send it.
    Grpc,
    /// Raw TCP ("GRPC_NETTY") for data, gRPC for the rest.
    Tcp,
    /// gRPC with all bytes in one field.
    Contiguous,
}

/// Pauses after NO_BUFFER: `first` · 2^n plus a random part of `first`, at most `longest`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RetryPauses {
    pub(crate) first: Duration,
    pub(crate) longest: Duration,
    /// Number of refusals after which the run ends.
    pub(crate) attempts: u32,
}

impl RetryPauses {
    fn pause(&self, refusals: u32) -> Duration {
        let doubled = self.first.saturating_mul(1 << refusals.min(16));
        (doubled + self.first.mul_f64(rand::random::<f64>())).min(self.longest)
    }
}

/// Address of the server, and how to call it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ServerTarget {
    pub(crate) grpc: SocketAddr,
    pub(crate) tcp: Option<SocketAddr>,
    pub(crate) transport: DataTransport,
    /// Deadline of each call and of each connection attempt.
    pub(crate) rpc_timeout: Duration,
    pub(crate) backoff: RetryPauses,
}

/// The connections of one client: gRPC, and raw TCP if block data uses it.
pub(crate) struct ClientSession {
    grpc: GrpcConnection,
    tcp: Option<RawConnection>,
    target: ServerTarget,
    pool: Arc<ContentPool>,
}

/// Result of a call by its status.
enum Verdict {
    Success,
    NoBuffer,
    Failed(StatusCode),
}

impl ClientSession {
    pub(crate) async fn connect(
        target: ServerTarget,
        pool: Arc<ContentPool>,
        tasks: &mut JoinSet<()>,
    ) -> anyhow::Result<Self> {
        let grpc = GrpcConnection::connect(target.grpc, target.rpc_timeout).await?;
        let tcp = match (target.transport, target.tcp) {
            (DataTransport::Tcp, Some(address)) => {
                Some(RawConnection::connect(address, target.rpc_timeout, tasks).await?)
            }
            (DataTransport::Tcp, None) => bail!("--transport tcp needs --tcp-port"),
            (DataTransport::Grpc | DataTransport::Contiguous, _) => None,
        };
        Ok(Self { grpc, tcp, target, pool })
    }

    pub(crate) async fn register(
        &self,
        stats: &Stats,
        key: &ShuffleKey,
        partitions: u32,
        local_order: bool,
    ) -> anyhow::Result<()> {
        // Spark registers each partition as a separate range.
        let range = |p: u32| proto::ShufflePartitionRange { start: p.cast_signed(), end: p.cast_signed() };
        let request = proto::ShuffleRegisterRequest {
            app_id: key.app.as_str().to_owned(),
            shuffle_id: key.shuffle.0,
            partition_ranges: (0..partitions).map(range).collect(),
            user: "uniffle-bench".to_owned(),
            shuffle_data_distribution: i32::from(local_order),
            ..Default::default()
        };
        self.retry_no_buffer(stats, || async {
            let call = self.grpc.call_encoded("/rss.common.ShuffleServer/registerShuffle", &request);
            let answer: proto::ShuffleRegisterResponse =
                timed(stats, TimedOperation::RegisterShuffle, call).await?;
            granted("registerShuffle", answer.status, &answer.ret_msg, || Ok(()))
        })
        .await
    }

    /// Requires a ticket and sends, with retries. `due` is the time at which the message should
    /// have been sent.
    pub(crate) async fn push(
        &self,
        stats: &Stats,
        key: &ShuffleKey,
        message: &PlannedMessage,
        due: Instant,
    ) -> anyhow::Result<()> {
        for attempt in 1.. {
            let ticket = self.require(stats, key, message).await?;
            let begin = Instant::now();
            let (status, text) = self.send(key, ticket, message).await?;
            stats.record(TimedOperation::SendShuffleData, begin.elapsed());
            match verdict("sendShuffleData", status, &text)? {
                Verdict::Success => break,
                Verdict::NoBuffer | Verdict::Failed(StatusCode::InternalError | StatusCode::Timeout)
                    if attempt < SEND_ATTEMPTS =>
                {
                    add(&stats.retries, 1);
                    sleep(self.target.backoff.first).await;
                }
                Verdict::NoBuffer | Verdict::Failed(_) => bail!("sendShuffleData: status {status}: {text}"),
            }
        }
        stats.record(TimedOperation::Push, due.elapsed());
        add(&stats.written_bytes, message.payload_bytes);
        add(&stats.blocks_written, message.blocks as u64);
        Ok(())
    }

    async fn require(
        &self,
        stats: &Stats,
        key: &ShuffleKey,
        message: &PlannedMessage,
    ) -> anyhow::Result<TicketId> {
        let (mut require_size, partition_require_sizes) = message::require_sizes(message);
        if self.tcp.is_some() {
            let frame = i32::try_from(message::netty_length(key, message)).unwrap_or(i32::MAX);
            require_size = require_size.saturating_add(frame);
        }
        let request = proto::RequireBufferRequest {
            require_size,
            app_id: key.app.as_str().to_owned(),
            shuffle_id: key.shuffle.0,
            partition_ids: message.partitions.iter().map(|(partition, _)| partition.0).collect(),
            partition_require_sizes,
        };
        self.retry_no_buffer(stats, || async {
            let call = self.grpc.call_encoded("/rss.common.ShuffleServer/requireBuffer", &request);
            let answer: proto::RequireBufferResponse =
                timed(stats, TimedOperation::RequireBuffer, call).await?;
            granted("requireBuffer", answer.status, &answer.ret_msg, || {
                Ok(TicketId(answer.require_buffer_id))
            })
        })
        .await
    }

    async fn send(
        &self,
        key: &ShuffleKey,
        ticket: TicketId,
        message: &PlannedMessage,
    ) -> anyhow::Result<(i32, String)> {
        if let Some(tcp) = &self.tcp {
            let id = tcp.next_id();
            let mut answer = tcp.call(id, message::netty(&self.pool, key, ticket, id, message)).await?;
            return prefix("sendShuffleData", &mut answer, &[0]);
        }
        let encode = match self.target.transport {
            DataTransport::Contiguous => message::contiguous,
            DataTransport::Grpc | DataTransport::Tcp => message::classic,
        };
        let pieces = encode(&self.pool, key, ticket, message);
        let call = self.grpc.call("/rss.common.ShuffleServer/sendShuffleData", pieces);
        let answer: proto::SendShuffleDataResponse = call.await?;
        Ok((answer.status, answer.ret_msg))
    }

    pub(crate) async fn report(
        &self,
        stats: &Stats,
        key: &ShuffleKey,
        task: TaskAttemptId,
        blocks: BTreeMap<PartitionId, Vec<i64>>,
    ) -> anyhow::Result<()> {
        let partition = |(partition, block_ids): (PartitionId, _)| proto::PartitionToBlockIds {
            partition_id: partition.0,
            block_ids,
        };
        let request = proto::ReportShuffleResultRequest {
            app_id: key.app.as_str().to_owned(),
            shuffle_id: key.shuffle.0,
            task_attempt_id: task.0,
            bitmap_num: 1,
            partition_to_block_ids: blocks.into_iter().map(partition).collect(),
            partition_stats: Vec::new(),
        };
        self.retry_no_buffer(stats, || async {
            let call = self.grpc.call_encoded("/rss.common.ShuffleServer/reportShuffleResult", &request);
            let answer: proto::ReportShuffleResultResponse =
                timed(stats, TimedOperation::ReportShuffleResult, call).await?;
            granted("reportShuffleResult", answer.status, &answer.ret_msg, || Ok(()))
        })
        .await
    }

    /// Returns the ids reported for a partition.
    pub(crate) async fn results(
        &self,
        stats: &Stats,
        key: &ShuffleKey,
        partition: PartitionId,
    ) -> anyhow::Result<Treemap> {
        const PATH: &str = "/rss.common.ShuffleServer/getShuffleResultForMultiPart";
        let request = proto::GetShuffleResultForMultiPartRequest {
            app_id: key.app.as_str().to_owned(),
            shuffle_id: key.shuffle.0,
            partitions: vec![partition.0],
            block_id_layout: Some(proto::BlockIdLayout {
                sequence_no_bits: LAYOUT.sequence_bits.cast_signed(),
                partition_id_bits: LAYOUT.partition_bits.cast_signed(),
                task_attempt_id_bits: LAYOUT.task_bits.cast_signed(),
            }),
        };
        self.retry_no_buffer(stats, || async {
            let call = self.grpc.call_encoded(PATH, &request);
            let answer: proto::GetShuffleResultForMultiPartResponse =
                timed(stats, TimedOperation::GetShuffleResult, call).await?;
            granted("getShuffleResultForMultiPart", answer.status, &answer.ret_msg, || {
                Ok(read::decode_bitmap(&answer.serialized_bitmap)?)
            })
        })
        .await
    }

    /// Returns the blocks in memory after `after`, and the server's end flag.
    pub(crate) async fn memory(
        &self,
        stats: &Stats,
        key: &ShuffleKey,
        partition: PartitionId,
        after: Option<BlockId>,
        limit: i32,
    ) -> anyhow::Result<(Vec<Block>, Option<bool>)> {
        const RPC: &str = "getMemoryShuffleData";
        let last_block_id = after.map_or(-1, |id| id.0);
        self.retry_no_buffer(stats, || async {
            let begin = Instant::now();
            let answer = if let Some(tcp) = &self.tcp {
                memory_over_tcp(tcp, key, partition, last_block_id, limit).await?
            } else {
                let request = proto::GetMemoryShuffleDataRequest {
                    app_id: key.app.as_str().to_owned(),
                    shuffle_id: key.shuffle.0,
                    partition_id: partition.0,
                    last_block_id,
                    read_buffer_size: limit,
                    timestamp: 0,
                    serialized_expected_task_ids_bitmap: None,
                };
                self.grpc.call_encoded("/rss.common.ShuffleServer/getMemoryShuffleData", &request).await?
            };
            stats.record(TimedOperation::GetMemoryShuffleData, begin.elapsed());
            granted(RPC, answer.status, &answer.ret_msg, || {
                let blocks = read::memory_blocks(&answer.shuffle_data_block_segments, &answer.data);
                Ok((blocks.context(RPC)?, answer.is_end))
            })
        })
        .await
    }

    /// Returns the blocks on disk and the number of readable bytes.
    pub(crate) async fn index(
        &self,
        stats: &Stats,
        key: &ShuffleKey,
        partition: PartitionId,
    ) -> anyhow::Result<(Vec<RecordPosition>, Option<u64>)> {
        const RPC: &str = "getLocalShuffleIndex";
        self.retry_no_buffer(stats, || async {
            let begin = Instant::now();
            let answer = if let Some(tcp) = &self.tcp {
                let mut answer = request_over_tcp(tcp, 4, key, partition, |_| {}).await?;
                let (status, ret_msg) = prefix(RPC, &mut answer, &[14, 23])?;
                let data_file_len = answer.message.try_get_i64().context(RPC)?;
                let index_data = answer.body;
                proto::GetLocalShuffleIndexResponse {
                    index_data,
                    status,
                    ret_msg,
                    data_file_len,
                    ..Default::default()
                }
            } else {
                let request = proto::GetLocalShuffleIndexRequest {
                    app_id: key.app.as_str().to_owned(),
                    shuffle_id: key.shuffle.0,
                    partition_id: partition.0,
                    partition_num_per_range: 1,
                    partition_num: partition.0.saturating_add(1),
                };
                self.grpc.call_encoded("/rss.common.ShuffleServer/getLocalShuffleIndex", &request).await?
            };
            stats.record(TimedOperation::GetLocalShuffleIndex, begin.elapsed());
            granted(RPC, answer.status, &answer.ret_msg, || {
                let records = read::decode_index(&answer.index_data).context(RPC)?;
                Ok((records, u64::try_from(answer.data_file_len).ok()))
            })
        })
        .await
    }

    /// Requests `length` bytes of a partition's data on disk. The caller checks their number.
    pub(crate) async fn data(
        &self,
        stats: &Stats,
        key: &ShuffleKey,
        partition: PartitionId,
        offset: u64,
        length: u64,
    ) -> anyhow::Result<Bytes> {
        const RPC: &str = "getLocalShuffleData";
        let (offset, length) = (i64::try_from(offset)?, i32::try_from(length)?);
        self.retry_no_buffer(stats, || async {
            let begin = Instant::now();
            let answer = if let Some(tcp) = &self.tcp {
                let range = |frame: &mut BytesMut| {
                    frame.put_i64(offset);
                    frame.put_i32(length);
                    frame.put_i64(0);
                };
                let mut answer = request_over_tcp(tcp, 5, key, partition, range).await?;
                let (status, ret_msg) = prefix(RPC, &mut answer, &[15])?;
                proto::GetLocalShuffleDataResponse { data: answer.body, status, ret_msg }
            } else {
                let request = proto::GetLocalShuffleDataRequest {
                    app_id: key.app.as_str().to_owned(),
                    shuffle_id: key.shuffle.0,
                    partition_id: partition.0,
                    partition_num_per_range: 1,
                    partition_num: partition.0.saturating_add(1),
                    offset,
                    length,
                    timestamp: 0,
                    storage_id: -1,
                    next_read_segments: Vec::new(),
                };
                self.grpc.call_encoded("/rss.common.ShuffleServer/getLocalShuffleData", &request).await?
            };
            stats.record(TimedOperation::GetLocalShuffleData, begin.elapsed());
            granted(RPC, answer.status, &answer.ret_msg, || Ok(answer.data))
        })
        .await
    }

    pub(crate) async fn unregister(&self, stats: &Stats, key: &ShuffleKey) -> anyhow::Result<()> {
        let request = proto::ShuffleUnregisterRequest {
            app_id: key.app.as_str().to_owned(),
            shuffle_id: key.shuffle.0,
        };
        self.retry_no_buffer(stats, || async {
            let call = self.grpc.call_encoded("/rss.common.ShuffleServer/unregisterShuffle", &request);
            let answer: proto::ShuffleUnregisterResponse =
                timed(stats, TimedOperation::UnregisterShuffle, call).await?;
            granted("unregisterShuffle", answer.status, &answer.ret_msg, || Ok(()))
        })
        .await
    }

    /// Unregisters the application. Errors are ignored, because servers before 0.9 do not know this
    /// call.
    pub(crate) async fn unregister_app(&self, app_id: &str) {
        let request = proto::ShuffleUnregisterByAppIdRequest { app_id: app_id.to_owned() };
        let call = self.grpc.call_encoded("/rss.common.ShuffleServer/unregisterShuffleByAppId", &request);
        let _: Result<proto::ShuffleUnregisterByAppIdResponse, _> = call.await;
    }

    /// Sends a heartbeat. Errors are ignored, as clients only log them.
    pub(crate) async fn heartbeat(&self, app_id: &str) {
        let request = proto::AppHeartBeatRequest { app_id: app_id.to_owned() };
        let call = self.grpc.call_encoded("/rss.common.ShuffleServer/appHeartbeat", &request);
        let _: Result<proto::AppHeartBeatResponse, _> = call.await;
    }

    /// Repeats the call while the response is NO_BUFFER (`None`).
    async fn retry_no_buffer<T, F>(&self, stats: &Stats, mut call: impl FnMut() -> F) -> anyhow::Result<T>
    where
        F: Future<Output = anyhow::Result<Option<T>>>,
    {
        for refusals in 0..self.target.backoff.attempts {
            if let Some(result) = call().await? {
                return Ok(result);
            }
            let pause = self.target.backoff.pause(refusals);
            stats.waited_for_buffer(pause);
            sleep(pause).await;
        }
        bail!("NO_BUFFER {} times in a row", self.target.backoff.attempts)
    }
}

async fn timed<T>(
    stats: &Stats,
    operation: TimedOperation,
    call: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    let begin = Instant::now();
    let answer = call.await?;
    stats.record(operation, begin.elapsed());
    Ok(answer)
}

fn verdict(rpc: &str, status: i32, text: &str) -> anyhow::Result<Verdict> {
    match StatusCode::try_from(status) {
        Ok(StatusCode::Success) => Ok(Verdict::Success),
        Ok(StatusCode::NoBuffer | StatusCode::NoBufferForHugePartition) => Ok(Verdict::NoBuffer),
        Ok(status) => Ok(Verdict::Failed(status)),
        Err(_) => bail!("{rpc}: unknown status {status}: {text}"),
    }
}

fn granted<T>(
    rpc: &str,
    status: i32,
    text: &str,
    result: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<Option<T>> {
    match verdict(rpc, status, text)? {
        Verdict::Success => result().map(Some),
        Verdict::NoBuffer => Ok(None),
        Verdict::Failed(status) => bail!("{rpc}: {status:?}: {text}"),
    }
}

/// Reads status and text of a response, which must be one of `kinds`.
fn prefix(rpc: &str, answer: &mut TcpResponse, kinds: &[u8]) -> anyhow::Result<(i32, String)> {
    ensure!(kinds.contains(&answer.kind), "{rpc}: unexpected response type {}", answer.kind);
    let status = answer.message.try_get_i32().context("status")?;
    let length = usize::try_from(answer.message.try_get_i32().context("retMsg")?).unwrap_or(0);
    ensure!(length <= answer.message.len(), "{rpc}: retMsg is longer than the response");
    let text = answer.message.split_to(length);
    Ok((status, String::from_utf8_lossy(&text).into_owned()))
}

/// Sends a read request of type `kind`. `rest` writes its own fields after the common ones.
async fn request_over_tcp(
    tcp: &RawConnection,
    kind: u8,
    key: &ShuffleKey,
    partition: PartitionId,
    rest: impl FnOnce(&mut BytesMut),
) -> anyhow::Result<TcpResponse> {
    let id = tcp.next_id();
    let mut frame = BytesMut::with_capacity(128);
    frame.put_i32(0);
    frame.put_u8(kind);
    frame.put_i32(0);
    frame.put_i64(id);
    frame.put_i32(i32::try_from(key.app.as_str().len())?);
    frame.put_slice(key.app.as_str().as_bytes());
    frame.put_i32(key.shuffle.0);
    frame.put_i32(partition.0);
    // Type 6 continues with its cursor, types 4 and 5 with partitionNumPerRange and partitionNum.
    if kind != 6 {
        frame.put_i32(1);
        frame.put_i32(partition.0.saturating_add(1));
    }
    rest(&mut frame);
    let length = i32::try_from(frame.len() - 9)?;
    frame[..4].copy_from_slice(&length.to_be_bytes());
    tcp.call(id, MessagePieces { length: frame.len(), pieces: vec![frame.freeze()] }).await
}

async fn memory_over_tcp(
    tcp: &RawConnection,
    key: &ShuffleKey,
    partition: PartitionId,
    last_block_id: i64,
    limit: i32,
) -> anyhow::Result<proto::GetMemoryShuffleDataResponse> {
    let cursor = |frame: &mut BytesMut| {
        frame.put_i64(last_block_id);
        frame.put_i32(limit);
        frame.put_i64(0);
        frame.put_i32(-1);
    };
    let mut answer = request_over_tcp(tcp, 6, key, partition, cursor).await?;
    let (status, ret_msg) = prefix("getMemoryShuffleData", &mut answer, &[16, 26])?;
    let mut message = answer.message;
    let count = usize::try_from(message.try_get_i32().context("segments")?)?;
    ensure!(message.len() >= count.saturating_mul(36), "getMemoryShuffleData: {count} segments announced");
    let segment = |message: &mut Bytes| proto::ShuffleDataBlockSegment {
        block_id: message.get_i64(),
        offset: i64::from(message.get_i32()),
        length: message.get_i32(),
        uncompress_length: message.get_i32(),
        crc: message.get_i64(),
        task_attempt_id: message.get_i64(),
    };
    let shuffle_data_block_segments = (0..count).map(|_| segment(&mut message)).collect();
    let is_end = if answer.kind == 26 { Some(message.try_get_u8().context("isEnd")? == 1) } else { None };
    Ok(proto::GetMemoryShuffleDataResponse {
        shuffle_data_block_segments,
        data: answer.body,
        status,
        ret_msg,
        is_end,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::convert::Infallible;

    use http_body_util::Full;
    use hyper::server::conn::http2;
    use hyper::service::service_fn;
    use hyper_util::rt::{TokioExecutor, TokioIo};
    use parking_lot::Mutex;
    use prost::Message as _;
    use tokio::net::TcpListener;
    use uniffle_wire::types::{AppId, ShuffleId};

    use super::*;
    use crate::content::Sizes;

    /// Responds to the first call of each kind with NO_BUFFER, and to later ones with SUCCESS.
    async fn serve_reluctantly(listener: TcpListener) {
        let (stream, _) = listener.accept().await.unwrap();
        let called = Mutex::new(HashSet::new());
        let service = service_fn(|request: hyper::Request<hyper::body::Incoming>| {
            let is_first = called.lock().insert(request.uri().path().to_owned());
            let status = if is_first { StatusCode::NoBuffer } else { StatusCode::Success };
            // The responses of all calls begin with the same fields.
            let answer = proto::ShuffleRegisterResponse { status: status.into(), ..Default::default() };
            let answer = answer.encode_to_vec();
            let body = [&[0, 0, 0, 0, u8::try_from(answer.len()).unwrap()], &answer[..]].concat();
            async move { Ok::<_, Infallible>(hyper::Response::new(Full::new(Bytes::from(body)))) }
        });
        let server = http2::Builder::new(TokioExecutor::new());
        server.serve_connection(TokioIo::new(stream), service).await.unwrap();
    }

    #[tokio::test]
    async fn every_call_is_repeated_after_no_buffer() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let pause = Duration::from_millis(1);
        let target = ServerTarget {
            grpc: listener.local_addr().unwrap(),
            tcp: None,
            transport: DataTransport::Grpc,
            rpc_timeout: Duration::from_secs(10),
            backoff: RetryPauses { first: pause, longest: pause, attempts: 3 },
        };
        let pool = Arc::new(ContentPool::new(1, Sizes::fixed(10)));
        let key = ShuffleKey::new(AppId::parse("app").unwrap(), ShuffleId(1));
        let (stats, mut tasks) = (Stats::default(), JoinSet::new());
        let calls = async {
            let session = ClientSession::connect(target, pool, &mut tasks).await?;
            session.register(&stats, &key, 2, false).await?;
            session.report(&stats, &key, TaskAttemptId(1), BTreeMap::new()).await?;
            session.results(&stats, &key, PartitionId(0)).await?;
            session.unregister(&stats, &key).await
        };
        tokio::select! {
            called = calls => called.unwrap(),
            () = serve_reluctantly(listener) => panic!("the connection ended early"),
        }
    }
}
