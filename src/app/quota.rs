//! A bounded counter whose shares are returned by `Drop`. It limits the number of stored block ids.
//!
//! Invariant: the counter is the sum of all shares. Only [`QuotaShare::move_from`] exceeds the
//! bound. Configurable quotas are in `usage`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Error: the bound is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("limit of {max} is reached")]
pub struct QuotaExceeded {
    /// The bound.
    pub max: u64,
}

/// A bounded counter; clones share it.
#[derive(Debug, Clone)]
pub struct Quota(Arc<BoundedCounter>);

#[derive(Debug)]
struct BoundedCounter {
    used: AtomicU64,
    max: u64,
}

impl Quota {
    /// Creates a counter that never exceeds `max`, except through [`QuotaShare::move_from`].
    pub fn new(max: u64) -> Self {
        Self(Arc::new(BoundedCounter { used: AtomicU64::new(0), max }))
    }

    /// Returns the sum of all shares.
    pub fn used(&self) -> u64 {
        self.0.used.load(Ordering::Relaxed)
    }

    /// Returns an empty share.
    pub fn share(&self) -> QuotaShare {
        QuotaShare { quota: self.clone(), held: 0 }
    }
}

/// One holder's part of the count, returned on drop.
#[derive(Debug)]
pub struct QuotaShare {
    quota: Quota,
    held: u64,
}

impl QuotaShare {
    /// Takes `count` more.
    ///
    /// # Errors
    /// [`QuotaExceeded`] if the bound would be exceeded; nothing is taken then.
    pub fn grow(&mut self, count: u64) -> Result<(), QuotaExceeded> {
        let max = self.quota.0.max;
        self.quota
            .0
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                used.checked_add(count).filter(|sum| *sum <= max)
            })
            .map_err(|_| QuotaExceeded { max })?;
        self.held += count;
        Ok(())
    }

    /// Returns an empty share of the same bound.
    pub fn of_the_same(&self) -> Self {
        self.quota.share()
    }

    /// Moves `count` from `paid` to this share. If `paid` has less, the rest is taken beyond the
    /// bound.
    pub fn move_from(&mut self, paid: &mut Self, count: u64) {
        let moved = count.min(paid.held);
        paid.held -= moved;
        self.quota.0.used.fetch_add(count - moved, Ordering::Relaxed);
        self.held += count;
    }

    /// Gives the part of the share above `count` back to the quota.
    pub fn shrink_to(&mut self, count: u64) {
        let surplus = self.held.saturating_sub(count);
        self.held -= surplus;
        self.quota.0.used.fetch_sub(surplus, Ordering::Relaxed);
    }

    /// Returns the size of this share.
    pub fn held(&self) -> u64 {
        self.held
    }
}

impl Drop for QuotaShare {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_bounded_and_returned() {
        let quota = Quota::new(10);
        let mut a = quota.share();
        let mut b = quota.share();
        a.grow(7).unwrap();
        assert_eq!(b.grow(4), Err(QuotaExceeded { max: 10 }));
        assert_eq!(b.grow(u64::MAX), Err(QuotaExceeded { max: 10 }));
        b.grow(3).unwrap();
        a.shrink_to(5);
        assert_eq!(quota.used(), 8);
        a.move_from(&mut b, 2);
        assert_eq!((a.held(), b.held(), quota.used()), (7, 1, 8));
        a.move_from(&mut b, 4);
        assert_eq!(
            (a.held(), b.held(), quota.used()),
            (11, 0, 11),
            "the missing part must be taken beyond the bound"
        );
        drop(a);
        drop(b);
        assert_eq!(quota.used(), 0);
    }
}
