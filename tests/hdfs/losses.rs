//! Reads from a worker over disks and HDFS after `kill -9`: blocks in memory are reported lost,
//! blocks in HDFS are not. While HDFS is unreachable, reads are refused as retryable, and nothing
//! is declared lost.

use std::collections::BTreeMap;

use bytes::Bytes;
use uniffle_client::block::{Block, IdLayout};
use uniffle_client::grpc::{Backoff, ClientError, ReadOptions, ShuffleClient, register_request};
use uniffle_client::send::SendForm;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_wire::types::{AppId, BlockId, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId};
use uniffle_worker::proto::{RemoteStorage, StatusCode};

use crate::fixture::{open, plain_connector};
use crate::reader::read_directory;
use crate::real::{REAL_HDFS_DEADLINE, real};
use uniffle_testkit::hdfs::MiniHdfs;
use uniffle_testkit::wait_until;
use uniffle_testkit::worker::{Setup, WorkerProcess};

/// A partition whose flush is larger than `memory_spill_to_cold_threshold_size`, so it is stored in
/// HDFS.
const COLD: i32 = 0;
/// A partition that is flushed to a local disk.
const WARM: i32 = 1;
/// A partition too small to be flushed.
const IN_MEMORY: i32 = 2;

/// A worker with one shuffle and all blocks sent to it.
struct LossesFixture {
    worker: WorkerProcess,
    key: ShuffleKey,
    url: String,
    sent: BTreeMap<i32, Vec<Block>>,
    tasks: i64,
}

impl LossesFixture {
    async fn start(hdfs: &MiniHdfs, path: &'static str) -> Self {
        let worker = WorkerProcess::start(&Setup {
            name: path,
            capacity: "64MiB",
            disks: 2,
            store_type: "MEMORY_LOCALFILE_HDFS",
            made_tables: "[hybrid_store]\nmemory_single_buffer_max_spill_size = \"1MiB\"\n\
                          memory_spill_to_cold_threshold_size = \"2MiB\""
                .to_owned(),
            ..Setup::default()
        });
        let key = ShuffleKey::new(AppId::parse("app-1").unwrap(), ShuffleId(1));
        let url = hdfs.url(&format!("/{path}"));
        let fixture = Self { worker, key, url, sent: BTreeMap::new(), tasks: 0 };
        let mut request = register_request(&fixture.key, &[(0, 0), (1, 1), (2, 2), (3, 3)]);
        request.remote_storage =
            Some(RemoteStorage { path: fixture.url.clone(), ..RemoteStorage::default() });
        fixture.client().await.register_with(request).await.unwrap();
        fixture
    }

    async fn client(&self) -> ShuffleClient {
        ShuffleClient::connect(([127, 0, 0, 1], self.worker.ready().grpc_port).into()).await.unwrap()
    }

    /// Sends a task's blocks and waits for the acknowledgement.
    async fn send(&mut self, partition: i32, count: u32, bytes: u32) -> (TaskAttemptId, Vec<Block>) {
        self.tasks += 1;
        let (at, task) = (PartitionId(partition), TaskAttemptId(self.tasks));
        let generator = BlockGenerator::new(9, IdLayout::SPARK);
        let blocks: Vec<_> = (0..count).map(|n| generator.block(at, task, n, bytes)).collect();
        self.client().await.push(&self.key, SendForm::Classic, &[(at, blocks.clone())]).await.unwrap();
        self.sent.entry(partition).or_default().extend(blocks.clone());
        (task, blocks)
    }

    async fn report(
        &self,
        partition: i32,
        (task, blocks): &(TaskAttemptId, Vec<Block>),
    ) -> Result<(), ClientError> {
        let ids = blocks.iter().map(|block| block.meta.block_id).collect();
        self.client().await.report(&self.key, *task, &[(PartitionId(partition), ids)]).await
    }

    /// Sends a batch for each partition and waits until it is in its tier.
    async fn fill(&mut self) -> [(TaskAttemptId, Vec<Block>); 3] {
        let cold = self.send(COLD, 6, 600_000).await;
        let warm = self.send(WARM, 2, 600_000).await;
        let in_memory = self.send(IN_MEMORY, 3, 1000).await;
        wait_until("large partitions are flushed", REAL_HDFS_DEADLINE, || {
            let metrics = self.worker.metrics();
            let flushed = (
                metrics.expect("total_memory_spill_to_hdfs"),
                metrics.expect("local_file_event_flush_num"),
                metrics.expect("memory_spill_total_bytes"),
            );
            if flushed == (3_600_000.0, 1.0, 4_800_000.0) { Ok(()) } else { Err(format!("{flushed:?}")) }
        });
        [cold, warm, in_memory]
    }

    /// Reads from the worker only.
    async fn read_from_worker(&self, partition: i32) -> Result<BTreeMap<BlockId, Bytes>, ClientError> {
        let client = self.client().await.with_backoff(Backoff { attempts: 1, ..Backoff::default() });
        let read = client.read_partition(&self.key, PartitionId(partition), &ReadOptions::default()).await?;
        Ok(read.blocks)
    }

    /// Reads from the worker, then from HDFS. Asserts that all sent blocks are there.
    async fn read(&self, partition: i32) -> Result<(), ClientError> {
        let mut found = self.read_from_worker(partition).await?;
        let fs = open(&*plain_connector(), &self.url);
        let root = &self.url[self.url.rfind('/').unwrap()..];
        let directory = format!("{root}/{}/{partition}-{partition}", self.key);
        let remote = read_directory(&*fs, &directory, "127.0.0.1-").await;
        found.extend(remote.into_iter().map(|(id, data)| (BlockId(id), data)));
        self.assert_all(partition, &found);
        Ok(())
    }

    fn assert_all(&self, partition: i32, found: &BTreeMap<BlockId, Bytes>) {
        for block in &self.sent[&partition] {
            let data = found.get(&block.meta.block_id);
            assert!(
                data == Some(&block.data),
                "block {} of partition {partition} is missing or has other bytes",
                block.meta.block_id
            );
        }
    }

    fn unverified(&self) -> f64 {
        self.worker.metrics().expect("unverified_partitions")
    }

    fn wait_until_verified(&self) {
        wait_until("nothing is unverified", REAL_HDFS_DEADLINE, || match self.unverified() {
            0.0 => Ok(()),
            remaining => Err(format!("{remaining} partitions")),
        });
    }

    fn kill_and_start(&mut self) {
        self.worker.kill();
        self.worker.start_again();
    }

    async fn end(self) {
        self.client().await.unregister_app("app-1").await.unwrap();
        self.worker.assert_clean();
        self.worker.stop();
    }
}

fn refusal(result: Result<(), ClientError>) -> (StatusCode, String) {
    match result {
        Err(ClientError::Refused { status, text, .. }) => (status, text),
        other => panic!("the read was not refused: {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_worker_reports_only_memory_blocks_as_lost() {
    let Some(hdfs) = real().await else { return };
    let mut fixture = LossesFixture::start(&hdfs, "losses").await;
    let [cold, warm, in_memory] = fixture.fill().await;
    // When the process dies, COLD is reported in part, and partition 3 not at all.
    fixture.report(COLD, &(cold.0, cold.1[..3].to_vec())).await.unwrap();
    fixture.report(WARM, &warm).await.unwrap();
    fixture.report(IN_MEMORY, &in_memory).await.unwrap();
    let unreported = fixture.send(3, 2, 1000).await;
    let files = hdfs.list("/losses");
    assert_eq!(files.len(), 2, "{files:?}");
    fixture.worker.kill();
    // The state of a file after a process was killed during an append.
    for file in &files {
        hdfs.run(&format!("leave-open {}", file.path));
    }
    fixture.worker.start_again();
    fixture.wait_until_verified();
    for partition in [COLD, WARM] {
        fixture.read(partition).await.unwrap();
    }
    let (status, text) = refusal(fixture.read(IN_MEMORY).await);
    assert_eq!(status, StatusCode::InternalError, "{text}");
    for part in ["3 blocks", "app-1/1 partition 2", "in memory when the worker ended"] {
        assert!(text.contains(part), "{part} is missing: {text}");
    }
    assert_eq!(fixture.worker.metrics().expect("lost_blocks"), 3.0, "{:?}", fixture.worker.page("/losses"));
    // Reports that arrive after the kill.
    fixture.report(COLD, &(cold.0, cold.1[3..].to_vec())).await.unwrap();
    let (_, text) = refusal(fixture.report(3, &unreported).await);
    assert!(text.contains("the task must run again"), "{text}");
    // Resending the blocks repairs the loss.
    let lost = fixture.sent[&IN_MEMORY].clone();
    let batch = [(PartitionId(IN_MEMORY), lost)];
    fixture.client().await.push(&fixture.key, SendForm::Classic, &batch).await.unwrap();
    fixture.read(IN_MEMORY).await.unwrap();
    assert_eq!(fixture.worker.metrics().expect("lost_blocks"), 0.0);
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreachable_hdfs_reports_no_loss_and_no_short_result() {
    let Some(hdfs) = real().await else { return };
    let mut fixture = LossesFixture::start(&hdfs, "unverified").await;
    let [cold, warm, in_memory] = fixture.fill().await;
    fixture.report(COLD, &(cold.0, cold.1[..3].to_vec())).await.unwrap();
    fixture.report(WARM, &warm).await.unwrap();
    fixture.report(IN_MEMORY, &in_memory).await.unwrap();
    let unreported = fixture.send(3, 2, 1000).await;
    hdfs.run("stop-namenode");
    fixture.kill_and_start();
    assert_eq!(fixture.unverified(), 2.0);
    for partition in [COLD, IN_MEMORY] {
        let (status, text) = refusal(fixture.read(partition).await);
        assert_eq!(status, StatusCode::NoBuffer, "{text}");
        assert!(text.contains("searched in the remote store"), "{text}");
    }
    fixture.assert_all(WARM, &fixture.read_from_worker(WARM).await.unwrap());
    // These blocks cannot be declared lost before HDFS was searched: one more unverified partition.
    fixture.report(3, &unreported).await.unwrap();
    assert_eq!((fixture.unverified(), fixture.worker.metrics().expect("lost_blocks")), (3.0, 0.0));
    hdfs.run("start-namenode");
    fixture.wait_until_verified();
    fixture.read(COLD).await.unwrap();
    for (partition, blocks) in [(IN_MEMORY, "3 blocks"), (3, "2 blocks")] {
        let (status, text) = refusal(fixture.read(partition).await);
        assert!(status == StatusCode::InternalError && text.contains(blocks), "{text}");
    }
    fixture.end().await;
}
