//! Where tasks wait, as text: their stacks as trees, the outermost call first.

use std::fmt::Write as _;

use indexmap::IndexMap;

use super::job::{Names, Symbol, Waiting, Waits};

/// All of it.
pub(super) fn text(waits: &Waits, names: &Names) -> String {
    let mut text = waits.summary.clone();
    for group in &waits.groups {
        let _ = writeln!(text, "\n{} × {}", group.tasks, group.name);
        Calls::new(group, names).draw("", &mut text);
    }
    if waits.left_out > 0 {
        let _ = writeln!(text, "\n{} more tasks, not shown", waits.left_out);
    }
    text
}

/// What was called from one place, and what from there.
#[derive(Debug, Default)]
struct Calls(IndexMap<String, Calls>);

impl Calls {
    fn new(group: &Waiting, names: &Names) -> Self {
        let mut roots = Self::default();
        for stack in &group.stacks {
            let mut calls = &mut roots;
            for symbol in stack.iter().rev().flat_map(|number| names.at(*number).iter().rev()) {
                calls = calls.0.entry(line(symbol)).or_default();
            }
        }
        roots
    }

    fn draw(&self, before: &str, text: &mut String) {
        let last = self.0.len().saturating_sub(1);
        for (at, (line, calls)) in self.0.iter().enumerate() {
            let (branch, below) = if at == last { ("└╼ ", "   ") } else { ("├╼ ", "│  ") };
            let _ = writeln!(text, "{before}{branch}{line}");
            calls.draw(&format!("{before}{below}"), text);
        }
    }
}

/// `what at file:line:column`; a future's `poll` or closure says nothing that the rest does not.
fn line(symbol: &Symbol) -> String {
    let name = match symbol.name.rsplit_once("::") {
        // What stands between `<` and `>` has paths too.
        Some((path, last)) if !last.contains('>') => path,
        _ => symbol.name.as_str(),
    };
    match (symbol.line, symbol.column) {
        (0, _) => name.to_owned(),
        (line, 0) => format!("{name} at {}:{line}", symbol.file),
        (line, column) => format!("{name} at {}:{line}:{column}", symbol.file),
    }
}

#[cfg(test)]
mod tests {
    use super::super::job::tests::named;
    use super::*;

    #[test]
    fn stacks_that_begin_alike_are_one_tree() {
        let (_, names) = named(&["tokio::Sleep::poll", "a::Stop::poll", "a::wait::{{closure}}", ""]);
        let stacks = vec![vec![0, 2], vec![1, 2], vec![3]];
        let group = Waiting { name: "sleeper".to_owned(), tasks: 3, stacks };
        let waits = Waits { summary: "4 tasks\n".to_owned(), groups: vec![group], left_out: 1 };
        let expected = "4 tasks\n\n3 × sleeper\n\
            ├╼ a::wait at src/a.rs:7:3\n\
            │  ├╼ tokio::Sleep at src/a.rs:7:3\n\
            │  └╼ a::Stop at src/a.rs:7:3\n\
            └╼ 0x1003 worker\n\n\
            1 more tasks, not shown\n";
        assert_eq!(text(&waits, &names), expected);
    }
}
