//! The promise of a ticket and the spending of a redeemed one.
//!
//! A send pays for segments and block metadata from the bytes that its ticket holds. Dropping the
//! reservation releases the rest. Invariant: the mirror in the pre-allocated total always has the
//! size of the charge.

use std::time::Duration;

use super::metadata_reserve::MetadataReserve;
use crate::error::MemoryError;
use uniffle_base::budget::{Budget, Charge};
use uniffle_base::clock::Instant;

/// Bytes charged per block beside its payload and its rows.
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

/// Charges of blocks and their list. Dropped in this order: blocks and lists count no longer than
/// their bytes are charged to the capacity.
#[derive(Debug)]
pub(crate) struct BlockCharges {
    /// Number of blocks, charged to the global limit.
    pub(crate) permits: Charge,
    /// Bytes of the heap for lists.
    pub(crate) lists: Charge,
    /// The same bytes in the application's capacity.
    pub(crate) capacity: Charge,
}

impl BlockCharges {
    /// Moves the charges of `blocks` blocks that cost `bytes` beside their payload to `other`.
    pub(crate) fn transfer(&mut self, blocks: u64, bytes: u64, other: &mut Self) {
        self.permits.transfer(blocks, &mut other.permits);
        self.lists.transfer(bytes, &mut other.lists);
        self.capacity.transfer(bytes, &mut other.capacity);
    }
}

/// Unspent funds of a redeemed ticket. Dropping it releases the rest.
#[derive(Debug)]
pub struct Reservation {
    requested: u64,
    spent: u64,
    granted: Instant,
    budget: Budget,
    /// Charges of blocks that are not committed yet. `None` until the first is paid for.
    blocks: Option<BlockCharges>,
    held: MirroredCharge,
}

impl Reservation {
    /// Holds `charge` for `requested` bytes of payload since `granted`. `mirror` counts the held
    /// bytes.
    pub(crate) fn new(requested: u64, charge: Charge, mirror: &Budget, granted: Instant) -> Self {
        let budget = charge.budget().clone();
        let held = MirroredCharge { mirror: mirror.charge_unchecked(charge.bytes()), charge };
        Self { requested, spent: 0, granted, budget, blocks: None, held }
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
    pub fn remaining_bytes(&self) -> u64 {
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
        let remaining = self.remaining_bytes();
        if bytes > remaining {
            return Err(MemoryError::TicketOverspent { requested: bytes, remaining });
        }
        self.spent += bytes;
        Ok(())
    }

    /// Pays for `blocks` uncommitted blocks that cost `bytes` beside their payload, as far as they
    /// are not paid for yet. Returns the charges, from which commits take theirs.
    ///
    /// # Errors
    /// `TooManyBlocks` beyond the number of `permits`, `NoCapacity` if `lists` has no room.
    pub(crate) fn pay_for_blocks(
        &mut self,
        blocks: u64,
        bytes: u64,
        permits: &Budget,
        lists: &MetadataReserve,
    ) -> Result<&mut BlockCharges, MemoryError> {
        let missing = |charge: &Charge, wanted: u64| wanted.saturating_sub(charge.bytes());
        let uncovered = self.blocks.as_ref().map_or(bytes, |paid| missing(&paid.capacity, bytes));
        let covered = (uncovered > 0).then(|| self.cover_metadata(uncovered));
        let paid = self.blocks.get_or_insert_with(|| BlockCharges {
            permits: permits.empty_charge(),
            lists: lists.empty_charge(),
            capacity: self.budget.empty_charge(),
        });
        covered.into_iter().for_each(|more| paid.capacity.merge(more));
        let too_many = |_| MemoryError::TooManyBlocks { max: permits.capacity() };
        paid.permits.try_grow(missing(&paid.permits, blocks)).map_err(too_many)?;
        let unlisted = missing(&paid.lists, bytes);
        if unlisted > 0 {
            paid.lists.merge(lists.charge(unlisted)?);
        }
        Ok(paid)
    }

    /// Returns a charge for `bytes` of block metadata. It cannot be refused, because the number of
    /// blocks is limited.
    pub(super) fn cover_metadata(&mut self, bytes: u64) -> Charge {
        let mut charge = self.held.take_up_to(bytes);
        let missing = bytes - charge.bytes();
        if missing > 0 {
            charge.merge(self.budget.charge_unchecked(missing));
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
        mirror.merge(mirror.budget().charge_unchecked(lacking));
    }

    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Returns the number of uncommitted blocks that are paid for.
    #[cfg(test)]
    pub(crate) fn paid_blocks(&self) -> u64 {
        self.blocks.as_ref().map_or(0, |paid| paid.permits.bytes())
    }
}
