//! A bounded amount with a fair wait queue: read memory, fetches, requests that arrive.
//!
//! The waiting application that holds least by its weight is next; among equals [`FairQueue`]
//! decides. Capacity is collected for the next waiter, or large requests would never be served. A
//! read also needs parts of the shares of its devices ([`ShareParts`]), which are granted together
//! with the amount: a waiter holds neither. A waiter whose share is full is skipped, and so are
//! later waiters for the same share. All reads of a device must use one semaphore: a release wakes
//! only the waiters of its own.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::sync::oneshot;
use uniffle_io::{DeviceShare, ShareParts};
use uniffle_wire::types::AppId;

use super::fair_queue::FairQueue;
use super::shares;

/// A waiter is removed only when it is served or its wait is dropped.
const WAITING: &str = "its wait is held";

/// Part of the capacity for applications that hold nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reserve {
    /// Whatever is free is granted.
    None,
    /// Only the worker itself and applications that hold nothing get the last eighth, so that their
    /// first request is served at once, and then one at a time, however slow the others are. A
    /// single application may use the eighth until it holds half.
    Eighth,
}

/// The application that a permit is for.
#[derive(Debug, Clone)]
pub struct Holder {
    /// Is `None` for the worker itself.
    pub app: Option<AppId>,
    /// Weight in fair sharing, at least 1.
    pub weight: u32,
}

/// A bounded amount with a wait queue. Requests of one application are served in order, but later
/// ones pass a request that waits for a device. While nobody waits, free capacity is granted at
/// once, except for the reserve.
#[derive(Debug)]
pub struct FairSemaphore(Mutex<State>);

#[derive(Debug)]
struct State {
    capacity: u64,
    reserved: u64,
    free: u64,
    /// Applications that hold something.
    held: HashMap<Option<AppId>, u64>,
    waiters: FairQueue<Option<AppId>, PermitWaiter>,
    /// At least one waiter lacks capacity, not only a share of a device.
    is_short: bool,
}

struct PermitWaiter {
    amount: u64,
    weight: u32,
    parts: ShareParts,
    grant: oneshot::Sender<Grant>,
}

impl fmt::Debug for PermitWaiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Waiter").field(&self.amount).finish_non_exhaustive()
    }
}

/// The granted amount, and the granted parts of devices.
pub type Grant = (Permit, DevicePermit);

/// A granted amount, released on drop.
#[derive(Debug)]
pub struct Permit {
    semaphore: Arc<FairSemaphore>,
    app: Option<AppId>,
    amount: u64,
}

/// Granted parts of the shares of devices, released on drop.
#[derive(Debug)]
pub struct DevicePermit {
    semaphore: Arc<FairSemaphore>,
    parts: ShareParts,
}

/// A waiting request. Drop leaves the queue and releases a grant that was not received.
struct Wait<'a> {
    semaphore: &'a Arc<FairSemaphore>,
    app: &'a Option<AppId>,
    number: u64,
    granted: oneshot::Receiver<Grant>,
}

impl FairSemaphore {
    /// Creates a semaphore with `capacity` free.
    pub fn new(capacity: u64, reserve: Reserve) -> Arc<Self> {
        let reserved = match reserve {
            Reserve::None => 0,
            Reserve::Eighth => shares::reserve(capacity),
        };
        let (held, waiters) = (HashMap::new(), FairQueue::default());
        Arc::new(Self(Mutex::new(State {
            capacity,
            reserved,
            free: capacity,
            held,
            waiters,
            is_short: false,
        })))
    }

    /// Acquires `amount` if it is available without waiting.
    pub fn try_acquire(self: &Arc<Self>, holder: &Holder, amount: u64) -> Option<Permit> {
        let (permit, _) = self.try_acquire_with(holder, amount, &ShareParts::default())?;
        Some(permit)
    }

    /// Waits for `amount`, at most the capacity; with a reserve, at most half of it.
    pub async fn acquire(self: &Arc<Self>, holder: &Holder, amount: u64) -> Permit {
        self.acquire_with(holder, amount, ShareParts::default()).await.0
    }

    /// Acquires `amount` and `parts` if both are available without waiting.
    pub fn try_acquire_with(
        self: &Arc<Self>,
        holder: &Holder,
        amount: u64,
        parts: &ShareParts,
    ) -> Option<Grant> {
        let is_taken = self.0.lock().try_take(&holder.app, amount, parts);
        is_taken.then(|| self.grant(holder.app.clone(), amount, parts.clone()))
    }

    /// Waits until `amount` and `parts` are available, and acquires both.
    pub async fn acquire_with(self: &Arc<Self>, holder: &Holder, amount: u64, parts: ShareParts) -> Grant {
        if let Some(grant) = self.try_acquire_with(holder, amount, &parts) {
            return grant;
        }
        let (grant, granted) = oneshot::channel();
        let Holder { app, weight } = holder;
        let waiter = PermitWaiter { amount, weight: *weight, parts, grant };
        let number = self.0.lock().waiters.push(app, amount, *weight, waiter);
        let mut wait = Wait { semaphore: self, app, number, granted };
        self.serve();
        (&mut wait.granted).await.expect(WAITING)
    }

    /// Returns whether nobody waits, and an application that holds nothing could acquire `amount`
    /// now.
    pub fn has_room(&self, amount: u64) -> bool {
        let state = self.0.lock();
        state.waiters.is_empty() && amount <= state.free
    }

    /// Returns whether someone waits for capacity, not only for a share of a device.
    pub fn is_short(&self) -> bool {
        self.0.lock().is_short
    }

    /// Returns whether someone waits, even if only for a share of a device.
    pub fn has_waiters(&self) -> bool {
        !self.0.lock().waiters.is_empty()
    }

    fn grant(self: &Arc<Self>, app: Option<AppId>, amount: u64, parts: ShareParts) -> Grant {
        let permit = Permit { semaphore: Arc::clone(self), app, amount };
        (permit, DevicePermit { semaphore: Arc::clone(self), parts })
    }

    /// Grants free capacity to the waiters that are next.
    fn serve(self: &Arc<Self>) {
        loop {
            let Some((app, PermitWaiter { amount, parts, grant, .. })) = self.0.lock().take_next() else {
                return;
            };
            // Sent outside the lock: without a receiver, the dropped permits take the lock.
            let _ = grant.send(self.grant(app, amount, parts));
        }
    }

    fn release(self: &Arc<Self>, release: impl FnOnce(&mut State)) {
        let mut state = self.0.lock();
        release(&mut state);
        let has_waiters = !state.waiters.is_empty();
        drop(state);
        if has_waiters {
            self.serve();
        }
    }
}

impl State {
    /// Takes everything or nothing. Takes nothing while a waiter lacks capacity, nor parts of
    /// device shares while anyone waits.
    fn try_take(&mut self, app: &Option<AppId>, amount: u64, parts: &ShareParts) -> bool {
        let is_ahead = self.is_short || (!parts.is_empty() && !self.waiters.is_empty());
        let is_taken = !is_ahead && self.needed(app, amount) <= self.free && parts.full().is_none();
        if is_taken {
            self.take(app, amount, parts);
        }
        is_taken
    }

    fn take(&mut self, app: &Option<AppId>, amount: u64, parts: &ShareParts) {
        if amount > 0 {
            self.free -= amount;
            *self.held.entry(app.clone()).or_default() += amount;
        }
        parts.take();
    }

    /// Returns the capacity that must be free so that `app` gets `amount`.
    fn needed(&self, app: &Option<AppId>, amount: u64) -> u64 {
        let is_exempt = amount == 0 || app.is_none() || !self.held.contains_key(app);
        let apps = self.held.len() - usize::from(self.held.contains_key(&None));
        let may_use_all = is_exempt || (apps <= 1 && !self.is_greedy(app, amount));
        if may_use_all { amount } else { amount + self.reserved }
    }

    /// Returns whether `app` would exceed half of the capacity with `amount` more.
    fn is_greedy(&self, app: &Option<AppId>, amount: u64) -> bool {
        self.held_by(app) + amount > shares::half(self.capacity)
    }

    fn held_by(&self, app: &Option<AppId>) -> u64 {
        self.held.get(app).copied().unwrap_or(0)
    }

    /// Removes the next waiter from the queue and takes its request, if everything is available.
    fn take_next(&mut self) -> Option<(Option<AppId>, PermitWaiter)> {
        let (next, is_short) = self.next();
        self.is_short = is_short;
        let (app, number) = next?;
        let waiter = self.waiters.take(&app, number)?;
        self.take(&app, waiter.amount, &waiter.parts);
        // Assumed until the other waiters have been checked.
        self.is_short = !self.waiters.is_empty();
        Some((app, waiter))
    }

    /// Returns the waiter that can be served next, and whether a waiter lacks capacity.
    fn next(&self) -> (Option<(Option<AppId>, u64)>, bool) {
        let turns = self.waiters.turns().map(|(app, waiters)| {
            let mut waiters = waiters.peekable();
            let weight = waiters.peek().map_or(1, |(_, first)| first.weight.max(1));
            (self.held_by(app) / u64::from(weight), app, waiters)
        });
        let mut turns: Vec<_> = turns.collect();
        // Stable, so that among equals the earlier turn is first.
        turns.sort_by_key(|(held, ..)| *held);
        let (mut full, mut is_short) = (FullShares::new(), false);
        for (_, app, mut waiters) in turns {
            let Some((number, waiter)) = waiters.find(|(_, waiter)| waiter.has_room(&mut full)) else {
                continue;
            };
            let amount = waiter.amount;
            if self.needed(app, amount) <= self.free {
                return (Some((app.clone(), number)), is_short);
            }
            is_short = true;
            // A waiter that lacks only the reserve, and whose application would exceed half, is
            // skipped. For any other, capacity is collected.
            if !(self.is_greedy(app, amount) && amount <= self.free) {
                break;
            }
        }
        (None, is_short)
    }
}

/// Full shares that earlier waiters need.
type FullShares<'a> = SmallVec<[&'a Arc<DeviceShare>; 8]>;

impl PermitWaiter {
    /// Returns whether its shares have room and no earlier waiter needs them.
    fn has_room<'a>(&'a self, full: &mut FullShares<'a>) -> bool {
        if full.iter().any(|share| self.parts.contains(share)) {
            return false;
        }
        let full_share = self.parts.full();
        full.extend(full_share);
        full_share.is_none()
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let Self { semaphore, app, amount } = self;
        if *amount == 0 {
            return;
        }
        semaphore.release(|state| {
            state.free += *amount;
            if let Entry::Occupied(mut held) = state.held.entry(app.take()) {
                *held.get_mut() -= *amount;
                if *held.get() == 0 {
                    held.remove();
                }
            }
        });
    }
}

impl Drop for DevicePermit {
    fn drop(&mut self) {
        if !self.parts.is_empty() {
            self.semaphore.release(|_| self.parts.release());
        }
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        drop(self.semaphore.0.lock().waiters.remove(self.app, self.number));
        // A grant that was sent but not received is dropped here; a later one fails to be sent.
        self.granted.close();
        drop(self.granted.try_recv());
        self.semaphore.serve();
    }
}

#[cfg(test)]
mod tests;
