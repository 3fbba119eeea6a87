//! Scenarios with one application at a time and one worker, over gRPC.

use crate::share::say_share;
use crate::{Application, spark};
use uniffle_testkit::spark::JvmKind;
use uniffle_testkit::worker::{Setup, WorkerProcess};

#[test]
fn sort_of_a_gigabyte_is_ordered_and_complete() {
    let Some(mut spark) = spark() else { return };
    let worker =
        WorkerProcess::start(&Setup { name: "sort", capacity: "1500M", disks: 2, ..Setup::default() });
    spark.run(&[&worker], Application::of("sort_1g"));
    let received = worker.metrics().expect("total_received_data");
    assert!(received > 1e9, "only {received} bytes were sent to the worker");
    worker.assert_no_error_logged();
    worker.stop();
}

#[test]
fn aggregations_and_joins_match_vanilla_spark() {
    let Some(mut spark) = spark() else { return };
    let worker = WorkerProcess::start(&Setup { name: "queries", capacity: "800M", ..Setup::default() });
    spark.run(&[&worker], Application::of("sort_small,wide_aggregation,join,range_sort"));
    let answers = spark.run(&[&worker], Application::of("skew_join_aqe,query_aqe_off,query_aqe_on"));
    let pieces = answers[0]["skewed_pieces"].as_u64();
    assert!(pieces.is_some_and(|pieces| pieces >= 2), "AQE must have split partitions: {answers:?}");
    assert_eq!(answers[1]["digest"], answers[2]["digest"], "AQE changed the result");
    worker.assert_no_error_logged();
    worker.stop();
}

#[test]
fn grouped_and_cached_rdds_match_vanilla_spark() {
    let Some(mut spark) = spark() else { return };
    let worker = WorkerProcess::start(&Setup { name: "rdds", capacity: "300M", ..Setup::default() });
    spark.run(&[&worker], Application::of("cached_rdd,cogroup"));
    worker.assert_no_error_logged();
    worker.stop();
}

#[test]
fn localfile_client_commits_to_and_reads_disks() {
    let Some(mut spark) = spark() else { return };
    let worker = WorkerProcess::start(&Setup { name: "no-memory", capacity: "300M", ..Setup::default() });
    // Clients accept this type in test mode only. With dynamic configuration the coordinator's type
    // would replace it.
    let words = "spark.rss.storage.type=LOCALFILE spark.rss.test.mode.enable=true \
                 spark.rss.dynamicClientConf.enabled=false";
    spark.run(&[&worker], Application { words, ..Application::of("sort_small,join,cogroup") });
    let metrics = worker.metrics();
    assert!(metrics.expect("grpc_commit_shuffle_task_total") > 0.0, "no task committed");
    assert_eq!(metrics.expect("grpc_get_memory_shuffle_data_total"), 0.0, "blocks were read from memory");
    worker.assert_no_error_logged();
    worker.stop();
}

#[test]
fn million_tiny_blocks_match_vanilla_spark() {
    let Some(mut spark) = spark() else { return };
    let worker = WorkerProcess::start(&Setup { name: "tiny", capacity: "800M", ..Setup::default() });
    let answers = spark.run(&[&worker], Application::of("tiny_partitions"));
    say_share(&worker.metrics(), &answers[0]);
    worker.assert_no_error_logged();
    worker.stop();
}

#[test]
fn shuffle_of_four_times_memory_uses_local_disks() {
    const CAPACITY: &str = "104M";
    const CAPACITY_BYTES: u64 = 104_000_000;
    let Some(mut spark) = spark() else { return };
    let worker =
        WorkerProcess::start(&Setup { name: "spill", capacity: CAPACITY, disks: 2, ..Setup::default() });
    spark.run(&[&worker], Application::of("spill"));

    let metrics = worker.metrics();
    let received = metrics.expect("total_received_data");
    assert!(received >= 4.0 * 104e6, "{received} bytes are less than four times the memory");
    let spilled = metrics.expect("memory_spill_total_bytes");
    assert!(
        spilled >= received - 104e6,
        "{spilled} of {received} bytes were flushed; memory cannot hold the others"
    );
    // docs/architecture.md §2.2: 5 % and 200 MiB over the capacity at any moment.
    let resident = worker.peak_resident_bytes();
    assert!(resident <= CAPACITY_BYTES / 20 * 21 + (200 << 20), "{resident} bytes were resident");
    worker.assert_no_error_logged();
    worker.stop();
}

#[test]
fn spark_3_3_matches_vanilla_spark_3_3() {
    let Some(mut spark) = spark() else { return };
    let worker = WorkerProcess::start(&Setup { name: "spark33", capacity: "300M", ..Setup::default() });
    let scenarios = "sort_small,cogroup,skew_join_aqe";
    let answers = spark.run(&[&worker], Application { jvm: JvmKind::Spark33, ..Application::of(scenarios) });
    assert!(
        answers.iter().all(|answer| answer["spark"] == "3.3.4"),
        "another version of Spark ran: {answers:?}"
    );
    // No other test needs this JVM.
    spark.jvms.remove(&JvmKind::Spark33);
    worker.assert_no_error_logged();
    worker.stop();
}
