//! Runs each sub-command of `uniffle-bench` at a small scale against a worker process, and checks
//! its errors.
//!
//! Measured values are not asserted, only that they exist. Every byte is compared, and a failure is
//! one line and a non-zero exit code.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::thread::spawn;
use std::time::Duration;

use serde_json::Value;
use socket2::{Domain, Socket, Type};
use uniffle_testkit::wait_until;
use uniffle_testkit::worker::{Setup, WorkerProcess};

/// A worker with 64 MB of memory, so that part of 100 MB goes to disk.
fn worker(name: &'static str) -> WorkerProcess {
    WorkerProcess::start(&Setup { name, capacity: "64MB", ..Setup::default() })
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_uniffle-bench"));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn bench(args: &[&str]) -> Output {
    command(args).output().expect("the bench was built with this test")
}

/// Runs with `--json` and returns the report.
fn run_report(args: &[&str]) -> Value {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().expect("paths of temporary directories are UTF-8");
    let output = bench(&[args, &["--json", path]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {stderr}");
    assert!(!output.stdout.is_empty(), "{args:?} printed nothing");
    serde_json::from_slice(&std::fs::read(path).expect("the result file exists")).expect("the result is JSON")
}

/// Asserts exit code 1 and a single line that contains `expected`.
fn assert_fails_with(output: &Output, expected: &str) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    let lines: Vec<&str> = stderr.lines().filter(|line| line.starts_with("uniffle-bench: ")).collect();
    assert_eq!(lines.len(), 1, "{stderr}");
    assert!(lines[0].contains(expected), "{expected:?} is missing: {:?}", lines[0]);
    assert!(!stderr.contains("panicked"), "{stderr}");
}

/// Returns the sum of a counter over all phases of all runs.
fn sum(report: &Value, counter: &str) -> u64 {
    let runs = report["runs"].as_array().unwrap();
    let phases = runs.iter().flat_map(|run| run["phases"].as_array().unwrap());
    phases.map(|phase| phase[counter].as_u64().unwrap()).sum()
}

#[test]
fn written_blocks_are_read_from_memory_and_disk() {
    let worker = worker("bench-read");
    let port = worker.ready().grpc_port.to_string();
    let report = run_report(&[
        "read",
        "--port",
        &port,
        "--bytes",
        "100MB",
        "--message-size",
        "2MiB",
        "--partitions",
        "50",
        "--blocks",
        "spark-mix",
        "--tasks",
        "7",
        "--skew",
        "0.5",
    ]);
    assert!(sum(&report, "written_bytes") >= 100_000_000);
    let (memory, disk) = (sum(&report, "blocks_from_memory"), sum(&report, "blocks_from_disk"));
    assert_eq!(memory + disk, sum(&report, "blocks_written"));
    assert!(disk > 0, "100 MB fit into 64 MB of memory");
    let phase = &report["runs"][0]["phases"][0];
    assert!(phase["server"]["cpu_seconds"].as_f64().expect("the process of the server was not found") > 0.0);
    assert!(phase["latencies"].as_array().is_some_and(|calls| calls.len() >= 4));
    worker.assert_clean();
    worker.assert_no_error_logged();
}

#[test]
fn other_transports_and_modes_work() {
    let worker = worker("bench-modes");
    let port = worker.ready().grpc_port.to_string();
    let small = ["--port", &port, "--bytes", "8MB", "--message-size", "256KiB", "--partitions", "20"];
    let run = |args: &[&str]| run_report(&[args, &small].concat());

    let report = run(&["write", "--replicas", "2", "--rounds", "2"]);
    assert!(sum(&report, "written_bytes") >= 32_000_000);
    // Contiguous: gRPC sends whose payload is in one piece.
    let report = run(&["read", "--transport", "contiguous", "--blocks", "tiny", "--tier", "memory"]);
    assert_eq!(sum(&report, "blocks_from_memory"), sum(&report, "blocks_written"));
    run(&["read", "--replicas", "2", "--local-order", "--reads", "1.5"]);
    let tcp_port = worker.ready().urpc_port.expect("the TCP listener is open").to_string();
    let report = run(&["read", "--transport", "tcp", "--tcp-port", &tcp_port]);
    assert!(sum(&report, "read_bytes") >= 8_000_000);
    let report = run(&["mixed", "--rounds", "2"]);
    assert!(sum(&report, "read_bytes") >= sum(&report, "written_bytes"));
    run(&["write", "--duration", "1s", "--rate", "4MB"]);
    let report = run(&["compare", "--b-transport", "contiguous", "--turns", "1"]);
    assert!(report["comparison"].as_array().is_some_and(|lines| lines.len() >= 4), "{report}");
    let recording = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/contract/replay/spark-3.5.6-client-0.9.2-tcp-local.rec"
    );
    let recorded = ["read", "--port", &port, "--shape", recording, "--executors", "3", "--bytes", "4MB"];
    assert!(sum(&run_report(&recorded), "written_bytes") >= 4_000_000);
    let report = run(&["latency"]);
    let phases = report["runs"][0]["phases"].as_array().unwrap();
    assert_eq!(phases.len(), 8, "expected writes and reads at four loads");
    assert!(sum(&report, "read_bytes") >= 25_000_000, "{report}");
    for preset in ["scale", "terasort", "tpcds-stress"] {
        let report = run_report(&[preset, "--port", &port, "--size", "0.004", "--connections", "2"]);
        assert!(sum(&report, "written_bytes") > 0, "{preset}");
    }
    worker.assert_clean();
    worker.assert_no_error_logged();
}

#[test]
fn report_page_and_baselines_are_created() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| {
        dir.path().join(name).to_str().expect("paths of temporary directories are UTF-8").to_owned()
    };
    let page = path("page.html");
    let here = dir.path().to_str().expect("paths of temporary directories are UTF-8");
    let report = run_report(&["baseline", "--bytes", "16MB", "--dir", here, "--html", &page]);
    assert!(report["floor"].as_array().is_some_and(|lines| lines.len() >= 5));
    let text = std::fs::read_to_string(&page).expect("the page was not written");
    assert!(text.starts_with("<!doctype html>") && text.contains("<svg"));
    let report = run_report(&["hdd", "--bytes", "8MiB", "--partitions", "20,200"]);
    assert!(report["hdd"].as_array().is_some_and(|lines| lines.len() == 4));
    assert_fails_with(&bench(&["baseline", "--dir", &path("missing")]), "is not a directory");
    assert_fails_with(&bench(&["write", "--html", "/nowhere/page.html"]), "cannot write");
}

#[test]
fn unreachable_or_wrong_server_is_reported() {
    // Bound, so that no other process uses the port, but without a listener.
    let closed = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    closed.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let closed_port =
        closed.local_addr().ok().and_then(|address| address.as_socket()).expect("the socket is bound").port();
    assert_fails_with(&bench(&["write", "--port", &closed_port.to_string()]), "Connection refused");
    let worker = worker("bench-wrong-port");
    let http = worker.ready().http_port.to_string();
    assert_fails_with(&bench(&["write", "--port", &http]), "does not speak gRPC on this port");
    let grpc = worker.ready().grpc_port.to_string();
    let tcp = ["write", "--port", &grpc, "--transport", "tcp"];
    assert_fails_with(&bench(&tcp), "--tcp-port");
    let wrong = ["write", "--port", &grpc, "--transport", "tcp", "--tcp-port", &http, "--bytes", "1MB"];
    assert_fails_with(&bench(&wrong), "does not speak this protocol");
    let tcp_port = worker.ready().urpc_port.expect("the TCP listener is open").to_string();
    assert_fails_with(&bench(&["write", "--port", &tcp_port]), "does not speak gRPC on this port");
    let swapped = ["write", "--port", &grpc, "--transport", "tcp", "--tcp-port", &grpc, "--bytes", "1MB"];
    assert_fails_with(&bench(&swapped), "does not speak this protocol");
    assert_fails_with(&bench(&["write", "--port", &grpc, "--server-cmd", "true"]), "is in use");
    let port = closed_port.to_string();
    assert_fails_with(&bench(&["write", "--port", &port, "--server-cmd", "false"]), "before it opened");
    assert_fails_with(&bench(&["compare", "--port", &grpc]), "the same server");
    // A peer that accepts connections and never responds.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().expect("the listener is bound").port().to_string();
    assert_fails_with(&bench(&["write", "--port", &port, "--rpc-timeout", "300ms"]), "no answer");
    worker.assert_clean();
}

/// No server runs, so a bench that connected first would fail with another text.
#[test]
fn impossible_options_are_refused_before_any_send() {
    assert_fails_with(
        &bench(&["write", "--shape", concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md")]),
        "not a recorded session",
    );
    assert_fails_with(&bench(&["write", "--connections", "90000"]), "descriptors");
    assert_fails_with(&bench(&["write", "--bytes", "1EB", "--blocks", "tiny"]), "memory");
    assert_fails_with(&bench(&["write", "--readers", "90000", "--bytes", "1PB"]), "memory");
    // Presets check their real needs: `scale` opens 112 connections.
    let few = format!("ulimit -n 128 && exec {} scale", env!("CARGO_BIN_EXE_uniffle-bench"));
    assert_fails_with(&Command::new("/bin/sh").args(["-c", &few]).output().expect("sh runs"), "descriptors");
    assert_fails_with(&bench(&["scale", "--size", "2"]), "--size");
}

#[test]
fn killed_server_ends_the_run() {
    for transport in ["grpc", "tcp"] {
        assert_server_death_fails(transport, &["write", "--rate", "2MB", "--bytes", "1GB"], "write failed");
        // Few bytes and many reads of them, so that no machine finishes early.
        let read = ["read", "--bytes", "4MB", "--reads", "1000", "--read-rate", "4MB"];
        assert_server_death_fails(transport, &read, "read failed");
    }
}

/// Kills the worker once the bench has stored data or reads, and asserts that the bench fails.
fn assert_server_death_fails(transport: &str, args: &[&str], expected: &str) {
    let worker = worker("bench-dies");
    let (port, tcp_port) =
        (worker.ready().grpc_port.to_string(), worker.ready().urpc_port.unwrap_or(0).to_string());
    // On a slow machine the metrics requests below keep the worker busy, so the bench must not
    // wait for it to become idle between two phases.
    let common = ["--port", &port, "--tcp-port", &tcp_port, "--message-size", "64KiB", "--settle", "0s"];
    let running: Child = command(&[args, &common, &["--transport", transport]].concat())
        .spawn()
        .expect("the bench was built with this test");
    let counter = if args[0] == "read" { "total_read_data" } else { "memory_used" };
    wait_until("the bench is at work", Duration::from_secs(60), || {
        let seen = worker.metrics().total(counter).unwrap_or(0.0);
        if seen > 0.0 { Ok(()) } else { Err(format!("{counter} is {seen}")) }
    });
    drop(worker);
    assert_fails_with(&running.wait_with_output().unwrap(), expected);
}

#[test]
fn single_wrong_byte_fails_the_run() {
    let worker = worker("bench-corrupt");
    let (grpc, tcp_port) =
        (worker.ready().grpc_port, worker.ready().urpc_port.expect("the TCP listener is open"));
    // With one connection and one reader, the corrupt byte is in a read.
    let args = [
        "read",
        "--bytes",
        "4MB",
        "--message-size",
        "1MiB",
        "--partitions",
        "4",
        "--connections",
        "1",
        "--readers",
        "1",
    ];
    let through = corrupting_proxy(grpc, 500_000).to_string();
    assert_fails_with(
        &bench(&[&args[..], &["--port", &through]].concat()),
        "differs from what was written at byte",
    );
    let (port, through) = (grpc.to_string(), corrupting_proxy(tcp_port, 500_000).to_string());
    let over_tcp = ["--port", &port, "--transport", "tcp", "--tcp-port", &through];
    assert_fails_with(&bench(&[&args[..], &over_tcp].concat()), "differs from what was written at byte");
}

/// Forwards connections to `port` and flips one bit of the byte at `corrupt_offset` of each
/// connection's responses.
fn corrupting_proxy(port: u16, corrupt_offset: usize) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let here = listener.local_addr().expect("the listener is bound").port();
    spawn(move || {
        for client in listener.incoming() {
            let client = client.unwrap();
            let upstream = TcpStream::connect(("127.0.0.1", port)).expect("the worker listens");
            let (client_again, upstream_again) = (client.try_clone().unwrap(), upstream.try_clone().unwrap());
            spawn(move || copy(client, upstream, usize::MAX));
            spawn(move || copy(upstream_again, client_again, corrupt_offset));
        }
    });
    here
}

fn copy(mut from: TcpStream, mut to: TcpStream, corrupt_offset: usize) {
    let mut buffer = vec![0; 64 << 10];
    let mut passed = 0;
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if (passed..passed + count).contains(&corrupt_offset) {
            buffer[corrupt_offset - passed] ^= 1;
        }
        passed += count;
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

#[test]
fn manuals_and_completions_are_created() {
    let dir = tempfile::tempdir().unwrap();
    let output = bench(&[
        "man",
        "--directory",
        dir.path().to_str().expect("paths of temporary directories are UTF-8"),
    ]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for page in ["uniffle-bench.1", "uniffle-bench-write.1", "uniffle-bench-compare.1"] {
        assert!(dir.path().join(page).is_file(), "{page}");
    }
    for shell in ["bash", "zsh", "fish"] {
        let text = String::from_utf8(bench(&["completions", shell]).stdout).unwrap();
        assert!(text.contains("tpcds-stress") && text.contains("message-size"), "{shell}");
    }
    assert_fails_with(&bench(&["man", "--directory", "/proc/nowhere"]), "--directory");
}
