//! Job times compared with vanilla Spark. These measurements need an idle machine.

use serde_json::Value;
use uniffle_testkit::say;
use uniffle_testkit::spark::JvmKind;
use uniffle_testkit::worker::{Setup, WorkerProcess};

use crate::{Application, Spark, spark};

/// Measured turns, after one warm-up.
const TURNS: usize = 3;
const SCENARIOS: [&str; 2] = ["sort_1g", "repartition_1000"];
/// Name and client type of each variant.
const VARIANTS: [(&str, Option<&str>); 3] =
    [("vanilla", None), ("gRPC", Some("GRPC")), ("TCP", Some("GRPC_NETTY"))];

/// Sorts 10 M rows and repartitions 1,000 × 1,000 in vanilla Spark and through a worker's memory,
/// in turns in one JVM.
///
/// Run: `SPEED_WORKER=target/release/uniffle-worker cargo test --test spark -- --ignored
/// --nocapture in_turns_with_vanilla`
#[test]
#[ignore = "a measurement, on an idle machine"]
fn jobs_in_turns_with_vanilla_spark() {
    let Some(mut spark) = spark() else { return };
    let binary = std::env::var_os("SPEED_WORKER").map(Into::into);
    let worker = WorkerProcess::start(&Setup { name: "turns", capacity: "3G", binary, ..Setup::default() });
    for turn in 0..=TURNS {
        for scenario in SCENARIOS {
            for (way, client) in VARIANTS {
                let before = worker.cpu_seconds();
                let answer = run(&mut spark, &worker, scenario, client);
                let (seconds, cpu) = (&answer["seconds"], worker.cpu_seconds() - before);
                say(&format!("turn {turn}, {scenario}, {way}: {seconds} s, the worker's CPU {cpu:.2} s"));
            }
        }
    }
    worker.assert_clean();
    worker.stop();
}

fn run(spark: &mut Spark, worker: &WorkerProcess, scenario: &str, client: Option<&str>) -> Value {
    // The same JVM for all variants, with the flags that TCP needs.
    let jvm = JvmKind::NoUnsafe;
    let words = client.map(|client| format!("{} spark.rss.client.type={client}", worker.printed_settings()));
    let mode = if client.is_some() { "printed" } else { "vanilla" };
    spark.begin(jvm, mode, &format!("scenarios={scenario} {}", words.unwrap_or_default()));
    spark.finish(&Application { jvm, ..Application::of(scenario) }).remove(0)
}
