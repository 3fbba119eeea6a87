//! Which buffers to flush: pure functions of values, no clock, no lock, no I/O.
//!
//! *Settled* bytes are those that sit in buffers and that no flush is moving yet: used − reserved by tickets − in
//! flight. The watermarks are shares of what tickets leave over (capacity − reserved): when clients hold large
//! reservations, flushing starts earlier, because that memory is about to be filled.

use std::collections::BinaryHeap;

/// Watermarks and bounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Flush when settled bytes pass this share. Default: 0.8.
    pub high_watermark: f64,
    /// Flush down to this share. Default: 0.2.
    pub low_watermark: f64,
    /// A buffer that holds more is flushed by itself. Default: 256 MiB.
    pub single_buffer_bytes_max: u64,
    /// Batches of one buffer in flight at a time (PROTOCOL §4.2). Default: 5.
    pub in_flight_batches_max: usize,
    /// Blocks in memory, all buffers together, beyond which a flush starts as if bytes were short.
    pub blocks_max: u64,
}

/// State of the memory tier at one moment, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Size of the budget.
    pub capacity: u64,
    /// Everything charged.
    pub used: u64,
    /// Of that, reserved by tickets.
    pub reserved: u64,
    /// Of that, sealed and on its way.
    pub in_flight: u64,
    /// Blocks in memory.
    pub blocks: u64,
    /// Largest request that was refused since the last look; 0 if none.
    pub refused: u64,
}

/// One buffer that could be flushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// Charged bytes that sealing it would put in flight.
    pub bytes: u64,
    /// Blocks likewise.
    pub blocks: u64,
    /// Batches of it already in flight.
    pub in_flight_batches: usize,
}

/// How many bytes to put in flight now; 0 = nothing to do.
#[must_use]
pub fn flush_goal(usage: Usage, limits: &Limits) -> u64 {
    let settled = usage.used.saturating_sub(usage.reserved).saturating_sub(usage.in_flight);
    let room = usage.capacity.saturating_sub(usage.reserved);
    let over_high = settled > share(room, limits.high_watermark);
    let over_blocks = usage.blocks > limits.blocks_max;
    let watermark_goal =
        if over_high || over_blocks { settled.saturating_sub(share(room, limits.low_watermark)) } else { 0 };
    // A refused request waits for room that the watermark may never make (80 % full, 25 % asked).
    let coming_free = usage.capacity.saturating_sub(usage.used) + usage.in_flight;
    let refusal_goal = usage.refused.saturating_sub(coming_free).min(settled);
    watermark_goal.max(refusal_goal)
}

/// Indexes of the buffers to flush: the largest first, until `goal` bytes are reached; buffers with too many batches
/// in flight are left alone. O(n + k log n) for k victims of n.
#[must_use]
pub fn victims(candidates: &[Candidate], goal: u64, limits: &Limits) -> Vec<usize> {
    let mut largest_first: BinaryHeap<(u64, usize)> = candidates
        .iter()
        .enumerate()
        .filter(|(_, candidate)| {
            candidate.bytes > 0 && candidate.in_flight_batches < limits.in_flight_batches_max
        })
        .map(|(index, candidate)| (candidate.bytes, index))
        .collect();
    let mut chosen = Vec::new();
    let mut total = 0;
    while total < goal {
        let Some((bytes, index)) = largest_first.pop() else { break };
        total += bytes;
        chosen.push(index);
    }
    chosen
}

/// Whether a buffer is to be flushed because of its own size.
#[must_use]
pub fn is_oversized(candidate: Candidate, limits: &Limits) -> bool {
    candidate.bytes > limits.single_buffer_bytes_max
        && candidate.in_flight_batches < limits.in_flight_batches_max
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
        in_flight_batches_max: 5,
        blocks_max: 1_000,
    };

    fn usage(used: u64, reserved: u64, in_flight: u64) -> Usage {
        Usage { capacity: 1_000, used, reserved, in_flight, ..Usage::default() }
    }

    #[test]
    fn below_the_high_watermark_nothing_is_flushed() {
        assert_eq!(flush_goal(usage(800, 0, 0), &LIMITS), 0);
        assert_eq!(flush_goal(usage(801, 0, 0), &LIMITS), 601);
    }

    #[test]
    fn bytes_in_flight_are_not_flushed_twice() {
        assert_eq!(flush_goal(usage(900, 0, 100), &LIMITS), 0);
        assert_eq!(flush_goal(usage(1_000, 0, 100), &LIMITS), 700);
    }

    #[test]
    fn reservations_lower_the_watermarks() {
        // 400 settled of 500 that tickets leave over is 80 %.
        assert_eq!(flush_goal(usage(900, 500, 0), &LIMITS), 0);
        assert_eq!(flush_goal(usage(901, 500, 0), &LIMITS), 301);
    }

    #[test]
    fn a_refused_request_is_made_room_for_below_the_watermark() {
        let refused =
            |refused, used, in_flight| flush_goal(Usage { refused, ..usage(used, 0, in_flight) }, &LIMITS);
        assert_eq!(refused(300, 750, 0), 50);
        assert_eq!(refused(300, 750, 50), 0);
        assert_eq!(refused(200, 750, 0), 0);
        assert_eq!(refused(5_000, 750, 0), 750);
    }

    #[test]
    fn too_many_blocks_count_like_too_many_bytes() {
        assert_eq!(flush_goal(Usage { blocks: 1_001, ..usage(300, 0, 0) }, &LIMITS), 100);
    }

    fn candidate() -> impl Strategy<Value = Candidate> {
        (0u64..200, 0u64..50, 0usize..8).prop_map(|(bytes, blocks, in_flight_batches)| Candidate {
            bytes,
            blocks,
            in_flight_batches,
        })
    }

    proptest! {
        #[test]
        fn victims_are_the_largest_and_no_more_than_needed(
            candidates in proptest::collection::vec(candidate(), 0..60), goal in 0u64..4_000,
        ) {
            let chosen = victims(&candidates, goal, &LIMITS);
            let total: u64 = chosen.iter().map(|i| candidates[*i].bytes).sum();
            let eligible = |c: &Candidate| c.bytes > 0 && c.in_flight_batches < LIMITS.in_flight_batches_max;
            let possible: u64 = candidates.iter().filter(|c| eligible(c)).map(|c| c.bytes).sum();
            prop_assert!(chosen.iter().all(|i| eligible(&candidates[*i])));
            prop_assert!(total >= goal.min(possible));
            if let Some(last) = chosen.last() {
                prop_assert!(total - candidates[*last].bytes < goal, "the last one was needed");
                let smallest = candidates[*last].bytes;
                let left_out = candidates.iter().enumerate().filter(|(i, c)| eligible(c) && !chosen.contains(i));
                prop_assert!(left_out.into_iter().all(|(_, c)| c.bytes <= smallest));
            }
        }

        #[test]
        fn the_goal_is_never_more_than_what_is_settled(
            used in 0u64..2_000, reserved in 0u64..1_000, in_flight in 0u64..1_000, refused in 0u64..3_000,
        ) {
            let goal = flush_goal(Usage { refused, ..usage(used, reserved, in_flight) }, &LIMITS);
            prop_assert!(goal <= used.saturating_sub(reserved).saturating_sub(in_flight));
        }
    }
}
