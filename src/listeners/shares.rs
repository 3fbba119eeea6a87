//! Shares of a budget over all connections: bytes of receive windows, or requests in progress.
//!
//! Invariant: the sum of all shares stays within the budget, since the minimum of every possible
//! connection is reserved. A share returns when its connection ends. If the budget is too small for
//! all minimums, every connection still gets the minimum.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The common budget. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct ShareBudget {
    granted: Arc<GrantedShares>,
    /// Budget beyond the minimums of all connections.
    extra: u64,
    limits: ShareLimits,
}

#[derive(Debug, Default)]
struct GrantedShares {
    all: AtomicU64,
    /// The part of `all` beyond the minimums.
    extra: AtomicU64,
}

/// Limits of one connection's share.
#[derive(Debug, Clone, Copy)]
pub(super) struct ShareLimits {
    pub(super) least: u32,
    pub(super) most: u32,
}

/// A connection's share, returned on drop.
#[derive(Debug)]
pub(super) struct Share {
    granted: Arc<GrantedShares>,
    amount: u32,
    extra: u32,
}

impl ShareBudget {
    /// Creates a budget of `total` for at most `connections_max` connections.
    pub(super) fn new(total: u64, connections_max: usize, limits: ShareLimits) -> Self {
        let limits = ShareLimits { least: limits.least.min(limits.most), ..limits };
        let least = u64::from(limits.least).saturating_mul(connections_max as u64);
        Self { granted: Arc::default(), extra: total.saturating_sub(least), limits }
    }

    /// Returns the sum of the shares of all connections.
    pub(super) fn granted(&self) -> u64 {
        self.granted.all.load(Ordering::Relaxed)
    }

    /// Returns the share of a new connection.
    pub(super) fn take(&self) -> Share {
        let ShareLimits { least, most } = self.limits;
        let mut extra = 0;
        // The closure always returns Some, so there is no failure to handle.
        let _updated = self.granted.extra.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |granted| {
            extra = share_of(self.extra, granted, most - least);
            Some(granted + u64::from(extra))
        });
        let amount = least + extra;
        self.granted.all.fetch_add(u64::from(amount), Ordering::Relaxed);
        Share { granted: Arc::clone(&self.granted), amount, extra }
    }
}

/// Returns the largest share times the square of the free fraction. A few connections get much, a
/// hundred still get a twentieth of it each, and the remainder never reaches zero. hyper cannot
/// shrink a live connection, so early ones must leave enough for late ones.
fn share_of(total: u64, granted: u64, most: u32) -> u32 {
    let free = total.saturating_sub(granted);
    let share = u128::from(free) * u128::from(free) * u128::from(most);
    let total = u128::from(total).max(1);
    let amount = (share / (total * total)).min(u128::from(free));
    u32::try_from(amount).unwrap_or(most)
}

impl Share {
    pub(super) fn amount(&self) -> u32 {
        self.amount
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.granted.extra.fetch_sub(u64::from(self.extra), Ordering::Relaxed);
        self.granted.all.fetch_sub(u64::from(self.amount), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use uniffle_base::budget::memory_plan::{STREAMS_MIN, WINDOW_BYTES_MIN};

    const WINDOWS: ShareLimits = ShareLimits { least: WINDOW_BYTES_MIN, most: 4 << 20 };

    #[test]
    fn windows_follow_the_number_of_connections() {
        let budget = ShareBudget::new(128 << 20, 401, WINDOWS);
        let first = budget.take();
        assert_eq!(first.amount(), 4 << 20);
        let hundred: Vec<_> = (0..100).map(|_| budget.take()).collect();
        assert!(hundred.windows(2).all(|pair| pair[0].amount() >= pair[1].amount()));
        assert!(hundred[99].amount() > 200 << 10, "{}", hundred[99].amount());
        let late: Vec<_> = (0..300).map(|_| budget.take()).collect();
        assert!(late.iter().all(|share| share.amount() >= WINDOW_BYTES_MIN));
        assert!(budget.granted() <= 128 << 20);
        drop((first, hundred, late));
        assert_eq!(budget.granted(), 0);
        assert_eq!(budget.take().amount(), 4 << 20);
    }

    #[test]
    fn small_budget_gives_everyone_the_minimum() {
        let budget = ShareBudget::new(1 << 20, 100, WINDOWS);
        let all: Vec<_> = (0..100).map(|_| budget.take()).collect();
        assert!(all.iter().all(|share| share.amount() == WINDOW_BYTES_MIN));
    }

    #[test]
    fn limit_below_the_minimum_applies() {
        let budget = ShareBudget::new(1000, 10, ShareLimits { least: STREAMS_MIN, most: 1 });
        assert_eq!(budget.take().amount(), 1);
    }

    proptest! {
        #[test]
        fn all_connections_together_stay_within_the_budget(
            connections in 1usize..3000, spare in 0u64..1 << 28, ended in 0usize..3000,
        ) {
            let total = u64::from(WINDOW_BYTES_MIN) * connections as u64 + spare;
            let budget = ShareBudget::new(total, connections, WINDOWS);
            let mut open: Vec<_> = (0..connections).map(|_| budget.take()).collect();
            prop_assert!(budget.granted() <= total);
            prop_assert!(open.iter().all(|share| (WINDOW_BYTES_MIN..=4 << 20).contains(&share.amount())));
            open.truncate(ended);
            open.extend((open.len()..connections).map(|_| budget.take()));
            prop_assert!(budget.granted() <= total);
            drop(open);
            prop_assert_eq!(budget.granted(), 0);
        }
    }
}
