//! Two NameNodes of one nameservice; the active one dies while a worker writes.

use std::collections::BTreeMap;

use bytes::Bytes;
use uniffle_client::block::{Block, IdLayout};
use uniffle_client::grpc::{ShuffleClient, register_request};
use uniffle_client::send::SendForm;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_wire::types::{AppId, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId};
use uniffle_worker::proto::{RemoteStorage, RemoteStorageConfItem, ShuffleRegisterRequest};
use uniffle_worker::remote::hdfs::RemoteFs;
use uniffle_worker::remote::hdfs::{RemoteLocation, RemoteTarget};

use crate::fixture::plain_connector;
use crate::reader::read_directory;
use crate::real::REAL_HDFS_DEADLINE;
use uniffle_testkit::hdfs::MiniHdfs;
use uniffle_testkit::maven;
use uniffle_testkit::wait_until;
use uniffle_testkit::worker::{Setup, WorkerProcess};

const PARTITIONS: i32 = 6;
const PATH: &str = "hdfs://ns1/uniffle";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_continue_on_standby_after_namenode_dies() {
    if !maven::is_available() {
        return;
    }
    let hdfs = MiniHdfs::start(&["ha=true"]);
    let settings = hdfs.nameservice("ns1");
    let worker = WorkerProcess::start(&Setup {
        name: "ha",
        capacity: "128MiB",
        disks: 0,
        store_type: "MEMORY_HDFS",
        made_tables: "[hybrid_store]\nmemory_single_buffer_max_spill_size = \"1MiB\"".to_owned(),
        ..Setup::default()
    });
    let client = ShuffleClient::connect(([127, 0, 0, 1], worker.ready().grpc_port).into()).await.unwrap();
    let key = ShuffleKey::new(AppId::parse("app-ha").unwrap(), ShuffleId(1));
    client.register_with(registration(&key, &settings)).await.unwrap();

    let generator = BlockGenerator::new(5, IdLayout::SPARK);
    let mut sent: BTreeMap<i32, Vec<Block>> = BTreeMap::new();
    let mut send = async |task: i64| {
        let block = |at, n| generator.block(PartitionId(at), TaskAttemptId(task), n, 300_000);
        let blocks = |at| (0..4).map(|n| block(at, n)).collect::<Vec<_>>();
        let batch: Vec<_> = (0..PARTITIONS).map(|at| (PartitionId(at), blocks(at))).collect();
        client.push(&key, SendForm::Classic, &batch).await.unwrap();
        for (at, blocks) in batch {
            sent.entry(at.0).or_default().extend(blocks);
        }
    };
    let in_hdfs = || worker.metrics().expect("total_memory_spill_to_hdfs");
    send(1).await;
    wait_until("the first task is in HDFS", REAL_HDFS_DEADLINE, || match in_hdfs() {
        7_200_000.0 => Ok(()),
        bytes => Err(format!("{bytes} bytes")),
    });
    for task in 2..6 {
        send(task).await;
    }
    hdfs.run("fail-over");
    for task in 6..8 {
        send(task).await;
    }
    wait_until("nothing is on its way", REAL_HDFS_DEADLINE, || {
        match worker.metrics().expect("memory_spill_to_hdfs") {
            0.0 => Ok(()),
            batches => Err(format!("{batches} batches")),
        }
    });
    // Blocks above the per-partition limit of in-flight batches go with the next flush.
    send(8).await;
    wait_until("all tasks are in HDFS", REAL_HDFS_DEADLINE, || match in_hdfs() {
        bytes if bytes >= 8.0 * 7_200_000.0 => Ok(()),
        bytes => Err(format!("{bytes} bytes")),
    });
    let location = RemoteLocation::parse(PATH).unwrap();
    let target = RemoteTarget { location, conf: settings, user: None };
    let fs = plain_connector().connect(&target).unwrap();
    wait_until("every block is readable", REAL_HDFS_DEADLINE, || {
        let reading = || tokio::runtime::Handle::current().block_on(everything(&*fs));
        let found = tokio::task::block_in_place(reading);
        let blocks = sent.values().flatten();
        let missing = blocks.filter(|block| found.get(&block.meta.block_id.0) != Some(&block.data)).count();
        if missing == 0 { Ok(()) } else { Err(format!("{missing} blocks are missing")) }
    });
    client.unregister_app("app-ha").await.unwrap();
    wait_until("the application's files are gone", REAL_HDFS_DEADLINE, || {
        match hdfs.list("/uniffle/app-ha") {
            remaining if remaining.is_empty() => Ok(()),
            remaining => Err(format!("{remaining:?}")),
        }
    });
    worker.assert_clean();
    worker.stop();
}

/// Returns a registration with the settings of the nameservice.
fn registration(key: &ShuffleKey, settings: &[(String, String)]) -> ShuffleRegisterRequest {
    let ranges: Vec<_> = (0..PARTITIONS).map(|partition| (partition, partition)).collect();
    let mut request = register_request(key, &ranges);
    let item =
        |(key, value): &(String, String)| RemoteStorageConfItem { key: key.clone(), value: value.clone() };
    let remote_storage_conf = settings.iter().map(item).collect();
    request.remote_storage = Some(RemoteStorage { path: PATH.to_owned(), remote_storage_conf });
    request
}

/// Returns the data in the files of all partitions, by block id.
async fn everything(fs: &dyn RemoteFs) -> BTreeMap<i64, Bytes> {
    let mut found = BTreeMap::new();
    for at in 0..PARTITIONS {
        found.extend(read_directory(fs, &format!("/uniffle/app-ha/1/{at}-{at}"), "127.0.0.1-").await);
    }
    found
}
