//! Writing the metadata log: group commit to its copies, and the begin of a new generation when too
//! much of the current one is dead.

pub(super) mod checkpoint;
pub(super) mod generation;
mod mark;
mod spare;
pub(super) mod writer;
