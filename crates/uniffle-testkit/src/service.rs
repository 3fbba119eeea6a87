//! A service with everything below it: memory, a local tier over in-memory disks with injectable
//! faults, a test's own tiers, and the flusher. All parameters have defaults. The only listener is
//! gRPC, opened on request ([`ServiceFixture::client`]).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use prometheus::Registry;
use tokio::net::TcpListener;
use tonic::service::RoutesBuilder;
use uniffle_client::grpc::ShuffleClient;
use uniffle_io::Disk;
use uniffle_worker::app::{AppConfig, AppRegistry};
use uniffle_worker::flush::policy::Limits;
use uniffle_worker::flush::{FlushConfig, Flusher};
use uniffle_worker::listeners::grpc::{GrpcConfig, GrpcMetrics, GrpcServer};
use uniffle_worker::memory::{Memory, MemoryConfig};
use uniffle_worker::runtime::Tasks;
use uniffle_worker::service::{Service, ServiceConfig};
use uniffle_worker::store::{LocalConfig, LocalStore, StoreError, Tier, Tiers};
use uniffle_worker::telemetry::traces::Traces;

use crate::clients::short_backoff;
use crate::eventually;
use crate::fault::{FaultDisk, Faults};
use crate::memory_disk::MemoryDisk;
use crate::worker::OWN_FILES;

/// Settings of a test. `ServiceBuilder::default().start()` is a service with two empty disks that
/// flushes only on request, or for a refused ticket.
#[derive(Debug)]
pub struct ServiceBuilder {
    pub memory: MemoryConfig,
    pub flush: FlushConfig,
    pub local: LocalConfig,
    pub apps: AppConfig,
    pub service: ServiceConfig,
    /// Disks of the local tier, which recovers their data. Empty: no local tier.
    pub disks: Vec<(Arc<MemoryDisk>, Faults)>,
    /// Tiers after the local one. The test runs their maintenance.
    pub more_tiers: Vec<Arc<dyn Tier>>,
    /// Intervals of the checks for expired tickets and for expired applications. `None` disables
    /// both.
    pub expiry: Option<(Duration, Duration)>,
    pub registry: Registry,
    pub tasks: Tasks,
}

impl Default for ServiceBuilder {
    fn default() -> Self {
        Self {
            memory: MemoryConfig {
                capacity_bytes: 16 << 20,
                read_capacity_bytes: 4 << 20,
                ticket_timeout: Duration::from_secs(30),
                tickets_max: 100,
                heap_bytes: 96 << 20,
                blocks_max: 10_000,
                backing: Default::default(),
                ..MemoryConfig::default()
            },
            flush: FlushConfig {
                limits: quiet(),
                cold_bytes: u64::MAX,
                batch_bytes_max: 4 << 20,
                tick: Duration::from_secs(1),
                retry_pause_min: Duration::from_millis(20),
                retry_pause_max: Duration::from_millis(100),
                traces: Traces::off(),
            },
            local: LocalConfig::default(),
            apps: AppConfig::default(),
            service: ServiceConfig::default(),
            disks: memory_disks(2),
            more_tiers: Vec::new(),
            expiry: Some((Duration::from_secs(5), Duration::from_secs(10))),
            registry: Registry::new(),
            tasks: Tasks::new(),
        }
    }
}

/// Limits that no test reaches, so that the service flushes only on request, or for a refused
/// ticket.
pub fn quiet() -> Limits {
    Limits {
        high_watermark: 1.0,
        low_watermark: 0.0,
        single_buffer_bytes_max: u64::MAX,
        huge_partition_bytes: u64::MAX,
        huge_buffer_bytes_max: u64::MAX,
        huge_share_bytes: u64::MAX,
        in_flight_batches_max: 5,
        blocks_high: u64::MAX,
        blocks_low: 0,
    }
}

/// Creates `count` empty disks without faults.
pub fn memory_disks(count: usize) -> Vec<(Arc<MemoryDisk>, Faults)> {
    (0..count).map(|n| (Arc::new(MemoryDisk::new(&format!("/disk{n}"), None)), Faults::default())).collect()
}

/// A running service.
#[derive(Debug)]
pub struct ServiceFixture {
    pub service: Arc<Service>,
    pub memory: Arc<Memory>,
    pub flusher: Arc<Flusher>,
    pub store: Option<Arc<LocalStore>>,
    pub disks: Vec<Arc<MemoryDisk>>,
    /// Faults of each disk.
    pub faults: Vec<Faults>,
    pub registry: Registry,
    pub tasks: Tasks,
}

impl ServiceBuilder {
    /// Starts the service. Faults apply from the first operation on a disk.
    pub async fn start(self) -> ServiceFixture {
        self.try_start().await.expect("no fault is set before the store is open")
    }

    /// Starts the service if the local tier accepts its disks.
    ///
    /// # Errors
    /// Returns the error of the local tier.
    pub async fn try_start(self) -> Result<ServiceFixture, StoreError> {
        let Self { registry, tasks, disks, .. } = self;
        let memory = Memory::new(&self.memory, &registry).expect("the registry is new");
        let faulty = |(disk, faults): &(Arc<MemoryDisk>, Faults)| {
            Arc::new(FaultDisk::new(Arc::clone(disk) as Arc<dyn Disk>, faults.clone())) as Arc<dyn Disk>
        };
        let store = match disks.is_empty() {
            true => None,
            false => {
                let disks = disks.iter().map(faulty).collect();
                Some(LocalStore::open(self.local, disks, memory.extents(), &registry).await?)
            }
        };
        if let Some(store) = &store {
            tasks.spawn("store maintenance", Arc::clone(store).maintain(tasks.cancelled()));
        }
        let local = store.clone().map(|store| store as Arc<dyn Tier>);
        let tiers: Vec<_> = local.into_iter().chain(self.more_tiers).collect();
        let recovered: Vec<_> = tiers
            .iter()
            .map(|tier| tier.metadata().map(|it| it.take_recovered()).unwrap_or_default())
            .collect();
        let tiers = Tiers::new(tiers).expect("at most one tier is read through the worker");
        let flusher = Flusher::start(self.flush, Arc::clone(&memory), tiers, tasks.clone(), &registry)
            .expect("the registry is new");
        let apps = Arc::new(AppRegistry::new(self.apps, memory.heap(), memory.answered()));
        let (m, f) = (Arc::clone(&memory), Some(Arc::clone(&flusher)));
        let service =
            Service::new(self.service, apps, m, f, tasks.clone(), &registry).expect("the registry is new");
        for recovered in recovered {
            service.lifecycle.restore(recovered).await;
        }
        if let Some(tier) = service.tiers().metadata() {
            tier.recovered_durable().await;
        }
        if let Some((interval, pause)) = self.expiry {
            tasks.spawn("expiry", Arc::clone(&service.lifecycle).run_expiry(interval, pause));
        }
        let (disks, faults) = disks.into_iter().unzip();
        Ok(ServiceFixture { service, memory, flusher, store, disks, faults, registry, tasks })
    }
}

impl ServiceFixture {
    /// Returns the local tier.
    pub fn store(&self) -> &Arc<LocalStore> {
        self.store.as_ref().expect("the service has disks")
    }

    /// Returns the files on the disks, without the worker's own.
    pub fn files(&self) -> Vec<PathBuf> {
        let all = self.disks.iter().flat_map(|disk| disk.files());
        all.filter(|file| OWN_FILES.iter().all(|name| !file.starts_with(name))).collect()
    }

    /// Opens the gRPC listener and connects to it.
    pub async fn client(&self) -> ShuffleClient {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (routes, service) = (RoutesBuilder::default(), Arc::clone(&self.service));
        let (tasks, metrics) = (self.tasks.clone(), GrpcMetrics::new(&self.registry));
        let metrics = metrics.expect("the registry is new");
        GrpcServer::start(GrpcConfig::default(), listener, routes, service, tasks, metrics);
        ShuffleClient::connect(address)
            .await
            .expect("cannot connect to the service")
            .with_backoff(short_backoff())
    }

    /// Returns the number of hanging operations on all disks.
    pub fn hung(&self) -> usize {
        self.faults.iter().map(Faults::hung).sum()
    }

    /// Removes all fault rules and resumes hanging operations.
    pub async fn heal(&self) {
        for faults in &self.faults {
            faults.clear();
            faults.release().await;
        }
    }

    /// Waits until all flushes are complete.
    pub async fn flushed(&self) {
        eventually("the flush ends", || match self.flusher.unfinished() {
            0 => Ok(()),
            remaining => Err(format!("{remaining} batches are left")),
        })
        .await;
    }

    /// Ends a test: unregisters all applications, checks that nothing is left, and stops all tasks.
    pub async fn finish(self) {
        for app in self.service.apps().apps() {
            self.service
                .lifecycle
                .unregister_app(app.id().as_str())
                .expect("the application is not registered");
        }
        eventually("the service is clean", || match self.leftovers() {
            remaining if remaining.is_empty() => Ok(()),
            remaining => Err(format!("{remaining:?}")),
        })
        .await;
        self.tasks.cancel();
        self.tasks.drained().await;
        assert_eq!(self.tasks.running(), 0);
    }

    /// Returns the sum of a metric over its labels.
    pub fn metric(&self, name: &str) -> f64 {
        sum_of(&self.registry, name)
    }

    /// Lists the remains of applications.
    pub fn leftovers(&self) -> Vec<String> {
        let memory = &self.memory;
        let counters = [
            ("used bytes", memory.budget().used()),
            ("pre-allocated bytes", memory.tickets().pre_allocated_bytes()),
            ("bytes in flight", memory.in_flight_bytes()),
            ("blocks", memory.block_count()),
            ("batches", self.flusher.unfinished() as u64),
            ("stored bytes", self.store.as_ref().map_or(0, |store| store.used_bytes())),
            ("shuffles", self.store.as_ref().map_or(0, |store| store.shuffle_count() as u64)),
            ("apps", self.service.apps().app_count() as u64),
        ];
        let counted = counters.iter().filter(|(_, value)| *value != 0);
        let counted = counted.map(|(name, value)| format!("{value} {name}"));
        counted.chain(self.files().iter().map(|file| file.display().to_string())).collect()
    }
}

/// Returns the sum of a counter or gauge over its labels.
pub fn sum_of(registry: &Registry, name: &str) -> f64 {
    let families = registry.gather();
    let family = families.iter().find(|family| family.name() == name);
    let family = family.unwrap_or_else(|| panic!("metric {name} does not exist"));
    family.get_metric().iter().map(|m| m.get_counter().get_value() + m.get_gauge().get_value()).sum()
}
