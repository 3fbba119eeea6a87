//! Uploads: batches of a shuffle wait in a queue and are written together as one segment. Offloads
//! from disks become segments without the queue.
//!
//! Invariant: extents become visible, or are relocated, only after the store has confirmed the
//! object with them.

pub(super) mod intake;
pub(super) mod queue;
pub(in crate::store) mod segment;
pub(super) mod uploader;
