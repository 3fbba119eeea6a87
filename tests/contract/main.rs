//! Contracts of the worker and its parts that need no process of the worker.
//!
//! `transports`, `grpc` and `tcp` follow docs/protocol.md. Most of their tests end with a common
//! check: nothing is reserved, stored or in flight, and no files or tasks remain. `replay` has
//! recorded sessions of clients. `life` and `damage` are simulated runs of the store. The other
//! modules are suites for disks, object stores, metrics, the client crate and clusters of several
//! workers.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]
#![allow(clippy::duplicate_mod, reason = "the same tests over both ways to run the TCP listener")]

mod client;
mod cluster;
mod damage;
mod disks;
mod life;
mod metrics;
mod object_client;
#[cfg(feature = "object")]
mod object_tier;
mod replay;
mod transports;

mod grpc {
    pub(crate) mod bad_input;
    pub(crate) mod blocks;
    pub(crate) mod bounds;
    pub(crate) mod commits;
    pub(crate) mod connections;
    pub(crate) mod decommission;
    pub(crate) mod faults;
    pub(crate) mod fixture;
    pub(crate) mod forms;
    pub(crate) mod health;
    pub(crate) mod heap_shares;
    pub(crate) mod hostile_frames;
    pub(crate) mod java_http;
    pub(crate) mod lifecycle;
    #[cfg(feature = "object")]
    pub(crate) mod objects;
    pub(crate) mod offload;
    pub(crate) mod other_clients;
    pub(crate) mod outages;
    pub(crate) mod panics;
    pub(crate) mod parts;
    pub(crate) mod quotas;
    pub(crate) mod races;
    pub(crate) mod raw;
    pub(crate) mod read_memory;
    pub(crate) mod restarts;
    pub(crate) mod results;
    pub(crate) mod sizes;
    pub(crate) mod ticket_queue;
    pub(crate) mod tickets;
    pub(crate) mod tiers;
    pub(crate) mod unknown_tier;
}

/// Connections are tasks of the test's runtime.
mod tcp {
    /// Number of runtimes of the listener.
    pub(crate) const OWN_THREADS: usize = 0;

    pub(crate) mod bad_input;
    pub(crate) mod deadlines;
    pub(crate) mod fixture;
    pub(crate) mod local;
    pub(crate) mod requests;
    pub(crate) mod unread;
}

/// Connections run on threads with a runtime each, which is the default. Excludes `deadlines`,
/// which needs the paused clock of the test.
#[path = "tcp"]
mod per_core {
    pub(crate) const OWN_THREADS: usize = 2;

    pub(crate) mod bad_input;
    pub(crate) mod fixture;
    pub(crate) mod local;
    pub(crate) mod requests;
    pub(crate) mod unread;
}
