//! Converts `server.conf` of the Java server and `riffle.toml` of riffle to our configuration.
//!
//! The result is checked like any configuration. Rejected values and keys without a counterpart
//! stay in the text as comments with the reason.
//! Invariant: no key of the input is dropped silently.

mod found;
mod java;
mod riffle;

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;

use toml::Value;

use self::found::{Entry, ImportedKeys, Other};
use super::{Config, ConfigError, Machine};
use crate::schema::names::{leaf_of, table_of};
use crate::schema::redact;

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

/// Converts `text` to a configuration for `machine`. `name` identifies the input in a comment.
///
/// # Errors
/// If the input has neither format, or no known key of either server.
pub fn import(name: &str, text: &str, machine: &Machine) -> Result<Imported, String> {
    let (kind, mut found) = match java::read(text) {
        Some(found) => ("the Java server's", found),
        None => ("riffle's", riffle::read(text)?),
    };
    if found.is_empty() {
        return Err(
            "no known keys found; expected a server.conf (keys that begin with rss.) or riffle's TOML"
                .to_owned(),
        );
    }
    open_remote_paths(&mut found);
    let missing = refuse(&mut found, machine);
    let mut written = format!("# From {}, {kind} configuration.\n", name.replace(char::is_control, " "));
    for problem in &missing {
        let _ = writeln!(written, "# MISSING: {}", one_line(problem));
    }
    write_entries(&mut written, &found.entries);
    if !found.others.is_empty() {
        written.push_str("\n# Without a counterpart:\n");
    }
    for Other { was, why, .. } in &found.others {
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
fn shown(entry: &Entry) -> Value {
    redact::value(&entry.path, &entry.value)
}

/// Allows all remote paths, as both other servers do, unless the input restricts them.
fn open_remote_paths(found: &mut ImportedKeys) {
    let has_hdfs = |entry: &Entry| entry.path == "store_type" && entry.value.to_string().contains("HDFS");
    if found.entries.iter().any(has_hdfs) && !found.has("hdfs_store.allowed_paths") {
        let comment = "as before, applications may use any remote path; better list the paths in use";
        let any = Value::Array(vec![Value::from("*")]);
        found.take("hdfs_store.allowed_paths", any, Some(comment.to_owned()));
    }
}

/// Marks rejected entries until the others are valid. Returns problems that belong to no entry.
fn refuse(found: &mut ImportedKeys, machine: &Machine) -> Vec<String> {
    loop {
        let mut text = String::new();
        write_entries(&mut text, &found.entries);
        let problems = match Config::parse(&text, &HashMap::new(), machine) {
            Ok(_) => return Vec::new(),
            Err(ConfigError::Invalid { problems, .. }) => problems,
            Err(other) => return vec![other.to_string()],
        };
        let mut missing = Vec::new();
        let mut is_changed = false;
        for problem in problems {
            let entry =
                found.entries.iter_mut().find(|entry| entry.path == problem.key && entry.refused.is_none());
            match entry {
                // Only the description of the allowed values; a missing key has no entry.
                Some(entry) => {
                    entry.refused = Some(problem.allowed);
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

/// Writes the top level first, then each table once, in the order of the input.
fn write_entries(text: &mut String, entries: &[Entry]) {
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
mod tests;
