//! Sends the process's spans to an OTLP collector over gRPC.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::trace::{
    self, BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracer, SdkTracerProvider, SpanData,
};
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::{LogLimiter, recorded};
use crate::schema::redact;

/// Spans that wait are sent so often, and when there are [`BATCH_SPANS_MAX`].
const EXPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Spans in one export: some 100 KiB of the 4 MiB that a collector takes in a message.
const BATCH_SPANS_MAX: usize = 512;

/// Spans that have ended and wait to be sent; what ends beyond that is lost. Room for all is taken at the start, 1.5 MiB: a second of
/// 4,000 calls that are traced.
const WAITING_SPANS_MAX: usize = 4096;

/// For one batch of spans.
const EXPORT_DEADLINE: Duration = Duration::from_secs(5);

/// For what is left when the process ends.
const LAST_EXPORT_DEADLINE: Duration = Duration::from_secs(2);

/// ... and when a successor follows in this process: calls wait meanwhile.
const UPGRADE_EXPORT_DEADLINE: Duration = Duration::from_millis(50);

/// Between two warnings while the collector is away.
const WARN_INTERVAL: Duration = Duration::from_secs(600);

/// Sends spans to the collector until it is dropped.
#[derive(Debug)]
#[must_use = "spans that wait are sent when this is dropped"]
pub struct Export {
    recording: Option<Recording>,
    provider: SdkTracerProvider,
    /// For what waits when it is dropped.
    last_deadline: Duration,
}

/// Sends spans to the collector at `endpoint`, on `runtime`. While it is unreachable they are lost, with a warning at
/// most every ten minutes.
///
/// # Errors
/// An endpoint that is not a URL.
pub fn export(endpoint: &str, runtime: &Handle) -> anyhow::Result<Export> {
    let provider = provider(endpoint, runtime)?;
    let scope =
        InstrumentationScope::builder("uniffle-worker").with_version(env!("CARGO_PKG_VERSION")).build();
    let recording = Some(Recording::begin(provider.tracer_with_scope(scope)));
    Ok(Export { recording, provider, last_deadline: LAST_EXPORT_DEADLINE })
}

/// While it lives the process's spans are begun.
#[derive(Debug)]
struct Recording;

impl Recording {
    fn begin(tracer: SdkTracer) -> Self {
        recorded::begin_with(Some(tracer));
        Self
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        recorded::begin_with(None);
    }
}

impl Export {
    /// A successor waits: what the collector does not take at once is lost.
    pub fn hurry(&mut self) {
        self.last_deadline = UPGRADE_EXPORT_DEADLINE;
    }
}

impl Drop for Export {
    /// Sends what waits, within a deadline.
    fn drop(&mut self) {
        drop(self.recording.take());
        // What fails has been logged, and what takes longer is lost.
        let _ = self.provider.shutdown_with_timeout(self.last_deadline);
    }
}

/// Takes spans that end, and sends them in batches from a thread of its own.
fn provider(endpoint: &str, runtime: &Handle) -> anyhow::Result<SdkTracerProvider> {
    let batches = BatchConfigBuilder::default()
        .with_scheduled_delay(EXPORT_INTERVAL)
        .with_max_export_batch_size(BATCH_SPANS_MAX)
        .with_max_queue_size(WAITING_SPANS_MAX)
        .build();
    let resource = resource();
    let collector = Collector::at(endpoint, runtime, &resource)?;
    let processor = BatchSpanProcessor::builder(collector).with_batch_config(batches).build();
    // Which calls are traced has been decided when a span is begun.
    let provider = SdkTracerProvider::builder().with_sampler(Sampler::AlwaysOn);
    Ok(provider.with_resource(resource).with_span_processor(processor).build())
}

/// Whose spans they are.
fn resource() -> Resource {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
    let attributes = [version, KeyValue::new("host.name", host)];
    Resource::builder_empty().with_service_name("uniffle-worker").with_attributes(attributes).build()
}

/// Where spans go. Each export is a task of the runtime, with a deadline; one at a time.
#[derive(Debug)]
struct Collector {
    exporter: Arc<SpanExporter>,
    /// What its connection belongs to. An export that is begun after its end fails, as one does that is under way then.
    runtime: Handle,
    endpoint: String,
    warnings: LogLimiter,
}

impl Collector {
    fn at(endpoint: &str, runtime: &Handle, resource: &Resource) -> anyhow::Result<Self> {
        let _entered = runtime.enter();
        let exporter =
            SpanExporter::builder().with_tonic().with_endpoint(endpoint).with_timeout(EXPORT_DEADLINE);
        let endpoint = redact::text(endpoint);
        let mut exporter = exporter.build().with_context(|| format!("tracing.otlp_endpoint = {endpoint}"))?;
        trace::SpanExporter::set_resource(&mut exporter, resource);
        let warnings = LogLimiter::new(1, WARN_INTERVAL);
        Ok(Self { exporter: Arc::new(exporter), runtime: runtime.clone(), endpoint, warnings })
    }

    fn report(&self, failure: Option<String>) {
        let endpoint = &self.endpoint;
        match failure {
            None if self.warnings.reset() => tracing::info!(endpoint, "the collector takes traces again"),
            None => {}
            Some(reason) => {
                let Some(_failures) = self.warnings.pass() else { return };
                tracing::warn!(
                    endpoint,
                    reason,
                    "the collector does not take traces, they are dropped until it does"
                );
            }
        }
    }
}

impl trace::SpanExporter for Collector {
    async fn export(&self, spans: Vec<SpanData>) -> OTelSdkResult {
        let exporter = Arc::clone(&self.exporter);
        let sending = async move { timeout(EXPORT_DEADLINE, exporter.export(spans)).await };
        // Not awaited here, on the processor's thread: the deadline of a runtime that has ended is a panic.
        let sent = self.runtime.spawn(sending).await;
        let sent = sent.map_err(|ended| OTelSdkError::InternalFailure(ended.to_string()))?;
        let sent = sent.unwrap_or(Err(OTelSdkError::Timeout(EXPORT_DEADLINE)));
        self.report(sent.as_ref().err().map(ToString::to_string));
        sent
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::trace::Tracer as _;
    use opentelemetry_sdk::trace::SpanExporter as _;
    use tokio::time::Instant;
    use uniffle_testkit::otlp::Receiver;

    use super::*;
    use crate::telemetry::captured::CapturedLog;

    const NOBODY: &str = "http://user:hush@127.0.0.1:1";

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_waits_is_sent_at_the_end() {
        let (receiver, port) = Receiver::start().await;
        let provider = provider(&format!("http://127.0.0.1:{port}"), &Handle::current()).unwrap();
        let tracer = provider.tracer("test");
        for _ in 0..2 * BATCH_SPANS_MAX + 1 {
            drop(tracer.start("span"));
        }
        tokio::task::block_in_place(|| provider.shutdown_with_timeout(EXPORT_DEADLINE)).unwrap();
        assert_eq!(receiver.named("span").len(), 2 * BATCH_SPANS_MAX + 1);
        let services = receiver.services();
        assert!(
            services.len() >= 3 && services.iter().all(|of| of.contains("uniffle-worker")),
            "{services:?}"
        );
    }

    #[tokio::test]
    async fn a_collector_that_is_away_is_told_once_and_so_is_its_return() {
        let log = CapturedLog::of_this_thread();
        let collector = Collector::at(NOBODY, &Handle::current(), &resource()).unwrap();
        for _ in 0..2 {
            collector.export(Vec::new()).await.unwrap_err();
        }
        let text = log.text();
        assert_eq!(text.matches("does not take traces").count(), 1, "{text}");
        assert!(text.contains("127.0.0.1:1") && !text.contains("hush"), "{text}");
        let (_receiver, port) = Receiver::start().await;
        let back =
            Collector::at(&format!("http://127.0.0.1:{port}"), &Handle::current(), &resource()).unwrap();
        let back = Collector { exporter: back.exporter, ..collector };
        back.export(Vec::new()).await.unwrap();
        back.export(Vec::new()).await.unwrap();
        assert_eq!(log.text().matches("takes traces again").count(), 1, "{}", log.text());
    }

    /// It would be given up after [`EXPORT_DEADLINE`] otherwise: nothing else ends the wait here.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_collector_that_takes_connections_and_never_answers_does_not_hold_up_an_upgrade() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", silent.local_addr().unwrap());
        let provider = provider(&endpoint, &Handle::current()).unwrap();
        drop(provider.tracer("test").start("span"));
        let mut export = Export { recording: None, provider, last_deadline: 100 * EXPORT_DEADLINE };
        export.hurry();
        let began = Instant::now();
        tokio::task::block_in_place(|| drop(export));
        assert!(began.elapsed() < EXPORT_DEADLINE, "{:?}", began.elapsed());
    }

    #[tokio::test]
    async fn an_export_fails_when_the_runtime_has_ended() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let collector = Collector::at(NOBODY, runtime.handle(), &resource()).unwrap();
        runtime.shutdown_background();
        collector.export(Vec::new()).await.unwrap_err();
    }
}
