//! Log files behind queues.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use parking_lot::{Mutex, RwLock};
use tracing_appender::non_blocking::{NonBlocking, WorkerGuard};
use tracing_appender::rolling;

use super::settings::{Rotation, TelemetryConfig};

/// A log file behind a queue, and how to open it again.
#[derive(Debug)]
pub(super) struct LogFile {
    config: TelemetryConfig,
    directory: PathBuf,
    name: &'static str,
    writer: Arc<RwLock<NonBlocking>>,
    queue: Mutex<WorkerGuard>,
}

impl LogFile {
    /// The file whose name begins with `name`.
    pub(super) fn open(
        config: &TelemetryConfig,
        directory: &Path,
        name: &'static str,
    ) -> anyhow::Result<Self> {
        let (writer, queue) = tracing_appender::non_blocking(appender(config, directory, name)?);
        let (config, directory) = (config.clone(), directory.to_owned());
        Ok(Self { config, directory, name, writer: Arc::new(RwLock::new(writer)), queue: Mutex::new(queue) })
    }

    /// Makes what writes one line.
    pub(super) fn writer(&self) -> impl Fn() -> NonBlocking + Send + Sync + 'static {
        let writer = Arc::clone(&self.writer);
        move || writer.read().clone()
    }

    /// Writes what is queued. Only the end of a queue writes all of it, so that another one takes its place.
    pub(super) fn flush(&self) {
        match appender(&self.config, &self.directory, self.name) {
            Ok(appender) => {
                let (writer, queue) = tracing_appender::non_blocking(appender);
                *self.writer.write() = writer;
                drop(std::mem::replace(&mut *self.queue.lock(), queue));
            }
            Err(error) => tracing::warn!("log lines may be lost: {error:#}"),
        }
    }
}

fn appender(
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
