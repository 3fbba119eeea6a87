//! What the tests of the workspace share. Nothing here knows what a test is about: no expectations, only means, and
//! every wait has a deadline.
//!
//! | a test of | takes |
//! | --- | --- |
//! | disks that fail, lose power or fill up | [`fault::FaultDisk`] over [`memory_disk::MemoryDisk`] |
//! | directories of which the claim is damaged | [`claims`] |
//! | HDFS without Java | [`fake_fs::FakeFs`] |
//! | the service over memory and tiers, with faults or paused time | [`service::ServiceBuilder`] |
//! | a worker in this process, and the text of configurations | [`config::Lines`] |
//! | a worker process as a user starts it | [`worker::Worker`], [`clients`] of it, [`metrics::Metrics`] |
//! | what survives kills, stops and upgrades | [`checker::Checker`] |
//! | whether everything that clients were told still holds | [`judge::verify`], through [`in_process::InProcess`] or a real client, with [`on_disk`] to know what there is |
//! | the embedded or another coordinator | [`coordinator::CoordinatorDouble`] |
//! | real clients | [`spark::Jvm`], [`hdfs::MiniHdfs`], both built by [`maven`] |
//! | blocks that another process can verify | [`block_generator::BlockGenerator`] |
//! | what real clients once said | [`replay::Recorder`], [`replay::Player`], of files that [`recording`] reads and writes |
//! | an object store that fails on purpose | [`object_fault::FaultyObjects`] |
//! | what a tier is | [`third_tier::ThirdTier`], which a worker is started with |
//! | stores that speak S3, with faults or as a real server | [`s3::S3Server`], [`s3::weed::Weed`] |
//! | spans | [`otlp::Receiver`] |
//! | components that need a port told, or kept while a worker is away | [`ports::free_port`], [`ports::KeptPort`] |
//!
//! Unit tests of the server's crate take the disks only: this crate links the server as other crates see it, so its
//! types are not those of a unit test. What needs a whole service belongs into `tests/contract`.

#![allow(
    clippy::panic,
    clippy::print_stderr,
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a fixture that cannot do its work fails the test and shows what it knows"
)]

pub mod block_generator;
pub mod checker;
pub mod claims;
pub mod clients;
pub mod config;
pub mod coordinator;
pub mod fake_fs;
pub mod fault;
pub mod hdfs;
pub mod in_process;
pub mod judge;
pub mod maven;
pub mod memory_disk;
pub mod metrics;
pub mod object_fault;
pub mod on_disk;
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

/// A wait that takes longer is told even though it ends well: it is time of every run of the tests.
const LONG_WAIT: Duration = Duration::from_secs(2);

/// Polls `look` until it gives a value. Panics with `what` and what `look` last complained of when time is up.
pub fn wait_until<T>(what: &str, deadline: Duration, mut look: impl FnMut() -> Result<T, String>) -> T {
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

/// What happens behind an answer (purges, flushes) is done within milliseconds; a busy machine gets time.
const SETTLE_DEADLINE: Duration = Duration::from_secs(20);

/// [`wait_until`] for what happens in this process.
pub async fn eventually<T>(what: &str, mut look: impl FnMut() -> Result<T, String>) -> T {
    let start = Instant::now();
    loop {
        match look() {
            Ok(value) => return value,
            Err(complaint) if start.elapsed() > SETTLE_DEADLINE => panic!("{what}: not yet: {complaint}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(2)).await,
        }
    }
}

/// [`eventually`] where time is paused and not to go on meanwhile: it lets others run, and its own time is that of the machine.
#[expect(clippy::disallowed_types, reason = "a clock that stands still brings no deadline")]
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
                panic!("{what}: not within {deadline:?}: {complaint}")
            }
            Err(_) => tokio::task::yield_now().await,
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "no runtime here: the thread waits for another process")]
fn pause(duration: Duration) {
    std::thread::sleep(duration);
}

/// A line that is seen even when the test passes and its output is captured.
pub fn say(line: &str) {
    drop(writeln!(std::io::stderr(), "{line}"));
}
