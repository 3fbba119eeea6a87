//! Several executors, applications, workers and replicas.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::restarts::{JOB, REPLICAS, assert_running, wait_total};
use crate::{Application, spark};
use uniffle_testkit::ports::free_port;
use uniffle_testkit::spark::JvmKind;
use uniffle_testkit::tools::binary;
use uniffle_testkit::wait_until;
use uniffle_testkit::worker::{Setup, WorkerProcess};

/// Upper bound; a worker registers with the coordinator as soon as it is ready.
const JOIN_DEADLINE: Duration = Duration::from_secs(20);

#[test]
fn executors_in_separate_jvms_read_each_others_blocks() {
    let Some(mut spark) = spark() else { return };
    let worker = WorkerProcess::start(&Setup { name: "executors", capacity: "400M", ..Setup::default() });
    let words = "master=local-cluster[2,1,1024]";
    spark.run(&[&worker], Application { words, ..Application::of("skew_join_aqe,cogroup") });
    worker.assert_no_error_logged();
    worker.stop();
}

#[test]
fn concurrent_apps_with_equal_shuffle_ids_are_isolated() {
    let Some(mut spark) = spark() else { return };
    // Both run the same scenarios, so their shuffle ids are equal. Their data exceeds the memory.
    let worker = WorkerProcess::start(&Setup { name: "two-apps", capacity: "64M", ..Setup::default() });
    let scenarios = "query_aqe_on,skew_join_aqe";
    let apps =
        [Application { jvm: JvmKind::NoUnsafe, ..Application::of(scenarios) }, Application::of(scenarios)];
    spark.run_all_at_once(&[&worker], &apps);
    let spilled = worker.metrics().expect("memory_spill_total_bytes");
    assert!(spilled > 0.0, "nothing was flushed");
    worker.assert_no_error_logged();
    worker.stop();
}

#[test]
fn blocks_are_written_once_or_to_each_replica() {
    let Some(mut spark) = spark() else { return };
    let first = WorkerProcess::start(&Setup { name: "first", capacity: "400M", ..Setup::default() });
    let quorum = Some(first.quorum());
    let second =
        WorkerProcess::start(&Setup { name: "second", capacity: "400M", quorum, ..Setup::default() });
    wait_until("the second worker is a node", JOIN_DEADLINE, || {
        let nodes = first.metrics().total("active_server_num");
        if nodes == Some(2.0) { Ok(()) } else { Err(format!("{nodes:?} nodes")) }
    });
    let workers = [&first, &second];

    let answers = spark.run(&workers, Application::of("range_sort,skew_join_aqe"));
    let received = |worker: &WorkerProcess| worker.metrics().expect("total_received_data");
    let shared = workers.map(received);
    let written = sum(&answers, "shuffle_written");
    assert!(
        shared[0] + shared[1] < 1.1 * written,
        "{shared:?} of {written} bytes: blocks were written more than once"
    );

    let words = "spark.rss.data.replica=2 spark.rss.data.replica.write=2 spark.rss.data.replica.read=1";
    let answers = spark.run(&workers, Application { words, ..Application::of("range_sort,cogroup") });
    let written = sum(&answers, "shuffle_written");
    for (worker, before) in workers.iter().zip(shared) {
        let received = received(worker) - before;
        assert!(received > 0.95 * written, "only {received} of {written} bytes were sent to {worker:?}");
    }
    for worker in [second, first] {
        worker.assert_no_error_logged();
        worker.stop();
    }
}

/// Starts three workers, two of them coordinators that all workers report to and that clients know.
/// `memory` has each worker's lines of `[memory_store]`.
pub(super) fn embedded_cluster(memory: [&'static str; 3]) -> Vec<WorkerProcess> {
    let ports = [free_port(), free_port()];
    let quorum = Some(ports.map(|port| format!("127.0.0.1:{port}")).join(","));
    let with = |name, grpc_port: Option<u16>, memory| {
        let enable = "[admin]\nport = 0\n[embedded_coordinator]\nenable = true\nnode_timeout_sec = 3";
        let made_tables = grpc_port.map(|_| enable.to_owned()).unwrap_or_default();
        let (quorum, capacity) = (quorum.clone(), "300M");
        WorkerProcess::start(&Setup {
            name,
            capacity,
            memory,
            quorum,
            grpc_port,
            made_tables,
            ..Setup::default()
        })
    };
    let workers = vec![
        with("first", Some(ports[0]), memory[0]),
        with("second", Some(ports[1]), memory[1]),
        with("third", None, memory[2]),
    ];
    until_active(&workers, 3.0);
    workers
}

/// Waits until both coordinators know three workers, of which `active` accept shuffles.
fn until_active(workers: &[WorkerProcess], active: f64) {
    wait_until("the workers are nodes of both", JOIN_DEADLINE, || {
        let nodes = [&workers[0], &workers[1]].map(|worker| {
            let metrics = worker.metrics();
            (metrics.total("total_server_num"), metrics.total("active_server_num"))
        });
        if nodes == [(Some(3.0), Some(active)); 2] { Ok(()) } else { Err(format!("{nodes:?} nodes")) }
    });
}

/// Starts the same workers, of which the first is only a coordinator.
fn cluster_with_dedicated_coordinator() -> Vec<WorkerProcess> {
    let workers = embedded_cluster([""; 3]);
    let ready = workers[0].ready();
    let [http, admin] = [Some(ready.http_port), ready.admin_port]
        .map(|port| format!("127.0.0.1:{}", port.expect("the administration port is open")));
    let answered = Command::new(binary("uniffle-worker"))
        .args(["ctl", "decommission", "--worker", &http, "--admin", &admin])
        .output()
        .expect("the binary was built with this test");
    assert!(answered.status.success(), "{answered:?}");
    until_active(&workers, 2.0);
    workers
}

#[test]
fn embedded_cluster_survives_loss_of_dedicated_coordinator() {
    let Some(mut spark) = spark() else { return };
    let application = Application { words: "failures=allowed master=local[2,4]", ..Application::of(JOB) };
    let (workers, _) = spark.run_while(cluster_with_dedicated_coordinator(), application, |workers| {
        wait_total(&workers[1], "total_received_data", 15e6);
        // The first of the quorum.
        workers[0].kill();
        assert_running(&workers[1], "total_received_data");
    });
    // A new application registers with the one remaining coordinator.
    let (workers, _) = spark.run_while(workers, Application::of("range_sort"), |_| {});
    for worker in workers.into_iter().skip(1).rev() {
        worker.assert_no_error_logged();
        worker.stop();
    }
}

/// Each block must be on two workers after writing, so a job survives the loss of one worker. With
/// two replicas a loss fails the tasks of a running map stage, because clients then require both
/// replicas. With three replicas two suffice.
const THREE_REPLICAS: &str = "failures=allowed spark.rss.data.replica=3 spark.rss.data.replica.write=2 \
                              spark.rss.data.replica.read=2 master=local[2,4]";

/// Runs a job on a new cluster and kills `victim` when its `counter` reaches `after`.
fn survives_loss(victim: usize, counter: &str, after: f64, words: &str) -> Vec<WorkerProcess> {
    let mut spark = spark().expect("Spark was found before");
    let application = Application { words, ..Application::of(JOB) };
    let (workers, _) = spark.run_while(embedded_cluster([""; 3]), application, |workers| {
        wait_total(&workers[victim], counter, after);
        workers[victim].kill();
        assert_running(&workers[(victim + 1) % 3], counter);
    });
    workers.into_iter().enumerate().filter(|(n, _)| *n != victim).map(|(_, worker)| worker).collect()
}

fn stop_without_errors(workers: Vec<WorkerProcess>) {
    for worker in workers.into_iter().rev() {
        worker.assert_no_error_logged();
        worker.stop();
    }
}

/// Clients ask the killed coordinator first. The next application must work without it.
#[test]
fn two_replicas_survive_loss_of_first_coordinator() {
    if spark().is_none() {
        return;
    }
    let rest = survives_loss(0, "total_read_data", 5e6, REPLICAS);
    let replicas = Application { words: REPLICAS, ..Application::of("range_sort") };
    let (rest, _) = spark().expect("Spark was found before").run_while(rest, replicas, |_| {});
    stop_without_errors(rest);
}

#[test]
fn two_replicas_survive_loss_of_plain_worker() {
    if spark().is_some() {
        stop_without_errors(survives_loss(2, "total_read_data", 5e6, REPLICAS));
    }
}

#[test]
fn three_replicas_survive_loss_in_map_stage() {
    if spark().is_some() {
        stop_without_errors(survives_loss(1, "total_received_data", 15e6, THREE_REPLICAS));
    }
}

fn sum(answers: &[Value], name: &str) -> f64 {
    answers
        .iter()
        .map(|answer| answer[name].as_f64().unwrap_or_else(|| panic!("{name} is missing: {answer}")))
        .sum()
}
