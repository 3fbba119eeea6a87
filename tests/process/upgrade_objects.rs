//! SIGUSR2 to a worker without disks: registrations, reports and blocks are in an object store,
//! where the successor finds them.

use tokio::task::block_in_place;
use uniffle_testkit::s3::{ACCESS_KEY, BUCKET, S3Server, SECRET_KEY};
use uniffle_testkit::wait_until;
use uniffle_testkit::worker::{Setup, WorkerProcess};

use crate::writes::{Written, client_of, key};

const PARTITIONS: i32 = 20;
const BLOCK_BYTES: u32 = 50_000;

/// Starts a worker without disks on the store. Returns also the directory of its keys.
fn start(server: &S3Server) -> (WorkerProcess, tempfile::TempDir) {
    start_with(server, "")
}

/// Starts a worker without disks on the store, with the additional tables `more`. Returns also the
/// directory of its keys.
pub(crate) fn start_with(server: &S3Server, more: &str) -> (WorkerProcess, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys");
    let text = format!("[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n");
    std::fs::write(&keys, text).unwrap();
    let tables = format!(
        "[object_store]\nurl = \"s3://{BUCKET}/uniffle\"\nendpoint = \"{}\"\npath_style = true\n\
         credentials = \"file\"\ncredentials_file = {keys:?}\n{more}",
        server.endpoint()
    );
    let setup = Setup {
        name: "objects",
        capacity: "64M",
        store_type: "MEMORY_OBJECT",
        disks: 0,
        made_tables: tables,
        ..Setup::default()
    };
    (block_in_place(|| WorkerProcess::start(&setup)), dir)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upgrade_without_disks_keeps_acknowledged_state() {
    let server = S3Server::start().await;
    let (mut worker, _keys) = start(&server);
    let client = client_of(&worker).await;
    let mut written = Written::register(&client, key("app", 0), PARTITIONS).await;
    let mut task = 0;
    for _ in 0..2 {
        for _ in 0..4 {
            written.task(&client_of(&worker).await, task, BLOCK_BYTES).await.unwrap();
            task += 1;
        }
        let pid = worker.pid();
        block_in_place(|| {
            worker.begin_upgrade();
            worker.finish_upgrade();
        });
        assert_eq!(worker.pid(), pid);
        let client = client_of(&worker).await;
        client.heartbeat("app").await.unwrap();
        written.assert_readable(&client).await;
    }
    worker.assert_no_error_logged();
    assert!(!worker.log().contains("not flushed"), "{}", worker.log());
    client_of(&worker).await.unregister_app("app").await.unwrap();
    let prefix = server.files().join("uniffle");
    block_in_place(|| {
        wait_until("the objects are deleted", std::time::Duration::from_secs(30), || {
            match segments(&prefix) {
                0 => Ok(()),
                remaining => Err(format!("{remaining} segments")),
            }
        });
        worker.assert_clean();
        worker.stop();
    });
    server.stop().await;
}

/// Returns the number of segments below `dir`.
fn segments(dir: &std::path::Path) -> usize {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let of = |entry: std::fs::DirEntry| match entry.path() {
        path if path.is_dir() => segments(&path),
        _ => usize::from(entry.file_name().to_string_lossy().starts_with('s')),
    };
    entries.map(of).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upgrade_to_another_store_location_is_refused() {
    let server = S3Server::start().await;
    let (worker, _keys) = start(&server);
    let client = client_of(&worker).await;
    let mut written = Written::register(&client, key("app", 0), PARTITIONS).await;
    let config = worker.config();
    let elsewhere = config.replace("shuffle/uniffle", "shuffle/elsewhere");
    let disks = config
        .replace("MEMORY_OBJECT", "MEMORY_LOCALFILE_OBJECT")
        .replace("data_paths = []", &format!("data_paths = [{:?}]", worker.dir().join("disk")));
    let unfit = [
        (elsewhere, "objects would be at s3://shuffle/elsewhere, as "),
        (disks, "store_type = MEMORY_LOCALFILE_OBJECT: the running worker has no local disks"),
    ];
    for (task, (text, complaint)) in (0..).zip(unfit) {
        assert_ne!(text, config);
        worker.write_config(&text);
        worker.begin_upgrade();
        block_in_place(|| worker.wait_log(complaint));
        written.task(&client, task, BLOCK_BYTES).await.expect("the worker does not continue");
    }
    written.assert_readable(&client).await;
    block_in_place(|| worker.stop());
    server.stop().await;
}
