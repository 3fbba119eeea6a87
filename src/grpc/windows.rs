//! How much unread data the peers may have in flight to us: HTTP/2 receive windows out of one budget.
//!
//! Not here: HTTP/2. Invariant: the sum of all granted windows stays within the budget until every new connection is
//! down to the protocol's floor; a grant returns its bytes when the connection ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A connection's window starts at this many bytes by the protocol (RFC 9113 §6.9.2) and can not start lower.
pub(super) const WINDOW_BYTES_MIN: u32 = 65_535;

/// The shared budget. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct WindowBudget {
    granted: Arc<AtomicU64>,
    budget_bytes: u64,
    connection_bytes_max: u32,
}

/// A connection's windows.
#[derive(Debug)]
pub(super) struct WindowGrant {
    budget: Arc<AtomicU64>,
    bytes: u32,
}

impl WindowBudget {
    pub(super) fn new(budget_bytes: u64, connection_bytes_max: u32) -> Self {
        Self { granted: Arc::default(), budget_bytes, connection_bytes_max }
    }

    /// Sum of the windows of all connections.
    pub(super) fn granted_bytes(&self) -> u64 {
        self.granted.load(Ordering::Relaxed)
    }

    /// The window of a new connection.
    pub(super) fn grant(&self) -> WindowGrant {
        let mut bytes = WINDOW_BYTES_MIN;
        // The closure always returns Some, so there is no failure to handle.
        let _updated = self.granted.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |granted| {
            bytes = window_for(self.budget_bytes, granted, self.connection_bytes_max);
            Some(granted + u64::from(bytes))
        });
        WindowGrant { budget: Arc::clone(&self.granted), bytes }
    }
}

/// The largest window times the square of the free share: a few connections get large windows, a hundred still get
/// some 200 KiB each, and what is left never reaches zero. hyper can not shrink the window of a live connection, so
/// early ones may not take so much that nothing is left for late ones.
fn window_for(budget_bytes: u64, granted_bytes: u64, max: u32) -> u32 {
    let free = budget_bytes.saturating_sub(granted_bytes);
    let share = u128::from(free) * u128::from(free) * u128::from(max);
    let budget = u128::from(budget_bytes).max(1);
    let bytes = (share / (budget * budget)).min(u128::from(free));
    u32::try_from(bytes).unwrap_or(max).max(WINDOW_BYTES_MIN)
}

impl WindowGrant {
    /// Bytes of the connection's window.
    pub(super) fn bytes(&self) -> u32 {
        self.bytes
    }
}

impl Drop for WindowGrant {
    fn drop(&mut self) {
        self.budget.fetch_sub(u64::from(self.bytes), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_shrink_as_connections_grow_and_come_back() {
        let budget = WindowBudget::new(128 << 20, 4 << 20);
        let first = budget.grant();
        assert_eq!(first.bytes(), 4 << 20);
        let hundred: Vec<_> = (0..100).map(|_| budget.grant()).collect();
        assert!(hundred.windows(2).all(|pair| pair[0].bytes() >= pair[1].bytes()));
        assert!(hundred[99].bytes() > 200 << 10, "{}", hundred[99].bytes());
        let late: Vec<_> = (0..300).map(|_| budget.grant()).collect();
        assert!(late.iter().all(|grant| grant.bytes() >= WINDOW_BYTES_MIN));
        assert!(budget.granted_bytes() <= 128 << 20);
        drop((first, hundred, late));
        assert_eq!(budget.granted_bytes(), 0);
        assert_eq!(budget.grant().bytes(), 4 << 20);
    }

    #[test]
    fn a_used_up_budget_gives_the_protocols_floor() {
        assert_eq!(window_for(1 << 20, 2 << 20, 4 << 20), WINDOW_BYTES_MIN);
        assert_eq!(window_for(0, 0, 4 << 20), WINDOW_BYTES_MIN);
    }
}
