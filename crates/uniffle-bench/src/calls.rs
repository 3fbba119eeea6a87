//! System calls of the server, counted by `perf stat`: from when it has found the server's threads until it is told to end.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::process::{Child, Command};
use tokio::time::sleep;

/// What `perf` counts.
const EVENT: &str = "raw_syscalls:sys_enter";
/// How long `perf` takes to find the threads, at most.
const ATTACH: Duration = Duration::from_millis(500);

/// A count that goes on until it is asked for.
#[derive(Debug)]
pub(crate) struct SystemCalls(Child);

impl SystemCalls {
    /// Begins to count those of `pid` and of what threads it starts.
    pub(crate) async fn of(pid: u32) -> anyhow::Result<Self> {
        let mut command = Command::new("perf");
        command.args(["stat", "-x", ",", "-e", EVENT, "-p", &pid.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().context("--system-calls needs perf")?;
        sleep(ATTACH).await;
        let ended = child.try_wait()?;
        ensure!(ended.is_none(), "perf does not count {EVENT} of {pid}: {ended:?}");
        Ok(Self(child))
    }

    /// What was counted.
    pub(crate) async fn count(self) -> anyhow::Result<u64> {
        let pid = self.0.id().and_then(|pid| rustix::process::Pid::from_raw(pid.cast_signed()));
        let pid = pid.context("perf ended before it was asked for its count")?;
        rustix::process::kill_process(pid, rustix::process::Signal::INT)?;
        let output = self.0.wait_with_output().await?;
        let text = String::from_utf8_lossy(&output.stderr);
        counted(&text).with_context(|| format!("perf counted no system calls: {text}"))
    }
}

/// The count in the comma-separated output of `perf stat`: its first field.
fn counted(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.contains(EVENT))?;
    line.split(',').next()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_is_found() {
        let text = "# started\n62900,,raw_syscalls:sys_enter,1933419,100.00,,\n";
        assert_eq!(counted(text), Some(62_900));
        assert_eq!(counted("<not supported>,,raw_syscalls:sys_enter,0,100.00,,\n"), None);
        assert_eq!(counted("Error: no permission\n"), None);
    }
}
