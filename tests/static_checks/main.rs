//! What holds of the sources, the documents and `deploy/` without a worker that runs.

#![allow(clippy::unwrap_used, clippy::panic, reason = "to panic is how a test fails")]

mod docs;
mod layers;
mod packaging;
mod prose;
