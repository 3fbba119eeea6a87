//! A real HDFS: Hadoop's NameNode and DataNode in a separate JVM (`tests/hdfs/`), on free ports.
//!
//! The JVM reads commands from standard input and writes one response per line (see
//! `uniffle.MiniHdfs`). It ends with its input, so it cannot outlive the test.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use parking_lot::Mutex;

use crate::tools::{WORKSPACE, kept_dir};
use crate::{maven, say};

/// Time limit of a command. One that waits for a DataNode to register takes seconds.
const COMMAND_DEADLINE: Duration = Duration::from_secs(120);

/// A running HDFS.
#[derive(Debug)]
pub struct MiniHdfs {
    child: Child,
    pipes: Mutex<Pipes>,
    dir: tempfile::TempDir,
    ports: Vec<u16>,
}

#[derive(Debug)]
struct Pipes {
    commands: ChildStdin,
    answers: Receiver<String>,
}

/// A file in the NameNode's listing.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileStatus {
    pub path: String,
    pub bytes: u64,
    pub owner: String,
}

/// Directory in which Maven puts classes and jars.
fn home() -> PathBuf {
    kept_dir().join("hdfs")
}

/// Runs Maven unless its output is up to date.
pub fn build() {
    maven::build(
        &Path::new(WORKSPACE).join("tests/hdfs"),
        &home(),
        &[format!("-Dhdfs.target={}", home().display())],
    );
}

impl MiniHdfs {
    /// Starts an HDFS with Hadoop `settings`, each `name=value`.
    pub fn start(settings: &[&str]) -> Self {
        Self::start_with(Command::new("java"), settings)
    }

    /// Starts an HDFS with a command that ends in running `java`, such as one that enters a network
    /// namespace.
    pub fn start_with(mut java: Command, settings: &[&str]) -> Self {
        build();
        let home = home();
        let dir = tempfile::Builder::new().prefix("uniffle-hdfs-").tempdir().unwrap();
        let log = std::fs::File::create(dir.path().join("hdfs.log")).unwrap();
        let mut child = java
            .args(["-Xmx512m", "-XX:+UseSerialGC", "-XX:-UsePerfData", "-Djava.net.preferIPv4Stack=true"])
            .arg("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn")
            .args(["-cp", &format!("{0}/classes:{0}/jars/*", home.display()), "uniffle.MiniHdfs"])
            .arg(dir.path().join("dfs"))
            .args(settings)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .expect("cannot run java");
        let stdout = BufReader::new(child.stdout.take().expect("stdout is piped"));
        let (send, answers) = channel();
        // Ends with the JVM, or with the receiver.
        std::thread::spawn(move || {
            stdout.lines().map_while(Result::ok).try_for_each(|line| send.send(line)).ok();
        });
        let commands = child.stdin.take().expect("stdin is piped");
        let mut hdfs = Self { child, pipes: Mutex::new(Pipes { commands, answers }), dir, ports: Vec::new() };
        let ready = hdfs.pipes.lock().answers.recv_timeout(COMMAND_DEADLINE);
        let ready = ready.unwrap_or_else(|error| panic!("HDFS does not start: {error}\n{}", hdfs.log_tail()));
        let ports = ready.strip_prefix("ready ").into_iter().flat_map(|ports| ports.split(' '));
        hdfs.ports = ports.filter_map(|port| port.parse().ok()).collect();
        assert!(!hdfs.ports.is_empty(), "HDFS announced no ports: {ready}\n{}", hdfs.log_tail());
        hdfs
    }

    /// `hdfs://127.0.0.1:<port><path>`
    pub fn url(&self, path: &str) -> String {
        format!("hdfs://127.0.0.1:{}{path}", self.port())
    }

    /// Returns the NameNode's port.
    pub fn port(&self) -> u16 {
        self.ports[0]
    }

    /// Returns the settings with which a client finds both NameNodes as nameservice `name`.
    /// Requires a start with `ha`.
    pub fn nameservice(&self, name: &str) -> Vec<(String, String)> {
        let mut settings = vec![
            ("dfs.nameservices".to_owned(), name.to_owned()),
            (format!("dfs.ha.namenodes.{name}"), "nn1,nn2".to_owned()),
        ];
        for (node, port) in ["nn1", "nn2"].iter().zip(&self.ports) {
            settings.push((format!("dfs.namenode.rpc-address.{name}.{node}"), format!("127.0.0.1:{port}")));
        }
        settings
    }

    /// Runs a command of `uniffle.MiniHdfs`, which must succeed.
    pub fn run(&self, command: &str) -> String {
        let mut pipes = self.pipes.lock();
        writeln!(pipes.commands, "{command}").unwrap_or_else(|error| panic!("{command}: {error}"));
        let answer = pipes.answers.recv_timeout(COMMAND_DEADLINE);
        let answer = answer.unwrap_or_else(|error| panic!("{command}: {error}\n{}", self.log_tail()));
        answer
            .strip_prefix("ok")
            .unwrap_or_else(|| panic!("{command}: {answer}\n{}", self.log_tail()))
            .trim()
            .to_owned()
    }

    /// Returns all files below a directory, sorted.
    pub fn list(&self, path: &str) -> Vec<FileStatus> {
        let answer = self.run(&format!("list {path}"));
        let mut files: Vec<FileStatus> = answer
            .split_whitespace()
            .map(|file| {
                let mut parts = file.split('|').map(str::to_owned);
                let mut next = || parts.next().unwrap();
                let (path, bytes, owner) = (next(), next(), next());
                FileStatus { path, bytes: bytes.parse().unwrap(), owner }
            })
            .collect();
        files.sort();
        files
    }

    /// Returns the end of Hadoop's log.
    pub fn log_tail(&self) -> String {
        let log = std::fs::read_to_string(self.dir.path().join("hdfs.log")).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(60)..].join("\n")
    }
}

impl Drop for MiniHdfs {
    fn drop(&mut self) {
        if std::thread::panicking() {
            say(&format!("--- end of HDFS's log\n{}", self.log_tail()));
        }
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
