//! Connections between clients and a worker that break, lag or go silent, on both data planes.
//!
//! A proxy sits in front of each listener. Acknowledged blocks must be readable afterwards, and no
//! state of departed clients may remain.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinSet, block_in_place};
use tokio::time::{sleep, timeout};
use uniffle_client::block::{Block, IdLayout};
use uniffle_client::grpc::{ReadOptions, ShuffleClient};
use uniffle_client::send::SendForm;
use uniffle_client::tcp::TcpClient;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_wire::types::{PartitionId, TaskAttemptId};
use uniffle_worker::runtime::Tasks;

use crate::writes::{client_of, key, local, long_backoff};
use uniffle_testkit::say;
use uniffle_testkit::worker::{Setup, WorkerProcess};

const WRITERS: u64 = 8;
const TASKS: i64 = 25;
const WAIT_MAX: Duration = Duration::from_millis(700);

/// Fault of a proxied connection in one direction.
#[derive(Debug, Clone, Copy)]
enum Fault {
    None,
    /// Closes both sides after this many bytes.
    Cut(usize),
    /// Delays every chunk.
    Delay(Duration),
    /// Swallows all bytes after this many.
    Silence(usize),
}

impl Fault {
    fn any(random: &mut ChaCha8Rng) -> Self {
        let after = random.random_range(0..300_000);
        match random.random_range(0..5) {
            0 => Self::Cut(after),
            1 => Self::Silence(after),
            2 => Self::Delay(Duration::from_millis(random.random_range(1..40))),
            _ => Self::None,
        }
    }
}

/// Forwards to `port` with faults, until aborted.
async fn proxy(listener: TcpListener, port: u16, seed: u64, faulty: Arc<AtomicU64>) {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut connections = JoinSet::new();
    while let Ok((near, _)) = listener.accept().await {
        let Ok(far) = TcpStream::connect(local(port)).await else { continue };
        let (near_read, near_write) = near.into_split();
        let (far_read, far_write) = far.into_split();
        let (up, down) = (Fault::any(&mut random), Fault::any(&mut random));
        faulty.fetch_add(u64::from(!matches!((up, down), (Fault::None, Fault::None))), Ordering::Relaxed);
        connections.spawn(async move {
            // A cut in one direction ends both.
            tokio::select! {
                () = forward(near_read, far_write, up) => {}
                () = forward(far_read, near_write, down) => {}
            }
        });
    }
}

async fn forward(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, fault: Fault) {
    let mut buffer = vec![0; 16 << 10];
    let mut passed = 0;
    loop {
        let Ok(length @ 1..) = from.read(&mut buffer).await else { return };
        match fault {
            Fault::Cut(after) if passed + length > after => {
                let rest = after.saturating_sub(passed);
                let _ = to.write_all(&buffer[..rest]).await;
                return;
            }
            Fault::Silence(after) if passed > after => {}
            Fault::Delay(pause) => {
                sleep(pause).await;
                if to.write_all(&buffer[..length]).await.is_err() {
                    return;
                }
            }
            Fault::None | Fault::Cut(_) | Fault::Silence(_) => {
                if to.write_all(&buffer[..length]).await.is_err() {
                    return;
                }
            }
        }
        passed += length;
    }
}

/// Sends every task once, on connections of its own. Returns the acknowledged blocks.
async fn write(ports: (u16, u16), writer: u64) -> Vec<Block> {
    let mut acknowledged = Vec::new();
    let generator = BlockGenerator::new(5, IdLayout::SPARK);
    let tasks = Tasks::new();
    for task in 0..TASKS {
        let attempt = TaskAttemptId(i64::try_from(writer).unwrap() * 1000 + task);
        let blocks: Vec<_> = (0..4).map(|at| generator.block(PartitionId(0), attempt, at, 12_000)).collect();
        let batch = [(PartitionId(0), blocks.clone())];
        let send = async {
            let client = ShuffleClient::connect(local(ports.0)).await.map_err(|error| error.to_string())?;
            let client = client.with_backoff(long_backoff());
            if task % 2 == 0 {
                return client
                    .push(&key("net", 0), SendForm::Classic, &batch)
                    .await
                    .map_err(|e| e.to_string());
            }
            let ticket = client.require_buffer(&key("net", 0), &batch).await.map_err(|e| e.to_string())?;
            let (tcp, driver) = TcpClient::connect(local(ports.1)).await.map_err(|e| e.to_string())?;
            tasks.spawn("tcp client", driver);
            tcp.send(&key("net", 0), ticket, &batch).await.map_err(|e| e.to_string())
        };
        if let Ok(Ok(())) = timeout(WAIT_MAX, send).await {
            acknowledged.extend(blocks);
        }
    }
    acknowledged
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_blocks_survive_network_faults() {
    let seed: u64 =
        std::env::var("NETWORK_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(rand::random);
    say(&format!("network: NETWORK_SEED={seed}"));
    let setup = Setup { name: "network", capacity: "32MiB", disks: 2, ..Setup::default() };
    let worker = block_in_place(|| WorkerProcess::start(&setup));
    let direct = client_of(&worker).await;
    direct.register(&key("net", 0), &[(0, 0)]).await.unwrap();
    let faulty = Arc::new(AtomicU64::new(0));
    let mut proxies = JoinSet::new();
    let mut ports = Vec::new();
    for (at, port) in [worker.ready().grpc_port, worker.ready().urpc_port.unwrap()].into_iter().enumerate() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        ports.push(listener.local_addr().unwrap().port());
        proxies.spawn(proxy(listener, port, seed ^ at as u64, Arc::clone(&faulty)));
    }
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        writers.spawn(write((ports[0], ports[1]), writer));
    }
    let mut acknowledged = Vec::new();
    while let Some(blocks) = writers.join_next().await {
        acknowledged.extend(blocks.unwrap());
    }
    let faulty = faulty.load(Ordering::Relaxed);
    let tasks = acknowledged.len() / 4;
    say(&format!("network: {tasks} of 200 tasks acknowledged, {faulty} faulty connections"));
    assert!(faulty > 10 && tasks > 20, "only {tasks} tasks with {faulty} faults ran");

    let read = direct.read_partition(&key("net", 0), PartitionId(0), &ReadOptions::default()).await;
    let read = read.unwrap().blocks;
    for block in &acknowledged {
        assert!(read.get(&block.meta.block_id) == Some(&block.data), "{:?}", block.meta.block_id);
    }
    proxies.shutdown().await;
    direct.unregister_app("net").await.unwrap();
    worker.assert_clean();
    worker.assert_no_error_logged();
    block_in_place(|| worker.stop());
}
