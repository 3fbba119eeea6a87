//! Time and memory of a start that recovers many registrations, reports and index files.

use std::path::{Path, PathBuf};

use futures::future::join_all;
use tokio::time::Instant;

use super::*;
use crate::log::{Record, RegistrationRecord, Report};
use crate::store::{ExtentData, ExtentWrite};
use uniffle_base::budget::Budget;
use uniffle_io::blocking::BlockingDisk;
use uniffle_wire::types::{AppId, BlockId, BlockMeta, ShuffleId, ShuffleKey, TaskAttemptId};

const SHUFFLES: i32 = 1000;
const TASKS: i64 = 100;
const PARTITIONS: i32 = 10;
const BLOCK_BYTES: u32 = 16;

fn disk(root: &Path) -> Arc<dyn Disk> {
    Arc::new(BlockingDisk::new(root, 4, 16))
}

/// Returns a configuration that works however full the machine's disk is.
fn roomy() -> LocalConfig {
    LocalConfig { high_watermark: 1.0, low_watermark: 1.0, ..LocalConfig::default() }
}

fn id(task: i64, partition: i32) -> i64 {
    i64::from(partition) << 21 | task
}

/// Returns the records of a shuffle: its registration, and a report of every task.
fn records() -> Vec<Vec<u8>> {
    let registration = RegistrationRecord {
        ranges: vec![(0, PARTITIONS - 1)],
        user: "ann".into(),
        ..RegistrationRecord::default()
    };
    let report = |task| {
        let partitions = (0..PARTITIONS).map(|it| (PartitionId(it), vec![id(task, it)])).collect();
        Record::Report(Report { bitmap_count: 1, task_attempt: task, partitions, records: Vec::new() })
            .encode()
    };
    std::iter::once(Record::Registration(registration).encode()).chain((0..TASKS).map(report)).collect()
}

fn extent(partition: i32) -> ExtentWrite {
    let block = |task| BlockMeta {
        block_id: BlockId(id(task, partition)),
        task_attempt_id: TaskAttemptId(task),
        length: BLOCK_BYTES,
        uncompressed_length: BLOCK_BYTES,
        crc: 0,
    };
    let blocks: Vec<_> = (0..TASKS).map(block).collect();
    let length = blocks.len() as u64 * u64::from(BLOCK_BYTES);
    let data = ExtentData::Pieces(vec![vec![7; blocks.len() * BLOCK_BYTES as usize].into()]);
    ExtentWrite { partition: PartitionId(partition), blocks, length, data }
}

async fn fill(root: &Path) {
    let (disks, extents) = (vec![disk(root)], Budget::new(u64::MAX));
    let store = LocalStore::open(roomy(), disks, &extents, &Registry::new()).await.unwrap();
    let records = records();
    for shuffle in 0..SHUFFLES {
        let key = ShuffleKey::new(AppId::parse(APP).unwrap(), ShuffleId(shuffle));
        let handle = store.register(&key);
        store.append_metadata(&handle, &records[0]).await.unwrap();
        let appended = records[1..].iter().map(|record| store.append_metadata(&handle, record));
        assert!(join_all(appended.collect::<Vec<_>>()).await.iter().all(Result::is_ok));
        store.write(&key, (0..PARTITIONS).map(extent).collect()).await.unwrap();
    }
}

/// Returns a field of this process's status, in bytes.
fn status_bytes(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// Run `RECOVER_DIR=/tmp/recover cargo test --release --lib recovery_of_a_million -- --ignored
/// --nocapture` twice: the first run fills the directory, the second one starts with an empty heap.
/// There is no time limit, because the machine may be busy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement"]
async fn recovery_of_a_million_blocks_is_measured() {
    let root = PathBuf::from(std::env::var("RECOVER_DIR").unwrap_or_else(|_| "/tmp/recover".to_owned()));
    if !root.exists() {
        fill(&root).await;
        println!("filled");
        return;
    }
    let (registry, tasks) = (Registry::new(), Tasks::new());
    let memory = Memory::new(&MemoryConfig::default(), &registry).unwrap();
    let before = status_bytes("VmRSS");
    let began = Instant::now();
    let store = LocalStore::open(roomy(), vec![disk(&root)], memory.extents(), &registry).await.unwrap();
    let opened = began.elapsed();
    let recovered = store.take_recovered();
    let flush = FlushConfig { limits: quiet(), ..FlushConfig::default() };
    let flusher = Flusher::start(flush, Arc::clone(&memory), store, tasks.clone(), &registry).unwrap();
    let apps = Arc::new(AppRegistry::new(AppConfig::default(), memory.heap(), memory.answered()));
    let (m, f) = (Arc::clone(&memory), Some(flusher));
    let service = Service::new(ServiceConfig::default(), apps, m, f, tasks.clone(), &registry).unwrap();
    let restored = service.lifecycle.restore(recovered).await;
    let (took, more) = (began.elapsed(), status_bytes("VmHWM").saturating_sub(before));
    let blocks = u64::from(SHUFFLES.unsigned_abs() * PARTITIONS.unsigned_abs()) * TASKS.unsigned_abs();
    assert_eq!((restored.shuffles, restored.reported_blocks), (1000, blocks));
    assert!(
        service.diagnostics.losses().losses.is_empty() && service.diagnostics.losses().incomplete.is_empty()
    );
    println!(
        "{took:?}, of which the disks {opened:?}; {} MiB more at most, {} MiB charged",
        more >> 20,
        memory.heap().whole().used() >> 20
    );
    assert!(more <= 64 << 20, "{} MiB", more >> 20);
    tasks.cancel();
}
