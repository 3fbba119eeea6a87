//! Limits on the registration heap per client address and for newcomers.
//!
//! One address cannot use the whole heap, however many applications it registers: part is reserved
//! for other addresses. Newcomers together cannot use it either, from however many addresses: a
//! part is reserved for established applications.
//!
//! An application counts for the address of its first registration. It is established if it was
//! known for a minute when the heap first had no room for a registration. That moment stays fixed
//! while the heap is nearly full, so that no application becomes established by waiting.

use std::cell::Cell;
use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use crate::clock::Instant;
use uniffle_base::budget::{Budget, Charge, Heap, HeapKind, NoCapacity};
use uniffle_base::sched::shares;

const KNOWN_FOR: Duration = Duration::from_secs(60);
/// Smallest number of addresses at which those without applications are dropped.
const FEW: usize = 64;

/// Heap of registrations by address.
#[derive(Debug)]
pub(super) struct RegistrationLimiter {
    whole: Budget,
    by_address: HashMap<IpAddr, Budget>,
    /// Number of addresses at which those without applications are dropped next.
    cleanup_at: usize,
    /// Time of the first refusal for lack of room since the heap became nearly full.
    tight_since: Cell<Option<Instant>>,
}

/// The part of the heap that an application may be charged to.
#[derive(Debug)]
pub(super) struct RegistrationRoom<'a> {
    limiter: &'a RegistrationLimiter,
    /// Bytes reserved for other applications.
    reserved_bytes: u64,
}

impl RegistrationLimiter {
    pub(super) fn of(heap: &Heap) -> Self {
        let whole = heap.of(HeapKind::Registrations).clone();
        Self { whole, by_address: HashMap::new(), cleanup_at: FEW, tight_since: Cell::default() }
    }

    /// Returns the budget for applications that register from address `from`. If the address is
    /// unknown, only the whole heap limits them.
    pub(super) fn budget(&mut self, from: Option<IpAddr>) -> Budget {
        let Some(from) = from else { return self.whole.clone() };
        if self.by_address.len() >= self.cleanup_at {
            self.by_address.retain(|_, budget| budget.used() > 0);
            self.cleanup_at = FEW.max(2 * self.by_address.len());
        }
        // It leaves one reserve to other newcomers, and one to established applications.
        let capacity = self.whole.capacity() - 2 * shares::reserve(self.whole.capacity());
        self.by_address.entry(from.to_canonical()).or_insert_with(|| self.whole.child(capacity)).clone()
    }

    /// Returns the room for an application that has been known for `known_for`; `None` is a
    /// newcomer.
    pub(super) fn room(&self, known_for: Option<Duration>) -> RegistrationRoom<'_> {
        let reserve = shares::reserve(self.whole.capacity());
        if self.whole.free() >= 2 * reserve {
            self.tight_since.set(None);
        }
        let tight_for = self.tight_since.get().map_or(Duration::ZERO, |since| since.elapsed());
        let was_there = known_for.is_some_and(|known_for| known_for >= tight_for + KNOWN_FOR);
        RegistrationRoom { limiter: self, reserved_bytes: if was_there { 0 } else { reserve } }
    }
}

impl RegistrationRoom<'_> {
    /// Charges an application's budget, or charges nothing.
    pub(super) fn try_charge(&self, budget: &Budget, bytes: u64) -> Result<Charge, NoCapacity> {
        let free = self.limiter.whole.free().saturating_sub(self.reserved_bytes);
        if bytes > free {
            self.limiter.tight_since.set(self.limiter.tight_since.get().or(Some(Instant::now())));
            return Err(NoCapacity { requested: bytes, free });
        }
        budget.try_charge(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn addresses_without_applications_are_forgotten() {
        let heap = Heap::new(64 << 20);
        let mut limiter = RegistrationLimiter::of(&heap);
        let kept = limiter.budget(Some(Ipv4Addr::LOCALHOST.into()));
        let charge = kept.try_charge(100).unwrap();
        for n in 0..10_000 {
            drop(limiter.budget(Some(Ipv4Addr::from_bits(n).into())));
        }
        assert!(limiter.by_address.len() <= FEW, "{}", limiter.by_address.len());
        let mapped = Ipv4Addr::LOCALHOST.to_ipv6_mapped();
        assert_eq!(
            limiter.budget(Some(mapped.into())).used(),
            100,
            "the IPv6 form of an address must share its budget"
        );
        drop(charge);
        assert_eq!(heap.whole().used(), 0);
    }
}
