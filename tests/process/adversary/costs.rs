//! Attacks on state that outlives a request: disk space, the metadata log, and the heap at the next
//! start. After each attack the worker is killed and upgraded, and must serve the honest
//! application within its memory bound.

use std::io;
use std::path::Path;
use std::time::Duration;

use futures::future::{self, BoxFuture, FutureExt as _};
use tokio::task::block_in_place;
use tokio::time::{Instant, sleep};
use uniffle_client::block::{Block, IdLayout};
use uniffle_client::grpc::{ReadOptions, ShuffleClient, register_request};
use uniffle_client::send::SendForm;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_testkit::clients::{client_of, key};
use uniffle_testkit::say;
use uniffle_wire::types::{BlockId, PartitionId, TaskAttemptId};

use super::attacks::{APP, Target, client};
use super::{ALONE, Attack, Siege};

/// Working time of the honest application after each start.
const AFTERWARDS: Duration = Duration::from_secs(2);
/// Pause before a connection is retried.
const PAUSE: Duration = Duration::from_millis(50);
/// Both copies of the metadata log: twice the compaction threshold plus the live records.
const LOG_BYTES_MAX: u64 = 2 * (2 * (8 << 20) + (8 << 20));

/// Sends one-byte blocks with widely spaced ids, and reports some of them.
fn scattered_blocks(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        let generator = BlockGenerator::new(target.seed, IdLayout::SPARK);
        let mut next = i64::try_from(target.seed % 1000).expect("small") << 20;
        loop {
            let Ok(client) = client(target).await else {
                sleep(PAUSE).await;
                continue;
            };
            for partition in 0..10 {
                let partition = PartitionId(partition);
                let ids: Vec<BlockId> = (next..next + 40_000).map(|at| BlockId(at << 33)).collect();
                next += 40_000;
                let block = |id: &BlockId| Block::new(*id, TaskAttemptId(1), generator.content(*id, 1));
                let blocks: Vec<Block> = ids.iter().map(block).collect();
                let _ = client.push(&key(APP, 0), SendForm::Classic, &[(partition, blocks)]).await;
                let some = [(partition, ids[..4000].to_vec())];
                let _ = client.report(&key(APP, 0), TaskAttemptId(next), &some).await;
            }
        }
    }
    .boxed()
}

/// Registers a few shuffles repeatedly, each time with other properties and ranges.
fn changing_registrations(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        let flood = (0..8).map(|shuffle| async move {
            for n in 0.. {
                let Ok(client) = client(target).await else {
                    sleep(PAUSE).await;
                    continue;
                };
                for round in 0..100 {
                    // Ranges that do not touch cannot be merged, so their number grows.
                    let first = 2 * ((100 * n + round) % 10_000);
                    let mut request = register_request(&key(APP, shuffle), &[(first, first)]);
                    let value = format!("{n}-{round}-").repeat(2000);
                    request.properties = [("spark.rss.changing".to_owned(), value)].into();
                    let _ = client.register_with(request).await;
                }
            }
        });
        future::join_all(flood).await;
        io::ErrorKind::QuotaExceeded.into()
    }
    .boxed()
}

/// Sends reports that repeat thousands of ids and add one.
fn repeated_reports(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        let flood = (0..8).map(|partition| async move {
            let known: Vec<BlockId> = (0..20_000).map(|at| BlockId(at << 21)).collect();
            for n in 0.. {
                let Ok(client) = client(target).await else {
                    sleep(PAUSE).await;
                    continue;
                };
                for round in 0..20 {
                    let task = 100_000 * (1 + i64::from(partition)) + 20 * n + round;
                    let mut ids = known.clone();
                    ids.push(BlockId((1 << 50) + task));
                    let report = [(PartitionId(partition), ids)];
                    let _ = client.report(&key(APP, 0), TaskAttemptId(task), &report).await;
                }
            }
        });
        future::join_all(flood).await;
        io::ErrorKind::QuotaExceeded.into()
    }
    .boxed()
}

/// Sends one-byte blocks to one partition each; each takes a page on disk.
fn blocks_that_fill_pages(target: Target) -> BoxFuture<'static, io::Error> {
    async move {
        let generator = BlockGenerator::new(target.seed, IdLayout::SPARK);
        for task in 0.. {
            let Ok(client) = client(target).await else {
                sleep(PAUSE).await;
                continue;
            };
            let _ = client.register(&key(APP, 1), &[(0, 4999)]).await;
            let tiny =
                |at| (PartitionId(at), vec![generator.block(PartitionId(at), TaskAttemptId(task), 0, 1)]);
            let batch: Vec<_> = (0..5000).map(tiny).collect();
            let _ = client.push(&key(APP, 1), SendForm::Classic, &batch).await;
        }
        io::ErrorKind::QuotaExceeded.into()
    }
    .boxed()
}

/// Returns the bytes of all files below a directory; files may appear and vanish meanwhile.
fn bytes_below(directory: &Path) -> u64 {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let bytes = entries.map(|entry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => bytes_below(&entry.path()),
        Ok(metadata) => metadata.len(),
        Err(_) => 0,
    });
    bytes.sum()
}

/// Returns the bytes below `directory` in all data directories.
fn on_disks(siege: &Siege, directory: &str) -> u64 {
    siege.worker.data_paths().iter().map(|path| bytes_below(&path.join(directory))).sum()
}

enum End {
    Kill,
    Upgrade,
}

impl Siege {
    /// Ends the worker and starts it again. The honest application continues; after a kill it uses
    /// a new shuffle.
    async fn restart(&mut self, end: End) {
        block_in_place(|| match end {
            End::Kill => {
                self.worker.kill();
                self.worker.start_again();
            }
            End::Upgrade => {
                self.worker.begin_upgrade();
                self.worker.finish_upgrade();
            }
        });
        self.client = client_of(&self.worker).await;
        match end {
            End::Kill => self.honest.begin_again(&self.client).await,
            End::Upgrade => self.honest.assert_readable(&self.client).await,
        }
        let figures = self.honest.work(&self.client, Instant::now() + AFTERWARDS).await;
        let peak = self.worker.peak_resident_bytes();
        say(&format!(
            "adversary, {}: after a start at most {} MiB resident; {figures}",
            self.name,
            peak >> 20
        ));
        self.assert_within_memory();
    }
}

/// Runs an attack beside the honest application, then restarts the worker twice.
async fn survives_restarts_after(
    name: &'static str,
    tables: &str,
    attack: Attack,
    then: impl AsyncFn(&Siege),
) {
    let mut siege = Siege::start_with(name, tables).await;
    let outcome = siege.run(&[attack], ALONE).await;
    then(&siege).await;
    siege.assert_bounds(&outcome);
    siege.restart(End::Kill).await;
    then(&siege).await;
    siege.restart(End::Upgrade).await;
    then(&siege).await;
    siege.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restart_after_scattered_ids_serves_everyone() {
    survives_restarts_after("scattered ids", "", scattered_blocks, async |_| {}).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scattered_blocks_on_disk_are_readable_after_a_restart() {
    let mut siege = Siege::start_with("scattered ids, read", "").await;
    let generator = BlockGenerator::new(1, IdLayout::SPARK);
    let ids: Vec<BlockId> = (1..40_001).map(|at| BlockId(at << 33)).collect();
    let blocks: Vec<Block> =
        ids.iter().map(|id| Block::new(*id, TaskAttemptId(1), generator.content(*id, 1))).collect();
    let (shuffle, partition) = (key(APP, 0), PartitionId(7));
    siege.client.push(&shuffle, SendForm::Classic, &[(partition, blocks)]).await.expect("sent");
    siege.client.report(&shuffle, TaskAttemptId(1), &[(partition, ids.clone())]).await.expect("reported");
    let outcome = siege.run(&[scattered_blocks], ALONE).await;
    siege.assert_bounds(&outcome);
    // After an upgrade everything is on the disks.
    siege.restart(End::Upgrade).await;
    siege.restart(End::Kill).await;
    let client: &ShuffleClient = &siege.client;
    let reported = client.results(&shuffle, &[partition], None).await.expect("results");
    assert!(ids.iter().all(|id| reported.contains(id.0.cast_unsigned())));
    let read = client.read_partition(&shuffle, partition, &ReadOptions::default()).await.expect("read");
    assert!(ids.iter().all(|id| read.blocks.contains_key(id)), "all of {} blocks", ids.len());
    siege.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changing_registrations_do_not_fill_the_log() {
    survives_restarts_after("changing registrations", "", changing_registrations, log_is_small).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_reports_do_not_fill_the_log() {
    survives_restarts_after("repeated reports", "", repeated_reports, log_is_small).await;
}

async fn log_is_small(siege: &Siege) {
    let bytes = on_disks(siege, "uniffle-worker.metadata");
    assert!(bytes <= LOG_BYTES_MAX, "{}: the metadata log has {} MiB", siege.name, bytes >> 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disk_quota_counts_pages_of_tiny_blocks() {
    let tables = "[quota]\napp_disk = \"32MiB\"";
    survives_restarts_after("pages of tiny blocks", tables, blocks_that_fill_pages, async |siege| {
        let bytes = on_disks(siege, &format!("apps/{APP}"));
        let max = (32 << 20) + super::CAPACITY_BYTES;
        assert!(bytes <= max, "{} MiB on disk with a quota of 32 MiB", bytes >> 20);
        let metrics = block_in_place(|| siege.worker.metrics());
        let used = metrics.largest("quota_used").unwrap_or_default().0;
        // The page cache may hold more than the last count of the worker.
        #[expect(clippy::cast_precision_loss, reason = "a comparison of sums of MiB")]
        let counted = used >= 0.5 * bytes as f64;
        assert!(counted, "quotas count {used} of {bytes} bytes");
    })
    .await;
}
