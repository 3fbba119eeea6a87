//! Replays recorded sessions of real clients (`*.rec`, see README.md in this folder).
//!
//! Each session runs twice: with all blocks in memory, and with everything spilled. `record_spark`
//! records the four sessions of client 0.9.2 again (needs Java and Maven): `cargo test --test
//! contract -- --ignored --nocapture record_spark`. README.md says how the others were made.

mod record;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::{Instant, sleep};
use uniffle_testkit::config::ConfigLines;
use uniffle_testkit::recording::{Plane, RecordedSession};
use uniffle_testkit::replay::{Player, ReplaySummary};
use uniffle_testkit::say;
use uniffle_worker::server::Worker;

const RECORDINGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/contract/replay");
/// All recordings in this folder. A new one is added here.
const NAMES: [&str; 12] = [
    "spark-3.5.6-client-0.10.0-grpc-local.rec",
    "spark-3.5.6-client-0.10.0-grpc-memory.rec",
    "spark-3.5.6-client-0.10.0-tcp-local.rec",
    "spark-3.5.6-client-0.10.0-tcp-memory.rec",
    "spark-3.5.6-client-0.9.2-grpc-local.rec",
    "spark-3.5.6-client-0.9.2-grpc-memory.rec",
    "spark-3.5.6-client-0.9.2-tcp-local.rec",
    "spark-3.5.6-client-0.9.2-tcp-memory.rec",
    "spark-4.1.1-client-master-grpc-local.rec",
    "spark-4.1.1-client-master-grpc-memory.rec",
    "spark-4.1.1-client-master-tcp-local.rec",
    "spark-4.1.1-client-master-tcp-memory.rec",
];
/// Limit for the size of all recordings, which are in Git. Git stores their common parts once.
const RECORDINGS_BYTES_MAX: usize = 1_700_000;
/// Purges continue after the response to an unregistration.
const CLEAN_DEADLINE: Duration = Duration::from_secs(10);

const MEMORY: &str = "";
/// The flusher spills everything as soon as it arrives.
const SPILLING: &str =
    "[hybrid_store]\nmemory_spill_high_watermark = 0.000001\nmemory_spill_low_watermark = 0.0\n";

/// A worker in this process with a temporary data directory.
struct Server {
    worker: Worker,
    _dir: tempfile::TempDir,
}

impl Server {
    async fn start(tables: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let lines = ConfigLines { capacity: "64MiB", top: "urpc_port = 0", tables, ..ConfigLines::default() };
        Self { worker: lines.start(&[dir.path()]).await, _dir: dir }
    }

    fn addresses(&self) -> (SocketAddr, SocketAddr) {
        let local = |address: SocketAddr| SocketAddr::from((Ipv4Addr::LOCALHOST, address.port()));
        let addresses = self.worker.addresses();
        (local(addresses.grpc), local(addresses.tcp.unwrap()))
    }

    /// Waits until no memory is in use, and stops.
    async fn stop_clean(self) {
        let start = Instant::now();
        loop {
            let used = self.worker.memory().budget().used();
            if used == 0 {
                break;
            }
            assert!(start.elapsed() < CLEAN_DEADLINE, "{used} bytes are in use after the session");
            sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(self.worker.stop().await, 0, "tasks are still running");
    }
}

async fn replay(session: &RecordedSession, tables: &str) -> Result<ReplaySummary, String> {
    let server = Server::start(tables).await;
    let (grpc, tcp) = server.addresses();
    let player = Player::connect(grpc, tcp).await.expect("cannot connect to the worker");
    let played = player.play(session).await;
    if played.is_ok() {
        server.stop_clean().await;
    }
    played
}

fn recordings() -> Vec<(PathBuf, RecordedSession)> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(RECORDINGS)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "rec"))
        .collect();
    paths.sort();
    assert_eq!(
        paths.iter().map(|path| name(path)).collect::<Vec<_>>(),
        NAMES,
        "the recordings in {RECORDINGS} differ from NAMES"
    );
    let read = |path: PathBuf| {
        let file = std::fs::read(&path).unwrap();
        let session =
            RecordedSession::decode(file).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        (path, session)
    };
    paths.into_iter().map(read).collect()
}

fn name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).expect("the name is UTF-8")
}

/// Returns whether the recorded session read blocks from disk.
fn is_of_disk(path: &Path) -> bool {
    name(path).ends_with("-local.rec")
}

fn show(path: &Path, session: &RecordedSession, summary: &ReplaySummary) {
    say(&format!("{}: {}: {summary:?}", path.display(), session.title));
}

#[tokio::test(flavor = "multi_thread")]
async fn recorded_sessions_replay_in_memory() {
    for (path, session) in recordings() {
        let summary = replay(&session, MEMORY).await;
        let summary = summary.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        show(&path, &session, &summary);
        // AQE splits the skewed join, whose readers then filter by task attempt.
        assert!(summary.filtered_reads > 0, "the skewed join was not split: {summary:?}");
        assert!(summary.blocks_sent > 0 && summary.from_memory + summary.caught_up > 0, "{summary:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn recorded_sessions_replay_with_everything_spilled() {
    for (path, session) in recordings() {
        let summary = replay(&session, SPILLING).await;
        let summary = summary.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        show(&path, &session, &summary);
        assert!(summary.blocks_sent > 0, "{}: {summary:?}", path.display());
        assert!(summary.from_disk > 0 || !is_of_disk(&path), "{}: {summary:?}", path.display());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_block_fails_the_replay() {
    let (_, session) = recordings().remove(0);
    let is_send = |path: &str| path.ends_with("/sendShuffleData");
    let mut lossy = session.clone();
    let send = lossy
        .exchanges
        .iter()
        .position(|exchange| matches!(&exchange.plane, Plane::Grpc { path, .. } if is_send(path)));
    // Simulates a worker that acknowledged a send and lost it.
    lossy.exchanges.remove(send.expect("the first recording has sends over gRPC"));
    let error = replay(&lossy, MEMORY).await.expect_err("a replay with missing blocks must fail");
    assert!(error.contains("never sent") || error.contains("not read"), "{error}");
}

#[test]
fn recordings_are_small() {
    let bytes: usize = recordings().iter().map(|(_, session)| session.encode().len()).sum();
    assert!(bytes <= RECORDINGS_BYTES_MAX, "the recordings have {bytes} bytes");
}
