//! Every `ctl` command in the README and in `docs/` is accepted by the program.

use std::collections::BTreeSet;
use std::path::Path;

use super::ctl::run;

/// Returns the README and the pages below `docs/`.
fn documents() -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut pages, mut folders) = (vec![root.join("README.md")], vec![root.join("docs")]);
    while let Some(folder) = folders.pop() {
        let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let (below, files): (Vec<_>, Vec<_>) = paths.partition(|path| path.is_dir());
        folders.extend(below);
        pages.extend(files.into_iter().filter(|file| file.extension().is_some_and(|end| end == "md")));
    }
    pages.iter().map(|page| std::fs::read_to_string(page).unwrap()).collect()
}

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
    let all: BTreeSet<_> = documents().iter().flat_map(|text| commands(text)).collect();
    assert!(all.len() > 30, "{all:?}");
    for command in all {
        // The help is printed if no argument before it is refused.
        let arguments: Vec<_> = command.iter().map(String::as_str).chain(["--help"]).collect();
        let outcome = run(&arguments).await;
        assert_eq!(outcome.code, 0, "{command:?}: {}", outcome.stderr);
    }
}
