//! An adversary against a worker whose memory is bounded by the kernel: it may be slowed down, not brought down.
//!
//! The bound is `memory.max` of a cgroup (version 2, or `memory.limit_in_bytes` of version 1) of the capacity and
//! 256 MiB. Where the system lets this process make none, the largest
//! resident size is held to the same bound instead, which the test says.

use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::{JoinSet, block_in_place};
use tokio::time::{sleep, timeout};
use uniffle_client::block::{Block, IdLayout};
use uniffle_client::grpc::{Backoff, ShuffleClient};
use uniffle_client::send::SendForm;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_wire::request::{MemoryRequest, ReadRequest, SendBlock, SendRequest, Target};
use uniffle_wire::types::{PartitionId, TaskAttemptId, TicketId};

use crate::writes::{Written, client_of, key, local};
use uniffle_testkit::say;
use uniffle_testkit::tools::weaker;
use uniffle_testkit::worker::{Setup, Worker};

const CAPACITY_BYTES: u64 = 64 << 20;
const ALLOWANCE_BYTES: u64 = 256 << 20;
/// How long the adversary goes on.
const SIEGE: Duration = Duration::from_secs(12);
const HALF_OPEN: usize = 1000;
const SLOW_READERS: usize = 100;
const IDLE: usize = 300;

/// A cgroup with a limit, removed when it is dropped.
struct Group {
    dir: PathBuf,
    version: u8,
}

impl Group {
    fn with_limit(bytes: u64) -> std::io::Result<Self> {
        let own = std::fs::read_to_string("/proc/self/cgroup")?;
        let group = own.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':');
            let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
            let (root, version) = match controllers {
                "" => ("/sys/fs/cgroup", 2),
                _ if controllers.split(',').any(|name| name == "memory") => ("/sys/fs/cgroup/memory", 1),
                _ => return None,
            };
            let (limit, parent) = match version {
                1 => ("memory.limit_in_bytes", Path::new(root).join(path.trim_start_matches('/'))),
                // A group with processes can have no children with limits: beside it, then.
                _ => ("memory.max", Path::new(root).join(path.trim_start_matches('/')).parent()?.to_owned()),
            };
            Some((parent.join(format!("uniffle-worker-test-{}", std::process::id())), limit, version))
        });
        let (dir, limit, version) = group.ok_or(std::io::ErrorKind::NotFound)?;
        std::fs::create_dir(&dir)?;
        let group = Self { dir, version };
        std::fs::write(group.dir.join(limit), bytes.to_string())?;
        Ok(group)
    }

    fn procs(&self) -> String {
        self.dir.join("cgroup.procs").display().to_string()
    }

    /// Times that the kernel has killed in it.
    fn kills(&self) -> u64 {
        let file = if self.version == 1 { "memory.oom_control" } else { "memory.events" };
        let text = std::fs::read_to_string(self.dir.join(file)).unwrap_or_default();
        text.lines()
            .find_map(|line| line.strip_prefix("oom_kill "))
            .and_then(|count| count.trim().parse().ok())
            .unwrap_or(0)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The kernel lets go of it once its processes are reaped.
        drop(std::fs::remove_dir(&self.dir));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_adversary_does_not_get_the_process_killed_and_leaves_nothing() {
    let group = Group::with_limit(CAPACITY_BYTES + ALLOWANCE_BYTES);
    if let Err(error) = &group {
        use std::io::ErrorKind::{NotFound, PermissionDenied, ReadOnlyFilesystem};
        let is_allowed = !matches!(error.kind(), NotFound | PermissionDenied | ReadOnlyFilesystem);
        let why = format!("no cgroup ({error}), the resident size is held to the bound instead");
        weaker("overload", &why, is_allowed);
    }
    let group = group.ok();
    let wrapper = group.as_ref().map(|group| {
        let line = format!("echo $$ > {} && exec \"$@\"", group.procs());
        ["bash", "-c", &line, "bash"].map(str::to_owned).to_vec()
    });
    let setup = Setup {
        name: "overload",
        capacity: "64MiB",
        // What the adversary reserved and never sends is back before the honest application loses patience.
        memory: "buffer_ticket_timeout_sec = 10\nbuffer_ticket_check_interval_sec = 1",
        disks: 2,
        wrapper: wrapper.unwrap_or_default(),
        ..Setup::default()
    };
    let worker = block_in_place(|| Worker::start(&setup));
    let client = client_of(&worker).await;
    let mut honest = Written::register(&client, key("honest", 0), 10).await;
    honest.task(&client, 0, 100_000).await.expect("sent");
    client.register(&key("siege", 0), &[(0, 99)]).await.expect("registered");

    let mut siege = JoinSet::new();
    let (grpc, urpc) = (worker.ready().grpc_port, worker.ready().urpc_port.expect("on"));
    for seed in 0..3 {
        siege.spawn(tiny_blocks(grpc, seed));
        siege.spawn(forged_tickets(grpc, urpc, seed));
    }
    siege.spawn(half_open_frames(urpc));
    siege.spawn(slow_readers(urpc));
    siege.spawn(idle(grpc));
    siege.spawn(idle(urpc));
    sleep(SIEGE).await;
    siege.abort_all();
    while siege.join_next().await.is_some() {}

    // It lives, has lost nothing of an honest application, and still takes data.
    honest.task(&client, 1, 100_000).await.expect("sent");
    honest.assert_readable(&client).await;
    let peak = worker.peak_resident_bytes();
    say(&format!("overload: at most {} MiB resident", peak >> 20));
    assert!(peak <= CAPACITY_BYTES + ALLOWANCE_BYTES, "{} MiB resident", peak >> 20);
    for app in ["honest", "siege"] {
        client.unregister_app(app).await.expect("known");
    }
    worker.assert_clean();
    assert_eq!(group.as_ref().map_or(0, Group::kills), 0);
    worker.assert_no_error_logged();
    block_in_place(|| worker.stop());
}

fn impatient() -> Backoff {
    Backoff { attempts: 1, first: Duration::from_millis(1), longest: Duration::from_millis(1) }
}

/// Blocks of one byte, 20,000 in a request.
async fn tiny_blocks(grpc: u16, seed: u64) {
    let Ok(client) = ShuffleClient::connect(local(grpc)).await else { return };
    let client = client.with_backoff(impatient());
    let generator = BlockGenerator::new(seed, IdLayout::SPARK);
    for task in 0.. {
        let attempt = TaskAttemptId(i64::try_from(seed).expect("small") * 1_000_000 + task);
        let partition = PartitionId(i32::try_from(task % 100).expect("small"));
        let blocks: Vec<Block> = (0..20_000).map(|at| generator.block(partition, attempt, at, 1)).collect();
        let _ = client.push(&key("siege", 0), SendForm::Classic, &[(partition, blocks)]).await;
    }
}

/// Sends without a right to it, tickets for more than there is, and tickets that are never used.
async fn forged_tickets(grpc: u16, urpc: u16, seed: u64) {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let Ok(client) = ShuffleClient::connect(local(grpc)).await else { return };
    let generator = BlockGenerator::new(seed, IdLayout::SPARK);
    let block = generator.block(PartitionId(1), TaskAttemptId(1), 0, 4 << 20);
    let batch = [(PartitionId(1), vec![block.clone()])];
    loop {
        let _ = client.send(&key("siege", 0), TicketId(random.random()), SendForm::Classic, &batch).await;
        for require_size in [i32::MAX, -1, 1 << 20] {
            let request = uniffle_worker::proto::RequireBufferRequest {
                require_size,
                app_id: "siege".to_owned(),
                shuffle_id: 0,
                partition_ids: (0..100).collect(),
                ..Default::default()
            };
            let _ = client.require_raw(request).await;
        }
        if let Ok(mut stream) = TcpStream::connect(local(urpc)).await {
            let _ = stream.write_all(&frame(random.random(), &block)).await;
        }
    }
}

fn frame(ticket: i64, block: &Block) -> Bytes {
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
        app: "siege".to_owned(),
        shuffle: 0,
        ticket,
        partitions: vec![(1, vec![block])],
        timestamp_ms: 0,
    };
    let mut frame = BytesMut::new();
    request.encode_frame(&mut frame);
    frame.freeze()
}

/// A thousand frames of which only the first half comes.
async fn half_open_frames(urpc: u16) {
    let block = BlockGenerator::new(9, IdLayout::SPARK).block(PartitionId(2), TaskAttemptId(1), 0, 1 << 20);
    let mut streams = Vec::new();
    for ticket in 0..HALF_OPEN {
        let Ok(mut stream) = TcpStream::connect(local(urpc)).await else { continue };
        let frame = frame(i64::try_from(ticket).expect("small"), &block);
        let _ = timeout(Duration::from_millis(20), stream.write_all(&frame[..frame.len() / 2])).await;
        streams.push(stream);
    }
    std::future::pending().await
}

/// Ask for what the honest application has in memory, again and again, and take a byte now and then.
async fn slow_readers(urpc: u16) {
    let mut streams = Vec::new();
    for _ in 0..SLOW_READERS {
        let Ok(mut stream) = TcpStream::connect(local(urpc)).await else { continue };
        let mut requests = BytesMut::new();
        for request_id in 0..1000 {
            let target = Target { request_id, app: "honest", shuffle: 0, partition: 0 };
            let (last_block_id, read_buffer_size) = (-1, 14 << 20);
            let request =
                MemoryRequest { target, last_block_id, read_buffer_size, timestamp_ms: 0, task_filter: None };
            ReadRequest::Memory(request).encode_frame(&mut requests);
        }
        let _ = timeout(Duration::from_millis(20), stream.write_all(&requests)).await;
        streams.push(stream);
    }
    loop {
        for stream in &mut streams {
            let _ = timeout(Duration::from_millis(5), stream.read_u8()).await;
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// Connect and say nothing.
async fn idle(port: u16) {
    let mut streams = Vec::new();
    for _ in 0..IDLE {
        streams.extend(TcpStream::connect(local(port)).await);
    }
    std::future::pending().await
}
