//! Small plots as inline SVG: line plots and horizontal bars.
//!
//! Pure functions from figures to text, which escape all text. Colours and fonts come from the page
//! ([`super::html`]).

use std::fmt::Write as _;

/// Size of a line plot, in SVG units.
const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 240.0;
/// Space for the numbers of the axes.
const LEFT: f64 = 60.0;
const BOTTOM: f64 = 34.0;
const TOP: f64 = 14.0;
/// Height of one bar with its label.
const BAR: f64 = 26.0;
/// Space for the labels of the bars.
const LABELS: f64 = 240.0;
/// Number of intervals between the grid lines.
const TICKS: u32 = 4;

/// One line of a plot.
#[derive(Debug)]
pub(crate) struct PlotLine {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// One bar of a chart.
#[derive(Debug)]
pub(crate) struct ChartBar {
    pub(crate) label: String,
    pub(crate) value: f64,
    /// Index of the page's colour.
    pub(crate) series: usize,
}

/// Escapes text for use between tags and in attributes.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Plots `lines` over axes that begin at 0. Returns an empty text without points.
pub(crate) fn lines(title: &str, x_unit: &str, y_unit: &str, lines: &[PlotLine]) -> String {
    let points =
        || lines.iter().flat_map(|line| &line.points).filter(|(x, y)| x.is_finite() && y.is_finite());
    if points().next().is_none() {
        return String::new();
    }
    let largest = |of: fn(&(f64, f64)) -> f64| points().map(of).fold(0.0, f64::max).max(1e-9);
    let (x_max, y_max) = (largest(|point| point.0), round_up(largest(|point| point.1)));
    let x = |value: f64| LEFT + value / x_max * (WIDTH - LEFT - 10.0);
    let y = |value: f64| HEIGHT - BOTTOM - value / y_max * (HEIGHT - BOTTOM - TOP);
    let mut svg = begin(title, WIDTH, HEIGHT + 18.0 * lines.len() as f64);
    for tick in 0..=TICKS {
        let share = f64::from(tick) / f64::from(TICKS);
        let (at, value) = (y(y_max * share), number(y_max * share));
        let _ = write!(
            svg,
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{WIDTH}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{value}</text>",
            LEFT - 6.0,
            at + 4.0
        );
        let (at, value) = (x(x_max * share), number(x_max * share));
        let bottom = HEIGHT - BOTTOM + 16.0;
        let _ = write!(svg, "<text x=\"{at:.1}\" y=\"{bottom:.1}\" text-anchor=\"middle\">{value}</text>");
    }
    let (x_unit, y_unit) = (escape(x_unit), escape(y_unit));
    let _ = write!(
        svg,
        "<text x=\"{WIDTH}\" y=\"{:.1}\" text-anchor=\"end\">{x_unit}</text><text x=\"{LEFT}\" y=\"11\">{y_unit}</text>",
        HEIGHT - 4.0
    );
    for (series, line) in lines.iter().enumerate() {
        let points = line.points.iter().filter(|(x, y)| x.is_finite() && y.is_finite());
        let points: String = points.map(|&(px, py)| format!("{:.1},{:.1} ", x(px), y(py))).collect();
        let _ = write!(svg, "<polyline class=\"s{}\" points=\"{}\"/>", series % 6, points.trim_end());
        let at = HEIGHT + 14.0 + 18.0 * series as f64;
        let _ = write!(
            svg,
            "<rect class=\"s{}\" x=\"{LEFT}\" y=\"{:.1}\" width=\"12\" height=\"10\"/><text x=\"{:.1}\" y=\"{at:.1}\">{}</text>",
            series % 6,
            at - 9.0,
            LEFT + 18.0,
            escape(&line.name)
        );
    }
    svg + "</svg></figure>"
}

/// Draws horizontal bars with their values. Returns an empty text without bars.
pub(crate) fn bars(title: &str, bars: &[ChartBar]) -> String {
    if bars.is_empty() {
        return String::new();
    }
    let finite = |value: f64| if value.is_finite() { value.max(0.0) } else { 0.0 };
    let largest = bars.iter().map(|bar| finite(bar.value)).fold(0.0, f64::max).max(1e-9);
    let mut svg = begin(title, WIDTH, BAR * bars.len() as f64 + 4.0);
    for (row, bar) in bars.iter().enumerate() {
        let top = BAR * row as f64 + 4.0;
        let length = finite(bar.value) / largest * (WIDTH - LABELS - 70.0);
        let _ = write!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\
             <rect class=\"s{}\" x=\"{LABELS}\" y=\"{top:.1}\" width=\"{length:.1}\" height=\"16\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            LABELS - 8.0,
            top + 13.0,
            escape(&bar.label),
            bar.series % 6,
            LABELS + length + 6.0,
            top + 13.0,
            number(bar.value)
        );
    }
    svg + "</svg></figure>"
}

fn begin(title: &str, width: f64, height: f64) -> String {
    let title = escape(title);
    format!(
        "<figure><figcaption>{title}</figcaption>\
         <svg viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\" aria-label=\"{title}\">"
    )
}

/// Rounds up to the next of 1, 2, 5 · 10^n, so that the axis has readable numbers.
fn round_up(value: f64) -> f64 {
    let power = 10_f64.powf(value.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0];
    steps.into_iter().map(|step| step * power).find(|&round| round >= value).unwrap_or(value)
}

/// Formats a number with about three significant digits.
fn number(value: f64) -> String {
    match value.abs() {
        large if large >= 100.0 => format!("{value:.0}"),
        middle if middle >= 10.0 => format!("{value:.1}"),
        small if small >= 1.0 || small == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_plot_stays_inside_its_frame() {
        let line = PlotLine {
            name: "a<b".into(),
            points: vec![(0.0, 0.0), (1.0, 7.0), (2.0, f64::NAN), (3.0, 3.0)],
        };
        let svg = lines("t", "s", "GB/s", &[line]);
        assert!(svg.contains("a&lt;b") && !svg.contains("NaN") && svg.ends_with("</svg></figure>"));
        let points = svg.split("points=\"").nth(1).unwrap().split('"').next().unwrap();
        for point in points.split(' ') {
            let (x, y) = point.split_once(',').unwrap();
            assert!(
                (LEFT..=WIDTH).contains(&x.parse().unwrap()) && (0.0..=HEIGHT).contains(&y.parse().unwrap())
            );
        }
        assert_eq!(points.split(' ').count(), 3, "values that are not numbers must not be drawn");
    }

    #[test]
    fn bar_length_is_proportional_to_value() {
        let bar = |value| ChartBar { label: String::new(), value, series: 0 };
        let svg = bars("t", &[bar(2.0), bar(1.0), bar(f64::INFINITY)]);
        let widths: Vec<f64> = svg
            .split("width=\"")
            .skip(1)
            .map(|rest| rest.split('"').next().unwrap().parse().unwrap())
            .collect();
        assert!((widths[0] - 2.0 * widths[1]).abs() < 0.2 && widths[2] < 0.1, "{widths:?}");
    }

    #[test]
    fn empty_plot_is_omitted() {
        assert!(lines("t", "", "", &[]).is_empty() && bars("t", &[]).is_empty());
    }

    #[test]
    fn axis_ends_at_a_round_number() {
        for (value, round) in [(0.9, 1.0), (1.1, 2.0), (3.0, 5.0), (700.0, 1_000.0)] {
            assert!((round_up(value) - round).abs() < 1e-9);
        }
    }
}
