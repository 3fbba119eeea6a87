//! The error of the metadata log.

use std::io;
use std::path::{Path, PathBuf};

use super::format::frame::METADATA;

/// Reason why the metadata log was not written or read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct LogError {
    /// Directory or file concerned.
    pub path: PathBuf,
    /// Kind of the failure.
    pub kind: io::ErrorKind,
    /// True if the object store failed.
    pub is_remote: bool,
    text: String,
}

impl LogError {
    pub(super) fn new(path: impl AsRef<Path>, error: &io::Error) -> Self {
        Self {
            path: path.as_ref().to_path_buf(),
            kind: error.kind(),
            is_remote: false,
            text: error.to_string(),
        }
    }

    /// Returns an error of the object store's part of the log.
    #[must_use]
    pub fn of(kind: io::ErrorKind, text: &str) -> Self {
        Self { path: METADATA.into(), kind, is_remote: true, text: text.to_owned() }
    }

    /// Returns an error that only has a reason.
    #[must_use]
    pub fn told(text: &str) -> Self {
        Self { path: METADATA.into(), kind: io::ErrorKind::Other, is_remote: false, text: text.to_owned() }
    }
}

impl From<io::Error> for LogError {
    fn from(error: io::Error) -> Self {
        Self::new(METADATA, &error)
    }
}

impl From<LogError> for io::Error {
    fn from(error: LogError) -> Self {
        Self::new(error.kind, error)
    }
}
