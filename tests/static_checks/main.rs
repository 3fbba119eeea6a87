//! What holds of the sources and of `deploy/` without a worker that runs.

#![allow(clippy::unwrap_used, clippy::panic, reason = "to panic is how a test fails")]

mod layers;
mod packaging;
