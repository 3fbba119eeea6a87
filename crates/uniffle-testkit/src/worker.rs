//! A worker process with its own configuration and directory, killed on drop.
//!
//! The worker signals that it is ready by writing the file in `WORKER_READY_FILE`: one JSON object
//! with its ports.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use serde::Deserialize;

use crate::config::{ConfigLines, unless_set};
use crate::metrics::{self, Metrics};
use crate::ports::free_port;
use crate::tools::binary;
use crate::wait_until;

/// Time limit to start. A start claims directories, maps memory and reads the metadata log; a debug
/// build on a busy machine is slow.
const START_DEADLINE: Duration = Duration::from_secs(120);
/// Time limit to stop. An orderly stop waits for tasks that are cancelled after a few seconds.
const STOP_DEADLINE: Duration = Duration::from_secs(30);
/// Time limit of purges, which run after the response to an unregistration.
const CLEAN_DEADLINE: Duration = Duration::from_secs(20);

/// Gauges that must be zero when no application is left, if the worker has them.
const ZERO_WHEN_IDLE: &[&str] = &[
    "app_num_with_node",
    "partition_num_with_node",
    "reported_block_count",
    "memory_used",
    "memory_allocated",
    "memory_allocated_tickets_num",
    "used_buffer_size",
    "read_used_buffer_size",
    "in_flush_buffer_size",
    "total_in_memory_block_count",
    "heap_charged_bytes",
    "local_extents",
    "local_storage_service_used_space",
    "storage_used_bytes",
    "flush_file_num",
];
/// Gauges that must exist. Otherwise the check would pass if all gauges were missing.
const NEVER_MISSING: &[&str] = &[
    "app_num_with_node",
    "partition_num_with_node",
    "reported_block_count",
    "memory_used",
    "memory_allocated",
    "used_buffer_size",
    "total_in_memory_block_count",
];

/// Number of starts, each with other ports, before a test fails.
const PORT_TRIES: usize = 5;

/// File name of `WORKER_READY_FILE`.
const READY_FILE: &str = "ready.json";

/// Entries that stay in an empty data directory: the claim, the mount record and the directory of
/// the metadata log.
pub const OWN_FILES: [&str; 3] = ["uniffle-worker.claim", "uniffle-worker.mounts", "uniffle-worker.metadata"];

/// Settings of a test. All others have the worker's or the harness's defaults.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Shown in messages.
    pub name: &'static str,
    /// `memory_store.capacity`.
    pub capacity: &'static str,
    /// Number of data directories.
    pub disks: usize,
    /// Coordinators, separated by commas. `None` uses the embedded one.
    pub quorum: Option<String>,
    /// `grpc_port`, if it must be known in advance. `None` chooses a free port.
    pub grpc_port: Option<u16>,
    /// Lines before the first table, including ports that must not be chosen freely.
    pub top: &'static str,
    /// More lines of `[memory_store]`.
    pub memory: &'static str,
    /// More lines of `[localfile_store]`, then whole tables.
    pub tables: &'static str,
    /// More whole tables, computed by the test.
    pub made_tables: String,
    /// A command that executes the worker, with its first arguments. Empty: executed directly.
    pub wrapper: Vec<String>,
    /// Binary to run instead of the one that cargo built.
    pub binary: Option<PathBuf>,
    /// `store_type`.
    pub store_type: &'static str,
    /// Additional environment variables.
    pub env: Vec<(&'static str, String)>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            name: "worker",
            capacity: "256M",
            disks: 1,
            quorum: None,
            grpc_port: None,
            top: "",
            memory: "",
            tables: "",
            made_tables: String::new(),
            wrapper: Vec::new(),
            binary: None,
            store_type: "MEMORY_LOCALFILE",
            env: Vec::new(),
        }
    }
}

/// A running worker.
#[derive(Debug)]
pub struct WorkerProcess {
    setup: Setup,
    child: Child,
    dir: tempfile::TempDir,
    data_paths: Vec<PathBuf>,
    ready: Ready,
}

/// Ports in a configuration. 0 lets the system choose.
#[derive(Debug, Clone, Copy, Default)]
struct Ports {
    grpc: u16,
    http: u16,
    urpc: u16,
}

impl Ports {
    /// Chooses three different ports.
    fn choose() -> Self {
        loop {
            let ports = Self { grpc: free_port(), http: free_port(), urpc: free_port() };
            if ports.grpc != ports.http && ports.http != ports.urpc && ports.urpc != ports.grpc {
                return ports;
            }
        }
    }

    fn of(ready: &Ready) -> Self {
        Self { grpc: ready.grpc_port, http: ready.http_port, urpc: ready.urpc_port.unwrap_or(0) }
    }
}

/// Content of the ready file, which the worker writes once all its listeners are bound.
#[derive(Debug, Clone, Deserialize)]
pub struct Ready {
    /// Port of the shuffle server and of the embedded coordinator.
    pub grpc_port: u16,
    /// Port of `/metrics` and `/health`.
    pub http_port: u16,
    /// Administration port, if it is open.
    pub admin_port: Option<u16>,
    /// Port of the raw TCP listener, if it is open.
    pub urpc_port: Option<u16>,
    /// Id of the process that wrote the file.
    pub pid: u32,
    /// Time without an accepting process during an upgrade.
    pub upgrade_gap_ms: Option<u64>,
}

impl WorkerProcess {
    /// Starts the worker and waits until its listeners are bound.
    pub fn start(setup: &Setup) -> Self {
        let dir = tempfile::Builder::new().prefix("uniffle-worker-test-").tempdir().unwrap();
        let data_paths: Vec<PathBuf> =
            (0..setup.disks).map(|disk| dir.path().join(format!("disk{disk}"))).collect();
        for path in &data_paths {
            std::fs::create_dir(path).unwrap();
        }
        Self::start_in(setup, dir, data_paths)
    }

    /// Starts the worker in a prepared directory.
    ///
    /// Ports are chosen outside the ephemeral range, so that they are still free after a restart.
    /// If another test chooses the same port concurrently, other ports are chosen.
    pub fn start_in(setup: &Setup, dir: tempfile::TempDir, data_paths: Vec<PathBuf>) -> Self {
        // Created before the wait, so that a worker that never gets ready is killed and its log is
        // shown.
        let mut worker = Self::launched(setup, dir, data_paths, Ports::choose());
        for _ in 0..PORT_TRIES {
            match worker.try_ready() {
                Err(_) if worker.log().contains("Address already in use") => {
                    drop(std::fs::remove_file(worker.dir.path().join("worker.log")));
                    worker.write_config(&config_text(setup, &worker.data_paths, Ports::choose()));
                    worker.child = launch(setup, worker.dir.path());
                }
                ready => {
                    worker.ready = ready.unwrap_or_else(|status| {
                        panic!("worker {} ended before it was ready: {status}", setup.name)
                    });
                    return worker;
                }
            }
        }
        panic!("worker {} found no free ports", setup.name)
    }

    fn launched(setup: &Setup, dir: tempfile::TempDir, data_paths: Vec<PathBuf>, ports: Ports) -> Self {
        std::fs::write(dir.path().join("config.toml"), config_text(setup, &data_paths, ports)).unwrap();
        let child = launch(setup, dir.path());
        let nothing = Ready {
            grpc_port: 0,
            http_port: 0,
            admin_port: None,
            urpc_port: None,
            pid: child.id(),
            upgrade_gap_ms: None,
        };
        Self { setup: setup.clone(), child, dir, data_paths, ready: nothing }
    }

    /// Returns the log of a worker without data directories that must refuse to start. Fails if it
    /// starts.
    pub fn refused(setup: &Setup) -> Result<String, String> {
        let dir = tempfile::Builder::new().prefix("uniffle-worker-test-").tempdir().unwrap();
        let mut worker = Self::launched(setup, dir, Vec::new(), Ports::default());
        let what = format!("worker {} becomes ready or ends", setup.name);
        let status = wait_until(&what, START_DEADLINE, || match worker.child.try_wait() {
            Ok(Some(status)) => Ok(Some(status)),
            _ if worker.dir.path().join(READY_FILE).exists() => Ok(None),
            other => Err(format!("{other:?}")),
        });
        let Some(status) = status else { return Err("the worker started".to_owned()) };
        assert_eq!(status.code(), Some(1), "{}", worker.log());
        Ok(worker.log())
    }

    fn wait_ready(&mut self) -> Ready {
        let name = self.setup.name;
        self.try_ready().unwrap_or_else(|status| panic!("worker {name} ended before it was ready: {status}"))
    }

    /// Waits for the ready file of this process, or for the end of the process.
    fn try_ready(&mut self) -> Result<Ready, ExitStatus> {
        let ready_file = self.dir.path().join(READY_FILE);
        let (what, child) = (format!("worker {} becomes ready", self.setup.name), &mut self.child);
        let ready: Ready = wait_until(&what, START_DEADLINE, || {
            if let Ok(Some(status)) = child.try_wait() {
                return Ok(Err(status));
            }
            let text = std::fs::read_to_string(&ready_file).map_err(|error| error.to_string())?;
            // A partially written file is not JSON, so it is read again.
            serde_json::from_str(&text).map(Ok).map_err(|error| format!("{error} in {text:?}"))
        })?;
        assert_eq!(ready.pid, self.child.id(), "another process wrote the ready file");
        Ok(ready)
    }

    fn forget_ready(&self) {
        drop(std::fs::remove_file(self.dir.path().join(READY_FILE)));
    }

    /// Kills the process (SIGKILL) and waits for its end.
    pub fn kill(&mut self) {
        self.child.kill().expect("the worker is a child of this process");
        self.child.wait().expect("the worker is a child of this process");
    }

    /// Restarts the worker after its end, on the same ports.
    pub fn start_again(&mut self) {
        self.start_again_with(&self.config());
    }

    /// Restarts the worker with another configuration.
    pub fn start_again_with(&mut self, config: &str) {
        self.launch_again_with(config);
        self.ready = self.wait_ready();
    }

    /// Restarts the worker with another configuration, without waiting until it is ready.
    pub fn launch_again_with(&mut self, config: &str) {
        self.write_config(config);
        self.forget_ready();
        self.child = launch(&self.setup, self.dir.path());
    }

    /// Returns the configuration with the current ports.
    pub fn config(&self) -> String {
        config_text(&self.setup, &self.data_paths, Ports::of(&self.ready))
    }

    /// Replaces the configuration, which a running worker reloads after a few seconds.
    pub fn write_config(&self, text: &str) {
        std::fs::write(self.dir.path().join("config.toml"), text).unwrap();
    }

    /// Starts an upgrade (SIGUSR2).
    pub fn begin_upgrade(&self) {
        self.forget_ready();
        self.signal(rustix::process::Signal::USR2);
    }

    /// Waits until the successor is ready. It has the same process id, because an upgrade is an
    /// `exec`, and the same ports.
    pub fn finish_upgrade(&mut self) {
        let ready = self.wait_ready();
        let ports = |ready: &Ready| (ready.grpc_port, ready.http_port, ready.urpc_port);
        assert_eq!(ports(&ready), ports(&self.ready), "an upgrade keeps the ports");
        self.ready = ready;
    }

    /// Sends a signal.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("the worker is a child of this process");
    }

    /// Returns true while the process runs.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|ended| ended.is_none())
    }

    /// Waits for the end of the process.
    pub fn wait_end(&mut self) -> ExitStatus {
        let what = format!("worker {} ends", self.setup.name);
        wait_until(&what, STOP_DEADLINE, || {
            self.child
                .try_wait()
                .map_err(|error| error.to_string())?
                .ok_or_else(|| "the process is running".to_owned())
        })
    }

    /// Waits until the log contains `text`.
    pub fn wait_log(&self, text: &str) {
        wait_until(&format!("worker {} logs {text:?}", self.setup.name), START_DEADLINE, || {
            if self.log().contains(text) { Ok(()) } else { Err("the text is not in the log".to_owned()) }
        });
    }

    /// Returns the worker's directory: configuration, log, disks.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the value of `spark.rss.coordinator.quorum`.
    pub fn quorum(&self) -> String {
        format!("127.0.0.1:{}", self.ready.grpc_port)
    }

    /// Returns the ports.
    pub fn ready(&self) -> &Ready {
        &self.ready
    }

    /// Returns the data directories.
    pub fn data_paths(&self) -> &[PathBuf] {
        &self.data_paths
    }

    /// Returns the current metrics.
    pub fn metrics(&self) -> Metrics {
        Metrics::fetch(self.ready.http_port)
            .unwrap_or_else(|error| panic!("worker {}: {error}", self.setup.name))
    }

    /// Returns the body of a page of the HTTP listener.
    pub fn page(&self, path: &str) -> Result<String, String> {
        metrics::get(self.ready.http_port, path)
    }

    /// Returns the log so far, including all lines logged before this call.
    pub fn log(&self) -> String {
        wait_until(&format!("worker {} writes its log", self.setup.name), START_DEADLINE, || {
            if has_lines_to_write(self.child.id()) { Err("lines wait".to_owned()) } else { Ok(()) }
        });
        std::fs::read_to_string(self.dir.path().join("worker.log")).unwrap_or_default()
    }

    /// Returns the CPU time of the process so far, in seconds.
    pub fn cpu_seconds(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))
            .expect("the process of the worker has ended");
        let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        // utime and stime are fields 14 and 15, in ticks of 10 ms.
        let ticks: f64 = fields.skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum();
        ticks / 100.0
    }

    /// Returns the peak resident size of the process, from the kernel.
    pub fn peak_resident_bytes(&self) -> u64 {
        peak_resident_bytes(self.child.id())
    }

    /// Returns a number in the kernel's `status` of the process. Sizes are in KiB.
    pub fn proc_status(&self, field: &str) -> u64 {
        proc_status(self.child.id(), field)
    }

    /// Checks that nothing of any application is left. The worker must know no application, before
    /// missing heartbeats could end one. All memory counters must be zero, and the data directories
    /// may hold only the worker's own files.
    pub fn assert_clean(&self) {
        wait_until(&format!("worker {} is clean", self.setup.name), CLEAN_DEADLINE, || {
            let metrics = Metrics::fetch(self.ready.http_port)?;
            let missing: Vec<_> = NEVER_MISSING.iter().filter(|name| metrics.total(name).is_none()).collect();
            if !missing.is_empty() {
                return Err(format!("no metrics named {missing:?} among {:?}", metrics.names()));
            }
            let remaining: Vec<_> = ZERO_WHEN_IDLE
                .iter()
                .filter_map(|name| metrics.total(name).map(|value| (name, value)))
                .filter(|(_, value)| *value != 0.0)
                .collect();
            if !remaining.is_empty() {
                return Err(format!("not zero: {remaining:?}"));
            }
            let files: Vec<_> = self.data_paths.iter().flat_map(|path| leftovers(path)).collect();
            if !files.is_empty() {
                return Err(format!("files left: {files:?}"));
            }
            Ok(())
        });
    }

    /// Returns the Spark settings that a worker with an embedded coordinator prints, separated by
    /// blanks.
    pub fn printed_settings(&self) -> String {
        // An upgraded or restarted worker prints them again, so the last ones count.
        let last =
            |log: &str| log.rfind("spark-submit \\\n").filter(|at| log[*at..].contains("YOUR_APPLICATION"));
        // They may be printed after the ready file is written.
        wait_until(
            "a worker with an embedded coordinator prints its settings",
            Duration::from_secs(30),
            || last(&self.log()).map(drop).ok_or_else(|| self.log()),
        );
        let log = self.log();
        let printed = &log[last(&log).unwrap_or_default()..];
        let command = printed.lines().take_while(|line| !line.contains("YOUR_APPLICATION"));
        let settings: Vec<_> =
            command.filter_map(|line| line.trim().strip_prefix("--conf ")?.strip_suffix(" \\")).collect();
        assert!(settings.iter().any(|setting| setting.contains("RssShuffleManager")), "{settings:?}");
        settings.join(" ")
    }

    /// Checks that no ERROR line and no panic was logged.
    pub fn assert_no_error_logged(&self) {
        let log = self.log();
        let bad: Vec<_> = log
            .lines()
            .filter(|line| line.contains(" ERROR ") || line.contains("panicked at"))
            .take(20)
            .collect();
        assert!(bad.is_empty(), "worker {} logged errors:\n{}", self.setup.name, bad.join("\n"));
    }

    /// Stops the worker (SIGTERM). It must end with exit code 0.
    pub fn stop(mut self) {
        self.terminate();
    }

    /// Waits until the worker ends by itself, which must be with exit code 0.
    pub fn ends(mut self, why: &str) {
        let status = self.wait_end();
        assert_eq!(status.code(), Some(0), "worker {} ended {why} with {status}", self.setup.name);
    }

    /// Stops the worker like `stop`, so that it can be restarted.
    pub fn terminate(&mut self) {
        assert_eq!(self.terminated(), Some(0), "worker {} did not end with code 0", self.setup.name);
    }

    /// Stops the worker (SIGTERM) and returns its exit code.
    pub fn terminated(&mut self) -> Option<i32> {
        self.signal(rustix::process::Signal::TERM);
        self.wait_end().code()
    }
}

/// Starts the binary like a user, with its configuration and files in `dir`.
fn launch(setup: &Setup, dir: &Path) -> Child {
    let log = std::fs::File::options().create(true).append(true).open(dir.join("worker.log"));
    let log = log.unwrap();
    let path = setup.binary.clone().unwrap_or_else(|| binary("uniffle-worker"));
    let mut command = match setup.wrapper.split_first() {
        None => Command::new(path),
        Some((program, arguments)) => {
            let mut command = Command::new(program);
            command.args(arguments).arg(path);
            command
        }
    };
    command
        .arg("-c")
        .arg(dir.join("config.toml"))
        .env("WORKER_READY_FILE", dir.join(READY_FILE))
        .env("WORKER_IP", "127.0.0.1")
        .env("RUST_LOG", std::env::var("WORKER_TEST_LOG").unwrap_or_else(|_| "info".to_owned()))
        .env("NO_COLOR", "1")
        .envs(setup.env.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("cannot duplicate the handle of the log"))
        .stderr(log)
        .spawn()
        .expect("the worker's binary was built with this test")
}

/// Returns true if the log-writing thread of a process is running. It sleeps when there are no
/// lines.
fn has_lines_to_write(pid: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("stat")).ok()).any(|stat| {
        let (name, rest) = stat.rsplit_once(')').unwrap_or_default();
        name.ends_with("(uniffle-log") && matches!(rest.trim_start().chars().next(), Some('R' | 'D'))
    })
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        // After `stop()` the process has already been waited for, and these calls do nothing.
        drop(self.child.kill());
        drop(self.child.wait());
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<_> = log.lines().collect();
            let shown = &lines[lines.len().saturating_sub(100)..];
            eprintln!(
                "--- last {} of {} lines of worker {}\n{}",
                shown.len(),
                lines.len(),
                self.setup.name,
                shown.join("\n")
            );
        }
    }
}

/// Returns the peak resident size of a process, from the kernel.
pub fn peak_resident_bytes(pid: u32) -> u64 {
    proc_status(pid, "VmHWM") << 10
}

fn proc_status(pid: u32, field: &str) -> u64 {
    let status =
        std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the process of the worker has ended");
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    number.unwrap_or_else(|| panic!("field {field} is not a number: {status}"))
}

fn config_text(setup: &Setup, data_paths: &[PathBuf], ports: Ports) -> String {
    let quorum: Vec<_> = setup.quorum.iter().flat_map(|quorum| quorum.split(',')).collect();
    let ports = Ports { grpc: setup.grpc_port.unwrap_or(ports.grpc), ..ports };
    let [grpc, http, urpc] = [ports.grpc, ports.http, ports.urpc].map(|port| port.to_string());
    let ports = unless_set(&[("grpc_port", &grpc), ("http_port", &http), ("urpc_port", &urpc)], setup.top);
    let top =
        format!("{ports}heartbeat_interval_seconds = 1\ncoordinator_quorum = {quorum:?}\n{}", setup.top);
    let lines = ConfigLines {
        store_type: setup.store_type,
        capacity: setup.capacity,
        top: &top,
        memory: setup.memory,
        local: setup.tables,
        tables: &setup.made_tables,
    };
    lines.text(data_paths)
}

/// Returns everything below a data directory except the worker's own files and the directories
/// `apps` and `trash` themselves.
pub fn leftovers(base: &Path) -> Vec<PathBuf> {
    let mut remaining = Vec::new();
    let mut open = vec![base.to_owned()];
    while let Some(dir) = open.pop() {
        // A directory that a concurrent purge removes does not count.
        for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if path == base.join("apps") || path == base.join("trash") {
                open.push(path);
            } else if OWN_FILES.iter().all(|name| path != base.join(name)) {
                remaining.push(path);
            }
        }
    }
    remaining
}
