//! Selects the tier for a batch: a pure function of the state when the batch is queued.
//!
//! Tiers are considered in their order if they accept batches now. The tier for cold data is HDFS.
//! It comes first for cold batches (large, or of a huge partition), and last for others. After a
//! failed write the batch goes to the next tier. If no tier accepts batches, it waits for the first
//! in the same order. A batch stays visible in memory until a tier has published it, so any order
//! is safe for readers (docs/protocol.md §4.5).

/// Readiness of a tier to accept batches of a shuffle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readiness {
    /// The shuffle is not registered in the tier.
    Absent,
    /// The tier accepts nothing now: no disk, an unresponsive remote, or too much in flight.
    Unavailable,
    /// The tier accepts batches.
    Ready,
}

/// A tier as placement sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TierView {
    /// Readiness to accept the batch.
    pub readiness: Readiness,
    /// True if the tier is for cold data.
    pub is_for_cold: bool,
}

/// Returns whether a chain of `bytes` bytes is cold. Its partition has received `received_bytes`.
/// One of them must exceed its limit.
pub fn is_cold(bytes: u64, received_bytes: u64, cold_bytes: u64, huge_partition_bytes: u64) -> bool {
    bytes > cold_bytes || received_bytes > huge_partition_bytes
}

/// Returns the index in `tiers` of the tier for a batch, or `None` if the shuffle has no tier.
/// `failed` is the tier whose write of the batch failed last.
pub fn select(tiers: &[TierView], is_cold: bool, failed: Option<usize>) -> Option<usize> {
    let belongs = |index: &usize| tiers[*index].is_for_cold == is_cold;
    let (mut order, others): (Vec<usize>, Vec<usize>) = (0..tiers.len()).partition(belongs);
    order.extend(others);
    if let Some(position) = order.iter().position(|index| Some(*index) == failed) {
        order.rotate_left(position + 1);
    }
    let with = |wanted: Readiness| order.iter().copied().find(|index| tiers[*index].readiness == wanted);
    // If no tier is ready, the batch waits for the first one in the same order.
    with(Readiness::Ready).or_else(|| with(Readiness::Unavailable))
}

#[cfg(test)]
mod tests {
    use super::Readiness::{Absent, Ready, Unavailable};
    use super::*;

    const HOT: usize = 0;
    const COLD: usize = 1;

    fn choose(hot: Readiness, cold: Readiness, is_cold: bool, failed: Option<usize>) -> Option<usize> {
        let tier = |readiness, is_for_cold| TierView { readiness, is_for_cold };
        select(&[tier(hot, false), tier(cold, true)], is_cold, failed)
    }

    #[test]
    fn cold_batches_use_the_cold_tier_and_others_the_first() {
        assert_eq!(choose(Ready, Ready, false, None), Some(HOT));
        assert_eq!(choose(Ready, Ready, true, None), Some(COLD));
        assert!(is_cold(101, 0, 100, 1000) && is_cold(1, 1001, 100, 1000));
        assert!(!is_cold(100, 1000, 100, 1000));
    }

    #[test]
    fn failed_or_full_tier_is_replaced_by_the_other() {
        assert_eq!(choose(Ready, Ready, false, Some(HOT)), Some(COLD));
        assert_eq!(choose(Ready, Ready, true, Some(COLD)), Some(HOT));
        assert_eq!(choose(Unavailable, Ready, false, None), Some(COLD));
        assert_eq!(choose(Ready, Unavailable, true, None), Some(HOT));
        let after_failure = choose(Unavailable, Ready, false, Some(COLD));
        assert_eq!(after_failure, Some(COLD), "the failed tier is better than an unavailable one");
    }

    #[test]
    fn tier_is_not_used_for_shuffles_without_it() {
        for readiness in [Ready, Unavailable] {
            for failed in [None, Some(HOT), Some(COLD)] {
                for is_cold in [false, true] {
                    assert_eq!(choose(readiness, Absent, is_cold, failed), Some(HOT));
                    assert_eq!(choose(Absent, readiness, is_cold, failed), Some(COLD));
                }
            }
        }
        assert_eq!(choose(Absent, Absent, false, None), None);
        assert_eq!(select(&[], true, None), None);
    }

    #[test]
    fn unplaceable_batch_waits_for_the_first_tier() {
        assert_eq!(choose(Unavailable, Unavailable, false, None), Some(HOT));
        assert_eq!(choose(Unavailable, Unavailable, true, None), Some(COLD));
        assert_eq!(choose(Unavailable, Unavailable, false, Some(HOT)), Some(COLD));
    }

    #[test]
    fn three_tiers_are_tried_in_turn() {
        let tier = |is_for_cold| TierView { readiness: Ready, is_for_cold };
        let tiers = [tier(false), tier(true), tier(false)];
        let turn = |is_cold| {
            let next = |failed: &Option<usize>| Some(select(&tiers, is_cold, *failed));
            std::iter::successors(Some(None), next).skip(1).take(4).flatten().collect::<Vec<_>>()
        };
        assert_eq!(turn(false), [0, 2, 1, 0]);
        assert_eq!(turn(true), [1, 0, 2, 1]);
    }
}
