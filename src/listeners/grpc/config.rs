//! Bounds and deadlines of the gRPC listener.

use std::time::Duration;

use crate::schema::kind::{GIB, HOUR, KIB, MIB, SECOND, count, list, optional, seconds, size, word};
use crate::schema::network::{Network, network};
use crate::schema::{section, words};
use crate::telemetry::traces::Traces;

words! {
    /// Callers that may use `decommission` and `cancelDecommission`.
    pub enum DecommissionBy {
        /// The machines of the coordinators.
        Coordinators = "coordinators",
        /// Programs on this machine.
        ThisMachine = "loopback",
        /// Everybody, as with the Java server.
        Everybody = "open",
        /// No caller.
        None = "off",
    }
}

section! {
    /// Settings of the gRPC listener.
    #[table(
        "grpc",
        "The gRPC listener. When the limit of connections is reached, the connection that has been \
         idle longest is closed: first one that has not finished its handshake, then one without a \
         request, then any."
    )]
    pub struct GrpcConfig {
        /// Maximum message size of a send, which is never buffered as a whole. A block may have up
        /// to 512 MiB.
        #[key("grpc.max_message_size", size(MIB..=2 * GIB - 1), Restart)]
        pub max_message_bytes: u32 = 1 << 30,
        /// Maximum number of connections; then the one idle longest is closed. Default: by memory,
        /// 192 to 4,096 (1,132 with 10 GB).
        #[key("grpc.max_connections", optional(count(1..=100_000)), Restart, example "4096")]
        pub connections_wanted: Option<usize> = None,
        /// Concurrent requests of a connection; fewer if many connections share max_streams_total.
        #[key("grpc.max_concurrent_streams", count(1..=65_535), Restart)]
        pub concurrent_streams_max: u32 = 256,
        /// Concurrent requests of all connections, each about 10 KiB of memory. Default: by memory,
        /// at least 4 per connection.
        #[key("grpc.max_streams_total", optional(count(256..=10_000_000)), Restart, example "8192")]
        pub streams_wanted: Option<u64> = None,
        /// HTTP/2 window of a stream; 1 MiB covers 1 GB/s at 1 ms.
        #[key("grpc.stream_window", size(64 * KIB..=64 * MIB), Restart)]
        pub stream_window_bytes: u32 = 1 << 20,
        /// HTTP/2 window of a connection, at least stream_window; smaller if many connections share
        /// window_total.
        #[key("grpc.connection_window", size(64 * KIB..=512 * MIB), Restart)]
        pub connection_window_bytes: u32 = 4 << 20,
        /// Sum of all connections' windows: at least connection_window, and 64 KiB per connection.
        /// Default: derived from capacity, at least 20 MiB.
        #[key("grpc.window_total", optional(size(64 * KIB..=64 * GIB)), Restart, example "\"64MiB\"")]
        pub windows_wanted: Option<u64> = None,
        /// Maximum HTTP/2 frame size, at most stream_window. Java clients send up to 64 KiB + 1.
        #[key("grpc.max_frame_size", size(16 * KIB..=8 * MIB), Restart)]
        pub frame_bytes_max: u32 = 1 << 20,
        /// Timeout for a send to arrive and be stored, and for any other call until it has a
        /// response.
        #[key("grpc.request_timeout_sec", seconds(SECOND..=HOUR), Restart)]
        pub call_deadline: Duration = 120 * SECOND,
        /// Timeout of a new connection's first byte, TLS handshake, HTTP/2 preface and SETTINGS. An
        /// open connection may stay idle.
        #[key("grpc.opening_timeout_sec", seconds(SECOND..=HOUR), Restart)]
        pub opening_deadline: Duration = 10 * SECOND,
        /// Longest pause between two frames of a data request.
        #[key("grpc.frame_timeout_sec", seconds(SECOND..=HOUR), Restart)]
        pub frame_deadline: Duration = 30 * SECOND,
        /// Timeout for the client to consume a response, or each 1 MiB of a larger one.
        #[key("grpc.answer_timeout_sec", seconds(SECOND..=HOUR), Restart)]
        pub answer_deadline: Duration = 120 * SECOND,
        /// Callers that may use gRPC decommission, which has no token: coordinators (of
        /// coordinator_quorum), loopback, open (anyone, as in Java) or off.
        #[key("admin.grpc_decommission", word(), Restart)]
        pub decommission_by: DecommissionBy = DecommissionBy::Coordinators,
        /// Further networks that may call it, for coordinators behind a Service or NAT.
        #[key("admin.grpc_decommission_networks", list(64, network()), Restart)]
        pub decommission_networks: Vec<Network> = Vec::new(),
        /// Limit in effect for `connections_wanted`.
        pub connections_max: usize = 4096,
        /// Limit in effect for `streams_wanted`.
        pub stream_budget: u64 = 16_384,
        /// Limit in effect for `windows_wanted`.
        pub window_budget_bytes: u64 = 512 * MIB,
        /// Names or addresses of the machines that [`DecommissionBy::Coordinators`] means.
        pub coordinators: Vec<String> = Vec::new(),
        /// Largest request for a ticket, a read or one partition's result; task filters may be
        /// large.
        pub read_request_bytes_max: u32 = 4 << 20,
        /// Which calls are traced.
        pub traces: Traces = Traces::off(),
    }
}
