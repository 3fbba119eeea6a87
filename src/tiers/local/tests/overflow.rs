//! The page cache as an overflow, by the clock of a device that writes 16 MiB in a second.

use parking_lot::Mutex;
use tokio::time::{Duration, Instant};

use super::*;
use crate::schema::SpareMemory;
use crate::tiers::{InMemory, Released};
use uniffle_testkit::fault::{EIO, Fault, Operation, Rule};

const MIB: u64 = 1 << 20;
const SPEED: u64 = 16 * MIB;
/// What waits for the disk in these tests: four seconds of work.
const BACKLOG: Backlog = Backlog { bytes: 64 * MIB, is_waited_for: true, is_last: false };

/// A store over one such disk of which the pace is known, with so much of the page cache.
async fn slow_store(config: LocalConfig) -> (TestDisk, Arc<LocalStore>, ShuffleHandle) {
    let disk = TestDisk::new("/a");
    let config = LocalConfig { index_cache_bytes: 0, ..config };
    let store = open_with(config, vec![disk.disk()]).await.unwrap();
    disk.faults.set_speed(SPEED);
    let handle = store.register(&key("app", 1));
    assert_eq!(
        written_in(&handle, 0, Backlog::default()).await,
        Duration::from_millis(63),
        "a MiB by the device"
    );
    (disk, store, handle)
}

fn cached(bytes: u64) -> LocalConfig {
    LocalConfig {
        page_cache_bytes: bytes,
        spare_memory: SpareMemory::Always(u64::MAX),
        ..LocalConfig::default()
    }
}

/// How long a batch of a MiB takes that is written while so much waits, in whole milliseconds.
async fn written_in(handle: &ShuffleHandle, id: i64, backlog: Backlog) -> Duration {
    let began = Instant::now();
    let of_batch = (backlog, Released::default());
    handle.write_of(&[extent(1, &[(id, MIB as usize)], true)], of_batch).await.unwrap();
    Duration::from_millis(u64::try_from(began.elapsed().as_millis()).unwrap())
}

#[tokio::test(start_paused = true)]
async fn long_backlog_uses_the_page_cache_within_its_limit() {
    let (_disk, store, handle) = slow_store(cached(2 * MIB)).await;
    let no_one_waits = Backlog { is_waited_for: false, ..BACKLOG };
    assert!(!written_in(&handle, 1, no_one_waits).await.is_zero());
    let short = Backlog { bytes: 4 * MIB, ..BACKLOG };
    assert!(!written_in(&handle, 2, short).await.is_zero());
    assert!(written_in(&handle, 3, BACKLOG).await.is_zero());
    assert!(written_in(&handle, 4, no_one_waits).await.is_zero(), "it would come after the one before");
    assert_eq!(store.core.overflow.used(), 2 * MIB);
    assert!(!written_in(&handle, 5, BACKLOG).await.is_zero(), "there is room for two");
    let ids = present(&store, &key("app", 1), PartitionId(1)).await;
    assert_eq!(ids.len(), 6, "readable, wherever it is");
    store.writer.tasks.drained().await;
    assert_eq!(store.core.overflow.used(), 0, "written back");
    assert_eq!(store.core.metrics.overflow_bytes.get(), 2 * MIB);
    assert!(written_in(&handle, 6, BACKLOG).await.is_zero(), "there is room again");
}

#[tokio::test(start_paused = true)]
async fn page_cache_is_unused_when_memory_is_short_or_syncing() {
    let none = LocalConfig { spare_memory: SpareMemory::Always(MIB - 1), ..cached(u64::MAX) };
    let synced = LocalConfig { sync: SyncWrites::Group, ..cached(u64::MAX) };
    let buffered_anyway = LocalConfig { direct_io: false, ..cached(u64::MAX) };
    for config in [none, synced] {
        let (_disk, store, handle) = slow_store(config).await;
        assert!(!written_in(&handle, 1, BACKLOG).await.is_zero());
        assert_eq!(store.core.overflow.used(), 0);
    }
    assert_eq!(
        super::super::overflow::Overflow::new(&buffered_anyway).admit(1, BACKLOG, Some(1.0)).map(drop),
        None
    );
}

#[tokio::test(start_paused = true)]
async fn failed_writeback_becomes_a_hole() {
    let (disk, store, handle) = slow_store(cached(u64::MAX)).await;
    let heard = Arc::new(Mutex::new(Vec::new()));
    let (hears, weak) = (Arc::clone(&heard), Arc::downgrade(&store));
    store.on_damage(Arc::new(move |key: &ShuffleKey, partition: PartitionId, reason: &str| {
        let read = weak.upgrade().unwrap().data(key, partition, 0, 2 * MIB as u32).unwrap();
        hears.lock().push((partition, read.has_hole(), reason.contains(".data")));
    }));
    disk.faults.add(Rule::once(Operation::WriteBack, Fault::Errno(EIO)));
    assert!(written_in(&handle, 1, BACKLOG).await.is_zero());
    store.writer.tasks.drained().await;
    let told = [(PartitionId(1), false, true), (PartitionId(1), true, true)];
    assert_eq!(*heard.lock(), told, "before it is a hole, and after");
    let ids = present(&store, &key("app", 1), PartitionId(1)).await;
    assert_eq!(ids, [0], "the other one is lost, and known to be");
    assert_eq!(store.core.metrics.extents_lost.get(), 1);
    assert_eq!(store.core.overflow.used(), 0);
}

/// The service would find it in memory, and not look again when memory has released it.
#[tokio::test(start_paused = true)]
async fn loss_is_reported_after_memory_is_released() {
    let (disk, store, handle) = slow_store(cached(u64::MAX)).await;
    let heard = Arc::new(AtomicUsize::new(0));
    let hears = Arc::clone(&heard);
    store.on_damage(Arc::new(move |_: &ShuffleKey, _: PartitionId, _: &str| {
        hears.fetch_add(1, Ordering::Relaxed);
    }));
    disk.faults.add(Rule::once(Operation::WriteBack, Fault::Errno(EIO)));
    let (in_memory, released) = InMemory::begin();
    handle.write_of(&[extent(1, &[(1, MIB as usize)], true)], (BACKLOG, released)).await.unwrap();
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!((disk.faults.injected(), store.core.overflow.used()), (1, 0));
    assert_eq!((heard.load(Ordering::Relaxed), store.core.metrics.extents_lost.get()), (0, 0));
    drop(in_memory);
    store.writer.tasks.drained().await;
    assert_eq!((heard.load(Ordering::Relaxed), store.core.metrics.extents_lost.get()), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn unpublished_batch_is_charged_until_written_back() {
    let (disk, store, handle) = slow_store(cached(u64::MAX)).await;
    disk.faults.add(Rule::once(Operation::Write, Fault::Errno(EIO)).on(".index"));
    let of_batch = (BACKLOG, Released::default());
    handle.write_of(&[extent(1, &[(1, MIB as usize)], true)], of_batch).await.unwrap_err();
    assert_eq!(store.core.overflow.used(), MIB);
    store.writer.tasks.drained().await;
    assert_eq!(store.core.overflow.used(), 0);
}
