//! A worker with only the TCP listener on a free port: memory, one disk with faults and the
//! service.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use prometheus::Registry;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use uniffle_client::block::{Block, IdLayout};
use uniffle_client::send::{Batch, require_size};
use uniffle_client::tcp::{TcpClient, read_reply};
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_testkit::eventually_in_no_time;
use uniffle_testkit::fault::Faults;
use uniffle_testkit::memory_disk::MemoryDisk;
use uniffle_testkit::service::{ServiceBuilder, quiet, sum_of};
use uniffle_wire::reply::Reply;
use uniffle_wire::request::{MemoryRequest, PartitionTarget, ReadRequest, SendBlock, SendRequest};
use uniffle_wire::types::{
    AppId, BlockId, Distribution, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId, TicketId,
};
use uniffle_worker::app::AppConfig;
use uniffle_worker::flush::FlushConfig;
use uniffle_worker::flush::policy::Limits;
use uniffle_worker::listeners::tcp::{TcpConfig, TcpServer};
use uniffle_worker::memory::{Memory, MemoryConfig};
use uniffle_worker::runtime::Tasks;
use uniffle_worker::service::{RegisterRequest, RequireRequest, Service};
use uniffle_worker::store::{ExtentData, ExtentWrite, LocalConfig, LocalStore};

const MIB: u64 = 1 << 20;
/// Real time after which a wait fails.
const WAIT_MAX: Duration = Duration::from_secs(180);
pub(crate) const APP: &str = "app";
pub(crate) const SHUFFLE: i32 = 1;
/// Registered partitions are 0..=99.
pub(crate) const PARTITION: PartitionId = PartitionId(2);

pub(crate) struct TcpFixture {
    pub(crate) service: Arc<Service>,
    pub(crate) memory: Arc<Memory>,
    pub(crate) store: Arc<LocalStore>,
    pub(crate) faults: Faults,
    pub(crate) registry: Registry,
    pub(crate) address: SocketAddr,
    pub(crate) clients: Tasks,
    serving: Tasks,
    background: Tasks,
}

pub(crate) fn key() -> ShuffleKey {
    ShuffleKey::new(AppId::parse(APP).unwrap(), ShuffleId(SHUFFLE))
}

/// Returns block `sequence` of the test's partition.
pub(crate) fn block(sequence: u32, length: u32) -> Block {
    block_of(PARTITION, sequence, length)
}

pub(crate) fn block_of(partition: PartitionId, sequence: u32, length: u32) -> Block {
    BlockGenerator::new(7, IdLayout::SPARK).block(partition, TaskAttemptId(3), sequence, length)
}

impl TcpFixture {
    pub(crate) async fn new() -> Self {
        Self::with(TcpConfig::default()).await
    }

    pub(crate) async fn with(config: TcpConfig) -> Self {
        let config = TcpConfig { own_threads: super::OWN_THREADS, ..config };
        let serving = Tasks::new();
        let memory = MemoryConfig {
            capacity_bytes: 64 * MIB,
            read_capacity_bytes: 8 * MIB,
            heap_bytes: 96 << 20,
            ticket_timeout: Duration::from_secs(300),
            tickets_max: 10_000,
            blocks_max: 1_000_000,
            backing: Default::default(),
            ..MemoryConfig::default()
        };
        let limits = Limits { high_watermark: 0.9, low_watermark: 0.5, ..quiet() };
        let default = ServiceBuilder::default();
        let flush = FlushConfig {
            limits,
            batch_bytes_max: 64 * MIB,
            tick: Duration::from_secs(3600),
            retry_pause_min: Duration::from_millis(100),
            retry_pause_max: Duration::from_secs(10),
            ..default.flush
        };
        let disks = vec![(Arc::new(MemoryDisk::new("disk", Some(256 * MIB))), Faults::default())];
        let local = LocalConfig { write_concurrency_per_disk: 1, ..LocalConfig::default() };
        let builder = ServiceBuilder {
            memory,
            flush,
            local,
            disks,
            expiry: None,
            apps: AppConfig::default(),
            ..ServiceBuilder::default()
        };
        let parts = builder.start().await;
        let (service, memory, store) =
            (Arc::clone(&parts.service), Arc::clone(&parts.memory), Arc::clone(parts.store()));
        let (faults, registry, background) = (parts.faults[0].clone(), parts.registry.clone(), parts.tasks);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        TcpServer::start(config, listener, Arc::clone(&service), &serving, &registry).unwrap();
        let fixture = Self {
            service,
            memory,
            store,
            faults,
            registry,
            address,
            clients: Tasks::new(),
            serving,
            background,
        };
        fixture.register(APP).await;
        fixture
    }

    pub(crate) async fn register(&self, app: &str) {
        let request = RegisterRequest {
            app,
            shuffle: SHUFFLE,
            ranges: vec![(0, 99)],
            user: "tester".to_owned(),
            distribution: Distribution::Normal,
            properties: HashMap::new(),
            remote_storage: None,
            from: None,
        };
        self.service.lifecycle.register(request).await.unwrap();
    }

    /// Returns a ticket for `bytes` bytes of payload.
    pub(crate) fn ticket(&self, app: &str, bytes: i32) -> TicketId {
        let partitions = [PARTITION.0];
        let request =
            RequireRequest { app, shuffle: SHUFFLE, bytes, partitions: &partitions, partition_sizes: &[] };
        TicketId(self.service.ingest.require_buffer(request).unwrap().ticket)
    }

    pub(crate) async fn client(&self) -> TcpClient {
        let (client, driver) = TcpClient::connect(self.address).await.unwrap();
        let stop = self.clients.cancelled();
        self.clients.spawn("tcp client", async move {
            tokio::select! {
                () = driver => {}
                () = stop => {}
            }
        });
        client
    }

    pub(crate) async fn raw(&self) -> Raw {
        Raw { stream: TcpStream::connect(self.address).await.unwrap() }
    }

    /// Returns a connection whose socket holds few unread replies.
    pub(crate) async fn raw_with_small_window(&self) -> Raw {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(64 << 10).unwrap();
        Raw { stream: socket.connect(self.address).await.unwrap() }
    }

    /// Sends `batch` as a client does.
    pub(crate) async fn send(&self, client: &TcpClient, batch: &Batch) {
        // The TCP client requires buffer for the encoded message too (docs/protocol.md §2.4).
        let ticket = self.ticket(APP, require_size(batch).unwrap() * 2);
        client.send(&key(), ticket, batch).await.unwrap();
    }

    /// Returns a valid send of `blocks` with a valid ticket, as a request that tests may corrupt.
    pub(crate) fn request(&self, request_id: i64, blocks: &[Block]) -> SendRequest {
        let bytes: u32 = blocks.iter().map(|block| block.meta.length + 32).sum();
        let ticket = self.ticket(APP, i32::try_from(bytes).unwrap());
        let blocks = blocks.iter().map(|block| SendBlock {
            block_id: block.meta.block_id.0,
            crc: i64::from(block.meta.crc),
            task_attempt_id: block.meta.task_attempt_id.0,
            data: block.data.clone(),
            servers: Vec::new(),
            uncompressed_length: i32::try_from(block.meta.uncompressed_length).unwrap(),
            free_memory: 0,
        });
        SendRequest {
            request_id,
            app: APP.to_owned(),
            shuffle: SHUFFLE,
            ticket: ticket.0,
            partitions: vec![(PARTITION.0, blocks.collect())],
            // A client's clock may have any time.
            timestamp_ms: i64::MAX,
        }
    }

    /// Writes `blocks` to the disk, bypassing memory.
    pub(crate) async fn store(&self, blocks: &[Block]) {
        let length = blocks.iter().map(|block| u64::from(block.meta.length)).sum();
        let data = ExtentData::Pieces(blocks.iter().map(|block| block.data.clone()).collect());
        let metas = blocks.iter().map(|block| block.meta).collect();
        let extent = ExtentWrite { partition: PARTITION, blocks: metas, length, data };
        self.store.handle(&key()).unwrap().write(vec![extent]).await.unwrap();
    }

    /// Returns the ids of blocks that a reader finds in memory.
    pub(crate) async fn blocks_in_memory(&self) -> Vec<BlockId> {
        let reply = self.client().await.read_memory(&key(), PARTITION, -1, 1 << 30, None).await.unwrap();
        let uniffle_wire::reply::ReplyAnswer::Memory(segments) = reply.answer else { panic!("{reply:?}") };
        segments.iter().map(|segment| BlockId(segment.block_id)).collect()
    }

    /// Returns the value of a counter or gauge, summed over all labels.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        sum_of(&self.registry, name)
    }

    /// Returns the charged bytes after the flusher's scan. It frees space of aborted sends in open
    /// segments.
    pub(crate) fn used_bytes(&self) -> u64 {
        drop(self.memory.candidates());
        self.memory.used_bytes()
    }

    /// Yields until `reached`. Paused time does not advance.
    pub(crate) async fn until(&self, what: &str, reached: impl Fn(&Self) -> bool) {
        let look = || if reached(self) { Ok(()) } else { Err("not reached".to_owned()) };
        eventually_in_no_time(what, WAIT_MAX, look).await;
    }

    /// Asserts that no task and no memory remains.
    pub(crate) async fn finish(self) {
        self.clients.cancel();
        self.clients.drained().await;
        self.service.lifecycle.unregister_app(APP).unwrap();
        self.serving.cancel();
        self.serving.drained().await;
        assert_eq!(self.metric("netty_active_connection"), 0.0);
        assert_eq!(self.metric("urpc_request_number"), 0.0);
        self.background.cancel();
        self.background.drained().await;
        self.memory.expire_tickets(uniffle_worker::clock::Instant::now() + Duration::from_secs(100_000));
        assert_eq!(self.used_bytes(), 0, "memory is still charged");
        assert_eq!(self.memory.block_count(), 0);
    }
}

/// A peer that sends arbitrary bytes.
pub(crate) struct Raw {
    pub(crate) stream: TcpStream,
}

impl Raw {
    pub(crate) async fn say(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }

    pub(crate) async fn hear(&mut self) -> Reply {
        self.try_hear().await.unwrap()
    }

    pub(crate) async fn try_hear(&mut self) -> io::Result<Reply> {
        read_reply(&mut self.stream).await
    }

    /// Expects the worker to close without a response.
    pub(crate) async fn expect_close(&mut self) {
        let mut rest = Vec::new();
        let end = self.stream.read_to_end(&mut rest).await;
        assert!(
            end.is_ok() || matches!(&end, Err(e) if e.kind() == io::ErrorKind::ConnectionReset),
            "{end:?}"
        );
        assert!(rest.is_empty(), "{rest:?}");
    }

    /// Expects the connection to serve requests.
    pub(crate) async fn expect_works(&mut self, fixture: &TcpFixture) {
        let before = fixture.blocks_in_memory().await;
        let sequence = 1_000_000 + u32::try_from(before.len()).unwrap();
        let request = fixture.request(4711, &[block(sequence, 10)]);
        self.say(&frame(&request)).await;
        let reply = self.hear().await;
        assert_eq!((reply.request_id, reply.status), (4711, 0), "{reply:?}");
        assert_eq!(fixture.blocks_in_memory().await.len(), before.len() + 1);
    }
}

/// Returns the frame of a memory read from the start of `partition`.
pub(crate) fn memory_frame(request_id: i64, partition: PartitionId, read_buffer_size: i32) -> Bytes {
    let target = PartitionTarget { request_id, app: APP, shuffle: SHUFFLE, partition: partition.0 };
    let request =
        MemoryRequest { target, last_block_id: -1, read_buffer_size, timestamp_ms: 0, task_filter: None };
    let mut out = BytesMut::new();
    ReadRequest::Memory(request).encode_frame(&mut out);
    out.freeze()
}

pub(crate) fn frame(request: &SendRequest) -> Bytes {
    let mut out = BytesMut::new();
    request.encode_frame(&mut out);
    out.freeze()
}
