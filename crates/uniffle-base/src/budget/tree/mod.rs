//! Capacity as a value with `Drop`: every reservation is a [`Charge`] that releases itself.
//!
//! This is not an allocator: a charge is a number, and its memory comes from elsewhere. Callers
//! never add or subtract amounts themselves. Amounts are called bytes, but a budget may also count
//! blocks or partitions. Budgets form a tree.
//!
//! Invariant: a charge to a child is also charged to all its ancestors, or refused. The used amount
//! of a budget is the sum of its own charges and those of its descendants: zero once all are
//! dropped. A release wakes every waiter of the tree.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use tokio::sync::Notify;

use crate::sched::shares;

/// A refused charge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("capacity is full: {requested} requested, {free} free")]
pub struct NoCapacity {
    /// Requested amount.
    pub requested: u64,
    /// Amount that was free at that moment.
    pub free: u64,
}

/// Free amount of the parent below which a child is refused more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Headroom {
    None,
    /// At least as much as the child holds (`sched::shares`).
    Share,
    /// A fixed number of bytes, whatever uses the parent.
    Bytes(u64),
}

/// A callback that runs each time `step_bytes` more were charged.
#[derive(Debug)]
struct ChargeStep {
    step_bytes: u64,
    charged: AtomicU64,
    callback: fn(),
}

impl ChargeStep {
    /// Counts a charge. Called before the caller can allocate the bytes.
    fn count(&self, bytes: u64) {
        let before = self.charged.fetch_add(bytes, Ordering::Relaxed);
        if before / self.step_bytes != before.wrapping_add(bytes) / self.step_bytes {
            (self.callback)();
        }
    }
}

#[derive(Debug)]
struct BudgetNode {
    capacity: u64,
    used: AtomicU64,
    parent: Option<Budget>,
    headroom: Headroom,
    step: Option<ChargeStep>,
    pressure: Notify,
    /// Number of waiters for released charges of the tree. Used in the root only.
    waiters: AtomicUsize,
    freed: Notify,
}

impl BudgetNode {
    fn new(parent: Option<Budget>, capacity: u64, headroom: Headroom) -> Self {
        Self {
            capacity,
            used: AtomicU64::new(0),
            parent,
            headroom,
            step: None,
            pressure: Notify::new(),
            waiters: AtomicUsize::new(0),
            freed: Notify::new(),
        }
    }

    /// Adds `bytes`, up to `overdraft` more than the capacity. Otherwise returns the free amount as
    /// the error.
    fn take(&self, bytes: u64, overdraft: u64) -> Result<(), u64> {
        let max = self.capacity.saturating_add(overdraft);
        // `SeqCst` orders this with `waiters`, see `charge`. It also acquires what `give_back`
        // released: a thread that takes the amount of a dropped charge sees that the charge's
        // memory was returned to the allocator before.
        let taken = self.used.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |used| {
            used.checked_add(bytes).filter(|sum| *sum <= max)
        });
        taken.map(drop).map_err(|used| max.saturating_sub(used))
    }

    fn unused(&self) -> u64 {
        self.capacity.saturating_sub(self.used.load(Ordering::SeqCst))
    }

    /// Returns the amount that this budget allows now, given its own limit and its headroom.
    fn free(&self) -> u64 {
        let free = self.unused();
        match (&self.parent, self.headroom) {
            (Some(parent), Headroom::Share) => {
                let used = self.used.load(Ordering::SeqCst);
                free.min(shares::room(parent.capacity(), parent.free_below_root(), used))
            }
            (Some(parent), Headroom::Bytes(bytes)) => free.min(parent.0.unused().saturating_sub(bytes)),
            (Some(_), Headroom::None) | (None, _) => free,
        }
    }

    /// Returns the amount that this budget allows now, up to `overdraft` more than its capacity. A
    /// budget with headroom gets no overdraft.
    fn free_with(&self, overdraft: u64) -> u64 {
        match self.headroom {
            Headroom::None => {
                let max = self.capacity.saturating_add(overdraft);
                max.saturating_sub(self.used.load(Ordering::SeqCst))
            }
            Headroom::Share | Headroom::Bytes(_) => self.free(),
        }
    }

    /// Returns whether the current charges leave the headroom free.
    fn has_headroom(&self) -> bool {
        match (&self.parent, self.headroom) {
            (Some(parent), Headroom::Share) => {
                let used = self.used.load(Ordering::SeqCst);
                shares::is_enough(parent.capacity(), parent.free_below_root(), used)
            }
            (Some(parent), Headroom::Bytes(bytes)) => parent.0.unused() >= bytes,
            (Some(_), Headroom::None) | (None, _) => true,
        }
    }

    /// Returns the amount that could be charged if the budget were empty.
    fn max_charge(&self) -> u64 {
        match (&self.parent, self.headroom) {
            (Some(parent), Headroom::Bytes(bytes)) => {
                self.capacity.min(parent.0.capacity.saturating_sub(bytes))
            }
            (Some(_), Headroom::None | Headroom::Share) | (None, _) => self.capacity,
        }
    }

    fn give_back(&self, bytes: u64) {
        let before = self.used.fetch_sub(bytes, Ordering::SeqCst);
        assert!(before >= bytes, "budget underflow: {bytes} of {before} bytes released");
    }
}

/// A bounded amount that charges are taken from. Clones share it.
#[derive(Clone, Debug)]
pub struct Budget(Arc<BudgetNode>);

impl Budget {
    /// Creates a budget of `capacity_bytes`, all of it free.
    #[must_use]
    pub fn new(capacity_bytes: u64) -> Self {
        Self::with_parent(None, capacity_bytes, Headroom::None)
    }

    /// Creates a budget that calls `callback` each time another `step_bytes` were charged,
    /// regardless of charges released meanwhile. The call happens inside the charge, before the
    /// caller can allocate the bytes.
    #[must_use]
    pub fn with_step(capacity_bytes: u64, step_bytes: u64, callback: fn()) -> Self {
        let step = ChargeStep { step_bytes: step_bytes.max(1), charged: AtomicU64::new(0), callback };
        Self(Arc::new(BudgetNode {
            step: Some(step),
            ..BudgetNode::new(None, capacity_bytes, Headroom::None)
        }))
    }

    /// Creates a child. Its charges are also charged to this budget. The capacities of all children
    /// may add up to more than the capacity of this budget, which stays the limit.
    #[must_use]
    pub fn child(&self, capacity_bytes: u64) -> Self {
        Self::with_parent(Some(self.clone()), capacity_bytes, Headroom::None)
    }

    /// Creates a child that is refused a charge unless `margin_bytes` of this budget stay free.
    #[must_use]
    pub fn child_leaving(&self, margin_bytes: u64, capacity_bytes: u64) -> Self {
        Self::with_parent(Some(self.clone()), capacity_bytes, Headroom::Bytes(margin_bytes))
    }

    /// Creates a child that leaves enough to others: at most half of this budget, and less as less
    /// of it is free (`sched::shares`).
    #[must_use]
    pub fn share(&self) -> Self {
        Self::with_parent(Some(self.clone()), shares::half(self.capacity()), Headroom::Share)
    }

    fn with_parent(parent: Option<Self>, capacity: u64, headroom: Headroom) -> Self {
        Self(Arc::new(BudgetNode::new(parent, capacity, headroom)))
    }

    /// Iterates over this budget and its ancestors, up to the root.
    fn path(&self) -> impl Iterator<Item = &BudgetNode> {
        std::iter::successors(Some(&*self.0), |node| node.parent.as_ref().map(|parent| &*parent.0))
    }

    /// Returns the capacity, charged or not.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.0.capacity
    }

    /// Returns the largest charge that could ever be granted.
    #[must_use]
    pub fn max_charge(&self) -> u64 {
        self.path().map(BudgetNode::max_charge).min().unwrap_or(0)
    }

    /// Returns the charged amount. It exceeds the capacity while the budget is overdrawn.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.0.used.load(Ordering::Relaxed)
    }

    /// Returns the amount that could be charged now.
    #[must_use]
    pub fn free(&self) -> u64 {
        self.path().map(BudgetNode::free).min().unwrap_or(0)
    }

    /// Returns the free amount, regardless of the root unless this is the root. The root also holds
    /// short-lived charges, whose current amount does not show which application holds too much.
    fn free_below_root(&self) -> u64 {
        let is_below_root = |node: &&BudgetNode| node.parent.is_some() || std::ptr::eq(*node, &*self.0);
        let free = |node: &BudgetNode| match node.headroom {
            Headroom::Bytes(_) => node.unused(),
            Headroom::None | Headroom::Share => node.free(),
        };
        self.path().filter(is_below_root).map(free).min().unwrap_or(0)
    }

    /// Charges `bytes`, or nothing. A charge of zero bytes is never refused, not even by an
    /// overdrawn budget.
    ///
    /// # Errors
    /// [`NoCapacity`] when fewer are free, here or in an ancestor.
    pub fn try_charge(&self, bytes: u64) -> Result<Charge, NoCapacity> {
        self.try_charge_beyond(bytes, 0)
    }

    /// Charges `bytes` like [`Budget::try_charge`], up to `overdraft` more than the capacity of
    /// this budget and of each ancestor. A budget with headroom gets no overdraft.
    ///
    /// # Errors
    /// [`NoCapacity`] when fewer are free, here or in an ancestor.
    pub fn try_charge_beyond(&self, bytes: u64, overdraft: u64) -> Result<Charge, NoCapacity> {
        self.take(bytes, overdraft)?;
        Ok(Charge { budget: self.clone(), bytes })
    }

    fn take(&self, bytes: u64, overdraft: u64) -> Result<(), NoCapacity> {
        if bytes == 0 {
            return Ok(());
        }
        // Checked before anything is taken: a refusal does not reduce the free amount of others,
        // not even for a moment.
        let mut free = self.path().map(|node| node.free_with(overdraft));
        if let Some(free) = free.find(|free| *free < bytes) {
            return Err(NoCapacity { requested: bytes, free });
        }
        self.take_path(bytes, overdraft)?;
        self.count(bytes);
        Ok(())
    }

    /// Takes `bytes` here and in all ancestors, or nothing. Fails only if others have charged
    /// something since the caller's check.
    fn take_path(&self, bytes: u64, overdraft: u64) -> Result<(), NoCapacity> {
        for (level, node) in self.path().enumerate() {
            if let Err(free) = node.take(bytes, overdraft) {
                self.path().take(level).for_each(|taken| taken.give_back(bytes));
                // A waiter may have been refused because of the amount that was taken for a moment.
                self.notify_waiters();
                return Err(NoCapacity { requested: bytes, free });
            }
        }
        if !self.path().all(BudgetNode::has_headroom) {
            self.give_back(bytes);
            return Err(NoCapacity { requested: bytes, free: self.free() });
        }
        Ok(())
    }

    fn count(&self, bytes: u64) {
        if let Some(step) = &self.root().step {
            step.count(bytes);
        }
    }

    /// Waits until `bytes` are free and charges them. There is no queue: smaller requests may be
    /// served first.
    ///
    /// # Errors
    /// [`NoCapacity`] at once if they can never be granted.
    pub async fn charge(&self, bytes: u64) -> Result<Charge, NoCapacity> {
        let max = self.max_charge();
        if max < bytes {
            return Err(NoCapacity { requested: bytes, free: max });
        }
        if let Ok(charge) = self.try_charge(bytes) {
            return Ok(charge);
        }
        let root = self.root();
        // Sequentially consistent: either the check below sees the released charge, or the
        // releasing thread sees this waiter.
        let _waiter = WaiterGuard::new(&root.waiters);
        loop {
            let mut freed = pin!(root.freed.notified());
            freed.as_mut().enable();
            if let Ok(charge) = self.try_charge(bytes) {
                return Ok(charge);
            }
            freed.await;
        }
    }

    /// Calls `check`, then waits until a charge is released anywhere in the tree. A release during
    /// `check` ends the wait.
    pub async fn wait_for_release(&self, check: impl FnOnce()) {
        let root = self.root();
        let _waiter = WaiterGuard::new(&root.waiters);
        let mut freed = pin!(root.freed.notified());
        freed.as_mut().enable();
        check();
        freed.await;
    }

    /// Returns whether someone waits for a released charge, anywhere in the tree.
    #[must_use]
    pub fn is_waited_for(&self) -> bool {
        self.root().waiters.load(Ordering::SeqCst) > 0
    }

    /// Charges `bytes` even beyond the capacity. For amounts that are bounded elsewhere.
    pub fn charge_unchecked(&self, bytes: u64) -> Charge {
        self.add_unchecked(bytes);
        self.count(bytes);
        Charge { budget: self.clone(), bytes }
    }

    /// Charges the parent before the child, so that the parent includes the charge once the child
    /// does.
    fn add_unchecked(&self, bytes: u64) {
        if let Some(parent) = &self.0.parent {
            parent.add_unchecked(bytes);
        }
        self.0.used.fetch_add(bytes, Ordering::SeqCst);
    }

    /// Returns an empty charge to merge others into.
    pub fn empty_charge(&self) -> Charge {
        Charge { budget: self.clone(), bytes: 0 }
    }

    /// Returns whether this is the only handle, without any charge or child.
    #[must_use]
    pub fn is_unshared(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    /// Returns the notification of [`Budget::notify_pressure`], shared by the whole tree.
    #[must_use]
    pub fn pressure(&self) -> &Notify {
        &self.root().pressure
    }

    /// Wakes the task that waits for [`Budget::pressure`]. Callers that were refused a charge
    /// decide whether it is needed.
    pub fn notify_pressure(&self) {
        self.pressure().notify_one();
    }

    fn root(&self) -> &BudgetNode {
        self.path().last().unwrap_or(&self.0)
    }

    fn give_back(&self, bytes: u64) {
        self.path().for_each(|node| node.give_back(bytes));
        self.notify_waiters();
    }

    /// Wakes all tasks that wait for a released charge, anywhere in the tree.
    fn notify_waiters(&self) {
        let root = self.root();
        if root.waiters.load(Ordering::SeqCst) > 0 {
            root.freed.notify_waiters();
        }
    }
}

/// Counts one waiter until it is dropped.
struct WaiterGuard<'a>(&'a AtomicUsize);

impl<'a> WaiterGuard<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for WaiterGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A part of a [`Budget`] that is released on drop.
#[derive(Debug)]
#[must_use = "a dropped charge is given back at once"]
pub struct Charge {
    budget: Budget,
    bytes: u64,
}

impl Charge {
    /// Returns the charged amount.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the charged budget.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Charges `bytes` more, or nothing.
    ///
    /// # Errors
    /// See [`Budget::try_charge`].
    pub fn try_grow(&mut self, bytes: u64) -> Result<(), NoCapacity> {
        self.budget.take(bytes, 0)?;
        self.bytes += bytes;
        Ok(())
    }

    /// Splits `bytes` off this charge. Returns `None` when it holds fewer.
    pub fn split(&mut self, bytes: u64) -> Option<Charge> {
        self.bytes = self.bytes.checked_sub(bytes)?;
        Some(Charge { budget: self.budget.clone(), bytes })
    }

    /// Splits up to `bytes` off this charge.
    pub fn split_up_to(&mut self, bytes: u64) -> Charge {
        let part = bytes.min(self.bytes);
        self.bytes -= part;
        Charge { budget: self.budget.clone(), bytes: part }
    }

    /// Adds `other`, a charge to the same budget, to this charge.
    pub fn merge(&mut self, mut other: Charge) {
        other.transfer(u64::MAX, self);
    }

    /// Moves up to `bytes` of this charge to `other`, a charge to the same budget, without the
    /// reference counts that splitting and merging cost.
    pub fn transfer(&mut self, bytes: u64, other: &mut Charge) {
        assert!(Arc::ptr_eq(&self.budget.0, &other.budget.0), "charges of two budgets cannot be merged");
        let moved = bytes.min(self.bytes);
        self.bytes -= moved;
        other.bytes += moved;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.budget.give_back(self.bytes);
        }
    }
}

#[cfg(test)]
mod tests;
