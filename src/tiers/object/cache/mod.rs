//! Chunks of segments on local disks, as far as there is room: what one reader has brought, others of the same chunk find.
//!
//! A chunk is fetched once, by a task of its own, however many want it, and written to a slot as it comes; then it is read
//! from there. Readers hold no memory while they wait. What has no slot, because all are in use, because it is not worth one, or
//! because the disk fails, is read from the store as without a cache. It is empty at every start.
//!
//! Nothing here is believed: readers compare the checksums of what they get from it.
//!
//! | file | does |
//! | --- | --- |
//! | `slots` | which chunk is where, and which leaves (pure) |
//! | `flight` | a chunk on its way |
//! | `directory` | the file of one disk |
//! | `chunks` | the chunks that are there, and their disks |
//! | `fetch` | the way from the store to the slot |

mod chunks;
mod directory;
mod fetch;
mod flight;
mod slots;

pub(super) use self::chunks::{Cache, CachedPart};
pub(super) use self::fetch::begin;
pub(super) use self::slots::{CHUNK_BYTES, ChunkKey};
