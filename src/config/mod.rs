//! Reads and checks the configuration: a TOML file and environment variables.
//!
//! Modules declare their own keys ([`crate::schema`]). This module combines the sections and checks
//! them against each other. A test generates their documentation. All problems are reported at
//! once, each with key, value and allowed values.
//!
//! Invariant: the result of [`Config::load`] and [`Config::parse`] needs no further checks, except
//! against the limits of the system ([`Config::fit`]).

mod banner;
mod check;
mod limits;
mod sections;
mod worker;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use toml::Table;
use uniffle_ctl::{ImportRefusal, Imported};

pub use crate::schema::limits::{SystemLimits, raise_soft_limits};
pub use crate::schema::{Machine, Problem};
pub use banner::{SparkOptions, startup_banner};
pub use limits::{Finding, LimitsTooLow};
pub use sections::Config;
pub use worker::{StoreType, WorkerConfig, check_tags};

use crate::schema::{Section as _, ValueReader, files, names, nested, redact};

/// Size limit of a configuration file. Real ones have a few KiB.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Reason why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {path}: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The file is not TOML. The text contains line and column.
    #[error("the configuration{} is not valid TOML: {text}", at(.path.as_deref()))]
    Syntax {
        /// The file, if there is one.
        path: Option<PathBuf>,
        /// Message of the parser.
        text: String,
    },
    /// The file is TOML and has invalid content.
    #[error("the configuration{} has {}:{}{}", at(.path.as_deref()), counted(.problems.len()), listed(.problems), pointer(.problems))]
    Invalid {
        /// The file, if there is one.
        path: Option<PathBuf>,
        /// All problems found.
        problems: Vec<Problem>,
    },
}

fn at(path: Option<&Path>) -> String {
    path.map_or_else(String::new, |path| format!(" {}", path.display()))
}

fn counted(count: usize) -> String {
    if count == 1 { "a problem".to_owned() } else { format!("{count} problems") }
}

/// Remedy for a configuration of another server.
const IMPORT: &str =
    "convert a configuration of the Java server or of riffle with `uniffle-worker import FILE`";

/// Converts `text`, a configuration of another server, to one for `machine`. `name` identifies the
/// input in a comment.
///
/// # Errors
/// If the input has neither format, or no known key of either server.
pub fn import(name: &str, text: &str, machine: &Machine) -> Result<Imported, String> {
    let check = |text: &str| match Config::parse(text, &HashMap::new(), machine) {
        Ok(_) => Ok(()),
        Err(ConfigError::Invalid { problems, .. }) => Err(ImportRefusal::Values(problems)),
        Err(other) => Err(ImportRefusal::Text(other.to_string())),
    };
    uniffle_ctl::import(name, text, &sections::schema(), check)
}

/// Returns a line that points to `import` if a key is unlike any key of this worker.
fn pointer(problems: &[Problem]) -> String {
    let is_foreign = |problem: &Problem| problem.is_foreign || names::is_java(&problem.key);
    if problems.iter().any(is_foreign) { format!("\n  {IMPORT}") } else { String::new() }
}

fn listed(problems: &[Problem]) -> String {
    problems.iter().map(|problem| format!("\n  {problem}")).collect()
}

impl Config {
    /// Reads the file `command_line`, else the one in `WORKER_CONFIG_PATH`, else uses the defaults.
    ///
    /// # Errors
    /// [`ConfigError`]. Its text is meant for users and has a line per problem.
    pub fn load(
        command_line: Option<&Path>,
        env: &HashMap<String, String>,
        machine: &Machine,
    ) -> Result<Self, ConfigError> {
        let from_env = env.get("WORKER_CONFIG_PATH").filter(|path| !path.is_empty()).map(Path::new);
        let Some(path) = command_line.or(from_env) else {
            return Self::parse("", env, machine);
        };
        let unreadable = |source| ConfigError::Unreadable { path: path.to_owned(), source };
        let text = files::read_text(path, FILE_BYTES_MAX).map_err(unreadable)?;
        match Self::parse(&text, env, machine) {
            Ok(config) => Ok(Self { source: Some(path.to_owned()), ..config }),
            Err(ConfigError::Syntax { text, .. }) => {
                Err(ConfigError::Syntax { path: Some(path.to_owned()), text })
            }
            Err(ConfigError::Invalid { problems, .. }) => {
                Err(ConfigError::Invalid { path: Some(path.to_owned()), problems })
            }
            Err(error @ ConfigError::Unreadable { .. }) => Err(error),
        }
    }

    /// Parses a configuration. Empty text gives the defaults.
    ///
    /// # Errors
    /// [`ConfigError`] without a path.
    pub fn parse(text: &str, env: &HashMap<String, String>, machine: &Machine) -> Result<Self, ConfigError> {
        let table: Table = text.parse().map_err(|error: toml::de::Error| ConfigError::Syntax {
            path: None,
            text: match text.lines().any(|line| names::is_java(line.trim_start())) {
                true => format!("{}; {IMPORT}", redact::text(error.to_string().trim_end())),
                false => redact::text(&error.to_string()),
            },
        })?;
        let mut reader = ValueReader::new(&sections::schema(), table, env.clone());
        let mut config = Self::read(&mut reader, machine);
        config.follow();
        config.settle_backing(env);
        check::check(&config, &mut reader);
        if !reader.problems.is_empty() {
            return Err(ConfigError::Invalid { path: None, problems: reader.problems });
        }
        config.warnings = reader.warnings;
        Ok(config)
    }

    /// Returns every key that has a value, as text, including defaults. A reload compares these.
    pub fn entries(&self) -> BTreeMap<&'static str, String> {
        let mut entries = Vec::new();
        self.print(&mut entries);
        entries.into_iter().map(|(key, value)| (key, value.to_string())).collect()
    }

    /// Returns the effective configuration as TOML. It parses to a configuration with the same
    /// values of all keys. Settings that have only an environment variable are left out.
    pub fn to_toml(&self) -> String {
        let mut entries = Vec::new();
        self.print(&mut entries);
        nested(entries).to_string()
    }

    /// Returns [`Config::entries`] without secrets.
    pub fn redacted_entries(&self) -> BTreeMap<&'static str, String> {
        self.redacted().into_iter().map(|(key, value)| (key, value.to_string())).collect()
    }

    /// Returns [`Config::to_toml`] without secrets.
    pub fn to_redacted_toml(&self) -> String {
        nested(self.redacted()).to_string()
    }

    fn redacted(&self) -> Vec<(&'static str, toml::Value)> {
        let mut entries = Vec::new();
        self.print(&mut entries);
        entries.into_iter().map(|(key, value)| (key, redact::value(key, &value))).collect()
    }
}

#[cfg(test)]
mod tests;
