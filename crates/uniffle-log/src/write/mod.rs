//! Writing the metadata log: group commit to its copies, and new generations, which drop dead
//! entries or replace failed copies.

pub(crate) mod checkpoint;
pub(crate) mod generation;
mod mark;
mod spare;
pub(crate) mod writer;
