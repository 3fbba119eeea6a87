//! Removal of purged shuffles and applications from the disks and the object store.
//!
//! Invariant: data of a purged shuffle is deleted only once the metadata log has the purge.
//! Otherwise a start would miss data of a shuffle that it still knows.

pub(super) mod deletion_queue;
#[cfg(feature = "object")]
pub(super) mod object_purge;
mod purge;
pub(super) mod purge_notes;
