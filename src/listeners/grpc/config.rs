//! Bounds and deadlines of the gRPC listener.

use std::time::Duration;

use uniffle_wire::send_message::Limits;

use crate::telemetry::traces::Traces;

use super::internal::DecommissionBy;

/// Settings of the gRPC listener, validated.
#[derive(Debug, Clone)]
pub struct GrpcConfig {
    /// Largest `sendShuffleData` message; Java's limit. Nothing of this size is ever held. Default: 1 GiB.
    pub max_message_bytes: u32,
    /// Largest request of the small calls (reports, registrations). Default: 64 MiB.
    pub small_message_bytes_max: usize,
    /// Largest request of a data read, where only its task filter can be large, and of a ticket. Default: 4 MiB.
    pub read_request_bytes_max: u32,
    /// Bounds of one `sendShuffleData` message besides its size.
    pub send_limits: Limits,
    /// Open connections; more are closed at once. Default: 16,384.
    pub connections_max: usize,
    /// Calls in progress on one connection while there are few. Default: 256.
    pub concurrent_streams_max: u32,
    /// Sum of these over all connections, as long as each may have more than four. Default: 8,192.
    pub stream_budget: u64,
    /// Receive window of a stream. Covers 1 GB/s at 1 ms. Default: 1 MiB.
    pub stream_window_bytes: u32,
    /// Receive window of a connection while there are few. Default: 4 MiB.
    pub connection_window_bytes: u32,
    /// Largest HTTP/2 frame announced; Java sends 64 KiB + 1 then. Default: 1 MiB.
    pub frame_bytes_max: u32,
    /// Sum of the windows of all connections, as long as each has more than 64 KiB. Default: 64 MiB.
    pub window_budget_bytes: u64,
    /// Time for a request to be complete, and for a small call to be answered. Default: 120 s.
    pub send_deadline: Duration,
    /// Time for a call from its head to the last byte of its answer; then the stream is reset. More than
    /// `send_deadline`. Default: 300 s.
    pub stream_deadline: Duration,
    /// Bytes of a refused request that are read and thrown away, so that the client sees the answer.
    /// Default: 64 MiB.
    pub discard_bytes_max: u64,
    /// Time for a connection's calls to end after GOAWAY. Default: 10 s.
    pub drain_deadline: Duration,
    /// Time for a new connection to send its first byte. Default: 10 s.
    pub first_byte_deadline: Duration,
    /// Pause between keep-alive pings. Default: 60 s.
    pub keep_alive_interval: Duration,
    /// Time for the answer to a keep-alive ping. Default: 20 s.
    pub keep_alive_timeout: Duration,
    /// Which calls are traced. Default: none.
    pub traces: Traces,
    /// Who may call `decommission` and `cancelDecommission`. Default: nobody.
    pub decommission_by: DecommissionBy,
}

impl Default for GrpcConfig {
    fn default() -> Self {
        Self {
            max_message_bytes: 1 << 30,
            small_message_bytes_max: 64 << 20,
            read_request_bytes_max: 4 << 20,
            send_limits: Limits::default(),
            connections_max: 16_384,
            concurrent_streams_max: 256,
            stream_budget: 8192,
            stream_window_bytes: 1 << 20,
            connection_window_bytes: 4 << 20,
            frame_bytes_max: 1 << 20,
            window_budget_bytes: 64 << 20,
            send_deadline: Duration::from_secs(120),
            stream_deadline: Duration::from_secs(300),
            discard_bytes_max: 64 << 20,
            drain_deadline: Duration::from_secs(10),
            first_byte_deadline: Duration::from_secs(10),
            keep_alive_interval: Duration::from_secs(60),
            keep_alive_timeout: Duration::from_secs(20),
            traces: Traces::off(),
            decommission_by: DecommissionBy::Nobody,
        }
    }
}
