//! The tier over a store in memory that fails on purpose.

mod cache;
mod chunks;
mod claims;
mod faults;
mod restarts;
mod segments;

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use prometheus::Registry;
use uniffle_io::buffers::HeapBuffers;
use uniffle_testkit::object_fault::FaultyObjects;
use uniffle_wire::index::records;
use uniffle_wire::types::{AppId, BlockId, BlockMeta, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId};

use super::{ObjectSettings, ObjectTier};
use crate::budget::Budget;
use crate::runtime::Tasks;
use crate::tiers::{
    ChunkRead, ExtentData, ExtentWrite, MetadataLog, Purge, ServedTier, StoreError, Tier, TierShuffle,
};

/// A process of the worker.
struct Process {
    store: FaultyObjects,
    tier: Arc<ObjectTier>,
    extents: Budget,
    tasks: Tasks,
}

fn settings() -> ObjectSettings {
    ObjectSettings {
        segment_bytes: 40_000,
        part_bytes: 8_000,
        making_bytes: 16 << 10,
        ..ObjectSettings::new("p/worker-1")
    }
}

impl Process {
    async fn start(store: &FaultyObjects) -> Self {
        Self::try_start(store).await.unwrap()
    }

    async fn try_start(store: &FaultyObjects) -> Result<Self, StoreError> {
        Self::with(store, settings()).await
    }

    async fn with(store: &FaultyObjects, settings: ObjectSettings) -> Result<Self, StoreError> {
        let (extents, tasks) = (Budget::new(u64::MAX), Tasks::new());
        let objects = Arc::new(store.clone());
        let tier = ObjectTier::open(objects, settings, &extents, tasks.clone(), &Registry::new()).await?;
        Ok(Self { store: store.clone(), tier, extents, tasks })
    }

    fn register(&self, key: &ShuffleKey) -> Arc<dyn TierShuffle> {
        Arc::clone(&self.tier).prepare(None).unwrap().unwrap()(key, &[]);
        self.tier.shuffle(key).unwrap()
    }

    fn log(&self, key: &ShuffleKey) -> Arc<dyn MetadataLog> {
        self.tier.metadata_log(key).unwrap()
    }

    /// A shuffle that the next process knows.
    async fn register_noted(&self, key: &ShuffleKey) -> Arc<dyn TierShuffle> {
        let shuffle = self.register(key);
        self.log(key).append(Bytes::from_static(b"registration")).await.unwrap();
        shuffle
    }

    async fn purge(&self, key: &ShuffleKey, why: Purge) {
        let keys = std::slice::from_ref(key);
        Arc::clone(&self.tier).forget(&key.app, keys, why).unwrap().await;
    }

    /// Blocks by id, each read by a request of its own, and the whole stream by one.
    async fn read(&self, key: &ShuffleKey, partition: i32) -> Result<BTreeMap<i64, Bytes>, StoreError> {
        let partition = PartitionId(partition);
        let index = self.tier.index(key, partition)?;
        let data_length = index.data_length;
        let index = all(index.chunks).await?;
        let mut found = BTreeMap::new();
        if data_length == 0 {
            return Ok(found);
        }
        let whole = (0, u32::try_from(data_length).unwrap());
        let whole = all(self.tier.data(key, partition, whole)?.chunks).await?;
        for record in records(&index) {
            let range = (record.offset.cast_unsigned(), record.length.cast_unsigned());
            let data = all(self.tier.data(key, partition, range)?.chunks).await?;
            let at = usize::try_from(record.offset).unwrap();
            assert_eq!(whole[at..at + data.len()], data);
            found.insert(record.block_id, data.into());
        }
        Ok(found)
    }

    /// Ends it as `kill -9` does.
    async fn kill(self) -> FaultyObjects {
        self.tasks.cancel();
        self.tasks.close();
        self.tasks.drained().await;
        self.store
    }
}

async fn all(mut read: Box<dyn ChunkRead>) -> Result<Vec<u8>, StoreError> {
    let mut bytes = Vec::new();
    while let Some(chunk) = read.next_chunk(&HeapBuffers).await? {
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

fn key(shuffle: i32) -> ShuffleKey {
    ShuffleKey::new(AppId::parse("app 1").unwrap(), ShuffleId(shuffle))
}

/// Bytes of a block, which its id gives.
fn content(id: i64, length: u32) -> Bytes {
    (0..length).map(|at| (i64::from(at) * 31 + id * 7).to_le_bytes()[0]).collect::<Vec<u8>>().into()
}

/// An extent of blocks with these ids, of `length` bytes each.
fn extent(partition: i32, ids: std::ops::Range<i64>, length: u32) -> ExtentWrite {
    let pieces: Vec<Bytes> = ids.clone().map(|id| content(id, length)).collect();
    let meta = |(id, bytes): (i64, &Bytes)| BlockMeta {
        block_id: BlockId(id),
        task_attempt_id: TaskAttemptId(1),
        length,
        uncompressed_length: length,
        crc: crc32fast::hash(bytes),
    };
    ExtentWrite {
        partition: PartitionId(partition),
        blocks: ids.zip(&pieces).map(meta).collect(),
        length: pieces.iter().map(|bytes| bytes.len() as u64).sum(),
        data: ExtentData::Pieces(pieces),
    }
}

fn expected(ids: std::ops::Range<i64>, length: u32) -> BTreeMap<i64, Bytes> {
    ids.map(|id| (id, content(id, length))).collect()
}

async fn segments(store: &FaultyObjects) -> Vec<(String, u64)> {
    store.objects().await.into_iter().filter(|(key, _)| key.contains("/s0")).collect()
}
