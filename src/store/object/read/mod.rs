//! Reads of extents in objects, directly or through the read cache.
//!
//! `data` reads blocks and `index` reads their records, both by `ranges`. A range comes from chunks
//! of the cache or from the store: `fetch` plans the requests, `body` copies their responses.
//!
//! Invariant: blocks that are completely in the requested range are verified (`checksums`),
//! wherever their bytes come from. Not verified are a block that is only partly in the range or has
//! no recorded checksum, and some of the blocks of a chunk if they are smaller than about 32 bytes.

mod body;
mod checksums;
pub(super) mod data;
pub(in crate::store) mod fetch;
mod index;
pub(super) mod ranges;
