//! Failures of commands, and their exit codes.

use std::fmt;

/// Reason why a command failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The worker refused the request.
    Refused {
        /// HTTP status.
        status: u16,
        /// Text with the worker's reason.
        text: String,
    },
    /// The command line is wrong, or a file that it refers to is unusable.
    Usage(String),
    /// No answer arrived.
    Unreachable(String),
    /// The awaited state was not reached in time.
    NotReached(String),
}

impl Failure {
    /// Returns the exit code.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Refused { .. } => 1,
            Self::Usage(_) => 2,
            Self::Unreachable(_) => 3,
            Self::NotReached(_) => 4,
        }
    }

    /// Returns true if the worker does not know the requested item.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, Self::Refused { status: 404, .. })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused { text, .. }
            | Self::Usage(text)
            | Self::Unreachable(text)
            | Self::NotReached(text) => f.write_str(text),
        }
    }
}
