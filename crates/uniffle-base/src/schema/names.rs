//! Sorts the entries of a configuration file into known keys, problems and warnings.
//!
//! Works on names only and looks at no values.
//! Invariant: every entry ends up as a value, a problem or a warning.

use std::collections::BTreeMap;

use toml::{Table, Value};

use super::key::{Problem, Schema};

/// Minimum similarity (normalised Damerau-Levenshtein) for a "did you mean" suggestion.
const LIKENESS_MIN: f64 = 0.5;

/// Longer names get no suggestion: no key is half as long, and comparing costs the product of the
/// two lengths.
const COMPARED_BYTES_MAX: usize = 100;

/// No suggestions after this number of problems.
const OFFERS_MAX: usize = 50;

/// Maximum length of a name in the text of a problem.
const SHOWN_BYTES_MAX: usize = 200;

const UNKNOWN_TABLE: &str = "unknown table";
const UNKNOWN_KEY: &str = "unknown key";

/// Values by canonical path, problems, and warnings.
pub type Sorted = (BTreeMap<&'static str, Value>, Vec<Problem>, Vec<String>);

pub fn sort(schema: &Schema, table: Table) -> Sorted {
    let mut sorted = Sorted::default();
    walk(schema, "", table, &mut sorted);
    sorted
}

fn walk(schema: &Schema, prefix: &str, table: Table, sorted: &mut Sorted) {
    for (name, value) in table {
        let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        let (values, problems, warnings) = &mut *sorted;
        if let Some((_, why)) = schema.no_effect.iter().find(|(known, _)| *known == path) {
            warnings.push(format!("{path} has no effect: {why}"));
            continue;
        }
        if let Some(removed) = schema.removed.iter().find(|removed| removed.path == path) {
            let allowed = format!("removed in {}: {}", removed.release, removed.reason);
            problems.push(Problem::new(&path, &value, allowed));
            continue;
        }
        if let Some(known) = canonical(schema, &path) {
            if values.contains_key(known) {
                let allowed = format!("given twice, as {known} and as an alias of it");
                problems.push(Problem::new(&path, &value, allowed));
            } else {
                values.insert(known, value);
            }
            continue;
        }
        let offers = problems.len() < OFFERS_MAX && path.len() <= COMPARED_BYTES_MAX;
        let shown = shown(&path);
        match (value, is_table(schema, &path)) {
            (Value::Table(inner), true) => walk(schema, &path, inner, sorted),
            (Value::Table(_), false) => problems.push(Problem {
                key: format!("[{shown}]"),
                value: None,
                allowed: if offers { unknown_table(schema, &path) } else { UNKNOWN_TABLE.to_owned() },
            }),
            (value, true) => {
                let problem = Problem::new(&path, &value, "must be a table, not a value");
                problems.push(Problem { key: shown, ..problem });
            }
            (value, false) => {
                let allowed = if offers { unknown_key(schema, &path, &name) } else { UNKNOWN_KEY.to_owned() };
                problems.push(Problem { key: shown, ..Problem::new(&path, &value, allowed) });
            }
        }
    }
}

/// Returns true if `key`, as a [`Problem`] names it, is a key of the Java server.
pub fn is_java(key: &str) -> bool {
    let key = key.trim_start_matches('[');
    key == "rss]" || key.starts_with("rss.")
}

/// Returns true if `allowed` of a [`Problem`] says that no key or table is similar.
pub fn is_foreign(allowed: &str) -> bool {
    [UNKNOWN_KEY, UNKNOWN_TABLE].contains(&allowed)
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
    candidates
        .map(|candidate| (strsim::normalized_damerau_levenshtein(text, candidate), candidate))
        .filter(|(likeness, _)| *likeness >= LIKENESS_MIN)
        .max_by(|left, right| left.0.total_cmp(&right.0))
        .map(|(_, candidate)| candidate)
}

fn unknown_table(schema: &Schema, path: &str) -> String {
    match nearest(path, paths(schema).map(table_of).filter(|table| !table.is_empty())) {
        Some(table) => format!("unknown table, did you mean [{table}]?"),
        None => UNKNOWN_TABLE.to_owned(),
    }
}

/// Describes an unknown key: the right table if the name exists in another one, else the most
/// similar key, preferring the same table.
fn unknown_key(schema: &Schema, path: &str, name: &str) -> String {
    let all = || paths(schema);
    let homes: Vec<String> = all()
        .filter(|known| leaf_of(known) == name)
        .map(|known| match table_of(known) {
            "" => "at the top level, before the first table".to_owned(),
            table => format!("in the table [{table}]"),
        })
        .collect();
    if !homes.is_empty() {
        return format!("this key belongs {}", homes.join(" or "));
    }
    let siblings = all().filter(|known| table_of(known) == table_of(path));
    let near = nearest(path, siblings)
        .or_else(|| nearest(path, all()))
        .or_else(|| all().find(|known| nearest(name, std::iter::once(leaf_of(known))).is_some()));
    match near {
        Some(known) => format!("unknown key, did you mean {known}?"),
        None => UNKNOWN_KEY.to_owned(),
    }
}
