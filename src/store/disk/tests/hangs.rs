//! Disks that do not answer, and callers that are dropped. Time is paused: deadlines pass when
//! nothing else happens.

use std::time::Duration;

use futures::{FutureExt, StreamExt, stream};

use super::*;
use crate::store::{Cause, Purge};
use uniffle_base::sched::{FairSemaphore, Holder, Permit, Reserve};
use uniffle_io::buffers::{ReadBuffer, ReadBuffers};
use uniffle_io::{BoxFuture, ReadPermit, ShareParts};
use uniffle_testkit::fault::{EIO, Fault, Operation, Rule};

async fn two_disks() -> ([TestDisk; 2], Arc<LocalStore>, ShuffleKey) {
    let disks = [TestDisk::new("/a"), TestDisk::new("/b")];
    let store = store_on(&disks).await;
    let key = key("app", 1);
    store.register(&key);
    (disks, store, key)
}

#[tokio::test(start_paused = true)]
async fn disk_is_not_blamed_for_a_pause_of_the_process() {
    crate::clock::testing::ticked(async {
        let (disks, store, key) = two_disks().await;
        disks[0].faults.add(Rule::once(Operation::Write, Fault::Hang).on(".data"));
        let paused = async {
            tokio::time::sleep(Duration::from_secs(5)).await;
            tokio::time::advance(Duration::from_secs(3600)).await;
            tokio::time::sleep(Duration::from_secs(5)).await;
            disks[0].faults.release().await;
        };
        let written = store.write(&key, vec![extent(1, &[(1, 9000)], true)]);
        let (published, ()) = tokio::join!(written, paused);
        assert_eq!(published.unwrap().disk, 0, "the disk answered within 10 s of process time");
        assert!(store.disks()[0].is_healthy());
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn hung_write_moves_to_another_disk() {
    let (disks, store, key) = two_disks().await;
    disks[0].faults.add(Rule::once(Operation::Write, Fault::Hang).on(".data"));
    let started = tokio::time::Instant::now();
    let published = store.write(&key, vec![extent(1, &[(1, 9000)], true)]).await.unwrap();
    assert_eq!(published.disk, 1);
    assert!(started.elapsed() >= Duration::from_secs(60));
    let info = &store.disks()[0];
    assert!(!info.is_healthy() && (info.condition == DiskCondition::Hung));
    store.probe().await;
    for id in 2..6 {
        store.write(&key, vec![extent(1, &[(id, 9000)], true)]).await.unwrap();
    }
    disks[0].faults.release().await;
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1, 2, 3, 4, 5]);
    let data_logs = disks[0].app_files().iter().filter(|path| path.extension().unwrap() == "data").count();
    assert_eq!(data_logs, 2, "a log that hung must stay closed");
    store.purge_app(&key.app).await;
    assert_nothing_left(&store, &disks).await;
}

/// One overloaded disk: calls miss their deadline in its queue, and others complete.
#[tokio::test(start_paused = true)]
async fn device_with_long_queue_is_busy_and_not_hung() {
    let disks = [TestDisk::new("/a")];
    let store = store_on(&disks).await;
    let key = key("app", 1);
    store.register(&key);
    disks[0].faults.add(Rule::once(Operation::Write, Fault::Slow(Duration::from_secs(3600))).on(".data"));
    let written = async |id| {
        tokio::time::sleep(Duration::from_secs(5)).await;
        store.write(&key, vec![extent(1, &[(id, 9000)], true)]).await.unwrap();
    };
    let (late, ..) = tokio::join!(
        biased;
        store.write(&key, vec![extent(1, &[(1, 9000)], true)]),
        written(2),
        written(3)
    );
    assert_eq!(late.unwrap_err().kind, StoreErrorKind::Unhealthy);
    assert_eq!(store.disks()[0].condition, DiskCondition::Healthy, "a busy device counts as hung");
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [2, 3]);
}

/// Bounded read memory of one application. Further requests wait.
struct BoundedBuffers {
    permits: Arc<FairSemaphore>,
    acquired: AtomicUsize,
}

struct BoundedBuffer {
    memory: Vec<u8>,
    _permit: Permit,
}

impl ReadBuffers for BoundedBuffers {
    fn acquire(&self, len: usize) -> BoxFuture<'_, Box<dyn ReadBuffer>> {
        async move { self.acquire_with(len, ShareParts::default()).await.0 }.boxed()
    }

    fn acquire_with(
        &self,
        len: usize,
        parts: ShareParts,
    ) -> BoxFuture<'_, (Box<dyn ReadBuffer>, ReadPermit)> {
        self.acquired.fetch_add(1, Ordering::Relaxed);
        async move {
            let holder = Holder { app: AppId::parse("app").ok(), weight: 1 };
            let (_permit, device) = self.permits.acquire_with(&holder, len as u64, parts).await;
            let buffer: Box<dyn ReadBuffer> = Box::new(BoundedBuffer { memory: vec![0; len], _permit });
            (buffer, Box::new(device) as ReadPermit)
        }
        .boxed()
    }

    fn chunk_bytes(&self) -> usize {
        1 << 20
    }
}

impl ReadBuffer for BoundedBuffer {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.memory
    }

    fn freeze(self: Box<Self>, len: usize) -> Bytes {
        Bytes::from(self.memory).slice(..len)
    }
}

const READ_MEMORY: usize = 8 << 20;

#[tokio::test(start_paused = true)]
async fn hung_reads_leave_memory_for_other_disks() {
    let disks = [TestDisk::new("/a"), TestDisk::new("/b")];
    let config = LocalConfig { read_memory_bytes: READ_MEMORY as u64, ..LocalConfig::default() };
    let io = disks.iter().map(TestDisk::disk).collect();
    let store = open_with(config, io).await.unwrap();
    let key = key("app", 1);
    store.register(&key);
    for partition in [0, 1] {
        let batch = vec![extent(partition, &[(1, 1_000_000)], false)];
        assert_eq!(store.write(&key, batch).await.unwrap().disk, partition as usize);
    }
    let buffers = BoundedBuffers {
        permits: FairSemaphore::new(READ_MEMORY as u64, Reserve::Eighth),
        acquired: AtomicUsize::new(0),
    };
    let first_chunk = async |partition| {
        let mut read = store.data(&key, PartitionId(partition), 0, 1_000_000)?.chunks;
        read.next_chunk(&buffers).await.map(|chunk| chunk.map(|bytes| bytes.len()))
    };
    disks[0].faults.add(Rule::always(Operation::Read, Fault::Hang).on(".data"));
    let mut stuck = std::pin::pin!(futures::future::join_all((0..20).map(|_| first_chunk(0))));
    assert!((&mut stuck).now_or_never().is_none());
    let other = tokio::time::timeout(Duration::from_secs(1), first_chunk(1)).await;
    assert_eq!(other.expect("hung reads left no memory for the other disk").unwrap(), Some(1_000_000));

    let began = tokio::time::Instant::now();
    for read in stuck.await {
        assert_eq!(read.unwrap_err().kind, StoreErrorKind::Unhealthy);
    }
    assert!(
        began.elapsed() <= Duration::from_secs(60),
        "waiting reads must be refused together with the first"
    );
    assert_eq!(store.disks()[0].condition, DiskCondition::Hung);
    let (acquired, now) = (buffers.acquired.load(Ordering::Relaxed), tokio::time::Instant::now());
    let error = first_chunk(0).await.unwrap_err();
    assert!(error.to_string().contains("until a check succeeds"), "{error}");
    assert_eq!((buffers.acquired.load(Ordering::Relaxed), now.elapsed()), (acquired, Duration::ZERO));
    assert_eq!(first_chunk(1).await.unwrap(), Some(1_000_000));
    disks[0].faults.clear();
    disks[0].faults.release().await;
    store.probe().await;
    assert_eq!(first_chunk(0).await.unwrap(), Some(1_000_000));
}

/// One deletion takes minutes. Meanwhile the other disk fails, is probed, and deletions on it
/// continue.
#[tokio::test(start_paused = true)]
async fn slow_deletion_does_not_delay_probes_or_other_disks() {
    let (disks, store, key) = two_disks().await;
    let (young, spare) = (super::key("young", 1), super::key("spare", 1));
    for key in [&key, &young, &spare] {
        store.register(key);
        for id in 0..4 {
            store.write(key, vec![extent(1, &[(id, 100)], false)]).await.unwrap();
        }
    }
    disks[0].faults.add(Rule::once(Operation::Remove, Fault::Hang));
    disks[1].faults.add(Rule::once(Operation::Write, Fault::Errno(EIO)).on(".data"));
    store.forget_shuffle(&key);
    let mut maintenance = std::pin::pin!(Arc::clone(&store).maintain(std::future::pending()));
    tokio::time::timeout(Duration::from_secs(1), &mut maintenance).await.unwrap_err();
    assert_eq!(disks[0].faults.hung(), 1);
    for id in 4..8 {
        store.write(&spare, vec![extent(1, &[(id, 100)], false)]).await.unwrap();
    }
    store.forget_shuffle(&young);
    assert_eq!(store.disks()[1].condition, DiskCondition::Broken);
    tokio::time::timeout(Duration::from_secs(100), &mut maintenance).await.unwrap_err();
    assert_eq!(store.disks()[1].condition, DiskCondition::Healthy, "disk 1 was not probed");
    assert!(
        disks[1].app_directories().iter().all(|path| path.starts_with("apps/spare")),
        "disk 1 was not cleaned"
    );
    assert_eq!(
        store.disks()[0].condition,
        DiskCondition::Healthy,
        "a slow deletion must not count as failure"
    );
    disks[0].faults.release().await;
    tokio::time::timeout(Duration::from_secs(20), &mut maintenance).await.unwrap_err();
    assert!(disks[0].app_directories().iter().all(|path| path.starts_with("apps/spare")));
}

/// Purges like the service: 16 at a time for all disks.
async fn purge_all(store: &Arc<LocalStore>, keys: &[ShuffleKey]) {
    let purges = keys.iter().filter_map(|key| {
        Tier::forget(Arc::clone(store), &key.app, std::slice::from_ref(key), Purge::App(Cause::Expired))
    });
    stream::iter(purges).buffer_unordered(16).collect().await
}

/// Creates two disks and 40 applications with files on both.
async fn two_disks_of_many() -> ([TestDisk; 2], Arc<LocalStore>, Vec<ShuffleKey>) {
    let (disks, store, _) = two_disks().await;
    let keys: Vec<_> = (0..40).map(|app| super::key(&format!("many{app}"), 1)).collect();
    for key in &keys {
        store.register(key);
        for id in 0..4 {
            store.write(key, vec![extent(1, &[(id, 100)], false)]).await.unwrap();
        }
    }
    (disks, store, keys)
}

fn of_many(disk: &TestDisk) -> usize {
    disk.app_directories().iter().filter(|path| path.to_string_lossy().contains("many")).count()
}

#[tokio::test(start_paused = true)]
async fn hung_disk_holds_only_its_share_of_deletions() {
    let (disks, store, keys) = two_disks_of_many().await;
    disks[0].faults.add(Rule::always(Operation::Rename, Fault::Hang));
    let mut purges = std::pin::pin!(purge_all(&store, &keys));
    let soon = tokio::time::timeout(Duration::from_secs(1), &mut purges).await;
    assert!(soon.is_err(), "purges must wait for the hung disk");
    assert_eq!(of_many(&disks[1]), 0, "files on the other disk must be deleted meanwhile");
    purges.await;
    assert_eq!(store.disks()[0].condition, DiskCondition::Hung);
    disks[0].faults.clear();
    disks[0].faults.release().await;
    store.probe().await;
    store.maintain_once().await;
    assert_eq!(of_many(&disks[0]), 0);
    store.purge_app(&super::key("app", 1).app).await;
    assert_nothing_left(&store, &disks).await;
}

#[tokio::test(start_paused = true)]
async fn purge_does_not_wait_for_a_hung_disk() {
    let (disks, store, keys) = two_disks_of_many().await;
    disks[0].faults.add(Rule::always(Operation::Remove, Fault::Hang));
    disks[0].faults.add(Rule::always(Operation::Space, Fault::Hang));
    store.maintain_once().await;
    assert_eq!(store.disks()[0].condition, DiskCondition::Hung);
    let began = tokio::time::Instant::now();
    purge_all(&store, &keys).await;
    assert_eq!((of_many(&disks[1]), began.elapsed()), (0, Duration::ZERO));
    disks[0].faults.clear();
    disks[0].faults.release().await;
    store.probe().await;
    store.maintain_once().await;
    assert_eq!(of_many(&disks[0]), 0);
}

#[tokio::test(start_paused = true)]
async fn hung_index_append_is_repeated_on_another_disk() {
    let (disks, store, key) = two_disks().await;
    disks[0].faults.add(Rule::once(Operation::Write, Fault::Hang).on(".index"));
    store.write(&key, vec![extent(1, &[(1, 100)], false)]).await.unwrap();
    store.write(&key, vec![extent(1, &[(2, 100)], false)]).await.unwrap();
    disks[0].faults.release().await;
    store.probe().await;
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1, 2]);
    let groups = groups(&disks);
    let sequences: Vec<_> = groups.iter().map(|group| group.header.sequence).collect();
    assert_eq!(sequences, [0, 0, 1], "the late append must leave a second copy");
    assert_eq!(groups[0], groups[1], "both copies must be equal");
}

#[tokio::test(start_paused = true)]
async fn hung_opens_reads_and_removals_end_at_their_deadline() {
    let (disks, store, key) = two_disks().await;
    disks[0].faults.add(Rule::once(Operation::OpenWrite, Fault::Hang));
    store.write(&key, vec![extent(1, &[(1, 100)], false)]).await.unwrap();
    store.write(&key, vec![extent(1, &[(2, 100)], false)]).await.unwrap();
    disks[1].faults.add(Rule::once(Operation::Read, Fault::Hang));
    let error = range_of(&store, &key, 1, (0, 200)).await.unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::Unhealthy);
    assert!((store.disks()[1].condition == DiskCondition::Hung));
    store.probe().await;
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1, 2]);
    disks[1].faults.add(Rule::once(Operation::Remove, Fault::Hang));
    store.purge(&key).await;
    disks[1].faults.release().await;
    disks[0].faults.release().await;
    store.probe().await;
    store.maintain_once().await;
    // The open that hung during the purge found its directory removed.
    assert!(disks[0].app_files().is_empty() && disks[1].app_files().is_empty());
}

#[tokio::test(start_paused = true)]
async fn hung_disk_delays_no_probe_or_maintenance_of_others() {
    let (disks, store, _) = two_disks().await;
    disks[0].faults.add(Rule::always(Operation::Space, Fault::Hang));
    disks[0].faults.add(Rule::always(Operation::Sync, Fault::Hang));
    store.maintain_once().await;
    store.probe().await;
    let infos = store.disks();
    assert!(!infos[0].is_healthy() && (infos[0].condition == DiskCondition::Hung) && infos[1].is_healthy());
}

/// A writer that is dropped during its index append leaves the outcome unknown. The next one
/// finishes it.
#[tokio::test(start_paused = true)]
async fn cancelled_publish_is_finished_by_the_next() {
    let (disks, store, key) = two_disks().await;
    disks[0].faults.add(Rule::once(Operation::Write, Fault::Hang).on(".index"));
    assert!(store.write(&key, vec![extent(1, &[(1, 100)], false)]).now_or_never().is_none());
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), Vec::<i64>::new());
    store.write(&key, vec![extent(1, &[(2, 100)], false), extent(2, &[(3, 1)], false)]).await.unwrap();
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1, 2]);
    disks[0].faults.release().await;
    assert_eq!(read_all(&store, &key, 1).await.unwrap(), [1, 2]);
    for group in groups(&disks) {
        assert_eq!(group.entries[0].0.base, group.header.sequence * 100, "{group:?}");
    }
    store.purge_app(&key.app).await;
    assert_nothing_left(&store, &disks).await;
}

#[tokio::test(start_paused = true)]
async fn purge_during_a_hung_write_leaves_nothing() {
    for path in [".data", ".index"] {
        let (disks, store, key) = two_disks().await;
        disks[0].faults.add(Rule::once(Operation::Write, Fault::Hang).on(path));
        let mut write = Box::pin(store.write(&key, vec![extent(1, &[(1, 100)], false)]));
        assert!((&mut write).now_or_never().is_none());
        store.purge_app(&key.app).await;
        disks[0].faults.release().await;
        assert_eq!(write.await.unwrap_err().kind, StoreErrorKind::Purged);
        assert_nothing_left(&store, &disks).await;
    }
}

#[tokio::test(start_paused = true)]
async fn purge_that_is_dropped_is_finished_later() {
    let (disks, store, key) = two_disks().await;
    for id in 0..4 {
        store.write(&key, vec![extent(1, &[(id, 100)], false)]).await.unwrap();
    }
    disks[1].faults.add(Rule::once(Operation::Rename, Fault::Hang));
    let dropped = tokio::time::timeout(Duration::from_secs(1), store.purge(&key)).await;
    assert!(dropped.is_err());
    assert_eq!(store.index(&key, PartitionId(1)).unwrap_err().kind, StoreErrorKind::NotFound);
    disks[1].faults.release().await;
    store.maintain_once().await;
    store.purge_app(&key.app).await;
    assert_nothing_left(&store, &disks).await;
}

/// Two applications end at the same time. The first purge removes the files of both, which takes
/// long.
#[tokio::test(start_paused = true)]
async fn app_directories_are_removed_by_concurrent_purges() {
    let (disks, store, first) = two_disks().await;
    let second = super::key("second", 1);
    store.register(&second);
    for key in [&first, &second] {
        for id in 0..4 {
            store.write(key, vec![extent(1, &[(id, 100)], false)]).await.unwrap();
        }
        store.forget_shuffle(key);
    }
    disks[1].faults.add(Rule::once(Operation::Rename, Fault::Slow(Duration::from_secs(1))));
    tokio::join!(store.remove_files(&first.app), store.remove_files(&second.app));
    assert_nothing_left(&store, &disks).await;
}

#[tokio::test(start_paused = true)]
async fn maintenance_runs_until_cancelled() {
    let (disks, store, key) = two_disks().await;
    disks[0].faults.add(Rule::once(Operation::Write, Fault::Errno(EIO)).on(".data"));
    store.write(&key, vec![extent(1, &[(1, 100)], false)]).await.unwrap();
    assert!(!store.disks()[0].is_healthy());
    let stop = tokio::time::sleep(Duration::from_secs(200));
    Arc::clone(&store).maintain(stop).await;
    assert!(store.disks()[0].is_healthy(), "the probe did not make the disk healthy");
}

#[tokio::test(start_paused = true)]
async fn directory_of_a_hung_call_is_swept_after_a_purge() {
    let (disks, store, key) = two_disks().await;
    let kept = super::key("kept", 1);
    store.register(&kept);
    disks[0].faults.add(Rule::once(Operation::CreateDir, Fault::Hang));
    store.write(&key, vec![extent(1, &[(1, 100)], false)]).await.unwrap();
    store.purge_app(&key.app).await;
    store.probe().await;
    store.maintain_once().await;
    disks[0].faults.release().await;
    assert_eq!(
        disks[0].app_directories().len(),
        2,
        "the late call creates the directories of the application and the shuffle"
    );
    store.write(&kept, vec![extent(1, &[(2, 100)], false)]).await.unwrap();
    store.sweep().await;
    assert_eq!(disks[0].app_directories().len(), 2, "directories of the other application were deleted");
    assert_eq!(read_all(&store, &kept, 1).await.unwrap(), [2]);
    store.purge_app(&kept.app).await;
    assert_nothing_left(&store, &disks).await;
}
