//! Messages of `rss.common`, generated from `proto/uniffle.proto`.
//!
//! All `bytes` fields are [`bytes::Bytes`]. The worker does not use these types for the hot
//! messages (`sendShuffleData` and the three data reads). They serve the client, the tests and the
//! small calls.

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
