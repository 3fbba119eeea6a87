//! Workers that spill to a real HDFS, which the client reads directly. Also clients that commit to
//! files and never read from memory.

use crate::{Application, spark};
use std::time::Duration;
use uniffle_testkit::hdfs::{FileStatus, MiniHdfs};
use uniffle_testkit::wait_until;
use uniffle_testkit::worker::{Setup, WorkerProcess};

/// The client uses Spark's default Hadoop settings; the worker needs only the path.
const WORDS: &str = "spark.rss.client.remote.storage.useLocalConfAsDefault=true";

/// Observes the files in HDFS while an application runs.
struct Watch<'a> {
    hdfs: &'a MiniHdfs,
    stop: std::sync::mpsc::Sender<()>,
    seen: std::thread::ScopedJoinHandle<'a, Vec<FileStatus>>,
}

impl<'a> Watch<'a> {
    fn start(hdfs: &'a MiniHdfs, scope: &'a std::thread::Scope<'a, '_>) -> Self {
        let (stop, stopped) = std::sync::mpsc::channel();
        let seen = scope.spawn(move || {
            let mut seen = Vec::new();
            while stopped
                .recv_timeout(Duration::from_millis(200))
                .is_err_and(|error| error == std::sync::mpsc::RecvTimeoutError::Timeout)
            {
                let now = hdfs.list("/uniffle");
                if total(&now, ".data") > total(&seen, ".data") {
                    seen = now;
                }
            }
            seen
        });
        Self { hdfs, stop, seen }
    }

    /// Waits until the application's files are deleted. Returns the largest listing observed.
    fn finish(self) -> Vec<FileStatus> {
        drop(self.stop);
        let seen = self.seen.join().expect("the watching thread panicked");
        wait_until("the application's files are gone", Duration::from_secs(20), || {
            match self.hdfs.list("/uniffle") {
                remaining if remaining.is_empty() => Ok(()),
                remaining => Err(format!("{remaining:?}")),
            }
        });
        seen
    }
}

fn total(files: &[FileStatus], ending: &str) -> u64 {
    files.iter().filter(|file| file.path.ends_with(ending)).map(|file| file.bytes).sum()
}

#[test]
fn client_reads_blocks_spilled_to_hdfs() {
    let Some(mut spark) = spark() else { return };
    let hdfs = MiniHdfs::start(&[]);
    // The embedded coordinator sends the path and the store type to the client.
    let worker = WorkerProcess::start(&Setup {
        name: "memory_hdfs",
        capacity: "104M",
        disks: 0,
        store_type: "MEMORY_HDFS",
        made_tables: format!("[embedded_coordinator]\nremote_storage_path = [\"{}\"]", hdfs.url("/uniffle")),
        ..Setup::default()
    });
    let seen = std::thread::scope(|scope| {
        let watch = Watch::start(&hdfs, scope);
        spark.run(&[&worker], Application { words: WORDS, ..Application::of("spill") });
        watch.finish()
    });
    let metrics = worker.metrics();
    let received = metrics.expect("total_received_data");
    let spilled = metrics.expect("total_memory_spill_to_hdfs");
    assert!(spilled >= received - 104e6, "only {spilled} of {received} bytes were written to HDFS");
    assert!(total(&seen, ".data") > 100_000_000, "HDFS has only {seen:?}");
    assert_eq!(total(&seen, ".index") % 40, 0, "{seen:?}");
    assert_eq!(metrics.expect("total_memory_to_hdfs_spill_failed"), 0.0);
    worker.assert_no_error_logged();
    worker.stop();
}

#[test]
fn cold_partitions_go_to_hdfs_and_others_to_disks() {
    let Some(mut spark) = spark() else { return };
    let hdfs = MiniHdfs::start(&[]);
    let worker = WorkerProcess::start(&Setup {
        name: "memory_localfile_hdfs",
        capacity: "104M",
        store_type: "MEMORY_LOCALFILE_HDFS",
        made_tables: format!(
            "[embedded_coordinator]\nremote_storage_path = [\"{}\"]\n\
             [hybrid_store]\nmemory_spill_to_cold_threshold_size = \"1400KiB\"",
            hdfs.url("/uniffle")
        ),
        ..Setup::default()
    });
    // The share of a partition in a batch varies with the load of the machine, and in some runs all
    // partitions are cold. Hence several runs.
    let (mut seen, mut spilled) = (Vec::new(), [0.0; 2]);
    for _ in 0..5 {
        seen = std::thread::scope(|scope| {
            let watch = Watch::start(&hdfs, scope);
            spark.run(&[&worker], Application { words: WORDS, ..Application::of("spill") });
            watch.finish()
        });
        let metrics = worker.metrics();
        spilled = ["memory_spill_total_bytes", "total_memory_spill_to_hdfs"].map(|name| metrics.expect(name));
        if spilled[0] - spilled[1] > 10e6 {
            break;
        }
    }
    let [all, remote] = spilled;
    assert!(remote > 10e6 && all - remote > 10e6, "{remote} of {all} flushed bytes were written to HDFS");
    assert!(total(&seen, ".data") > 0 && total(&seen, ".index") > 0, "HDFS has only {seen:?}");
    worker.assert_no_error_logged();
    worker.stop();
}

/// Runs jobs of a client whose storage type has no memory: a task's blocks must be in files when it
/// commits, and the client reads only files.
fn commit_to_files(name: &'static str, store_type: &'static str, type_of_client: &str) {
    let Some(mut spark) = spark() else { return };
    let hdfs = MiniHdfs::start(&[]);
    let path = hdfs.url("/uniffle");
    let worker = WorkerProcess::start(&Setup {
        name,
        capacity: "300M",
        disks: usize::from(store_type.contains("LOCALFILE")),
        store_type,
        made_tables: format!("[embedded_coordinator]\nremote_storage_path = [\"{path}\"]"),
        ..Setup::default()
    });
    let words = format!(
        "{WORDS} {type_of_client} spark.rss.dynamicClientConf.enabled=false spark.rss.remote.storage.path={path}"
    );
    spark.run(&[&worker], Application { words: &words, ..Application::of("sort_small,join,cogroup") });
    let metrics = worker.metrics();
    assert!(metrics.expect("grpc_commit_shuffle_task_total") > 0.0, "no task committed");
    assert_eq!(metrics.expect("grpc_get_memory_shuffle_data_total"), 0.0, "blocks were read from memory");
    assert!(metrics.expect("memory_spill_total_bytes") > 0.0);
    worker.assert_no_error_logged();
    worker.stop();
}

/// Clients accept this type in test mode only.
#[test]
fn hdfs_only_client_commits_to_and_reads_hdfs() {
    let type_of_client = "spark.rss.storage.type=HDFS spark.rss.test.mode.enable=true";
    commit_to_files("hdfs-alone", "MEMORY_HDFS", type_of_client);
}

#[test]
fn localfile_hdfs_client_commits_to_and_reads_files() {
    commit_to_files("disks-hdfs", "MEMORY_LOCALFILE_HDFS", "spark.rss.storage.type=LOCALFILE_HDFS");
}
