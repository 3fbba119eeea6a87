//! The read cache: chunks of objects on local disks, shared by all readers.
//!
//! A chunk is fetched once, by a task of its own, and written to a slot as it arrives: a range of a
//! cache file. Readers wait for the task without holding memory, and then read from the slot. A
//! read bypasses the cache if it finds no free or idle slot, if it needs too little of the chunk to
//! replace another one, or if the disk fails. The cache is empty at every start.
//!
//! Readers verify the checksums of cached bytes, because the cache itself does not.

mod directory;
mod fetch;
mod read_cache;
mod slots;

pub(super) use self::fetch::begin_fetch;
pub(super) use self::read_cache::{Cache, CachedPart};
pub(super) use self::slots::{CHUNK_BYTES, ChunkKey};
