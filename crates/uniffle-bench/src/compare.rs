//! Compares A with B (another server or the bare machine) in several alternating turns. Reports
//! medians and ratios.
//!
//! The machine's speed varies over minutes, so A and B alternate, and the first of a turn changes
//! each time.

use crate::floor;
use crate::options::{CompareArgs, ComparedWork, FloorArgs, RunArgs};
use crate::report::{BenchReport, Comparison, FloorLine, PhaseReport, RunReport, median};
use crate::run;

/// Bytes of each floor measurement within a turn.
const FLOOR_BYTES: u64 = 1_000_000_000;

/// Runs all turns.
pub(crate) async fn turns(args: &CompareArgs) -> anyhow::Result<BenchReport> {
    anyhow::ensure!((1..=1_000).contains(&args.turns), "--turns must be 1 to 1000");
    let (a, b) = args.sides()?;
    let mut report = BenchReport::default();
    let mut floors: Vec<Vec<FloorLine>> = Vec::new();
    let (mut of_a, mut of_b) = (Vec::new(), Vec::new());
    for turn in 0..args.turns {
        let Some(b) = &b else {
            of_a.push(work(args.work, &format!("A {}", turn + 1), &a).await?);
            floors.push(floor(args)?);
            continue;
        };
        if turn % 2 == 0 {
            of_a.push(work(args.work, &format!("A {}", turn + 1), &a).await?);
            of_b.push(work(args.work, &format!("B {}", turn + 1), b).await?);
        } else {
            of_b.push(work(args.work, &format!("B {}", turn + 1), b).await?);
            of_a.push(work(args.work, &format!("A {}", turn + 1), &a).await?);
        }
    }
    report.comparison =
        if floors.is_empty() { compare(&of_a, &of_b) } else { compare_with_floor(&of_a, &floors) };
    report.floor = median_floor(&floors);
    report.runs = of_a.into_iter().chain(of_b).collect();
    Ok(report)
}

async fn work(work: ComparedWork, name: &str, args: &RunArgs) -> anyhow::Result<RunReport> {
    match work {
        ComparedWork::Write => run::write_only(name, args).await,
        ComparedWork::Read => run::write_and_read(name, args).await,
        ComparedWork::Mixed => run::mixed(name, args).await,
    }
}

fn floor(args: &CompareArgs) -> anyhow::Result<Vec<FloorLine>> {
    floor::measure(&FloorArgs {
        bytes: bytesize::ByteSize::b(FLOOR_BYTES),
        dir: args.floor_dir.clone(),
        connections: args.run.load.connections.min(64),
        report: args.run.report.clone(),
    })
}

/// A figure of a phase: name, whether more is better, and its value.
type Figure = (&'static str, bool, fn(&PhaseReport) -> Option<f64>);

const FIGURES: [Figure; 4] = [
    ("GB/s", true, |phase| Some(phase.gb_per_second())),
    ("server CPU-s/GB", false, PhaseReport::server_cpu_per_gb),
    ("system calls/GB", false, PhaseReport::system_calls_per_gb),
    ("server peak RSS, MiB", false, |phase| Some(phase.server?.peak_rss_bytes as f64 / f64::from(1 << 20))),
];

/// Returns the median of a figure over all phases with a name.
fn of_phase(runs: &[RunReport], phase: &str, figure: fn(&PhaseReport) -> Option<f64>) -> Option<f64> {
    let phases = runs.iter().flat_map(|run| &run.phases).filter(|of_run| of_run.name == phase);
    let values: Vec<f64> = phases.filter_map(figure).collect();
    (!values.is_empty()).then(|| median(&values))
}

fn compare(a: &[RunReport], b: &[RunReport]) -> Vec<Comparison> {
    let mut lines = Vec::new();
    for phase in ["write", "mixed", "read"] {
        for (name, more_is_better, figure) in FIGURES {
            if let (Some(a), Some(b)) = (of_phase(a, phase, figure), of_phase(b, phase, figure)) {
                let what = format!("{phase}: {name}");
                lines.push(Comparison { what, a, b, ratio: a / b, more_is_better });
            }
        }
    }
    lines
}

/// Compares the server's CPU time with that of loops that move the same bytes. For the share of
/// blocks that were read from disk, the loops also write to disk or read from it.
fn compare_with_floor(a: &[RunReport], floors: &[Vec<FloorLine>]) -> Vec<Comparison> {
    let floor = median_floor(floors);
    let bare = |name: &str| floor.iter().find(|line| line.name == name).map(|line| line.server_cpu_per_gb);
    let share = disk_share(a);
    let mut lines = Vec::new();
    for (phase, socket, disk) in [
        ("write", "socket to warm memory", floor::DIRECT_WRITE),
        ("read", "memory to socket", floor::DIRECT_READ),
    ] {
        let (Some(a), Some(memory)) = (of_phase(a, phase, PhaseReport::server_cpu_per_gb), bare(socket))
        else {
            continue;
        };
        let (b, what) = match bare(disk).filter(|_| share > 0.0) {
            Some(disk_cpu) => (memory + share * disk_cpu, format!("floor, {:.0} % by disk", share * 100.0)),
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

fn median_floor(floors: &[Vec<FloorLine>]) -> Vec<FloorLine> {
    let Some(first) = floors.first() else { return Vec::new() };
    let of = |name: &str, figure: fn(&FloorLine) -> f64| {
        let lines = floors.iter().flatten().filter(|line| line.name == name);
        median(&lines.map(figure).collect::<Vec<_>>())
    };
    let line = |line: &FloorLine| FloorLine {
        name: line.name.clone(),
        gb_per_second: of(&line.name, |line| line.gb_per_second),
        server_cpu_per_gb: of(&line.name, |line| line.server_cpu_per_gb),
        client_cpu_per_gb: of(&line.name, |line| line.client_cpu_per_gb),
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
            "figures that were not measured were compared"
        );
    }

    fn floor(name: &str, server_cpu_per_gb: f64) -> FloorLine {
        FloorLine { name: name.into(), gb_per_second: 1.0, server_cpu_per_gb, client_cpu_per_gb: 0.0 }
    }

    #[test]
    fn floor_is_compared_with_loops_of_the_same_bytes() {
        let floors = [0.1, 0.2, 0.15].map(|cpu| vec![floor("socket to warm memory", cpu)]);
        let lines = compare_with_floor(&runs(&[0.3]), &floors);
        assert_eq!(lines.len(), 1);
        assert!((lines[0].ratio - 2.0).abs() < 1e-9);
    }

    #[test]
    fn blocks_read_from_disk_count_disk_loops() {
        let mut a = runs(&[0.4]);
        let read = PhaseReport { blocks_from_memory: 1, blocks_from_disk: 3, ..PhaseReport::default() };
        a[0].phases.push(read);
        let floors = [vec![floor("socket to warm memory", 0.125), floor(floor::DIRECT_WRITE, 0.1)]];
        let lines = compare_with_floor(&a, &floors);
        assert_eq!(lines.len(), 1);
        assert!((lines[0].b - 0.2).abs() < 1e-9 && (lines[0].ratio - 2.0).abs() < 1e-9, "{lines:?}");
        assert!(lines[0].what.contains("75 %"), "{lines:?}");
    }
}
