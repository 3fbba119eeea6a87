//! Tickets: capacity promised to a sender by `requireBuffer`, and what a redeemed one may still spend.
//!
//! A ticket reserves the bytes asked for plus one smallest segment per named partition, so that rounding never makes a
//! valid send fail. It is single use, belongs to one application and expires. Everything here is a [`Charge`]: a
//! ticket that expires or a send that dies gives back by being dropped.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::error::MemoryError;
use super::region::SEGMENT_BYTES_MIN;
use crate::budget::{Budget, Charge};
use uniffle_wire::types::{AppId, TicketId};

/// Rounding allowance of a request that names no partition (clients before 0.9 may not): sixteen partitions' worth.
const ALLOWANCE_UNNAMED_BYTES: u64 = 64 << 10;

/// Dead entries tolerated in the expiry queue before it is swept, beside as many as there are live tickets.
const QUEUE_SLACK: usize = 1024;

/// All tickets that were granted and neither redeemed nor expired.
pub struct Tickets {
    budget: Budget,
    /// Mirror of what tickets and reservations hold: a budget without a limit, for its `used()` only.
    pre_allocated: Budget,
    timeout: Duration,
    tickets_max: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct Ticket {
    app: AppId,
    reservation: Reservation,
}

#[derive(Debug)]
struct State {
    live: HashMap<TicketId, Ticket>,
    /// Oldest first, since the timeout is the same for all; redeemed ones stay until they are swept.
    queue: VecDeque<(Instant, TicketId)>,
    next: i64,
}

impl Tickets {
    pub(super) fn new(budget: Budget, timeout: Duration, tickets_max: usize) -> Self {
        // A random start, so that a ticket of a process before this one is unknown here rather than someone's.
        let next = i64::from(rand::random::<u32>() >> 1) << 32;
        let state = State { live: HashMap::new(), queue: VecDeque::new(), next };
        Self {
            budget,
            pre_allocated: Budget::new(u64::MAX),
            timeout,
            tickets_max: AtomicUsize::new(tickets_max),
            state: Mutex::new(state),
        }
    }

    /// Reserves `bytes` of payload for `app`, to be spread over `partitions` named partitions (0 = not named).
    ///
    /// # Errors
    /// `TooLarge` for what can never be granted, else `NoCapacity` (which also wakes the flusher).
    pub fn require(&self, app: &AppId, bytes: u64, partitions: usize) -> Result<TicketId, MemoryError> {
        let allowance = match partitions {
            0 => ALLOWANCE_UNNAMED_BYTES,
            named => (named as u64).saturating_mul(SEGMENT_BYTES_MIN as u64),
        };
        let max = self.budget.capacity().saturating_sub(allowance);
        if bytes > max {
            return Err(MemoryError::TooLarge { asked: bytes, max });
        }
        let charge = self.budget.try_charge(bytes + allowance).inspect_err(|_| self.budget.wake())?;
        let held = Held { mirror: self.pre_allocated.force_charge(charge.bytes()), charge };
        let granted = Instant::now();
        let budget = self.budget.clone();
        let reservation = Reservation { requested: bytes, spent: 0, granted, budget, held };
        let ticket = Ticket { app: app.clone(), reservation };
        let expires = granted + self.timeout;
        let mut state = self.state.lock();
        if state.live.len() >= self.tickets_max.load(Ordering::Relaxed) {
            drop(state);
            return Err(MemoryError::NoCapacity { asked: bytes, free: self.budget.free() });
        }
        state.next += 1;
        let id = TicketId(state.next);
        state.live.insert(id, ticket);
        state.queue.push_back((expires, id));
        state.sweep();
        Ok(id)
    }

    /// Replaces the number of tickets that may be outstanding; those there are stay.
    pub fn set_max_count(&self, max: usize) {
        self.tickets_max.store(max, Ordering::Relaxed);
    }

    /// Takes the ticket out. A ticket of another application stays where it is.
    ///
    /// # Errors
    /// `UnknownTicket`.
    pub fn redeem(&self, app: &AppId, id: TicketId) -> Result<Reservation, MemoryError> {
        let mut state = self.state.lock();
        match state.live.entry(id) {
            std::collections::hash_map::Entry::Occupied(ticket) if ticket.get().app == *app => {
                Ok(ticket.remove().reservation)
            }
            _ => Err(MemoryError::UnknownTicket),
        }
    }

    /// Drops every ticket whose time ran out at `now`; how many there were.
    pub fn expire(&self, now: Instant) -> usize {
        let mut expired = Vec::new();
        let mut state = self.state.lock();
        while let Some((expires, id)) = state.queue.front().copied()
            && expires <= now
        {
            state.queue.pop_front();
            expired.extend(state.live.remove(&id));
        }
        drop(state);
        expired.len()
    }

    /// Drops every ticket of `app`.
    pub fn forget_app(&self, app: &AppId) {
        let mut state = self.state.lock();
        let forgotten: Vec<_> = state.live.extract_if(|_, ticket| ticket.app == *app).collect();
        drop(state);
        drop(forgotten);
    }

    /// Bytes reserved by tickets and by redeemed reservations that no segment has taken yet.
    #[must_use]
    pub fn pre_allocated_bytes(&self) -> u64 {
        self.pre_allocated.used()
    }

    /// Tickets neither redeemed nor expired.
    #[must_use]
    pub fn count(&self) -> usize {
        self.state.lock().live.len()
    }
}

impl fmt::Debug for Tickets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tickets").field("count", &self.count()).finish_non_exhaustive()
    }
}

impl State {
    /// Keeps the queue proportional to the live tickets: a redeemed ticket is popped when it comes to the front, or
    /// with all the others once they are the majority (amortised over as many redemptions).
    fn sweep(&mut self) {
        while let Some((_, id)) = self.queue.front()
            && !self.live.contains_key(id)
        {
            self.queue.pop_front();
        }
        if self.queue.len() > 2 * self.live.len() + QUEUE_SLACK {
            self.queue.retain(|(_, id)| self.live.contains_key(id));
        }
    }
}

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
    /// Payload bytes the ticket was asked for.
    #[must_use]
    pub fn requested_bytes(&self) -> u64 {
        self.requested
    }

    /// Time since the ticket was granted.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.granted.elapsed()
    }

    /// Payload bytes not spent yet.
    #[must_use]
    pub fn left_bytes(&self) -> u64 {
        self.requested - self.spent
    }

    /// Bytes of capacity still held.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.held.charge.bytes()
    }

    /// Gives back what a message of `message_bytes` cannot need; clients may ask for twice their data.
    pub fn cut_to(&mut self, message_bytes: u64) {
        let surplus = self.requested.saturating_sub(message_bytes);
        drop(self.held.take_up_to(surplus));
    }

    /// A charge of `bytes`: what is held first, the rest from the free budget.
    ///
    /// # Errors
    /// `NoCapacity`; what was held stays held.
    pub fn take(&mut self, bytes: u64) -> Result<Charge, MemoryError> {
        let missing = bytes.saturating_sub(self.held_bytes());
        let rest = self.budget.try_charge(missing)?;
        let mut charge = self.held.take_up_to(bytes);
        charge.merge(rest);
        Ok(charge)
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

    /// A charge that cannot be refused, for what is bounded elsewhere: block metadata, and payload within the
    /// ticket. The latter can run short only because other senders filled room that this one had paid for (their
    /// tickets then hold as much too much until they end) or because a seal cut off the tail of a segment; the
    /// region's slack covers that.
    pub(super) fn cover(&mut self, bytes: u64) -> Charge {
        let mut charge = self.held.take_up_to(bytes);
        let missing = bytes - charge.bytes();
        if missing > 0 {
            charge
                .merge(self.budget.try_charge(missing).unwrap_or_else(|_| self.budget.force_charge(missing)));
        }
        charge
    }

    /// A charge for a segment: `needed` is covered, `extra` (room for later blocks) only if it is free just now.
    pub(super) fn cover_with_extra(&mut self, needed: u64, extra: u64) -> Option<Charge> {
        let extra = self.budget.try_charge(extra).ok()?;
        let mut charge = self.cover(needed);
        charge.merge(extra);
        Some(charge)
    }

    /// Takes a charge back that [`Reservation::cover`] gave and that found no memory.
    pub(super) fn put_back(&mut self, mut charge: Charge, needed: u64) {
        let back = charge.split_up_to(needed);
        let Held { charge: held, mirror } = &mut self.held;
        held.merge(back);
        let lacking = held.bytes() - mirror.bytes();
        mirror.merge(mirror.budget().force_charge(lacking));
    }

    pub(super) fn free_budget(&self) -> u64 {
        self.budget.free()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn app(name: &str) -> AppId {
        AppId::parse(name).unwrap()
    }

    fn tickets(capacity: u64) -> (Budget, Tickets) {
        let budget = Budget::new(capacity);
        (budget.clone(), Tickets::new(budget, Duration::from_secs(60), 3))
    }

    #[tokio::test]
    async fn a_ticket_is_spent_once_and_by_its_app_only() {
        let (budget, tickets) = tickets(1 << 20);
        let id = tickets.require(&app("app-1"), 1000, 2).unwrap();
        assert!(id.0 > 0);
        assert_eq!(budget.used(), 1000 + 8192);
        assert_eq!(tickets.redeem(&app("app-10"), id).unwrap_err(), MemoryError::UnknownTicket);
        let reservation = tickets.redeem(&app("app-1"), id).unwrap();
        assert_eq!(reservation.requested_bytes(), 1000);
        assert_eq!(tickets.redeem(&app("app-1"), id).unwrap_err(), MemoryError::UnknownTicket);
        assert_eq!(tickets.pre_allocated_bytes(), budget.used());
        drop(reservation);
        assert_eq!((budget.used(), tickets.pre_allocated_bytes(), tickets.count()), (0, 0, 0));
    }

    #[tokio::test]
    async fn what_can_never_be_granted_is_told_apart_from_what_can_not_be_granted_now() {
        let (budget, tickets) = tickets(1 << 20);
        let refused = tickets.require(&app("a"), 1 << 20, 1).unwrap_err();
        assert_eq!(refused, MemoryError::TooLarge { asked: 1 << 20, max: (1 << 20) - 4096 });
        assert!(matches!(
            tickets.require(&app("a"), u64::MAX, usize::MAX),
            Err(MemoryError::TooLarge { .. })
        ));
        let _all = tickets.require(&app("a"), (1 << 20) - 4096, 1).unwrap();
        assert!(matches!(tickets.require(&app("a"), 1, 1), Err(MemoryError::NoCapacity { .. })));
        budget.pressure().notified().await;
    }

    #[tokio::test(start_paused = true)]
    async fn tickets_expire_in_time_and_apps_are_forgotten_alone() {
        let (budget, tickets) = tickets(1 << 30);
        let old = tickets.require(&app("a"), 10, 0).unwrap();
        tokio::time::advance(Duration::from_secs(59)).await;
        let young = tickets.require(&app("a"), 10, 0).unwrap();
        let other = tickets.require(&app("a0"), 10, 0).unwrap();
        assert!(
            matches!(tickets.require(&app("b"), 1, 0), Err(MemoryError::NoCapacity { .. })),
            "three at most"
        );
        assert_eq!(tickets.expire(Instant::now()), 0);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(tickets.expire(Instant::now()), 1);
        assert_eq!(tickets.redeem(&app("a"), old).unwrap_err(), MemoryError::UnknownTicket);
        tickets.forget_app(&app("a"));
        assert!(tickets.redeem(&app("a"), young).is_err());
        drop(tickets.redeem(&app("a0"), other).unwrap());
        assert_eq!(budget.used(), 0);
    }

    #[tokio::test]
    async fn redeemed_tickets_do_not_pile_up_in_the_queue() {
        let (_, tickets) = tickets(1 << 30);
        let _oldest = tickets.require(&app("a"), 1, 1).unwrap();
        for _ in 0..5000 {
            let id = tickets.require(&app("a"), 1, 1).unwrap();
            drop(tickets.redeem(&app("a"), id));
        }
        assert!(tickets.state.lock().queue.len() <= QUEUE_SLACK + 4);
    }

    #[tokio::test]
    async fn a_reservation_is_cut_spent_and_topped_up() {
        let (budget, tickets) = tickets(1 << 20);
        let id = tickets.require(&app("a"), 200_000, 1).unwrap();
        let mut funds = tickets.redeem(&app("a"), id).unwrap();
        funds.cut_to(100_000);
        assert_eq!(budget.used(), 104_096);
        funds.cut_to(1 << 40);
        assert_eq!(funds.held_bytes(), 104_096);
        funds.spend(200_000).unwrap();
        assert_eq!(funds.spend(1).unwrap_err(), MemoryError::TicketOverspent { asked: 1, left: 0 });
        let more = funds.take(110_000).unwrap();
        assert_eq!((more.bytes(), funds.held_bytes(), tickets.pre_allocated_bytes()), (110_000, 0, 0));
        assert!(matches!(funds.take(1 << 20), Err(MemoryError::NoCapacity { .. })));
        let forced = funds.cover(1 << 20);
        assert_eq!(budget.used(), 110_000 + (1 << 20));
        assert!(funds.cover_with_extra(1, 1).is_none());
        funds.put_back(forced, 5000);
        assert_eq!((funds.held_bytes(), tickets.pre_allocated_bytes(), budget.used()), (5000, 5000, 115_000));
        drop((more, funds));
        assert_eq!((budget.used(), tickets.pre_allocated_bytes()), (0, 0));
    }
}
