//! Extents: the parts of a partition's stream, in order and with their locations. Pure: no I/O.
//!
//! Invariant: the base and the length of a published extent never change, because clients compute
//! offsets from them.

pub(super) mod extent;
pub(super) mod extent_list;
pub(super) mod extent_write;
pub(super) mod streams;
