//! Data directories used by successive worker processes, and the responses to their clients.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, IteratorRandom};
use rand::{Rng, RngExt, SeedableRng};

use uniffle_client::block::{Block, IdLayout};
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_testkit::fault::Faults;
use uniffle_testkit::in_process::InProcess;
use uniffle_testkit::memory_disk::MemoryDisk;
use uniffle_testkit::on_disk::DirectoryFiles;
use uniffle_testkit::oracle::ShuffleHistory;
use uniffle_testkit::service::{ServiceBuilder, ServiceFixture};
use uniffle_wire::types::{AppId, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId};
use uniffle_worker::memory::MemoryConfig;
use uniffle_worker::service::ServiceError;
use uniffle_worker::store::{LocalConfig, StoreError, SyncWrites, VerifyReads};

pub(crate) const LAYOUT: IdLayout = IdLayout::HISTORIC;
const PARTITIONS: i32 = 3;
const APPS: [&str; 3] = ["app-1", "app-10", "app-2"];
const SHUFFLES: [i32; 3] = [0, 1, 10];
/// Number of file versions that a file can be reset to.
const VERSIONS_MAX: usize = 8;

pub(crate) struct Fixture {
    pub(crate) rng: StdRng,
    pub(crate) disks: Vec<Arc<MemoryDisk>>,
    /// Injected faults of the next process, by disk.
    pub(crate) faults: Vec<Faults>,
    /// True for each disk that the next process finds.
    pub(crate) present: Vec<bool>,
    pub(crate) histories: BTreeMap<ShuffleKey, ShuffleHistory>,
    /// Earlier versions of the files.
    pub(crate) versions: Vec<Vec<DirectoryFiles>>,
    pub(crate) sync: SyncWrites,
    pub(crate) verify_reads: VerifyReads,
    pub(crate) recovery: bool,
    /// True once the disks are damaged: registrations may then fail.
    pub(crate) is_damaged: bool,
    next_task: i64,
}

/// One worker process.
pub(crate) struct Life {
    pub(crate) client: InProcess,
    pub(crate) worker: ServiceFixture,
}

impl Fixture {
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let disks = rng.random_range(1..=3);
        let sync = if rng.random() { SyncWrites::Group } else { SyncWrites::Off };
        let disk = |number: usize| Arc::new(MemoryDisk::new(&format!("/disk{number}"), None));
        Self {
            rng,
            disks: (0..disks).map(disk).collect(),
            faults: std::iter::repeat_with(Faults::default).take(disks).collect(),
            present: vec![true; disks],
            histories: BTreeMap::new(),
            versions: Vec::new(),
            sync,
            verify_reads: VerifyReads::Always,
            recovery: true,
            is_damaged: false,
            next_task: 0,
        }
    }

    /// Returns the files of all disks, including missing ones.
    pub(crate) fn files(&self) -> Vec<DirectoryFiles> {
        self.disks.iter().map(|disk| disk.snapshot()).collect()
    }

    /// Runs one worker process on the present disks. Only files survive it. Fails if the store
    /// refuses to open.
    pub(crate) fn live<T>(&mut self, body: impl AsyncFnOnce(&mut Self, &Life) -> T) -> Result<T, StoreError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.unwrap().block_on(async {
            let life = self.start().await?;
            Ok(body(self, &life).await)
        })
    }

    async fn start(&self) -> Result<Life, StoreError> {
        let default = ServiceBuilder::default();
        let memory = MemoryConfig { capacity_bytes: 4 << 20, read_capacity_bytes: 1 << 20, ..default.memory };
        let (sync, verify_reads, recovery) = (self.sync, self.verify_reads, self.recovery);
        let local = LocalConfig { sync, verify_reads, recovery, ..default.local };
        let pairs = self.disks.iter().cloned().zip(self.faults.iter().cloned());
        let disks = pairs.zip(&self.present).filter(|(_, present)| **present).map(|(pair, _)| pair).collect();
        let worker = ServiceBuilder { memory, local, disks, ..ServiceBuilder::default() }.try_start().await?;
        let client = InProcess { service: Arc::clone(&worker.service), layout: LAYOUT };
        Ok(Life { client, worker })
    }

    /// Runs `steps` random steps of clients.
    pub(crate) async fn work(&mut self, life: &Life, steps: u32) {
        for _ in 0..steps {
            match self.rng.random_range(0..20) {
                0..4 => self.register(life).await,
                4..14 => self.run_task(life).await,
                14..17 => self.flush(life).await,
                17 => self.unregister_some(life).await,
                18 => self.remember_version(),
                _ => tokio::time::sleep(Duration::from_secs(self.rng.random_range(1..60))).await,
            }
            APPS.iter().for_each(|app| _ = life.client.service.lifecycle.heartbeat(app));
        }
    }

    pub(crate) fn remember_version(&mut self) {
        if self.versions.len() < VERSIONS_MAX {
            self.versions.push(self.files());
        }
    }

    pub(crate) fn some_key(&mut self) -> ShuffleKey {
        let app = APPS.choose(&mut self.rng).unwrap();
        let shuffle = *SHUFFLES.choose(&mut self.rng).unwrap();
        ShuffleKey::new(AppId::parse(app).unwrap(), ShuffleId(shuffle))
    }

    async fn register(&mut self, life: &Life) {
        let key = self.some_key();
        if let Err(error) = life.client.register(&key, PARTITIONS).await {
            assert!(self.is_damaged && matches!(error, ServiceError::Store(_)), "{key}: {error}");
            return;
        }
        let history = self.histories.entry(key).or_default();
        (0..PARTITIONS).for_each(|partition| _ = history.partition(partition));
    }

    /// A task of a known shuffle sends a block to some partitions and reports them.
    pub(crate) async fn run_task(&mut self, life: &Life) {
        let Some(key) = self.histories.keys().choose(&mut self.rng).cloned() else { return };
        self.run_task_of(life, &key).await;
    }

    pub(crate) async fn run_task_of(&mut self, life: &Life, key: &ShuffleKey) {
        self.next_task += 1;
        let task = TaskAttemptId(self.next_task);
        let history = self.histories.entry(key.clone()).or_default();
        let (mut batch, mut report) = (Vec::new(), Vec::new());
        for partition in 0..PARTITIONS {
            if partition > 0 && self.rng.random_bool(0.4) {
                continue;
            }
            let length = if self.rng.random_bool(0.1) { 60_000 } else { 3_000 };
            let block = block(partition, task, self.rng.random_range(1..length));
            history.partition(partition).sent.insert(block.meta.block_id, block.data.clone());
            report.push((partition, vec![block.meta.block_id]));
            batch.push((partition, vec![block]));
        }
        if let Err(error) = life.client.send(key, &batch) {
            // Memory is full (2), or recovery does not know the shuffle (4).
            assert!(error.status() as i32 == 4 || error.status() as i32 == 2, "{key}: {error}");
            return;
        }
        if self.rng.random_bool(0.1) {
            return; // The task dies before it reports.
        }
        history.tried(&report);
        if life.client.report(key, task, &report).await.is_ok() {
            history.reported(&report);
        }
    }

    pub(crate) async fn flush(&mut self, life: &Life) {
        for _ in 0..20 {
            life.worker.flusher.flush_all();
            tokio::time::sleep(Duration::from_millis(200)).await;
            if life.worker.flusher.unfinished() == 0 && life.worker.memory.block_count() == 0 {
                return;
            }
        }
    }

    async fn unregister_some(&mut self, life: &Life) {
        let Some(key) = self.histories.keys().choose(&mut self.rng).cloned() else { return };
        if self.rng.random_bool(0.7) {
            self.unregister(life, &key);
        } else {
            _ = life.client.service.lifecycle.unregister_app(key.app.as_str());
            self.histories.retain(|other, _| other.app != key.app);
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }

    pub(crate) fn unregister(&mut self, life: &Life, key: &ShuffleKey) {
        _ = life.client.service.lifecycle.unregister_shuffle(key.app.as_str(), key.shuffle.0);
        self.histories.remove(key);
    }

    /// Runs before the end of a process: flushes or not, and waits a moment after the last
    /// acknowledgement. Until then only the two copies of the log contain the report.
    pub(crate) async fn end(&mut self, life: &Life) {
        if self.rng.random() {
            self.flush(life).await;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    /// Simulates a power loss.
    pub(crate) fn lose_power(&mut self) {
        for disk in &self.disks {
            disk.lose_power(self.rng.next_u64());
        }
    }
}

fn block(partition: i32, task: TaskAttemptId, length: u32) -> Block {
    BlockGenerator::new(13, LAYOUT).block(PartitionId(partition), task, 0, length)
}
