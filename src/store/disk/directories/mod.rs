//! Data directories: their claim and content, their health, and the choice among them.
//!
//! Invariant: only the process that holds the lock on a directory's marker file writes files to it.
//! Without the lock, `claimable` creates and removes an empty directory there.

pub(super) mod claim;
pub mod claimable;
mod content;
pub(in crate::store) mod directory;
pub mod health;
pub(super) mod marker;
pub(super) mod mounts;
pub mod placement;
