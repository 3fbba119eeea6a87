//! A set of block ids in about 8 bytes each or less, regardless of their layout: compressed chunks,
//! and a list of late arrivals.
//!
//! Ids are added to the list. It is merged into the chunks once it is long relative to the set. Few
//! ids, and ids that do not compress, stay a list. Until the merge the list may repeat ids of the
//! chunks, which [`IdSet::len`] counts twice. No other function exposes that. Pure.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::iter::Peekable;

use super::id_chunk::{CHUNK_IDS_MAX, IdChunk};

/// A list of up to this number of ids stays a list. Longer ones may be compressed.
const LISTED_MAX: usize = 32;

/// The list is merged when it has more ids than this fraction (an eighth) of the set, but at least
/// [`LISTED_MAX`] and at most [`LATE_MAX`].
const LATE_PART: u64 = 8;
const LATE_MAX: usize = 2048;

/// Minimum number of new ids that are merged with the list. Fewer are inserted.
const MERGED_MIN: usize = 16;

/// Size of an id in a list.
const ID_BYTES: u64 = size_of::<u64>() as u64;

/// A set of block ids. A clone shares the chunks until one of the two changes.
#[derive(Debug, Clone, Default)]
pub struct IdSet {
    /// Late arrivals in ascending order.
    late: Vec<u64>,
    chunks: Option<Box<IdChunks>>,
}

/// Chunks in the order of their ids. Their ranges do not overlap, and none is empty.
#[derive(Debug, Clone, Default)]
struct IdChunks {
    list: Vec<IdChunk>,
    ids: u64,
    payload_bytes: u64,
}

impl IdChunks {
    fn of(list: Vec<IdChunk>) -> Self {
        let ids = list.iter().map(IdChunk::count).sum();
        let payload_bytes = list.iter().map(IdChunk::heap_bytes).sum();
        Self { list, ids, payload_bytes }
    }

    fn heap_bytes(&self) -> u64 {
        (size_of::<Self>() + self.list.capacity() * size_of::<IdChunk>()) as u64 + self.payload_bytes
    }

    /// Returns the chunk whose range contains `id`.
    fn find(&self, id: u64) -> Option<usize> {
        let at = self.list.partition_point(|chunk| chunk.first() <= id).checked_sub(1)?;
        self.list.get(at).is_some_and(|chunk| id <= chunk.last()).then_some(at)
    }

    /// Adds ascending ids. Only chunks that get ids are encoded again.
    fn insert(&mut self, mut ids: &[u64]) {
        let old = std::mem::take(&mut self.list);
        let mut list = Vec::with_capacity(old.len() + ids.len() / CHUNK_IDS_MAX + 1);
        let (mut known, mut merged) = (Vec::new(), Vec::new());
        let mut old = old.into_iter().peekable();
        while let Some(chunk) = old.next() {
            let next = old.peek().map(IdChunk::first);
            let end = next.map_or(ids.len(), |next| ids.partition_point(|id| *id < next));
            let (here, others) = ids.split_at(end);
            ids = others;
            let appends = next.is_none() && here.first().is_some_and(|id| *id > chunk.last());
            if here.is_empty() || (appends && chunk.is_full()) {
                list.push(chunk);
                list.extend(here.chunks(CHUNK_IDS_MAX).filter_map(IdChunk::encode));
                continue;
            }
            chunk.decode(&mut known);
            merge(&known, here, &mut merged);
            // A chunk with appended ids is filled up. A chunk with ids in its middle is divided
            // evenly, so that its parts have room for more.
            let parts = merged.len().div_ceil(CHUNK_IDS_MAX).max(1);
            let size = if appends { CHUNK_IDS_MAX } else { merged.len().div_ceil(parts) };
            list.extend(merged.chunks(size).filter_map(IdChunk::encode));
        }
        list.shrink_to_fit();
        *self = Self::of(list);
    }
}

impl IdSet {
    /// Creates a set of strictly ascending ids.
    pub fn from_ascending(ids: impl Iterator<Item = u64>) -> Self {
        let (mut list, mut part) = (Vec::new(), Vec::with_capacity(LISTED_MAX));
        for id in ids {
            if part.len() == CHUNK_IDS_MAX {
                list.extend(IdChunk::encode(&part));
                part.clear();
            }
            part.push(id);
        }
        if list.is_empty() {
            let mut set = Self::default();
            set.merge_late(part);
            return set;
        }
        list.extend(IdChunk::encode(&part));
        list.shrink_to_fit();
        Self { late: Vec::new(), chunks: Some(Box::new(IdChunks::of(list))) }
    }

    /// Creates a set of ids in any order.
    pub fn from_unsorted(mut ids: Vec<u64>) -> Self {
        ids.sort_unstable();
        ids.dedup();
        Self::from_ascending(ids.into_iter())
    }

    /// Creates a set of chunks whose ids ascend.
    pub(super) fn from_chunks(list: Vec<IdChunk>) -> Self {
        let chunks = (!list.is_empty()).then(|| Box::new(IdChunks::of(list)));
        Self { late: Vec::new(), chunks }
    }

    /// Returns all ids in chunks, as they are written to a file.
    pub(super) fn into_chunks(self) -> Vec<IdChunk> {
        match self.chunks {
            None => self.late.chunks(CHUNK_IDS_MAX).filter_map(IdChunk::encode).collect(),
            Some(chunks) if self.late.is_empty() => chunks.list,
            Some(mut chunks) => {
                chunks.insert(&self.late);
                chunks.list
            }
        }
    }

    /// Returns whether the set contains `id`.
    #[must_use]
    pub fn contains(&self, id: u64) -> bool {
        self.lookup().contains(id)
    }

    /// Returns the number of ids. Ids that arrived twice may be counted twice until the list is
    /// merged.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.late.len() as u64 + self.chunks.as_ref().map_or(0, |chunks| chunks.ids)
    }

    /// Returns whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.late.is_empty() && self.chunks.is_none()
    }

    /// Returns the heap size of the set.
    #[must_use]
    pub fn heap_bytes(&self) -> u64 {
        let chunks = self.chunks.as_ref().map_or(0, |chunks| chunks.heap_bytes());
        ID_BYTES * self.late.capacity() as u64 + chunks
    }

    /// Returns the heap size that a clone allocates.
    #[must_use]
    pub fn clone_bytes(&self) -> u64 {
        let chunks = |chunks: &IdChunks| size_of::<IdChunks>() + chunks.list.len() * size_of::<IdChunk>();
        ID_BYTES * self.late.len() as u64 + self.chunks.as_ref().map_or(0, |it| chunks(it) as u64)
    }

    /// Returns the length at which the list is merged.
    fn late_max(&self) -> usize {
        match &self.chunks {
            Some(chunks) => {
                let part = usize::try_from(chunks.ids / LATE_PART).unwrap_or(LATE_MAX);
                part.clamp(LISTED_MAX, LATE_MAX)
            }
            // The list did not compress the last time. Try again above the next power of two.
            None => self.late.len().next_power_of_two().max(LISTED_MAX),
        }
    }

    /// Adds one id.
    pub fn add(&mut self, id: u64) {
        self.add_sorted(&[id]);
    }

    /// Adds ascending ids, which may repeat.
    pub fn add_sorted(&mut self, ids: &[u64]) {
        debug_assert!(ids.is_sorted(), "ids must be ascending");
        let is_due = self.late.len() + ids.len() > self.late_max();
        if is_due || ids.len() >= MERGED_MIN {
            let mut all = Vec::with_capacity(self.late.len() + ids.len());
            merge(&std::mem::take(&mut self.late), ids, &mut all);
            if is_due {
                self.merge_late(all);
            } else {
                self.late = all;
            }
            return;
        }
        for id in ids {
            let Err(at) = self.late.binary_search(id) else { continue };
            if self.late.len() == self.late.capacity() {
                self.late.reserve_exact((1 + self.late.len() / 16).min(8));
            }
            self.late.insert(at, *id);
        }
    }

    /// Merges ascending ids into the chunks, or into the list if that is smaller.
    fn merge_late(&mut self, mut ids: Vec<u64>) {
        match &mut self.chunks {
            Some(chunks) => chunks.insert(&ids),
            None => {
                let chunks = || IdChunks::of(ids.chunks(CHUNK_IDS_MAX).filter_map(IdChunk::encode).collect());
                let chunks = (ids.len() > LISTED_MAX).then(chunks);
                match chunks.filter(|it| it.heap_bytes() < ID_BYTES * ids.len() as u64) {
                    Some(mut chunks) => {
                        chunks.list.shrink_to_fit();
                        self.chunks = Some(Box::new(chunks));
                    }
                    None => {
                        ids.shrink_to_fit();
                        self.late = ids;
                    }
                }
            }
        }
    }

    /// Adds all ids of `other`.
    pub fn add_all(&mut self, other: &Self) {
        if self.is_empty() {
            *self = other.clone();
        } else if other.len() < self.len() / LATE_PART {
            self.add_sorted(&other.iter().collect::<Vec<_>>());
        } else {
            *self = Self::from_ascending(union([&*self, other]));
        }
    }

    /// Removes `ids`. Returns how many of them were present.
    pub fn remove_all(&mut self, ids: &Self) -> u64 {
        if ids.is_empty() {
            return 0;
        }
        let late = std::mem::take(&mut self.late);
        if !late.is_empty() {
            self.merge_late(late);
        }
        let mut gone = ids.lookup();
        let before = self.len();
        self.late.retain(|id| !gone.contains(*id));
        if let Some(chunks) = &mut self.chunks {
            let (mut list, mut remaining) = (Vec::with_capacity(chunks.list.len()), Vec::new());
            for chunk in std::mem::take(&mut chunks.list) {
                if !ids.has_any_within(chunk.first(), chunk.last()) {
                    list.push(chunk);
                    continue;
                }
                chunk.decode(&mut remaining);
                remaining.retain(|id| !gone.contains(*id));
                list.extend(IdChunk::encode(&remaining));
            }
            list.shrink_to_fit();
            **chunks = IdChunks::of(list);
        }
        self.chunks.take_if(|chunks| chunks.list.is_empty());
        before - self.len()
    }

    /// Returns whether a chunk or the list may have an id from `first` to `last`.
    fn has_any_within(&self, first: u64, last: u64) -> bool {
        let listed = self.late.partition_point(|id| *id < first);
        let is_listed = self.late.get(listed).is_some_and(|id| *id <= last);
        is_listed
            || self.chunks.as_ref().is_some_and(|chunks| {
                let at = chunks.list.partition_point(|chunk| chunk.last() < first);
                chunks.list.get(at).is_some_and(|chunk| chunk.first() <= last)
            })
    }

    /// Returns the ids that are not in `other`.
    #[must_use]
    pub fn minus(&self, other: &Self) -> Self {
        let mut others = other.lookup();
        Self::from_ascending(self.iter().filter(|id| !others.contains(*id)))
    }

    /// Returns the ids that are also in `other`.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        let mut others = other.lookup();
        Self::from_ascending(self.iter().filter(|id| others.contains(*id)))
    }

    /// Returns the ids in ascending order, each once.
    #[must_use]
    pub fn iter(&self) -> Ids<'_> {
        let chunks = self.chunks.as_ref().map_or(&[][..], |chunks| &chunks.list);
        Ids { late: &self.late, chunks: chunks.iter(), decoded: Vec::new(), at: 0 }
    }

    /// Returns a lookup of ids, which is fastest in ascending order.
    #[must_use]
    pub fn lookup(&self) -> Lookup<'_> {
        Lookup { set: self, decoded: Vec::new(), chunk: None }
    }
}

/// Replaces `all` by the merged ids of two ascending lists, each once.
fn merge(mut a: &[u64], mut b: &[u64], all: &mut Vec<u64>) {
    all.clear();
    loop {
        let id = match (a.split_first(), b.split_first()) {
            (Some((x, rest)), Some((y, _))) if x <= y => {
                a = rest;
                *x
            }
            (Some((x, rest)), None) => {
                a = rest;
                *x
            }
            (_, Some((y, rest))) => {
                b = rest;
                *y
            }
            (None, None) => break,
        };
        if all.last() != Some(&id) {
            all.push(id);
        }
    }
}

/// Ids of a set in ascending order.
#[derive(Debug, Clone)]
pub struct Ids<'a> {
    late: &'a [u64],
    chunks: std::slice::Iter<'a, IdChunk>,
    decoded: Vec<u64>,
    at: usize,
}

impl Iterator for Ids<'_> {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        if self.at == self.decoded.len() {
            self.at = 0;
            match self.chunks.next() {
                Some(chunk) => chunk.decode(&mut self.decoded),
                None => self.decoded.clear(),
            }
        }
        let (chunked, late) = (self.decoded.get(self.at).copied(), self.late.first().copied());
        let next = chunked.into_iter().chain(late).min()?;
        self.at += usize::from(chunked == Some(next));
        if late == Some(next) {
            self.late = &self.late[1..];
        }
        Some(next)
    }
}

/// Lookup of ids in a set. The chunk used last stays decoded.
#[derive(Debug)]
pub struct Lookup<'a> {
    set: &'a IdSet,
    decoded: Vec<u64>,
    chunk: Option<usize>,
}

impl Lookup<'_> {
    /// Returns whether the set contains `id`.
    pub fn contains(&mut self, id: u64) -> bool {
        if self.set.late.binary_search(&id).is_ok() {
            return true;
        }
        let Some(chunks) = &self.set.chunks else { return false };
        let Some(at) = chunks.find(id) else { return false };
        if self.chunk.replace(at) != Some(at)
            && let Some(chunk) = chunks.list.get(at)
        {
            chunk.decode(&mut self.decoded);
        }
        self.decoded.binary_search(&id).is_ok()
    }
}

/// Returns the ids of several sets in ascending order, each once.
pub fn union<'a>(sets: impl IntoIterator<Item = &'a IdSet>) -> Union<'a> {
    let sets: Vec<_> = sets.into_iter().map(|set| set.iter().peekable()).collect();
    let mut union = Union { sets, next: BinaryHeap::new() };
    for (at, ids) in union.sets.iter_mut().enumerate() {
        union.next.extend(ids.peek().map(|id| Reverse((*id, at))));
    }
    union
}

/// Iterator over the ids of several sets, see [`union`].
#[derive(Debug, Clone)]
pub struct Union<'a> {
    sets: Vec<Peekable<Ids<'a>>>,
    /// Next id of each set.
    next: BinaryHeap<Reverse<(u64, usize)>>,
}

impl Iterator for Union<'_> {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        let Reverse((id, _)) = *self.next.peek()?;
        while let Some(mut top) = self.next.peek_mut() {
            let Reverse((same, at)) = *top;
            if same != id {
                break;
            }
            let ids = &mut self.sets[at];
            ids.next();
            match ids.peek() {
                Some(next) => *top = Reverse((*next, at)),
                None => drop(std::collections::binary_heap::PeekMut::pop(top)),
            }
        }
        Some(id)
    }
}

impl PartialEq for IdSet {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for IdSet {}

impl Extend<u64> for IdSet {
    fn extend<I: IntoIterator<Item = u64>>(&mut self, ids: I) {
        self.add_all(&ids.into_iter().collect());
    }
}

impl FromIterator<u64> for IdSet {
    fn from_iter<I: IntoIterator<Item = u64>>(ids: I) -> Self {
        Self::from_unsorted(ids.into_iter().collect())
    }
}

impl<const N: usize> From<[u64; N]> for IdSet {
    fn from(ids: [u64; N]) -> Self {
        ids.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn listed(set: &IdSet) -> Vec<u64> {
        set.iter().collect()
    }

    proptest! {
        #[test]
        fn set_contains_added_and_not_removed_ids(
            steps in prop::collection::vec((any::<bool>(), prop::collection::vec(0u64..3000, 0..300)), 1..20),
            spread in 0u32..50,
        ) {
            let (mut set, mut model) = (IdSet::default(), BTreeSet::new());
            for (adds, ids) in steps {
                let mut ids: Vec<u64> = ids.into_iter().map(|id| id << spread).collect();
                ids.sort_unstable();
                if adds {
                    set.add_sorted(&ids);
                    model.extend(ids);
                } else {
                    let (removes, there) = (!ids.is_empty(), ids.iter().filter(|id| model.remove(id)).count() as u64);
                    prop_assert_eq!(set.remove_all(&ids.into_iter().collect()), there);
                    // Removing nothing leaves the late list unchanged.
                    prop_assert!(!removes || set.len() == model.len() as u64);
                }
                prop_assert!(set.len() >= model.len() as u64);
                prop_assert_eq!(set.is_empty(), model.is_empty());
                prop_assert_eq!(listed(&set), model.iter().copied().collect::<Vec<_>>());
                let mut lookup = set.lookup();
                prop_assert!((0..3000).all(|id| lookup.contains(id << spread) == model.contains(&(id << spread))));
            }
        }

        #[test]
        fn set_operations_follow_the_model(
            a in prop::collection::btree_set(0u64..2000, 0..900),
            b in prop::collection::btree_set(0u64..2000, 0..900),
            some in prop::collection::btree_set(0u64..2000, 0..20),
            spread in 0u32..50,
        ) {
            let wide = |ids: &BTreeSet<u64>| ids.iter().map(|id| id << spread).collect::<BTreeSet<u64>>();
            let [a, b, some] = [&a, &b, &some].map(wide);
            let [x, y, z] = [&a, &b, &some].map(|ids| ids.iter().copied().collect::<IdSet>());
            prop_assert_eq!(x.len(), a.len() as u64);
            prop_assert_eq!(listed(&x.minus(&y)), a.difference(&b).copied().collect::<Vec<_>>());
            prop_assert_eq!(listed(&x.and(&y)), a.intersection(&b).copied().collect::<Vec<_>>());
            let all: BTreeSet<u64> = a.iter().chain(&b).chain(&some).copied().collect();
            let mut sum = x.clone();
            sum.add_all(&y);
            sum.add_all(&z);
            prop_assert_eq!(listed(&sum), all.iter().copied().collect::<Vec<_>>());
            prop_assert!(union([&x, &y, &z]).eq(all));
            prop_assert_eq!(x == y, a == b);
        }
    }

    #[test]
    fn clone_shares_chunks_until_changed() {
        let set: IdSet = (0..100_000).map(|id| id << 20).collect();
        let mut copy = set.clone();
        copy.add(1);
        assert_eq!((set.len(), copy.len(), set.contains(1)), (100_000, 100_001, false));
        assert!(
            set.clone_bytes() < set.heap_bytes(),
            "a clone takes {} bytes, the set {}",
            set.clone_bytes(),
            set.heap_bytes()
        );
        assert!(set.heap_bytes() < 100_000, "ids of one distance take {} bytes", set.heap_bytes());
    }

    #[test]
    fn set_of_few_ids_is_small() {
        for ids in 0..400 {
            let far: IdSet = (0..ids).map(|id: u64| (id * 7919).pow(2) << 20).collect();
            assert!(far.heap_bytes() <= 8 * ids, "{} bytes for {ids} distant ids", far.heap_bytes());
        }
    }
}
