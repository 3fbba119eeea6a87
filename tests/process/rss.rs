//! Resident memory of a worker under writes, after large responses, and idle.
//!
//! It stays within capacity × 1.05 + 200 MiB while a client writes four times the capacity in the
//! most expensive shape: 1 KiB blocks, one per partition and task, over 10,000 partitions.
//! `cargo test --test process rss -- --nocapture` prints the figures of docs/benchmarks.md.

use std::time::Duration;

use tokio::time::Instant;
use uniffle_client::block::{Block, IdLayout};
use uniffle_client::grpc::{Backoff, ReadOptions, ShuffleClient};
use uniffle_client::send::SendForm;
use uniffle_coordinator::proto::coordinator_server_client::CoordinatorServerClient;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_testkit::worker::{Setup, WorkerProcess};
use uniffle_testkit::{say, wait_until};
use uniffle_wire::types::{AppId, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId};
use uniffle_worker::proto;

const CAPACITY_BYTES: u64 = 200_000_000;
const BLOCK_BYTES: u32 = 1024;
const PARTITIONS: i32 = 10_000;
/// Each task writes one block to every partition: 80 × 10,000 KiB are 4.1 times the capacity.
const TASKS: i64 = 80;
/// Partitions of one request. Its ticket, a page per partition on top of the data, fits into the
/// capacity.
const REQUEST_PARTITIONS: i32 = 2500;
/// Concurrent tasks.
const WRITERS: i64 = 4;

fn block(partition: i32, task: i64) -> Block {
    let generator = BlockGenerator::new(7, IdLayout::SPARK);
    generator.block(PartitionId(partition), TaskAttemptId(task), 0, BLOCK_BYTES)
}

/// Writes the output of every `WRITERS`th task.
async fn write(client: ShuffleClient, key: ShuffleKey, first_task: i64) {
    for task in (first_task..TASKS).step_by(usize::try_from(WRITERS).unwrap()) {
        for first in (0..PARTITIONS).step_by(usize::try_from(REQUEST_PARTITIONS).unwrap()) {
            let partitions = first..first + REQUEST_PARTITIONS;
            let batch: Vec<_> = partitions.map(|p| (PartitionId(p), vec![block(p, task)])).collect();
            client.push(&key, SendForm::Classic, &batch).await.unwrap();
        }
    }
}

async fn check(client: &ShuffleClient, key: &ShuffleKey, partition: i32) -> usize {
    let read = client.read_partition(key, PartitionId(partition), &ReadOptions::default()).await.unwrap();
    assert_eq!(
        read.blocks.len(),
        usize::try_from(TASKS).unwrap(),
        "blocks of partition {partition} are missing"
    );
    for task in 0..TASKS {
        let expected = block(partition, task);
        assert!(
            read.blocks[&expected.meta.block_id] == expected.data,
            "the block of task {task} in partition {partition} has other bytes"
        );
    }
    read.from_disk
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writing_four_times_capacity_stays_within_bound() {
    let setup = Setup { name: "rss", capacity: "200M", disks: 2, ..Setup::default() };
    let worker = tokio::task::spawn_blocking(move || WorkerProcess::start(&setup)).await.unwrap();
    let address = ([127, 0, 0, 1], worker.ready().grpc_port).into();
    let backoff =
        Backoff { attempts: 5000, first: Duration::from_millis(5), longest: Duration::from_millis(20) };
    let client = ShuffleClient::connect(address).await.unwrap().with_backoff(backoff);
    let key = ShuffleKey::new(AppId::parse("app-1").unwrap(), ShuffleId(1));
    client.register(&key, &[(0, PARTITIONS - 1)]).await.unwrap();

    let started = Instant::now();
    futures::future::join_all((0..WRITERS).map(|first| write(client.clone(), key.clone(), first))).await;
    let seconds = started.elapsed().as_secs_f64();
    let mut from_disk = 0;
    for partition in [0, 1, 2499, 2500, 4999, 5000, 7777, PARTITIONS - 1] {
        from_disk += check(&client, &key, partition).await;
    }
    assert!(from_disk > 0, "nothing was flushed, so the test checks nothing");

    let peak = worker.peak_resident_bytes();
    let written = TASKS.unsigned_abs() * u64::from(PARTITIONS.unsigned_abs()) * u64::from(BLOCK_BYTES);
    assert!(written >= 4 * CAPACITY_BYTES);
    say(&format!(
        "rss: {} MiB written in {seconds:.1} s through a capacity of {} MiB; largest resident size {} MiB",
        written >> 20,
        CAPACITY_BYTES >> 20,
        peak >> 20
    ));
    let bound = CAPACITY_BYTES / 100 * 105 + (200 << 20);
    assert!(peak <= bound, "{} MiB are resident, {} MiB are allowed", peak >> 20, bound >> 20);

    client.unregister_app("app-1").await.unwrap();
    drop(client);
    tokio::task::spawn_blocking(move || {
        worker.assert_clean();
        worker.assert_no_error_logged();
        worker.stop();
    })
    .await
    .unwrap();
}

/// Regression test: each allocator arena retained freed memory for seconds, under attack up to 160
/// MiB beside a heap of 72 MiB.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn freed_response_memory_is_returned_to_the_system() {
    /// Memory retained by the allocator, one charge step, the memory freed by the last request, and
    /// uncharged memory.
    const KEPT_BYTES_MAX: f64 = (24 << 20) as f64;
    let setup = Setup { name: "freed", capacity: "256M", ..Setup::default() };
    let worker = tokio::task::spawn_blocking(move || WorkerProcess::start(&setup)).await.unwrap();
    let address = format!("http://127.0.0.1:{}", worker.ready().grpc_port);
    let coordinator = CoordinatorServerClient::connect(address).await.unwrap();
    // An assignment of 100,000 ranges takes about 30 MB; 1,000 ranges take a hundredth of that.
    let assign = async |ranges: i32| {
        let request = proto::GetShuffleServerRequest {
            application_id: "app-1".to_owned(),
            partition_num: ranges,
            partition_num_per_range: 1,
            data_replica: 1,
            assignment_shuffle_server_number: -1,
            ..Default::default()
        };
        let mut coordinator = coordinator.clone().max_decoding_message_size(usize::MAX);
        coordinator.get_shuffle_assignments(request).await.unwrap();
    };
    for _ in 0..4 {
        futures::future::join(assign(100_000), assign(100_000)).await;
    }
    for _ in 0..100 {
        assign(1000).await;
    }
    let metrics = tokio::task::block_in_place(|| worker.metrics());
    let of = |name: &str| metrics.expect(&format!("allocator_{name}_bytes"));
    let kept = of("resident") - of("active") - of("metadata");
    say(&format!("the allocator keeps {:.1} MiB", kept / f64::from(1 << 20)));
    assert!(kept <= KEPT_BYTES_MAX, "the allocator keeps {:.0} MiB", kept / f64::from(1 << 20));
    drop(coordinator);
    tokio::task::block_in_place(|| {
        worker.assert_clean();
        worker.stop();
    });
}

/// docs/benchmarks.md has the figures of a release build.
#[test]
fn idle_worker_has_few_threads_and_little_memory() {
    let worker = WorkerProcess::start(&Setup { name: "idle", ..Setup::default() });
    let threads_max = 12 + 2 * std::thread::available_parallelism().unwrap().get() as u64;
    // Threads of the start end by themselves.
    wait_until("only the threads of an idle worker are left", Duration::from_secs(60), || {
        match worker.proc_status("Threads") {
            threads if threads <= threads_max => Ok(()),
            threads => Err(format!("{threads}, {threads_max} are allowed")),
        }
    });
    let resident = worker.proc_status("VmRSS") >> 10;
    assert!(resident <= 64, "{resident} MiB are resident");
    worker.stop();
}
