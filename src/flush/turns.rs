//! Start-time fair queueing of applications, without a lock or a clock.
//!
//! Every item costs its application virtual time: the item's cost divided by the application's
//! weight. An item's start time is when its application has paid for its earlier items, or now if
//! it has none. The earliest start time is served next. If one application queues a thousand items,
//! it delays another's first item only by the item being served. While both have items, they are
//! served in proportion to their weights. Items of one application keep their order.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

/// Virtual time per unit of cost at weight 1. It exceeds 1, so that weights up to it make a
/// difference.
const UNITS: u64 = 1024;

/// Number of entries, above two per waiting item, that `paid_until` may have before entries without
/// debts are removed.
const REMEMBERED: usize = 64;

/// Waiting items, by `K`.
#[derive(Debug)]
pub(super) struct FairQueue<K, T> {
    /// Ordered by start time, then by arrival.
    waiting: BTreeMap<(u64, u64), (K, T)>,
    /// Earliest next start time of each key that has items or debts.
    paid_until: HashMap<K, u64>,
    now: u64,
    arrivals: u64,
}

impl<K, T> Default for FairQueue<K, T> {
    fn default() -> Self {
        Self { waiting: BTreeMap::new(), paid_until: HashMap::new(), now: 0, arrivals: 0 }
    }
}

impl<K: Clone + Eq + Hash, T> FairQueue<K, T> {
    /// Adds an item of `key`.
    pub(super) fn push(&mut self, key: K, cost: u64, weight: u32, item: T) {
        let turn = self.paid_until.get(&key).copied().unwrap_or(0).max(self.now);
        let time = (cost.saturating_mul(UNITS) / u64::from(weight.max(1))).max(1);
        self.paid_until.insert(key.clone(), turn.saturating_add(time));
        if self.paid_until.len() > 2 * self.waiting.len() + REMEMBERED {
            let now = self.now;
            self.paid_until.retain(|_, until| *until > now);
        }
        self.arrivals += 1;
        self.waiting.insert((turn, self.arrivals), (key, item));
    }

    /// Removes and returns the next item.
    pub(super) fn pop(&mut self) -> Option<T> {
        let ((turn, _), (_, item)) = self.waiting.pop_first()?;
        self.now = turn;
        if self.waiting.is_empty() {
            self.clear();
        }
        Some(item)
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn long_queue_does_not_block_another() {
        let mut turns = FairQueue::default();
        for n in 0..100 {
            turns.push("flood", 64, 1, ("flood", n));
        }
        assert_eq!(turns.pop(), Some(("flood", 0)));
        turns.push("small", 1, 1, ("small", 0));
        assert_eq!(turns.pop(), Some(("small", 0)));
        let rest: Vec<_> = std::iter::from_fn(|| turns.pop()).map(|(_, n)| n).collect();
        assert_eq!(rest, (1..100).collect::<Vec<_>>(), "in their order");
        assert!(turns.paid_until.is_empty(), "nothing is remembered of an empty queue");
    }

    proptest! {
        #[test]
        fn busy_queues_are_served_by_weight(
            weights in prop::collection::vec(1u32..5, 2..5), cost in 1u64..100,
        ) {
            let mut turns = FairQueue::default();
            for (key, weight) in weights.iter().enumerate() {
                for _ in 0..100 {
                    turns.push(key, cost, *weight, key);
                }
            }
            let mut served = vec![0_i64; weights.len()];
            for _ in 0..100 {
                served[turns.pop().unwrap()] += 1;
            }
            let all: i64 = weights.iter().copied().map(i64::from).sum();
            for (count, weight) in served.iter().zip(&weights) {
                prop_assert!((count * all - 100 * i64::from(*weight)).abs() <= 2 * all, "{served:?}");
            }
        }

        #[test]
        fn every_item_is_returned_once(pushes in prop::collection::vec((0u8..5, 0u64..1000, 0u32..9), 0..100)) {
            let mut turns = FairQueue::default();
            for (n, (key, cost, weight)) in pushes.iter().enumerate() {
                turns.push(*key, *cost, *weight, n);
            }
            prop_assert_eq!(turns.len(), pushes.len());
            let mut out: Vec<_> = std::iter::from_fn(|| turns.pop()).collect();
            out.sort_unstable();
            prop_assert_eq!(out, (0..pushes.len()).collect::<Vec<_>>());
        }
    }
}
