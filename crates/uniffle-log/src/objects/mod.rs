//! The copies of the metadata log in an object store.

pub(crate) mod object;
mod object_file;
pub(crate) mod ship;
pub(crate) mod shipped;
