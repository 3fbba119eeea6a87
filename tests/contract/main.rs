//! The worker's contract over both transports, against workers and their parts in this process.
//!
//! | module | against what |
//! | --- | --- |
//! | `grpc` | docs/protocol.md over gRPC: [`grpc::fixture::WorkerFixture`] is a whole worker as a user configures it, [`grpc::parts::parts`] gives the same parts over disks that can be made to hang or fail, with a clock that can be paused |
//! | `tcp`, `per_core` | the raw TCP listener over real sockets, each way to run it |
//! | `replay` | recorded sessions of real clients |
//! | `damage` | seeded damages of data directories, against what clients were told |
//! | `life` | seeded histories of blocks under paused time, against a model |
//! | `object_client` | the client of object stores, against a store with faults and SeaweedFS |
//! | `object_tier` | the object tier over its client, against the store with faults |
//! | `disks` | every disk of `uniffle-io` and of the testkit: what the store relies on |
//! | `client` | the client crate and its example, against workers |
//! | `burst` | a burst against a disk of which the speed is simulated |
//! | `cluster`, `metrics` | workers and coordinators together; the names of metrics |
//!
//! Tests end with the common check: nothing reserved, nothing stored, nothing in flight, no files, no tasks. No
//! expectation lives in a fixture.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "to panic is how a test fails")]
#![allow(clippy::duplicate_mod, reason = "the same tests over both ways to run the TCP listener")]

mod burst;
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
    pub(crate) mod metrics;
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
    pub(crate) mod ticket_line;
    pub(crate) mod tickets;
    pub(crate) mod tiers;
}

/// Connections are tasks of the shared runtime: `urpc_runtime = "shared"`.
mod tcp {
    /// Runtimes of the listener's own.
    pub(crate) const OWN_THREADS: usize = 0;

    pub(crate) mod bad_input;
    pub(crate) mod deadlines;
    pub(crate) mod fixture;
    pub(crate) mod local;
    pub(crate) mod requests;
}

/// Connections live on threads with a runtime each, as by default. Not the deadlines, which need the
/// test's own paused clock.
#[allow(dead_code, reason = "some of the fixture is for the deadlines")]
#[path = "tcp"]
mod per_core {
    pub(crate) const OWN_THREADS: usize = 2;

    pub(crate) mod bad_input;
    pub(crate) mod fixture;
    pub(crate) mod local;
    pub(crate) mod requests;
}
