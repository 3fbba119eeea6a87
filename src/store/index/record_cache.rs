//! A least recently used cache of index records of published extents, bounded by bytes.
//!
//! The records of an extent never change. An entry is removed by eviction, or when its extent is
//! purged, lost or offloaded. Records are stored verified, with offsets relative to their extent.
//! Writers add the records that they have just published, so indexes of a small job need no disk
//! read.

use bytes::Bytes;
use lru::LruCache;
use parking_lot::Mutex;

/// Memory of an entry besides its records: key, list links, table slot and the `Bytes` itself.
const ENTRY_BYTES: u64 = 160;

/// Maximum number of entries that one call removes, because it may run on a runtime thread. Only
/// calls for purged shuffles pass more keys. Incarnations are not reused, so the remaining entries
/// are never looked up again. They become the least recently used and are evicted.
const REMOVALS_PER_CALL_MAX: usize = 16 << 10;

/// Key of an extent's records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::store) struct RecordsKey {
    pub(in crate::store) incarnation: u64,
    /// Number of the shuffle's log or object. Each tier has its own cache, so the two kinds of
    /// numbers do not collide.
    pub(in crate::store) log: u32,
    /// Offset of the records in the log or object.
    pub(in crate::store) offset: u64,
}

/// A least recently used cache of index records, bounded by their bytes.
#[derive(Debug)]
pub(in crate::store) struct RecordCache {
    capacity_bytes: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    entries: LruCache<RecordsKey, Bytes>,
    used_bytes: u64,
}

fn cost(records: &Bytes) -> u64 {
    records.len() as u64 + ENTRY_BYTES
}

impl RecordCache {
    pub(in crate::store) fn new(capacity_bytes: u64) -> Self {
        let state = State { entries: LruCache::unbounded(), used_bytes: 0 };
        Self { capacity_bytes, state: Mutex::new(state) }
    }

    /// Returns the records of an extent, and marks them as used.
    pub(in crate::store) fn get(&self, key: &RecordsKey) -> Option<Bytes> {
        self.state.lock().entries.get(key).cloned()
    }

    /// Returns whether the cache accepts `records_bytes` bytes of records. More than an eighth of
    /// the capacity would evict too many others.
    pub(in crate::store) fn admits(&self, records_bytes: usize) -> bool {
        records_bytes as u64 + ENTRY_BYTES <= self.capacity_bytes / 8
    }

    /// Caches records that own their memory, if [admitted](Self::admits), and evicts others if
    /// needed. A slice would keep its whole buffer alive.
    pub(in crate::store) fn insert(&self, key: RecordsKey, records: Bytes) {
        let added = cost(&records);
        if !self.admits(records.len()) {
            return;
        }
        let mut evicted = Vec::new();
        let mut state = self.state.lock();
        state.used_bytes += added;
        if let Some(replaced) = state.entries.put(key, records) {
            state.used_bytes -= cost(&replaced);
        }
        while state.used_bytes > self.capacity_bytes {
            let Some((_, records)) = state.entries.pop_lru() else { break };
            state.used_bytes -= cost(&records);
            evicted.push(records);
        }
        drop(state);
        drop(evicted); // Freed outside the lock.
    }

    /// Drops the records of removed extents, at most [`REMOVALS_PER_CALL_MAX`].
    pub(in crate::store) fn remove(&self, keys: impl Iterator<Item = RecordsKey>) {
        // Locks once per key: a purge of a million extents must not block all readers.
        for key in keys.take(REMOVALS_PER_CALL_MAX) {
            let mut state = self.state.lock();
            if let Some(records) = state.entries.pop(&key) {
                state.used_bytes -= cost(&records);
            }
        }
    }

    /// Returns the memory of all entries.
    pub(in crate::store) fn used_bytes(&self) -> u64 {
        self.state.lock().used_bytes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(offset: u64) -> RecordsKey {
        RecordsKey { incarnation: 1, log: 0, offset }
    }

    #[test]
    fn least_recently_used_is_evicted() {
        let cache = RecordCache::new(8 * (40 + ENTRY_BYTES));
        for n in 0..8 {
            cache.insert(key(n), Bytes::from(vec![1; 40]));
        }
        assert!(cache.get(&key(0)).is_some());
        cache.insert(key(8), Bytes::from(vec![1; 40]));
        assert!(cache.get(&key(0)).is_some() && cache.get(&key(1)).is_none());
        cache.remove((0..9).map(key));
        assert_eq!(cache.used_bytes(), 0);
        cache.insert(key(1), Bytes::from(vec![1; 400]));
        assert!(cache.get(&key(1)).is_none(), "a large extent must not evict all others");
    }

    #[test]
    fn removal_is_bounded_per_call() {
        let limit = REMOVALS_PER_CALL_MAX as u64;
        let cache = RecordCache::new((limit + 10) * (40 + ENTRY_BYTES));
        (0..limit + 10).for_each(|n| cache.insert(key(n), Bytes::from(vec![1; 40])));
        cache.remove((0..u64::MAX).map(key));
        assert_eq!(cache.used_bytes(), 10 * (40 + ENTRY_BYTES));
        (0..limit + 10)
            .for_each(|n| cache.insert(RecordsKey { incarnation: 2, ..key(n) }, Bytes::from(vec![1; 40])));
        assert!((limit..limit + 10).all(|n| cache.get(&key(n)).is_none()));
    }

    proptest! {
        #[test]
        fn used_bytes_match_entries_below_capacity(
            steps in prop::collection::vec((0u64..12, 0usize..300, any::<bool>()), 0..200),
        ) {
            let cache = RecordCache::new(2000);
            for (offset, len, is_removal) in steps {
                if is_removal {
                    cache.remove(std::iter::once(key(offset)));
                } else {
                    cache.insert(key(offset), Bytes::from(vec![7; len]));
                }
                let state = cache.state.lock();
                let sum: u64 = state.entries.iter().map(|(_, records)| cost(records)).sum();
                prop_assert_eq!(sum, state.used_bytes);
                prop_assert!(state.used_bytes <= cache.capacity_bytes);
            }
        }
    }
}
