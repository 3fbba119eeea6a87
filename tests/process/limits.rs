//! System limits for the process, foreign children, and a paused process.

use std::io::Write as _;
use std::net::TcpStream;
use std::process::{Command, Output};
use std::time::Duration;

use rustix::process::{Signal, getuid};
use tokio::task::block_in_place;
use uniffle_testkit::tools::lacking;
use uniffle_testkit::wait_until;
use uniffle_testkit::worker::{Setup, WorkerProcess};
use uniffle_worker::config::{SystemLimits, raise_soft_limits};

use crate::writes::{Written, client_of, key, local};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// Returns a wrapper that runs shell commands and then executes the worker.
fn shell(commands: &str) -> Vec<String> {
    vec!["sh".to_owned(), "-c".to_owned(), format!("{commands}\nexec \"$0\" \"$@\"")]
}

/// Returns the soft and the hard descriptor limit of a process.
fn descriptors_of(pid: u32) -> (u64, u64) {
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let mut values = line.split_whitespace().map(|value| value.parse().unwrap());
    (values.next().unwrap(), values.next().unwrap())
}

#[test]
fn descriptor_soft_limit_is_raised_to_hard_limit() {
    let worker = WorkerProcess::start(&Setup { wrapper: shell("ulimit -Sn 300"), ..Setup::default() });
    let (soft, hard) = descriptors_of(worker.pid());
    assert_eq!(soft, hard);
    worker.stop();
}

#[test]
fn health_responds_when_descriptors_are_exhausted() {
    raise_soft_limits();
    if SystemLimits::read().descriptors.is_some_and(|limit| limit.value < 4096) {
        return lacking("a worker that runs out of descriptors", "this test needs 4096 descriptors itself");
    }
    let setup = Setup {
        wrapper: shell("ulimit -n 1024"),
        tables: "[grpc]\nmax_connections = 3000\n[tcp]\nmax_connections = 3000",
        disks: 2,
        ..Setup::default()
    };
    let worker = WorkerProcess::start(&setup);
    let log = worker.log();
    assert!(log.contains("RLIMIT_NOFILE is 1024") && log.contains("tcp.max_connections"), "{log}");
    let (grpc, tcp) = (worker.ready().grpc_port, worker.ready().urpc_port.unwrap());
    let mut open = Vec::new();
    for number in 0..1400 {
        let mut stream = TcpStream::connect(local(if number % 2 == 0 { grpc } else { tcp })).unwrap();
        if number % 2 == 0 {
            // May be closed already, in favour of a later connection.
            let _ = stream.write_all(PREFACE);
        }
        open.push(stream);
    }
    for path in ["/health/live", "/health/ready", "/metrics"] {
        worker.page(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    }
    let log = worker.log();
    assert!(!log.contains("cannot accept connections"), "{log}");
    drop(open);
    worker.stop();
}

/// Runs the binary with a limit of `threads` threads; as root, under an unused user without
/// privileges.
fn with_threads(threads: u32, arguments: &[&str]) -> Output {
    let state = tempfile::tempdir().unwrap();
    let limit = format!("--nproc={threads}");
    let other = ["setpriv", "--reuid=54321", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"];
    let limited = ["prlimit", &limit, env!("CARGO_BIN_EXE_uniffle-worker")];
    let line = if getuid().is_root() { [&other[..], &limited].concat() } else { limited.to_vec() };
    let mut command = Command::new(line[0]);
    command.args(&line[1..]).args(arguments);
    command.env("XDG_STATE_HOME", state.path()).env_remove("WORKER_CONFIG_PATH").output().unwrap()
}

#[test]
fn start_without_threads_names_limit_and_key() {
    for (arguments, code) in [(&["--check"][..], 2), (&["--check", "--here"], 2), (&[], 1)] {
        let output = with_threads(6, arguments);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {text}");
        for part in ["runtime_config.worker_threads: ", " threads are needed", "RLIMIT_NPROC is 6"] {
            assert_eq!(text.matches(part).count(), 1, "{part}: {text}");
        }
        let skipped = text.contains("were not examined for lack of threads");
        assert_eq!(skipped, arguments.contains(&"--here"), "{text}");
        assert!(!text.contains("panicked"), "{text}");
    }
}

#[test]
fn capacity_beyond_memory_is_refused_with_both_values() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.toml");
    std::fs::write(&file, "[memory_store]\ncapacity = \"15TiB\"\n").unwrap();
    for (arguments, code) in [(&["--check"][..], 2), (&[], 1)] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_uniffle-worker"));
        let output = command.args(arguments).arg("-c").arg(&file).env("XDG_STATE_HOME", dir.path()).output();
        let output = output.unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{text}");
        let named = text.contains("memory_store.capacity: ") && text.contains("15.0 TiB");
        assert!(named && text.contains("must be at most"), "{text}");
    }
}

#[test]
fn check_names_limits_of_file_size_and_data() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.toml");
    let paths = format!("data_paths = [{:?}]", dir.path().join("data").display().to_string());
    std::fs::write(&file, format!("[memory_store]\ncapacity = \"64MiB\"\n[localfile_store]\n{paths}\n"))
        .unwrap();
    for (limit, parts) in [
        ("--fsize=0", ["localfile_store.data_paths: ", "RLIMIT_FSIZE is 0 B"]),
        ("--data=104857600", ["memory_store.capacity: ", "RLIMIT_DATA (ulimit -d, LimitDATA=) is 100.0 MiB"]),
    ] {
        for (arguments, code) in [(&["--check"][..], 2), (&[], 1)] {
            let mut command = Command::new("prlimit");
            command.args([limit, env!("CARGO_BIN_EXE_uniffle-worker")]).args(arguments).arg("-c").arg(&file);
            let output = command.env("XDG_STATE_HOME", dir.path()).output().unwrap();
            let text = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(code), "{limit} {arguments:?}: {text}");
            for part in parts {
                assert!(text.contains(part), "{part}: {text}");
            }
        }
    }
}

#[test]
fn orphaned_child_is_reaped() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pid");
    // Like an orphan in a container: a child of the process that executes the worker, unknown to
    // the worker.
    let commands = format!("sleep 3 & echo $! > {}", file.display());
    let worker = WorkerProcess::start(&Setup { wrapper: shell(&commands), ..Setup::default() });
    let child: u32 = std::fs::read_to_string(file).unwrap().trim().parse().unwrap();
    wait_until(
        "the child has ended and is reaped",
        Duration::from_secs(60),
        || match std::fs::read_to_string(format!("/proc/{child}/stat")) {
            Ok(stat) => Err(stat),
            Err(_) => Ok(()),
        },
    );
    worker.stop();
}

/// Longer than the timeouts of [`app_survives_pause_of_the_process`].
const PAUSE: &str = "12";

#[tokio::test(flavor = "multi_thread")]
async fn app_survives_pause_of_the_process() {
    let setup = Setup {
        tables: "[app_config]\napp_heartbeat_timeout_min = \"10s\"\n[embedded_coordinator]\nnode_timeout_sec = 5",
        ..Setup::default()
    };
    let worker = WorkerProcess::start(&setup);
    let client = client_of(&worker).await;
    let mut written = Written::register(&client, key("app", 0), 5).await;
    written.task(&client, 1, 1000).await.unwrap();
    block_in_place(|| {
        worker.signal(Signal::STOP);
        // A shorter pause would make the test pass vacuously.
        assert!(Command::new("sleep").arg(PAUSE).status().unwrap().success());
        worker.signal(Signal::CONT);
        worker.wait_log("the process was paused");
    });
    written.assert_readable(&client).await;
    let paused = worker.metrics().expect("runtime_paused_seconds_total");
    assert!(paused > 10.0, "{paused}");
    let log = worker.log();
    assert!(
        !log.contains("node is lost") && !log.contains("application expired without a heartbeat"),
        "{log}"
    );
    written.task(&client, 2, 1000).await.expect("a send with the old assignment failed");
    block_in_place(|| worker.stop());
}
