//! The worker's contract over gRPC: docs/protocol.md §12 and docs/architecture.md §6 row by row, against workers in
//! this process.
//!
//! [`world::World`] is a whole worker as a user configures it; [`rig::Rig`] is the same parts over disks that can be
//! made to hang or fail, and with a clock that can be paused. Both end with the common check: nothing reserved, nothing
//! stored, nothing in flight, no files, no tasks. No expectation lives in those two.

#![allow(clippy::unwrap_used, clippy::panic, reason = "to panic is how a test fails")]

#[path = "support/coordinator.rs"]
mod coordinator;

mod contract {
    pub(crate) mod bad_input;
    pub(crate) mod blocks;
    pub(crate) mod decommission;
    pub(crate) mod faults;
    pub(crate) mod forms;
    pub(crate) mod health;
    pub(crate) mod hostile_frames;
    pub(crate) mod lifecycle;
    pub(crate) mod metrics;
    pub(crate) mod outages;
    pub(crate) mod panics;
    pub(crate) mod races;
    pub(crate) mod raw;
    pub(crate) mod read_memory;
    pub(crate) mod restarts;
    pub(crate) mod results;
    pub(crate) mod rig;
    pub(crate) mod sizes;
    pub(crate) mod tickets;
    pub(crate) mod tiers;
    pub(crate) mod world;
}
