//! Alerts about remote stores: object store, offload to it, and HDFS.

use std::path::Path;
use std::time::Duration;

use tokio::task::block_in_place;
use uniffle_client::grpc::register_request;
use uniffle_client::send::SendForm;
use uniffle_testkit::hdfs::MiniHdfs;
use uniffle_testkit::s3::faults::{On, ResponseFault};
use uniffle_testkit::s3::{ACCESS_KEY, BUCKET, S3Server, SECRET_KEY};
use uniffle_testkit::worker::{Setup, WorkerProcess};
use uniffle_testkit::{maven, wait_until};
use uniffle_worker::proto::RemoteStorage;

use super::alerts::{BLOCK_BYTES, WAIT_MAX, Watch, fill, is_possible};
use crate::writes::{Written, client_of, key};

/// Returns the settings of a worker on the store, whose keys are written to `keys`.
fn on_store(server: &S3Server, keys: &Path, store_type: &'static str) -> Setup {
    let text = format!("[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n");
    std::fs::write(keys, text).unwrap();
    let made_tables = format!(
        "[hybrid_store]\nmemory_spill_high_watermark = 0.1\nmemory_spill_low_watermark = 0.01\n\
         [object_store]\nurl = \"s3://{BUCKET}/uniffle\"\nendpoint = \"{}\"\npath_style = true\n\
         retry_timeout_sec = 1\ncredentials = \"file\"\ncredentials_file = {keys:?}\n",
        server.endpoint(),
    );
    let disks = usize::from(store_type == "MEMORY_LOCALFILE_OBJECT");
    Setup { capacity: "64MiB", store_type, disks, made_tables, ..Setup::default() }
}

/// Alerts that may follow from a failing object store.
const CONSEQUENCES: [&str; 6] = [
    "UniffleObjectStoreFails",
    "UniffleObjectStoreThrottles",
    "UniffleFlushFails",
    "UniffleFlushQueueGrows",
    "UniffleMemoryExhausted",
    "UniffleWorkerUnhealthy",
];

/// Asserts that the alerts `expected` fire while all requests to the object store but deletions,
/// aborts and lists of uploads get `fault` and blocks arrive.
async fn assert_store_alerts(fault: ResponseFault, expected: &[&str]) {
    let (server, directory) = (S3Server::start().await, tempfile::tempdir().unwrap());
    let setup = on_store(&server, &directory.path().join("keys"), "MEMORY_OBJECT");
    let worker = block_in_place(|| WorkerProcess::start(&setup));
    let watch = block_in_place(|| Watch::start(&[&worker]));
    let client = client_of(&worker).await;
    for shuffle in 0..20 {
        client.register(&key("app", shuffle), &[(0, 3)]).await.unwrap();
    }
    for on in [On::Get, On::Head, On::List, On::Put, On::Part, On::Create, On::Complete] {
        server.faults.plan(on, 10_000, &fault);
    }
    for task in 0..100 {
        let written = Written::of(key("app", task % 20), 4);
        let batch = written.batch(i64::from(task), BLOCK_BYTES);
        client.push(&written.key, SendForm::Classic, &batch).await.unwrap();
    }
    block_in_place(|| watch.wait_firing(&worker, expected, &CONSEQUENCES));
    drop(worker);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn alerts_fire_on_store_outage() {
    if is_possible() {
        let refusal = ResponseFault::Refuse(503, "SlowDown");
        assert_store_alerts(refusal, &["UniffleObjectStoreFails", "UniffleFlushFails"]).await;
    }
}

/// Every second request to upload is refused. The worker repeats it, so the store does not count as
/// failing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn alert_fires_on_throttling_store() {
    if !is_possible() {
        return;
    }
    let (server, directory) = (S3Server::start().await, tempfile::tempdir().unwrap());
    let setup = on_store(&server, &directory.path().join("keys"), "MEMORY_OBJECT");
    let worker = block_in_place(|| WorkerProcess::start(&setup));
    let watch = block_in_place(|| Watch::start(&[&worker]));
    for _ in 0..5000 {
        server.faults.plan(On::Put, 1, &ResponseFault::Refuse(503, "SlowDown"));
        server.faults.plan(On::Put, 1, &ResponseFault::None);
    }
    let filling = fill(&worker, "app");
    block_in_place(|| watch.wait_firing(&worker, &["UniffleObjectStoreThrottles"], &CONSEQUENCES));
    drop((filling, worker));
    server.stop().await;
}

/// Batches wait for uploads that take longer than the test.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn alert_fires_on_growing_flush_queue() {
    if is_possible() {
        assert_store_alerts(ResponseFault::Slow(Duration::from_secs(600)), &["UniffleFlushQueueGrows"]).await;
    }
}

/// Deletions are denied: those of objects, and those of directories in HDFS, whose NameNode is then
/// stopped. Uploads from disks are denied too. Deletions of objects are given up after two minutes,
/// so all are tried at the same time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn alerts_fire_on_denied_deletions_uploads_and_absent_namenode() {
    if !is_possible() || !maven::is_available() {
        return;
    }
    let (deletions, uploads) = (S3Server::start().await, S3Server::start().await);
    let directory = tempfile::tempdir().unwrap();
    let objects = on_store(&deletions, &directory.path().join("keys-1"), "MEMORY_OBJECT");
    let mut moves = on_store(&uploads, &directory.path().join("keys-2"), "MEMORY_LOCALFILE_OBJECT");
    moves.made_tables.push_str("offload_high_watermark = 0.0002\noffload_low_watermark = 0.0001\n");
    let [objects, moves] = [objects, moves].map(|setup| block_in_place(|| WorkerProcess::start(&setup)));
    let (hdfs, remote) = block_in_place(|| (MiniHdfs::start(&[]), start_on_hdfs()));
    let watch = block_in_place(|| Watch::start(&[&objects, &moves, &remote]));
    let denied = ResponseFault::Refuse(403, "AccessDenied");

    let client = client_of(&objects).await;
    let mut written = Written::register(&client, key("app", 0), 4).await;
    written.task(&client, 0, BLOCK_BYTES).await.unwrap();
    for on in [On::List, On::Delete] {
        deletions.faults.plan(on, 10_000, &denied);
    }
    client.unregister_app("app").await.unwrap();

    for on in [On::Put, On::Create, On::Part] {
        uploads.faults.plan(on, 10_000, &denied);
    }
    let client = client_of(&moves).await;
    let mut written = Written::register(&client, key("app", 0), 4).await;
    for task in 0..20 {
        written.task(&client, task, BLOCK_BYTES).await.unwrap();
    }

    fail_hdfs(&hdfs, &remote).await;
    block_in_place(|| {
        let of_hdfs = ["UniffleWorkerUnhealthy", "UniffleFlushFails", "UniffleFlushQueueGrows"];
        watch.wait_firing(&remote, &["UniffleHdfsFilesLeft", "UniffleHdfsFails"], &of_hdfs);
        watch.wait_firing(&moves, &["UniffleOffloadFails"], &["UniffleObjectStoreFails"]);
        watch.wait_firing(&objects, &["UniffleObjectsLeft"], &["UniffleObjectStoreFails"]);
    });
    drop((objects, moves, remote));
    deletions.stop().await;
    uploads.stop().await;
}

/// Starts a worker without disks that writes to HDFS as a user without special rights.
fn start_on_hdfs() -> WorkerProcess {
    let made_tables = "[hdfs_store]\nallowed_paths = [\"*\"]\n[hybrid_store]\n\
                       memory_single_buffer_max_spill_size = \"1MiB\"\n";
    WorkerProcess::start(&Setup {
        capacity: "64MiB",
        disks: 0,
        store_type: "MEMORY_HDFS",
        made_tables: made_tables.to_owned(),
        env: vec![("HADOOP_USER_NAME", "nobody".to_owned())],
        ..Setup::default()
    })
}

/// Denies the deletion of an application's directory. Then stops the NameNode, and sends blocks of
/// another application.
async fn fail_hdfs(hdfs: &MiniHdfs, worker: &WorkerProcess) {
    block_in_place(|| {
        hdfs.run("mkdirs /apps");
        hdfs.run("chmod 777 /apps");
    });
    let client = client_of(worker).await;
    for app in ["denied", "absent"] {
        let mut request = register_request(&key(app, 0), &[(0, 3)]);
        request.remote_storage = Some(RemoteStorage { path: hdfs.url("/apps"), ..RemoteStorage::default() });
        client.register_with(request).await.unwrap();
    }
    let batch = |app| Written::of(key(app, 0), 4).batch(0, 1_200_000);
    client.push(&key("denied", 0), SendForm::Classic, &batch("denied")).await.unwrap();
    block_in_place(|| {
        wait_until("blocks are in HDFS", WAIT_MAX, || {
            let bytes = worker.metrics().expect("total_memory_spill_to_hdfs");
            if bytes >= 4_800_000.0 { Ok(()) } else { Err(format!("{bytes} bytes")) }
        });
        // Only the superuser, who started HDFS, may now remove entries.
        hdfs.run("chmod 555 /apps");
    });
    client.unregister_app("denied").await.unwrap();
    block_in_place(|| {
        wait_until("the deletion is given up", WAIT_MAX, || {
            let failed = worker.metrics().expect("total_remote_storage_deletion_failed");
            if failed > 0.0 { Ok(()) } else { Err("no deletion has failed yet".to_owned()) }
        });
        hdfs.run("stop-namenode");
    });
    client.push(&key("absent", 0), SendForm::Classic, &batch("absent")).await.unwrap();
}
