//! Names of metrics of the raw TCP listener on dashboards of the Java server (docs/protocol.md
//! §10.3) and of riffle (§10.6).

use super::view::{IN_MS, IN_SECONDS, View};

/// Java's name for request durations.
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

/// riffle's names for sends and local data.
pub(crate) const TRANSPORT_TIMES: [View; 2] = [
    transport_time("urpc_send_data_transport_time"),
    transport_time("urpc_get_localfile_data_transport_time"),
];

/// riffle's names for sends, memory and local data.
pub(crate) const PROCESS_TIMES: [View; 3] = [
    process_time("urpc_send_data_process_time"),
    process_time("urpc_get_memory_data_process_time"),
    process_time("urpc_get_localfile_data_process_time"),
];
