//! The worker's parts over disks in memory that can hang or fail, behind a real gRPC listener if a test wants one.
//!
//! For what a [`super::world::World`] cannot show: a batch that stays in flight for as long as the test looks, disks
//! that fail, and minutes that pass at once (paused time; without the listener, whose sockets know no paused clock).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use prometheus::Registry;
use tokio::net::TcpListener;
use tonic::service::RoutesBuilder;
use uniffle_client::grpc::ShuffleClient;
use uniffle_io::Disk;
use uniffle_testkit::fault::{FaultDisk, Faults};
use uniffle_testkit::memory_disk::MemoryDisk;
use uniffle_worker::app::{AppConfig, AppRegistry};
use uniffle_worker::flush::policy::Limits;
use uniffle_worker::flush::{FlushConfig, Flusher};
use uniffle_worker::listeners::grpc::{GrpcConfig, GrpcServer};
use uniffle_worker::memory::{Memory, MemoryConfig};
use uniffle_worker::runtime::Tasks;
use uniffle_worker::service::{Service, ServiceConfig};
use uniffle_worker::tiers::{LocalConfig, LocalStore};

use super::world::{OWN_FILES, eventually, quickly};

/// Without a heartbeat for so long an application is expired.
pub(crate) const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) struct Rig {
    pub(crate) service: Arc<Service>,
    pub(crate) memory: Arc<Memory>,
    pub(crate) flusher: Arc<Flusher>,
    pub(crate) store: Arc<LocalStore>,
    pub(crate) faults: Vec<Faults>,
    disks: Vec<Arc<MemoryDisk>>,
    registry: Registry,
    tasks: Tasks,
}

impl Rig {
    pub(crate) async fn start() -> Self {
        Self::on(memory_disks(), local_config()).await
    }

    /// On disks that another rig may have had, of which it takes over what is there.
    pub(crate) async fn on(disks: Vec<Arc<MemoryDisk>>, local: LocalConfig) -> Self {
        let registry = Registry::new();
        let tasks = Tasks::new();
        let memory = Memory::new(&memory_config(), &registry).unwrap();
        let faults: Vec<_> = disks.iter().map(|_| Faults::default()).collect();
        let faulty = |(disk, faults): (&Arc<MemoryDisk>, &Faults)| {
            Arc::new(FaultDisk::new(Arc::clone(disk) as Arc<dyn Disk>, faults.clone())) as Arc<dyn Disk>
        };
        let faulty: Vec<_> = disks.iter().zip(&faults).map(faulty).collect();
        let store = LocalStore::open(local, faulty, &registry).await.unwrap();
        let (m, s) = (Arc::clone(&memory), Arc::clone(&store));
        let flusher = Flusher::start(flush_config(), m, s, tasks.clone(), &registry).unwrap();
        let service = Service::new(
            ServiceConfig::default(),
            Arc::new(AppRegistry::new(AppConfig {
                heartbeat_timeout: HEARTBEAT_TIMEOUT,
                ..AppConfig::default()
            })),
            Arc::clone(&memory),
            Some(Arc::clone(&flusher)),
            tasks.clone(),
            &registry,
        )
        .unwrap();
        service.restore(store.take_recovered());
        let expiry = Arc::clone(&service).run_expiry(Duration::from_secs(5), Duration::from_secs(10));
        tasks.spawn("expiry", expiry);
        tasks.spawn("store maintenance", Arc::clone(&store).maintain(tasks.cancelled()));
        Self { service, memory, flusher, store, faults, disks, registry, tasks }
    }

    /// Opens the gRPC listener and connects to it.
    pub(crate) async fn client(&self) -> ShuffleClient {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        GrpcServer::start(
            GrpcConfig::default(),
            listener,
            RoutesBuilder::default(),
            Arc::clone(&self.service),
            self.tasks.clone(),
            &self.registry,
        )
        .unwrap();
        ShuffleClient::connect(address).await.unwrap().with_backoff(quickly())
    }

    /// Operations that hang, on all disks.
    pub(crate) fn hung(&self) -> usize {
        self.faults.iter().map(Faults::hung).sum()
    }

    /// Lets hung operations go on, and those that come later pass.
    pub(crate) async fn heal(&self) {
        for faults in &self.faults {
            faults.clear();
            faults.release().await;
        }
    }

    /// Waits until nothing is on its way to the disks.
    pub(crate) async fn flushed(&self) {
        eventually("the flush ends", || match self.flusher.unfinished() {
            0 => Ok(()),
            left => Err(format!("{left} batches are left")),
        })
        .await;
    }

    /// Files other than the worker's own.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        let all = self.disks.iter().flat_map(|disk| disk.files());
        all.filter(|file| OWN_FILES.iter().all(|name| !file.ends_with(name))).collect()
    }

    /// What is left of applications.
    pub(crate) fn leftovers(&self) -> Vec<String> {
        let counters = [
            ("used bytes", self.memory.budget().used()),
            ("pre-allocated bytes", self.memory.tickets().pre_allocated_bytes()),
            ("bytes in flight", self.memory.in_flight_bytes()),
            ("blocks", self.memory.block_count()),
            ("batches", self.flusher.unfinished() as u64),
            ("stored bytes", self.store.used_bytes()),
            ("shuffles", self.store.shuffle_count() as u64),
            ("apps", self.service.apps().app_count() as u64),
        ];
        let counted = counters.iter().filter(|(_, value)| *value != 0);
        counted
            .map(|(name, value)| format!("{value} {name}"))
            .chain(self.files().iter().map(|file| file.display().to_string()))
            .collect()
    }

    /// The common end: unregisters what is left, finds nothing left, stops with no task left.
    pub(crate) async fn finish(self) {
        for app in self.service.apps().apps() {
            self.service.unregister_app(app.id().as_str()).unwrap();
        }
        eventually("the rig is clean", || match self.leftovers() {
            left if left.is_empty() => Ok(()),
            left => Err(format!("{left:?}")),
        })
        .await;
        self.tasks.cancel();
        self.tasks.drained().await;
        assert_eq!(self.tasks.running(), 0);
    }
}

fn memory_config() -> MemoryConfig {
    MemoryConfig {
        capacity_bytes: 16 << 20,
        read_capacity_bytes: 4 << 20,
        ticket_timeout: Duration::from_secs(30),
        tickets_max: 100,
        blocks_max: 10_000,
    }
}

/// Flushes only when a test says so.
fn flush_config() -> FlushConfig {
    FlushConfig {
        limits: Limits {
            high_watermark: 1.0,
            low_watermark: 0.5,
            single_buffer_bytes_max: 1 << 40,
            huge_partition_bytes: 1 << 40,
            huge_buffer_bytes_max: 1 << 40,
            huge_share_bytes: u64::MAX,
            in_flight_batches_max: 5,
            blocks_high: 9_000,
            blocks_low: 2_000,
        },
        cold_bytes: u64::MAX,
        batch_bytes_max: 4 << 20,
        tick: Duration::from_secs(1),
        retry_pause_min: Duration::from_millis(20),
        retry_pause_max: Duration::from_millis(100),
        traces: uniffle_worker::telemetry::traces::Traces::off(),
    }
}

/// Two that are empty.
pub(crate) fn memory_disks() -> Vec<Arc<MemoryDisk>> {
    (0..2).map(|n| Arc::new(MemoryDisk::new(&format!("/disk{n}"), None))).collect()
}

/// A disk that failed is looked at again soon.
pub(crate) fn local_config() -> LocalConfig {
    let soon = Duration::from_millis(50);
    LocalConfig { space_interval: soon, probe_interval: soon, ..LocalConfig::default() }
}
