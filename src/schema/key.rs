//! What is known of a key, and what can be wrong with one.

use std::fmt::{self, Display};

use super::redact;

/// When a changed key of a configuration that is read again comes into effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reload {
    /// With the reload.
    AtOnce,
    /// For what begins afterwards.
    NextUse,
    /// With the next start or upgrade.
    Restart,
}

/// What is known of a key, or of a variable of the environment that has none.
#[derive(Debug)]
pub struct Key {
    /// Dotted path; empty for what only the environment says.
    pub path: &'static str,
    /// Other dotted paths that mean the same.
    pub aliases: &'static [&'static str],
    /// Variables that come before the file.
    pub env: &'static [&'static str],
    /// What it is, as written above the field.
    pub doc: &'static [&'static str],
    /// Bounds, in words.
    pub bounds: String,
    /// When a change comes into effect.
    pub reload: Reload,
    /// A value for the example file, where the default is none or follows the machine.
    pub example: Option<&'static str>,
}

/// Everything that can be configured, in the order of the example file.
#[derive(Debug, Default)]
pub struct Schema {
    /// Tables and what they are about.
    pub tables: Vec<(&'static str, &'static str)>,
    /// Keys and variables.
    pub keys: Vec<Key>,
    /// Keys of other servers that are accepted and do nothing: path and why.
    pub no_effect: &'static [(&'static str, &'static str)],
}

/// Longest value repeated in a problem.
const SHOWN_CHARS_MAX: usize = 120;

/// One thing wrong with a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The key as written.
    pub key: String,
    /// Its value, shortened when shown.
    pub value: Option<String>,
    /// What is allowed instead.
    pub allowed: String,
}

impl Problem {
    /// `value` of `key` may not stand; its secrets are not kept.
    pub fn new(key: &str, value: impl Display, allowed: impl Into<String>) -> Self {
        let shown = match redact::is_secret(key) {
            true => redact::REMOVED.to_owned(),
            false => redact::text(&value.to_string()),
        };
        Self { key: key.to_owned(), value: Some(shown), allowed: allowed.into() }
    }
}

impl Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(value) = &self.value else {
            return write!(f, "{}: {}", self.key, self.allowed);
        };
        let shown: String =
            value.chars().take(SHOWN_CHARS_MAX).map(|c| if c == '\n' { ' ' } else { c }).collect();
        let cut = if value.chars().nth(SHOWN_CHARS_MAX).is_some() { "…" } else { "" };
        write!(f, "{} = {shown}{cut}: {}", self.key, self.allowed)
    }
}
