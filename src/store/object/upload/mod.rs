//! Uploads: batches of a shuffle wait in a queue and are written together as one segment.

pub(super) mod group;
pub(super) mod intake;
pub(in crate::store) mod segment;
pub(super) mod uploader;
