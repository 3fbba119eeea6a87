//! Bounds and deadlines of the TCP listener. Every wait for a peer has a deadline, and every
//! resource that a peer can occupy has a limit.

use std::time::Duration;

use crate::schema::kind::{HOUR, SECOND, count, optional, seconds};
use crate::schema::section;
use crate::telemetry::traces::Traces;
use uniffle_io::buffers::READ_CHUNK_BYTES_SHORT;

impl TcpConfig {
    /// Returns the maximum number of waiting local responses. They may hold a quarter of the read
    /// memory's chunks, or half if these are large. The rest is for responses being written.
    #[must_use]
    pub fn local_reads_for(read_capacity_bytes: u64) -> usize {
        let chunks = read_capacity_bytes / READ_CHUNK_BYTES_SHORT as u64;
        usize::try_from(chunks / 4).unwrap_or(usize::MAX).max(1)
    }
}

section! {
    /// Settings of the TCP listener.
    #[table(
        "tcp",
        "The raw TCP listener. When the limit of connections is reached, the connection that has \
         been idle longest is closed: first one that has sent no frame header, then one without a \
         request, then any."
    )]
    pub struct TcpConfig {
        /// Largest accepted read request. Default: 8 MiB, a task filter of four million scattered
        /// attempts. Received bytes are charged to the heap until the response exists.
        pub read_request_bytes_max: u32 = 8 << 20,
        /// Maximum number of connections; then the one idle longest is closed. Default: by memory,
        /// 384 to 10,000 (1,408 with 10 GB).
        #[key("tcp.max_connections", optional(count(1..=1_000_000)), Restart, example "10000")]
        pub connections_wanted: Option<usize> = None,
        /// Limit in effect for `connections_wanted`.
        pub connections_max: usize = 10_000,
        /// Requests of one connection with unwritten replies. At the limit, its socket is not read.
        /// Default: 256.
        pub requests_in_flight_per_connection_max: usize = 256,
        /// Requests in progress over all connections, at least 8 of each. Default: 1,000,000. A
        /// worker derives it from its memory.
        pub requests_total: u64 = 1_000_000,
        /// Local responses of all connections that hold their first chunk of read memory and wait
        /// for the socket. Default: 32. At most half of the read memory's chunks: the other half
        /// is for responses being written, so that they always continue. An eighth is reserved for
        /// applications without such a response.
        pub local_reads_in_flight_max: usize = 32,
        /// Time that a local read waits for such a place before NO_BUFFER. Default: 10 s.
        pub local_read_wait: Duration = Duration::from_secs(10),
        /// Timeout of a new connection's first frame header.
        #[key("tcp.opening_timeout_sec", seconds(SECOND..=HOUR), Restart)]
        pub opening_timeout: Duration = 30 * SECOND,
        /// Idle connections are closed after this time; Java clients close theirs after 10 minutes.
        #[key("tcp.idle_timeout_sec", seconds(SECOND..=24 * HOUR), Restart)]
        pub idle_timeout: Duration = 15 * 60 * SECOND,
        /// Longest pause within a frame.
        #[key("tcp.frame_timeout_sec", seconds(SECOND..=HOUR), Restart)]
        pub frame_timeout: Duration = 30 * SECOND,
        /// Timeout of a frame from first to last byte; clients give up after 60 s.
        #[key("tcp.request_timeout_sec", seconds(SECOND..=HOUR), Restart)]
        pub fill_timeout: Duration = 120 * SECOND,
        /// Timeout for the client to consume a reply, or each 1 MiB of a larger one.
        #[key("tcp.answer_timeout_sec", seconds(SECOND..=HOUR), Restart)]
        pub write_timeout: Duration = 120 * SECOND,
        /// Threads of the listener, each with its own runtime. A connection stays on one of them.
        /// 0 = connections run on the runtime that started the listener. Default: 0. A worker has
        /// `worker_threads`.
        pub own_threads: usize = 0,
        /// Maximum number of threads for disk calls of each of the listener's own threads. Default:
        /// 64.
        pub blocking_threads: usize = 64,
        /// Sampling of traced requests. Default: none.
        pub traces: Traces = Traces::off(),
    }
}
