//! Classifies the entries of a configuration file as known keys, problems or warnings.
//!
//! Only names and the difference between tables and other values matter here; `kind` checks values.
//! Invariant: every entry ends up as a value, a problem or a warning. The cost and the text for one
//! entry are bounded, however long its name is.

use std::collections::BTreeMap;

use toml::{Table, Value};

use super::key::{Problem, Schema};

/// Minimum similarity (normalised Damerau-Levenshtein) for a "did you mean" suggestion.
const SIMILARITY_MIN: f64 = 0.5;

/// Longer names are rarely like a key, because most keys have less than half of this length. They
/// are not compared, because that costs the product of the two lengths.
const COMPARED_BYTES_MAX: usize = 100;

/// No suggestions after this number of problems.
const SUGGESTIONS_MAX: usize = 50;

/// Maximum length of a name in the text of a problem.
const SHOWN_BYTES_MAX: usize = 200;

/// Values by canonical path, problems, and warnings.
pub type Classified = (BTreeMap<&'static str, Value>, Vec<Problem>, Vec<String>);

/// Divides the entries of `table` into values of known keys, problems and warnings.
pub fn classify(schema: &Schema, table: Table) -> Classified {
    let mut classified = Classified::default();
    walk(schema, "", table, &mut classified);
    classified
}

fn walk(schema: &Schema, prefix: &str, table: Table, classified: &mut Classified) {
    for (name, value) in table {
        let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        let (values, problems, warnings) = &mut *classified;
        if let Some((_, why)) = schema.no_effect.iter().find(|(known, _)| *known == path) {
            warnings.push(format!("{path} has no effect: {why}"));
            continue;
        }
        if let Some(removed) = schema.removed.iter().find(|removed| removed.path == path) {
            let message = format!("removed in {}: {}", removed.release, removed.reason);
            problems.push(Problem::new(&path, &value, message));
            continue;
        }
        if let Some(known) = canonical(schema, &path) {
            if values.contains_key(known) {
                let message = format!("given twice, under two names of {known}");
                problems.push(Problem::new(&path, &value, message));
            } else {
                values.insert(known, value);
            }
            continue;
        }
        let is_compared = problems.len() < SUGGESTIONS_MAX;
        let shown = shown(&path);
        match (value, is_table(schema, &path)) {
            (Value::Table(inner), true) => walk(schema, &path, inner, classified),
            (Value::Table(_), false) => {
                let suggestion = is_compared.then(|| suggest_table(schema, &path));
                problems.push(Problem {
                    key: format!("[{shown}]"),
                    value: None,
                    is_foreign: suggestion == Some(None),
                    message: suggestion.flatten().unwrap_or_else(|| "unknown table".to_owned()),
                });
            }
            (value, true) => {
                let problem = Problem::new(&path, &value, "must be a table, not a value");
                problems.push(Problem { key: shown, ..problem });
            }
            (value, false) => {
                let suggestion = is_compared.then(|| suggest_key(schema, &path, &name));
                let is_foreign = suggestion == Some(None);
                let message = suggestion.flatten().unwrap_or_else(|| "unknown key".to_owned());
                problems.push(Problem { key: shown, is_foreign, ..Problem::new(&path, &value, message) });
            }
        }
    }
}

/// Returns true if `key` names a key of the Java server. `key` is the name in a [`Problem`] (a
/// table as `[table]`), or a line of a file without leading spaces.
pub fn is_java(key: &str) -> bool {
    let key = key.trim_start_matches('[');
    key == "rss]" || key.starts_with("rss.")
}

fn shown(path: &str) -> String {
    let end = path.floor_char_boundary(SHOWN_BYTES_MAX);
    format!("{}{}", &path[..end], if end < path.len() { "…" } else { "" })
}

fn canonical(schema: &Schema, path: &str) -> Option<&'static str> {
    let known = schema.keys.iter().filter(|key| !key.path.is_empty());
    known.filter(|key| key.path == path || key.aliases.contains(&path)).map(|key| key.path).next()
}

fn paths(schema: &Schema) -> impl Iterator<Item = &'static str> {
    let all = schema.keys.iter().flat_map(|key| std::iter::once(key.path).chain(key.aliases.iter().copied()));
    all.filter(|path| !path.is_empty())
}

/// Returns the table of a dotted path, or "" at the top level.
pub fn table_of(path: &str) -> &str {
    path.rsplit_once('.').map_or("", |(table, _)| table)
}

/// Returns the last component of a dotted path.
pub fn leaf_of(path: &str) -> &str {
    path.rsplit_once('.').map_or(path, |(_, leaf)| leaf)
}

fn is_table(schema: &Schema, path: &str) -> bool {
    let no_effect = schema.no_effect.iter().map(|(path, _)| *path);
    let is_inside = |known: &str| known.strip_prefix(path).is_some_and(|rest| rest.starts_with('.'));
    paths(schema).chain(no_effect).any(is_inside)
}

/// Returns the most similar of `candidates` if it is similar enough to be a likely typing error.
fn nearest<'a>(text: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    if text.len() > COMPARED_BYTES_MAX {
        return None;
    }
    candidates
        .map(|candidate| (strsim::normalized_damerau_levenshtein(text, candidate), candidate))
        .filter(|(similarity, _)| *similarity >= SIMILARITY_MIN)
        .max_by(|left, right| left.0.total_cmp(&right.0))
        .map(|(_, candidate)| candidate)
}

/// Returns a message that names the most similar table.
fn suggest_table(schema: &Schema, path: &str) -> Option<String> {
    let near = nearest(path, paths(schema).map(table_of).filter(|table| !table.is_empty()))?;
    Some(format!("unknown table, did you mean [{near}]?"))
}

/// Returns a message that names the right table if the key exists in another one. Otherwise it
/// names the most similar key, preferring the same table.
fn suggest_key(schema: &Schema, path: &str, name: &str) -> Option<String> {
    let all = || paths(schema);
    let tables: Vec<String> = all()
        .filter(|known| leaf_of(known) == name)
        .map(|known| match table_of(known) {
            "" => "at the top level, before the first table".to_owned(),
            table => format!("in the table [{table}]"),
        })
        .collect();
    if !tables.is_empty() {
        return Some(format!("this key belongs {}", tables.join(" or ")));
    }
    let siblings = all().filter(|known| table_of(known) == table_of(path));
    let near = nearest(path, siblings)
        .or_else(|| nearest(path, all()))
        .or_else(|| all().find(|known| nearest(name, std::iter::once(leaf_of(known))).is_some()));
    near.map(|known| format!("unknown key, did you mean {known}?"))
}
