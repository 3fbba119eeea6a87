//! Block ids of one partition, reported or found: a sorted list while they are few, a bitmap from then on.
//!
//! A bitmap of a few ids takes most of a KiB, mostly for the ids to come; most partitions of a large shuffle have few.
//! Invariant: what a set takes is known before it grows, from above and never below ([`IdSet::cost`]).

use std::sync::Arc;

use croaring::Treemap;

/// Up to so many ids are a list.
const FEW_MAX: usize = 128;

/// An id of a list, with the room that the list grows by.
const LISTED_BYTES: u64 = 16;
/// A bitmap of 64-bit ids, its first node included.
const BITMAP_BYTES: u64 = 600;
/// One of its high words: an entry and a bitmap of 32-bit ids.
const HIGH_BYTES: u64 = 160;
/// A container of 65,536 ids.
const CONTAINER_BYTES: u64 = 64;
/// An id in a container, with the room that it grows by; from [`CONTAINER_IDS_LISTED`] on it is one of 65,536 bits.
const CONTAINED_BYTES: u64 = 4;
/// Ids of a container that are a list there.
const CONTAINER_IDS_LISTED: u64 = 4096;

/// A set of block ids. A copy of a bitmap is shared until one of the two changes.
#[derive(Debug, Clone)]
pub enum IdSet {
    /// Sorted.
    Few(Vec<u64>),
    /// Many, or such that once were.
    Many(Arc<Treemap>),
}

impl Default for IdSet {
    fn default() -> Self {
        Self::Few(Vec::new())
    }
}

/// What ids would add to a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    /// Ids that are not in it; repeated ones may count again.
    pub new: u64,
    /// Heap, at most.
    pub bytes: u64,
}

impl IdSet {
    /// Whether `id` is in it.
    pub fn contains(&self, id: u64) -> bool {
        match self {
            Self::Few(ids) => ids.binary_search(&id).is_ok(),
            Self::Many(set) => set.contains(id),
        }
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> u64 {
        match self {
            Self::Few(ids) => ids.len() as u64,
            Self::Many(set) => set.cardinality(),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What adding `ids` costs.
    #[must_use]
    pub fn cost(&self, ids: &[i64]) -> Cost {
        let new = ids.iter().map(|id| id.unsigned_abs()).filter(|id| !self.contains(*id));
        match self {
            Self::Few(few) => {
                // Most reports name a few ids of each of many partitions: nothing is allocated for those.
                let count = new.clone().count();
                if few.len() + count <= FEW_MAX {
                    return Cost { new: count as u64, bytes: LISTED_BYTES * count as u64 };
                }
                let count = count as u64;
                let mut all: Vec<u64> = few.iter().copied().chain(new).collect();
                all.sort_unstable();
                let bytes = BITMAP_BYTES
                    + HIGH_BYTES * distinct(&all, 32)
                    + CONTAINER_BYTES * distinct(&all, 16)
                    + CONTAINED_BYTES * (few.len() as u64 + count);
                Cost { new: count, bytes }
            }
            Self::Many(set) => {
                let mut cost = Cost::default();
                let mut last = None;
                for id in new {
                    let is_neighbour = last.replace(id >> 16) == Some(id >> 16);
                    cost.new += 1;
                    cost.bytes += if is_neighbour { CONTAINED_BYTES } else { cost_in(set, id) };
                }
                cost
            }
        }
    }

    /// Adds `id`; false if it was there.
    pub fn add(&mut self, id: u64) -> bool {
        match self {
            Self::Few(ids) => {
                let Err(at) = ids.binary_search(&id) else { return false };
                if ids.len() < FEW_MAX {
                    ids.insert(at, id);
                    return true;
                }
                let mut set = Treemap::of(ids);
                set.add(id);
                *self = Self::Many(Arc::new(set));
                true
            }
            Self::Many(set) => Arc::make_mut(set).add_checked(id),
        }
    }

    /// Adds `ids`, which are sorted; how many were not there.
    pub fn add_sorted(&mut self, ids: &[u64]) -> u64 {
        debug_assert!(ids.is_sorted(), "neighbours are added together");
        if let Self::Few(few) = self {
            if few.len() + ids.len() <= FEW_MAX {
                return ids.iter().filter(|id| self.add(**id)).count() as u64;
            }
            *self = Self::Many(Arc::new(Treemap::of(few)));
        }
        let Self::Many(set) = self else { return 0 };
        let (set, mut added, mut lows) = (Arc::make_mut(set), 0, Vec::new());
        for ids in ids.chunk_by(|a, b| a >> 32 == b >> 32) {
            let Some([high, _]) = ids.first().map(|id| halves(*id)) else { continue };
            lows.clear();
            lows.extend(ids.iter().map(|id| halves(*id)[1]));
            let bitmap = set.map.entry(high).or_default();
            let before = bitmap.cardinality();
            bitmap.add_many(&lows);
            added += bitmap.cardinality() - before;
        }
        added
    }

    /// Takes `ids` out.
    pub fn remove_all(&mut self, ids: &Treemap) {
        match self {
            Self::Few(few) => few.retain(|id| !ids.contains(*id)),
            Self::Many(set) => Arc::make_mut(set).andnot_inplace(ids),
        }
    }

    /// Those of `ids` that are not in it.
    #[must_use]
    pub fn lacking(&self, ids: &Treemap) -> Treemap {
        match self {
            Self::Few(_) => ids.iter().filter(|id| !self.contains(*id)).collect(),
            Self::Many(set) => ids.andnot(set),
        }
    }

    /// Adds all of it to `all`.
    pub fn add_to(&self, all: &mut Treemap) {
        match self {
            Self::Few(ids) => ids.iter().for_each(|id| all.add(*id)),
            Self::Many(set) => all.or_inplace(set),
        }
    }

    /// As a bitmap.
    pub fn to_bitmap(&self) -> Treemap {
        let mut all = Treemap::new();
        self.add_to(&mut all);
        all
    }

    /// Those that are among `ids`.
    pub fn among(&self, ids: &Treemap) -> Treemap {
        match self {
            Self::Few(few) => few.iter().copied().filter(|id| ids.contains(*id)).collect(),
            Self::Many(set) => set.and(ids),
        }
    }

    /// About what it takes.
    #[must_use]
    pub fn heap_bytes(&self) -> u64 {
        match self {
            Self::Few(ids) => LISTED_BYTES * ids.len() as u64,
            Self::Many(set) => {
                let encoded = set.get_serialized_size_in_bytes::<croaring::JvmLegacy>() as u64;
                BITMAP_BYTES + encoded + HIGH_BYTES * set.map.len() as u64
            }
        }
    }

    /// About what a bitmap of it takes, in the heap and on the wire together.
    pub fn bitmap_bytes(&self) -> u64 {
        match self {
            Self::Few(ids) => {
                HIGH_BYTES * distinct(ids, 32)
                    + CONTAINER_BYTES * distinct(ids, 16)
                    + 2 * CONTAINED_BYTES * ids.len() as u64
            }
            Self::Many(set) => {
                let encoded = set.get_serialized_size_in_bytes::<croaring::JvmLegacy>() as u64;
                2 * encoded + HIGH_BYTES * set.map.len() as u64
            }
        }
    }
}

impl From<Treemap> for IdSet {
    fn from(ids: Treemap) -> Self {
        match ids.cardinality() <= FEW_MAX as u64 {
            true => Self::Few(ids.iter().collect()),
            false => Self::Many(Arc::new(ids)),
        }
    }
}

impl Extend<u64> for IdSet {
    fn extend<I: IntoIterator<Item = u64>>(&mut self, ids: I) {
        for id in ids {
            self.add(id);
        }
    }
}

impl FromIterator<u64> for IdSet {
    fn from_iter<I: IntoIterator<Item = u64>>(ids: I) -> Self {
        let mut set = Self::default();
        set.extend(ids);
        set
    }
}

/// How many different numbers sorted `ids` have above their lowest `bits`.
fn distinct(ids: &[u64], bits: u32) -> u64 {
    ids.chunk_by(|a, b| a >> bits == b >> bits).count() as u64
}

/// The upper and the lower half.
#[expect(clippy::cast_possible_truncation, reason = "the halves")]
fn halves(id: u64) -> [u32; 2] {
    [(id >> 32) as u32, id as u32]
}

/// What one id that is not in `set` adds to it.
fn cost_in(set: &Treemap, id: u64) -> u64 {
    let [high, low] = halves(id);
    let Some(bitmap) = set.map.get(&high) else { return HIGH_BYTES + CONTAINER_BYTES + CONTAINED_BYTES };
    match bitmap.range_cardinality(low & !0xFFFF..=low | 0xFFFF) {
        0 => CONTAINER_BYTES + CONTAINED_BYTES,
        listed if listed < CONTAINER_IDS_LISTED => CONTAINED_BYTES,
        // The list becomes a bitmap of 8 KiB, which is what its ids were charged.
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_set_is_a_set_however_large(
            reports in prop::collection::vec(prop::collection::vec(0i64..700, 0..90), 1..9),
            spread in 0u32..40,
        ) {
            let mut set = IdSet::default();
            let mut model = BTreeSet::new();
            for ids in reports {
                let ids: Vec<i64> = ids.into_iter().map(|id| id << spread).collect();
                let cost = set.cost(&ids);
                let before = model.len();
                let mut sorted: Vec<u64> = ids.iter().map(|id| id.unsigned_abs()).collect();
                sorted.sort_unstable();
                let mut at_once = set.clone();
                let added_at_once = at_once.add_sorted(&sorted);
                let added = ids.iter().filter(|id| set.add(id.unsigned_abs())).count();
                prop_assert_eq!((added_at_once, at_once.to_bitmap()), (added as u64, set.to_bitmap()));
                model.extend(ids.iter().map(|id| id.unsigned_abs()));
                prop_assert_eq!(added, model.len() - before);
                prop_assert!(cost.new >= added as u64, "{:?} for {}", cost, added);
                prop_assert_eq!(cost.new == 0, added == 0);
            }
            prop_assert_eq!(set.to_bitmap().to_vec(), model.iter().copied().collect::<Vec<_>>());
            prop_assert!(model.iter().all(|id| set.contains(*id)) && !set.contains(u64::MAX));
            let some: Treemap = model.iter().copied().step_by(3).chain([u64::MAX]).collect();
            prop_assert_eq!(set.among(&some).to_vec(), model.iter().copied().step_by(3).collect::<Vec<_>>());
            prop_assert_eq!(set.lacking(&some).to_vec(), [u64::MAX]);
            let (held, bitmap) = (set.len(), set.to_bitmap());
            prop_assert_eq!((held, IdSet::from(bitmap.clone()).to_bitmap()), (model.len() as u64, bitmap));
            set.remove_all(&some);
            prop_assert_eq!(set.lacking(&some), some.clone());
            prop_assert_eq!(set.len(), held + 1 - some.cardinality());
        }
    }

    #[test]
    fn what_a_set_is_charged_follows_its_shape() {
        let charged = |ids: &mut dyn Iterator<Item = i64>| {
            let mut set = IdSet::default();
            ids.map(|id| {
                let bytes = set.cost(&[id]).bytes;
                set.add(id.unsigned_abs());
                bytes
            })
            .sum::<u64>()
        };
        let dense = charged(&mut (0..65_536));
        assert!((8 << 10..64 << 10).contains(&dense), "{dense}");
        let scattered = charged(&mut (0..10_000).map(|id| id << 33));
        assert!((150 * 10_000..300 * 10_000).contains(&scattered), "{scattered}");
        assert_eq!(charged(&mut [7].into_iter()), LISTED_BYTES);
    }
}
