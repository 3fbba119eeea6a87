//! The server process: resource usage from `/proc` or from its metrics, and starting it with a
//! command.
//!
//! CPU time and page faults count from the start of the process, so callers compute differences.
//! The CPU time of this process and thread is here too.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde::Serialize;
use tokio::time::{Instant, sleep};

/// Time limit for a server to open its port.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for a server to stop, after which it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);
/// Deadline of a metrics request.
const METRICS_TIMEOUT: Duration = Duration::from_secs(2);

/// Resources that a process has used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct ProcessUsage {
    pub(crate) cpu_seconds: f64,
    pub(crate) rss_bytes: u64,
    pub(crate) peak_rss_bytes: u64,
    pub(crate) threads: u64,
    pub(crate) minor_faults: u64,
    pub(crate) major_faults: u64,
}

/// Source of the figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Probe {
    Pid(u32),
    Http(SocketAddr),
    Nothing,
}

impl Probe {
    /// Selects `pid`, or else the process of this machine that listens on `port`, unless `http` is
    /// on another machine. Selects the metrics of `http` otherwise.
    pub(crate) fn find(pid: Option<u32>, port: u16, http: Option<SocketAddr>) -> Self {
        let local = || if http.is_none_or(|http| http.ip().is_loopback()) { listener(port) } else { None };
        match (pid.or_else(local), http) {
            (Some(pid), _) => Self::Pid(pid),
            (None, Some(http)) => Self::Http(http),
            (None, None) => Self::Nothing,
        }
    }

    pub(crate) fn usage(self) -> Option<ProcessUsage> {
        match self {
            Self::Pid(pid) => from_proc(pid),
            Self::Http(address) => parse_metrics(&scrape(address).ok()?),
            Self::Nothing => None,
        }
    }
}

/// Returns the CPU seconds of this process.
pub(crate) fn own_cpu_seconds() -> f64 {
    seconds(rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime))
}

/// Returns the CPU seconds of this thread.
pub(crate) fn thread_cpu_seconds() -> f64 {
    seconds(rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime))
}

fn seconds(time: rustix::time::Timespec) -> f64 {
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn from_proc(pid: u32) -> Option<ProcessUsage> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    parse_proc(&stat, &status, rustix::param::clock_ticks_per_second() as f64)
}

/// Parses `proc_pid_stat(5)`: the first field after the command in parentheses is field 3.
fn parse_proc(stat: &str, status: &str, ticks_per_second: f64) -> Option<ProcessUsage> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    let kib = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()? * 1024)
    };
    Some(ProcessUsage {
        cpu_seconds: (field(14)? + field(15)?) as f64 / ticks_per_second,
        rss_bytes: kib("VmRSS:")?,
        peak_rss_bytes: kib("VmHWM:")?,
        threads: field(20)?,
        minor_faults: field(10)?,
        major_faults: field(12)?,
    })
}

fn scrape(address: SocketAddr) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, METRICS_TIMEOUT)?;
    stream.set_read_timeout(Some(METRICS_TIMEOUT))?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
    let mut text = String::new();
    stream.take(16 << 20).read_to_string(&mut text)?;
    Ok(text)
}

/// Parses the `process_*` metrics that Prometheus client libraries export. The peak is the
/// current value and faults are 0, because these metrics have neither.
fn parse_metrics(text: &str) -> Option<ProcessUsage> {
    let value = |name: &str| {
        let lines = text.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        lines.filter_map(|value| value.trim().parse::<f64>().ok()).next()
    };
    let whole = |name: &str| value(name).map(|value| format!("{value:.0}").parse().unwrap_or(0));
    let rss_bytes = whole("process_resident_memory_bytes")?;
    Some(ProcessUsage {
        cpu_seconds: value("process_cpu_seconds_total")?,
        rss_bytes,
        peak_rss_bytes: rss_bytes,
        threads: whole("process_threads").unwrap_or(0),
        minor_faults: 0,
        major_faults: 0,
    })
}

/// Returns the process that listens on `port` on this machine, if permissions allow it.
fn listener(port: u16) -> Option<u32> {
    let tables =
        ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| std::fs::read_to_string(path).unwrap_or_default());
    let inode = tables.iter().find_map(|table| listening_inode(table, port))?;
    let wanted = format!("socket:[{inode}]");
    let processes = std::fs::read_dir("/proc").ok()?.flatten();
    let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.find(|pid| {
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let mut links = descriptors.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        links.any(|link| link.to_str() == Some(wanted.as_str()))
    })
}

/// Returns the inode of the socket in state LISTEN (0A) on `port` in a table of `/proc/net`.
fn listening_inode(table: &str, port: u16) -> Option<u64> {
    let port = format!(":{port:04X}");
    table.lines().skip(1).find_map(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let listens = fields.get(1)?.ends_with(&port) && *fields.get(3)? == "0A";
        if listens { fields.get(9)?.parse().ok() } else { None }
    })
}

/// A server that this process started. It is killed on drop, unless [`ServerProcess::stop`] has
/// ended it.
#[derive(Debug)]
pub(crate) struct ServerProcess {
    child: Child,
}

impl ServerProcess {
    /// Starts `command` (a shell line, run with `exec`), and waits until `address` accepts
    /// connections.
    pub(crate) async fn start(command: &str, address: SocketAddr) -> anyhow::Result<Self> {
        if TcpStream::connect_timeout(&address, METRICS_TIMEOUT).is_ok() {
            bail!("{address} is in use, so {command:?} cannot be started there");
        }
        let child = Command::new("/bin/sh")
            .args(["-c", &format!("exec {command}")])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {command:?}"))?;
        let mut server = Self { child };
        let deadline = Instant::now() + START_TIMEOUT;
        while TcpStream::connect_timeout(&address, METRICS_TIMEOUT).is_err() {
            if let Some(status) = server.child.try_wait()? {
                bail!("{command:?} ended with {status} before it opened {address}");
            }
            if Instant::now() > deadline {
                bail!("{command:?} did not open {address} within {} s", START_TIMEOUT.as_secs());
            }
            sleep(Duration::from_millis(50)).await;
        }
        Ok(server)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Asks the server to stop, and kills it after a timeout.
    pub(crate) async fn stop(mut self) {
        let pid = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw);
        if let Some(pid) = pid {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let deadline = Instant::now() + STOP_TIMEOUT;
        while Instant::now() < deadline && matches!(self.child.try_wait(), Ok(None)) {
            sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_stat_is_parsed_with_unusual_command_names() {
        let stat = "42 (a) b) S 1 42 42 0 -1 4194304 111 0 7 0 250 50 0 0 20 0 13 0 100 1000000 300 18446744073709551615";
        let status = "Name:\ta\nVmHWM:\t  2048 kB\nVmRSS:\t    1024 kB\n";
        let expected = ProcessUsage {
            cpu_seconds: 3.0,
            rss_bytes: 1 << 20,
            peak_rss_bytes: 2 << 20,
            threads: 13,
            minor_faults: 111,
            major_faults: 7,
        };
        assert_eq!(parse_proc(stat, status, 100.0), Some(expected));
        assert_eq!(parse_proc("", status, 100.0), None);
    }

    #[test]
    fn process_metrics_are_parsed() {
        let text = "HTTP/1.0 200 OK\r\n\r\n# HELP process_threads x\nprocess_cpu_seconds_total 12.5\n\
                    process_resident_memory_bytes 1.5e6\nprocess_threads 9\n";
        let usage = parse_metrics(text).unwrap();
        assert_eq!((usage.cpu_seconds, usage.rss_bytes, usage.threads), (12.5, 1_500_000, 9));
        assert_eq!(parse_metrics("nothing"), None);
    }

    #[test]
    fn listener_of_a_port_is_found() {
        let listening = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listening.local_addr().unwrap().port();
        assert_eq!(listener(port), Some(std::process::id()));
        drop(listening);
        assert_eq!(listener(port), None);
    }

    #[test]
    fn this_process_and_thread_use_cpu() {
        let usage = Probe::Pid(std::process::id()).usage().unwrap();
        assert!(usage.rss_bytes > 0 && usage.peak_rss_bytes >= usage.rss_bytes && usage.threads >= 1);
        assert!(thread_cpu_seconds() > 0.0 && own_cpu_seconds() >= thread_cpu_seconds());
    }
}
