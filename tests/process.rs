//! The worker as a process: stopped, killed, upgraded in place, out of memory, cut off.
//!
//! Each test has a process of its own, started with the binary as a user starts it, and looks at it through its listeners.

#![allow(clippy::panic, reason = "to panic is how a test fails")]

mod support;

#[path = "process/checker.rs"]
mod checker;
#[path = "process/lifecycle.rs"]
mod lifecycle;
#[path = "process/network.rs"]
mod network;
#[path = "process/overload.rs"]
mod overload;
#[path = "process/writes.rs"]
mod writes;
