//! The extents of a partition: a list that grows at its end and is taken from at its beginning, and of which a copy costs little.
//!
//! A reader keeps the list as it was when it began. Of a partition of a job of many TB that is a long one, so chunks that are
//! full are shared by all copies: a copy takes an eighth of a byte per extent and one chunk, not 40 bytes per extent.

use std::sync::Arc;

use super::extent::Extent;

/// Extents in a chunk: as many as fit into a size that allocators have, with the two counts of its `Arc`.
const CHUNK: usize = 63;
const CHUNK_BYTES: u64 = 2560;

const _: () = assert!((size_of::<[Extent; CHUNK]>() + 2 * size_of::<usize>()) as u64 <= CHUNK_BYTES);

/// Heap of a place for one extent, with what an allocator whose sizes are a quarter apart rounds up to.
pub(super) const PLACE_BYTES: u64 = size_of::<Extent>() as u64 * 5 / 4;

/// Full chunks, which copies share, and the last one, which each copy has of its own.
#[derive(Debug, Clone, Default)]
pub(super) struct ExtentList {
    /// Most partitions have none.
    full: Option<Box<FullChunks>>,
    /// Fewer than a chunk.
    open: Vec<Extent>,
}

#[derive(Debug, Clone, Default)]
struct FullChunks {
    chunks: Vec<Arc<[Extent; CHUNK]>>,
    /// So many of the first chunk are not in the list any more.
    skipped: usize,
}

impl ExtentList {
    fn chunks(&self) -> &[Arc<[Extent; CHUNK]>] {
        self.full.as_ref().map_or(&[], |full| &full.chunks)
    }

    fn skipped(&self) -> usize {
        self.full.as_ref().map_or(0, |full| full.skipped)
    }

    pub(super) fn len(&self) -> usize {
        self.chunks().len() * CHUNK - self.skipped() + self.open.len()
    }

    /// Appends an extent.
    pub(super) fn push(&mut self, extent: Extent) {
        if self.open.len() == self.open.capacity() {
            // Most partitions of a large shuffle get no second one.
            let more = if self.len() == 0 { 1 } else { self.open.len().max(3).min(CHUNK - self.open.len()) };
            self.open.reserve_exact(more);
        }
        self.open.push(extent);
        if let Ok(chunk) = <[Extent; CHUNK]>::try_from(self.open.as_slice()) {
            self.full.get_or_insert_default().chunks.push(Arc::new(chunk));
            self.open = Vec::new();
        }
    }

    pub(super) fn get(&self, at: usize) -> Option<&Extent> {
        let at = at + self.skipped();
        match self.chunks().get(at / CHUNK) {
            Some(chunk) => chunk.get(at % CHUNK),
            None => self.open.get(at - self.chunks().len() * CHUNK),
        }
    }

    /// Copies that were made keep what they have.
    pub(super) fn get_mut(&mut self, at: usize) -> Option<&mut Extent> {
        let (at, full) = (at + self.skipped(), self.chunks().len());
        match self.full.as_mut().and_then(|full| full.chunks.get_mut(at / CHUNK)) {
            Some(chunk) => Arc::make_mut(chunk).get_mut(at % CHUNK),
            None => self.open.get_mut(at - full * CHUNK),
        }
    }

    /// All from number `at` on.
    pub(super) fn iter_from(&self, at: usize) -> impl Iterator<Item = &Extent> + Clone {
        (at..self.len()).filter_map(|at| self.get(at))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Extent> + Clone {
        self.iter_from(0)
    }

    /// Takes out the first `count`. What stays in full chunks is not copied.
    pub(super) fn drop_first(&mut self, count: usize) {
        if count == 0 {
            return;
        }
        let at = self.skipped() + count;
        match &mut self.full {
            Some(full) if at / CHUNK < full.chunks.len() => {
                full.chunks.drain(..at / CHUNK);
                full.chunks.shrink_to_fit();
                full.skipped = at % CHUNK;
            }
            _ => {
                let of_open = at - self.chunks().len() * CHUNK;
                self.open = self.open.split_off(of_open.min(self.open.len()));
                self.full = None;
            }
        }
    }

    /// The number of the first extent that does not end at or before `offset` of the stream.
    pub(super) fn after(&self, offset: u64) -> usize {
        let is_before = |extent: &Extent| extent.base + extent.length <= offset;
        let full = self.chunks().partition_point(|chunk| chunk.last().is_some_and(is_before));
        let rest = self.chunks().get(full).map_or(self.open.as_slice(), |chunk| chunk.as_slice());
        (full * CHUNK + rest.partition_point(is_before)).saturating_sub(self.skipped())
    }

    /// The number of the extent that begins at `base`.
    pub(super) fn beginning_at(&self, base: u64) -> Option<usize> {
        let at = self.after(base);
        self.get(at).filter(|extent| extent.base == base).map(|_| at)
    }

    /// What it takes of the heap.
    pub(super) fn heap_bytes(&self) -> u64 {
        let chunks = self.full.as_ref().map_or(0, |full| {
            let table = size_of::<FullChunks>() + full.chunks.capacity() * size_of::<usize>();
            full.chunks.len() as u64 * CHUNK_BYTES + table as u64 * 5 / 4
        });
        chunks + self.open.capacity() as u64 * PLACE_BYTES
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn list(count: u64) -> ExtentList {
        let mut list = ExtentList::default();
        (0..count).for_each(|at| list.push(Extent::gap(10 * at, 10)));
        list
    }

    #[test]
    fn a_copy_is_what_the_list_was() {
        let mut list = list(200);
        let copy = list.clone();
        assert!(copy.chunks().iter().zip(list.chunks()).all(|(one, other)| Arc::ptr_eq(one, other)));
        list.get_mut(70).unwrap().blocks = 7;
        list.push(Extent::gap(2000, 10));
        assert_eq!((list.len(), list.get(70).unwrap().blocks), (201, 7));
        assert_eq!((copy.len(), copy.get(70).unwrap().blocks, copy.get(200).is_none()), (200, 1, true));
    }

    #[test]
    fn what_stays_behind_the_first_is_not_copied() {
        let mut list = list(200);
        let copy = list.clone();
        for (count, chunks_gone) in [(0, 0), (70, 1), (50, 1), (10, 2)] {
            list.drop_first(count);
            let stay = list.chunks().iter().zip(&copy.chunks()[chunks_gone..]);
            assert!(
                stay.len() == 3 - chunks_gone && stay.clone().all(|(one, other)| Arc::ptr_eq(one, other))
            );
        }
        assert_eq!((list.len(), list.get(0).unwrap().base, copy.len()), (70, 1300, 200));
        list.drop_first(60);
        assert!(list.full.is_none() && list.open.capacity() == 10);
        assert_eq!((list.len(), list.get(0).unwrap().base), (10, 1900));
    }

    #[cfg(feature = "jemalloc")]
    #[test]
    fn d12_lists_of_extents_take_no_more_heap_than_they_are_charged() {
        use tikv_jemalloc_ctl::thread::{allocatedp, deallocatedp};
        let held = || allocatedp::read().unwrap().get().wrapping_sub(deallocatedp::read().unwrap().get());
        for count in [1, 2, 5, 30, 62, 63, 64, 100, 1000, 100_000] {
            let before = held();
            let list = list(count);
            let (held, charged) = (held().wrapping_sub(before), list.heap_bytes());
            assert!(held <= charged && charged <= held * 5 / 4, "{count}: {held} held, {charged} charged");
            assert!(count < 1000 || charged <= 42 * count, "{count}: {charged} charged");
        }
    }

    proptest! {
        #[test]
        fn it_is_a_list(
            lengths in prop::collection::vec(1u64..9, 0..400),
            drops in prop::collection::hash_map(0usize..400, 0usize..200, 0..4),
            offset in 0u64..2000,
        ) {
            let (mut list, mut base, mut all) = (ExtentList::default(), 0, Vec::new());
            for (number, length) in lengths.into_iter().enumerate() {
                list.push(Extent::gap(base, length));
                all.push((base, length));
                base += length;
                let first = drops.get(&number).map_or(0, |count| (*count).min(all.len()));
                list.drop_first(first);
                all.drain(..first);
            }
            let told: Vec<_> = list.iter().map(|it| (it.base, it.length)).collect();
            prop_assert_eq!((told.len(), &told), (list.len(), &all));
            let after = all.partition_point(|(base, length)| base + length <= offset);
            prop_assert_eq!(list.after(offset), after);
            prop_assert_eq!(list.beginning_at(offset), all.iter().position(|it| it.0 == offset));
            prop_assert_eq!(list.iter_from(after).count(), all.len() - after);
            prop_assert!(list.get(all.len()).is_none() && list.get_mut(all.len()).is_none());
        }
    }
}
