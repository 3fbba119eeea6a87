//! The gRPC listener: translates calls of `rss.common` into calls of [`crate::service`], and
//! decides only which connections and callers it serves.
//!
//! Five hot methods (`requireBuffer`, `sendShuffleData` and the three data reads) bypass tonic's
//! router and work on HTTP/2 frames, so payload is never collected into a message. Registrations,
//! reports and result queries bypass it too, since they can be large. All other calls are small and
//! use tonic. Collected requests are charged to the heap as they arrive (`request_collector`).
//!
//! docs/design/data-path.md §3 explains the sizes of windows and frames.

mod calls;
mod config;
pub(crate) mod metrics;
mod router;
mod server;
mod transport;

pub use config::{DecommissionBy, GrpcConfig};
pub use metrics::GrpcMetrics;
pub use server::GrpcServer;
