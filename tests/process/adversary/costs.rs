//! Attacks on state that outlives a request: disk space, the metadata log and its compaction, and
//! the heap at the next start. After each attack the worker is killed and upgraded. It must serve
//! the honest application within its memory bound.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::future::{self, BoxFuture, FutureExt as _};
use tokio::task::{JoinSet, block_in_place};
use tokio::time::{Instant, sleep};
use uniffle_client::block::{Block, IdLayout};
use uniffle_client::grpc::{ReadOptions, ShuffleClient, register_request};
use uniffle_client::send::SendForm;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_testkit::clients::{client_of, key};
use uniffle_testkit::say;
use uniffle_wire::types::{BlockId, PartitionId, TaskAttemptId};

use super::attacks::{APP, Target, client};
use super::honest::{self, Figures, Health};
use super::{MEMORY, Siege};

/// Working time of the honest application after each start.
const AFTERWARDS: Duration = Duration::from_secs(2);
/// Pause before a connection is retried.
const PAUSE: Duration = Duration::from_millis(50);
/// Period after which the cost of an attack is checked.
const ROUND: Duration = Duration::from_secs(1);
/// Rounds in which an attack must cost enough.
const ROUNDS_MAX: usize = 120;
/// Dead bytes in a copy of the metadata log above which it is rewritten.
const DEAD_BYTES: u64 = 8 << 20;
/// Upper bound on the live records of an attack.
const LIVE_BYTES: u64 = 3 << 20;
/// Both copies of the metadata log while it is rewritten.
const LOG_BYTES_MAX: u64 = 2 * (DEAD_BYTES + 2 * LIVE_BYTES);

/// Blocks of a send with scattered ids. The heap for unfinished sends has no room for more.
const SEND_BLOCKS: usize = 5_000;

/// An attack, which counts acknowledged work in its own unit.
type CostlyAttack = fn(Target, Arc<AtomicU64>) -> BoxFuture<'static, io::Error>;

/// Adds `units` to the cost of an attack if they were acknowledged.
fn count<T, E>(cost: &AtomicU64, units: u64, answer: &Result<T, E>) {
    if answer.is_ok() {
        cost.fetch_add(units, Ordering::Relaxed);
    }
}

/// Returns ascending ids whose distances have no pattern, so that a set of them cannot be packed.
fn scattered_id(at: i64) -> BlockId {
    let noise = at.cast_unsigned().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 31;
    BlockId(at << 33 | noise.cast_signed())
}

/// Sends one-byte blocks with widely spaced ids, and reports some of them. Counts blocks.
fn scattered_blocks(target: Target, cost: Arc<AtomicU64>) -> BoxFuture<'static, io::Error> {
    async move {
        let generator = BlockGenerator::new(target.seed, IdLayout::SPARK);
        let mut next = i64::try_from(target.seed % 1000).unwrap() << 20;
        loop {
            let Ok(client) = client(target).await else {
                sleep(PAUSE).await;
                continue;
            };
            for partition in 0..10 {
                let partition = PartitionId(partition);
                let ids: Vec<BlockId> = (next..next + 40_000).map(scattered_id).collect();
                next += 40_000;
                let block = |id: &BlockId| Block::new(*id, TaskAttemptId(1), generator.content(*id, 1));
                let blocks: Vec<Block> = ids.iter().map(block).collect();
                for send in blocks.chunks(SEND_BLOCKS) {
                    let send = [(partition, send.to_vec())];
                    let sent = client.push(&key(APP, 0), SendForm::Classic, &send).await;
                    count(&cost, SEND_BLOCKS as u64, &sent);
                }
                let some = [(partition, ids[..4000].to_vec())];
                let _ = client.report(&key(APP, 0), TaskAttemptId(next), &some).await;
            }
        }
    }
    .boxed()
}

/// Registers a few shuffles repeatedly, each time with other properties and ranges. Counts bytes of
/// properties.
fn changing_registrations(target: Target, cost: Arc<AtomicU64>) -> BoxFuture<'static, io::Error> {
    async move {
        let cost = &cost;
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
                    let bytes = value.len() as u64;
                    request.properties = [("spark.rss.changing".to_owned(), value)].into();
                    count(cost, bytes, &client.register_with(request).await);
                }
            }
        });
        future::join_all(flood).await;
        io::ErrorKind::QuotaExceeded.into()
    }
    .boxed()
}

/// Sends reports that repeat thousands of ids and add one. Counts bytes of ids.
fn repeated_reports(target: Target, cost: Arc<AtomicU64>) -> BoxFuture<'static, io::Error> {
    async move {
        let cost = &cost;
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
                    let bytes = 8 * ids.len() as u64;
                    let report = [(PartitionId(partition), ids)];
                    count(cost, bytes, &client.report(&key(APP, 0), TaskAttemptId(task), &report).await);
                }
            }
        });
        future::join_all(flood).await;
        io::ErrorKind::QuotaExceeded.into()
    }
    .boxed()
}

/// Sends one-byte blocks to one partition each; their pages and index take far more on disk. Counts
/// sends that the quota refuses.
fn blocks_that_fill_pages(target: Target, cost: Arc<AtomicU64>) -> BoxFuture<'static, io::Error> {
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
            if let Err(error) = client.push(&key(APP, 1), SendForm::Classic, &batch).await
                && error.to_string().contains("quota.app_disk")
            {
                cost.fetch_add(1, Ordering::Relaxed);
            }
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
            End::Kill => self.honest.start_new_shuffle(&self.client).await,
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

impl Siege {
    /// Runs `attack` beside the honest application until it has cost enough.
    async fn run_until(
        &mut self,
        attack: CostlyAttack,
        is_enough: impl Fn(&Self, u64) -> bool,
    ) -> (Figures, Health) {
        let (cost, mut attacking) = (Arc::new(AtomicU64::new(0)), JoinSet::new());
        attacking.spawn(attack(self.target(), Arc::clone(&cost)));
        let (mut figures, mut health) = (Figures::default(), Health::default());
        for _ in 0..ROUNDS_MAX {
            let until = Instant::now() + ROUND;
            let watch = honest::watch(self.worker.ready().http_port, until);
            let (sends, checks) = tokio::join!(self.honest.work(&self.client, until), watch);
            figures.add(sends);
            health.add(&checks);
            if is_enough(self, cost.load(Ordering::Relaxed)) {
                attacking.shutdown().await;
                return (figures, health);
            }
        }
        panic!("{}: the attack only cost {cost:?}", self.name);
    }

    /// Restarts the worker after a kill and by an upgrade. `holds` asserts a bound before and after
    /// each.
    async fn restart_twice(mut self, outcome: (Figures, Health), holds: impl AsyncFn(&Self)) {
        holds(&self).await;
        self.assert_bounds(&outcome);
        for end in [End::Kill, End::Upgrade] {
            self.restart(end).await;
            holds(&self).await;
        }
        self.end().await;
    }
}

/// The smallest heap. The ids of [`SCATTERED_BLOCKS`] blocks take 3 bytes each, more than the part
/// of it that one application gets for ids.
const SMALL_HEAP: &str =
    "heap_capacity = \"32MiB\"\nbuffer_ticket_timeout_sec = 10\nbuffer_ticket_check_interval_sec = 1";
const IDS_BYTES_MAX: f64 = 8.0 * 1024.0 * 1024.0;
const SCATTERED_BLOCKS: u64 = 3_500_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scattered_blocks_on_disk_are_readable_after_a_restart() {
    let mut siege = Siege::start_with("scattered ids", SMALL_HEAP, "").await;
    let generator = BlockGenerator::new(1, IdLayout::SPARK);
    let ids: Vec<BlockId> = (1..4_001).map(|at| BlockId(at << 33)).collect();
    let blocks: Vec<Block> =
        ids.iter().map(|id| Block::new(*id, TaskAttemptId(1), generator.content(*id, 1))).collect();
    let (shuffle, partition) = (key(APP, 0), PartitionId(7));
    siege.client.push(&shuffle, SendForm::Classic, &[(partition, blocks)]).await.unwrap();
    siege.client.report(&shuffle, TaskAttemptId(1), &[(partition, ids.clone())]).await.unwrap();
    let outcome = siege.run_until(scattered_blocks, |_, blocks| blocks >= SCATTERED_BLOCKS).await;
    siege.assert_bounds(&outcome);
    // After an upgrade everything is on the disks.
    for end in [End::Upgrade, End::Kill] {
        siege.restart(end).await;
        let metrics = block_in_place(|| siege.worker.metrics());
        #[expect(clippy::cast_precision_loss, reason = "a number of blocks")]
        let all = SCATTERED_BLOCKS as f64;
        assert!(metrics.expect("recovered_blocks") >= all);
        let held = metrics.total_of("heap_charged_bytes", "kind=\"reported_ids\"").unwrap_or_default();
        say(&format!("adversary, {}: {held} bytes of heap for ids", siege.name));
        assert!(held <= IDS_BYTES_MAX, "ids of one application take {held} bytes of heap");
    }
    let client: &ShuffleClient = &siege.client;
    let reported = client.results(&shuffle, &[partition], None).await.unwrap();
    assert!(ids.iter().all(|id| reported.contains(id.0.cast_unsigned())));
    let read = client.read_partition(&shuffle, partition, &ReadOptions::default()).await.unwrap();
    assert!(ids.iter().all(|id| read.blocks.contains_key(id)), "blocks of {} are missing", ids.len());
    siege.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compaction_bounds_log_of_changing_registrations() {
    let mut siege = Siege::start("changing registrations").await;
    let outcome = siege.run_until(changing_registrations, |_, bytes| bytes >= 2 * LOG_BYTES_MAX).await;
    siege.restart_twice(outcome, log_is_small).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_reports_do_not_fill_the_log() {
    let mut siege = Siege::start("repeated reports").await;
    let outcome = siege.run_until(repeated_reports, |_, bytes| bytes >= 4 * LOG_BYTES_MAX).await;
    siege.restart_twice(outcome, log_is_small).await;
}

async fn log_is_small(siege: &Siege) {
    let bytes = on_disks(siege, "uniffle-worker.metadata");
    say(&format!("adversary, {}: the metadata log has {} KiB", siege.name, bytes >> 10));
    assert!(bytes <= LOG_BYTES_MAX, "{}: the metadata log has {} MiB", siege.name, bytes >> 20);
}

/// Disk quota of the attack with tiny blocks.
const QUOTA: u64 = 16 << 20;
/// One flush of its shuffle: a page of each partition, and index records. It may begin before the
/// quota is reached, and a second one takes the blocks that are in memory then.
const FLUSH_BYTES: u64 = 5000 * (4 << 10) + (8 << 20);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disk_quota_counts_pages_of_tiny_blocks() {
    let table = format!("[quota]\napp_disk = {QUOTA}");
    let mut siege = Siege::start_with("pages of tiny blocks", MEMORY, &table).await;
    let on_disk = |siege: &Siege| on_disks(siege, &format!("apps/{APP}"));
    let is_over = |siege: &Siege, refused| refused > 0 || on_disk(siege) > QUOTA + 3 * FLUSH_BYTES;
    let outcome = siege.run_until(blocks_that_fill_pages, is_over).await;
    let holds = async |siege: &Siege| {
        let bytes = on_disk(siege);
        say(&format!("adversary, {}: {} KiB on disk", siege.name, bytes >> 10));
        let max = QUOTA + 2 * FLUSH_BYTES;
        assert!(bytes <= max, "{} MiB are on disk, the quota is {} MiB", bytes >> 20, QUOTA >> 20);
        let metrics = block_in_place(|| siege.worker.metrics());
        let used = metrics.largest("quota_used").unwrap_or_default().0;
        // The page cache may hold more than the last count of the worker.
        #[expect(clippy::cast_precision_loss, reason = "a comparison of sums of MiB")]
        let counted = used >= 0.5 * bytes as f64;
        assert!(counted, "quotas count {used} bytes, {bytes} are on disk");
    };
    siege.restart_twice(outcome, holds).await;
}
