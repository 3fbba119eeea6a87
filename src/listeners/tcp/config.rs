//! Bounds and deadlines of the TCP listener.

use std::time::Duration;

use crate::schema::kind::{HOUR, SECOND, count, optional, seconds, word};
use crate::schema::{section, words};
use crate::telemetry::traces::Traces;
use uniffle_io::buffers::READ_CHUNK_BYTES_SHORT;

words! {
    /// Where connections run.
    pub enum TcpThreads {
        /// As many threads as the runtime has, each with connections of its own.
        PerCore = "per_core",
        /// With everything else.
        Shared = "shared",
    }
}

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
        /// Threads of the raw TCP listener: per_core = worker_threads threads of its own, shared =
        /// those of the runtime.
        #[key("runtime_config.urpc_runtime", word(), Restart)]
        pub threads: TcpThreads = TcpThreads::PerCore,
        /// Largest frame accepted. Default: 1 GiB. Frames are never buffered and blocks are admitted by their ticket, so the
        /// bound costs no memory; it must let one block of 512 MiB pass (`types::BLOCK_BYTES_MAX`) and refuses only broken
        /// peers: Spark aims at 16 MiB per request (`rss.client.send.size.limit`). Java's decoder allows `i32::MAX`.
        pub frame_bytes_max: u32 = 1 << 30,
        /// Largest read request accepted. Default: 8 MiB, a task filter of four million scattered attempts. What has come of
        /// one is charged to the heap until its answer is there.
        pub read_request_bytes_max: u32 = 8 << 20,
        /// Bytes taken from a socket at once. Default: 256 KiB, which stays in the core's cache (docs/design/data-path.md §2). One such
        /// buffer exists per thread, not per connection.
        pub chunk_bytes: usize = 256 << 10,
        /// Maximum number of connections; then the one idle longest is closed. Default: by memory,
        /// 384 to 10,000 (1,408 with 10 GB).
        #[key("tcp.max_connections", optional(count(1..=1_000_000)), Restart, example "10000")]
        pub connections_wanted: Option<usize> = None,
        /// What is in effect for it.
        pub connections_max: usize = 10_000,
        /// Requests of one connection whose replies are not written; then its socket is not read. Default: 256.
        pub requests_in_flight_per_connection_max: usize = 256,
        /// Requests in progress over all connections, at least 8 of each. Default: 1,000,000; what fits in memory in a worker.
        pub requests_total: u64 = 1_000_000,
        /// Memory answers of all connections that are not written. Default: 1,024.
        pub memory_reads_in_flight_max: usize = 1024,
        /// Local answers of all connections that wait for their turn on the socket while they hold their first chunk of read
        /// memory. Default: 32. Must be at most half of the read memory's chunks: the other half is for the answers that
        /// are being written, so that these can always go on. An eighth is kept for applications that hold none.
        pub local_reads_in_flight_max: usize = 32,
        /// How long a local read waits for one of them before NO_BUFFER. Default: 10 s.
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
        /// Threads that belong to the listener, each with a runtime of its own to which a connection is bound; 0 = connections
        /// run on the runtime that the listener was started in. Default: 0.
        pub own_threads: usize = 0,
        /// Most threads for disk calls that each of the listener's own threads may start. Default: 64.
        pub blocking_threads: usize = 64,
        /// What replies that are ready may take to be written once the listener closes. Default: 5 s.
        pub shutdown_grace: Duration = Duration::from_secs(5),
        /// Which requests are traced. Default: none.
        pub traces: Traces = Traces::off(),
    }
}
