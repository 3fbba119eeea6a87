//! A start that recovers more block ids of one application than fit into its share of the heap.

use super::*;
use crate::log::{PartitionBlockIds, Record, RegistrationRecord, Report};
use crate::store::{ExtentData, ExtentWrite, TierHeap};
use uniffle_base::budget::{Budget, HeapKind};
use uniffle_wire::types::{AppId, BlockId, BlockMeta, ShuffleId, ShuffleKey, TaskAttemptId};

const GREEDY: &str = "greedy";
/// Blocks of each partition of the greedy application.
const BLOCKS: i64 = 20_000;
const PARTITIONS: i32 = 5;
/// Heap size. One application gets 256 KiB of it for reported ids: about 32,000 of the 100,000.
const HEAP_BYTES: u64 = 1 << 20;
/// An id that was reported but exists nowhere.
const LOST: i64 = 77;

fn key(app: &str) -> ShuffleKey {
    ShuffleKey::new(AppId::parse(app).unwrap(), ShuffleId(0))
}

/// Returns an id far from the others, at varying distances, so that a set of ids hardly compresses.
fn id(n: i64) -> i64 {
    (n << 40) | ((n * n * 0x9e37) & 0xff_ffff_ffff)
}

fn extent(partition: i32, ids: &[i64]) -> ExtentWrite {
    let block = |id: &i64| BlockMeta {
        block_id: BlockId(*id),
        task_attempt_id: TaskAttemptId(0),
        length: 1,
        uncompressed_length: 1,
        crc: 0,
    };
    let data = ExtentData::Pieces(vec![vec![7; ids.len()].into()]);
    let (blocks, length) = (ids.iter().map(block).collect(), ids.len() as u64);
    ExtentWrite { partition: PartitionId(partition), blocks, length, data }
}

fn report_of(partition: i32, ids: Vec<i64>) -> Vec<u8> {
    let partitions = vec![PartitionBlockIds { partition: PartitionId(partition), block_ids: ids }];
    Record::Report(Report { bitmap_count: 1, task_attempt: 0, partitions, records: Vec::new() }).encode()
}

async fn filled() -> Arc<dyn Disk> {
    let disk: Arc<dyn Disk> = Arc::new(MemoryDisk::new("/disk", None));
    let (disks, heap) = (vec![Arc::clone(&disk)], Budget::new(u64::MAX));
    let store = LocalStore::open(LocalConfig::default(), disks, &heap, &Registry::new()).await.unwrap();
    let registration =
        RegistrationRecord { ranges: vec![(0, PARTITIONS - 1)], ..RegistrationRecord::default() };
    let registration = Record::Registration(registration).encode();
    for app in [GREEDY, APP] {
        let handle = store.register(&key(app));
        store.append_metadata(&handle, &registration).await.unwrap();
        let some = if app == GREEDY { 1000 } else { 10 };
        let mut reported: Vec<i64> = (1..=some).map(id).collect();
        if app == GREEDY {
            reported.push(LOST);
        }
        store.append_metadata(&handle, &report_of(0, reported)).await.unwrap();
        let blocks = if app == GREEDY { BLOCKS } else { some };
        let ids: Vec<i64> = (1..=blocks).map(id).collect();
        for partition in 0..PARTITIONS {
            store.write(&key(app), vec![extent(partition, &ids)]).await.unwrap();
        }
    }
    disk
}

#[tokio::test]
async fn ids_beyond_the_share_of_an_application_stay_on_disk() {
    let (disk, registry, tasks) = (filled().await, Registry::new(), Tasks::new());
    let config = MemoryConfig { heap_bytes: HEAP_BYTES, ..memory_config(Default::default()) };
    let memory = Memory::new(&config, &registry).unwrap();
    let heap = TierHeap { extents: memory.extents().clone(), heap: Some(memory.heap().clone()) };
    let store = LocalStore::open(LocalConfig::default(), vec![disk], heap, &registry).await.unwrap();
    let recovered = store.take_recovered();
    assert!(recovered.shuffles.iter().any(|shuffle| shuffle.present.in_tier().count() > 0));
    assert!(
        memory.heap().of(HeapKind::ReportedIds).used() <= HEAP_BYTES / 4,
        "reported ids of one application exceed half of the share of their kind"
    );
    let flush = FlushConfig { limits: quiet(), ..FlushConfig::default() };
    let (m, s) = (Arc::clone(&memory), Arc::clone(&store));
    let flusher = Flusher::start(flush, m, s, tasks.clone(), &registry).unwrap();
    let apps = Arc::new(AppRegistry::new(AppConfig::default(), memory.heap(), memory.answered()));
    let (m, f) = (Arc::clone(&memory), Some(flusher));
    let service = Service::new(ServiceConfig::default(), apps, m, f, tasks.clone(), &registry).unwrap();
    let restored = service.lifecycle.restore(recovered).await;
    assert_eq!((restored.shuffles, restored.reported_blocks), (2, 1011));

    // The other application is served at once.
    let report = async |app: &'static str, partition: i32, ids: Vec<i64>| {
        let partitions = vec![PartitionBlockIds { partition: PartitionId(partition), block_ids: ids }];
        let (shuffle, task_attempt, bitmap_count, records) = (0, 1, 1, Vec::new());
        let request = ReportRequest { app, shuffle, task_attempt, bitmap_count, partitions, records };
        service.ingest.report(request).await
    };
    report(APP, 1, (1..=10).map(id).collect()).await.unwrap();
    // The missing block is found to be lost, and no other.
    let lost = || service.diagnostics.losses().losses.iter().map(|loss| loss.blocks).sum::<u64>();
    within_time("the lost block is named", || lost() > 0).await;
    assert_eq!(lost(), 1);
    // Blocks on the disk may be reported, others may not.
    for partition in 1..PARTITIONS {
        report(GREEDY, partition, (1..=100).map(id).collect()).await.unwrap();
        let refused = report(GREEDY, partition, vec![id(200), LOST]).await.unwrap_err();
        assert!(matches!(refused, ServiceError::Lost(_)), "{refused}");
    }
    assert_eq!(lost(), 1);
    assert!(memory.heap().of(HeapKind::ReportedIds).used() <= HEAP_BYTES / 4 + (16 << 10));
    for app in [GREEDY, APP] {
        service.lifecycle.unregister_app(app).unwrap();
    }
    assert_eq!(memory.heap().of(HeapKind::ReportedIds).used(), 0);
    tasks.cancel();
    tasks.drained().await;
}
