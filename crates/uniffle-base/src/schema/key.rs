//! Description of a configuration key, and problems found in a configuration.

use std::fmt::{self, Display};

use super::redact;

/// When a changed key takes effect after a reload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reload {
    /// During the reload.
    AtOnce,
    /// For requests, applications or connections that begin after the reload.
    NextUse,
    /// At the next start or upgrade.
    Restart,
}

/// Description of a configuration key, or of an environment variable without a key.
#[derive(Debug)]
pub struct Key {
    /// Dotted path; empty for a setting that only an environment variable sets.
    pub path: &'static str,
    /// Alternative dotted paths.
    pub aliases: &'static [&'static str],
    /// Environment variables that override the file.
    pub env: &'static [&'static str],
    /// Description, taken from the doc comment of the field.
    pub doc: &'static [&'static str],
    /// Allowed values, in words.
    pub bounds: String,
    /// When a change takes effect.
    pub reload: Reload,
    /// A value that the example file shows in a comment instead of the default: if that is unset,
    /// empty or off, or depends on the machine or on other keys.
    pub example: Option<&'static str>,
}

/// All configuration keys, in the order of the example file.
#[derive(Debug, Default)]
pub struct Schema {
    /// Names and descriptions of the tables.
    pub tables: Vec<(&'static str, &'static str)>,
    /// Keys and environment variables.
    pub keys: Vec<Key>,
    /// Keys of other servers that are accepted and ignored: path and reason.
    pub no_effect: &'static [(&'static str, &'static str)],
    /// Keys that this version refuses.
    pub removed: &'static [RemovedKey],
}

/// A key of earlier versions. A configuration that sets it is refused.
#[derive(Debug)]
pub struct RemovedKey {
    /// Dotted path.
    pub path: &'static str,
    /// Release that removed it.
    pub release: &'static str,
    /// Reason, and what to do.
    pub reason: &'static str,
}

/// Maximum length of a value in the text of a problem.
const SHOWN_CHARS_MAX: usize = 120;

/// A problem with one key of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The key: as the user wrote it if its name is the problem, otherwise its path or the name of
    /// the environment variable.
    pub key: String,
    /// The value, with secrets removed. It is shortened when displayed.
    pub value: Option<String>,
    /// The fault, or the allowed values.
    pub message: String,
    /// True if the key is unknown and unlike any known key.
    pub is_foreign: bool,
}

impl Problem {
    /// Creates a problem with `value` of `key`, with secrets removed from the value.
    pub fn new(key: &str, value: impl Display, message: impl Into<String>) -> Self {
        let shown = match redact::is_secret(key) {
            true => redact::REMOVED.to_owned(),
            false => redact::text(&value.to_string()),
        };
        Self { key: key.to_owned(), value: Some(shown), message: message.into(), is_foreign: false }
    }
}

impl Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(value) = &self.value else {
            return write!(f, "{}: {}", self.key, self.message);
        };
        let shown: String =
            value.chars().take(SHOWN_CHARS_MAX).map(|c| if c == '\n' { ' ' } else { c }).collect();
        let cut = if value.chars().nth(SHOWN_CHARS_MAX).is_some() { "…" } else { "" };
        write!(f, "{} = {shown}{cut}: {}", self.key, self.message)
    }
}
