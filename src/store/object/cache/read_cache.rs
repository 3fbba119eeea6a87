//! The [`Cache`]: its directories, the chunks stored in them, and the permits to fetch chunks.
//!
//! A chunk is pinned while it is read. If a disk fails, all its chunks are dropped, and readers use
//! the store. The disk gets no chunks for a while.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use uniffle_io::{Disk, ReadBuffer, ReadPart, ReadTarget};

use super::directory::CacheDirectory;
use super::slots::{CHUNK_BYTES, CachedChunk, ChunkKey, FetchSender, SlotAllocator, SlotLookup, Slots};
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
    /// Permits for fetches. Applications that wait are served in turn.
    pub(super) fetches: Arc<FairSemaphore>,
    capacity_bytes: u64,
}

/// A chunk that has a slot. The slot is not reused while this exists.
#[derive(Debug)]
pub(in crate::store::object) struct Pinned {
    key: ChunkKey,
    pub(super) chunk: CachedChunk,
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
                directory.disable(&error);
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

    /// Returns the size of the slots of all chunks in the table, also of those being fetched. Slots
    /// of dropped chunks that are still being read are not counted.
    pub(in crate::store::object) fn used_bytes(&self) -> u64 {
        self.slots.lock().len() as u64 * CHUNK_BYTES
    }

    /// Returns whether a fetch would start without waiting.
    pub(in crate::store::object) fn has_fetch_permit(&self) -> bool {
        self.fetches.has_room(1)
    }

    /// Finds a chunk of which a reader needs `bytes` bytes, or reserves a slot for it. Returns a
    /// sender if the caller has to fetch the chunk, and `None` if it gets no slot.
    pub(super) fn find_or_reserve(
        &self,
        metrics: &Metrics,
        key: ChunkKey,
        bytes: u64,
    ) -> Option<(Pinned, Option<FetchSender>)> {
        let found = self
            .slots
            .lock()
            .find_or_reserve(key, bytes, |directory| self.directories[directory].is_enabled());
        let (count, found) = match found {
            SlotLookup::Known(chunk) => (&metrics.cache_hits, Some((Pinned { key, chunk }, None))),
            SlotLookup::Fetch(chunk, sender) => {
                (&metrics.cache_misses, Some((Pinned { key, chunk }, Some(sender))))
            }
            SlotLookup::Bypass => (&metrics.cache_bypassed, None),
        };
        count.inc();
        self.update_gauge(metrics);
        found
    }

    /// Fills `parts` of `buffer` from cached chunks.
    ///
    /// # Errors
    /// A disk fails. All chunks of that disk are dropped then. The buffer is not returned, because
    /// a hung disk may still use it.
    pub(in crate::store) async fn read(
        &self,
        metrics: &Metrics,
        mut buffer: Box<dyn ReadBuffer>,
        parts: &[CachedPart],
    ) -> io::Result<Box<dyn ReadBuffer>> {
        for (number, directory) in self.directories.iter().enumerate() {
            let in_directory = parts.iter().filter(|part| part.pinned.chunk.slot.directory == number);
            let read_part = |part: &CachedPart| ReadPart {
                range: part.range.clone(),
                offset: part.pinned.chunk.slot.start() + part.offset,
            };
            let parts: Vec<_> = in_directory.map(read_part).collect();
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

    /// Drops chunks that were read with wrong bytes, unless they were fetched again meanwhile.
    pub(in crate::store::object) fn discard_corrupt(&self, metrics: &Metrics, parts: &[CachedPart]) {
        let mut slots = self.slots.lock();
        parts.iter().for_each(|part| slots.remove_if_current(&part.pinned.key, &part.pinned.chunk));
        drop(slots);
        self.update_gauge(metrics);
    }

    /// Drops the chunks `keys`, even if other readers use them.
    pub(in crate::store::object) fn discard(&self, metrics: &Metrics, keys: impl Iterator<Item = ChunkKey>) {
        let mut slots = self.slots.lock();
        keys.for_each(|key| {
            slots.remove(&key);
        });
        drop(slots);
        self.update_gauge(metrics);
    }

    /// Drops the chunks of an incarnation, in batches.
    pub(in crate::store::object) fn purge(&self, metrics: &Metrics, incarnation: u64) {
        while self.slots.lock().purge_batch(incarnation) {}
        self.update_gauge(metrics);
    }

    /// Counts an error of a directory, disables it for a while, and drops its chunks in batches.
    pub(super) fn fail_directory(&self, metrics: &Metrics, directory: usize, error: &io::Error) {
        metrics.cache_failures.inc();
        self.directories[directory].disable(error);
        let mut from = Some(ChunkKey::FIRST);
        while let Some(key) = from {
            from = self.slots.lock().empty_batch(directory, key);
        }
        self.update_gauge(metrics);
    }

    /// Updates the gauge of the used bytes.
    pub(super) fn update_gauge(&self, metrics: &Metrics) {
        metrics.cache_bytes.set(clamped(self.used_bytes()));
    }
}

impl Pinned {
    /// Waits until the chunk is fetched. Returns its size in bytes, or `None` if its disk failed.
    ///
    /// # Errors
    /// The store failed to return the chunk.
    pub(in crate::store) async fn ready(&self, key: &str) -> Result<Option<u64>, StoreError> {
        self.chunk.fetch.outcome(key).await
    }
}
