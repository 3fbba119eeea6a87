//! What can go wrong in a store, by what the caller does about it.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Why a store operation failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StoreErrorKind {
    /// No space left where it was tried.
    NoSpace,
    /// Stored bytes are not what was written.
    Corrupt,
    /// A file or shuffle does not exist.
    NotFound,
    /// No healthy disk is left, or one did not answer in time.
    Unhealthy,
    /// Any other failure of a file operation.
    Io,
    /// The shuffle was purged: there is nothing to retry and nothing was left behind.
    Purged,
    /// The range asked for is not in the partition's stream.
    InvalidRange,
    /// The batch contradicts itself (lengths); a bug of the caller.
    InvalidBatch,
    /// The directory has content that is not ours.
    NotOurs,
    /// The directory is ours, and its claim says nothing.
    Unclaimed,
    /// The directory was written in a format that is not read any more.
    Outdated,
    /// Another process holds the directory.
    InUse,
    /// Two directories have one identity.
    Copied,
    /// The directory was on a mount point that is not mounted.
    NotMounted,
    /// A file of that name is there already.
    Exists,
    /// A remote store refuses: permission or login.
    Denied,
    /// A remote store does not answer, or does not take writes (safe mode).
    Unreachable,
}

/// A failed store operation.
#[derive(Debug)]
pub struct StoreError {
    /// What the caller can act on.
    pub kind: StoreErrorKind,
    /// File, directory or shuffle concerned.
    pub path: PathBuf,
    /// The cause.
    pub source: Option<io::Error>,
}

impl StoreError {
    /// An error without a cause below it.
    pub fn new(kind: StoreErrorKind, path: impl AsRef<Path>) -> Self {
        Self { kind, path: path.as_ref().to_path_buf(), source: None }
    }

    /// A failed file operation, classified.
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

    /// A failed call of a remote store.
    pub fn remote(kind: StoreErrorKind, path: impl AsRef<Path>, text: impl Into<String>) -> Self {
        let source = Some(io::Error::other(text.into()));
        Self { kind, path: path.as_ref().to_path_buf(), source }
    }

    /// Stored bytes that are not what was written.
    pub fn corrupt(path: impl AsRef<Path>, what: &'static str) -> Self {
        let source = Some(io::Error::new(io::ErrorKind::InvalidData, what));
        Self { kind: StoreErrorKind::Corrupt, path: path.as_ref().to_path_buf(), source }
    }
}

impl fmt::Display for StoreErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoSpace => "disk is full",
            Self::Corrupt => "stored bytes are corrupt",
            Self::NotFound => "not found",
            Self::Unhealthy => "no healthy disk",
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
        assert!(full.to_string().starts_with("/d: disk is full ("));
    }
}
