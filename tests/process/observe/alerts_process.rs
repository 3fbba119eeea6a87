//! Alerts about the process itself: crashes, panics, its log, and its descriptors.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, prlimit};
use tokio::task::{JoinSet, block_in_place};
use uniffle_testkit::wait_until;
use uniffle_testkit::worker::{Setup, WorkerProcess};

use super::alerts::{WAIT_MAX, Watch, is_possible};
use super::prometheus::query;
use crate::clock_steps::build_shim;
use crate::writes::{Written, client_of, key};

/// A library preloaded before libc. While a file exists, random bytes are not available, as on a
/// broken kernel. The status page then panics, because it needs a nonce. Hash maps use other flags.
const NO_RANDOM: &str = r#"
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

ssize_t getrandom(void *buffer, size_t length, unsigned flags) {
    const char *file = getenv("NO_RANDOM_FILE");
    if (length > 0 && flags == 0 && file && access(file, F_OK) == 0) {
        errno = EIO;
        return -1;
    }
    return syscall(SYS_getrandom, buffer, length, flags);
}
"#;

/// One worker crashes three times. The log of the other is not read, a handler panics, and its
/// descriptors are used up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn alerts_fire_on_crashes_panics_full_log_and_descriptors() {
    if !is_possible() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut crashing = block_in_place(|| WorkerProcess::start(&Setup::default()));
    let (failing, _pipe, no_random) = block_in_place(|| start_with_unread_log(directory.path()));
    let watch = block_in_place(|| Watch::start(&[&crashing, &failing]));
    let _sending = send_slowly(&failing).await;
    block_in_place(|| {
        panic_once(&failing, &no_random);
        crash(&mut crashing, &watch);
        watch.wait_firing(&crashing, &["UniffleWorkerRestarts"], &["UniffleWorkerDown"]);
        watch.wait_firing(&failing, &["UnifflePanics", "UniffleLogLinesDropped"], &[]);
        let _connections = use_up_descriptors(&failing);
        let others = ["UnifflePanics", "UniffleLogLinesDropped"];
        watch.wait_firing(&failing, &["UniffleDescriptorsShort"], &others);
    });
}

/// Starts a worker whose log is a pipe that nobody reads. Returns also the pipe, and the file that
/// makes random bytes unavailable.
fn start_with_unread_log(directory: &Path) -> (WorkerProcess, File, std::path::PathBuf) {
    let (path, no_random) = (directory.join("pipe"), directory.join("no-random"));
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    let pipe = File::options().read(true).write(true).open(&path).unwrap();
    let line = format!("exec \"$@\" > {} 2>&1", path.display());
    let text = |path: &Path| path.display().to_string();
    let worker = WorkerProcess::start(&Setup {
        wrapper: ["bash", "-c", &line, "bash"].map(str::to_owned).to_vec(),
        env: vec![
            ("RUST_LOG", "trace".to_owned()),
            ("LD_PRELOAD", text(&build_shim(directory, NO_RANDOM))),
            ("NO_RANDOM_FILE", text(&no_random)),
        ],
        ..Setup::default()
    });
    (worker, pipe, no_random)
}

/// Sends small blocks until the set is dropped, so that there is something to log.
async fn send_slowly(worker: &WorkerProcess) -> JoinSet<()> {
    let client = client_of(worker).await;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut written = Written::register(&client, key("app", 0), 4).await;
        for task in 0.. {
            written.task(&client, task, 1000).await.unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    tasks
}

/// Requests the status page while random bytes are not available.
fn panic_once(worker: &WorkerProcess, no_random: &Path) {
    std::fs::write(no_random, "").unwrap();
    let mut stream = TcpStream::connect(("127.0.0.1", worker.ready().http_port)).unwrap();
    stream.write_all(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n").unwrap();
    // The connection ends without an answer.
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    std::fs::remove_file(no_random).unwrap();
    let panics = worker.metrics().expect("panic_signal");
    assert_eq!(panics, 1.0, "{}", String::from_utf8_lossy(&answer));
}

/// Kills the worker and starts it again, until three starts were scraped. Each has another second
/// than the one before: the metric has no fractions.
fn crash(worker: &mut WorkerProcess, watch: &Watch) {
    let instance = format!("127.0.0.1:{}", worker.ready().http_port);
    let changes = format!("changes(process_start_time_seconds{{instance=\"{instance}\"}}[1h])");
    for times in 1..=3 {
        let second = |worker: &WorkerProcess| worker.metrics().expect("process_start_time_seconds");
        let before = second(worker);
        while second(worker) <= before {
            worker.kill();
            worker.start_again();
        }
        wait_until("the start is scraped", WAIT_MAX, || {
            let rows = query(watch.port, &changes)?;
            let seen = rows[0]["value"][1].as_str().and_then(|text| text.parse::<u32>().ok());
            if seen.is_some_and(|seen| seen >= times) { Ok(()) } else { Err(rows.to_string()) }
        });
    }
}

/// Lowers the limit of descriptors and opens connections, which leave a few.
fn use_up_descriptors(worker: &WorkerProcess) -> Vec<TcpStream> {
    const MORE: u16 = 100;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small count")]
    let open = worker.metrics().expect("process_open_fds") as u64;
    let limit = Some(open + u64::from(MORE));
    let pid = Pid::from_raw(i32::try_from(worker.pid()).unwrap());
    prlimit(pid, Resource::Nofile, Rlimit { current: limit, maximum: limit }).unwrap();
    let port = worker.ready().urpc_port.unwrap();
    (0..MORE - 8).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()).collect()
}
