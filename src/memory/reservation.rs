//! What a ticket promises, and what a redeemed one may still spend.

use std::time::Duration;

use super::error::MemoryError;
use crate::budget::{Budget, Charge};
use crate::clock::Instant;

/// Charged per block beside its bytes.
pub(super) const METADATA_BYTES: u64 = 64;

/// A charge and its mirror in the pre-allocated total, always of the same size.
#[derive(Debug)]
struct Held {
    charge: Charge,
    mirror: Charge,
}

impl Held {
    fn take_up_to(&mut self, bytes: u64) -> Charge {
        let charge = self.charge.split_up_to(bytes);
        drop(self.mirror.split_up_to(charge.bytes()));
        charge
    }
}

/// What a redeemed ticket may still spend. Dropping it gives the rest back.
#[derive(Debug)]
pub struct Reservation {
    requested: u64,
    spent: u64,
    granted: Instant,
    budget: Budget,
    held: Held,
}

impl Reservation {
    /// Holds `charge` for `requested` bytes of payload; `mirror` counts what it holds. Granted at `granted`.
    pub(super) fn new(requested: u64, charge: Charge, mirror: &Budget, granted: Instant) -> Self {
        let budget = charge.budget().clone();
        let held = Held { mirror: mirror.force_charge(charge.bytes()), charge };
        Self { requested, spent: 0, granted, budget, held }
    }

    /// When it was granted.
    pub(super) fn granted(&self) -> Instant {
        self.granted
    }

    /// Payload bytes the ticket was asked for.
    pub fn requested_bytes(&self) -> u64 {
        self.requested
    }

    /// Time since the ticket was granted.
    pub fn age(&self) -> Duration {
        self.granted.elapsed()
    }

    /// Payload bytes not spent yet.
    pub fn left_bytes(&self) -> u64 {
        self.requested - self.spent
    }

    /// Bytes of capacity still held.
    pub fn held_bytes(&self) -> u64 {
        self.held.charge.bytes()
    }

    /// Gives back what a message of `message_bytes` cannot need; clients may ask for twice their data.
    pub fn cut_to(&mut self, message_bytes: u64) {
        let surplus = self.requested.saturating_sub(message_bytes);
        drop(self.held.take_up_to(surplus));
    }

    /// Counts `bytes` of payload against the ticket.
    pub(super) fn spend(&mut self, bytes: u64) -> Result<(), MemoryError> {
        let left = self.left_bytes();
        if bytes > left {
            return Err(MemoryError::TicketOverspent { asked: bytes, left });
        }
        self.spent += bytes;
        Ok(())
    }

    /// A charge for `bytes` of metadata of blocks, which cannot be refused: their number is limited.
    pub(super) fn cover_metadata(&mut self, bytes: u64) -> Charge {
        let mut charge = self.held.take_up_to(bytes);
        let missing = bytes - charge.bytes();
        if missing > 0 {
            charge.merge(self.budget.force_charge(missing));
        }
        charge
    }

    /// A charge for a segment: `needed` for what is to be stored, and `extra`, room for later blocks, only if it is
    /// free just now. What is held is always enough, unless other senders of the same partition filled room that this
    /// one had paid for (then they hold too much until they end) or a seal cut off the tail of a segment. Then
    /// the budget may be overdrawn by up to `overdraft`, for which there is memory that is promised to no one.
    pub(super) fn cover_segment(&mut self, (needed, extra): (u64, u64), overdraft: u64) -> Option<Charge> {
        let extra = self.budget.try_charge(extra).ok()?;
        let missing = needed.saturating_sub(self.held_bytes());
        let rest = self.budget.try_charge_beyond(missing, overdraft).ok()?;
        let mut charge = self.held.take_up_to(needed);
        charge.merge(rest);
        charge.merge(extra);
        Some(charge)
    }

    /// Takes a charge back that [`Reservation::cover_segment`] gave and that found no memory.
    pub(super) fn put_back(&mut self, mut charge: Charge, needed: u64) {
        let back = charge.split_up_to(needed);
        let Held { charge: held, mirror } = &mut self.held;
        held.merge(back);
        let lacking = held.bytes() - mirror.bytes();
        mirror.merge(mirror.budget().force_charge(lacking));
    }

    pub(super) fn budget(&self) -> &Budget {
        &self.budget
    }
}
