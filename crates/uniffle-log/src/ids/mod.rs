//! Sets of block ids: compressed in the heap, and in unnamed files if they exceed it.

mod id_chunk;
pub(crate) mod id_run;
pub(crate) mod id_set;
pub(crate) mod present;
pub(crate) mod scratch;
