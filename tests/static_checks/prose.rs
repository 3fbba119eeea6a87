//! The language of the documents stays short: words per table cell and per sentence (docs/style.md).
//!
//! Not here: generated pages, whose text comes from the sources.

use std::path::Path;

const CELL_WORDS_MAX: usize = 25;
const SENTENCE_WORDS_MAX: usize = 40;
const GENERATED: [&str; 2] = ["docs/configuration.md", "docs/metrics.md"];

/// A cell or sentence with too many words; `line` is where its row or paragraph ends.
#[derive(Debug, PartialEq)]
struct TooLong {
    line: usize,
    words: usize,
    start: String,
}

#[test]
fn documents_have_short_cells_and_sentences() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut pages = vec!["README.md".to_owned(), "CHANGELOG.md".to_owned()];
    for folder in ["docs", "docs/design"] {
        for entry in std::fs::read_dir(root.join(folder)).expect("a readable folder") {
            let name = entry.expect("a readable entry").file_name();
            pages.push(format!("{folder}/{}", name.to_string_lossy()));
        }
    }
    pages.retain(|page| page.ends_with(".md") && !GENERATED.contains(&page.as_str()));
    assert!(pages.len() > 15, "the search is broken: {pages:?}");

    let mut long = Vec::new();
    for page in &pages {
        let text = std::fs::read_to_string(root.join(page)).expect("a readable page");
        for TooLong { line, words, start } in too_long(&text) {
            long.push(format!("{page}:{line}: {words} words: {start}"));
        }
    }
    assert!(long.is_empty(), "shorten these cells or sentences:\n{}\n", long.join("\n"));
}

/// Returns each cell and sentence of a page that is too long.
fn too_long(text: &str) -> Vec<TooLong> {
    let mut found = Vec::new();
    let mut paragraph = String::new();
    let mut in_code = false;
    let lines = text.lines().chain([""]).enumerate();
    for (line, text) in lines.map(|(index, text)| (index + 1, text)) {
        in_code ^= text.starts_with("```");
        let is_code = in_code || text.starts_with("```") || text.starts_with("    ");
        let is_table = text.starts_with('|');
        let item = text.trim_start();
        let begins =
            item.starts_with("- ") || item.starts_with(|c: char| c.is_ascii_digit()) && item.contains(". ");
        if is_code || is_table || item.is_empty() || begins || item.starts_with('#') {
            found.extend(longer_than(SENTENCE_WORDS_MAX, sentences(&paragraph), line));
            paragraph.clear();
        }
        if is_table {
            found.extend(longer_than(CELL_WORDS_MAX, plain(text).split(" | ").collect(), line));
        } else if !is_code && !item.starts_with('#') {
            paragraph.push_str(&plain(item));
            paragraph.push(' ');
        }
    }
    found
}

/// Returns the parts of `text` with more than `most` words.
fn longer_than<'a>(most: usize, parts: Vec<&'a str>, line: usize) -> impl Iterator<Item = TooLong> + 'a {
    parts.into_iter().filter_map(move |part| {
        let words = part.split_whitespace().filter(|word| word.contains(char::is_alphanumeric)).count();
        let start = part.trim().chars().take(80).collect();
        (words > most).then_some(TooLong { line, words, start })
    })
}

/// Splits behind a full stop, colon or separator that is followed by anything but a lower-case word.
fn sentences(text: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut begin = 0;
    for (at, mark) in text.match_indices([' ']) {
        let ends = text[begin..at].ends_with(['.', '!', '?', ':', '·']) || text[begin..at].ends_with(".**");
        if ends && !text[at + mark.len()..].starts_with(|c: char| c.is_lowercase()) {
            parts.push(&text[begin..at]);
            begin = at + mark.len();
        }
    }
    parts.push(&text[begin..]);
    parts
}

/// A line with each code span as one word and each link as its text.
fn plain(line: &str) -> String {
    let mut text = String::new();
    for (index, part) in line.split('`').enumerate() {
        text.push_str(if index % 2 == 0 { part } else { "code" });
    }
    while let Some(middle) = text.find("](") {
        let Some(end) = text[middle..].find(')') else { break };
        text.replace_range(middle..=middle + end, "");
    }
    text.replace(['[', '!'], "")
}

#[test]
fn long_sentence_and_cell_are_reported() {
    let words = |count: usize| "word ".repeat(count);
    let page = format!("{}.\n\n| a | {} |\n\n```\n{}\n```\n", words(41), words(26), words(90));
    let found: Vec<usize> = too_long(&page).into_iter().map(|long| long.words).collect();
    assert_eq!(found, [41, 26]);
    let short = format!("{}. Next {}\n- `{}`\n", words(39), words(39), words(90));
    assert_eq!(too_long(&short), []);
}
