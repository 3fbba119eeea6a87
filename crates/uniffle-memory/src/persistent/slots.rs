//! Allocator of the numbered slots of a table. It tracks free slots and the chunks of slots that
//! have memory pages. Pure: it never touches the table.
//!
//! A chunk gets pages when its first slot is needed, and loses them when all its slots are free
//! again. The lowest slots are taken first, so that few chunks are in use. Invariant: slots are
//! taken or free only in chunks with pages. The caller repeats [`TableSlots::close_one`], so that
//! few unused chunks keep their pages.

use crate::region::buddy::BlockSet;

/// Size of a chunk, in whole pages. Smaller in tests, to have many chunks.
pub(super) const CHUNK_BYTES: u64 = if cfg!(test) { 4 << 10 } else { 64 << 10 };
/// Number of chunks of each table that are not charged: they are included in the allowance of a
/// process without clients (`budget::memory_plan`).
pub(super) const UNCHARGED_CHUNKS: u64 = if cfg!(test) { 1 } else { 4 };
/// Unused chunks that keep their pages, so that pages are not allocated and freed with every flush.
pub(super) const IDLE_CHUNKS: usize = if cfg!(test) { 0 } else { 2 };

/// Free and taken slots of a table, and the state of its chunks.
#[derive(Debug)]
pub(super) struct TableSlots {
    /// Free slots in chunks with pages.
    free: BlockSet,
    /// Number of taken slots in each chunk that was ever used. `None` for a chunk without pages.
    chunks: Vec<Option<u32>>,
    /// Used chunks without pages.
    without: BlockSet,
    /// Chunks with pages and no taken slot.
    idle: BlockSet,
    idle_chunks: usize,
    resident_chunks: u64,
    taken: u64,
    per_chunk: u32,
    max: u32,
}

impl TableSlots {
    /// Creates an allocator of `max` slots of `slot_bytes`. An earlier process used at most the
    /// first `mark` slots. All slots of chunks for which `has_pages` is true count as taken.
    pub(super) fn new(slot_bytes: u64, max: u32, mark: u32, has_pages: impl Fn(u32) -> bool) -> Self {
        let per_chunk = u32::try_from(CHUNK_BYTES / slot_bytes).unwrap_or(1);
        let chunks_max = max.div_ceil(per_chunk) as usize;
        let mut slots = Self {
            free: BlockSet::new(max as usize),
            chunks: Vec::new(),
            without: BlockSet::new(chunks_max),
            idle: BlockSet::new(chunks_max),
            idle_chunks: 0,
            resident_chunks: 0,
            taken: 0,
            per_chunk,
            max,
        };
        for chunk in 0..mark.min(max).div_ceil(per_chunk) {
            let taken = has_pages(chunk).then(|| slots.len(chunk));
            slots.chunks.push(taken);
            match taken {
                Some(taken) => {
                    slots.taken += u64::from(taken);
                    slots.resident_chunks += 1;
                }
                None => slots.without.insert(chunk as usize),
            }
        }
        slots
    }

    /// Returns the slots of `chunk`.
    pub(super) fn of_chunk(&self, chunk: u32) -> std::ops::Range<u32> {
        let start = chunk * self.per_chunk;
        start..start.saturating_add(self.per_chunk).min(self.max)
    }

    fn len(&self, chunk: u32) -> u32 {
        let of = self.of_chunk(chunk);
        of.end - of.start
    }

    fn chunk_of(&self, slot: u32) -> usize {
        (slot / self.per_chunk) as usize
    }

    /// Returns a number greater than all slots that were ever used.
    pub(super) fn mark(&self) -> u32 {
        let chunks = u32::try_from(self.chunks.len()).unwrap_or(u32::MAX);
        chunks.saturating_mul(self.per_chunk).min(self.max)
    }

    /// Returns whether the chunk of `slot` has pages.
    pub(super) fn has_pages(&self, slot: u32) -> bool {
        slot < self.max && self.chunks.get(self.chunk_of(slot)).is_some_and(Option::is_some)
    }

    /// Returns the chunks with pages.
    pub(super) fn with_pages(&self) -> Vec<u32> {
        let chunks = (0u32..).zip(&self.chunks);
        chunks.filter(|(_, taken)| taken.is_some()).map(|(chunk, _)| chunk).collect()
    }

    /// Returns the bytes of pages that are not paid for, if `more_chunks` further chunks had pages.
    /// Each taken slot has paid for `paid_each` bytes, and [`UNCHARGED_CHUNKS`] cost nothing.
    pub(super) fn unpaid_bytes(&self, more_chunks: u64, paid_each: u64) -> u64 {
        let resident = (self.resident_chunks + more_chunks).saturating_sub(UNCHARGED_CHUNKS) * CHUNK_BYTES;
        resident.saturating_sub(self.taken * paid_each)
    }

    /// Takes the lowest free slot of chunks with pages.
    pub(super) fn take(&mut self) -> Option<u32> {
        let slot = u32::try_from(self.free.first()?).ok()?;
        self.free.remove(slot as usize);
        let chunk = self.chunk_of(slot);
        if let Some(Some(taken)) = self.chunks.get_mut(chunk) {
            if *taken == 0 {
                self.idle.remove(chunk);
                self.idle_chunks -= 1;
            }
            *taken += 1;
            self.taken += 1;
        }
        Some(slot)
    }

    /// Returns the chunk that gets pages next. `None` when all have pages.
    pub(super) fn next_chunk(&self) -> Option<u32> {
        let next = self.without.first().unwrap_or(self.chunks.len());
        u32::try_from(next).ok().filter(|chunk| chunk * self.per_chunk < self.max)
    }

    /// Records that `chunk`, returned by [`TableSlots::next_chunk`], now has zeroed pages.
    pub(super) fn open(&mut self, chunk: u32) {
        let at = chunk as usize;
        match self.chunks.get_mut(at) {
            Some(without) => {
                *without = Some(0);
                self.without.remove(at);
            }
            None => self.chunks.push(Some(0)),
        }
        self.idle.insert(at);
        self.idle_chunks += 1;
        self.resident_chunks += 1;
        self.of_chunk(chunk).for_each(|slot| self.free.insert(slot as usize));
    }

    /// Frees a taken slot that has been zeroed.
    pub(super) fn put(&mut self, slot: u32) {
        let chunk = self.chunk_of(slot);
        let Some(Some(taken)) = self.chunks.get_mut(chunk) else {
            debug_assert!(false, "slot {slot} was never taken");
            return;
        };
        debug_assert!(*taken > 0, "slot {slot} is free twice");
        *taken -= 1;
        self.taken -= 1;
        if *taken == 0 {
            self.idle.insert(chunk);
            self.idle_chunks += 1;
        }
        self.free.insert(slot as usize);
    }

    /// Marks one idle chunk as without pages and returns it. `None` if at most [`IDLE_CHUNKS`] are
    /// idle.
    pub(super) fn close_one(&mut self) -> Option<u32> {
        self.idle_chunks.checked_sub(IDLE_CHUNKS + 1)?;
        let chunk = self.idle.last()?;
        self.idle.remove(chunk);
        self.idle_chunks -= 1;
        self.resident_chunks -= 1;
        self.chunks[chunk] = None;
        self.without.insert(chunk);
        let chunk = u32::try_from(chunk).ok()?;
        self.of_chunk(chunk).for_each(|slot| self.free.remove(slot as usize));
        Some(chunk)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const PER_CHUNK: u32 = 64;

    fn slots(max: u32, mark: u32) -> TableSlots {
        TableSlots::new(CHUNK_BYTES / u64::from(PER_CHUNK), max, mark, |chunk| chunk % 2 == 0)
    }

    #[test]
    fn used_slots_with_pages_are_recovered() {
        let mut found = slots(500, 200);
        assert_eq!((found.with_pages(), found.mark(), found.taken), (vec![0, 2], 256, 128));
        assert!(found.has_pages(0) && !found.has_pages(64) && found.has_pages(128) && !found.has_pages(192));
        assert_eq!((found.take(), found.next_chunk()), (None, Some(1)), "used chunks must come first");
        found.open(1);
        assert_eq!(found.take(), Some(64));
    }

    #[test]
    fn all_slots_are_allocated_with_a_short_last_chunk() {
        let mut slots = slots(100, 0);
        while let Some(chunk) = slots.next_chunk() {
            slots.open(chunk);
        }
        assert_eq!(std::iter::from_fn(|| slots.take()).collect::<Vec<_>>(), (0..100).collect::<Vec<_>>());
        assert_eq!((slots.mark(), slots.unpaid_bytes(0, 64)), (100, 0));
        assert!(slots.has_pages(99) && !slots.has_pages(100), "slot 100 does not exist");
        assert_eq!(slots.unpaid_bytes(0, 0), CHUNK_BYTES, "one of two chunks must be free of charge");
    }

    proptest! {
        #[test]
        fn slots_follow_a_set(steps in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>()), 1..400)) {
            let mut slots = slots(300, 0);
            let mut taken = BTreeSet::new();
            for (takes, index) in steps {
                if takes {
                    let slot = slots.take().or_else(|| {
                        let chunk = slots.next_chunk()?;
                        slots.open(chunk);
                        slots.take()
                    });
                    prop_assert_eq!(slot.is_some(), taken.len() < 300);
                    prop_assert!(slot.is_none_or(|slot| taken.insert(slot)));
                } else if !taken.is_empty() {
                    let slot = *index.get(&taken.iter().copied().collect::<Vec<_>>());
                    taken.remove(&slot);
                    slots.put(slot);
                    while slots.close_one().is_some() {}
                }
                let chunks: BTreeSet<u32> = taken.iter().map(|slot| slot / PER_CHUNK).collect();
                let with_pages: BTreeSet<u32> = slots.with_pages().into_iter().collect();
                prop_assert!(with_pages.is_superset(&chunks), "taken slots must have pages");
                prop_assert!(with_pages.len() <= chunks.len() + IDLE_CHUNKS + 1, "too many idle chunks have pages");
                let resident = (with_pages.len() as u64).saturating_sub(UNCHARGED_CHUNKS) * CHUNK_BYTES;
                prop_assert_eq!(slots.unpaid_bytes(0, 64), resident.saturating_sub(64 * taken.len() as u64));
            }
        }
    }
}
