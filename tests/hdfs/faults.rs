//! Failures over the file system in memory and over a real HDFS. A failed write continues in
//! another file or tier, and no block is lost. On a real HDFS, a failed append may hide the blocks
//! of its file until the file is closed.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::sleep;
use uniffle_testkit::fake_fs::{FakeFs, RemoteCall, RemoteFault};
use uniffle_worker::clock::Instant;
use uniffle_worker::remote::hdfs::RemoteFs;
use uniffle_worker::remote::hdfs::{HdfsConfig, RemoteConnector, RemoteLocation, RemoteTarget};
use uniffle_worker::store::{RemoteStorage, StoreError, StoreErrorKind};

use crate::fixture::{HdfsFixture, SERVER_ID, Setup, open, plain_connector};
use crate::real::real;
use uniffle_testkit::hdfs::MiniHdfs;

/// Returns the file names of paths, without the server's id.
fn names(files: impl IntoIterator<Item = String>) -> Vec<String> {
    let name = |path: String| path.rsplit('/').next().unwrap_or_default().replace(SERVER_ID, "");
    files.into_iter().map(name).collect()
}

#[tokio::test(start_paused = true)]
async fn failed_write_continues_in_a_new_pair_of_files() {
    use RemoteCall::{Append, Create};
    let failures = [
        (Create, ".data", RemoteFault::Fail(StoreErrorKind::Unreachable)),
        (Create, ".data", RemoteFault::Torn(1500, StoreErrorKind::Io)),
        (Create, ".data", RemoteFault::Lost),
        (Create, ".index", RemoteFault::Fail(StoreErrorKind::NoSpace)),
        (Create, ".index", RemoteFault::Torn(50, StoreErrorKind::Io)),
        (Create, ".index", RemoteFault::Lost),
        (Append, ".data", RemoteFault::Fail(StoreErrorKind::Denied)),
        (Append, ".data", RemoteFault::Torn(1500, StoreErrorKind::Io)),
        (Append, ".data", RemoteFault::Lost),
        (Append, ".index", RemoteFault::Torn(50, StoreErrorKind::Io)),
        (Append, ".index", RemoteFault::Lost),
    ];
    for (call, ending, fault) in failures {
        let (mut fixture, fs) = HdfsFixture::fake(Setup::default()).await;
        fixture.register(1).await;
        if call == Append {
            fixture.push(1, 0, 3, 1000);
            fixture.flush().await;
        }
        fs.add_fault(call, ending, fault, Some(1));
        for _ in 0..2 {
            fixture.push(1, 0, 3, 1000);
            fixture.begin_flush();
            sleep(Duration::from_millis(20)).await;
            fixture.assert_nothing_missing().await;
        }
        fixture.settled().await;
        assert_eq!(
            fixture.in_hdfs(1, 0).await.len(),
            fixture.all[&(1, 0)].len(),
            "{call:?} {ending} {fault:?}"
        );
        let files = names(fs.files().into_keys());
        assert!(files.contains(&"_0_1.index".to_owned()), "{call:?} {ending} {fault:?}: {files:?}");
        assert!(fixture.metric("total_memory_to_hdfs_spill_failed") >= 1.0);
        assert!(fixture.metric("storage_retry_write_remote") >= 1.0);
        fixture.finish().await;
    }
}

#[tokio::test(start_paused = true)]
async fn files_of_an_earlier_process_stay_unchanged() {
    let (mut fixture, fs) = HdfsFixture::fake(Setup::default()).await;
    fixture.register(1).await;
    fixture.push(1, 0, 3, 1000);
    fixture.flush().await;
    let before = fs.files();
    // The same worker, restarted without knowledge of the files.
    let connector = Arc::new(crate::fixture::FakeConnector(fs.clone()));
    let path = "hdfs://fake:8020/uniffle";
    let mut again = HdfsFixture::start(Setup::default(), connector, Arc::new(fs.clone()), path).await;
    again.register(1).await;
    again.push(1, 0, 5, 1000);
    again.flush().await;
    for (path, bytes) in &before {
        assert_eq!(fs.files().get(path), Some(bytes), "{path}");
    }
    let files = names(fs.files().into_keys());
    assert_eq!(files, ["_0_0.data", "_0_0.index", "_0_1.data", "_0_1.index"]);
    fixture.assert_nothing_missing().await;
    again.assert_nothing_missing().await;
    again.finish().await;
    fixture.finish().await;
}

/// Begins to flush five partitions of shuffle 1 to a remote that cannot create data files.
async fn flushing_to_failing_remote() -> (HdfsFixture, FakeFs) {
    let (mut fixture, fs) = HdfsFixture::fake(Setup::default()).await;
    fixture.register(1).await;
    fs.add_fault(RemoteCall::Create, ".data", RemoteFault::Fail(StoreErrorKind::Unreachable), None);
    for partition in 0..5 {
        fixture.push(1, partition, 3, 1000);
    }
    fixture.begin_flush();
    (fixture, fs)
}

#[tokio::test(start_paused = true)]
async fn failed_remote_is_suspended_and_retried() {
    let (fixture, fs) = flushing_to_failing_remote().await;
    fixture
        .eventually("the remote is marked as failing", || {
            if fixture.hdfs.all_failing() { Ok(()) } else { Err(String::new()) }
        })
        .await;
    fixture.hdfs.refresh_metrics();
    assert_eq!(fixture.metric("remote_storage_is_failing"), 1.0);
    // The number of batches that fail before the suspension depends on scheduling.
    let before = fs.calls().len();
    sleep(Duration::from_secs(300)).await;
    let calls = fs.calls().len() - before;
    // The five batches together retry after 1, 2, 4, 8 and 16 seconds, then every 30.
    assert!((10..=16).contains(&calls), "{calls} calls in five minutes: expected one per suspension");
    fixture.assert_nothing_missing().await;
    fs.release();
    fixture.settled().await;
    assert!(!fixture.hdfs.all_failing());
    assert_eq!(fixture.in_hdfs(1, 4).await.len(), 3);
    fixture.assert_nothing_missing().await;
    fixture.finish().await;
}

#[tokio::test(start_paused = true)]
async fn last_flush_ignores_an_open_circuit_breaker() {
    let (fixture, fs) = flushing_to_failing_remote().await;
    // Suspensions and retry pauses have reached their maximum.
    sleep(Duration::from_secs(300)).await;
    // A call fails, so the next suspension begins now.
    let before = fs.calls().len();
    fixture
        .eventually("a call fails", || match fs.calls().len() - before {
            0 => Err("no call".to_owned()),
            _ => Ok(()),
        })
        .await;
    fs.release();
    assert!(fixture.hdfs.all_failing());
    let deadline = Instant::now() + Duration::from_secs(10);
    assert!(fixture.flusher.drain(deadline).await, "a remote that answers must be tried");
    assert_eq!(fixture.in_hdfs(1, 4).await.len(), 3);
    fixture.assert_nothing_missing().await;
    fixture.finish().await;
}

/// A suspended remote is an open circuit breaker: probes close it, also without batches.
#[tokio::test(start_paused = true)]
async fn open_circuit_breaker_is_probed_without_batches() {
    let (mut fixture, fs) = HdfsFixture::fake(Setup::default()).await;
    fixture.register(1).await;
    fixture.register(2).await;
    fs.add_fault(RemoteCall::Create, ".data", RemoteFault::Fail(StoreErrorKind::Unreachable), None);
    for partition in 0..5 {
        fixture.push(1, partition, 1, 1000);
    }
    fixture.begin_flush();
    fixture
        .eventually(
            "the remote fails",
            || if fixture.hdfs.all_failing() { Ok(()) } else { Err(String::new()) },
        )
        .await;
    // Failed batches are not retried, and shuffle 2 writes nothing. The deletion of shuffle 1 must
    // fail as well, because its success would end the suspension.
    fs.add_fault(RemoteCall::Delete, "", RemoteFault::Fail(StoreErrorKind::Unreachable), None);
    fixture.service.lifecycle.unregister_shuffle(crate::fixture::APP, 1).unwrap();
    fixture.all.clear();
    fixture.settled().await;
    let mut probing = JoinSet::new();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    probing.spawn(Arc::clone(&fixture.hdfs).keep_probing(async { drop(stopped.await) }));
    let times =
        |call: RemoteCall| fs.calls().iter().filter(|it| it.0 == call && it.1.contains(".probe-")).count();
    fixture
        .eventually("a probe failed", || match times(RemoteCall::Delete) {
            0..3 => Err("not three times".to_owned()),
            _ => Ok(()),
        })
        .await;
    assert!(fixture.hdfs.all_failing());
    fs.release();
    fixture
        .eventually("the remote answers", || {
            if fixture.hdfs.all_failing() { Err(String::new()) } else { Ok(()) }
        })
        .await;
    let asked = times(RemoteCall::Delete);
    sleep(Duration::from_secs(600)).await;
    assert_eq!(times(RemoteCall::Delete), asked, "a working remote was probed");
    drop(stop);
    probing.join_next().await.unwrap().unwrap();
    fixture.finish().await;
}

#[tokio::test(start_paused = true)]
async fn failed_deletion_is_retried_and_finally_abandoned() {
    let (mut fixture, fs) = HdfsFixture::fake(Setup::default()).await;
    fixture.register(1).await;
    fixture.push(1, 0, 1, 1000);
    fixture.flush().await;
    fs.add_fault(RemoteCall::Delete, "/1", RemoteFault::Fail(StoreErrorKind::Io), Some(4));
    fixture.service.lifecycle.unregister_shuffle(crate::fixture::APP, 1).unwrap();
    fixture.all.clear();
    fixture
        .eventually(
            "the files are deleted",
            || if fs.files().is_empty() { Ok(()) } else { Err(String::new()) },
        )
        .await;
    fixture.register(2).await;
    fixture.push(2, 0, 1, 1000);
    fixture.flush().await;
    fs.add_fault(RemoteCall::Delete, "/2", RemoteFault::Fail(StoreErrorKind::Denied), None);
    fixture.service.lifecycle.unregister_shuffle(crate::fixture::APP, 2).unwrap();
    fixture.all.clear();
    fixture
        .eventually("the deletion is abandoned", || {
            match fixture.metric("total_remote_storage_deletion_failed") {
                1.0 => Ok(()),
                other => Err(other.to_string()),
            }
        })
        .await;
    fs.release();
    fixture.finish().await;
}

/// Short timeouts, for quick tests.
fn short_timeouts() -> Setup {
    let hdfs = HdfsConfig { write_timeout: Duration::from_secs(20), ..Setup::default().hdfs };
    Setup { hdfs, ..Setup::default() }
}

/// Runs `fault` during writes, and `heal` after a failed write. Then waits until every block is
/// stored and visible.
async fn survives(
    mut fixture: HdfsFixture,
    fault: impl FnOnce(&MiniHdfs),
    heal: impl FnOnce(&MiniHdfs),
    hdfs: &MiniHdfs,
) -> HdfsFixture {
    fixture.register(1).await;
    for partition in 0..4 {
        fixture.push(1, partition, 4, 50_000);
    }
    fixture.flush().await;
    fixture.assert_nothing_missing().await;
    for partition in 0..4 {
        fixture.push(1, partition, 4, 500_000);
    }
    fixture.begin_flush();
    fault(hdfs);
    for partition in 0..4 {
        fixture.push(1, partition, 4, 50_000);
    }
    fixture.begin_flush();
    fixture
        .eventually("something has failed or all is stored", || {
            let failed = fixture.metric("total_memory_to_hdfs_spill_failed");
            if failed > 0.0 || fixture.flusher.unfinished() == 0 {
                Ok(())
            } else {
                Err("all waits".to_owned())
            }
        })
        .await;
    assert!(fixture.metric("total_memory_to_hdfs_spill_failed") > 0.0, "no write has failed");
    heal(hdfs);
    fixture.settled().await;
    fixture.wait_until_nothing_missing().await;
    fixture
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn datanode_stopped_during_appends_loses_nothing() {
    let Some(hdfs) = real().await else { return };
    let fixture = HdfsFixture::real(short_timeouts(), &hdfs.url("/datanode")).await;
    let fixture = survives(
        fixture,
        |hdfs| drop(hdfs.run("stop-datanode")),
        |hdfs| drop(hdfs.run("start-datanode")),
        &hdfs,
    );
    let fixture = fixture.await;
    assert_eq!(fixture.in_hdfs(1, 0).await.len(), 12);
    let later = hdfs.list("/datanode").iter().filter(|file| !file.path.contains("_0.")).count();
    assert!(later > 0, "files got no new numbers: {:?}", hdfs.list("/datanode"));
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn namenode_restart_loses_nothing() {
    let Some(hdfs) = real().await else { return };
    let fixture = HdfsFixture::real(short_timeouts(), &hdfs.url("/namenode")).await;
    let fixture = survives(
        fixture,
        |hdfs| drop(hdfs.run("stop-namenode")),
        |hdfs| drop(hdfs.run("start-namenode")),
        &hdfs,
    );
    let fixture = fixture.await;
    assert_eq!(fixture.in_hdfs(1, 3).await.len(), 12);
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flush_waits_for_the_end_of_safe_mode() {
    let Some(hdfs) = real().await else { return };
    let fixture = HdfsFixture::real(short_timeouts(), &hdfs.url("/safe")).await;
    let fixture = survives(
        fixture,
        |hdfs| drop(hdfs.run("safe-mode on")),
        |hdfs| drop(hdfs.run("safe-mode off")),
        &hdfs,
    );
    fixture.await.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exceeded_quota_falls_back_to_disks() {
    let Some(hdfs) = real().await else { return };
    hdfs.run("mkdirs /quota");
    // The quota is less than a block, so nothing can be written.
    let fixture = HdfsFixture::real(Setup { local: true, ..short_timeouts() }, &hdfs.url("/quota")).await;
    let quota = |hdfs: &MiniHdfs| drop(hdfs.run("quota /quota 1000000"));
    let fixture = survives(fixture, quota, |_| (), &hdfs).await;
    hdfs.run("quota /quota -1");
    fixture.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn denied_permission_falls_back_to_disks_or_waits() {
    let Some(hdfs) = real().await else { return };
    hdfs.run("mkdirs /denied");
    hdfs.run("chmod 777 /denied");
    // Permissions do not apply to the user that started HDFS.
    for local in [true, false] {
        let connector = Arc::new(AsUser(plain_connector(), "nobody"));
        let (path, setup) = (hdfs.url("/denied"), Setup { local, ..short_timeouts() });
        let fixture = HdfsFixture::start(setup, connector, open(&*plain_connector(), &path), &path).await;
        let deny = |hdfs: &MiniHdfs| each_of_the_shuffle(hdfs, &["chown hdfs", "chmod 755"]);
        let allow = |hdfs: &MiniHdfs| each_of_the_shuffle(hdfs, &["chmod 777"]);
        let fixture = survives(fixture, deny, allow, &hdfs).await;
        assert!(!fixture.hdfs.all_failing(), "a denied path must not count as failure of the file system");
        assert_eq!(fixture.visible(1, 1).await[1].is_empty(), !local);
        fixture.finish().await;
    }
}

/// Runs commands on the shuffle's directory, recursively.
fn each_of_the_shuffle(hdfs: &MiniHdfs, commands: &[&str]) {
    let shuffle = "/denied/app-1/1";
    let mut paths = vec![shuffle.to_owned()];
    paths.extend((0..4).map(|partition| format!("{shuffle}/{partition}-{partition}")));
    paths.extend(hdfs.list(shuffle).into_iter().map(|file| file.path));
    for (path, command) in paths.iter().flat_map(|path| commands.iter().map(move |command| (path, command))) {
        hdfs.run(&format!("{command} {path}"));
    }
}

/// Connects as another user; HDFS without security accepts any name.
#[derive(Debug)]
struct AsUser(Arc<dyn RemoteConnector>, &'static str);

impl RemoteConnector for AsUser {
    fn target(&self, storage: &RemoteStorage, location: RemoteLocation) -> Result<RemoteTarget, StoreError> {
        let target = self.0.target(storage, location)?;
        Ok(RemoteTarget { user: Some(self.1.to_owned()), ..target })
    }

    fn connect(&self, target: &RemoteTarget) -> Result<Arc<dyn RemoteFs>, StoreError> {
        self.0.connect(target)
    }
}
