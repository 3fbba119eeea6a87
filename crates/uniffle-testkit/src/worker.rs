//! A worker process: started with a configuration in a directory of its own, killed on drop.
//!
//! The worker says that it is ready by the file that `WORKER_READY_FILE` names, one JSON object with the ports it got.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use serde::Deserialize;

use crate::config::{Lines, unless_set};
use crate::metrics::{self, Metrics};
use crate::ports::free_port;
use crate::tools::binary;
use crate::wait_until;

/// Start-up claims directories, maps memory and reads the metadata log; a debug build on a busy machine gets time.
const START_DEADLINE: Duration = Duration::from_secs(120);
/// An orderly stop waits for tasks that are given up after a few seconds.
const STOP_DEADLINE: Duration = Duration::from_secs(30);
/// Purges run behind the answer to an unregistration.
const CLEAN_DEADLINE: Duration = Duration::from_secs(20);

/// Gauges that must be zero when no application is left, of all those that the worker has.
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
/// Without these nothing would be asserted.
const NEVER_MISSING: &[&str] = &[
    "app_num_with_node",
    "partition_num_with_node",
    "reported_block_count",
    "memory_used",
    "memory_allocated",
    "used_buffer_size",
    "total_in_memory_block_count",
];

/// How often other ports are chosen when one was taken meanwhile.
const PORT_TRIES: usize = 5;

/// Named by `WORKER_READY_FILE`.
const READY_FILE: &str = "ready.json";

/// The marker by which a worker claims a data directory, where it is mounted, and its metadata log: what stays.
pub const OWN_FILES: [&str; 3] = ["uniffle-worker.claim", "uniffle-worker.mounts", "uniffle-worker.metadata"];

/// What a test chooses; everything else is the worker's default or belongs to the harness.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Shown in messages.
    pub name: &'static str,
    /// `memory_store.capacity`.
    pub capacity: &'static str,
    /// How many data directories it gets.
    pub disks: usize,
    /// The coordinators, separated by commas, or none: then it is its own.
    pub quorum: Option<String>,
    /// `grpc_port`, where others must know it before; none = any.
    pub grpc_port: Option<u16>,
    /// Lines before the first table; ports, if they are not to be chosen.
    pub top: &'static str,
    /// More lines of `[memory_store]`.
    pub memory: &'static str,
    /// More lines of `[localfile_store]`, then whole tables.
    pub tables: &'static str,
    /// More whole tables, made by the test.
    pub made_tables: String,
    /// A command that executes the worker, with its first arguments; none = directly.
    pub wrapper: Vec<String>,
    /// Another file than the one that cargo built.
    pub binary: Option<PathBuf>,
    /// `store_type`.
    pub store_type: &'static str,
    /// More of the environment.
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
pub struct Worker {
    setup: Setup,
    child: Child,
    dir: tempfile::TempDir,
    data_paths: Vec<PathBuf>,
    ready: Ready,
}

/// Ports that a configuration names; 0, the system chooses.
#[derive(Debug, Clone, Copy, Default)]
struct Ports {
    grpc: u16,
    http: u16,
    urpc: u16,
}

impl Ports {
    /// Three that differ.
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

/// What the worker writes once all its listeners are bound.
#[derive(Debug, Clone, Deserialize)]
pub struct Ready {
    /// Port of the shuffle server and of the embedded coordinator.
    pub grpc_port: u16,
    /// Port of `/metrics` and `/health`.
    pub http_port: u16,
    /// Port of the administration, when it is open.
    pub admin_port: Option<u16>,
    /// Port of the raw TCP listener, when it is open.
    pub urpc_port: Option<u16>,
    /// The process that wrote it.
    pub pid: u32,
    /// How long no process accepted, after an upgrade.
    pub upgrade_gap_ms: Option<u64>,
}

impl Worker {
    /// Starts the worker and waits until its listeners are bound.
    pub fn start(setup: &Setup) -> Self {
        let dir = tempfile::Builder::new().prefix("uniffle-worker-test-").tempdir().expect("a temp dir");
        let data_paths: Vec<PathBuf> =
            (0..setup.disks).map(|disk| dir.path().join(format!("disk{disk}"))).collect();
        for path in &data_paths {
            std::fs::create_dir(path).expect("a data dir");
        }
        Self::start_in(setup, dir, data_paths)
    }

    /// The same in a directory that was prepared.
    ///
    /// Its ports are chosen outside of those that the system gives away, so that they are still free when it is started
    /// again; another test may choose the same at the same moment, and then others are.
    pub fn start_in(setup: &Setup, dir: tempfile::TempDir, data_paths: Vec<PathBuf>) -> Self {
        // The value exists before the wait, so that a worker that never gets ready is killed and its log shown.
        let mut worker = Self::launched(setup, dir, data_paths, Ports::choose());
        for _ in 0..PORT_TRIES {
            match worker.try_ready() {
                Err(_) if worker.log().contains("Address already in use") => {
                    drop(std::fs::remove_file(worker.dir.path().join("worker.log")));
                    worker.write_config(&config_text(setup, &worker.data_paths, Ports::choose()));
                    worker.child = launch(setup, worker.dir.path());
                }
                ready => {
                    worker.ready =
                        ready.unwrap_or_else(|status| panic!("worker {} ended: {status}", setup.name));
                    return worker;
                }
            }
        }
        panic!("worker {}: no free ports", setup.name)
    }

    fn launched(setup: &Setup, dir: tempfile::TempDir, data_paths: Vec<PathBuf>, ports: Ports) -> Self {
        std::fs::write(dir.path().join("config.toml"), config_text(setup, &data_paths, ports))
            .expect("the configuration");
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

    /// What a worker says that does not start; an error while one does.
    pub fn refused(setup: &Setup) -> Result<String, String> {
        let dir = tempfile::Builder::new().prefix("uniffle-worker-test-").tempdir().expect("a temp dir");
        let mut worker = Self::launched(setup, dir, Vec::new(), Ports::default());
        let what = format!("worker {} ends or gets ready", setup.name);
        let status = wait_until(&what, START_DEADLINE, || match worker.child.try_wait() {
            Ok(Some(status)) => Ok(Some(status)),
            _ if worker.dir.path().join(READY_FILE).exists() => Ok(None),
            other => Err(format!("{other:?}")),
        });
        let Some(status) = status else { return Err("it has started".to_owned()) };
        assert_eq!(status.code(), Some(1), "{}", worker.log());
        Ok(worker.log())
    }

    fn wait_ready(&mut self) -> Ready {
        let name = self.setup.name;
        self.try_ready().unwrap_or_else(|status| panic!("worker {name} gets ready: it ended: {status}"))
    }

    /// Waits for the ready file of this process, or for its end.
    fn try_ready(&mut self) -> Result<Ready, ExitStatus> {
        let ready_file = self.dir.path().join(READY_FILE);
        let (what, child) = (format!("worker {} gets ready", self.setup.name), &mut self.child);
        let ready: Ready = wait_until(&what, START_DEADLINE, || {
            if let Ok(Some(status)) = child.try_wait() {
                return Ok(Err(status));
            }
            let text = std::fs::read_to_string(&ready_file).map_err(|error| error.to_string())?;
            // Half a file is not JSON, so that a write that is seen in the middle is seen again.
            serde_json::from_str(&text).map(Ok).map_err(|error| format!("{error} in {text:?}"))
        })?;
        assert_eq!(ready.pid, self.child.id(), "another process wrote the ready file");
        Ok(ready)
    }

    fn forget_ready(&self) {
        drop(std::fs::remove_file(self.dir.path().join(READY_FILE)));
    }

    /// SIGKILL, and waits for the end.
    pub fn kill(&mut self) {
        self.child.kill().expect("our own child");
        self.child.wait().expect("our own child");
    }

    /// Starts it again after its end, on the ports that it had.
    pub fn start_again(&mut self) {
        self.start_again_with(&self.config());
    }

    /// The same with another configuration.
    pub fn start_again_with(&mut self, config: &str) {
        self.launch_again_with(config);
        self.ready = self.wait_ready();
    }

    /// The same, without waiting for it.
    pub fn launch_again_with(&mut self, config: &str) {
        self.write_config(config);
        self.forget_ready();
        self.child = launch(&self.setup, self.dir.path());
    }

    /// Its configuration with the ports that it has.
    pub fn config(&self) -> String {
        config_text(&self.setup, &self.data_paths, Ports::of(&self.ready))
    }

    /// Replaces the configuration; it is read at the next start or upgrade.
    pub fn write_config(&self, text: &str) {
        std::fs::write(self.dir.path().join("config.toml"), text).expect("the configuration");
    }

    /// SIGUSR2.
    pub fn begin_upgrade(&self) {
        self.forget_ready();
        self.signal(rustix::process::Signal::USR2);
    }

    /// Waits until the successor is ready; the ports are the same.
    pub fn finish_upgrade(&mut self) {
        let ready = self.wait_ready();
        let ports = |ready: &Ready| (ready.grpc_port, ready.http_port, ready.urpc_port);
        assert_eq!(ports(&ready), ports(&self.ready), "an upgrade keeps the ports");
        self.ready = ready;
    }

    /// The same where the successor runs beside the process; its id.
    pub fn finish_upgrade_beside(&mut self) -> u32 {
        self.wait_log("the successor runs beside this process");
        let ready_file = self.dir.path().join(READY_FILE);
        let what = format!("the successor of worker {} gets ready", self.setup.name);
        let ready: Ready = wait_until(&what, START_DEADLINE, || {
            let text = std::fs::read_to_string(&ready_file).map_err(|error| error.to_string())?;
            serde_json::from_str(&text).map_err(|error| format!("{error} in {text:?}"))
        });
        let ports = |ready: &Ready| (ready.grpc_port, ready.http_port, ready.urpc_port);
        assert_eq!(ports(&ready), ports(&self.ready), "an upgrade keeps the ports");
        assert_ne!(ready.pid, self.child.id(), "it is another process");
        self.ready = ready;
        self.ready.pid
    }

    /// Sends a signal.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("our own child");
    }

    /// Whether the process lives.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|ended| ended.is_none())
    }

    /// Waits for the end of the process.
    pub fn wait_end(&mut self) -> ExitStatus {
        let what = format!("worker {} ends", self.setup.name);
        wait_until(&what, STOP_DEADLINE, || {
            self.child.try_wait().map_err(|error| error.to_string())?.ok_or_else(|| "it runs".to_owned())
        })
    }

    /// Waits until its log has a line with `text`.
    pub fn wait_log(&self, text: &str) {
        wait_until(&format!("worker {} logs {text:?}", self.setup.name), START_DEADLINE, || {
            if self.log().contains(text) { Ok(()) } else { Err("it does not".to_owned()) }
        });
    }

    /// Its directory: configuration, log, disks.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What `spark.rss.coordinator.quorum` is set to.
    pub fn quorum(&self) -> String {
        format!("127.0.0.1:{}", self.ready.grpc_port)
    }

    /// The ports.
    pub fn ready(&self) -> &Ready {
        &self.ready
    }

    /// Its data directories.
    pub fn data_paths(&self) -> &[PathBuf] {
        &self.data_paths
    }

    /// Its metrics now.
    pub fn metrics(&self) -> Metrics {
        Metrics::fetch(self.ready.http_port)
            .unwrap_or_else(|error| panic!("worker {}: {error}", self.setup.name))
    }

    /// The body of a page of its HTTP listener.
    pub fn page(&self, path: &str) -> Result<String, String> {
        metrics::get(self.ready.http_port, path)
    }

    /// What it has logged so far, with the lines that it logged before this call.
    pub fn log(&self) -> String {
        wait_until(&format!("worker {} writes its log", self.setup.name), START_DEADLINE, || {
            if has_lines_to_write(self.child.id()) { Err("lines wait".to_owned()) } else { Ok(()) }
        });
        std::fs::read_to_string(self.dir.path().join("worker.log")).unwrap_or_default()
    }

    /// Processor time of the process so far, in seconds.
    pub fn cpu_seconds(&self) -> f64 {
        let stat =
            std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).expect("the process lives");
        let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        // utime and stime are the 14th and 15th field of all, in ticks of 10 ms.
        let ticks: f64 = fields.skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum();
        ticks / 100.0
    }

    /// The largest resident size that the process ever had, from the kernel.
    pub fn peak_resident_bytes(&self) -> u64 {
        peak_resident_bytes(self.child.id())
    }

    /// A number in the kernel's `status` of the process; sizes are in KiB.
    pub fn proc_status(&self, field: &str) -> u64 {
        proc_status(self.child.id(), field)
    }

    /// Nothing of any application is left: the worker knows none (long before a missing heartbeat could tell), every
    /// memory counter is zero, and the data directories hold the claim and no more.
    pub fn assert_clean(&self) {
        wait_until(&format!("worker {} is clean", self.setup.name), CLEAN_DEADLINE, || {
            let metrics = Metrics::fetch(self.ready.http_port)?;
            let missing: Vec<_> = NEVER_MISSING.iter().filter(|name| metrics.total(name).is_none()).collect();
            if !missing.is_empty() {
                return Err(format!("no metrics named {missing:?} among {:?}", metrics.names()));
            }
            let left: Vec<_> = ZERO_WHEN_IDLE
                .iter()
                .filter_map(|name| metrics.total(name).map(|value| (name, value)))
                .filter(|(_, value)| *value != 0.0)
                .collect();
            if !left.is_empty() {
                return Err(format!("not zero: {left:?}"));
            }
            let files: Vec<_> = self.data_paths.iter().flat_map(|path| leftovers(path)).collect();
            if !files.is_empty() {
                return Err(format!("files left: {files:?}"));
            }
            Ok(())
        });
    }

    /// The Spark settings that a worker with an embedded coordinator prints for its user, separated by blanks.
    pub fn printed_settings(&self) -> String {
        let log = self.log();
        // An upgraded or restarted worker prints them again.
        let last = log.rfind("spark-submit \\\n").expect("a worker with an embedded coordinator prints them");
        let command = log[last..].lines().take_while(|line| !line.contains("YOUR_APPLICATION"));
        let settings: Vec<_> =
            command.filter_map(|line| line.trim().strip_prefix("--conf ")?.strip_suffix(" \\")).collect();
        assert!(settings.iter().any(|setting| setting.contains("RssShuffleManager")), "{settings:?}");
        settings.join(" ")
    }

    /// No line of level ERROR and no panic so far.
    pub fn assert_no_error_logged(&self) {
        let log = self.log();
        let bad: Vec<_> = log
            .lines()
            .filter(|line| line.contains(" ERROR ") || line.contains("panicked at"))
            .take(20)
            .collect();
        assert!(bad.is_empty(), "worker {} logged errors:\n{}", self.setup.name, bad.join("\n"));
    }

    /// SIGTERM; it must end by itself with exit code 0.
    pub fn stop(mut self) {
        self.terminate();
    }

    /// Waits until it ends by itself, which must be with exit code 0.
    pub fn ends(mut self, why: &str) {
        let status = self.wait_end();
        assert_eq!(status.code(), Some(0), "worker {} ends {why}: {status}", self.setup.name);
    }

    /// The same, and it can be started again.
    pub fn terminate(&mut self) {
        assert_eq!(self.terminated(), Some(0), "worker {}", self.setup.name);
    }

    /// SIGTERM; the exit code with which it ends.
    pub fn terminated(&mut self) -> Option<i32> {
        self.signal(rustix::process::Signal::TERM);
        self.wait_end().code()
    }
}

/// The binary as a user starts it, with its configuration and files in `dir`.
fn launch(setup: &Setup, dir: &Path) -> Child {
    let log = std::fs::File::options().create(true).append(true).open(dir.join("worker.log"));
    let log = log.expect("the log");
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
        .stdout(log.try_clone().expect("a second handle of the log"))
        .stderr(log)
        .spawn()
        .expect("the worker's binary was built with this test")
}

/// Whether the thread that writes the log of a process runs; without lines it sleeps.
fn has_lines_to_write(pid: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("stat")).ok()).any(|stat| {
        let (name, rest) = stat.rsplit_once(')').unwrap_or_default();
        name.ends_with("(uniffle-log") && matches!(rest.trim_start().chars().next(), Some('R' | 'D'))
    })
}

impl Drop for Worker {
    fn drop(&mut self) {
        // After stop() it has been waited for, and these do nothing.
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

/// The largest resident size that a process ever had, from the kernel.
pub fn peak_resident_bytes(pid: u32) -> u64 {
    proc_status(pid, "VmHWM") << 10
}

fn proc_status(pid: u32, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the process lives");
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    number.unwrap_or_else(|| panic!("no number {field} in {status}"))
}

fn config_text(setup: &Setup, data_paths: &[PathBuf], ports: Ports) -> String {
    let quorum: Vec<_> = setup.quorum.iter().flat_map(|quorum| quorum.split(',')).collect();
    let ports = Ports { grpc: setup.grpc_port.unwrap_or(ports.grpc), ..ports };
    let [grpc, http, urpc] = [ports.grpc, ports.http, ports.urpc].map(|port| port.to_string());
    let ports = unless_set(&[("grpc_port", &grpc), ("http_port", &http), ("urpc_port", &urpc)], setup.top);
    let top =
        format!("{ports}heartbeat_interval_seconds = 1\ncoordinator_quorum = {quorum:?}\n{}", setup.top);
    let lines = Lines {
        store_type: setup.store_type,
        capacity: setup.capacity,
        top: &top,
        memory: setup.memory,
        local: setup.tables,
        tables: &setup.made_tables,
    };
    lines.text(data_paths)
}

/// Everything below a data directory but its claim and the empty directories of applications and of what is deleted.
pub fn leftovers(base: &Path) -> Vec<PathBuf> {
    let mut left = Vec::new();
    let mut open = vec![base.to_owned()];
    while let Some(dir) = open.pop() {
        // A directory that a purge removes meanwhile is not left.
        for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if path == base.join("apps") || path == base.join("trash") {
                open.push(path);
            } else if OWN_FILES.iter().all(|name| path != base.join(name)) {
                left.push(path);
            }
        }
    }
    left
}
