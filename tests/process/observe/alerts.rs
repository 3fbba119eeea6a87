//! Alerts fire under the faults that they are for.
//!
//! A real Prometheus scrapes workers with a fault. It evaluates the rules of `deploy/`, in which
//! minutes are shortened to seconds. `deploy/prometheus/uniffle-worker.tests.yml` tests all alerts
//! with their real times. Faults of remote stores and of the process itself are in files of their
//! own.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use tokio::task::{JoinSet, block_in_place};
use uniffle_client::grpc::ShuffleClient;
use uniffle_testkit::clients::{local, long_backoff};
use uniffle_testkit::coordinator::{CoordinatorDouble, HeartbeatReply};
use uniffle_testkit::ports::free_port;
use uniffle_testkit::tools::available;
use uniffle_testkit::wait_until;
use uniffle_testkit::worker::{Setup, WorkerProcess};
use uniffle_wire::types::PartitionId;

use super::prometheus::{RULES, prometheus, query};
use super::tools::{Running, ask_text};
use crate::kept_memory::{NEVER_FLUSHED, directory};
use crate::writes::{Written, client_of, key};

/// The slowest fault, a deletion of objects, is given up after two minutes.
pub(super) const WAIT_MAX: Duration = Duration::from_secs(240);
pub(super) const BLOCK_BYTES: u32 = 100_000;

/// A Prometheus that evaluates the rules with minutes shortened to seconds.
pub(super) struct Watch {
    _running: Running,
    _directory: tempfile::TempDir,
    pub(super) port: u16,
}

impl Watch {
    /// Starts a Prometheus for these workers, and waits until it has scraped all of them.
    pub(super) fn start(workers: &[&WorkerProcess]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let rules = directory.path().join("rules.yml");
        std::fs::write(&rules, shortened(&std::fs::read_to_string(RULES).unwrap())).unwrap();
        let targets: Vec<u16> = workers.iter().map(|worker| worker.ready().http_port).collect();
        let (running, port) = prometheus(directory.path(), &rules, &targets);
        wait_until("all are scraped", WAIT_MAX, || {
            let up = query(port, "up == 1 and memory_capacity")?;
            if up.as_array().is_some_and(|rows| rows.len() == targets.len()) {
                Ok(())
            } else {
                Err(up.to_string())
            }
        });
        Self { _running: running, _directory: directory, port }
    }

    /// Waits until each of `expected` fires for `worker`. No others may fire for it, except
    /// `consequences`.
    pub(super) fn wait_firing(&self, worker: &WorkerProcess, expected: &[&str], consequences: &[&str]) {
        let instance = format!("127.0.0.1:{}", worker.ready().http_port);
        let mut seen = BTreeSet::new();
        wait_until(&format!("{expected:?} fire"), WAIT_MAX, || {
            let firing = self.firing(&instance)?;
            seen.extend(firing.iter().cloned());
            let missing = expected.iter().any(|alert| !seen.contains(*alert));
            if missing { Err(format!("firing: {firing:?}")) } else { Ok(()) }
        });
        let others: Vec<_> = seen
            .iter()
            .filter(|alert| !expected.contains(&alert.as_str()) && !consequences.contains(&alert.as_str()))
            .collect();
        assert!(others.is_empty(), "other alerts fire too: {others:?}");
    }

    /// Returns the names of the alerts that fire for an instance or for its job.
    fn firing(&self, instance: &str) -> Result<BTreeSet<String>, String> {
        let (_, text) = ask_text(self.port, "GET", "/api/v1/alerts");
        let answer: Value = serde_json::from_str(&text).map_err(|error| format!("{error}: {text}"))?;
        let alerts = answer["data"]["alerts"].as_array().ok_or_else(|| text.clone())?;
        let firing = alerts.iter().filter(|alert| {
            let of_another = alert["labels"]["instance"].as_str().is_some_and(|it| it != instance);
            alert["state"] == "firing" && !of_another
        });
        let name = |alert: &Value| {
            let texts = alert["annotations"].to_string();
            assert!(!texts.contains("error expanding") && !texts.contains("<no value>"), "{texts}");
            assert!(texts.contains("\"https://docs/docs/runbook.md#"), "{texts}");
            alert["labels"]["alertname"].as_str().map(str::to_owned)
        };
        Ok(firing.filter_map(name).collect())
    }
}

/// Returns whether Prometheus is installed.
pub(super) fn is_possible() -> bool {
    available("alerts under faults", &["prometheus", "promtool"])
}

/// Returns the rules with minutes shortened to seconds. Hours and days stay.
fn shortened(rules: &str) -> String {
    let shortened_line = |line: &str| match line.split_once("for: ") {
        Some((indent, time)) if indent.trim().is_empty() => {
            format!("{indent}for: {}", time.replace('m', "s"))
        }
        _ => line.replace("m])", "s])").replace("m]) ", "s]) ").replace("m]", "s]"),
    };
    rules.lines().map(|line| shortened_line(line) + "\n").collect()
}

/// Sends blocks until the set is dropped.
pub(super) fn fill(worker: &WorkerProcess, app: &'static str) -> JoinSet<()> {
    let port = worker.ready().grpc_port;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let client = ShuffleClient::connect(local(port)).await.unwrap().with_backoff(long_backoff());
        let mut written = Written::register(&client, key(app, 0), 4).await;
        for task in 0.. {
            if written.task(&client, task, BLOCK_BYTES).await.is_err() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    });
    tasks
}

#[test]
fn minutes_of_rules_become_seconds() {
    let rules =
        "  for: 15m\n  expr: rate(m[5m]) > 0 and x[1d] or max_over_time(y[10m])\n  summary: for: 5m\n";
    let short =
        "  for: 15s\n  expr: rate(m[5s]) > 0 and x[1d] or max_over_time(y[10s])\n  summary: for: 5m\n";
    assert_eq!(shortened(rules), short);
}

/// The only disk is above its watermark, so blocks stay in memory until writers are refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn alerts_fire_on_full_disk() {
    if !is_possible() {
        return;
    }
    let setup = Setup {
        capacity: "64MiB",
        tables: "disk_high_watermark = 0.0002\ndisk_low_watermark = 0.0001\nhealthy_check_min_disks = 1\n\
                 disk_healthy_check_interval_sec = 1\n",
        ..Setup::default()
    };
    let worker = block_in_place(|| WorkerProcess::start(&setup));
    let watch = Watch::start(&[&worker]);
    let filling = fill(&worker, "app");
    let expected = [
        "UniffleDiskFull",
        "UniffleNoDiskWritable",
        "UniffleWorkerUnhealthy",
        "UniffleMemoryExhausted",
        "UniffleFlushFails",
    ];
    block_in_place(|| watch.wait_firing(&worker, &expected, &["UniffleFlushQueueGrows"]));
    drop(filling);
}

/// One disk cannot be written, and one is moved away. The third continues.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn alerts_fire_on_failed_and_detached_disks() {
    if !is_possible() {
        return;
    }
    let tables = "disk_healthy_check_interval_sec = 1\n";
    let setup = Setup { disks: 3, tables, ..Setup::default() };
    let worker = block_in_place(|| WorkerProcess::start(&setup));
    let watch = Watch::start(&[&worker]);
    // In place of the probe's directory.
    std::fs::write(worker.data_paths()[0].join("probe"), "").unwrap();
    std::fs::rename(&worker.data_paths()[1], worker.dir().join("elsewhere")).unwrap();
    block_in_place(|| watch.wait_firing(&worker, &["UniffleDiskFails", "UniffleDiskDetached"], &[]));
}

/// The worker is killed with blocks in memory, and a data directory is missing at its start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn alerts_fire_on_lost_blocks_and_missing_directory() {
    if !is_possible() {
        return;
    }
    let mut worker = block_in_place(|| {
        WorkerProcess::start(&Setup { disks: 2, tables: NEVER_FLUSHED, ..Setup::default() })
    });
    let client = client_of(&worker).await;
    let mut written = Written::register(&client, key("app", 5), 4).await;
    written.task(&client, 0, BLOCK_BYTES).await.unwrap();
    worker.kill();
    let missing = worker.data_paths()[1].clone();
    std::fs::rename(&missing, worker.dir().join("elsewhere")).unwrap();
    std::fs::write(&missing, "").unwrap();
    block_in_place(|| worker.start_again());
    let watch = Watch::start(&[&worker]);
    let client = client_of(&worker).await;
    let mut asking = JoinSet::<()>::new();
    asking.spawn(async move {
        loop {
            client.results(&key("app", 3), &[PartitionId(0)], None).await.unwrap_err();
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    });
    let expected = [
        "UniffleBlocksLost",
        "UniffleShufflesIncomplete",
        "UniffleUnknownShufflesRefused",
        "UniffleDiskLeftOut",
    ];
    block_in_place(|| watch.wait_firing(&worker, &expected, &[]));
    asking.abort_all();
}

/// Another program removes the files of a running worker.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn alerts_fire_on_removed_files() {
    if !is_possible() {
        return;
    }
    let tables = "disk_healthy_check_interval_sec = 1\n[hybrid_store]\nmemory_spill_high_watermark = 0.01\n\
                  memory_spill_low_watermark = 0.001\n";
    let worker =
        block_in_place(|| WorkerProcess::start(&Setup { capacity: "64MiB", tables, ..Setup::default() }));
    let watch = Watch::start(&[&worker]);
    let client = client_of(&worker).await;
    let mut written = Written::register(&client, key("app", 0), 4).await;
    for task in 0..20 {
        written.task(&client, task, BLOCK_BYTES).await.unwrap();
    }
    let flushed = || worker.metrics().expect("memory_spill_total_bytes");
    block_in_place(|| {
        wait_until("blocks are on the disk", WAIT_MAX, || {
            if flushed() > 0.0 { Ok(()) } else { Err("none".to_owned()) }
        });
    });
    let apps = worker.data_paths()[0].join("apps");
    remove_files(&apps);
    let mut reading = JoinSet::<()>::new();
    reading.spawn(async move {
        loop {
            let _ = written.readable(&client).await;
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    });
    let expected = ["UniffleFilesVanished", "UniffleBlocksLost"];
    block_in_place(|| watch.wait_firing(&worker, &expected, &["UniffleDiskFails"]));
    reading.abort_all();
}

/// Removes all files below a directory, and leaves the directories.
fn remove_files(directory: &Path) {
    for entry in std::fs::read_dir(directory).unwrap().flatten() {
        if entry.path().is_dir() {
            remove_files(&entry.path());
        } else {
            std::fs::remove_file(entry.path()).unwrap();
        }
    }
}

/// A worker is killed. The coordinator in the other one loses it.
#[test]
fn alerts_fire_on_dead_worker() {
    if !is_possible() {
        return;
    }
    let tables = "[embedded_coordinator]\nenable = true\nnode_timeout_sec = 3\n";
    let coordinator = WorkerProcess::start(&Setup { name: "coordinator", tables, ..Setup::default() });
    let quorum = Some(coordinator.quorum());
    let mut worker = WorkerProcess::start(&Setup { quorum, ..Setup::default() });
    let watch = Watch::start(&[&coordinator, &worker]);
    worker.kill();
    watch.wait_firing(&worker, &["UniffleWorkerDown", "UniffleWorkersLost"], &[]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn alerts_fire_on_absent_coordinators() {
    if !is_possible() {
        return;
    }
    let present = CoordinatorDouble::start(HeartbeatReply::Succeed).await;
    let absent = format!("127.0.0.1:{}", free_port());
    let both = format!("{},{absent}", present.address);
    let alone = block_in_place(|| WorkerProcess::start(&Setup { quorum: Some(absent), ..Setup::default() }));
    let half = block_in_place(|| WorkerProcess::start(&Setup { quorum: Some(both), ..Setup::default() }));
    let watch = Watch::start(&[&alone, &half]);
    block_in_place(|| {
        watch.wait_firing(&alone, &["UniffleNoCoordinator"], &[]);
        watch.wait_firing(&half, &["UniffleCoordinatorAway"], &[]);
    });
    present.stop().await;
}

/// Clients reach a quota, the heap's part for registrations, and the limit of connections.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn alerts_fire_on_limits_of_clients() {
    if !is_possible() {
        return;
    }
    let start = |tables, memory| {
        block_in_place(|| {
            WorkerProcess::start(&Setup { capacity: "64MiB", tables, memory, ..Setup::default() })
        })
    };
    let quota = start("[quota]\napp_partitions = 2\n", "");
    let heap = start("", "heap_capacity = \"32MiB\"\n");
    let connections = start("[grpc]\nmax_connections = 10\n", "");
    let watch = Watch::start(&[&quota, &heap, &connections]);
    let (client, address) = (client_of(&quota).await, connections.ready().grpc_port);
    let mut asking = JoinSet::<()>::new();
    asking.spawn(async move {
        let mut open = Vec::new();
        loop {
            client.register(&key("app", 0), &[(0, 9)]).await.unwrap_err();
            open.push(tokio::net::TcpStream::connect(("127.0.0.1", address)).await);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    let client = client_of(&heap).await;
    let mut app = 0;
    while client.register(&key(&format!("app{app}"), 0), &[(0, 0)]).await.is_ok() {
        app += 1;
    }
    block_in_place(|| {
        watch.wait_firing(&quota, &["UniffleQuotaRefuses"], &[]);
        watch.wait_firing(&heap, &["UniffleHeapFull"], &[]);
        watch.wait_firing(&connections, &["UniffleConnectionsRefused"], &[]);
    });
    asking.abort_all();
}

/// The configuration file gets an unknown key.
#[test]
fn alerts_fire_on_refused_reload_and_upgrade() {
    if !is_possible() {
        return;
    }
    let worker = WorkerProcess::start(&Setup::default());
    let watch = Watch::start(&[&worker]);
    worker.write_config(&(worker.config() + "[unknown]\nkey = 1\n"));
    watch.wait_firing(&worker, &["UniffleReloadRefused"], &[]);
    worker.begin_upgrade();
    watch.wait_firing(&worker, &["UniffleUpgradeRefused"], &["UniffleReloadRefused"]);
}

/// Another program removes the file of blocks in memory.
#[test]
fn alerts_fire_on_removed_memory_file() {
    if !is_possible() {
        return;
    }
    let (directory, memory) = directory();
    let worker = WorkerProcess::start(&Setup { capacity: "24MiB", memory, ..Setup::default() });
    let watch = Watch::start(&[&worker]);
    remove_files(directory.path());
    watch.wait_firing(&worker, &["UniffleMemoryUnprotected"], &[]);
}

/// Every alert is named by a test with its fault.
#[test]
fn every_alert_has_a_test_with_its_fault() {
    const TESTS: &str = concat!(
        include_str!("alerts.rs"),
        include_str!("alerts_process.rs"),
        include_str!("alerts_stores.rs")
    );
    let rules = std::fs::read_to_string(RULES).unwrap();
    let alerts = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: "));
    let missing: Vec<_> = alerts.filter(|alert| !TESTS.contains(&format!("\"{alert}\""))).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
