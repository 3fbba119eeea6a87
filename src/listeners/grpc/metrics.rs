//! Metrics of the gRPC listener, under the names of the Java server (docs/protocol.md §10.3) and of
//! riffle (§10.6), so that dashboards of either work.
//!
//! A value with several names or units is measured once (`grpc_duration_seconds`, transit times).
//!
//! Invariant: only paths of known methods become labels. Unknown paths count under `other`.

use std::collections::HashMap;

use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, Registry};

use crate::clock::Instant;
use crate::compat::dashboards::{IN_PROCESS, RIFFLE_DURATIONS, RIFFLE_TRANSIT, TIMED};
use crate::metrics::{self, Description, GaugeGuard, TRANSIT_MS_BUCKETS, TransitTimes, exponential_buckets};

/// Paths of the methods that are served ahead of tonic's router.
pub(super) mod methods {
    pub(in crate::listeners::grpc) const REQUIRE_BUFFER: &str = "/rss.common.ShuffleServer/requireBuffer";
    pub(in crate::listeners::grpc) const SEND_SHUFFLE_DATA: &str =
        "/rss.common.ShuffleServer/sendShuffleData";
    pub(in crate::listeners::grpc) const GET_MEMORY_SHUFFLE_DATA: &str =
        "/rss.common.ShuffleServer/getMemoryShuffleData";
    pub(in crate::listeners::grpc) const GET_LOCAL_SHUFFLE_INDEX: &str =
        "/rss.common.ShuffleServer/getLocalShuffleIndex";
    pub(in crate::listeners::grpc) const GET_LOCAL_SHUFFLE_DATA: &str =
        "/rss.common.ShuffleServer/getLocalShuffleData";
    pub(in crate::listeners::grpc) const REGISTER_SHUFFLE: &str = "/rss.common.ShuffleServer/registerShuffle";
    pub(in crate::listeners::grpc) const REPORT_SHUFFLE_RESULT: &str =
        "/rss.common.ShuffleServer/reportShuffleResult";
    pub(in crate::listeners::grpc) const GET_SHUFFLE_RESULT: &str =
        "/rss.common.ShuffleServer/getShuffleResult";
    pub(in crate::listeners::grpc) const GET_SHUFFLE_RESULT_FOR_MULTI_PART: &str =
        "/rss.common.ShuffleServer/getShuffleResultForMultiPart";
}

/// Path label of everything that is not in [`METHODS`].
const OTHER: &str = "other";

/// Returns `path` as a label of metrics and traces. It is static, so that paths sent by strangers
/// are not stored.
pub(super) fn label(path: &str) -> &'static str {
    METHODS.iter().find(|(known, _)| *known == path).map_or(OTHER, |(known, _)| known)
}

/// Path and Java's metric stem, or our own stem for methods that Java does not count.
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

/// 0.5 ms to 75 s.
const DURATION_BUCKETS: &[f64] = &exponential_buckets::<14>(0.0005, 2.5);

metrics::table! {
    /// Transit times of calls. Only these requests contain a timestamp.
    pub(crate) struct TransitMetrics {
        send: TransitTimes = "grpc_send_shuffle_data_transport_latency",
            "Milliseconds from a send_shuffle_data call's timestamp to its arrival", in TRANSIT_MS_BUCKETS;
        local_data: TransitTimes = "grpc_get_local_shuffle_data_transport_latency",
            "Milliseconds from a get_local_shuffle_data call's timestamp to its arrival", in TRANSIT_MS_BUCKETS;
        memory: TransitTimes = "grpc_get_memory_shuffle_data_transport_latency",
            "Milliseconds from a get_memory_shuffle_data call's timestamp to its arrival", in TRANSIT_MS_BUCKETS;
        sorted: TransitTimes = "grpc_get_sorted_shuffle_data_transport_latency",
            "Milliseconds from a get_sorted_shuffle_data call's timestamp to its arrival", in TRANSIT_MS_BUCKETS;
    }
}

metrics::table! {
    struct Method each fill {
        in_progress: IntGauge = "grpc_{method}", "Calls of {method} in progress";
        total: IntCounter = "grpc_{method}_total", "Calls of {method} received";
    }
}

metrics::table! {
    struct Calls {
        requests: IntCounterVec["path"] = "total_grpc_request_number", "gRPC calls received, by path";
        durations: HistogramVec["path"] = "grpc_duration_seconds",
            "Seconds from the header of a call to the header of its response, by path", in DURATION_BUCKETS;
        open: IntGauge = "grpc_open", "gRPC calls in progress", also "grpc_request_number";
        total: IntCounter = "grpc_total", "gRPC calls received";
        connections: IntGauge = "grpc_server_connection_number", "Open gRPC connections";
        refused_connections: IntCounter = "grpc_refused_connection_total",
            "gRPC connections closed at the limit to accept new ones";
        window_bytes: IntGauge = "grpc_window_bytes",
            "Sum of the HTTP/2 receive windows granted to connections";
    }
    with { transit: TransitMetrics }
}

/// Metrics of one method, or of all unknown ones.
#[derive(Debug)]
struct MethodMetrics {
    method: Option<Method>,
    requests: IntCounter,
    duration: Histogram,
}

/// Metrics of the listener.
#[derive(Debug)]
pub struct GrpcMetrics {
    methods: HashMap<&'static str, MethodMetrics>,
    other: MethodMetrics,
    calls: Calls,
}

impl GrpcMetrics {
    /// Registers every metric, so that all exist from the start.
    ///
    /// # Errors
    /// If a metric name is already registered in `registry`.
    pub fn new(registry: &Registry) -> prometheus::Result<Self> {
        let calls = Calls::new(registry)?;
        let of = |path: &str, method| MethodMetrics {
            method,
            requests: calls.requests.with_label_values(&[path]),
            duration: calls.durations.with_label_values(&[path]),
        };
        let mut methods = HashMap::with_capacity(METHODS.len());
        for (path, stem) in METHODS {
            let fill = [("{method}", stem)];
            let method = of(path, Some(Method::new(registry, &fill)?));
            if TIMED.contains(&stem) {
                IN_PROCESS.register(registry, &method.duration, &fill)?;
            }
            for (_, view) in RIFFLE_DURATIONS.iter().filter(|(of, _)| *of == stem) {
                view.register(registry, &method.duration, &[])?;
            }
            methods.insert(path, method);
        }
        let TransitMetrics { send, local_data, memory, .. } = &calls.transit;
        for (view, times) in RIFFLE_TRANSIT.iter().zip([send, local_data, memory]) {
            view.register(registry, times.histogram(), &[])?;
        }
        Ok(Self { methods, other: of(OTHER, None), calls })
    }

    /// Returns the descriptions of all metrics, for the documentation.
    pub(crate) fn described() -> Vec<Description> {
        let views = RIFFLE_DURATIONS.iter().map(|(_, view)| view).chain(&RIFFLE_TRANSIT);
        let mut described = Calls::described();
        described.extend(METHODS.iter().flat_map(|(_, stem)| Method::described(&[("{method}", stem)])));
        described.extend(TIMED.map(|stem| IN_PROCESS.describe(module_path!(), &[("{method}", stem)])));
        described.extend(views.map(|view| view.describe(module_path!(), &[])));
        described
    }

    /// Returns the transit times of requests.
    pub(super) fn transit(&self) -> &TransitMetrics {
        &self.calls.transit
    }

    /// Counts a call until the returned value is dropped, which also happens when the client
    /// cancels.
    pub(super) fn begin(&self, path: &str) -> CallTimer {
        let MethodMetrics { method, requests, duration } = self.methods.get(path).unwrap_or(&self.other);
        requests.inc();
        self.calls.total.inc();
        let of_method = method.as_ref().map(|method| {
            method.total.inc();
            GaugeGuard::inc(&method.in_progress)
        });
        let in_progress = (GaugeGuard::inc(&self.calls.open), of_method);
        CallTimer { _in_progress: in_progress, started: Instant::now(), duration: duration.clone() }
    }

    /// Returns the gauge of open connections.
    pub(crate) fn connections(&self) -> &IntGauge {
        &self.calls.connections
    }

    /// Returns the counter of connections closed at the limit.
    pub(super) fn refused_connections(&self) -> &IntCounter {
        &self.calls.refused_connections
    }

    /// Publishes the sum of the granted windows.
    pub(super) fn set_window_bytes(&self, bytes: u64) {
        self.calls.window_bytes.set(metrics::clamped(bytes));
    }
}

/// A call in progress.
#[derive(Debug)]
pub(super) struct CallTimer {
    _in_progress: (GaugeGuard, Option<GaugeGuard>),
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
    async fn calls_are_counted_in_gauge_and_total() {
        let registry = Registry::new();
        let metrics = GrpcMetrics::new(&registry).unwrap();
        let call = metrics.begin(methods::SEND_SHUFFLE_DATA);
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
        assert_eq!(paths.get_metric().len(), METHODS.len() + 1, "an unknown path got its own label");
    }
}
