//! Removal of purged shuffles and applications from the disks and the object store.

pub(super) mod deletion_queue;
#[cfg(feature = "object")]
pub(super) mod object_purge;
mod purge;
pub(super) mod purge_notes;
