//! The read cache: chunks of segments on local disks, shared by all readers.
//!
//! A chunk is fetched once, by a task of its own, and written to a slot as it arrives. Readers wait
//! for the task without holding memory, and then read from the slot. A read bypasses the cache if
//! all slots are in use, if the chunk is not worth a slot, or if the disk fails. The cache is empty
//! at every start.
//!
//! Readers verify the checksums of cached bytes, because the cache itself does not.

mod chunks;
mod directory;
mod fetch;
mod slots;

pub(super) use self::chunks::{Cache, CachedPart};
pub(super) use self::fetch::begin;
pub(super) use self::slots::{CHUNK_BYTES, ChunkKey};
