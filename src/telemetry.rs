//! Logs: where they go, what is filtered, and the panic hook.
//!
//! [`init`] is called once per process by `main`; libraries and tests only use the `tracing` macros. Not here: metrics,
//! except the count of panics, which is the process's like the hook that counts them.

use std::backtrace::Backtrace;
use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context as _;
use parking_lot::{Mutex, RwLock};
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntGauge, Registry};
use tracing_appender::non_blocking::{NonBlocking, WorkerGuard};
use tracing_appender::rolling;
use tracing_subscriber::filter::ParseError;
use tracing_subscriber::fmt::writer::BoxMakeWriter;
use tracing_subscriber::{EnvFilter, reload};

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

/// Where logs go, already validated.
#[derive(Debug, Clone, PartialEq)]
pub struct TelemetryConfig {
    /// Directory of the log files; none = stderr.
    pub directory: Option<PathBuf>,
    /// When files are changed.
    pub rotation: Rotation,
    /// Old files kept.
    pub files_max: usize,
    /// Text for [`parse_filter`].
    pub filter: String,
}

/// Keeps the log writer alive; what is still queued is written when this is dropped.
#[derive(Debug)]
#[must_use = "logs to a file stop when this is dropped"]
pub struct Telemetry {
    filter: LogFilter,
    file: Option<LogFile>,
}

/// A log file behind a queue, and how to open it again.
#[derive(Debug)]
struct LogFile {
    config: TelemetryConfig,
    directory: PathBuf,
    writer: Arc<RwLock<NonBlocking>>,
    queue: Mutex<WorkerGuard>,
}

impl LogFile {
    fn open(config: &TelemetryConfig, directory: &Path) -> anyhow::Result<Self> {
        let (writer, queue) = tracing_appender::non_blocking(log_file(config, directory)?);
        let (config, directory) = (config.clone(), directory.to_owned());
        Ok(Self { config, directory, writer: Arc::new(RwLock::new(writer)), queue: Mutex::new(queue) })
    }

    /// Writes what is queued. Only the end of a queue writes all of it, so that another one takes its place.
    fn flush(&self) {
        match log_file(&self.config, &self.directory) {
            Ok(appender) => {
                let (writer, queue) = tracing_appender::non_blocking(appender);
                *self.writer.write() = writer;
                drop(std::mem::replace(&mut *self.queue.lock(), queue));
            }
            Err(error) => tracing::warn!("log lines may be lost: {error:#}"),
        }
    }
}

impl Telemetry {
    /// Writes what is queued, before another program takes over the process.
    pub fn flush(&self) {
        if let Some(file) = &self.file {
            file.flush();
        }
    }

    /// The filter of the installed subscriber.
    #[must_use]
    pub fn filter(&self) -> &LogFilter {
        &self.filter
    }
}

/// The process's log filter, which can be replaced while it runs. Clones share it.
#[derive(Clone)]
pub struct LogFilter(Arc<dyn Fn(EnvFilter) -> Result<(), reload::Error> + Send + Sync>);

impl LogFilter {
    /// Replaces the filter by `text`, as for [`parse_filter`].
    ///
    /// # Errors
    /// What is wrong with `text`; the filter stays then.
    pub fn set(&self, text: &str) -> Result<(), String> {
        let filter = parse_filter(text).map_err(|error| error.to_string())?;
        (self.0)(filter).map_err(|error| error.to_string())
    }
}

impl std::fmt::Debug for LogFilter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LogFilter")
    }
}

/// Panics since the process started. The one static of the crate: std's panic hook is process-wide, and a count
/// behind it can not belong to one of two workers in a process.
static PANICS: AtomicU64 = AtomicU64::new(0);

/// Panics since the process started, counted once [`init`] was called.
#[must_use]
pub fn panic_count() -> u64 {
    PANICS.load(Ordering::Relaxed)
}

/// Exports [`panic_count`] as `panic_signal`, the name dashboards of riffle know.
///
/// # Errors
/// When the registry has it already.
pub fn register_panic_count(registry: &Registry) -> prometheus::Result<()> {
    let gauge = IntGauge::new("panic_signal", "panics since the process started")?;
    registry.register(Box::new(PanicCollector { gauge }))
}

/// Reads the count when metrics are gathered.
struct PanicCollector {
    gauge: IntGauge,
}

impl Collector for PanicCollector {
    fn desc(&self) -> Vec<&Desc> {
        self.gauge.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.gauge.set(i64::try_from(panic_count()).unwrap_or(i64::MAX));
        self.gauge.collect()
    }
}

/// Parses a filter such as `info` or `uniffle_worker=debug,h2=warn`.
///
/// # Errors
/// When a directive is not `target=level` or a level.
pub fn parse_filter(text: &str) -> Result<EnvFilter, ParseError> {
    EnvFilter::builder().parse(text)
}

/// Installs the process's subscriber and panic hook.
///
/// # Errors
/// When the log directory can not be used, or a subscriber is installed already.
pub fn init(config: &TelemetryConfig) -> anyhow::Result<Telemetry> {
    let (writer, colours, file) = match &config.directory {
        None => (BoxMakeWriter::new(std::io::stderr), std::io::stderr().is_terminal(), None),
        Some(directory) => {
            let file = LogFile::open(config, directory)?;
            let writer = Arc::clone(&file.writer);
            (BoxMakeWriter::new(move || writer.read().clone()), false, Some(file))
        }
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(parse_filter(&config.filter)?)
        .with_writer(writer)
        .with_ansi(colours)
        .with_filter_reloading();
    let handle = builder.reload_handle();
    builder.try_init().map_err(|error| anyhow::anyhow!("logs are set up already: {error}"))?;
    install_panic_hook();
    Ok(Telemetry { filter: LogFilter(Arc::new(move |filter| handle.reload(filter))), file })
}

fn log_file(config: &TelemetryConfig, directory: &Path) -> anyhow::Result<rolling::RollingFileAppender> {
    let rotation = match config.rotation {
        Rotation::Daily => rolling::Rotation::DAILY,
        Rotation::Hourly => rolling::Rotation::HOURLY,
        Rotation::Never => rolling::Rotation::NEVER,
    };
    std::fs::create_dir_all(directory)
        .with_context(|| format!("can not create the log directory {}", directory.display()))?;
    rolling::Builder::new()
        .rotation(rotation)
        .filename_prefix("uniffle-worker")
        .filename_suffix("log")
        .max_log_files(config.files_max)
        .build(directory)
        .with_context(|| format!("can not log into {}", directory.display()))
}

/// A panic ends its task, not the process: it is counted and logged with its backtrace, and the worker goes on.
fn install_panic_hook() {
    std::panic::set_hook(Box::new(|panic| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        let payload = panic.payload_as_str().unwrap_or("(no text)");
        let location = panic.location().map(ToString::to_string).unwrap_or_default();
        let thread = std::thread::current();
        let thread = thread.name().unwrap_or("unnamed");
        let backtrace = Backtrace::force_capture();
        tracing::error!(%location, thread, "panic: {payload}\n{backtrace}");
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_levels_or_targets_with_levels() {
        for good in ["info", "uniffle_worker=debug,h2=warn", "off"] {
            assert!(parse_filter(good).is_ok(), "{good}");
        }
        for bad in ["a=b=c=notalevel", "x=loud"] {
            assert!(parse_filter(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn panics_are_counted_and_exported() {
        let registry = Registry::new();
        register_panic_count(&registry).unwrap();
        let exported = || registry.gather()[0].get_metric()[0].get_gauge().get_value();
        let before = exported();
        install_panic_hook();
        std::panic::catch_unwind(|| panic!("counted by a test")).unwrap_err();
        drop(std::panic::take_hook());
        assert!(exported() > before); // other tests may panic meanwhile, on purpose
    }

    #[test]
    fn log_files_go_into_the_directory_and_are_flushed_by_the_guard() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("a/b");
        let config = TelemetryConfig {
            directory: Some(directory.clone()),
            rotation: Rotation::Never,
            files_max: 2,
            filter: "info".to_owned(),
        };
        let file = LogFile::open(&config, &directory).unwrap();
        let writer = Arc::clone(&file.writer);
        let filter = parse_filter(&config.filter).unwrap();
        let subscriber = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(move || writer.read().clone())
            .with_ansi(false)
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!("found in the file");
            file.flush();
            tracing::info!("after a flush");
        });
        drop(file);
        let files: Vec<_> =
            std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(files.len(), 1);
        let text = std::fs::read_to_string(&files[0]).unwrap();
        assert!(text.contains("found in the file") && text.contains("after a flush"), "{text}");
    }

    #[test]
    fn a_log_directory_that_can_not_be_made_is_named() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("file");
        std::fs::write(&file, "").unwrap();
        let config = TelemetryConfig {
            directory: None,
            rotation: Rotation::Daily,
            files_max: 2,
            filter: String::new(),
        };
        let error = log_file(&config, &file.join("logs")).unwrap_err();
        assert!(format!("{error:#}").contains("file/logs"), "{error:#}");
    }
}
