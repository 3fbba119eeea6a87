//! Divides the memory that the process may hold beside its capacity among the kinds of use. Pure
//! functions.
//!
//! The promise is resident memory of at most capacity × 1.05 + 200 MiB ([`promised`]), whatever
//! clients do. Everything except blocks gets its part from [`divide`], which also yields the
//! defaults of the keys that bound a kind. All kinds may therefore be full at once. A configured
//! key moves the bound: a start warns if capacity and [`MemoryParts::sum`] of the configured values
//! exceed the promise.

const MIB: u64 = 1 << 20;

/// Fixed part of the promise.
const FIXED: u64 = 200 * MIB;

/// The process without clients: code, runtime, first threads, tables and the allocator's own
/// memory. Tables are the first block lists, the index cache of default size, and the tables of the
/// embedded coordinator.
const BASE: u64 = 40 * MIB;
/// Number of cores whose threads are included in [`BASE`].
const CORES_IN_BASE: u64 = 16;
/// Memory of one further core's threads: a stack each, the allocator's cache, a chunk to read into.
const CORE: u64 = MIB / 2;

/// The region exceeds the capacity by this fraction, at most by [`SLACK_MAX`]. Sends may need the
/// excess beyond the bytes of their tickets.
const SLACK_DIVISOR: u64 = 64;
const SLACK_MAX: u64 = 64 * MIB;

/// The heap grows by this fraction of the capacity.
const HEAP_DIVISOR: u64 = 64;

/// Parts of the smallest worker: heap, reads from disk, HTTP/2 windows, gRPC and TCP connections
/// with their requests. Together with [`BASE`] they add up to [`FIXED`].
const SMALL: [u64; 5] = [68 * MIB, 40 * MIB, 20 * MIB, 20 * MIB, 12 * MIB];
/// Eighths of the remainder, in the order of [`SMALL`]. The heap grows by [`HEAP_DIVISOR`] instead.
const GROWTH_EIGHTHS: [u64; 5] = [0, 1, 3, 3, 1];
/// Maximum growth of one part other than the heap. A larger part has no benefit.
const GROWTH_MAX: u64 = 512 * MIB;

/// Initial window of a connection in bytes, as fixed by the protocol (RFC 9113 §6.9.2). It cannot
/// be lower.
pub const WINDOW_BYTES_MIN: u32 = 65_535;
/// Requests in progress that every gRPC connection may have: a ticket, a send, a report and a read.
pub const STREAMS_MIN: u32 = 4;

/// A gRPC connection without a request: buffers of HTTP/2 and its task.
const GRPC_CONNECTION: u64 = 40 << 10;
/// Additional TLS state of a gRPC connection.
const TLS_CONNECTION: u64 = 48 << 10;
/// A gRPC request in progress: its stream, its task and its decoded message.
const GRPC_REQUEST: u64 = 10 << 10;
/// A TCP connection without a request: two tasks and a queue.
const TCP_CONNECTION: u64 = 16 << 10;
/// A TCP request in progress: its reply until it is written.
const TCP_REQUEST: u64 = 1 << 10;
/// Requests in progress that every TCP connection may have.
pub const TCP_REQUESTS_MIN: u32 = 8;

/// Upper limits of the default numbers of connections.
const GRPC_CONNECTIONS_MAX: u64 = 4096;
const TCP_CONNECTIONS_MAX: u64 = 10_000;
/// Fraction of windows and requests that covers the minimum of every connection, as numerator and
/// denominator.
const LEAST_PART: (u64, u64) = (3, 4);

/// Bytes by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryParts {
    /// The process without clients.
    pub base: u64,
    /// Excess of the region over the capacity.
    pub slack: u64,
    /// `memory_store.heap_capacity`
    pub heap: u64,
    /// `memory_store.read_buffer_capacity`
    pub reads: u64,
    /// `grpc.window_total`
    pub windows: u64,
    /// gRPC connections and requests.
    pub grpc: u64,
    /// TCP connections and requests.
    pub tcp: u64,
}

/// Limits on the numbers of connections and requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// gRPC connections.
    pub grpc_connections: usize,
    /// gRPC requests in progress, over all connections.
    pub grpc_requests: u64,
    /// TCP connections.
    pub tcp_connections: usize,
    /// TCP requests in progress, over all connections.
    pub tcp_requests: u64,
}

/// Configured numbers of connections.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ConfiguredConnections {
    /// `grpc.max_connections`
    pub grpc: Option<usize>,
    /// `tcp.max_connections`
    pub tcp: Option<usize>,
}

/// Returns the bytes that the process may hold with `capacity` bytes of blocks.
#[must_use]
pub fn promised(capacity: u64) -> u64 {
    capacity.saturating_add(capacity / 20).saturating_add(FIXED)
}

/// Returns the excess of the region over `capacity`.
#[must_use]
pub fn slack(capacity: u64) -> u64 {
    (capacity / SLACK_DIVISOR).min(SLACK_MAX)
}

/// Returns the bytes per kind that a process on `cores` cores may hold beside `capacity` bytes of
/// blocks.
#[must_use]
pub fn divide(capacity: u64, cores: usize) -> MemoryParts {
    let base = base(cores);
    let (slack, growth) = (slack(capacity), capacity / HEAP_DIVISOR);
    let small: u64 = SMALL.iter().sum();
    let rest = (capacity / 20 + FIXED).saturating_sub(base + slack + growth);
    let part = |at: usize, unit: u64| {
        let (kibs, more) = (SMALL[at] >> 10, rest.saturating_sub(small));
        let part = (rest.min(small) / (small >> 10)).saturating_mul(kibs);
        let growth = if at == 0 { growth } else { (more / 8 * GROWTH_EIGHTHS[at]).min(GROWTH_MAX) };
        (part + growth) / unit * unit
    };
    let [heap, windows, grpc, tcp] = [0, 2, 3, 4].map(|at| part(at, MIB));
    MemoryParts { base, slack, heap, reads: part(1, 2 * MIB), windows, grpc, tcp }
}

fn base(cores: usize) -> u64 {
    BASE + CORE * (cores as u64).saturating_sub(CORES_IN_BASE)
}

/// Returns the bytes of one gRPC connection without its window.
fn grpc_connection_bytes(is_tls: bool) -> u64 {
    GRPC_CONNECTION + if is_tls { TLS_CONNECTION } else { 0 }
}

impl MemoryParts {
    /// Returns the sum of all kinds.
    #[must_use]
    pub fn sum(&self) -> u64 {
        let Self { base, slack, heap, reads, windows, grpc, tcp } = *self;
        [base, slack, heap, reads, windows, grpc, tcp].iter().fold(0, |sum, part| sum.saturating_add(*part))
    }

    /// Returns the numbers of connections and requests that fit into these parts. Configured
    /// numbers of connections replace the computed ones.
    #[must_use]
    pub fn limits(&self, is_tls: bool, configured: ConfiguredConnections) -> ConnectionLimits {
        let least = |part: u64| part / LEAST_PART.1 * LEAST_PART.0;
        let grpc =
            PeerCost { connection: grpc_connection_bytes(is_tls), request: GRPC_REQUEST, least: STREAMS_MIN };
        let tcp = PeerCost { connection: TCP_CONNECTION, request: TCP_REQUEST, least: TCP_REQUESTS_MIN };
        let connections = (least(self.windows) / u64::from(WINDOW_BYTES_MIN))
            .min(least(self.grpc) / grpc.least_bytes())
            .clamp(1, GRPC_CONNECTIONS_MAX);
        let grpc_connections = configured.grpc.map_or(connections, |count| count as u64);
        let connections = (least(self.tcp) / tcp.least_bytes()).clamp(1, TCP_CONNECTIONS_MAX);
        let tcp_connections = configured.tcp.map_or(connections, |count| count as u64);
        ConnectionLimits {
            grpc_connections: usize::try_from(grpc_connections).unwrap_or(usize::MAX),
            grpc_requests: grpc.requests(self.grpc, grpc_connections),
            tcp_connections: usize::try_from(tcp_connections).unwrap_or(usize::MAX),
            tcp_requests: tcp.requests(self.tcp, tcp_connections),
        }
    }

    /// Replaces the parts by configured values. Windows and requests cover at least the minimum of
    /// all connections.
    #[must_use]
    pub fn with(self, heap: u64, reads: u64, windows: u64, limits: ConnectionLimits, is_tls: bool) -> Self {
        let connections = limits.grpc_connections as u64;
        let grpc =
            PeerCost { connection: grpc_connection_bytes(is_tls), request: GRPC_REQUEST, least: STREAMS_MIN };
        let tcp = PeerCost { connection: TCP_CONNECTION, request: TCP_REQUEST, least: TCP_REQUESTS_MIN };
        Self {
            heap,
            reads,
            windows: windows.max(connections.saturating_mul(u64::from(WINDOW_BYTES_MIN))),
            grpc: grpc.bytes(connections, limits.grpc_requests),
            tcp: tcp.bytes(limits.tcp_connections as u64, limits.tcp_requests),
            ..self
        }
    }
}

/// Memory needs of one listener's connections.
///
/// A connection's minimum is the memory it can occupy before the worker has looked at any of its
/// data. HTTP/2 cannot open a connection with a window below 65,535 bytes, so the number of
/// connections follows the memory.
#[derive(Debug, Clone, Copy)]
struct PeerCost {
    /// Bytes of a connection without a request.
    connection: u64,
    /// Bytes of a request.
    request: u64,
    /// Minimum number of requests per connection.
    least: u32,
}

impl PeerCost {
    fn least_bytes(self) -> u64 {
        self.connection + self.request * u64::from(self.least)
    }

    /// Returns the number of requests that fit into `part` beside `connections` connections.
    fn requests(self, part: u64, connections: u64) -> u64 {
        let remaining = part.saturating_sub(connections.saturating_mul(self.connection));
        (remaining / self.request).max(connections.saturating_mul(u64::from(self.least)))
    }

    fn bytes(self, connections: u64, requests: u64) -> u64 {
        let requests = requests.max(connections.saturating_mul(u64::from(self.least)));
        connections.saturating_mul(self.connection).saturating_add(requests.saturating_mul(self.request))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TB: u64 = 1_000_000_000_000;

    #[test]
    fn smallest_shares_equal_the_fixed_part() {
        assert_eq!(BASE + SMALL.iter().sum::<u64>(), FIXED);
        let eighths: u64 = GROWTH_EIGHTHS.iter().sum();
        assert_eq!(eighths, 8);
        let small = divide(256_000_000, 2);
        assert!(small.sum() <= promised(256_000_000) - 256_000_000);
        assert!(small.heap >= 71 * MIB && small.reads >= 40 * MIB, "{small:?}");
    }

    proptest! {
        #[test]
        fn all_full_kinds_stay_within_the_limit(
            capacity in 64_000_000..TB, cores in 1usize..64, is_tls in any::<bool>(),
        ) {
            let parts = divide(capacity, cores);
            prop_assert!(parts.sum() <= promised(capacity) - capacity, "{parts:?}");
            let limits = parts.limits(is_tls, ConfiguredConnections::default());
            let real = parts.with(parts.heap, parts.reads, parts.windows, limits, is_tls);
            prop_assert!(real.sum() <= parts.sum(), "{limits:?}: {real:?} exceeds {parts:?}");
            prop_assert!(limits.grpc_connections >= 64 && limits.tcp_connections >= 256, "{limits:?}");
            prop_assert!(limits.grpc_requests >= 4 * limits.grpc_connections as u64);
        }

        #[test]
        fn more_capacity_never_means_less_of_anything(capacity in 64_000_000..TB, more in 0..TB) {
            let (less, more) = (divide(capacity, 8), divide(capacity + more, 8));
            let of = |parts: &MemoryParts| [parts.heap, parts.reads, parts.windows, parts.grpc, parts.tcp];
            prop_assert!(of(&less).iter().zip(of(&more)).all(|(less, more)| *less <= more), "{less:?} {more:?}");
        }

        #[test]
        fn limit_includes_configuration_and_connections(
            windows in 65_536u64..1 << 34, connections in 1usize..100_000, requests in 256u64..10_000_000,
        ) {
            let limits = ConnectionLimits {
                grpc_connections: connections,
                grpc_requests: requests,
                tcp_connections: 7,
                tcp_requests: 56,
            };
            let parts = divide(1 << 30, 2);
            let real = parts.with(parts.heap, parts.reads, windows, limits, false);
            prop_assert!(real.windows >= windows && real.windows >= 65_535 * connections as u64);
            prop_assert!(real.grpc >= GRPC_REQUEST * requests);
            let fits = real.sum() <= parts.sum();
            prop_assert!(!fits || connections <= 4096);
        }
    }
}
