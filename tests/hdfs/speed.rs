//! Speed of spilling to HDFS, compared with Hadoop's own copy of as many bytes to the same HDFS.
//!
//! Run: `cargo test --release --test hdfs -- --ignored --nocapture spilling_two_gigabytes`

use std::time::Duration;

use tokio::time::Instant;
use uniffle_client::block::IdLayout;
use uniffle_client::grpc::{ShuffleClient, register_request};
use uniffle_client::send::SendForm;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_wire::types::{AppId, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId};
use uniffle_worker::proto::RemoteStorage;

use crate::real::real;
use uniffle_testkit::worker::{Setup, WorkerProcess};
use uniffle_testkit::{say, wait_until};

const PARTITIONS: i32 = 32;
/// Just below the spill threshold of a partition.
const BLOCKS: u32 = 63;
const BLOCK_BYTES: u32 = 1 << 20;
const DEADLINE: Duration = Duration::from_secs(600);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement, on an idle machine and with --release"]
async fn spilling_two_gigabytes_compared_with_put() {
    let Some(hdfs) = real().await else { return };
    let worker = WorkerProcess::start(&Setup {
        name: "speed",
        capacity: "4GiB",
        disks: 0,
        store_type: "MEMORY_HDFS",
        made_tables: "[hybrid_store]\nmemory_single_buffer_max_spill_size = \"64MiB\"".to_owned(),
        ..Setup::default()
    });
    let client = ShuffleClient::connect(([127, 0, 0, 1], worker.ready().grpc_port).into()).await.unwrap();
    let key = ShuffleKey::new(AppId::parse("app-speed").unwrap(), ShuffleId(1));
    let ranges: Vec<_> = (0..PARTITIONS).map(|partition| (partition, partition)).collect();
    let mut request = register_request(&key, &ranges);
    request.remote_storage = Some(RemoteStorage { path: hdfs.url("/speed"), ..RemoteStorage::default() });
    client.register_with(request).await.unwrap();
    let generator = BlockGenerator::new(1, IdLayout::SPARK);
    let send = async |numbers: std::ops::Range<u32>| {
        for partition in (0..PARTITIONS).map(PartitionId) {
            let block = |n| generator.block(partition, TaskAttemptId(1), n, BLOCK_BYTES);
            for first in numbers.clone().step_by(16) {
                let blocks = (first..numbers.end.min(first + 16)).map(block).collect();
                client.push(&key, SendForm::Classic, &[(partition, blocks)]).await.unwrap();
            }
        }
    };
    send(0..BLOCKS).await;
    assert_eq!(worker.metrics().expect("memory_spill_total_bytes"), 0.0, "nothing is spilled yet");
    let (start, cpu) = (Instant::now(), worker.cpu_seconds());
    // 3 % more blocks, with which each partition passes the threshold.
    send(BLOCKS..BLOCKS + 2).await;
    let wanted = f64::from(BLOCK_BYTES) * f64::from(BLOCKS + 2) * f64::from(PARTITIONS);
    wait_until("everything is in HDFS", DEADLINE, || {
        match worker.metrics().expect("total_memory_spill_to_hdfs") {
            bytes if bytes >= wanted - f64::from(PARTITIONS) * f64::from(BLOCK_BYTES) => Ok(()),
            bytes => Err(format!("{bytes} of {wanted}")),
        }
    });
    let seconds = start.elapsed().as_secs_f64();
    let cpu = worker.cpu_seconds() - cpu;
    client.unregister_app("app-speed").await.unwrap();
    worker.stop();

    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("64MiB");
    let block = generator.block(PartitionId(0), TaskAttemptId(2), 0, BLOCK_BYTES).data;
    std::fs::write(&file, block.repeat(64)).unwrap();
    let millis: f64 = hdfs.run(&format!("put {} /put {PARTITIONS}", file.display())).parse().unwrap();
    let put_bytes = f64::from(BLOCK_BYTES) * 64.0 * f64::from(PARTITIONS);
    say(&format!(
        "spilled {:.2} GB in {seconds:.1} s: {:.0} MB/s, {:.2} CPU-s/GB; hdfs dfs -put: {:.0} MB/s",
        wanted / 1e9,
        wanted / 1e6 / seconds,
        cpu / (wanted / 1e9),
        put_bytes / 1e3 / millis
    ));
}
