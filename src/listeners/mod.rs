//! The listeners: they translate, and never decide.
//!
//! [`acceptor`] accepts the connections of all of them; [`grpc`], [`tcp`] and [`http`] speak on them.

mod acceptor;
pub mod grpc;
pub mod http;
mod places;
mod shares;
pub mod tcp;
pub mod tls;
mod watched;

pub use acceptor::Binding;
