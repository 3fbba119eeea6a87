//! Parts of a worker over disks in memory that can hang or fail.
//!
//! They allow what a complete worker does not: batches that stay in flight, failing disks, and
//! minutes that pass at once. Paused time excludes the listener, because sockets use the real
//! clock.

use std::time::Duration;

use uniffle_testkit::service::{ServiceBuilder, quiet};
use uniffle_worker::app::AppConfig;
use uniffle_worker::flush::FlushConfig;
use uniffle_worker::flush::policy::Limits;
use uniffle_worker::store::LocalConfig;

/// Time without a heartbeat after which an application expires.
pub(crate) const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the parts, which flush on request, or when memory has more than 9,000 blocks.
pub(crate) fn parts() -> ServiceBuilder {
    let apps = AppConfig { heartbeat_timeout: HEARTBEAT_TIMEOUT, ..AppConfig::default() };
    let default = ServiceBuilder::default();
    let limits = Limits { low_watermark: 0.5, blocks_high: 9_000, blocks_low: 2_000, ..quiet() };
    let flush = FlushConfig { limits, ..default.flush };
    ServiceBuilder { local: local_config(), apps, flush, ..ServiceBuilder::default() }
}

/// Returns a configuration that probes a failed disk soon.
pub(crate) fn local_config() -> LocalConfig {
    let soon = Duration::from_millis(50);
    LocalConfig { space_interval: soon, probe_interval: soon, ..LocalConfig::default() }
}
