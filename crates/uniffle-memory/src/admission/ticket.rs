//! Tickets: capacity promised to a sender by `requireBuffer`.
//!
//! A refused request is the backpressure on its sender, which asks again later. A ticket reserves
//! the requested bytes plus one smallest segment per named partition, so that rounding never makes
//! a valid send fail. It works once, belongs to one application and expires. While others wait,
//! unused tickets are revoked earlier, and soonest from an application over its share
//! ([`super::fair_shares`]). A ticket that expires releases its charge on drop, and a send that
//! ends releases the part that its blocks do not use.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::fair::Claimant;
use super::fair_shares::{FairShares, RequestSize, Standing, Ticket};
use super::prefaulter::Prefaulter;
use super::reservation::Reservation;
use crate::error::MemoryError;
use crate::region::SEGMENT_BYTES_MIN;
use uniffle_base::budget::Budget;
use uniffle_base::clock::Instant;
use uniffle_wire::types::{AppId, TicketId};

/// Rounding allowance of a request that names no partition, which clients before 0.9 may send:
/// sixteen partitions' worth.
const ALLOWANCE_UNNAMED_BYTES: u64 = 64 << 10;

/// All tickets that were granted and are neither redeemed, revoked nor expired.
///
/// A ticket does not reserve memory for lists (`buffer::list::LIST_BYTES` per partition without
/// blocks in memory, 64 bytes per block). The number of blocks is unknown, and most sends are to
/// partitions that have a list. The process stays bounded, because a list is created only when the
/// region has ceded or the heap has lent its size ([`super::metadata_reserve`]).
///
/// A send of `b` bytes to `p` partitions uses at most `b` + 4096 `p` bytes of the region, which its
/// ticket holds. If tickets hold all of the capacity, lists can use the region's slack (a 64th, at
/// most 64 MiB), 2 MiB, and half of the heap. Further new partitions are refused with `NO_BUFFER`,
/// and their tickets are released.
pub struct Tickets {
    budget: Budget,
    /// Mirror of the bytes that tickets and reservations hold: a budget without a limit, only for
    /// its `used()`.
    pre_allocated: Budget,
    /// Number of tickets, mirrored in the same way.
    count: Budget,
    timeout: Duration,
    tickets_max: AtomicUsize,
    state: Mutex<State>,
    /// Allocates pages for granted tickets. Only for memory in a file.
    prefaulter: Option<Arc<Prefaulter>>,
}

/// An outstanding ticket, as handed over from one process to the next.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outstanding {
    app: String,
    id: i64,
    /// Payload bytes that were requested.
    requested: u64,
    /// Bytes that it holds.
    held: u64,
}

#[derive(Debug)]
struct State {
    shares: FairShares,
    next: i64,
}

impl Tickets {
    /// Creates an empty table of tickets that reserve parts of `budget`. Its part `extents` belongs
    /// to no share. Tickets are valid for `timeout`, and at most `tickets_max` exist, apart from
    /// those of the previous process.
    #[must_use]
    pub fn new(budget: Budget, extents: Budget, timeout: Duration, tickets_max: usize) -> Self {
        // A random start, so that a ticket of an earlier process is unknown here instead of
        // matching another one.
        let next = i64::from(rand::random::<u32>() >> 1) << 32;
        let state = State { shares: FairShares::new(budget.clone(), extents), next };
        Self {
            budget,
            pre_allocated: Budget::new(u64::MAX),
            count: Budget::new(u64::MAX),
            timeout,
            tickets_max: AtomicUsize::new(tickets_max),
            state: Mutex::new(state),
            prefaulter: None,
        }
    }

    /// Notifies `prefaulter` of every grant.
    pub(crate) fn take_pages_by(&mut self, prefaulter: Arc<Prefaulter>) {
        self.prefaulter = Some(prefaulter);
    }

    /// Reserves `bytes` of payload for `app`, to be spread over `partitions` named partitions (0 =
    /// not named).
    ///
    /// # Errors
    /// `TooLarge` if it can never be granted, otherwise `NoCapacity` or `OverShare`. A lack of
    /// memory also wakes the flusher; the limit on the number of tickets (`NoCapacity`) does not.
    pub fn require(&self, app: &AppId, bytes: u64, partitions: usize) -> Result<TicketId, MemoryError> {
        let allowance = match partitions {
            0 => ALLOWANCE_UNNAMED_BYTES,
            named => (named as u64).saturating_mul(SEGMENT_BYTES_MIN as u64),
        };
        let max = self.budget.capacity().saturating_sub(allowance);
        if bytes > max {
            return Err(MemoryError::TooLarge { requested: bytes, max });
        }
        let ask = RequestSize { bytes: bytes + allowance, partitions };
        let now = Instant::now();
        let mut state = self.state.lock();
        if self.count() >= self.tickets_max.load(Ordering::Relaxed) && !state.shares.revoke_one(app, now) {
            drop(state);
            return Err(MemoryError::NoCapacity { requested: bytes, free: self.budget.free() });
        }
        let charge = match state.shares.charge(app, ask, now) {
            Ok(charge) => charge,
            Err(refused) => {
                drop(state);
                self.budget.notify_pressure();
                return Err(refused);
            }
        };
        let reservation = Reservation::new(bytes, charge, &self.pre_allocated, now);
        let ticket = Ticket { reservation, _count: self.count.charge_unchecked(1) };
        state.next += 1;
        let id = TicketId(state.next);
        state.shares.holder(app).tickets.insert(id, ticket);
        drop(state);
        self.prefaulter.iter().for_each(|prefaulter| prefaulter.note_promise());
        Ok(id)
    }

    /// Replaces the maximum number of outstanding tickets. Existing tickets stay.
    pub fn set_max_count(&self, max: usize) {
        self.tickets_max.store(max, Ordering::Relaxed);
    }

    /// Redeems the ticket. A ticket of another application is not touched.
    ///
    /// # Errors
    /// `UnknownTicket` if `app` has no such ticket.
    pub fn redeem(&self, app: &AppId, id: TicketId) -> Result<Reservation, MemoryError> {
        let mut state = self.state.lock();
        let ticket = state.shares.find(app).and_then(|holder| holder.tickets.remove(&id));
        drop(state);
        ticket.map(|ticket| ticket.reservation).ok_or(MemoryError::UnknownTicket)
    }

    /// Returns all outstanding tickets for the next process.
    pub fn outstanding(&self) -> Vec<Outstanding> {
        let state = self.state.lock();
        let describe = |app: &AppId, id: &TicketId, ticket: &Ticket| Outstanding {
            app: app.as_str().to_owned(),
            id: id.0,
            requested: ticket.reservation.requested_bytes(),
            held: ticket.reservation.held_bytes(),
        };
        let of_all = state.shares.holders();
        of_all.flat_map(|(app, of)| of.tickets.iter().map(move |(id, it)| describe(app, id, it))).collect()
    }

    /// Grants tickets of the previous process again with the same ids, as far as there is room.
    /// Returns the number granted.
    pub fn grant_again(&self, outstanding: &[Outstanding]) -> usize {
        let now = Instant::now();
        let mut granted = 0;
        for Outstanding { app, id, requested, held } in outstanding {
            let Ok(app) = AppId::parse(app) else { continue };
            let mut state = self.state.lock();
            let holder = state.shares.holder(&app);
            let Ok(charge) = holder.budget.try_charge(*held) else { continue };
            let reservation = Reservation::new(*requested, charge, &self.pre_allocated, now);
            let ticket = Ticket { reservation, _count: self.count.charge_unchecked(1) };
            granted += usize::from(holder.tickets.insert(TicketId(*id), ticket).is_none());
        }
        self.prefaulter.iter().for_each(|prefaulter| prefaulter.note_promise());
        granted
    }

    /// Expiry: drops the tickets that expired at `now`. Returns their number.
    pub fn expire(&self, now: Instant) -> usize {
        let expired = now.checked_sub(self.timeout).map(|before| self.state.lock().shares.expire(before));
        expired.map_or(0, |expired| expired.len())
    }

    /// Drops every ticket of `app`.
    pub fn forget_app(&self, app: &AppId) {
        let forgotten = self.state.lock().shares.forget(app);
        drop(forgotten);
    }

    /// Returns the bytes reserved by tickets and by redeemed reservations that no segment has taken
    /// yet.
    #[must_use]
    pub fn pre_allocated_bytes(&self) -> u64 {
        self.pre_allocated.used()
    }

    /// Returns the number of outstanding tickets.
    #[must_use]
    pub fn count(&self) -> usize {
        usize::try_from(self.count.used()).unwrap_or(usize::MAX)
    }

    /// Returns the number of unused tickets revoked so far for applications that waited.
    #[must_use]
    pub fn revoked(&self) -> u64 {
        self.state.lock().shares.revoked()
    }

    /// Returns the budget to which everything of `app` in memory is charged.
    #[must_use]
    pub fn budget_of(&self, app: &AppId) -> Budget {
        self.state.lock().shares.holder(app).budget.clone()
    }

    /// Sets the weight of `app`, valid while it holds anything or has shuffles.
    pub fn set_weight(&self, app: &AppId, weight: u32) {
        self.state.lock().shares.set_weight(app, weight.max(1));
    }

    /// Returns the weight of `app`, see [`Tickets::set_weight`].
    #[must_use]
    pub fn weight_of(&self, app: &AppId) -> u32 {
        self.state.lock().shares.find(app).map_or(1, |holder| holder.weight)
    }

    /// Returns the position of `app` in the division of the memory.
    #[must_use]
    pub fn standing(&self, app: &AppId) -> Standing {
        self.state.lock().shares.standing(app, Instant::now())
    }

    /// Returns whether a recently refused request still waits.
    #[must_use]
    pub fn are_waited_for(&self) -> bool {
        self.state.lock().shares.are_waited_for(Instant::now())
    }

    /// Returns whether a slow send of `app` must end for another application that waits for memory.
    #[must_use]
    pub fn must_yield(&self, app: &AppId) -> bool {
        self.state.lock().shares.must_yield(app, Instant::now())
    }

    /// Returns the bytes to keep free for applications below their shares.
    #[must_use]
    pub fn claimed_bytes(&self) -> u64 {
        self.state.lock().shares.claimed_bytes(Instant::now())
    }

    /// Returns the held bytes and the weight of every application.
    #[must_use]
    pub fn holders(&self) -> HashMap<AppId, Claimant> {
        let state = self.state.lock();
        let holders = state.shares.holders().map(|(app, holder)| {
            (app.clone(), Claimant { weight: holder.weight, demand: holder.budget.used() })
        });
        holders.collect()
    }
}

impl fmt::Debug for Tickets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tickets").field("count", &self.count()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::super::fair_shares::{SLOW_SEND_GRACE, SLOW_SEND_GRACE_WITHIN_SHARE};
    use super::*;

    fn app(name: &str) -> AppId {
        AppId::parse(name).unwrap()
    }

    fn tickets(capacity: u64) -> (Budget, Tickets) {
        let budget = Budget::new(capacity);
        (budget.clone(), Tickets::new(budget.clone(), budget.child(0), Duration::from_secs(60), 3))
    }

    #[tokio::test]
    async fn ticket_is_spent_once_and_only_by_its_app() {
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
    async fn granted_tickets_are_recovered_as_far_as_they_fit() {
        let (_, before) = tickets(1 << 20);
        let first = before.require(&app("a"), 100_000, 1).unwrap();
        let second = before.require(&app("b"), 200_000, 1).unwrap();
        let inherited = serde_json::to_string(&before.outstanding()).unwrap();
        let inherited: Vec<Outstanding> = serde_json::from_str(&inherited).unwrap();
        assert_eq!(inherited.len(), 2);

        let (budget, after) = tickets(1 << 20);
        assert_eq!(after.grant_again(&inherited), 2);
        assert_eq!(after.pre_allocated_bytes(), before.pre_allocated_bytes());
        assert_eq!(after.redeem(&app("a"), second).unwrap_err(), MemoryError::UnknownTicket);
        assert_eq!(after.redeem(&app("a"), first).unwrap().remaining_bytes(), 100_000);
        after.forget_app(&app("b"));
        assert_eq!((budget.used(), after.count()), (0, 0));

        let (budget, small) = tickets(256 << 10);
        assert_eq!(small.grant_again(&inherited), 1);
        assert_eq!(budget.used(), small.pre_allocated_bytes());
    }

    #[tokio::test]
    async fn impossible_requests_differ_from_temporary_refusals() {
        let (budget, tickets) = tickets(1 << 20);
        let refused = tickets.require(&app("a"), 1 << 20, 1).unwrap_err();
        assert_eq!(refused, MemoryError::TooLarge { requested: 1 << 20, max: (1 << 20) - 4096 });
        assert!(matches!(
            tickets.require(&app("a"), u64::MAX, usize::MAX),
            Err(MemoryError::TooLarge { .. })
        ));
        let _all = tickets.require(&app("a"), (1 << 20) - 4096, 1).unwrap();
        assert!(matches!(tickets.require(&app("a"), 1, 1), Err(MemoryError::NoCapacity { .. })));
        budget.pressure().notified().await;
    }

    #[tokio::test(start_paused = true)]
    async fn tickets_expire_in_time_and_apps_are_removed() {
        let (budget, tickets) = tickets(1 << 30);
        let old = tickets.require(&app("a"), 10, 0).unwrap();
        tokio::time::advance(Duration::from_secs(59)).await;
        let young = tickets.require(&app("a"), 10, 0).unwrap();
        let other = tickets.require(&app("a0"), 10, 0).unwrap();
        assert!(matches!(tickets.require(&app("a"), 1, 0), Err(MemoryError::NoCapacity { .. })));
        assert_eq!(tickets.expire(Instant::now()), 0);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(tickets.expire(Instant::now()), 1);
        assert_eq!(tickets.redeem(&app("a"), old).unwrap_err(), MemoryError::UnknownTicket);
        tickets.forget_app(&app("a"));
        assert!(tickets.redeem(&app("a"), young).is_err());
        drop(tickets.redeem(&app("a0"), other).unwrap());
        assert_eq!(budget.used(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn ticket_survives_a_pause_of_the_process() {
        uniffle_base::clock::testing::ticked(async {
            let (_budget, tickets) = tickets(1 << 30);
            let id = tickets.require(&app("a"), 10, 0).unwrap();
            tokio::time::advance(Duration::from_secs(3600)).await;
            assert_eq!(tickets.expire(Instant::now()), 0);
            tokio::time::sleep(Duration::from_secs(59)).await;
            assert_eq!(tickets.expire(Instant::now()), 0);
            tokio::time::sleep(Duration::from_secs(2)).await;
            assert_eq!(tickets.expire(Instant::now()), 1);
            assert!(tickets.redeem(&app("a"), id).is_err());
        })
        .await;
    }

    #[tokio::test]
    async fn reservation_is_reduced_spent_and_increased() {
        let (budget, tickets) = tickets(1 << 20);
        let id = tickets.require(&app("a"), 200_000, 1).unwrap();
        let mut funds = tickets.redeem(&app("a"), id).unwrap();
        funds.truncate_to(100_000);
        assert_eq!(budget.used(), 104_096);
        funds.truncate_to(1 << 40);
        assert_eq!(funds.held_bytes(), 104_096);
        funds.spend(200_000).unwrap();
        assert_eq!(funds.spend(1).unwrap_err(), MemoryError::TicketOverspent { requested: 1, remaining: 0 });
        let more = funds.cover_segment(108_000, 2000, 0).unwrap();
        assert_eq!((more.bytes(), funds.held_bytes(), tickets.pre_allocated_bytes()), (110_000, 0, 0));
        assert!(funds.cover_segment(1 << 20, 0, 0).is_none());
        let forced = funds.cover_segment(1 << 20, 0, 110_000).unwrap();
        assert_eq!(budget.used(), 110_000 + (1 << 20));
        assert!(
            funds.cover_segment(1, 0, 110_000).is_none(),
            "the capacity is already overdrawn to its limit"
        );
        assert!(
            funds.cover_segment(0, 1, 110_001).is_none(),
            "room for later blocks must be within the capacity"
        );
        funds.put_back(forced, 5000);
        assert_eq!((funds.held_bytes(), tickets.pre_allocated_bytes(), budget.used()), (5000, 5000, 115_000));
        assert_eq!(funds.cover_metadata(6400).bytes(), 6400);
        assert_eq!((funds.held_bytes(), budget.used()), (0, 110_000));
        drop((more, funds));
        assert_eq!((budget.used(), tickets.pre_allocated_bytes()), (0, 0));
    }

    const KIB: u64 = 1 << 10;

    /// Tickets of one partition each, for a memory of 100 KiB.
    fn small() -> (Budget, Tickets) {
        let budget = Budget::new(100 * KIB);
        let extents = budget.child(u64::MAX);
        (budget.clone(), Tickets::new(budget, extents, Duration::from_secs(20), 30))
    }

    fn ask(tickets: &Tickets, name: &str, kib: u64) -> Result<TicketId, MemoryError> {
        tickets.require(&app(name), (kib - 4) * KIB, 1)
    }

    #[tokio::test(start_paused = true)]
    async fn longest_waiter_below_its_share_is_served_first() {
        let (_, tickets) = small();
        let all = ask(&tickets, "flood", 100).unwrap();
        let held = tickets.redeem(&app("flood"), all).unwrap();
        assert!(ask(&tickets, "first", 60).is_err());
        tokio::time::advance(Duration::from_millis(20)).await;
        assert!(ask(&tickets, "second", 50).is_err());
        drop(held);
        assert_eq!(tickets.claimed_bytes(), 110 * KIB);
        let refused = ask(&tickets, "second", 50).unwrap_err();
        assert_eq!(refused, MemoryError::NoCapacity { requested: 50 * KIB, free: 100 * KIB });
        assert!(ask(&tickets, "flood", 41).is_err(), "awaited memory must be reserved for the waiters");
        ask(&tickets, "first", 60).unwrap();
        assert!(ask(&tickets, "second", 50).is_err());
        // A client that does not ask again is not waited for.
        tokio::time::advance(Duration::from_secs(13)).await;
        assert_eq!(tickets.claimed_bytes(), 0);
        ask(&tickets, "third", 40).unwrap();
        assert_eq!(tickets.standing(&app("third")).share, None);
    }

    #[tokio::test(start_paused = true)]
    async fn app_over_its_share_waits_with_that_reason() {
        let (_, tickets) = small();
        let mut sends: Vec<_> = (0..9)
            .map(|_| tickets.redeem(&app("flood"), ask(&tickets, "flood", 10).unwrap()).unwrap())
            .collect();
        assert!(ask(&tickets, "honest", 30).is_err());
        let refused = ask(&tickets, "flood", 10).unwrap_err();
        assert_eq!(refused, MemoryError::OverShare { requested: 10 * KIB, held: 90 * KIB, share: 70 * KIB });
        sends.truncate(7);
        ask(&tickets, "honest", 30).unwrap();
        let standing = tickets.standing(&app("honest"));
        assert_eq!((standing.held, standing.waited, standing.weight), (30 * KIB, 0, 1));
        assert_eq!(tickets.revoked(), 0, "a redeemed ticket must not be revoked");
    }

    #[tokio::test(start_paused = true)]
    async fn old_idle_tickets_are_revoked_down_to_the_share() {
        let (budget, tickets) = small();
        for _ in 0..9 {
            ask(&tickets, "flood", 10).unwrap();
            tokio::time::advance(Duration::from_millis(100)).await;
        }
        assert!(ask(&tickets, "honest", 70).is_err(), "even the five old tickets would free only 60 KiB");
        assert_eq!(tickets.revoked(), 4, "tickets are revoked down to a share of 50 KiB");
        tokio::time::advance(Duration::from_millis(500)).await;
        assert!(ask(&tickets, "honest", 70).is_err(), "an application at its share must lose no ticket");
        ask(&tickets, "honest", 50).unwrap();
        assert_eq!(budget.free(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn unused_tickets_within_a_share_are_revoked_later() {
        let (_, tickets) = small();
        for name in ["a", "b", "c", "d"] {
            ask(&tickets, name, 20).unwrap();
        }
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(ask(&tickets, "honest", 30).is_err());
        assert_eq!(tickets.standing(&app("a")).share, Some(20 * KIB), "no application is above its share");
        tokio::time::advance(Duration::from_secs(4)).await;
        ask(&tickets, "honest", 30).unwrap();
        assert_eq!(tickets.revoked(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn slow_send_yields_to_an_app_that_waits_below_its_share() {
        let (_, tickets) = small();
        let held: Vec<_> =
            ["flood", "flood", "flood", "small"].map(app).into_iter().zip([30, 30, 30, 10]).collect();
        let mut held: Vec<_> = held
            .iter()
            .map(|(app, kib)| tickets.redeem(app, ask(&tickets, app.as_str(), *kib).unwrap()).unwrap())
            .collect();
        assert!(!tickets.must_yield(&app("flood")), "no application waits");
        assert!(ask(&tickets, "honest", 20).is_err());
        assert!(!tickets.must_yield(&app("flood")), "the wait has only begun");
        tokio::time::advance(SLOW_SEND_GRACE).await;
        assert!(tickets.must_yield(&app("flood")));
        assert!(!tickets.must_yield(&app("small")));
        tokio::time::advance(SLOW_SEND_GRACE_WITHIN_SHARE).await;
        assert!(tickets.must_yield(&app("small")));
        held.remove(0);
        assert!(
            !tickets.must_yield(&app("flood")) && !tickets.must_yield(&app("small")),
            "enough memory is free for the waiters"
        );
        ask(&tickets, "honest", 20).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn slow_send_does_not_yield_to_its_own_app() {
        let (_, tickets) = small();
        let _held = tickets.redeem(&app("a"), ask(&tickets, "a", 90).unwrap()).unwrap();
        assert!(ask(&tickets, "a", 20).is_err());
        tokio::time::advance(Duration::from_secs(8)).await;
        assert!(ask(&tickets, "a", 20).is_err());
        assert!(!tickets.must_yield(&app("a")));
    }

    #[tokio::test(start_paused = true)]
    async fn number_of_tickets_is_shared_too() {
        let (_, tickets) = small();
        tickets.set_max_count(10);
        for _ in 0..10 {
            ask(&tickets, "flood", 4).unwrap();
        }
        assert!(ask(&tickets, "honest", 4).is_err());
        tokio::time::advance(Duration::from_millis(500)).await;
        assert!(ask(&tickets, "flood", 4).is_err(), "an application must not revoke its own tickets");
        ask(&tickets, "honest", 4).unwrap();
        assert_eq!((tickets.count(), tickets.revoked()), (10, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn apps_without_tickets_are_removed() {
        let (budget, tickets) = small();
        let id = ask(&tickets, "a", 100).unwrap();
        let held = tickets.redeem(&app("a"), id).unwrap();
        assert!(ask(&tickets, "b", 10).is_err());
        tickets.forget_app(&app("b"));
        tickets.forget_app(&app("a"));
        // A send is in progress: a returning application has the same budget.
        assert_eq!(tickets.expire(Instant::now()), 0);
        assert_eq!(tickets.budget_of(&app("a")).used(), 100 * KIB);
        drop(held);
        tickets.expire(Instant::now());
        assert!(tickets.holders().is_empty());
        assert_eq!(budget.used(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn extent_lists_belong_to_no_share() {
        let budget = Budget::new(100 * KIB);
        let extents = budget.child(u64::MAX);
        let tickets = Tickets::new(budget, extents.clone(), Duration::from_secs(20), 30);
        let _listed = extents.charge_unchecked(40 * KIB);
        let sends: Vec<_> = (0..4)
            .map(|_| tickets.redeem(&app("large"), ask(&tickets, "large", 10).unwrap()).unwrap())
            .collect();
        assert!(ask(&tickets, "other", 30).is_err());
        let refused = ask(&tickets, "large", 10).unwrap_err();
        assert_eq!(refused, MemoryError::OverShare { requested: 10 * KIB, held: 40 * KIB, share: 30 * KIB });
        drop(sends);
    }
}
