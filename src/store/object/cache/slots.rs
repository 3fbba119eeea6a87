//! Assigns slots to chunks. Eviction takes the least recently used chunk, but never one that is
//! being read or fetched.
//!
//! A slot is a range of [`CHUNK_BYTES`] in the file of a directory. It is free when its last holder
//! drops it, so a chunk that is dropped during a read does not free its slot before the read ends.
//! One task fetches a chunk, and all its readers wait for the same outcome. Does no I/O.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use lru::LruCache;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::store::object::circuit_breaker::copy_of;
use crate::store::{StoreError, StoreErrorKind};
use uniffle_base::budget::{Budget, Charge};

/// Size of a chunk. Chunks begin at multiples of it in their object.
pub(in crate::store::object) const CHUNK_BYTES: u64 = 2 << 20;

/// Heap of a cached chunk: two tree entries, the slot and the waiting readers.
pub(super) const ENTRY_BYTES: u64 = 512;

/// Number of least recently used chunks examined to find one that nobody holds.
const LOOKED_AT: usize = 64;

/// Largest number of chunks dropped under one lock, because readers wait for the lock meanwhile.
const PURGED_AT_ONCE: usize = 128;

/// Number of chunks remembered because a reader needed them and they got no slot.
const WANTED_MAX: NonZeroUsize = NonZeroUsize::new(4096).unwrap();

/// In a full cache, a chunk replaces another only if a reader needs at least this fraction of it,
/// or if it is needed for the second time.
const WANTED_DIVISOR: u64 = 4;

/// Largest number of chunks examined under one lock to empty a directory.
const EMPTIED_AT_ONCE: usize = 128;

/// Identifies a chunk of an object. Ordered by incarnation, so that the chunks of a shuffle are a
/// range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(in crate::store::object) struct ChunkKey {
    pub(in crate::store) incarnation: u64,
    pub(in crate::store::object) segment: u32,
    pub(in crate::store) number: u32,
}

impl ChunkKey {
    /// The smallest key.
    pub(super) const FIRST: Self = Self { incarnation: 0, segment: 0, number: 0 };

    /// Returns the chunk's offset in its object.
    pub(in crate::store) fn start(&self) -> u64 {
        u64::from(self.number) * CHUNK_BYTES
    }
}

/// Allocator of the slots of one directory.
#[derive(Debug)]
pub(super) struct SlotAllocator {
    state: Mutex<Free>,
    max: u32,
}

#[derive(Debug)]
struct Free {
    /// Numbers of slots that were freed.
    returned: Vec<u32>,
    /// Lowest number that was never allocated.
    next: u32,
}

impl SlotAllocator {
    pub(super) fn new(max: u32) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(Free { returned: Vec::new(), next: 0 }), max })
    }

    fn free(&self) -> u32 {
        let state = self.state.lock();
        self.max - state.next + u32::try_from(state.returned.len()).unwrap_or(0)
    }

    fn take(self: &Arc<Self>, directory: usize) -> Option<CacheSlot> {
        let number = {
            let mut state = self.state.lock();
            let fresh = (state.next < self.max).then_some(state.next);
            let number = state.returned.pop().or(fresh)?;
            state.next = state.next.max(number + 1);
            number
        };
        Some(CacheSlot {
            directory,
            number,
            allocator: Arc::clone(self),
            is_abandoned: AtomicBool::new(false),
        })
    }
}

/// An allocated slot. It is free again on drop, unless it was abandoned.
#[derive(Debug)]
pub(super) struct CacheSlot {
    pub(super) directory: usize,
    number: u32,
    allocator: Arc<SlotAllocator>,
    is_abandoned: AtomicBool,
}

impl CacheSlot {
    /// Returns the slot's offset in its file.
    pub(super) fn start(&self) -> u64 {
        u64::from(self.number) * CHUNK_BYTES
    }

    /// Excludes the slot from reuse, because a write that timed out may still reach it.
    pub(super) fn abandon(&self) {
        self.is_abandoned.store(true, Ordering::Relaxed);
    }
}

impl Drop for CacheSlot {
    fn drop(&mut self) {
        if !self.is_abandoned.load(Ordering::Relaxed) {
            self.allocator.state.lock().returned.push(self.number);
        }
    }
}

/// The slot of a chunk, and the outcome of its fetch.
#[derive(Debug, Clone)]
pub(super) struct CachedChunk {
    pub(super) slot: Arc<CacheSlot>,
    pub(super) fetch: FetchReceiver,
}

#[derive(Debug)]
struct CacheEntry {
    held: CachedChunk,
    used_at: u64,
    _charge: Charge,
}

/// Result of a lookup.
#[derive(Debug)]
pub(super) enum SlotLookup {
    /// The chunk is cached or being fetched.
    Known(CachedChunk),
    /// The chunk has got a slot, and the caller fetches it.
    Fetch(CachedChunk, FetchSender),
    /// The chunk gets no slot.
    Bypass,
}

/// Table of cached chunks, by key and by last use, with the slot allocators of the directories.
#[derive(Debug)]
pub(super) struct Slots {
    allocators: Vec<Arc<SlotAllocator>>,
    entries: BTreeMap<ChunkKey, CacheEntry>,
    by_use: BTreeMap<u64, ChunkKey>,
    uses: u64,
    wanted: LruCache<ChunkKey, ()>,
    heap: Budget,
}

impl Slots {
    pub(super) fn new(allocators: Vec<Arc<SlotAllocator>>, heap: &Budget) -> Self {
        Self {
            allocators,
            entries: BTreeMap::new(),
            by_use: BTreeMap::new(),
            uses: 0,
            wanted: LruCache::new(WANTED_MAX),
            heap: heap.clone(),
        }
    }

    /// Finds a chunk of which a reader needs `bytes` bytes. A missing chunk gets a free slot of a
    /// directory for which `is_enabled` returns true. If there is none, it replaces another chunk
    /// if `bytes` is a large part of it, or if it was needed before.
    pub(super) fn find_or_reserve(
        &mut self,
        key: ChunkKey,
        bytes: u64,
        is_enabled: impl Fn(usize) -> bool,
    ) -> SlotLookup {
        self.uses += 1;
        // The next reader retries a failed fetch.
        if self.entries.get(&key).is_some_and(|entry| entry.held.fetch.has_failed()) {
            self.remove(&key);
        }
        if let Some(entry) = self.entries.get_mut(&key) {
            self.by_use.remove(&entry.used_at);
            entry.used_at = self.uses;
            self.by_use.insert(self.uses, key);
            return SlotLookup::Known(entry.held.clone());
        }
        let is_worth_it = bytes >= CHUNK_BYTES / WANTED_DIVISOR || self.wanted.contains(&key);
        let slot = match self.take(&is_enabled) {
            Some(slot) => Some(slot),
            None if is_worth_it && self.make_room(&is_enabled) => self.take(&is_enabled),
            None => None,
        };
        let Some(slot) = slot else {
            self.wanted.put(key, ());
            return SlotLookup::Bypass;
        };
        self.wanted.pop(&key);
        let (sender, fetch) = FetchReceiver::new();
        let held = CachedChunk { slot: Arc::new(slot), fetch };
        let _charge = self.heap.charge_unchecked(ENTRY_BYTES);
        self.entries.insert(key, CacheEntry { held: held.clone(), used_at: self.uses, _charge });
        self.by_use.insert(self.uses, key);
        SlotLookup::Fetch(held, sender)
    }

    /// Allocates a slot in the enabled directory with the most free slots.
    fn take(&self, is_enabled: &impl Fn(usize) -> bool) -> Option<CacheSlot> {
        let usable = self.allocators.iter().enumerate().filter(|(number, _)| is_enabled(*number));
        let (number, allocator) = usable.max_by_key(|(_, allocator)| allocator.free())?;
        allocator.take(number)
    }

    fn make_room(&mut self, is_enabled: &impl Fn(usize) -> bool) -> bool {
        let is_idle = |key: &&ChunkKey| {
            let held = self.entries.get(key).map(|entry| &entry.held);
            held.is_some_and(|held| Arc::strong_count(&held.slot) == 1 && is_enabled(held.slot.directory))
        };
        let idle = self.by_use.values().take(LOOKED_AT).find(is_idle).copied();
        idle.is_some_and(|key| self.remove(&key))
    }

    /// Drops a chunk. Returns whether it existed.
    pub(super) fn remove(&mut self, key: &ChunkKey) -> bool {
        let removed = self.entries.remove(key);
        removed.is_some_and(|entry| self.by_use.remove(&entry.used_at).is_some())
    }

    /// Drops a chunk if it still has the slot of `held`.
    pub(super) fn remove_if_current(&mut self, key: &ChunkKey, held: &CachedChunk) {
        let entry = self.entries.get(key);
        if entry.is_some_and(|entry| Arc::ptr_eq(&entry.held.slot, &held.slot)) {
            self.remove(key);
        }
    }

    /// Drops at most [`PURGED_AT_ONCE`] chunks of an incarnation. Returns whether there may be
    /// more.
    pub(super) fn purge_batch(&mut self, incarnation: u64) -> bool {
        let key = |segment, number| ChunkKey { incarnation, segment, number };
        let all = key(0, 0)..=key(u32::MAX, u32::MAX);
        let some = self.entries.range(all).take(PURGED_AT_ONCE);
        let keys: Vec<_> = some.map(|(key, _)| *key).collect();
        for key in &keys {
            self.remove(key);
        }
        keys.len() == PURGED_AT_ONCE
    }

    /// Examines [`EMPTIED_AT_ONCE`] chunks from `from` on, and drops the chunks of `directory`.
    /// Returns the chunk to continue with, if there are more.
    pub(super) fn empty_batch(&mut self, directory: usize, from: ChunkKey) -> Option<ChunkKey> {
        let some = self.entries.range(from..).take(EMPTIED_AT_ONCE + 1);
        let mut some: Vec<_> = some.map(|(key, entry)| (*key, entry.held.slot.directory)).collect();
        let next = some.get(EMPTIED_AT_ONCE).map(|(key, _)| *key);
        some.truncate(EMPTIED_AT_ONCE);
        for (key, _) in some.iter().filter(|(_, of)| *of == directory) {
            self.remove(key);
        }
        next
    }

    /// Returns the number of chunks.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }
}

/// Outcome of a fetch.
#[derive(Debug)]
pub(super) enum FetchOutcome {
    /// The slot has the whole chunk, of this many bytes.
    Whole(u64),
    /// The store failed to return the chunk.
    StoreFailed(StoreError),
    /// The disk failed to store the chunk.
    DiskFailed,
}

/// Reports the outcome of a fetch. If dropped before that, as by a cancelled task, readers get an
/// error.
pub(super) type FetchSender = watch::Sender<Option<FetchOutcome>>;

/// Receives the outcome of a fetch, `None` until the fetch ends.
#[derive(Debug, Clone)]
pub(super) struct FetchReceiver(watch::Receiver<Option<FetchOutcome>>);

impl FetchReceiver {
    pub(super) fn new() -> (FetchSender, Self) {
        let (sender, outcome) = watch::channel(None);
        (sender, Self(outcome))
    }

    /// Waits for the outcome. Returns the chunk's size in bytes, or `None` if its disk failed.
    ///
    /// # Errors
    /// The store failed to return the chunk, or the fetch was cancelled.
    pub(super) async fn outcome(&self, key: &str) -> Result<Option<u64>, StoreError> {
        let mut outcome = self.0.clone();
        let outcome = outcome.wait_for(Option::is_some).await;
        match outcome.as_deref() {
            Ok(Some(FetchOutcome::Whole(bytes))) => Ok(Some(*bytes)),
            Ok(Some(FetchOutcome::DiskFailed)) => Ok(None),
            Ok(Some(FetchOutcome::StoreFailed(error))) => Err(copy_of(error)),
            Ok(None) | Err(_) => Err(StoreError::new(StoreErrorKind::Unhealthy, key)),
        }
    }

    /// Returns whether the fetch has ended without a chunk in the slot.
    pub(super) fn has_failed(&self) -> bool {
        // Looked at first: the outcome of a fetch that has ended does not change.
        let has_ended = self.0.has_changed().is_err();
        match *self.0.borrow() {
            None => has_ended,
            Some(FetchOutcome::Whole(_)) => false,
            Some(FetchOutcome::StoreFailed(_) | FetchOutcome::DiskFailed) => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn outcome(held: CachedChunk, sender: &FetchSender) -> CachedChunk {
        sender.send_replace(Some(FetchOutcome::Whole(CHUNK_BYTES)));
        held
    }

    fn key(number: u32) -> ChunkKey {
        ChunkKey { incarnation: 1, segment: number / 4, number }
    }

    fn slots(budget: &Budget, max: u32) -> Slots {
        Slots::new(vec![SlotAllocator::new(max / 2), SlotAllocator::new(max - max / 2)], budget)
    }

    fn fetch(slots: &mut Slots, number: u32) -> CachedChunk {
        match slots.find_or_reserve(key(number), CHUNK_BYTES, |_| true) {
            SlotLookup::Fetch(held, sender) => outcome(held, &sender),
            other => panic!("{number}: {other:?}"),
        }
    }

    #[test]
    fn least_recently_used_chunk_is_evicted_unless_read() {
        let budget = Budget::new(u64::MAX);
        let mut slots = slots(&budget, 4);
        let read = fetch(&mut slots, 0);
        (1..4).for_each(|number| drop(fetch(&mut slots, number)));
        assert!(matches!(slots.find_or_reserve(key(1), 1, |_| true), SlotLookup::Known(_)));
        drop(fetch(&mut slots, 4));
        assert!(
            matches!(slots.find_or_reserve(key(1), 1, |_| true), SlotLookup::Known(_)),
            "chunk 2 must be evicted first"
        );
        assert!(
            matches!(slots.find_or_reserve(key(0), 1, |_| true), SlotLookup::Known(_)),
            "a chunk that is being read must not be evicted"
        );
        assert_eq!(budget.used(), 4 * ENTRY_BYTES);
        slots.purge_batch(1);
        assert_eq!((slots.len(), budget.used()), (0, 0));
        let free: u32 = slots.allocators.iter().map(|allocator| allocator.free()).sum();
        assert_eq!(free, 3, "one chunk is still being read");
        drop(read);
        let free: u32 = slots.allocators.iter().map(|allocator| allocator.free()).sum();
        assert_eq!(free, 4);
    }

    #[test]
    fn chunk_of_a_cancelled_fetch_is_fetched_again() {
        let mut slots = slots(&Budget::new(u64::MAX), 4);
        let SlotLookup::Fetch(_, sender) = slots.find_or_reserve(key(0), 1, |_| true) else {
            panic!("expected a fetch of the new chunk")
        };
        assert!(
            matches!(slots.find_or_reserve(key(0), 1, |_| true), SlotLookup::Known(_)),
            "a chunk that is being fetched must not be fetched again"
        );
        drop(sender);
        assert!(matches!(slots.find_or_reserve(key(0), 1, |_| true), SlotLookup::Fetch(..)));
    }

    #[test]
    fn chunks_of_a_registration_are_dropped_in_batches() {
        let mut slots = slots(&Budget::new(u64::MAX), 300);
        (0..200).for_each(|number| drop(fetch(&mut slots, number)));
        assert!(slots.purge_batch(1) && slots.len() == 200 - PURGED_AT_ONCE);
        assert!(!slots.purge_batch(1) && slots.len() == 0);
    }

    #[test]
    fn full_cache_admits_repeated_or_large_reads() {
        let mut slots = slots(&Budget::new(u64::MAX), 2);
        (0..2).for_each(|number| drop(fetch(&mut slots, number)));
        assert!(
            matches!(slots.find_or_reserve(key(5), 1000, |_| true), SlotLookup::Bypass),
            "the first read of a small part must not be admitted"
        );
        assert!(
            matches!(slots.find_or_reserve(key(5), 1000, |_| true), SlotLookup::Fetch(..)),
            "the second read of a chunk must be admitted"
        );
        assert!(
            matches!(slots.find_or_reserve(key(6), CHUNK_BYTES / 4, |_| true), SlotLookup::Fetch(..)),
            "a read of a large part of the chunk must be admitted"
        );
    }

    #[test]
    fn failed_cache_directory_is_emptied_and_unused() {
        let mut slots = slots(&Budget::new(u64::MAX), 4);
        let first = fetch(&mut slots, 0);
        let failing = first.slot.directory;
        assert!(slots.empty_batch(failing, ChunkKey::FIRST).is_none());
        first.slot.abandon();
        drop(first);
        let is_enabled = |directory| directory != failing;
        for number in 1..6 {
            match slots.find_or_reserve(key(number), CHUNK_BYTES, is_enabled) {
                SlotLookup::Fetch(held, _) => assert_ne!(held.slot.directory, failing),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(
            (slots.len(), slots.allocators[failing].free()),
            (2, 1),
            "a late write may still reach the abandoned slot"
        );
    }

    #[test]
    fn cache_directory_is_emptied_in_batches() {
        let mut slots = slots(&Budget::new(u64::MAX), 400);
        (0..300).for_each(|number| drop(fetch(&mut slots, number)));
        let of = |slots: &Slots, directory: usize| {
            slots.entries.values().filter(|entry| entry.held.slot.directory == directory).count()
        };
        let others = of(&slots, 1);
        let (mut from, mut remaining) = (ChunkKey::FIRST, slots.len());
        while let Some(next) = slots.empty_batch(0, from) {
            assert!(remaining - slots.len() <= EMPTIED_AT_ONCE);
            (from, remaining) = (next, slots.len());
        }
        assert_eq!((of(&slots, 0), of(&slots, 1)), (0, others));
    }

    proptest! {
        #[test]
        fn slots_are_unique_and_never_lost(
            steps in prop::collection::vec((0u32..12, 0u8..5, any::<prop::sample::Index>()), 1..150),
        ) {
            let budget = Budget::new(u64::MAX);
            let mut slots = slots(&budget, 5);
            let mut held: Vec<(u32, CachedChunk)> = Vec::new();
            for (number, what, at) in steps {
                match what {
                    0 if !held.is_empty() => drop(held.swap_remove(at.index(held.len()))),
                    1 => {
                        slots.remove(&key(number));
                    }
                    _ => match slots.find_or_reserve(key(number), CHUNK_BYTES, |_| true) {
                        SlotLookup::Known(it) => held.push((number, it)),
                        SlotLookup::Fetch(it, sender) => held.push((number, outcome(it, &sender))),
                        SlotLookup::Bypass => {}
                    },
                }
                let slot = |it: &CachedChunk| (it.slot.directory, it.slot.number);
                for (number, it) in &held {
                    let others = held.iter().filter(|(other, that)| other != number && slot(that) == slot(it));
                    prop_assert_eq!(others.count(), 0);
                }
                prop_assert_eq!(slots.by_use.len(), slots.len());
                prop_assert_eq!(budget.used(), slots.len() as u64 * ENTRY_BYTES);
            }
            drop(held);
            slots.purge_batch(1);
            prop_assert_eq!(slots.allocators.iter().map(|allocator| allocator.free()).sum::<u32>(), 5);
        }
    }
}
