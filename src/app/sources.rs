//! What registrations that come from one address may have of their heap, under however many names: some of it is left to others.
//!
//! An application counts where it was registered first.

use std::collections::HashMap;
use std::net::IpAddr;

use crate::budget::{Budget, Heap, HeapKind};

/// One address leaves one of so many parts to others.
const PARTS: u64 = 8;
/// Addresses are not looked through for those without applications while they are so few.
const FEW: usize = 64;

/// Heap of registrations by address.
#[derive(Debug)]
pub(super) struct Sources {
    whole: Budget,
    by_address: HashMap<IpAddr, Budget>,
    looked_through_at: usize,
}

impl Sources {
    pub(super) fn of(heap: &Heap) -> Self {
        let whole = heap.of(HeapKind::Registrations).clone();
        Self { whole, by_address: HashMap::new(), looked_through_at: FEW }
    }

    /// Where applications that register at `from` are charged; where it is not known, only the whole bounds them.
    pub(super) fn budget(&mut self, from: Option<IpAddr>) -> Budget {
        let Some(from) = from else { return self.whole.clone() };
        if self.by_address.len() >= self.looked_through_at {
            self.by_address.retain(|_, budget| budget.used() > 0);
            self.looked_through_at = FEW.max(2 * self.by_address.len());
        }
        let capacity = self.whole.capacity() / PARTS * (PARTS - 1);
        self.by_address.entry(from.to_canonical()).or_insert_with(|| self.whole.child(capacity)).clone()
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn addresses_without_applications_are_forgotten() {
        let heap = Heap::new(64 << 20);
        let mut sources = Sources::of(&heap);
        let kept = sources.budget(Some(Ipv4Addr::LOCALHOST.into()));
        let charge = kept.try_charge(100).unwrap();
        for n in 0..10_000 {
            drop(sources.budget(Some(Ipv4Addr::from_bits(n).into())));
        }
        assert!(sources.by_address.len() <= FEW, "{}", sources.by_address.len());
        let mapped = Ipv4Addr::LOCALHOST.to_ipv6_mapped();
        assert_eq!(sources.budget(Some(mapped.into())).used(), 100, "the same address, told otherwise");
        drop(charge);
        assert_eq!(heap.whole().used(), 0);
    }
}
