//! Renders a report as one self-contained HTML page: no scripts, no links, plots as inline SVG.

use std::fmt::Write as _;

use crate::plot::{ChartBar, PlotLine, bars, escape, lines};
use crate::report::{BenchReport, PhaseReport, PhaseSample, RunReport};
use crate::stats::Latency;

const STYLE: &str = "\
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#1d2733;background:#fff}\
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem;border-bottom:1px solid #d8dee6}\
code{background:#f1f4f7;padding:.1rem .3rem;border-radius:3px;overflow-wrap:anywhere}\
.plots{display:flex;flex-wrap:wrap;gap:1rem}figure{margin:0;flex:1 1 26rem;max-width:40rem}\
figcaption{font-weight:600;margin:.6rem 0}svg{width:100%;height:auto}svg text{font-size:12px;fill:#52606d}\
.grid{stroke:#e3e8ee}polyline{fill:none;stroke-width:2}\
rect.s0{fill:#2563a8}rect.s1{fill:#d97706}rect.s2{fill:#15803d}rect.s3{fill:#9333a8}rect.s4{fill:#b91c1c}rect.s5{fill:#0e7490}\
polyline.s0{stroke:#2563a8}polyline.s1{stroke:#d97706}polyline.s2{stroke:#15803d}polyline.s3{stroke:#9333a8}\
polyline.s4{stroke:#b91c1c}polyline.s5{stroke:#0e7490}\
table{border-collapse:collapse;margin:.8rem 0;font-variant-numeric:tabular-nums}\
th,td{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #e3e8ee}th:first-child,td:first-child{text-align:left}\
@media(prefers-color-scheme:dark){body{background:#14181d;color:#dde4ec}code{background:#222a33}\
svg text{fill:#a9b4c0}.grid{stroke:#2b343e}th,td,h2{border-color:#2b343e}}";

/// Returns the page.
pub(crate) fn page(report: &BenchReport) -> String {
    let mut body = String::new();
    comparison(&mut body, report);
    for run in &report.runs {
        of_run(&mut body, run);
    }
    baseline(&mut body, report);
    hdd(&mut body, report);
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <title>uniffle-bench</title><style>{STYLE}</style></head><body>\
         <h1>uniffle-bench</h1><p><code>{}</code></p>{body}</body></html>\n",
        escape(&report.command)
    )
}

fn comparison(body: &mut String, report: &BenchReport) {
    if report.comparison.is_empty() {
        return;
    }
    *body += "<h2>A against B</h2>";
    let head = ["median", "A", "B", "A : B", "better"];
    let rows = report.comparison.iter().map(|line| {
        let a_is_better = (line.ratio > 1.0) == line.more_is_better;
        let better = if (line.ratio - 1.0).abs() < 0.01 {
            "–"
        } else if a_is_better {
            "A"
        } else {
            "B"
        };
        vec![
            line.what.clone(),
            format!("{:.3}", line.a),
            format!("{:.3}", line.b),
            format!("{:.2}", line.ratio),
            better.to_owned(),
        ]
    });
    table(body, &head, rows);
    *body += "<div class=\"plots\">";
    for line in &report.comparison {
        let bar = |label: &str, value, series| ChartBar { label: label.to_owned(), value, series };
        *body += &bars(&line.what, &[bar("A", line.a, 0), bar("B", line.b, 1)]);
    }
    *body += "</div>";
}

fn of_run(body: &mut String, run: &RunReport) {
    let _ = write!(body, "<h2>{}</h2>", escape(&run.name));
    let head = [
        "phase",
        "GB",
        "s",
        "GB/s",
        "server CPU-s/GB",
        "peak RSS MiB",
        "threads",
        "minor faults",
        "retries",
        "NO_BUFFER waits",
    ];
    table(body, &head, run.phases.iter().map(phase_row));
    *body += "<div class=\"plots\">";
    *body += &lines("Throughput", "seconds", "GB/s", &throughput(&run.samples));
    let memory = |s: &PhaseSample| (s.seconds, s.server_rss_bytes as f64 / f64::from(1 << 20));
    if run.samples.iter().any(|sample| sample.server_rss_bytes > 0) {
        let points = run.samples.iter().map(memory).collect();
        *body += &lines("Server memory", "seconds", "MiB", &[PlotLine { name: "RSS".into(), points }]);
    }
    for phase in &run.phases {
        *body += &latency_plot(phase);
    }
    *body += "</div>";
    let head = ["call", "calls", "p50 ms", "p99 ms", "p99.9 ms", "max ms"];
    for phase in &run.phases {
        let _ = write!(body, "<h3>{}: latencies</h3>", escape(&phase.name));
        table(body, &head, phase.latencies.iter().map(latency_row));
    }
}

fn phase_row(phase: &PhaseReport) -> Vec<String> {
    let server = phase.server.unwrap_or_default();
    vec![
        phase.name.clone(),
        format!("{:.2}", phase.bytes() as f64 / crate::report::GB),
        format!("{:.2}", phase.seconds),
        format!("{:.3}", phase.gb_per_second()),
        phase.server_cpu_per_gb().map_or("–".to_owned(), |cpu| format!("{cpu:.3}")),
        format!("{}", server.peak_rss_bytes >> 20),
        server.threads.to_string(),
        server.minor_faults.to_string(),
        phase.retries.to_string(),
        format!("{} ({:.1} s)", phase.no_buffer_waits, phase.no_buffer_wait_seconds),
    ]
}

fn latency_row(latency: &Latency) -> Vec<String> {
    let ms = |value: f64| format!("{value:.2}");
    vec![
        format!("{:?}", latency.operation),
        latency.count.to_string(),
        ms(latency.p50_ms),
        ms(latency.p99_ms),
        ms(latency.p999_ms),
        ms(latency.max_ms),
    ]
}

/// Returns the rates between consecutive samples. Counters restart with each phase.
fn throughput(samples: &[PhaseSample]) -> Vec<PlotLine> {
    let rate = |of: fn(&PhaseSample) -> u64| {
        let pairs = samples.iter().zip(samples.iter().skip(1));
        let point = |(before, after): (&PhaseSample, &PhaseSample)| {
            let seconds = after.seconds - before.seconds;
            let bytes = of(after).checked_sub(of(before)).unwrap_or(of(after)) as f64;
            (seconds > 0.01).then(|| (after.seconds, bytes / crate::report::GB / seconds))
        };
        pairs.filter_map(point).collect::<Vec<_>>()
    };
    let line = |name: &str, points: Vec<(f64, f64)>| PlotLine { name: name.to_owned(), points };
    vec![line("written", rate(|s| s.written_bytes)), line("read", rate(|s| s.read_bytes))]
}

/// Plots latency over the number of nines: x is −log10(1 − quantile), so 1 is p90 and 2 is p99. The
/// axis ends at five nines.
fn latency_plot(phase: &PhaseReport) -> String {
    let curve = |latency: &Latency| {
        let nines = |&(quantile, ms): &(f64, f64)| (-(1.0 - quantile).max(1e-5).log10(), ms);
        PlotLine {
            name: format!("{:?}", latency.operation),
            points: latency.curve.iter().map(nines).collect(),
        }
    };
    let curves: Vec<PlotLine> =
        phase.latencies.iter().filter(|latency| latency.count > 1).map(curve).collect();
    let title = format!("Latency of {}", phase.name);
    lines(&title, "nines of calls (1 = p90, 2 = p99, 3 = p99.9)", "ms", &curves)
}

fn baseline(body: &mut String, report: &BenchReport) {
    if report.baseline.is_empty() {
        return;
    }
    *body += "<h2>The bare machine</h2>";
    let head = ["loop", "GB/s", "server CPU-s/GB", "client CPU-s/GB"];
    let rows = report.baseline.iter().map(|line| {
        let figure = |value: f64| format!("{value:.3}");
        vec![
            line.name.clone(),
            figure(line.gb_per_second),
            figure(line.server_cpu_per_gb),
            figure(line.client_cpu_per_gb),
        ]
    });
    table(body, &head, rows);
    let bar = |line: &crate::report::BaselineResult| ChartBar {
        label: line.name.clone(),
        value: line.server_cpu_per_gb,
        series: 0,
    };
    *body += &bars("Server CPU-s/GB", &report.baseline.iter().map(bar).collect::<Vec<_>>());
}

fn hdd(body: &mut String, report: &BenchReport) {
    if report.hdd.is_empty() {
        return;
    }
    *body += "<h2>A simulated rotating disk</h2>";
    let head = ["layout", "partitions", "write s/GB", "read s/GB", "seeks per partition", "files"];
    let rows = report.hdd.iter().map(|line| {
        vec![
            line.layout.clone(),
            line.partitions.to_string(),
            format!("{:.2}", line.write_seconds_per_gb),
            format!("{:.2}", line.read_seconds_per_gb),
            format!("{:.1}", line.seeks_per_partition),
            line.files.to_string(),
        ]
    });
    table(body, &head, rows);
    let label = |line: &crate::report::HddLine| format!("{}, {} partitions", line.layout, line.partitions);
    let bar = |line: &crate::report::HddLine| ChartBar {
        label: label(line),
        value: line.write_seconds_per_gb + line.read_seconds_per_gb,
        // The worker's own layout, "extent logs", has the first colour.
        series: usize::from(!line.layout.starts_with("extent")),
    };
    *body += &bars("Disk seconds per GB, write + read", &report.hdd.iter().map(bar).collect::<Vec<_>>());
}

fn table(body: &mut String, head: &[&str], rows: impl Iterator<Item = Vec<String>>) {
    let cells = |tag: &str, cells: &mut dyn Iterator<Item = String>| {
        let cells: String = cells.map(|cell| format!("<{tag}>{}</{tag}>", escape(&cell))).collect();
        format!("<tr>{cells}</tr>")
    };
    *body += "<table>";
    *body += &cells("th", &mut head.iter().map(|&text| text.to_owned()));
    for row in rows {
        *body += &cells("td", &mut row.into_iter());
    }
    *body += "</table>";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_is_self_contained_and_complete() {
        let page = page(&crate::report::tests::sample_report());
        for part in
            ["A against B", "Throughput", "Server memory", "Latency of write", "bare machine", "rotating"]
        {
            assert!(page.contains(part), "{part}");
        }
        for foreign in ["<script", "http://", "https://", "src=", "href=", "<tiny>"] {
            assert!(!page.contains(foreign), "{foreign}");
        }
        for tag in ["figure", "svg", "table", "tr", "td", "th", "div", "h2"] {
            let count = |text: &str| page.matches(text).count();
            let opened = count(&format!("<{tag}>")) + count(&format!("<{tag} "));
            assert_eq!(opened, count(&format!("</{tag}>")), "{tag}");
        }
    }

    #[test]
    fn empty_report_renders_a_page() {
        assert!(page(&BenchReport::default()).ends_with("</html>\n"));
    }

    #[test]
    fn rates_survive_counter_resets() {
        let sample =
            |seconds, written_bytes| PhaseSample { seconds, written_bytes, ..PhaseSample::default() };
        let lines = throughput(&[sample(0.0, 0), sample(1.0, 2_000_000_000), sample(2.0, 1_000_000_000)]);
        assert_eq!(lines[0].points, [(1.0, 2.0), (2.0, 1.0)]);
    }
}
