//! Workers over HDFS: reports to coordinators and operators when HDFS is unusable.

use std::path::Path;

use uniffle_client::block::{Block, IdLayout};
use uniffle_client::grpc::{ReadOptions, ShuffleClient, register_request};
use uniffle_client::send::SendForm;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_wire::types::{AppId, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId};
use uniffle_worker::proto::{RemoteStorage, ServerStatus};

use crate::real::{REAL_HDFS_DEADLINE, real};
use uniffle_testkit::coordinator::{CoordinatorDouble, HeartbeatReply};
use uniffle_testkit::ports::free_port;
use uniffle_testkit::wait_until;
use uniffle_testkit::worker::{Setup, WorkerProcess};

/// Returns the setup of a worker with HDFS as the only tier below memory, and `more` in its
/// section.
fn only_hdfs(name: &'static str, more: &str) -> Setup {
    Setup {
        name,
        capacity: "64MiB",
        disks: 0,
        store_type: "MEMORY_HDFS",
        made_tables: format!(
            "[hdfs_store]\n{more}\n[hybrid_store]\nmemory_single_buffer_max_spill_size = \"1MiB\""
        ),
        ..Setup::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_without_remote_store_is_unhealthy_and_keeps_data() {
    let Some(hdfs) = real().await else { return };
    let mut coordinator = CoordinatorDouble::start(HeartbeatReply::Succeed).await;
    let quorum = Some(coordinator.address.to_string());
    let worker = WorkerProcess::start(&Setup { quorum, ..only_hdfs("unhealthy", "allowed_paths = [\"*\"]") });
    let client = ShuffleClient::connect(([127, 0, 0, 1], worker.ready().grpc_port).into()).await.unwrap();
    let key = ShuffleKey::new(AppId::parse("app-1").unwrap(), ShuffleId(1));
    let mut request = register_request(&key, &[(0, 0), (1, 1), (2, 2), (3, 3)]);
    request.remote_storage = Some(RemoteStorage { path: hdfs.url("/unhealthy"), ..RemoteStorage::default() });
    client.register_with(request).await.unwrap();
    coordinator.heartbeat(|beat| beat.status() == ServerStatus::Active).await;

    hdfs.run("stop-namenode");
    let generator = BlockGenerator::new(5, IdLayout::SPARK);
    let mut sent: Vec<(PartitionId, Vec<Block>)> = Vec::new();
    for partition in (0..4).map(PartitionId) {
        let blocks = (0..2).map(|n| generator.block(partition, TaskAttemptId(1), n, 600_000)).collect();
        sent.push((partition, blocks));
    }
    client.push(&key, SendForm::Classic, &sent).await.unwrap();
    wait_until("the worker is not ready", REAL_HDFS_DEADLINE, || match worker.page("/health/ready") {
        Err(answer) if answer.contains("503") && answer.contains("unhealthy: all remote stores fail") => {
            Ok(())
        }
        other => Err(format!("{other:?}")),
    });
    coordinator.heartbeat(|beat| beat.status() == ServerStatus::Unhealthy).await;
    let metrics = worker.metrics();
    assert_eq!(
        (metrics.expect("service_is_healthy"), metrics.expect("remote_storage_is_failing")),
        (1.0, 1.0)
    );
    assert!(worker.log().contains("all remote stores fail"), "{}", worker.log());
    for (partition, blocks) in &sent {
        let read = client.read_partition(&key, *partition, &ReadOptions::default()).await.unwrap().blocks;
        assert!(blocks.iter().all(|block| read.get(&block.meta.block_id) == Some(&block.data)));
    }

    hdfs.run("start-namenode");
    wait_until("the worker is ready", REAL_HDFS_DEADLINE, || worker.page("/health/ready").map(drop));
    coordinator.heartbeat(|beat| beat.status() == ServerStatus::Active).await;
    wait_until("everything is in HDFS", REAL_HDFS_DEADLINE, || {
        match worker.metrics().expect("total_memory_spill_to_hdfs") {
            4_800_000.0 => Ok(()),
            bytes => Err(format!("{bytes} bytes")),
        }
    });
    assert_eq!(worker.metrics().expect("service_is_healthy"), 0.0);
    client.unregister_app("app-1").await.unwrap();
    worker.assert_clean();
    worker.stop();
    coordinator.stop().await;
}

/// Asserts that a worker does not start and exits with code 1. Returns its error line.
fn refusal(setup: &Setup) -> String {
    let log = WorkerProcess::refused(setup).unwrap();
    assert!(!log.contains("panicked"), "{log}");
    let line = log.lines().find(|line| line.starts_with("uniffle-worker: "));
    line.unwrap_or_else(|| panic!("no error was logged: {log}")).to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unusable_remote_path_fails_start_and_names_key() {
    // No process listens on this port.
    let port = free_port();
    let absent = format!("hdfs://127.0.0.1:{port}/uniffle");
    let setup = only_hdfs("no-namenode", &format!("precheck_enable = true\nallowed_paths = [\"{absent}\"]"));
    let line = refusal(&setup);
    assert!(line.contains("hdfs_store.precheck_enable") && line.contains(&absent), "{line}");

    // At first the worker's user may write to one of two paths only.
    let Some(hdfs) = real().await else { return };
    hdfs.run("mkdirs /private");
    hdfs.run("chmod 700 /private");
    let (good, private) = (hdfs.url("/checked"), hdfs.url("/private"));
    hdfs.run("mkdirs /checked");
    hdfs.run("chmod 777 /checked");
    let more = format!("precheck_enable = true\nallowed_paths = [\"{good}\", \"{private}\"]");
    let env = vec![("HADOOP_USER_NAME", "nobody".to_owned())];
    let setup = Setup { env: env.clone(), ..only_hdfs("denied", &more) };
    let line = refusal(&setup);
    for part in ["hdfs_store.precheck_enable", private.as_str(), "permission", "user=nobody"] {
        assert!(line.contains(part), "{part} is missing: {line}");
    }
    assert!(!line.contains(&good), "{line}");
    hdfs.run("chmod 777 /private");
    WorkerProcess::start(&Setup { env, ..only_hdfs("allowed", &more) }).stop();
    let remaining: Vec<_> = ["/checked", "/private"].iter().flat_map(|path| hdfs.list(path)).collect();
    assert!(remaining.is_empty(), "{remaining:?}");
}

#[test]
fn start_without_kerberos_library_names_it() {
    // The loader takes the first file with this name, which is not a library.
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("libgssapi_krb5.so.2"), "no library").unwrap();
    let keytab = Path::new("/nonexistent/uniffle.keytab");
    let kerberos = format!(
        "[hdfs_store.kerberos_security_config]\nkeytab_path = {keytab:?}\nprincipal = \"uniffle/host@REALM\""
    );
    let env = vec![("LD_LIBRARY_PATH", dir.path().display().to_string())];
    let line = refusal(&Setup { env, ..only_hdfs("no-library", &kerberos) });
    for part in ["Kerberos login for HDFS", "libgssapi_krb5.so.2", "libgssapi-krb5-2", "krb5-libs"] {
        assert!(line.contains(part), "{part} is missing: {line}");
    }
}
