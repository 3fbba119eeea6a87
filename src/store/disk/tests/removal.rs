//! Deletions do not delay writes, and do not pause if there is nothing to delay. Time is paused, so
//! it only passes in pauses. Also: files go only after the metadata log has their purge.

use std::time::Duration;

use futures::FutureExt;
use tokio::time::Instant;

use super::*;
use crate::store::disk::directories::directory::InFlightWrite;
use uniffle_testkit::fault::{EIO, Fault, Operation, Rule};

const MIB: usize = 1 << 20;

/// Creates a disk, a store on it, and a shuffle whose data log is 48 MiB long.
async fn large_log() -> (TestDisk, Arc<LocalStore>, ShuffleKey) {
    let disk = TestDisk::new("/a");
    let store = open(vec![disk.disk()]).await.unwrap();
    let key = key("app", 1);
    store.register(&key);
    store.write(&key, vec![extent(1, &[(1, 9000)], true)]).await.unwrap();
    let log = disk.app_files().into_iter().find(|path| path.extension().is_some_and(|it| it == "data"));
    disk.memory.put(&log.unwrap(), Some(vec![0; 48 * MIB]));
    (disk, store, key)
}

/// Returns the remaining MiB of shuffles, including deleted ones.
fn left(disk: &TestDisk) -> usize {
    let files = disk.memory.snapshot().into_iter();
    let of_shuffles = files.filter(|(path, _)| path.starts_with("trash") || path.starts_with("apps"));
    of_shuffles.map(|(_, bytes)| bytes.len()).sum::<usize>() / MIB
}

/// Runs `purge` until the first 16 of 48 MiB are removed and it pauses.
async fn until_it_pauses(disk: &TestDisk, mut purge: impl Future<Output = ()> + Unpin) {
    for _ in 0..10_000 {
        if left(disk) <= 32 {
            break;
        }
        assert!((&mut purge).now_or_never().is_none(), "the purge did not pause");
        tokio::task::yield_now().await;
    }
    assert_eq!(left(disk), 32);
}

#[tokio::test(start_paused = true)]
async fn busy_disk_deletes_a_log_in_parts_with_pauses() {
    let (disk, store, key) = large_log().await;
    let writing = InFlightWrite::begin(&store.core.disks[0], 1);
    let mut purge = Box::pin(store.purge(&key));
    let began = Instant::now();
    let mut lengths = Vec::new();
    while (&mut purge).now_or_never().is_none() {
        lengths.push(left(&disk));
        assert!(began.elapsed() < Duration::from_secs(60), "the log was not deleted: {lengths:?}");
        tokio::time::advance(Duration::from_millis(1)).await;
    }
    lengths.dedup();
    assert!(lengths.ends_with(&[32, 16, 0]), "{lengths:?}");
    assert!(began.elapsed() >= Duration::from_millis(20), "{:?}", began.elapsed());
    drop((purge, writing));
    store.purge_app(&key.app).await;
    assert_nothing_left(&store, &[disk]).await;
}

#[tokio::test(start_paused = true)]
async fn idle_or_full_disk_deletes_without_pauses() {
    for is_idle in [true, false] {
        let (disk, store, key) = large_log().await;
        let writing = InFlightWrite::begin(&store.core.disks[0], if is_idle { 0 } else { 1 });
        if !is_idle {
            // The fill level is between the watermarks.
            disk.memory.set_capacity(Some(64 * MIB as u64));
            store.maintain_once().await;
        }
        let began = Instant::now();
        store.purge(&key).await;
        assert_eq!(
            (left(&disk), began.elapsed()),
            (0, Duration::ZERO),
            "files remain or the deletion paused, idle: {is_idle}"
        );
        drop(writing);
        store.purge_app(&key.app).await;
        assert_nothing_left(&store, &[disk]).await;
    }
}

#[tokio::test(start_paused = true)]
async fn purge_dropped_between_parts_is_finished_later() {
    let (disk, store, key) = large_log().await;
    let writing = InFlightWrite::begin(&store.core.disks[0], 1);
    let mut purge = Box::pin(store.purge(&key));
    until_it_pauses(&disk, &mut purge).await;
    drop((purge, writing));
    store.maintain_once().await;
    assert_eq!(left(&disk), 0);
    store.purge_app(&key.app).await;
    assert_nothing_left(&store, &[disk]).await;
}

/// The file of a reader is truncated during the read.
#[tokio::test(start_paused = true)]
async fn read_overtaken_by_a_purge_does_not_blame_the_disk() {
    for mode in ["data", "index"] {
        let disk = TestDisk::new("/a");
        let store = open(vec![disk.disk()]).await.unwrap();
        let key = key("app", 1);
        store.register(&key);
        store.write(&key, vec![extent(1, &[(1, 9000)], true)]).await.unwrap();
        disk.faults.add(Rule::once(Operation::Read, Fault::Hang).on(mode));
        let mut read: futures::future::BoxFuture<'_, _> = match mode {
            "data" => range_of(&store, &key, 1, (0, 9000)).map(|read| read.map(drop)).boxed(),
            _ => index_of(&store, &key, 1).map(|read| read.map(drop)).boxed(),
        };
        assert!((&mut read).now_or_never().is_none());
        store.purge(&key).await;
        disk.faults.release().await;
        assert_eq!(read.await.unwrap_err().kind, StoreErrorKind::Purged);
        assert_eq!(store.disks()[0].condition, DiskCondition::Healthy);
        store.purge_app(&key.app).await;
        assert_nothing_left(&store, &[disk]).await;
    }
}

/// Otherwise an upgrade would accept no connections during the whole removal.
#[tokio::test(start_paused = true)]
async fn successor_finishes_a_removal() {
    let (disk, store, key) = large_log().await;
    let writing = InFlightWrite::begin(&store.core.disks[0], 1);
    let mut purge = Box::pin(store.purge(&key));
    until_it_pauses(&disk, &mut purge).await;
    let began = Instant::now();
    tokio::join!(store.cease_removals(), purge);
    assert_eq!(
        (left(&disk), began.elapsed()),
        (32, Duration::ZERO),
        "only the part in progress may end after the stop"
    );
    assert_eq!(
        store.core.metrics.deletion_failed.get(),
        0,
        "an unfinished deletion must not count as failed"
    );
    store.purge_app(&key.app).await;
    store.maintain_once().await;
    assert_eq!((left(&disk), store.core.metrics.deletion_failed.get()), (32, 0));
    drop((writing, store));
    let successor = open(vec![disk.disk()]).await.unwrap();
    successor.maintain_once().await;
    assert_eq!(left(&disk), 0, "the next start must empty the trash");
    successor.purge_app(&key.app).await;
    assert_nothing_left(&successor, &[disk]).await;
}

/// Creates a shuffle with a record and a file.
async fn registered(disk: &TestDisk) -> (Arc<LocalStore>, ShuffleKey) {
    let store = open(vec![disk.disk()]).await.unwrap();
    let key = key("app", 1);
    let handle = store.register(&key);
    store.append_metadata(&handle, b"registered").await.unwrap();
    store.write(&key, vec![extent(1, &[(1, 9000)], true)]).await.unwrap();
    (store, key)
}

/// Otherwise a start would know the shuffle and miss its files.
#[tokio::test(start_paused = true)]
async fn sweep_spares_files_of_an_unlogged_purge() {
    let disk = TestDisk::new("/a");
    let (store, key) = registered(&disk).await;
    let files = disk.app_files();
    drop(store.forget_shuffle(&key));
    store.sweep().await;
    assert_eq!(disk.app_files(), files);
    store.purges_logged(&key.app, None).await.unwrap();
    store.sweep().await;
    assert_eq!(disk.app_files(), Vec::<PathBuf>::new());
}

#[tokio::test(start_paused = true)]
async fn durable_purge_is_not_undone() {
    let disk = TestDisk::new("/a");
    let (store, key) = registered(&disk).await;
    drop(store.forget_shuffle(&key));
    let other = ShuffleKey::new(key.app.clone(), ShuffleId(2));
    for of in [Some(&other), Some(&key), None] {
        store.forgotten_durable(&key.app, of).await.unwrap();
    }
    drop(store);
    let store = open(vec![disk.disk()]).await.unwrap();
    let mut recovered = store.take_recovered();
    assert!(recovered.records.next().await.unwrap().is_none(), "records of a purged shuffle were recovered");
}

#[tokio::test(start_paused = true)]
async fn unloggable_end_is_refused_until_logged() {
    let disk = TestDisk::new("/a");
    let (store, key) = registered(&disk).await;
    disk.faults.add(Rule::always(Operation::Write, Fault::Errno(EIO)));
    drop(store.forget_shuffle(&key));
    let error = store.forgotten_durable(&key.app, Some(&key)).await.unwrap_err();
    assert!(error.to_string().contains("cannot record the deletion in the metadata log"), "{error}");
    disk.faults.clear();
    store.probe().await;
    store.forgotten_durable(&key.app, Some(&key)).await.unwrap();
}
