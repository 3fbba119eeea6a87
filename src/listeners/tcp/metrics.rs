//! Metrics of the TCP listener, under the names of the Java server and of riffle (docs/protocol.md
//! §10.3, §10.6).

use std::sync::Arc;

use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, Registry};

use crate::compat::dashboards::{PROCESS_LATENCY, PROCESS_TIMES, TRANSPORT_TIMES};
use crate::metrics::{self, Description, GaugeGuard, TRANSIT_MS_BUCKETS, TransitTimes};
use uniffle_wire::frame::FrameType;

/// In seconds, from a memory read of one block to a request that a client has given up on.
const LATENCY_BUCKETS: &[f64] = &[1e-5, 1e-4, 5e-4, 1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0];

metrics::table! {
    pub(crate) struct TcpMetricTable {
        totals: IntCounterVec["path"] = "total_urpc_request_number", "Requests received over raw TCP";
        in_progress: IntGauge = "urpc_request_number",
            "Requests over raw TCP that are being received or answered";
        parsing: HistogramVec["path"] = "urpc_request_parsing_latency",
            "Seconds from a request's first byte to its last", in LATENCY_BUCKETS;
        processing: HistogramVec["path"] = "urpc_request_processing_latency",
            "Seconds from the last byte of a request to the last byte of its reply", in LATENCY_BUCKETS;
        // Open connections by Java's and by riffle's name.
        active: IntGauge =
            "netty_active_connection", "Open raw TCP connections", also "urpc_connection_number";
        exceptions: IntCounter = "netty_handle_exception", "Raw TCP connections that ended with an error";
        refused: IntCounter = "urpc_connection_refused_total",
            "Raw TCP connections closed at the limit to accept new ones";
    }
}

metrics::table! {
    struct FrameKindMetrics each fill {
        total: IntCounter = "netty_{kind}_request_total", "Requests received over raw TCP";
        in_progress: IntGauge = "netty_{kind}_request", "Requests over raw TCP in progress";
        transit: TransitTimes = "netty_{kind}_request_transport_latency",
            "Milliseconds from a request's timestamp to its last byte", in TRANSIT_MS_BUCKETS;
    }
}

/// Java's metric stem and riffle's label of each kind of request, in the order of [`TcpMetrics`].
const KINDS: [(&str, &str); 5] = [
    ("send_shuffle_data", "sendShuffleData"),
    ("get_local_shuffle_index", "getLocalShuffleIndex"),
    ("get_local_shuffle_data", "getLocalShuffleData"),
    ("get_memory_shuffle_data", "getMemoryShuffleData"),
    ("get_sorted_shuffle_data", "getSortedShuffleData"),
];

/// Metrics of the listener.
#[derive(Debug)]
pub(crate) struct TcpMetrics {
    send: Arc<RequestMetrics>,
    index: Arc<RequestMetrics>,
    data: Arc<RequestMetrics>,
    memory: Arc<RequestMetrics>,
    sorted: Arc<RequestMetrics>,
    pub(super) all: TcpMetricTable,
}

/// Metrics of one kind of request.
#[derive(Debug)]
pub(super) struct RequestMetrics {
    /// Metrics under Java's names.
    java: FrameKindMetrics,
    /// Total under riffle's name.
    total: IntCounter,
    /// Requests of all kinds that have begun to arrive and whose reply is not written.
    all_in_progress: IntGauge,
    /// Time from the first to the last byte of the request.
    pub(super) parsing: Histogram,
    /// Time from the last byte of the request to the last byte of the reply.
    processing: Histogram,
}

impl RequestMetrics {
    /// Counts a request. It is in progress until the returned value is dropped.
    pub(super) fn begin(self: &Arc<Self>) -> InProgress {
        self.java.total.inc();
        self.total.inc();
        let gauges = [&self.java.in_progress, &self.all_in_progress].map(GaugeGuard::inc);
        InProgress { metrics: Arc::clone(self), _gauges: gauges }
    }

    /// Returns the metric of the time from the client's timestamp to the last byte of the request.
    pub(super) fn transit(&self) -> &TransitTimes {
        &self.java.transit
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

    /// Records that the reply was written `seconds` after the request was complete.
    pub(super) fn answered(&self, seconds: f64) {
        self.metrics.processing.observe(seconds);
    }
}

impl TcpMetrics {
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let all = TcpMetricTable::new(registry)?;
        let of = |(stem, path): (&str, &str)| -> prometheus::Result<Arc<RequestMetrics>> {
            let fill = [("{kind}", stem)];
            let processing = all.processing.with_label_values(&[path]);
            PROCESS_LATENCY.register(registry, &processing, &fill)?;
            Ok(Arc::new(RequestMetrics {
                java: FrameKindMetrics::new(registry, &fill)?,
                total: all.totals.with_label_values(&[path]),
                all_in_progress: all.in_progress.clone(),
                parsing: all.parsing.with_label_values(&[path]),
                processing,
            }))
        };
        let [send, index, data, memory, sorted] = KINDS.map(of);
        let metrics = Self { send: send?, index: index?, data: data?, memory: memory?, sorted: sorted?, all };
        let Self { send, data, memory, .. } = &metrics;
        for (view, kind) in TRANSPORT_TIMES.iter().zip([send, data]) {
            view.register(registry, kind.transit().histogram(), &[])?;
        }
        for (view, kind) in PROCESS_TIMES.iter().zip([send, memory, data]) {
            view.register(registry, &kind.processing, &[])?;
        }
        Ok(metrics)
    }

    /// Returns the descriptions of all metrics, for the documentation.
    pub(crate) fn described() -> Vec<Description> {
        let mut described = TcpMetricTable::described();
        for (stem, _) in KINDS {
            let fill = [("{kind}", stem)];
            described.extend(FrameKindMetrics::described(&fill));
            described.push(PROCESS_LATENCY.describe(module_path!(), &fill));
        }
        let views = TRANSPORT_TIMES.iter().chain(&PROCESS_TIMES);
        described.extend(views.map(|view| view.describe(module_path!(), &[])));
        described
    }

    /// Returns the metrics of requests of type `kind`. Replies never occur here.
    pub(super) fn of(&self, kind: FrameType) -> &Arc<RequestMetrics> {
        match kind {
            FrameType::LocalIndex | FrameType::LocalIndexReply | FrameType::LocalIndexV2Reply => &self.index,
            FrameType::LocalData
            | FrameType::LocalDataV2
            | FrameType::LocalDataV3
            | FrameType::LocalDataReply => &self.data,
            FrameType::Memory | FrameType::MemoryReply | FrameType::MemoryV2Reply => &self.memory,
            FrameType::Sorted | FrameType::SortedReply => &self.sorted,
            FrameType::Send | FrameType::RpcReply => &self.send,
        }
    }
}
