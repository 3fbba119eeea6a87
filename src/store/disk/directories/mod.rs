//! Data directories: their claim and content, their health, and the choice among them.
//!
//! Invariant: only the process that holds the lock on a directory's marker file writes to it.

pub(super) mod claim;
pub mod claimable;
mod content;
pub(in crate::store) mod directory;
pub mod health;
pub(super) mod marker;
pub(super) mod mounts;
pub mod placement;
