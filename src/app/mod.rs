//! Applications and shuffles: registration, reported block ids, losses, last use, and expiry.
//!
//! This module does not store their data (`memory`, `store` do). Only [`AppRegistry::register`]
//! and, for recovered registrations, [`AppRegistry::take_over`] create an app or a shuffle; no
//! other call does. A late heartbeat must not bring a purged app back (docs/protocol.md §11
//! app-resurrection).

mod account;
mod application;
mod block_ids;
mod commits;
mod logged_registrations;
mod quota;
mod ranges;
mod record_counts;
mod registration;
mod registration_limiter;
mod registry;
mod shuffle;
mod unverified_apps;
mod usage;

use std::time::Duration;

use crate::schema::kind::{DAY, SECOND, count, minutes};
use crate::schema::section;

pub use account::{Account, ByteCounter, STAGES, StageSum, WaitStage};
pub use application::{Activity, App, AppBudgets, AppClient};
pub use block_ids::{BitmapCountChanged, BlockIds, IdTable, PaidIds, Price, ReportError};
pub use commits::Commits;
pub use logged_registrations::{LoggedRegistrations, NextRecord};
pub use quota::{Quota, QuotaExceeded, QuotaShare};
pub use ranges::{PartitionRanges, RangeError};
pub use record_counts::RecordCounts;
pub use registration::{RegisterError, Registration};
pub use registry::AppRegistry;
pub use shuffle::{DiskUsage, RegisteredPartitions, Reports, ShuffleState};
pub use usage::{AppUsage, OverQuota, QuotaKind, QuotaResource, QuotaSubject, Quotas, quota_key};

section! {
    /// Limits and timeout of the registry.
    #[table("app_config", "Applications and their partitions.")]
    pub struct AppConfig {
        /// An application without a heartbeat or other call for this long expires. Applications may
        /// choose 1 min to 7 d with spark.rss.riffle.appHeartbeatTimeoutMinutes.
        #[key("app_config.app_heartbeat_timeout_min", minutes(10 * SECOND..=7 * DAY), NextUse)]
        pub heartbeat_timeout: Duration = 300 * SECOND,
        /// Maximum number of reported block ids; half of memory_store.heap_capacity bounds them
        /// too.
        #[key("app_config.reported_block_max_count", count(1000..=1 << 40), Restart)]
        pub reported_blocks_max: u64 = 1 << 40,
        /// Apps known at a time.
        pub apps_max: usize = 100_000,
        /// Shuffles of one app at a time.
        pub shuffles_per_app_max: usize = 100_000,
    }
}

impl AppConfig {
    /// Returns the interval of expiry checks: a tenth of the configured timeout, from 100 ms to
    /// 30 s. An app outlives its timeout, configured or its own, by at most one interval.
    #[must_use]
    pub fn check_interval(&self) -> Duration {
        (self.heartbeat_timeout / 10).clamp(Duration::from_millis(100), 30 * SECOND)
    }
}
