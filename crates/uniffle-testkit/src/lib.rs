//! Test fixtures of the workspace. Only the [`checker`], the [`oracle`], the [`replay`] and the
//! checks at the end of a test have expectations of their own. Waits for a worker have a deadline.
//!
//! Unit tests of the server's crate can only use fixtures without types of the server, such as the
//! disks ([`fault`], [`memory_disk`]), the object store ([`object_fault`]) and [`captured_log`].
//! This crate links the server as an external crate, so the server's types differ from those of a
//! unit test. Tests that need a whole service belong into `tests/contract`.

#![allow(
    clippy::panic,
    clippy::print_stderr,
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a failing fixture fails the test with its details"
)]

pub mod block_generator;
pub mod captured_log;
pub mod checker;
pub mod clients;
pub mod config;
pub mod coordinator;
pub mod fake_fs;
pub mod fault;
pub mod hdfs;
pub mod in_process;
pub mod maven;
pub mod memory_disk;
pub mod metrics;
pub mod object_fault;
pub mod on_disk;
pub mod oracle;
pub mod otlp;
pub mod ports;
pub mod recording;
pub mod replay;
pub mod s3;
pub mod seeds;
pub mod service;
pub mod spark;
pub mod third_tier;
pub mod tools;
pub mod worker;

use std::io::Write as _;
use std::time::Duration;

use tokio::time::Instant;

/// [`wait_until`] prints longer waits even if they succeed, because they slow down every test run.
const LONG_WAIT: Duration = Duration::from_secs(2);

/// Polls `look` on this thread until it returns a value. Panics at the deadline with `what` and the
/// last error of `look`.
pub fn wait_until<T>(what: &str, deadline: Duration, mut look: impl FnMut() -> Result<T, String>) -> T {
    let start = Instant::now();
    let mut last_complaint = String::new();
    loop {
        match look() {
            Ok(value) => {
                if start.elapsed() > LONG_WAIT {
                    let seconds = start.elapsed().as_secs_f32();
                    say(&format!("{what}: took {seconds:.1} s; last state before: {last_complaint}"));
                }
                return value;
            }
            Err(complaint) if start.elapsed() > deadline => {
                panic!("{what}: timed out after {deadline:?}: {complaint}")
            }
            Err(complaint) => last_complaint = complaint,
        }
        pause(Duration::from_millis(20));
    }
}

/// Time limit for background work after a response (purges, flushes). It takes milliseconds; a busy
/// machine gets more time.
const SETTLE_DEADLINE: Duration = Duration::from_secs(20);

/// Polls `look` until work in this process is done. Panics after [`SETTLE_DEADLINE`], as
/// [`wait_until`] does.
pub async fn eventually<T>(what: &str, mut look: impl FnMut() -> Result<T, String>) -> T {
    let start = Instant::now();
    loop {
        match look() {
            Ok(value) => return value,
            Err(complaint) if start.elapsed() > SETTLE_DEADLINE => panic!("{what}: timed out: {complaint}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(2)).await,
        }
    }
}

/// Waits like [`eventually`] while time is paused and must not advance. Yields to other tasks and
/// measures the deadline in real time.
#[expect(clippy::disallowed_types, reason = "the deadline is in real time, also with a paused clock")]
pub async fn eventually_in_no_time<T>(
    what: &str,
    deadline: Duration,
    mut look: impl FnMut() -> Result<T, String>,
) -> T {
    let start = std::time::Instant::now();
    loop {
        match look() {
            Ok(value) => return value,
            Err(complaint) if start.elapsed() > deadline => {
                panic!("{what}: timed out after {deadline:?}: {complaint}")
            }
            Err(_) => tokio::task::yield_now().await,
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "no runtime here: the thread waits for another process")]
fn pause(duration: Duration) {
    std::thread::sleep(duration);
}

/// Prints a line that is visible even if the test passes and its output is captured.
pub fn say(line: &str) {
    drop(writeln!(std::io::stderr(), "{line}"));
}
