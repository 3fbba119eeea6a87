//! Attacks on a worker, usable alone or combined. Each runs until it is dropped and repeats after a
//! failed round. At most a refused connection ends an attack; the error then fails the test.

use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::future::{BoxFuture, FutureExt as _};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use uniffle_client::block::{Block, IdLayout};
use uniffle_client::grpc::{Backoff, ShuffleClient};
use uniffle_client::send::SendForm;
use uniffle_coordinator::proto::coordinator_server_client::CoordinatorServerClient;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_testkit::clients::{key, local};
use uniffle_wire::request::{MemoryRequest, ReadRequest, SendBlock, SendRequest};
use uniffle_wire::types::{PartitionId, TaskAttemptId, TicketId};
use uniffle_worker::proto;

use super::h2::Connection;

/// Application that most attacks share; partitions 0 to 99 of shuffle 0 are registered.
pub(super) const APP: &str = "siege";

/// Ports and seed of the worker under attack.
#[derive(Debug, Clone, Copy)]
pub(super) struct Target {
    pub(super) grpc: u16,
    pub(super) tcp: u16,
    pub(super) http: u16,
    pub(super) seed: u64,
}

/// Runs until it is dropped. Returns only on an error.
pub(super) type Attack = fn(Target) -> BoxFuture<'static, io::Error>;

/// Pause between rounds of attacks that do not depend on frequency.
const PAUSE: Duration = Duration::from_millis(50);
/// Connections per round of attacks that hold many.
const MANY: usize = 500;

fn impatient() -> Backoff {
    Backoff { attempts: 1, first: Duration::from_millis(1), longest: Duration::from_millis(1) }
}

pub(super) async fn client(target: Target) -> io::Result<ShuffleClient> {
    let client = ShuffleClient::connect(local(target.grpc)).await;
    client.map(|client| client.with_backoff(impatient())).map_err(io::Error::other)
}

/// Repeats `round` until its connection is refused.
pub(super) async fn repeat<F>(round: impl Fn() -> F) -> io::Error
where
    F: Future<Output = io::Result<()>>,
{
    loop {
        // A worker that sheds load disconnects attackers; the attack then starts over.
        if let Err(error) = round().await
            && error.kind() == io::ErrorKind::ConnectionRefused
        {
            return error;
        }
        sleep(PAUSE).await;
    }
}

/// Opens `count` connections, sends `bytes` on each and holds them for `time`.
async fn hold(port: u16, count: usize, bytes: &[u8], time: Duration) -> io::Result<()> {
    let mut streams = Vec::with_capacity(count);
    for _ in 0..count {
        let mut stream = TcpStream::connect(local(port)).await?;
        // May fail: the worker may have evicted this connection for a later one.
        let _ = stream.write_all(bytes).await;
        streams.push(stream);
    }
    sleep(time).await;
    Ok(())
}

/// Opens more connections than the limit that send one byte of a preface, and silent TCP ones.
pub(super) fn half_sent_prefaces(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        let grpc = repeat(|| hold(target.grpc, 3 * MANY, b"P", Duration::from_secs(5)));
        let tcp = repeat(|| hold(target.tcp, MANY, b"", Duration::from_secs(5)));
        tokio::select! { error = grpc => error, error = tcp => error }
    }
    .boxed()
}

/// Holds sockets on the HTTP port that send half a request or read no response, and requests task
/// dumps.
pub(super) fn slow_sockets_and_dumps(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        let heads = repeat(|| hold(target.http, 200, b"GET /health/li", Duration::from_secs(5)));
        let metrics = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
        let answers = repeat(|| hold(target.http, 100, metrics, Duration::from_secs(2)));
        let dumps = repeat(|| hold(target.http, 10, b"GET /debug/tasks HTTP/1.1\r\nHost: x\r\n\r\n", PAUSE));
        tokio::select! { error = heads => error, error = answers => error, error = dumps => error }
    }
    .boxed()
}

/// Forges heartbeats of the coordinator's own worker and of thousands of others. Also requests the
/// largest assignments, and explanations, which query all joined workers.
pub(super) fn forged_heartbeats(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        let mut random = ChaCha8Rng::seed_from_u64(target.seed);
        let forging = async {
            loop {
                let address = format!("http://127.0.0.1:{}", target.grpc);
                let Ok(mut coordinator) = CoordinatorServerClient::connect(address).await else {
                    sleep(PAUSE).await;
                    continue;
                };
                let _ = forge(&mut coordinator, &mut random).await;
            }
        };
        let explain = b"GET /api/v1/cluster/apps/siege/explain HTTP/1.1\r\nHost: x\r\n\r\n";
        let explanations = repeat(|| hold(target.http, 4, explain, Duration::from_secs(1)));
        tokio::select! { error = forging => error, error = explanations => error }
    }
    .boxed()
}

async fn forge(
    coordinator: &mut CoordinatorServerClient<tonic::transport::Channel>,
    random: &mut ChaCha8Rng,
) -> Result<(), tonic::Status> {
    let servers = coordinator.get_shuffle_server_list(()).await?.into_inner().servers;
    for server in servers.into_iter().take(10) {
        let forged = proto::ShuffleServerId { ip: "203.0.113.1".to_owned(), ..server };
        let heartbeat = proto::ShuffleServerHeartBeatRequest {
            server_id: Some(forged),
            available_memory: i64::MAX,
            ..Default::default()
        };
        coordinator.heartbeat(heartbeat).await?;
    }
    for _ in 0..100 {
        let number: u16 = random.random();
        let server_id = proto::ShuffleServerId {
            id: format!("10.0.0.1-{number}"),
            ip: "10.0.0.1".to_owned(),
            port: i32::from(number).max(1),
            ..Default::default()
        };
        // The forged worker has no tags, so that honest jobs are not assigned to it.
        let heartbeat =
            proto::ShuffleServerHeartBeatRequest { server_id: Some(server_id), ..Default::default() };
        coordinator.heartbeat(heartbeat).await?;
    }
    for partition_num in [1 << 17, 1 << 20] {
        let request = proto::GetShuffleServerRequest {
            application_id: APP.to_owned(),
            partition_num,
            partition_num_per_range: 1,
            data_replica: 1,
            assignment_shuffle_server_number: -1,
            ..Default::default()
        };
        // The response exceeds this client's limit; only its cost for the worker matters.
        let _ = coordinator.get_shuffle_assignments(request).await;
    }
    Ok(())
}

/// Sends requests of 20,000 one-byte blocks.
pub(super) fn tiny_blocks(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        let generator = BlockGenerator::new(target.seed, IdLayout::SPARK);
        let mut task = i64::try_from(target.seed % 1000).unwrap() * 1_000_000;
        loop {
            let Ok(client) = client(target).await else {
                sleep(PAUSE).await;
                continue;
            };
            for _ in 0..10 {
                task += 1;
                let partition = PartitionId(i32::try_from(task % 100).unwrap());
                let blocks: Vec<Block> =
                    (0..20_000).map(|at| generator.block(partition, TaskAttemptId(task), at, 1)).collect();
                let _ = client.push(&key(APP, 0), SendForm::Classic, &[(partition, blocks)]).await;
            }
        }
    }
    .boxed()
}

/// Sends data without a valid ticket, requests oversized tickets, and leaves tickets unused.
pub(super) fn forged_tickets(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        let generator = BlockGenerator::new(target.seed, IdLayout::SPARK);
        let block = generator.block(PartitionId(1), TaskAttemptId(1), 0, 4 << 20);
        let mut random = ChaCha8Rng::seed_from_u64(target.seed);
        loop {
            let _ = forge_tickets(target, &block, &mut random).await;
            sleep(PAUSE).await;
        }
    }
    .boxed()
}

async fn forge_tickets(target: Target, block: &Block, random: &mut ChaCha8Rng) -> io::Result<()> {
    let client = client(target).await?;
    let batch = [(PartitionId(1), vec![block.clone()])];
    let _ = client.send(&key(APP, 0), TicketId(random.random()), SendForm::Classic, &batch).await;
    for require_size in [i32::MAX, -1, 1 << 20] {
        let request = proto::RequireBufferRequest {
            require_size,
            app_id: APP.to_owned(),
            shuffle_id: 0,
            partition_ids: (0..100).collect(),
            ..Default::default()
        };
        let _ = client.require_raw(request).await;
    }
    let mut stream = TcpStream::connect(local(target.tcp)).await?;
    stream.write_all(&frame(random.random(), block)).await
}

pub(super) fn frame(ticket: i64, block: &Block) -> Bytes {
    let block = SendBlock {
        block_id: block.meta.block_id.0,
        crc: i64::from(block.meta.crc),
        task_attempt_id: block.meta.task_attempt_id.0,
        data: block.data.clone(),
        servers: Vec::new(),
        uncompressed_length: 1,
        free_memory: 0,
    };
    let request = SendRequest {
        request_id: 1,
        app: APP.to_owned(),
        shuffle: 0,
        ticket,
        partitions: vec![(1, vec![block])],
        timestamp_ms: 0,
    };
    let mut frame = BytesMut::new();
    request.encode_frame(&mut frame);
    frame.freeze()
}

/// Sends only the first half of TCP frames.
pub(super) fn half_frames(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        let block =
            BlockGenerator::new(9, IdLayout::SPARK).block(PartitionId(2), TaskAttemptId(1), 0, 1 << 20);
        repeat(|| async {
            let mut streams = Vec::new();
            for ticket in 0..i64::try_from(MANY).unwrap() {
                let mut stream = TcpStream::connect(local(target.tcp)).await?;
                let frame = frame(ticket, &block);
                let _ = timeout(Duration::from_millis(20), stream.write_all(&frame[..frame.len() / 2])).await;
                streams.push(stream);
            }
            sleep(Duration::from_secs(5)).await;
            Ok(())
        })
        .await
    }
    .boxed()
}

/// Requests the honest application's data a thousand times on each of many TCP connections, and
/// takes a byte now and then.
pub(super) fn slow_readers(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        repeat(|| async {
            let mut streams = Vec::new();
            for _ in 0..100 {
                let mut stream = TcpStream::connect(local(target.tcp)).await?;
                let _ = timeout(Duration::from_millis(20), stream.write_all(&reads("honest"))).await;
                streams.push(stream);
            }
            for _ in 0..20 {
                for stream in &mut streams {
                    let _ = timeout(Duration::from_millis(5), stream.read_u8()).await;
                }
                sleep(PAUSE).await;
            }
            Ok(())
        })
        .await
    }
    .boxed()
}

fn reads(app: &str) -> BytesMut {
    let mut requests = BytesMut::new();
    for request_id in 0..1000 {
        let target = uniffle_wire::request::PartitionTarget { request_id, app, shuffle: 0, partition: 0 };
        let (last_block_id, read_buffer_size) = (-1, 14 << 20);
        let request =
            MemoryRequest { target, last_block_id, read_buffer_size, timestamp_ms: 0, task_filter: None };
        ReadRequest::Memory(request).encode_frame(&mut requests);
    }
    requests
}

/// Starts sends and reports over HTTP/2 and pauses in them, reads no response of a heartbeat call,
/// and answers pings.
pub(super) fn paused_calls(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        repeat(|| async {
            let mut connections = Vec::new();
            for _ in 0..50 {
                let mut connection = Connection::open(target.grpc, 0).await?;
                for method in ["ShuffleServer/sendShuffleData", "ShuffleServer/reportShuffleResult"] {
                    let id = connection.begin(method).await?;
                    connection.data(id, &[0, 0, 1, 0, 0, 10], false).await?;
                }
                let list = proto::AppHeartBeatRequest { app_id: "nobody".to_owned() };
                connection.ask("ShuffleServer/appHeartbeat", &list).await?;
                connections.push(connection);
            }
            for connection in &mut connections {
                connection.pong(PAUSE).await?;
            }
            Ok(())
        })
        .await
    }
    .boxed()
}
