//! Traces: which calls get one, and where they go.
//!
//! A span per call and per flush, with children for what they wait for; never per block. Whoever begins one asks the
//! worker's [`Traces`]; without a collector in the configuration that is a branch and no more. The collector's end,
//! like the log, is the process's: `main` calls [`export`] once.

use std::borrow::Cow;
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use fastrace::Span;
use fastrace::collector::{Config, SpanContext};
use fastrace_opentelemetry::OpenTelemetryReporter;
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::LogLimiter;

/// For one batch of spans.
const EXPORT_DEADLINE: Duration = Duration::from_secs(5);

/// For what is left when the process ends.
const LAST_EXPORT_DEADLINE: Duration = Duration::from_secs(2);

/// Between two warnings while the collector is away.
const WARN_INTERVAL: Duration = Duration::from_secs(600);

/// Which calls are traced.
#[derive(Debug, Clone, Copy, Default)]
pub struct Traces {
    /// None = off. Else the share, as a bound of a random `u64`.
    below: Option<u64>,
}

impl Traces {
    /// Nothing is traced.
    #[must_use]
    pub fn off() -> Self {
        Self::default()
    }

    /// Whether this never traces.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.below.is_none()
    }

    /// This share of the calls is traced, and those that come with a sampled trace.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a share of the range of u64; the last bits do not matter, and `as` saturates"
    )]
    pub fn sampled(ratio: f64) -> Self {
        Self { below: Some((ratio * u64::MAX as f64) as u64) }
    }

    /// The span of one call or flush; of none when it is not traced. `parent` is the client's W3C traceparent, whose
    /// word on sampling holds.
    pub fn begin(&self, name: &'static str, parent: Option<&str>) -> Span {
        let Some(below) = self.below else { return Span::noop() };
        match parent.and_then(SpanContext::decode_w3c_traceparent) {
            Some(parent) if parent.sampled => Span::root(name, parent)
                .with_properties(|| [("span.kind", "server"), ("span.parent_span_is_remote", "true")]),
            Some(_) => Span::noop(),
            None if rand::random::<u64>() < below || below == u64::MAX => {
                Span::root(name, SpanContext::random())
            }
            None => Span::noop(),
        }
    }
}

/// Sends spans to the collector until it is dropped.
#[derive(Debug)]
#[must_use = "spans that wait are sent when this is dropped"]
pub struct Export(());

/// Sends the process's spans to the OTLP collector at `endpoint`, on `runtime`. One that is away costs a
/// warning now and then, and the spans.
///
/// # Errors
/// An endpoint that is none.
pub fn export(endpoint: &str, runtime: &Handle) -> anyhow::Result<Export> {
    let _entered = runtime.enter(); // the exporter's connection belongs to it
    let exporter = SpanExporter::builder()
        .with_tonic()
        .with_endpoint(endpoint)
        .with_timeout(EXPORT_DEADLINE)
        .build()
        .with_context(|| format!("tracing.otlp_endpoint = {endpoint}"))?;
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
    let endpoint = endpoint.to_owned();
    let reporter =
        OpenTelemetryReporter::new(exporter, Cow::Owned(resource), scope).with_block_on(move |export| {
            let sent = handle.block_on(async { timeout(EXPORT_DEADLINE, export).await });
            let reason = match sent {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some(format!("no answer within {EXPORT_DEADLINE:?}")),
            };
            tell(&endpoint, reason, &warnings);
            Ok(())
        });
    fastrace::set_reporter(reporter, Config::default());
    Ok(Export(()))
}

fn tell(endpoint: &str, failure: Option<String>, warnings: &LogLimiter) {
    match failure {
        None if warnings.reset() => tracing::info!(endpoint, "the collector takes traces again"),
        None => {}
        Some(reason) => {
            let Some(_failures) = warnings.pass() else { return };
            tracing::warn!(
                endpoint,
                reason,
                "the collector does not take traces, those of this time are lost"
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

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    const NOT_SAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";

    fn is_traced(traces: Traces, parent: Option<&str>) -> bool {
        SpanContext::from_span(&traces.begin("test", parent)).is_some()
    }

    #[test]
    fn the_client_decides_and_else_the_share() {
        // Spans exist only while somebody takes them.
        struct Nobody;
        impl fastrace::collector::Reporter for Nobody {
            fn report(&mut self, _: Vec<fastrace::collector::SpanRecord>) {}
        }
        fastrace::set_reporter(Nobody, Config::default());
        let (never, always) = (Traces::sampled(0.0), Traces::sampled(1.0));
        assert!(is_traced(never, Some(SAMPLED)) && !is_traced(never, None));
        assert!(is_traced(always, None) && !is_traced(always, Some(NOT_SAMPLED)));
        assert!(is_traced(always, Some("nonsense")) && !is_traced(never, Some("")));
        assert!(!is_traced(Traces::off(), Some(SAMPLED)));
        let some = (0..1000).filter(|_| is_traced(Traces::sampled(0.5), None)).count();
        assert!((300..700).contains(&some), "{some} of 1000");
    }
}
