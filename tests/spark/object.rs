//! Jobs over a worker above SeaweedFS, without disks and with offload from disks to it.
//!
//! Some jobs write several times the memory or the disk. During others the worker or the store is
//! killed and restarted, in either stage. After a kill of the worker the result must be correct, or
//! the job must fail and name the lost blocks. In all other tests it must be correct. A measurement
//! shows the cost of offload. Other tests may run while a store starts, which takes seconds.

use serde_json::Value;
use uniffle_testkit::ports::InheritedPort;
use uniffle_testkit::s3::weed::Weed;
use uniffle_testkit::s3::{ACCESS_KEY, BUCKET, SECRET_KEY};
use uniffle_testkit::say;
use uniffle_testkit::tools::{may_mount, weaker};
use uniffle_testkit::worker::{Setup, WorkerProcess};

use crate::restarts::{JOB, JOB_BYTES, SmallDisk, wait_total};
use crate::{Application, Spark, spark};

/// Returns a worker of `capacity` whose only tier is `weed`.
fn above(weed: &Weed, name: &'static str, capacity: &'static str) -> Setup {
    let tables = format!(
        "[object_store]\nurl = \"s3://{BUCKET}/uniffle\"\nendpoint = \"{}\"\npath_style = true\n\
         credentials = \"environment\"\nprecheck_enable = true\n",
        weed.endpoint()
    );
    let env = [("AWS_ACCESS_KEY_ID", ACCESS_KEY), ("AWS_SECRET_ACCESS_KEY", SECRET_KEY)];
    let env = env.map(|(key, value)| (key, value.to_owned())).to_vec();
    Setup {
        name,
        capacity,
        disks: 0,
        store_type: "MEMORY_OBJECT",
        made_tables: tables,
        env,
        ..Setup::default()
    }
}

/// Watermarks that offload everything at once, whatever else is on the machine's disk.
const AT_ONCE: &str = "offload_high_watermark = 0.000002\noffload_low_watermark = 0.000001\n";

/// Like [`above`], with a disk that offloads data beyond `watermarks`.
fn with_a_disk(weed: &Weed, name: &'static str, capacity: &'static str, watermarks: &str) -> Setup {
    let above = above(weed, name, capacity);
    let made_tables = above.made_tables.clone() + watermarks;
    Setup { disks: 1, store_type: "MEMORY_LOCALFILE_OBJECT", made_tables, ..above }
}

#[test]
fn jobs_larger_than_the_disk_match_vanilla_spark() {
    const DISK: &str = "30m";
    const DISK_BYTES: f64 = 30.0 * 1024.0 * 1024.0;
    let Some(weed) = Weed::start("Spark above a small disk and SeaweedFS") else { return };
    let Some(mut spark) = spark() else { return };
    let dir = tempfile::Builder::new().prefix("uniffle-worker-test-").tempdir().unwrap();
    let mount = dir.path().join("disk0");
    let disk = SmallDisk::mount(&mount, DISK);
    let watermarks = match &disk {
        Some(_) => "offload_high_watermark = 0.3\noffload_low_watermark = 0.1\n",
        None => AT_ONCE,
    };
    if disk.is_none() {
        weaker("a small disk", "nothing is mounted and all is moved at once instead", may_mount());
    }
    let path = mount.join("data");
    std::fs::create_dir(&path).unwrap();
    let worker =
        WorkerProcess::start_in(&with_a_disk(&weed, "offload-sort", "32M", watermarks), dir, vec![path]);
    let answers = spark.run(&[&worker], Application::of("restarts,skew_join_aqe"));
    assert!(answers[0]["shuffle_written"].as_f64() > Some(5.0 * DISK_BYTES), "{answers:?}");
    let pieces = answers[1]["skewed_pieces"].as_u64();
    assert!(pieces.is_some_and(|pieces| pieces >= 2), "AQE must have split partitions: {answers:?}");
    let metrics = worker.metrics();
    let (moved, objects) = (metrics.expect("offload_bytes"), metrics.expect("object_segments_written"));
    say(&format!("{moved} bytes were moved in {objects} objects"));
    assert!(moved > 3.0 * DISK_BYTES, "only {moved} bytes were moved");
    worker.assert_no_error_logged();
    worker.stop();
    drop(disk);
}

#[test]
fn jobs_larger_than_memory_match_vanilla_spark() {
    let Some(weed) = Weed::start("Spark above SeaweedFS") else { return };
    let Some(mut spark) = spark() else { return };
    let worker = WorkerProcess::start(&above(&weed, "object-sort", "32M"));
    let answers = spark.run(&[&worker], Application::of("skew_join_aqe,range_sort,restarts"));
    let pieces = answers[0]["skewed_pieces"].as_u64();
    assert!(pieces.is_some_and(|pieces| pieces >= 2), "AQE must have split partitions: {answers:?}");
    let metrics = worker.metrics();
    let written = metrics.expect("object_write_bytes");
    assert!(written > 4.0 * 32e6, "only {written} bytes were written to the store");
    let (segments, pages) =
        (metrics.expect("object_segments_written"), metrics.expect("object_metadata_writes"));
    say(&format!("{written} bytes in {segments} segments, {pages} objects of metadata"));
    worker.assert_no_error_logged();
    worker.stop();
}

/// Failed tasks are retried and do not fail the job.
const WORDS: &str = "failures=allowed master=local[2,4]";

/// Runs the job with `in_the_map_stage` during one map stage and `in_the_reduce_stage` during a
/// reduce stage.
fn run_disturbed(
    spark: &mut Spark,
    worker: WorkerProcess,
    in_the_map_stage: impl FnOnce(&mut WorkerProcess),
    in_the_reduce_stage: impl FnOnce(&mut WorkerProcess),
) -> (WorkerProcess, Vec<Value>) {
    let application = Application { words: WORDS, ..Application::of(JOB) };
    let (mut workers, answers) = spark.run_unchecked(vec![worker], application, |workers| {
        wait_total(&workers[0], "total_received_data", 40e6);
        in_the_map_stage(&mut workers[0]);
        wait_total(&workers[0], "total_read_data", 15e6);
        in_the_reduce_stage(&mut workers[0]);
    });
    (workers.remove(0), answers)
}

fn assert_right(spark: &Spark, answers: &[Value]) {
    let vanilla = spark.vanilla_of(uniffle_testkit::spark::JvmKind::Main, JOB);
    assert_eq!(
        answers[0]["ok"],
        true,
        "{answers:?}\n{}",
        spark.log_tail(uniffle_testkit::spark::JvmKind::Main)
    );
    assert_eq!(answers[0]["digest"], vanilla["digest"], "{answers:?}");
}

/// The store is killed and restarted in each stage; the result must be correct.
fn store_killed(setup: impl FnOnce(&Weed) -> Setup) {
    let Some(mut weed) = Weed::start("Spark above a SeaweedFS that is killed") else { return };
    let Some(mut spark) = spark() else { return };
    let worker = WorkerProcess::start(&setup(&weed));
    let weed = std::cell::RefCell::new(&mut weed);
    let kill = |worker: &mut WorkerProcess| {
        weed.borrow_mut().kill();
        worker.wait_log("the store fails");
        weed.borrow_mut().start_again();
    };
    let (worker, answers) = run_disturbed(&mut spark, worker, kill, |worker| {
        kill(worker);
        // Read-ahead data and data on disk may cover the remaining reads.
        let read = worker.metrics().expect("total_read_data");
        if read < JOB_BYTES {
            wait_total(worker, "total_read_data", read + 1.0);
        }
    });
    assert_right(&spark, &answers);
    worker.assert_clean();
    worker.stop();
}

#[test]
fn killed_store_loses_nothing() {
    store_killed(|weed| above(weed, "object-store-killed", "64M"));
}

#[test]
fn killed_store_below_disks_loses_nothing() {
    store_killed(|weed| with_a_disk(weed, "offload-store-killed", "32M", AT_ONCE));
}

/// Kills the worker when `counter` reaches `least`, and restarts it. The job must then have the
/// right result, or fail and name lost blocks. The worker's socket stays open, as with a service
/// manager: otherwise all attempts of a task may find no listener, and the application ends before
/// it asks for lost blocks.
fn kill_in_stage(setup: impl FnOnce(&Weed) -> Setup, (counter, least): (&str, f64)) {
    let Some(weed) = Weed::start("Spark above a worker that is killed") else { return };
    let Some(mut spark) = spark() else { return };
    let kept = InheritedPort::open();
    let mut setup = Setup { top: "grpc_port = 0", wrapper: kept.passing_on(), ..setup(&weed) };
    setup.made_tables += "[app_config]\napp_heartbeat_timeout_min = \"10s\"\n";
    let worker = WorkerProcess::start(&setup);
    let words = "failures=allowed master=local[2,4] spark.rss.heartbeat.interval=1000";
    let application = Application { words, ..Application::of(JOB) };
    let (mut workers, answers) = spark.run_unchecked(vec![worker], application, |workers| {
        wait_total(&workers[0], counter, least);
        workers[0].kill();
        workers[0].start_again();
    });
    let worker = workers.remove(0);
    match answers[0]["ok"] == true {
        true => {
            say(&format!("{}: the job went on and its result is right", setup.name));
            assert_right(&spark, &answers);
        }
        false => {
            let error = answers[0]["error"].as_str().unwrap_or_default();
            say(&format!("{}: the job failed and named what is lost", setup.name));
            for text in [" lost (ids ", "/0 partition "] {
                assert!(error.contains(text), "{text:?} is missing in the error of Spark: {error}");
            }
            worker.wait_log("blocks are lost shuffle=");
        }
    }
    worker.assert_clean();
    worker.stop();
    drop(kept);
}

/// Received or read bytes at which the worker is killed.
const IN_THE_MAP_STAGE: (&str, f64) = ("total_received_data", 40e6);
const IN_THE_REDUCE_STAGE: (&str, f64) = ("total_read_data", 15e6);

#[test]
fn kill_in_map_stage_ends_right_or_names_losses() {
    kill_in_stage(|weed| above(weed, "object-map-killed", "64M"), IN_THE_MAP_STAGE);
}

#[test]
fn kill_in_reduce_stage_ends_right_or_names_losses() {
    kill_in_stage(|weed| above(weed, "object-reduce-killed", "64M"), IN_THE_REDUCE_STAGE);
}

#[test]
fn kill_with_disk_in_map_stage_ends_right_or_names_losses() {
    kill_in_stage(|weed| with_a_disk(weed, "offload-map-killed", "32M", AT_ONCE), IN_THE_MAP_STAGE);
}

#[test]
fn kill_with_disk_in_reduce_stage_ends_right_or_names_losses() {
    kill_in_stage(|weed| with_a_disk(weed, "offload-reduce-killed", "32M", AT_ONCE), IN_THE_REDUCE_STAGE);
}

/// Measures the extra time for the map stage of a 1.1 GB sort while all of it is offloaded to the
/// store.
///
/// Run: `SPEED_WORKER=target/release/uniffle-worker cargo test --test spark -- --ignored
/// --nocapture map_stage_with_offload`
#[test]
#[ignore = "a measurement, on an idle machine"]
fn map_stage_with_offload_compared_with_disks() {
    const TURNS: usize = 5;
    let Some(weed) = Weed::start("Spark above disks and SeaweedFS") else { return };
    let Some(mut spark) = spark() else { return };
    let binary = std::env::var_os("SPEED_WORKER").map(Into::into);
    let moved = Setup { binary, ..with_a_disk(&weed, "speed", "256M", AT_ONCE) };
    let disks = || Setup {
        made_tables: String::new(),
        store_type: "MEMORY_LOCALFILE",
        binary: moved.binary.clone(),
        ..Setup { name: "speed-disks", capacity: "256M", ..Setup::default() }
    };
    let mut seconds = [Vec::new(), Vec::new()];
    for _ in 0..TURNS {
        for (all, setup) in seconds.iter_mut().zip([disks(), moved.clone()]) {
            let worker = WorkerProcess::start(&setup);
            let answers = spark.run(&[&worker], Application::of("sort_1g"));
            all.push(answers[0]["map_stages_seconds"].as_f64().unwrap());
            worker.stop();
        }
    }
    let median = |all: &mut Vec<f64>| {
        all.sort_by(f64::total_cmp);
        all[TURNS / 2]
    };
    say(&format!("disks only {:.2?} s, all moved {:.2?} s", seconds[0], seconds[1]));
    let [disks, moved] = seconds.each_mut().map(median);
    say(&format!("medians {disks:.2} and {moved:.2} s: {:.2}", moved / disks));
}
