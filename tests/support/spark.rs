//! The Spark application of `tests/spark/`, built by Maven and kept running in one JVM that takes commands.
//!
//! The JVM prints one JSON object per line on stdout; see `uniffle.Main` for commands and answers. It ends when its
//! standard input does, so it can not outlive the test.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use super::{in_ci, say};

const PROJECT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/spark");
/// Where Maven builds: below cargo's target directory, and the default of the pom when that is at its usual place.
const OUTPUT: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/spark");
/// All scenarios in vanilla mode take 30 s on two idle cores.
const COMMAND_DEADLINE: Duration = Duration::from_secs(300);

/// A JVM that waits for commands.
#[derive(Debug)]
pub(crate) struct Jvm {
    child: Child,
    commands: ChildStdin,
    answers: Receiver<String>,
    log: PathBuf,
}

impl Jvm {
    /// Builds the application unless it is up to date, and starts it. `None` when there is no Java or no Maven:
    /// that is said in a line, and is a failure in the pipeline.
    pub(crate) fn start() -> Option<Self> {
        if let Some(missing) = ["java", "mvn"].into_iter().find(|tool| !runs(tool)) {
            let line = format!("SKIPPED: no `{missing}` here, so nothing was tried with Spark");
            assert!(!in_ci(), "{line} (and CI=true)");
            say(&line);
            return None;
        }
        build();
        let log = Path::new(OUTPUT).join("jvm.log");
        let temp = Path::new(OUTPUT).join("tmp");
        // Shuffle files of vanilla Spark, also those of a JVM that was killed.
        drop(std::fs::remove_dir_all(&temp));
        std::fs::create_dir_all(&temp).expect("a directory for Spark's own files");
        let mut child = Command::new("java")
            .arg(format!("@{PROJECT}/jvm.options"))
            .arg(format!("-Djava.io.tmpdir={}", temp.display()))
            .args(["-cp", &format!("{OUTPUT}/classes:{OUTPUT}/deps/*"), "uniffle.Main"])
            .env("SPARK_LOCAL_IP", "127.0.0.1")
            .env_remove("SPARK_LOCAL_DIRS")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(&log).expect("the log"))
            .spawn()
            .expect("java runs");
        let stdout = BufReader::new(child.stdout.take().expect("piped above"));
        let (send, answers) = channel();
        // Ends with the JVM, or with the receiver.
        std::thread::spawn(move || {
            stdout.lines().map_while(Result::ok).try_for_each(|line| send.send(line)).ok();
        });
        let commands = child.stdin.take().expect("piped above");
        Some(Self { child, commands, answers, log })
    }

    /// Runs one application, to its end, and returns the lines of its scenarios.
    ///
    /// # Errors
    /// No answer in time, or the JVM is gone; then no further command makes sense.
    pub(crate) fn run(&mut self, mode: &str, words: &str) -> Result<Vec<Value>, String> {
        let deadline = Instant::now() + COMMAND_DEADLINE;
        writeln!(self.commands, "modes={mode} {words}").map_err(|error| self.lost(&error.to_string()))?;
        let mut scenarios = Vec::new();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.answers.recv_timeout(left).map_err(|error| match error {
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

    /// The end of what Spark and the client logged.
    pub(crate) fn log_tail(&self) -> String {
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

fn runs(tool: &str) -> bool {
    // `java -version`, `mvn -version`: both know it, and both end with 0.
    Command::new(tool)
        .arg("-version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Runs Maven when the sources are not those that were built last. Its first run downloads 280 MB.
fn build() {
    let stamp_file = Path::new(OUTPUT).join("built-from");
    let stamp = sources_stamp(Path::new(PROJECT));
    if std::fs::read_to_string(&stamp_file).is_ok_and(|built| built == stamp) {
        return;
    }
    let start = Instant::now();
    say("building tests/spark with Maven; the first time it downloads 280 MB");
    let build = || {
        Command::new("mvn")
            .args(["-B", "-ntp", "-q", "-f", PROJECT, "package"])
            .arg(format!("-Dscenarios.target={OUTPUT}"))
            .stdin(Stdio::null())
            .output()
            .expect("mvn runs")
    };
    let mut result = build();
    if !result.status.success() {
        say("mvn failed; once more, since the network may have been at fault");
        result = build();
    }
    assert!(
        result.status.success(),
        "mvn: {}\n{}\n{}",
        result.status,
        String::from_utf8_lossy(&result.stdout),
        String::from_utf8_lossy(&result.stderr)
    );
    std::fs::write(&stamp_file, stamp).expect("the output directory was just made");
    say(&format!("tests/spark was built in {:.0} s", start.elapsed().as_secs_f32()));
}

/// Path and checksum of every source, one per line.
fn sources_stamp(project: &Path) -> String {
    let mut lines = Vec::new();
    let mut open = vec![project.join("pom.xml"), project.join("src")];
    while let Some(path) = open.pop() {
        if path.is_dir() {
            open.extend(std::fs::read_dir(&path).expect("readable").flatten().map(|entry| entry.path()));
        } else {
            let bytes = std::fs::read(&path).expect("readable");
            lines.push(format!("{} {:08x}", path.display(), crc32fast::hash(&bytes)));
        }
    }
    lines.sort();
    lines.join("\n")
}
