//! Log files, which are rotated.

use std::path::Path;

use anyhow::Context as _;
use tracing_appender::rolling;

use super::settings::{Rotation, TelemetryConfig};

/// Opens the log file in `directory` whose name begins with `name`.
pub(super) fn open(
    config: &TelemetryConfig,
    directory: &Path,
    name: &str,
) -> anyhow::Result<rolling::RollingFileAppender> {
    let rotation = match config.rotation {
        Rotation::Daily => rolling::Rotation::DAILY,
        Rotation::Hourly => rolling::Rotation::HOURLY,
        Rotation::Never => rolling::Rotation::NEVER,
    };
    std::fs::create_dir_all(directory)
        .with_context(|| format!("cannot create the log directory {}", directory.display()))?;
    rolling::Builder::new()
        .rotation(rotation)
        .filename_prefix(name)
        .filename_suffix("log")
        .max_log_files(config.files_max)
        .build(directory)
        .with_context(|| format!("cannot log into {}", directory.display()))
}
