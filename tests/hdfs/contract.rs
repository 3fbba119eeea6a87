//! The contract between tiers, flusher and readers. One suite runs over local disks, HDFS and
//! object stores, real and in memory, and over the third tier of the test kit.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use futures::future::join_all;
use prometheus::Registry;
use uniffle_client::block::{Block, IdLayout};
use uniffle_io::Disk;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_testkit::fake_fs::FakeFs;
use uniffle_testkit::memory_disk::MemoryDisk;
use uniffle_testkit::third_tier::ThirdTier;
use uniffle_wire::index::records;
use uniffle_wire::types::{AppId, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId};
use uniffle_worker::log::IdSet;
use uniffle_worker::memory::{Budget, ReadPool};
use uniffle_worker::remote::hdfs::RemoteFs;
use uniffle_worker::remote::hdfs::{HdfsConfig, HdfsStore, RemoteConnector};
use uniffle_worker::runtime::Tasks;
use uniffle_worker::store::{
    ChunkRead, ExtentData, ExtentWrite, LocalConfig, LocalStore, Purge, RemoteStorage, ServedTier,
    StoreError, StoreErrorKind, Tier, TierShuffle,
};

use crate::fixture::{FakeConnector, SERVER_ID, open, plain_connector};
use crate::reader::read_directory;
use crate::real::real;

/// A tier as the flusher and a reader see it.
struct Subject {
    tier: Arc<dyn Tier>,
    /// Remote storage of the registration, and access to its files.
    files: Option<(RemoteStorage, Arc<dyn RemoteFs>, String)>,
}

impl Subject {
    fn served(tier: Arc<dyn Tier>) -> Self {
        Self { tier, files: None }
    }

    async fn local(disks: Vec<Arc<dyn Disk>>) -> Self {
        let (extents, registry) = (Budget::new(u64::MAX), Registry::new());
        // Accepts any fill level of the machine's disk.
        let config = LocalConfig { high_watermark: 1.0, low_watermark: 1.0, ..LocalConfig::default() };
        Self::served(LocalStore::open(config, disks, &extents, &registry).await.unwrap())
    }

    fn hdfs(connector: Arc<dyn RemoteConnector>, fs: Arc<dyn RemoteFs>, path: &str, root: &str) -> Self {
        let config = HdfsConfig {
            server_id: SERVER_ID.to_owned(),
            partition_write_max_concurrency: 3,
            ..HdfsConfig::default()
        };
        let tier = HdfsStore::new(config, connector, Tasks::new(), &Registry::new()).unwrap();
        let storage = RemoteStorage { path: path.to_owned(), ..RemoteStorage::default() };
        Self { tier, files: Some((storage, fs, root.to_owned())) }
    }

    fn register(&self, key: &ShuffleKey) -> Arc<dyn TierShuffle> {
        let storage = self.files.as_ref().map(|(storage, ..)| storage);
        let admit = Arc::clone(&self.tier).prepare(storage).unwrap().expect("the tier refused the shuffle");
        admit(key, &[]);
        self.tier.shuffle(key).unwrap()
    }

    async fn read(&self, key: &ShuffleKey, partition: i32) -> BTreeMap<i64, Bytes> {
        match (&self.files, self.tier.served()) {
            (None, Some(tier)) => read_served(tier, key, PartitionId(partition)).await,
            (Some((_, fs, root)), None) => {
                let path = format!("{root}/{}/{}/{partition}-{partition}", key.app, key.shuffle);
                read_directory(&**fs, &path, SERVER_ID).await
            }
            _ => unreachable!("a tier is read through the worker or by clients"),
        }
    }

    async fn purge(&self, key: &ShuffleKey) {
        let keys = std::slice::from_ref(key);
        if let Some(deletion) = Arc::clone(&self.tier).forget(&key.app, keys, Purge::Shuffles) {
            deletion.await;
        }
    }

    /// Asserts that the blocks read and the ids reported as present agree with `blocks`.
    async fn assert_holds(&self, key: &ShuffleKey, partition: i32, blocks: &[Block]) {
        assert_eq!(self.read(key, partition).await, expected(blocks));
        let mut present = IdSet::default();
        self.tier.visit_present(key, PartitionId(partition), &mut |id| present.add(id)).await.unwrap();
        assert_eq!(
            present,
            blocks.iter().map(|block| block.meta.block_id.0.unsigned_abs()).collect::<IdSet>()
        );
    }
}

async fn write(shuffle: &Arc<dyn TierShuffle>, partition: i32, blocks: &[Block]) -> Result<(), StoreError> {
    shuffle.write(vec![extent(partition, blocks)].into()).await
}

async fn read_all(mut read: Box<dyn ChunkRead>) -> Vec<u8> {
    let pool = ReadPool::new(8 << 20).unwrap();
    let mut bytes = Vec::new();
    while let Some(chunk) = read.next_chunk(&pool).await.unwrap() {
        bytes.extend_from_slice(&chunk);
    }
    bytes
}

async fn read_served(
    tier: &dyn ServedTier,
    key: &ShuffleKey,
    partition: PartitionId,
) -> BTreeMap<i64, Bytes> {
    let mut found = BTreeMap::new();
    let Ok(index) = tier.index(key, partition) else { return found };
    let (length, data_length) = (index.length, index.data_length);
    let index = read_all(index.chunks).await;
    assert_eq!(index.len() as u64, length);
    let mut next = 0;
    for record in records(&index) {
        assert_eq!(record.offset, next, "blocks must be contiguous");
        next += i64::from(record.length);
        let (offset, length) = (record.offset.cast_unsigned(), record.length.cast_unsigned());
        let data = read_all(tier.data(key, partition, offset, length).unwrap().chunks).await;
        found.insert(record.block_id, data.into());
    }
    assert_eq!(next.cast_unsigned(), data_length);
    let beyond = tier.data(key, partition, data_length, 1).unwrap_err();
    assert_eq!(beyond.kind, StoreErrorKind::InvalidRange);
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
    let shuffle = subject.register(&key);
    assert!(subject.read(&key, 0).await.is_empty());
    let (first, second, other) = (blocks(0, 0..5, 1000), blocks(0, 5..9, 70_000), blocks(1, 0..3, 10));
    write(&shuffle, 0, &first).await.unwrap();
    subject.assert_holds(&key, 0, &first).await;
    write(&shuffle, 1, &other).await.unwrap();
    write(&shuffle, 0, &second).await.unwrap();
    subject.assert_holds(&key, 0, &[first, second].concat()).await;
    assert!(subject.tier.usage(&key).bytes > 285_000);
    assert_eq!(subject.read(&key, 1).await, expected(&other));
    subject.purge(&key).await;
}

async fn batches_at_once_do_not_mix(subject: &Subject) {
    let key = key("app-1", 2);
    let shuffle = subject.register(&key);
    let batches: Vec<_> = (0..8).map(|n| blocks(0, n * 4..n * 4 + 4, 3000)).collect();
    let writes = batches.iter().map(|batch| write(&shuffle, 0, batch));
    for written in join_all(writes).await {
        written.unwrap();
    }
    assert_eq!(subject.read(&key, 0).await, expected(&batches.concat()));
    subject.purge(&key).await;
}

async fn padding_is_not_data(subject: &Subject) {
    let key = key("app-1", 3);
    let shuffle = subject.register(&key);
    let blocks = blocks(0, 0..2, 5000);
    let mut extent = extent(0, &blocks);
    extent.data = ExtentData::Aligned(page(&blocks));
    shuffle.write(vec![extent].into()).await.unwrap();
    subject.assert_holds(&key, 0, &blocks).await;
    subject.purge(&key).await;
}

/// Returns the blocks' bytes, padded with zeroes to a whole page.
fn page(blocks: &[Block]) -> Vec<Bytes> {
    let mut bytes: Vec<u8> = blocks.iter().flat_map(|block| block.data.to_vec()).collect();
    bytes.resize(bytes.len().next_multiple_of(4096), 0);
    vec![bytes.into()]
}

async fn a_purged_shuffle_is_gone_and_its_name_is_free(subject: &Subject) {
    let (key, sibling) = (key("app-1", 4), key("app-1", 40));
    let (old, beside) = (subject.register(&key), subject.register(&sibling));
    let (first, second) = (blocks(0, 0..3, 100), blocks(0, 3..6, 200));
    write(&old, 0, &first).await.unwrap();
    write(&beside, 0, &first).await.unwrap();
    subject.purge(&key).await;
    assert!(subject.read(&key, 0).await.is_empty());
    let refused = write(&old, 0, &first).await.unwrap_err();
    assert_eq!(refused.kind, StoreErrorKind::Purged);
    let new = subject.register(&key);
    assert_eq!(write(&old, 0, &first).await.unwrap_err().kind, StoreErrorKind::Purged);
    write(&new, 0, &second).await.unwrap();
    assert_eq!(
        subject.read(&key, 0).await,
        expected(&second),
        "blocks of the previous registration were read"
    );
    assert_eq!(subject.read(&sibling, 0).await, expected(&first));
    subject.purge(&key).await;
    subject.purge(&sibling).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_disks_fulfil_the_contract() {
    let disks = (0..2).map(|n| Arc::new(MemoryDisk::new(&format!("/disk{n}"), None)) as Arc<dyn Disk>);
    suite(&Subject::local(disks.collect()).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn local_disks_fulfil_the_contract() {
    let dir = tempfile::tempdir().unwrap();
    let config =
        LocalConfig { paths: vec![dir.path().join("a"), dir.path().join("b")], ..LocalConfig::default() };
    config.paths.iter().for_each(|path| std::fs::create_dir(path).unwrap());
    suite(&Subject::local(config.real_disks()).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn third_tier_fulfils_the_contract() {
    suite(&Subject::served(Arc::new(ThirdTier::default()))).await;
}

#[cfg(feature = "object")]
mod objects {
    use futures::TryStreamExt as _;
    use object_store::ObjectStore;
    use object_store::path::Path;
    use tokio::task::block_in_place;
    use uniffle_testkit::object_fault::FaultyObjects;
    use uniffle_testkit::s3::S3Server;
    use uniffle_testkit::s3::weed::Weed;
    use uniffle_worker::store::object::claim::claim_key;
    use uniffle_worker::store::object::client::Client;
    use uniffle_worker::store::object::{Bucket, ObjectSettings};
    use uniffle_worker::store::offload::OffloadTier;
    use uniffle_worker::store::{MetadataTier as _, ObjectConfig};

    use super::*;

    async fn open(
        store: &Arc<dyn ObjectStore>,
        settings: ObjectSettings,
        extents: &Budget,
        registry: &Registry,
    ) -> Arc<OffloadTier> {
        let tasks = Tasks::new();
        let opened = Bucket::open(Arc::clone(store), settings, extents, tasks.clone(), registry);
        let objects = opened.await.unwrap();
        OffloadTier::without_disks(objects, extents, tasks, registry).await.unwrap()
    }

    async fn suite_over(store: &Arc<dyn ObjectStore>, parts_bytes: &[usize]) {
        for &part_bytes in parts_bytes {
            let settings = ObjectSettings { part_bytes, ..ObjectSettings::new("shuffle/worker") };
            let (extents, registry) = (Budget::new(u64::MAX), Registry::new());
            let opened = open(store, settings, &extents, &registry).await;
            suite(&Subject::served(opened)).await;
            let mut remaining: Vec<_> =
                store.list(None).map_ok(|object| object.location).try_collect().await.unwrap();
            remaining.retain(|path| !path.as_ref().contains("/!log/"));
            assert_eq!(remaining, [Path::from(claim_key("shuffle/worker"))]);
            assert_eq!(extents.used(), 0);
        }
    }

    async fn suite_at(config: &ObjectConfig) {
        let client = Client::open(config, &Tasks::new(), &Registry::new()).unwrap();
        // The minimum part size of S3.
        suite_over(&client.store(), &[5 << 20]).await;
        the_newer_process_has_the_prefix(&client.store()).await;
    }

    async fn the_newer_process_has_the_prefix(store: &Arc<dyn ObjectStore>) {
        let open = async || {
            let (extents, registry) = (Budget::new(u64::MAX), Registry::new());
            let settings = ObjectSettings::new("shuffle/claimed");
            open(store, settings, &extents, &registry).await
        };
        let (older, key) = (open().await, key("app-1", 1));
        Arc::clone(&older).prepare(None).unwrap().unwrap()(&key, &[]);
        let log = older.metadata_log(&key).unwrap();
        log.append(Bytes::from_static(b"acknowledged")).await.unwrap();
        let newer = open().await;
        let error = log.append(Bytes::from_static(b"too late")).await.unwrap_err();
        assert_eq!(error.kind, StoreErrorKind::InUse, "{error}");
        assert!(error.to_string().contains("shuffle/claimed/!claim"), "{error}");
        assert_eq!(newer.take_recovered().shuffles.len(), 1);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn memory_object_store_fulfils_the_contract() {
        let store = FaultyObjects::default();
        // Objects of one request, and multipart uploads.
        suite_over(&(Arc::new(store.clone()) as Arc<dyn ObjectStore>), &[8 << 20, 5000]).await;
        assert_eq!(store.open_uploads(), 0);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn s3_store_fulfils_the_contract() {
        let server = S3Server::start().await;
        suite_at(&server.config("uniffle")).await;
        server.stop().await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn seaweedfs_fulfils_the_contract() {
        let Some(weed) = block_in_place(|| Weed::start("the contract of tiers on SeaweedFS")) else { return };
        suite_at(&weed.config("uniffle")).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_hdfs_fulfils_the_contract() {
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
async fn real_hdfs_fulfils_the_contract() {
    let Some(hdfs) = real().await else { return };
    let path = hdfs.url("/contract");
    let connector = plain_connector();
    let fs = open(&*connector, &path);
    suite(&Subject::hdfs(connector, fs, &path, "/contract")).await;
    assert_eq!(hdfs.list("/contract"), []);
}
