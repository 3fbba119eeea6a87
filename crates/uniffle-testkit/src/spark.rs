//! The Spark application of `tests/spark/`, built by Maven and run in JVMs that accept commands.
//!
//! A JVM prints one JSON object per line on stdout (`uniffle.Main` describes commands and
//! responses). It ends with its standard input, so it cannot outlive the test.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use crate::tools::{WORKSPACE, kept_dir};
use crate::{maven, say};

/// Time limit of a command. All scenarios in vanilla mode take a minute on two idle cores.
const COMMAND_DEADLINE: Duration = Duration::from_secs(300);

/// Kind of JVM. Each has its own log and temporary files, so that all can run concurrently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum JvmKind {
    /// Spark 3.5.
    Main,
    /// Spark 3.5 with the flag that a client of type GRPC_NETTY needs on JDK 9 and later
    /// (docs/protocol.md §12).
    NoUnsafe,
    /// Spark 3.3.
    Spark33,
}

impl JvmKind {
    fn name(self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::NoUnsafe => "no-unsafe",
            Self::Spark33 => "spark-3.3",
        }
    }

    /// Returns the Spark version. The first one is the default of the pom and is built in the
    /// default directory.
    pub fn spark_version(self) -> &'static str {
        match self {
            Self::Main | Self::NoUnsafe => "3.5.6",
            Self::Spark33 => "3.3.4",
        }
    }

    /// Returns Maven's output directory for this version of Spark: classes and jars.
    fn home(self) -> PathBuf {
        let name = match self {
            Self::Main | Self::NoUnsafe => "spark".to_owned(),
            Self::Spark33 => format!("spark-{}", self.spark_version()),
        };
        kept_dir().join(name)
    }

    fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Main | Self::Spark33 => &[],
            Self::NoUnsafe => &["-Dorg.apache.uniffle.shaded.io.netty.noUnsafe=true"],
        }
    }
}

/// A JVM that waits for commands.
#[derive(Debug)]
pub struct Jvm {
    child: Child,
    commands: ChildStdin,
    answers: Receiver<String>,
    log: PathBuf,
}

impl Jvm {
    /// Builds the application if needed, and starts it.
    pub fn start(kind: JvmKind) -> Self {
        Self::start_as(kind, kind.name(), &[], &[])
    }

    /// Starts a JVM with its own name, so that several of a kind can run concurrently. `wrapper` is
    /// a command that executes the JVM, `flags` are additional flags.
    pub fn start_as(kind: JvmKind, name: &str, wrapper: &[&str], flags: &[&str]) -> Self {
        build(kind);
        let home = kind.home();
        let log = home.join(format!("{name}.log"));
        let temp = home.join("tmp").join(name);
        // Removes shuffle files of vanilla Spark, including those of a killed JVM.
        drop(std::fs::remove_dir_all(&temp));
        std::fs::create_dir_all(&temp).expect("cannot create the directory of Spark's own files");
        let command = [wrapper, &["java"]].concat();
        let mut child = Command::new(command[0])
            .args(&command[1..])
            .arg(format!("@{WORKSPACE}/tests/spark/jvm.options"))
            .args(kind.flags())
            .args(flags)
            .arg(format!("-Djava.io.tmpdir={}", temp.display()))
            .args(["-cp", &format!("{0}/classes:{0}/jars/*", home.display()), "uniffle.Main"])
            .env("SPARK_LOCAL_IP", "127.0.0.1")
            // Executors of local-cluster start from this directory.
            .env("SPARK_HOME", &home)
            .env("SPARK_SCALA_VERSION", "2.12")
            .env_remove("SPARK_LOCAL_DIRS")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(&log).unwrap())
            .spawn()
            .expect("cannot run java");
        let stdout = BufReader::new(child.stdout.take().expect("stdout is piped"));
        let (send, answers) = channel();
        // Ends with the JVM, or with the receiver.
        std::thread::spawn(move || {
            stdout.lines().map_while(Result::ok).try_for_each(|line| send.send(line)).ok();
        });
        let commands = child.stdin.take().expect("stdin is piped");
        Self { child, commands, answers, log }
    }

    /// Starts one application. [`Jvm::finish`] waits for it.
    ///
    /// # Errors
    /// Fails if the JVM is gone. No further command is possible then.
    pub fn begin(&mut self, mode: &str, words: &str) -> Result<(), String> {
        writeln!(self.commands, "modes={mode} {words}").map_err(|error| self.lost(&error.to_string()))
    }

    /// Waits for the end of the application and returns the lines of its scenarios.
    ///
    /// # Errors
    /// Fails without a response in time, or if the JVM is gone. No further command is possible
    /// then.
    pub fn finish(&mut self) -> Result<Vec<Value>, String> {
        let deadline = Instant::now() + COMMAND_DEADLINE;
        let mut scenarios = Vec::new();
        loop {
            let remaining = deadline.saturating_duration_since(Instant::now());
            let line = self.answers.recv_timeout(remaining).map_err(|error| match error {
                RecvTimeoutError::Timeout => self.lost("no answer in time"),
                RecvTimeoutError::Disconnected => self.lost("it has ended"),
            })?;
            say(&line);
            let answer: Value =
                serde_json::from_str(&line).map_err(|error| self.lost(&format!("{error} in {line}")))?;
            if answer.get("event").is_some_and(|event| event == "stopped") {
                return Ok(scenarios);
            }
            let refused = answer.get("scenario").is_some_and(|name| name == "command");
            scenarios.push(answer);
            if refused {
                return Ok(scenarios);
            }
        }
    }

    /// Returns the end of the log of Spark and the client.
    pub fn log_tail(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(120)..].join("\n")
    }

    fn lost(&self, why: &str) -> String {
        format!("the JVM is lost: {why}\n--- end of its log\n{}", self.log_tail())
    }
}

impl Drop for Jvm {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Runs Maven if the sources have changed. The first run downloads 280 MB per Spark version.
pub fn build(kind: JvmKind) {
    let version = format!("-Dspark.version={}", kind.spark_version());
    let output = format!("-Dscenarios.target={}", kind.home().display());
    maven::build(&Path::new(WORKSPACE).join("tests/spark"), &kind.home(), &[output, version]);
}
