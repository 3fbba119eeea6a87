//! Generates `config.toml.example` and `docs/configuration.md`.
//!
//! The test checks that both are current.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use toml::Value;

use crate::config::sections::{Config, schema};
use crate::schema::names::{leaf_of, table_of};
use crate::schema::{Key, Reload, RemovedKey, Schema};

/// Maximum line length in the example.
const COLUMNS: usize = 118;

const EXAMPLE_HEAD: &str = "Configuration of uniffle-worker: every key, with its default. Start with `uniffle-worker -c \
config.toml` (or WORKER_CONFIG_PATH); `--check` validates a file, `--print-config` prints the effective values. Lines that \
begin with \"#: \" are settings that are unset by default or whose default depends on the machine. Sizes are bytes or text: \
\"10G\" is 10^10 bytes, \"10GiB\" is 10 x 2^30. Durations are integers in the unit of the key's name, or text such as \
\"90s\" or \"5m\". Unknown keys are errors. docs/configuration.md has the same keys as tables, with the effect of a reload and \
the environment variables. This file is generated from the source.";

const REFERENCE_HEAD: &str = "# Configuration

Generated from the source: `UPDATE_DOCS=1 cargo test --lib config` writes this page and
[`config.toml.example`](../config.toml.example).

    uniffle-worker -c config.toml                  # or WORKER_CONFIG_PATH=config.toml
    uniffle-worker -c config.toml --check          # validates and lists every problem
    uniffle-worker -c config.toml --print-config   # prints the effective values

Without a file the worker starts with its defaults and the embedded coordinator. Sizes are bytes or text: `\"10G\"` is 10^10
bytes, `\"10GiB\"` is 10 × 2^30. Durations are integers in the unit of the key's name, or text such as `\"90s\"` or `\"5m\"`.
Unknown keys are errors that name the most similar known key. A known key in the wrong table is an error that names its table.

`urpc_port` is the port of Uniffle's raw TCP protocol (client type GRPC_NETTY). Pages and metrics call that listener *TCP*.

The worker reloads the file on SIGHUP, when it changes, and on `POST /admin/reload`: completely, or not at all on an error.
*Changes* says when a changed key takes effect. *At once*: with the reload. *Next use*: for requests, applications and
connections that begin afterwards. *Restart*: with the next start or upgrade; the log lists such keys.
";

const ENVIRONMENT: &[(&str, &str)] = &[
    ("WORKER_CONFIG_PATH", "Configuration file, if `-c` is not given."),
    (
        "WORKER_READY_FILE",
        "File to which a line of JSON with the bound ports is written once the listeners are open.",
    ),
    ("KRB5_CONFIG", "Configuration file of Kerberos. Default: /etc/krb5.conf."),
    ("MALLOC_CONF", "Options of jemalloc, also read from `_RJEM_MALLOC_CONF`."),
];

/// Returns the tables with their keys, in the order of the file, beginning with the top level.
fn tables(schema: &Schema) -> Vec<(&str, Vec<&Key>)> {
    let mut tables: Vec<(&str, Vec<&Key>)> = vec![("", Vec::new())];
    for key in schema.keys.iter().filter(|key| !key.path.is_empty()) {
        let name = table_of(key.path);
        match tables.iter_mut().find(|(table, _)| *table == name) {
            Some((_, keys)) => keys.push(key),
            None => tables.push((name, vec![key])),
        }
    }
    tables
}

fn about<'a>(schema: &'a Schema, table: &str) -> Option<&'a str> {
    schema.tables.iter().find(|(name, _)| *name == table).map(|(_, about)| *about)
}

/// Returns the doc comment of a key as one line.
fn text(key: &Key) -> String {
    key.doc.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ").replace(['[', ']'], "")
}

/// Returns the default values as TOML values, without those that depend on the machine.
fn defaults() -> BTreeMap<&'static str, Value> {
    let mut entries = Vec::new();
    crate::schema::Section::print(&Config::default(), &mut entries);
    entries.into_iter().collect()
}

/// `config.toml.example`.
pub(super) fn example() -> String {
    let (schema, defaults) = (schema(), defaults());
    let mut file = String::new();
    comment(&mut file, EXAMPLE_HEAD);
    for (table, keys) in tables(&schema) {
        file.push('\n');
        if let Some(about) = about(&schema, table) {
            about.lines().for_each(|line| comment(&mut file, line));
        }
        let _ = match table {
            "" => writeln!(file),
            table => writeln!(file, "[{table}]"),
        };
        for key in keys {
            let mut text = format!("{} ({}", text(key), key.bounds);
            for alias in key.aliases {
                let _ = write!(text, "; also accepted as {alias}");
            }
            comment(&mut file, &(text + ")"));
            let leaf = leaf_of(key.path);
            let _ = match (key.example, defaults.get(key.path)) {
                (Some(example), _) => writeln!(file, "#: {leaf} = {example}"),
                (None, Some(default)) => writeln!(file, "{leaf} = {default}"),
                (None, None) => writeln!(file, "#: {leaf} ="),
            };
        }
    }
    file
}

/// Adds `text` as a comment, wrapped at `COLUMNS`.
fn comment(file: &mut String, text: &str) {
    let mut columns = 0;
    for word in text.split_whitespace() {
        let width = word.chars().count() + 1;
        if columns == 0 || columns + width > COLUMNS {
            file.push_str(if columns == 0 { "#" } else { "\n#" });
            columns = 1;
        }
        columns += width;
        let _ = write!(file, " {word}");
    }
    file.push('\n');
}

/// Returns the text of `docs/configuration.md`.
pub(super) fn reference() -> String {
    let (schema, defaults) = (schema(), defaults());
    let mut page = REFERENCE_HEAD.to_owned();
    for (table, keys) in tables(&schema) {
        let _ = match table {
            "" => writeln!(page, "\n## Top level, before the first table"),
            table => writeln!(page, "\n## `[{table}]`"),
        };
        if let Some(about) = about(&schema, table) {
            let mut lines = about.lines();
            let _ = writeln!(page, "\n{}", lines.next().unwrap_or_default());
            for (number, line) in lines.enumerate() {
                let _ = writeln!(page, "{}- {line}", if number == 0 { "\n" } else { "" });
            }
        }
        page.push_str("\n| key | default | allowed | changes | |\n| --- | --- | --- | --- | --- |\n");
        for key in keys {
            let default = match (key.example, defaults.get(key.path)) {
                (None, Some(default)) => format!("`{default}`"),
                _ => "–".to_owned(),
            };
            let changes = match key.reload {
                Reload::AtOnce => "at once",
                Reload::NextUse => "next use",
                Reload::Restart => "restart",
            };
            let mut text = text(key);
            for alias in key.aliases {
                let _ = write!(text, " Also accepted as `{alias}`.");
            }
            let leaf = leaf_of(key.path);
            let _ = writeln!(page, "| `{leaf}` | {default} | {} | {changes} | {text} |", key.bounds);
        }
    }
    page.push_str("\n## Environment\n\n| variable | |\n| --- | --- |\n");
    for (name, text) in ENVIRONMENT {
        let _ = writeln!(page, "| `{name}` | {text} |");
    }
    for key in &schema.keys {
        for name in key.env {
            let _ = match key.path {
                "" => writeln!(page, "| `{name}` | {} ({}) |", text(key), key.bounds),
                path => writeln!(page, "| `{name}` | Takes precedence over `{path}`. |"),
            };
        }
    }
    page.push_str("\n## Accepted without effect\n\nKeys of other servers. Each is logged once as a warning.\n\n| key | why |\n| --- | --- |\n");
    for (path, why) in schema.no_effect {
        let _ = writeln!(page, "| `{path}` | {why} |");
    }
    page.push_str("\n## Removed\n\nA configuration that sets one of these keys is refused.\n\n| key | removed in | why |\n| --- | --- | --- |\n");
    for RemovedKey { path, release, reason } in schema.removed {
        let _ = writeln!(page, "| `{path}` | {release} | {reason} |");
    }
    page
}
