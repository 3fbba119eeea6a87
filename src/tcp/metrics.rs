//! Counters of the TCP door; names as the Java server's and riffle's (PROTOCOL §10.3, §10.6).

use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts, Registry,
};

use crate::wire::frame::FrameType;

/// Seconds; from a memory read of one block to a request that a client has given up.
const LATENCY_BUCKETS: [f64; 13] = [1e-5, 1e-4, 5e-4, 1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0];

/// See the module.
#[derive(Debug)]
pub struct TcpMetrics {
    send: RequestMetrics,
    index: RequestMetrics,
    data: RequestMetrics,
    memory: RequestMetrics,
    sorted: RequestMetrics,
    /// Connections open now, by Java's and by riffle's name.
    active: IntGauge,
    connections: IntGauge,
    /// Connections that ended for another reason than the peer closing it between frames.
    pub(super) exceptions: IntCounter,
    /// Connections refused over the limit.
    pub(super) refused: IntCounter,
}

/// Metrics of one kind of request.
#[derive(Debug, Clone)]
pub(super) struct RequestMetrics {
    /// Java's name.
    java: IntCounter,
    /// riffle's name.
    riffle: IntCounter,
    /// First byte to last byte of the request.
    pub(super) parsing: Histogram,
    /// Last byte of the request to last byte of the reply, by riffle's name.
    pub(super) processing: Histogram,
}

impl RequestMetrics {
    pub(super) fn count(&self) {
        self.java.inc();
        self.riffle.inc();
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
        let histogram = |name: &str, help: &str| -> prometheus::Result<HistogramVec> {
            let opts = HistogramOpts::new(name, help).buckets(LATENCY_BUCKETS.to_vec());
            let histogram = HistogramVec::new(opts, &["path"])?;
            registry.register(Box::new(histogram.clone()))?;
            Ok(histogram)
        };
        let totals =
            IntCounterVec::new(Opts::new("total_urpc_request_number", "Requests over raw TCP"), &["path"])?;
        registry.register(Box::new(totals.clone()))?;
        let parsing =
            histogram("urpc_request_parsing_latency", "Seconds from a request's first byte to its last")?;
        let processing = histogram(
            "urpc_request_processing_latency",
            "Seconds from a request's last byte to its reply's last",
        )?;
        let request = |name: &str, path: &str| -> prometheus::Result<RequestMetrics> {
            Ok(RequestMetrics {
                java: counter(&format!("netty_{name}_request_total"), "Requests over raw TCP")?,
                riffle: totals.with_label_values(&[path]),
                parsing: parsing.with_label_values(&[path]),
                processing: processing.with_label_values(&[path]),
            })
        };
        Ok(Self {
            send: request("send_shuffle_data", "sendShuffleData")?,
            index: request("get_local_shuffle_index", "getLocalShuffleIndex")?,
            data: request("get_local_shuffle_data", "getLocalShuffleData")?,
            memory: request("get_memory_shuffle_data", "getMemoryShuffleData")?,
            sorted: request("get_sorted_shuffle_data", "getSortedShuffleData")?,
            active: gauge("netty_active_connection", "Raw TCP connections open now")?,
            connections: gauge("urpc_connection_number", "Raw TCP connections open now")?,
            exceptions: counter("netty_handle_exception", "Raw TCP connections that ended with an error")?,
            refused: counter(
                "urpc_connection_refused_total",
                "Raw TCP connections closed for being too many",
            )?,
        })
    }

    /// Those of requests of type `kind`. Replies never get here; they would count as sends.
    pub(super) fn of(&self, kind: FrameType) -> &RequestMetrics {
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

    /// Counts a connection for as long as the guard lives.
    pub(super) fn connection(&self) -> ConnectionGauge {
        self.active.inc();
        self.connections.inc();
        ConnectionGauge(self.active.clone(), self.connections.clone())
    }
}

/// See [`TcpMetrics::connection`].
#[derive(Debug)]
pub(super) struct ConnectionGauge(IntGauge, IntGauge);

impl Drop for ConnectionGauge {
    fn drop(&mut self) {
        self.0.dec();
        self.1.dec();
    }
}
