//! Tests of offload: the tier above in-memory disks and an in-memory store with injected faults.
//! Disks and store survive the process. A store that refuses all later calls stands for a kill.

mod damaged;
mod guards;
mod offloads;
mod reregistration;
mod restarts;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use prometheus::Registry;
use uniffle_io::Disk;
use uniffle_io::buffers::HeapBuffers;
use uniffle_testkit::memory_disk::MemoryDisk;
use uniffle_testkit::object_fault::FaultyObjects;
use uniffle_wire::index::FILLER_BLOCK_ID;
use uniffle_wire::types::{AppId, PartitionId, ShuffleId, ShuffleKey};

use super::policy::{OffloadCandidate, Watermarks};
use super::{LocalDisks, OffloadSettings, OffloadTier};
use crate::log::{Record, RegistrationRecord};
use crate::runtime::Tasks;
use crate::store::object::{Bucket, ObjectSettings};
use crate::store::test_blocks::{self, content, expected, extent, read_to_end};
use crate::store::{
    DrainableTier as _, ExtentWrite, LocalConfig, MetadataTier as _, Purge, Recovered, ServedTier,
    StoreError, Tier,
};
use uniffle_base::budget::Budget;

/// Disks, store and configuration that survive a process.
#[derive(Clone)]
struct Fixture {
    disks: Vec<MemoryDisk>,
    store: FaultyObjects,
    /// `localfile_store.require_mounted`.
    require_mounted: Option<bool>,
}

impl Fixture {
    fn new() -> Self {
        let disks = ["/a", "/b"].map(|name| MemoryDisk::new(name, None)).to_vec();
        Self { disks, store: FaultyObjects::default(), require_mounted: None }
    }

    /// Returns the same store with new disks, which the configuration declares to be new.
    fn on_an_empty_machine(&self) -> Self {
        Self { store: self.store.clone(), require_mounted: Some(false), ..Self::new() }
    }

    /// Returns the same store and configuration with empty directories, as if the disks were not
    /// mounted.
    fn unmounted(&self) -> Self {
        Self { disks: Self::new().disks, ..self.clone() }
    }

    async fn start(&self) -> Process {
        self.try_start().await.unwrap()
    }

    async fn try_start(&self) -> Result<Process, StoreError> {
        let (memory, tasks) = (Budget::new(u64::MAX), Tasks::new());
        let objects =
            ObjectSettings { segment_bytes: 40_000, part_bytes: 8_000, ..ObjectSettings::new("p/worker-1") };
        let registry = Registry::new();
        let object =
            Bucket::open(Arc::new(self.store.clone()), objects, &memory, tasks.clone(), &registry).await?;
        let settings = OffloadSettings {
            watermarks: Watermarks { high: 0.6, low: 0.5 },
            cold_bytes: 30_000,
            pass_bytes: 100_000,
        };
        let config = LocalConfig {
            index_cache_bytes: 0,
            data_log_bytes: 50_000,
            require_mounted: self.require_mounted,
            ..LocalConfig::default()
        };
        let disks = self.disks.iter().map(|disk| Arc::new(disk.clone()) as Arc<dyn Disk>).collect();
        let local = LocalDisks { config, disks };
        let tier = OffloadTier::open(settings, local, object, &memory, tasks.clone(), &registry).await?;
        Ok(Process { fixture: self.clone(), tier, tasks })
    }

    /// Returns the number of data files on the disks.
    fn data_files(&self) -> usize {
        let files = self.disks.iter().flat_map(|disk| disk.files());
        files
            .filter(|path| path.starts_with("apps") && path.extension().is_some_and(|it| it == "data"))
            .count()
    }

    async fn segments(&self) -> usize {
        self.store.objects().await.iter().filter(|(key, _)| key.contains("/s0")).count()
    }
}

/// A process of the worker.
struct Process {
    fixture: Fixture,
    tier: Arc<OffloadTier>,
    tasks: Tasks,
}

impl Process {
    fn admit(&self, key: &ShuffleKey) {
        Arc::clone(&self.tier).prepare(None).unwrap().unwrap()(key, &[]);
    }

    async fn register(&self, key: &ShuffleKey) {
        self.admit(key);
        let note = Record::Registration(RegistrationRecord {
            user: "ann".to_owned(),
            ..RegistrationRecord::default()
        });
        self.append_record(key, &note.encode()).await.unwrap();
    }

    async fn append_record(&self, key: &ShuffleKey, record: &[u8]) -> Result<(), StoreError> {
        self.tier.metadata_log(key).unwrap().append(Bytes::copy_from_slice(record)).await
    }

    async fn write(&self, key: &ShuffleKey, extents: Vec<ExtentWrite>) {
        self.tier.shuffle(key).unwrap().write(extents.into()).await.unwrap();
    }

    /// Offloads the oldest data of a shuffle until none is left.
    async fn offload_all(&self, key: &ShuffleKey) -> Result<(), StoreError> {
        for _ in 0..1000 {
            if !self.offload_once(key).await? {
                return Ok(());
            }
        }
        panic!("the offload does not end");
    }

    /// Offloads data that the policy selects, until it selects none. Then records the end of a
    /// drain. Returns the number of failures.
    async fn offload_candidates(&self) -> usize {
        let mut failed = 0;
        for _ in 0..100 {
            let Some((wanted, shuffle)) = self.tier.next() else {
                self.until_known().await;
                self.tier.record_drained().await;
                return failed;
            };
            failed += usize::from(self.tier.offload_candidate(wanted, &shuffle).await.is_err());
        }
        panic!("the offload does not end");
    }

    /// Waits until the store knows all records of the log.
    async fn until_known(&self) {
        let log = self.tier.object.log();
        while !(log.is_begun() && log.knows(log.end_position())) {
            self.tier.object.known(log.end_position()).await.unwrap();
        }
    }

    async fn offload_once(&self, key: &ShuffleKey) -> Result<bool, StoreError> {
        let shuffle = self.tier.find(key).unwrap();
        self.tier.offload_candidate(OffloadCandidate::Oldest(0), &shuffle).await
    }

    /// Returns the blocks of a partition by id, read as a client reads them.
    async fn read(&self, key: &ShuffleKey, partition: i32) -> Result<BTreeMap<i64, Bytes>, StoreError> {
        let mut blocks = test_blocks::read(&*self.tier, key, partition).await?;
        // Its records represent gaps.
        blocks.remove(&FILLER_BLOCK_ID);
        Ok(blocks)
    }

    /// Returns the bytes of a partition that are in objects.
    fn offloaded_bytes(&self, key: &ShuffleKey, partition: i32) -> u64 {
        let view = self.tier.local.view(key, PartitionId(partition)).unwrap();
        view.extents.iter().filter(|extent| extent.is_in_object()).map(|extent| extent.length).sum()
    }

    async fn index(&self, key: &ShuffleKey, partition: PartitionId) -> Result<(Vec<u8>, u64), StoreError> {
        test_blocks::index(&*self.tier, key, partition).await
    }

    async fn purge(&self, key: &ShuffleKey) {
        let keys = std::slice::from_ref(key);
        Arc::clone(&self.tier).forget(&key.app, keys, Purge::Shuffles).unwrap().await;
    }

    /// Ends the process without a flush: cancels its tasks and waits for them.
    async fn kill(self) -> Fixture {
        self.tasks.cancel();
        self.tasks.close();
        self.tasks.drained().await;
        self.fixture
    }
}

/// Returns the recovered state, and the distinct records of each shuffle.
async fn recovered_records(process: &Process) -> (Recovered, BTreeMap<ShuffleKey, Vec<Bytes>>) {
    let mut recovered = process.tier.take_recovered();
    let mut records: BTreeMap<ShuffleKey, Vec<Bytes>> = BTreeMap::new();
    while let Some((key, record)) = recovered.records.next().await.unwrap() {
        let of_one = records.entry(key).or_default();
        if !of_one.contains(&record) {
            of_one.push(record);
        }
    }
    (recovered, records)
}

fn present(recovered: &Recovered, key: &ShuffleKey, partition: i32) -> Vec<u64> {
    let found = recovered.shuffles.iter().find(|it| it.key == *key).expect("the shuffle is recovered");
    found.present.held(PartitionId(partition)).map_or_else(Vec::new, |ids| ids.iter().collect())
}

fn key(shuffle: i32) -> ShuffleKey {
    ShuffleKey::new(AppId::parse("app-1").unwrap(), ShuffleId(shuffle))
}
