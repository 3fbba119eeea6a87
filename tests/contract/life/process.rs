//! One worker process: the real service, memory, flusher and store over disks that survive it.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use prometheus::Registry;
use uniffle_worker::clock::Instant;

use uniffle_io::Disk;
use uniffle_testkit::fault::{FaultDisk, Faults};
use uniffle_testkit::memory_disk::MemoryDisk;
use uniffle_testkit::object_fault::FaultyObjects;
use uniffle_testkit::service::{ServiceBuilder, ServiceFixture, sum_of};
use uniffle_worker::flush::policy::Limits;
use uniffle_worker::flush::{FlushConfig, Flusher};
use uniffle_worker::memory::{Budget, Memory, MemoryConfig};
use uniffle_worker::runtime::Tasks;
use uniffle_worker::service::Service;
use uniffle_worker::store::object::{Bucket, ObjectSettings};
use uniffle_worker::store::offload::{LocalDisks, OffloadSettings, OffloadTier, Watermarks};
use uniffle_worker::store::{LocalConfig, LocalStore, StoreError, Tier};

const CAPACITY: u64 = 1 << 20;
/// Interval of the check for expired applications.
pub(crate) const EXPIRY_INTERVAL: Duration = Duration::from_secs(60);
/// Prefix of the worker's objects.
pub(crate) const ROOT: &str = "p/worker-1";

pub(crate) struct Process {
    pub(crate) service: Arc<Service>,
    pub(crate) memory: Arc<Memory>,
    pub(crate) flusher: Arc<Flusher>,
    pub(crate) tasks: Tasks,
    registry: Registry,
}

impl Process {
    /// Starts on `disks`. Their faults apply from the first operation.
    pub(crate) async fn start(
        disks: &[(Arc<MemoryDisk>, Faults)],
        local: LocalConfig,
    ) -> Result<Self, StoreError> {
        Self::of(ServiceBuilder { local, disks: disks.to_vec(), ..ServiceBuilder::default() }).await
    }

    /// Starts on an object store. Its faults apply from the first request.
    pub(crate) async fn above(store: &FaultyObjects) -> Result<Self, StoreError> {
        let (extents, registry, tasks) = (Budget::new(u64::MAX), Registry::new(), Tasks::new());
        let object = objects(store, (&extents, &tasks), &registry).await?;
        let tier = OffloadTier::without_disks(object, &extents, tasks.clone(), &registry).await?;
        Self::over(tier, tasks, registry).await
    }

    /// Starts on `disks`. Data above `watermarks` is offloaded to an object store.
    pub(crate) async fn moving(
        disks: &[(Arc<MemoryDisk>, Faults)],
        local: LocalConfig,
        (store, watermarks): (&FaultyObjects, Watermarks),
    ) -> Result<Self, StoreError> {
        let (extents, registry, tasks) = (Budget::new(u64::MAX), Registry::new(), Tasks::new());
        let opened = async {
            let object = objects(store, (&extents, &tasks), &registry).await?;
            let settings = OffloadSettings { watermarks, cold_bytes: 30_000, pass_bytes: 60_000 };
            let local = LocalConfig { data_log_bytes: 50_000, ..local };
            let faulty = |(disk, faults): &(Arc<MemoryDisk>, Faults)| {
                Arc::new(FaultDisk::new(Arc::clone(disk) as Arc<dyn Disk>, faults.clone())) as Arc<dyn Disk>
            };
            let disks = disks.iter().map(faulty).collect();
            let local = LocalDisks { config: local, disks };
            OffloadTier::open(settings, local, object, &extents, tasks.clone(), &registry).await
        };
        match opened.await {
            Ok(tier) => Self::over(tier, tasks, registry).await,
            Err(error) => {
                tasks.cancel();
                Err(error)
            }
        }
    }

    async fn over(tier: Arc<dyn Tier>, tasks: Tasks, registry: Registry) -> Result<Self, StoreError> {
        if let Some(tier) = Arc::clone(&tier).maintenance() {
            tasks.spawn("tier maintenance", tier.maintain(tasks.cancelled().boxed()));
        }
        let (disks, more_tiers) = (Vec::new(), vec![tier]);
        Self::of(ServiceBuilder { disks, more_tiers, registry, tasks, ..ServiceBuilder::default() }).await
    }

    async fn of(builder: ServiceBuilder) -> Result<Self, StoreError> {
        let default = ServiceBuilder::default();
        let memory =
            MemoryConfig { capacity_bytes: CAPACITY, read_capacity_bytes: 1 << 20, ..default.memory };
        let flush = FlushConfig {
            limits: limits(),
            batch_bytes_max: 128 << 10,
            retry_pause_min: Duration::from_millis(100),
            retry_pause_max: Duration::from_secs(2),
            ..default.flush
        };
        let expiry = Some((Duration::from_secs(5), EXPIRY_INTERVAL));
        let builder = ServiceBuilder { memory, flush, expiry, ..builder };
        let ServiceFixture { service, memory, flusher, tasks, registry, .. } = builder.try_start().await?;
        Ok(Self { service, memory, flusher, tasks, registry })
    }

    /// Returns whether memory is empty.
    pub(crate) fn is_flushed(&self) -> bool {
        self.flusher.unfinished() == 0 && self.memory.block_count() == 0
    }

    /// Flushes everything if the disks allow it within a while.
    pub(crate) async fn flush(&self) {
        for _ in 0..20 {
            self.flusher.flush_all();
            tokio::time::sleep(Duration::from_secs(1)).await;
            if self.is_flushed() {
                return;
            }
        }
    }

    /// Flushes everything as a stop does.
    pub(crate) async fn empty(&self) {
        self.flusher.drain(Instant::now() + Duration::from_secs(20)).await;
    }

    /// Returns the local tier.
    pub(crate) fn store(&self) -> Arc<LocalStore> {
        self.flusher.tiers().find().expect("the worker has disks")
    }

    /// Syncs as the last step of a graceful stop.
    pub(crate) async fn sync(&self) {
        let syncs =
            self.flusher.tiers().maintained().map(async |tier| tier.sync(Duration::from_secs(10)).await);
        futures::future::join_all(syncs).await;
    }

    pub(crate) fn counter(&self, name: &str) -> u64 {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count")]
        let value = sum_of(&self.registry, name) as u64;
        value
    }

    /// Asserts that nothing remains after the last application has ended.
    pub(crate) fn assert_nothing_left(&self) {
        assert_eq!(self.flusher.unfinished(), 0, "batches are still being flushed");
        assert_eq!(self.memory.budget().used(), 0, "bytes are still charged");
        assert_eq!(self.memory.tickets().pre_allocated_bytes(), 0, "bytes are still reserved");
        assert_eq!(self.memory.in_flight_bytes(), 0, "bytes are still in flight");
        assert_eq!(self.memory.block_count(), 0, "blocks are still counted");
        assert_eq!(self.service.apps().block_id_count(), 0, "reported ids are still held");
        assert!(
            self.service.diagnostics.losses().losses.is_empty(),
            "losses of ended applications are still listed"
        );
    }
}

async fn objects(
    store: &FaultyObjects,
    (extents, tasks): (&Budget, &Tasks),
    registry: &Registry,
) -> Result<Arc<Bucket>, StoreError> {
    let settings = ObjectSettings { segment_bytes: 100_000, part_bytes: 16_000, ..ObjectSettings::new(ROOT) };
    Bucket::open(Arc::new(store.clone()), settings, extents, tasks.clone(), registry).await
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
