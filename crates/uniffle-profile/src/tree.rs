//! Formats waiting tasks as text: their stacks as trees, outermost call first.

use std::fmt::Write as _;

use indexmap::IndexMap;

use super::job::{PlaceNames, Symbol, WaitingTasks, Waits};

/// Returns the text for all groups.
pub(super) fn text(waits: &Waits, names: &PlaceNames) -> String {
    let mut text = waits.summary.clone();
    let mut places: IndexMap<(&str, Vec<Vec<String>>), u64> = IndexMap::new();
    for group in &waits.groups {
        *places.entry((&group.name, stacks(group, names))).or_default() += group.tasks;
    }
    places.sort_by(|_, some, _, others| others.cmp(some));
    for ((name, stacks), tasks) in places {
        let _ = writeln!(text, "\n{tasks} × {name}");
        CallTree::new(stacks).draw("", &mut text);
    }
    if waits.left_out > 0 {
        let _ = writeln!(text, "\n{} more tasks, not shown", waits.left_out);
    }
    text
}

/// Returns the stacks as lines, outermost call first. They are sorted, because the awaits of a
/// `select!` have no fixed order and may have different addresses for the same lines.
fn stacks(group: &WaitingTasks, names: &PlaceNames) -> Vec<Vec<String>> {
    let lines = |stack: &Vec<u32>| {
        stack.iter().rev().flat_map(|number| names.at(*number).iter().rev()).map(line).collect::<Vec<_>>()
    };
    let mut stacks: Vec<_> = group.stacks.iter().map(lines).collect();
    stacks.sort_unstable();
    stacks
}

/// Tree of calls: each line with the calls made from there.
#[derive(Debug, Default)]
struct CallTree(IndexMap<String, CallTree>);

impl CallTree {
    fn new(stacks: Vec<Vec<String>>) -> Self {
        let mut roots = Self::default();
        for stack in stacks {
            let mut calls = &mut roots;
            for line in stack {
                calls = calls.0.entry(line).or_default();
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

/// Formats a symbol as `name at file:line:column`. The last component, a future's `poll` or a
/// closure, is removed because it adds no information.
fn line(symbol: &Symbol) -> String {
    let name = match symbol.name.rsplit_once("::") {
        // Generic arguments between `<` and `>` contain paths too.
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
    fn stacks_with_common_prefix_form_one_tree() {
        let (_, names) = named(&["tokio::Sleep::poll", "a::Stop::poll", "a::wait::{{closure}}", ""]);
        let group = |tasks, stacks| WaitingTasks { name: "sleeper".to_owned(), tasks, stacks };
        let other = WaitingTasks { name: "accept".to_owned(), tasks: 2, stacks: vec![vec![1]] };
        let same = |first, second| vec![first, second, vec![3]];
        let (some, others) = (same(vec![0, 2], vec![1, 2]), same(vec![1, 2], vec![0, 2]));
        let waits = Waits {
            summary: "6 tasks\n".to_owned(),
            groups: vec![group(1, some), other, group(2, others)],
            left_out: 1,
        };
        let expected = "6 tasks\n\n3 × sleeper\n\
            ├╼ 0x1003 worker\n\
            └╼ a::wait at src/a.rs:7:3\n\
            \x20  ├╼ a::Stop at src/a.rs:7:3\n\
            \x20  └╼ tokio::Sleep at src/a.rs:7:3\n\n\
            2 × accept\n\
            └╼ a::Stop at src/a.rs:7:3\n\n\
            1 more tasks, not shown\n";
        assert_eq!(text(&waits, &names), expected);
    }
}
