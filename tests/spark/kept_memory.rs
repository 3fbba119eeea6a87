//! Jobs over a cluster whose workers are killed and restarted during the job. Blocks in their
//! memory survive (`memory_store.backing`), so one copy of each block suffices.

use crate::clusters::embedded_cluster;
use crate::restarts::{JOB, assert_running, wait_total};
use crate::{Application, spark};
use uniffle_testkit::spark::JvmKind;
use uniffle_testkit::worker::WorkerProcess;

/// Returns a temporary tmpfs directory and the lines of `[memory_store]` that name it.
fn tmpfs() -> (tempfile::TempDir, &'static str) {
    let directory = tempfile::Builder::new().prefix("uniffle-worker-test-").tempdir_in("/dev/shm");
    let directory = directory.expect("cannot create a directory on a tmpfs");
    let lines = format!("backing = {:?}\n", directory.path().display().to_string());
    (directory, Box::leak(lines.into_boxed_str()))
}

/// Kills and restarts `worker` while the stage measured by `counter` runs.
fn kill_and_restart(worker: &mut WorkerProcess, other: &WorkerProcess, counter: &str, after: f64) {
    wait_total(worker, counter, after);
    worker.kill();
    worker.start_again();
    let log = worker.log();
    assert!(log.contains("recovered blocks from memory"), "{log}");
    assert_running(other, counter);
}

/// Client and Spark as published. Tasks may be retried, stages may not.
fn survives_kill_of_any_worker(jvm: JvmKind, words: &str) {
    let Some(mut spark) = spark() else { return };
    let [first, second, third] = [tmpfs(), tmpfs(), tmpfs()];
    let memory = [first.1, second.1, third.1];
    let words = format!("failures=allowed master=local-cluster[2,1,1024] {words}");
    let application = Application { jvm, scenarios: JOB, words: &words };
    let (workers, answers) = spark.run_while(embedded_cluster(memory), application, |workers| {
        let [first, second, third] = workers else { unreachable!("the cluster has three workers") };
        // First a coordinator, then the plain worker, then the other coordinator.
        kill_and_restart(first, third, "total_received_data", 5e6);
        kill_and_restart(third, second, "total_received_data", 10e6);
        kill_and_restart(second, third, "total_read_data", 3e6);
    });
    assert_eq!(answers[0]["failed_stages"], 0, "{answers:?}");
    for worker in workers.into_iter().rev() {
        assert_eq!(worker.metrics().total("lost_blocks").unwrap_or_default(), 0.0, "{worker:?}");
        worker.stop();
    }
}

#[test]
fn killed_workers_lose_nothing_with_persistent_memory() {
    survives_kill_of_any_worker(JvmKind::Main, "");
}

#[test]
fn killed_workers_lose_nothing_over_tcp() {
    survives_kill_of_any_worker(JvmKind::NoUnsafe, "spark.rss.client.type=GRPC_NETTY");
}
