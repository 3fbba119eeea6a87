//! What keeps a client from being made.

/// Why there is no client, with the key of the configuration.
#[derive(Debug, thiserror::Error)]
#[error("{key}: {reason}")]
pub struct OpenError {
    key: &'static str,
    reason: String,
}

impl OpenError {
    pub(super) fn new(key: &'static str, reason: impl Into<String>) -> Self {
        Self { key, reason: reason.into() }
    }
}
