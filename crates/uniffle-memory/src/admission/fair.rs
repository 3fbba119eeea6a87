//! Fairness of memory: weighted max-min shares, as pure functions of values.
//!
//! A claimant that wants less than its share gets its demand. The rest is divided among the others
//! by their weights. The division is therefore one number: the [`Level`] of memory per unit of
//! weight, up to which each claimant may fill. The level is a bound only while the total demand
//! exceeds the capacity.

use std::cmp::Ordering;

/// An application that wants memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claimant {
    /// Weight, at least 1.
    pub weight: u32,
    /// Held and awaited bytes.
    pub demand: u64,
}

/// Memory per unit of weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Level {
    bytes: u64,
    weight: u64,
}

impl Level {
    /// Level without a bound: there is enough for all.
    pub const ENOUGH: Self = Self { bytes: u64::MAX, weight: 0 };

    /// Returns the largest amount for a claimant of `weight`.
    pub fn share(&self, weight: u32) -> u64 {
        if self.weight == 0 { u64::MAX } else { part(self.bytes, weight, self.weight) }
    }
}

/// Returns `bytes × weight / all`, rounded down.
fn part(bytes: u64, weight: u32, all: u64) -> u64 {
    let product = u128::from(bytes) * u128::from(weight);
    product.checked_div(u128::from(all)).map_or(0, |part| u64::try_from(part).unwrap_or(u64::MAX))
}

/// Returns the level at which `capacity` is divided among `claimants`. O(n log n).
pub fn level(capacity: u64, claimants: &[Claimant]) -> Level {
    let mut by_need = claimants.to_vec();
    by_need.sort_unstable_by(by_demand_per_weight);
    let mut remaining = capacity;
    let mut weight: u64 = by_need.iter().map(|claimant| u64::from(claimant.weight)).sum();
    for claimant in by_need {
        if claimant.demand > part(remaining, claimant.weight, weight) {
            return Level { bytes: remaining, weight };
        }
        remaining -= claimant.demand;
        weight -= u64::from(claimant.weight);
    }
    Level::ENOUGH
}

fn by_demand_per_weight(a: &Claimant, b: &Claimant) -> Ordering {
    let scaled = |demand: u64, weight: u32| u128::from(demand) * u128::from(weight);
    scaled(a.demand, b.weight).cmp(&scaled(b.demand, a.weight))
}

/// A request at one moment, while others wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompetingRequest {
    /// Requested bytes.
    pub requested: u64,
    /// Bytes that its application holds.
    pub held: u64,
    /// Share of the application.
    pub share: u64,
    /// Bytes claimed by applications below their share that have waited longer than this one.
    pub ahead: u64,
}

impl CompetingRequest {
    /// Returns how many bytes must be free to grant the request, or `None` for an application that
    /// has its share.
    ///
    /// Within its share an application needs only the requested bytes, because the shares together
    /// never exceed the capacity. Requests can be larger than shares. One request may therefore
    /// exceed the share if longer waiters still find their claims. The longest waiter always makes
    /// progress.
    pub fn room_needed(&self) -> Option<u64> {
        let Self { requested, held, share, ahead } = *self;
        let is_within = held.saturating_add(requested) <= share;
        let needed = if is_within { requested } else { requested.saturating_add(ahead) };
        is_below_share(held, share).then_some(needed)
    }
}

/// Returns whether an application is owed memory. An application that holds nothing always is.
pub fn is_below_share(held: u64, share: u64) -> bool {
    held == 0 || held < share
}

/// Returns the bytes to keep free for an application that waits for `waited` bytes: up to its
/// share, and at least its oldest request of `oldest` bytes.
pub fn claim(held: u64, share: u64, waited: u64, oldest: u64) -> u64 {
    if is_below_share(held, share) { waited.min(share.saturating_sub(held).max(oldest)) } else { 0 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shares(capacity: u64, claimants: &[Claimant]) -> Vec<u64> {
        let level = level(capacity, claimants);
        claimants.iter().map(|it| it.demand.min(level.share(it.weight))).collect()
    }

    fn claimant(weight: u32, demand: u64) -> Claimant {
        Claimant { weight, demand }
    }

    #[test]
    fn small_claims_are_met_and_the_rest_divided_by_weight() {
        let claimants = [claimant(1, 10), claimant(1, 500), claimant(4, 500), claimant(1, 90)];
        assert_eq!(shares(600, &claimants), [10, 100, 400, 90]);
        assert_eq!(level(1100, &claimants), Level::ENOUGH);
        assert_eq!(level(0, &[]), Level::ENOUGH);
        assert_eq!(shares(0, &[claimant(1, 1)]), [0]);
        let huge = claimant(u32::MAX, u64::MAX);
        assert_eq!(shares(u64::MAX, &[huge, huge]), [u64::MAX / 2; 2]);
    }

    #[test]
    fn request_beyond_its_share_needs_unclaimed_memory() {
        let request = CompetingRequest { requested: 10, held: 20, share: 30, ahead: 100 };
        assert_eq!(request.room_needed(), Some(10));
        let beyond = CompetingRequest { requested: 11, ..request };
        assert_eq!(beyond.room_needed(), Some(111));
        assert_eq!(
            CompetingRequest { held: 30, ..beyond }.room_needed(),
            None,
            "an application at its share must get nothing"
        );
        assert_eq!(
            CompetingRequest { held: 0, share: 0, ..beyond }.room_needed(),
            Some(111),
            "an application that holds nothing must be considered"
        );
    }

    #[test]
    fn claim_is_between_one_request_and_the_share() {
        assert_eq!(claim(10, 50, 100, 14), 40);
        assert_eq!(claim(10, 50, 30, 14), 30);
        assert_eq!(claim(49, 50, 100, 14), 14);
        assert_eq!(claim(50, 50, 100, 14), 0);
        assert_eq!(claim(0, 0, 100, 14), 14);
    }

    proptest! {
        #[test]
        fn division_has_max_min_fairness(
            capacity in 0u64..1_000_000,
            claimants in prop::collection::vec((1u32..20, 0u64..200_000).prop_map(|(w, d)| claimant(w, d)), 0..40),
        ) {
            let given = shares(capacity, &claimants);
            let weights: u64 = claimants.iter().map(|it| u64::from(it.weight)).sum();
            let wanted: u64 = claimants.iter().map(|it| it.demand).sum();
            let sum: u64 = given.iter().sum();
            prop_assert!(sum <= capacity);
            // Nothing is left while an application wants it, except for less than a byte each of
            // rounding.
            prop_assert!(sum + claimants.len() as u64 >= capacity.min(wanted));
            for (it, share) in claimants.iter().zip(&given) {
                let fair = part(capacity, it.weight, weights);
                prop_assert!(*share >= it.demand.min(fair), "an application got less than its weighted share");
                // An application that gets less than its demand has no less by weight than any
                // other.
                if *share < it.demand {
                    for (other, theirs) in claimants.iter().zip(&given) {
                        prop_assert!((share + 1) * u64::from(other.weight) >= theirs * u64::from(it.weight));
                    }
                }
            }
        }

        #[test]
        fn order_of_claimants_changes_nothing(
            claimants in prop::collection::vec((1u32..5, 0u64..50).prop_map(|(w, d)| claimant(w, d)), 1..12),
            capacity in 0u64..300, by in 0usize..12,
        ) {
            let mut turned = claimants.clone();
            turned.rotate_left(by % claimants.len());
            let (level, other) = (level(capacity, &claimants), level(capacity, &turned));
            for it in claimants {
                prop_assert_eq!(it.demand.min(level.share(it.weight)), it.demand.min(other.share(it.weight)));
            }
        }

        #[test]
        fn longest_waiter_needs_only_its_request(
            held in 0u64..100, requested in 1u64..100, share in 0u64..100,
        ) {
            let needed = CompetingRequest { requested, held, share, ahead: 0 }.room_needed();
            prop_assert_eq!(needed, is_below_share(held, share).then_some(requested));
        }
    }
}
