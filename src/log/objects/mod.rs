//! The copies of the metadata log in an object store.

pub(super) mod object;
mod object_file;
pub(super) mod ship;
pub(super) mod shipped;
