//! Another process fills the worker's tmpfs before a shuffle is registered, so the memory file has
//! no slot for the shuffle's tables. The shuffle gets a slot once there is space, and survives a
//! kill from then on. Skipped where a tmpfs cannot be mounted. This is a failure in CI if the
//! process may mount.

use std::os::unix::fs::MetadataExt as _;
use std::time::Duration;

use tokio::task::block_in_place;
use tokio::time::Instant;
use uniffle_testkit::worker::{Setup, WorkerProcess};
use uniffle_testkit::{eventually, say};

use super::honest::{APP, Honest};
use crate::kept_memory::{NEVER_FLUSHED, SmallTmpfs};
use crate::writes::client_of;

/// Minimum bytes of pre-faulted pages: enough for the writes while the tmpfs is full.
const PREFAULTED_BYTES: u64 = 32 << 20;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shuffle_of_a_full_tmpfs_survives_a_kill_once_there_is_room() {
    let directory = tempfile::Builder::new().prefix("uniffle-worker-test-").tempdir().unwrap();
    let Some(tmpfs) = SmallTmpfs::mount(directory.path(), "200m") else { return };
    let memory: &'static str = Box::leak(format!("backing = {:?}\n", tmpfs.path()).into());
    let setup =
        Setup { name: "full tmpfs", capacity: "96MiB", memory, tables: NEVER_FLUSHED, ..Setup::default() };
    let mut worker = block_in_place(|| WorkerProcess::start(&setup));
    let client = client_of(&worker).await;
    eventually("pages are pre-faulted", || {
        let files = std::fs::read_dir(tmpfs.path()).unwrap().flatten();
        let bytes: u64 = files.filter_map(|file| Some(512 * file.metadata().ok()?.blocks())).sum();
        if bytes >= PREFAULTED_BYTES { Ok(()) } else { Err(format!("{bytes} bytes")) }
    })
    .await;
    let filler = tmpfs.fill();
    let mut honest = Honest::start(&client).await;
    block_in_place(|| worker.wait_log("a kill would lose blocks in memory of some shuffles"));
    let ready = block_in_place(|| worker.page("/health/ready")).unwrap();
    assert!(ready.contains("a kill would lose blocks in memory of 1 shuffles"), "{ready}");
    assert_eq!(block_in_place(|| worker.metrics()).total("memory_unprotected_shuffles"), Some(1.0));
    let stats = honest.work(&client, Instant::now() + Duration::from_secs(1)).await;
    say(&format!("adversary, full tmpfs: {stats}"));
    std::fs::remove_file(filler).unwrap();
    block_in_place(|| worker.wait_log("memory_store.backing has space for all shuffles again"));
    honest.work(&client, Instant::now()).await;
    block_in_place(|| {
        worker.kill();
        worker.start_again();
    });
    let client = client_of(&worker).await;
    honest.assert_readable(&client).await;
    client.unregister_app(APP).await.unwrap();
    worker.assert_clean();
    block_in_place(|| worker.stop());
}
