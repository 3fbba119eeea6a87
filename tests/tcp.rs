//! The raw TCP door over real sockets: what clients do, and what nobody should do to it.
//!
//! Every test ends with [`World::finish`]: no task left, no byte of memory charged, whatever the peers did.

#![allow(clippy::panic, clippy::unwrap_used, clippy::expect_used, reason = "to panic is how a test fails")]

mod tcp {
    pub(crate) mod bad_input;
    pub(crate) mod deadlines;
    pub(crate) mod local;
    pub(crate) mod requests;
    pub(crate) mod world;
}
