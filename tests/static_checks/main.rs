//! Checks of sources, documents and `deploy/` that need no running worker.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod chart;
mod docs;
mod layers;
mod monitoring;
mod names;
mod packaging;
mod prose;
