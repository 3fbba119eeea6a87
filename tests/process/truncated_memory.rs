//! Access to memory whose file in `memory_store.backing` was truncated (SIGBUS).

use std::os::unix::process::ExitStatusExt as _;

use tokio::task::block_in_place;
use uniffle_client::grpc::ReadOptions;
use uniffle_testkit::clients::client_of;
use uniffle_testkit::worker::{Setup, WorkerProcess};
use uniffle_wire::types::PartitionId;

use crate::kept_memory::directory;
use crate::writes::{Written, key};

/// Another program truncates the memory file. The worker continues, and only blocks in missing
/// pages are lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_survives_truncation_of_its_memory_file() {
    let (directory, memory) = directory();
    // The periodic check of the file comes too late.
    let tables = "disk_healthy_check_interval_sec = 3600\n";
    let setup = Setup { name: "truncated", capacity: "24MiB", memory, tables, ..Setup::default() };
    let mut worker = block_in_place(|| WorkerProcess::start(&setup));
    let client = client_of(&worker).await;
    let mut earlier = Written::register(&client, key("app", 0), 2).await;
    earlier.task(&client, 0, 14 << 10).await.unwrap();
    let path = directory.path().join("uniffle-worker.memory");
    let bytes = std::fs::metadata(&path).unwrap().len();
    for shuffle in 1..4 {
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(0).unwrap();
        let mut written = Written::register(&client, key("app", shuffle), 2).await;
        for task in 0..20 {
            written.task(&client, task, 14 << 10).await.expect("the worker does not continue");
        }
        written.assert_readable(&client).await;
        let read = client.read_partition(&earlier.key, PartitionId(0), &ReadOptions::default()).await;
        assert!(read.is_err(), "a zeroed block was served");
    }
    assert_eq!(std::fs::metadata(&path).unwrap().len(), bytes, "the length of the file was not restored");
    block_in_place(|| worker.begin_upgrade());
    block_in_place(|| worker.finish_upgrade());
    assert!(worker.log().contains("was removed, replaced or truncated"), "{}", worker.log());
    let client = client_of(&worker).await;
    let mut written = Written::register(&client, key("app", 9), 2).await;
    written.task(&client, 0, 14 << 10).await.unwrap();
    written.assert_readable(&client).await;
    block_in_place(|| worker.stop());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn end_by_sigbus_is_explained_on_stderr() {
    let (directory, memory) = directory();
    let setup = Setup { name: "sigbus", memory, ..Setup::default() };
    let mut worker = block_in_place(|| WorkerProcess::start(&setup));
    worker.signal(rustix::process::Signal::BUS);
    block_in_place(|| worker.wait_log("uniffle-worker: ended by SIGBUS: a page of "));
    assert!(worker.log().contains(&directory.path().display().to_string()), "{}", worker.log());
    block_in_place(|| {
        assert_eq!(worker.wait_end().signal(), Some(rustix::process::Signal::BUS.as_raw()));
        worker.start_again();
        worker.stop();
    });
}
