//! Converts `server.conf` of the Java server and `riffle.toml` of riffle to our configuration.
//!
//! The result is checked like any configuration, by a function of the caller. Rejected values and
//! keys without a counterpart stay in the text as comments with the reason.
//! Invariant: no key of the input is dropped silently.

mod found;
mod java;
mod riffle;

use std::collections::BTreeSet;
use std::fmt::Write as _;

use toml::Value;
use uniffle_base::schema::names::{leaf_of, table_of};
use uniffle_base::schema::{Problem, Schema, redact};

use self::found::{ImportedEntry, ImportedKeys, UnconvertedKey};

/// A converted configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    /// TOML with comments.
    pub text: String,
    /// Problems that the user must fix before the configuration is valid.
    pub missing: Vec<String>,
    /// Values that were not converted, with the reason and without secrets. Each needs a review.
    pub refused: Vec<String>,
    /// Keys of `text` whose values contain secrets of the input. The text must be protected.
    pub secrets: Vec<String>,
}

/// Result of a check that refuses a configuration.
#[derive(Debug)]
pub enum ImportRefusal {
    /// Problems with values.
    Values(Vec<Problem>),
    /// The configuration cannot be read at all, with the reason.
    Text(String),
}

/// Converts `text` to a configuration with the keys of `schema`. `name` identifies the input in a
/// comment. `check` checks a configuration like the start of a worker.
///
/// # Errors
/// If the input has neither format, or no known key of either server.
pub fn import(
    name: &str,
    text: &str,
    schema: &Schema,
    check: impl Fn(&str) -> Result<(), ImportRefusal>,
) -> Result<Imported, String> {
    let (kind, mut found) = match java::read(text) {
        Some(found) => ("the Java server's", found),
        None => ("riffle's", riffle::read(text, schema)?),
    };
    if found.is_empty() {
        return Err(
            "no known keys found; expected a server.conf (keys that begin with rss.) or riffle's TOML"
                .to_owned(),
        );
    }
    open_remote_paths(&mut found);
    let missing = refuse(&mut found, check);
    let mut written = format!("# From {}, {kind} configuration.\n", name.replace(char::is_control, " "));
    for problem in &missing {
        let _ = writeln!(written, "# MISSING: {}", one_line(problem));
    }
    write_entries(&mut written, &found.entries);
    if !found.others.is_empty() {
        written.push_str("\n# Not converted:\n");
    }
    for UnconvertedKey { was, why, .. } in &found.others {
        let _ = writeln!(written, "# {}: {}", one_line(was), one_line(why));
    }
    Ok(Imported { text: written, missing, refused: refusals(&found), secrets: secrets(&found) })
}

/// Returns the keys whose written values contain secrets.
fn secrets(found: &ImportedKeys) -> Vec<String> {
    let written = found.entries.iter().filter(|entry| entry.refused.is_none());
    written.filter(|entry| shown(entry) != entry.value).map(|entry| entry.path.clone()).collect()
}

/// Returns one line for every value that was rejected.
fn refusals(found: &ImportedKeys) -> Vec<String> {
    let entries = found.entries.iter().filter_map(|entry| {
        let from = entry.comment.as_ref().map(|comment| format!(" (from {comment})")).unwrap_or_default();
        let allowed = entry.refused.as_ref()?;
        Some(one_line(&format!("{} = {}{from}: rejected, {allowed}", entry.path, shown(entry))))
    });
    let others = found.others.iter().filter(|other| other.is_refused);
    entries.chain(others.map(|other| one_line(&format!("{}: {}", other.was, other.why)))).collect()
}

/// Returns the value of `entry` without secrets.
fn shown(entry: &ImportedEntry) -> Value {
    redact::value(&entry.path, &entry.value)
}

/// Allows all remote paths, as both other servers do, unless the input restricts them.
fn open_remote_paths(found: &mut ImportedKeys) {
    let has_hdfs =
        |entry: &ImportedEntry| entry.path == "store_type" && entry.value.to_string().contains("HDFS");
    if found.entries.iter().any(has_hdfs) && !found.has("hdfs_store.allowed_paths") {
        let comment = "as before, applications may use any remote path; better list the paths in use";
        let any = Value::Array(vec![Value::from("*")]);
        found.take("hdfs_store.allowed_paths", any, Some(comment.to_owned()));
    }
}

/// Marks rejected entries until the others are valid. Returns problems that belong to no entry.
fn refuse(found: &mut ImportedKeys, check: impl Fn(&str) -> Result<(), ImportRefusal>) -> Vec<String> {
    loop {
        let mut text = String::new();
        write_entries(&mut text, &found.entries);
        let problems = match check(&text) {
            Ok(()) => return Vec::new(),
            Err(ImportRefusal::Values(problems)) => problems,
            Err(ImportRefusal::Text(why)) => return vec![why],
        };
        let mut missing = Vec::new();
        let mut is_changed = false;
        for problem in problems {
            let entry =
                found.entries.iter_mut().find(|entry| entry.path == problem.key && entry.refused.is_none());
            match entry {
                // Without the value, which the entry has. A missing key has no entry.
                Some(entry) => {
                    entry.refused = Some(problem.message);
                    is_changed = true;
                }
                None => missing.push(problem.to_string()),
            }
        }
        if !is_changed {
            return missing;
        }
    }
}

/// Writes the top level first, then each table once, in the order of `entries`.
fn write_entries(text: &mut String, entries: &[ImportedEntry]) {
    let mut seen = BTreeSet::new();
    let tables = std::iter::once("").chain(entries.iter().map(|entry| table_of(&entry.path)));
    for table in tables.filter(|table| seen.insert(*table)) {
        let within: Vec<_> = entries.iter().filter(|entry| table_of(&entry.path) == table).collect();
        if !table.is_empty() {
            let _ = writeln!(text, "\n[{table}]");
        }
        for entry in within {
            if let Some(comment) = &entry.comment {
                let _ = writeln!(text, "# {}", one_line(comment));
            }
            let leaf = leaf_of(&entry.path);
            let _ = match &entry.refused {
                None => writeln!(text, "{leaf} = {}", entry.value),
                Some(allowed) => {
                    let line = format!("{leaf} = {}: rejected, {allowed}", shown(entry));
                    writeln!(text, "# {}", one_line(&line))
                }
            };
        }
    }
}

/// Replaces control characters, so that a comment stays on one line.
fn one_line(text: &str) -> String {
    text.split(char::is_control).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::java;

    #[test]
    fn migration_page_lists_the_java_config_keys() {
        // The command selects this test by `config` in its name.
        const BEGIN: &str = "<!-- generated: UPDATE_DOCS=1 cargo test --lib config -->\n";
        const END: &str = "<!-- end -->";
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/migration.md");
        let page = std::fs::read_to_string(&path).unwrap();
        let (before, rest) = page.split_once(BEGIN).expect("the page has no begin marker of the table");
        let (_, after) = rest.split_once(END).expect("the page has no end marker of the table");
        let current = format!("{before}{BEGIN}\n{}\n{END}{after}", java::reference());
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(&path, &current).unwrap();
        }
        assert!(
            page == current || std::env::var_os("UPDATE_DOCS").is_some(),
            "the table is out of date: run UPDATE_DOCS=1 cargo test --lib config"
        );
    }
}
