//! Writing the metadata log: group commit to its copies, and compaction, which begins a new
//! generation when too much of the current one is dead.

pub(crate) mod checkpoint;
pub(crate) mod generation;
mod mark;
mod spare;
pub(crate) mod writer;
