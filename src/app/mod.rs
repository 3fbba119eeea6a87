//! Which applications and shuffles exist: registration, reported block ids, losses, last use, expiry.
//!
//! Not here: their bytes (`memory`, `store`). Only [`AppRegistry::register`] creates an app or a shuffle; every other
//! call finds one or does not (docs/protocol.md §11 trap 27: a late heartbeat must not bring a purged app back).

mod account;
mod block_ids;
mod losses;
mod quota;
mod ranges;
mod registry;

pub use account::{Account, STAGES, Stage, StageSum, Tally};
pub use block_ids::{BitmapCountChanged, BlockIds, ReportError};
pub use losses::{Loss, Losses, ranges};
pub use quota::{Quota, QuotaExceeded, Share};
pub use ranges::{PartitionRanges, RangeError};
pub use registry::{App, AppRegistry, Registration, ShuffleState};

/// Limits of the registry.
#[derive(Debug, Clone)]
pub struct AppConfig {
    /// An app that was not used for this long is purged. Default: 5 min.
    pub heartbeat_timeout: std::time::Duration,
    /// Reported block ids held for all apps together. Default: 100,000,000.
    pub reported_blocks_max: u64,
    /// Losses listed for all apps together; beyond it they are only counted. Default: 10,000.
    pub loss_entries_max: u64,
    /// Apps known at a time. Default: 100,000.
    pub apps_max: usize,
    /// Shuffles of one app at a time. Default: 100,000.
    pub shuffles_per_app_max: usize,
}

impl Default for AppConfig {
    fn default() -> Self {
        Self {
            heartbeat_timeout: std::time::Duration::from_secs(300),
            reported_blocks_max: 100_000_000,
            loss_entries_max: 10_000,
            apps_max: 100_000,
            shuffles_per_app_max: 100_000,
        }
    }
}
