//! Unmodified Spark with the published Uniffle client, through a worker process, against vanilla Spark.
//!
//! One JVM serves all tests of this file (they take turns), each test has workers of its own. A scenario runs first
//! in vanilla mode and then through a worker; the application compares the digests.
//!
//! By hand, against a worker that runs (`uniffle.Main` has the other words; `spark.…=…` sets anything of Spark):
//! ```text
//! mvn -q -f tests/spark package
//! java @tests/spark/jvm.options -cp 'target/tmp/spark/classes:target/tmp/spark/deps/*' uniffle.Main \
//!     modes=vanilla,uniffle quorum=127.0.0.1:21100 scenarios=sort_small,join
//! ```

#![allow(clippy::panic, reason = "to panic is how a test fails")]

mod support;

use std::sync::LazyLock;

use parking_lot::{Mutex, MutexGuard};
use serde_json::Value;
use support::spark::Jvm;
use support::worker::{Setup, Worker};

/// `None` before the first test and after a test that lost it.
static JVM: LazyLock<Mutex<Option<Jvm>>> = LazyLock::new(|| Mutex::new(None));

#[test]
fn a_sort_of_a_gigabyte_is_in_order_and_complete() {
    let Some(mut spark) = spark() else { return };
    let worker = Worker::start(&Setup { name: "sort", capacity: "1500M", disks: 2, tables: "" });
    vanilla_then_uniffle(&mut spark, &worker, "sort_1g");
    let received = worker.metrics().expect("total_received_data");
    assert!(received > 1e9, "only {received} bytes came through the worker");
    worker.assert_no_error_logged();
    worker.stop();
}

#[test]
fn aggregations_and_joins_have_the_results_of_vanilla_spark() {
    let Some(mut spark) = spark() else { return };
    let worker = Worker::start(&Setup { name: "queries", capacity: "800M", disks: 1, tables: "" });
    vanilla_then_uniffle(&mut spark, &worker, "sort_small,wide_aggregation,join");
    let answers = vanilla_then_uniffle(&mut spark, &worker, "skew_join_aqe");
    let pieces = answers[0]["skewed_pieces"].as_u64();
    assert!(pieces.is_some_and(|pieces| pieces >= 2), "AQE must have split partitions: {answers:?}");
    worker.assert_no_error_logged();
    worker.stop();
}

#[test]
fn a_shuffle_four_times_the_memory_goes_through_local_disks() {
    const CAPACITY: &str = "104M";
    const CAPACITY_BYTES: u64 = 104_000_000;
    let Some(mut spark) = spark() else { return };
    let worker = Worker::start(&Setup { name: "spill", capacity: CAPACITY, disks: 2, tables: "" });
    vanilla_then_uniffle(&mut spark, &worker, "spill");

    let metrics = worker.metrics();
    let received = metrics.expect("total_received_data");
    assert!(received >= 4.0 * 104e6, "{received} bytes are not four times the memory");
    let spilled = metrics.expect("memory_spill_total_bytes");
    assert!(
        spilled >= received - 104e6,
        "{spilled} of {received} bytes were spilled: the rest can not be in memory"
    );
    // GOALS §2: 5 % and 200 MiB over the capacity at any moment.
    let resident = worker.peak_resident_bytes();
    assert!(resident <= CAPACITY_BYTES / 20 * 21 + (200 << 20), "{resident} bytes were resident");
    worker.assert_no_error_logged();
    worker.stop();
}

/// The JVM, started by whoever comes first. `None` when Java or Maven is missing.
fn spark() -> Option<MutexGuard<'static, Option<Jvm>>> {
    let mut jvm = JVM.lock();
    if jvm.is_none() {
        *jvm = Jvm::start();
    }
    jvm.is_some().then_some(jvm)
}

/// Runs the scenarios without and with the worker, in two applications; after the second the worker must be clean.
fn vanilla_then_uniffle(spark: &mut Option<Jvm>, worker: &Worker, scenarios: &str) -> Vec<Value> {
    let words = format!("scenarios={scenarios}");
    let vanilla = application(spark, "vanilla", &words);
    assert_all_ok(spark, &vanilla, &words);

    let counted = ["total_received_data", "total_unregister"];
    let before_uniffle = worker.metrics();
    let uniffle = application(spark, "uniffle", &format!("{words} quorum={}", worker.quorum()));
    assert_all_ok(spark, &uniffle, &words);
    for (answer, before) in uniffle.iter().zip(&vanilla) {
        assert_eq!(answer["digest"], before["digest"], "{answer}");
    }
    worker.assert_clean();
    let after_uniffle = worker.metrics();
    for name in counted {
        let (before, after) = (before_uniffle.expect(name), after_uniffle.expect(name));
        assert!(after > before, "{name} is {after} as before: the application never told the worker");
    }
    uniffle
}

fn application(spark: &mut Option<Jvm>, mode: &str, words: &str) -> Vec<Value> {
    let jvm = spark.as_mut().expect("spark() gave it");
    match jvm.run(mode, words) {
        Ok(answers) => answers,
        Err(lost) => {
            *spark = None;
            panic!("{lost}")
        }
    }
}

fn assert_all_ok(spark: &Option<Jvm>, answers: &[Value], words: &str) {
    let bad: Vec<String> =
        answers.iter().filter(|answer| answer["ok"] != true).map(ToString::to_string).collect();
    let log = spark.as_ref().map(Jvm::log_tail).unwrap_or_default();
    assert!(bad.is_empty(), "{}\n--- end of the JVM's log\n{log}", bad.join("\n"));
    let asked = words.split(['=', ',']).skip(1).count();
    assert_eq!(answers.len(), asked, "not every scenario of `{words}` was answered");
}
