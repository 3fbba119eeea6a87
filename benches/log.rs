//! Wait of reports until the metadata log is durable, by the number of reports at a time.
//!
//! Run: `cargo bench --bench log`. `LOG_DIR=/dev/shm` measures without a device.
//!
//! Figures: `benches/notes/metadata-log.md`.

#![allow(missing_docs, reason = "a benchmark")]

use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use futures::future::join_all;
use tempfile::TempDir;
use uniffle_io::Disk as _;
use uniffle_io::blocking::BlockingDisk;
use uniffle_wire::types::{AppId, ShuffleId, ShuffleKey};
use uniffle_worker::log::{Deadlines, Directory, DirectoryHealth, Incarnation, MetadataLog, Survey};
use uniffle_worker::runtime::Tasks;
use uuid::Uuid;

#[derive(Debug)]
struct Healthy;

impl DirectoryHealth for Healthy {
    fn rank(&self) -> Option<u8> {
        Some(0)
    }

    fn failed(&self, _: &std::io::Error) {}
}

async fn open(roots: &[TempDir], health: &Arc<Healthy>, tasks: &Tasks) -> MetadataLog {
    let directory = |root: &TempDir| {
        let io = Arc::new(BlockingDisk::new(root.path(), 4, 16));
        let health = Arc::downgrade(health) as Weak<dyn DirectoryHealth>;
        Directory { uuid: Uuid::new_v4(), label: io.root().display().to_string(), io, health }
    };
    let directories: Vec<_> = roots.iter().map(directory).collect();
    let deadlines = Deadlines { write: Duration::from_secs(10), name: Duration::from_secs(30) };
    let survey = Survey::take(&directories, deadlines.name).await;
    MetadataLog::open(directories, survey, deadlines, None, tasks).await.0
}

fn reports(c: &mut Criterion) {
    let base = std::env::var_os("LOG_DIR").map_or_else(std::env::temp_dir, Into::into);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let key = ShuffleKey::new(AppId::parse("application_1700000000000_0001").expect("an id"), ShuffleId(1));
    let shuffle = Incarnation { key, number: 1 };
    // Size of 100 block ids of one task.
    let report = Bytes::from(vec![7; 300]);
    for directories in [1, 2] {
        let mut group = c.benchmark_group(format!("report, {directories} directories"));
        for count in [1, 16, 64] {
            let roots: Vec<_> =
                (0..directories).map(|_| tempfile::tempdir_in(&base).expect("a directory")).collect();
            let (tasks, health) = (Tasks::new(), Arc::new(Healthy));
            let log = runtime.block_on(open(&roots, &health, &tasks));
            group.throughput(Throughput::Elements(count));
            group.bench_function(BenchmarkId::from_parameter(count), |b| {
                b.iter(|| {
                    let appends = (0..count).map(|_| log.append(shuffle.clone(), report.clone()));
                    let results = runtime.block_on(join_all(appends));
                    assert!(results.iter().all(Result::is_ok), "a report was refused");
                });
            });
            tasks.cancel();
        }
        group.finish();
    }
}

criterion_group!(benches, reports);
criterion_main!(benches);
