//! A worker ends, and another one starts on its directories: flushed data has the same bytes at the
//! same offsets, and blocks that were only in memory are reported lost. A crash is a runtime that
//! is dropped, which loses everything unwritten. The last test damages a file of a running worker.

use std::path::PathBuf;
use std::time::Duration;

use croaring::Treemap;
use tempfile::TempDir;
use uniffle_client::block::{Block, IdLayout};
use uniffle_client::grpc::ReadOptions;
use uniffle_wire::types::{PartitionId, ShuffleKey, TaskAttemptId};
use uniffle_worker::proto::StatusCode;
use uniffle_worker::store::LocalStore;

use super::blocks::{batch, blocks};
use super::fixture::{Setup, WorkerFixture, assert_same, eventually, key};

const P: PartitionId = PartitionId(0);

/// Runs `life` like a separate process, which only files survive.
pub(crate) fn process<T>(life: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let result = runtime.block_on(life);
    runtime.shutdown_timeout(Duration::from_secs(20));
    result
}

/// Drops the worker without a stop and returns its directories.
pub(crate) fn crashed(fixture: WorkerFixture) -> (TempDir, Vec<PathBuf>) {
    let WorkerFixture { worker, client, dir, disks } = fixture;
    drop((worker, client));
    (dir, disks)
}

async fn report(fixture: &WorkerFixture, key: &ShuffleKey, task: i64, blocks: &[Block]) {
    let ids = blocks.iter().map(|block| block.meta.block_id).collect();
    fixture.client.report(key, TaskAttemptId(task), &[(P, ids)]).await.unwrap();
}

async fn reported(fixture: &WorkerFixture, key: &ShuffleKey) -> Vec<u64> {
    fixture.client.results(key, &[P], Some(IdLayout::SPARK)).await.unwrap().to_vec()
}

fn ids(blocks: &[Block]) -> Vec<u64> {
    let mut ids: Vec<u64> = blocks.iter().map(|block| block.meta.block_id.0.cast_unsigned()).collect();
    ids.sort_unstable();
    ids
}

#[test]
fn crash_keeps_flushed_blocks_at_the_same_offsets() {
    let (kept, other) = (key("app-1", 1), key("app-10", 10));
    let (first, second) = (blocks(0, 1, 0..40), blocks(0, 2, 0..40));
    let (home, before) = process(async {
        let fixture = WorkerFixture::start().await;
        for key in [&kept, &other] {
            fixture.client.register(key, &[(0, 3)]).await.unwrap();
        }
        for (task, part) in [(1, &first), (2, &second)] {
            fixture.push(&kept, &batch(0, part)).await;
            fixture.flush().await;
            report(&fixture, &kept, task, part).await;
        }
        fixture.push(&other, &batch(0, &first)).await;
        fixture.flush().await;
        fixture.client.unregister_app("app-10").await.unwrap();
        let index = fixture.client.read_index(&kept, P).await.unwrap();
        (crashed(fixture), index)
    });
    process(async {
        let fixture = WorkerFixture::on(Setup::default(), home.0, home.1).await;
        let all = [first, second].concat();
        let index = fixture.client.read_index(&kept, P).await.unwrap();
        assert_eq!(index.records, before.records);
        fixture.assert_reads(&kept, 0, &all).await;
        assert_eq!(reported(&fixture, &kept).await, ids(&all));
        // More blocks are accepted, also for a partition that was empty.
        let third = blocks(3, 3, 0..10);
        fixture.push(&kept, &batch(3, &third)).await;
        fixture.flush().await;
        fixture.assert_reads(&kept, 3, &third).await;
        fixture.finish().await;
    });
}

#[test]
fn all_shuffle_ids_are_accepted_and_recovered() {
    let shuffles = [i32::MIN, -1, 0, i32::MAX].map(|shuffle| key("app-1", shuffle));
    let all: Vec<Vec<Block>> = (1..).take(4).map(|task| blocks(0, task, 0..10)).collect();
    let home = process(async {
        let fixture = WorkerFixture::start().await;
        for (key, part) in shuffles.iter().zip(&all) {
            fixture.client.register(key, &[(0, 0)]).await.unwrap();
            fixture.push(key, &batch(0, part)).await;
            fixture.assert_reads(key, 0, part).await;
            report(&fixture, key, 1, part).await;
        }
        fixture.flush().await;
        crashed(fixture)
    });
    process(async {
        let fixture = WorkerFixture::on(Setup::default(), home.0, home.1).await;
        for (key, part) in shuffles.iter().zip(&all) {
            fixture.assert_reads(key, 0, part).await;
            assert_eq!(reported(&fixture, key).await, ids(part));
        }
        fixture.client.unregister(&shuffles[1]).await.unwrap();
        fixture.assert_reads(&shuffles[0], 0, &all[0]).await;
        fixture.finish().await;
    });
}

#[test]
fn record_numbers_are_recovered() {
    use super::results::{report_stats, reported_stats, stats};
    let key = key("app-1", 1);
    let home = process(async {
        let fixture = WorkerFixture::start().await;
        fixture.client.register(&key, &[(0, 3)]).await.unwrap();
        report_stats(&fixture, &key, 1, Vec::new()).await;
        report_stats(&fixture, &key, 2, vec![stats(0, &[(2, 40)]), stats(3, &[(2, 2)])]).await;
        report_stats(&fixture, &key, 3, vec![stats(0, &[(3, 1)])]).await;
        crashed(fixture)
    });
    process(async {
        let fixture = WorkerFixture::on(Setup::default(), home.0, home.1).await;
        let recovered_stats = reported_stats(&fixture, &key, &[0, 1, 2, 3]).await;
        assert_eq!(recovered_stats, [stats(0, &[(2, 40), (3, 1)]), stats(3, &[(2, 2)])]);
        fixture.finish().await;
    });
}

/// Returns every copy of the metadata log.
fn log_copies(disks: &[PathBuf]) -> Vec<PathBuf> {
    let copies =
        disks.iter().flat_map(|disk| std::fs::read_dir(disk.join("uniffle-worker.metadata")).unwrap());
    let copies = copies.map(|entry| entry.unwrap().path().join("log")).filter(|path| path.exists());
    copies.collect()
}

/// Flips a bit of the last byte.
fn damage(path: &std::path::Path) {
    let mut bytes = std::fs::read(path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn reports_survive_damage_of_one_log_copy() {
    let key = key("app-1", 1);
    let all = blocks(0, 1, 0..40);
    let (dir, disks) = process(async {
        let fixture = WorkerFixture::start().await;
        fixture.client.register(&key, &[(0, 3)]).await.unwrap();
        fixture.push(&key, &batch(0, &all)).await;
        fixture.flush().await;
        report(&fixture, &key, 1, &all).await;
        crashed(fixture)
    });
    damage(&log_copies(&disks)[1]);
    process(async {
        let fixture = WorkerFixture::on(Setup::default(), dir, disks).await;
        assert_eq!(reported(&fixture, &key).await, ids(&all));
        fixture.assert_reads(&key, 0, &all).await;
        fixture.finish().await;
    });
}

#[test]
fn incomplete_results_are_refused_until_app_ends() {
    let (damaged, unknown, fresh) = (key("app-1", 1), key("app-1", 7), key("app-2", 1));
    let all = blocks(0, 1, 0..40);
    let (dir, disks) = process(async {
        let fixture = WorkerFixture::start().await;
        fixture.client.register(&damaged, &[(0, 3)]).await.unwrap();
        fixture.push(&damaged, &batch(0, &all)).await;
        fixture.flush().await;
        for (task, part) in [(1, &all[..20]), (2, &all[20..])] {
            report(&fixture, &damaged, task, part).await;
        }
        crashed(fixture)
    });
    let copies = log_copies(&disks);
    assert_eq!(copies.len(), 2);
    for copy in &copies {
        // Damage in the middle: the records behind it prove that it is not an unacknowledged end.
        let mut bytes = std::fs::read(copy).unwrap();
        let at = bytes.windows(4).enumerate().filter(|(_, word)| word == b"UWML").nth(2).unwrap().0;
        bytes[at + 20] ^= 1;
        std::fs::write(copy, bytes).unwrap();
    }
    process(async {
        let fixture = WorkerFixture::on(Setup::default(), dir, disks).await;
        fixture.client.register(&fresh, &[(0, 3)]).await.unwrap();
        fixture.push(&fresh, &batch(0, &all)).await;
        fixture.flush().await;
        report(&fixture, &fresh, 1, &all).await;
        assert_eq!(reported(&fixture, &fresh).await, ids(&all));
        let refusal = async |key: &ShuffleKey| {
            fixture.client.results(key, &[P], Some(IdLayout::SPARK)).await.unwrap_err().to_string()
        };
        let refused = refusal(&damaged).await;
        assert!(refused.contains("results of shuffle app-1/1 are refused"), "{refused}");
        assert!(
            refused.contains("/log is corrupt at record 2") && refused.contains("unregister"),
            "{refused}"
        );
        let refused = refusal(&unknown).await;
        assert!(refused.contains("cannot determine whether shuffle app-1/7 was registered"), "{refused}");
        assert!((fixture.metric("unknown_shuffles_refused") - 1.0).abs() < f64::EPSILON);
        let diagnosis = fixture.worker.service().diagnostics.incompleteness();
        assert!(
            diagnosis.unknown_shuffles.is_some() && diagnosis.shuffles == 1 && diagnosis.reasons.len() == 1,
            "{diagnosis:?}"
        );
        let explained = fixture.worker.service().diagnostics.explain("app-1").unwrap();
        assert!(
            explained.findings[0].starts_with("results of shuffle 1 are refused"),
            "{:?}",
            explained.findings
        );
        // The data of the shuffle is served.
        let read = fixture.client.read_index(&damaged, P).await.unwrap();
        assert!(!read.records.is_empty());
        fixture
            .worker
            .service()
            .diagnostics
            .refresh_metrics(&fixture.worker.service().diagnostics.app_statistics());
        assert!((fixture.metric("incomplete_shuffles") - 1.0).abs() < f64::EPSILON);
        let incomplete = fixture.worker.service().diagnostics.losses().incomplete;
        assert_eq!((incomplete.len(), incomplete[0].app.as_str(), incomplete[0].shuffle), (1, "app-1", 1));
        fixture.client.unregister_app("app-1").await.unwrap();
        fixture.client.register(&damaged, &[(0, 3)]).await.unwrap();
        fixture.push(&damaged, &batch(0, &all)).await;
        report(&fixture, &damaged, 1, &all).await;
        assert_eq!(reported(&fixture, &damaged).await, ids(&all));
        fixture.finish().await;
    });
}

#[test]
fn graceful_stop_keeps_only_registered_shuffles() {
    let (kept, gone) = (key("app-1", 1), key("app-1", 2));
    let all = blocks(0, 1, 0..20);
    let (dir, disks) = process(async {
        let fixture = WorkerFixture::start().await;
        for key in [&kept, &gone] {
            fixture.client.register(key, &[(0, 0)]).await.unwrap();
            fixture.push(key, &batch(0, &all)).await;
        }
        fixture.flush().await;
        report(&fixture, &kept, 1, &all).await;
        fixture.client.unregister(&gone).await.unwrap();
        let WorkerFixture { worker, client, dir, disks } = fixture;
        drop(client);
        assert_eq!(worker.stop().await, 0);
        (dir, disks)
    });
    process(async {
        let fixture = WorkerFixture::on(Setup::default(), dir, disks).await;
        let options = ReadOptions::default();
        let read = fixture.client.read_partition(&kept, P, &options).await.unwrap();
        assert_same(&read.blocks, &all);
        assert_eq!(reported(&fixture, &kept).await, ids(&all));
        assert_eq!(fixture.worker.service().apps().apps()[0].shuffles().len(), 1);
        fixture.finish().await;
    });
}

#[test]
fn start_without_recovery_deletes_existing_data() {
    let key = key("app-1", 1);
    let home = process(async {
        let fixture = WorkerFixture::start().await;
        fixture.client.register(&key, &[(0, 0)]).await.unwrap();
        fixture.push(&key, &batch(0, &blocks(0, 1, 0..20))).await;
        fixture.flush().await;
        crashed(fixture)
    });
    process(async {
        let setup = Setup { local: "recovery = false", ..Setup::default() };
        let fixture = WorkerFixture::on(setup, home.0, home.1).await;
        assert_eq!(fixture.worker.service().apps().app_count(), 0);
        assert!(fixture.client.read_index(&key, P).await.is_err());
        fixture.finish().await;
    });
}

/// Crashes a worker: `flushed` is on disk, `lost` was in memory and reported, and `unreported` was
/// in memory.
fn after_a_loss(key: &ShuffleKey, parts: [&[Block]; 3]) -> (TempDir, Vec<PathBuf>) {
    let [flushed, lost, unreported] = parts;
    process(async {
        let fixture = WorkerFixture::start().await;
        fixture.client.register(key, &[(0, 0)]).await.unwrap();
        fixture.push(key, &batch(0, flushed)).await;
        fixture.flush().await;
        for (task, part) in [(1, flushed), (2, lost)] {
            fixture.push(key, &batch(0, part)).await;
            report(&fixture, key, task, part).await;
        }
        fixture.push(key, &batch(0, unreported)).await;
        crashed(fixture)
    })
}

#[test]
fn blocks_lost_from_memory_are_reported_lost_until_resent() {
    let key = key("app-1", 1);
    let (flushed, lost, unreported) = (blocks(0, 1, 0..10), blocks(0, 2, 0..5), blocks(0, 3, 0..3));
    let home = after_a_loss(&key, [&flushed, &lost, &unreported]);
    process(async {
        let fixture = WorkerFixture::on(Setup::default(), home.0, home.1).await;
        assert_eq!(reported(&fixture, &key).await, ids(&[flushed.clone(), lost.clone()].concat()));
        let refused = fixture.client.read_memory(&key, P, None, 1 << 20, None).await.unwrap_err();
        assert_eq!(refused.status(), Some(StatusCode::InternalError));
        let text = refused.to_string();
        assert!(text.contains("5 blocks of shuffle app-1/1 partition 0 are lost"), "{text}");
        assert!(text.contains("in memory when the worker ended"), "{text}");
        let tcp = fixture.tcp_client().await;
        let refused = tcp.read_memory(&key, P, -1, 1 << 20, None).await.unwrap_err();
        assert_eq!(refused.status(), Some(StatusCode::InternalError));
        assert!(refused.to_string().contains("5 blocks of shuffle"), "{refused}");
        drop(tcp);

        // A reader of other tasks' blocks is not affected.
        let wanted = Treemap::of(&[1]);
        let answer = fixture.client.read_memory(&key, P, None, 1 << 20, Some(&wanted)).await.unwrap();
        assert!(answer.blocks.is_empty());
        let diagnosis = fixture.worker.service().diagnostics.losses();
        assert_eq!(
            (diagnosis.losses.len(), diagnosis.losses[0].blocks, diagnosis.unlisted_blocks),
            (1, 5, 0)
        );
        assert_eq!((diagnosis.losses[0].app.as_str(), diagnosis.losses[0].partition), ("app-1", 0));
        // Spark repeats the task whose unreported blocks were lost with the worker.
        let late = unreported.iter().map(|block| block.meta.block_id).collect();
        let late = fixture.client.report(&key, TaskAttemptId(3), &[(P, late)]).await.unwrap_err();
        assert!(late.to_string().contains("the task must run again"), "{late}");

        fixture.push(&key, &batch(0, &lost)).await;
        fixture.push(&key, &batch(0, &unreported)).await;
        report(&fixture, &key, 3, &unreported).await;
        assert!(fixture.worker.service().diagnostics.losses().losses.is_empty());
        fixture.assert_reads(&key, 0, &[flushed, lost, unreported].concat()).await;
        assert_eq!((fixture.metric("total_lost_blocks"), fixture.metric("total_healed_blocks")), (5.0, 5.0));
        fixture.finish().await;
    });
}

#[test]
fn loss_error_names_the_missing_data_directory() {
    let key = key("app-1", 1);
    let all = blocks(0, 1, 0..40);
    let (dir, disks) = process(async {
        let fixture = WorkerFixture::start().await;
        fixture.client.register(&key, &[(0, 0)]).await.unwrap();
        for part in all.chunks(4) {
            fixture.push(&key, &batch(0, part)).await;
            fixture.flush().await;
        }
        report(&fixture, &key, 1, &all).await;
        crashed(fixture)
    });
    let used: Vec<PathBuf> =
        disks.iter().filter(|disk| disk.join("apps/app-1/1.1/0.data").exists()).cloned().collect();
    let gone = used.first().cloned().unwrap_or_else(|| disks[0].clone());
    let remaining = disks.iter().filter(|disk| **disk != gone).cloned().collect();
    process(async {
        let fixture = WorkerFixture::on(Setup::default(), dir, remaining).await;
        let results =
            fixture.client.results(&key, &[P], Some(IdLayout::SPARK)).await.unwrap_err().to_string();
        assert!(results.contains(&format!("data directory {} is missing", gone.display())), "{results}");
        let refused = fixture.client.read_memory(&key, P, None, 1 << 20, None).await.unwrap_err().to_string();
        let reason =
            format!("data directory {} is missing, or the blocks were in memory when", gone.display());
        assert!(refused.contains(&reason), "{refused}");
        // A report of blocks that were lost with the process or the directory.
        let late = blocks(0, 2, 0..3).iter().map(|block| block.meta.block_id).collect();
        let late = fixture.client.report(&key, TaskAttemptId(2), &[(P, late)]).await.unwrap_err().to_string();
        assert!(late.contains(&reason), "{late}");
        fixture.finish().await;
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn corrupt_reads_blame_the_disk_and_report_the_loss() {
    // Files of a blamed disk are removed once a probe has succeeded.
    let setup = Setup { local: "disk_healthy_check_interval_sec = 1", ..Setup::default() };
    let (fixture, key) = (WorkerFixture::with(setup).await, key("app-1", 1));
    fixture.client.register(&key, &[(0, 0)]).await.unwrap();
    let (damaged, whole) = (blocks(0, 1, 0..10), blocks(0, 2, 0..10));
    for (task, part) in [(1, &damaged), (2, &whole)] {
        fixture.push(&key, &batch(0, part)).await;
        fixture.flush().await;
        report(&fixture, &key, task, part).await;
    }
    let files = fixture.disks.iter().flat_map(|disk| data_files(disk));
    let file = files.into_iter().find(|file| {
        let bytes = std::fs::read(file).unwrap();
        bytes.windows(damaged[0].data.len()).any(|window| window == damaged[0].data)
    });
    let file = file.unwrap();
    let mut bytes = std::fs::read(&file).unwrap();
    let at = bytes.windows(damaged[0].data.len()).position(|window| window == damaged[0].data).unwrap();
    bytes[at + 7] ^= 1;
    std::fs::write(&file, bytes).unwrap();

    let options = ReadOptions::default();
    let error = fixture.client.read_partition(&key, P, &options).await.unwrap_err().to_string();
    assert!(error.contains(&file.display().to_string()), "{error}");
    assert_eq!(fixture.metric("total_read_crc_mismatch"), 1.0);
    assert_eq!(fixture.metric("lost_blocks"), 0.0, "gauges must be refreshed on request");
    let diagnosis = fixture.worker.service().diagnostics.losses();
    assert_eq!(
        (diagnosis.losses.len(), diagnosis.losses[0].blocks),
        (1, 1),
        "only one block of the extent may be lost: {diagnosis:?}"
    );
    assert!(diagnosis.losses[0].reason.contains("block is corrupt"), "{diagnosis:?}");
    let refused = fixture.client.read_memory(&key, P, None, 1 << 20, None).await.unwrap_err().to_string();
    assert!(refused.contains("1 block of shuffle app-1/1 partition 0 are lost"), "{refused}");
    // Resent blocks are found, and the damaged copy does not interfere.
    fixture.push(&key, &batch(0, &damaged)).await;
    fixture.assert_reads(&key, 0, &[damaged.clone(), whole.clone()].concat()).await;
    fixture.flush().await;
    fixture.assert_reads(&key, 0, &[damaged, whole].concat()).await;
    assert!(fixture.worker.service().diagnostics.losses().losses.is_empty());
    let store = fixture.worker.service().tiers().find::<LocalStore>().unwrap();
    eventually("the disk answers again", || match store.available_disks() {
        2 => Ok(()),
        healthy => Err(format!("{healthy} disks are healthy")),
    })
    .await;
    fixture.finish().await;
}

fn data_files(disk: &std::path::Path) -> Vec<PathBuf> {
    let directory = disk.join("apps/app-1/1.1");
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.filter(|path| path.extension().is_some_and(|it| it == "data")).collect()
}
