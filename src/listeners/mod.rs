//! The listeners: they translate, and never decide.

pub mod grpc;
pub mod http;
pub mod tcp;
