//! Bounds and deadlines of the TCP listener.

use std::time::Duration;

use crate::telemetry::traces::Traces;

/// Settings of the TCP listener; already validated.
#[derive(Debug, Clone)]
pub struct TcpConfig {
    /// Largest frame accepted. Default: 1 GiB. Frames are never buffered and blocks are admitted by their ticket, so
    /// the bound costs no memory; it must let one block of 512 MiB pass (`types::BLOCK_BYTES_MAX`) and refuses only
    /// broken peers: Spark aims at 16 MiB per request (`rss.client.send.size.limit`). Java's decoder allows `i32::MAX`.
    pub frame_bytes_max: u32,
    /// Largest read request accepted. Default: 8 MiB, a task filter of four million scattered attempts.
    pub read_request_bytes_max: u32,
    /// Bytes of incomplete read requests over 64 KiB that all connections may hold together. Default: 64 MiB.
    pub large_requests_bytes_max: u32,
    /// Bytes taken from a socket at once. Default: 256 KiB, which stays in the core's cache (docs/performance.md §E).
    /// One such buffer exists per thread, not per connection.
    pub chunk_bytes: usize,
    /// Connections open at once; more are closed on accept. Default: 10,000.
    pub connections_max: usize,
    /// Requests of one connection whose replies are not written; then its socket is not read. Default: 256.
    pub requests_in_flight_per_connection_max: usize,
    /// Memory answers of all connections that are not written. Default: 1,024.
    pub memory_reads_in_flight_max: usize,
    /// Local answers of all connections that wait for their turn on the socket while they hold their first chunk of
    /// read memory. Default: 32. Must be at most half of the read memory's chunks: the other half is for the answers
    /// that are being written, so that these can always go on.
    pub local_reads_in_flight_max: usize,
    /// How long a local read waits for one of them before NO_BUFFER. Default: 10 s.
    pub local_read_wait: Duration,
    /// A connection without any traffic is closed after. Default: 15 min; Java's clients close after 10 themselves.
    pub idle_timeout: Duration,
    /// How long a peer may take from a frame's first byte to its last. Default: 120 s; clients give up after 60.
    pub fill_timeout: Duration,
    /// How long a peer may take to accept a reply, or 1 MiB of one that is streamed. Default: 120 s.
    pub write_timeout: Duration,
    /// Threads that belong to the listener, each with a runtime of its own to which a connection is bound; 0 =
    /// connections run on the runtime that the listener was started in. Default: 0.
    pub own_threads: usize,
    /// Most threads for disk calls that each of the listener's own threads may start. Default: 64.
    pub blocking_threads: usize,
    /// What replies that are ready may take to be written once the listener closes. Default: 5 s.
    pub shutdown_grace: Duration,
    /// Which requests are traced. Default: none.
    pub traces: Traces,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            frame_bytes_max: 1 << 30,
            read_request_bytes_max: 8 << 20,
            large_requests_bytes_max: 64 << 20,
            chunk_bytes: 256 << 10,
            connections_max: 10_000,
            requests_in_flight_per_connection_max: 256,
            memory_reads_in_flight_max: 1024,
            local_reads_in_flight_max: 32,
            local_read_wait: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(15 * 60),
            fill_timeout: Duration::from_secs(120),
            write_timeout: Duration::from_secs(120),
            own_threads: 0,
            blocking_threads: 64,
            shutdown_grace: Duration::from_secs(5),
            traces: Traces::off(),
        }
    }
}
