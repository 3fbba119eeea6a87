//! The worker as a process: for example stopped, killed, upgraded in place, out of memory,
//! disconnected.
//!
//! Most tests start the binary as a user does. Most tests of operations start the worker in this
//! process. They observe listeners, exit codes, resident memory and data directories.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod adversary;
mod checker;
mod cli;
mod clock_steps;
mod kept_memory;
mod lifecycle;
mod limits;
mod many_partitions;
mod network;
mod observe;
mod operations;
mod reported_ids;
mod rss;
mod runtime_state;
mod systemd;
mod tcp_rss;
mod truncated_memory;
mod upgrade_flush;
mod upgrade_objects;
mod upgrade_waits;
mod upgrades;
mod writes;
