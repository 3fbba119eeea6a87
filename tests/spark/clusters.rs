//! More than one of something: executors, applications, workers, replicas.

use std::time::Duration;

use serde_json::Value;

use crate::{Application, spark};
use uniffle_testkit::spark::Kind;
use uniffle_testkit::wait_until;
use uniffle_testkit::worker::{Setup, Worker};

/// A worker tells the coordinator of itself as soon as it is ready.
const JOIN_DEADLINE: Duration = Duration::from_secs(20);

#[test]
fn executors_in_jvms_of_their_own_read_what_the_others_wrote() {
    let Some(mut spark) = spark() else { return };
    let worker = Worker::start(&Setup { name: "executors", capacity: "400M", ..Setup::default() });
    let words = "master=local-cluster[2,1,1024]";
    spark.run(&[&worker], Application { words, ..Application::of("skew_join_aqe,cogroup") });
    worker.assert_no_error_logged();
    worker.stop();
}

#[test]
fn two_applications_at_once_do_not_meet() {
    let Some(mut spark) = spark() else { return };
    // The same scenarios, so that both have the same shuffle ids, with more bytes than there is memory.
    let worker = Worker::start(&Setup { name: "two-apps", capacity: "64M", ..Setup::default() });
    let scenarios = "query_aqe_on,skew_join_aqe";
    let apps =
        [Application { jvm: Kind::NoUnsafe, ..Application::of(scenarios) }, Application::of(scenarios)];
    spark.run_all_at_once(&[&worker], &apps);
    let spilled = worker.metrics().expect("memory_spill_total_bytes");
    assert!(spilled > 0.0, "nothing was spilled");
    worker.assert_no_error_logged();
    worker.stop();
}

#[test]
fn two_workers_share_partitions_and_keep_replicas() {
    let Some(mut spark) = spark() else { return };
    let first = Worker::start(&Setup { name: "first", capacity: "400M", ..Setup::default() });
    let quorum = Some(first.quorum());
    let second = Worker::start(&Setup { name: "second", capacity: "400M", quorum, ..Setup::default() });
    wait_until("the second worker is a node", JOIN_DEADLINE, || {
        let nodes = first.metrics().total("active_server_num");
        if nodes == Some(2.0) { Ok(()) } else { Err(format!("{nodes:?} nodes")) }
    });
    let workers = [&first, &second];

    let answers = spark.run(&workers, Application::of("range_sort,skew_join_aqe"));
    let received = |worker: &Worker| worker.metrics().expect("total_received_data");
    let shared = workers.map(received);
    let written = sum(&answers, "shuffle_written");
    assert!(shared[0] + shared[1] < 1.1 * written, "{shared:?} of {written}: written more than once");

    let words = "spark.rss.data.replica=2 spark.rss.data.replica.write=2 spark.rss.data.replica.read=1";
    let answers = spark.run(&workers, Application { words, ..Application::of("range_sort,cogroup") });
    let written = sum(&answers, "shuffle_written");
    for (worker, before) in workers.iter().zip(shared) {
        let received = received(worker) - before;
        assert!(received > 0.95 * written, "{received} of {written} bytes came to {worker:?}");
    }
    for worker in [second, first] {
        worker.assert_no_error_logged();
        worker.stop();
    }
}

fn sum(answers: &[Value], name: &str) -> f64 {
    answers.iter().map(|answer| answer[name].as_f64().unwrap_or_else(|| panic!("{name} in {answer}"))).sum()
}
