//! Sends spans to an OTLP collector over gRPC, with fastrace's OpenTelemetry reporter.
//!
//! fastrace's collector thread only moves spans to a bounded queue, and a second thread sends them.
//! No other thread waits for the OTLP collector. Spans that it does not accept are counted as lost
//! and never sent again. At the end of the process, queued spans are sent within a deadline.

use std::borrow::Cow;
use std::sync::{Arc, mpsc as std_mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::Context as _;
use fastrace::collector::{Config, Reporter, SpanRecord};
use fastrace_opentelemetry::OpenTelemetryReporter;
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::trace::{self, SpanData};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::timeout;
use uniffle_base::LogLimiter;

use super::spans::{SPANS, Spans};
use uniffle_base::schema::redact;

/// Interval at which spans are collected from threads. A finished root counts as open until then.
const COLLECT_INTERVAL: Duration = Duration::from_millis(250);

/// Spans per export, about 100 KiB. Collectors accept messages of 4 MiB.
const BATCH_SPANS_MAX: usize = 512;

/// Capacity of the queue of finished spans, about 2 MiB.
const WAITING_SPANS_MAX: usize = 4096;

/// Deadline for one batch of spans.
const EXPORT_DEADLINE: Duration = Duration::from_secs(5);

/// Deadline for queued spans when the process ends.
const LAST_EXPORT_DEADLINE: Duration = Duration::from_secs(2);

/// Deadline for queued spans before a successor takes over, as calls wait meanwhile.
const UPGRADE_EXPORT_DEADLINE: Duration = Duration::from_millis(20);

/// Minimum time between two warnings about an unavailable collector.
const WARN_INTERVAL: Duration = Duration::from_secs(600);

/// Sends spans to the collector until it is dropped.
#[derive(Debug)]
#[must_use = "spans that wait are sent when this is dropped"]
pub struct Export {
    queue: SpanQueue,
    sender: Option<JoinHandle<()>>,
    /// Deadline for queued spans when this is dropped.
    last_deadline: Duration,
}

/// Sends spans to the collector at `endpoint`, on `runtime`. While the collector is unavailable,
/// spans are lost, with a warning at most every ten minutes.
///
/// # Errors
/// If the endpoint is not a URL, or no thread can be started.
pub fn export(endpoint: &str, runtime: &Handle) -> anyhow::Result<Export> {
    let collector = OtlpCollector::at(endpoint, runtime, &SPANS)?;
    let (queue, sender) = SpanQueue::before(collector, &SPANS)?;
    fastrace::set_reporter(queue.clone(), Config::default().report_interval(COLLECT_INTERVAL));
    SPANS.set_exported(true);
    Ok(Export { queue, sender: Some(sender), last_deadline: LAST_EXPORT_DEADLINE })
}

impl Export {
    /// Shortens the last deadline, because a successor waits.
    pub fn expedite(&mut self) {
        self.last_deadline = UPGRADE_EXPORT_DEADLINE;
    }
}

impl Drop for Export {
    /// Sends the queued spans, within a deadline.
    fn drop(&mut self) {
        SPANS.set_exported(false);
        let (queue, sender) = (self.queue.clone(), self.sender.take());
        let (sent, all_sent) = std_mpsc::channel();
        let finish = move || {
            fastrace::flush();
            queue.close();
            let _ = sender.map(JoinHandle::join);
            let _ = sent.send(());
        };
        // On another thread, because neither the flush nor the join has a deadline.
        if thread::Builder::new().name("uniffle-traces".to_owned()).spawn(finish).is_ok() {
            let _ = all_sent.recv_timeout(self.last_deadline);
        }
    }
}

/// Queue of finished spans. Spans are lost while it is full or closed.
#[derive(Debug, Clone)]
struct SpanQueue {
    spans: &'static Spans,
    waiting: Arc<Mutex<Option<mpsc::Sender<SpanRecord>>>>,
}

impl SpanQueue {
    /// Returns a queue and the thread that sends its spans to `collector` until the queue is
    /// closed.
    fn before(collector: OtlpCollector, spans: &'static Spans) -> anyhow::Result<(Self, JoinHandle<()>)> {
        let (sender, mut waiting) = mpsc::channel(WAITING_SPANS_MAX);
        let scope =
            InstrumentationScope::builder("uniffle-worker").with_version(env!("CARGO_PKG_VERSION")).build();
        let mut reporter = OpenTelemetryReporter::new(collector, Cow::Owned(resource()), scope);
        let send = move || {
            let mut batch = Vec::new();
            while waiting.blocking_recv_many(&mut batch, BATCH_SPANS_MAX) > 0 {
                reporter.report(std::mem::take(&mut batch));
            }
        };
        let thread = thread::Builder::new().name("uniffle-traces".to_owned()).spawn(send);
        let thread = thread.context("cannot start the thread that sends traces")?;
        Ok((Self { spans, waiting: Arc::new(Mutex::new(Some(sender))) }, thread))
    }

    /// Closes the queue. The thread ends after sending the queued spans.
    fn close(&self) {
        self.waiting.lock().take();
    }
}

impl Reporter for SpanQueue {
    fn report(&mut self, records: Vec<SpanRecord>) {
        self.spans.release(&records);
        let waiting = self.waiting.lock();
        for record in records {
            let is_queued = waiting.as_ref().is_some_and(|waiting| waiting.try_send(record).is_ok());
            if !is_queued {
                self.spans.lose(1);
            }
        }
    }
}

/// Returns the attributes of this process.
fn resource() -> Resource {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
    let attributes = [version, KeyValue::new("host.name", host)];
    Resource::builder_empty().with_service_name("uniffle-worker").with_attributes(attributes).build()
}

/// The collector. Exports run one at a time, as tasks of the runtime, with a deadline.
#[derive(Debug)]
struct OtlpCollector {
    exporter: Arc<SpanExporter>,
    /// Runtime of the connection. Exports fail after it has ended.
    runtime: Handle,
    endpoint: String,
    warnings: LogLimiter,
    spans: &'static Spans,
}

impl OtlpCollector {
    fn at(endpoint: &str, runtime: &Handle, spans: &'static Spans) -> anyhow::Result<Self> {
        let _entered = runtime.enter();
        let exporter =
            SpanExporter::builder().with_tonic().with_endpoint(endpoint).with_timeout(EXPORT_DEADLINE);
        let endpoint = redact::text(endpoint);
        let exporter = exporter.build().with_context(|| format!("tracing.otlp_endpoint = {endpoint}"))?;
        let warnings = LogLimiter::new(1, WARN_INTERVAL);
        Ok(Self { exporter: Arc::new(exporter), runtime: runtime.clone(), endpoint, warnings, spans })
    }

    async fn send(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let exporter = Arc::clone(&self.exporter);
        let sending =
            async move { timeout(EXPORT_DEADLINE, trace::SpanExporter::export(&*exporter, batch)).await };
        // Spawned instead of polled here: a timeout panics if its runtime has ended.
        let sent = self.runtime.spawn(sending).await;
        let sent = sent.map_err(|ended| OTelSdkError::InternalFailure(ended.to_string()))?;
        sent.unwrap_or(Err(OTelSdkError::Timeout(EXPORT_DEADLINE)))
    }

    fn log(&self, failure: Option<String>) {
        let (endpoint, lost_spans) = (&self.endpoint, self.spans.lost());
        match failure {
            None if self.warnings.reset() => {
                tracing::info!(endpoint, lost_spans, "the collector accepts traces again");
            }
            None => {}
            Some(reason) => {
                let Some(failures) = self.warnings.pass() else { return };
                tracing::warn!(
                    endpoint,
                    reason,
                    failures,
                    lost_spans,
                    "the collector does not accept traces; they are dropped until it does"
                );
            }
        }
    }
}

impl trace::SpanExporter for OtlpCollector {
    /// Always succeeds. Lost spans are counted and logged here, so the reporter must not log again.
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len() as u64;
        let failure = self.send(batch).await.err().map(|error| error.to_string());
        if failure.is_some() {
            self.spans.lose(spans);
        }
        self.log(failure);
        Ok(())
    }

    fn set_resource(&mut self, resource: &Resource) {
        if let Some(exporter) = Arc::get_mut(&mut self.exporter) {
            exporter.set_resource(resource);
        }
    }
}

#[cfg(test)]
mod tests {
    use fastrace::collector::SpanId;
    use opentelemetry_sdk::trace::SpanExporter as _;
    use tokio::task::block_in_place;
    use tokio::time::Instant;
    use uniffle_testkit::otlp::Receiver;

    use super::super::spans::tests::{leaked, record};
    use super::*;
    use uniffle_testkit::captured_log::CapturedLog;

    const NOBODY: &str = "http://user:hush@127.0.0.1:1";

    fn collector(endpoint: &str, spans: &'static Spans) -> OtlpCollector {
        OtlpCollector::at(endpoint, &Handle::current(), spans).unwrap()
    }

    fn records(count: usize) -> Vec<SpanRecord> {
        (0..count).map(|_| record("span", SpanId(7))).collect()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn waiting_spans_are_sent_at_the_end() {
        let ((receiver, port), spans) = (Receiver::start().await, leaked());
        let (mut queue, sender) =
            SpanQueue::before(collector(&format!("http://127.0.0.1:{port}"), spans), spans).unwrap();
        queue.report(records(2 * BATCH_SPANS_MAX + 1));
        queue.close();
        block_in_place(|| sender.join()).unwrap();
        assert_eq!((receiver.named("span").len(), spans.lost()), (2 * BATCH_SPANS_MAX + 1, 0));
        let services = receiver.services();
        let are_named = services.iter().all(|of| of.contains("uniffle-worker"));
        assert!(services.len() >= 3 && are_named, "{services:?}");
        queue.report(records(2));
        assert_eq!(spans.lost(), 2, "the queue is closed, so spans must be lost");
    }

    #[tokio::test]
    async fn unreachable_collector_and_its_return_are_logged_once() {
        let (log, spans) = (CapturedLog::of_this_thread(), leaked());
        let away = collector(NOBODY, spans);
        for _ in 0..2 {
            away.export(vec![]).await.unwrap();
            away.send(vec![]).await.unwrap_err();
        }
        let text = log.text();
        assert_eq!(text.matches("does not accept traces").count(), 1, "{text}");
        assert!(text.contains("127.0.0.1:1") && !text.contains("hush"), "{text}");
        let (_receiver, port) = Receiver::start().await;
        let back = collector(&format!("http://127.0.0.1:{port}"), spans);
        let back = OtlpCollector { exporter: back.exporter, ..away };
        back.export(Vec::new()).await.unwrap();
        back.export(Vec::new()).await.unwrap();
        assert_eq!(log.text().matches("accepts traces again").count(), 1, "{}", log.text());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn unsent_spans_are_counted_as_lost() {
        let spans = leaked();
        let (mut queue, sender) = SpanQueue::before(collector(NOBODY, spans), spans).unwrap();
        queue.report(records(3));
        queue.close();
        block_in_place(|| sender.join()).unwrap();
        assert_eq!(spans.lost(), 3);
    }

    /// Only the deadline ends the wait here.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn silent_collector_delays_no_report_and_no_upgrade() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let spans = leaked();
        let endpoint = format!("http://{}", silent.local_addr().unwrap());
        let (mut queue, sender) = SpanQueue::before(collector(&endpoint, spans), spans).unwrap();
        let reported = 2 * (WAITING_SPANS_MAX + BATCH_SPANS_MAX);
        block_in_place(|| queue.report(records(reported)));
        let waiting = (WAITING_SPANS_MAX + BATCH_SPANS_MAX) as u64;
        assert!(spans.lost() >= reported as u64 - waiting, "only {} spans count as lost", spans.lost());
        let mut export = Export { queue, sender: Some(sender), last_deadline: 100 * EXPORT_DEADLINE };
        export.expedite();
        let began = Instant::now();
        block_in_place(|| drop(export));
        assert!(began.elapsed() < EXPORT_DEADLINE, "{:?}", began.elapsed());
    }

    #[tokio::test]
    async fn export_fails_when_the_runtime_has_ended() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let collector = OtlpCollector::at(NOBODY, runtime.handle(), leaked()).unwrap();
        runtime.shutdown_background();
        collector.send(Vec::new()).await.unwrap_err();
    }
}
