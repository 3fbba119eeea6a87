//! Single calls of the protocol: codecs, a connection over gRPC and one over raw TCP.
//!
//! Public with the feature `proto`.

pub mod grpc;
pub mod proto;
pub mod read;
pub mod send;
pub mod tcp;
