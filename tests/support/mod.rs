//! What the tests with real components share: a worker process of its own, its metrics, the Spark application.
//!
//! A test binary takes this with `mod support;` and need not use all of it. Nothing here knows what a test is about:
//! no expectations, only means, and every wait has a deadline. The worker is the binary as a user starts it, with a
//! configuration file and ports that the system chose.

#![allow(dead_code, reason = "each test binary takes what it needs")]
#![allow(clippy::panic, reason = "to panic is how a test fails")]
#![allow(clippy::print_stderr, reason = "what a failed test has to show")]

pub(crate) mod checker;
pub(crate) mod clients;
pub(crate) mod hdfs;
pub(crate) mod maven;
pub(crate) mod metrics;
pub(crate) mod otlp;
pub(crate) mod ports;
pub(crate) mod spark;
pub(crate) mod worker;

use std::io::Write as _;
use std::time::Duration;

use tokio::time::Instant;

/// The load generator as `cargo test` at the top builds it, beside the binary of this test.
pub(crate) fn bench_binary() -> std::path::PathBuf {
    let test = std::env::current_exe().expect("a test knows where it is");
    let target = test.ancestors().nth(2).expect("it is in deps/ of a profile's directory");
    let binary = target.join("uniffle-bench");
    assert!(binary.exists(), "uniffle-bench is missing; build it with `cargo build --package uniffle-bench`");
    binary
}

/// A wait that takes longer is told even though it ends well: it is time of every run of the tests.
const LONG_WAIT: Duration = Duration::from_secs(2);

/// Polls `look` until it gives a value. Panics with `what` and what `look` last complained of when time is up.
pub(crate) fn wait_until<T>(
    what: &str,
    deadline: Duration,
    mut look: impl FnMut() -> Result<T, String>,
) -> T {
    let start = Instant::now();
    let mut last_complaint = String::new();
    loop {
        match look() {
            Ok(value) => {
                if start.elapsed() > LONG_WAIT {
                    let seconds = start.elapsed().as_secs_f32();
                    say(&format!("{what}: only after {seconds:.1} s, before it was: {last_complaint}"));
                }
                return value;
            }
            Err(complaint) if start.elapsed() > deadline => {
                panic!("{what}: not within {deadline:?}: {complaint}")
            }
            Err(complaint) => last_complaint = complaint,
        }
        pause(Duration::from_millis(20));
    }
}

#[expect(clippy::disallowed_methods, reason = "no runtime here: the thread waits for another process")]
fn pause(duration: Duration) {
    std::thread::sleep(duration);
}

/// A line that is seen even when the test passes and its output is captured.
pub(crate) fn say(line: &str) {
    drop(writeln!(std::io::stderr(), "{line}"));
}

/// Whether the pipeline runs: then a missing component is a failure and not a reason to skip.
pub(crate) fn in_ci() -> bool {
    std::env::var("CI").is_ok_and(|value| value == "true")
}
