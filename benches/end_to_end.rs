//! gRPC send and read end to end: the Rust client and a worker in one process, over loopback.
//!
//! Run: `cargo bench --bench end_to_end`. Client and worker share the cores, so figures are only
//! comparable with each other. A send round is a ticket and 8 MiB in one request over 8 partitions.
//! The worker flushes them when memory runs short. Reads request 8 MiB in responses of 1 MiB, from
//! memory and from disk.
//!
//! Figures: `benches/notes/criterion.md`.

#![allow(missing_docs, reason = "a benchmark")]
#![allow(clippy::unwrap_used, reason = "a benchmark ends when something fails")]

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use tokio::runtime::Runtime;
use uniffle_client::block::{Block, IdLayout};
use uniffle_client::grpc::{Backoff, ReadOptions, ShuffleClient};
use uniffle_client::send::SendForm;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_testkit::config::ConfigLines;
use uniffle_wire::types::{AppId, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId};
use uniffle_worker::server::Worker;

const ROUND_BYTES: u32 = 8 << 20;
const PARTITIONS: i32 = 8;

struct Bench {
    runtime: Runtime,
    worker: Worker,
    client: ShuffleClient,
    _dir: tempfile::TempDir,
}

impl Bench {
    fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let (worker, client) = runtime.block_on(async {
            let worker = ConfigLines { capacity: "512MiB", ..ConfigLines::default() }
                .start(&[dir.path().join("disk")])
                .await;
            let client = ShuffleClient::connect(worker.addresses().grpc).await.unwrap();
            (worker, client)
        });
        let patience =
            Backoff { attempts: 10_000, first: Duration::from_millis(1), longest: Duration::from_millis(5) };
        Self { runtime, worker, client: client.with_backoff(patience), _dir: dir }
    }

    fn register(&self, shuffle: i32) -> ShuffleKey {
        let key = ShuffleKey::new(AppId::parse("bench").unwrap(), ShuffleId(shuffle));
        self.runtime.block_on(self.client.register(&key, &[(0, PARTITIONS - 1)])).unwrap();
        key
    }

    fn flush(&self) {
        let flusher = self.worker.service().flusher().unwrap();
        flusher.flush_all();
        self.runtime.block_on(async {
            while flusher.unfinished() > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
    }
}

/// Returns the blocks of one round, with ids from `sequence` on.
fn batch(block_bytes: u32, sequence: &mut u32) -> Vec<(PartitionId, Vec<Block>)> {
    let generator = BlockGenerator::new(1, IdLayout::SPARK);
    let per_partition = ROUND_BYTES / PARTITIONS.unsigned_abs() / block_bytes;
    let first = *sequence;
    // The sequence has 21 bits. Blocks with these ids are on disk long before it wraps.
    *sequence = (first + per_partition) % (1 << 20);
    let block = |p: i32, n: u32| generator.block(PartitionId(p), TaskAttemptId(1), first + n, block_bytes);
    let blocks = |p: i32| (0..per_partition).map(|n| block(p, n)).collect();
    (0..PARTITIONS).map(|p| (PartitionId(p), blocks(p))).collect()
}

fn send(c: &mut Criterion) {
    let bench = Bench::start();
    let mut group = c.benchmark_group("grpc_send");
    group.throughput(Throughput::Bytes(u64::from(ROUND_BYTES))).sample_size(20);
    for (shuffle, block_bytes) in [(1, 1 << 10), (2, 16 << 10), (3, 1 << 20)] {
        let key = bench.register(shuffle);
        for form in [SendForm::Classic, SendForm::Contiguous] {
            let mut sequence = 0;
            group.bench_function(BenchmarkId::new(format!("{form:?}"), block_bytes), |b| {
                b.iter_batched(
                    || batch(block_bytes, &mut sequence),
                    |batch| bench.runtime.block_on(bench.client.push(&key, form, &batch)).unwrap(),
                    criterion::BatchSize::PerIteration,
                );
            });
        }
        bench.runtime.block_on(bench.client.unregister(&key)).unwrap();
    }
    group.finish();
}

async fn read_all(client: &ShuffleClient, key: &ShuffleKey) {
    let options = ReadOptions { read_buffer_size: 1 << 20, ..Default::default() };
    for p in 0..PARTITIONS {
        let read = client.read_partition(key, PartitionId(p), &options).await.unwrap();
        assert!(!read.blocks.is_empty());
    }
}

fn read(c: &mut Criterion) {
    let bench = Bench::start();
    let mut group = c.benchmark_group("grpc_read");
    group.throughput(Throughput::Bytes(u64::from(ROUND_BYTES))).sample_size(20);
    for (shuffle, block_bytes) in [(1, 1 << 10), (2, 16 << 10), (3, 1 << 20)] {
        let key = bench.register(shuffle);
        let mut sequence = 0;
        let batch = batch(block_bytes, &mut sequence);
        bench.runtime.block_on(bench.client.push(&key, SendForm::Classic, &batch)).unwrap();
        for tier in ["memory", "disk"] {
            if tier == "disk" {
                bench.flush();
            }
            group.bench_function(BenchmarkId::new(tier, block_bytes), |b| {
                b.iter(|| bench.runtime.block_on(read_all(&bench.client, &key)));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, send, read);
criterion_main!(benches);
