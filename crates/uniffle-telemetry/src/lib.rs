//! Logs (destination, filter and panic hook), and the traces of calls and flushes ([`traces`]).
//!
//! `main` calls [`init`] once per process. Other code logs with the `tracing` macros.
//! Events that operators look up later have the target [`AUDIT`]. If logs go to files, they are
//! also written to a separate file. Metrics are elsewhere, except those that belong to the process.

mod files;
mod metrics;
#[cfg(feature = "otlp")]
pub mod otlp;
mod panics;
mod repeats;
mod settings;
mod spans;
pub mod traces;
mod writer;

use std::fmt;
use std::io::IsTerminal as _;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tracing::Subscriber;
use tracing::field::{Field, Visit};
use tracing_subscriber::field::{RecordFields, VisitOutput as _};
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{DefaultVisitor, Writer};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer, Registry, reload};

use self::repeats::{RepeatLimiter, Repeats};
use self::settings::audit_filter;
use self::writer::LogThread;
pub use metrics::TelemetryMetrics;
pub use panics::panic_count;
pub use repeats::Refusals;
pub use settings::{AUDIT, LogFormat, Rotation, TelemetryConfig, parse_filter};
pub use uniffle_base::LogLimiter;
pub use writer::print;

/// Deadline for writing queued lines before a successor takes over, as calls wait meanwhile.
const UPGRADE_WRITE_DEADLINE: Duration = Duration::from_millis(50);

/// The threads that write the log. Dropping this writes queued lines, within a deadline.
#[derive(Debug)]
#[must_use = "the log ends when this is dropped"]
pub struct Telemetry {
    threads: Vec<LogThread>,
    filter: LogFilter,
}

impl Telemetry {
    /// Waits until all lines are written, before another program takes over the process. Waits
    /// 50 ms at most per thread, and not at all for a write that already takes that long.
    pub fn flush(&self) {
        self.threads.iter().for_each(|thread| thread.flush(UPGRADE_WRITE_DEADLINE));
    }

    /// Returns the handle for changing the filter.
    pub fn filter(&self) -> &LogFilter {
        &self.filter
    }
}

/// The log filter of the process, which can be replaced at run time. Clones share it.
#[derive(Debug, Clone)]
pub struct LogFilter {
    handle: reload::Handle<EnvFilter, Registry>,
    repeats: Arc<Repeats>,
}

impl LogFilter {
    /// Replaces the filter.
    ///
    /// # Errors
    /// If `text` is not a valid filter. The filter is unchanged then.
    pub fn set(&self, text: &str) -> Result<(), String> {
        let filter = parse_filter(text).map_err(|error| error.to_string())?;
        self.repeats.follow(&filter);
        self.handle.reload(filter).map_err(|error| error.to_string())
    }
}

/// Installs the process's subscriber and panic hook.
///
/// # Errors
/// If the filter is invalid, the log directory cannot be used, or a subscriber is already
/// installed.
pub fn init(config: &TelemetryConfig) -> anyhow::Result<Telemetry> {
    let (subscriber, telemetry) = subscriber(config)?;
    subscriber.try_init().context("logs are set up already")?;
    panics::install_panic_hook();
    Ok(telemetry)
}

/// Creates the subscriber for [`init`].
fn subscriber(
    config: &TelemetryConfig,
) -> anyhow::Result<(impl Subscriber + Send + Sync + 'static, Telemetry)> {
    let (filter, repeats) = (parse_filter(&config.filter)?, Arc::<Repeats>::default());
    repeats.follow(&filter);
    let (filter, handle) = reload::Layer::new(filter);
    let start = |sink| LogThread::start(sink, Some(Arc::clone(&repeats)));
    let mut threads = Vec::new();
    let mut layers: Vec<Box<dyn Layer<Registry> + Send + Sync>> = Vec::new();
    match &config.directory {
        None => {
            let (colours, thread) = (std::io::stderr().is_terminal(), start(writer::stderr())?);
            layers.push(lines(config.format, &thread, colours).with_filter(filter).boxed());
            threads.push(thread);
        }
        Some(directory) => {
            let main = start(Box::new(files::open(config, directory, "uniffle-worker")?))?;
            let audit = Box::new(files::open(config, directory, "uniffle-audit")?);
            let audit = LogThread::start(audit, None)?;
            layers.push(lines(config.format, &main, false).with_filter(filter).boxed());
            layers.push(lines(config.format, &audit, false).with_filter(audit_filter()).boxed());
            threads.extend([main, audit]);
        }
    }
    let filter = LogFilter { handle, repeats };
    Ok((tracing_subscriber::registry().with(layers), Telemetry { threads, filter }))
}

/// Checks whether log files can be created in the directory of `config`. Creates nothing: a missing
/// directory is checked in its nearest parent.
///
/// # Errors
/// The reason, with the configuration key.
pub fn check_directory(config: &TelemetryConfig) -> anyhow::Result<()> {
    let Some(directory) = &config.directory else { return Ok(()) };
    files::check_writable(directory).with_context(|| {
        format!(
            "log.path = {}: must be a directory in which this worker can create files",
            directory.display()
        )
    })
}

/// Returns the layer that formats events for `thread`.
fn lines<S>(format: LogFormat, thread: &LogThread, colours: bool) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'lookup> LookupSpan<'lookup>,
{
    let (writer, repeats) = (thread.writer(), thread.repeats());
    let layer = tracing_subscriber::fmt::layer().with_writer(move || writer.clone()).with_ansi(colours);
    match format {
        LogFormat::Text => layer
            .fmt_fields(QuotedFields)
            .map_event_format(|format| RepeatLimiter { format, repeats })
            .boxed(),
        LogFormat::Json => {
            let layer = layer.json().flatten_event(true);
            layer.map_event_format(|format| RepeatLimiter { format, repeats }).boxed()
        }
    }
}

/// Formats fields of text lines, `name=value`, so that each value ends at an unquoted space.
/// Without it, only texts are quoted, and errors and durations are not.
#[derive(Debug)]
struct QuotedFields;

impl<'writer> FormatFields<'writer> for QuotedFields {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'writer>, fields: R) -> fmt::Result {
        let mut visitor = QuotedVisitor(DefaultVisitor::new(writer, true));
        fields.record(&mut visitor);
        visitor.0.finish()
    }
}

struct QuotedVisitor<'writer>(DefaultVisitor<'writer>);

impl Visit for QuotedVisitor<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.record_str(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            return self.0.record_debug(field, value);
        }
        let text = format!("{value:?}");
        match text.is_empty() || text.contains(|c: char| c.is_whitespace() || c.is_control()) {
            true => self.0.record_str(field, &text),
            false => self.0.record_debug(field, &format_args!("{text}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use tracing::subscriber::with_default;

    use super::writer::tests::CapturedText;
    use super::*;

    #[test]
    fn filters_are_levels_or_targets_with_levels() {
        for good in ["info", "uniffle=debug,h2=warn", "off"] {
            assert!(parse_filter(good).is_ok(), "{good}");
        }
        for bad in ["a=b=c=notalevel", "x=loud"] {
            assert!(parse_filter(bad).is_err(), "{bad}");
        }
    }

    fn config(directory: Option<PathBuf>, format: LogFormat) -> TelemetryConfig {
        TelemetryConfig {
            directory,
            rotation: Rotation::Never,
            files_max: 2,
            format,
            filter: "info".to_owned(),
        }
    }

    /// Returns the text of the only file in `directory` with the prefix `name`.
    fn file(directory: &Path, name: &str) -> String {
        let files = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
        let wanted = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with(name);
        let files: Vec<_> = files.filter(wanted).collect();
        assert_eq!(files.len(), 1, "{files:?}");
        std::fs::read_to_string(&files[0]).unwrap()
    }

    #[test]
    fn logs_and_audit_use_separate_files() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("a/b");
        let (subscriber, telemetry) = subscriber(&config(Some(directory.clone()), LogFormat::Text)).unwrap();
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!("logged");
            tracing::debug!("not logged");
            telemetry.filter().set("off").unwrap();
            telemetry.filter().set("x=loud").unwrap_err();
            tracing::info!("not logged either");
            tracing::info!(target: AUDIT, app = "a", "kept");
            telemetry.filter().set("debug").unwrap();
            telemetry.flush();
            tracing::debug!("logged at last");
        });
        drop(telemetry);
        let (log, audit) = (file(&directory, "uniffle-worker"), file(&directory, "uniffle-audit"));
        assert!(log.contains("logged") && log.contains("logged at last"), "{log}");
        assert!(!log.contains("not logged") && !log.contains("kept"), "{log}");
        assert!(audit.contains("kept app=\"a\"") && audit.lines().count() == 1, "{audit}");
    }

    #[test]
    fn lines_can_be_json() {
        let root = tempfile::tempdir().unwrap();
        let (subscriber, telemetry) =
            subscriber(&config(Some(root.path().to_owned()), LogFormat::Json)).unwrap();
        tracing::subscriber::with_default(subscriber, || tracing::warn!(bytes = 7, "a \"quoted\" line"));
        drop(telemetry);
        let line: serde_json::Value = serde_json::from_str(&file(root.path(), "uniffle-worker")).unwrap();
        assert_eq!((&line["bytes"], &line["level"]), (&7.into(), &"WARN".into()), "{line}");
        assert_eq!(line["message"], "a \"quoted\" line");
    }

    #[test]
    fn old_files_are_removed() {
        let root = tempfile::tempdir().unwrap();
        for day in 1..=5 {
            std::fs::write(root.path().join(format!("uniffle-worker.2020-01-0{day}.log")), "old").unwrap();
            std::fs::write(root.path().join(format!("uniffle-audit.2020-01-0{day}.log")), "old").unwrap();
        }
        let daily = TelemetryConfig {
            rotation: Rotation::Daily,
            ..config(Some(root.path().to_owned()), LogFormat::Text)
        };
        let (subscriber, telemetry) = subscriber(&daily).unwrap();
        tracing::subscriber::with_default(subscriber, || tracing::info!("new"));
        drop(telemetry);
        let remaining = std::fs::read_dir(root.path()).unwrap().count();
        assert!(remaining <= 2 * daily.files_max, "{remaining} log files remain");
    }

    #[test]
    fn uncreatable_log_directory_is_named() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("file");
        std::fs::write(&path, "").unwrap();
        let error = files::open(&config(None, LogFormat::Text), &path.join("logs"), "x").unwrap_err();
        assert!(format!("{error:#}").contains("file/logs"), "{error:#}");
    }

    #[test]
    fn values_of_several_words_are_quoted() {
        let written = CapturedText::default();
        let writer = written.clone();
        let layer = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(move || writer.clone());
        with_default(tracing_subscriber::registry().with(layer.fmt_fields(QuotedFields)), || {
            let error = std::io::Error::other("disk \"a\" is\nfull");
            let (text, none) = ("two words", "");
            tracing::warn!(%error, path = %"/data1", empty = %none, text, blocks = 3, paths = ?["/a"], "flush failed");
        });
        let line = written.text();
        let fields = r#"flush failed error="disk \"a\" is\nfull" path=/data1 empty="" text="two words" blocks=3 paths=["/a"]"#;
        assert!(line.trim_end().ends_with(fields), "{line}");
    }
}
