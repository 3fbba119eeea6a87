//! What a reader finds in another server's configuration, in the order of the input.

use toml::Value;

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

/// What was found in the input.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) entries: Vec<Entry>,
    /// Keys without a counterpart, as they were, and why.
    pub(super) others: Vec<(String, String)>,
}

impl Found {
    pub(super) fn take(&mut self, path: &str, value: Value, comment: Option<String>) {
        self.entries.push(Entry { path: path.to_owned(), value, comment, refused: None });
    }

    pub(super) fn leave(&mut self, was: impl Into<String>, why: impl Into<String>) {
        self.others.push((was.into(), why.into()));
    }

    pub(super) fn has(&self, path: &str) -> bool {
        self.entries.iter().any(|entry| entry.path == path)
    }
}
