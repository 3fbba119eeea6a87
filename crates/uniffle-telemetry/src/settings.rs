//! Settings of the log.

use std::path::PathBuf;

use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::{ParseError, Targets};

use uniffle_base::schema::kind::{Kind, count, optional, parsed, path, word};
use uniffle_base::schema::{section, words};

/// Target of audit events: registrations, removals, operator actions and losses. They are INFO or
/// above, and name the application, shuffle or setting, if they concern one.
pub const AUDIT: &str = "audit";

words! {
    /// Interval of log file rotation.
    pub enum Rotation {
        /// At midnight (UTC).
        Daily = "Daily",
        /// At the full hour.
        Hourly = "Hourly",
        /// Never.
        Never = "Never",
    }
}

words! {
    /// Format of log lines.
    pub enum LogFormat {
        /// For people.
        Text = "text",
        /// One JSON object per line.
        Json = "json",
    }
}

section! {
    /// Settings of the log.
    #[table("log", "Logs.")]
    pub struct TelemetryConfig {
        /// Level, or levels by target such as "info,uniffle=debug". RUST_LOG and LOG take
        /// precedence.
        #[key("log.filter" or "log.log_level", filter(), AtOnce, env "RUST_LOG" "LOG")]
        pub filter: String = "info".to_owned(),
        /// Directory of log files: uniffle-worker.*.log and uniffle-audit.*.log. Default: none;
        /// both go to stderr.
        #[key("log.path", optional(path()), Restart, example "\"/var/log/uniffle\"")]
        pub directory: Option<PathBuf> = None,
        /// Interval after which a new log file is opened.
        #[key("log.rotation", word(), Restart)]
        pub rotation: Rotation = Rotation::Daily,
        /// Log files kept of each kind.
        #[key("log.max_files" or "log.max_log_files", count(1..=10_000), Restart)]
        pub files_max: usize = 14,
        /// text, or json with one object per line.
        #[key("log.format", word(), Restart)]
        pub format: LogFormat = LogFormat::Text,
    }
}

fn filter() -> Kind<String> {
    let check = |text: &str| match parse_filter(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(format!("a filter such as \"info\" or \"uniffle=debug\" ({error})")),
    };
    parsed("a filter such as info or uniffle=debug", check)
}

/// Parses a filter such as `info` or `uniffle=debug,h2=warn`.
///
/// # Errors
/// If a directive is invalid, for example has an unknown level.
pub fn parse_filter(text: &str) -> Result<EnvFilter, ParseError> {
    EnvFilter::builder().parse(text)
}

/// Returns a filter that passes audit events, independent of the filter of the main log.
pub(super) fn audit_filter() -> Targets {
    Targets::new().with_target(AUDIT, LevelFilter::INFO)
}
