//! Counts the server's system calls with `perf stat`, from the attachment to its threads until the
//! count is requested.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::process::{Child, Command};
use tokio::time::sleep;

/// Event that `perf` counts.
const EVENT: &str = "raw_syscalls:sys_enter";
/// Time that `perf` gets to attach to the threads.
const ATTACH: Duration = Duration::from_millis(500);

/// A running count.
#[derive(Debug)]
pub(crate) struct SystemCalls(Child);

impl SystemCalls {
    /// Starts counting the system calls of `pid` and of the threads that it starts.
    pub(crate) async fn of(pid: u32) -> anyhow::Result<Self> {
        let mut command = Command::new("perf");
        command.args(["stat", "-x", ",", "-e", EVENT, "-p", &pid.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().context("--system-calls needs perf")?;
        sleep(ATTACH).await;
        let ended = child.try_wait()?;
        ensure!(ended.is_none(), "perf cannot count {EVENT} of process {pid}: {ended:?}");
        Ok(Self(child))
    }

    /// Stops counting and returns the count.
    pub(crate) async fn count(self) -> anyhow::Result<u64> {
        let pid = self.0.id().and_then(|pid| rustix::process::Pid::from_raw(pid.cast_signed()));
        let pid = pid.context("perf ended before its count was requested")?;
        rustix::process::kill_process(pid, rustix::process::Signal::INT)?;
        let output = self.0.wait_with_output().await?;
        let text = String::from_utf8_lossy(&output.stderr);
        counted(&text).with_context(|| format!("perf counted no system calls: {text}"))
    }
}

/// Parses the comma-separated output of `perf stat`. The count is the first field.
fn counted(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.contains(EVENT))?;
    line.split(',').next()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_call_count_is_parsed() {
        let text = "# started\n62900,,raw_syscalls:sys_enter,1933419,100.00,,\n";
        assert_eq!(counted(text), Some(62_900));
        assert_eq!(counted("<not supported>,,raw_syscalls:sys_enter,0,100.00,,\n"), None);
        assert_eq!(counted("Error: no permission\n"), None);
    }
}
