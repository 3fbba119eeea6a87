//! Tables and lines that fit a width.
//!
//! A table that is too wide loses its least important columns first. Names are only shortened for a
//! terminal or a given `COLUMNS`, because programs that read a pipe need them whole.

use std::io::IsTerminal as _;

use serde_json::Value;

/// Width if stdout is not a terminal and `COLUMNS` is not set.
const COLUMNS_DEFAULT: usize = 80;

/// Smallest width. Narrower terminals cut the lines.
const COLUMNS_MIN: usize = 20;

/// Spaces between two columns.
const GAP: usize = 2;

/// Width of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Width {
    pub(crate) columns: usize,
    /// True if names are shortened and lines wrapped.
    pub(crate) is_strict: bool,
}

impl Width {
    /// Returns the width of stdout: that of the terminal, else `COLUMNS`, else 80.
    pub(crate) fn of_stdout() -> Self {
        let stdout = std::io::stdout();
        let terminal = stdout.is_terminal().then(|| rustix::termios::tcgetwinsize(&stdout).ok()).flatten();
        let terminal = terminal.map(|size| usize::from(size.ws_col)).filter(|columns| *columns > 0);
        let columns = terminal.or_else(|| std::env::var("COLUMNS").ok()?.parse().ok());
        let is_strict = columns.is_some();
        Self { columns: columns.unwrap_or(COLUMNS_DEFAULT).max(COLUMNS_MIN), is_strict }
    }

    /// Wraps `text` between words. Continued lines are indented by `indent` columns.
    pub(crate) fn wrap(self, text: &str, indent: usize) -> String {
        if !self.is_strict || text.chars().count() <= self.columns {
            return text.to_owned();
        }
        let mut wrapped = String::with_capacity(text.len());
        let mut used = 0;
        for word in text.split_inclusive(' ') {
            let length = word.trim_end().chars().count();
            if used > indent && used + length > self.columns {
                wrapped.truncate(wrapped.trim_end().len());
                wrapped.push('\n');
                wrapped.push_str(&" ".repeat(indent));
                used = indent;
            }
            wrapped.push_str(word);
            used += word.chars().count();
        }
        wrapped
    }
}

/// A table with aligned columns. Numbers are right-aligned, except in the first column.
pub(crate) struct TextTable {
    header: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl TextTable {
    /// Creates a table. Every row has one cell per column of `header`.
    pub(crate) fn new(header: &[&'static str], rows: Vec<Vec<String>>) -> Self {
        Self { header: header.to_vec(), rows }
    }

    /// Removes the column `name`, if it exists.
    fn remove(&mut self, name: &str) {
        let Some(at) = self.header.iter().position(|column| *column == name) else { return };
        self.header.remove(at);
        for row in self.rows.iter_mut().filter(|row| row.len() > at) {
            row.remove(at);
        }
    }

    /// Formats the table for `width`. Columns in `optional` are removed in this order until it
    /// fits. The first column is shortened if that does not suffice and the width is strict.
    pub(crate) fn fitted(mut self, width: Width, optional: &[&str]) -> String {
        for name in optional {
            if self.width() <= width.columns {
                break;
            }
            self.remove(name);
        }
        let excess = self.width().saturating_sub(width.columns);
        if width.is_strict && excess > 0 {
            let first = self.columns().first().map_or(0, |(width, _)| *width);
            let longest = first.saturating_sub(excess).max(1);
            self.rows.iter_mut().filter_map(|row| row.first_mut()).for_each(|name| shorten(name, longest));
        }
        self.text()
    }

    /// Returns the width of each column, and whether it is right-aligned.
    fn columns(&self) -> Vec<(usize, bool)> {
        let cells = |at: usize| self.rows.iter().filter_map(move |row| row.get(at));
        let is_number = |text: &String| text.starts_with(|first: char| first.is_ascii_digit()) || text == "-";
        let column = |(at, name): (usize, &&str)| {
            let width = cells(at).map(|cell| cell.chars().count()).max().unwrap_or(0);
            (width.max(name.chars().count()), at > 0 && cells(at).all(is_number))
        };
        self.header.iter().enumerate().map(column).collect()
    }

    fn width(&self) -> usize {
        self.columns().iter().map(|(width, _)| width + GAP).sum::<usize>().saturating_sub(GAP)
    }

    /// Formats the whole table.
    pub(crate) fn text(&self) -> String {
        let columns = self.columns();
        let mut text = String::new();
        let names = self.header.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        for row in std::iter::once(&names).chain(&self.rows) {
            let mut line = String::new();
            for (cell, (width, to_right)) in row.iter().zip(&columns) {
                match to_right {
                    true => line.push_str(&format!("{cell:>width$}  ")),
                    false => line.push_str(&format!("{cell:<width$}  ")),
                }
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

/// Formats a value without control characters, because clients choose names.
pub(crate) fn word(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect(),
        other => other.to_string(),
    }
}

/// Replaces the middle of `name` by an ellipsis if it has more than `longest` characters. Ids
/// differ at their ends.
fn shorten(name: &mut String, longest: usize) {
    let length = name.chars().count();
    if length <= longest {
        return;
    }
    let end = longest.saturating_sub(1) / 2;
    let start: String = name.chars().take(longest.saturating_sub(1) - end).collect();
    *name = start + "\u{2026}" + &name.chars().skip(length - end).collect::<String>();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(name: &str) -> TextTable {
        let row = [name, "active", "512.0M", "3"].map(str::to_owned).to_vec();
        TextTable::new(&["worker", "state", "memory", "apps"], vec![row])
    }

    #[test]
    fn columns_are_aligned_and_numbers_right_aligned() {
        let rows = [vec!["a".to_owned(), "5".to_owned()], vec!["bcd".to_owned(), "12".to_owned()]];
        assert_eq!(TextTable::new(&["name", "n"], rows.to_vec()).text(), "name   n\na      5\nbcd   12\n");
    }

    #[test]
    fn narrow_table_loses_optional_columns_before_names() {
        let strict = |columns| Width { columns, is_strict: true };
        let fit = |name, columns| table(name).fitted(strict(columns), &["apps", "memory"]);
        assert_eq!(fit("w-1", 28), "worker  state   memory  apps\nw-1     active  512.0M     3\n");
        assert_eq!(fit("w-1", 27), "worker  state   memory\nw-1     active  512.0M\n");
        assert_eq!(fit("w-1", 20), "worker  state\nw-1     active\n");
        let long = fit("worker-0.uniffle.svc-21100-21200", 24);
        assert!(long.contains("worker-0\u{2026}0-21200  active"), "{long}");
        assert!(long.lines().all(|line| line.chars().count() <= 24), "{long}");
        let piped = Width { columns: 24, is_strict: false };
        let long = table("worker-0.uniffle.svc-21100-21200").fitted(piped, &["apps", "memory"]);
        assert!(long.contains("worker-0.uniffle.svc-21100-21200  active\n"), "{long}");
    }

    #[test]
    fn long_line_is_wrapped_between_words() {
        let text = "disks        2, /data1 full, /data2/uniffle broken";
        let width = Width { columns: 30, is_strict: true };
        assert_eq!(
            width.wrap(text, 13),
            "disks        2, /data1 full,\n             /data2/uniffle\n             broken"
        );
        assert_eq!(Width { is_strict: false, ..width }.wrap(text, 13), text);
    }
}
