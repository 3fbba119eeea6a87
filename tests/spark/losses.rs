//! Jobs over a worker that is killed between their stages, with all of a finished map stage in its memory.
//!
//! The jobs pause there (`spark.uniffle.pause`): by themselves they would meet a port without a listener, and
//! fail for that.
//!
//! What becomes of such a job is up to its client. By default it fails, and says what is lost. With
//! `spark.rss.resubmit.stage` client 0.9.2 makes Spark's `FetchFailedException` of the third failed read of a partition,
//! but it leaves the map outputs registered (0.10 drops them then), so that Spark runs the reduce stage again, and the map
//! stage only if it is a barrier stage.

use std::time::Duration;

use serde_json::Value;

use crate::{Application, Spark, spark};
use uniffle_testkit::spark::Kind;
use uniffle_testkit::wait_until;
use uniffle_testkit::worker::{Setup, Worker};

/// A map stage of seconds, on a machine that others use as well.
const STAGE_DEADLINE: Duration = Duration::from_secs(120);

/// Runs a job whose worker is killed, and started again, between its stages.
fn killed_between_the_stages(
    spark: &mut Spark,
    application: Application<'_>,
    name: &'static str,
) -> (Worker, Vec<Value>) {
    let worker = Worker::start(&Setup { name, capacity: "300M", ..Setup::default() });
    let pause = worker.dir().join("pause");
    std::fs::create_dir(&pause).expect("a directory for the pause");
    let words = format!(
        "failures=allowed master=local[4,4] spark.uniffle.pause={} {}",
        pause.display(),
        application.words
    );
    let application = Application { words: &words, ..application };
    let (mut workers, answers) = spark.run_unchecked(vec![worker], application, |workers| {
        wait_until("the map stage is over", STAGE_DEADLINE, || {
            if pause.join("reached").exists() { Ok(()) } else { Err("it is not".to_owned()) }
        });
        workers[0].kill();
        workers[0].start_again();
        let lost = workers[0].metrics().expect("lost_blocks");
        assert!(lost > 0.0, "all was on the disk");
        std::fs::write(pause.join("go"), "").expect("the sign to go on");
    });
    (workers.remove(0), answers)
}

/// The answer is a failure that names what is lost, of `scenario`'s one shuffle.
fn assert_names_the_loss(answers: &[Value]) {
    assert_eq!(answers[0]["ok"], false, "{answers:?}");
    let error = answers[0]["error"].as_str().unwrap_or_default();
    for text in ["of shuffle ", "/0 partition ", " lost (ids ", "in memory when the worker ended"] {
        assert!(error.contains(text), "no {text:?} in what Spark says: {error}");
    }
}

fn fails_with_words(jvm: Kind, words: &str, name: &'static str) {
    let Some(mut spark) = spark() else { return };
    let application = Application { jvm, scenarios: "paused", words };
    let (worker, answers) = killed_between_the_stages(&mut spark, application, name);
    assert_names_the_loss(&answers);
    assert!(worker.metrics().expect("total_reads_refused_for_loss") > 0.0);
    worker.assert_clean();
    worker.stop();
}

#[test]
fn what_a_killed_worker_lost_fails_the_job_with_words_where_stages_may_not() {
    fails_with_words(Kind::Main, "", "failed-grpc");
}

#[test]
fn what_a_killed_worker_lost_fails_the_job_with_words_over_tcp() {
    fails_with_words(Kind::NoUnsafe, "spark.rss.client.type=GRPC_NETTY", "failed-tcp");
}

#[test]
fn what_a_killed_worker_lost_fails_the_job_with_words_where_the_client_does_not_drop_map_outputs() {
    fails_with_words(Kind::Main, "spark.rss.resubmit.stage=true", "not-dropped");
}

#[test]
fn what_a_killed_worker_lost_is_computed_again_where_stages_may_be() {
    let Some(mut spark) = spark() else { return };
    let scenario = "paused_barrier";
    let application = Application { words: "spark.rss.resubmit.stage=true", ..Application::of(scenario) };
    let (worker, answers) = killed_between_the_stages(&mut spark, application, "computed-again");
    let vanilla = spark.vanilla_of(Kind::Main, scenario);
    assert_eq!(answers[0]["ok"], true, "{answers:?}\n{}", spark.log_tail(Kind::Main));
    assert_eq!(answers[0]["digest"], vanilla["digest"], "{answers:?}");
    assert!(worker.metrics().expect("total_healed_blocks") > 0.0, "nothing was sent again");
    worker.assert_clean();
    worker.stop();
}
