//! The listeners: they translate protocols into calls of the service, and decide only which
//! connections and callers they serve.
//!
//! [`acceptor`] accepts all connections and limits their number; [`grpc`], [`tcp`] and [`http`]
//! serve them. The constants here bound how long a peer may delay others that wait for memory, or a
//! successor that waits for the listener to close.

mod acceptor;
mod connection_limiter;
pub mod grpc;
pub mod http;
mod http2;
mod shares;
pub mod tcp;
pub mod tls;
mod tracked_stream;

use std::time::Duration;

pub use acceptor::Binding;

/// Time after which a peer that does not read a response counts as stalled. The response is then
/// abandoned if others wait for its memory. Garbage collection of a JVM does not pause that long.
const STALL_MAX: Duration = Duration::from_secs(10);

/// Interval of the checks whether others wait, while HTTP/2 holds the last bytes of a stalled
/// response. Responses in progress are checked more often.
const STALL_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Longest pause within a request while the listener closes. All new requests wait for the
/// successor then.
const CLOSING_PAUSE: Duration = Duration::from_millis(300);

/// Time for a request to arrive completely after the listener started to close.
const CLOSING_REQUEST: Duration = Duration::from_secs(1);

/// Time for a peer to read 1 MiB of a response, or its rest, while the listener closes.
const CLOSING_ANSWER: Duration = Duration::from_secs(1);

/// Time for a peer to acknowledge the end of its connection while the listener closes. Afterwards a
/// connection without a request is closed once its responses are written, or when it is silent, and
/// after twice this time in any case. Also the time for a TLS handshake to end.
const CLOSING_REST: Duration = Duration::from_secs(1);
