//! `CoordinatorServer` of `rss.common`, generated from `proto/uniffle.proto`, with the messages of
//! [`uniffle_wire::proto`].

#[allow(
    unreachable_pub,
    missing_debug_implementations,
    clippy::all,
    clippy::pedantic,
    clippy::restriction,
    reason = "generated"
)]
mod generated {
    tonic::include_proto!("rss.common");
}
pub use generated::*;
pub use uniffle_wire::proto::*;
