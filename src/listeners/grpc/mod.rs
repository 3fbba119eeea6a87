//! The gRPC listener: translates calls of `rss.common` into calls of [`crate::service`], and decides nothing.
//!
//! Five hot methods (`requireBuffer`, `sendShuffleData` and the three data reads) are taken by path before tonic's
//! router and work on the HTTP/2 frames themselves: payload is never collected into a message. So are registrations,
//! reports and result queries, which can be large. Everything else is small and tonic's. What is collected is charged
//! to the heap as it arrives (`inbound`).
//!
//! Windows (docs/design/data-path.md §3): 1 MiB per stream, 4 MiB per connection and 1 MiB frames cost 0.27 CPU-s/GB
//! against 0.43 with tonic's defaults and 0.59 with 32 MiB windows and 16 KiB frames.

mod arriving;
mod bookkeeping;
mod config;
mod convert;
mod gathered;
mod inbound;
mod ingest;
mod internal;
mod message;
mod methods;
pub(crate) mod metrics;
mod progress;
mod reads;
mod replies;
mod router;
mod server;
mod shuffle;
mod tickets;
mod timer;
mod weight;

pub use config::{DecommissionBy, GrpcConfig};
pub use server::GrpcServer;
