//! Names and formats that exist for the dashboards, tools and configurations of other servers: the
//! Java server and riffle.
//!
//! [`grpc`] and [`tcp`] name metrics a second time ([`view`]; a single further name is `also` in
//! the table of a metric). [`http`] serves paths of the Java server, and `keys` lists keys without
//! effect. Nothing here makes decisions. Formats of clients are the protocol and not
//! here.

pub(crate) mod grpc;
pub mod http;
mod keys;
pub(crate) mod tcp;
pub(crate) mod view;

pub(crate) use keys::NO_EFFECT;

/// Property of riffle with which an app chooses its heartbeat timeout in minutes (docs/protocol.md
/// §8.4).
pub(crate) const HEARTBEAT_TIMEOUT_PROPERTY: &str = "spark.rss.riffle.appHeartbeatTimeoutMinutes";
