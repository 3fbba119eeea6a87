//! An application floods a worker. Nine small ones beside it take at most 1.5 times as long as
//! without the flood.
//!
//! Needs an idle machine, and prints the figures of `docs/benchmarks.md`:
//! `cargo test --release --test spark fairness -- --ignored --nocapture --test-threads 1`

use serde_json::Value;
use uniffle_testkit::say;
use uniffle_testkit::spark::{Jvm, JvmKind};
use uniffle_testkit::worker::{Setup, WorkerProcess};

use crate::spark;

/// Number of small applications.
const SMALL: usize = 9;
/// 55 MB each: the nine need twice the memory.
const SMALL_WORDS: &str = "scenarios=sized master=local[2] spark.scenario.rows=500000";
/// 440 MB in each round.
const FLOOD_WORDS: &str = "scenarios=sized master=local[8] spark.scenario.rows=4000000";
/// Longer than the small applications take.
const FLOOD_LONG: &str = "spark.scenario.seconds=150";
/// Low priority for the flood: this test is about sharing the worker, not the processor.
const NICE: &[&str] = &["nice", "-n", "10"];
/// Bound on the longest time of a small application, relative to that without the flood.
const SLOWDOWN_MAX: f64 = 1.5;

/// Warmed-up JVMs: the first application of each takes ten seconds longer.
struct Jvms {
    small: Vec<Jvm>,
    flood: Jvm,
}

impl Jvms {
    fn start() -> Self {
        let start = |at| Jvm::start_as(JvmKind::NoUnsafe, &format!("small-{at}"), &[], &["-Xmx1g"]);
        let mut small: Vec<_> = (0..SMALL).map(start).collect();
        let mut flood = Jvm::start_as(JvmKind::NoUnsafe, "flood", NICE, &[]);
        // Each runs once with its own rows, as the reference for later results.
        for jvm in &mut small {
            begin(jvm, "vanilla", SMALL_WORDS);
        }
        begin(&mut flood, "vanilla", FLOOD_WORDS);
        let digests: Vec<_> = small.iter_mut().map(finish).collect();
        assert!(digests.windows(2).all(|pair| pair[0]["digest"] == pair[1]["digest"]), "{digests:?}");
        finish(&mut flood);
        Self { small, flood }
    }

    /// Runs all small applications at once and checks every row. Returns the seconds of each.
    fn run_small(&mut self, words: &str) -> Vec<f64> {
        for jvm in &mut self.small {
            begin(jvm, "printed", &format!("{SMALL_WORDS} {words}"));
        }
        let answers: Vec<_> = self.small.iter_mut().map(finish).collect();
        assert!(answers.windows(2).all(|pair| pair[0]["digest"] == pair[1]["digest"]), "{answers:?}");
        answers.iter().map(|answer| answer["seconds"].as_f64().expect("every line has the seconds")).collect()
    }
}

fn begin(jvm: &mut Jvm, mode: &str, words: &str) {
    jvm.begin(mode, words).unwrap_or_else(|lost| panic!("{lost}"));
}

fn finish(jvm: &mut Jvm) -> Value {
    let answers = jvm.finish().unwrap_or_else(|lost| panic!("{lost}"));
    let [answer] = &answers[..] else { panic!("{answers:?}") };
    assert_eq!(answer["ok"], true, "{answer}\n--- end of the JVM's log\n{}", jvm.log_tail());
    answer.clone()
}

/// Prints the average and longest time. Returns the longest.
fn print_times(what: &str, seconds: &[f64]) -> f64 {
    let longest = seconds.iter().copied().fold(0.0, f64::max);
    let mean = seconds.iter().sum::<f64>() / f64::from(u32::try_from(seconds.len()).unwrap());
    say(&format!("{what}: {mean:.1} s on average, {longest:.1} s the longest, of {seconds:.1?}"));
    longest
}

/// Prints how many ticket requests were granted after a wait, and how many were refused.
fn print_tickets(worker: &WorkerProcess, what: &str) {
    let metrics = worker.metrics();
    let count = |name| metrics.total(name).unwrap_or_default();
    say(&format!(
        "{what}: {:.0} tickets granted in line, {:.0} refused, {:.0} of them over their share",
        count("tickets_granted_in_line_total"),
        count("total_require_buffer_failed"),
        count("total_require_buffer_failed_over_share"),
    ));
}

fn run(name: &'static str, client: &str) {
    let Some(turn) = spark() else { return };
    let worker = WorkerProcess::start(&Setup { name, capacity: "256M", disks: 2, ..Setup::default() });
    let words = format!("{} spark.rss.client.type={client}", worker.printed_settings());
    let mut jvms = Jvms::start();
    jvms.run_small(&words);
    let alone = print_times(&format!("{client}, nine without the flood"), &jvms.run_small(&words));
    print_tickets(&worker, client);

    begin(&mut jvms.flood, "printed", &format!("{FLOOD_WORDS} {FLOOD_LONG} {words}"));
    let beside = print_times(&format!("{client}, nine beside the flood"), &jvms.run_small(&words));
    print_tickets(&worker, client);
    let flood = finish(&mut jvms.flood);
    let flooded = flood["seconds"].as_f64().unwrap_or_default();
    say(&format!(
        "{client}: {:.2} times; the flood had {} rounds in {flooded:.1} s",
        beside / alone,
        flood["rounds"]
    ));
    assert!(flooded > beside, "the flood ended before the small jobs");
    worker.assert_clean();
    worker.assert_no_error_logged();
    worker.stop();
    drop((jvms, turn));
    assert!(
        beside <= SLOWDOWN_MAX * alone,
        "small jobs took {beside:.1} s beside the flood and {alone:.1} s without it"
    );
}

#[test]
#[ignore = "takes minutes, and its figures mean nothing on a machine that does something else"]
fn flood_over_grpc_slows_small_apps_within_bound() {
    run("fairness-grpc", "GRPC");
}

#[test]
#[ignore = "takes minutes, and its figures mean nothing on a machine that does something else"]
fn flood_over_tcp_slows_small_apps_within_bound() {
    run("fairness-tcp", "GRPC_NETTY");
}
