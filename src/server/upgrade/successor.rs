//! Starts the next program of an upgrade in place.
//!
//! The successor has the same command line. It first rehearses in a child process (`rehearsal`),
//! and is then executed in this process. `exec` keeps the process id, the place under the service
//! manager and every descriptor without close-on-exec. Sockets are passed as systemd passes them
//! (`sockets`).
//!
//! The binary is looked up under the path this process was started with. A package upgrade or a
//! switched symbolic link therefore selects the next program. After a start by a bare name, only a
//! replaced file does, because the path is that of the executable without links.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::ChildStdout;

use super::rehearsal::{PROGRAM, REHEARSED, TAKES_MEMORY, TAKES_SIGNALS};
use crate::log::HandOff;
use crate::server::sockets::{GAP_BEGAN, HAND_OFF, Inherited, PREDECESSOR};

/// Time limit of a rehearsal. It gives up on disks after 30 s and on remote stores after 60 s;
/// meanwhile this worker serves.
const REHEARSAL_DEADLINE: Duration = Duration::from_secs(150);
/// Maximum number of bytes read from each output stream of a rehearsal.
const OUTPUT_BYTES_MAX: u64 = 64 << 10;
/// Lowest descriptor number for a successor, above the standard descriptors.
const FIRST_DESCRIPTOR: RawFd = 16;
/// Upper bound of descriptor numbers, far above any limit of open descriptors.
const DESCRIPTORS_MAX: RawFd = 1 << 24;

/// The command line of the next process.
#[derive(Debug, Clone)]
pub struct Successor {
    program: PathBuf,
    arguments: Vec<OsString>,
}

impl Successor {
    /// Returns the command line of this process. Must be called before the working directory
    /// changes.
    ///
    /// # Errors
    /// If the path of the executable cannot be determined.
    pub fn of_this_process() -> io::Result<Self> {
        let mut arguments = std::env::args_os();
        let called = PathBuf::from(arguments.next().unwrap_or_default());
        // A bare name was looked up in PATH. The resolved path is good enough.
        let is_path = called.components().count() > 1;
        let program = if is_path { std::path::absolute(called)? } else { std::env::current_exe()? };
        Ok(Self { program, arguments: arguments.collect() })
    }

    /// Runs the new binary with `--check` in a child process, to prove that it can take over.
    ///
    /// The environment variable `variable` with `facts` describes this process to it. For a binary
    /// that only knows `--check` the exit code decides.
    ///
    /// # Errors
    /// The new binary cannot be run, refuses or takes too long. The error has its error output.
    pub(super) async fn rehearse(&self, variable: &str, facts: String) -> anyhow::Result<RehearsalReport> {
        let program = self.program.display();
        let mut child = tokio::process::Command::new(&self.program)
            .args(&self.arguments)
            .arg("--check")
            .env(variable, facts)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot run {program}"))?;
        let verdict = child.stdout.take().map(verdict).context("no pipe from the rehearsal")?;
        let stderr = child.stderr.take().context("no pipe from the rehearsal")?;
        let mut stderr_text = Vec::new();
        let outcome = crate::clock::timeout(REHEARSAL_DEADLINE, async {
            let ended = async {
                let mut stderr = stderr.take(OUTPUT_BYTES_MAX);
                let (_, status) = tokio::join!(stderr.read_to_end(&mut stderr_text), child.wait());
                status
            };
            tokio::select! {
                biased;
                rehearsed = verdict => Ok(RehearsalOutcome::Succeeded(rehearsed)),
                status = ended => status.map(RehearsalOutcome::Exit),
            }
        })
        .await;
        let stderr_text = || String::from_utf8_lossy(&stderr_text).trim().to_owned();
        let Ok(status) = outcome else {
            bail!("{program} --check took longer than {REHEARSAL_DEADLINE:?}: {}", stderr_text());
        };
        match status? {
            RehearsalOutcome::Exit(status) if !status.success() => {
                bail!("{program} --check: {status}: {}", stderr_text())
            }
            RehearsalOutcome::Exit(_) => Ok(RehearsalReport::default()),
            RehearsalOutcome::Succeeded(rehearsed) => Ok(rehearsed),
        }
    }

    /// Replaces this process by the next program. Returns only on failure, with the error and the
    /// sockets.
    pub fn exec(&self, mut sockets: Inherited) -> (io::Error, Inherited) {
        let (gap_began_ms, hand_off) = (sockets.gap_began_ms, sockets.hand_off.take());
        let predecessor = sockets.predecessor.take().unwrap_or_default();
        let until_exec = sockets.until_exec.take();
        let named = sockets.into_named();
        let error = match self.passing(&named, gap_began_ms, hand_off.as_ref()) {
            Ok((mut next, _copies)) => {
                next.env(PREDECESSOR, predecessor).env("LISTEN_PID", std::process::id().to_string()).exec()
            }
            Err(error) => error,
        };
        // Exec failed: the next worker of this program maps the memory again.
        drop(until_exec);
        let back = Inherited::from_named(named);
        (error, Inherited { gap_began_ms, is_returned: true, hand_off, ..back })
    }

    /// Builds the command of the next process. Also returns copies of the descriptors, which must
    /// stay open until exec.
    fn passing(
        &self,
        named: &[(String, OwnedFd)],
        gap_began_ms: Option<u64>,
        hand_off: Option<&HandOff>,
    ) -> io::Result<(Command, Vec<OwnedFd>)> {
        let descriptors: Vec<&OwnedFd> = named.iter().map(|(_, descriptor)| descriptor).collect();
        let copies = duplicate_consecutively(&descriptors)?;
        for copy in &copies {
            fcntl_setfd(copy, FdFlags::empty())?;
        }
        let names: Vec<&str> = named.iter().map(|(name, _)| name.as_str()).collect();
        let mut next = Command::new(&self.program);
        next.args(&self.arguments)
            .env_remove("LISTEN_PID")
            .env("LISTEN_FDS", copies.len().to_string())
            .env("LISTEN_FDNAMES", names.join(":"))
            .env("LISTEN_FDS_FIRST_FD", copies.first().map_or(3, |copy| copy.as_raw_fd()).to_string())
            .env(GAP_BEGAN, gap_began_ms.unwrap_or_default().to_string())
            .env_remove(HAND_OFF);
        if let Some(hand_off) = hand_off.and_then(|it| serde_json::to_string(it).ok()) {
            next.env(HAND_OFF, hand_off);
        }
        Ok((next, copies))
    }
}

/// A successor that can take over.
#[derive(Debug, Default)]
pub(super) struct RehearsalReport {
    /// True if it takes over the memory contents without a flush.
    pub(super) takes_memory: bool,
    /// True if it handles signals that are pending at `exec`.
    pub(super) takes_signals: bool,
    /// Version and commit, if the successor reports them.
    pub(in crate::server) program: Option<String>,
}

/// Outcome of a rehearsal.
enum RehearsalOutcome {
    /// Nothing prevents the upgrade.
    Succeeded(RehearsalReport),
    /// The child ended without printing a verdict.
    Exit(ExitStatus),
}

/// Resolves when the rehearsal prints that nothing prevents the upgrade, otherwise never.
async fn verdict(stdout: ChildStdout) -> RehearsalReport {
    let mut lines = BufReader::new(stdout.take(OUTPUT_BYTES_MAX)).lines();
    let mut rehearsed = RehearsalReport::default();
    while let Ok(Some(line)) = lines.next_line().await {
        if line == REHEARSED {
            return rehearsed;
        }
        rehearsed.takes_memory |= line == TAKES_MEMORY;
        rehearsed.takes_signals |= line == TAKES_SIGNALS;
        if let Some(program) = line.strip_prefix(PROGRAM) {
            rehearsed.program = Some(program.to_owned());
        }
    }
    std::future::pending().await
}

/// Duplicates `descriptors` to consecutive numbers, as the `LISTEN_FDS` convention requires.
fn duplicate_consecutively(descriptors: &[&OwnedFd]) -> io::Result<Vec<OwnedFd>> {
    let mut first = FIRST_DESCRIPTOR;
    while first < DESCRIPTORS_MAX {
        let mut copies: Vec<OwnedFd> = Vec::with_capacity(descriptors.len());
        for descriptor in descriptors {
            let wanted = copies.last().map_or(first, |last| last.as_raw_fd() + 1);
            let copy = fcntl_dupfd_cloexec(descriptor, wanted)?;
            let follows = copies.is_empty() || copy.as_raw_fd() == wanted;
            if !follows {
                // Another descriptor is in between: retry above it.
                copies.clear();
                first = copy.as_raw_fd();
                break;
            }
            copies.push(copy);
        }
        if copies.len() == descriptors.len() {
            return Ok(copies);
        }
    }
    Err(io::Error::other("too few consecutive descriptors are free for the inherited sockets"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_copied_around_occupied_ones() {
        let files: Vec<OwnedFd> = (0..5).map(|_| tempfile::tempfile().unwrap().into()).collect();
        let descriptors: Vec<&OwnedFd> = files.iter().collect();
        let row = |copies: &[OwnedFd]| copies.iter().map(|copy| copy.as_raw_fd()).collect::<Vec<_>>();
        let copies = duplicate_consecutively(&descriptors).unwrap();
        let first = copies[0].as_raw_fd();
        assert_eq!(row(&copies), (first..first + 5).collect::<Vec<_>>());
        // A descriptor that is in the way.
        let mut copies = copies;
        let kept = copies.remove(2);
        drop(copies);
        let again = duplicate_consecutively(&descriptors).unwrap();
        let first = again[0].as_raw_fd();
        assert_eq!(row(&again), (first..first + 5).collect::<Vec<_>>());
        assert!(!row(&again).contains(&kept.as_raw_fd()));
        assert!(duplicate_consecutively(&[]).unwrap().is_empty());
    }
}
