//! Client type GRPC_NETTY: data over the TCP listener, other calls over gRPC.

use crate::share::say_share;
use crate::{Application, spark};
use uniffle_testkit::metrics::Metrics;
use uniffle_testkit::spark::JvmKind;
use uniffle_testkit::worker::{Setup, WorkerProcess};

const TCP: Application<'_> =
    Application { jvm: JvmKind::NoUnsafe, scenarios: "", words: "spark.rss.client.type=GRPC_NETTY" };

/// Returns the request counts of one RPC on both listeners.
fn requests(metrics: &Metrics, rpc: &str) -> (f64, f64) {
    // The gRPC listener labels with the whole path, the TCP listener with its last part.
    let count = |name: &str| metrics.total_of(name, &format!("{rpc}\"")).unwrap_or(0.0);
    (count("total_grpc_request_number"), count("total_urpc_request_number"))
}

fn assert_tcp_only(metrics: &Metrics, rpcs: &[&str]) {
    for rpc in rpcs {
        let (grpc, tcp) = requests(metrics, rpc);
        assert!(grpc == 0.0 && tcp > 0.0, "{rpc}: {grpc} calls over gRPC, {tcp} over TCP");
    }
}

#[test]
fn jobs_over_tcp_match_vanilla_spark() {
    let Some(mut spark) = spark() else { return };
    let worker = WorkerProcess::start(&Setup { name: "tcp", capacity: "800M", disks: 2, ..Setup::default() });
    let scenarios = "range_sort,skew_join_aqe,tiny_partitions";
    let answers = spark.run(&[&worker], Application { scenarios, ..TCP });
    let pieces = answers[1]["skewed_pieces"].as_u64();
    assert!(pieces.is_some_and(|pieces| pieces >= 2), "AQE must have split partitions: {answers:?}");
    let metrics = worker.metrics();
    assert_tcp_only(&metrics, &["sendShuffleData", "getMemoryShuffleData"]);
    say_share(&metrics, &answers[2]);
    worker.assert_no_error_logged();
    worker.stop();
}

#[test]
fn shuffle_of_four_times_memory_uses_disks_over_tcp() {
    let Some(mut spark) = spark() else { return };
    let worker =
        WorkerProcess::start(&Setup { name: "tcp-spill", capacity: "104M", disks: 2, ..Setup::default() });
    // By default the client pauses 2 to 10 s after NO_BUFFER.
    let words = "spark.rss.client.type=GRPC_NETTY spark.rss.client.retry.interval.max=500";
    spark.run(&[&worker], Application { scenarios: "spill", words, ..TCP });
    let metrics = worker.metrics();
    let spilled = metrics.expect("memory_spill_total_bytes");
    assert!(spilled > 3.0 * 104e6, "only {spilled} bytes were flushed");
    assert_tcp_only(&metrics, &["sendShuffleData", "getLocalShuffleIndex", "getLocalShuffleData"]);
    worker.assert_no_error_logged();
    worker.stop();
}

#[test]
fn concurrent_apps_on_both_listeners_match_vanilla_spark() {
    let Some(mut spark) = spark() else { return };
    let worker = WorkerProcess::start(&Setup { name: "two-listeners", capacity: "400M", ..Setup::default() });
    let scenarios = "query_aqe_on,skew_join_aqe";
    let apps = [Application { scenarios, ..TCP }, Application::of(scenarios)];
    spark.run_all_at_once(&[&worker], &apps);
    let (grpc, tcp) = requests(&worker.metrics(), "sendShuffleData");
    assert!(grpc > 0.0 && tcp > 0.0, "{grpc} calls over gRPC, {tcp} over TCP");
    worker.assert_no_error_logged();
    worker.stop();
}
