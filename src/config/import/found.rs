//! What a reader finds in another server's configuration, in the order of the input.

use toml::Value;

use crate::schema::redact;

/// One key of ours, and where it is from.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) path: String,
    pub(super) value: Value,
    /// Stands above it.
    pub(super) comment: Option<String>,
    /// Why it is only a comment.
    pub(super) refused: Option<String>,
}

/// A key that is only a comment.
#[derive(Debug, Clone)]
pub(super) struct Other {
    /// Key and value, without secrets.
    pub(super) was: String,
    pub(super) why: String,
    /// It has a counterpart, and its value is none for that.
    pub(super) is_refused: bool,
}

/// What was found in the input.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) entries: Vec<Entry>,
    /// Keys without a counterpart, and values that cannot be.
    pub(super) others: Vec<Other>,
    /// Of `others`, keys that nobody knows.
    pub(super) unknown: usize,
}

impl Found {
    pub(super) fn take(&mut self, path: &str, value: Value, comment: Option<String>) {
        self.entries.push(Entry { path: path.to_owned(), value, comment, refused: None });
    }

    /// It has no counterpart.
    pub(super) fn leave(&mut self, was: &Was<'_>, why: impl Into<String>) {
        self.others.push(Other { was: was.shown(), why: why.into(), is_refused: false });
    }

    /// It has one, which takes no such value.
    pub(super) fn refuse(&mut self, was: &Was<'_>, why: impl Into<String>) {
        self.others.push(Other { was: was.shown(), why: why.into(), is_refused: true });
    }

    /// There is nothing in the input that this program or another server knows.
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.others.len() == self.unknown
    }

    pub(super) fn has(&self, path: &str) -> bool {
        self.entries.iter().any(|entry| entry.path == path)
    }
}

/// A key of the input and its value.
#[derive(Debug, Clone, Copy)]
pub(super) struct Was<'a> {
    pub(super) key: &'a str,
    /// What stands between them in the input's language.
    pub(super) between: &'a str,
    pub(super) value: &'a str,
}

impl Was<'_> {
    /// As it was, without secrets.
    pub(super) fn shown(&self) -> String {
        let Self { key, between, value } = self;
        match redact::is_secret(key) {
            true => format!("{key}{between}{}", redact::REMOVED),
            false => format!("{key}{between}{}", redact::text(value)),
        }
    }
}
