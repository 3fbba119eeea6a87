//! A job over a cluster of workers alone, each of which is killed while the job needs it and started again: what was in
//! its memory outlives it (`memory_store.backing`), so that one copy of each block is enough.

use crate::clusters::workers_alone;
use crate::restarts::{JOB, goes_on, wait_total};
use crate::{Application, spark};
use uniffle_testkit::spark::Kind;
use uniffle_testkit::worker::Worker;

/// A directory of a tmpfs, deleted at the end, and the lines of `[memory_store]` that name it.
fn tmpfs() -> (tempfile::TempDir, &'static str) {
    let directory = tempfile::Builder::new().prefix("uniffle-worker-test-").tempdir_in("/dev/shm");
    let directory = directory.expect("a directory of a tmpfs");
    let lines = format!("backing = {:?}\n", directory.path().display().to_string());
    (directory, Box::leak(lines.into_boxed_str()))
}

/// While a stage of which `counter` tells goes on.
fn killed_and_started_again(worker: &mut Worker, other: &Worker, counter: &str, after: f64) {
    wait_total(worker, counter, after);
    worker.kill();
    worker.start_again();
    let log = worker.log();
    assert!(log.contains("took over blocks that an earlier process left in memory"), "{log}");
    goes_on(other, counter);
}

/// Client and Spark as published; a task may be tried again, a stage may not.
fn any_worker_may_be_killed(jvm: Kind, words: &str) {
    let Some(mut spark) = spark() else { return };
    let [first, second, third] = [tmpfs(), tmpfs(), tmpfs()];
    let memory = [first.1, second.1, third.1];
    let words = format!("failures=allowed master=local-cluster[2,1,1024] {words}");
    let application = Application { jvm, scenarios: JOB, words: &words };
    let (workers, answers) = spark.run_while(workers_alone(memory), application, |workers| {
        let [first, second, third] = workers else { unreachable!("three workers") };
        // A coordinator, then one that is none.
        killed_and_started_again(first, third, "total_received_data", 5e6);
        killed_and_started_again(third, second, "total_received_data", 10e6);
        killed_and_started_again(second, third, "total_read_data", 3e6);
    });
    assert_eq!(answers[0]["failed_stages"], 0, "{answers:?}");
    for worker in workers.into_iter().rev() {
        assert_eq!(worker.metrics().total("lost_blocks").unwrap_or_default(), 0.0, "{worker:?}");
        worker.stop();
    }
}

#[test]
fn any_worker_of_a_cluster_may_be_killed_in_either_stage_where_memory_outlives_it() {
    any_worker_may_be_killed(Kind::Main, "");
}

#[test]
fn any_worker_of_a_cluster_may_be_killed_in_either_stage_where_memory_outlives_it_over_tcp() {
    any_worker_may_be_killed(Kind::NoUnsafe, "spark.rss.client.type=GRPC_NETTY");
}
