//! The worker's parts over disks in memory that can hang or fail, as most tests here take them.
//!
//! For what a whole worker cannot show: a batch that stays in flight for as long as the test looks, disks that fail, and
//! minutes that pass at once (paused time; without the listener, whose sockets know no paused clock).

use std::time::Duration;

use uniffle_testkit::service::{ServiceBuilder, quiet};
use uniffle_worker::app::AppConfig;
use uniffle_worker::flush::FlushConfig;
use uniffle_worker::flush::policy::Limits;
use uniffle_worker::tiers::LocalConfig;

/// Without a heartbeat for so long an application is expired.
pub(crate) const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) fn parts() -> ServiceBuilder {
    let apps = AppConfig { heartbeat_timeout: HEARTBEAT_TIMEOUT, ..AppConfig::default() };
    let default = ServiceBuilder::default();
    let limits = Limits { low_watermark: 0.5, blocks_high: 9_000, blocks_low: 2_000, ..quiet() };
    let flush = FlushConfig { limits, ..default.flush };
    ServiceBuilder { local: local_config(), apps, flush, ..ServiceBuilder::default() }
}

/// A disk that failed is looked at again soon.
pub(crate) fn local_config() -> LocalConfig {
    let soon = Duration::from_millis(50);
    LocalConfig { space_interval: soon, probe_interval: soon, ..LocalConfig::default() }
}
