//! Results of a command as data and as text. The page with plots is in [`super::html`].

use std::io::Write as _;
use std::path::Path;

use anyhow::Context as _;
use bytesize::ByteSize;
use serde::Serialize;

use crate::process::ProcessUsage;
use crate::stats::Latency;

/// 10^9 bytes, as in all figures in GB.
pub(crate) const GB: f64 = 1e9;

/// All results of one command.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct BenchReport {
    /// The command line.
    pub(crate) command: String,
    /// Runs in chronological order. Those of `compare`: first all of A, then all of B.
    pub(crate) runs: Vec<RunReport>,
    /// Named as in reports of earlier versions.
    #[serde(rename = "floor")]
    pub(crate) baseline: Vec<BaselineResult>,
    pub(crate) comparison: Vec<Comparison>,
    pub(crate) hdd: Vec<HddLine>,
}

/// One run against one server.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct RunReport {
    pub(crate) name: String,
    pub(crate) phases: Vec<PhaseReport>,
    pub(crate) samples: Vec<PhaseSample>,
}

/// One phase of a run.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct PhaseReport {
    pub(crate) name: String,
    pub(crate) seconds: f64,
    pub(crate) written_bytes: u64,
    pub(crate) read_bytes: u64,
    pub(crate) blocks_written: u64,
    pub(crate) blocks_from_memory: u64,
    pub(crate) blocks_from_disk: u64,
    pub(crate) blocks_repeated: u64,
    pub(crate) retries: u64,
    pub(crate) no_buffer_waits: u64,
    pub(crate) no_buffer_wait_seconds: f64,
    pub(crate) client_cpu_seconds: f64,
    /// Number of calls.
    pub(crate) requests: u64,
    /// System calls of the server until it was idle again, if counted.
    pub(crate) system_calls: Option<u64>,
    /// Resources that the server used until it was idle again, so that a flush counts for the write
    /// that caused it.
    pub(crate) server: Option<ServerUse>,
    pub(crate) latencies: Vec<Latency>,
}

impl PhaseReport {
    pub(crate) fn bytes(&self) -> u64 {
        self.written_bytes + self.read_bytes
    }

    fn per_gb(&self, count: u64) -> f64 {
        count as f64 / (self.bytes().max(1) as f64 / GB)
    }

    pub(crate) fn system_calls_per_gb(&self) -> Option<f64> {
        let is_known = self.bytes() > 0;
        self.system_calls.filter(|_| is_known).map(|count| self.per_gb(count))
    }

    /// Returns how many requests one core of the server answers per second.
    fn requests_per_core_second(&self) -> Option<f64> {
        let used = self.server.as_ref()?.cpu_seconds;
        (used > 0.0).then(|| self.requests as f64 / used)
    }

    pub(crate) fn gb_per_second(&self) -> f64 {
        self.bytes() as f64 / GB / self.seconds.max(1e-9)
    }

    pub(crate) fn server_cpu_per_gb(&self) -> Option<f64> {
        let bytes = self.bytes();
        let server = self.server.as_ref().filter(|_| bytes > 0)?;
        Some(server.cpu_seconds / (bytes as f64 / GB))
    }
}

/// Resources that the server used in a phase.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct ServerUse {
    pub(crate) cpu_seconds: f64,
    /// Peak since the process began.
    pub(crate) peak_rss_bytes: u64,
    pub(crate) rss_bytes: u64,
    pub(crate) threads: u64,
    pub(crate) minor_faults: u64,
    pub(crate) major_faults: u64,
}

impl ServerUse {
    pub(crate) fn between(before: &ProcessUsage, after: &ProcessUsage) -> Self {
        Self {
            cpu_seconds: after.cpu_seconds - before.cpu_seconds,
            peak_rss_bytes: after.peak_rss_bytes,
            rss_bytes: after.rss_bytes,
            threads: after.threads,
            minor_faults: after.minor_faults.saturating_sub(before.minor_faults),
            major_faults: after.major_faults.saturating_sub(before.major_faults),
        }
    }
}

/// A sample of a running phase.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct PhaseSample {
    pub(crate) seconds: f64,
    pub(crate) written_bytes: u64,
    pub(crate) read_bytes: u64,
    pub(crate) server_rss_bytes: u64,
}

/// Result of one bare loop.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct BaselineResult {
    pub(crate) name: String,
    pub(crate) gb_per_second: f64,
    /// CPU time of the threads in the role of the server.
    pub(crate) server_cpu_per_gb: f64,
    pub(crate) client_cpu_per_gb: f64,
}

/// Medians of one figure for A and B.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Comparison {
    pub(crate) what: String,
    pub(crate) a: f64,
    pub(crate) b: f64,
    pub(crate) ratio: f64,
    pub(crate) more_is_better: bool,
}

/// Result of a layout on a simulated rotating disk.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct HddLine {
    pub(crate) layout: String,
    pub(crate) partitions: u32,
    pub(crate) write_seconds_per_gb: f64,
    pub(crate) read_seconds_per_gb: f64,
    /// Number of seeks to read a partition.
    pub(crate) seeks_per_partition: f64,
    pub(crate) files: u64,
}

impl BenchReport {
    /// Formats the report as text.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        for run in &self.runs {
            text += &format!("{}\n", run.name);
            for phase in &run.phases {
                text += &phase_text(phase);
            }
        }
        if !self.baseline.is_empty() {
            text += &format!(
                "{:<44} {:>8} {:>14} {:>14}\n",
                "baseline", "GB/s", "server CPU/GB", "client CPU/GB"
            );
        }
        for line in &self.baseline {
            text += &format!(
                "{:<44} {:>8.2} {:>14.3} {:>14.3}\n",
                line.name, line.gb_per_second, line.server_cpu_per_gb, line.client_cpu_per_gb
            );
        }
        if !self.comparison.is_empty() {
            text += &format!("{:<44} {:>10} {:>10} {:>8}\n", "medians", "A", "B", "A : B");
        }
        for line in &self.comparison {
            text += &format!("{:<44} {:>10.3} {:>10.3} {:>8.2}\n", line.what, line.a, line.b, line.ratio);
        }
        if !self.hdd.is_empty() {
            text += &format!(
                "{:<24} {:>10} {:>11} {:>11} {:>15} {:>8}\n",
                "layout", "partitions", "write s/GB", "read s/GB", "seeks/partition", "files"
            );
        }
        for line in &self.hdd {
            text += &format!(
                "{:<24} {:>10} {:>11.2} {:>11.2} {:>15.1} {:>8}\n",
                line.layout,
                line.partitions,
                line.write_seconds_per_gb,
                line.read_seconds_per_gb,
                line.seeks_per_partition,
                line.files
            );
        }
        text
    }

    /// Writes the JSON file.
    pub(crate) fn write_json(&self, path: &Path) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(self)?;
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}

fn phase_text(phase: &PhaseReport) -> String {
    let size = |bytes: u64| ByteSize::b(bytes).display().iec();
    let mut text = format!(
        "  {:<8} {:>10} in {:>7.2} s = {:>6.3} GB/s",
        phase.name,
        size(phase.bytes()).to_string(),
        phase.seconds,
        phase.gb_per_second()
    );
    if let Some(cpu) = phase.server_cpu_per_gb() {
        text += &format!("   server CPU {cpu:.3} s/GB");
    }
    let client = phase.client_cpu_seconds / (phase.bytes().max(1) as f64 / GB);
    text += &format!("   client CPU {client:.3} s/GB\n");
    if let Some(server) = &phase.server {
        text += &format!(
            "           server: {:.2} CPU-s, RSS {} (peak {}), {} threads, page faults {} minor {} major\n",
            server.cpu_seconds,
            size(server.rss_bytes),
            size(server.peak_rss_bytes),
            server.threads,
            server.minor_faults,
            server.major_faults
        );
    }
    text += &format!("           {:.0} requests per GB", phase.per_gb(phase.requests));
    if let Some(rate) = phase.requests_per_core_second() {
        text += &format!(", {rate:.0} per second and core of the server");
    }
    if let Some(calls) = phase.system_calls_per_gb() {
        let per_request = phase.system_calls.unwrap_or(0) as f64 / phase.requests.max(1) as f64;
        text += &format!(", {calls:.0} system calls of the server per GB, {per_request:.1} per request");
    }
    text += &format!(
        "\n           blocks: {} written, {} from memory, {} from disk, {} repeated; \
         {} retries, {} NO_BUFFER waits ({:.2} s)\n",
        phase.blocks_written,
        phase.blocks_from_memory,
        phase.blocks_from_disk,
        phase.blocks_repeated,
        phase.retries,
        phase.no_buffer_waits,
        phase.no_buffer_wait_seconds
    );
    for latency in &phase.latencies {
        text += &format!(
            "           {:<22} {:>8} calls  p50 {:>9.2} ms  p99 {:>9.2}  p99.9 {:>9.2}  max {:>9.2}\n",
            format!("{:?}", latency.operation),
            latency.count,
            latency.p50_ms,
            latency.p99_ms,
            latency.p999_ms,
            latency.max_ms
        );
    }
    text
}

/// Writes to stdout. A closed pipe is not an error.
pub(crate) fn print(text: &[u8]) {
    let mut stdout = std::io::stdout().lock();
    let _ = stdout.write_all(text).and_then(|()| stdout.flush());
}

/// Returns the median of `values`, or the mean of the two middle values.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let half = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => sorted[half],
        _ => f64::midpoint(sorted[half - 1], sorted[half]),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::stats::{Stats, TimedOperation};

    /// A report with something in every part.
    pub(crate) fn sample_report() -> BenchReport {
        let stats = Stats::default();
        stats.record(TimedOperation::SendShuffleData, std::time::Duration::from_millis(12));
        stats.record(TimedOperation::SendShuffleData, std::time::Duration::from_millis(14));
        let server =
            ServerUse { cpu_seconds: 1.0, peak_rss_bytes: 1 << 30, threads: 14, ..ServerUse::default() };
        let phase = PhaseReport {
            name: "write".into(),
            seconds: 2.0,
            written_bytes: 4_000_000_000,
            no_buffer_waits: 7,
            requests: 2_000,
            system_calls: Some(40_000),
            server: Some(server),
            latencies: stats.latencies(),
            ..PhaseReport::default()
        };
        let sample = |n: u32| PhaseSample {
            seconds: f64::from(n),
            written_bytes: u64::from(n) * 1_000_000,
            read_bytes: 0,
            server_rss_bytes: 1 << 20,
        };
        BenchReport {
            command: "uniffle-bench write --blocks <tiny>".into(),
            runs: vec![RunReport {
                name: "A".into(),
                phases: vec![phase],
                samples: (0..10).map(sample).collect(),
            }],
            baseline: vec![BaselineResult {
                name: "memcpy".into(),
                gb_per_second: 9.0,
                server_cpu_per_gb: 0.1,
                client_cpu_per_gb: 0.0,
            }],
            comparison: vec![Comparison {
                what: "write GB/s".into(),
                a: 2.0,
                b: 1.0,
                ratio: 2.0,
                more_is_better: true,
            }],
            hdd: vec![HddLine {
                layout: "extent logs".into(),
                partitions: 200,
                write_seconds_per_gb: 6.0,
                read_seconds_per_gb: 7.0,
                seeks_per_partition: 8.0,
                files: 2,
            }],
        }
    }

    #[test]
    fn text_report_contains_the_figures() {
        let text = sample_report().text();
        let calls = "500 requests per GB, 2000 per second and core of the server, 10000 system calls of the server per GB, 20.0 per request";
        for expected in
            [" 2.000 GB/s", calls, "0.250 s/GB", "14 threads", "7 NO_BUFFER", "memcpy", "extent logs"]
        {
            assert!(text.contains(expected), "{expected} is missing:\n{text}");
        }
        assert!(text.contains("SendShuffleData"));
    }

    #[test]
    fn json_report_contains_the_figures() {
        let file = tempfile::NamedTempFile::new().unwrap();
        sample_report().write_json(file.path()).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&std::fs::read(file.path()).unwrap()).unwrap();
        assert_eq!(value["runs"][0]["phases"][0]["written_bytes"], 4_000_000_000_u64);
        assert_eq!(value["runs"][0]["phases"][0]["latencies"][0]["rpc"], "SendShuffleData");
    }

    #[test]
    fn medians() {
        assert!((median(&[3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((median(&[4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
        assert!(median(&[]).abs() < 1e-9);
    }
}
