//! What a connection may have at most, out of a budget of all connections: bytes of receive windows, calls in progress.
//!
//! Not here: HTTP/2. Invariant: the sum of all shares stays within the budget until every new connection is down to
//! the least that is any use; a share goes back when its connection ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A connection's window starts at this many bytes by the protocol (RFC 9113 §6.9.2) and cannot start lower.
pub(super) const WINDOW_BYTES_MIN: u32 = 65_535;

/// Calls in progress that every connection may have: a ticket, a send, a report and a read.
pub(super) const STREAMS_MIN: u32 = 4;

/// The shared budget. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct ShareBudget {
    given: Arc<AtomicU64>,
    total: u64,
    limits: ShareLimits,
}

/// Of one connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct ShareLimits {
    pub(super) least: u32,
    pub(super) most: u32,
}

/// A connection's part.
#[derive(Debug)]
pub(super) struct Share {
    given: Arc<AtomicU64>,
    amount: u32,
}

impl ShareBudget {
    pub(super) fn new(total: u64, limits: ShareLimits) -> Self {
        Self { given: Arc::default(), total, limits }
    }

    /// Sum of the shares of all connections.
    pub(super) fn given(&self) -> u64 {
        self.given.load(Ordering::Relaxed)
    }

    /// The share of a new connection.
    pub(super) fn take(&self) -> Share {
        let mut amount = self.limits.least;
        // The closure always returns Some, so there is no failure to handle.
        let _updated = self.given.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |given| {
            amount = share_of(self.total, given, self.limits);
            Some(given + u64::from(amount))
        });
        Share { given: Arc::clone(&self.given), amount }
    }
}

/// The largest share times the square of what is free: a few connections get much, a hundred still get a twentieth of
/// it each, and what is left never reaches zero. hyper cannot take from a live connection, so early ones may not
/// take so much that nothing is left for late ones.
fn share_of(total: u64, given: u64, limits: ShareLimits) -> u32 {
    let free = total.saturating_sub(given);
    let share = u128::from(free) * u128::from(free) * u128::from(limits.most);
    let total = u128::from(total).max(1);
    let amount = (share / (total * total)).min(u128::from(free));
    u32::try_from(amount).unwrap_or(limits.most).max(limits.least.min(limits.most))
}

impl Share {
    pub(super) fn amount(&self) -> u32 {
        self.amount
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.given.fetch_sub(u64::from(self.amount), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOWS: ShareLimits = ShareLimits { least: WINDOW_BYTES_MIN, most: 4 << 20 };

    #[test]
    fn windows_shrink_as_connections_grow_and_come_back() {
        let budget = ShareBudget::new(128 << 20, WINDOWS);
        let first = budget.take();
        assert_eq!(first.amount(), 4 << 20);
        let hundred: Vec<_> = (0..100).map(|_| budget.take()).collect();
        assert!(hundred.windows(2).all(|pair| pair[0].amount() >= pair[1].amount()));
        assert!(hundred[99].amount() > 200 << 10, "{}", hundred[99].amount());
        let late: Vec<_> = (0..300).map(|_| budget.take()).collect();
        assert!(late.iter().all(|share| share.amount() >= WINDOW_BYTES_MIN));
        assert!(budget.given() <= 128 << 20);
        drop((first, hundred, late));
        assert_eq!(budget.given(), 0);
        assert_eq!(budget.take().amount(), 4 << 20);
    }

    #[test]
    fn a_used_up_budget_gives_the_protocols_floor() {
        assert_eq!(share_of(1 << 20, 2 << 20, WINDOWS), WINDOW_BYTES_MIN);
        assert_eq!(share_of(0, 0, WINDOWS), WINDOW_BYTES_MIN);
    }

    #[test]
    fn calls_of_thousands_of_connections_stay_near_their_budget() {
        let budget = ShareBudget::new(8192, ShareLimits { least: STREAMS_MIN, most: 256 });
        let some: Vec<_> = (0..112).map(|_| budget.take()).collect();
        assert_eq!(some[0].amount(), 256);
        assert!(some[111].amount() >= 12, "{}", some[111].amount());
        assert!(budget.given() <= 8192);
        let many: Vec<_> = (112..4096).map(|_| budget.take()).collect();
        assert!(budget.given() <= 8192 + u64::from(STREAMS_MIN) * 4096, "{}", budget.given());
        drop((some, many));
        assert_eq!(budget.given(), 0);
    }

    #[test]
    fn a_limit_below_the_least_counts() {
        assert_eq!(share_of(0, 0, ShareLimits { least: 4, most: 1 }), 1);
    }
}
