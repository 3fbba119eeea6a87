//! One life of a worker: the real service, memory, flusher and store over disks that outlive it.

use std::sync::Arc;
use std::time::Duration;

use prometheus::Registry;

use uniffle_io::Disk;
use uniffle_testkit::fault::{FaultDisk, Faults};
use uniffle_testkit::memory_disk::MemoryDisk;
use uniffle_worker::app::{AppConfig, AppRegistry};
use uniffle_worker::flush::policy::Limits;
use uniffle_worker::flush::{FlushConfig, Flusher};
use uniffle_worker::memory::{Memory, MemoryConfig};
use uniffle_worker::runtime::Tasks;
use uniffle_worker::service::{Service, ServiceConfig};
use uniffle_worker::tiers::{LocalConfig, LocalStore, SyncWrites};

const CAPACITY: u64 = 1 << 20;

pub(crate) struct Process {
    pub(crate) service: Arc<Service>,
    pub(crate) memory: Arc<Memory>,
    pub(crate) flusher: Arc<Flusher>,
    pub(crate) tasks: Tasks,
    registry: Registry,
}

impl Process {
    /// Starts on `disks`, with faults that begin with the first operation.
    pub(crate) async fn start(disks: &[(Arc<MemoryDisk>, Faults)], sync: SyncWrites) -> Self {
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
        let faulty = disks.iter().map(|(disk, faults)| {
            Arc::new(FaultDisk::new(Arc::clone(disk) as Arc<dyn Disk>, faults.clone())) as Arc<dyn Disk>
        });
        let config = LocalConfig { sync, ..LocalConfig::default() };
        let store = LocalStore::open(config, faulty.collect(), &registry).await;
        let store = store.expect("no fault is there before the store is open");
        tasks.spawn("store maintenance", Arc::clone(&store).maintain(tasks.cancelled()));
        let flush_config = FlushConfig {
            limits: limits(),
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
            Some(Arc::clone(&flusher)),
            tasks.clone(),
            &registry,
        )
        .expect("service");
        service.restore(store.take_recovered());
        let expiry = Arc::clone(&service).run_expiry(Duration::from_secs(5), Duration::from_secs(60));
        tasks.spawn("expiry", expiry);
        Self { service, memory, flusher, tasks, registry }
    }

    /// Whether nothing is in memory any more.
    pub(crate) fn is_flushed(&self) -> bool {
        self.flusher.unfinished() == 0 && self.memory.block_count() == 0
    }

    /// Brings everything to the disks if they let it within a while.
    pub(crate) async fn flush(&self) {
        for _ in 0..20 {
            self.flusher.flush_all();
            tokio::time::sleep(Duration::from_secs(1)).await;
            if self.is_flushed() {
                return;
            }
        }
    }

    pub(crate) fn counter(&self, name: &str) -> u64 {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == name).expect("a known metric");
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count")]
        let value = family.get_metric()[0].get_counter().get_value() as u64;
        value
    }

    /// After the last app is gone.
    pub(crate) fn assert_nothing_left(&self) {
        assert_eq!(self.flusher.unfinished(), 0, "batches left");
        assert_eq!(self.memory.budget().used(), 0, "bytes charged");
        assert_eq!(self.memory.tickets().pre_allocated_bytes(), 0, "bytes reserved");
        assert_eq!(self.memory.in_flight_bytes(), 0, "bytes in flight");
        assert_eq!(self.memory.block_count(), 0, "blocks counted");
        assert_eq!(self.service.apps().block_id_count(), 0, "reported ids held");
        assert!(self.service.losses().losses.is_empty(), "losses told of nobody");
    }
}

fn limits() -> Limits {
    Limits {
        high_watermark: 0.6,
        low_watermark: 0.2,
        single_buffer_bytes_max: 200 << 10,
        huge_partition_bytes: 300 << 10,
        huge_buffer_bytes_max: 60 << 10,
        huge_share_bytes: u64::MAX,
        in_flight_batches_max: 3,
        blocks_high: 9_000,
        blocks_low: 2_000,
    }
}
