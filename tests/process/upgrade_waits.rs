//! SIGUSR2 with a hand-over of memory: no call is refused, nothing is flushed, and the longest wait
//! is measured. A send that is half received is stored once or not at all.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::task::{JoinSet, block_in_place};
use tokio::time::Instant;
use uniffle_client::block::{Block, IdLayout};
use uniffle_client::grpc::{ClientError, ShuffleClient, require_request};
use uniffle_client::send::{Batch, SendForm};
use uniffle_client::tcp::{TcpClient, TcpClientError, read_reply};
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_testkit::worker::{Setup, WorkerProcess};
use uniffle_testkit::{eventually, say};
use uniffle_wire::request::{SendBlock, SendRequest};
use uniffle_wire::types::{BlockId, BlockMeta, PartitionId, ShuffleKey, TaskAttemptId};
use uniffle_worker::proto::StatusCode;
use uniffle_worker::runtime::Tasks;

use crate::kept_memory::{MEMFD, NEVER_FLUSHED, directory};
use crate::upgrades::is_unprocessed;
use crate::writes::{Written, client_of, key, local, long_backoff};

const BLOCK_BYTES: u32 = 14 << 10;
const LAYOUT: IdLayout = IdLayout::SPARK;
/// Partitions of the shuffle that fills memory.
const PARTITIONS: i32 = 500;
const READ_PARTITIONS: i32 = 20;
const READ_BLOCKS: i32 = 10;
/// A call that is retried for this long counts as unanswered.
const CALL_DEADLINE: Duration = Duration::from_secs(60);
/// Bound on a wait in a release build.
const WAIT_MAX: Duration = Duration::from_millis(200);

#[derive(Debug, Clone, Copy)]
enum Transport {
    Grpc,
    Tcp,
}

/// Reason for a retry.
#[derive(Debug)]
#[expect(dead_code, reason = "for the message")]
enum Retry {
    /// Status returned by the worker.
    Refused(StatusCode),
    /// The connection ended.
    Connection(String),
}

impl From<ClientError> for Retry {
    fn from(error: ClientError) -> Self {
        match (&error, error.status()) {
            (_, Some(status)) => Self::Refused(status),
            (ClientError::Rpc { status, .. }, _) if is_unprocessed(status) => Self::Connection(String::new()),
            _ => Self::Connection(format!("{error:?}")),
        }
    }
}

impl From<TcpClientError> for Retry {
    fn from(error: TcpClientError) -> Self {
        error.status().map_or_else(|| Self::Connection(error.to_string()), Self::Refused)
    }
}

/// Connections of one caller.
struct Clients {
    grpc: ShuffleClient,
    tcp: TcpClient,
}

/// Concurrent writers and readers with their observations.
#[derive(Debug)]
struct Callers {
    ports: (u16, u16),
    written: ShuffleKey,
    read: ShuffleKey,
    blocks: BTreeMap<i32, Vec<Block>>,
    tasks: Tasks,
    stop: AtomicBool,
    answered: [AtomicUsize; 4],
    longest: Mutex<BTreeMap<String, Duration>>,
    again: Mutex<Vec<Retry>>,
}

impl Callers {
    async fn connect(&self) -> Clients {
        let grpc = ShuffleClient::connect(local(self.ports.0)).await.expect("a connection was refused");
        let (tcp, driver) = TcpClient::connect(local(self.ports.1)).await.expect("a connection was refused");
        self.tasks.spawn("tcp client", driver);
        Clients { grpc: grpc.with_backoff(long_backoff()), tcp }
    }

    /// Makes one call after another, each until it is answered.
    async fn call(self: Arc<Self>, number: usize) {
        let by = [Transport::Grpc, Transport::Tcp][number % 2];
        let mut clients = self.connect().await;
        for call in 0.. {
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            let task = TaskAttemptId(i64::try_from(number * 100_000 + call).unwrap());
            let began = Instant::now();
            loop {
                let done = match number < 2 {
                    true => self.write(&clients, by, task).await,
                    false => self.read(&clients, by, i32::try_from(call).unwrap()).await,
                };
                let Err(again) = done else { break };
                assert!(began.elapsed() < CALL_DEADLINE, "a call was not answered: {again:?}");
                if matches!(again, Retry::Connection(_)) {
                    clients = self.connect().await;
                }
                self.again.lock().push(again);
                tokio::task::yield_now().await;
            }
            let what = format!("{} over {by:?}", if number < 2 { "write" } else { "read" });
            let mut longest = self.longest.lock();
            let longest = longest.entry(what).or_default();
            *longest = began.elapsed().max(*longest);
            self.answered[number].fetch_add(1, Ordering::Relaxed);
        }
    }

    async fn write(&self, clients: &Clients, by: Transport, task: TaskAttemptId) -> Result<(), Retry> {
        let (batch, key) = (batch_of(task, 10), &self.written);
        let ticket = clients.grpc.require_once(require_request(key, &batch)?).await?;
        match by {
            Transport::Grpc => clients.grpc.send(key, ticket, SendForm::Classic, &batch).await?,
            Transport::Tcp => clients.tcp.send(key, ticket, &batch).await?,
        }
        let ids: Vec<_> = batch.iter().map(|(at, blocks)| (*at, vec![blocks[0].meta.block_id])).collect();
        Ok(clients.grpc.report(key, task, &ids).await?)
    }

    async fn read(&self, clients: &Clients, by: Transport, call: i32) -> Result<(), Retry> {
        let (partition, key) = (PartitionId(call % READ_PARTITIONS), &self.read);
        let answer = match by {
            Transport::Grpc => clients.grpc.read_memory(key, partition, None, 1 << 20, None).await?,
            Transport::Tcp => {
                let reply = clients.tcp.read_memory(key, partition, -1, 1 << 20, None).await?;
                TcpClient::memory_answer(reply)?
            }
        };
        assert!(answer.blocks == self.blocks[&partition.0], "{partition:?} has other bytes");
        Ok(())
    }

    /// Waits until every caller has five more answers than `before`.
    async fn progress(&self, before: Vec<usize>) {
        eventually("all callers make progress", || {
            let now = self.answered();
            let all = now.iter().zip(&before).all(|(now, before)| *now >= before + 5);
            if all { Ok(()) } else { Err(format!("{now:?}")) }
        })
        .await;
    }

    fn answered(&self) -> Vec<usize> {
        self.answered.iter().map(|count| count.load(Ordering::Relaxed)).collect()
    }
}

/// Returns one block for each partition. All have the same bytes, so creating thousands is cheap.
fn batch_of(task: TaskAttemptId, partitions: i32) -> Vec<(PartitionId, Vec<Block>)> {
    let like = Block::new(BlockId(0), task, Bytes::from(vec![7; BLOCK_BYTES as usize]));
    let block = |at| {
        let block_id = LAYOUT.block_id(0, PartitionId(at), task).unwrap();
        Block { meta: BlockMeta { block_id, ..like.meta }, data: like.data.clone() }
    };
    (0..partitions).map(|at| (PartitionId(at), vec![block(at)])).collect()
}

/// Returns the amount of data in memory, and the binary to assert the waits of, if any.
fn parameters() -> (f64, Option<PathBuf>) {
    let gigabytes = std::env::var("UPGRADE_GIGABYTES").ok().and_then(|text| text.parse().ok());
    (gigabytes.unwrap_or(0.05), std::env::var_os("UPGRADE_WORKER").map(PathBuf::from))
}

/// Registers `filled` and writes `gigabytes` to it. Returns the number of tasks.
async fn fill(client: &ShuffleClient, filled: &ShuffleKey, gigabytes: f64) -> i64 {
    client.register(filled, &[(0, PARTITIONS - 1)]).await.unwrap();
    #[expect(clippy::cast_possible_truncation, reason = "a number of tasks")]
    let tasks = (gigabytes * 1e9 / f64::from(BLOCK_BYTES) / f64::from(PARTITIONS)) as i64;
    for task in (0..tasks).map(TaskAttemptId) {
        let batch = batch_of(task, PARTITIONS);
        client.push(filled, SendForm::Classic, &batch).await.unwrap();
        let ids: Vec<_> = batch.iter().map(|(at, blocks)| (*at, vec![blocks[0].meta.block_id])).collect();
        client.report(filled, task, &ids).await.unwrap();
    }
    tasks
}

/// Upgrades a worker under calls and asserts that only calls on closing connections were repeated.
/// Run with `UPGRADE_GIGABYTES=10 UPGRADE_WORKER=target/release/uniffle-worker`, `--nocapture` and
/// `--test-threads 1` to assert the longest wait with an optimized build.
async fn hand_over_under_calls(name: &'static str, memory: &'static str) {
    let (gigabytes, binary) = parameters();
    let capacity: &'static str = Box::leak(format!("{:.0}M", gigabytes * 1250.0 + 256.0).into());
    let (setup, is_judged) =
        (Setup { name, capacity, memory, tables: NEVER_FLUSHED, ..Setup::default() }, binary.is_some());
    let mut worker = block_in_place(|| WorkerProcess::start(&Setup { binary, ..setup }));
    let client = client_of(&worker).await;
    let mut read = Written::register(&client, key("app", 0), READ_PARTITIONS).await;
    for task in 0..READ_BLOCKS {
        read.task(&client, task.into(), BLOCK_BYTES).await.unwrap();
    }
    let (filled, written) = (key("app", 1), key("app", 2));
    client.register(&written, &[(0, 9)]).await.unwrap();
    let tasks = fill(&client, &filled, gigabytes).await;
    let callers = Arc::new(Callers {
        ports: (worker.ready().grpc_port, worker.ready().urpc_port.unwrap()),
        written,
        read: read.key.clone(),
        blocks: read.blocks.clone(),
        tasks: Tasks::new(),
        stop: AtomicBool::new(false),
        answered: Default::default(),
        longest: Mutex::default(),
        again: Mutex::default(),
    });
    let mut running = JoinSet::new();
    (0..4).for_each(|number| drop(running.spawn(Arc::clone(&callers).call(number))));
    callers.progress(vec![0; 4]).await;
    let usual = callers.longest.lock().values().copied().max().unwrap_or_default();
    block_in_place(|| {
        worker.begin_upgrade();
        worker.finish_upgrade();
    });
    callers.progress(callers.answered()).await;
    callers.stop.store(true, Ordering::Relaxed);
    while let Some(ended) = running.join_next().await {
        ended.expect("a call was not answered");
    }
    let (longest, again) = (callers.longest.lock().clone(), std::mem::take(&mut *callers.again.lock()));
    let (gap_ms, calls) = (worker.ready().upgrade_gap_ms.unwrap(), callers.answered());
    say(&format!(
        "{name}: {} blocks in memory, handed over under {calls:?} calls: longest waits {longest:?} ({usual:?} before), no process \
         accepted for {gap_ms} ms, made again: {again:?}",
        tasks * i64::from(PARTITIONS)
    ));
    let broken = |again: &&Retry| !matches!(again, Retry::Connection(why) if why.is_empty());
    assert_eq!(
        again.iter().find(broken).map(|again| format!("{again:?}")),
        None,
        "one of {} retries had another cause",
        again.len()
    );
    let log = worker.log();
    assert!(log.contains("handing over memory") && log.contains("flushed_bytes=0"), "{log}");
    let blocks = i64::from(READ_PARTITIONS * READ_BLOCKS) + tasks * i64::from(PARTITIONS);
    let blocks = blocks + 10 * i64::try_from(calls[0] + calls[1]).unwrap();
    let in_memory = worker.metrics().total("total_in_memory_block_count").map(|count| count.to_string());
    assert_eq!(in_memory, Some(blocks.to_string()), "all acknowledged blocks must be in memory once");
    let found = client_of(&worker).await.results(&filled, &[PartitionId(7)], None).await.unwrap();
    assert_eq!(found.cardinality(), u64::try_from(tasks).unwrap());
    assert!(!is_judged || longest.values().all(|wait| *wait <= WAIT_MAX), "{longest:?}");
    let client = client_of(&worker).await;
    client.unregister_app("app").await.unwrap();
    worker.assert_clean();
    callers.tasks.cancel();
    callers.tasks.drained().await;
    block_in_place(|| worker.stop());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn memfd_hand_over_refuses_no_call() {
    hand_over_under_calls("memfd under calls", MEMFD).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tmpfs_hand_over_refuses_no_call() {
    let (_directory, memory) = directory();
    hand_over_under_calls("directory under calls", memory).await;
}

/// Returns a send of `batch` as a frame.
fn large_send(key: &ShuffleKey, ticket: i64, batch: &Batch) -> Bytes {
    let block = |block: &Block| SendBlock {
        block_id: block.meta.block_id.0,
        crc: i64::from(block.meta.crc),
        task_attempt_id: block.meta.task_attempt_id.0,
        data: block.data.clone(),
        servers: Vec::new(),
        uncompressed_length: i32::try_from(block.meta.length).unwrap(),
        free_memory: 0,
    };
    let request = SendRequest {
        request_id: 1,
        app: key.app.as_str().to_owned(),
        shuffle: key.shuffle.0,
        ticket,
        partitions: batch.iter().map(|(at, blocks)| (at.0, blocks.iter().map(block).collect())).collect(),
        timestamp_ms: 0,
    };
    let mut frame = BytesMut::new();
    request.encode_frame(&mut frame);
    frame.freeze()
}

/// A send that is half received at an upgrade is acknowledged by the old process, and visible once
/// in the successor on the same connection. If the process is killed before the rest arrives, the
/// send is not visible.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn send_received_during_upgrade_is_stored_once() {
    let (_directory, memory) = directory();
    let setup = Setup { name: "half a send", memory, tables: NEVER_FLUSHED, ..Setup::default() };
    let mut worker = block_in_place(|| WorkerProcess::start(&setup));
    let client = client_of(&worker).await;
    let key = key("app", 0);
    client.register(&key, &[(0, 0)]).await.unwrap();
    let generator = BlockGenerator::new(7, LAYOUT);
    let batch = |task| {
        let block = |at| generator.block(PartitionId(0), TaskAttemptId(task), at, BLOCK_BYTES);
        [(PartitionId(0), (0..1024).map(block).collect::<Vec<_>>())]
    };
    let (first, second) = (batch(1), batch(2));
    let mut socket = TcpStream::connect(local(worker.ready().urpc_port.unwrap())).await.unwrap();
    let ticket = client.require_buffer(&key, &first).await.unwrap();
    let frame = large_send(&key, ticket.0, &first);
    let (half, rest) = frame.split_at(frame.len() / 2);
    socket.write_all(half).await.unwrap();
    worker.begin_upgrade();
    block_in_place(|| worker.wait_log("handing over memory"));
    socket.write_all(rest).await.unwrap();
    let reply = read_reply(&mut socket).await.unwrap();
    assert_eq!(reply.status, StatusCode::Success as i32, "{}", reply.message);
    block_in_place(|| worker.finish_upgrade());
    let client = client_of(&worker).await;
    assert_holds(&worker, &client, &key, &first).await;
    // The connection belongs to the successor now.
    let ticket = client.require_buffer(&key, &second).await.unwrap();
    let frame = large_send(&key, ticket.0, &second);
    socket.write_all(&frame[..frame.len() / 2]).await.unwrap();
    block_in_place(|| {
        worker.kill();
        worker.start_again();
    });
    let client = client_of(&worker).await;
    assert_holds(&worker, &client, &key, &first).await;
    client.push(&key, SendForm::Classic, &second).await.unwrap();
    let both = [(PartitionId(0), [first[0].1.clone(), second[0].1.clone()].concat())];
    assert_holds(&worker, &client, &key, &both).await;
    client.unregister_app("app").await.unwrap();
    worker.assert_clean();
    block_in_place(|| worker.stop());
}

/// SIGTERM while the worker waits for a half received send before it executes its successor.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_during_hand_over_keeps_memory() {
    let setup = Setup { name: "stop at hand-over", memory: MEMFD, tables: NEVER_FLUSHED, ..Setup::default() };
    let mut worker = block_in_place(|| WorkerProcess::start(&setup));
    let client = client_of(&worker).await;
    let key = key("app", 0);
    client.register(&key, &[(0, 0)]).await.unwrap();
    let generator = BlockGenerator::new(7, LAYOUT);
    let block = |at| generator.block(PartitionId(0), TaskAttemptId(1), at, BLOCK_BYTES);
    let batch = [(PartitionId(0), (0..1024).map(block).collect::<Vec<_>>())];
    let mut socket = TcpStream::connect(local(worker.ready().urpc_port.unwrap())).await.unwrap();
    let ticket = client.require_buffer(&key, &batch).await.unwrap();
    let frame = large_send(&key, ticket.0, &batch);
    let (half, rest) = frame.split_at(frame.len() / 2);
    socket.write_all(half).await.unwrap();
    worker.begin_upgrade();
    block_in_place(|| worker.wait_log("handing over memory"));
    worker.signal(rustix::process::Signal::TERM);
    block_in_place(|| worker.wait_log("stopping signal=\"SIGTERM\""));
    socket.write_all(rest).await.unwrap();
    let reply = read_reply(&mut socket).await.unwrap();
    assert_eq!(reply.status, StatusCode::Success as i32, "{}", reply.message);
    drop((client, socket));
    assert_eq!(block_in_place(|| worker.wait_end()).code(), Some(0), "{}", worker.log());
    block_in_place(|| worker.start_again());
    let client = client_of(&worker).await;
    let read = client.read_partition(&key, PartitionId(0), &Default::default()).await.unwrap();
    let blocks: BTreeMap<_, _> = batch[0].1.iter().map(|it| (it.meta.block_id, it.data.clone())).collect();
    assert!(read.blocks == blocks, "{} blocks were read of {}", read.blocks.len(), blocks.len());
    client.unregister_app("app").await.unwrap();
    block_in_place(|| worker.stop());
}

/// Asserts that the blocks of `batch` are in memory, byte for byte, and no others.
async fn assert_holds(worker: &WorkerProcess, client: &ShuffleClient, key: &ShuffleKey, batch: &Batch) {
    let read = client.read_partition(key, PartitionId(0), &Default::default()).await.unwrap();
    let blocks: BTreeMap<_, _> = batch[0].1.iter().map(|it| (it.meta.block_id, it.data.clone())).collect();
    assert!(read.blocks == blocks, "{} blocks were read of {}", read.blocks.len(), blocks.len());
    assert_eq!(read.skipped, 0);
    let in_memory = worker.metrics().total("total_in_memory_block_count").map(|count| count.to_string());
    assert_eq!(in_memory, Some(blocks.len().to_string()));
}
