//! Limits the share of one application in a resource, by pure functions.
//!
//! Amounts that are returned soon, such as read memory, are free to all but the [`reserve`]. That
//! is for applications that hold nothing, and for a single one until it holds [`half`]. Of anything
//! that is returned late or never (registrations, reported ids, partitions, unread responses), an
//! application may hold as much as it leaves free ([`room`]). A single one thus gets half, two
//! equal ones a third each, and three a quarter. In the last quarter, each may hold at most a
//! quarter of the free rest. Invariant: every newcomer thus takes at most a fifth of it, and leaves
//! something to the next.

/// Fraction of the capacity that is reserved for applications that hold nothing.
const RESERVE_DIVISOR: u64 = 8;

/// Divisor of the bytes that are free to an application: the maximum of one memory response, or of
/// its block lists. So responses become smaller with many concurrent readers, and slow readers
/// leave some room.
pub const APP_RESPONSE_DIVISOR: u64 = 4;
/// Divisor of the bytes that are free to a connection: the maximum of one memory response. It is
/// smaller than [`APP_RESPONSE_DIVISOR`], because the budget of a connection is smaller.
pub const CONNECTION_RESPONSE_DIVISOR: u64 = 2;

/// Fraction of a resource that is returned late or never, reserved for applications that hold
/// little.
const STATE_RESERVE_DIVISOR: u64 = 4;
/// In the reserve, an application may hold this fraction of the free rest.
const RESERVED_PART_DIVISOR: u64 = 4;

/// Returns the part of `capacity` that is reserved for applications that hold nothing.
#[must_use]
pub fn reserve(capacity: u64) -> u64 {
    capacity / RESERVE_DIVISOR
}

/// Returns how much of `capacity` an application may hold if it is alone.
#[must_use]
pub fn half(capacity: u64) -> u64 {
    capacity / 2
}

/// Returns whether an application may hold `held` of `capacity` while `free` is unused.
#[must_use]
pub fn is_enough(capacity: u64, free: u64, held: u64) -> bool {
    let part = if free >= capacity / STATE_RESERVE_DIVISOR { free } else { free / RESERVED_PART_DIVISOR };
    held <= part
}

/// Returns how much more an application that holds `held` of `capacity` may take while `free` is
/// unused.
#[must_use]
pub fn room(capacity: u64, free: u64, held: u64) -> u64 {
    let reserve = capacity / STATE_RESERVE_DIVISOR;
    // The application leaves as much as it holds, and does not touch the reserve.
    let outside = (free.saturating_sub(held) / 2).min(free.saturating_sub(reserve));
    // The application leaves four times the amount that it holds.
    let held_four_times = held.saturating_mul(RESERVED_PART_DIVISOR);
    let inside = free.saturating_sub(held_four_times) / (RESERVED_PART_DIVISOR + 1);
    outside.max(inside)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn single_claimant_gets_half_and_leaves_room_for_later_ones() {
        assert_eq!(room(1600, 1600, 0), 800);
        assert_eq!(room(1600, 800, 800), 0);
        assert_eq!(room(1600, 800, 0), 400);
        assert_eq!(
            room(1600, 400, 0),
            80,
            "the last quarter must be reserved for applications that hold little"
        );
        assert_eq!(room(1600, 400, 200), 0);
        let mut free = 1 << 30;
        for _ in 0..20 {
            free -= room(1 << 30, free, 0);
        }
        assert!(
            room(1 << 30, free, 0) > 900 << 10,
            "only {free} bytes remain after 20 applications took their maximum"
        );
    }

    #[test]
    fn concurrent_claimants_get_equal_shares() {
        let (mut held, mut free) = ([0u64; 3], 1_000_000);
        while let Some(app) = (0..3)
            .find(|app| room(1_000_000, free, held[*app]) > 0 && held[*app] == *held.iter().min().unwrap())
        {
            held[app] += 1;
            free -= 1;
        }
        assert!(held.iter().all(|held| held.abs_diff(250_000) <= 1), "{held:?}");
    }

    proptest! {
        #[test]
        fn room_is_the_largest_admissible_charge(capacity in 0u64..2000, free in 0u64..2000, held in 0u64..2000) {
            let free = free.min(capacity);
            let enough = |more: u64| more <= free && is_enough(capacity, free - more, held + more);
            let most = (1..=free).rev().find(|more| enough(*more)).unwrap_or(0);
            prop_assert_eq!(room(capacity, free, held), most);
        }
    }
}
