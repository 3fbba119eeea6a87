//! The read cache: its directories, and the chunks stored in them.
//!
//! A chunk is pinned while it is read. If a disk fails, all its chunks are dropped, and readers use
//! the store.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use uniffle_io::{Disk, ReadBuffer, ReadPart, ReadTarget};

use super::directory::CacheDirectory;
use super::slots::{CHUNK_BYTES, ChunkKey, FetchSender, HeldChunk, SlotAllocator, SlotLookup, Slots};
use crate::metrics::clamped;
use crate::store::StoreError;
use crate::store::object::metrics::Metrics;
use uniffle_base::budget::Budget;
use uniffle_base::sched::{FairSemaphore, Reserve};

/// Maximum number of concurrent fetches.
const FETCHES: u64 = 16;

/// Directories of the cache, a table of the chunks in their slots, and permits for fetches.
#[derive(Debug)]
pub(in crate::store::object) struct Cache {
    pub(super) directories: Vec<CacheDirectory>,
    pub(super) slots: Mutex<Slots>,
    /// Permits for fetches. Waiting applications alternate.
    pub(super) fetches: Arc<FairSemaphore>,
    capacity_bytes: u64,
}

/// A chunk that has a slot. The slot is not reused while this exists.
#[derive(Debug)]
pub(in crate::store::object) struct Pinned {
    key: ChunkKey,
    pub(super) held: HeldChunk,
}

/// A part of a read buffer that is filled from a cached chunk.
#[derive(Debug)]
pub(in crate::store) struct CachedPart {
    pub(in crate::store::object) pinned: Arc<Pinned>,
    /// Offset in the chunk.
    pub(in crate::store::object) offset: u64,
    pub(in crate::store) range: Range<usize>,
}

impl Cache {
    /// Creates an empty cache of `capacity_bytes`, divided equally among `disks`. Returns `None`
    /// without `disks`, or if a disk's share is less than a chunk. The table of chunks is charged
    /// to `heap`.
    pub(in crate::store::object) async fn open(
        disks: &[Arc<dyn Disk>],
        capacity_bytes: u64,
        heap: &Budget,
    ) -> Option<Self> {
        let slots_each = capacity_bytes / CHUNK_BYTES / (disks.len() as u64).max(1);
        let slots_each = u32::try_from(slots_each).unwrap_or(u32::MAX);
        if disks.is_empty() || slots_each == 0 {
            return None;
        }
        let directories: Vec<_> = disks.iter().map(|disk| CacheDirectory::new(Arc::clone(disk))).collect();
        for directory in &directories {
            if let Err(error) = directory.open().await {
                directory.fail(&error);
            }
        }
        let slots = Slots::new(disks.iter().map(|_| SlotAllocator::new(slots_each)).collect(), heap);
        let capacity_bytes = u64::from(slots_each) * CHUNK_BYTES * disks.len() as u64;
        let fetches = FairSemaphore::new(FETCHES, Reserve::None);
        Some(Self { directories, slots: Mutex::new(slots), fetches, capacity_bytes })
    }

    /// Returns the capacity, rounded down to whole chunks.
    pub(in crate::store::object) fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// Returns the number of bytes in occupied slots.
    pub(in crate::store::object) fn used_bytes(&self) -> u64 {
        self.slots.lock().len() as u64 * CHUNK_BYTES
    }

    /// Returns whether a fetch would start without waiting.
    pub(in crate::store::object) fn has_time(&self) -> bool {
        self.fetches.has_room(1)
    }

    /// Finds a chunk of which a reader needs `bytes` bytes. Returns the chunk, and where the
    /// outcome is reported if the caller has to fetch it. Returns `None` if it gets no slot.
    pub(super) fn find(
        &self,
        metrics: &Metrics,
        key: ChunkKey,
        bytes: u64,
    ) -> Option<(Pinned, Option<FetchSender>)> {
        let found = self.slots.lock().find(key, bytes, |directory| self.directories[directory].works());
        let (count, found) = match found {
            SlotLookup::Known(held) => (&metrics.cache_hits, Some((Pinned { key, held }, None))),
            SlotLookup::Fetch(held, sender) => {
                (&metrics.cache_misses, Some((Pinned { key, held }, Some(sender))))
            }
            SlotLookup::Not => (&metrics.cache_bypassed, None),
        };
        count.inc();
        self.show(metrics);
        found
    }

    /// Fills `parts` of `buffer` from cached chunks.
    ///
    /// # Errors
    /// A disk fails. All chunks of that disk are dropped then, and the buffer may be lost.
    pub(in crate::store) async fn read(
        &self,
        metrics: &Metrics,
        mut buffer: Box<dyn ReadBuffer>,
        parts: &[CachedPart],
    ) -> io::Result<Box<dyn ReadBuffer>> {
        for (number, directory) in self.directories.iter().enumerate() {
            let of_it = parts.iter().filter(|part| part.pinned.held.slot.directory == number);
            let place = |part: &CachedPart| ReadPart {
                range: part.range.clone(),
                offset: part.pinned.held.slot.start() + part.offset,
            };
            let parts: Vec<_> = of_it.map(place).collect();
            if parts.is_empty() {
                continue;
            }
            let bytes: usize = parts.iter().map(|part| part.range.len()).sum();
            match directory.read(ReadTarget { buffer, parts }).await {
                Ok(target) => buffer = target.buffer,
                Err(error) => {
                    self.fail_directory(metrics, number, &error);
                    return Err(error);
                }
            }
            metrics.cache_read_bytes.inc_by(bytes as u64);
        }
        Ok(buffer)
    }

    /// Drops chunks that were read with wrong bytes.
    pub(in crate::store::object) fn discard(&self, metrics: &Metrics, parts: &[CachedPart]) {
        let mut slots = self.slots.lock();
        parts.iter().for_each(|part| slots.remove_held(&part.pinned.key, &part.pinned.held));
        drop(slots);
        self.show(metrics);
    }

    /// Drops the chunks `keys`, even if other readers use them.
    pub(in crate::store::object) fn drop_all(&self, metrics: &Metrics, keys: impl Iterator<Item = ChunkKey>) {
        let mut slots = self.slots.lock();
        keys.for_each(|key| {
            slots.remove(&key);
        });
        drop(slots);
        self.show(metrics);
    }

    /// Drops the chunks of an incarnation.
    pub(in crate::store::object) fn forget(&self, metrics: &Metrics, incarnation: u64) {
        while self.slots.lock().forget(incarnation) {}
        self.show(metrics);
    }

    pub(super) fn fail_directory(&self, metrics: &Metrics, directory: usize, error: &io::Error) {
        metrics.cache_failures.inc();
        self.directories[directory].fail(error);
        let mut from = Some(ChunkKey::FIRST);
        while let Some(key) = from {
            from = self.slots.lock().empty_some(directory, key);
        }
        self.show(metrics);
    }

    pub(super) fn show(&self, metrics: &Metrics) {
        metrics.cache_bytes.set(clamped(self.used_bytes()));
    }
}

impl Pinned {
    /// Waits until the chunk is fetched. Returns its size in bytes, or `None` if its disk failed.
    ///
    /// # Errors
    /// The store failed to return the chunk.
    pub(in crate::store) async fn ready(&self, key: &str) -> Result<Option<u64>, StoreError> {
        self.held.fetch.outcome(key).await
    }
}
