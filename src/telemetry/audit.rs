//! The audit log: registrations, removals, operator actions and losses.

use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;

/// Target of audit events. They are INFO or above, and name the application, shuffle or setting.
pub const AUDIT: &str = "audit";

/// Returns a filter that passes audit events, independent of the filter of the main log.
pub(super) fn only() -> Targets {
    Targets::new().with_target(AUDIT, LevelFilter::INFO)
}
