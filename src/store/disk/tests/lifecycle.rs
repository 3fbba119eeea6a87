//! Claims of directories, states of disks (read-only, dead, full), short-lived shuffles, concurrent
//! writers and purges, and the descriptors and heap that shuffles use.

use futures::future::join_all;

use super::*;
use crate::store::Purge;
use uniffle_io::WriteOpen;
use uniffle_io::blocking::BlockingDisk;
use uniffle_testkit::fault::{EIO, Fault, Operation, Rule};

#[tokio::test]
async fn purge_spares_ids_with_the_same_prefix() {
    let disks = [TestDisk::new("/disk")];
    let store = store_on(&disks).await;
    let keys = [key("app-1", 1), key("app-1", 10), key("app-10", 1), key("app-10", 10)];
    for (id, key) in keys.iter().enumerate() {
        store.register(key);
        store.write(key, vec![extent(1, &[(id as i64, 100)], false)]).await.unwrap();
    }
    store.purge_app(&keys[0].app).await;
    for (id, key) in keys.iter().enumerate().skip(2) {
        assert_eq!(read_all(&store, key, 1).await.unwrap(), [id as i64]);
    }
    assert_eq!(store.index(&keys[0], PartitionId(1)).unwrap_err().kind, StoreErrorKind::NotFound);
    store.purge(&keys[2]).await;
    assert_eq!(read_all(&store, &keys[3], 1).await.unwrap(), [3]);
    assert_eq!(store.shuffle_count(), 1);
    assert!(disks[0].app_directories().iter().all(|path| path.starts_with("apps/app-10")));
    store.purge_app(&keys[3].app).await;
    assert_nothing_left(&store, &disks).await;
}

#[tokio::test]
async fn batch_does_not_enter_a_later_incarnation() {
    let disks = [TestDisk::new("/disk")];
    let store = store_on(&disks).await;
    let key = key("app", 1);
    let old = store.register(&key);
    old.write(vec![extent(1, &[(1, 100)], false)]).await.unwrap();
    store.purge(&key).await;
    let new = store.register(&key);
    let error = old.write(vec![extent(1, &[(2, 100)], false)]).await.unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::Purged);
    new.write(vec![extent(1, &[(3, 100)], false)]).await.unwrap();
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [3]);
    assert_eq!(disks[0].app_files()[0], Path::new("apps/app/1.2/0.data"));
}

#[tokio::test]
async fn open_read_of_a_purged_shuffle_ends_with_an_error() {
    let disks = [TestDisk::new("/disk")];
    let store = store_on(&disks).await;
    let key = key("app", 1);
    store.register(&key);
    store.write(&key, vec![extent(1, &[(1, 100)], false)]).await.unwrap();
    let mut read = store.data(&key, PartitionId(1), 0, 100).unwrap().chunks;
    let mut index = store.index(&key, PartitionId(1)).unwrap().chunks;
    store.purge(&key).await;
    assert_eq!(read.next_chunk(&HeapBuffers).await.unwrap_err().kind, StoreErrorKind::Purged);
    assert_eq!(index.next_chunk(&HeapBuffers).await.unwrap_err().kind, StoreErrorKind::Purged);
    drop((read, index));
    assert!(store.disks()[0].is_healthy(), "a missing file must not count against the disk");
}

/// Writes and reads back. Returns whether every result was valid.
async fn write_in_a_race(store: &LocalStore, handle: &DiskShuffleHandle, key: &ShuffleKey, id: i64) -> bool {
    let batch = vec![extent(1, &[(id, 3000)], id % 2 == 0), extent(2, &[(id, 10)], false)];
    match handle.write(batch).await {
        Ok(_) => read_all(store, key, 1).await.is_ok_and(|ids| ids.len() <= 4) || handle.shuffle.is_purged(),
        Err(error) => error.kind == StoreErrorKind::Purged,
    }
}

/// Writers, readers and a purge on real threads. Nothing is left, whatever their order.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn purges_and_writes_race() {
    let disks = [TestDisk::new("/a"), TestDisk::new("/b")];
    let store = store_on(&disks).await;
    let tasks = crate::runtime::Tasks::new();
    let good = Arc::new(AtomicU64::new(0));
    for round in 0..60 {
        let key = key("app", 1);
        let handle = store.register(&key);
        for id in 0..4 {
            let (store, handle, key, good) =
                (Arc::clone(&store), handle.clone(), key.clone(), Arc::clone(&good));
            tasks.spawn("writer", async move {
                // A panic in a task does not fail the test, but a count that is too small does.
                let fine = write_in_a_race(&store, &handle, &key, id).await;
                good.fetch_add(u64::from(fine), Ordering::Relaxed);
            });
        }
        for _ in 0..round % 7 {
            tokio::task::yield_now().await;
        }
        store.purge_app(&key.app).await;
    }
    tasks.drained().await;
    assert_eq!(good.load(Ordering::Relaxed), 240);
    store.purge_app(&key("app", 1).app).await;
    assert_nothing_left(&store, &disks).await;
}

#[tokio::test]
async fn many_writers_of_one_shuffle_make_one_gapless_stream() {
    let disks = [TestDisk::new("/a"), TestDisk::new("/b"), TestDisk::new("/c")];
    let store = store_on(&disks).await;
    let key = key("app", 1);
    store.register(&key);
    let writes =
        (0..50).map(|id| store.write(&key, vec![extent(1, &[(id, 500 + id as usize)], id % 3 == 0)]));
    for published in join_all(writes).await {
        published.unwrap();
    }
    let mut ids = read_all(&store, &key, 1).await.unwrap();
    ids.sort_unstable();
    assert_eq!(ids, (0..50).collect::<Vec<_>>());
}

#[tokio::test]
async fn directory_has_one_owner_and_keeps_its_identity() {
    let disk = TestDisk::new("/disk");
    let store = open(vec![disk.disk()]).await.unwrap();
    let uuid = store.disks()[0].uuid;
    assert_eq!(open(vec![disk.disk()]).await.unwrap_err().kind, StoreErrorKind::InUse);
    let key = key("app", 1);
    store.register(&key);
    store.write(&key, vec![extent(1, &[(1, 100)], false)]).await.unwrap();
    drop(store);
    let config = LocalConfig { recovery: false, ..LocalConfig::default() };
    let store = open_with(config, vec![disk.disk()]).await.unwrap();
    assert_eq!(store.disks()[0].uuid, uuid);
    assert!(disk.app_files().is_empty());
    assert!(disk.memory.files().len() > 2, "files must be deleted later, not at once");
    assert_nothing_left(&store, &[disk]).await;
}

#[tokio::test]
async fn real_directory_has_one_owner() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("not/there/yet");
    let disk = || Arc::new(BlockingDisk::new(&path, 1, 1)) as Arc<dyn Disk>;
    let store = open_real(vec![disk()]).await.unwrap();
    assert_eq!(open_real(vec![disk()]).await.unwrap_err().kind, StoreErrorKind::InUse);
    assert_eq!(open_real(vec![disk(), disk()]).await.unwrap_err().kind, StoreErrorKind::Copied);
    drop(store);
    open_real(vec![disk()]).await.unwrap();
}

#[tokio::test]
async fn directory_that_is_not_ours_is_left_alone() {
    let disk = TestDisk::new("/home");
    disk.memory.create_dir_all(Path::new("apps/precious")).await.unwrap();
    disk.memory.write_small(Path::new("apps/precious/thesis"), b"years".to_vec()).await.unwrap();
    let other = TestDisk::new("/other");
    let error = open(vec![other.disk(), disk.disk()]).await.unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::NotOurs);
    assert!(error.to_string().contains("/home"), "{error}");
    assert_eq!(disk.memory.files(), [PathBuf::from("apps/precious/thesis")]);

    let damaged = TestDisk::new("/damaged");
    damaged.memory.write_small(Path::new(MARKER), b"some later format\n".to_vec()).await.unwrap();
    damaged.memory.create_dir_all(Path::new("apps/x")).await.unwrap();
    assert_eq!(open(vec![damaged.disk()]).await.unwrap_err().kind, StoreErrorKind::Unclaimed);
    assert_eq!(damaged.app_directories(), [PathBuf::from("apps/x")]);
}

#[tokio::test]
async fn read_only_disk_serves_reads_until_writable() {
    let (disks, store, key, handle) = two_disks_with_blocks(4).await;
    drop((handle, store));
    disks[0].memory.set_read_only(true);
    let before = disks[0].memory.files();
    let store = store_on(&disks).await;
    let info = &store.disks()[0];
    assert_eq!((info.condition, info.path.as_path()), (DiskCondition::ReadOnly, Path::new("/a")));
    assert!(info.fault.is_some());
    assert_eq!(store.core.metrics.disk_is_read_only.with_label_values(&["/a"]).get(), 1);
    assert_eq!(
        open(vec![disks[0].disk()]).await.unwrap_err().kind,
        StoreErrorKind::InUse,
        "the directory is locked"
    );
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [0, 1, 2, 3]);
    for id in 4..8 {
        assert_eq!(store.write(&key, vec![extent(1, &[(id, 9000)], true)]).await.unwrap().disk, 1);
    }
    store.probe().await;
    store.maintain_once().await;
    assert_eq!(store.disks()[0].condition, DiskCondition::ReadOnly);
    assert_eq!(disks[0].memory.files(), before);

    disks[0].memory.set_read_only(false);
    store.probe().await;
    assert_eq!(store.disks()[0].condition, DiskCondition::Healthy);
    let mut taken = [0; 2];
    for id in 8..16 {
        taken[store.write(&key, vec![extent(1, &[(id, 9000)], true)]).await.unwrap().disk] += 1;
    }
    assert!(taken[0] > 0, "{taken:?}");
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), (0..16).collect::<Vec<_>>());
}

/// Only a read-only disk is left, and it is served.
#[tokio::test]
async fn worker_starts_with_only_a_read_only_disk() {
    let disks = [TestDisk::new("/a")];
    let store = store_on(&disks).await;
    let key = key("app", 1);
    let handle = store.register(&key);
    store.append_metadata(&handle, b"registered").await.unwrap();
    store.write(&key, vec![extent(1, &[(1, 9000)], true)]).await.unwrap();
    drop((handle, store));
    disks[0].memory.set_read_only(true);
    let store = store_on(&disks).await;
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1]);
    let error = store.write(&key, vec![extent(1, &[(2, 9000)], true)]).await.unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::Unhealthy);
}

#[tokio::test]
async fn empty_file_system_with_lost_and_found_is_accepted() {
    let disk = TestDisk::new("/mnt");
    disk.memory.create_dir_all(Path::new("lost+found")).await.unwrap();
    open(vec![disk.disk()]).await.unwrap();
}

#[tokio::test]
async fn dead_disk_at_start_is_left_out_if_another_works() {
    let disks = [TestDisk::new("/dead"), TestDisk::new("/alive")];
    disks[0].faults.add(Rule::always(Operation::Other, Fault::Errno(EIO)));
    let store = store_on(&disks).await;
    assert_eq!(store.disks().len(), 1);
    assert_eq!(store.core.metrics.dirs_corrupted.get(), 1);
    assert_eq!(store.core.metrics.dirs_total.get(), 2);
    let key = key("app", 1);
    store.register(&key);
    store.write(&key, vec![extent(1, &[(1, 1)], false)]).await.unwrap();
    drop(store);
    assert_eq!(open(vec![disks[0].disk()]).await.unwrap_err().kind, StoreErrorKind::Io);
    assert_eq!(open(Vec::new()).await.unwrap_err().kind, StoreErrorKind::Unhealthy);
}

#[tokio::test]
async fn disk_above_high_watermark_is_full_until_below_low() {
    let disk = TestDisk::new("/disk");
    disk.memory.set_capacity(Some(100_000));
    let store = open(vec![disk.disk()]).await.unwrap();
    let fill = |bytes: usize| {
        let memory = disk.memory.clone();
        async move { memory.write_small(Path::new("trash/ballast"), vec![0; 100 * bytes]).await.unwrap() }
    };
    let full = || async {
        store.core.disks[0].measure().await.unwrap();
        store.disks()[0].is_full()
    };
    for (bytes, expected) in [(700, false), (800, true), (720, true), (500, false), (720, false)] {
        fill(bytes).await;
        assert_eq!(full().await, expected, "{bytes}");
    }
}

#[tokio::test]
async fn descriptors_are_bounded_and_opened_again() {
    let disk = TestDisk::new("/disk");
    let config = LocalConfig { descriptors_max: 2, ..LocalConfig::default() };
    let store = open_with(config, vec![disk.disk()]).await.unwrap();
    let keys: Vec<_> = (0..5).map(|shuffle| key("app", shuffle)).collect();
    for id in 0..3 {
        for key in &keys {
            store.register(key);
            store.write(key, vec![extent(1, &[(id, 10)], false)]).await.unwrap();
            assert!(store.core.files.len() <= 2);
        }
    }
    for key in &keys {
        assert_eq!(read_all(&store, key, 1).await.unwrap(), [0, 1, 2]);
    }
    assert_eq!(disk.app_files().len(), 10);
    disk.memory.open_write(&disk.app_files()[0], WriteOpen::default()).await.unwrap();
}

#[tokio::test]
async fn extent_lists_are_charged_until_purge() {
    let disk = TestDisk::new("/a");
    let key = key("app", 0);
    let opened = |extents: Budget| {
        let disks = vec![disk.disk()];
        async move { LocalStore::open(LocalConfig::default(), disks, &extents, &Registry::new()).await.unwrap() }
    };
    let whole = Budget::new(10);
    let extents = whole.child(u64::MAX);
    let store = opened(extents.clone()).await;
    store.register(&key);
    for round in 0..100 {
        store.write(&key, vec![extent(0, &[(round, 10)], true)]).await.unwrap();
        assert_eq!(extents.used() > 0, round > 0, "only the first extent is charged with its partition");
    }
    assert!(
        (40 * 99..60 * 100).contains(&extents.used()),
        "the extents are charged {} bytes",
        extents.used()
    );
    assert_eq!(whole.used(), extents.used());
    drop(store);
    assert_eq!(whole.used(), 0);

    let store = opened(extents.clone()).await;
    assert!(
        (40 * 100..65 * 100).contains(&extents.used()),
        "the extents are charged {} bytes",
        extents.used()
    );
    assert_eq!(store.partition_bytes(&key, PartitionId(0)), 1000);
    store.purge(&key).await;
    assert_eq!(whole.used(), 0);
}

/// Registrations wait on runtime threads for the lock under which a shuffle is forgotten.
#[tokio::test]
async fn detached_shuffle_is_walked_before_its_files_are_deleted() {
    let disk = TestDisk::new("/a");
    let (key, extents, registry) = (key("app", 0), Budget::new(u64::MAX), Registry::new());
    let store = LocalStore::open(LocalConfig::default(), vec![disk.disk()], &extents, &registry);
    let store = store.await.unwrap();
    store.register(&key);
    for round in 0..9 {
        store.write(&key, vec![extent(0, &[(round, 10)], true)]).await.unwrap();
    }
    let keys = std::slice::from_ref(&key);
    let deletion = Tier::forget(Arc::clone(&store), &key.app, keys, Purge::Shuffles).unwrap();
    assert_eq!(store.index(&key, PartitionId(0)).unwrap_err().kind, StoreErrorKind::NotFound);
    assert!(extents.used() > 0 && store.core.metrics.extents.get() == 9);
    store.maintain_once().await;
    assert!(!disk.app_files().is_empty() && store.core.files.len() > 0);
    deletion.await;
    assert_eq!((extents.used(), store.core.metrics.deleted_bytes.get()), (0, 90));
    assert_nothing_left(&store, &[disk]).await;
}

#[tokio::test]
async fn dropped_deletion_is_finished_later() {
    let (disks, store, key, _) = two_disks_with_blocks(9).await;
    drop(Tier::forget(Arc::clone(&store), &key.app, std::slice::from_ref(&key), Purge::Shuffles));
    store.maintain_once().await;
    assert_eq!(store.core.metrics.deleted_bytes.get(), 81_000);
    store.purge_app(&key.app).await;
    assert_nothing_left(&store, &disks).await;
}
