//! Logs of a worker process: the audit log, repeated lines, and a pipe that nobody reads.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::Command;

use uniffle_client::grpc::ShuffleClient;
use uniffle_client::send::SendForm;
use uniffle_testkit::wait_until;
use uniffle_worker::proto::{AppHeartBeatRequest, ShuffleRegisterRequest, StatusCode};

use super::tools::Load;
use crate::kept_memory::{NEVER_FLUSHED, SmallTmpfs};
use crate::writes::{Written, client_of, key};
use uniffle_testkit::worker::{Setup, WorkerProcess};

/// Returns the text of the file in `directory` with the prefix `name`.
fn file(directory: &Path, name: &str) -> String {
    let mut entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let path = entries.find(|path| path.file_name().unwrap().to_str().unwrap().starts_with(name));
    std::fs::read_to_string(path.unwrap_or_else(|| panic!("there is no file {name}*"))).unwrap()
}

#[test]
fn audit_log_names_registered_and_removed_apps() {
    let directory = tempfile::tempdir().unwrap();
    let more = format!("[log]\npath = {:?}\nformat = \"json\"\nrotation = \"Never\"", directory.path());
    // The filter applies to the ordinary log, not to the audit log.
    let worker = WorkerProcess::start(&Setup {
        made_tables: more,
        env: vec![("RUST_LOG", "warn".to_owned())],
        ..Setup::default()
    });
    Load::start(&worker, "5MB", 1).finish();
    worker.assert_clean();
    worker.stop();
    let audit = file(directory.path(), "uniffle-audit");
    let lines: Vec<serde_json::Value> =
        audit.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let has = |message: &str| {
        lines.iter().any(|line| {
            line["message"] == message
                && line["app"].as_str().is_some_and(|app| app.starts_with("uniffle-bench"))
        })
    };
    assert!(has("registered") && has("unregistered"), "{audit}");
    assert!(lines.iter().all(|line| line["target"] == "audit"), "{audit}");
    assert_eq!(file(directory.path(), "uniffle-worker"), "", "warnings were logged");
}

/// Hundreds of requests with two kinds of errors, over both listeners, produce six lines.
#[test]
fn repeated_client_errors_are_logged_a_few_times() {
    let directory = tempfile::tempdir().unwrap();
    let worker = WorkerProcess::start(&Setup {
        made_tables: format!("[log]\npath = {:?}\nrotation = \"Never\"", directory.path()),
        ..Setup::default()
    });
    let ready = worker.ready();
    let (grpc, urpc) = (ready.grpc_port, ready.urpc_port.unwrap());
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let client = ShuffleClient::connect(([127, 0, 0, 1], grpc).into()).await.unwrap();
        for _ in 0..100 {
            let app_id = "../x\nWARN nothing is left".to_owned();
            let request = ShuffleRegisterRequest { app_id, ..Default::default() };
            let answer = client.raw().register_shuffle(request).await.unwrap().into_inner();
            assert_eq!(answer.status(), StatusCode::InvalidRequest);
            // An expected error: the application has expired.
            let late = AppHeartBeatRequest { app_id: "gone".to_owned() };
            let answer = client.raw().app_heartbeat(late).await.unwrap().into_inner();
            assert_eq!(answer.status(), StatusCode::NoRegister);
        }
    });
    for _ in 0..100 {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", urpc)).unwrap();
        // A frame of an unknown type.
        stream.write_all(&[0, 0, 0, 8, 99, 0, 0, 0, 0]).unwrap();
        assert!(!matches!(stream.read(&mut [0; 1]), Ok(1..)), "the worker must close the connection");
    }
    worker.stop();
    let log = file(directory.path(), "uniffle-worker");
    let count = |kind: &str| log.lines().filter(|line| line.contains(kind)).count();
    assert_eq!(count("kind=\"invalid value\""), 3, "{log}");
    assert_eq!(count("kind=\"malformed request\""), 3, "{log}");
    assert_eq!(count("WARN"), 6, "{log}");
}

/// Loads `worker` until it drops log lines.
fn drop_lines(worker: &WorkerProcess) {
    let dropped = || worker.metrics().total("log_lines_dropped_total").unwrap();
    let before = dropped();
    while dropped() == before {
        Load::start(worker, "5MB", 1).finish();
    }
}

/// Reads from a pipe until `text` was read.
fn read_until(pipe: &mut File, text: &str) {
    let (mut read, mut chunk) = (Vec::new(), vec![0; 64 << 10]);
    while !String::from_utf8_lossy(&read).contains(text) {
        let length = pipe.read(&mut chunk).unwrap();
        read.extend_from_slice(&chunk[..length]);
    }
}

/// Like a stopped log driver or journald: stdout and stderr share one pipe, which is full.
#[test]
fn worker_serves_upgrades_and_stops_with_blocked_log() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    let mut pipe = File::options().read(true).write(true).open(&path).unwrap();
    let line = format!("exec \"$@\" > {} 2>&1", path.display());
    let mut worker = WorkerProcess::start(&Setup {
        wrapper: ["bash", "-c", &line, "bash"].map(str::to_owned).to_vec(),
        env: vec![("RUST_LOG", "trace".to_owned())],
        ..Setup::default()
    });
    drop_lines(&worker);
    assert!(worker.page("/health/live").is_ok());
    worker.begin_upgrade();
    worker.finish_upgrade();
    drop_lines(&worker);
    read_until(&mut pipe, "log lines were dropped");
    drop_lines(&worker);
    worker.stop();
}

/// Number of shuffles with a batch each, which a full disk refuses.
const SHUFFLES: i32 = 100;

/// Hundreds of failed batches have one cause, so they take a few lines.
#[test]
fn full_disk_is_logged_a_few_times() {
    let directory = tempfile::Builder::new().prefix("uniffle-worker-test-").tempdir().unwrap();
    let Some(disk) = SmallTmpfs::mount(directory.path(), "64m") else { return };
    let tables = format!("{NEVER_FLUSHED}[admin]\nport = 0\n");
    let setup =
        Setup { name: "full disk", capacity: "64M", tables: Box::leak(tables.into()), ..Setup::default() };
    let home = tempfile::Builder::new().prefix("uniffle-worker-test-").tempdir().unwrap();
    let mut worker = WorkerProcess::start_in(&setup, home, vec![disk.path().join("data")]);
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let client = client_of(&worker).await;
        for shuffle in 0..SHUFFLES {
            let written = Written::register(&client, key("app", shuffle), 1).await;
            let batch = written.batch(0, 14 << 10);
            client.push(&written.key, SendForm::Classic, &batch).await.expect("a send to memory failed");
        }
    });
    disk.fill();
    let url = format!("http://127.0.0.1:{}/admin/flush", worker.ready().admin_port.unwrap());
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let answer = reqwest::Client::new().post(url).send().await.unwrap();
        assert!(answer.status().is_success(), "{}", answer.status());
    });
    wait_until("every batch has failed", std::time::Duration::from_secs(120), || {
        let failed = worker.metrics().total("total_memory_to_localfile_spill_failed");
        if failed >= Some(f64::from(3 * SHUFFLES)) { Ok(()) } else { Err(format!("{failed:?}")) }
    });
    let log = worker.log();
    let lines = log.lines().filter(|line| line.contains("batch was not written"));
    let lines = lines.filter(|line| !line.contains("suppressed")).count();
    // Five a minute.
    assert!((1..=20).contains(&lines), "{} failures caused {lines} log lines: {log}", 3 * SHUFFLES);
    worker.kill();
}
