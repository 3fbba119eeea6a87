//! Sets of block ids: compressed in the heap, and in unnamed files if they exceed it.

mod id_chunk;
pub(super) mod id_run;
pub(super) mod id_set;
pub(super) mod present;
pub(super) mod scratch;
