//! The worker's state as a node (docs/protocol.md §2.14, §8.5): one source of truth for heartbeat, health and metrics.

use tokio::sync::{Notify, watch};

/// State that coordinators see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkerState {
    /// Takes new shuffles.
    Active,
    /// Serves, gets no new shuffles: the health checker says so.
    Unhealthy,
    /// Serves, gets no new shuffles: an operator says so.
    Decommissioning,
    /// Decommissioning has ended: no app is left.
    Decommissioned,
}

impl WorkerState {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Unhealthy => "unhealthy",
            Self::Decommissioning => "decommissioning",
            Self::Decommissioned => "decommissioned",
        }
    }
}

/// What an operator asked for, and what the health checker found; kept apart so that one does not undo the other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Inputs {
    decommission: bool,
    drained: bool,
    unhealthy: bool,
    /// Fewer disks take data than should, or none, whatever the coordinators are told.
    without_room: bool,
    stopping: Option<Stopping>,
    /// What is here is brought elsewhere.
    draining: bool,
}

/// Why tickets are refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopping {
    /// The worker leaves: coordinators are to assign nothing here.
    ForGood,
    /// A successor follows within seconds: coordinators need not know.
    ForSuccessor,
}

impl Inputs {
    fn state(self) -> WorkerState {
        match (self.decommission, self.drained, self.unhealthy) {
            (true, true, _) => WorkerState::Decommissioned,
            _ if self.stopping == Some(Stopping::ForGood) => WorkerState::Decommissioning,
            (true, false, _) => WorkerState::Decommissioning,
            (false, _, true) => WorkerState::Unhealthy,
            (false, _, false) => WorkerState::Active,
        }
    }
}

/// See [`WorkerState`].
#[derive(Debug, Default)]
pub struct WorkerStatus {
    inputs: watch::Sender<Inputs>,
    began: Notify,
    emptied: Notify,
}

impl WorkerStatus {
    /// The state now.
    pub fn state(&self) -> WorkerState {
        self.inputs.borrow().state()
    }

    /// Resolves with the state once it is another than `seen`, also when that was before the call.
    pub async fn changed_from(&self, seen: WorkerState) -> WorkerState {
        self.wait_for(|state| state != seen).await
    }

    /// Begins decommissioning, whatever the health checker says.
    pub fn decommission(&self) {
        if self.update(|inputs| inputs.decommission = true) {
            self.began.notify_one();
        }
    }

    /// Whether an operator or a coordinator asked for decommissioning.
    pub fn is_decommission_wanted(&self) -> bool {
        self.inputs.borrow().decommission
    }

    /// Back to what the health checker says.
    pub fn cancel_decommission(&self) {
        self.update(|inputs| {
            inputs.decommission = false;
            inputs.drained = false;
            if std::mem::take(&mut inputs.draining) {
                inputs.stopping = None;
            }
        });
    }

    /// From here on nothing new is taken; true if that was not so before.
    pub(super) fn drain(&self) -> bool {
        self.update(|inputs| {
            inputs.draining = true;
            inputs.stopping.get_or_insert(Stopping::ForGood);
        })
    }

    /// Whether nothing new is taken because of a drain.
    pub(super) fn is_draining(&self) -> bool {
        self.inputs.borrow().draining
    }

    /// Told at intervals how many apps are left; true when that is what ends a decommissioning. An app that registers
    /// afterwards (a driver with an old assignment) is served, and decommissioning goes on.
    pub fn observe_apps(&self, apps: usize) -> bool {
        let changed = self.update(|inputs| inputs.drained = inputs.decommission && apps == 0);
        changed && apps == 0
    }

    /// Resolves when a decommissioning begins, also one that began before the call; for one waiter.
    pub(super) async fn decommission_began(&self) {
        self.began.notified().await;
    }

    /// The last application has gone.
    pub(super) fn note_emptied(&self) {
        self.emptied.notify_one();
    }

    /// Resolves when the last application goes, also when it went before the call; for one waiter.
    pub async fn emptied(&self) {
        self.emptied.notified().await;
    }

    /// Resolves once the worker is decommissioned.
    pub async fn decommissioned(&self) {
        self.wait_for(|state| state == WorkerState::Decommissioned).await;
    }

    /// Told by the health checker.
    pub fn set_unhealthy(&self, unhealthy: bool) {
        self.update(|inputs| inputs.unhealthy = unhealthy);
    }

    /// Told by the health checker: whether writers are better off at other workers.
    pub fn set_without_room(&self, without_room: bool) {
        self.update(|inputs| inputs.without_room = without_room);
    }

    /// Whether the tiers take less than they should.
    pub(super) fn is_without_room(&self) -> bool {
        self.inputs.borrow().without_room
    }

    /// From here on tickets are refused with NO_BUFFER.
    pub fn stop(&self, why: Stopping) {
        self.update(|inputs| inputs.stopping = Some(why));
    }

    /// Undoes [`WorkerStatus::stop`]: it did not come to that.
    pub(super) fn go_on(&self) {
        self.update(|inputs| inputs.stopping = None);
    }

    /// Whether [`WorkerStatus::stop`] was called.
    pub fn is_stopping(&self) -> bool {
        self.inputs.borrow().stopping.is_some()
    }

    /// Whether the worker stops without a successor.
    pub fn is_stopping_for_good(&self) -> bool {
        self.inputs.borrow().stopping == Some(Stopping::ForGood)
    }

    /// Wakes those who wait when `change` changes anything, and says whether it did.
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
        reached.expect("the sender is borrowed while this waits").state()
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
        assert!(!status.observe_apps(1), "a late app is served");
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
        status.go_on();
        assert!(!status.is_stopping());
        status.stop(Stopping::ForGood);
        assert_eq!(status.state(), WorkerState::Decommissioning);
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
