//! Every `ctl` command in the README and in `docs/` is accepted by the program.

use std::collections::BTreeSet;

use super::ctl::run;

const DOCUMENTS: [&str; 9] = [
    include_str!("../../../README.md"),
    include_str!("../../../docs/cluster.md"),
    include_str!("../../../docs/ctl.md"),
    include_str!("../../../docs/durability.md"),
    include_str!("../../../docs/kubernetes.md"),
    include_str!("../../../docs/migration.md"),
    include_str!("../../../docs/object-storage.md"),
    include_str!("../../../docs/operations.md"),
    include_str!("../../../docs/runbook.md"),
];

/// Returns the words of each command that begins with `ctl`, up to the end of the command or an
/// ellipsis.
fn commands(text: &str) -> BTreeSet<Vec<String>> {
    let starts = ["uniffle-worker ctl ", "`ctl "];
    let lines = text.lines().flat_map(|line| starts.iter().flat_map(move |start| line.split(start).skip(1)));
    let words = lines.map(|rest| {
        let rest = rest.split("  #").next().unwrap_or_default();
        let (mut words, mut word, mut quote) = (vec!["ctl".to_owned()], String::new(), None);
        for c in rest.chars() {
            match (c, quote) {
                ('\'' | '"', None) => quote = Some(c),
                (c, Some(open)) if c == open => quote = None,
                (' ', None) => words.extend(Some(std::mem::take(&mut word)).filter(|word| !word.is_empty())),
                ('`' | ';' | '|' | '>' | '&' | '\\' | ')' | '…' | '[', None) => break,
                _ => word.push(c),
            }
        }
        words.extend(Some(word).filter(|word| !word.is_empty()));
        words
    });
    words.filter(|words| words.len() > 1).collect()
}

#[tokio::test]
async fn commands_of_the_documents_are_accepted() {
    let all: BTreeSet<_> = DOCUMENTS.iter().flat_map(|text| commands(text)).collect();
    assert!(all.len() > 30, "{all:?}");
    for command in all {
        // The help is printed if no argument before it is refused.
        let arguments: Vec<_> = command.iter().map(String::as_str).chain(["--help"]).collect();
        let outcome = run(&arguments).await;
        assert_eq!(outcome.code, 0, "{command:?}: {}", outcome.stderr);
    }
}
