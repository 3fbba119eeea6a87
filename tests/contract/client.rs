//! The client crate and its examples against real workers in this process, over real sockets. The
//! remote files of one test are a fake.

#[path = "../../crates/uniffle-client/examples/word_count/job.rs"]
mod word_count;

/// The example of the crate's README.
mod quick_start {
    include!("../../crates/uniffle-client/examples/quick_start.rs");

    const _: fn() -> Result<(), Error> = main;

    pub(super) async fn run_at(coordinator: String) -> Result<Vec<u8>, Error> {
        run(&[coordinator]).await
    }
}

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep, timeout};
use uniffle_client::grpc::{ReadOptions, ShuffleClient};
use uniffle_client::types::{BlockId, PartitionId, ShuffleId, TaskAttemptId};
use uniffle_client::{
    Backoff, Block, BoxFuture, ClientOptions, Cluster, Error, IdLayout, RemoteDirectory, RemoteFile,
    RemoteFiles, Replicas, Shuffle, ShuffleHandle, StorageType, TaskFilter, Transport,
};
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_testkit::config::ConfigLines;
use uniffle_wire::index::IndexRecord;
use uniffle_worker::server::Worker;

const WAIT_MAX: Duration = Duration::from_secs(60);

struct Node {
    worker: Worker,
    _dir: TempDir,
}

impl Node {
    /// Starts a worker on free ports with its own directory.
    async fn start(capacity: &str, top: &str, tables: &str) -> Self {
        let dir = tempfile::Builder::new().prefix("uniffle-client-").tempdir().unwrap();
        let top = format!("urpc_port = 0\nheartbeat_interval_seconds = \"100ms\"\n{top}");
        let local = "healthy_check_min_disks = 1";
        let lines = ConfigLines { capacity, top: &top, local, tables, ..ConfigLines::default() };
        Self { worker: lines.start(&[dir.path().join("data")]).await, _dir: dir }
    }

    fn address(&self) -> String {
        self.worker.addresses().grpc.to_string()
    }

    /// Returns the id that assignments contain.
    fn id(&self) -> String {
        let addresses = self.worker.addresses();
        format!("127.0.0.1-{}-{}", addresses.grpc.port(), addresses.tcp.unwrap().port())
    }

    async fn stop(self) {
        timeout(WAIT_MAX, self.worker.stop()).await.expect("the worker did not stop");
    }
}

fn options() -> ClientOptions {
    let backoff = |attempts| Backoff {
        attempts,
        first: Duration::from_millis(10),
        longest: Duration::from_millis(100),
    };
    ClientOptions::default().with(|options| {
        options.no_buffer = backoff(600);
        options.failures = backoff(3);
        options.rpc_timeout = Duration::from_secs(20);
        options.heartbeat_interval = Duration::from_millis(500);
        options.send_bytes_max = 1 << 20;
        options.read_buffer_bytes = 1 << 20;
    })
}

/// Returns the content of block `sequence` of a task.
fn content(partition: i32, task: i64, sequence: u32, length: u32) -> Bytes {
    let blocks = BlockGenerator::new(5, IdLayout::SPARK);
    blocks.block(PartitionId(partition), TaskAttemptId(task), sequence, length).data
}

async fn write_task(shuffle: &Shuffle, task: i64, partitions: i32, blocks: u32, length: u32) {
    let mut writer = shuffle.writer(TaskAttemptId(task)).unwrap();
    for sequence in 0..blocks {
        for partition in 0..partitions {
            writer.write(PartitionId(partition), content(partition, task, sequence, length)).await.unwrap();
        }
    }
    let totals = writer.finish().await.unwrap();
    assert_eq!(totals.blocks, u64::from(blocks) * u64::try_from(partitions).unwrap());
}

/// Asserts that partitions `0..partitions` contain exactly `blocks` blocks of each of `tasks`.
async fn assert_reads(shuffle: &Shuffle, tasks: &[i64], partitions: i32, blocks: u32, length: u32) {
    for partition in 0..partitions {
        let reader = shuffle.reader(PartitionId(partition), &TaskFilter::all()).await.unwrap();
        let read = timeout(WAIT_MAX, reader.read_all()).await.unwrap().unwrap();
        let read: BTreeMap<BlockId, Block> =
            read.into_iter().map(|block| (block.meta.block_id, block)).collect();
        assert_eq!(read.len(), tasks.len() * blocks as usize);
        for &task in tasks {
            for sequence in 0..blocks {
                let id =
                    IdLayout::SPARK.block_id(sequence, PartitionId(partition), TaskAttemptId(task)).unwrap();
                assert_eq!(read[&id].data, content(partition, task, sequence, length), "{partition} {task}");
            }
        }
    }
}

/// Sends 32 MB through 16 MiB of memory, so that part of it is read from disk, over both
/// transports.
#[tokio::test(flavor = "multi_thread")]
async fn blocks_are_read_from_memory_and_disk_over_both_transports() {
    const LENGTH: u32 = 100_000;
    let node = Node::start("16MiB", "", "").await;
    for (transport, id) in [(Transport::Grpc, "both-grpc"), (Transport::Tcp, "both-tcp")] {
        let options = options().with(|options| options.transport = transport);
        let cluster = Cluster::new([node.address()], options.clone()).unwrap();
        let application = cluster.application(id).await.unwrap();
        let small = application.register_shuffle(ShuffleId(0), 2).await.unwrap();
        write_task(&small, 1, 2, 3, 1000).await;
        assert_reads(&small, &[1], 2, 3, 1000).await;

        // Another client, as in another process, writes and reads with only the handle.
        let large = application.register_shuffle(ShuffleId(1), 4).await.unwrap();
        let handle = ShuffleHandle::decode(&large.handle().encode()).unwrap();
        let elsewhere = Cluster::new([node.address()], options).unwrap();
        let large = elsewhere.attach(handle).unwrap();
        let (one, two) = (large.clone(), large.clone());
        tokio::join!(write_task(&one, 1, 4, 40, LENGTH), write_task(&two, 2, 4, 40, LENGTH));
        assert_reads(&large, &[1, 2], 4, 40, LENGTH).await;

        // A filtered reader receives the blocks of its tasks.
        let filter = TaskFilter::of([TaskAttemptId(2)]);
        let read = large.reader(PartitionId(3), &filter).await.unwrap().read_all().await.unwrap();
        assert_eq!(read.len(), 40);
        assert!(read.iter().all(|block| block.meta.task_attempt_id == TaskAttemptId(2)));

        large.unregister().await.unwrap();
        application.unregister().await.unwrap();
    }
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn readme_example_reads_what_it_writes() {
    let node = Node::start("16MiB", "", "").await;
    assert_eq!(quick_start::run_at(node.address()).await.unwrap(), b"the records of partition 3");
    node.stop().await;
}

/// A replica that stops before a write, or between write and read, only costs time.
#[tokio::test(flavor = "multi_thread")]
async fn three_replicas_survive_one_stopped_worker() {
    let first = Node::start("32MiB", "", "").await;
    let quorum = format!("coordinator_quorum = [\"{}\"]\n", first.address());
    let (second, third) = (Node::start("32MiB", &quorum, "").await, Node::start("32MiB", &quorum, "").await);
    let replicas = Replicas { total: 3, write: 2, read: 2 };
    for (transport, id) in [(Transport::Grpc, "replicas-grpc"), (Transport::Tcp, "replicas-tcp")] {
        let options = options().with(|options| (options.transport, options.replicas) = (transport, replicas));
        let cluster = Cluster::new([first.address()], options).unwrap();
        let application = cluster.application(id).await.unwrap();
        let shuffle = until_registered(&application, 3).await;
        write_task(&shuffle, 1, 6, 4, 10_000).await;
        assert_reads(&shuffle, &[1], 6, 4, 10_000).await;
        application.unregister().await.unwrap();
    }
    let options = options().with(|options| options.replicas = replicas);
    let cluster = Cluster::new([first.address()], options).unwrap();
    let application = cluster.application("replicas-stopped").await.unwrap();
    let shuffle = until_registered(&application, 3).await;
    write_task(&shuffle, 1, 6, 4, 10_000).await;
    second.stop().await;
    assert_reads(&shuffle, &[1], 6, 4, 10_000).await;
    write_task(&shuffle, 2, 6, 4, 10_000).await;
    assert_reads(&shuffle, &[1, 2], 6, 4, 10_000).await;

    // Without two of three replicas, writes and reads have no quorum and fail.
    third.stop().await;
    let mut writer = shuffle.writer(TaskAttemptId(3)).unwrap();
    writer.write(PartitionId(0), content(0, 3, 0, 100)).await.unwrap();
    let error = writer.finish().await.unwrap_err();
    assert!(matches!(error, Error::WriteQuorum { acknowledged: 1, needed: 2, .. }), "{error}");
    let error = shuffle.reader(PartitionId(0), &TaskFilter::all()).await.unwrap_err();
    assert!(matches!(error, Error::ReadQuorum { answered: 1, needed: 2, .. }), "{error}");
    drop((application, shuffle));
    first.stop().await;
}

/// Registers as soon as the coordinator knows enough servers.
async fn until_registered(application: &uniffle_client::Application, servers: usize) -> Shuffle {
    let start = Instant::now();
    loop {
        match application.register_shuffle(ShuffleId(0), 6).await {
            Ok(shuffle) => {
                assert_eq!(shuffle.handle().assignment.servers().len(), servers);
                return shuffle;
            }
            Err(error) => assert!(start.elapsed() < WAIT_MAX, "{error}"),
        }
        sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn cluster_works_with_one_of_three_coordinators() {
    let node = Node::start("16MiB", "", "").await;
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let refusing = closed.local_addr().unwrap().to_string();
    drop(closed);
    // The kernel accepts connections, but nobody responds.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addresses = [refusing.clone(), silent.local_addr().unwrap().to_string(), node.address()];
    let quick = options().with(|options| options.rpc_timeout = Duration::from_secs(2));
    let cluster = Cluster::new(&addresses, quick.clone()).unwrap();
    let application = cluster.application("quorum").await.unwrap();
    let shuffle = application.register_shuffle(ShuffleId(0), 2).await.unwrap();
    write_task(&shuffle, 1, 2, 1, 10).await;
    assert_reads(&shuffle, &[1], 2, 1, 10).await;
    let conf = cluster.coordinators().client_conf().await.unwrap();
    let storage = conf.iter().find(|(key, _)| key == "rss.storage.type").map(|(_, value)| value.as_str());
    assert_eq!(storage.unwrap().parse::<StorageType>().unwrap(), StorageType::MemoryLocalfile);
    assert_eq!(cluster.coordinators().remote_storage(application.id()).await.unwrap(), None);
    application.unregister().await.unwrap();

    let nowhere = Cluster::new([refusing], quick).unwrap();
    let error = nowhere.application("nowhere").await.unwrap_err();
    assert!(matches!(error, Error::Call { .. }), "{error}");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_blocks_are_listed_in_error() {
    let node = Node::start("16MiB", "", "").await;
    let cluster = Cluster::new([node.address()], options()).unwrap();
    let application = cluster.application("missing").await.unwrap();
    let shuffle = application.register_shuffle(ShuffleId(0), 1).await.unwrap();
    write_task(&shuffle, 1, 1, 2, 100).await;
    let phantom = IdLayout::SPARK.block_id(9, PartitionId(0), TaskAttemptId(2)).unwrap();
    let single = ShuffleClient::connect(node.worker.addresses().grpc).await.unwrap();
    single.report(shuffle.key(), TaskAttemptId(2), &[(PartitionId(0), vec![phantom])]).await.unwrap();
    let mut reader = shuffle.reader(PartitionId(0), &TaskFilter::all()).await.unwrap();
    assert_eq!(reader.expected_blocks(), 3);
    for _ in 0..2 {
        assert!(reader.next().await.unwrap().is_some());
    }
    for _ in 0..2 {
        let error = reader.next().await.unwrap_err();
        let Error::MissingBlocks { missing, expected: 3, .. } = &error else { panic!("{error}") };
        assert_eq!((missing.count, missing.first.as_slice()), (1, [phantom].as_slice()));
        assert!(error.to_string().contains(&phantom.to_string()), "{error}");
    }
    // Without that task the partition is complete.
    let filter = TaskFilter::of([TaskAttemptId(1)]);
    let read = shuffle.reader(PartitionId(0), &filter).await.unwrap().read_all().await.unwrap();
    assert_eq!(read.len(), 2);

    assert!(matches!(shuffle.reader(PartitionId(1), &filter).await.unwrap_err(), Error::Invalid(_)));
    let mut writer = shuffle.writer(TaskAttemptId(3)).unwrap();
    assert!(matches!(writer.write(PartitionId(0), Bytes::new()).await.unwrap_err(), Error::Invalid(_)));
    application.unregister().await.unwrap();
    let error = writer.write(PartitionId(0), Bytes::from_static(b"x")).await;
    error.expect("the error must be returned by `finish`, not by `write`");
    let error = writer.finish().await.unwrap_err();
    let says_why = format!("{:?}", error).contains("NoRegister");
    assert!(says_why && matches!(error, Error::WriteQuorum { .. }), "{error:?}");
    node.stop().await;
}

/// Files in memory, by path.
#[derive(Debug, Default)]
struct FakeFiles(BTreeMap<String, Bytes>);

#[derive(Debug)]
struct FakeFile(Bytes);

impl RemoteFiles for FakeFiles {
    fn list<'a>(
        &'a self,
        _: &'a RemoteDirectory,
        directory: &'a str,
    ) -> BoxFuture<'a, io::Result<Vec<String>>> {
        let names = self.0.keys().filter_map(|path| path.strip_prefix(directory)?.strip_prefix('/'));
        let names = names.map(str::to_owned).collect();
        Box::pin(async { Ok(names) })
    }

    fn open<'a>(
        &'a self,
        _: &'a RemoteDirectory,
        path: &'a str,
    ) -> BoxFuture<'a, io::Result<Arc<dyn RemoteFile>>> {
        let file = self.0.get(path).cloned().ok_or_else(|| io::Error::from(io::ErrorKind::NotFound));
        Box::pin(async { Ok(Arc::new(FakeFile(file?)) as Arc<dyn RemoteFile>) })
    }
}

impl RemoteFile for FakeFile {
    fn length(&self) -> u64 {
        self.0.len() as u64
    }

    fn read(&self, offset: u64, length: usize) -> BoxFuture<'_, io::Result<Bytes>> {
        let start = usize::try_from(offset).unwrap();
        let data = self.0.slice(start..start + length);
        Box::pin(async { Ok(data) })
    }
}

impl FakeFiles {
    /// Adds a pair of files as a server writes them.
    fn add(&mut self, stem: &str, blocks: &[&Block]) {
        let (mut index, mut data) = (Vec::new(), Vec::new());
        for block in blocks {
            index.extend(IndexRecord::new(&block.meta, data.len() as u64).encode());
            data.extend_from_slice(&block.data);
        }
        self.0.insert(format!("{stem}.index"), index.into());
        self.0.insert(format!("{stem}.data"), data.into());
    }
}

/// Reads blocks that are neither in memory nor on disk from the remote files of their worker.
#[tokio::test(flavor = "multi_thread")]
async fn blocks_only_in_remote_files_are_read() {
    const ROOT: &str = "hdfs://namenode:8020/rss";
    let tables = format!("[embedded_coordinator]\nremote_storage_path = [\"{ROOT}\"]\n");
    let node = Node::start("16MiB", "", &tables).await;
    let generator = BlockGenerator::new(5, IdLayout::SPARK);
    let blocks: Vec<Block> = (0..6)
        .map(|number| generator.block(PartitionId(1), TaskAttemptId(7), number, 500 + number))
        .collect();
    let mut files = FakeFiles::default();
    let stem = |server: &str, number: u32| format!("{ROOT}/remote/0/1-1/{server}_{number}_0");
    files.add(&stem(&node.id(), 0), &[&blocks[0], &blocks[1]]);
    files.add(&stem(&node.id(), 1), &[&blocks[1], &blocks[2]]);
    // Damaged data, missing data and half a record.
    files.add(&stem(&node.id(), 2), &[&blocks[3], &blocks[4]]);
    files.add(&stem(&node.id(), 3), &[&blocks[3], &blocks[4]]);
    let damage = |files: &mut FakeFiles, name: String, change: fn(&mut Vec<u8>)| {
        let mut bytes = files.0[&name].to_vec();
        change(&mut bytes);
        files.0.insert(name, bytes.into());
    };
    damage(&mut files, stem(&node.id(), 2) + ".data", |bytes| bytes[0] ^= 1);
    damage(&mut files, stem(&node.id(), 3) + ".data", |bytes| bytes.truncate(600));
    damage(&mut files, stem(&node.id(), 3) + ".index", |bytes| bytes.extend([0; 13]));
    // An index without data, and a file of another server whose id has the same prefix.
    files.0.insert(stem(&node.id(), 4) + ".index", Bytes::new());
    files.add(&stem(&(node.id() + "9"), 0), &[&blocks[5]]);

    let options = options().with(|options| {
        options.storage = StorageType::MemoryLocalfileHdfs;
        options.remote_files = Some(Arc::new(files));
    });
    let cluster = Cluster::new([node.address()], options).unwrap();
    let application = cluster.application("remote").await.unwrap();
    let shuffle = application.register_shuffle(ShuffleId(0), 2).await.unwrap();
    assert_eq!(shuffle.handle().remote_storage.as_ref().unwrap().path, ROOT);
    write_task(&shuffle, 1, 2, 2, 100).await;
    let single = ShuffleClient::connect(node.worker.addresses().grpc).await.unwrap();
    let report = async |task: i64, blocks: &[Block]| {
        let ids = blocks.iter().map(|block| block.meta.block_id).collect();
        single.report(shuffle.key(), TaskAttemptId(task), &[(PartitionId(1), ids)]).await.unwrap();
    };
    report(7, &blocks[..5]).await;
    let read = shuffle.reader(PartitionId(1), &TaskFilter::all()).await.unwrap().read_all().await.unwrap();
    assert_eq!(read.len(), 7);
    for block in &blocks[..5] {
        let found = read.iter().find(|found| found.meta.block_id == block.meta.block_id);
        assert_eq!(found.map(|found| &found.data), Some(&block.data));
    }
    report(7, &blocks[5..]).await;
    let reader = shuffle.reader(PartitionId(1), &TaskFilter::all()).await.unwrap();
    let error = reader.read_all().await.unwrap_err();
    let Error::MissingBlocks { missing, .. } = &error else { panic!("{error}") };
    assert_eq!(missing.first, [blocks[5].meta.block_id]);
    application.unregister().await.unwrap();
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn example_counts_words() {
    let node = Node::start("16MiB", "", "").await;
    for transport in [Transport::Grpc, Transport::Tcp] {
        let options = options().with(|options| options.transport = transport);
        let counts = timeout(WAIT_MAX, word_count::run(&node.address(), options)).await.unwrap().unwrap();
        assert_eq!(counts, word_count::expected());
    }
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn example_ignores_stored_blocks_of_its_failed_attempt() {
    let node = Node::start("16MiB", "", "").await;
    let (application, shuffle) = word_count::register(&node.address(), options()).await.unwrap();
    let successful = word_count::map(&shuffle).await.unwrap();
    let single = ShuffleClient::connect(node.worker.addresses().grpc).await.unwrap();
    let mut stored = Vec::new();
    for partition in (0..word_count::PARTITIONS).map(PartitionId) {
        let read = single.read_partition(shuffle.key(), partition, &ReadOptions::default()).await.unwrap();
        stored.extend(read.blocks.keys().map(|id| IdLayout::SPARK.task_of(*id)));
    }
    let failed = word_count::failed_attempt().unwrap();
    assert!(stored.contains(&failed), "the failed attempt has sent nothing: {stored:?}");
    assert!(successful.iter().all(|task| stored.contains(task) && *task != failed));
    assert_eq!(word_count::reduce(&shuffle, &successful).await.unwrap(), word_count::expected());
    application.unregister().await.unwrap();
    node.stop().await;
}
