//! SIGUSR2 during a write to a slow disk: the upgrade waits for it, and each block is stored once
//! afterwards.

use tokio::task::block_in_place;
use uniffle_client::send::SendForm;
use uniffle_testkit::wait_until;
use uniffle_testkit::worker::{Setup, WorkerProcess};
use uniffle_wire::types::TaskAttemptId;

use crate::kept_memory::{MEMFD, directory};
use crate::upgrades::FreezableDisk;
use crate::writes::{Written, client_of, key};

const PARTITIONS: i32 = 20;
const BLOCK_BYTES: u32 = 64 << 10;
/// Flushes from 7 MiB on, with a capacity of 24 MiB.
const SOON_FLUSHED: &str =
    "[hybrid_store]\nmemory_spill_high_watermark = 0.3\nmemory_spill_low_watermark = 0.05\n";

/// Returns the number behind `name=` in the last line of `log` that contains `message`.
fn logged_number(log: &str, message: &str, name: &str) -> u64 {
    let line =
        log.lines().rev().find(|line| line.contains(message)).unwrap_or_else(|| panic!("{message}: {log}"));
    let field = format!(" {name}=");
    let value = line.split_once(&field).unwrap_or_else(|| panic!("{name}: {line}")).1;
    value.split(' ').next().and_then(|value| value.parse().ok()).unwrap()
}

async fn handed_over_in_a_flush(name: &'static str, memory: &'static str) {
    let dir = tempfile::Builder::new().prefix("uniffle-worker-test-").tempdir().unwrap();
    let Some(disk) = FreezableDisk::mount(dir.path()) else { return };
    let paths = vec![disk.0.join("data")];
    let setup = Setup { name, capacity: "24MiB", memory, tables: SOON_FLUSHED, ..Setup::default() };
    let mut worker = block_in_place(|| WorkerProcess::start_in(&setup, dir, paths));
    let client = client_of(&worker).await;
    let mut written = Written::register(&client, key("app", 0), PARTITIONS).await;
    // Some blocks are on the disk, others are below the flush threshold.
    for task in 0..8 {
        written.task(&client, task, BLOCK_BYTES).await.unwrap();
    }
    let frozen = disk.freeze();
    for task in 8..16 {
        // Reports are written to the disk as well.
        client.push(&written.key, SendForm::Classic, &written.batch(task, BLOCK_BYTES)).await.unwrap();
    }
    block_in_place(|| {
        wait_until("a batch is being written", std::time::Duration::from_secs(30), || {
            match worker.metrics().total("in_flush_buffer_size") {
                Some(bytes) if bytes > 0.0 => Ok(()),
                other => Err(format!("{other:?} bytes")),
            }
        });
        worker.begin_upgrade();
        worker.wait_log("upgrade: rehearsal of the successor started");
        drop(frozen);
        worker.finish_upgrade();
    });
    let log = worker.log();
    assert!(log.contains("rehearsal succeeded; handing over memory"), "{log}");
    let on_disk = logged_number(&log, "recovered data of an earlier process", "blocks");
    let in_memory = logged_number(&log, "recovered blocks from memory", "restored");
    let blocks = 16 * u64::try_from(PARTITIONS).unwrap();
    assert!(on_disk > 0 && in_memory > 0, "{on_disk} blocks are on the disk, {in_memory} in memory");
    assert_eq!(on_disk + in_memory, blocks);
    let client = client_of(&worker).await;
    for task in 8..16 {
        let batch = written.batch(task, BLOCK_BYTES);
        let ids: Vec<_> = batch.iter().map(|(at, blocks)| (*at, vec![blocks[0].meta.block_id])).collect();
        client.report(&written.key, TaskAttemptId(task), &ids).await.unwrap();
        written.expect(task, BLOCK_BYTES);
    }
    written.assert_readable(&client).await;
    client.unregister_app("app").await.unwrap();
    worker.assert_clean();
    block_in_place(|| worker.stop());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upgrade_during_a_flush_stores_each_block_once() {
    let (_directory, memory) = directory();
    handed_over_in_a_flush("flushed meanwhile", memory).await;
    handed_over_in_a_flush("flushed meanwhile, memfd", MEMFD).await;
}
