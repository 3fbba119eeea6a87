//! What every store promises the flusher and readers: one suite over local disks, over an HDFS in memory and over a
//! real one.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use futures::future::join_all;
use prometheus::Registry;
use uniffle_client::block::{Block, IdLayout};
use uniffle_io::Disk;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_testkit::memory_disk::MemoryDisk;
use uniffle_wire::index::records;
use uniffle_wire::types::{AppId, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId};
use uniffle_worker::memory::ReadPool;
use uniffle_worker::runtime::Tasks;
use uniffle_worker::tiers::hdfs::Connector;
use uniffle_worker::tiers::hdfs::fake::FakeFs;
use uniffle_worker::tiers::hdfs::fs::RemoteFs;
use uniffle_worker::tiers::{
    ExtentData, ExtentWrite, HdfsConfig, HdfsStore, LocalConfig, LocalStore, RemoteHandle, RemoteStorage,
    ShuffleHandle, StoreError, StoreErrorKind,
};

use crate::fixture::{FakeConnector, SERVER_ID, open, plain_connector};
use crate::reader::read_directory;
use crate::real::real;

/// A store as the flusher sees it, and what a reader finds in it.
enum Subject {
    Local(Arc<LocalStore>),
    Hdfs { store: Arc<HdfsStore>, fs: Arc<dyn RemoteFs>, path: String, root: String },
}

enum Handle {
    Local(ShuffleHandle),
    Hdfs(RemoteHandle),
}

impl Subject {
    async fn local() -> Self {
        let disks = (0..2).map(|n| Arc::new(MemoryDisk::new(&format!("/disk{n}"), None)) as Arc<dyn Disk>);
        let store = LocalStore::open(LocalConfig::default(), disks.collect(), &Registry::new()).await;
        Self::Local(store.unwrap())
    }

    fn hdfs(connector: Arc<dyn Connector>, fs: Arc<dyn RemoteFs>, path: &str, root: &str) -> Self {
        let config = HdfsConfig {
            server_id: SERVER_ID.to_owned(),
            partition_write_max_concurrency: 3,
            ..HdfsConfig::default()
        };
        let store = HdfsStore::new(config, connector, Tasks::new(), &Registry::new()).unwrap();
        Self::Hdfs { store, fs, path: path.to_owned(), root: root.to_owned() }
    }

    fn register(&self, key: &ShuffleKey) -> Handle {
        match self {
            Self::Local(store) => Handle::Local(store.register(key)),
            Self::Hdfs { store, path, .. } => {
                let storage = RemoteStorage { path: path.clone(), ..RemoteStorage::default() };
                store.register(key, &store.prepare(&storage).unwrap(), &[]);
                Handle::Hdfs(store.handle(key).unwrap())
            }
        }
    }

    async fn write(&self, handle: &Handle, partition: i32, blocks: &[Block]) -> Result<(), StoreError> {
        let extent = extent(partition, blocks);
        match (self, handle) {
            (Self::Local(store), Handle::Local(handle)) => {
                store.write_to(handle, vec![extent]).await.map(drop)
            }
            (Self::Hdfs { store, .. }, Handle::Hdfs(handle)) => store.write_to(handle, extent).await,
            _ => unreachable!("a handle of another store"),
        }
    }

    async fn read(&self, key: &ShuffleKey, partition: i32) -> BTreeMap<i64, Bytes> {
        match self {
            Self::Local(store) => read_local(store, key, PartitionId(partition)).await,
            Self::Hdfs { fs, root, .. } => {
                let path = format!("{root}/{}/{}/{partition}-{partition}", key.app, key.shuffle);
                read_directory(&**fs, &path, SERVER_ID).await
            }
        }
    }

    async fn purge(&self, key: &ShuffleKey) {
        match self {
            Self::Local(store) => store.purge(key).await,
            Self::Hdfs { store, .. } => {
                if let Some(removal) = store.forget_shuffles(&key.app, std::slice::from_ref(key)) {
                    removal.run().await;
                }
            }
        }
    }
}

async fn read_local(store: &LocalStore, key: &ShuffleKey, partition: PartitionId) -> BTreeMap<i64, Bytes> {
    let pool = ReadPool::new(8 << 20).unwrap();
    let mut found = BTreeMap::new();
    let Ok(mut read) = store.index(key, partition) else { return found };
    let mut index = Vec::new();
    while let Some(chunk) = read.next_chunk(&pool).await.unwrap() {
        index.extend_from_slice(&chunk);
    }
    let mut next = 0;
    for record in records(&index) {
        assert_eq!(record.offset, next, "blocks must lie side by side");
        next += i64::from(record.length);
        let (offset, length) = (record.offset.cast_unsigned(), record.length.cast_unsigned());
        let mut read = store.data(key, partition, offset, length).unwrap();
        let mut data = Vec::new();
        while let Some(chunk) = read.next_chunk(&pool).await.unwrap() {
            data.extend_from_slice(&chunk);
        }
        found.insert(record.block_id, data.into());
    }
    found
}

fn extent(partition: i32, blocks: &[Block]) -> ExtentWrite {
    let data: Vec<Bytes> = blocks.iter().map(|block| block.data.clone()).collect();
    ExtentWrite {
        partition: PartitionId(partition),
        blocks: blocks.iter().map(|block| block.meta).collect(),
        length: data.iter().map(|bytes| bytes.len() as u64).sum(),
        data: ExtentData::Pieces(data),
    }
}

fn blocks(partition: i32, numbers: std::ops::Range<u32>, bytes: u32) -> Vec<Block> {
    let generator = BlockGenerator::new(3, IdLayout::SPARK);
    numbers.map(|n| generator.block(PartitionId(partition), TaskAttemptId(1), n, bytes + n)).collect()
}

fn expected(blocks: &[Block]) -> BTreeMap<i64, Bytes> {
    blocks.iter().map(|block| (block.meta.block_id.0, block.data.clone())).collect()
}

fn key(app: &str, shuffle: i32) -> ShuffleKey {
    ShuffleKey::new(AppId::parse(app).unwrap(), ShuffleId(shuffle))
}

async fn suite(subject: &Subject) {
    batches_add_up(subject).await;
    batches_at_once_do_not_mix(subject).await;
    padding_is_not_data(subject).await;
    a_purged_shuffle_is_gone_and_its_name_is_free(subject).await;
}

async fn batches_add_up(subject: &Subject) {
    let key = key("app-1", 1);
    let handle = subject.register(&key);
    assert!(subject.read(&key, 0).await.is_empty());
    let (first, second, other) = (blocks(0, 0..5, 1000), blocks(0, 5..9, 70_000), blocks(1, 0..3, 10));
    subject.write(&handle, 0, &first).await.unwrap();
    assert_eq!(subject.read(&key, 0).await, expected(&first));
    subject.write(&handle, 1, &other).await.unwrap();
    subject.write(&handle, 0, &second).await.unwrap();
    assert_eq!(subject.read(&key, 0).await, expected(&[first, second].concat()));
    assert_eq!(subject.read(&key, 1).await, expected(&other));
    subject.purge(&key).await;
}

async fn batches_at_once_do_not_mix(subject: &Subject) {
    let key = key("app-1", 2);
    let handle = subject.register(&key);
    let batches: Vec<_> = (0..8).map(|n| blocks(0, n * 4..n * 4 + 4, 3000)).collect();
    let writes = batches.iter().map(|batch| subject.write(&handle, 0, batch));
    for written in join_all(writes).await {
        written.unwrap();
    }
    assert_eq!(subject.read(&key, 0).await, expected(&batches.concat()));
    subject.purge(&key).await;
}

async fn padding_is_not_data(subject: &Subject) {
    let key = key("app-1", 3);
    let handle = subject.register(&key);
    let blocks = blocks(0, 0..2, 5000);
    let mut page = uniffle_page(&blocks);
    for round in 0..2 {
        let mut extent = extent(0, &blocks);
        extent.data = ExtentData::Pieces(page.clone());
        // One padded piece more than the length says.
        if let (Subject::Hdfs { store, .. }, Handle::Hdfs(handle)) = (subject, &handle) {
            extent.data = ExtentData::Aligned(std::mem::take(&mut page));
            store.write_to(handle, extent).await.unwrap();
        } else if round == 0 {
            subject.write(&handle, 0, &blocks).await.unwrap();
        }
        page = uniffle_page(&blocks);
        assert_eq!(subject.read(&key, 0).await, expected(&blocks), "round {round}");
    }
    subject.purge(&key).await;
}

/// The blocks' bytes with zeroes up to a page's end.
fn uniffle_page(blocks: &[Block]) -> Vec<Bytes> {
    let mut bytes: Vec<u8> = blocks.iter().flat_map(|block| block.data.to_vec()).collect();
    bytes.resize(bytes.len().next_multiple_of(4096), 0);
    vec![bytes.into()]
}

async fn a_purged_shuffle_is_gone_and_its_name_is_free(subject: &Subject) {
    let (key, sibling) = (key("app-1", 4), key("app-1", 40));
    let (old, beside) = (subject.register(&key), subject.register(&sibling));
    let (first, second) = (blocks(0, 0..3, 100), blocks(0, 3..6, 200));
    subject.write(&old, 0, &first).await.unwrap();
    subject.write(&beside, 0, &first).await.unwrap();
    subject.purge(&key).await;
    assert!(subject.read(&key, 0).await.is_empty());
    let refused = subject.write(&old, 0, &first).await.unwrap_err();
    assert_eq!(refused.kind, StoreErrorKind::Purged);
    let new = subject.register(&key);
    assert_eq!(subject.write(&old, 0, &first).await.unwrap_err().kind, StoreErrorKind::Purged);
    subject.write(&new, 0, &second).await.unwrap();
    assert_eq!(subject.read(&key, 0).await, expected(&second), "nothing of the one before");
    assert_eq!(subject.read(&sibling, 0).await, expected(&first), "4 is not 40");
    subject.purge(&key).await;
    subject.purge(&sibling).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn local_disks_keep_the_contract() {
    suite(&Subject::local().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hdfs_in_memory_keeps_the_contract() {
    let fs = FakeFs::default();
    let subject = Subject::hdfs(
        Arc::new(FakeConnector(fs.clone())),
        Arc::new(fs.clone()),
        "hdfs://fake/uniffle",
        "/uniffle",
    );
    suite(&subject).await;
    assert_eq!(fs.files().len(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_real_hdfs_keeps_the_contract() {
    let Some(hdfs) = real().await else { return };
    let path = hdfs.url("/contract");
    let connector = plain_connector();
    let fs = open(&*connector, &path);
    suite(&Subject::hdfs(connector, fs, &path, "/contract")).await;
    assert_eq!(hdfs.list("/contract"), []);
}
