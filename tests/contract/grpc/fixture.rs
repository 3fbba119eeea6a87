//! A complete worker in this process, started from TOML on free ports, and a client of it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use tempfile::TempDir;
use uniffle_client::block::Block;
use uniffle_client::grpc::{ReadOptions, ShuffleClient};
use uniffle_client::send::{Batch, SendForm};
use uniffle_client::tcp::TcpClient;
pub(crate) use uniffle_testkit::clients::short_backoff;
pub(crate) use uniffle_testkit::config::ConfigLines as Setup;
pub(crate) use uniffle_testkit::eventually;
use uniffle_testkit::service::sum_of;
pub(crate) use uniffle_testkit::worker::leftovers as files_below;
use uniffle_wire::types::{AppId, PartitionId, ShuffleId, ShuffleKey, TicketId};
use uniffle_worker::memory::Memory;
use uniffle_worker::proto::{self, StatusCode};
use uniffle_worker::runtime::Tasks;
use uniffle_worker::server::Worker;
use uniffle_worker::store::Tier;

/// A running worker and a client of it. [`WorkerFixture::start`] creates two data directories.
#[derive(Debug)]
pub(crate) struct WorkerFixture {
    pub(crate) worker: Worker,
    pub(crate) client: ShuffleClient,
    /// The parent of the data directories.
    pub(crate) dir: TempDir,
    pub(crate) disks: Vec<PathBuf>,
}

impl WorkerFixture {
    pub(crate) async fn start() -> Self {
        Self::with(Setup::default()).await
    }

    pub(crate) async fn with(setup: Setup<'_>) -> Self {
        let dir = tempfile::Builder::new().prefix("uniffle-contract-").tempdir().unwrap();
        let disks: Vec<PathBuf> = (0..2).map(|disk| dir.path().join(format!("disk{disk}"))).collect();
        for disk in &disks {
            std::fs::create_dir(disk).unwrap();
        }
        Self::on(setup, dir, disks).await
    }

    /// Starts a worker whose only tier below memory is a test double.
    pub(crate) async fn with_tier(tier: Arc<dyn Tier>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let unused = vec![dir.path().join("unused")];
        let setup = Setup { store_type: "MEMORY", ..Setup::default() };
        Self::of(setup.start_with_tiers(vec![tier], &unused).await, dir, unused).await
    }

    /// Starts a worker on `disks` in `dir`, for example those of an earlier worker.
    pub(crate) async fn on(setup: Setup<'_>, dir: TempDir, disks: Vec<PathBuf>) -> Self {
        Self::of(setup.start(&disks).await, dir, disks).await
    }

    async fn of(worker: Worker, dir: TempDir, disks: Vec<PathBuf>) -> Self {
        let client =
            ShuffleClient::connect(worker.addresses().grpc).await.unwrap().with_backoff(short_backoff());
        Self { worker, client, dir, disks }
    }

    pub(crate) async fn tcp_client(&self) -> TcpClient {
        connect_tcp(self.worker.addresses().tcp.expect("the TCP port is open by default")).await
    }

    pub(crate) fn memory(&self) -> &Memory {
        self.worker.memory()
    }

    /// Gets a ticket and sends in the classic form. Both must succeed.
    pub(crate) async fn push(&self, key: &ShuffleKey, batch: &Batch) {
        self.client.push(key, SendForm::Classic, batch).await.unwrap();
    }

    /// Gets a ticket for `bytes` bytes, which must be granted.
    pub(crate) async fn ticket(&self, key: &ShuffleKey, bytes: i32) -> TicketId {
        let answer = self.client.require_raw(require(key, bytes)).await.unwrap();
        assert_eq!(answer.status(), StatusCode::Success, "{}", answer.ret_msg);
        TicketId(answer.require_buffer_id)
    }

    /// Starts a flush of everything in memory.
    pub(crate) fn begin_flush(&self) {
        self.worker.service().flusher().unwrap().flush_all();
    }

    /// Flushes everything in memory and waits until all of it is in a tier.
    pub(crate) async fn flush(&self) {
        self.begin_flush();
        let flusher = self.worker.service().flusher().unwrap();
        eventually("the flush ends", || match (flusher.unfinished(), self.memory().block_count()) {
            (0, 0) => Ok(()),
            remaining => Err(format!("{remaining:?} batches and blocks are left")),
        })
        .await;
    }

    /// Asserts that readers get exactly `blocks`, whether or not they trust the field `isEnd`.
    pub(crate) async fn assert_reads(&self, key: &ShuffleKey, partition: i32, blocks: &[Block]) {
        for trust_is_end in [true, false] {
            let options = ReadOptions { trust_is_end, read_buffer_size: 1 << 20, ..Default::default() };
            let read = self.client.read_partition(key, PartitionId(partition), &options).await.unwrap();
            assert_same(&read.blocks, blocks);
        }
    }

    /// Returns the sum of a metric over its labels.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        sum_of(self.worker.registry(), name)
    }

    /// Returns the number of observations of a histogram without labels, and their sum.
    pub(crate) fn histogram(&self, name: &str) -> (u64, f64) {
        let families = self.worker.registry().gather();
        let found = families.iter().find(|family| family.name() == name);
        let histogram =
            found.unwrap_or_else(|| panic!("metric {name} does not exist")).get_metric()[0].get_histogram();
        (histogram.get_sample_count(), histogram.get_sample_sum())
    }

    /// Describes the state that differs from a worker without applications.
    pub(crate) fn leftovers(&self) -> Vec<String> {
        let memory = self.memory();
        let flusher = self.worker.service().flusher().unwrap();
        let counters = [
            ("used bytes", memory.budget().used()),
            ("pre-allocated bytes", memory.tickets().pre_allocated_bytes()),
            ("tickets", memory.tickets().count() as u64),
            ("bytes in flight", memory.in_flight_bytes()),
            ("blocks", memory.block_count()),
            ("heap bytes", memory.heap().whole().used()),
            ("bytes of answers", memory.answered().used()),
            ("read bytes", memory.read_pool().used_bytes()),
            ("batches", flusher.unfinished() as u64),
            ("stored bytes", flusher.tiers().iter().map(|tier| tier.state().used_bytes).sum()),
            ("apps", self.worker.service().apps().app_count() as u64),
        ];
        let counted = counters.iter().filter(|(_, value)| *value != 0);
        let files = self.disks.iter().flat_map(|disk| files_below(disk));
        counted
            .map(|(name, value)| format!("{value} {name}"))
            .chain(files.map(|f| f.display().to_string()))
            .collect()
    }

    /// Asserts that the memory counters are zero before any application is unregistered. Data on
    /// disks still has extent lists.
    pub(crate) async fn assert_memory_is_free(&self) {
        let memory = self.memory();
        eventually("memory is free", || {
            let remaining = (
                memory.budget().used() - memory.extents().used(),
                memory.tickets().pre_allocated_bytes(),
                memory.in_flight_bytes(),
                memory.block_count(),
            );
            if remaining == (0, 0, 0, 0) { Ok(()) } else { Err(format!("{remaining:?}")) }
        })
        .await;
    }

    /// Ends a test: unregisters applications, and asserts that no state and no task remains.
    pub(crate) async fn finish(self) {
        for app in self.worker.service().apps().apps() {
            self.client.unregister_app(app.id().as_str()).await.unwrap();
        }
        eventually("the worker is clean", || match self.leftovers() {
            remaining if remaining.is_empty() => Ok(()),
            remaining => Err(format!("{remaining:?}")),
        })
        .await;
        drop(self.client);
        assert_eq!(self.worker.stop().await, 0, "tasks are still running");
    }
}

/// Connects to a TCP listener. The connection ends with the client.
pub(crate) async fn connect_tcp(address: SocketAddr) -> TcpClient {
    let (client, driver) = TcpClient::connect(address).await.unwrap();
    Tasks::new().spawn("tcp client", driver);
    client
}

pub(crate) fn key(app: &str, shuffle: i32) -> ShuffleKey {
    ShuffleKey::new(AppId::parse(app).unwrap(), ShuffleId(shuffle))
}

/// Returns `requireBuffer` as a 0.9 client sends it, without sizes per partition.
pub(crate) fn require(key: &ShuffleKey, bytes: i32) -> proto::RequireBufferRequest {
    proto::RequireBufferRequest {
        require_size: bytes,
        app_id: key.app.as_str().to_owned(),
        shuffle_id: key.shuffle.0,
        partition_ids: vec![0],
        partition_require_sizes: Vec::new(),
    }
}

/// Asserts that `read` contains exactly `blocks`.
pub(crate) fn assert_same(
    read: &std::collections::BTreeMap<uniffle_wire::types::BlockId, bytes::Bytes>,
    blocks: &[Block],
) {
    let ids: Vec<i64> = read.keys().map(|id| id.0).collect();
    let mut expected: Vec<i64> = blocks.iter().map(|block| block.meta.block_id.0).collect();
    expected.sort_unstable();
    assert_eq!(ids, expected);
    for block in blocks {
        assert!(read[&block.meta.block_id] == block.data, "block {} has other bytes", block.meta.block_id);
    }
}
