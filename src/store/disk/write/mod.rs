//! Writes batches of sealed blocks to the local disks and makes them visible to readers.
//!
//! A batch is one contiguous range of a data log. Its index group is appended to an index log of
//! the shuffle. If a disk fails, the batch is written to the next one.
//!
//! Invariant: data is written before its index group, and the group is appended before its extents
//! are visible. Everything that readers see therefore survives the process.

pub(super) mod append;
pub(super) mod batch;
pub(super) mod pending;
mod publish;
