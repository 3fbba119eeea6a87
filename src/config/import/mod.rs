//! Other servers' configurations as ours: `server.conf` of the Java server, `riffle.toml` of riffle.
//!
//! [`import`] gives a text whose keys are checked as every configuration is: what ours does not take is left in as a comment
//! with the reason, and so is every key that has no counterpart. Invariant: no key of the input is dropped silently.
//! `java` and `riffle` know the names; here the text is put together.

mod found;
mod java;
mod riffle;

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;

use toml::Value;

use self::found::{Entry, Found, Other};
use super::{Config, ConfigError, Machine};
use crate::schema::names::{leaf_of, table_of};
use crate::schema::redact;

/// A configuration of ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    /// TOML with comments.
    pub text: String,
    /// What a person has to add before it is valid; empty when it is.
    pub missing: Vec<String>,
    /// Values that could not be taken over and why, without secrets: a person has to look at each.
    pub refused: Vec<String>,
    /// Keys of `text` that still have the input's secrets, which the worker needs: who may read the text may read these.
    pub secrets: Vec<String>,
}

/// `text` as a configuration of ours, for `machine`; `name` is told in it.
///
/// # Errors
/// It is neither of the two, or has no key of either.
pub fn import(name: &str, text: &str, machine: &Machine) -> Result<Imported, String> {
    let (kind, mut found) = match java::read(text) {
        Some(found) => ("the Java server's", found),
        None => ("riffle's", riffle::read(text)?),
    };
    if found.is_empty() {
        return Err(
            "nothing in it is recognized: give a server.conf (keys that begin with rss.) or riffle's TOML"
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

/// Keys that are written with values of which something may not be shown.
fn secrets(found: &Found) -> Vec<String> {
    let written = found.entries.iter().filter(|entry| entry.refused.is_none());
    written.filter(|entry| shown(entry) != entry.value).map(|entry| entry.path.clone()).collect()
}

/// What a reader of the comments should not have to find.
fn refusals(found: &Found) -> Vec<String> {
    let entries = found.entries.iter().filter_map(|entry| {
        let from = entry.comment.as_ref().map(|comment| format!(" (from {comment})")).unwrap_or_default();
        let allowed = entry.refused.as_ref()?;
        Some(one_line(&format!("{} = {}{from}: refused, {allowed}", entry.path, shown(entry))))
    });
    let others = found.others.iter().filter(|other| other.is_refused);
    entries.chain(others.map(|other| one_line(&format!("{}: {}", other.was, other.why)))).collect()
}

/// The value of `entry` without secrets.
fn shown(entry: &Entry) -> Value {
    redact::value(&entry.path, &entry.value)
}

/// Both other servers let applications name any remote path.
fn open_remote_paths(found: &mut Found) {
    let has_hdfs = |entry: &Entry| entry.path == "store_type" && entry.value.to_string().contains("HDFS");
    if found.entries.iter().any(has_hdfs) && !found.has("hdfs_store.allowed_paths") {
        let comment = "what it did: applications may name any remote path. Better name those that there are";
        let any = Value::Array(vec![Value::from("*")]);
        found.take("hdfs_store.allowed_paths", any, Some(comment.to_owned()));
    }
}

/// Marks what ours does not take, until the rest is valid; returns what is wrong with no entry.
fn refuse(found: &mut Found, machine: &Machine) -> Vec<String> {
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
                // What a key must be is another thing than that it must be there.
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

/// The top first, then each table once, in the order of the input.
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
                    let line = format!("{leaf} = {}: refused, {allowed}", shown(entry));
                    writeln!(text, "# {}", one_line(&line))
                }
            };
        }
    }
}

/// A comment has one line, whatever was in the input.
fn one_line(text: &str) -> String {
    text.split(char::is_control).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests;
