//! Jobs over a worker that is killed between their stages, with a finished map stage in its memory.
//!
//! The jobs pause between the stages (`spark.uniffle.pause`); otherwise they would fail because the
//! port has no listener. By default such a job fails and names the lost blocks. With
//! `spark.rss.resubmit.stage`, client 0.9.2 makes Spark repeat the reduce stage. Spark repeats the
//! map stage only if it is a barrier stage, because this client leaves the map outputs registered.
//! Client 0.10 unregisters them.

use std::time::Duration;

use serde_json::Value;

use crate::{Application, Spark, spark};
use uniffle_testkit::spark::JvmKind;
use uniffle_testkit::wait_until;
use uniffle_testkit::worker::{Setup, WorkerProcess};

/// Upper bound for a map stage of seconds, on a shared machine.
const STAGE_DEADLINE: Duration = Duration::from_secs(120);

/// Runs a job whose worker is killed and restarted between the stages.
fn kill_between_stages(
    spark: &mut Spark,
    application: Application<'_>,
    name: &'static str,
) -> (WorkerProcess, Vec<Value>) {
    let worker = WorkerProcess::start(&Setup { name, capacity: "300M", ..Setup::default() });
    let pause = worker.dir().join("pause");
    std::fs::create_dir(&pause).expect("cannot create the directory for the pause");
    let words = format!(
        "failures=allowed master=local[4,4] spark.uniffle.pause={} {}",
        pause.display(),
        application.words
    );
    let application = Application { words: &words, ..application };
    let (mut workers, answers) = spark.run_unchecked(vec![worker], application, |workers| {
        wait_until("the map stage is over", STAGE_DEADLINE, || {
            if pause.join("reached").exists() { Ok(()) } else { Err("not reached".to_owned()) }
        });
        workers[0].kill();
        workers[0].start_again();
        let lost = workers[0].metrics().expect("lost_blocks");
        assert!(lost > 0.0, "no block was lost, because all were on the disk");
        std::fs::write(pause.join("go"), "").expect("cannot write the signal to continue");
    });
    (workers.remove(0), answers)
}

/// Asserts a failure that names lost blocks of the job's only shuffle.
fn assert_names_the_loss(answers: &[Value]) {
    assert_eq!(answers[0]["ok"], false, "{answers:?}");
    let error = answers[0]["error"].as_str().unwrap_or_default();
    for text in ["of shuffle ", "/0 partition ", " lost (ids ", "in memory when the worker ended"] {
        assert!(error.contains(text), "{text:?} is missing in the error of Spark: {error}");
    }
}

fn fails_with_reason(jvm: JvmKind, words: &str, name: &'static str) {
    let Some(mut spark) = spark() else { return };
    let application = Application { jvm, scenarios: "paused", words };
    let (worker, answers) = kill_between_stages(&mut spark, application, name);
    assert_names_the_loss(&answers);
    assert!(worker.metrics().expect("total_reads_refused_for_loss") > 0.0);
    worker.assert_clean();
    worker.stop();
}

#[test]
fn lost_blocks_fail_the_job_with_a_reason() {
    fails_with_reason(JvmKind::Main, "", "failed-grpc");
}

#[test]
fn lost_blocks_fail_the_job_over_tcp() {
    fails_with_reason(JvmKind::NoUnsafe, "spark.rss.client.type=GRPC_NETTY", "failed-tcp");
}

#[test]
fn lost_blocks_fail_the_job_if_map_outputs_stay_registered() {
    fails_with_reason(JvmKind::Main, "spark.rss.resubmit.stage=true", "not-dropped");
}

#[test]
fn lost_blocks_of_barrier_stage_are_recomputed() {
    let Some(mut spark) = spark() else { return };
    let scenario = "paused_barrier";
    let application = Application { words: "spark.rss.resubmit.stage=true", ..Application::of(scenario) };
    let (worker, answers) = kill_between_stages(&mut spark, application, "computed-again");
    let vanilla = spark.vanilla_of(JvmKind::Main, scenario);
    assert_eq!(answers[0]["ok"], true, "{answers:?}\n{}", spark.log_tail(JvmKind::Main));
    assert_eq!(answers[0]["digest"], vanilla["digest"], "{answers:?}");
    assert!(worker.metrics().expect("total_healed_blocks") > 0.0, "no lost block was resent");
    worker.assert_clean();
    worker.stop();
}
