//! Runs jobs in a child process, which is this program started again (`symbols` is its code).
//!
//! Resolving names reads debug information, which takes about 200 MiB. That would break the memory
//! bound of this process (`budget::memory_plan`).
//! Invariant: if the child fails in any way, the profile has addresses instead of names. The child
//! has ended when the job is done.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::Context as _;

use super::job::{PlaceNames, RenderJob};
use super::{ProfileError, render, wire};
use uniffle_base::clock::Instant;

/// First argument that makes this program run as the child (`symbols::answer_on_stdin`).
pub const SUBCOMMAND: &str = "__symbols";

/// The running program, even after its file was replaced.
pub(super) const PROGRAM: &str = "/proc/self/exe";

/// Long, because the child runs at the lowest priority: seconds of CPU time may take minutes.
const DEADLINE: Duration = Duration::from_secs(300);

/// Size limit of the answer, far above a flamegraph of the largest profile.
const ANSWER_BYTES_MAX: u64 = 32 << 20;

/// Environment variables passed to the child, which it needs to find its libraries. Others concern
/// this process only: sockets, the service manager, allocator options.
const ENVIRONMENT: &[&str] = &["LD_LIBRARY_PATH"];

/// Runs the job, with function names if possible.
///
/// # Errors
/// If the job fails even without names.
pub(super) fn made(job: &RenderJob) -> Result<Vec<u8>, ProfileError> {
    if std::fs::read_link(PROGRAM).is_ok_and(|path| is_gone(&path)) {
        tracing::warn!(
            "the program's file was replaced or removed; profiles have addresses instead of names"
        );
    }
    Helper::this_program().made(job)
}

/// Returns whether the program's file was deleted. Debug information is read from that path.
fn is_gone(program: &Path) -> bool {
    program.as_os_str().as_encoded_bytes().ends_with(b" (deleted)")
}

/// The program that runs as the child.
#[derive(Debug)]
struct Helper {
    program: PathBuf,
    arguments: Vec<OsString>,
    deadline: Duration,
}

impl Helper {
    fn this_program() -> Self {
        Self { program: PROGRAM.into(), arguments: vec![SUBCOMMAND.into()], deadline: DEADLINE }
    }

    fn made(&self, job: &RenderJob) -> Result<Vec<u8>, ProfileError> {
        self.asked(job)
            .or_else(|error| {
                tracing::warn!(
                    error = format!("{error:#}"),
                    "symbolization failed; the profile or dump has addresses instead of names"
                );
                render::made(job, &PlaceNames::none(&job.places))
            })
            .map_err(|error| ProfileError::Failed(format!("{error:#}")))
    }

    fn asked(&self, job: &RenderJob) -> anyhow::Result<Vec<u8>> {
        let question = postcard::to_allocvec(job).context("cannot serialize the job")?;
        let (ours, theirs) = UnixStream::pair().context("cannot create a socket pair")?;
        let mut running = ChildProcess::start(self, theirs)?;
        let mut line = ChildConnection { stream: ours, until: Instant::now() + self.deadline };
        let answered = line.ask(&question, ANSWER_BYTES_MAX);
        answered.map_err(|error| match running.end() {
            Ok(status) => anyhow::anyhow!("{error}; the process: {status}"),
            Err(_) => error.into(),
        })
    }
}

/// The child process. Dropping this kills it.
#[derive(Debug)]
struct ChildProcess(Child);

impl ChildProcess {
    /// Starts the child with `theirs` as stdin and stdout. All other descriptors are closed on
    /// exec.
    fn start(helper: &Helper, theirs: UnixStream) -> anyhow::Result<Self> {
        let program = helper.program.display();
        let kept = ENVIRONMENT.iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
        let stdin = OwnedFd::from(theirs.try_clone().context("cannot duplicate the socket")?);
        let child = Command::new(&helper.program)
            .args(&helper.arguments)
            .env_clear()
            .envs(kept)
            .stdin(stdin)
            .stdout(OwnedFd::from(theirs))
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot run {program}"))?;
        Ok(Self(child))
    }

    /// Kills the child if it still runs. Returns its exit status.
    fn end(&mut self) -> io::Result<ExitStatus> {
        self.0.kill()?;
        self.0.wait()
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // Fails if the child was already reaped.
        let _ = self.end();
    }
}

/// The connection to the child, with a deadline.
#[derive(Debug)]
struct ChildConnection {
    stream: UnixStream,
    until: Instant,
}

impl ChildConnection {
    fn ask(&mut self, question: &[u8], answer_bytes_max: u64) -> io::Result<Vec<u8>> {
        wire::write(self, wire::QUESTION, question)?;
        self.stream.shutdown(Shutdown::Write)?;
        wire::read(self, wire::ANSWER, answer_bytes_max)
    }

    fn remaining(&self) -> io::Result<Duration> {
        let remaining = self.until.saturating_duration_since(Instant::now());
        if remaining.is_zero() { Err(late()) } else { Ok(remaining) }
    }
}

impl Read for ChildConnection {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.remaining()?))?;
        self.stream.read(buffer).map_err(timely)
    }
}

impl Write for ChildConnection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.remaining()?))?;
        self.stream.write(bytes).map_err(timely)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "no answer before the deadline")
}

/// Maps the error of a socket timeout, which is `WouldBlock`, to a timeout.
fn timely(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock { late() } else { error }
}

#[cfg(test)]
mod tests {
    use super::super::Format;
    use super::super::job::tests::named;
    use super::super::job::{CountedStack, ProfileJob, SampleUnit, Samples};
    use super::*;

    fn shell(script: &str, deadline: Duration) -> Helper {
        Helper { program: "/bin/sh".into(), arguments: vec!["-c".into(), script.into()], deadline }
    }

    fn job(stacks: usize) -> RenderJob {
        let (places, _) = named(&["read", "serve"]);
        let stack = |_| CountedStack { thread: Some("uniffle".to_owned()), frames: vec![0, 1], found: 3 };
        let stacks = (0..stacks).map(stack).collect();
        let samples = Samples { kind: SampleUnit::Heap, began_nanos: 0, duration_nanos: 0, stacks };
        RenderJob { places, what: ProfileJob::Profile(samples, Format::Svg) }
    }

    /// Returns why the child failed, after checking that the result has addresses instead of names.
    fn failure(helper: &Helper, job: &RenderJob) -> String {
        let svg = String::from_utf8(helper.made(job).unwrap()).unwrap();
        assert!(svg.contains("</svg>") && svg.contains("0x1000 worker"), "{svg}");
        format!("{:#}", helper.asked(job).unwrap_err())
    }

    #[test]
    fn missing_program_leaves_addresses_without_names() {
        let helper = Helper { program: "/nowhere/worker".into(), ..shell("", DEADLINE) };
        let why = failure(&helper, &job(1));
        assert!(why.starts_with("cannot run /nowhere/worker: "), "{why}");
    }

    #[test]
    fn invalid_response_leaves_addresses_without_names() {
        for (script, expected) in [
            ("cat >/dev/null; echo 'error: unrecognized subcommand'", "not a message of this program"),
            ("exec cat", "not a message of this program"),
            ("cat >/dev/null; echo no", "failed to fill whole buffer"),
            ("cat >/dev/null; exit 7", "exit status: 7"),
            ("cat >/dev/null; kill -9 $$", "signal: 9"),
            (r"cat >/dev/null; printf 'uffname!\1\0\0\0\0\0\0\0'", "unexpected end of file"),
            (r"cat >/dev/null; printf 'uffname!\0\0\0\0\0\0\0\1'", "the limit is 33554432"),
        ] {
            let why = failure(&shell(script, DEADLINE), &job(1));
            assert!(why.contains(expected), "{script}: {why}");
        }
    }

    #[test]
    fn hung_child_leaves_addresses_without_names() {
        let short = Duration::from_millis(50);
        let why = failure(&shell("exec sleep 1000", short), &job(1));
        assert!(why.starts_with("no answer before the deadline; the process: signal: 9"), "{why}");
        // This program reads nothing, and the question does not fit into the socket buffer.
        let why = failure(&shell("exec sleep 1000", short), &job(100_000));
        assert!(why.starts_with("no answer before the deadline; the process: signal: 9"), "{why}");
    }

    #[test]
    fn ended_child_leaves_addresses_without_names() {
        let why = failure(&shell("exec true", DEADLINE), &job(100_000));
        assert!(why.contains("the process: exit status: 0"), "{why}");
    }

    #[test]
    fn child_responds_and_inherits_nothing() {
        let open = tempfile::NamedTempFile::new().unwrap();
        let script = r"cat >/dev/null
            tr '\0' '\n' </proc/$$/environ | grep -v ^LD_LIBRARY_PATH= && exit 3
            ls -l /proc/$$/fd | grep FILE && exit 4
            printf 'uffname!\2\0\0\0\0\0\0\0ok'";
        let script = script.replace("FILE", open.path().to_str().unwrap());
        let made = shell(&script, DEADLINE).asked(&job(1));
        assert_eq!(made.map_err(|error| format!("{error:#}")), Ok(b"ok".to_vec()));
    }
}
