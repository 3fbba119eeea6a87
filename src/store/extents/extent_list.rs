//! The extents of a partition: a list that grows at the end and is cheap to copy.
//!
//! A reader keeps the list as it was when the read began. A partition of a job of many TB has a
//! long one, so copies share all full chunks. A copy costs an eighth of a byte per extent and one
//! chunk, not about 40 bytes per extent. A reader of a range only copies that range
//! ([`ChunkedList::part`]).

use std::sync::Arc;

use uniffle_base::budget::Charge;

/// A piece of a partition's stream.
pub(in crate::store) trait InStream: Copy {
    /// Returns the offset at which the piece begins.
    fn base(&self) -> u64;
    /// Returns the offset at which the next piece begins.
    fn end(&self) -> u64;
}

/// Heap size of a full chunk: a size class of common allocators.
const CHUNK_BYTES: usize = 2560;

/// Returns the number of extents that fit in a chunk with the two counts of its `Arc`.
pub(super) const fn chunk_of<T>() -> usize {
    (CHUNK_BYTES - 2 * size_of::<usize>()) / size_of::<T>()
}

/// A list of full chunks, which copies share, and an open chunk, which each copy owns. `CHUNK` is
/// [`chunk_of`] the type of the extents.
#[derive(Debug, Clone)]
pub(in crate::store) struct ChunkedList<T, const CHUNK: usize> {
    /// Full chunks. Most partitions have none.
    #[expect(clippy::box_collection, reason = "one word for each of many partitions")]
    full: Option<Box<Vec<Arc<[T; CHUNK]>>>>,
    /// Extents of the open chunk, fewer than `CHUNK`.
    open: Vec<T>,
}

impl<T, const CHUNK: usize> Default for ChunkedList<T, CHUNK> {
    fn default() -> Self {
        Self { full: None, open: Vec::new() }
    }
}

impl<T: InStream, const CHUNK: usize> ChunkedList<T, CHUNK> {
    /// Heap size of a place for one extent, including the rounding of an allocator whose size
    /// classes are a quarter apart.
    pub(super) const PLACE_BYTES: u64 = size_of::<T>() as u64 * 5 / 4;

    fn chunks(&self) -> &[Arc<[T; CHUNK]>] {
        self.full.as_ref().map_or(&[], |full| full)
    }

    pub(in crate::store) fn len(&self) -> usize {
        self.chunks().len() * CHUNK + self.open.len()
    }

    /// Appends an extent.
    pub(in crate::store) fn push(&mut self, extent: T) {
        if self.open.len() == self.open.capacity() {
            // Most partitions of a large shuffle get no second extent.
            let more = if self.len() == 0 { 1 } else { self.open.len().max(3).min(CHUNK - self.open.len()) };
            self.open.reserve_exact(more);
        }
        self.open.push(extent);
        if let Ok(chunk) = <[T; CHUNK]>::try_from(self.open.as_slice()) {
            self.full.get_or_insert_default().push(Arc::new(chunk));
            self.open = Vec::new();
        }
    }

    pub(in crate::store) fn get(&self, at: usize) -> Option<&T> {
        match self.chunks().get(at / CHUNK) {
            Some(chunk) => chunk.get(at % CHUNK),
            None => self.open.get(at - self.chunks().len() * CHUNK),
        }
    }

    /// Returns an extent for modification. Existing copies of the list do not change.
    pub(in crate::store) fn get_mut(&mut self, at: usize) -> Option<&mut T> {
        let full = self.chunks().len();
        match self.full.as_mut().and_then(|full| full.get_mut(at / CHUNK)) {
            Some(chunk) => Arc::make_mut(chunk).get_mut(at % CHUNK),
            None => self.open.get_mut(at - full * CHUNK),
        }
    }

    /// Returns all extents from index `at` on.
    pub(in crate::store) fn iter_from(&self, at: usize) -> impl Iterator<Item = &T> + Clone {
        (at..self.len()).filter_map(|at| self.get(at))
    }

    pub(in crate::store) fn iter(&self) -> impl Iterator<Item = &T> + Clone {
        self.iter_from(0)
    }

    /// Returns the extents that overlap `start..end` of the stream.
    pub(in crate::store) fn touched(&self, start: u64, end: u64) -> impl Iterator<Item = &T> + Clone {
        self.iter_from(self.after(start)).take_while(move |extent| extent.base() < end)
    }

    /// Returns a list of the extents that overlap `start..end` of the stream, and of others in the
    /// same chunks. Its indexes differ.
    pub(in crate::store) fn part(&self, start: u64, end: u64) -> Self {
        let is_before = |extent: &T| extent.end() <= start;
        let begins = |extent: &T| extent.base() < end;
        let first = self.chunks().partition_point(|chunk| chunk.last().is_some_and(is_before));
        let chunk_end = self.chunks().partition_point(|chunk| chunk.first().is_some_and(begins));
        let chunks = self.chunks().get(first..chunk_end).filter(|chunks| !chunks.is_empty());
        let full = chunks.map(|chunks| Box::new(chunks.to_vec()));
        let of_open = self.open.partition_point(is_before)..self.open.partition_point(begins);
        Self { full, open: self.open.get(of_open).unwrap_or_default().to_vec() }
    }

    /// Returns the index of the first extent that ends after `offset` of the stream.
    pub(in crate::store) fn after(&self, offset: u64) -> usize {
        let is_before = |extent: &T| extent.end() <= offset;
        let full = self.chunks().partition_point(|chunk| chunk.last().is_some_and(is_before));
        let rest = self.chunks().get(full).map_or(self.open.as_slice(), |chunk| chunk.as_slice());
        full * CHUNK + rest.partition_point(is_before)
    }

    /// Returns the index of the extent that begins at `base`.
    pub(in crate::store) fn beginning_at(&self, base: u64) -> Option<usize> {
        let at = self.after(base);
        self.get(at).filter(|extent| extent.base() == base).map(|_| at)
    }

    /// Returns the heap size of the list.
    fn heap_bytes(&self) -> u64 {
        let chunks = self.full.as_ref().map_or(0, |full| {
            let table = size_of::<Vec<Arc<[T; CHUNK]>>>() + full.capacity() * size_of::<usize>();
            (full.len() * CHUNK_BYTES) as u64 + table as u64 * 5 / 4
        });
        chunks + self.open.capacity() as u64 * Self::PLACE_BYTES
    }

    /// Returns the heap size without the first extent, which is charged with the partition itself.
    pub(super) fn further_bytes(&self) -> u64 {
        self.heap_bytes().saturating_sub(Self::PLACE_BYTES)
    }
}

/// Adjusts a charge after the size of lists [without their first
/// extents](ChunkedList::further_bytes) has changed.
pub(super) fn recharge(charge: &mut Charge, before: u64, after: u64) {
    if after > before {
        charge.merge(charge.budget().charge_unchecked(after - before));
    } else {
        drop(charge.split_up_to(before - after));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// An extent with `WORDS` words besides its base and length.
    #[derive(Debug, Clone, Copy)]
    struct Extent<const WORDS: usize> {
        base: u64,
        length: u64,
        words: [u64; WORDS],
    }

    impl<const WORDS: usize> InStream for Extent<WORDS> {
        fn base(&self) -> u64 {
            self.base
        }

        fn end(&self) -> u64 {
            self.base + self.length
        }
    }

    fn extent<const WORDS: usize>(base: u64, length: u64) -> Extent<WORDS> {
        Extent { base, length, words: [1; WORDS] }
    }

    type List = ChunkedList<Extent<3>, { chunk_of::<Extent<3>>() }>;

    fn list<const WORDS: usize, const CHUNK: usize>(count: u64) -> ChunkedList<Extent<WORDS>, CHUNK> {
        let mut list = ChunkedList::default();
        (0..count).for_each(|at| list.push(extent(10 * at, 10)));
        list
    }

    #[test]
    fn copy_equals_the_list() {
        let mut list: List = list(200);
        let copy = list.clone();
        assert!(copy.chunks().iter().zip(list.chunks()).all(|(one, other)| Arc::ptr_eq(one, other)));
        list.get_mut(70).unwrap().words[0] = 7;
        list.push(extent(2000, 10));
        assert_eq!((list.len(), list.get(70).unwrap().words[0]), (201, 7));
        assert_eq!((copy.len(), copy.get(70).unwrap().words[0], copy.get(200).is_none()), (200, 1, true));
    }

    #[test]
    fn growing_list_is_not_copied_for_its_readers() {
        let mut list: List = list(200_000);
        let copy = list.clone();
        (200_000..200_100).for_each(|at| list.push(extent(10 * at, 10)));
        assert!(copy.chunks().iter().zip(list.chunks()).all(|(one, other)| Arc::ptr_eq(one, other)));
        assert_eq!((copy.len(), list.len()), (200_000, 200_100));
    }

    #[test]
    fn part_contains_exactly_the_touched_chunks() {
        let list: List = list(200_000);
        let chunks = |start, end| {
            let part = list.part(start, end);
            (part.chunks().len(), part.open.len())
        };
        assert_eq!([chunks(0, 1), chunks(629, 631), chunks(700_000, 700_005)], [(1, 0), (2, 0), (1, 0)]);
        let whole = list.chunks().len();
        assert_eq!([chunks(0, u64::MAX), chunks(1_999_990, u64::MAX)], [(whole, list.open.len()), (0, 1)]);
        assert_eq!([chunks(5, 5), chunks(2_000_000, 2_000_001), chunks(9, 3)], [(1, 0), (0, 0), (1, 0)]);
    }

    #[cfg(feature = "jemalloc")]
    #[test]
    fn extent_lists_use_at_most_their_charged_heap() {
        use tikv_jemalloc_ctl::thread::{allocatedp, deallocatedp};

        fn measure<const WORDS: usize, const CHUNK: usize>() {
            let held = || allocatedp::read().unwrap().get().wrapping_sub(deallocatedp::read().unwrap().get());
            for count in [1, 2, 5, 30, 52, 53, 62, 63, 64, 100, 1000, 100_000] {
                let before = held();
                let list: ChunkedList<Extent<WORDS>, CHUNK> = list(count);
                let (held, charged) = (held().wrapping_sub(before), list.heap_bytes());
                assert!(
                    held <= charged && charged <= held * 5 / 4,
                    "{count} extents: {held} bytes held, {charged} charged"
                );
                let alone = size_of::<Extent<WORDS>>() as u64 + 2;
                assert!(count < 1000 || charged <= alone * count, "{count} extents: {charged} bytes charged");
            }
        }

        measure::<3, { chunk_of::<Extent<3>>() }>();
        measure::<4, { chunk_of::<Extent<4>>() }>();
    }

    proptest! {
        #[test]
        fn extent_list_follows_a_vec(
            lengths in prop::collection::vec(1u64..9, 0..400),
            offset in 0u64..2000,
        ) {
            let (mut list, mut base, mut all) = (List::default(), 0, Vec::new());
            for length in lengths {
                list.push(extent(base, length));
                all.push((base, length));
                base += length;
            }
            let listed: Vec<_> = list.iter().map(|it| (it.base, it.length)).collect();
            prop_assert_eq!((listed.len(), &listed), (list.len(), &all));
            let after = all.partition_point(|(base, length)| base + length <= offset);
            prop_assert_eq!(list.after(offset), after);
            prop_assert_eq!(list.beginning_at(offset), all.iter().position(|it| it.0 == offset));
            prop_assert_eq!(list.iter_from(after).count(), all.len() - after);
            prop_assert!(list.get(all.len()).is_none() && list.get_mut(all.len()).is_none());
            for end in [offset + 1, offset + 700] {
                let touched = all[after..].iter().take_while(|(base, _)| *base < end).map(|(base, _)| *base);
                let touched: Vec<_> = touched.collect();
                let of = |list: &List| list.touched(offset, end).map(|it| it.base).collect::<Vec<_>>();
                prop_assert_eq!(of(&list), &touched[..]);
                prop_assert_eq!(of(&list.part(offset, end)), &touched[..]);
            }
        }
    }
}
