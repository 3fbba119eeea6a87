//! A worker with 200,000 partitions stays within its memory bound while writing, after recovery by
//! another process, and releases everything at the end.
//!
//! `cargo test --test process many_partitions -- --nocapture` prints the memory in use.

use std::time::Duration;

use uniffle_client::block::{Block, IdLayout};
use uniffle_client::grpc::{Backoff, ReadOptions, ShuffleClient};
use uniffle_client::send::SendForm;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_testkit::say;
use uniffle_testkit::worker::{Setup, WorkerProcess};
use uniffle_wire::types::{AppId, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId};

const CAPACITY_BYTES: u64 = 200_000_000;
/// Partitions of each of two applications.
const PARTITIONS: i32 = 100_000;
/// Partitions of one request. The ticket takes a page per partition.
const REQUEST_PARTITIONS: usize = 2500;
const BLOCK_BYTES: u32 = 100;

fn block(partition: i32) -> Block {
    let generator = BlockGenerator::new(7, IdLayout::SPARK);
    generator.block(PartitionId(partition), TaskAttemptId(0), 0, BLOCK_BYTES)
}

/// Writes and reports a block in every partition.
async fn write(client: ShuffleClient, key: ShuffleKey) {
    client.register(&key, &[(0, PARTITIONS - 1)]).await.unwrap();
    let partitions: Vec<i32> = (0..PARTITIONS).collect();
    for some in partitions.chunks(REQUEST_PARTITIONS) {
        let batch: Vec<_> = some.iter().map(|it| (PartitionId(*it), vec![block(*it)])).collect();
        client.push(&key, SendForm::Classic, &batch).await.unwrap();
        let reported: Vec<_> =
            batch.iter().map(|(partition, blocks)| (*partition, vec![blocks[0].meta.block_id])).collect();
        client.report(&key, TaskAttemptId(0), &reported).await.unwrap();
    }
}

async fn check(client: &ShuffleClient, keys: &[ShuffleKey]) {
    for key in keys {
        for partition in [0, 1, 2499, 2500, 77_777, PARTITIONS - 1] {
            let id = PartitionId(partition);
            let expected = block(partition);
            let read = client.read_partition(key, id, &ReadOptions::default()).await.unwrap();
            assert!(
                read.blocks[&expected.meta.block_id] == expected.data,
                "partition {partition} has other bytes"
            );
            assert_eq!(client.results(key, &[id], None).await.unwrap().cardinality(), 1);
        }
    }
}

async fn connect(worker: &WorkerProcess) -> ShuffleClient {
    let backoff =
        Backoff { attempts: 5000, first: Duration::from_millis(5), longest: Duration::from_millis(20) };
    let address = ([127, 0, 0, 1], worker.ready().grpc_port).into();
    ShuffleClient::connect(address).await.unwrap().with_backoff(backoff)
}

fn assert_memory_bound(worker: &WorkerProcess, idle: u64, what: &str) {
    let bound = CAPACITY_BYTES / 100 * 105 + (200 << 20);
    let (peak, heap) = (worker.peak_resident_bytes(), worker.metrics().total("heap_charged_bytes").unwrap());
    let used = worker.metrics().total("used_buffer_size").unwrap();
    say(&format!(
        "200,000 partitions {what}: {} MiB resident at most, {} MiB before them; {:.0} MiB of heap charged, {:.0} MiB of memory \
         used; {} MiB are allowed",
        peak >> 20,
        idle >> 20,
        heap / f64::from(1 << 20),
        used / f64::from(1 << 20),
        bound >> 20
    ));
    assert!(peak <= bound, "{} MiB are resident, {} MiB are allowed", peak >> 20, bound >> 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_partitions_stay_within_memory_bound() {
    let memory = "heap_capacity = \"128MiB\"";
    let setup = Setup { name: "partitions", capacity: "200M", memory, disks: 2, ..Setup::default() };
    let mut worker = tokio::task::spawn_blocking(move || WorkerProcess::start(&setup)).await.unwrap();
    let keys = ["app-1", "app-2"].map(|app| ShuffleKey::new(AppId::parse(app).unwrap(), ShuffleId(1)));
    let idle = worker.proc_status("VmRSS") << 10;
    let client = connect(&worker).await;
    futures::future::join_all(keys.iter().map(|key| write(client.clone(), key.clone()))).await;
    check(&client, &keys).await;
    assert_memory_bound(&worker, idle, "written");
    drop(client);

    // The stop flushes memory, so that the next process recovers everything from disk.
    let mut worker = tokio::task::spawn_blocking(move || {
        worker.terminate();
        worker.start_again();
        worker
    })
    .await
    .unwrap();
    assert_memory_bound(&worker, idle, "taken over");
    let client = connect(&worker).await;
    check(&client, &keys).await;
    for key in &keys {
        client.unregister_app(key.app.as_str()).await.unwrap();
    }
    drop(client);
    tokio::task::spawn_blocking(move || {
        worker.assert_clean();
        worker.assert_no_error_logged();
        worker.terminate();
    })
    .await
    .unwrap();
}
