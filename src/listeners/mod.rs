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

/// While a listener closes, all others wait for a successor. A request whose next bytes do not come within this time ends ...
const CLOSING_PAUSE: Duration = Duration::from_millis(300);

/// ... as does one that is not complete this long after the listener began to close ...
const CLOSING_REQUEST: Duration = Duration::from_secs(1);

/// ... and an answer of which less than 1 MiB, or its rest, was taken within this time.
const CLOSING_ANSWER: Duration = Duration::from_secs(1);

/// ... and a connection on which no request has begun and whose peer says nothing for this time.
const CLOSING_REST: Duration = Duration::from_secs(1);
