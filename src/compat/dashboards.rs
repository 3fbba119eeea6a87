//! Names of the listeners' metrics on dashboards of the Java server (docs/protocol.md §10.3) and of
//! riffle (§10.6).

use super::view::{IN_MS, IN_SECONDS, View};

/// Java's names for durations of gRPC calls, for the methods that Java times.
pub(crate) const IN_PROCESS: View = View::new(
    "grpc_{method}_process_latency",
    "Milliseconds from the header of a {method} call to the header of its response",
    IN_MS,
);

/// Stems of the methods that Java times.
pub(crate) const TIMED: [&str; 6] = [
    "send_shuffle_data",
    "get_local_shuffle_data",
    "get_memory_shuffle_data",
    "get_sorted_shuffle_data",
    "get_shuffle_result_for_multi_part",
    "report_shuffle_result",
];

/// riffle's names for durations of gRPC calls, by stem.
pub(crate) const RIFFLE_DURATIONS: [(&str, View); 6] = [
    ("send_shuffle_data", duration_view("grpc_send_data_process_time")),
    ("require_buffer", duration_view("grpc_buffer_require_process_time")),
    ("get_memory_shuffle_data", duration_view("grpc_get_memory_data_process_time")),
    ("get_local_shuffle_data", duration_view("grpc_get_localfile_data_process_time")),
    ("get_local_shuffle_data", duration_view("grpc_get_localfile_data_latency")),
    ("get_local_shuffle_index", duration_view("grpc_get_localfile_index_latency")),
];

const fn duration_view(name: &'static str) -> View {
    View::new(name, "Seconds from the header of a call to the header of its response", 1.0)
}

/// riffle's names for transit times of gRPC calls, in the order of `TransitMetrics`.
pub(crate) const RIFFLE_TRANSIT: [View; 3] = [
    transit_view("grpc_send_data_transport_time"),
    transit_view("grpc_get_localfile_data_transport_time"),
    transit_view("grpc_get_memory_data_transport_time"),
];

const fn transit_view(name: &'static str) -> View {
    View::new(name, "Seconds from a call's timestamp to its arrival", IN_SECONDS)
}

/// Java's name for the durations of TCP requests.
pub(crate) const PROCESS_LATENCY: View = View::new(
    "netty_{kind}_request_process_latency",
    "Milliseconds from the last byte of a request to the last byte of its reply",
    IN_MS,
);

const fn transport_time(name: &'static str) -> View {
    View::new(name, "Seconds from a request's timestamp to its last byte", IN_SECONDS)
}

const fn process_time(name: &'static str) -> View {
    View::new(name, "Seconds from the last byte of a request to the last byte of its reply", 1.0)
}

/// riffle's names for transit times of TCP sends and local data.
pub(crate) const TRANSPORT_TIMES: [View; 2] = [
    transport_time("urpc_send_data_transport_time"),
    transport_time("urpc_get_localfile_data_transport_time"),
];

/// riffle's names for durations of TCP sends, and of reads of memory and local data.
pub(crate) const PROCESS_TIMES: [View; 3] = [
    process_time("urpc_send_data_process_time"),
    process_time("urpc_get_memory_data_process_time"),
    process_time("urpc_get_localfile_data_process_time"),
];
