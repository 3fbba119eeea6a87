//! Graceful stop (shutdown) on SIGTERM, upgrade on SIGUSR2, and inherited sockets.

use std::io::Write as _;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::task::block_in_place;
use uniffle_client::grpc::ShuffleClient;
use uniffle_client::tcp::TcpClient;
use uniffle_wire::types::PartitionId;
use uniffle_worker::runtime::Tasks;

use crate::kept_memory::{MEMFD, NEVER_FLUSHED};
use crate::writes::{Written, client_of, key, local};
use uniffle_testkit::ports::InheritedPort;
use uniffle_testkit::wait_until;
use uniffle_testkit::worker::{Setup, WorkerProcess};

/// Each attempt takes a rehearsal, a flush and a start.
const UPGRADES_DEADLINE: Duration = Duration::from_secs(120);

/// Returns the bytes of the data logs on the worker's disks.
fn data_bytes(worker: &WorkerProcess) -> u64 {
    let mut open: Vec<_> = worker.data_paths().to_vec();
    let mut bytes = 0;
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let path = entry.path();
            match path.extension() {
                Some(extension) if extension == "data" => {
                    bytes += entry.metadata().map_or(0, |file| file.len())
                }
                _ if path.is_dir() => open.push(path),
                _ => {}
            }
        }
    }
    bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn graceful_stop_flushes_memory_to_disks() {
    let mut worker =
        WorkerProcess::start(&Setup { name: "sigterm", capacity: "64M", disks: 2, ..Setup::default() });
    let client = client_of(&worker).await;
    let mut written = Written::register(&client, key("app", 0), 50).await;
    for task in 0..8 {
        written.task(&client, task, 20_000).await.unwrap();
    }
    assert_eq!(data_bytes(&worker), 0);
    block_in_place(|| worker.terminate());
    assert!(data_bytes(&worker) >= written.bytes(), "only {} bytes are on the disks", data_bytes(&worker));
    block_in_place(|| worker.start_again());
    let client = client_of(&worker).await;
    written.assert_readable(&client).await;
    written.task(&client, 100, 20_000).await.expect("the worker does not continue");
    written.assert_readable(&client).await;
    let log = worker.log();
    assert!(!log.contains(" WARN ") && !log.contains(" ERROR "), "{log}");
    client.unregister_app("app").await.unwrap();
    worker.assert_clean();
    block_in_place(|| worker.stop());
}

#[tokio::test(flavor = "multi_thread")]
async fn restart_with_other_ports_and_capacity_recovers_data() {
    let setup = Setup { name: "changed", capacity: "64M", disks: 2, ..Setup::default() };
    let mut worker = WorkerProcess::start(&setup);
    let client = client_of(&worker).await;
    let mut written = Written::register(&client, key("app", 0), 20).await;
    for task in 0..4 {
        written.task(&client, task, 50_000).await.unwrap();
    }
    let config = worker.config();
    let ports = worker.ready().clone();
    let other = config
        .replace(&format!("grpc_port = {}", ports.grpc_port), "grpc_port = 0")
        .replace(&format!("urpc_port = {}", ports.urpc_port.unwrap()), "urpc_port = 0")
        .replace("64M", "32M");
    block_in_place(|| {
        worker.terminate();
        worker.start_again_with(&other);
    });
    assert_ne!(worker.ready().grpc_port, ports.grpc_port);
    let client = client_of(&worker).await;
    written.assert_readable(&client).await;

    let gone = config.replace(&format!(", {:?}", worker.data_paths()[1]), "");
    block_in_place(|| {
        worker.terminate();
        worker.start_again_with(&gone);
        worker.wait_log("a data directory of earlier starts is missing");
    });
    let client = client_of(&worker).await;
    let mut more = Written::register(&client, key("more", 0), 5).await;
    more.task(&client, 0, 1000).await.expect("the worker does not serve");
    more.assert_readable(&client).await;
    block_in_place(|| worker.stop());
}

/// Reconnects until [`Reconnecting::end`]; no attempt may be refused.
struct Reconnecting {
    stop: Arc<AtomicBool>,
    connected: Arc<AtomicU64>,
    knocker: Option<std::thread::JoinHandle<()>>,
}

impl Reconnecting {
    fn at(port: u16) -> Self {
        let (stop, connected) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, count) = (Arc::clone(&stop), Arc::clone(&connected));
        let knocker = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                TcpStream::connect(local(port)).expect("a connection was refused");
                count.fetch_add(1, Ordering::Relaxed);
                std::thread::yield_now();
            }
        });
        Self { stop, connected, knocker: Some(knocker) }
    }

    fn end(mut self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.knocker.take().unwrap().join().expect("a connection was refused");
        self.connected.load(Ordering::Relaxed)
    }
}

/// Bound on the time between the listeners of two processes with a few MB in memory. It takes
/// milliseconds, more on a busy machine.
const UPGRADE_GAP_MS_MAX: u64 = 5000;

#[tokio::test(flavor = "multi_thread")]
async fn upgrade_keeps_ports_process_and_connections() {
    let mut worker =
        WorkerProcess::start(&Setup { name: "upgrade", capacity: "64M", disks: 2, ..Setup::default() });
    let client = client_of(&worker).await;
    let mut written = Written::register(&client, key("app", 0), 20).await;
    for task in 0..4 {
        written.task(&client, task, 50_000).await.unwrap();
    }
    let (tcp, driver) =
        TcpClient::connect(local(worker.ready().urpc_port.unwrap())).await.expect("cannot connect over TCP");
    let tasks = Tasks::new();
    tasks.spawn("tcp client", driver);
    tcp.read_memory(&written.key, PartitionId(0), -1, 1 << 20, None).await.unwrap();
    for round in 0..2 {
        let knocking = [worker.ready().grpc_port, worker.ready().http_port].map(Reconnecting::at);
        block_in_place(|| {
            worker.begin_upgrade();
            worker.finish_upgrade();
        });
        let connected = knocking.map(Reconnecting::end);
        assert!(connected.iter().all(|connected| *connected > 0));
        let gap_ms = worker.ready().upgrade_gap_ms.expect("the start was no upgrade");
        assert!(gap_ms <= UPGRADE_GAP_MS_MAX, "calls waited for {gap_ms} ms");
        // The same connection still works.
        tcp.read_index(&written.key, PartitionId(0)).await.unwrap();
        let client = client_of(&worker).await;
        written.assert_readable(&client).await;
        written.task(&client, 100 + round, 50_000).await.expect("the worker does not continue");
    }
    drop(tcp);
    tasks.drained().await;
    worker.assert_no_error_logged();
    block_in_place(|| worker.stop());
}

#[tokio::test(flavor = "multi_thread")]
async fn upgrade_to_unfit_configuration_is_refused() {
    let worker =
        WorkerProcess::start(&Setup { name: "refused", capacity: "64M", disks: 2, ..Setup::default() });
    let config = worker.config();
    let port = format!("grpc_port = {}", worker.ready().grpc_port);
    let disk = format!(", {:?}", worker.data_paths()[1]);
    let unfit = [
        (config.replace("capacity", "capasity"), "did you mean memory_store.capacity"),
        (config.replace(&port, "grpc_port = 1"), "grpc_port = 1: must be "),
        (config.replace(&disk, ""), "disk1, which has data of running jobs"),
    ];
    let client = client_of(&worker).await;
    let mut written = Written::register(&client, key("app", 0), 5).await;
    for (task, (text, complaint)) in unfit.into_iter().enumerate() {
        assert_ne!(text, config);
        worker.write_config(&text);
        worker.signal(rustix::process::Signal::USR2);
        block_in_place(|| worker.wait_log(complaint));
        assert!(worker.log().contains("upgrade refused"));
        written
            .task(&client, i64::try_from(task).unwrap(), 1000)
            .await
            .expect("the worker does not continue");
    }
    written.assert_readable(&client).await;
    block_in_place(|| worker.stop());
}

/// Starts a worker whose blocks cannot be flushed, and sends some. The limit of 1 MiB per file is
/// enough for metadata.
async fn unflushable(tables: &'static str) -> (WorkerProcess, ShuffleClient, Written) {
    let line = "ulimit -f 1024; exec \"$@\"";
    let worker = WorkerProcess::start(&Setup {
        name: "unflushable",
        capacity: "64M",
        wrapper: ["bash", "-c", line, "bash"].map(str::to_owned).to_vec(),
        tables,
        ..Setup::default()
    });
    let client = client_of(&worker).await;
    let mut written = Written::register(&client, key("app", 3), 2).await;
    written.task(&client, 0, 2_000_000).await.unwrap();
    (worker, client, written)
}

/// Asserts that one log line names the shuffle whose blocks are lost.
fn assert_loss_is_logged(worker: &WorkerProcess) {
    let log = worker.log();
    let lines: Vec<_> = log.lines().filter(|line| line.contains("lost at shutdown")).collect();
    assert_eq!(lines.len(), 1, "{log}");
    assert!(lines[0].contains("ERROR") && lines[0].contains("app/3"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn forced_shutdown_that_loses_data_exits_with_3() {
    let (mut worker, _client, _written) = unflushable("[shutdown]\nflush_timeout_sec = \"1h\"").await;
    worker.signal(rustix::process::Signal::TERM);
    block_in_place(|| worker.wait_log("stopping signal=\"SIGTERM\""));
    worker.signal(rustix::process::Signal::INT);
    assert_eq!(block_in_place(|| worker.wait_end()).code(), Some(3));
    assert_loss_is_logged(&worker);
}

#[tokio::test(flavor = "multi_thread")]
async fn upgrade_that_would_lose_memory_is_refused() {
    let (mut worker, client, written) = unflushable("[shutdown]\nflush_timeout_sec = \"300ms\"").await;
    worker.begin_upgrade();
    block_in_place(|| worker.wait_log("memory was not flushed completely"));
    // The worker continues.
    client.heartbeat("app").await.unwrap();
    written.assert_readable(&client).await;
    // EFBIG does not count as a disk failure.
    let log = worker.log();
    assert!(!log.contains("disk failed") && log.contains("RLIMIT_FSIZE is"), "{log}");
    // It stops on SIGTERM and reports the data that is lost.
    assert_eq!(block_in_place(|| worker.terminated()), Some(3));
    assert_loss_is_logged(&worker);
}

#[tokio::test(flavor = "multi_thread")]
async fn graceful_stop_flushes_to_disks_above_watermark() {
    let mut worker = WorkerProcess::start(&Setup {
        name: "above-watermark",
        capacity: "64M",
        disks: 2,
        tables: "disk_high_watermark = 0.00002\ndisk_low_watermark = 0.00001",
        ..Setup::default()
    });
    let client = client_of(&worker).await;
    let mut written = Written::register(&client, key("app", 3), 2).await;
    written.task(&client, 0, 200_000).await.unwrap();
    drop(client);
    block_in_place(|| worker.terminate());
    assert!(!worker.log().contains("lost at shutdown"), "{}", worker.log());
    block_in_place(|| worker.start_again());
    written.assert_readable(&client_of(&worker).await).await;
    block_in_place(|| worker.stop());
}

#[tokio::test(flavor = "multi_thread")]
async fn upgrade_without_metadata_log_is_refused() {
    for store_type in ["MEMORY", "MEMORY_HDFS"] {
        let worker = WorkerProcess::start(&Setup {
            name: "no-journal",
            capacity: "64M",
            store_type,
            disks: 0,
            ..Setup::default()
        });
        worker.begin_upgrade();
        let refusal = format!(
            "upgrade refused; continuing as before: store_type {store_type} has neither local disks nor an object store"
        );
        block_in_place(|| worker.wait_log(&refusal));
        client_of(&worker).await;
        block_in_place(|| worker.stop());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn upgrade_signals_never_kill_a_starting_program() {
    let mut worker = WorkerProcess::start(&Setup { name: "signals", capacity: "64M", ..Setup::default() });
    let client = client_of(&worker).await;
    let mut written = Written::register(&client, key("app", 0), 5).await;
    written.task(&client, 0, 1000).await.unwrap();
    block_in_place(|| {
        worker.begin_upgrade();
        wait_until("three upgrades", UPGRADES_DEADLINE, || {
            // Enough signals that some arrive between two programs.
            for _ in 0..1000 {
                worker.signal(rustix::process::Signal::USR2);
            }
            let pid = worker.pid();
            assert!(worker.is_running(), "process {pid} has ended:\n{}", worker.log());
            match worker.log().matches("upgraded; no connection was accepted").count() {
                0..3 => Err("too few".to_owned()),
                _ => Ok(()),
            }
        });
    });
    let upgrades = || {
        let log = worker.log();
        let begun = log.matches("upgrade: rehearsal succeeded").count();
        (begun, log.matches("upgraded; no connection was accepted").count())
    };
    // A signal may still be pending.
    let calm = async {
        loop {
            let before = upgrades();
            let read = written.readable(&client_of(&worker).await).await;
            if before.0 == before.1 && upgrades() == before {
                // This client does not retry a call on a closing connection, so failures count only
                // from here on.
                return read.expect("a read failed although no upgrade is running");
            }
        }
    };
    tokio::time::timeout(UPGRADES_DEADLINE, calm).await.expect("the last upgrade did not end");
    worker.assert_no_error_logged();
    block_in_place(|| worker.stop());
}

/// SIGTERM between two programs: the successor is a script that signals itself before it executes
/// the worker.
#[tokio::test(flavor = "multi_thread")]
async fn stop_signal_at_exec_reaches_the_successor() {
    let dir = tempfile::tempdir().unwrap();
    let binary = dir.path().join("worker");
    let program = env!("CARGO_BIN_EXE_uniffle-worker");
    std::fs::copy(program, &binary).unwrap();
    let setup = Setup {
        name: "stop-at-exec",
        binary: Some(binary.clone()),
        memory: MEMFD,
        tables: NEVER_FLUSHED,
        ..Setup::default()
    };
    let mut worker = WorkerProcess::start(&setup);
    let client = client_of(&worker).await;
    let mut written = Written::register(&client, key("app", 0), 5).await;
    written.task(&client, 0, 1000).await.unwrap();
    drop(client);
    script(
        &binary,
        &format!(
            "#!/bin/sh\ncase \"$*\" in *--check*) ;; *) kill -s TERM $$; kill -s HUP $$ ;; esac\nexec '{program}' \"$@\"\n"
        ),
    );
    worker.begin_upgrade();
    assert_eq!(block_in_place(|| worker.wait_end()).code(), Some(0), "{}", worker.log());
    assert!(worker.log().contains("stopping signal=\"SIGTERM\""), "{}", worker.log());
    std::fs::remove_file(&binary).unwrap();
    std::fs::copy(program, &binary).unwrap();
    block_in_place(|| worker.start_again());
    written.assert_readable(&client_of(&worker).await).await;
    block_in_place(|| worker.stop());
}

fn script(path: &Path, text: &str) {
    let temporary = path.with_extension("new");
    std::fs::File::create(&temporary).unwrap().write_all(text.as_bytes()).unwrap();
    std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::rename(temporary, path).expect("both paths are on one file system");
}

#[tokio::test(flavor = "multi_thread")]
async fn unusable_binary_leaves_old_process_serving() {
    let dir = tempfile::tempdir().unwrap();
    let binary = dir.path().join("worker");
    std::fs::copy(env!("CARGO_BIN_EXE_uniffle-worker"), &binary).unwrap();
    let setup = Setup { name: "exec", capacity: "64M", binary: Some(binary.clone()), ..Setup::default() };
    let mut worker = WorkerProcess::start(&setup);
    let client = client_of(&worker).await;
    let mut written = Written::register(&client, key("app", 0), 5).await;
    written.task(&client, 0, 1000).await.unwrap();
    // This script passes as a binary for the check and then deletes itself.
    script(&binary, "#!/bin/sh\nrm -- \"$0\"\n");
    let knocking = Reconnecting::at(worker.ready().grpc_port);
    block_in_place(|| {
        worker.begin_upgrade();
        worker.finish_upgrade();
    });
    assert!(knocking.end() > 0);
    assert!(worker.log().contains("cannot execute the successor"));
    assert!(worker.log().contains("accepting connections again after the failed upgrade"));
    assert!(!worker.log().contains(" upgraded; "));
    // A binary that is not a worker is refused; afterwards a valid one is accepted.
    script(&binary, "#!/bin/sh\nexit 7\n");
    worker.signal(rustix::process::Signal::USR2);
    block_in_place(|| worker.wait_log("--check: exit status: 7"));
    std::fs::copy(env!("CARGO_BIN_EXE_uniffle-worker"), dir.path().join("better")).unwrap();
    std::fs::rename(dir.path().join("better"), &binary).unwrap();
    block_in_place(|| {
        worker.begin_upgrade();
        worker.finish_upgrade();
    });
    let (log, version) = (worker.log(), env!("CARGO_PKG_VERSION"));
    for event in ["rehearsal succeeded", "upgraded; no connection"] {
        let line = log.lines().rev().find(|line| line.contains(event)).unwrap();
        for part in [format!("from={version} ("), format!("to=\"{version} (")] {
            let unquoted = part.replace('"', "");
            assert!(line.replace('"', "").contains(&unquoted), "{unquoted} is missing: {line}");
        }
    }
    block_in_place(|| worker.stop());
}

#[tokio::test(flavor = "multi_thread")]
async fn service_manager_passes_sockets_and_is_notified() {
    let dir = tempfile::tempdir().unwrap();
    let manager = UnixDatagram::bind(dir.path().join("notify")).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let kept = InheritedPort::open();
    let mut worker = WorkerProcess::start(&Setup {
        name: "activated",
        capacity: "64M",
        top: "grpc_port = 0",
        wrapper: kept.passing_on(),
        env: vec![("NOTIFY_SOCKET", dir.path().join("notify").display().to_string())],
        ..Setup::default()
    });
    assert_eq!(worker.ready().grpc_port, kept.port());
    drop(kept);
    let notified = |until: &str| {
        let mut all = String::new();
        while !all.contains(until) {
            let mut message = [0; 1000];
            let length =
                manager.recv(&mut message).unwrap_or_else(|error| panic!("{error}; messages so far: {all}"));
            all.push_str(&String::from_utf8_lossy(&message[..length]));
        }
        all
    };
    let all = block_in_place(|| notified("READY=1"));
    assert!(all.contains("FDSTORE=1\nFDNAME=grpc") && all.contains("FDNAME=http"), "{all}");
    client_of(&worker).await;
    block_in_place(|| {
        worker.begin_upgrade();
        worker.finish_upgrade();
        assert!(notified("READY=1").contains("RELOADING=1\nMONOTONIC_USEC="));
        worker.terminate();
        assert!(notified("STOPPING=1").contains("STOPPING=1"));
    });
}
