//! Errors of a store. The kind says what happened and whether the caller retries. Within `Io`, the
//! source tells damage from transient failures.
//!
//! After a failed write the flusher keeps the batch and retries it, here or in another tier, with
//! one exception: after `Purged` it drops the batch. So a store must not return `Purged` for data
//! that is still needed. At a start, `NotOurs` and the kinds after it up to `Copied` refuse the
//! start.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::log::LogError;

/// Kind of a failed store operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StoreErrorKind {
    /// The target has no space left.
    NoSpace,
    /// Stored bytes differ from the written ones.
    Corrupt,
    /// A file or shuffle does not exist.
    NotFound,
    /// No healthy disk or store is available now, or one did not answer in time. Readers retry.
    Unhealthy,
    /// Any other failure of a file operation.
    Io,
    /// The shuffle was purged. Do not retry. A failed write leaves no data.
    Purged,
    /// The requested range is not in the partition's stream.
    InvalidRange,
    /// The batch is inconsistent (lengths), which is a bug of the caller.
    InvalidBatch,
    /// The directory has content that is not ours.
    NotOurs,
    /// The directory is ours, but has no usable claim.
    Unclaimed,
    /// The directory has a format that is no longer supported.
    Outdated,
    /// The directory has a format of another version.
    OtherFormat,
    /// Another process holds the directory.
    InUse,
    /// Two directories have one identity.
    Copied,
    /// The directory was on a mount point that is not mounted.
    NotMounted,
    /// A file with that name already exists.
    Exists,
    /// A remote store refuses: permission or login.
    Denied,
    /// A remote store does not answer, or does not accept writes (safe mode).
    Unreachable,
}

/// A failed store operation.
#[derive(Debug)]
pub struct StoreError {
    /// Kind of the failure.
    pub kind: StoreErrorKind,
    /// The file, directory or shuffle concerned.
    pub path: PathBuf,
    /// Underlying error.
    pub source: Option<io::Error>,
}

/// Conversions between kinds of store errors and kinds of log errors, in both directions.
pub(super) const LOG_KINDS: [(StoreErrorKind, io::ErrorKind); 5] = [
    (StoreErrorKind::Unreachable, io::ErrorKind::TimedOut),
    (StoreErrorKind::InUse, io::ErrorKind::ResourceBusy),
    (StoreErrorKind::Denied, io::ErrorKind::PermissionDenied),
    (StoreErrorKind::NoSpace, io::ErrorKind::StorageFull),
    (StoreErrorKind::InvalidBatch, io::ErrorKind::InvalidInput),
];

impl StoreError {
    /// Creates an error without a source.
    pub fn new(kind: StoreErrorKind, path: impl AsRef<Path>) -> Self {
        Self { kind, path: path.as_ref().to_path_buf(), source: None }
    }

    /// Creates an error from a failed file operation, and classifies it.
    pub fn io(path: impl AsRef<Path>, source: io::Error) -> Self {
        let kind = match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => StoreErrorKind::NoSpace,
            io::ErrorKind::NotFound => StoreErrorKind::NotFound,
            io::ErrorKind::TimedOut => StoreErrorKind::Unhealthy,
            io::ErrorKind::UnexpectedEof => StoreErrorKind::Corrupt,
            _ => StoreErrorKind::Io,
        };
        Self { kind, path: path.as_ref().to_path_buf(), source: Some(source) }
    }

    /// Creates the error of a failed call of a remote store.
    pub fn remote(kind: StoreErrorKind, path: impl AsRef<Path>, text: impl Into<String>) -> Self {
        let source = Some(io::Error::other(text.into()));
        Self { kind, path: path.as_ref().to_path_buf(), source }
    }

    /// Converts an error of the metadata log in an object store. `of` is its path.
    pub fn of_log(error: &LogError, of: impl AsRef<Path>) -> Self {
        let kind = LOG_KINDS.iter().find(|(_, kind)| *kind == error.kind);
        let kind = kind.map_or(StoreErrorKind::Unhealthy, |(kind, _)| *kind);
        Self::remote(kind, of, error.to_string())
    }

    /// Creates the error for stored bytes that differ from the written ones.
    pub fn corrupt(path: impl AsRef<Path>, what: &'static str) -> Self {
        let source = Some(io::Error::new(io::ErrorKind::InvalidData, what));
        Self { kind: StoreErrorKind::Corrupt, path: path.as_ref().to_path_buf(), source }
    }
}

impl fmt::Display for StoreErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoSpace => "no space left",
            Self::Corrupt => "stored bytes are corrupt",
            Self::NotFound => "not found",
            Self::Unhealthy => "no healthy disk or store",
            Self::Io => "input/output error",
            Self::Purged => "shuffle was purged",
            Self::InvalidRange => "range is not in the data stream",
            Self::InvalidBatch => "batch is inconsistent",
            Self::NotOurs => "directory has content of another program; use an empty directory",
            Self::Unclaimed => "directory belongs to a uniffle-worker, but its claim cannot be read",
            Self::Outdated => {
                "directory was written by version 0.1.0, which this version cannot read: run 0.1.0 until its applications have \
                 ended, then start with an empty directory"
            }
            Self::OtherFormat => {
                "directory has the format of another version, which this version cannot read: run the version that wrote it \
                 until its applications have ended, then start with an empty directory"
            }
            Self::InUse => "in use by another process",
            Self::Copied => "directory has the identity of another directory",
            Self::NotMounted => "directory is empty because its disk is not mounted",
            Self::Exists => "already exists",
            Self::Denied => "permission or login refused",
            Self::Unreachable => "remote store does not respond or refuses writes",
        })
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.kind)?;
        match &self.source {
            Some(source) => write!(f, " ({source})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for StoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| source as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_follow_the_cause() {
        let full = StoreError::io("/d", io::Error::from_raw_os_error(uniffle_testkit::fault::ENOSPC));
        assert_eq!(full.kind, StoreErrorKind::NoSpace);
        let short = StoreError::io("/d", io::ErrorKind::UnexpectedEof.into());
        assert_eq!(short.kind, StoreErrorKind::Corrupt);
        assert!(full.to_string().starts_with("/d: no space left ("));
    }
}
