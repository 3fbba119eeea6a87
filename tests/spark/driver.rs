//! The published Java client library without Spark (`tests/driver/`), against a worker process.
//!
//! The Java program writes more than the worker's memory, reads everything back and compares every
//! byte. The test also requires that some blocks were spilled to disk and some read from memory,
//! and that the worker's resident memory stayed near its capacity.
//!
//! The full size, with the figures of docs/benchmarks.md:
//! `DRIVER=full cargo test --release --test spark -- driver --nocapture --test-threads 1`
//! By hand, against any server on this machine (`uniffle.driver.Main` documents the arguments):
//! ```text
//! mvn -q -f tests/driver package
//! java @tests/driver/jvm.options \
//!     -cp 'target/tmp/driver/classes:target/tmp/driver/jars/*' uniffle.driver.Main \
//!     grpc=21100 tcp=21200 pid=PID client=GRPC_NETTY
//! ```

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use parking_lot::Mutex;
use serde_json::Value;
use uniffle_testkit::tools::kept_dir;
use uniffle_testkit::worker::{Setup, WorkerProcess};
use uniffle_testkit::{maven, say};

const PROJECT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/driver");

/// Maven does not support concurrent builds of one project.
static BUILDING: Mutex<()> = Mutex::new(());

/// Size of a run.
struct Size {
    capacity: &'static str,
    capacity_bytes: u64,
    /// Further arguments of `uniffle.driver.Main`.
    arguments: &'static [&'static str],
    rounds: usize,
    /// Measures the baseline of the machine before and after.
    measures_baseline: bool,
}

/// About one second of work.
const SMALL: Size = Size {
    capacity: "24MB",
    capacity_bytes: 24_000_000,
    arguments: &["rounds=2", "bytes=60000000", "send=1048576", "wait=200"],
    rounds: 2,
    measures_baseline: false,
};
/// 3.14 GB of 14 KiB blocks in 14 MiB sends by 4 threads to 200 partitions, with 1 GB of memory.
const FULL: Size = Size {
    capacity: "1GB",
    capacity_bytes: 1_000_000_000,
    arguments: &["rounds=5"],
    rounds: 5,
    measures_baseline: true,
};

fn run(name: &'static str, client: &str) {
    if !maven::is_available() {
        return;
    }
    let size = if std::env::var("DRIVER").is_ok_and(|value| value == "full") { FULL } else { SMALL };
    let output = build();
    let worker = WorkerProcess::start(&Setup { name, capacity: size.capacity, disks: 2, ..Setup::default() });
    measure_baseline(&worker, &size);
    let ready = worker.ready();
    let driver = Command::new("java")
        .arg(format!("@{PROJECT}/jvm.options"))
        .args(["-cp", &format!("{0}/classes:{0}/jars/*", output.display()), "uniffle.driver.Main"])
        .args([format!("grpc={}", ready.grpc_port), format!("pid={}", ready.pid), format!("client={client}")])
        .args(ready.urpc_port.map(|port| format!("tcp={port}")))
        .args(size.arguments)
        .stdin(Stdio::null())
        .output()
        .expect("cannot run java");
    let (stdout, stderr) = (String::from_utf8_lossy(&driver.stdout), String::from_utf8_lossy(&driver.stderr));
    assert!(driver.status.success(), "the driver failed: {}\n{stdout}\n{stderr}", driver.status);
    measure_baseline(&worker, &size);

    let rounds: Vec<Value> = stdout
        .lines()
        .map(|line| {
            say(line);
            serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
        })
        .collect();
    assert_eq!(rounds.len(), size.rounds, "a round is missing: {stdout}\n{stderr}");
    for figure in ["write_cpu_s_per_gb", "read_cpu_s_per_gb", "peak_rss_mib"] {
        say(&format!("{client} {figure}: median {:.3}", median(&rounds, figure)));
    }
    let bytes: f64 = rounds.iter().filter_map(|round| round["bytes"].as_f64()).sum();
    let metrics = worker.metrics();
    let blocks: f64 = rounds.iter().filter_map(|round| round["blocks"].as_f64()).sum();
    assert!(metrics.expect("total_received_data") >= bytes, "less than {bytes} bytes were sent");
    let (local, memory) = (metrics.expect("total_write_block"), metrics.expect("total_read_memory_data"));
    assert!(
        local > 0.0 && local <= blocks && memory > 0.0,
        "{local} of {blocks} blocks were flushed, {memory} read from memory"
    );
    let (peak, bound) = (worker.peak_resident_bytes(), size.capacity_bytes / 100 * 105 + (200 << 20));
    assert!(peak <= bound, "{} MiB are resident, {} MiB are allowed", peak >> 20, bound >> 20);
    worker.assert_clean();
    worker.assert_no_error_logged();
}

/// Builds the driver. Returns its directory.
fn build() -> PathBuf {
    let output = kept_dir().join("driver");
    let _one_at_a_time = BUILDING.lock();
    maven::build(Path::new(PROJECT), &output, &[format!("-Ddriver.target={}", output.display())]);
    output
}

/// Measures the baseline of the machine with the same command that users have.
fn measure_baseline(worker: &WorkerProcess, size: &Size) {
    if !size.measures_baseline {
        return;
    }
    let output = Command::new(uniffle_testkit::tools::binary("uniffle-bench"))
        .args(["baseline", "--bytes", "2GB", "--dir"])
        .arg(worker.data_paths()[0].parent().expect("the path has a parent"))
        .output()
        .expect("the bench was built with this test");
    say(&String::from_utf8_lossy(&output.stdout));
}

fn median(rounds: &[Value], figure: &str) -> f64 {
    let mut values: Vec<f64> = rounds
        .iter()
        .map(|round| round[figure].as_f64().unwrap_or_else(|| panic!("{figure} is missing: {round}")))
        .collect();
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Run first by `.ci/run`, so that downloads and Maven do not count as test time.
#[test]
fn driver_builds() {
    if maven::is_available() {
        build();
    }
}

#[test]
fn java_client_reads_its_blocks_over_grpc() {
    run("driver-grpc", "GRPC");
}

#[test]
fn java_client_reads_its_blocks_over_tcp() {
    run("driver-tcp", "GRPC_NETTY");
}
