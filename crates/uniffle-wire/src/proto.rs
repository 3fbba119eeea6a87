//! Messages of `rss.common`, generated from `proto/uniffle.proto`.
//!
//! All `bytes` fields are [`bytes::Bytes`]. The worker decodes no `sendShuffleData` and encodes no
//! response with data with these types, because prost would copy the data (`send_message` decodes
//! sends). Requests of reads and small calls use them, and so do the client and the tests.

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
