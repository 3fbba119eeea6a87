//! Entries found in the configuration of another server. Every key of the input becomes an entry
//! or a comment. Comments show no secret.

use toml::Value;
use uniffle_base::schema::redact;

/// A key of this worker with its origin.
#[derive(Debug, Clone)]
pub(super) struct ImportedEntry {
    pub(super) path: String,
    pub(super) value: Value,
    /// Comment line above the entry.
    pub(super) comment: Option<String>,
    /// Reason if the check of the converted configuration rejects the value. The entry is then
    /// written as a comment.
    pub(super) refused: Option<String>,
}

/// A key that did not become an entry. It is written as a comment.
#[derive(Debug, Clone)]
pub(super) struct UnconvertedKey {
    /// Original key and value, without secrets.
    pub(super) was: String,
    pub(super) why: String,
    /// True if the key has a counterpart, but its value cannot be converted or is given twice.
    pub(super) is_refused: bool,
}

/// All entries of the input.
#[derive(Debug, Default)]
pub(super) struct ImportedKeys {
    pub(super) entries: Vec<ImportedEntry>,
    /// Keys without a counterpart, and values that cannot be converted.
    pub(super) others: Vec<UnconvertedKey>,
    /// Number of keys in `others` of riffle's TOML that neither server knows.
    pub(super) unknown: usize,
}

impl ImportedKeys {
    pub(super) fn take(&mut self, path: &str, value: Value, comment: Option<String>) {
        self.entries.push(ImportedEntry { path: path.to_owned(), value, comment, refused: None });
    }

    /// Adds a key without a counterpart.
    pub(super) fn leave(&mut self, was: &OldEntry<'_>, why: impl Into<String>) {
        self.others.push(UnconvertedKey { was: was.shown(), why: why.into(), is_refused: false });
    }

    /// Adds a key with a counterpart whose value cannot be converted or is given twice.
    pub(super) fn refuse(&mut self, was: &OldEntry<'_>, why: impl Into<String>) {
        self.others.push(UnconvertedKey { was: was.shown(), why: why.into(), is_refused: true });
    }

    /// Returns whether the input contains no known key of either server.
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.others.len() == self.unknown
    }

    pub(super) fn has(&self, path: &str) -> bool {
        self.entries.iter().any(|entry| entry.path == path)
    }
}

/// A key of the input and its value.
#[derive(Debug, Clone, Copy)]
pub(super) struct OldEntry<'a> {
    pub(super) key: &'a str,
    /// Separator of key and value in the input's syntax.
    pub(super) between: &'a str,
    pub(super) value: &'a str,
}

impl OldEntry<'_> {
    /// Returns the original text without secrets.
    pub(super) fn shown(&self) -> String {
        let Self { key, between, value } = self;
        match redact::is_secret(key) {
            true => format!("{key}{between}{}", redact::REMOVED),
            false => format!("{key}{between}{}", redact::text(value)),
        }
    }
}
