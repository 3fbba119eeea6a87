//! Counters of the TCP listener; names as the Java server's and riffle's (docs/protocol.md §10.3, §10.6).

use std::sync::Arc;

use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts, Registry,
};

use crate::metrics::{self, GaugeGuard, TransitTimes};
use uniffle_wire::frame::FrameType;

/// Seconds; from a memory read of one block to a request that a client has given up.
const LATENCY_BUCKETS: [f64; 13] = [1e-5, 1e-4, 5e-4, 1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0];

/// See the module.
#[derive(Debug)]
pub struct TcpMetrics {
    send: Arc<RequestMetrics>,
    index: Arc<RequestMetrics>,
    data: Arc<RequestMetrics>,
    memory: Arc<RequestMetrics>,
    sorted: Arc<RequestMetrics>,
    /// Connections open now, by Java's and by riffle's name.
    active: IntGauge,
    connections: IntGauge,
    /// Connections that ended for another reason than the peer closing it between frames.
    pub(super) exceptions: IntCounter,
    /// Connections refused over the limit.
    pub(super) refused: IntCounter,
}

/// Metrics of one kind of request.
#[derive(Debug)]
pub(super) struct RequestMetrics {
    /// Java's name.
    java: IntCounter,
    /// riffle's name.
    riffle: IntCounter,
    /// Requests whose first bytes are here and whose reply is not written.
    in_progress: IntGauge,
    /// The same of all kinds together.
    all_in_progress: IntGauge,
    /// From the client's timestamp to the last byte of the request.
    pub(super) transit: TransitTimes,
    /// First byte to last byte of the request.
    pub(super) parsing: Histogram,
    /// Last byte of the request to last byte of the reply, by riffle's name.
    processing: Histogram,
}

impl RequestMetrics {
    /// Counts a request until the returned value is dropped.
    pub(super) fn begin(self: &Arc<Self>) -> InProgress {
        self.java.inc();
        self.riffle.inc();
        let gauges = [&self.in_progress, &self.all_in_progress].map(GaugeGuard::one);
        InProgress { metrics: Arc::clone(self), _gauges: gauges }
    }
}

/// A request in progress.
#[derive(Debug)]
pub(super) struct InProgress {
    metrics: Arc<RequestMetrics>,
    _gauges: [GaugeGuard; 2],
}

impl InProgress {
    pub(super) fn metrics(&self) -> &RequestMetrics {
        &self.metrics
    }

    /// Its reply was written `seconds` after it was complete.
    pub(super) fn answered(&self, seconds: f64) {
        self.metrics.processing.observe(seconds);
    }
}

/// Registers those of one kind after another.
struct Kinds<'a> {
    registry: &'a Registry,
    totals: IntCounterVec,
    in_progress: IntGauge,
    parsing: HistogramVec,
    processing: HistogramVec,
}

impl<'a> Kinds<'a> {
    fn new(registry: &'a Registry) -> prometheus::Result<Self> {
        let histogram = |name: &str, help: &str| -> prometheus::Result<HistogramVec> {
            let opts = HistogramOpts::new(name, help).buckets(LATENCY_BUCKETS.to_vec());
            let histogram = HistogramVec::new(opts, &["path"])?;
            registry.register(Box::new(histogram.clone()))?;
            Ok(histogram)
        };
        let totals = Opts::new("total_urpc_request_number", "Requests over raw TCP");
        let totals = IntCounterVec::new(totals, &["path"])?;
        registry.register(Box::new(totals.clone()))?;
        let help = "Requests over raw TCP that came in part or whole and whose reply is not written";
        Ok(Self {
            registry,
            totals,
            in_progress: metrics::gauge(registry, "urpc_request_number", help)?,
            parsing: histogram(
                "urpc_request_parsing_latency",
                "Seconds from a request's first byte to its last",
            )?,
            processing: histogram(
                "urpc_request_processing_latency",
                "Seconds from a request's last byte to its reply's last",
            )?,
        })
    }

    /// `stem` is Java's, `path` riffle's.
    fn register(&self, stem: &str, path: &str) -> prometheus::Result<Arc<RequestMetrics>> {
        let name = |end: &str| format!("netty_{stem}_request{end}");
        let processing = self.processing.with_label_values(&[path]);
        let process_latency = "Milliseconds from a request's last byte to its reply's last";
        metrics::also_in_ms(self.registry, &processing, &name("_process_latency"), process_latency)?;
        Ok(Arc::new(RequestMetrics {
            java: metrics::counter(self.registry, &name("_total"), "Requests over raw TCP")?,
            riffle: self.totals.with_label_values(&[path]),
            in_progress: metrics::gauge(self.registry, &name(""), "Requests over raw TCP in progress")?,
            all_in_progress: self.in_progress.clone(),
            transit: TransitTimes::new(
                self.registry,
                &name("_transport_latency"),
                "Milliseconds from a request's timestamp to its last byte",
            )?,
            parsing: self.parsing.with_label_values(&[path]),
            processing,
        }))
    }
}

impl TcpMetrics {
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let counter = |name: &str, help: &str| -> prometheus::Result<IntCounter> {
            let counter = IntCounter::new(name, help)?;
            registry.register(Box::new(counter.clone()))?;
            Ok(counter)
        };
        let gauge = |name: &str, help: &str| -> prometheus::Result<IntGauge> {
            let gauge = IntGauge::new(name, help)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        let kinds = Kinds::new(registry)?;
        let metrics = Self {
            send: kinds.register("send_shuffle_data", "sendShuffleData")?,
            index: kinds.register("get_local_shuffle_index", "getLocalShuffleIndex")?,
            data: kinds.register("get_local_shuffle_data", "getLocalShuffleData")?,
            memory: kinds.register("get_memory_shuffle_data", "getMemoryShuffleData")?,
            sorted: kinds.register("get_sorted_shuffle_data", "getSortedShuffleData")?,
            active: gauge("netty_active_connection", "Raw TCP connections open now")?,
            connections: gauge("urpc_connection_number", "Raw TCP connections open now")?,
            exceptions: counter("netty_handle_exception", "Raw TCP connections that ended with an error")?,
            refused: counter(
                "urpc_connection_refused_total",
                "Raw TCP connections closed for being too many",
            )?,
        };
        metrics.name_as_riffle_does(registry)?;
        Ok(metrics)
    }

    fn name_as_riffle_does(&self, registry: &Registry) -> prometheus::Result<()> {
        for (request, name) in [
            (&self.send, "urpc_send_data_transport_time"),
            (&self.data, "urpc_get_localfile_data_transport_time"),
        ] {
            let help = "Seconds from a request's timestamp to its last byte";
            metrics::also_in_seconds(registry, request.transit.histogram(), name, help)?;
        }
        for (request, name) in [
            (&self.send, "urpc_send_data_process_time"),
            (&self.memory, "urpc_get_memory_data_process_time"),
            (&self.data, "urpc_get_localfile_data_process_time"),
        ] {
            let help = "Seconds from a request's last byte to its reply's last";
            metrics::also_alone(registry, &request.processing, name, help)?;
        }
        Ok(())
    }

    /// Those of requests of type `kind`. Replies never get here; they would count as sends.
    pub(super) fn of(&self, kind: FrameType) -> &Arc<RequestMetrics> {
        match kind {
            FrameType::LocalIndex | FrameType::LocalIndexReply | FrameType::LocalIndexV2Reply => &self.index,
            FrameType::LocalData
            | FrameType::LocalDataV2
            | FrameType::LocalDataV3
            | FrameType::LocalDataReply => &self.data,
            FrameType::Memory | FrameType::MemoryReply => &self.memory,
            FrameType::Sorted | FrameType::SortedReply => &self.sorted,
            FrameType::Send | FrameType::RpcReply => &self.send,
        }
    }

    /// The gauges of open connections.
    pub(super) fn open_connections(&self) -> Vec<IntGauge> {
        vec![self.active.clone(), self.connections.clone()]
    }
}
