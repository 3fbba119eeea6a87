//! Messages of `rss.common`, generated from `proto/uniffle.proto`.
//!
//! All `bytes` fields are [`bytes::Bytes`]. The hot messages (`sendShuffleData`, the three data reads) are not
//! encoded or decoded through these types by the worker; they serve the client, the tests and the small calls.

#[allow(
    unreachable_pub,
    missing_debug_implementations,
    clippy::all,
    clippy::pedantic,
    clippy::restriction,
    reason = "generated"
)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/rss.common.rs"));
}
pub use generated::*;
