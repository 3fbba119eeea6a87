//! Selects the buffers to flush, with pure functions of values: no clock, no lock, no I/O.
//!
//! *Settled* bytes are in buffers and not yet being flushed: used − reserved by tickets − in
//! flight. The watermarks are fractions of the capacity without reservations (capacity − reserved).
//! Flushing therefore starts earlier while clients hold large reservations, because that memory is
//! about to be filled. Below the watermarks, it also starts for a refused request, for too many
//! small blocks, and for a partition that is too large ([`is_oversized`], [`is_stuck`]).

use std::collections::{BinaryHeap, HashSet};

use crate::memory::admission::fair::{self, Claimant};
use crate::schema::kind::{MIB, TIB, ratio, size};
use crate::schema::section;

section! {
    /// Watermarks and bounds.
    #[table("hybrid_store", "Flushing of memory: when, and to which tier.")]
    #[derive(Copy)]
    pub struct Limits {
        /// Flushing starts when blocks that are not being flushed exceed this share of capacity.
        #[key("hybrid_store.memory_spill_high_watermark", ratio(), AtOnce)]
        pub high_watermark: f64 = 0.8,
        /// Flushing stops at this share of capacity.
        #[key("hybrid_store.memory_spill_low_watermark", ratio(), AtOnce)]
        pub low_watermark: f64 = 0.2,
        /// A partition larger than this is flushed at once.
        #[key("hybrid_store.memory_single_buffer_max_spill_size", size(MIB..=TIB), AtOnce)]
        pub single_buffer_bytes_max: u64 = 256 * MIB,
        /// The same for huge partitions (see app_config); lowered to half of their memory share, so
        /// that one half fills while the other is flushed.
        #[key("hybrid_store.huge_partition_memory_single_buffer_max_spill_size", size(MIB..=TIB), AtOnce)]
        pub huge_buffer_bytes_max: u64 = 128_000_000,
        /// Memory that a huge partition may fill.
        pub huge_share_bytes: u64 = u64::MAX,
        /// A partition that has received more in all is huge (docs/protocol.md §4.7).
        pub huge_partition_bytes: u64 = 20_000_000_000,
        /// Batches of one buffer in flight at a time (docs/protocol.md §4.2).
        pub in_flight_batches_max: usize = 5,
        /// Settled blocks, all buffers together, beyond which a flush starts.
        pub blocks_high: u64 = u64::MAX,
        /// Settled blocks at which a flush ends.
        pub blocks_low: u64 = u64::MAX,
    }
}

/// State of memory at one moment, in bytes unless blocks are named. Memory for lists of extents is
/// left out of `capacity` and `used`, because a flush does not free it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryUsage {
    /// Size of the budget.
    pub capacity: u64,
    /// All charged bytes.
    pub used: u64,
    /// Bytes of `used` that are reserved by tickets.
    pub reserved: u64,
    /// Bytes of `used` that are sealed and being flushed.
    pub in_flight: u64,
    /// Blocks in memory.
    pub blocks: u64,
    /// Blocks that are sealed and being flushed.
    pub blocks_in_flight: u64,
    /// Bytes to make room for: the largest request refused since the last check, or the sum that
    /// waiting applications are entitled to; 0 if none.
    pub refused: u64,
}

/// A buffer that could be flushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// Index of its application in the list of applications.
    pub app: usize,
    /// Charged bytes that sealing it would put in flight: the gain of flushing it.
    pub charged_bytes: u64,
    /// Payload bytes among them: the size of the extent.
    pub payload_bytes: u64,
    /// Number of blocks among them.
    pub blocks: u64,
    /// Total payload that the partition has ever received.
    pub received_bytes: u64,
    /// Batches of the buffer already in flight.
    pub in_flight_batches: usize,
}

/// Amount to put in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Goal {
    /// Minimum charged bytes.
    pub bytes: u64,
    /// Minimum number of blocks. Small blocks can become too many long before memory is short.
    pub blocks: u64,
}

impl Goal {
    /// Returns whether there is nothing to flush.
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

/// Returns the amount to put in flight now.
pub fn flush_goal(usage: MemoryUsage, limits: &Limits) -> Goal {
    Goal { bytes: bytes_goal(usage, limits), blocks: blocks_goal(usage, limits) }
}

fn blocks_goal(usage: MemoryUsage, limits: &Limits) -> u64 {
    let settled = usage.blocks.saturating_sub(usage.blocks_in_flight);
    if settled > limits.blocks_high { settled.saturating_sub(limits.blocks_low) } else { 0 }
}

fn bytes_goal(usage: MemoryUsage, limits: &Limits) -> u64 {
    let settled = usage.used.saturating_sub(usage.reserved).saturating_sub(usage.in_flight);
    let room = usage.capacity.saturating_sub(usage.reserved);
    let over_high = settled > share(room, limits.high_watermark);
    let watermark_goal =
        if over_high { settled.saturating_sub(share(room, limits.low_watermark)) } else { 0 };
    // A refused request waits for room that the watermark may never create (80 % full, 25 %
    // requested).
    let coming_free = usage.capacity.saturating_sub(usage.used) + usage.in_flight;
    let refusal_goal = usage.refused.saturating_sub(coming_free).min(settled);
    watermark_goal.max(refusal_goal)
}

/// Returns the indexes of the buffers to flush.
///
/// The first step takes buffers of applications above their share, until they are down to it. The
/// second takes the largest buffers of all applications until the goal's bytes are reached. The
/// third takes the buffers with the most blocks until the goal's blocks are reached. In the first
/// step, the buffers that reduce an excess most come first. Buffers with too many batches in flight
/// are skipped. Usually O(n + k log n) for k victims of n.
pub fn victims(candidates: &[Candidate], apps: &[Claimant], goal: Goal, limits: &Limits) -> Vec<usize> {
    let ranked = |weight: &dyn Fn(&Candidate) -> (u64, u64)| {
        let may_go = |candidate: &Candidate| candidate.blocks > 0 && has_room_in_flight(candidate, limits);
        let indexed = candidates.iter().enumerate().filter(|(_, candidate)| may_go(candidate));
        let weighed = indexed.map(|(index, candidate)| (weight(candidate), index));
        let mut heap: BinaryHeap<_> = weighed.filter(|((weight, _), _)| *weight > 0).collect();
        std::iter::from_fn(move || heap.pop().map(|(_, index)| index))
    };
    let mut victims =
        Victims { candidates, indexes: Vec::new(), taken: HashSet::new(), sum: Goal::default() };
    let mut excesses = excesses(apps, goal.bytes);
    let excess_of = |candidate: &Candidate| excesses.get(candidate.app).copied().unwrap_or(0);
    let of_those_over = ranked(&|it| (it.charged_bytes.min(excess_of(it)), it.charged_bytes));
    for index in of_those_over {
        let excess = &mut excesses[candidates[index].app];
        if victims.sum.bytes >= goal.bytes {
            break;
        }
        if *excess > 0 {
            *excess = excess.saturating_sub(candidates[index].charged_bytes);
            victims.take(index);
        }
    }
    if victims.sum.bytes < goal.bytes {
        let largest = ranked(&|it| (it.charged_bytes, 0));
        victims.take_until(largest, |sum| sum.bytes >= goal.bytes);
    }
    if victims.sum.blocks < goal.blocks {
        let most_blocks = ranked(&|it| (it.blocks, 0));
        victims.take_until(most_blocks, |sum| sum.blocks >= goal.blocks);
    }
    victims.indexes
}

/// The buffers chosen so far.
struct Victims<'a> {
    candidates: &'a [Candidate],
    indexes: Vec<usize>,
    taken: HashSet<usize>,
    sum: Goal,
}

impl Victims<'_> {
    fn take(&mut self, index: usize) {
        if self.taken.insert(index) {
            self.sum.bytes = self.sum.bytes.saturating_add(self.candidates[index].charged_bytes);
            self.sum.blocks += self.candidates[index].blocks;
            self.indexes.push(index);
        }
    }

    fn take_until(&mut self, ranked: impl Iterator<Item = usize>, is_enough: impl Fn(Goal) -> bool) {
        for index in ranked {
            if is_enough(self.sum) {
                return;
            }
            self.take(index);
        }
    }
}

/// Returns the excess of each application over its share, if the total is reduced by `bytes`.
fn excesses(apps: &[Claimant], bytes: u64) -> Vec<u64> {
    let held = apps.iter().fold(0_u64, |sum, app| sum.saturating_add(app.demand));
    let level = fair::level(held.saturating_sub(bytes), apps);
    apps.iter().map(|app| app.demand.saturating_sub(level.share(app.weight))).collect()
}

/// Returns whether a buffer is to be flushed because of its own size. Only the current list counts,
/// without the batches in flight (docs/protocol.md §11 staging-size).
pub fn is_oversized(candidate: Candidate, limits: &Limits) -> bool {
    let is_huge = candidate.received_bytes > limits.huge_partition_bytes;
    let bytes_max = match is_huge {
        true => {
            limits.huge_buffer_bytes_max.min(limits.huge_share_bytes / 2).min(limits.single_buffer_bytes_max)
        }
        false => limits.single_buffer_bytes_max,
    };
    candidate.payload_bytes > bytes_max
}

/// Returns whether a buffer that fills its partition's share of the memory is to be flushed below
/// its threshold. Without a batch in flight its writers would wait forever.
pub fn is_stuck(candidate: Candidate) -> bool {
    candidate.payload_bytes > 0 && candidate.in_flight_batches == 0
}

/// Returns whether one more batch of a buffer may be in flight.
pub fn has_room_in_flight(candidate: &Candidate, limits: &Limits) -> bool {
    candidate.in_flight_batches < limits.in_flight_batches_max
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a ratio of 0..=1 of a byte count; a few bytes of rounding do not matter"
)]
fn share(bytes: u64, ratio: f64) -> u64 {
    (bytes as f64 * ratio) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMITS: Limits = Limits {
        high_watermark: 0.8,
        low_watermark: 0.2,
        single_buffer_bytes_max: 100,
        huge_partition_bytes: 1_000,
        huge_buffer_bytes_max: 50,
        huge_share_bytes: u64::MAX,
        in_flight_batches_max: 5,
        blocks_high: 800,
        blocks_low: 200,
    };

    fn usage(used: u64, reserved: u64, in_flight: u64) -> MemoryUsage {
        MemoryUsage { capacity: 1_000, used, reserved, in_flight, ..MemoryUsage::default() }
    }

    fn bytes_goal(usage: MemoryUsage) -> u64 {
        let goal = flush_goal(usage, &LIMITS);
        assert_eq!(goal.blocks, 0);
        goal.bytes
    }

    #[test]
    fn nothing_is_flushed_below_the_high_watermark() {
        assert_eq!(bytes_goal(usage(800, 0, 0)), 0);
        assert_eq!(bytes_goal(usage(801, 0, 0)), 601);
    }

    #[test]
    fn bytes_in_flight_are_not_flushed_twice() {
        assert_eq!(bytes_goal(usage(900, 0, 100)), 0);
        assert_eq!(bytes_goal(usage(1_000, 0, 100)), 700);
    }

    #[test]
    fn reservations_lower_the_watermarks() {
        // 400 settled bytes are 80 % of the 500 that tickets leave.
        assert_eq!(bytes_goal(usage(900, 500, 0)), 0);
        assert_eq!(bytes_goal(usage(901, 500, 0)), 301);
    }

    #[test]
    fn refused_request_triggers_flush_below_the_watermark() {
        let refused =
            |refused, used, in_flight| bytes_goal(MemoryUsage { refused, ..usage(used, 0, in_flight) });
        assert_eq!(refused(300, 750, 0), 50);
        assert_eq!(refused(300, 750, 50), 0);
        assert_eq!(refused(200, 750, 0), 0);
        assert_eq!(refused(5_000, 750, 0), 750);
    }

    #[test]
    fn too_many_blocks_are_flushed_however_small_they_are() {
        let few_bytes =
            |blocks, blocks_in_flight| MemoryUsage { blocks, blocks_in_flight, ..usage(10, 0, 0) };
        assert_eq!(flush_goal(few_bytes(800, 0), &LIMITS), Goal::default());
        assert_eq!(flush_goal(few_bytes(801, 0), &LIMITS), Goal { bytes: 0, blocks: 601 });
        assert!(
            flush_goal(few_bytes(801, 1), &LIMITS).is_nothing(),
            "blocks in flight must not be flushed again"
        );
    }

    #[test]
    fn huge_partitions_have_their_own_threshold() {
        let buffer = |payload_bytes, received_bytes, in_flight_batches| Candidate {
            app: 0,
            charged_bytes: payload_bytes,
            payload_bytes,
            blocks: 1,
            received_bytes,
            in_flight_batches,
        };
        assert!(!is_oversized(buffer(100, 1_000, 0), &LIMITS));
        assert!(is_oversized(buffer(101, 1_000, 0), &LIMITS));
        assert!(!is_oversized(buffer(50, 1_001, 0), &LIMITS));
        assert!(is_oversized(buffer(51, 1_001, 4), &LIMITS));
        assert!(has_room_in_flight(&buffer(51, 1_001, 4), &LIMITS));
        assert!(
            !has_room_in_flight(&buffer(51, 1_001, 5), &LIMITS),
            "too many batches of the buffer are in flight"
        );
        assert!(is_stuck(buffer(1, 1_001, 0)));
        assert!(!is_stuck(buffer(1, 1_001, 1)) && !is_stuck(buffer(0, 1_001, 0)));
    }

    fn candidate() -> impl Strategy<Value = Candidate> {
        (0u64..200, 0u64..50, 0usize..8).prop_map(|(charged_bytes, blocks, in_flight_batches)| Candidate {
            app: 0,
            charged_bytes,
            payload_bytes: charged_bytes,
            blocks,
            received_bytes: 0,
            in_flight_batches,
        })
    }

    /// Returns one application that holds all candidates.
    fn all_of_one(candidates: &[Candidate]) -> [Claimant; 1] {
        [Claimant { weight: 1, demand: candidates.iter().map(|it| it.charged_bytes).sum() }]
    }

    #[test]
    fn apps_over_their_share_are_flushed_first_to_their_share() {
        let of = |app, charged_bytes| Candidate {
            app,
            charged_bytes,
            payload_bytes: charged_bytes,
            blocks: 1,
            received_bytes: 0,
            in_flight_batches: 0,
        };
        let candidates = [of(0, 100), of(1, 40), of(1, 50), of(1, 60), of(2, 30)];
        let apps = |weight| [100, 150, 30].map(|demand| Claimant { weight, demand });
        let chosen =
            |apps: &[Claimant], bytes| victims(&candidates, apps, Goal { bytes, blocks: 0 }, &LIMITS);
        assert_eq!(
            chosen(&apps(1), 50),
            [3],
            "the largest partition belongs to an application below its share"
        );
        assert_eq!(
            chosen(&apps(1), 100),
            [3, 2],
            "the second application exceeds the level of 75 bytes most"
        );
        let mut heavier = apps(1);
        heavier[1].weight = 9;
        assert_eq!(chosen(&heavier, 50), [0], "with its weight only the first application exceeds its share");
        assert_eq!(chosen(&apps(1), 1_000).len(), 5);
        // Tickets count as held but cannot be flushed: the rest comes from the largest buffers.
        let hoarder = [Claimant { weight: 1, demand: 500 }, Claimant { weight: 1, demand: 150 }];
        assert_eq!(chosen(&hoarder, 130), [0, 3]);
    }

    fn eligible(candidate: &Candidate) -> bool {
        candidate.blocks > 0 && candidate.in_flight_batches < LIMITS.in_flight_batches_max
    }

    proptest! {
        #[test]
        fn victims_are_the_largest_and_no_more_than_needed(
            candidates in proptest::collection::vec(candidate(), 0..60), bytes in 0u64..4_000,
        ) {
            let chosen = victims(&candidates, &all_of_one(&candidates), Goal { bytes, blocks: 0 }, &LIMITS);
            let total: u64 = chosen.iter().map(|i| candidates[*i].charged_bytes).sum();
            let possible: u64 = candidates.iter().filter(|c| eligible(c)).map(|c| c.charged_bytes).sum();
            prop_assert!(chosen.iter().all(|i| eligible(&candidates[*i])));
            prop_assert!(total >= bytes.min(possible));
            if let Some(last) = chosen.last() {
                prop_assert!(total - candidates[*last].charged_bytes < bytes, "the goal is reached without the last buffer");
                let smallest = candidates[*last].charged_bytes;
                let left_out = candidates.iter().enumerate().filter(|(i, c)| eligible(c) && !chosen.contains(i));
                prop_assert!(left_out.into_iter().all(|(_, c)| c.charged_bytes <= smallest));
            }
        }

        #[test]
        fn both_goals_are_reached_without_duplicates(
            candidates in proptest::collection::vec(candidate(), 0..60),
            bytes in 0u64..4_000, blocks in 0u64..1_000,
        ) {
            let apps = all_of_one(&candidates);
            let mut chosen = victims(&candidates, &apps, Goal { bytes, blocks }, &LIMITS);
            let sum = |of: fn(&Candidate) -> u64, from: &[usize]| -> u64 { from.iter().map(|i| of(&candidates[*i])).sum() };
            let all: Vec<usize> = (0..candidates.len()).filter(|i| eligible(&candidates[*i])).collect();
            prop_assert!(sum(|c| c.charged_bytes, &chosen) >= bytes.min(sum(|c| c.charged_bytes, &all)));
            prop_assert!(sum(|c| c.blocks, &chosen) >= blocks.min(sum(|c| c.blocks, &all)));
            prop_assert!(chosen.iter().all(|i| eligible(&candidates[*i])));
            chosen.sort_unstable();
            prop_assert!(chosen.windows(2).all(|pair| pair[0] < pair[1]));
        }

        #[test]
        fn goal_never_exceeds_settled_bytes(
            used in 0u64..2_000, reserved in 0u64..1_000, in_flight in 0u64..1_000, refused in 0u64..3_000,
            blocks in 0u64..2_000, blocks_in_flight in 0u64..2_000,
        ) {
            let goal = flush_goal(MemoryUsage { refused, blocks, blocks_in_flight, ..usage(used, reserved, in_flight) }, &LIMITS);
            prop_assert!(goal.bytes <= used.saturating_sub(reserved).saturating_sub(in_flight));
            prop_assert!(goal.blocks <= blocks.saturating_sub(blocks_in_flight));
        }
    }
}
