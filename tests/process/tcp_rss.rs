//! Resident memory when a thousand connections are in the middle of a 4 MiB frame and nothing can
//! be spilled.
//!
//! One worker is the real binary with a disk that counts as full; the other runs in a process of
//! its test with a disk whose writes hang. Accepted blocks stay in memory. Most frames have no
//! ticket: they must be drained, not buffered. The bound is capacity × 1.05 + 200 MiB
//! (docs/architecture.md §2.2).

#[allow(dead_code, reason = "made for the tests of the TCP listener")]
#[path = "../contract/tcp/fixture.rs"]
mod fixture;

/// For `fixture`: connections share the runtime.
const OWN_THREADS: usize = 0;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::sync::Barrier;
use uniffle_client::block::IdLayout;
use uniffle_client::grpc::ShuffleClient;
use uniffle_client::tcp::read_reply;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_testkit::fault::{Fault, Operation, Rule};
use uniffle_testkit::tools::alone;
use uniffle_testkit::worker::{Setup, WorkerProcess};
use uniffle_wire::request::{SendBlock, SendRequest};
use uniffle_wire::types::{AppId, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId};
use uniffle_worker::proto::{RequireBufferRequest, StatusCode};
use uniffle_worker::service::RequireRequest;

const CONNECTIONS: usize = 1000;
const BLOCK_BYTES: u32 = 4 << 20;
const CAPACITY_BYTES: u64 = 256 << 20;
const APP: &str = "application_1_1";
/// Placeholder for the ticket, distinct from all other bytes of the frame's head.
const TICKET: i64 = 0x1122_3344_5566_7788;
/// Placeholder for the partition.
const PARTITION: i32 = 0x0765_4321;
const PARTITIONS: i32 = 100;
/// More than the bytes before a frame's payload.
const HEAD_BYTES: usize = 256;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_beside_full_disk_stay_within_memory_bound() {
    let setup = Setup {
        name: "tcp_rss",
        capacity: "256MiB",
        disks: 1,
        // No memory is freed, so waiting for a ticket is useless.
        memory: "buffer_ticket_wait_sec = 0",
        // The first two belong to `[localfile_store]`, the preceding table: every disk is above
        // these.
        tables: "disk_high_watermark = 0.0002\ndisk_low_watermark = 0.0001\n[tcp]\nmax_connections = 1100\n",
        ..Setup::default()
    };
    let worker = tokio::task::spawn_blocking(move || WorkerProcess::start(&setup)).await.unwrap();
    let address = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let control = ShuffleClient::connect(address(worker.ready().grpc_port)).await.unwrap();
    let key = ShuffleKey::new(AppId::parse(APP).unwrap(), ShuffleId(0));
    control.register(&key, &[(0, PARTITIONS - 1)]).await.unwrap();

    let frame = frame(APP, 0);
    let halfway = Arc::new(Barrier::new(CONNECTIONS));
    let tcp = address(worker.ready().urpc_port.expect("the TCP listener is open by default"));
    let mut sends = tokio::task::JoinSet::new();
    // A second block with the same id would be dropped as a duplicate, hence as many partitions.
    for partition in (0..PARTITIONS).cycle().take(CONNECTIONS) {
        let stream = TcpStream::connect(tcp).await.unwrap();
        let ticket = ticket(&control, partition, frame.len()).await;
        sends.spawn(send(ticket, stream, (partition, frame.clone()), Arc::clone(&halfway)));
    }
    let (stored, refused) = answers(sends).await;
    let used = worker.metrics().expect("memory_used");
    // No block has left memory: the disk accepts nothing.
    let sent = f64::from(u32::try_from(stored).unwrap()) * f64::from(BLOCK_BYTES);
    assert!(used >= sent, "{stored} blocks are only {used} bytes in memory");
    let peak = worker.peak_resident_bytes();
    uniffle_testkit::say(&format!(
        "{stored} sends stored, {refused} refused, {used} bytes used, peak {peak} bytes resident"
    ));
    assert!(
        stored * u64::from(BLOCK_BYTES) > CAPACITY_BYTES / 2,
        "only {stored} sends were stored, so memory was not full"
    );
    assert_eq!(stored + refused, CONNECTIONS as u64);
    assert_bounded(peak, CAPACITY_BYTES);
    worker.assert_no_error_logged();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_beside_hung_disk_stay_within_memory_bound() {
    let this = "tcp_rss::frames_beside_hung_disk_stay_within_memory_bound";
    if !tokio::task::block_in_place(|| alone(this)) {
        return;
    }
    let fixture = fixture::TcpFixture::new().await;
    let capacity = fixture.memory.capacity_bytes();
    fixture.faults.add(Rule::always(Operation::Write, Fault::Hang));
    let frame = frame(fixture::APP, fixture::SHUFFLE);
    let size = i32::try_from(frame.len()).unwrap();
    let halfway = Arc::new(Barrier::new(CONNECTIONS));
    let mut sends = tokio::task::JoinSet::new();
    for partition in (0..PARTITIONS).cycle().take(CONNECTIONS) {
        let stream = TcpStream::connect(fixture.address).await.unwrap();
        let request = RequireRequest {
            app: fixture::APP,
            shuffle: fixture::SHUFFLE,
            bytes: size,
            partitions: &[partition],
            partition_sizes: &[size],
        };
        let ticket = fixture.service.ingest.require_buffer(request).ok().map(|grant| grant.ticket);
        sends.spawn(send(ticket, stream, (partition, frame.clone()), Arc::clone(&halfway)));
    }
    let (stored, refused) = answers(sends).await;
    // The refusals have triggered a flush, whose writes hang.
    fixture.until("a write hangs", |fixture| fixture.faults.hung() > 0).await;
    let peak = uniffle_testkit::worker::peak_resident_bytes(std::process::id());
    uniffle_testkit::say(&format!("{stored} sends stored, {refused} refused, peak {peak} bytes resident"));
    assert!(
        stored * u64::from(BLOCK_BYTES) > capacity / 2,
        "only {stored} sends were stored, so memory was not full"
    );
    assert_eq!(stored + refused, CONNECTIONS as u64);
    assert_bounded(peak, capacity);
    fixture.faults.clear();
    fixture.faults.release().await;
    fixture.finish().await;
}

fn assert_bounded(peak: u64, capacity: u64) {
    let bound = capacity + capacity / 20 + (200 << 20);
    assert!(peak <= bound, "{} MiB are resident, {} MiB are allowed", peak >> 20, bound >> 20);
}

/// Returns the numbers of stored and refused frames. Only frames with a ticket may be stored.
async fn answers(mut sends: tokio::task::JoinSet<(bool, StatusCode, String)>) -> (u64, u64) {
    let (mut stored, mut refused) = (0, 0);
    while let Some(answer) = sends.join_next().await {
        let (had_ticket, status, text) = answer.unwrap();
        assert_eq!(had_ticket, status == StatusCode::Success, "{status:?}: {text}");
        if had_ticket { stored += 1 } else { refused += 1 }
    }
    (stored, refused)
}

/// Requests a ticket for a frame of `bytes`. Returns `None` without free memory.
async fn ticket(control: &ShuffleClient, partition: i32, bytes: usize) -> Option<i64> {
    let size = i32::try_from(bytes).unwrap();
    let request = RequireBufferRequest {
        require_size: size,
        app_id: APP.to_owned(),
        shuffle_id: 0,
        partition_ids: vec![partition],
        partition_require_sizes: vec![size],
    };
    let grant = control.require_raw(request).await.unwrap();
    (grant.status() == StatusCode::Success).then_some(grant.require_buffer_id)
}

/// Returns a frame of one block, with the placeholders [`TICKET`] and [`PARTITION`].
fn frame(app: &str, shuffle: i32) -> Bytes {
    let block =
        BlockGenerator::new(7, IdLayout::SPARK).block(PartitionId(0), TaskAttemptId(1), 0, BLOCK_BYTES);
    let block = SendBlock {
        block_id: block.meta.block_id.0,
        crc: i64::from(block.meta.crc),
        task_attempt_id: block.meta.task_attempt_id.0,
        data: block.data,
        servers: Vec::new(),
        uncompressed_length: i32::try_from(BLOCK_BYTES).unwrap(),
        free_memory: 0,
    };
    let request = SendRequest {
        request_id: 1,
        app: app.to_owned(),
        shuffle,
        ticket: TICKET,
        partitions: vec![(PARTITION, vec![block])],
        timestamp_ms: 0,
    };
    let mut frame = BytesMut::new();
    request.encode_frame(&mut frame);
    frame.freeze()
}

/// Sends the frame in two halves and waits for all other senders in between. Returns whether it had
/// a ticket, and status and text of the response.
async fn send(
    ticket: Option<i64>,
    mut stream: TcpStream,
    (partition, frame): (i32, Bytes),
    halfway: Arc<Barrier>,
) -> (bool, StatusCode, String) {
    // A frame without a ticket names one that was never issued.
    let (had_ticket, ticket) = (ticket.is_some(), ticket.unwrap_or(-1));
    let mut head = frame[..HEAD_BYTES].to_vec();
    put(&mut head, TICKET.to_be_bytes(), ticket.to_be_bytes());
    put(&mut head, PARTITION.to_be_bytes(), partition.to_be_bytes());
    stream.write_all(&head).await.unwrap();
    let half = frame.len() / 2;
    stream.write_all(&frame[HEAD_BYTES..half]).await.unwrap();
    halfway.wait().await;
    stream.write_all(&frame[half..]).await.unwrap();
    let reply = read_reply(&mut stream).await.unwrap();
    (had_ticket, StatusCode::try_from(reply.status).unwrap(), reply.message)
}

/// Replaces `placeholder` with `value` everywhere; each block names its partition again.
fn put<const N: usize>(head: &mut [u8], placeholder: [u8; N], value: [u8; N]) {
    let mut found = 0;
    while let Some(at) = head.windows(N).position(|bytes| bytes == placeholder) {
        head[at..at + N].copy_from_slice(&value);
        found += 1;
    }
    assert!(found > 0, "the frame's head is longer than {HEAD_BYTES} bytes");
}
