//! Memory, local disks and HDFS together, over a file system in memory with injected hangs and
//! failures: the tier that gets a batch, the number of writers, the paths that applications may
//! name, and deletions.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::sleep;
use uniffle_testkit::fake_fs::{FakeFs, RemoteCall, RemoteFault};
use uniffle_testkit::fault::{EIO, Fault, Operation, Rule};
use uniffle_wire::types::{AppId, BlockId, BlockMeta, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId};
use uniffle_worker::flush::policy::Limits;
use uniffle_worker::remote::hdfs::RemoteFs as _;
use uniffle_worker::remote::hdfs::{AllowList, HdfsConfig, RemoteLocation};
use uniffle_worker::store::{Cause, ExtentData, ExtentWrite, RemoteStorage, StoreErrorKind, Tier as _};

use crate::fixture::{APP, HdfsFixture, SERVER_ID, Setup};

fn both() -> Setup {
    Setup { local: true, ..Setup::default() }
}

/// Returns one partition's extent of one block.
fn extent(partition: i32) -> ExtentWrite {
    let data = Bytes::from_static(b"0123456789");
    let block = BlockMeta {
        block_id: BlockId(i64::from(partition)),
        task_attempt_id: TaskAttemptId(1),
        length: 10,
        uncompressed_length: 10,
        crc: 0,
    };
    let (partition, blocks) = (PartitionId(partition), vec![block]);
    ExtentWrite { partition, blocks, length: 10, data: ExtentData::Pieces(vec![data]) }
}

/// A hung write of an application, and the deletion of one of its shuffles, make its other writes
/// wait. Waiting writes hold no permit, so other applications continue.
#[tokio::test(start_paused = true)]
async fn app_waiting_for_its_deletion_does_not_block_others() {
    let hdfs = HdfsConfig { max_concurrency: 2, ..Setup::default().hdfs };
    let (fixture, fs) = HdfsFixture::fake(Setup { hdfs, ..Setup::default() }).await;
    let store = std::sync::Arc::clone(&fixture.hdfs);
    let key = |app: &str, shuffle| ShuffleKey::new(AppId::parse(app).unwrap(), ShuffleId(shuffle));
    let path = "hdfs://fake:8020/uniffle".to_owned();
    let storage = RemoteStorage { path, ..RemoteStorage::default() };
    let admit = std::sync::Arc::clone(&store).prepare(Some(&storage)).unwrap().unwrap();
    let handle = |app, shuffle| {
        admit(&key(app, shuffle), &[(0, 0), (1, 1)]);
        store.shuffle(&key(app, shuffle)).unwrap()
    };
    let (gone, stays, other) = (handle("one", 1), handle("one", 2), handle("other", 1));
    fs.add_fault(RemoteCall::Create, ".data", RemoteFault::Hang, Some(1));
    let mut hung = std::pin::pin!(gone.write(vec![extent(0)].into()));
    assert!(futures::poll!(hung.as_mut()).is_pending());
    let hangs = || if fs.calls().is_empty() { Err("no call".to_owned()) } else { Ok(()) };
    fixture.eventually("the write hangs", hangs).await;

    let app = AppId::parse("one").unwrap();
    let removal = store.forget_shuffles(&app, &[key("one", 1)]).unwrap();
    let mut first = std::pin::pin!(stays.write(vec![extent(0)].into()));
    let mut second = std::pin::pin!(stays.write(vec![extent(1)].into()));
    assert!(futures::poll!(first.as_mut()).is_pending() && futures::poll!(second.as_mut()).is_pending());
    let written = tokio::time::timeout(Duration::from_secs(30), other.write(vec![extent(0)].into())).await;
    written.expect("the other application is blocked").unwrap();

    fs.release();
    hung.await.unwrap();
    removal.run().await;
    first.await.unwrap();
    second.await.unwrap();
    assert_eq!(store.usage(&key("one", 2)).files, 4);
    for (app, shuffle) in [("one", 2), ("other", 1)] {
        let key = key(app, shuffle);
        store.forget_app(&key.app, std::slice::from_ref(&key), Cause::Unregistered).unwrap().run().await;
    }
    fixture.finish().await;
}

/// Three batches of one application wait for the permit before a batch of another application does.
#[tokio::test(start_paused = true)]
async fn queued_writes_do_not_delay_another_application() {
    let hdfs = HdfsConfig { max_concurrency: 1, ..Setup::default().hdfs };
    let (fixture, fs) = HdfsFixture::fake(Setup { hdfs, ..Setup::default() }).await;
    let store = std::sync::Arc::clone(&fixture.hdfs);
    let path = "hdfs://fake:8020/uniffle".to_owned();
    let storage = RemoteStorage { path, ..RemoteStorage::default() };
    let admit = std::sync::Arc::clone(&store).prepare(Some(&storage)).unwrap().unwrap();
    let handle = |app: &str| {
        let key = ShuffleKey::new(AppId::parse(app).unwrap(), ShuffleId(1));
        admit(&key, &[(0, 0), (1, 1), (2, 2)]);
        store.shuffle(&key).unwrap()
    };
    let (many, other) = (handle("many"), handle("other"));
    fs.add_fault(RemoteCall::Create, ".data", RemoteFault::Hang, Some(1));
    let queued = (0..3).map(|partition| many.write(vec![extent(partition)].into()));
    let mut queued = std::pin::pin!(futures::future::try_join_all(queued));
    let mut late = std::pin::pin!(other.write(vec![extent(0)].into()));
    assert!(futures::poll!(queued.as_mut()).is_pending() && futures::poll!(late.as_mut()).is_pending());
    let hangs = || if fs.calls().is_empty() { Err("no call".to_owned()) } else { Ok(()) };
    fixture.eventually("the write hangs", hangs).await;
    fs.release();
    let (queued, late) = futures::join!(queued, late);
    queued.unwrap();
    late.unwrap();
    let calls = fs.calls();
    let first_of = |part: &str| calls.iter().position(|(_, path)| path.contains(part)).unwrap();
    assert!(first_of("/other/1/0-0/") < first_of("/many/1/2-2/"), "{calls:?}");
    for app in ["many", "other"] {
        let key = ShuffleKey::new(AppId::parse(app).unwrap(), ShuffleId(1));
        store.forget_app(&key.app, std::slice::from_ref(&key), Cause::Unregistered).unwrap().run().await;
    }
    fixture.finish().await;
}

/// Changes the limit as a reload of `app_config.partition_limit_threshold` does.
#[tokio::test(start_paused = true)]
async fn huge_partition_limit_follows_reload() {
    let (mut fixture, _) = HdfsFixture::fake(both()).await;
    fixture.flusher.set_limits(Limits { huge_partition_bytes: 50_000, ..fixture.flusher.limits() });
    fixture.register(1).await;
    fixture.push(1, 0, 9, 10_000);
    fixture.flush().await;
    assert_eq!(fixture.metric("total_hadoop_write_data_for_huge_partition"), 90_000.0);
    fixture.assert_nothing_missing().await;
    fixture.finish().await;
}

#[tokio::test(start_paused = true)]
async fn cold_and_huge_partitions_go_to_hdfs() {
    let (mut fixture, _) = HdfsFixture::fake(Setup { huge_partition_bytes: 300_000, ..both() }).await;
    fixture.register(1).await;
    fixture.push(1, 0, 10, 10_000); // not above the threshold
    fixture.push(1, 1, 11, 10_000); // above the threshold
    fixture.flush().await;
    for _ in 0..4 {
        fixture.push(1, 2, 9, 10_000); // each below the threshold, but huge in total
        fixture.flush().await;
    }
    let small = fixture.visible(1, 0).await;
    assert_eq!((small[1].len(), small[2].len()), (10, 0));
    let cold = fixture.visible(1, 1).await;
    assert_eq!((cold[1].len(), cold[2].len()), (0, 11));
    let huge = fixture.visible(1, 2).await;
    assert_eq!((huge[1].len(), huge[2].len()), (27, 9), "the fourth batch must make the partition huge");
    assert_eq!(fixture.metric("total_hadoop_write_data_for_huge_partition"), 90_000.0);
    assert_eq!(fixture.metric("total_hadoop_write_data"), 200_000.0);
    fixture.service.diagnostics.refresh_metrics(&fixture.service.diagnostics.app_statistics());
    assert_eq!(fixture.metric("topN_of_on_hadoop_data_size_for_app"), 200_000.0);
    assert_eq!(fixture.metric("topN_of_on_localfile_data_size_for_app"), 370_000.0);
    fixture.assert_nothing_missing().await;
    fixture.finish().await;
}

#[tokio::test(start_paused = true)]
async fn blocks_stay_in_memory_until_both_files_are_readable() {
    let (mut fixture, fs) = HdfsFixture::fake(Setup::default()).await;
    fixture.register(1).await;
    fixture.push(1, 0, 3, 1000);
    fs.add_fault(RemoteCall::Create, ".index", RemoteFault::Hang, None);
    fixture.begin_flush();
    fixture
        .eventually("the data is written", || match fs.files().len() {
            1 => Ok(()),
            files => Err(format!("{files} files")),
        })
        .await;
    let tiers = fixture.visible(1, 0).await;
    assert_eq!((tiers[0].len(), tiers[2].len()), (3, 0), "blocks without an index entry must stay in memory");
    fs.release();
    fixture.settled().await;
    let tiers = fixture.visible(1, 0).await;
    assert_eq!((tiers[0].len(), tiers[2].len()), (0, 3));
    let order: Vec<_> = fs.calls().into_iter().filter(|(call, _)| *call == RemoteCall::Create).collect();
    assert!(order[0].1.ends_with(".data") && order[1].1.ends_with(".index"), "{order:?}");
    fixture.finish().await;
}

#[tokio::test(start_paused = true)]
async fn failed_tier_is_replaced_by_the_other() {
    let (mut fixture, fs) = HdfsFixture::fake(both()).await;
    fixture.register(1).await;
    fs.add_fault(RemoteCall::Create, ".data", RemoteFault::Fail(StoreErrorKind::Io), None);
    fixture.push(1, 0, 20, 10_000);
    fixture.flush().await;
    assert_eq!(fixture.visible(1, 0).await[1].len(), 20, "cold blocks that HDFS refused must be on disk");
    fs.release();
    fixture.disk_faults.add(Rule::always(Operation::Write, Fault::Errno(EIO)));
    fixture.push(1, 1, 5, 1000);
    fixture.flush().await;
    assert_eq!(fixture.visible(1, 1).await[2].len(), 5, "blocks that no disk accepted must be in HDFS");
    let failed = ["total_memory_to_hdfs_spill_failed", "total_memory_to_localfile_spill_failed"];
    assert_eq!(failed.map(|name| fixture.metric(name)), [1.0; 2]);
    assert_eq!(fixture.metric("storage_retry_write_remote"), 1.0, "expected one retry in the remote tier");
    fixture.disk_faults.clear();
    fixture.assert_nothing_missing().await;
    fixture.finish().await;
}

#[tokio::test(start_paused = true)]
async fn hung_hdfs_does_not_delay_the_disks() {
    let (mut fixture, fs) =
        HdfsFixture::fake(Setup { hdfs: HdfsConfig { in_flight_max: 3, ..both().hdfs }, ..both() }).await;
    fixture.register(1).await;
    fs.add_fault(RemoteCall::Create, ".data", RemoteFault::Hang, None);
    for partition in 0..3 {
        fixture.push(1, partition, 20, 10_000);
    }
    fixture.begin_flush();
    fixture
        .eventually("three are on their way", || match fs.calls().len() {
            3 => Ok(()),
            calls => Err(format!("{calls} calls")),
        })
        .await;
    // Cold, but all HDFS writers are busy; small partitions as usual.
    fixture.push(1, 3, 20, 10_000);
    fixture.push(1, 4, 2, 1000);
    fixture.begin_flush();
    fixture
        .eventually("the others are on disk", || match fixture.flusher.unfinished() {
            3 => Ok(()),
            remaining => Err(format!("{remaining} batches")),
        })
        .await;
    assert_eq!(fixture.visible(1, 3).await[1].len(), 20);
    assert_eq!(fixture.visible(1, 4).await[1].len(), 2);
    fixture.assert_nothing_missing().await;
    // After the timeout the write is abandoned, and the disks take its blocks.
    fixture.settled().await;
    assert_eq!(fixture.visible(1, 0).await[1].len(), 20);
    fs.release();
    fixture.assert_nothing_missing().await;
    fixture.finish().await;
}

#[tokio::test(start_paused = true)]
async fn writers_are_limited_per_file_system_and_partition() {
    let hdfs = HdfsConfig { max_concurrency: 4, partition_write_max_concurrency: 2, ..Setup::default().hdfs };
    let (mut fixture, fs) = HdfsFixture::fake(Setup { hdfs, ..Setup::default() }).await;
    fixture.register(1).await;
    fs.add_fault(RemoteCall::Create, ".data", RemoteFault::Hang, None);
    for _ in 0..4 {
        fixture.push(1, 0, 1, 1000);
        fixture.begin_flush();
    }
    for partition in 1..6 {
        fixture.push(1, partition, 1, 1000);
    }
    fixture.begin_flush();
    sleep(Duration::from_secs(5)).await;
    let calls = fs.calls();
    let of_first = calls.iter().filter(|(_, path)| path.contains("/0-0/")).count();
    assert!(of_first <= 2 && calls.len() <= 4, "{calls:?}");
    fs.release();
    fixture.settled().await;
    let names: std::collections::BTreeSet<_> =
        fs.files().into_keys().filter(|path| path.contains("/0-0/")).collect();
    assert!(names.iter().all(|path| path.contains("_0_0.") || path.contains("_1_0.")), "{names:?}");
    fixture.assert_nothing_missing().await;
    fixture.finish().await;
}

#[tokio::test(start_paused = true)]
async fn apps_writer_count_overrides_default_up_to_limit() {
    let hdfs = HdfsConfig {
        partition_write_max_concurrency: 1,
        partition_write_concurrency_limit: 3,
        ..Setup::default().hdfs
    };
    for (wanted, expected) in [(None, 1), (Some(2), 2), (Some(9), 3)] {
        let (mut fixture, fs) = HdfsFixture::fake(Setup { hdfs: hdfs.clone(), ..Setup::default() }).await;
        let path = "hdfs://fake:8020/uniffle".to_owned();
        let storage = RemoteStorage { path, writers: wanted, ..RemoteStorage::default() };
        fixture.register_with(1, Some(storage)).await.unwrap();
        fs.add_fault(RemoteCall::Create, ".data", RemoteFault::Hang, None);
        for _ in 0..4 {
            fixture.push(1, 0, 1, 1000);
            fixture.begin_flush();
        }
        sleep(Duration::from_secs(5)).await;
        fs.release();
        fixture.settled().await;
        let files = fs.files().into_keys().filter(|path| path.ends_with(".data")).count();
        assert_eq!(files, expected, "{wanted:?}: {:?}", fs.files().keys());
        fixture.assert_nothing_missing().await;
        fixture.finish().await;
    }
}

#[tokio::test(start_paused = true)]
async fn single_writer_uses_short_file_names() {
    let (mut fixture, fs) = HdfsFixture::fake(Setup::default()).await;
    let path = "hdfs://fake:8020/uniffle".to_owned();
    let storage = RemoteStorage { path, writers: Some(1), ..RemoteStorage::default() };
    fixture.register_with(1, Some(storage)).await.unwrap();
    fixture.push(1, 7, 2, 1000);
    fixture.flush().await;
    let names: Vec<_> = fs.files().into_keys().collect();
    let directory = format!("/uniffle/{APP}/1/7-7");
    assert_eq!(
        names,
        [format!("{directory}/{SERVER_ID}_0.data"), format!("{directory}/{SERVER_ID}_0.index")]
    );
    fixture.finish().await;
}

#[tokio::test(start_paused = true)]
async fn apps_without_remote_path_use_memory_and_disks() {
    let (mut fixture, fs) = HdfsFixture::fake(both()).await;
    fixture.register_with(1, None).await.unwrap();
    fixture.push(1, 0, 20, 10_000);
    fixture.flush().await;
    assert_eq!(
        fixture.visible(1, 0).await[1].len(),
        20,
        "an application without a remote path must be written to disks"
    );
    assert_eq!(fs.paths().len(), 0);
    fixture.finish().await;

    let (fixture, _) = HdfsFixture::fake(Setup::default()).await;
    let refused = fixture.register_with(1, None).await.unwrap_err();
    assert!(refused.contains("spark.rss.remote.storage.path"), "{refused}");
    fixture.finish().await;
}

#[tokio::test(start_paused = true)]
async fn disallowed_remote_paths_are_refused_with_reason() {
    let allowed = AllowList(vec![RemoteLocation::parse("hdfs://fake:8020/uniffle").unwrap()]);
    let hdfs = HdfsConfig { allowed, ..Setup::default().hdfs };
    let (fixture, fs) = HdfsFixture::fake(Setup { hdfs, ..Setup::default() }).await;
    let named = |path: &str| RemoteStorage { path: path.to_owned(), ..RemoteStorage::default() };
    for path in
        ["hdfs://fake:8020/", "hdfs://fake:8020/uniffle2", "hdfs://other/uniffle", "/uniffle", "file:///x"]
    {
        let refused = fixture.register_with(1, Some(named(path))).await.unwrap_err();
        assert!(refused.contains(path), "{refused}");
    }
    let refused = fixture.register_with(1, Some(named("hdfs://fake/etc"))).await.unwrap_err();
    assert!(refused.contains("hdfs_store.allowed_paths"), "{refused}");
    fixture.register_with(1, Some(named("hdfs://fake/uniffle/team"))).await.unwrap();
    assert_eq!(fs.calls().len(), 0, "a remote was called");
    fixture.finish().await;
}

#[tokio::test(start_paused = true)]
async fn unregistration_deletes_all_and_expiry_only_own_files() {
    let (mut fixture, fs) = HdfsFixture::fake(Setup::default()).await;
    let others = |fs: &FakeFs| {
        fs.files().into_keys().filter(|path| !path.contains(&format!("/{SERVER_ID}_"))).collect::<Vec<_>>()
    };
    let foreign = format!("/uniffle/{APP}/1/0-0/10.0.0.1-211000_0_0.data");
    let write_foreign = || async {
        let data = vec![bytes::Bytes::from_static(b"of another server")];
        create(&fs, &foreign, data).await;
    };
    fixture.register(1).await;
    fixture.register(2).await;
    fixture.push(1, 0, 3, 1000);
    fixture.push(2, 3, 3, 1000);
    fixture.flush().await;
    write_foreign().await;
    // A shuffle whose directory has files of other workers.
    fixture.service.lifecycle.unregister_shuffle(APP, 1).unwrap();
    fixture.all.retain(|(shuffle, _), _| *shuffle != 1);
    fixture
        .eventually("the shuffle is gone", || match others(&fs) {
            remaining if remaining.is_empty() => Ok(()),
            remaining => Err(format!("{remaining:?}")),
        })
        .await;
    fixture.assert_nothing_missing().await;

    // An app without heartbeats.
    fixture.register(1).await;
    fixture.push(1, 0, 3, 1000);
    fixture.flush().await;
    write_foreign().await;
    sleep(Duration::from_secs(400)).await;
    assert_eq!(fixture.service.lifecycle.expire_apps(), 1);
    fixture
        .eventually("only the other server's file is left", || {
            match fs.files().into_keys().collect::<Vec<_>>() {
                remaining if remaining == [foreign.clone()] => Ok(()),
                remaining => Err(format!("{remaining:?}")),
            }
        })
        .await;
    let remaining = fs.paths();
    assert!(
        !remaining.iter().any(|path| path.contains("/2")),
        "empty directories must be removed too: {remaining:?}"
    );

    // The same app, unregistered.
    fixture.all.clear();
    fixture.register(1).await;
    fixture.finish().await;
    assert_eq!(fs.files().len(), 0);
}

async fn create(fs: &FakeFs, path: &str, data: Vec<bytes::Bytes>) {
    fs.create(path, data).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn reregistered_shuffle_survives_earlier_deletion() {
    let (mut fixture, fs) = HdfsFixture::fake(Setup::default()).await;
    fixture.register(1).await;
    fixture.push(1, 0, 3, 1000);
    fixture.flush().await;
    // The deletion of the old files takes long.
    fs.add_fault(RemoteCall::Delete, "/1", RemoteFault::Hang, Some(1));
    fixture.service.lifecycle.unregister_shuffle(APP, 1).unwrap();
    fixture.all.clear();
    fixture.register(1).await;
    fixture.push(1, 0, 5, 2000);
    fixture.begin_flush();
    sleep(Duration::from_secs(3)).await;
    assert_eq!(
        fixture.visible(1, 0).await[0].len(),
        5,
        "the blocks must stay in memory until the deletion ends"
    );
    fs.release();
    fixture.settled().await;
    assert_eq!(fixture.visible(1, 0).await[2].len(), 5);
    fixture.assert_nothing_missing().await;
    fixture.finish().await;
}
