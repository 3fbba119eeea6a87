//! The worker's state as a node (docs/protocol.md §2.14, §8.5): one source of truth for heartbeat,
//! health and metrics.
//!
//! The state follows from separate inputs: requests of operators, findings of the health checker, a
//! stop, and a drain. One input never overwrites another, so a worker that becomes healthy again
//! stays decommissioned.

use tokio::sync::{Notify, watch};

/// Worker state reported to coordinators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkerState {
    /// Accepts new shuffles.
    Active,
    /// Serves, but gets no new shuffles, because the health checker found it unhealthy.
    Unhealthy,
    /// Serves, but gets no new shuffles, because an operator or a coordinator decommissioned it, or
    /// because it stops for good.
    Decommissioning,
    /// Decommissioning has ended: no app is left.
    Decommissioned,
}

impl WorkerState {
    /// Returns the name of the state.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Unhealthy => "unhealthy",
            Self::Decommissioning => "decommissioning",
            Self::Decommissioned => "decommissioned",
        }
    }
}

/// Requests of operators and coordinators, findings of the health checker, a stop, and a drain.
/// They are separate so that one does not undo the other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Inputs {
    decommission: bool,
    drained: bool,
    unhealthy: bool,
    /// Fewer disks than required accept data, or none, regardless of the state that coordinators
    /// see.
    without_room: bool,
    stopping: Option<Stopping>,
    /// The worker's data is being moved elsewhere.
    draining: bool,
}

/// Reason for refusing tickets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopping {
    /// The worker leaves: coordinators must not assign shuffles to it.
    ForGood,
    /// A successor follows within seconds: coordinators need not know.
    ForSuccessor,
}

impl Inputs {
    /// Returns why tickets are refused. A drain is a stop for good, unless a successor follows.
    fn stop_reason(self) -> Option<Stopping> {
        self.stopping.or(self.draining.then_some(Stopping::ForGood))
    }

    fn state(self) -> WorkerState {
        match (self.decommission, self.drained, self.unhealthy) {
            (true, true, _) => WorkerState::Decommissioned,
            _ if self.stop_reason() == Some(Stopping::ForGood) => WorkerState::Decommissioning,
            (true, false, _) => WorkerState::Decommissioning,
            (false, _, true) => WorkerState::Unhealthy,
            (false, _, false) => WorkerState::Active,
        }
    }
}

/// Holder of the current [`WorkerState`], with notifications of changes.
#[derive(Debug, Default)]
pub struct WorkerStatus {
    inputs: watch::Sender<Inputs>,
    began: Notify,
    emptied: Notify,
}

impl WorkerStatus {
    /// Returns the current state.
    pub fn state(&self) -> WorkerState {
        self.inputs.borrow().state()
    }

    /// Waits until the state differs from `seen`, and returns it. Returns at once if it already
    /// differs.
    pub async fn changed_from(&self, seen: WorkerState) -> WorkerState {
        self.wait_for(|state| state != seen).await
    }

    /// Begins decommissioning, regardless of the health checker.
    pub fn decommission(&self) {
        if self.update(|inputs| inputs.decommission = true) {
            self.began.notify_one();
        }
    }

    /// Returns whether an operator or a coordinator requested decommissioning.
    pub fn is_decommission_wanted(&self) -> bool {
        self.inputs.borrow().decommission
    }

    /// Cancels decommissioning and a drain. A stop continues. Otherwise the health checker
    /// determines the state again.
    pub fn cancel_decommission(&self) {
        self.update(|inputs| {
            inputs.decommission = false;
            inputs.drained = false;
            inputs.draining = false;
        });
    }

    /// Stops accepting new shuffles and data. Returns whether this changed anything.
    pub(super) fn drain(&self) -> bool {
        self.update(|inputs| inputs.draining = true)
    }

    /// Returns whether new shuffles and data are refused because of a drain.
    pub(super) fn is_draining(&self) -> bool {
        self.inputs.borrow().draining
    }

    /// Called at intervals with the number of remaining apps. Returns whether this ends a
    /// decommissioning. An app that registers afterwards (a driver with an old assignment) is
    /// served, and decommissioning continues.
    pub fn observe_apps(&self, apps: usize) -> bool {
        let changed = self.update(|inputs| inputs.drained = inputs.decommission && apps == 0);
        changed && apps == 0
    }

    /// Waits until a decommissioning begins, or returns at once if one began before the call. For
    /// one waiter.
    pub(super) async fn decommission_began(&self) {
        self.began.notified().await;
    }

    /// Records that the last application has been removed.
    pub(super) fn note_emptied(&self) {
        self.emptied.notify_one();
    }

    /// Waits until the last application is removed, or returns at once if that was before the call.
    /// For one waiter.
    pub async fn emptied(&self) {
        self.emptied.notified().await;
    }

    /// Waits until the worker is decommissioned.
    pub async fn decommissioned(&self) {
        self.wait_for(|state| state == WorkerState::Decommissioned).await;
    }

    /// Records the result of the health checker.
    pub fn set_unhealthy(&self, unhealthy: bool) {
        self.update(|inputs| inputs.unhealthy = unhealthy);
    }

    /// Records whether the health checker found that writers should prefer other workers.
    pub fn set_without_room(&self, without_room: bool) {
        self.update(|inputs| inputs.without_room = without_room);
    }

    /// Returns whether the tiers accept less than they should.
    pub(super) fn is_without_room(&self) -> bool {
        self.inputs.borrow().without_room
    }

    /// Makes the worker refuse tickets with `NO_BUFFER`.
    pub fn stop(&self, why: Stopping) {
        self.update(|inputs| inputs.stopping = Some(why));
    }

    /// Undoes [`WorkerStatus::stop`] after a cancelled stop. A drain continues.
    pub(super) fn resume(&self) {
        self.update(|inputs| inputs.stopping = None);
    }

    /// Returns whether tickets are refused, because of [`WorkerStatus::stop`] or a drain.
    pub fn is_stopping(&self) -> bool {
        self.inputs.borrow().stop_reason().is_some()
    }

    /// Returns whether the worker stops without a successor, or is being drained.
    pub fn is_stopping_for_good(&self) -> bool {
        self.inputs.borrow().stop_reason() == Some(Stopping::ForGood)
    }

    /// Applies `change`. If it changes anything, wakes the waiters and returns true.
    fn update(&self, change: impl FnOnce(&mut Inputs)) -> bool {
        self.inputs.send_if_modified(|inputs| {
            let before = *inputs;
            change(inputs);
            *inputs != before
        })
    }

    async fn wait_for(&self, holds: impl Fn(WorkerState) -> bool) -> WorkerState {
        let mut inputs = self.inputs.subscribe();
        let reached = inputs.wait_for(|inputs| holds(inputs.state())).await;
        reached.expect("the sender is borrowed until the wait ends").state()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decommission_can_be_cancelled() {
        let status = WorkerStatus::default();
        status.decommission();
        status.decommission();
        assert_eq!(status.state(), WorkerState::Decommissioning);
        assert!(!status.observe_apps(1));
        assert_eq!(status.state(), WorkerState::Decommissioning);
        assert!(status.observe_apps(0) && !status.observe_apps(0));
        assert_eq!(status.state(), WorkerState::Decommissioned);
        assert!(!status.observe_apps(1), "an application that registered late must be served to its end");
        assert_eq!(status.state(), WorkerState::Decommissioning);
        assert!(status.observe_apps(0));
        status.decommission();
        assert_eq!(status.state(), WorkerState::Decommissioned);
        status.cancel_decommission();
        assert_eq!(status.state(), WorkerState::Active);
        assert!(!status.observe_apps(0));
    }

    #[tokio::test]
    async fn end_of_decommission_can_be_awaited() {
        let status = WorkerStatus::default();
        let mut waiting = std::pin::pin!(status.decommissioned());
        assert!(futures::poll!(&mut waiting).is_pending());
        status.decommission();
        status.observe_apps(1);
        assert!(futures::poll!(&mut waiting).is_pending());
        status.observe_apps(0);
        waiting.await;
        status.decommissioned().await;
    }

    #[tokio::test]
    async fn only_state_changes_wake_waiters() {
        let status = WorkerStatus::default();
        let mut waiting = std::pin::pin!(status.changed_from(WorkerState::Active));
        assert!(futures::poll!(&mut waiting).is_pending());
        status.stop(Stopping::ForSuccessor);
        status.observe_apps(0);
        assert!(futures::poll!(&mut waiting).is_pending());
        status.set_unhealthy(true);
        assert_eq!(waiting.await, WorkerState::Unhealthy);
        assert_eq!(status.changed_from(WorkerState::Active).await, WorkerState::Unhealthy);
    }

    #[test]
    fn only_leaving_worker_reports_decommissioning() {
        let status = WorkerStatus::default();
        status.stop(Stopping::ForSuccessor);
        assert_eq!((status.state(), status.is_stopping()), (WorkerState::Active, true));
        status.resume();
        assert!(!status.is_stopping());
        status.stop(Stopping::ForGood);
        assert_eq!(status.state(), WorkerState::Decommissioning);
    }

    #[test]
    fn drain_and_stop_do_not_end_each_other() {
        let status = WorkerStatus::default();
        status.decommission();
        assert!(status.drain() && !status.drain());
        status.stop(Stopping::ForSuccessor);
        assert!(!status.is_stopping_for_good());
        status.resume();
        assert!(status.is_stopping_for_good(), "a cancelled stop must not end the drain");
        status.stop(Stopping::ForGood);
        status.cancel_decommission();
        assert!(!status.is_draining() && status.is_stopping(), "a cancelled drain must not end the stop");
        status.resume();
        assert!(!status.is_stopping());
    }

    #[test]
    fn unhealthy_worker_is_decommissioned_until_cancelled() {
        let status = WorkerStatus::default();
        status.set_unhealthy(true);
        assert_eq!(status.state(), WorkerState::Unhealthy);
        status.decommission();
        assert_eq!(status.state(), WorkerState::Decommissioning);
        assert!(status.observe_apps(0));
        assert_eq!(status.state(), WorkerState::Decommissioned);
        status.cancel_decommission();
        assert_eq!(status.state(), WorkerState::Unhealthy);
        status.set_unhealthy(false);
        assert_eq!(status.state(), WorkerState::Active);
    }
}
