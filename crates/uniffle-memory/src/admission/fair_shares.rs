//! Grants tickets to applications that hold or wait for memory, by the rules of [`super::fair`].
//!
//! While nobody waits, every request that fits is granted. From the first refusal on, shares are
//! enforced, until each waiting request was granted or not repeated for [`WAIT_MAX`]. Meanwhile an
//! application that has reached its share gets no new ticket. Freed memory is kept for applications
//! below their share. A request beyond the share also leaves free what those that began to wait
//! earlier claim. Tickets that stay unused are revoked, and sends whose bytes arrive too slowly
//! must end ([`FairShares::must_yield`]).
//!
//! Nothing here locks or waits; the lock is in [`super::ticket`].

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::fair::{self, Claimant, CompetingRequest, Level};
use super::reservation::Reservation;
use crate::error::MemoryError;
use uniffle_base::budget::{Budget, Charge};
use uniffle_base::clock::Instant;
use uniffle_wire::types::{AppId, TicketId};

/// Time after which a refused request that was not repeated no longer waits. Clients repeat it
/// after 2 to 10 s (docs/protocol.md §2.4).
const WAIT_MAX: Duration = Duration::from_secs(12);

/// Time after which an unused ticket may be revoked, if its application is over its share, or has
/// the most tickets when their number is at its limit. A client normally sends as soon as it has
/// its ticket. After a revocation it has to repeat the send, as after an expiry.
const IDLE_MAX: Duration = Duration::from_millis(500);

/// The same time for an application within its share, if memory is short.
const IDLE_MAX_WITHIN_SHARE: Duration = Duration::from_secs(5);

/// A slow send of an application over its share ends once a request of another application has
/// waited this long.
pub(super) const SLOW_SEND_GRACE: Duration = Duration::from_millis(500);
/// The same limit for an application within its share.
pub(super) const SLOW_SEND_GRACE_WITHIN_SHARE: Duration = Duration::from_secs(5);

/// Maximum age of the [`Level`] of fair shares while an application waits.
const LEVEL_AGE_MAX: Duration = Duration::from_millis(10);
/// Up to this number of applications, the level is also recomputed when one begins or stops
/// waiting.
const CLAIMANTS_AT_ONCE: usize = 128;

/// Maximum number of waiting requests remembered per application. Clients have a handful of tasks
/// per executor.
const REQUESTS_MAX: usize = 256;

/// The amounts of a request. A refused client repeats them, so equal amounts are one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RequestSize {
    /// Bytes to reserve.
    pub(crate) bytes: u64,
    /// Number of partitions named.
    pub(crate) partitions: usize,
}

/// Memory of an application, compared to its fair share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    /// Weight of the application.
    pub weight: u32,
    /// Bytes that it holds: tickets, blocks, batches in flight.
    pub held: u64,
    /// Bytes that it was refused and still waits for.
    pub waited: u64,
    /// Largest number of bytes it may hold now. `None` while there is enough for all.
    pub share: Option<u64>,
}

/// All applications that hold memory or wait for it.
#[derive(Debug)]
pub(super) struct FairShares {
    root: Budget,
    /// Share of the budget excluded from fair sharing (lists of extents).
    extents: Budget,
    holders: HashMap<AppId, AppTickets>,
    waiting: HashMap<AppId, RefusedRequests>,
    level: Level,
    leveled: Instant,
    is_stale: bool,
    /// Values of the last `update_level`: bytes claimed by applications below their shares, and the
    /// two of them that have waited longest.
    claimed: u64,
    owed: [Option<(Instant, AppId)>; 2],
    /// Number of tickets revoked so far.
    revoked: u64,
}

/// Holdings of one application. It exists from its first use until nothing is held any longer. An
/// application thus has one budget at a time, even if it unregisters and returns while a reader
/// holds its memory.
#[derive(Debug)]
pub(super) struct AppTickets {
    pub(crate) budget: Budget,
    pub(super) weight: u32,
    /// Tickets by id. Ids grow, so the first is the oldest.
    pub(crate) tickets: BTreeMap<TicketId, Ticket>,
}

/// A granted ticket that is neither redeemed nor expired.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(crate) reservation: Reservation,
    /// Charge of one ticket against the limit on tickets.
    pub(super) _count: Charge,
}

impl AppTickets {
    fn has_idle_ticket(&self, now: Instant, idle_max: Duration) -> bool {
        let oldest = self.tickets.first_key_value();
        oldest.is_some_and(|(_, ticket)| now.duration_since(ticket.reservation.granted()) >= idle_max)
    }

    /// Returns whether one of its tickets may be revoked for another application.
    fn has_revocable_ticket(&self, now: Instant, level: Level) -> bool {
        let idle_max = if self.excess(level) > 0 { IDLE_MAX } else { IDLE_MAX_WITHIN_SHARE };
        self.has_idle_ticket(now, idle_max)
    }

    /// Returns the bytes above its share.
    fn excess(&self, level: Level) -> u64 {
        self.budget.used().saturating_sub(level.share(self.weight))
    }
}

/// Refused requests of one application, the oldest first.
#[derive(Debug, Default)]
struct RefusedRequests(Vec<RefusedRequest>);

#[derive(Debug)]
struct RefusedRequest {
    ask: RequestSize,
    since: Instant,
    seen: Instant,
}

impl RefusedRequests {
    fn bytes(&self) -> u64 {
        self.0.iter().fold(0, |sum, waiter| sum.saturating_add(waiter.ask.bytes))
    }

    fn since(&self) -> Option<Instant> {
        self.0.first().map(|waiter| waiter.since)
    }

    fn claim(&self, held: u64, share: u64) -> u64 {
        fair::claim(held, share, self.bytes(), self.0.first().map_or(0, |waiter| waiter.ask.bytes))
    }
}

impl FairShares {
    pub(crate) fn new(root: Budget, extents: Budget) -> Self {
        let (holders, waiting) = (HashMap::new(), HashMap::new());
        let (level, leveled) = (Level::ENOUGH, Instant::now());
        let (claimed, owed) = (0, [None, None]);
        Self { root, extents, holders, waiting, level, leveled, is_stale: false, claimed, owed, revoked: 0 }
    }

    pub(super) fn holder(&mut self, app: &AppId) -> &mut AppTickets {
        let root = &self.root;
        let fresh =
            || AppTickets { budget: root.child(root.capacity()), weight: 1, tickets: BTreeMap::new() };
        self.holders.entry(app.clone()).or_insert_with(fresh)
    }

    pub(crate) fn holders(&self) -> impl Iterator<Item = (&AppId, &AppTickets)> {
        self.holders.iter()
    }

    pub(crate) fn find(&mut self, app: &AppId) -> Option<&mut AppTickets> {
        self.holders.get_mut(app)
    }

    pub(super) fn set_weight(&mut self, app: &AppId, weight: u32) {
        self.is_stale |= std::mem::replace(&mut self.holder(app).weight, weight) != weight;
    }

    /// Reserves memory for `ask` of `app`, or records that it waits.
    ///
    /// # Errors
    /// `NoCapacity`, or `OverShare` for an application that must wait until others have their
    /// shares.
    pub(crate) fn charge(
        &mut self,
        app: &AppId,
        ask: RequestSize,
        now: Instant,
    ) -> Result<Charge, MemoryError> {
        let budget = self.holder(app).budget.clone();
        if self.waiting.is_empty()
            && let Ok(charge) = budget.try_charge(ask.bytes)
        {
            return Ok(charge);
        }
        self.wait(app, ask, now);
        self.update_level(now);
        let request = self.request(app, ask);
        let needed = request.room_needed();
        if let Some(needed) = needed {
            self.revoke(app, needed, now);
        }
        let free = self.root.free();
        let CompetingRequest { requested, held, share, .. } = request;
        match needed {
            None if requested <= free => return Err(MemoryError::OverShare { requested, held, share }),
            Some(needed) if needed <= free => {}
            None | Some(_) => return Err(MemoryError::NoCapacity { requested, free }),
        }
        let charge = budget.try_charge(ask.bytes)?;
        self.satisfied(app, ask);
        Ok(charge)
    }

    /// Revokes an idle ticket of the application with the most tickets, if it has more than `app`.
    /// Returns whether it did.
    pub(super) fn revoke_one(&mut self, app: &AppId, now: Instant) -> bool {
        let of_app = self.holders.get(app).map_or(0, |holder| holder.tickets.len());
        let most = self.holders.values_mut().max_by_key(|holder| holder.tickets.len());
        let most =
            most.filter(|holder| holder.tickets.len() > of_app + 1 && holder.has_idle_ticket(now, IDLE_MAX));
        let taken = most.is_some_and(|holder| holder.tickets.pop_first().is_some());
        self.revoked += u64::from(taken);
        taken
    }

    pub(crate) fn revoked(&self) -> u64 {
        self.revoked
    }

    /// Removes the waiting requests and the tickets of `app`. Returns the tickets.
    #[must_use = "tickets are dropped outside of the lock"]
    pub(crate) fn forget(&mut self, app: &AppId) -> BTreeMap<TicketId, Ticket> {
        self.is_stale |= self.waiting.remove(app).is_some();
        self.find(app).map(|holder| std::mem::take(&mut holder.tickets)).unwrap_or_default()
    }

    /// Removes and returns tickets granted up to `granted_before`, and forgets applications that
    /// hold nothing and do not wait.
    #[must_use = "tickets are dropped outside of the lock"]
    pub(crate) fn expire(&mut self, granted_before: Instant) -> Vec<Ticket> {
        let mut expired = Vec::new();
        for holder in self.holders.values_mut() {
            while let Some(oldest) = holder.tickets.first_entry()
                && oldest.get().reservation.granted() <= granted_before
            {
                expired.push(oldest.remove());
            }
        }
        let waiting = &self.waiting;
        self.holders.retain(|app, holder| {
            !(holder.budget.is_unshared() && holder.tickets.is_empty() && !waiting.contains_key(app))
        });
        expired
    }

    pub(super) fn are_waited_for(&mut self, now: Instant) -> bool {
        self.update_level(now);
        !self.waiting.is_empty()
    }

    /// Returns whether a slow send of `app` must end: another application that is owed memory has
    /// waited long enough, and fewer bytes are free than claimed.
    pub(super) fn must_yield(&mut self, app: &AppId, now: Instant) -> bool {
        if self.waiting.is_empty() {
            return false;
        }
        self.update_level(now);
        let is_over_share = self.holders.get(app).is_some_and(|holder| holder.excess(self.level) > 0);
        let grace = if is_over_share { SLOW_SEND_GRACE } else { SLOW_SEND_GRACE_WITHIN_SHARE };
        let other = self.owed.iter().flatten().find(|(_, other)| other != app);
        let has_waited = other.is_some_and(|(since, _)| now.duration_since(*since) >= grace);
        has_waited && self.root.free() < self.claimed
    }

    /// Returns the bytes to keep free for applications below their shares.
    pub(super) fn claimed_bytes(&mut self, now: Instant) -> u64 {
        self.update_level(now);
        let claims = self.waiting.iter().map(|(app, waiting)| self.claim_of(app, waiting));
        claims.fold(0, u64::saturating_add)
    }

    pub(super) fn standing(&mut self, app: &AppId, now: Instant) -> Standing {
        self.update_level(now);
        let (held, weight) = self.holding(app);
        let waited = self.waiting.get(app).map_or(0, RefusedRequests::bytes);
        let share = (self.level != Level::ENOUGH).then(|| self.level.share(weight));
        Standing { weight, held, waited, share }
    }

    fn holding(&self, app: &AppId) -> (u64, u32) {
        self.holders.get(app).map_or((0, 1), |holder| (holder.budget.used(), holder.weight))
    }

    fn claim_of(&self, app: &AppId, waiting: &RefusedRequests) -> u64 {
        let (held, weight) = self.holding(app);
        waiting.claim(held, self.level.share(weight))
    }

    fn request(&self, app: &AppId, ask: RequestSize) -> CompetingRequest {
        let (held, weight) = self.holding(app);
        let since = self.waiting.get(app).and_then(RefusedRequests::since);
        let is_ahead = |waiting: &RefusedRequests| waiting.since() < since;
        let others = self.waiting.iter().filter(|(other, waiting)| *other != app && is_ahead(waiting));
        let ahead = others.map(|(other, waiting)| self.claim_of(other, waiting));
        CompetingRequest {
            requested: ask.bytes,
            held,
            share: self.level.share(weight),
            ahead: ahead.fold(0, u64::saturating_add),
        }
    }

    fn wait(&mut self, app: &AppId, ask: RequestSize, now: Instant) {
        if !self.waiting.contains_key(app) {
            self.waiting.insert(app.clone(), RefusedRequests::default());
            self.is_stale = true;
        }
        let Some(RefusedRequests(waiters)) = self.waiting.get_mut(app) else { return };
        match waiters.iter().position(|waiter| waiter.ask == ask) {
            Some(at) => waiters[at].seen = now,
            None if waiters.len() < REQUESTS_MAX => {
                waiters.push(RefusedRequest { ask, since: now, seen: now })
            }
            None => {}
        }
    }

    fn satisfied(&mut self, app: &AppId, ask: RequestSize) {
        let Some(RefusedRequests(waiters)) = self.waiting.get_mut(app) else { return };
        waiters.retain(|waiter| waiter.ask != ask);
        if waiters.is_empty() {
            self.waiting.remove(app);
            self.is_stale = true;
        }
    }

    /// Updates the level and drops waiters that have given up.
    fn update_level(&mut self, now: Instant) {
        let is_due = now.duration_since(self.leveled) >= LEVEL_AGE_MAX;
        let is_cheap = self.holders.len() <= CLAIMANTS_AT_ONCE;
        if !(is_due || self.is_stale && is_cheap) {
            return;
        }
        self.waiting.retain(|_, RefusedRequests(waiters)| {
            waiters.retain(|waiter| now.duration_since(waiter.seen) < WAIT_MAX);
            !waiters.is_empty()
        });
        (self.leveled, self.is_stale) = (now, false);
        (self.claimed, self.owed) = (0, [None, None]);
        if self.waiting.is_empty() {
            self.level = Level::ENOUGH;
            return;
        }
        let claimant = |(app, holder): (&AppId, &AppTickets)| {
            let waited = self.waiting.get(app).map_or(0, RefusedRequests::bytes);
            Claimant { weight: holder.weight, demand: holder.budget.used().saturating_add(waited) }
        };
        let claimants: Vec<_> = self.holders.iter().map(claimant).filter(|it| it.demand > 0).collect();
        self.level = fair::level(self.root.capacity().saturating_sub(self.extents.used()), &claimants);
        self.note_owed();
    }

    fn note_owed(&mut self) {
        let claims = self.waiting.iter().map(|(app, waiting)| (app, waiting, self.claim_of(app, waiting)));
        let (mut claimed, mut oldest, mut second) = (0u64, None, None);
        for (app, waiting, claim) in claims.filter(|(_, _, claim)| *claim > 0) {
            claimed = claimed.saturating_add(claim);
            let Some(since) = waiting.since() else { continue };
            if oldest.is_none_or(|(other, _)| since < other) {
                (oldest, second) = (Some((since, app)), oldest);
            } else if second.is_none_or(|(other, _)| since < other) {
                second = Some((since, app));
            }
        }
        let named = |it: Option<(Instant, &AppId)>| it.map(|(since, app)| (since, app.clone()));
        (self.claimed, self.owed) = (claimed, [named(oldest), named(second)]);
    }

    /// Revokes idle tickets of other applications, those furthest over their shares first, until
    /// `needed` bytes are free.
    fn revoke(&mut self, app: &AppId, needed: u64, now: Instant) {
        let (root, level) = (&self.root, self.level);
        while root.free() < needed {
            let others = self.holders.iter_mut().filter(|(other, _)| *other != app).map(|(_, holder)| holder);
            let revocable = others.filter(|holder| holder.has_revocable_ticket(now, level));
            let Some(holder) = revocable.max_by_key(|holder| holder.excess(level)) else { return };
            while root.free() < needed && holder.has_revocable_ticket(now, level) {
                holder.tickets.pop_first();
                self.revoked += 1;
            }
        }
    }
}
