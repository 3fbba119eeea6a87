//! A small Rust client of the shuffle protocols, for tests and for the load generator.
//!
//! [`block`] has block ids, [`send`] and [`read`] are the codecs, [`grpc`] puts them on a connection and
//! follows the Java client's way of reading. Not here: Spark's quorum, replicas and reassignment. It shares no codec
//! with the server beyond the generated messages, so that a mistake on one side is seen by the other; [`tcp`]
//! is the exception, its frames are pinned by golden vectors.

pub mod block;
pub mod grpc;
pub mod proto;
pub mod read;
pub mod send;
pub mod tcp;
