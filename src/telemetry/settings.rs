//! Where logs go and what they look like, already validated.

use std::path::PathBuf;

/// When a log file is closed and the next one opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rotation {
    /// At midnight (UTC).
    Daily,
    /// At the full hour.
    Hourly,
    /// Never.
    Never,
}

/// How a line of the log looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

/// Settings of the process's log.
#[derive(Debug, Clone, PartialEq)]
pub struct TelemetryConfig {
    /// Directory of the log files; none = stderr.
    pub directory: Option<PathBuf>,
    /// When files are changed.
    pub rotation: Rotation,
    /// Files kept of each kind.
    pub files_max: usize,
    /// How lines look.
    pub format: LogFormat,
    /// Text for [`parse_filter`](super::parse_filter).
    pub filter: String,
}
