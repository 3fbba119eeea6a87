//! Converts riffle's TOML. Most of its keys are ours under the same name or an alias.
//!
//! A key with a counterpart keeps its value. A repeated key, a key without effect and an unknown
//! key become comments with the reason. Invariant: no key is dropped silently, and comments show no
//! secret. The caller of the import checks the values.

use toml::{Table, Value};
use uniffle_base::schema::{Schema, ValueReader, redact};

use super::found::{ImportedKeys, OldEntry};

/// Parses `text` as riffle's TOML.
pub(super) fn read(text: &str, schema: &Schema) -> Result<ImportedKeys, String> {
    let table: Table = text.parse().map_err(|error: toml::de::Error| {
        let error = redact::text(&error.to_string());
        format!("neither a server.conf (keys that begin with rss.) nor TOML: {error}")
    })?;
    let mut found = ImportedKeys::default();
    walk("", table, schema, &mut found);
    Ok(found)
}

fn walk(prefix: &str, table: Table, schema: &Schema, found: &mut ImportedKeys) {
    for (name, value) in table {
        let path = if prefix.is_empty() { name } else { format!("{prefix}.{name}") };
        let known = schema
            .keys
            .iter()
            .find(|key| !key.path.is_empty() && (key.path == path || key.aliases.contains(&path.as_str())));
        let no_effect = schema.no_effect.iter().find(|(known, _)| *known == path);
        match (known, no_effect, value) {
            (Some(key), _, value) if found.has(key.path) => {
                found.refuse(&was(&path, &shown(&value)), format!("given twice, also as {}", key.path));
            }
            (Some(key), _, value) => {
                let comment = (key.path != path).then(|| format!("{path} in riffle"));
                found.take(key.path, value, comment);
            }
            (None, Some((_, why)), value) => found.leave(&was(&path, &shown(&value)), *why),
            (None, None, Value::Table(inner)) => walk(&path, inner, schema, found),
            (None, None, value) => {
                // The reader's text for an unknown key suggests the most similar key.
                let problems =
                    ValueReader::new(schema, nested(&path, value.clone()), Default::default()).problems;
                let why = problems.first().map_or("unknown key", |problem| problem.message.as_str());
                found.leave(&was(&path, &shown(&value)), why);
                found.unknown += 1;
            }
        }
    }
}

fn was<'a>(key: &'a str, value: &'a str) -> OldEntry<'a> {
    OldEntry { key, between: " = ", value }
}

fn shown(value: &Value) -> String {
    redact::value("", value).to_string()
}

fn nested(path: &str, value: Value) -> Table {
    let (name, value) = match path.split_once('.') {
        Some((table, rest)) => (table, Value::Table(nested(rest, value))),
        None => (path, value),
    };
    Table::from_iter([(name.to_owned(), value)])
}
