//! The worker's parts over an HDFS, in memory or real, with or without local disks; and a client
//! that remembers every acknowledged block.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use prometheus::Registry;
use tokio::time::{Instant, sleep};
use uniffle_client::block::{Block, IdLayout};
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_testkit::fake_fs::FakeFs;
use uniffle_testkit::fault::Faults;
use uniffle_testkit::memory_disk::MemoryDisk;
use uniffle_testkit::service::{ServiceBuilder, ServiceFixture, quiet, sum_of};
use uniffle_wire::index::records;
use uniffle_wire::types::{Distribution, PartitionId, TaskAttemptId};
use uniffle_worker::app::AppConfig;
use uniffle_worker::flush::policy::Limits;
use uniffle_worker::flush::{FlushConfig, Flusher};
use uniffle_worker::memory::{Memory, MemoryConfig};
use uniffle_worker::remote::hdfs::RemoteFs;
use uniffle_worker::remote::hdfs::client::HdfsConnector;
use uniffle_worker::remote::hdfs::hadoop::HadoopConf;
use uniffle_worker::remote::hdfs::kerberos::Login;
use uniffle_worker::remote::hdfs::{HdfsConfig, HdfsStore, RemoteConnector, RemoteLocation, RemoteTarget};
use uniffle_worker::runtime::Tasks;
use uniffle_worker::service::{
    BlockHeader, IncomingSend, MemoryReadRequest, ReadRange, RegisterRequest, RequestedPartition,
    RequireRequest, Service,
};
use uniffle_worker::store::{LocalStore, RemoteStorage, StoreError, Tier};

use crate::reader::read_directory;

pub(crate) const SERVER_ID: &str = "10.0.0.1-21100";
pub(crate) const APP: &str = "app-1";
/// Large enough that flushes happen only when a test requests them.
const CAPACITY: u64 = 64 << 20;
const SETTLE_DEADLINE: Duration = Duration::from_secs(600);

/// Returns the same file system in memory for all users.
#[derive(Debug)]
pub(crate) struct FakeConnector(pub(crate) FakeFs);

impl RemoteConnector for FakeConnector {
    fn target(&self, storage: &RemoteStorage, location: RemoteLocation) -> Result<RemoteTarget, StoreError> {
        Ok(RemoteTarget { location, conf: storage.conf.clone(), user: None })
    }

    fn connect(&self, _: &RemoteTarget) -> Result<Arc<dyn RemoteFs>, StoreError> {
        Ok(Arc::new(self.0.clone()))
    }
}

/// Returns a connector without settings and login, like a worker without `HADOOP_CONF_DIR`.
pub(crate) fn plain_connector() -> Arc<dyn RemoteConnector> {
    Arc::new(HdfsConnector { conf: HadoopConf::default(), login: Login::default() })
}

/// Opens the file system of a path for the assertions of a test.
pub(crate) fn open(connector: &dyn RemoteConnector, path: &str) -> Arc<dyn RemoteFs> {
    let location = RemoteLocation::parse(path).unwrap();
    connector.connect(&RemoteTarget { location, conf: Vec::new(), user: None }).unwrap()
}

/// Options of a test.
#[derive(Debug, Clone)]
pub(crate) struct Setup {
    pub(crate) local: bool,
    pub(crate) hdfs: HdfsConfig,
    pub(crate) cold_bytes: u64,
    pub(crate) huge_partition_bytes: u64,
}

impl Default for Setup {
    fn default() -> Self {
        let hdfs = HdfsConfig { server_id: SERVER_ID.to_owned(), in_flight_max: 16, ..HdfsConfig::default() };
        Self { local: false, hdfs, cold_bytes: 100_000, huge_partition_bytes: u64::MAX }
    }
}

pub(crate) struct HdfsFixture {
    pub(crate) service: Arc<Service>,
    pub(crate) memory: Arc<Memory>,
    pub(crate) flusher: Arc<Flusher>,
    pub(crate) hdfs: Arc<HdfsStore>,
    pub(crate) local: Option<Arc<LocalStore>>,
    pub(crate) disk_faults: Faults,
    pub(crate) registry: Registry,
    /// The worker's file system, for assertions.
    pub(crate) fs: Arc<dyn RemoteFs>,
    pub(crate) root: String,
    storage: RemoteStorage,
    tasks: Tasks,
    generator: BlockGenerator,
    /// Acknowledged blocks by shuffle and partition.
    pub(crate) all: BTreeMap<(i32, i32), Vec<Block>>,
}

impl HdfsFixture {
    /// Starts over a file system in memory.
    pub(crate) async fn fake(setup: Setup) -> (Self, FakeFs) {
        let fs = FakeFs::default();
        let connector = Arc::new(FakeConnector(fs.clone()));
        (Self::start(setup, connector, Arc::new(fs.clone()), "hdfs://fake:8020/uniffle").await, fs)
    }

    /// Starts over a real HDFS.
    pub(crate) async fn real(setup: Setup, path: &str) -> Self {
        let connector = plain_connector();
        let fs = open(&*connector, path);
        Self::start(setup, connector, fs, path).await
    }

    pub(crate) async fn start(
        setup: Setup,
        connector: Arc<dyn RemoteConnector>,
        fs: Arc<dyn RemoteFs>,
        path: &str,
    ) -> Self {
        let default = ServiceBuilder::default();
        let hdfs =
            HdfsStore::new(setup.hdfs.clone(), connector, default.tasks.clone(), &default.registry).unwrap();
        let memory = MemoryConfig {
            capacity_bytes: CAPACITY,
            ticket_timeout: Duration::from_secs(60),
            tickets_max: 1000,
            blocks_max: 100_000,
            backing: Default::default(),
            ..default.memory
        };
        let flush = FlushConfig {
            limits: Limits { huge_partition_bytes: setup.huge_partition_bytes, ..quiet() },
            cold_bytes: setup.cold_bytes,
            batch_bytes_max: 1 << 20,
            retry_pause_min: Duration::from_millis(50),
            retry_pause_max: Duration::from_secs(2),
            ..default.flush
        };
        let disk_faults = Faults::default();
        let disk = (Arc::new(MemoryDisk::new("/disk", None)), disk_faults.clone());
        let builder = ServiceBuilder {
            memory,
            flush,
            apps: AppConfig { heartbeat_timeout: Duration::from_secs(300), ..AppConfig::default() },
            disks: setup.local.then_some(disk).into_iter().collect(),
            more_tiers: vec![Arc::clone(&hdfs) as Arc<dyn Tier>],
            expiry: None,
            ..default
        };
        let ServiceFixture { service, memory, flusher, store: local, registry, tasks, .. } =
            builder.start().await;
        let root = RemoteLocation::parse(path).unwrap().path().to_owned();
        let storage = RemoteStorage { path: path.to_owned(), ..RemoteStorage::default() };
        let generator = BlockGenerator::new(7, IdLayout::SPARK);
        let all = BTreeMap::new();
        Self {
            service,
            memory,
            flusher,
            hdfs,
            local,
            disk_faults,
            registry,
            fs,
            root,
            storage,
            tasks,
            generator,
            all,
        }
    }

    /// Registers partitions 0 to 9, one range each.
    pub(crate) async fn register(&self, shuffle: i32) {
        self.register_with(shuffle, Some(self.storage.clone())).await.unwrap();
    }

    pub(crate) async fn register_with(
        &self,
        shuffle: i32,
        storage: Option<RemoteStorage>,
    ) -> Result<(), String> {
        let request = RegisterRequest {
            app: APP,
            shuffle,
            ranges: (0..10).map(|partition| (partition, partition)).collect(),
            user: "alice".to_owned(),
            distribution: Distribution::Normal,
            properties: HashMap::new(),
            remote_storage: storage,
            from: None,
        };
        self.service.lifecycle.register(request).await.map_err(|error| error.to_string())
    }

    /// Sends `count` blocks of `bytes`; they are acknowledged when this returns.
    pub(crate) fn push(&mut self, shuffle: i32, partition: i32, count: u32, bytes: u32) {
        let sent = self.all.entry((shuffle, partition)).or_default();
        let first = u32::try_from(sent.len()).unwrap();
        let blocks: Vec<Block> = (first..first + count)
            .map(|n| self.generator.block(PartitionId(partition), TaskAttemptId(1), n, bytes))
            .collect();
        let size = i32::try_from(count * bytes).unwrap();
        let partitions = [partition];
        let request =
            RequireRequest { app: APP, shuffle, bytes: size, partitions: &partitions, partition_sizes: &[] };
        let ticket = self.service.ingest.require_buffer(request).unwrap().ticket;
        let header =
            IncomingSend { app: APP, shuffle, ticket, message_bytes: u64::from(count * bytes) + 1000 };
        let mut session = self.service.ingest.begin_send(header).unwrap();
        session.partition(partition).unwrap();
        for block in &blocks {
            session.begin_block(block.meta.length).unwrap();
            session.write(&block.data).unwrap();
            let header = BlockHeader {
                block_id: block.meta.block_id.0,
                length: i32::try_from(block.meta.length).unwrap(),
                uncompressed_length: 9,
                crc: i64::from(block.meta.crc),
                task_attempt_id: 1,
            };
            session.end_block(header).unwrap();
        }
        session.commit().unwrap();
        sent.extend(blocks);
    }

    /// Returns the blocks that a client finds in memory, on local disks, and in HDFS, in the order
    /// of reads.
    pub(crate) async fn visible(&self, shuffle: i32, partition: i32) -> [BTreeMap<i64, Bytes>; 3] {
        let memory = self.in_memory(shuffle, partition);
        let local = self.on_disks(shuffle, partition).await;
        [memory, local, self.in_hdfs(shuffle, partition).await]
    }

    pub(crate) fn directory(&self, shuffle: i32, partition: i32) -> String {
        format!("{}/{APP}/{shuffle}/{partition}-{partition}", self.root)
    }

    pub(crate) async fn in_hdfs(&self, shuffle: i32, partition: i32) -> BTreeMap<i64, Bytes> {
        read_directory(&*self.fs, &self.directory(shuffle, partition), SERVER_ID).await
    }

    fn in_memory(&self, shuffle: i32, partition: i32) -> BTreeMap<i64, Bytes> {
        let mut found = BTreeMap::new();
        let mut last_block_id = -1;
        loop {
            let request = MemoryReadRequest {
                app: APP,
                shuffle,
                partition,
                last_block_id,
                read_buffer_size: 1 << 20,
                task_filter: None,
                window: None,
            };
            let read = self.service.reads.read_memory(request).unwrap().read;
            let Some(last) = read.blocks.last() else { return found };
            last_block_id = last.block_id.0;
            let mut bytes = Bytes::from(read.data.concat());
            for block in &read.blocks {
                found.insert(block.block_id.0, bytes.split_to(block.length as usize));
            }
        }
    }

    pub(crate) async fn on_disks(&self, shuffle: i32, partition: i32) -> BTreeMap<i64, Bytes> {
        let mut found = BTreeMap::new();
        if self.local.is_none() {
            return found;
        }
        let reads = &self.service.reads;
        let (limits, target) = (reads.read_limits(), RequestedPartition { app: APP, shuffle, partition });
        let mut answer = reads.read_index(&limits, target).await.unwrap();
        let mut index = Vec::new();
        while let Some(chunk) = answer.chunks.next().await.unwrap() {
            index.extend_from_slice(&chunk);
        }
        for record in records(&index) {
            let range = ReadRange { offset: record.offset, length: record.length };
            let mut answer = reads.read_data(&limits, target, range).await.unwrap();
            let mut data = Vec::new();
            while let Some(chunk) = answer.chunks.next().await.unwrap() {
                data.extend_from_slice(&chunk);
            }
            found.insert(record.block_id, Bytes::from(data));
        }
        found
    }

    /// Asserts that every acknowledged block is in some tier, byte for byte.
    pub(crate) async fn assert_nothing_missing(&self) {
        let missing = self.missing().await;
        assert!(missing.is_empty(), "blocks are missing: {missing:?}");
    }

    /// Waits until every acknowledged block is in some tier. A torn file hides its blocks until it
    /// is closed.
    pub(crate) async fn wait_until_nothing_missing(&self) {
        let start = Instant::now();
        loop {
            let missing = self.missing().await;
            if missing.is_empty() {
                return;
            }
            assert!(start.elapsed() < SETTLE_DEADLINE, "blocks are missing: {missing:?}");
            sleep(Duration::from_millis(200)).await;
        }
    }

    /// Returns the acknowledged blocks that no reader would find.
    async fn missing(&self) -> Vec<String> {
        let mut missing = Vec::new();
        for ((shuffle, partition), blocks) in &self.all {
            let tiers = self.visible(*shuffle, *partition).await;
            for block in blocks {
                let id = block.meta.block_id.0;
                let found: Vec<_> = tiers.iter().filter_map(|tier| tier.get(&id)).collect();
                if found.is_empty() {
                    missing.push(format!("block {id} of {shuffle}/{partition}"));
                }
                assert!(found.iter().all(|bytes| **bytes == block.data), "block {id} has other bytes");
            }
        }
        missing
    }

    /// Starts a flush of everything.
    pub(crate) fn begin_flush(&self) {
        self.flusher.flush_all();
    }

    /// Waits until no flush is in flight.
    pub(crate) async fn settled(&self) {
        self.eventually("everything is stored", || match self.flusher.unfinished() {
            0 => Ok(()),
            remaining => Err(format!("{remaining} batches")),
        })
        .await;
    }

    pub(crate) async fn flush(&self) {
        self.begin_flush();
        self.settled().await;
    }

    pub(crate) async fn eventually(&self, what: &str, mut look: impl FnMut() -> Result<(), String>) {
        let start = Instant::now();
        while let Err(complaint) = look() {
            assert!(start.elapsed() < SETTLE_DEADLINE, "{what}: {complaint}");
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Returns the sum of a metric over its labels.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        sum_of(&self.registry, name)
    }

    /// Unregisters the application, and asserts that no data and no task is left.
    pub(crate) async fn finish(self) {
        drop(self.service.lifecycle.unregister_app(APP));
        self.end().await;
    }

    /// Like [`HdfsFixture::finish`], for an application that is already gone.
    pub(crate) async fn end(self) {
        let start = Instant::now();
        let app = format!("{}/{APP}", self.root);
        loop {
            let remaining = [
                ("bytes in memory", self.memory.budget().used()),
                ("bytes in flight", self.memory.in_flight_bytes()),
                ("batches", self.flusher.unfinished() as u64),
                ("shuffles", self.hdfs.shuffle_count() as u64),
                ("bytes on disks", self.local.as_ref().map_or(0, |local| local.used_bytes())),
                ("entries in HDFS", self.fs.list(&app).await.map_or(0, |entries| entries.len() as u64)),
            ];
            let remaining: Vec<_> = remaining.iter().filter(|(_, count)| *count != 0).collect();
            if remaining.is_empty() {
                break;
            }
            assert!(start.elapsed() < SETTLE_DEADLINE, "resources are not released: {remaining:?}");
            sleep(Duration::from_millis(20)).await;
        }
        self.tasks.cancel();
        tokio::time::timeout(SETTLE_DEADLINE, self.tasks.drained()).await.expect("tasks are still running");
    }
}
