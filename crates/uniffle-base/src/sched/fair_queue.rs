//! Start-time fair queueing of applications, without a lock or a clock.
//!
//! Serving an item costs its application virtual time: the item's cost divided by the application's
//! weight. An application's next turn is when it has paid for its earlier items, or now if it has
//! paid. The earliest turn is next. If one application queues a thousand items, it delays another's
//! first item only by the item being served. While both have items, they are served in proportion
//! to their weights. [`FairQueue::pop`] and [`FairQueue::serve`] keep the order of an application's
//! items. [`FairQueue::take`] serves any item.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::Hash;

/// Virtual time per unit of cost at weight 1. It exceeds 1, so that weights up to it make a
/// difference.
const UNITS: u64 = 1024;

/// Number of keys, above two per waiting item, that are kept before keys without items and debts
/// are removed.
const REMEMBERED: usize = 64;

/// Waiting items, by `K`.
#[derive(Debug)]
pub struct FairQueue<K, T> {
    /// Keys with items.
    turns: BTreeMap<TurnKey, K>,
    /// Keys with items or debts, and some without either: see [`REMEMBERED`].
    keys: HashMap<K, KeyQueue<T>>,
    len: usize,
    /// Latest turn of which an item was served.
    now: u64,
    /// Number that was given last, to an item or to a refused key.
    last_number: u64,
}

/// Virtual time of a turn, and the number that decides between equal times.
type TurnKey = (u64, u64);

#[derive(Debug)]
struct KeyQueue<T> {
    /// Turn of the first item, or the earliest turn of the next one to arrive.
    turn: TurnKey,
    items: VecDeque<Item<T>>,
}

#[derive(Debug)]
struct Item<T> {
    number: u64,
    /// Virtual time that serving it costs.
    time: u64,
    value: T,
}

impl<T> KeyQueue<T> {
    fn remove(&mut self, number: u64) -> Option<Item<T>> {
        let at = self.items.binary_search_by_key(&number, |item| item.number).ok()?;
        self.items.remove(at)
    }
}

impl<K, T> Default for FairQueue<K, T> {
    fn default() -> Self {
        Self { turns: BTreeMap::new(), keys: HashMap::new(), len: 0, now: 0, last_number: 0 }
    }
}

impl<K: Clone + Eq + Hash, T> FairQueue<K, T> {
    /// Adds an item of `key`. Returns its number.
    pub fn push(&mut self, key: &K, cost: u64, weight: u32, value: T) -> u64 {
        let number = self.next_number();
        let time = (cost.saturating_mul(UNITS) / u64::from(weight.max(1))).max(1);
        if self.keys.len() > 2 * self.len + REMEMBERED {
            let now = self.now;
            self.keys.retain(|_, queue| !queue.items.is_empty() || queue.turn.0 > now);
        }
        let fresh = || KeyQueue { turn: (0, 0), items: VecDeque::new() };
        let queue = self.keys.entry(key.clone()).or_insert_with(fresh);
        if queue.items.is_empty() {
            queue.turn = (queue.turn.0.max(self.now), number);
            self.turns.insert(queue.turn, key.clone());
        }
        queue.items.push_back(Item { number, time, value });
        self.len += 1;
        number
    }

    /// Removes and returns the next item.
    pub fn pop(&mut self) -> Option<T> {
        let key = self.turns.first_key_value()?.1.clone();
        let number = self.keys.get(&key)?.items.front()?.number;
        self.take(&key, number)
    }

    /// Removes and returns an item that is served, which costs its key virtual time. The item need
    /// not be the first of its key.
    pub fn take(&mut self, key: &K, number: u64) -> Option<T> {
        let queue = self.keys.get_mut(key)?;
        let item = queue.remove(number)?;
        self.turns.remove(&queue.turn);
        self.now = self.now.max(queue.turn.0);
        let next = queue.items.front().map(|next| next.number);
        queue.turn = (queue.turn.0.saturating_add(item.time), next.unwrap_or_default());
        if next.is_some() {
            self.turns.insert(queue.turn, key.clone());
        }
        self.count_removed();
        Some(item.value)
    }

    /// Removes and returns an item that is not served, which costs nothing.
    pub fn remove(&mut self, key: &K, number: u64) -> Option<T> {
        let queue = self.keys.get_mut(key)?;
        let item = queue.remove(number)?;
        if queue.items.is_empty() {
            self.turns.remove(&queue.turn);
        }
        self.count_removed();
        Some(item.value)
    }

    /// Serves the keys in turn. `serve` returns whether it served the first item of a key. A key
    /// that was refused becomes the last, as if it had been served until then. Ends when every key
    /// with items, or `refused_max` keys in a row, were refused; the next call continues with the
    /// keys that were not tried.
    pub fn serve(&mut self, refused_max: usize, mut serve: impl FnMut(&K, &mut T) -> bool) {
        let mut refused = 0;
        while refused < self.turns.len().min(refused_max) {
            let Some(key) = self.turns.first_key_value().map(|(_, key)| key.clone()) else { return };
            let Some(first) = self.keys.get_mut(&key).and_then(|queue| queue.items.front_mut()) else {
                return;
            };
            if serve(&key, &mut first.value) {
                let number = first.number;
                self.take(&key, number);
                refused = 0;
            } else {
                self.defer(&key);
                refused += 1;
            }
        }
    }

    /// Returns the keys in turn, with the numbered items of each in the order of their arrival.
    pub fn turns(&self) -> impl Iterator<Item = (&K, impl Iterator<Item = (u64, &T)>)> {
        let queues = self.turns.values().filter_map(|key| Some((key, self.keys.get(key)?)));
        queues.map(|(key, queue)| (key, queue.items.iter().map(|item| (item.number, &item.value))))
    }

    /// Returns the number of items of `key`.
    pub fn count(&self, key: &K) -> usize {
        self.keys.get(key).map_or(0, |queue| queue.items.len())
    }

    /// Returns the number of items.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no items.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Drops all items, and forgets all debts.
    pub fn clear(&mut self) {
        *self = Self { last_number: self.last_number, ..Self::default() };
    }

    /// Moves a key behind all others.
    fn defer(&mut self, key: &K) {
        let number = self.next_number();
        let Some(queue) = self.keys.get_mut(key) else { return };
        let last = self.turns.last_key_value().map_or(0, |((time, _), _)| *time);
        self.turns.remove(&queue.turn);
        queue.turn = (last, number);
        self.turns.insert(queue.turn, key.clone());
    }

    fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Counts a removed item. An empty queue remembers no debts.
    fn count_removed(&mut self) {
        self.len -= 1;
        if self.len == 0 {
            self.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn long_queue_does_not_block_another() {
        let mut queue = FairQueue::default();
        for n in 0..100 {
            queue.push(&"flood", 64, 1, ("flood", n));
        }
        assert_eq!(queue.pop(), Some(("flood", 0)));
        queue.push(&"small", 1, 1, ("small", 0));
        assert_eq!(queue.pop(), Some(("small", 0)));
        let rest: Vec<_> = std::iter::from_fn(|| queue.pop()).map(|(_, n)| n).collect();
        assert_eq!(rest, (1..100).collect::<Vec<_>>());
        assert!(queue.keys.is_empty(), "the empty queue still has keys");
    }

    #[test]
    fn cancelled_items_cost_their_key_nothing() {
        let mut queue = FairQueue::default();
        queue.push(&"other", 1, 1, 0);
        let numbers: Vec<_> = (1..100).map(|n| queue.push(&"impatient", 1, 1, n)).collect();
        for number in numbers {
            assert!(queue.remove(&"impatient", number).is_some());
            assert!(queue.remove(&"impatient", number).is_none(), "a waiter was removed twice");
        }
        queue.push(&"other", 1, 1, 101);
        queue.push(&"impatient", 1, 1, 102);
        let served: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(served, [0, 102, 101]);
    }

    #[test]
    fn keys_alternate_and_items_keep_their_order() {
        let mut queue = FairQueue::default();
        for at in 0..4 {
            queue.push(&"flood", 1, 1, ("flood", at));
        }
        for at in 0..2 {
            queue.push(&"other", 1, 1, ("other", at));
        }
        let served: Vec<_> = std::iter::from_fn(|| queue.pop()).take(3).collect();
        assert_eq!(served, [("flood", 0), ("other", 0), ("flood", 1)]);
        let mut tried = Vec::new();
        queue.serve(16, |key, item| {
            tried.push(*item);
            *key == "flood"
        });
        let (flood, other) = (|at| ("flood", at), ("other", 1));
        assert_eq!(tried, [other, flood(2), other, flood(3), other]);
        assert_eq!((queue.len(), queue.count(&"other"), queue.count(&"flood")), (1, 1, 0));
    }

    #[test]
    fn refused_keys_do_not_starve_those_behind_them() {
        let mut queue = FairQueue::default();
        for key in 0..40 {
            queue.push(&key, 1, 1, ());
        }
        let mut served = Vec::new();
        for _ in 0..3 {
            queue.serve(16, |key, ()| {
                served.extend((*key >= 32).then_some(*key));
                *key >= 32
            });
        }
        assert_eq!(served, (32..40).collect::<Vec<_>>());
    }

    proptest! {
        #[test]
        fn busy_queues_are_served_by_weight(
            weights in prop::collection::vec(1u32..5, 2..5), cost in 1u64..100,
        ) {
            let mut queue = FairQueue::default();
            for (key, weight) in weights.iter().enumerate() {
                for _ in 0..100 {
                    queue.push(&key, cost, *weight, key);
                }
            }
            let mut served = vec![0_i64; weights.len()];
            for _ in 0..100 {
                served[queue.pop().unwrap()] += 1;
            }
            let all: i64 = weights.iter().copied().map(i64::from).sum();
            for (count, weight) in served.iter().zip(&weights) {
                prop_assert!((count * all - 100 * i64::from(*weight)).abs() <= 2 * all, "{served:?}");
            }
        }

        #[test]
        fn every_item_is_returned_once(pushes in prop::collection::vec((0u8..5, 0u64..1000, 0u32..9), 0..100)) {
            let mut queue = FairQueue::default();
            for (n, (key, cost, weight)) in pushes.iter().enumerate() {
                queue.push(key, *cost, *weight, n);
            }
            prop_assert_eq!(queue.len(), pushes.len());
            let mut out: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
            out.sort_unstable();
            prop_assert_eq!(out, (0..pushes.len()).collect::<Vec<_>>());
        }

        #[test]
        fn items_are_never_lost_or_reordered_per_key(
            steps in prop::collection::vec((0usize..24, 0u8..4, any::<prop::sample::Index>()), 1..200),
        ) {
            let mut queue = FairQueue::default();
            let mut waiting: Vec<(usize, u64)> = Vec::new();
            for (key, step, at) in steps {
                match step {
                    0 | 1 => waiting.push((key, queue.push(&key, 1, 1, ()))),
                    2 if !waiting.is_empty() => {
                        let (key, number) = waiting.swap_remove(at.index(waiting.len()));
                        prop_assert!(queue.remove(&key, number).is_some());
                    }
                    _ => {
                        let (mut served, mut remaining) = (Vec::new(), at.index(4));
                        queue.serve(3, |key, ()| {
                            let is_served = remaining > 0 && *key != 0;
                            if is_served {
                                remaining -= 1;
                                served.push(*key);
                            }
                            is_served
                        });
                        for key in served {
                            let of_it = waiting.iter().enumerate().filter(|(_, (of, _))| *of == key);
                            let (first, _) = of_it.min_by_key(|(_, (_, number))| *number).unwrap();
                            waiting.remove(first);
                        }
                    }
                }
                prop_assert_eq!(queue.len(), waiting.len());
                let mut there: Vec<u64> =
                    queue.turns().flat_map(|(_, items)| items.map(|(number, ())| number)).collect();
                let mut expected: Vec<u64> = waiting.iter().map(|(_, number)| *number).collect();
                there.sort_unstable();
                expected.sort_unstable();
                prop_assert_eq!(there, expected);
                prop_assert!(queue.turns.len() <= queue.keys.len());
            }
        }
    }
}
