//! Tests of the tier with an in-memory store that injects faults.

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
use uniffle_wire::types::{AppId, PartitionId, ShuffleId, ShuffleKey};

use super::{Bucket, ObjectSettings};
use crate::runtime::Tasks;
use crate::store::offload::OffloadTier;
use crate::store::test_blocks::{self, content, expected, extent, read_to_end};
use crate::store::{
    ChunkRead, MaintainedTier as _, MetadataTier as _, Purge, RegistrationLog, ServedTier, StoreError, Tier,
    TierShuffle,
};
use uniffle_base::budget::Budget;

impl Bucket {
    /// Returns the number of batches waiting for a segment.
    fn waiting(&self, key: &ShuffleKey) -> usize {
        self.find(key).map_or(0, |shuffle| shuffle.queue.len())
    }

    /// Returns the bytes in use in the read cache.
    fn cached_bytes(&self) -> u64 {
        self.core.cache.as_ref().map_or(0, |cache| cache.used_bytes())
    }
}

/// A process of the worker.
struct Process {
    store: FaultyObjects,
    tier: Arc<OffloadTier>,
    extents: Budget,
    tasks: Tasks,
}

fn settings() -> ObjectSettings {
    ObjectSettings {
        segment_bytes: 40_000,
        part_bytes: 8_000,
        segment_heap_bytes: 16 << 10,
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
        let registry = Registry::new();
        let object = Bucket::open(objects, settings, &extents, tasks.clone(), &registry).await?;
        let tier = OffloadTier::without_disks(object, &extents, tasks.clone(), &registry).await?;
        Ok(Self { store: store.clone(), tier, extents, tasks })
    }

    fn register(&self, key: &ShuffleKey) -> Arc<dyn TierShuffle> {
        Arc::clone(&self.tier).prepare(None).unwrap().unwrap()(key, &[]);
        self.tier.shuffle(key).unwrap()
    }

    fn log(&self, key: &ShuffleKey) -> Arc<dyn RegistrationLog> {
        self.tier.metadata_log(key).unwrap()
    }

    /// Registers a shuffle and a record of it, so that the next process recovers it.
    async fn register_noted(&self, key: &ShuffleKey) -> Arc<dyn TierShuffle> {
        let shuffle = self.register(key);
        self.log(key).append(Bytes::from_static(b"registration")).await.unwrap();
        shuffle
    }

    async fn purge(&self, key: &ShuffleKey, why: Purge) {
        let keys = std::slice::from_ref(key);
        Arc::clone(&self.tier).forget(&key.app, keys, why).unwrap().await;
    }

    /// Reads the blocks of a partition by id, like a client.
    async fn read(&self, key: &ShuffleKey, partition: i32) -> Result<BTreeMap<i64, Bytes>, StoreError> {
        test_blocks::read(&*self.tier, key, partition).await
    }

    /// Ends the process like `kill -9`.
    async fn kill(self) -> FaultyObjects {
        self.tasks.cancel();
        self.tasks.close();
        self.tasks.drained().await;
        self.store
    }
}

fn key(shuffle: i32) -> ShuffleKey {
    ShuffleKey::new(AppId::parse("app 1").unwrap(), ShuffleId(shuffle))
}

async fn segments(store: &FaultyObjects) -> Vec<(String, u64)> {
    store.objects().await.into_iter().filter(|(key, _)| key.contains("/s0")).collect()
}

/// Returns the keys of the metadata log's objects.
async fn log_objects(store: &FaultyObjects) -> Vec<String> {
    store.objects().await.into_iter().map(|(key, _)| key).filter(|key| key.contains("/!log/")).collect()
}

/// Waits until the store has `wanted` segments.
async fn until_segments(store: &FaultyObjects, wanted: usize) {
    for _ in 0..1000 {
        if segments(store).await.len() == wanted {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("found {:?} instead of {wanted} segments", segments(store).await);
}
