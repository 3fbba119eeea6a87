//! Memory, local disks and HDFS together, over a file system in memory that hangs and fails on purpose.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::sleep;
use uniffle_testkit::fake_fs::{FakeFs, RemoteCall, RemoteFault};
use uniffle_testkit::fault::{EIO, Fault, Operation, Rule};
use uniffle_wire::types::{AppId, BlockId, BlockMeta, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId};
use uniffle_worker::flush::policy::Limits;
use uniffle_worker::tiers::hdfs::fs::RemoteFs as _;
use uniffle_worker::tiers::hdfs::{AllowList, RemoteLocation};
use uniffle_worker::tiers::{Cause, ExtentData, ExtentWrite, HdfsConfig, RemoteStorage, StoreErrorKind};

use crate::fixture::{APP, HdfsFixture, SERVER_ID, Setup};

fn both() -> Setup {
    Setup { local: true, ..Setup::default() }
}

/// One partition's extent of one block.
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

/// A write of an application hangs, and one of its shuffles goes: its other writes wait for that. They hold no place
/// meanwhile, so that another application writes on.
#[tokio::test(start_paused = true)]
async fn d11_an_app_that_waits_for_its_own_deletion_keeps_nobody_else_from_writing() {
    let hdfs = HdfsConfig { max_concurrency: 2, ..Setup::default().hdfs };
    let (fixture, fs) = HdfsFixture::fake(Setup { hdfs, ..Setup::default() }).await;
    let store = std::sync::Arc::clone(&fixture.hdfs);
    let key = |app: &str, shuffle| ShuffleKey::new(AppId::parse(app).unwrap(), ShuffleId(shuffle));
    let path = "hdfs://fake:8020/uniffle".to_owned();
    let prepared = store.prepare(&RemoteStorage { path, ..RemoteStorage::default() }).unwrap();
    let handle = |app, shuffle| {
        store.register(&key(app, shuffle), &prepared, &[(0, 0), (1, 1)]);
        store.handle(&key(app, shuffle)).unwrap()
    };
    let (gone, stays, other) = (handle("one", 1), handle("one", 2), handle("other", 1));
    fs.add_fault(RemoteCall::Create, ".data", RemoteFault::Hang, Some(1));
    let mut hung = std::pin::pin!(store.write_to(&gone, extent(0)));
    assert!(futures::poll!(hung.as_mut()).is_pending());
    let hangs = || if fs.calls().is_empty() { Err("no call".to_owned()) } else { Ok(()) };
    fixture.eventually("the write hangs", hangs).await;

    let app = AppId::parse("one").unwrap();
    let removal = store.forget_shuffles(&app, &[key("one", 1)]).unwrap();
    let mut first = std::pin::pin!(store.write_to(&stays, extent(0)));
    let mut second = std::pin::pin!(store.write_to(&stays, extent(1)));
    assert!(futures::poll!(first.as_mut()).is_pending() && futures::poll!(second.as_mut()).is_pending());
    let written = tokio::time::timeout(Duration::from_secs(30), store.write_to(&other, extent(0))).await;
    written.expect("the other application writes on").unwrap();

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

/// `app_config.partition_limit_threshold` changes while the worker runs.
#[tokio::test(start_paused = true)]
async fn what_is_huge_follows_a_reload() {
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
async fn cold_and_huge_partitions_go_to_hdfs_and_the_rest_to_disks() {
    let (mut fixture, _) = HdfsFixture::fake(Setup { huge_partition_bytes: 300_000, ..both() }).await;
    fixture.register(1).await;
    fixture.push(1, 0, 10, 10_000); // not more than the threshold
    fixture.push(1, 1, 11, 10_000); // more
    fixture.flush().await;
    for _ in 0..4 {
        fixture.push(1, 2, 9, 10_000); // never more, but huge in the end
        fixture.flush().await;
    }
    let small = fixture.visible(1, 0).await;
    assert_eq!((small[1].len(), small[2].len()), (10, 0));
    let cold = fixture.visible(1, 1).await;
    assert_eq!((cold[1].len(), cold[2].len()), (0, 11));
    let huge = fixture.visible(1, 2).await;
    assert_eq!((huge[1].len(), huge[2].len()), (27, 9), "the fourth batch made it huge");
    assert_eq!(fixture.metric("total_hadoop_write_data_for_huge_partition"), 90_000.0);
    assert_eq!(fixture.metric("total_hadoop_write_data"), 200_000.0);
    fixture.service.insight.refresh_metrics(&fixture.service.insight.app_statistics());
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
    assert_eq!((tiers[0].len(), tiers[2].len()), (3, 0), "no index yet");
    fs.release();
    fixture.settled().await;
    let tiers = fixture.visible(1, 0).await;
    assert_eq!((tiers[0].len(), tiers[2].len()), (0, 3));
    let order: Vec<_> = fs.calls().into_iter().filter(|(call, _)| *call == RemoteCall::Create).collect();
    assert!(order[0].1.ends_with(".data") && order[1].1.ends_with(".index"), "{order:?}");
    fixture.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_tier_that_fails_is_left_for_the_other() {
    let (mut fixture, fs) = HdfsFixture::fake(both()).await;
    fixture.register(1).await;
    fs.add_fault(RemoteCall::Create, ".data", RemoteFault::Fail(StoreErrorKind::Io), None);
    fixture.push(1, 0, 20, 10_000);
    fixture.flush().await;
    assert_eq!(fixture.visible(1, 0).await[1].len(), 20, "cold, and yet on disk");
    fs.release();
    fixture.disk_faults.add(Rule::always(Operation::Write, Fault::Errno(EIO)));
    fixture.push(1, 1, 5, 1000);
    fixture.flush().await;
    assert_eq!(fixture.visible(1, 1).await[2].len(), 5, "small, and yet in HDFS");
    let failed = ["total_memory_to_hdfs_spill_failed", "total_memory_to_localfile_spill_failed"];
    assert_eq!(failed.map(|name| fixture.metric(name)), [1.0; 2]);
    assert_eq!(fixture.metric("storage_retry_write_remote"), 1.0, "what the disks did not take");
    fixture.disk_faults.clear();
    fixture.assert_nothing_missing().await;
    fixture.finish().await;
}

#[tokio::test(start_paused = true)]
async fn an_hdfs_that_hangs_does_not_hold_up_the_disks() {
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
    // Cold, but HDFS has its fill; and small ones as ever.
    fixture.push(1, 3, 20, 10_000);
    fixture.push(1, 4, 2, 1000);
    fixture.begin_flush();
    fixture
        .eventually("the others are on disk", || match fixture.flusher.unfinished() {
            3 => Ok(()),
            left => Err(format!("{left} batches")),
        })
        .await;
    assert_eq!(fixture.visible(1, 3).await[1].len(), 20);
    assert_eq!(fixture.visible(1, 4).await[1].len(), 2);
    fixture.assert_nothing_missing().await;
    // After its time the write is given up, and the disks take what HDFS did not.
    fixture.settled().await;
    assert_eq!(fixture.visible(1, 0).await[1].len(), 20);
    fs.release();
    fixture.assert_nothing_missing().await;
    fixture.finish().await;
}

#[tokio::test(start_paused = true)]
async fn writes_are_bounded_per_file_system_and_per_partition() {
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
async fn n24_an_applications_own_number_of_writers_goes_before_the_default_up_to_the_limit() {
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
async fn one_writer_per_partition_has_the_short_names() {
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
async fn clients_without_a_remote_path_keep_to_memory_and_disks() {
    let (mut fixture, fs) = HdfsFixture::fake(both()).await;
    fixture.register_with(1, None).await.unwrap();
    fixture.push(1, 0, 20, 10_000);
    fixture.flush().await;
    assert_eq!(fixture.visible(1, 0).await[1].len(), 20, "its client does not look into HDFS");
    assert_eq!(fs.paths().len(), 0);
    fixture.finish().await;

    let (fixture, _) = HdfsFixture::fake(Setup::default()).await;
    let refused = fixture.register_with(1, None).await.unwrap_err();
    assert!(refused.contains("spark.rss.remote.storage.path"), "{refused}");
    fixture.finish().await;
}

#[tokio::test(start_paused = true)]
async fn remote_paths_that_are_not_allowed_are_refused_by_name() {
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
    assert_eq!(fs.calls().len(), 0, "no remote was asked");
    fixture.finish().await;
}

#[tokio::test(start_paused = true)]
async fn unregistering_takes_everything_and_expiry_only_what_is_ours() {
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
    // A shuffle, with what others have of it.
    fixture.service.lifecycle.unregister_shuffle(APP, 1).unwrap();
    fixture.all.retain(|(shuffle, _), _| *shuffle != 1);
    fixture
        .eventually("the shuffle is gone", || match others(&fs) {
            left if left.is_empty() => Ok(()),
            left => Err(format!("{left:?}")),
        })
        .await;
    fixture.assert_nothing_missing().await;

    // An app that is silent.
    fixture.register(1).await;
    fixture.push(1, 0, 3, 1000);
    fixture.flush().await;
    write_foreign().await;
    sleep(Duration::from_secs(400)).await;
    assert_eq!(fixture.service.lifecycle.expire_apps(), 1);
    fixture
        .eventually("only the other server's file is left", || {
            match fs.files().into_keys().collect::<Vec<_>>() {
                left if left == [foreign.clone()] => Ok(()),
                left => Err(format!("{left:?}")),
            }
        })
        .await;
    let left = fs.paths();
    assert!(!left.iter().any(|path| path.contains("/2")), "empty directories go as well: {left:?}");

    // The same app, told to go.
    fixture.all.clear();
    fixture.register(1).await;
    fixture.finish().await;
    assert_eq!(fs.files().len(), 0);
}

async fn create(fs: &FakeFs, path: &str, data: Vec<bytes::Bytes>) {
    fs.create(path, data).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_registration_after_an_unregistration_loses_nothing_to_it() {
    let (mut fixture, fs) = HdfsFixture::fake(Setup::default()).await;
    fixture.register(1).await;
    fixture.push(1, 0, 3, 1000);
    fixture.flush().await;
    // The deletion of the old files is under way for long.
    fs.add_fault(RemoteCall::Delete, "/1", RemoteFault::Hang, Some(1));
    fixture.service.lifecycle.unregister_shuffle(APP, 1).unwrap();
    fixture.all.clear();
    fixture.register(1).await;
    fixture.push(1, 0, 5, 2000);
    fixture.begin_flush();
    sleep(Duration::from_secs(3)).await;
    assert_eq!(fixture.visible(1, 0).await[0].len(), 5, "written only after the deletion");
    fs.release();
    fixture.settled().await;
    assert_eq!(fixture.visible(1, 0).await[2].len(), 5);
    fixture.assert_nothing_missing().await;
    fixture.finish().await;
}
