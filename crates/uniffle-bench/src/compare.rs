//! Compares server A with B, another server or the bare machine's [`baseline`], in several turns.
//! Reports medians and ratios.
//!
//! The machine's speed varies over minutes, so A and B alternate. Of two servers, the one that runs
//! first changes each turn. The baseline always runs after A.

use crate::baseline;
use crate::options::{BaselineArgs, CompareArgs, ComparedWork, RunArgs};
use crate::report::{BaselineResult, BenchReport, Comparison, PhaseReport, RunReport, median};
use crate::run;

/// Bytes of each baseline measurement within a turn.
const BASELINE_BYTES: u64 = 1_000_000_000;

/// Runs all turns.
pub(crate) async fn run_turns(args: &CompareArgs) -> anyhow::Result<BenchReport> {
    anyhow::ensure!((1..=1_000).contains(&args.turns), "--turns must be 1 to 1000");
    let (a, b) = args.sides()?;
    let mut report = BenchReport::default();
    let mut baselines: Vec<Vec<BaselineResult>> = Vec::new();
    let (mut runs_a, mut runs_b) = (Vec::new(), Vec::new());
    for turn in 0..args.turns {
        let Some(b) = &b else {
            runs_a.push(run_side(args.work, &format!("A {}", turn + 1), &a).await?);
            baselines.push(measure_baseline(args)?);
            continue;
        };
        if turn % 2 == 0 {
            runs_a.push(run_side(args.work, &format!("A {}", turn + 1), &a).await?);
            runs_b.push(run_side(args.work, &format!("B {}", turn + 1), b).await?);
        } else {
            runs_b.push(run_side(args.work, &format!("B {}", turn + 1), b).await?);
            runs_a.push(run_side(args.work, &format!("A {}", turn + 1), &a).await?);
        }
    }
    report.comparison = if baselines.is_empty() {
        compare(&runs_a, &runs_b)
    } else {
        compare_with_baseline(&runs_a, &baselines)
    };
    report.baseline = median_baseline(&baselines);
    report.runs = runs_a.into_iter().chain(runs_b).collect();
    Ok(report)
}

async fn run_side(work: ComparedWork, name: &str, args: &RunArgs) -> anyhow::Result<RunReport> {
    match work {
        ComparedWork::Write => run::write_only(name, args).await,
        ComparedWork::Read => run::write_and_read(name, args).await,
        ComparedWork::Mixed => run::mixed(name, args).await,
    }
}

fn measure_baseline(args: &CompareArgs) -> anyhow::Result<Vec<BaselineResult>> {
    baseline::measure(&BaselineArgs {
        bytes: bytesize::ByteSize::b(BASELINE_BYTES),
        dir: args.baseline_dir.clone(),
        connections: args.run.load.connections.min(64),
        report: args.run.report.clone(),
    })
}

/// A measured quantity of a phase: name, whether more is better, and its value.
type Measure = (&'static str, bool, fn(&PhaseReport) -> Option<f64>);

const MEASURES: [Measure; 4] = [
    ("GB/s", true, |phase| Some(phase.gb_per_second())),
    ("server CPU-s/GB", false, PhaseReport::server_cpu_per_gb),
    ("system calls/GB", false, PhaseReport::system_calls_per_gb),
    ("server peak RSS, MiB", false, |phase| Some(phase.server?.peak_rss_bytes as f64 / f64::from(1 << 20))),
];

/// Returns the median of a quantity over all phases with a name.
fn phase_median(runs: &[RunReport], phase: &str, measure: fn(&PhaseReport) -> Option<f64>) -> Option<f64> {
    let phases = runs.iter().flat_map(|run| &run.phases).filter(|run_phase| run_phase.name == phase);
    let values: Vec<f64> = phases.filter_map(measure).collect();
    (!values.is_empty()).then(|| median(&values))
}

fn compare(a: &[RunReport], b: &[RunReport]) -> Vec<Comparison> {
    let mut lines = Vec::new();
    for phase in ["write", "mixed", "read"] {
        for (name, more_is_better, measure) in MEASURES {
            if let (Some(a), Some(b)) = (phase_median(a, phase, measure), phase_median(b, phase, measure)) {
                let what = format!("{phase}: {name}");
                lines.push(Comparison { what, a, b, ratio: a / b, more_is_better });
            }
        }
    }
    lines
}

/// Compares the server's CPU time with that of loops that move the same bytes. The cost of the disk
/// loops is weighted with the share of blocks that were read from disk.
fn compare_with_baseline(a: &[RunReport], baselines: &[Vec<BaselineResult>]) -> Vec<Comparison> {
    let results = median_baseline(baselines);
    let cpu_of =
        |name: &str| results.iter().find(|line| line.name == name).map(|line| line.server_cpu_per_gb);
    let share_from_disk = disk_share(a);
    let mut lines = Vec::new();
    for (phase, socket, disk) in [
        ("write", baseline::RECEIVE, baseline::DIRECT_WRITE),
        ("read", baseline::SEND, baseline::DIRECT_READ),
    ] {
        let (Some(a), Some(memory)) =
            (phase_median(a, phase, PhaseReport::server_cpu_per_gb), cpu_of(socket))
        else {
            continue;
        };
        let (b, what) = match cpu_of(disk).filter(|_| share_from_disk > 0.0) {
            Some(disk_cpu) => (
                memory + share_from_disk * disk_cpu,
                format!("baseline, {:.0} % by disk", share_from_disk * 100.0),
            ),
            None => (memory, socket.to_owned()),
        };
        let what = format!("{phase}: server CPU-s/GB : {what}");
        lines.push(Comparison { what, a, b, ratio: a / b, more_is_better: false });
    }
    lines
}

/// Returns the share of blocks that were read from disk.
fn disk_share(runs: &[RunReport]) -> f64 {
    let phases = || runs.iter().flat_map(|run| &run.phases);
    let disk: u64 = phases().map(|phase| phase.blocks_from_disk).sum();
    let memory: u64 = phases().map(|phase| phase.blocks_from_memory).sum();
    disk as f64 / (disk + memory).max(1) as f64
}

fn median_baseline(baselines: &[Vec<BaselineResult>]) -> Vec<BaselineResult> {
    let Some(first) = baselines.first() else { return Vec::new() };
    let median_of = |name: &str, measure: fn(&BaselineResult) -> f64| {
        let lines = baselines.iter().flatten().filter(|line| line.name == name);
        median(&lines.map(measure).collect::<Vec<_>>())
    };
    let line = |line: &BaselineResult| BaselineResult {
        name: line.name.clone(),
        gb_per_second: median_of(&line.name, |line| line.gb_per_second),
        server_cpu_per_gb: median_of(&line.name, |line| line.server_cpu_per_gb),
        client_cpu_per_gb: median_of(&line.name, |line| line.client_cpu_per_gb),
    };
    first.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::ServerUse;

    fn runs(cpu_seconds: &[f64]) -> Vec<RunReport> {
        let run = |&cpu_seconds: &f64| {
            let server = Some(ServerUse { cpu_seconds, peak_rss_bytes: 1 << 20, ..ServerUse::default() });
            let name = "write".to_owned();
            let phase = PhaseReport {
                name,
                seconds: 1.0,
                written_bytes: 1_000_000_000,
                server,
                ..PhaseReport::default()
            };
            RunReport { phases: vec![phase], ..RunReport::default() }
        };
        cpu_seconds.iter().map(run).collect()
    }

    #[test]
    fn medians_are_compared() {
        let lines = compare(&runs(&[0.3, 9.0, 0.2]), &runs(&[0.6, 0.6, 0.5]));
        let cpu = lines.iter().find(|line| line.what == "write: server CPU-s/GB").unwrap();
        assert!((cpu.a - 0.3).abs() < 1e-9 && (cpu.b - 0.6).abs() < 1e-9 && (cpu.ratio - 0.5).abs() < 1e-9);
        assert!(
            lines.iter().all(|line| !line.what.starts_with("read")),
            "phases that were not measured must not be compared"
        );
    }

    fn baseline(name: &str, server_cpu_per_gb: f64) -> BaselineResult {
        BaselineResult { name: name.into(), gb_per_second: 1.0, server_cpu_per_gb, client_cpu_per_gb: 0.0 }
    }

    #[test]
    fn server_is_compared_with_baseline_of_the_same_bytes() {
        let baselines = [0.1, 0.2, 0.15].map(|cpu| vec![baseline(baseline::RECEIVE, cpu)]);
        let lines = compare_with_baseline(&runs(&[0.3]), &baselines);
        assert_eq!(lines.len(), 1);
        assert!((lines[0].ratio - 2.0).abs() < 1e-9);
    }

    #[test]
    fn blocks_read_from_disk_count_disk_loops() {
        let mut a = runs(&[0.4]);
        let read = PhaseReport { blocks_from_memory: 1, blocks_from_disk: 3, ..PhaseReport::default() };
        a[0].phases.push(read);
        let baselines = [vec![baseline(baseline::RECEIVE, 0.125), baseline(baseline::DIRECT_WRITE, 0.1)]];
        let lines = compare_with_baseline(&a, &baselines);
        assert_eq!(lines.len(), 1);
        assert!((lines[0].b - 0.2).abs() < 1e-9 && (lines[0].ratio - 2.0).abs() < 1e-9, "{lines:?}");
        assert!(lines[0].what.contains("75 %"), "{lines:?}");
    }
}
