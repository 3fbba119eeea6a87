//! Counts the server's system calls with `perf stat`. The count begins when `perf` has attached to
//! the server's threads, and ends when it is requested, which runs do once the server is idle.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::process::{Child, Command};
use tokio::time::sleep;

/// Event that `perf` counts.
const EVENT: &str = "raw_syscalls:sys_enter";
/// Time that `perf` gets to attach to the threads. It does not report when it is ready.
const ATTACH_TIME: Duration = Duration::from_millis(500);

/// A running count.
#[derive(Debug)]
pub(crate) struct SyscallCounter(Child);

impl SyscallCounter {
    /// Starts counting the system calls of `pid` and of the threads that it starts.
    pub(crate) async fn attach(pid: u32) -> anyhow::Result<Self> {
        let mut command = Command::new("perf");
        command.args(["stat", "-x", ",", "-e", EVENT, "-p", &pid.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().context("--system-calls needs perf")?;
        sleep(ATTACH_TIME).await;
        if child.try_wait()?.is_some() {
            let output = child.wait_with_output().await?;
            let text = String::from_utf8_lossy(&output.stderr);
            let reason: Vec<&str> = text.split_whitespace().collect();
            bail!("perf cannot count {EVENT} of process {pid}: {}", reason.join(" "));
        }
        Ok(Self(child))
    }

    /// Stops counting and returns the count.
    pub(crate) async fn finish(self) -> anyhow::Result<u64> {
        let pid = self.0.id().and_then(|pid| rustix::process::Pid::from_raw(pid.cast_signed()));
        let pid = pid.context("perf ended before its count was requested")?;
        rustix::process::kill_process(pid, rustix::process::Signal::INT)?;
        let output = self.0.wait_with_output().await?;
        let text = String::from_utf8_lossy(&output.stderr);
        parse_count(&text).with_context(|| format!("perf counted no system calls: {text}"))
    }
}

/// Parses the comma-separated output of `perf stat`. The count is the first field.
fn parse_count(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.contains(EVENT))?;
    line.split(',').next()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_call_count_is_parsed() {
        let text = "# started\n62900,,raw_syscalls:sys_enter,1933419,100.00,,\n";
        assert_eq!(parse_count(text), Some(62_900));
        assert_eq!(parse_count("<not supported>,,raw_syscalls:sys_enter,0,100.00,,\n"), None);
        assert_eq!(parse_count("Error: no permission\n"), None);
    }
}
