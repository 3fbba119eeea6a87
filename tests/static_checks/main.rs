//! Checks of sources, documents and `deploy/` that need no running worker.

#![allow(clippy::unwrap_used, clippy::panic, reason = "to panic is how a test fails")]

mod docs;
mod layers;
mod packaging;
mod prose;
