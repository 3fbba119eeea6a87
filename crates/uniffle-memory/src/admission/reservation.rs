//! The promise of a ticket and the spending of a redeemed one.
//!
//! A send pays for segments and block metadata from the bytes that its ticket holds. Dropping the
//! reservation releases the rest. Invariant: the mirror in the pre-allocated total always has the
//! size of the charge.

use std::time::Duration;

use crate::error::MemoryError;
use uniffle_base::budget::{Budget, Charge};
use uniffle_base::clock::Instant;

/// Bytes charged per block beside its payload.
pub(crate) const METADATA_BYTES: u64 = 64;

/// A charge and its mirror in the pre-allocated total, always of the same size.
#[derive(Debug)]
struct MirroredCharge {
    charge: Charge,
    mirror: Charge,
}

impl MirroredCharge {
    fn take_up_to(&mut self, bytes: u64) -> Charge {
        let charge = self.charge.split_up_to(bytes);
        drop(self.mirror.split_up_to(charge.bytes()));
        charge
    }
}

/// Unspent funds of a redeemed ticket. Dropping it releases the rest.
#[derive(Debug)]
pub struct Reservation {
    requested: u64,
    spent: u64,
    granted: Instant,
    budget: Budget,
    held: MirroredCharge,
}

impl Reservation {
    /// Holds `charge` for `requested` bytes of payload since `granted`. `mirror` counts the held
    /// bytes.
    pub(crate) fn new(requested: u64, charge: Charge, mirror: &Budget, granted: Instant) -> Self {
        let budget = charge.budget().clone();
        let held = MirroredCharge { mirror: mirror.force_charge(charge.bytes()), charge };
        Self { requested, spent: 0, granted, budget, held }
    }

    /// Returns the time of the grant.
    pub(crate) fn granted(&self) -> Instant {
        self.granted
    }

    /// Returns the payload bytes that were requested.
    #[inline]
    pub fn requested_bytes(&self) -> u64 {
        self.requested
    }

    /// Returns the time since the ticket was granted.
    pub fn age(&self) -> Duration {
        self.granted.elapsed()
    }

    /// Returns the payload bytes not spent yet.
    #[inline]
    pub fn left_bytes(&self) -> u64 {
        self.requested - self.spent
    }

    /// Returns the bytes of capacity still held.
    #[inline]
    pub fn held_bytes(&self) -> u64 {
        self.held.charge.bytes()
    }

    /// Releases the surplus over a message of `message_bytes`. Clients may request twice their
    /// data.
    pub fn truncate_to(&mut self, message_bytes: u64) {
        let surplus = self.requested.saturating_sub(message_bytes);
        drop(self.held.take_up_to(surplus));
    }

    /// Counts `bytes` of payload against the ticket.
    pub(crate) fn spend(&mut self, bytes: u64) -> Result<(), MemoryError> {
        let left = self.left_bytes();
        if bytes > left {
            return Err(MemoryError::TicketOverspent { asked: bytes, left });
        }
        self.spent += bytes;
        Ok(())
    }

    /// Returns a charge for `bytes` of block metadata. It cannot be refused, because the number of
    /// blocks is limited.
    pub(crate) fn cover_metadata(&mut self, bytes: u64) -> Charge {
        let mut charge = self.held.take_up_to(bytes);
        let missing = bytes - charge.bytes();
        if missing > 0 {
            charge.merge(self.budget.force_charge(missing));
        }
        charge
    }

    /// Returns a charge for a segment: `needed` bytes to store, and `extra` bytes for later blocks,
    /// which must be free now.
    ///
    /// The held bytes always suffice, with two exceptions. Other senders of the same partition may
    /// have filled room that this one paid for; they then hold too much until they end. Or a seal
    /// cut off the tail of a segment. In these cases the budget may be overdrawn by up to
    /// `overdraft`, for which there is unpromised memory.
    pub(crate) fn cover_segment(&mut self, needed: u64, extra: u64, overdraft: u64) -> Option<Charge> {
        let extra = self.budget.try_charge(extra).ok()?;
        let missing = needed.saturating_sub(self.held_bytes());
        let rest = self.budget.try_charge_beyond(missing, overdraft).ok()?;
        let mut charge = self.held.take_up_to(needed);
        charge.merge(rest);
        charge.merge(extra);
        Some(charge)
    }

    /// Takes back a charge of [`Reservation::cover_segment`] for which no memory was found.
    pub(crate) fn put_back(&mut self, mut charge: Charge, needed: u64) {
        let back = charge.split_up_to(needed);
        let MirroredCharge { charge: held, mirror } = &mut self.held;
        held.merge(back);
        let lacking = held.bytes() - mirror.bytes();
        mirror.merge(mirror.budget().force_charge(lacking));
    }

    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }
}
