//! Jobs over workers that are upgraded, killed, or out of disk space during the job.
//!
//! The job is `restarts`: 165 MB in 48 map tasks and 24 reduce tasks. The worker's counters, which
//! restart with each process, show the progress of the job.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::{Application, spark};
use uniffle_testkit::metrics::Metrics;
use uniffle_testkit::spark::JvmKind;
use uniffle_testkit::tools::{binary, may_mount, weaker};
use uniffle_testkit::worker::{Setup, WorkerProcess};
use uniffle_testkit::{say, wait_until};

/// Upper bound for the job on a shared machine.
const PROGRESS_DEADLINE: Duration = Duration::from_secs(120);
/// Upper bound; a worker registers with the coordinator as soon as it is ready.
const JOIN_DEADLINE: Duration = Duration::from_secs(20);
pub(super) const JOB: &str = "restarts";
/// A little less than the job writes.
pub(super) const JOB_BYTES: f64 = 155e6;

/// Waits until the counter reaches `least`. Returns its value.
pub(super) fn wait_total(worker: &WorkerProcess, counter: &str, least: f64) -> f64 {
    wait_until(&format!("{counter} reaches {least}"), PROGRESS_DEADLINE, || {
        let total = Metrics::fetch(worker.ready().http_port)?.expect(counter);
        if total >= least { Ok(total) } else { Err(format!("{total}")) }
    })
}

/// Asserts that the stage measured by `counter` was still running.
pub(super) fn assert_running(worker: &WorkerProcess, counter: &str) {
    let now = worker.metrics().expect(counter);
    wait_total(worker, counter, now + 1.0);
}

/// A copy of the binary named by `UPGRADE_FROM`, which the first upgrade replaces as a package
/// manager does. Without the variable the worker upgrades to itself.
struct Installed(Option<(tempfile::TempDir, PathBuf)>);

impl Installed {
    fn by_variable() -> Self {
        Self(std::env::var_os("UPGRADE_FROM").map(|old| {
            let dir = tempfile::Builder::new().prefix("uniffle-worker-test-").tempdir().unwrap();
            let path = dir.path().join("uniffle-worker");
            std::fs::copy(old, &path).expect("UPGRADE_FROM is a file");
            (dir, path)
        }))
    }

    fn path(&self) -> Option<PathBuf> {
        self.0.as_ref().map(|(_, path)| path.clone())
    }

    fn replace(&self) {
        if let Some((dir, path)) = &self.0 {
            let temporary = dir.path().join("new");
            std::fs::copy(binary("uniffle-worker"), &temporary).expect("cannot copy the worker's binary");
            std::fs::rename(temporary, path).expect("both paths are on one file system");
        }
    }
}

fn upgrade(worker: &mut WorkerProcess, installed: &Installed) {
    installed.replace();
    worker.begin_upgrade();
    worker.finish_upgrade();
    say(&format!(
        "upgraded; no process accepted for {} ms",
        worker.ready().upgrade_gap_ms.unwrap_or_default()
    ));
}

/// Upgrades in both stages of a job.
fn upgrade_in_both_stages(name: &'static str, jvm: JvmKind, words: &str) {
    let Some(mut spark) = spark() else { return };
    let installed = Installed::by_variable();
    let setup = Setup { name, capacity: "300M", disks: 2, binary: installed.path(), ..Setup::default() };
    let worker = WorkerProcess::start(&setup);
    let application = Application { jvm, scenarios: JOB, words };
    let (workers, answers) = spark.run_while(vec![worker], application, |workers| {
        let received = wait_total(&workers[0], "total_received_data", 40e6);
        assert!(received < JOB_BYTES, "the map stage ended too early: {received} bytes");
        upgrade(&mut workers[0], &installed);
        let read = wait_total(&workers[0], "total_read_data", 15e6);
        assert!(read < JOB_BYTES, "the reduce stage ended too early: {read} bytes");
        upgrade(&mut workers[0], &installed);
    });
    assert_eq!(answers[0]["failed_tasks"], 0, "{answers:?}");
    for worker in workers {
        worker.assert_no_error_logged();
        worker.stop();
    }
}

#[test]
fn upgrades_fail_no_task_of_a_cluster() {
    upgrade_in_both_stages("cluster-grpc", JvmKind::Main, "master=local-cluster[2,1,1024]");
}

#[test]
fn upgrades_fail_no_task_of_a_cluster_over_tcp() {
    upgrade_in_both_stages(
        "cluster-tcp",
        JvmKind::NoUnsafe,
        "master=local-cluster[2,1,1024] spark.rss.client.type=GRPC_NETTY",
    );
}

#[test]
fn upgrades_fail_no_task_of_a_local_master() {
    upgrade_in_both_stages("local-grpc", JvmKind::Main, "master=local[2,4]");
}

#[test]
fn upgrades_fail_no_task_of_a_local_master_over_tcp() {
    upgrade_in_both_stages(
        "local-tcp",
        JvmKind::NoUnsafe,
        "master=local[2,4] spark.rss.client.type=GRPC_NETTY",
    );
}

/// Set by users who want to run the tests without mounts.
const NO_MOUNTS: &str = "NO_MOUNTS";

/// A mounted file system, unmounted on drop.
pub(super) struct SmallDisk(std::path::PathBuf);

impl SmallDisk {
    /// Mounts a file system. Returns `None` where mounts are not permitted.
    pub(super) fn mount(at: &Path, size: &str) -> Option<Self> {
        std::fs::create_dir(at).unwrap();
        if std::env::var_os(NO_MOUNTS).is_some() {
            return None;
        }
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"])
            .arg(at)
            .stderr(Stdio::null())
            .status();
        mounted.is_ok_and(|status| status.success()).then(|| Self(at.to_owned()))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazy unmount, because the worker may still be exiting.
        drop(Command::new("umount").arg("-l").arg(&self.0).status());
    }
}

#[test]
fn full_disk_fails_no_task() {
    let Some(mut spark) = spark() else { return };
    let dir = tempfile::Builder::new().prefix("uniffle-worker-test-").tempdir().unwrap();
    let mounts = [dir.path().join("disk0"), dir.path().join("disk1")];
    let mut mounted: Vec<_> =
        mounts.iter().zip(["300m", "600m"]).filter_map(|(path, size)| SmallDisk::mount(path, size)).collect();
    let paths = mounts.map(|mount| mount.join("data")).to_vec();
    for path in &paths {
        std::fs::create_dir(path).unwrap();
    }
    let mut setup = Setup { name: "full-disk", capacity: "64M", disks: 2, ..Setup::default() };
    if mounted.len() < 2 {
        let is_allowed = may_mount() && std::env::var_os(NO_MOUNTS).is_none();
        weaker("a full disk", "nothing is mounted and files are limited in size instead", is_allowed);
        mounted.clear();
        let line = "trap '' XFSZ; ulimit -f 20000; exec \"$@\"";
        setup.wrapper = ["bash", "-c", line, "bash"].map(str::to_owned).to_vec();
    }
    let filler = mounted.first().map(|disk| disk.0.join("filler"));
    let worker = WorkerProcess::start_in(&setup, dir, paths);
    let words = "spark.rss.client.retry.interval.max=500";
    let (workers, answers) =
        spark.run_while(vec![worker], Application { words, ..Application::of(JOB) }, |workers| {
            wait_total(&workers[0], "total_received_data", 20e6);
            if let Some(filler) = &filler {
                fill(filler);
            }
        });
    assert_eq!(answers[0]["failed_tasks"], 0, "{answers:?}");
    for worker in workers {
        let log = worker.log();
        let noticed = ["disk is full", "disk crossed a watermark", "write failed; trying the next disk"];
        assert!(noticed.iter().any(|text| log.contains(text)), "no disk became full");
        worker.stop();
    }
    drop(mounted);
}

/// Takes all remaining space.
fn fill(path: &Path) {
    let mut file = std::fs::File::create(path).unwrap();
    let piece = vec![1; 1 << 20];
    while file.write_all(&piece).is_ok() {}
}

fn three_workers(capacity: &'static str) -> Vec<WorkerProcess> {
    let first = WorkerProcess::start(&Setup { name: "first", capacity, ..Setup::default() });
    let quorum = Some(first.quorum());
    let more = ["second", "third"].map(|name| {
        WorkerProcess::start(&Setup { name, capacity, quorum: quorum.clone(), ..Setup::default() })
    });
    wait_until("three workers are nodes", JOIN_DEADLINE, || {
        let nodes = first.metrics().total("active_server_num");
        if nodes == Some(3.0) { Ok(()) } else { Err(format!("{nodes:?} nodes")) }
    });
    std::iter::once(first).chain(more).collect()
}

pub(super) const REPLICAS: &str = "failures=allowed spark.rss.data.replica=2 spark.rss.data.replica.write=2 \
                        spark.rss.data.replica.read=1 master=local[2,4]";

#[test]
fn two_replicas_survive_kill_in_map_stage() {
    let Some(mut spark) = spark() else { return };
    let application = Application { words: REPLICAS, ..Application::of(JOB) };
    let (workers, _) = spark.run_while(three_workers("300M"), application, |workers| {
        wait_total(&workers[1], "total_received_data", 15e6);
        workers[1].kill();
        assert_running(&workers[0], "total_received_data");
        workers[1].start_again();
    });
    for worker in workers.into_iter().rev() {
        worker.stop();
    }
}

#[test]
fn two_replicas_survive_kill_in_reduce_stage() {
    let Some(mut spark) = spark() else { return };
    let application = Application { words: REPLICAS, ..Application::of(JOB) };
    let (workers, _) = spark.run_while(three_workers("300M"), application, |workers| {
        wait_total(&workers[1], "total_read_data", 5e6);
        workers[1].kill();
        assert_running(&workers[0], "total_read_data");
    });
    drop(workers);
}
