//! The audit log: registrations, removals, the operator's actions and losses.

use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;

/// Target of such events. They are INFO or above, and each names the application, shuffle or setting it is about.
pub const AUDIT: &str = "audit";

/// Passes what the audit log is for, whatever the filter of the other log says.
pub(super) fn only() -> Targets {
    Targets::new().with_target(AUDIT, LevelFilter::INFO)
}
