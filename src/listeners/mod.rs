//! The listeners: they translate, and never decide.
//!
//! [`acceptor`] accepts the connections of all of them; [`grpc`], [`tcp`] and [`http`] speak on them.

mod acceptor;
pub mod grpc;
pub mod http;
mod http2;
mod places;
mod shares;
pub mod tcp;
pub mod tls;
mod watched;

use std::time::Duration;

pub use acceptor::Binding;

/// An answer of which nothing was taken for so long gives way to others that wait for what it holds; JVMs that collect their
/// garbage do not pause so long.
const PATIENCE: Duration = Duration::from_secs(10);

/// After that it is looked so often whether others wait.
const LOOK: Duration = Duration::from_secs(1);
