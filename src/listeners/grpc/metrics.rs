//! What the gRPC listener counts: the names of the Java server (docs/protocol.md §10.3) and of riffle (§10.6) side by
//! side, so that dashboards of either work.
//!
//! What goes by several names or units is measured once (`grpc_duration_seconds`, the times on the way).
//!
//! Invariant: labels are the paths of known methods only; a stranger's path counts under `other`.

use std::collections::HashMap;

use prometheus::core::Collector;
use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts, Registry,
};
use tokio::time::Instant;

use super::methods;
use crate::metrics::{self, GaugeGuard, TransitTimes};

/// Path label of everything that is not in [`METHODS`].
const OTHER: &str = "other";

/// `path` as a label of metrics and traces: without end, or what strangers send would be kept.
pub(super) fn label(path: &str) -> &'static str {
    METHODS.iter().find(|(known, _)| *known == path).map_or(OTHER, |(known, _)| known)
}

/// Path and Java's metric stem (ours where Java counts nothing).
const METHODS: [(&str, &str); 18] = [
    ("/rss.common.ShuffleServer/registerShuffle", "registered_shuffle"),
    ("/rss.common.ShuffleServer/unregisterShuffle", "unregister_shuffle"),
    ("/rss.common.ShuffleServer/unregisterShuffleByAppId", "unregister_shuffle_by_app_id"),
    (methods::SEND_SHUFFLE_DATA, "send_shuffle_data"),
    (methods::GET_LOCAL_SHUFFLE_INDEX, "get_local_shuffle_index"),
    (methods::GET_LOCAL_SHUFFLE_DATA, "get_local_shuffle_data"),
    (methods::GET_MEMORY_SHUFFLE_DATA, "get_memory_shuffle_data"),
    ("/rss.common.ShuffleServer/commitShuffleTask", "commit_shuffle_task"),
    ("/rss.common.ShuffleServer/reportShuffleResult", "report_shuffle_result"),
    ("/rss.common.ShuffleServer/getShuffleResult", "get_shuffle_result"),
    ("/rss.common.ShuffleServer/getShuffleResultForMultiPart", "get_shuffle_result_for_multi_part"),
    ("/rss.common.ShuffleServer/finishShuffle", "finish_shuffle"),
    (methods::REQUIRE_BUFFER, "require_buffer"),
    ("/rss.common.ShuffleServer/appHeartbeat", "app_heartbeat"),
    ("/rss.common.ShuffleServer/startSortMerge", "start_sort_merge"),
    ("/rss.common.ShuffleServer/getSortedShuffleData", "get_sorted_shuffle_data"),
    ("/rss.common.ShuffleServerInternal/decommission", "decommission"),
    ("/rss.common.ShuffleServerInternal/cancelDecommission", "cancel_decommission"),
];

/// Stems of the methods whose time Java tells in milliseconds.
const TIMED: [&str; 6] = [
    "send_shuffle_data",
    "get_local_shuffle_data",
    "get_memory_shuffle_data",
    "get_sorted_shuffle_data",
    "get_shuffle_result_for_multi_part",
    "report_shuffle_result",
];

/// Paths and riffle's names for their durations.
const RIFFLE_DURATIONS: [(&str, &str); 6] = [
    (methods::SEND_SHUFFLE_DATA, "grpc_send_data_process_time"),
    (methods::REQUIRE_BUFFER, "grpc_buffer_require_process_time"),
    (methods::GET_MEMORY_SHUFFLE_DATA, "grpc_get_memory_data_process_time"),
    (methods::GET_LOCAL_SHUFFLE_DATA, "grpc_get_localfile_data_process_time"),
    (methods::GET_LOCAL_SHUFFLE_DATA, "grpc_get_localfile_data_latency"),
    (methods::GET_LOCAL_SHUFFLE_INDEX, "grpc_get_localfile_index_latency"),
];

/// Counters of one method.
#[derive(Debug)]
struct MethodMetrics {
    in_progress: IntGauge,
    total: IntCounter,
    requests: IntCounter,
    duration: Histogram,
}

/// How long calls were on their way; only these requests say when they were sent.
#[derive(Debug)]
pub(super) struct TransitMetrics {
    pub(super) send: TransitTimes,
    pub(super) local_data: TransitTimes,
    pub(super) memory: TransitTimes,
    pub(super) sorted: TransitTimes,
}

/// Counters of the listener.
#[derive(Debug)]
pub(super) struct GrpcMetrics {
    methods: HashMap<&'static str, MethodMetrics>,
    other_requests: IntCounter,
    other_duration: Histogram,
    pub(super) transit: TransitMetrics,
    open: IntGauge,
    total: IntCounter,
    /// Connections that are open.
    pub(super) connections: IntGauge,
    /// Connections closed at once, over the limit.
    pub(super) refused_connections: IntCounter,
    window_bytes: IntGauge,
}

fn registered<C: Collector + Clone + 'static>(registry: &Registry, metric: C) -> prometheus::Result<C> {
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}

impl TransitMetrics {
    fn new(registry: &Registry) -> prometheus::Result<Self> {
        let times = |stem: &str| {
            let help = format!("milliseconds from a {stem} call's timestamp until it is here");
            TransitTimes::new(registry, &format!("grpc_{stem}_transport_latency"), &help)
        };
        let metrics = Self {
            send: times("send_shuffle_data")?,
            local_data: times("get_local_shuffle_data")?,
            memory: times("get_memory_shuffle_data")?,
            sorted: times("get_sorted_shuffle_data")?,
        };
        for (times, riffle) in [
            (&metrics.send, "grpc_send_data_transport_time"),
            (&metrics.local_data, "grpc_get_localfile_data_transport_time"),
            (&metrics.memory, "grpc_get_memory_data_transport_time"),
        ] {
            let help = "seconds from a call's timestamp until it is here";
            metrics::also_in_seconds(registry, times.histogram(), riffle, help)?;
        }
        Ok(metrics)
    }
}

/// The durations of calls by the names of Java and of riffle.
fn name_durations(registry: &Registry, durations: &HistogramVec) -> prometheus::Result<()> {
    for (path, stem) in METHODS.iter().filter(|(_, stem)| TIMED.contains(stem)) {
        let help = format!("milliseconds from a {stem} call's head to its answer's head");
        let duration = durations.with_label_values(&[path]);
        metrics::also_in_ms(registry, &duration, &format!("grpc_{stem}_process_latency"), &help)?;
    }
    for (path, name) in RIFFLE_DURATIONS {
        let help = "seconds from a call's head to its answer's head";
        metrics::also_alone(registry, &durations.with_label_values(&[path]), name, help)?;
    }
    Ok(())
}

impl GrpcMetrics {
    /// Registers every name; they exist from the start.
    pub(super) fn new(registry: &Registry) -> prometheus::Result<Self> {
        let requests = Opts::new("total_grpc_request_number", "calls received, by path");
        let requests = registered(registry, IntCounterVec::new(requests, &["path"])?)?;
        let duration =
            HistogramOpts::new("grpc_duration_seconds", "time from a call's head to its answer's head")
                .buckets(prometheus::exponential_buckets(0.0005, 2.5, 14)?);
        let duration = registered(registry, HistogramVec::new(duration, &["path"])?)?;

        let mut methods = HashMap::with_capacity(METHODS.len());
        for (path, stem) in METHODS {
            let in_progress = IntGauge::new(format!("grpc_{stem}"), format!("{stem} calls in progress"))?;
            let total = IntCounter::new(format!("grpc_{stem}_total"), format!("{stem} calls received"))?;
            let method = MethodMetrics {
                in_progress: registered(registry, in_progress)?,
                total: registered(registry, total)?,
                requests: requests.with_label_values(&[path]),
                duration: duration.with_label_values(&[path]),
            };
            methods.insert(path, method);
        }
        name_durations(registry, &duration)?;
        let gauge = |name, help| registered(registry, IntGauge::new(name, help)?);
        let counter = |name, help| registered(registry, IntCounter::new(name, help)?);
        let open: IntGauge = gauge("grpc_open", "calls in progress")?;
        metrics::also(registry, &open, "grpc_request_number")?;
        Ok(Self {
            methods,
            other_requests: requests.with_label_values(&[OTHER]),
            other_duration: duration.with_label_values(&[OTHER]),
            transit: TransitMetrics::new(registry)?,
            open,
            total: counter("grpc_total", "calls received")?,
            connections: gauge("grpc_server_connection_number", "open connections")?,
            refused_connections: counter("grpc_refused_connection_total", "connections over the limit")?,
            window_bytes: gauge("grpc_window_bytes", "sum of the receive windows granted to connections")?,
        })
    }

    /// Counts a call until the returned value is dropped, which also happens when the client cancels.
    pub(super) fn begin(&self, path: &str) -> CallTimer {
        let method = self.methods.get(path);
        let duration = method.map_or(&self.other_duration, |method| &method.duration).clone();
        method.map_or(&self.other_requests, |method| &method.requests).inc();
        if let Some(method) = method {
            method.total.inc();
        }
        self.total.inc();
        let in_progress =
            [Some(GaugeGuard::one(&self.open)), method.map(|method| GaugeGuard::one(&method.in_progress))];
        CallTimer { _in_progress: in_progress, started: Instant::now(), duration }
    }

    /// Publishes the sum of the granted windows.
    pub(super) fn set_window_bytes(&self, bytes: u64) {
        self.window_bytes.set(metrics::clamped(bytes));
    }
}

/// A call in progress.
#[derive(Debug)]
pub(super) struct CallTimer {
    _in_progress: [Option<GaugeGuard>; 2],
    started: Instant,
    duration: Histogram,
}

impl Drop for CallTimer {
    fn drop(&mut self) {
        self.duration.observe(self.started.elapsed().as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(registry: &Registry, name: &str) -> f64 {
        let family = registry.gather().into_iter().find(|family| family.name() == name).expect(name);
        let metric = &family.get_metric()[0];
        if family.get_field_type() == prometheus::proto::MetricType::GAUGE {
            metric.get_gauge().get_value()
        } else {
            metric.get_counter().get_value()
        }
    }

    #[tokio::test]
    async fn calls_are_counted_while_they_last_and_for_ever() {
        let registry = Registry::new();
        let metrics = GrpcMetrics::new(&registry).unwrap();
        let call = metrics.begin(super::super::methods::SEND_SHUFFLE_DATA);
        drop(metrics.begin("/somebody/else"));
        assert_eq!(value(&registry, "grpc_send_shuffle_data"), 1.0);
        assert_eq!(value(&registry, "grpc_open"), 1.0);
        drop(call);
        assert_eq!(value(&registry, "grpc_send_shuffle_data"), 0.0);
        assert_eq!(value(&registry, "grpc_open"), 0.0);
        assert_eq!(value(&registry, "grpc_send_shuffle_data_total"), 1.0);
        assert_eq!(value(&registry, "grpc_total"), 2.0);
        let families = registry.gather();
        let paths = families.iter().find(|family| family.name() == "total_grpc_request_number").unwrap();
        assert_eq!(paths.get_metric().len(), METHODS.len() + 1, "no label for a stranger's path");
    }
}
