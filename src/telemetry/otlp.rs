//! Sends the process's spans to an OTLP collector over gRPC.

use std::borrow::Cow;
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use fastrace::collector::Config;
use fastrace_opentelemetry::OpenTelemetryReporter;
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::LogLimiter;
use crate::schema::redact;

/// For one batch of spans.
const EXPORT_DEADLINE: Duration = Duration::from_secs(5);

/// For what is left when the process ends.
const LAST_EXPORT_DEADLINE: Duration = Duration::from_secs(2);

/// Between two warnings while the collector is away.
const WARN_INTERVAL: Duration = Duration::from_secs(600);

/// Sends spans to the collector until it is dropped.
#[derive(Debug)]
#[must_use = "spans that wait are sent when this is dropped"]
pub struct Export(());

/// Sends spans to the collector at `endpoint`, on `runtime`. While it is unreachable they are lost, with a warning at
/// most every ten minutes.
///
/// # Errors
/// An endpoint that is not a URL.
pub fn export(endpoint: &str, runtime: &Handle) -> anyhow::Result<Export> {
    let _entered = runtime.enter(); // the exporter's connection belongs to it
    let exporter = SpanExporter::builder()
        .with_tonic()
        .with_endpoint(endpoint)
        .with_timeout(EXPORT_DEADLINE)
        .build()
        .with_context(|| format!("tracing.otlp_endpoint = {}", redact::text(endpoint)))?;
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let resource = Resource::builder_empty()
        .with_service_name("uniffle-worker")
        .with_attributes([
            KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
            KeyValue::new("host.name", host),
        ])
        .build();
    let scope =
        InstrumentationScope::builder("uniffle-worker").with_version(env!("CARGO_PKG_VERSION")).build();
    let handle = runtime.clone();
    let warnings = LogLimiter::new(1, WARN_INTERVAL);
    let endpoint = redact::text(endpoint);
    let reporter =
        OpenTelemetryReporter::new(exporter, Cow::Owned(resource), scope).with_block_on(move |export| {
            let sent = handle.block_on(async { timeout(EXPORT_DEADLINE, export).await });
            let reason = match sent {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some(format!("no answer within {EXPORT_DEADLINE:?}")),
            };
            report_outcome(&endpoint, reason, &warnings);
            Ok(())
        });
    fastrace::set_reporter(reporter, Config::default());
    Ok(Export(()))
}

fn report_outcome(endpoint: &str, failure: Option<String>, warnings: &LogLimiter) {
    match failure {
        None if warnings.reset() => tracing::info!(endpoint, "the collector takes traces again"),
        None => {}
        Some(reason) => {
            let Some(_failures) = warnings.pass() else { return };
            tracing::warn!(
                endpoint,
                reason,
                "the collector does not take traces, they are dropped until it does"
            );
        }
    }
}

impl Drop for Export {
    /// Sends what waits, within a deadline.
    fn drop(&mut self) {
        let (done, wait) = std::sync::mpsc::channel();
        let flush = move || {
            fastrace::flush();
            let _ = done.send(());
        };
        if thread::Builder::new().name("uniffle-traces".to_owned()).spawn(flush).is_ok() {
            let _ = wait.recv_timeout(LAST_EXPORT_DEADLINE);
        }
    }
}
