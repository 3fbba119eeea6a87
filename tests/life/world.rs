//! One simulated worker, its clients, and what they were promised.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use prometheus::Registry;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, RngCore, SeedableRng};

use uniffle_worker::app::{AppConfig, AppRegistry};
use uniffle_worker::flush::policy::Limits;
use uniffle_worker::flush::{FlushConfig, Flusher};
use uniffle_worker::io::Disk;
use uniffle_worker::io::fault::{EIO, ENOSPC, Fault, FaultDisk, Faults, Operation};
use uniffle_worker::io::memory::MemoryDisk;
use uniffle_worker::memory::{Memory, MemoryConfig};
use uniffle_worker::runtime::Tasks;
use uniffle_worker::service::{
    BlockHeader, RegisterRequest, RequireRequest, SendHeader, SendSession, Service, ServiceConfig,
    ServiceError, Tiers,
};
use uniffle_worker::store::{LocalConfig, LocalStore};
use uniffle_worker::types::Distribution;

use super::reader::Reader;

const CAPACITY: u64 = 1 << 20;
const PARTITIONS: i32 = 3;
const APPS: [&str; 2] = ["app-1", "app-10"];
const SHUFFLES: [i32; 2] = [1, 10];

/// What a history did, so that a model that no longer reaches something is noticed.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Tally {
    pub(crate) acknowledged: u64,
    pub(crate) flushed_bytes: u64,
    pub(crate) failed_writes: u64,
    pub(crate) purged_batches: u64,
    pub(crate) duplicates: u64,
    pub(crate) refused_tickets: u64,
    pub(crate) aborted: u64,
    pub(crate) read_from_memory: u64,
    pub(crate) read_from_disk: u64,
}

impl Tally {
    pub(crate) fn add(&mut self, other: Self) {
        self.acknowledged += other.acknowledged;
        self.flushed_bytes += other.flushed_bytes;
        self.failed_writes += other.failed_writes;
        self.purged_batches += other.purged_batches;
        self.duplicates += other.duplicates;
        self.refused_tickets += other.refused_tickets;
        self.aborted += other.aborted;
        self.read_from_memory += other.read_from_memory;
        self.read_from_disk += other.read_from_disk;
    }

    /// Names of what never happened.
    pub(crate) fn never(&self) -> Vec<&'static str> {
        let figures = [
            ("acknowledged", self.acknowledged),
            ("flushed_bytes", self.flushed_bytes),
            ("failed_writes", self.failed_writes),
            ("purged_batches", self.purged_batches),
            ("duplicates", self.duplicates),
            ("refused_tickets", self.refused_tickets),
            ("aborted", self.aborted),
            ("read_from_memory", self.read_from_memory),
            ("read_from_disk", self.read_from_disk),
        ];
        figures.into_iter().filter(|(_, count)| *count == 0).map(|(name, _)| name).collect()
    }
}

/// What clients of one registered shuffle were promised.
#[derive(Debug, Default)]
pub(crate) struct Promised {
    /// Acknowledged blocks per partition.
    pub(crate) acknowledged: HashMap<i32, BTreeMap<i64, Vec<u8>>>,
    /// The longest index seen per partition.
    pub(crate) index_seen: HashMap<i32, Vec<u8>>,
    /// Distinguishes registrations of the same shuffle.
    pub(crate) epoch: u64,
    pub(crate) local_order: bool,
}

pub(crate) type Key = (&'static str, i32);

/// A send whose bytes are still arriving.
struct OpenSend {
    key: Key,
    epoch: u64,
    session: SendSession,
    blocks: Vec<(i32, i64, Vec<u8>)>,
    next: usize,
}

pub(crate) struct World {
    rng: StdRng,
    pub(crate) service: Arc<Service>,
    memory: Arc<Memory>,
    flusher: Arc<Flusher>,
    tasks: Tasks,
    disks: Vec<Arc<MemoryDisk>>,
    faults: Vec<Faults>,
    pub(crate) promised: HashMap<Key, Promised>,
    sends: Vec<OpenSend>,
    readers: Vec<Reader>,
    next_block: i64,
    next_epoch: u64,
    registry: Registry,
    pub(crate) tally: Tally,
}

impl World {
    pub(crate) async fn new(seed: u64) -> Self {
        let registry = Registry::new();
        let tasks = Tasks::new();
        let memory_config = MemoryConfig {
            capacity_bytes: CAPACITY,
            read_capacity_bytes: 1 << 20,
            ticket_timeout: Duration::from_secs(30),
            tickets_max: 100,
            blocks_max: 10_000,
        };
        let memory = Memory::new(&memory_config, &registry).expect("memory");
        let disks: Vec<_> = (0..3).map(|n| Arc::new(MemoryDisk::new(&format!("/disk{n}"), None))).collect();
        let faults: Vec<_> = disks.iter().map(|_| Faults::default()).collect();
        let faulty: Vec<Arc<dyn Disk>> = disks
            .iter()
            .zip(&faults)
            .map(|(disk, faults)| {
                Arc::new(FaultDisk::new(Arc::clone(disk) as Arc<dyn Disk>, faults.clone())) as _
            })
            .collect();
        let store = LocalStore::open(LocalConfig::default(), faulty, &registry).await.expect("store");
        tasks.spawn("store maintenance", Arc::clone(&store).maintain(tasks.cancelled()));
        let flush_config = FlushConfig {
            limits: limits(),
            workers: 4,
            hdfs_in_flight_max: 8,
            cold_bytes: u64::MAX,
            batch_bytes_max: 128 << 10,
            tick: Duration::from_secs(1),
            retry_pause_min: Duration::from_millis(100),
            retry_pause_max: Duration::from_secs(2),
            traces: uniffle_worker::telemetry::traces::Traces::off(),
        };
        let flusher =
            Flusher::start(flush_config, Arc::clone(&memory), Arc::clone(&store), tasks.clone(), &registry)
                .expect("flusher");
        let service = Service::new(
            ServiceConfig::default(),
            Arc::new(AppRegistry::new(AppConfig::default())),
            Arc::clone(&memory),
            Some(Tiers { local: Some(store), hdfs: None, flusher: Arc::clone(&flusher) }),
            tasks.clone(),
            &registry,
        )
        .expect("service");
        let expiry = Arc::clone(&service).run_expiry(Duration::from_secs(5), Duration::from_secs(60));
        tasks.spawn("expiry", expiry);
        Self {
            rng: StdRng::seed_from_u64(seed),
            service,
            memory,
            flusher,
            tasks,
            disks,
            faults,
            promised: HashMap::new(),
            sends: Vec::new(),
            readers: Vec::new(),
            next_block: 0,
            next_epoch: 0,
            registry,
            tally: Tally::default(),
        }
    }

    pub(crate) async fn step(&mut self) {
        match self.rng.random_range(0..100) {
            0..6 => self.register().await,
            6..36 => self.open_send().await,
            36..50 => self.feed_some().await,
            50..56 => self.abort_one(),
            56..62 => self.flusher.flush_all(),
            62..64 => self.purge_one(),
            64..68 => self.break_a_disk(),
            68..72 => self.faults.iter().for_each(Faults::clear),
            72..80 => self.sleep_a_while().await,
            80..86 => self.start_reader(),
            _ => self.step_readers().await,
        }
        if self.rng.random_bool(0.3) {
            tokio::task::yield_now().await;
        }
        self.heartbeat();
    }

    fn key(&mut self) -> Key {
        (APPS[self.rng.random_range(0..APPS.len())], SHUFFLES[self.rng.random_range(0..SHUFFLES.len())])
    }

    fn known_key(&mut self) -> Option<Key> {
        let mut keys: Vec<Key> = self.promised.keys().copied().collect();
        keys.sort_unstable();
        keys.choose(&mut self.rng).copied()
    }

    fn heartbeat(&self) {
        for app in APPS {
            let _ = self.service.heartbeat(app);
        }
    }

    async fn register(&mut self) {
        let key = self.key();
        let local_order = match self.promised.get(&key) {
            Some(promised) => promised.local_order,
            None => self.rng.random(),
        };
        let request = RegisterRequest {
            app: key.0,
            shuffle: key.1,
            ranges: vec![(0, PARTITIONS - 1)],
            user: "model".to_owned(),
            distribution: if local_order { Distribution::LocalOrder } else { Distribution::Normal },
            properties: HashMap::new(),
            remote_storage: None,
        };
        if let Err(error) = self.service.register(request).await {
            assert_eq!(error.status() as i32, 6, "only disks may refuse a registration: {error}");
            return;
        }
        self.next_epoch += 1;
        let fresh = Promised { epoch: self.next_epoch, local_order, ..Promised::default() };
        self.promised.entry(key).or_insert(fresh);
    }

    async fn open_send(&mut self) {
        let Some(key) = self.known_key() else { return self.register().await };
        let blocks = self.blocks();
        let bytes: usize = blocks.iter().map(|(_, _, data)| data.len() + 32).sum();
        let partitions: Vec<i32> = (0..PARTITIONS).collect();
        let request = RequireRequest {
            app: key.0,
            shuffle: key.1,
            bytes: i32::try_from(bytes).expect("small"),
            partitions: &partitions,
            partition_sizes: &[],
        };
        let grant = match self.service.require_buffer(request) {
            Ok(grant) => grant,
            Err(error) => {
                self.tally.refused_tickets += 1;
                assert_eq!(error.status() as i32, 2, "only NO_BUFFER may refuse a small request: {error}");
                return;
            }
        };
        if self.rng.random_bool(0.1) {
            return; // The ticket is left to expire.
        }
        let header = SendHeader {
            app: key.0,
            shuffle: key.1,
            ticket: grant.ticket,
            message_bytes: bytes as u64 + 1_000,
        };
        let session = self.service.begin_send(header).expect("a fresh ticket of a registered shuffle");
        let epoch = self.promised[&key].epoch;
        self.sends.push(OpenSend { key, epoch, session, blocks, next: 0 });
        if self.rng.random_bool(0.5) {
            let last = self.sends.len() - 1;
            self.feed(last, usize::MAX);
        }
    }

    fn blocks(&mut self) -> Vec<(i32, i64, Vec<u8>)> {
        let count = self.rng.random_range(1..8);
        let mut blocks: Vec<(i32, i64, Vec<u8>)> = (0..count).map(|_| self.block()).collect();
        blocks.sort_by_key(|(partition, ..)| *partition);
        blocks
    }

    /// Resends of an id are normal after a time-out; length and bytes are a function of the id.
    fn block(&mut self) -> (i32, i64, Vec<u8>) {
        let resent = self.next_block > 0 && self.rng.random_bool(0.15);
        let id = if resent { self.rng.random_range(0..self.next_block) } else { self.next_block };
        self.next_block = self.next_block.max(id + 1);
        let mut content = StdRng::seed_from_u64(id.unsigned_abs());
        let length = match content.random_range(0..10) {
            0..3 => content.random_range(1..100),
            3..9 => content.random_range(100..20_000),
            _ => content.random_range(20_000..90_000),
        };
        let mut data = vec![0; length];
        content.fill_bytes(&mut data);
        (i32::try_from(id % i64::from(PARTITIONS)).expect("a partition"), id, data)
    }

    async fn feed_some(&mut self) {
        if self.sends.is_empty() {
            return self.open_send().await;
        }
        let index = self.rng.random_range(0..self.sends.len());
        let blocks = self.rng.random_range(1..4);
        self.feed(index, blocks);
    }

    /// Feeds up to `blocks` blocks of a send; commits it after its last.
    fn feed(&mut self, index: usize, blocks: usize) {
        let send = &mut self.sends[index];
        for _ in 0..blocks {
            let Some((partition, id, data)) = send.blocks.get(send.next) else { break };
            let new_run = send.next == 0 || send.blocks[send.next - 1].0 != *partition;
            if let Err(error) = feed_block(&mut send.session, new_run.then_some(*partition), *id, data) {
                assert_eq!(error.status() as i32, 4, "only a purge may stop a send with a ticket: {error}");
                self.sends.swap_remove(index);
                return;
            }
            send.next += 1;
        }
        if send.next == send.blocks.len() {
            let send = self.sends.swap_remove(index);
            self.commit(send);
        }
    }

    fn commit(&mut self, send: OpenSend) {
        let committed = send.session.commit(0);
        let Some(promised) = self.promised.get_mut(&send.key).filter(|promised| promised.epoch == send.epoch)
        else {
            assert!(committed.is_err(), "a send into a purged shuffle was acknowledged");
            return;
        };
        committed.expect("a send with a ticket into a registered shuffle never fails");
        for (partition, id, data) in send.blocks {
            promised.acknowledged.entry(partition).or_default().entry(id).or_insert(data);
            self.tally.acknowledged += 1;
        }
    }

    fn abort_one(&mut self) {
        if !self.sends.is_empty() {
            let index = self.rng.random_range(0..self.sends.len());
            let mut send = self.sends.swap_remove(index);
            self.tally.aborted += 1;
            if let Some((_, _, data)) = send.blocks.get(send.next).filter(|_| send.next > 0) {
                // Cut in the middle of a block.
                if send.session.begin_block(u32::try_from(data.len()).expect("small")).is_ok() {
                    send.session.write(&data[..data.len() / 2]).expect("fewer bytes than announced");
                }
            }
        }
    }

    fn purge_one(&mut self) {
        let Some(key) = self.known_key() else { return };
        if self.rng.random_bool(0.5) {
            self.service.unregister_shuffle(key.0, key.1).expect("the app is known");
            self.promised.remove(&key);
        } else {
            self.service.unregister_app(key.0).expect("the app is known");
            self.promised.retain(|other, _| other.0 != key.0);
        }
    }

    fn break_a_disk(&mut self) {
        let disk = self.rng.random_range(0..self.faults.len());
        let seed = self.rng.random();
        let one_in = self.rng.random_range(1..4);
        let kinds = vec![
            (Operation::Write, Fault::Errno(ENOSPC)),
            (Operation::Write, Fault::Errno(EIO)),
            (Operation::Write, Fault::Short { bytes: 777, errno: EIO }),
            (Operation::OpenWrite, Fault::Errno(EIO)),
        ];
        self.faults[disk].seed(seed, one_in, kinds);
    }

    async fn sleep_a_while(&mut self) {
        let millis = self.rng.random_range(1..3_000);
        tokio::time::sleep(Duration::from_millis(millis)).await;
    }

    fn start_reader(&mut self) {
        let Some(key) = self.known_key() else { return };
        let partition = self.rng.random_range(0..PARTITIONS);
        let read_buffer_size = *[1, 3_000, 100_000].choose(&mut self.rng).expect("not empty");
        self.readers.push(Reader::new(key, partition, read_buffer_size, &self.promised[&key]));
    }

    async fn step_readers(&mut self) {
        let mut readers = std::mem::take(&mut self.readers);
        let steps = self.rng.random_range(1..5);
        for reader in &mut readers {
            for _ in 0..steps {
                reader.step(self).await;
            }
        }
        readers.retain(|reader| !reader.is_done());
        self.readers = readers;
    }

    /// Reads everything that was promised, then unregisters all and checks that nothing is left.
    pub(crate) async fn finish(mut self) -> Tally {
        self.sends.clear();
        self.faults.iter().for_each(Faults::clear);
        for key in self.promised.keys().copied().collect::<Vec<_>>() {
            for partition in 0..PARTITIONS {
                let mut reader = Reader::new(key, partition, 10_000, &self.promised[&key]);
                while !reader.is_done() {
                    reader.step(&mut self).await;
                }
            }
        }
        for app in APPS {
            let _ = self.service.unregister_app(app);
        }
        self.readers.clear();
        // Tickets that were never redeemed expire; batches under way end; files are deleted.
        tokio::time::sleep(Duration::from_secs(200)).await;
        assert_eq!(self.flusher.unfinished(), 0, "batches left");
        assert_eq!(self.memory.budget().used(), 0, "bytes charged");
        assert_eq!(self.memory.tickets().pre_allocated_bytes(), 0, "bytes reserved");
        assert_eq!(self.memory.in_flight_bytes(), 0, "bytes in flight");
        assert_eq!(self.memory.block_count(), 0, "blocks counted");
        let left: Vec<PathBuf> =
            self.disks.iter().flat_map(|disk| disk.files()).filter(|path| path.starts_with("apps")).collect();
        assert!(left.is_empty(), "files left: {left:?}");
        self.tasks.cancel();
        self.tasks.drained().await;
        assert_eq!(self.tasks.running(), 0, "tasks left");
        self.tally.flushed_bytes = self.counter("memory_spill_total_bytes");
        self.tally.failed_writes = self.counter("total_failed_written_event_num");
        self.tally.purged_batches = self.counter("total_spill_events_dropped_with_app_not_found");
        self.tally.duplicates = self.counter("total_duplicate_blocks");
        self.tally
    }

    fn counter(&self, name: &str) -> u64 {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == name).expect("a known metric");
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count")]
        let value = family.get_metric()[0].get_counter().get_value() as u64;
        value
    }
}

fn limits() -> Limits {
    Limits {
        high_watermark: 0.6,
        low_watermark: 0.2,
        single_buffer_bytes_max: 200 << 10,
        huge_partition_bytes: 300 << 10,
        huge_buffer_bytes_max: 60 << 10,
        in_flight_batches_max: 3,
        blocks_high: 9_000,
        blocks_low: 2_000,
    }
}

fn feed_block(
    session: &mut SendSession,
    partition: Option<i32>,
    id: i64,
    data: &[u8],
) -> Result<(), ServiceError> {
    if let Some(partition) = partition {
        session.partition(partition)?;
    }
    let length = u32::try_from(data.len()).expect("small");
    session.begin_block(length)?;
    let (first, second) = data.split_at(data.len() / 3);
    session.write(first)?;
    session.write(second)?;
    session.end_block(BlockHeader {
        block_id: id,
        length: i32::try_from(length).expect("small"),
        uncompressed_length: 7,
        crc: i64::from(crc32fast::hash(data)),
        task_attempt_id: id % 5,
    })
}
