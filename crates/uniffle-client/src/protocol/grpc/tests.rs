//! The client against a server double, which records requests and answers from a script.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::*;
use crate::block::sample;
use crate::proto::shuffle_server_server::{ShuffleServer, ShuffleServerServer};
use uniffle_wire::types::{AppId, ShuffleId};

#[derive(Debug, Default)]
pub(crate) struct Script {
    /// Number of `requireBuffer` calls that are refused with NO_BUFFER before one succeeds.
    pub(crate) no_buffer: u32,
    /// Statuses of the first sends. Later sends succeed.
    pub(crate) send_answers: VecDeque<StatusCode>,
    pub(crate) sent: Vec<proto::SendShuffleDataRequest>,
    pub(crate) reported: Vec<u64>,
    pub(crate) memory: VecDeque<proto::GetMemoryShuffleDataResponse>,
    pub(crate) cursors: Vec<i64>,
    pub(crate) index: proto::GetLocalShuffleIndexResponse,
    pub(crate) file: Vec<u8>,
    pub(crate) data_reads: Vec<(i64, i32)>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Double(pub(crate) Arc<Mutex<Script>>);

type Answer<T> = Result<Response<T>, Status>;

macro_rules! not_in_the_script {
    ($($name:ident($request:ident) -> $response:ident;)*) => {
        $(fn $name<'a, 'b>(
            &'a self,
            _: Request<proto::$request>,
        ) -> std::pin::Pin<Box<dyn Future<Output = Answer<proto::$response>> + Send + 'b>>
        where
            'a: 'b,
            Self: 'b,
        {
            Box::pin(async { Err(Status::unimplemented(stringify!($name))) })
        })*
    };
}

#[tonic::async_trait]
impl ShuffleServer for Double {
    async fn require_buffer(
        &self,
        request: Request<proto::RequireBufferRequest>,
    ) -> Answer<proto::RequireBufferResponse> {
        let mut script = self.0.lock();
        let mut response = proto::RequireBufferResponse {
            require_buffer_id: i64::from(request.into_inner().require_size),
            ..Default::default()
        };
        if script.no_buffer > 0 {
            script.no_buffer -= 1;
            response.set_status(StatusCode::NoBuffer);
            response.require_buffer_id = -1;
        }
        Ok(Response::new(response))
    }

    async fn send_shuffle_data(
        &self,
        request: Request<proto::SendShuffleDataRequest>,
    ) -> Answer<proto::SendShuffleDataResponse> {
        let mut script = self.0.lock();
        script.sent.push(request.into_inner());
        let status = script.send_answers.pop_front().unwrap_or(StatusCode::Success);
        Ok(Response::new(proto::SendShuffleDataResponse { status: status.into(), ..Default::default() }))
    }

    async fn report_shuffle_result(
        &self,
        request: Request<proto::ReportShuffleResultRequest>,
    ) -> Answer<proto::ReportShuffleResultResponse> {
        let ids = request.into_inner().partition_to_block_ids.into_iter().flat_map(|p| p.block_ids);
        self.0.lock().reported.extend(ids.map(i64::cast_unsigned));
        Ok(Response::new(Default::default()))
    }

    async fn get_shuffle_result_for_multi_part(
        &self,
        _: Request<proto::GetShuffleResultForMultiPartRequest>,
    ) -> Answer<proto::GetShuffleResultForMultiPartResponse> {
        let serialized_bitmap = read::encode_bitmap(&Treemap::of(&self.0.lock().reported));
        Ok(Response::new(proto::GetShuffleResultForMultiPartResponse {
            serialized_bitmap,
            ..Default::default()
        }))
    }

    async fn get_memory_shuffle_data(
        &self,
        request: Request<proto::GetMemoryShuffleDataRequest>,
    ) -> Answer<proto::GetMemoryShuffleDataResponse> {
        let mut script = self.0.lock();
        script.cursors.push(request.into_inner().last_block_id);
        // The last answer of the script is repeated.
        let answer =
            if script.memory.len() > 1 { script.memory.pop_front() } else { script.memory.front().cloned() };
        Ok(Response::new(answer.unwrap_or_default()))
    }

    async fn get_local_shuffle_index(
        &self,
        _: Request<proto::GetLocalShuffleIndexRequest>,
    ) -> Answer<proto::GetLocalShuffleIndexResponse> {
        Ok(Response::new(self.0.lock().index.clone()))
    }

    async fn get_local_shuffle_data(
        &self,
        request: Request<proto::GetLocalShuffleDataRequest>,
    ) -> Answer<proto::GetLocalShuffleDataResponse> {
        let request = request.into_inner();
        let mut script = self.0.lock();
        script.data_reads.push((request.offset, request.length));
        let start = usize::try_from(request.offset).unwrap();
        let end = start + usize::try_from(request.length).unwrap();
        let data = Bytes::copy_from_slice(&script.file[start..end.min(script.file.len())]);
        Ok(Response::new(proto::GetLocalShuffleDataResponse { data, ..Default::default() }))
    }

    async fn app_heartbeat(
        &self,
        _: Request<proto::AppHeartBeatRequest>,
    ) -> Answer<proto::AppHeartBeatResponse> {
        let ret_msg = "NO_REGISTER".to_owned();
        Ok(Response::new(proto::AppHeartBeatResponse { status: StatusCode::NoRegister.into(), ret_msg }))
    }

    not_in_the_script! {
        register_shuffle(ShuffleRegisterRequest) -> ShuffleRegisterResponse;
        unregister_shuffle(ShuffleUnregisterRequest) -> ShuffleUnregisterResponse;
        unregister_shuffle_by_app_id(ShuffleUnregisterByAppIdRequest) -> ShuffleUnregisterByAppIdResponse;
        commit_shuffle_task(ShuffleCommitRequest) -> ShuffleCommitResponse;
        get_shuffle_result(GetShuffleResultRequest) -> GetShuffleResultResponse;
        finish_shuffle(FinishShuffleRequest) -> FinishShuffleResponse;
        start_sort_merge(StartSortMergeRequest) -> StartSortMergeResponse;
        get_sorted_shuffle_data(GetSortedShuffleDataRequest) -> GetSortedShuffleDataResponse;
    }
}

/// The running server of a double. It does not use `runtime::Tasks`, because this crate does not
/// depend on the worker.
pub(crate) struct Running {
    stop: oneshot::Sender<()>,
    server: JoinSet<()>,
}

impl Running {
    /// Stops the server. Its clients must be dropped before, because it waits for their
    /// connections.
    pub(crate) async fn end(self) {
        drop(self.stop);
        self.server.join_all().await;
    }
}

/// Starts a double. Returns it with its address and its server.
pub(crate) async fn serve(script: Script) -> (Double, SocketAddr, Running) {
    let double = Double(Arc::new(Mutex::new(script)));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = ShuffleServerServer::new(double.clone());
    let (stop, stopped) = oneshot::channel::<()>();
    let mut server = JoinSet::new();
    server.spawn(async move {
        let stopped = async move { drop(stopped.await) };
        let incoming = TcpListenerStream::new(listener);
        let server = Server::builder().add_service(service);
        server.serve_with_incoming_shutdown(incoming, stopped).await.unwrap();
    });
    (double, address, Running { stop, server })
}

/// Starts a double and connects a client to it.
async fn pair(script: Script) -> (Double, ShuffleClient, Running) {
    let (double, address, running) = serve(script).await;
    let client = ShuffleClient::connect(address).await.unwrap();
    let backoff = Backoff { attempts: 4, first: Duration::from_millis(1), longest: Duration::from_millis(2) };
    (double, client.with_backoff(backoff), running)
}

async fn end(client: ShuffleClient, running: Running) {
    drop(client);
    running.end().await;
}

pub(crate) fn key() -> ShuffleKey {
    ShuffleKey::new(AppId::parse("app").unwrap(), ShuffleId(1))
}

pub(crate) const PARTITION: PartitionId = PartitionId(2);

pub(crate) fn blocks(sequences: std::ops::Range<u32>) -> Vec<Block> {
    let length = |n: u32| usize::try_from(100 + n).unwrap();
    sequences.map(|n| sample(PARTITION, TaskAttemptId(i64::from(n % 2)), n, length(n))).collect()
}

pub(crate) fn memory(blocks: &[Block], is_end: Option<bool>) -> proto::GetMemoryShuffleDataResponse {
    let mut response = proto::GetMemoryShuffleDataResponse { is_end, ..Default::default() };
    let mut data = Vec::new();
    for Block { meta, data: bytes } in blocks {
        response.shuffle_data_block_segments.push(proto::ShuffleDataBlockSegment {
            block_id: meta.block_id.0,
            offset: i64::try_from(data.len()).unwrap(),
            length: i32::try_from(meta.length).unwrap(),
            uncompress_length: i32::try_from(meta.uncompressed_length).unwrap(),
            crc: i64::from(meta.crc),
            task_attempt_id: meta.task_attempt_id.0,
        });
        data.extend_from_slice(bytes);
    }
    response.data = data.into();
    response
}

pub(crate) fn disk(script: &mut Script, blocks: &[Block]) {
    let mut index = Vec::new();
    for Block { meta, data } in blocks {
        index.extend(i64::try_from(script.file.len()).unwrap().to_be_bytes());
        index.extend(i32::try_from(meta.length).unwrap().to_be_bytes());
        index.extend(i32::try_from(meta.uncompressed_length).unwrap().to_be_bytes());
        index.extend(i64::from(meta.crc).to_be_bytes());
        index.extend(meta.block_id.0.to_be_bytes());
        index.extend(meta.task_attempt_id.0.to_be_bytes());
        script.file.extend_from_slice(data);
    }
    script.index.index_data = index.into();
    script.index.data_file_len = i64::try_from(script.file.len()).unwrap();
}

#[tokio::test]
async fn only_no_buffer_is_retried() {
    let (double, client, running) = pair(Script { no_buffer: 3, ..Default::default() }).await;
    let batch = [(PARTITION, blocks(0..2))];
    client.push(&key(), SendForm::Contiguous, &batch).await.unwrap();
    assert_eq!(double.0.lock().sent[0].require_buffer_id, 100 + 101 + 64);

    double.0.lock().no_buffer = 4;
    let refused = client.require_buffer(&key(), &batch).await.unwrap_err();
    assert_eq!(refused.status(), Some(StatusCode::NoBuffer));
    assert_eq!(double.0.lock().no_buffer, 0);

    assert_eq!(client.heartbeat("app").await.unwrap_err().status(), Some(StatusCode::NoRegister));
    assert!(matches!(client.unregister(&key()).await.unwrap_err(), ClientError::Rpc { .. }));
    end(client, running).await;
}

#[tokio::test]
async fn reported_ids_are_returned_as_a_set() {
    let (_, client, running) = pair(Script::default()).await;
    let ids: Vec<BlockId> = blocks(0..5).iter().map(|block| block.meta.block_id).collect();
    client.report(&key(), TaskAttemptId(0), &[(PARTITION, ids.clone())]).await.unwrap();
    let set = client.results(&key(), &[PARTITION], Some(IdLayout::SPARK)).await.unwrap();
    assert_eq!(set.cardinality(), 5);
    assert!(ids.iter().all(|id| set.contains(id.0.cast_unsigned())));
    end(client, running).await;
}

#[tokio::test]
async fn partition_is_read_through_both_tiers() {
    let all = blocks(0..10);
    let mut script = Script::default();
    script.memory.extend([memory(&all[6..8], None), memory(&all[8..], None), memory(&[], None)]);
    disk(&mut script, &all[..8]);
    let (double, client, running) = pair(script).await;
    let options = ReadOptions { read_buffer_size: 300, ..Default::default() };
    let read = client.read_partition(&key(), PARTITION, &options).await.unwrap();
    assert_eq!(read.blocks.len(), 10);
    assert!(all.iter().all(|block| read.blocks[&block.meta.block_id] == block.data));
    assert_eq!((read.from_memory, read.from_disk, read.skipped), (4, 6, 2));
    assert_eq!(double.0.lock().cursors, [-1, all[7].meta.block_id.0, all[9].meta.block_id.0]);
    // A read ends once it has 300 bytes: 100 + 101 + 102, then 103 + 104 + 105. The other blocks
    // were in memory and are not read.
    assert_eq!(double.0.lock().data_reads, [(0, 303), (303, 312)]);
    end(client, running).await;
}

#[tokio::test]
async fn trusted_is_end_saves_a_call() {
    for (trust_is_end, calls) in [(true, 1), (false, 2)] {
        let mut script = Script::default();
        script.memory.extend([memory(&blocks(0..1), Some(true)), memory(&[], Some(true))]);
        let (double, client, running) = pair(script).await;
        let options = ReadOptions { trust_is_end, ..Default::default() };
        assert_eq!(client.read_partition(&key(), PARTITION, &options).await.unwrap().blocks.len(), 1);
        assert_eq!(double.0.lock().cursors.len(), calls);
        end(client, running).await;
    }
}

#[tokio::test]
async fn skewed_reads_request_only_their_tasks() {
    let all = blocks(0..4);
    let mut script = Script::default();
    disk(&mut script, &all);
    let (double, client, running) = pair(script).await;
    let options = ReadOptions { tasks: Some(Treemap::of(&[1])), ..Default::default() };
    let read = client.read_partition(&key(), PARTITION, &options).await.unwrap();
    let ids: Vec<BlockId> = read.blocks.keys().copied().collect();
    assert_eq!(ids, [all[1].meta.block_id, all[3].meta.block_id]);
    assert_eq!(double.0.lock().data_reads, [(100, 101), (303, 103)]);

    double.0.lock().data_reads.clear();
    let last = all[3].meta.block_id.0.cast_unsigned();
    let options =
        ReadOptions { expected: Some(Treemap::of(&[last])), read_buffer_size: 1, ..Default::default() };
    client.read_partition(&key(), PARTITION, &options).await.unwrap();
    assert_eq!(double.0.lock().data_reads, [(303, 103)]);
    end(client, running).await;
}

#[tokio::test]
async fn invalid_responses_are_errors() {
    let all = blocks(0..2);
    let mut script = Script::default();
    disk(&mut script, &all);
    script.file[0] ^= 1;
    let (double, client, running) = pair(script).await;
    let options = ReadOptions::default();
    let error = client.read_partition(&key(), PARTITION, &options).await.unwrap_err();
    assert!(matches!(error, ClientError::Malformed { source: Malformed::Crc { .. }, .. }), "{error}");

    double.0.lock().file.truncate(150);
    let error = client.read_partition(&key(), PARTITION, &options).await.unwrap_err();
    let short = |source: &Malformed| matches!(source, Malformed::DataLength { expected: 201, got: 150 });
    assert!(matches!(&error, ClientError::Malformed { source, .. } if short(source)), "{error}");

    double.0.lock().memory.push_back(memory(&all, None));
    let error = client.read_partition(&key(), PARTITION, &options).await.unwrap_err();
    assert!(matches!(error, ClientError::Endless { .. }), "{error}");
    end(client, running).await;
}

#[test]
fn default_backoff_matches_java() {
    let backoff = Backoff::default();
    for (n, least, most) in [(0, 2, 4), (1, 4, 6), (2, 8, 10), (3, 10, 10), (40, 10, 10)] {
        let pause = backoff.pause(n);
        assert!(pause >= Duration::from_secs(least) && pause <= Duration::from_secs(most), "{n}: {pause:?}");
    }
}

#[tokio::test]
async fn unreachable_coordinator_error_is_readable() {
    let closed =
        std::net::TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).unwrap();
    let mut options = crate::ClientOptions::default();
    options.failures.attempts = 1;
    let coordinators = crate::Coordinators::new([closed.to_string()], options).unwrap();
    let error = coordinators.servers().await.unwrap_err().to_string();
    assert!(error.starts_with(&closed.to_string()) && error.contains("refused"), "{error}");
    for part in ["Error(", "Some(", "MetadataMap"] {
        assert!(!error.contains(part), "{part} is in the error: {error}");
    }
}
