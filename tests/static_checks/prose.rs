//! Language of documents, comments and test names (docs/style.md).
//!
//! Table cells and sentences of documents are short. Comments of the finished folders and of the
//! example configuration avoid relative clauses and references. Nearly all comment lines of the
//! folders fit 100 columns. Test names are short. The measures only show where to look: rewrite for
//! a reader. Generated pages are not checked, because their text comes from the sources.

use std::collections::BTreeMap;
use std::path::Path;

use super::docs::read_tree;

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
    let mut pages = BTreeMap::new();
    read_tree(root, &root.join("docs"), &mut pages);
    for page in ["README.md", "CHANGELOG.md"] {
        pages.insert(page.into(), std::fs::read_to_string(root.join(page)).unwrap());
    }
    let is_generated = |page: &Path| GENERATED.iter().any(|generated| page == Path::new(generated));
    pages.retain(|page, _| page.extension().is_some_and(|end| end == "md") && !is_generated(page));
    assert!(pages.len() > 15, "found only {:?}: the search is broken", pages.keys());

    let mut long = Vec::new();
    for (page, text) in &pages {
        for TooLong { line, words, start } in too_long(text) {
            long.push(format!("{}:{line}: {words} words: {start}", page.display()));
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

/// Splits behind a full stop, colon or separator that is followed by anything but a lower-case
/// word.
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

/// Folders whose comments and test names follow docs/style.md. A folder that is done stays here.
const DONE: &[&str] = &[
    "benches",
    "crates/fastant",
    "crates/uniffle-base",
    "crates/uniffle-bench",
    "crates/uniffle-client",
    "crates/uniffle-coordinator",
    "crates/uniffle-ctl",
    "crates/uniffle-io",
    "crates/uniffle-log",
    "crates/uniffle-memory",
    "crates/uniffle-profile",
    "crates/uniffle-telemetry",
    "crates/uniffle-testkit",
    "crates/uniffle-wire",
    "src/app",
    "src/compat",
    "src/config",
    "src/flush",
    "src/listeners",
    "src/server",
    "src/service",
    "src/remote",
    "src/store",
    "tests",
];
/// First words of a comment that refer to something outside of it, such as the item's name.
const OPENERS: &[&str] = &[
    "What", "Whether", "Who", "Whose", "Those", "Of", "So", "One", "How", "As", "Its", "Where", "Their",
    "These", "None",
];
/// Words that make "what" the start of a relative clause.
const WHAT_CLAUSE: &[&str] = &[
    "is", "was", "has", "have", "it", "they", "a", "an", "the", "of", "can", "may", "comes", "came",
    "stands", "lies", "ends", "goes", "must", "did", "does",
];
/// Words that glue a second statement to the first one, behind a semicolon.
const GLUE: &[&str] = &["how", "what", "whether", "none", "false", "true", "its", "that", "which"];
/// Limits per 10,000 comments, words, words and lines.
const OPENERS_MAX: usize = 300;
const WHAT_CLAUSES_MAX: usize = 8;
const GLUED_MAX: usize = 1;
const WIDE_MAX: usize = 100;
const COMMENT_COLUMNS_MAX: usize = 100;
const TEST_NAME_MAX: usize = 60;
/// Shorter comments are not measured.
const BLOCK_BYTES_MIN: usize = 8;
const WORST_SHOWN: usize = 10;

/// Adjacent comment lines, joined.
struct Block {
    line: usize,
    text: String,
}

/// Counts of the comments of a folder, and the places to improve.
#[derive(Default)]
struct Measures {
    blocks: usize,
    words: usize,
    openers: Vec<String>,
    what_clauses: Vec<String>,
    glued: Vec<String>,
    lines: usize,
    wide: Vec<String>,
    long_names: Vec<String>,
}

impl Measures {
    fn of_folder(root: &Path, folder: &str) -> Self {
        let mut measures = Self::default();
        let mut files = BTreeMap::new();
        read_tree(root, &root.join(folder), &mut files);
        files.retain(|path, _| path.extension().is_some_and(|extension| extension == "rs"));
        for (path, text) in files {
            let is_test_module = path.iter().skip(folder.split('/').count()).any(|part| part == "tests")
                || path.ends_with("tests.rs");
            measures.add_names(&path, &text);
            if !is_test_module {
                measures.add(&path, text.split("\n#[cfg(test)]\nmod ").next().unwrap_or_default());
            }
        }
        measures
    }

    fn add(&mut self, path: &Path, text: &str) {
        for (line, text) in (1..).zip(text.lines()).filter(|(_, text)| text.trim_start().starts_with("//")) {
            self.lines += 1;
            if text.chars().count() > COMMENT_COLUMNS_MAX {
                self.wide.push(format!("{}:{line}", path.display()));
            }
        }
        for Block { line, text } in blocks(text) {
            let place =
                || format!("{}:{line}: {}", path.display(), text.chars().take(160).collect::<String>());
            self.blocks += 1;
            self.words += text.split_whitespace().count();
            let first = text.split_whitespace().next().unwrap_or_default();
            if OPENERS.contains(&first.trim_matches(|mark| ".,`[*".contains(mark))) {
                self.openers.push(place());
            }
            self.what_clauses.extend((0..what_clauses(&text)).map(|_| place()));
            self.glued.extend((0..glued(&text)).map(|_| place()));
        }
    }

    fn add_names(&mut self, path: &Path, text: &str) {
        let mut is_test = false;
        for (line, text) in (1..).zip(text.lines().map(str::trim_start)) {
            is_test |= text.starts_with("#[test]") || text.starts_with("#[tokio::test");
            let Some((_, rest)) = text.split_once("fn ").filter(|_| is_test && !text.starts_with("//"))
            else {
                continue;
            };
            is_test = false;
            let name = first_word(rest);
            if name.len() > TEST_NAME_MAX {
                self.long_names.push(format!("{}:{line}: {name}", path.display()));
            }
        }
    }

    /// Returns each figure over its limit, with the worst places.
    fn excesses(&self, folder: &str) -> Vec<String> {
        let figures = [
            ("comments that open with a reference", &self.openers, self.blocks, OPENERS_MAX),
            ("what-clauses", &self.what_clauses, self.words, WHAT_CLAUSES_MAX),
            ("glued statements", &self.glued, self.words, GLUED_MAX),
            ("comment lines that are too wide", &self.wide, self.lines, WIDE_MAX),
            ("test names that are too long", &self.long_names, 1, 0),
        ];
        let over = figures.into_iter().filter(|(_, places, of, limit)| places.len() * 10_000 > limit * of);
        let over = over.map(|(what, places, of, _)| {
            let shown = places[..places.len().min(WORST_SHOWN)].join("\n  ");
            format!("{folder}: {} {what} of {of}:\n  {shown}", places.len())
        });
        over.collect()
    }
}

#[test]
fn comments_and_test_names_of_done_folders_are_plain() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut excesses = Vec::new();
    for folder in DONE {
        let measures = Measures::of_folder(root, folder);
        assert!(measures.blocks > 5, "the search is broken: {folder} has {} comments", measures.blocks);
        excesses.extend(measures.excesses(folder));
    }
    assert!(excesses.is_empty(), "rewrite for a reader (docs/style.md):\n{}\n", excesses.join("\n"));
}

#[test]
fn comments_of_the_example_configuration_are_plain() {
    let text = include_str!("../../config.toml.example").replace("\n# ", "\n// ");
    let mut measures = Measures::default();
    measures.add(Path::new("config.toml.example"), &text);
    assert!(measures.blocks > 100, "the search is broken: {} comments", measures.blocks);
    // The generator wraps its lines, at more columns.
    measures.wide.clear();
    let excesses = measures.excesses("config.toml.example");
    assert!(excesses.is_empty(), "rewrite the docs of these keys:\n{}\n", excesses.join("\n"));
}

/// Returns the comments of a file that are long enough to be measured.
fn blocks(text: &str) -> Vec<Block> {
    let mut found: Vec<Block> = Vec::new();
    let mut is_open = false;
    for (line, text) in (1..).zip(text.lines().map(str::trim)) {
        let comment = ["///", "//!", "//"].iter().find_map(|mark| text.strip_prefix(mark));
        match (comment, found.last_mut().filter(|_| is_open)) {
            (Some(comment), Some(block)) => block.text.push_str(&format!(" {}", comment.trim())),
            (Some(comment), None) => found.push(Block { line, text: comment.trim().to_owned() }),
            (None, _) => {}
        }
        is_open = comment.is_some();
    }
    found.retain(|block| block.text.trim().len() >= BLOCK_BYTES_MIN);
    found
}

fn what_clauses(text: &str) -> usize {
    let clauses = text.match_indices("hat ").filter(|(at, found)| {
        let before = text[..*at].trim_end_matches(['W', 'w']);
        let is_what = before.len() + 1 == *at && !before.ends_with(|mark: char| mark.is_alphanumeric());
        is_what && WHAT_CLAUSE.contains(&first_word(&text[at + found.len()..]))
    });
    clauses.count()
}

fn glued(text: &str) -> usize {
    text.split("; ").skip(1).filter(|rest| GLUE.contains(&first_word(rest))).count()
}

fn first_word(text: &str) -> &str {
    let end = text.find(|mark: char| !mark.is_alphanumeric() && mark != '_').unwrap_or(text.len());
    &text[..end]
}

#[test]
fn unclear_comments_and_long_test_names_are_reported() {
    let measure = |text: &str| {
        let mut measures = Measures::default();
        measures.add(Path::new("a.rs"), text);
        measures.add_names(Path::new("a.rs"), text);
        measures.excesses("src").len()
    };
    assert_eq!(measure("/// What is left of a block\n/// after a flush; how much it was.\nfn f() {}\n"), 3);
    assert_eq!(measure(&format!("// Returns {}\n", "a word ".repeat(20))), 1);
    assert_eq!(measure(&format!("#[test]\nfn {}() {{}}\n", "a".repeat(61))), 1);
    assert_eq!(measure(&format!("#[test]\nfn {}() {{}}\n", "a".repeat(60))), 0);
    assert_eq!(measure("/// Returns whatever is left; it may be somewhat small.\n"), 0);
}
