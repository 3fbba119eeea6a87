//! Capacity as a value with `Drop`: what is reserved, held or charged is a [`Charge`] that gives itself back.
//!
//! This is not an allocator: a charge is a number, the memory behind it comes from [`super::region`]. There is no
//! `inc`/`dec` pair anywhere else; when every charge has been dropped, [`Budget::used`] is zero. The same type counts
//! blocks (a budget of blocks) and mirrors sub-totals (a budget without a limit).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

/// A refused charge: how much was asked, how much was free at that moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no capacity: asked {asked}, free {free}")]
pub struct NoCapacity {
    /// What was asked for.
    pub asked: u64,
    /// What was free.
    pub free: u64,
}

#[derive(Debug)]
struct Ledger {
    capacity: u64,
    used: AtomicU64,
    pressure: Notify,
}

/// A bounded amount that charges are taken from. Clones share it.
#[derive(Clone, Debug)]
pub struct Budget(Arc<Ledger>);

impl Budget {
    /// A budget of `capacity_bytes`, all of it free.
    #[must_use]
    pub fn new(capacity_bytes: u64) -> Self {
        Self(Arc::new(Ledger { capacity: capacity_bytes, used: AtomicU64::new(0), pressure: Notify::new() }))
    }

    /// The whole amount.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.0.capacity
    }

    /// What is charged now; more than the capacity while something is overdrawn.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.0.used.load(Ordering::Relaxed)
    }

    /// What could be charged now.
    #[must_use]
    pub fn free(&self) -> u64 {
        self.capacity().saturating_sub(self.used())
    }

    /// Charges `bytes`, or nothing.
    ///
    /// # Errors
    /// [`NoCapacity`] when fewer are free.
    pub fn try_charge(&self, bytes: u64) -> Result<Charge, NoCapacity> {
        let capacity = self.0.capacity;
        // Acquire pairs with the Release of `Charge::drop`: the thread that gets the amount of a dropped charge also sees
        // that its memory went back to the allocator before.
        let charged = self.0.used.fetch_update(Ordering::Acquire, Ordering::Relaxed, |used| {
            used.checked_add(bytes).filter(|sum| *sum <= capacity)
        });
        match charged {
            Ok(_) => Ok(Charge { budget: self.clone(), bytes }),
            Err(used) => Err(NoCapacity { asked: bytes, free: capacity.saturating_sub(used) }),
        }
    }

    /// Charges `bytes` even beyond the capacity. For what is bounded elsewhere: block metadata (by the block limit)
    /// and what a redeemed ticket has already been promised.
    pub fn force_charge(&self, bytes: u64) -> Charge {
        self.0.used.fetch_add(bytes, Ordering::Acquire);
        Charge { budget: self.clone(), bytes }
    }

    /// A charge of nothing, to merge others into.
    pub fn nothing(&self) -> Charge {
        Charge { budget: self.clone(), bytes: 0 }
    }

    /// Notified by [`Budget::wake`].
    #[must_use]
    pub fn pressure(&self) -> &Notify {
        &self.0.pressure
    }

    /// Wakes those that wait for pressure: a charge was refused.
    pub fn wake(&self) {
        self.0.pressure.notify_one();
    }
}

/// A part of a [`Budget`] that is given back on drop.
#[derive(Debug)]
#[must_use = "a dropped charge is given back at once"]
pub struct Charge {
    budget: Budget,
    bytes: u64,
}

impl Charge {
    /// How much it holds.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The budget it is of.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Takes `bytes` out of this charge; `None` when it holds fewer.
    pub fn split(&mut self, bytes: u64) -> Option<Charge> {
        self.bytes = self.bytes.checked_sub(bytes)?;
        Some(Charge { budget: self.budget.clone(), bytes })
    }

    /// Takes up to `bytes` out of this charge.
    pub fn split_up_to(&mut self, bytes: u64) -> Charge {
        let part = bytes.min(self.bytes);
        self.bytes -= part;
        Charge { budget: self.budget.clone(), bytes: part }
    }

    /// Adds `other` to this charge.
    pub fn merge(&mut self, mut other: Charge) {
        assert!(Arc::ptr_eq(&self.budget.0, &other.budget.0), "charges of two budgets cannot be merged");
        self.bytes += std::mem::take(&mut other.bytes);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let before = self.budget.0.used.fetch_sub(self.bytes, Ordering::Release);
        assert!(before >= self.bytes, "budget underflow: {} given back of {before}", self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn charge_beyond_capacity_is_refused_and_leaves_nothing() {
        let budget = Budget::new(100);
        let held = budget.try_charge(60).unwrap();
        assert_eq!(budget.try_charge(41).unwrap_err(), NoCapacity { asked: 41, free: 40 });
        assert_eq!(budget.try_charge(u64::MAX).unwrap_err().free, 40);
        assert_eq!(budget.used(), 60);
        drop(held);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn overdrawn_budget_refuses_until_it_is_paid_back() {
        let budget = Budget::new(10);
        let over = budget.force_charge(15);
        assert_eq!(budget.free(), 0);
        assert!(budget.try_charge(1).is_err());
        drop(over);
        assert!(budget.try_charge(10).is_ok());
    }

    proptest! {
        #[test]
        fn budget_follows_a_counter(steps in prop::collection::vec((0u8..5, 0u64..60, any::<prop::sample::Index>()), 1..200)) {
            let budget = Budget::new(100);
            let mut charges: Vec<Charge> = Vec::new();
            let mut used = 0u64;
            for (what, bytes, at) in steps {
                match what {
                    0 => {
                        let granted = budget.try_charge(bytes);
                        prop_assert_eq!(granted.is_ok(), used + bytes <= 100);
                        if let Ok(charge) = granted { used += bytes; charges.push(charge); }
                    }
                    1 => { used += bytes; charges.push(budget.force_charge(bytes)); }
                    2 if !charges.is_empty() => { let i = at.index(charges.len()); used -= charges.swap_remove(i).bytes(); }
                    3 if !charges.is_empty() => {
                        let i = at.index(charges.len());
                        let had = charges[i].bytes();
                        let part = charges[i].split(bytes);
                        prop_assert_eq!(part.is_some(), bytes <= had);
                        charges.extend(part);
                    }
                    4 if charges.len() > 1 => { let other = charges.pop().unwrap(); charges[0].merge(other); }
                    _ => {}
                }
                prop_assert_eq!(budget.used(), used);
                prop_assert_eq!(charges.iter().map(Charge::bytes).sum::<u64>(), used);
            }
            charges.clear();
            prop_assert_eq!(budget.used(), 0);
        }
    }
}
