//! The configuration: TOML and environment → the modules' sections, read and cross-checked.
//!
//! Every module declares what can be configured of it where it is used ([`crate::schema`]); here the sections are put
//! together (`sections`), checked against each other (`check`) and documented (`document`); `import` reads those of other
//! servers. All problems are reported at once, each with its key, its value and what is allowed. Nothing here starts,
//! opens or binds anything. Invariant: a `Config` made by [`Config::load`] or [`Config::parse`] needs no further checks.
//! The environment is passed in as a map, the machine as a [`Machine`], so that tests share no state.

mod banner;
mod check;
mod document;
mod import;
mod limits;
mod sections;
mod worker;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use toml::Table;

pub use crate::schema::limits::{SystemLimits, raise_soft_limits};
pub use crate::schema::{Machine, Problem};
pub use banner::startup_banner;
pub use document::{example, reference};
pub use import::{Imported, import};
pub use limits::{Finding, LimitsTooLow};
pub use sections::Config;
pub use worker::{StoreType, WorkerConfig, check_tags};

use crate::schema::{Reader, Section as _, files, nested, redact};

/// Largest configuration file read; real ones have a few KiB.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {path}: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not TOML; the text has line and column.
    #[error("the configuration{} is not TOML: {text}", at(.path.as_deref()))]
    Syntax {
        /// The file, if there is one.
        path: Option<PathBuf>,
        /// What the parser says.
        text: String,
    },
    /// The file is TOML, and this is wrong with it.
    #[error("the configuration{} has {}:{}", at(.path.as_deref()), counted(.problems.len()), listed(.problems))]
    Invalid {
        /// The file, if there is one.
        path: Option<PathBuf>,
        /// Everything that is wrong.
        problems: Vec<Problem>,
    },
}

fn at(path: Option<&Path>) -> String {
    path.map_or_else(String::new, |path| format!(" {}", path.display()))
}

fn counted(count: usize) -> String {
    if count == 1 { "a problem".to_owned() } else { format!("{count} problems") }
}

fn listed(problems: &[Problem]) -> String {
    problems.iter().map(|problem| format!("\n  {problem}")).collect()
}

impl Config {
    /// Reads the file given on the command line, else the one of `WORKER_CONFIG_PATH`, else takes the defaults.
    ///
    /// # Errors
    /// [`ConfigError`]; its text is complete for a person, on several lines when there are several problems.
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

    /// Reads a configuration from `text`; empty text gives the defaults.
    ///
    /// # Errors
    /// [`ConfigError`] without a path.
    pub fn parse(text: &str, env: &HashMap<String, String>, machine: &Machine) -> Result<Self, ConfigError> {
        let table: Table = text.parse().map_err(|error: toml::de::Error| ConfigError::Syntax {
            path: None,
            text: redact::text(&error.to_string()),
        })?;
        let mut reader = Reader::new(&sections::schema(), table, env.clone());
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

    /// Every key that has a value, as text: what is compared when a file is read again.
    pub fn entries(&self) -> BTreeMap<&'static str, String> {
        let mut entries = Vec::new();
        self.print(&mut entries);
        entries.into_iter().map(|(key, value)| (key, value.to_string())).collect()
    }

    /// The effective configuration as TOML with every key that has a value; parses back to an equal one.
    pub fn to_toml(&self) -> String {
        let mut entries = Vec::new();
        self.print(&mut entries);
        nested(entries).to_string()
    }

    /// As [`Config::entries`], without secrets: what others may see.
    pub fn shown_entries(&self) -> BTreeMap<&'static str, String> {
        self.shown().into_iter().map(|(key, value)| (key, value.to_string())).collect()
    }

    /// As [`Config::to_toml`], without secrets: what a person may see.
    pub fn to_shown_toml(&self) -> String {
        nested(self.shown()).to_string()
    }

    fn shown(&self) -> Vec<(&'static str, toml::Value)> {
        let mut entries = Vec::new();
        self.print(&mut entries);
        entries.into_iter().map(|(key, value)| (key, redact::value(key, &value))).collect()
    }
}

#[cfg(test)]
mod tests;
