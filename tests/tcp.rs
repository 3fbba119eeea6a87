//! The raw TCP listener over real sockets: what clients do, and what nobody should do to it.
//!
//! Every test ends with [`World::finish`]: no task left, no byte of memory charged, whatever the peers did.

#![allow(clippy::panic, clippy::unwrap_used, clippy::expect_used, reason = "to panic is how a test fails")]
#![allow(clippy::duplicate_mod, reason = "the same tests over both ways to run the listener")]

/// Connections are tasks of the shared runtime: `urpc_runtime = "shared"`.
mod tcp {
    /// Runtimes of the listener's own.
    pub(crate) const OWN_THREADS: usize = 0;

    pub(crate) mod bad_input;
    pub(crate) mod deadlines;
    pub(crate) mod local;
    pub(crate) mod requests;
    pub(crate) mod world;
}

/// Connections live on threads with a runtime each, as by default. Not the deadlines, which need the
/// test's own paused clock.
#[allow(dead_code, reason = "some of the world is for the deadlines")]
#[path = "tcp"]
mod per_core {
    pub(crate) const OWN_THREADS: usize = 2;

    pub(crate) mod bad_input;
    pub(crate) mod local;
    pub(crate) mod requests;
    pub(crate) mod world;
}
