//! Reads of extents in objects, directly or through the read cache.

mod body;
mod checksums;
pub(super) mod data;
pub(in crate::store) mod fetch;
mod index;
pub(super) mod ranges;
