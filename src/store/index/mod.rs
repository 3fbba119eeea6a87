//! Indexes of published extents: the format of index groups, reads and the cache of their records,
//! and the verifier of blocks.

pub(super) mod block_verifier;
pub mod codec;
pub(super) mod index_read;
pub(super) mod record_cache;
pub(crate) mod records;
