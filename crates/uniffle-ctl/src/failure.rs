//! Why a command did not do what it was to do, and the exit code of that.

use std::fmt;

/// Why not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The worker's answer is no.
    Refused {
        /// Of HTTP.
        status: u16,
        /// With the worker's reason.
        text: String,
    },
    /// The command line, or a file that it names.
    Usage(String),
    /// There is no answer.
    Unreachable(String),
    /// What was waited for did not come.
    NotReached(String),
}

impl Failure {
    /// The exit code.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Refused { .. } => 1,
            Self::Usage(_) => 2,
            Self::Unreachable(_) => 3,
            Self::NotReached(_) => 4,
        }
    }

    /// Whether the worker does not know what was named.
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
