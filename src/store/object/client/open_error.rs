//! The error of a client that cannot be created.

/// Reason for which no client was created, with the key of the configuration.
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
