//! A real systemd for one test, with the unmodified unit of `deploy/systemd` and one drop-in.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use uniffle_client::grpc::ShuffleClient;
use uniffle_testkit::config::ConfigLines;
use uniffle_testkit::metrics::Metrics;
use uniffle_testkit::ports::free_port;
use uniffle_testkit::tools::{WORKSPACE, available, binary, find, lacking, may_mount, weaker};
use uniffle_testkit::worker::Ready;
use uniffle_testkit::{say, wait_until};

use crate::writes::{local, long_backoff};

const DEADLINE: Duration = Duration::from_secs(60);
const UNIT: &str = "uniffle-worker.service";
/// State directory of the unit.
pub(super) const STATE: &str = "/var/lib/uniffle-worker";
/// Targets that every unit depends on; the machine's own would start the whole machine.
const TARGETS: [&str; 3] = ["sysinit.target", "basic.target", "shutdown.target"];
const ALONE: &str = "[Unit]\nDefaultDependencies=no\n";
const ACCOUNTS: [(&str, &str); 2] = [
    ("passwd", "root:x:0:0::/root:/bin/sh\nuniffle:x:60123:60123::/var/lib/uniffle-worker:/bin/false\n"),
    ("group", "root:x:0:\nuniffle:x:60123:\n"),
];
/// Log files instead of the journal, variables of the test, and short pauses between restarts.
/// Everything else is as shipped.
const DROP_IN: &str = "[Service]\n\
     Environment=WORKER_READY_FILE=/var/lib/uniffle-worker/ready.json WORKER_IP=127.0.0.1 RUST_LOG=info NO_COLOR=1\n\
     StandardOutput=append:/var/lib/uniffle-worker/worker.log\n\
     StandardError=append:/var/lib/uniffle-worker/worker.log\n\
     RestartSec=100ms\nRestartMaxDelaySec=100ms\n";

/// A systemd instance with the worker's unit.
#[derive(Debug)]
pub(super) struct Manager {
    namespaces: Child,
    /// Closing it ends systemd.
    stdin: Option<ChildStdin>,
    init: u32,
    /// Lines of the configuration.
    ports: String,
    dir: tempfile::TempDir,
}

impl Manager {
    /// Starts systemd without a worker. Returns `None` without the tools, and unless this process
    /// may mount (`CAP_SYS_ADMIN`). With that permission namespaces and cgroups are available too,
    /// so any failure panics.
    pub(super) fn start() -> Option<Self> {
        let tried = "a worker under a real systemd";
        if !available(tried, &["unshare", "nsenter", "systemctl", "mount"]) {
            return None;
        }
        let program = Path::new("/usr/lib/systemd/systemd");
        if !program.exists() {
            lacking(tried, &format!("no {}", program.display()));
            return None;
        }
        if !may_mount() {
            weaker(tried, "no namespaces can be made (no CAP_SYS_ADMIN)", false);
            return None;
        }
        let dir = tempfile::Builder::new().prefix("uniffle-worker-test-").tempdir().unwrap();
        create_root(dir.path());
        let script = Path::new(WORKSPACE).join("tests/process/systemd/namespace.sh");
        let mut namespaces = Command::new(find("unshare").unwrap())
            .args(["--mount", "bash"])
            .args([&script, dir.path(), program])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = namespaces.stdin.take();
        let ports = ["grpc_port", "http_port", "urpc_port"].map(|name| format!("{name} = {}\n", free_port()));
        let mut manager = Self { namespaces, stdin, init: 0, ports: ports.concat(), dir };
        manager.init = wait_until("the namespaces are made", DEADLINE, || manager.find_init());
        wait_until("systemd is up", DEADLINE, || match manager.run(&["show", "--property=SystemState"]) {
            Ok(state) if state.trim() == "SystemState=running" => Ok(()),
            other => Err(format!("{other:?}")),
        });
        Some(manager)
    }

    fn find_init(&mut self) -> Result<u32, String> {
        if let Ok(Some(status)) = self.namespaces.try_wait() {
            panic!("cannot create the namespaces: {status}");
        }
        let read = |path: PathBuf| fs::read_to_string(path).map_err(|error| error.to_string());
        let parent = read(self.dir.path().join("pid"))?.trim().to_owned();
        let children = read(format!("/proc/{parent}/task/{parent}/children").into())?;
        children.trim().parse().map_err(|_| format!("the init process has the children {children:?}"))
    }

    /// Returns the path that the worker sees as [`STATE`].
    pub(super) fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    /// Runs systemctl.
    fn run(&self, arguments: &[&str]) -> Result<String, String> {
        self.execute(&[&["systemctl", "--no-pager"], arguments].concat())
    }

    fn execute(&self, command: &[&str]) -> Result<String, String> {
        let init = self.init.to_string();
        let output = Command::new(find("nsenter").unwrap())
            .args(["--target", &init, "--mount", "--pid"])
            .args(command)
            .output()
            .map_err(|error| error.to_string())?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    /// Runs a systemctl command on the unit, and asserts success.
    pub(super) fn systemctl(&self, arguments: &[&str]) {
        if let Err(output) = self.run(&[arguments, &[UNIT]].concat()) {
            let status = self.run(&["status", UNIT]);
            panic!("systemctl {arguments:?} failed: {output}{status:?}\n{}", self.log());
        }
    }

    /// Sends a signal to the worker's main process.
    pub(super) fn signal(&self, signal: Signal) {
        let option = format!("--signal={}", signal.as_raw());
        self.systemctl(&["kill", "--kill-whom=main", &option]);
    }

    /// Returns a property of the unit.
    pub(super) fn property(&self, name: &str) -> String {
        let shown = self
            .run(&["show", "--value", "--property", name, UNIT])
            .expect("cannot read the property of the unit");
        shown.trim().to_owned()
    }

    /// Returns the number of automatic restarts.
    pub(super) fn restarts(&self) -> u32 {
        self.property("NRestarts").parse().unwrap()
    }

    /// Kills the main process and waits until its replacement is ready.
    pub(super) fn kill(&self) {
        let before = self.restarts();
        self.signal(Signal::KILL);
        self.wait_restarted(before);
    }

    /// Waits until the worker runs after one more restart than `before`.
    pub(super) fn wait_restarted(&self, before: u32) {
        wait_until("systemd has started the worker again", DEADLINE, || {
            let (restarts, state) = (self.restarts(), self.property("ActiveState"));
            match restarts == before + 1 && state == "active" {
                true => Ok(()),
                false => Err(format!("{restarts} restarts, {state}, {}", self.property("SubState"))),
            }
        });
    }

    /// Waits for `more` failed restarts beyond `before`.
    pub(super) fn wait_refused(&self, before: u32, more: u32) {
        wait_until("systemd tries again", DEADLINE, || {
            let (restarts, state) = (self.restarts(), self.property("ActiveState"));
            assert_ne!(state, "failed", "{}", self.log());
            if restarts >= before + more { Ok(()) } else { Err(format!("{restarts} restarts, {state}")) }
        });
    }

    /// Waits until a restart succeeds.
    pub(super) fn wait_active(&self) {
        wait_until("the worker serves", DEADLINE, || match self.property("ActiveState").as_str() {
            "active" => Ok(()),
            other => Err(other.to_owned()),
        });
    }

    /// Sends SIGUSR2 to the main process and waits for the successor.
    pub(super) fn upgrade(&self) {
        let ready = self.ready();
        fs::remove_file(self.state().join("ready.json")).expect("the worker is not ready");
        self.signal(Signal::USR2);
        wait_until("the successor is ready", DEADLINE, || {
            let text = fs::read_to_string(self.state().join("ready.json"));
            text.map_err(|error| error.to_string())
        });
        wait_until("systemd knows it", DEADLINE, || match self.property("ActiveState").as_str() {
            "active" => Ok(()),
            other => Err(other.to_owned()),
        });
        assert_eq!(self.ready().grpc_port, ready.grpc_port);
    }

    /// Returns the worker's ready line.
    pub(super) fn ready(&self) -> Ready {
        let text = fs::read_to_string(self.state().join("ready.json")).expect("the worker is not ready");
        serde_json::from_str(&text).unwrap()
    }

    /// Writes a configuration with `capacity`, `backing` and fixed ports. `data` lists data
    /// directories below [`STATE`].
    pub(super) fn configure(&self, capacity: &str, backing: &str, data: &[&str]) {
        let path = self.dir.path().join("etc/config.toml");
        let data: Vec<PathBuf> = data.iter().map(|name| Path::new(STATE).join(name)).collect();
        let memory = format!("backing = {backing:?}\n");
        let tables = "disk_healthy_check_interval_sec = 1\n[hybrid_store]\n\
             memory_spill_high_watermark = 0.99\nmemory_spill_low_watermark = 0.98\n";
        let text = ConfigLines {
            capacity,
            top: &self.ports,
            memory: &memory,
            local: tables,
            ..ConfigLines::default()
        }
        .text(&data);
        fs::write(path, &text).unwrap();
        let root = Path::new("/proc").join(self.init.to_string()).join("root");
        fs::write(root.join("etc").join("uniffle-worker").join("config.toml"), text).unwrap();
    }

    /// Returns a client of the worker.
    pub(super) async fn client(&self) -> ShuffleClient {
        let client = ShuffleClient::connect(local(self.ready().grpc_port))
            .await
            .expect("cannot connect to the worker");
        client.with_backoff(long_backoff())
    }

    /// Returns the worker's metrics.
    pub(super) fn metrics(&self) -> Metrics {
        Metrics::fetch(self.ready().http_port).expect("cannot fetch the metrics of the worker")
    }

    /// Waits until the worker has logged `text`.
    pub(super) fn wait_log(&self, text: &str) {
        wait_until(&format!("the worker logs {text:?}"), DEADLINE, || {
            if self.log().contains(text) { Ok(()) } else { Err("the text is not in the log".to_owned()) }
        });
    }

    /// Returns the log of the worker.
    pub(super) fn log(&self) -> String {
        fs::read_to_string(self.state().join("worker.log")).unwrap_or_default()
    }
}

/// Creates the directories that replace the machine's own in the namespace.
fn create_root(dir: &Path) {
    for name in ["etc", "bin", "state", "units/uniffle-worker.service.d"] {
        fs::create_dir_all(dir.join(name)).unwrap();
    }
    for (name, text) in ACCOUNTS {
        fs::write(dir.join("etc").join(name), text).unwrap();
    }
    fs::copy(binary("uniffle-worker"), dir.join("bin/uniffle-worker")).unwrap();
    let units = dir.join("units");
    let shipped = Path::new(WORKSPACE).join("deploy/systemd").join(UNIT);
    fs::copy(shipped, units.join(UNIT)).unwrap();
    fs::write(units.join(format!("{UNIT}.d/test.conf")), DROP_IN).unwrap();
    for target in TARGETS {
        fs::write(units.join(target), ALONE).unwrap();
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        if std::thread::panicking() {
            say(&format!("--- {:?}\n--- the worker's log\n{}", self.run(&["status", UNIT]), self.log()));
        }
        drop(self.stdin.take());
        drop(self.namespaces.wait());
    }
}
