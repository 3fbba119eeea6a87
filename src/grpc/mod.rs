//! The gRPC door: translates calls of `rss.common` into calls of [`crate::service`], and decides nothing.
//!
//! Four hot methods (`sendShuffleData` and the three data reads) are taken by path before tonic's router and work on
//! the HTTP/2 frames themselves: payload is never collected into a message. Everything else is tonic.

mod message;
mod replies;
